"""A layer imports only from itself and from the layers above it in this table."""

import pytest

from tests.tidy.sources import Import, imports, modules

# (layer, the modules and packages directly under quorate that are in it). "__init__" is quorate itself.
LAYERS: tuple[tuple[str, frozenset[str]], ...] = (
    (
        "shared words",
        frozenset({"errors", "events", "_marks", "_plain", "_version", "options", "urls", "settings", "parameters"}),
    ),
    ("kv", frozenset({"kv"})),
    ("wire", frozenset({"wire"})),
    ("backends", frozenset({"backends"})),
    ("rendezvous", frozenset({"rendezvous"})),
    ("server", frozenset({"server"})),
    ("store", frozenset({"store", "store_arguments", "blocking"})),
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
                "_bell",
                "_address",
                "_world",
                "_early",
                "_ending",
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
# Imports that the order would allow and that are forbidden all the same: (layer, layer it must not import).
ALSO_FORBIDDEN = {("testing", "cli")}
# Imports that the order forbids and that are allowed all the same: (importing module, imported module) -> reason.
SIM = "`quorate sim` is the simulator's own command"
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("quorate.cli.sim", "quorate.testing.sim.campaign"): SIM,
    ("quorate.cli.sim", "quorate.testing.sim.plan"): SIM,
    ("quorate.cli.sim", "quorate.testing.sim.run"): SIM,
}

RANK = {layer: rank for rank, (layer, _) in enumerate(LAYERS)}
LAYER_OF = {word: layer for layer, words in LAYERS for word in words}
PLACE_IT = "is in no layer: put it into LAYERS in tests/tidy/test_layers.py"


def layer_violations(module: str, source: str) -> list[str]:
    """What is wrong with the imports of one module, a sentence each."""
    word = module.split(".")[1]
    if word not in LAYER_OF:
        return [f"{module}: quorate.{word} {PLACE_IT}"]
    here = LAYER_OF[word]
    found = []
    for one in imports(module, source):
        if one.module.split(".")[0] != "quorate" or (module, one.module) in EXCEPTIONS:
            continue
        target = _word(one)
        if target not in LAYER_OF:
            found.append(f"{module}:{one.line}: imports {one}; quorate.{target} {PLACE_IT}")
        elif RANK[LAYER_OF[target]] > RANK[here] or (here, LAYER_OF[target]) in ALSO_FORBIDDEN:
            found.append(f"{module}:{one.line}: {here} must not import {one} ({LAYER_OF[target]})")
    return found


def _word(one: Import) -> str:
    """The module or package under quorate that an import reaches; "__init__" for a name of quorate itself."""
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
        ("quorate.errors", "import quorate.kv"),
        ("quorate.kv.engine", "from quorate.wire import frames"),
        ("quorate.kv.engine", "from quorate import backends"),
        ("quorate.kv.engine", "from ..backends import memory"),
        ("quorate.kv.__init__", "from .. import server"),
        ("quorate.backends.tcp", "def f():\n    from quorate.rendezvous.decide import decide"),
        ("quorate.server.app", "import quorate"),
        ("quorate.server.app", "from quorate import join"),
        ("quorate.server.app", "import importlib\nimportlib.import_module('quorate.cli')"),
        ("quorate.store", "from quorate.handler import create_handler"),
        ("quorate.cli.sim", "from quorate.testing import sim"),
        ("quorate.__init__", "from quorate.testing import sim"),
        ("quorate.__init__", "from .cli import main"),
        ("quorate.testing.sim", "from quorate.cli import main"),
    ],
)
def test_import_from_a_lower_layer_is_caught(module, source):
    assert len(layer_violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("quorate.events", "from quorate.errors import QuorateError"),
        ("quorate.kv.engine", "from .types import Item\nfrom quorate import errors\nimport quorate.settings"),
        ("quorate.rendezvous.node", "from ..backends import contract"),
        ("quorate.handler", "from quorate._background import loop\nimport msgspec"),
        ("quorate.__init__", "from .handler import join\nfrom quorate import compat"),
        ("quorate.__main__", "from quorate.cli import main"),
        ("quorate.testing.sim", "import quorate\nfrom quorate import join, server"),
    ],
)
def test_import_from_the_same_or_a_higher_layer_is_allowed(module, source):
    assert layer_violations(module, source) == []


def test_module_that_is_in_no_layer_is_caught():
    assert layer_violations("quorate.helpers", "") == [f"quorate.helpers: quorate.helpers {PLACE_IT}"]
    assert PLACE_IT in layer_violations("quorate.kv.engine", "import quorate.helpers")[0]
