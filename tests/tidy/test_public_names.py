"""The public names are a list that somebody decided on, kept in public_names.txt."""

from pathlib import Path

import rallypoint

LIST = Path(__file__).with_name("public_names.txt")


def decided_names(text: str) -> list[str]:
    """The names of a list, without comments and empty lines."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def test_public_names_are_those_that_were_decided():
    assert sorted(rallypoint.__all__) == decided_names(LIST.read_text(encoding="utf-8")), f"update {LIST.name}?"


def test_decided_names_are_sorted_and_without_repetition():
    names = decided_names(LIST.read_text(encoding="utf-8"))
    assert names == sorted(set(names))


def test_every_public_name_can_be_used():
    missing = [name for name in rallypoint.__all__ if not hasattr(rallypoint, name)]
    assert not missing


def test_comments_and_empty_lines_of_the_list_are_no_names():
    assert decided_names("# a comment\n\njoin\nserve\n") == ["join", "serve"]
