"""The handler for torchrun has torch's interface, results, errors, events and log levels."""

import gc
import itertools
import json
import logging
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist
from torch.distributed.elastic import events as torch_events
from torch.distributed.elastic import rendezvous as theirs
from torch.distributed.elastic.events import handlers as event_handlers
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

import rallypoint
from rallypoint import errors as ours
from rallypoint.integrations.torchrun import TorchrunHandler, TorchStore
from rallypoint.integrations.torchrun.errors import rendezvous_error

_numbers = itertools.count(1)


def parameters(run_id: str, nodes: tuple[int, int] = (1, 1), **config: Any) -> theirs.RendezvousParameters:
    config.setdefault("timeout", 900)
    return theirs.RendezvousParameters("rallypoint", "memory://torch", run_id, *nodes, "127.0.0.1", **config)


@pytest.fixture
def run_id() -> str:
    return f"handler-{next(_numbers)}"


@pytest.fixture
def make(run_id: str) -> Iterator[Any]:
    made: list[TorchrunHandler] = []

    def one(*args: Any, **config: Any) -> TorchrunHandler:
        made.append(get_rendezvous_handler(parameters(run_id, *args, **config)))
        return made[-1]

    yield one
    for handler in made:
        handler._handler.close()
        handler._stores.close()


@pytest.fixture
def together(make: Any) -> Iterator[Any]:
    """Call `next_rendezvous` of several handlers at once."""
    with ThreadPoolExecutor(8) as pool:
        yield lambda *handlers: [one.result(60) for one in [pool.submit(h.next_rendezvous) for h in handlers]]


def test_registry_of_torch_makes_our_handler(make):
    handler = make()
    assert isinstance(handler, theirs.RendezvousHandler)
    assert isinstance(handler, TorchrunHandler)
    assert (handler.get_backend(), handler.settings.join_timeout_s) == ("rallypoint", 900)


def test_result_has_the_types_that_the_agent_of_torch_expects(make, run_id):
    handler = make()
    info = handler.next_rendezvous()
    assert isinstance(info, theirs.RendezvousInfo)
    assert (info.rank, info.world_size) == (0, 1)
    assert isinstance(info.store, TorchStore)
    info.store.set_timeout(timedelta(seconds=5))
    info.store.set("k", "v")
    assert info.store.get("k") == b"v"
    assert isinstance(info.bootstrap_store_info, theirs.RendezvousStoreInfo)
    assert handler.get_run_id() == run_id


# --- the store of the workers ---------------------------------------------------------------------------------------


def client(info: theirs.RendezvousInfo) -> dist.TCPStore:
    place = info.bootstrap_store_info
    return dist.TCPStore(place.master_addr, place.master_port, is_master=False, timeout=timedelta(seconds=10))


def test_rank_0_of_every_round_hosts_a_store_for_that_round_alone(make, together):
    handlers = [make((2, 2), name=name) for name in ("a", "b")]
    first = together(*handlers)
    assert handlers[0].use_agent_store
    assert len({one.bootstrap_store_info.master_port for one in first}) == 1
    client(first[1]).set("left", "over")
    second = together(*handlers)
    ports = {one.bootstrap_store_info.master_port for one in second}
    assert len(ports) == 1
    assert client(second[0]).check(["left"]) is False


def test_node_that_becomes_rank_0_hosts_the_store(make, together):
    first, second = (make((1, 2), name=name, keep_alive_interval="0.2") for name in ("a", "b"))
    assert [info.rank for info in together(first, second)] == [0, 1]
    first._handler.abandon()
    first._stores.close()
    info = second.next_rendezvous()
    assert info.rank == 0
    client(info).set("k", "v")


def test_stores_of_old_rounds_are_dropped(make, together):
    handlers = [make((2, 2), name=name, join_timeout=60) for name in ("a", "b")]
    for _ in range(4):
        infos = together(*handlers)
        kept = [handler._stores.rounds for handler in handlers]
        assert [len(rounds) for rounds in kept] == [1, 0]
        old = infos[0].bootstrap_store_info.master_port
    assert handlers[0]._stores._active[1].port == old
    handlers[0].shutdown()
    assert handlers[0]._stores.rounds == []


