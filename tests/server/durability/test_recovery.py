"""Directories as they are found: cut, flipped, torn, incomplete, newer. A prefix is recovered, or it is refused."""

import asyncio
import random

import pytest

from rallypoint.errors import DataError
from rallypoint.events import Emitter, LogCut
from rallypoint.kv.engine import Engine
from rallypoint.kv.log import FORMAT, Entry, Header, Kind, encode_entries
from rallypoint.kv.parts import capture
from rallypoint.kv.snapshot import snapshot
from rallypoint.kv.types import Add, Grant, Op, Origin, Put, Revoke, Txn
from rallypoint.server.durability.data import open_data
from rallypoint.server.durability.disk import Directory
from rallypoint.server.durability.files import begin_log, write_snapshot
from rallypoint.server.durability.journal import Bounds
from rallypoint.server.durability.recovery import log_name, recover, snapshot_name
from rallypoint.testing.disk import MemoryDisk
from tests.server.durability.kit import kill, make
from tests.server.kit import eventually, run

CLIENT = "c" * 24
HISTORY: tuple[tuple[Op, Origin | None], ...] = (
    (Grant(5.0, 77), Origin(CLIENT, 1)),
    (Txn((), (Put("a", b"1", 77),)), Origin(CLIENT, 2, 1)),
    (Add("n", 1), Origin(CLIENT, 3, 2)),
    (Txn((), (Put("b", b"x" * 30),)), None),
    (Add("n", 41), Origin(CLIENT, 4, 3)),
    (Revoke(77), None),
)


async def lived(disk: MemoryDisk, history=HISTORY, bounds: Bounds | None = None) -> list[bytes]:
    """Let a server execute a history, each operation durable before the next; its state after each of them."""
    server = make(disk, bounds=bounds or Bounds())
    states = [snapshot(server.engine_host.engine)]
    for op, origin in history:
        server.engine_host.execute(op, origin)
        await server.journal.wait_durable()
        states.append(snapshot(server.engine_host.engine))
        await eventually(
            lambda: not server.journal._is_busy and server.journal._snapshotting is None,
            "all is written that has to be",
        )
    await kill(server)
    return states


def outcome(disk: MemoryDisk) -> bytes | str:
    """The state that is recovered, or why none is."""
    try:
        found = recover(disk, lambda: 0.0)
    except DataError as error:
        return str(error)
    return snapshot(found.engine) if found.engine is not None else "nothing"


def copy(disk: MemoryDisk) -> MemoryDisk:
    again = MemoryDisk()
    for name in disk.names():
        again.put(name, disk.read(name))
    return again


# --- every byte -------------------------------------------------------------------------------------------------------


def test_log_cut_at_every_byte_gives_the_operations_before_the_cut_and_is_never_a_lie():
    async def main():
        disk = MemoryDisk()
        states = await lived(disk)
        name = log_name(1)
        whole = disk.read(name)
        found = []
        for length in range(len(whole)):
            cut = copy(disk)
            cut.put(name, whole[:length])
            found.append(outcome(cut))
        recovered = [states.index(state) for state in found if isinstance(state, bytes)]
        assert recovered == sorted(recovered)  # never less with more bytes
        assert set(recovered) == set(range(len(HISTORY)))
        refused = [text for text in found if isinstance(text, str)]
        assert len(refused) == len(Header(Kind.LOG, 1, 0, "0" * 16).encode())  # a log without a header never existed
        assert all("header is cut short" in text and "What to do: restore" in text for text in refused)

    run(main())


@pytest.mark.parametrize("flip", [0x01, 0x10, 0xFF])
def test_directory_with_any_byte_flipped_is_refused_with_what_to_do(flip):
    async def main():
        disk = MemoryDisk()
        await lived(disk)
        refused = 0
        for name in disk.names():
            whole = disk.read(name)
            for place in range(len(whole)):
                data = bytearray(whole)
                data[place] ^= flip
                broken = copy(disk)
                broken.put(name, bytes(data))
                found = outcome(broken)
                assert isinstance(found, str), f"byte {place} of {name} was flipped, and nobody noticed"
                assert name in found
                assert "What to do: " in found or "newer version" in found
                refused += 1
        assert refused > 500

    run(main())


def test_snapshot_cut_at_every_byte_is_refused():
    async def main():
        disk = MemoryDisk()
        await lived(disk)
        name = snapshot_name(1)
        whole = disk.read(name)
        for length in range(len(whole)):
            cut = copy(disk)
            cut.put(name, whole[:length])
            assert isinstance(outcome(cut), str)

    run(main())


def two_logs() -> tuple[MemoryDisk, list[bytes]]:
    """As after a kill between the beginning of a log and the end of its snapshot."""
    disk, engine, states = MemoryDisk(), Engine(), []
    generation = "0123456789abcdef"
    write_snapshot(disk, 1, 0, generation, capture(engine))
    states.append(snapshot(engine))
    for number, ops in enumerate((HISTORY[:3], HISTORY[3:]), start=1):
        first = len(states) - 1
        kept = b""
        for op, origin in ops:
            kept += encode_entries(len(states) - 1, [Entry(op, origin)])
            engine.apply(op, 0.0, origin)
            states.append(snapshot(engine))
        begin_log(disk, number, first, generation, kept)
    return disk, states


