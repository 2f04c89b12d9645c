"""Pure modules use no clock, randomness, network, thread, operating system or log, not even through other modules."""

import ast
from fnmatch import fnmatch

import pytest

from tests.tidy.sources import imports, modules

# Patterns of dotted module names (a package's own file is "....__init__").
PURE = (
    "rallypoint.errors",
    "rallypoint.options",
    "rallypoint.sentences",
    "rallypoint.settings",
    "rallypoint.urls",
    "rallypoint.kv.*",
    "rallypoint.wire.*",
    "rallypoint.rendezvous.attempt",
    "rallypoint.rendezvous.closed_mark",
    "rallypoint.rendezvous.decide",
    "rallypoint.rendezvous.history",
    "rallypoint.rendezvous.holdback",
    "rallypoint.rendezvous.keys",
    "rallypoint.rendezvous.membership",
    "rallypoint.rendezvous.ranks",
    "rallypoint.rendezvous.records",
    "rallypoint.rendezvous.returning_nodes",
    "rallypoint.rendezvous.rules",
    "rallypoint.rendezvous.round_end",
    "rallypoint.rendezvous.view",
    "rallypoint.launcher.failure",
    "rallypoint.launcher.crash_backoff",
    "rallypoint.launcher.policy",
    "rallypoint.launcher.stall",
    "rallypoint.integrations.schedulers.*",
    "rallypoint.observe.phase",
    "rallypoint.observe.report",
    "rallypoint.observe.report_builder",
    "rallypoint.dashboard.timeline",
    "rallypoint.dashboard.versioned",
)
FORBIDDEN_IMPORTS = frozenset(
    {
        "time",
        "datetime",
        "random",
        "secrets",
        "uuid",
        "socket",
        "ssl",
        "threading",
        "asyncio",
        "os",
        "logging",
        "subprocess",
        "select",
        "selectors",
        "multiprocessing",
        "concurrent",
        "signal",
    }
)
ALLOWED_NAMES = {("datetime", "timedelta")}  # a duration, not a clock
FORBIDDEN_CALLS = frozenset({"open", "print", "input"})


def is_pure(module: str) -> bool:
    """Whether a module must be pure."""
    return any(fnmatch(module, pattern) for pattern in PURE)


def impurities(module: str, source: str) -> list[str]:
    """The forbidden imports and calls of a module itself, one message each."""
    found = [
        f"{module}:{one.line}: imports {one}"
        for one in imports(module, source)
        if one.module.split(".")[0] in FORBIDDEN_IMPORTS and (one.module, one.name) not in ALLOWED_NAMES
    ]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                found.append(f"{module}:{node.lineno}: calls {name}()")
    return found


def reached_impurities(start: str, sources: dict[str, str]) -> list[str]:
    """The impurities of a module and of its transitive imports from this project, each with the import chain."""
    found: list[str] = []
    chains = {start: start}
    to_visit = [start]
    while to_visit:
        module = to_visit.pop()
        found += [f"{chains[module]}: {line}" for line in impurities(module, sources[module])]
        for one in imports(module, sources[module]):
            candidates = (str(one), f"{one}.__init__", one.module, f"{one.module}.__init__")
            target = next((name for name in candidates if name in sources), None)
            if target is not None and target not in chains:
                chains[target] = f"{chains[module]} -> {target}"
                to_visit.append(target)
    return found


def test_pure_modules_import_nothing_impure():
    sources = modules()
    found = [line for module in sources if is_pure(module) for line in reached_impurities(module, sources)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", sorted(FORBIDDEN_IMPORTS))
def test_import_of_an_impure_module_is_caught(name):
    assert len(impurities("rallypoint.kv.engine", f"def f():\n    import {name}")) == 1
    assert len(impurities("rallypoint.kv.engine", f"from {name} import something")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from datetime import datetime",
        "import datetime",
        "import os.path",
        "print(1)",
        "def f():\n    return open('x')",
    ],
)
def test_other_impure_source_is_caught(source):
    assert len(impurities("rallypoint.kv.engine", source)) == 1


def test_impurity_of_an_imported_module_is_caught_with_the_import_chain():
    sources = {
        "rallypoint.kv.engine": "from rallypoint import events",
        "rallypoint.events": "from .clocks import now",
        "rallypoint.clocks.__init__": "import time",
    }
    assert reached_impurities("rallypoint.kv.engine", sources) == [
        "rallypoint.kv.engine -> rallypoint.events -> rallypoint.clocks.__init__: rallypoint.clocks.__init__:1: "
        "imports time"
    ]


def test_harmless_source_is_pure():
    source = "from datetime import timedelta\nimport msgspec\nfrom .types import Item\nstream.open()\n"
    assert impurities("rallypoint.kv.engine", source) == []


def test_patterns_match_whole_packages_and_single_modules():
    assert is_pure("rallypoint.kv.__init__")
    assert is_pure("rallypoint.kv.deep.engine")
    assert is_pure("rallypoint.rendezvous.decide")
    assert not is_pure("rallypoint.rendezvous.coordinator")