def test_only_a_free_port_is_published_if_sharing_is_off(make, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handler = make()
    info = handler.next_rendezvous()
    place = info.bootstrap_store_info
    assert handler.use_agent_store is False
    assert handler._stores.rounds == []
    dist.TCPStore(place.master_addr, place.master_port, is_master=True)  # it is free


def test_store_that_cannot_be_hosted_is_an_error(make, monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no sockets left")

    handler = make()
    monkeypatch.setattr(dist, "TCPStore", refuse)
    with pytest.raises(theirs.RendezvousError, match="cannot host the workers' TCPStore: no sockets left"):
        handler.next_rendezvous()


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ours.RendezvousClosedError("x"), theirs.RendezvousClosedError),
        (ours.RendezvousTimeoutError("x"), theirs.RendezvousTimeoutError),
        (ours.RendezvousConnectionError("x"), theirs.RendezvousConnectionError),
        (ours.RendezvousStateError("x"), theirs.RendezvousStateError),
        (ours.NewerSchemaError("x"), theirs.RendezvousStateError),
        (ours.RendezvousGracefulExitError("x"), theirs.RendezvousGracefulExitError),
        (ours.SettingsMismatchError("x", differences={}), theirs.RendezvousError),
        (ours.SessionLostError("x"), theirs.RendezvousError),
        (ours.ForkedProcessError("x"), theirs.RendezvousError),
        (ours.RendezvousError("x"), theirs.RendezvousError),
        (ours.Unavailable("x"), theirs.RendezvousConnectionError),
        (ours.OutcomeUnknown("x"), theirs.RendezvousConnectionError),
        (ours.Rejected("x"), theirs.RendezvousConnectionError),
        (ours.StoreError("x"), theirs.RendezvousError),
        (ours.SettingsError("x"), ours.SettingsError),
    ],
)
def test_each_error_is_translated_to_one_of_torch(error, kind):
    translated = rendezvous_error(error)
    assert type(translated) is kind
    assert str(translated) == "x"


def test_every_error_of_the_tree_has_a_translation():
    def below(kind: type) -> list[type]:
        return [kind, *(deeper for sub in kind.__subclasses__() for deeper in below(sub))]

    tree = [kind for kind in below(ours.RallypointError) if kind.__module__ == "rallypoint.errors"]
    for kind in set(tree) - {
        ours.RallypointError,
        ours.SettingsError,
        ours.DataError,
    }:  # DataError: only of servers
        translated = rendezvous_error(kind.__new__(kind))
        assert isinstance(translated, theirs.RendezvousError), kind


def test_closed_run_raises_the_error_of_torch_with_ours_as_its_cause(make):
    first, second = make(), make()
    first.set_closed()
    assert first.is_closed() is True
    with pytest.raises(theirs.RendezvousClosedError) as caught:
        second.next_rendezvous()
    assert isinstance(caught.value.__cause__, rallypoint.RendezvousClosedError)


def test_time_out_raises_the_error_of_torch(make):
    with pytest.raises(theirs.RendezvousTimeoutError, match="1 of at least 2 nodes joined"):
        make((2, 2), join_timeout="0.2").next_rendezvous()


def test_garbage_collected_handler_ends_its_session(run_id):
    handler = get_rendezvous_handler(parameters(run_id))
    handler.next_rendezvous()
    other = get_rendezvous_handler(parameters(run_id))
    del handler
    gc.collect()
    assert other.next_rendezvous().world_size == 1  # its place is free
    other.shutdown()


# --- shutdown -------------------------------------------------------------------------------------------------------


def test_shutdown_closes_the_run_and_is_idempotent(make):
    handler, other = make(), make()
    handler.next_rendezvous()
    assert handler.shutdown() is True
    assert handler.shutdown() is True
    assert other.is_closed() is True
    assert handler.num_nodes_waiting() == 0


def test_shutdown_of_a_refused_node_does_not_close_the_run(make):
    member, stranger = make((1, 2), last_call_timeout="0.1"), make((1, 3))
    member.next_rendezvous()
    with pytest.raises(theirs.RendezvousError, match="max_nodes"):
        stranger.next_rendezvous()
    assert stranger.shutdown() is True
    assert member.is_closed() is False


