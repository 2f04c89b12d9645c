from tests.tidy.sources import imports, modules, project_files


def names_of(module: str, source: str) -> list[str]:
    return [str(one) for one in imports(module, source)]


def test_relative_imports_are_made_absolute():
    assert names_of("rallypoint.kv.engine", "from .types import Item") == ["rallypoint.kv.types.Item"]
    assert names_of("rallypoint.kv.engine", "from .. import errors") == ["rallypoint.errors"]
    assert names_of("rallypoint.kv.__init__", "from .types import Item") == ["rallypoint.kv.types.Item"]
    assert names_of("rallypoint.__init__", "from .handler import join") == ["rallypoint.handler.join"]


def test_imports_inside_functions_and_by_name_are_seen():
    source = 'def f():\n    import a.b\n    importlib.import_module("c.d")\nif TYPE_CHECKING:\n    from e import f\n'
    assert names_of("rallypoint.x", source) == ["a.b", "c.d", "e.f"]


def test_the_source_tree_and_the_repository_are_found():
    assert "rallypoint.cli.__init__" in modules()
    assert "pyproject.toml" in {path.name for path in project_files()}
