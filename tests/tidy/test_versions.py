"""The version is defined once, and everything else agrees with it."""

import importlib.metadata
import re
import tomllib

import pytest

import rallypoint
from rallypoint._version import __version__
from tests.tidy.sources import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def changelog_disagreement(version: str, changelog: str) -> str | None:
    """Why a changelog does not agree with a version, or None.

    Its first section is Unreleased. The next is the newest release: exactly the version, or, while the version is a
    development one, an earlier one or nothing.
    """
    titles = re.findall(r"^## \[?([^\]\s]+)\]?", changelog, flags=re.MULTILINE)
    if not titles or titles[0] != "Unreleased":
        return "the first section of CHANGELOG.md is not Unreleased"
    newest = titles[1] if len(titles) > 1 else None
    if ".dev" in version:
        released = version.split(".dev")[0]
        return f"CHANGELOG.md has a section for {released}, which is not released" if newest == released else None
    return None if newest == version else f"the newest release in CHANGELOG.md is {newest}, the version is {version}"


def test_public_version_is_the_defined_one():
    assert rallypoint.__version__ == __version__


def test_installed_version_is_the_defined_one():
    assert importlib.metadata.version("rallypoint") == __version__


def test_version_is_not_repeated_in_pyproject():
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/rallypoint/_version.py"


def test_changelog_agrees_with_the_version():
    assert changelog_disagreement(__version__, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")) is None


def test_readme_is_the_page_of_the_package():
    declared = PROJECT["project"].get("readme")
    assert declared == ("README.md" if (ROOT / "README.md").exists() else None)


@pytest.mark.parametrize(
    ("version", "changelog"),
    [
        ("0.1.0", "# Changelog\n"),
        ("0.1.0", "## [Unreleased]\n"),
        ("0.1.0", "## [0.1.0] - 2030-01-01\n"),
        ("0.2.0", "## [Unreleased]\n## [0.1.0] - 2030-01-01\n"),
        ("0.2.0.dev0", "## [Unreleased]\n## [0.2.0] - 2030-01-01\n"),
    ],
)
def test_changelog_that_does_not_fit_the_version_is_caught(version, changelog):
    assert changelog_disagreement(version, changelog) is not None


@pytest.mark.parametrize(
    ("version", "changelog"),
    [
        ("0.1.0.dev0", "## [Unreleased]\n"),
        ("0.1.0", "## [Unreleased]\n## [0.1.0] - 2030-01-01\n"),
        ("0.2.0.dev0", "## [Unreleased]\n## [0.1.0] - 2030-01-01\n"),
    ],
)
def test_changelog_that_fits_the_version_is_not_caught(version, changelog):
    assert changelog_disagreement(version, changelog) is None
