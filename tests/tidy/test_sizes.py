"""A module fits into a head."""

from tests.tidy.sources import modules

MOST_LINES = 500
# Module -> why it is better long than divided.
LONG_FOR_A_REASON: dict[str, str] = {"rallypoint.events": "all words that are ever said, one small class each"}


def too_long(module: str, source: str) -> bool:
    """Whether a module has more lines than a module should."""
    return len(source.splitlines()) > MOST_LINES


def test_modules_are_not_longer_than_they_should_be():
    long = {module for module, source in modules().items() if too_long(module, source)}
    assert long == LONG_FOR_A_REASON.keys()


def test_module_that_is_too_long_is_caught():
    assert not too_long("rallypoint.x", "pass\n" * MOST_LINES)
    assert too_long("rallypoint.x", "pass\n" * (MOST_LINES + 1))
