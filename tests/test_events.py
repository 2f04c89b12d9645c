"""Events: typed, one per fact, with a sentence; failing sinks; no output without a logging configuration."""

import logging

import msgspec
import pytest

import rallypoint
from rallypoint import events
from rallypoint.events import Emitter, Event, JoinStarted, RoundEntered, SessionLost, WaitingFor
from tests.patience import in_thread, result_of, script, unique


def kinds() -> list[type[Event]]:
    return [
        kind
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
    ]


def example(kind: type[Event]) -> Event:
    """An event of this kind with a value in every field."""
    values = {str: "some words", int: 3, float: 1.5, float | None: 1.5, tuple[str, ...]: ("one", "two")}
    return kind(**{field.name: values[field.type] for field in msgspec.structs.fields(kind)})


@pytest.mark.parametrize("kind", kinds())
def test_text_of_every_event_is_one_line(kind):
    event = example(kind)
    assert "\n" not in str(event)
    assert str(event).startswith("run 'some words': some words: ")
    assert event.text()
    assert kind.__doc__.endswith(".")
    assert kind.level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


@pytest.mark.parametrize("kind", kinds())
def test_every_event_is_a_frozen_value_with_its_name(kind):
    event = example(kind)
    assert msgspec.to_builtins(event)["event"] == kind.__name__
    assert event == example(kind)
    with pytest.raises(AttributeError):
        event.run_id = "another"


def test_levels_of_all_events():
    levels = {kind.__name__: logging.getLevelName(kind.level) for kind in kinds()}
    assert {name for name, level in levels.items() if level == "WARNING"} == {
        "BackendUnreachable",
        "ClientRefused",
        "DataGoesOn",
        "EventsGoOn",
        "EventsTrouble",
        "Hosting",
        "JoinFailed",
        "LogCut",
        "ManyGone",
        "ManyLost",
        "NodeGone",
        "NodeHeldBack",
        "NodeLost",
        "NodeRefused",
        "RankNotGiven",
        "RecordUnreadable",
        "RenewalMissed",
        "SecurityNotice",
        "SessionLost",
        "ShutdownFailed",
    }
    assert {"JoinStarted", "RoundEntered", "RunClosed"} <= {name for name, level in levels.items() if level == "INFO"}


# --- sinks ------------------------------------------------------------------------------------------------------------


def joined(run_id="run") -> RoundEntered:
    return RoundEntered(run_id=run_id, by="a", round=1, rank=0, world_size=1)


def test_every_sink_gets_every_event_in_order():
    one, other = [], []
    emit = Emitter(one.append)
    emit(joined("first"))
    emit.add(other.append)
    emit(joined("second"))
    assert [event.run_id for event in one] == ["first", "second"]
    assert [event.run_id for event in other] == ["second"]


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)])
def test_sink_that_raises_is_removed_and_reported_once(caplog, error):
    calls, seen = [], []

    def broken(event):
        calls.append(event)
        raise error

    emit = Emitter(broken, seen.append)
    for _ in range(3):
        emit(joined())
    assert len(calls) == 1
    assert len(seen) == 3
    reports = [record for record in caplog.records if "sink failed" in record.message]
    assert [record.levelname for record in reports] == ["ERROR"]
    assert "broken" in reports[0].message
    assert reports[0].exc_info[1] is error


def test_logging_sink_uses_the_level_of_the_event_and_carries_it(caplog):
    emit = Emitter()
    with caplog.at_level(logging.INFO, "rallypoint"):
        emit(joined())
        emit(WaitingFor(run_id="run", by="a", reason="for b"))
        emit(SessionLost(run_id="run", by="a", reason="it was not renewed"))
    assert [(record.levelname, record.name) for record in caplog.records] == [
        ("INFO", "rallypoint"),
        ("WARNING", "rallypoint"),
    ]
    assert caplog.records[0].event == joined()
    assert caplog.messages[0] == "run 'run': a: is in round 1 as rank 0 of 1"


def test_failing_sink_does_not_affect_the_job(caplog):
    def broken(event):
        raise ValueError

    handler = rallypoint.create_handler(f"memory://{unique()}/run", min_nodes=1, sinks=[broken])
    assert handler.next_rendezvous().world_size == 1
    assert handler.shutdown()
    assert len([record for record in caplog.records if "sink failed" in record.message]) == 1


def test_one_event_is_emitted_per_fact():
    place, seen = f"memory://{unique()}/run", []
    handlers = [
        rallypoint.create_handler(place, min_nodes=2, name=name, sinks=[seen.append], local_addr="here")
        for name in ("a", "b")
    ]
    for _ in range(2):
        for call in [in_thread(handler.next_rendezvous) for handler in handlers]:
            result_of(call)
    for handler in handlers:
        handler.shutdown()

    def count(name, by=None):
        return sum(type(event).__name__ == name and by in (None, event.by) for event in seen)

    for by in ("a", "b"):
        assert [count(name, by) for name in ("JoinStarted", "Confirmed", "RoundEntered", "NodeLeft")] == [2, 2, 2, 1]
    assert [count(name) for name in ("RoundForming", "RoundActive", "RunClosed")] == [2, 2, 1]
    assert [count(name) for name in ("JoinFailed", "SessionLost", "RenewalMissed", "BackendUnreachable")] == [0] * 4
    starts = [event for event in seen if isinstance(event, JoinStarted)]
    assert sorted((event.by, event.join) for event in starts) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


# --- output -----------------------------------------------------------------------------------------------------------


def test_library_prints_nothing_by_default():
    done = script(
        """
        import rallypoint
        url = "memory:///run?join_timeout=0.3"
        handler = rallypoint.create_handler(url, min_nodes=2, sinks=[lambda event: 1 / 0])
        try:
            handler.next_rendezvous()       # logs a warning
        except rallypoint.RendezvousTimeoutError:
            pass
        with rallypoint.join(url, min_nodes=1) as run:
            next(run.rounds()).store.set("k", "v")
        handler.shutdown()
        """
    )
    assert done.stdout == ""


def test_events_are_logged_if_logging_is_configured():
    done = script(
        """
        import logging, sys
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns on a busy machine
        import rallypoint
        handler = rallypoint.create_handler("memory:///run?min_nodes=1&name=a")
        handler.next_rendezvous()
        handler.shutdown()
        """
    )
    lines = done.stdout.splitlines()
    assert "INFO run 'run': a: is in round 1 as rank 0 of 1" in lines
    assert any(line.startswith("INFO run 'run': a: closed the run") for line in lines)
    assert not [line for line in lines if not line.startswith("INFO run 'run': a: ")]
