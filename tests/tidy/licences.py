"""The licences of everything that Rallypoint installs, from the metadata of the packages."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

from tests.tidy.sources import ROOT

GENEROUS = ("Apache", "MIT", "BSD", "PSF", "Python-2.0", "ISC", "0BSD")
"""Licences that require only attribution."""
HEAD = """# Licences

Rallypoint is under Apache-2.0. This table lists the packages that `rallypoint[all]` installs, including transitive
dependencies, by the packages' own metadata:

| package | licence | needed by |
|---|---|---|
"""
TAIL = """
`torch` (BSD-3-Clause) is not installed: the user chooses its build. No code of the packages above is copied
into Rallypoint.
"""


def page() -> str:
    """The page, from the packages installed here."""
    rows = [f"| `{name}` | {licence_of(name)} | {', '.join(by)} |\n" for name, by in sorted(needed().items())]
    return HEAD + "".join(rows) + TAIL


def needed() -> dict[str, list[str]]:
    """Every package of an installation with all extras, and the packages that need it."""
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
    """Whether a requirement has no condition on an extra, system or Python version."""
    marker = requirement.partition(";")[2]
    return not re.search(r"extra|platform|sys_platform|python_version|implementation", marker)


def licence_of(name: str) -> str:
    about = metadata.metadata(name)
    said = about.get("License-Expression") or ""
    if not said:
        classes = [one.rpartition(" :: ")[2] for one in about.get_all("Classifier") or () if one.startswith("License")]
        said = " or ".join(classes) or (about.get("License") or "").partition("\n")[0]
    return said
