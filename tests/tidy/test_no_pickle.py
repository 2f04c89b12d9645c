"""No module can run code from the bytes that it reads, and none uses a wall clock for decisions."""

import ast

import pytest

from tests.tidy.sources import imports, modules

CODE_LOADERS = frozenset({"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})
WALL_CLOCKS = frozenset(
    {
        "time.time",
        "time.time_ns",
        "datetime.datetime.now",
        "datetime.datetime.utcnow",
        "datetime.datetime.today",
        "datetime.date.today",
    }
)
# Where a wall clock may be read, "module:qualified name of the function" -> reason. Showing the time to people is a
# reason; a decision is not. "module:" is the top of the module.
WALL_CLOCK_ALLOWED: dict[str, str] = {
    "rallypoint.dashboard.feeds:wall": "when something was shown, for people",
    "rallypoint.cli.render:wall_clock": "what people are shown, and read in records",
    "rallypoint.observe.doctor.diagnose:_check_run": "how long ago a node was refused, for people",
    "rallypoint.observe.sinks:JsonLines.__init__": "when an event happened, in a file that people read",
    "rallypoint.aio:AsyncHandler._open": "times in records that people read; nothing compares them",
    "rallypoint.launcher.preflight:write_note": "a time in a note that people read",
    "rallypoint.launcher.worker_signs:WorkerSigns._take": "torch's timers expire at a wall-clock time of this machine",
    "rallypoint.launcher.supervisor:Supervisor.__init__": "when a run was closed, for people",
    "rallypoint.server.server:Server.__init__": "times in records that people read, and the first revision",
    "rallypoint.server.server:first_revision": "a first revision that no earlier life of the server has reached; if a "
    "clock goes back, the generation still tells the lives apart",
}


def code_loader_imports(module: str, source: str) -> list[str]:
    """The imports of a module that can execute code from bytes."""
    return [
        f"{module}:{one.line}: imports {one}"
        for one in imports(module, source)
        if one.module.split(".")[0] in CODE_LOADERS
    ]


def wall_clock_places(module: str, source: str) -> dict[str, str]:
    """The uses of a wall clock in a module: "module:qualified name" -> line and clock."""
    tree = ast.parse(source)
    full_names = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                full_names |= {alias.asname or alias.name: alias.name for alias in names}
            case ast.ImportFrom(module=str(base), names=names, level=0):
                full_names |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in names}
    found: dict[str, str] = {}

    def visit(node: ast.AST, scope: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = (*scope, node.name)
        elif isinstance(node, ast.Attribute | ast.Name):
            head, _, rest = ast.unparse(node).partition(".")
            full = f"{full_names.get(head, head)}.{rest}" if rest else full_names.get(head, head)
            if full in WALL_CLOCKS:
                found[f"{module}:{'.'.join(scope)}"] = f"line {node.lineno}: {full}"
        for child in ast.iter_child_nodes(node):
            visit(child, scope)

    visit(tree, ())
    return found


def test_no_module_imports_pickle_or_similar_modules():
    found = [line for module, source in modules().items() for line in code_loader_imports(module, source)]
    assert not found, "\n".join(found)


def test_wall_clocks_are_read_only_in_listed_functions():
    found = {}
    for module, source in modules().items():
        found |= wall_clock_places(module, source)
    assert found.keys() == WALL_CLOCK_ALLOWED.keys(), found


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from marshal import loads", "def f():\n    import dill as d", "__import__('shelve')"],
)
def test_import_of_a_code_loader_is_caught(source):
    assert len(code_loader_imports("rallypoint.wire.frames", source)) == 1


def test_other_serialisers_are_no_code_loaders():
    assert code_loader_imports("rallypoint.wire.frames", "import json, msgspec\nfrom .pickle import x") == []


@pytest.mark.parametrize(
    "use",
    [
        "import time\ndef f():\n    return time.time()",
        "import time as t\ndef f(clock=t.time_ns): ...",
        "from time import time as now\ndef f():\n    return now()",
        "from datetime import datetime, UTC\ndef f():\n    return datetime.now(UTC)",
        "import datetime as dt\ndef f():\n    return dt.date.today()",
    ],
)
def test_wall_clock_is_caught_with_the_function_that_reads_it(use):
    assert wall_clock_places("rallypoint.x", use).keys() == {"rallypoint.x:f"}


def test_wall_clock_in_a_method_or_at_the_top_is_caught():
    source = "import time\nSTART = time.time()\nclass A:\n    def f(self):\n        return time.time()\n"
    assert wall_clock_places("rallypoint.x", source).keys() == {"rallypoint.x:", "rallypoint.x:A.f"}


def test_monotonic_clocks_are_no_wall_clocks():
    assert wall_clock_places("rallypoint.x", "import time\ntime.monotonic()\nself.time.time()\n") == {}