def test_shutdown_of_a_node_that_was_asked_to_go_does_not_close_the_run(make, run_id):
    with ThreadPoolExecutor() as pool:
        waiting_handler = make((2, 2), name="to-go")
        waiting = pool.submit(waiting_handler.next_rendezvous)
        core = waiting_handler._handler._core
        _until(lambda: core._node is not None and core._node._node_session.record is not None)
        waiting_handler._handler._loop.call(core._node._run_config.drain("to-go", "maintenance"))
        with pytest.raises(theirs.RendezvousGracefulExitError, match="maintenance"):
            waiting.result(60)
    assert waiting_handler.shutdown() is True
    assert make().is_closed() is False


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, "signal"])
def test_shutdown_because_of_a_signal_does_not_close_the_run(make, kind):
    handler, other = make(), make()

    def launch() -> None:
        try:
            raise SignalException("Ctrl-C", signal.SIGINT) if kind == "signal" else kind
        finally:  # as torch's launcher does
            assert handler.shutdown() is True

    with pytest.raises(SignalException if kind == "signal" else kind):
        launch()
    assert other.is_closed() is False


@pytest.mark.parametrize("is_a_worker", [True, False])
def test_agent_whose_worker_failed_for_good_ends_the_run_for_the_other_members(make, is_a_worker):
    """Another error of one agent closes the run, but the members of the round go on."""
    first, second = make((2, 2)), make((2, 2))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda handler: handler.next_rendezvous(), (first, second)))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=-9, error_file="none")

    def launch() -> None:
        try:
            raise ChildFailedError("train.py", {3: failure}) if is_a_worker else RuntimeError("no memory")
        finally:
            first.shutdown()

    with pytest.raises(ChildFailedError if is_a_worker else RuntimeError):
        launch()
    _until(second.is_closed)
    assert second.num_nodes_waiting() == int(is_a_worker)
    why = "rank 3 on .* was ended by SIGKILL" if is_a_worker else "its agent failed: RuntimeError: no memory"
    with pytest.raises(theirs.RendezvousClosedError, match=why):
        second.next_rendezvous()


def test_shutdown_because_of_another_error_closes_the_run(make):
    handler, other = make(), make()

    def launch() -> None:
        try:
            raise RuntimeError("the agent failed")
        finally:
            handler.shutdown()

    with pytest.raises(RuntimeError):
        launch()
    assert other.is_closed() is True


def test_spare_of_a_run_that_is_shut_down_ends_without_an_error(make):
    member, spare = make(name="member"), make(name="spare")
    member.next_rendezvous()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(spare.next_rendezvous)
        _until(lambda: "spare" in _reason(spare))
        assert member.shutdown() is True
        with pytest.raises(theirs.RendezvousGracefulExitError, match="was closed by member"):
            waiting.result(60)


def _reason(handler: TorchrunHandler) -> str:
    node = handler._handler._core._node
    return "" if node is None else node.view.reason()


def _until(look: Any, patience_s: float = 30.0) -> None:
    deadline = time.monotonic() + patience_s
    while not look():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


# --- waiting nodes --------------------------------------------------------------------------------------------------


def test_number_of_waiting_nodes_is_pushed_and_read_in_microseconds(make):
    member, late = make((1, 2), name="a", last_call_timeout="0.1", admission_window="0"), make((1, 2), name="b")
    member.next_rendezvous()
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(late.next_rendezvous)
        _until(lambda: member.num_nodes_waiting() == 1)
        took_s = []
        for _ in range(200):
            began_at = time.perf_counter()
            member.num_nodes_waiting()
            took_s.append(time.perf_counter() - began_at)
        member.next_rendezvous()
        joining.result(60)
    assert sorted(took_s)[100] < 100e-6


# --- events and logs ------------------------------------------------------------------------------------------------


class Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(json.loads(record.getMessage()))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    recorder = Recorder()
    monkeypatch.setitem(event_handlers._log_handlers, "dynamic_rendezvous", recorder)
    monkeypatch.setattr(torch_events, "_events_loggers", {})
    logger = logging.getLogger("torchelastic-events-dynamic_rendezvous")
    monkeypatch.setattr(logger, "handlers", [])
    return recorder.records


