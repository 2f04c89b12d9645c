"""Reads the project as text and syntax trees, without importing it.

A module is identified by its dotted name; a package's own file is `rallypoint.kv.__init__`. A check needs only a name
and a source, so it can be tested with an invented module.
"""

import ast
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"


@dataclass(frozen=True, slots=True)
class Import:
    """`import module` (name is None) or `from module import name`, with absolute names."""

    line: int
    module: str
    name: str | None = None

    def __str__(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"


def modules() -> dict[str, str]:
    """The source of every module in src, by dotted name."""
    return {
        ".".join(path.relative_to(SRC).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(SRC.rglob("*.py"))
    }


def project_files() -> list[Path]:
    """All files of the repository: tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [path for name in sorted(set(listed.stdout.split("\0")) - {""}) if (path := ROOT / name).is_file()]


def imports(module: str, source: str) -> list[Import]:
    """All imports of a module: at the top, inside functions, for type checking, and with `import_module("...")`."""
    found: list[Import] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [Import(node.lineno, alias.name) for alias in names]
            case ast.ImportFrom(module=target, names=names, level=level):
                base = ".".join(filter(None, (_ancestor(module, level), target)))
                found += [Import(node.lineno, base, alias.name) for alias in names]
            case ast.Call(func=func, args=[ast.Constant(value=str(target)), *_]):
                if _last_word(func) in {"import_module", "__import__"} and not target.startswith("."):
                    found.append(Import(node.lineno, target))
    return sorted(found, key=lambda one: one.line)


def _ancestor(module: str, level: int) -> str:
    """The package that `level` leading dots mean in a module; empty without dots."""
    return module.rsplit(".", level)[0] if level else ""


def _last_word(func: ast.expr) -> str:
    match func:
        case ast.Name(id=word) | ast.Attribute(attr=word):
            return word
    return ""
