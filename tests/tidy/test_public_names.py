"""The public names are exactly those of public_names.txt."""

from pathlib import Path

import rallypoint

LIST = Path(__file__).with_name("public_names.txt")


def listed_names(text: str) -> list[str]:
    """The names in the file, without comments and empty lines."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def test_public_names_are_those_of_the_list():
    assert sorted(rallypoint.__all__) == listed_names(LIST.read_text(encoding="utf-8")), f"update {LIST.name}?"


def test_listed_names_are_sorted_and_without_repetition():
    names = listed_names(LIST.read_text(encoding="utf-8"))
    assert names == sorted(set(names))


def test_every_public_name_can_be_used():
    missing = [name for name in rallypoint.__all__ if not hasattr(rallypoint, name)]
    assert not missing


def test_comments_and_empty_lines_of_the_list_are_ignored():
    assert listed_names("# a comment\n\njoin\nserve\n") == ["join", "serve"]
