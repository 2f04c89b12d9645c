"""The name of a test is a sentence that says what it shows."""

import ast

import pytest

from tests.tidy.sources import ROOT

FEWEST_WORDS = 3


def short_names(name: str, source: str) -> list[str]:
    """The tests of a file whose names are too short to be a sentence."""
    return [
        f"{name}:{node.lineno}: {node.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len([word for word in node.name.split("_")[1:] if word]) < FEWEST_WORDS
    ]


def test_names_of_tests_are_sentences():
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        found += short_names(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["test_join", "test_join_2"])
def test_name_that_is_not_a_sentence_is_caught(name):
    assert short_names("test_x.py", f"class TestX:\n    async def {name}(self): ...") != []


def test_name_that_is_a_sentence_is_not_caught():
    assert short_names("test_x.py", "def test_late_node_waits(): ...\ndef helper(): ...") == []