def test_events_of_a_round_are_recorded_as_by_torch(make, recorded, run_id):
    handler = make()
    handler.next_rendezvous()
    handler.shutdown()
    entered = next(event for event in recorded if event["name"] == "rallypoint:RoundEntered")
    assert (entered["run_id"], entered["node_state"], entered["rank"]) == (run_id, "RUNNING", 0)
    assert (entered["hostname"], entered["local_id"]) == ("127.0.0.1", handler._handler._core._local_id)
    closed = next(event for event in recorded if event["name"] == "rallypoint:RunClosed")
    assert closed["node_state"] == "SUCCEEDED"


def test_exception_that_leaves_the_api_is_recorded_as_failed(make, recorded):
    handler = make((2, 2), join_timeout="0.2")
    with pytest.raises(theirs.RendezvousTimeoutError) as caught:
        handler.next_rendezvous()
    failed = [event for event in recorded if event["node_state"] == "FAILED"]
    assert [event["message"] for event in failed] == [f"RendezvousTimeoutError: {caught.value}"]
    assert "Traceback" in failed[0]["error_trace"]


def test_exception_that_is_not_ours_is_recorded_and_passed_on(make, recorded, monkeypatch):
    handler = make()

    def interrupted(cause: rallypoint.LeaveCause | None) -> None:
        raise KeyboardInterrupt("now")

    monkeypatch.setattr(handler._handler, "next_rendezvous", interrupted)
    with pytest.raises(KeyboardInterrupt):
        handler.next_rendezvous()
    assert recorded[-1]["message"] == "KeyboardInterrupt: now"


def test_log_levels_are_those_of_torch(make, caplog):
    name = "torch.distributed.elastic.rendezvous.rallypoint"
    logger = logging.getLogger(name)
    logger.addHandler(caplog.handler)  # torch's loggers do not propagate to the root logger
    try:
        with caplog.at_level(logging.DEBUG, logger=name):
            handler = make((1, 2), last_call_timeout="0.1")
            handler.next_rendezvous()
            handler.shutdown()
    finally:
        logger.removeHandler(caplog.handler)
    said = {record.getMessage().rpartition(": ")[2].split(" (")[0]: record.levelno for record in caplog.records}
    levels = {text: level for text, level in said.items() if level >= logging.INFO}
    assert set(levels.values()) == {logging.INFO}
    assert any("asks to join" in text for text in levels)
    assert any("as rank 0 of 1" in text for text in levels)
    assert any("closed the run" in record.getMessage() for record in caplog.records)
    assert logging.DEBUG in said.values()


# --- why the agent leaves its round -----------------------------------------------------------------------------------


def reason_for(world_of: TorchrunHandler) -> str:
    """What the member of this handler is told about its round."""
    world = world_of._world
    assert world is not None
    assert world.changed.wait(60)
    return world.changed.reason


def test_other_members_learn_that_the_agent_restarts_its_workers(make, together):
    a, b = make((2, 2), name="a"), make((2, 2), name="b")
    together(a, b)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(b.next_rendezvous)
        why = "a worker on b failed, and the agent restarts its workers"
        assert reason_for(a) == f"members are leaving round 1: {why}"
        a.next_rendezvous()
        again.result(60)


def test_other_members_learn_which_worker_ended_the_job(make, together, tmp_path):
    a, b = make((2, 2), name="a"), make((2, 2), name="b")
    together(a, b)
    reply = tmp_path / "error.json"
    message = {"message": "RuntimeError: CUDA out of memory", "extraInfo": {"timestamp": "1"}}
    reply.write_text(json.dumps({"message": message}))
    failed = {1: ProcessFailure(0, 123, 1, str(reply)), 0: ProcessFailure(0, 124, -11, "")}
    try:
        raise ChildFailedError("job", failed)
    except ChildFailedError:
        assert b.shutdown()
    with pytest.raises(theirs.RendezvousClosedError, match="closed by b: rank 1 on b exited with 1: RuntimeError"):
        a.next_rendezvous()
