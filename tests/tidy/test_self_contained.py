"""The repository mentions no paths of other machines and no documents that are not in it."""

import re

import pytest

from tests.tidy.sources import ROOT, project_files

# Split, because this file is checked, too.
FORBIDDEN = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\.\./" + "shared",
        r"(?<![\w.-])/" + "work" + r"\b/?(?![\w-]*\.)",
        r"\bissue" + r" ?#",
        r"\bwork" + r"places?\b",
        r"\b(DESI" + r"GN|STY" + r"LE|TEST" + r"ING|COM" + r"PAT|ANCH" + r"ORS)(\.md\b| sections?\b)",
        r"\b(?-i:SCENA" + r"RIOS)(\.md\b| sections?\b)",  # docs has a page of that name in small letters
        r"\bmodel/mo" + r"del\.py\b",
        r"\b(cla" + r"ude|anth" + r"ropic|sub-?" + r"agents?|language mo" + r"dels?)\b",
    )
)


def foreign_words(name: str, text: str) -> list[str]:
    """The forbidden words of a text, one message each."""
    return [
        f"{name}:{number}: {match.group()!r}"
        for number, line in enumerate(text.splitlines(), start=1)
        for pattern in FORBIDDEN
        for match in pattern.finditer(line)
    ]


def test_no_file_mentions_what_is_not_in_the_repository():
    found = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        found += foreign_words(str(path.relative_to(ROOT)), text)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "see .." + "/shared/notes",
        "cd /" + "work/main",
        "fixes issue" + " #12",
        "from another work" + "place",
        "as in DESIGN" + ".md",
        "as in DESIGN" + " section 5",
        "row 3 of SCENA" + "RIOS.md",
    ],
)
def test_foreign_word_is_caught(text):
    assert foreign_words("a.txt", f"first line\n{text}\n") != []


@pytest.mark.parametrize(
    "text", ["a shared store", "docs/scenarios.md", "the workers' work/life", "src/work/x", "design", "this issue"]
)
def test_ordinary_word_is_not_caught(text):
    assert foreign_words("a.txt", text) == []
