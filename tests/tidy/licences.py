"""The licences of everything that Rallypoint installs, from the packages' own words."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

from tests.tidy.sources import ROOT

GENEROUS = ("Apache", "MIT", "BSD", "PSF", "Python-2.0", "ISC", "0BSD")
"""Licences that ask for nothing but their mention."""
HEAD = """# Licences

Rallypoint is under Apache-2.0. What it installs, with `rallypoint[all]` and all that that needs, by the packages' own
metadata:

| package | licence | needed by |
|---|---|---|
"""
TAIL = """
`torch` (BSD-3-Clause) is not among them: which build of it is used is the user's choice. Nothing of the above is copied
into Rallypoint.
"""


def page() -> str:
    """The page, from what is installed here."""
    rows = [f"| `{name}` | {licence_of(name)} | {', '.join(by)} |\n" for name, by in sorted(needed().items())]
    return HEAD + "".join(rows) + TAIL


def needed() -> dict[str, list[str]]:
    """Every package that an installation with all extras brings, and which of ours or theirs asks for it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["etcd"], *extras["uvloop"], *extras["dashboard"]]
    found: dict[str, set[str]] = {}
    todo = [(_name(one), "rallypoint") for one in wanted]
    while todo:
        name, by = todo.pop()
        is_new = name not in found
        found.setdefault(name, set()).add(by)
        if is_new:
            todo += [(_name(one), name) for one in metadata.requires(name) or () if _is_always(one)]
    return {name: sorted(by) for name, by in found.items()}


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _is_always(requirement: str) -> bool:
    """Not for an extra, another system or another Python."""
    marker = requirement.partition(";")[2]
    return not re.search(r"extra|platform|sys_platform|python_version|implementation", marker)


def licence_of(name: str) -> str:
    about = metadata.metadata(name)
    said = about.get("License-Expression") or ""
    if not said:
        classes = [one.rpartition(" :: ")[2] for one in about.get_all("Classifier") or () if one.startswith("License")]
        said = " or ".join(classes) or (about.get("License") or "").partition("\n")[0]
    return said
