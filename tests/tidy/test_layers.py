"""A layer imports only from itself and from the layers above it in this table."""

import pytest

from tests.tidy.sources import Import, imports, modules

# (layer, its modules and packages directly under rallypoint). "__init__" is rallypoint itself.
LAYERS: tuple[tuple[str, frozenset[str]], ...] = (
    (
        "shared definitions",
        frozenset(
            {
                "errors",
                "sentences",
                "events",
                "_alive",
                "_marks",
                "_plain",
                "_version",
                "options",
                "urls",
                "settings",
                "parameters",
            }
        ),
    ),
    ("kv", frozenset({"kv"})),
    ("wire", frozenset({"wire"})),
    ("backends", frozenset({"backends"})),
    ("rendezvous", frozenset({"rendezvous"})),
    ("server", frozenset({"server"})),
    ("store", frozenset({"store"})),
    (
        "api",
        frozenset(
            {
                "api",
                "aio",
                "static",
                "handler",
                "registry",
                "_background",
                "_address",
                "_world",
                "_ending",
                "_requested_rank",
            }
        ),
    ),
    ("launcher", frozenset({"launcher"})),
    ("compat and integrations", frozenset({"compat", "integrations"})),
    ("observe", frozenset({"observe"})),
    ("dashboard", frozenset({"dashboard"})),
    ("public names", frozenset({"__init__"})),
    ("bench", frozenset({"bench"})),
    ("cli", frozenset({"cli", "__main__"})),
    ("testing", frozenset({"testing"})),
)
# Forbidden although the order of the layers allows it: (layer, layer that it must not import).
ALSO_FORBIDDEN = {("testing", "cli")}
# Allowed although the order of the layers forbids it: (importing module, imported module) -> reason.
SIM = "`rallypoint sim` is the command of the simulator"
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("rallypoint.cli.sim", "rallypoint.testing.sim.campaign"): SIM,
    ("rallypoint.cli.sim", "rallypoint.testing.sim.plan"): SIM,
    ("rallypoint.cli.sim", "rallypoint.testing.sim.run"): SIM,
}

RANK = {layer: rank for rank, (layer, _) in enumerate(LAYERS)}
LAYER_OF = {word: layer for layer, words in LAYERS for word in words}
PLACE_IT = "is in no layer: add it to LAYERS in tests/tidy/test_layers.py"


def layer_violations(module: str, source: str) -> list[str]:
    """The forbidden imports of one module, one message each."""
    word = module.split(".")[1]
    if word not in LAYER_OF:
        return [f"{module}: rallypoint.{word} {PLACE_IT}"]
    here = LAYER_OF[word]
    found = []
    for one in imports(module, source):
        if one.module.split(".")[0] != "rallypoint" or (module, one.module) in EXCEPTIONS:
            continue
        target = _word(one)
        if target not in LAYER_OF:
            found.append(f"{module}:{one.line}: imports {one}; rallypoint.{target} {PLACE_IT}")
        elif RANK[LAYER_OF[target]] > RANK[here] or (here, LAYER_OF[target]) in ALSO_FORBIDDEN:
            found.append(f"{module}:{one.line}: {here} must not import {one} ({LAYER_OF[target]})")
    return found


def _word(one: Import) -> str:
    """The module or package under rallypoint that is imported; "__init__" for a name of rallypoint itself."""
    parts = one.module.split(".")
    if len(parts) > 1:
        return parts[1]
    return one.name if one.name in LAYER_OF else "__init__"


def test_layers_import_only_from_the_layers_above_them():
    found = [line for module, source in modules().items() for line in layer_violations(module, source)]
    assert not found, "\n".join(found)


def test_exceptions_to_the_layers_are_still_needed():
    found = {(module, one.module) for module, source in modules().items() for one in imports(module, source)}
    assert EXCEPTIONS.keys() <= found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rallypoint.errors", "import rallypoint.kv"),
        ("rallypoint.kv.engine", "from rallypoint.wire import frames"),
        ("rallypoint.kv.engine", "from rallypoint import backends"),
        ("rallypoint.kv.engine", "from ..backends import memory"),
        ("rallypoint.kv.__init__", "from .. import server"),
        ("rallypoint.backends.tcp", "def f():\n    from rallypoint.rendezvous.decide import decide"),
        ("rallypoint.server.app", "import rallypoint"),
        ("rallypoint.server.app", "from rallypoint import join"),
        ("rallypoint.server.app", "import importlib\nimportlib.import_module('rallypoint.cli')"),
        ("rallypoint.store", "from rallypoint.handler import create_handler"),
        ("rallypoint.cli.sim", "from rallypoint.testing import sim"),
        ("rallypoint.__init__", "from rallypoint.testing import sim"),
        ("rallypoint.__init__", "from .cli import main"),
        ("rallypoint.testing.sim", "from rallypoint.cli import main"),
    ],
)
def test_import_from_a_lower_layer_is_caught(module, source):
    assert len(layer_violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rallypoint.events", "from rallypoint.errors import RallypointError"),
        ("rallypoint.kv.engine", "from .types import Item\nfrom rallypoint import errors\nimport rallypoint.settings"),
        ("rallypoint.rendezvous.node", "from ..backends import contract"),
        ("rallypoint.handler", "from rallypoint._background import loop\nimport msgspec"),
        ("rallypoint.__init__", "from .handler import join\nfrom rallypoint import compat"),
        ("rallypoint.__main__", "from rallypoint.cli import main"),
        ("rallypoint.testing.sim", "import rallypoint\nfrom rallypoint import join, server"),
    ],
)
def test_import_from_the_same_or_a_higher_layer_is_allowed(module, source):
    assert layer_violations(module, source) == []


def test_module_that_is_in_no_layer_is_caught():
    assert layer_violations("rallypoint.helpers", "") == [f"rallypoint.helpers: rallypoint.helpers {PLACE_IT}"]
    assert PLACE_IT in layer_violations("rallypoint.kv.engine", "import rallypoint.helpers")[0]
