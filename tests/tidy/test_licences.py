"""All dependencies have permissive licences, and docs/licences.md lists them."""

import pytest

from tests.tidy.licences import GENEROUS, licence_of, needed, page
from tests.tidy.sources import ROOT

PAGE = ROOT / "docs" / "licences.md"


def test_page_of_licences_is_current(request: pytest.FixtureRequest):
    if request.config.getoption("--rewrite"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "run `pytest tests/tidy --rewrite`"


@pytest.mark.parametrize("name", sorted(needed()))
def test_licence_of_a_dependency_requires_only_attribution(name):
    assert any(word in licence_of(name) for word in GENEROUS), licence_of(name)
