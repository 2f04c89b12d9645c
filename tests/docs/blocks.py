"""The code and the commands in README and docs, and what a page says of how they are to be run.

A fenced block is Python, shell (`sh`, or `console` with prompts and output), configuration, or text. A comment before
it may say how it is run: `<!-- run: in the background -->`, `<!-- run: with a job -->`, `<!-- run: fails -->`,
`<!-- run: not, because of this reason -->`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNNABLE = frozenset({"python", "sh", "console"})
KNOWN = RUNNABLE | {"text", "yaml", "toml", "json", "ini", "svg"}
_FENCE = re.compile(
    r"^(?:<!-- run: (?P<how>[^>]*?) -->\n+)?(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    kind: str
    text: str
    how: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.kind in RUNNABLE and not self.how.startswith("not")

    @property
    def script(self) -> str:
        """The commands, without prompts and output."""
        if self.kind != "console":
            return self.text
        lines, goes_on = [], False
        for line in self.text.splitlines():
            if line.startswith("$ ") or goes_on:
                lines.append(line.removeprefix("$ "))
                goes_on = line.endswith("\\")
        return "\n".join(lines)


def pages() -> list[Path]:
    """Everything a user reads."""
    several = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *several, *sorted((ROOT / "examples").rglob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT))
    return [
        Block(
            name,
            text.count("\n", 0, found.start("text")),
            found["kind"],
            _dedented(found["text"], found["indent"]),
            found["how"] or "",
        )
        for found in _FENCE.finditer(text)
    ]


def _dedented(text: str, indent: str) -> str:
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))


def all_blocks() -> list[Block]:
    """But for the tutorial, which takes two machines and has a test of its own."""
    return [block for page in pages() if page.name != "tutorial.md" for block in blocks_of(page)]


def commands_of(text: str) -> Iterator[list[str]]:
    """The arguments of every `rallypoint` in a script: after the pipes, the variables and the prompts of a shell."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue  # half a quotation: not a command
        part: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set("|&;()<>"):
                if part and part[0] == "rallypoint":
                    yield part[1:]
                part = []
            elif part or word == "rallypoint":
                part.append(word)
