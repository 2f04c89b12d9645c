"""A forked child must not inherit a lock that nobody releases."""

import ast

from tests.tidy.sources import imports, modules


def taken_locks(module: str, source: str) -> list[str]:
    """Uses of `cached_property`, whose lock is shared by all instances of a class: a fork may inherit it taken."""
    named = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    used = named | {str(one).rpartition(".")[2] for one in imports(module, source)}
    return sorted(used & {"cached_property"})


def test_no_module_uses_a_lock_that_a_fork_would_inherit():
    assert {module: found for module, source in modules().items() if (found := taken_locks(module, source))} == {}


def test_use_of_cached_property_is_caught():
    assert taken_locks("rallypoint.x", "from functools import cached_property") == ["cached_property"]
    assert taken_locks(
        "rallypoint.x", "import functools\nclass A:\n    @functools.cached_property\n    def a(self): ..."
    )
    assert not taken_locks("rallypoint.x", "from functools import partial")
