"""Static runs: fixed ranks and size, no waiting nodes, never closed."""

import asyncio
import threading

import pytest

import rallypoint
from rallypoint.backends.contract import Backend
from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.settings import Settings
from rallypoint.static import LOOK_S, StaticHandler
from rallypoint.testing import loop as virtual
from tests.ports import free_port
from tests.rendezvous.kit import CountingBackend

PATIENCE_S = 60


def url_of(port: int, rank: object = 0, **options: object) -> str:
    given = {"min_nodes": 3, "node_rank": rank, "join_timeout": 30, "close_timeout": 1} | options
    return f"static://127.0.0.1:{port}/run?" + "&".join(f"{name}={value}" for name, value in given.items())


def call_all(handlers: list[rallypoint.Handler]) -> list[object]:
    """Call `next_rendezvous` of all handlers concurrently; their worlds or errors."""
    results: list[object] = [None] * len(handlers)

    def call(index: int) -> None:
        try:
            results[index] = handlers[index].next_rendezvous()
        except rallypoint.RendezvousError as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(handlers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.fixture
def made():
    """Creates handlers and closes them after the test, rank 0 last, which hosts the server."""
    handlers: list[rallypoint.Handler] = []

    def make(url: str) -> rallypoint.Handler:
        handlers.append(rallypoint.create_handler(url))
        return handlers[-1]

    yield make
    for handler in sorted(handlers, key=lambda one: -(one.settings.node_rank or 0)):
        handler.close()


def test_every_node_gets_its_requested_rank_and_a_store_hosted_by_rank_zero(made):
    port = free_port()
    worlds = call_all([made(url_of(port, rank, name=f"n{2 - rank}")) for rank in (2, 0, 1)])
    assert [(world.rank, world.world_size) for world in worlds] == [(2, 3), (0, 3), (1, 3)]
    worlds[0].store.set("key", b"value")
    assert worlds[2].store.get("key") == b"value"


def test_static_run_has_no_waiting_nodes_and_is_never_closed(made):
    port = free_port()
    handlers = [made(url_of(port, rank)) for rank in range(3)]
    call_all(handlers)
    for handler in handlers:
        handler.set_closed()
        assert handler.num_nodes_waiting() == 0
        assert not handler.is_closed()
    assert {world.world_size for world in call_all(handlers)} == {3}


def test_two_nodes_with_the_same_rank_get_an_error(made):
    port = free_port()
    results = call_all([made(url_of(port, rank, min_nodes=2, name=f"n{i}")) for i, rank in enumerate((0, 0))])
    errors = [result for result in results if isinstance(result, rallypoint.RendezvousError)]
    assert len(errors) == 1
    assert "rank 0 of run 'run' was requested by two nodes and given to n" in str(errors[0])


QUICK = {"keep_alive_interval": 0.5, "keep_alive_max_attempt": 2}


def test_further_node_with_a_taken_rank_is_told_who_has_it(made):
    port = free_port()
    call_all([made(url_of(port, rank, name=f"n{rank}", **QUICK)) for rank in range(3)])
    (error,) = call_all([made(url_of(port, 1, name="late", **QUICK))])
    assert isinstance(error, rallypoint.RendezvousError)
    assert "rank 1 of run 'run' is taken: n1 (" in str(error)
    assert "stop that node first" in str(error)


def test_member_that_joins_again_reads_no_other_nodes_while_it_waits():
    async def main() -> None:
        server, counting = MemoryServer(), []

        async def opener(_: Settings) -> Backend:
            counting.append(CountingBackend(MemoryBackend(server)))
            return counting[-1]

        given = {"min_nodes": 2, "max_nodes": 2, "join_timeout": 60}
        a, b = (
            StaticHandler(
                Settings.build(scheme="static", endpoints="127.0.0.1:1", run_id="run", node_rank=rank, **given),
                opener=opener,
            )
            for rank in (0, 1)
        )
        await asyncio.gather(a.next_rendezvous(), b.next_rendezvous())
        before = counting[0].counts["scan"]
        joining = asyncio.create_task(a.next_rendezvous())
        await asyncio.sleep(10 * LOOK_S)
        assert counting[0].counts["scan"] == before
        await asyncio.gather(joining, b.next_rendezvous())
        await asyncio.gather(a.aclose(), b.aclose())

    virtual.run(main())


def test_replacement_of_a_lost_node_gets_its_rank(made):
    port = free_port()
    handlers = [made(url_of(port, rank, name=f"n{rank}", **QUICK)) for rank in range(3)]
    call_all(handlers)
    handlers[2].close()
    worlds = call_all([*handlers[:2], made(url_of(port, 2, name="n2", **QUICK))])
    assert [world.rank for world in worlds] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"node_rank": ""}, "node_rank"),
        ({"max_nodes": 4}, "fixed size"),
        ({"node_rank": 3}, "ranks go from 0 to 2"),
    ],
)
def test_static_run_needs_a_rank_within_a_fixed_size(options, words):
    with pytest.raises(rallypoint.SettingsError) as raised:
        rallypoint.create_handler(url_of(free_port(), **options))
    assert words in str(raised.value)


def test_static_run_without_a_rank_is_refused():
    with pytest.raises(rallypoint.SettingsError, match="a static run needs node_rank"):
        rallypoint.create_handler(f"static://127.0.0.1:{free_port()}/run?min_nodes=2")
