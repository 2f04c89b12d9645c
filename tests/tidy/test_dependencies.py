"""Every dependency has a line with its reason in docs/dependencies.md."""

import re
import tomllib

from tests.tidy.sources import ROOT


def declared(pyproject: str) -> set[str]:
    """The names of all dependencies of a pyproject.toml, in every extra, without the project itself."""
    data = tomllib.loads(pyproject)
    project = data["project"]
    wanted = [*project.get("dependencies", []), *data["build-system"]["requires"]]
    for extra in project.get("optional-dependencies", {}).values():
        wanted += extra
    return {re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0] for line in wanted} - {project["name"]}


def explained(page: str) -> set[str]:
    """The names that begin a row of a table."""
    return set(re.findall(r"^\| `([\w.-]+)`", page, flags=re.MULTILINE))


def test_every_dependency_is_explained_and_nothing_else_is():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    assert explained(page) == declared(pyproject)


def test_dependency_without_a_line_is_caught():
    pyproject = """
        build-system.requires = ["hatchling>=1"]
        [project]
        name = "rallypoint"
        dependencies = ["click>=8"]
        optional-dependencies = { web = ["uvicorn[standard] >= 1"], all = ["rallypoint[web]"] }
    """
    assert declared(pyproject) == {"hatchling", "click", "uvicorn"}
    assert explained("| dependency | for |\n|---|---|\n| `click` | commands |\n") == {"click"}