def test_logs_that_follow_each_other_are_all_replayed():
    disk, states = two_logs()
    assert outcome(disk) == states[-1]


def test_log_that_another_follows_is_refused_wherever_it_is_cut():
    disk, states = two_logs()
    name = log_name(1)
    whole = disk.read(name)
    for length in range(len(whole)):
        cut = copy(disk)
        cut.put(name, whole[:length])
        assert isinstance(outcome(cut), str), length
    last = disk.read(log_name(2))
    for length in range(len(last)):
        cut = copy(disk)
        cut.put(log_name(2), last[:length])
        found = outcome(cut)
        assert isinstance(found, str) or found in states[3:]


def test_log_that_was_to_be_the_next_and_never_was_is_passed_over():
    disk, states = two_logs()
    begin_log(disk, 3, 4, "0123456789abcdef", b"")  # made after entry 4, when there were six in the end
    assert outcome(disk) == states[-1]

    async def main():
        server = make(disk)
        assert log_name(3) not in disk.names()
        await kill(server)

    run(main())


# --- what is missing or not ours --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda disk: disk.remove(snapshot_name(1)), "there is a log, but no snapshot"),
        (lambda disk: disk.remove(log_name(1)), f"{log_name(1)} is damaged: it is missing, and {log_name(2)} is there"),
        (lambda disk: disk.rename(log_name(2), log_name(3)), f"{log_name(2)} is damaged: it is missing"),
        (lambda disk: disk.put(log_name(2), disk.read(log_name(1))), "it says that its number is 1"),
        (lambda disk: disk.put(log_name(2), disk.read(snapshot_name(1))), "it is not a log"),
        (
            lambda disk: disk.put(log_name(2), Header(Kind.LOG, 2, 3, "f" * 16).encode()),
            "it belongs to another directory",
        ),
        (
            lambda disk: disk.put(log_name(2), Header(Kind.LOG, 2, 9, "0123456789abcdef").encode()),
            "it begins with entry 9, and what comes before ends with 2",
        ),
        (lambda disk: disk.put(log_name(2), b"not ours at all, but long enough to be a header"), "does not begin as"),
    ],
)
def test_directory_with_something_missing_or_foreign_is_refused(spoil, said):
    disk, _ = two_logs()
    spoil(disk)
    found = outcome(disk)
    assert isinstance(found, str)
    assert said in found


def test_log_of_a_snapshot_that_was_taken_while_it_grew_must_not_be_missing():
    async def main():
        disk = MemoryDisk()
        await lived(disk, bounds=Bounds(log_entries=2))
        (last,) = [name for name in disk.names() if name.startswith("log")]
        assert last != log_name(1)
        disk.remove(last)
        assert f"{last} is damaged: it is missing" in str(outcome(disk))

    run(main())


def test_newer_format_is_refused_as_such(monkeypatch):
    monkeypatch.setattr("rallypoint.kv.log.FORMAT", FORMAT + 1)
    disk, _ = two_logs()
    monkeypatch.undo()
    found = str(outcome(disk))
    assert "was written by a newer version" in found
    assert "Upgrade" in found


def test_what_else_is_in_the_directory_is_left_alone(tmp_path):
    async def main():
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "log-1").write_text("mine, too")
        await kill(make(Directory(tmp_path)))
        await kill(make(Directory(tmp_path)))
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"notes.txt", "log-1", "lock", snapshot_name(1), log_name(1)}

    run(main())


# --- a torn end -------------------------------------------------------------------------------------------------------


def test_torn_end_is_cut_off_with_a_warning_that_says_how_many_bytes():
    async def main():
        disk = MemoryDisk("there")
        states = await lived(disk)
        whole = disk.read(log_name(1))
        disk.put(log_name(1), whole[:-7])
        told: list[object] = []
        engine, journal = open_data(disk, emit=Emitter(told.append))
        assert snapshot(engine) == states[-2]
        (cut,) = [event for event in told if isinstance(event, LogCut)]
        assert str(cut) == (
            f"server: cut off the last {cut.bytes} bytes of there/{log_name(1)}: they were being written when the "
            f"server died"
        )
        assert disk.read(log_name(1)) == whole[: len(whole) - 7 - cut.bytes]
        await journal.close()
        assert outcome(disk) == states[-2]

    run(main())


# --- power ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(150))
def test_what_was_acknowledged_survives_a_loss_of_power_at_any_moment(seed):
    """Operations one after the other or together, snapshots between them; the power goes at some moment."""

    async def main():
        rng = random.Random(seed)
        disk = MemoryDisk()
        acknowledged, attempted = 0, 0
        for _ in range(4):
            server = make(disk, bounds=Bounds(log_entries=rng.choice((3, 10, 1000))))
            found = int(server.engine_host.engine.items["n"].value) if "n" in server.engine_host.engine.items else 0
            assert acknowledged <= found <= attempted
            attempted = found
            for _ in range(rng.randint(0, 25)):
                server.engine_host.execute(Add("n", 1))
                attempted += 1
                now = attempted
                if rng.random() < 0.5:
                    await server.journal.wait_durable()
                    acknowledged = now
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)
            acknowledged = max(acknowledged, attempted - (server.journal.position - server.journal.durable))
            after = disk.after_power_loss(rng)
            await kill(server)
            disk = after

    run(main())
