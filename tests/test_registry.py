"""Handlers and backends by name: registration, entry points of plug-ins, and errors."""

import textwrap

import pytest

import rallypoint
from rallypoint import RendezvousHandlerRegistry, RendezvousParameters, SettingsError
from rallypoint.backends import schemes
from rallypoint.backends.memory import MemoryBackend, MemoryServer
from tests.patience import script, unique


class Fake(rallypoint.RendezvousHandler):
    """A handler with nothing but a name."""

    def __init__(self, backend="fake"):
        self.backend = backend

    def get_backend(self):
        return self.backend

    def next_rendezvous(self):
        raise NotImplementedError

    def is_closed(self):
        return False

    def set_closed(self):
        pass

    def num_nodes_waiting(self):
        return 0

    def get_run_id(self):
        return "run"

    def shutdown(self):
        return True

    def create(self, params):
        return self


def params(backend="fake", **options) -> RendezvousParameters:
    return RendezvousParameters(backend, "there:1", "run", 1, 2, **options)


def creator(given):
    return Fake(given.backend)


# --- handlers ---------------------------------------------------------------------------------------------------------


def test_registered_creator_makes_the_handler():
    registry = RendezvousHandlerRegistry()
    registry.register("fake", creator)
    assert isinstance(registry.create_handler(params()), Fake)


def test_same_creator_may_be_registered_twice():
    registry = RendezvousHandlerRegistry()
    registry.register("fake", creator)
    registry.register("fake", creator)
    maker = Fake()
    registry.register("method", maker.create)
    registry.register("method", maker.create)  # a new bound method each time, but the same creator
    assert registry.create_handler(params()).get_backend() == "fake"


def test_another_creator_for_a_taken_name_is_refused():
    registry = RendezvousHandlerRegistry()
    registry.register("fake", creator)
    with pytest.raises(ValueError, match="'fake' is already registered"):
        registry.register("fake", lambda given: Fake("other"))
    assert registry.create_handler(params()).get_backend() == "fake"


def test_empty_name_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        RendezvousHandlerRegistry().register("", creator)
    with pytest.raises(ValueError, match="backend name is empty"):
        params("")


def test_unregistered_backend_is_refused_with_the_registered_ones():
    with pytest.raises(ValueError, match=r"'pigeon': There are .*memory"):
        RendezvousHandlerRegistry().create_handler(params("pigeon"))


def test_handler_with_another_name_is_an_error_of_its_creator():
    registry = RendezvousHandlerRegistry()
    registry.register("fake", lambda given: Fake("other"))
    with pytest.raises(RuntimeError, match="'fake' calls itself 'other'"):
        registry.create_handler(params())


def test_schemes_are_registered_by_default():
    handler = RendezvousHandlerRegistry().create_handler(params("memory", join_timeout=3))
    assert isinstance(handler, rallypoint.Handler)
    assert handler.get_backend() == "memory"
    assert handler.settings.join_timeout_s == 3
    assert handler.settings.endpoints == ("there:1",)


def test_create_handler_asks_the_global_registry(monkeypatch):
    monkeypatch.setattr(rallypoint.rendezvous_handler_registry, "_creators", {})
    rallypoint.rendezvous_handler_registry.register("fake", creator)
    assert isinstance(rallypoint.create_handler(params()), Fake)
    with pytest.raises(TypeError, match="join_timeout"):
        rallypoint.create_handler(params(), join_timeout=3)


def test_wrong_options_of_parameters_are_named():
    with pytest.raises(SettingsError, match="did you mean join_timeout"):
        rallypoint.create_handler(params("memory", join_timeot=3))
    with pytest.raises(SettingsError, match="join_timeout='soon'"):
        rallypoint.create_handler(params("memory", join_timeout="soon"))


# --- backends ---------------------------------------------------------------------------------------------------------


def test_registered_backend_can_be_used_by_url(monkeypatch):
    monkeypatch.setattr(schemes, "_openers", dict(schemes._openers))
    opened = []

    async def opener(settings):
        opened.append(settings.endpoints)
        return MemoryBackend(MemoryServer())

    scheme = unique().replace("-", "")
    rallypoint.register_backend(scheme, opener)
    rallypoint.register_backend(scheme, opener)
    handler = rallypoint.create_handler(f"{scheme}://some/run?min_nodes=1")
    assert not opened  # nothing is opened before its first use
    assert handler.next_rendezvous().world_size == 1
    assert handler.get_backend() == scheme
    assert opened == [("some",)]
    handler.shutdown()
    with pytest.raises(SettingsError, match="is already registered"):
        rallypoint.register_backend(scheme, lambda settings: opener(settings))


# --- entry points -----------------------------------------------------------------------------------------------------

PLUGIN = """
    from rallypoint.backends.memory import MemoryBackend, MemoryServer
    from tests.test_registry import Fake

    server = MemoryServer()
    print("the plug-in is loaded")

    async def open_backend(settings):
        return MemoryBackend(server)

    def create(params):
        return Fake("plugged")
"""


@pytest.fixture
def plugin(tmp_path):
    """A directory with an installed distribution that plugs in a handler and a backend."""
    (tmp_path / "a_plugin.py").write_text(textwrap.dedent(PLUGIN))
    info = tmp_path / "a_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rallypoint.handlers]\nplugged = a_plugin:create\n\n"
        "[rallypoint.backends]\nplugged-store = a_plugin:open_backend\n"
    )
    return str(tmp_path)


def with_plugin(source: str, plugin: str) -> str:
    head = f"import sys\nsys.path[:0] = [{plugin!r}, '.']\nimport rallypoint\n"
    return script(head + textwrap.dedent(source)).stdout


def test_entry_point_plugs_in_a_handler(plugin):
    output = with_plugin(
        """
        print("imported")
        params = rallypoint.RendezvousParameters("plugged", "", "run", 1, 1)
        print(type(rallypoint.create_handler(params)).__name__)
        print(type(rallypoint.create_handler(params)).__name__)
        """,
        plugin,
    )
    assert output.splitlines() == ["imported", "the plug-in is loaded", "Fake", "Fake"]


def test_entry_point_plugs_in_a_backend(plugin):
    output = with_plugin(
        """
        handler = rallypoint.create_handler("plugged-store://x/run?min_nodes=1")
        print(handler.next_rendezvous().world_size, handler.get_backend(), handler.shutdown())
        params = rallypoint.RendezvousParameters("plugged-store", "", "other", 1, 1)
        print(rallypoint.create_handler(params).get_backend())
        """,
        plugin,
    )
    assert output.splitlines() == ["the plug-in is loaded", "1 plugged-store True", "plugged-store"]


def test_error_for_an_unknown_scheme_lists_the_plugged_in_backends(plugin):
    output = with_plugin(
        """
        try:
            rallypoint.create_handler("pigeon://x/run?min_nodes=1")
        except rallypoint.SettingsError as error:
            print(error)
        """,
        plugin,
    )
    assert "memory, plugged-store" in output
    assert "loaded" not in output
