"""Recovery from damaged directories: truncated, corrupt, incomplete, newer. It gives a prefix, or is refused."""

import asyncio
import random

import pytest

from rallypoint.errors import DataError
from rallypoint.events import Emitter, LogCut
from rallypoint.kv.engine import Engine
from rallypoint.kv.log import FORMAT, Entry, Header, Kind, encode_entries
from rallypoint.kv.snapshot import snapshot
from rallypoint.kv.snapshot_parts import capture
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


async def run_history(disk: MemoryDisk, history=HISTORY, bounds: Bounds | None = None) -> list[bytes]:
    """Have a server execute operations, each durable before the next. Returns the state after each."""
    server = make(disk, bounds=bounds or Bounds())
    states = [snapshot(server.engine_host.engine)]
    for op, origin in history:
        server.engine_host.execute(op, origin)
        await server.journal.wait_durable()
        states.append(snapshot(server.engine_host.engine))
        await eventually(
            lambda: not server.journal._is_busy and server.journal._snapshotting is None,
            "nothing is being written",
        )
    await kill(server)
    return states


def outcome(disk: MemoryDisk) -> bytes | str:
    """The recovered state, or the message of the refusal."""
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


def test_log_truncated_at_any_byte_gives_exactly_the_operations_before_it():
    async def main():
        disk = MemoryDisk()
        states = await run_history(disk)
        name = log_name(1)
        whole = disk.read(name)
        found = []
        for length in range(len(whole)):
            cut = copy(disk)
            cut.put(name, whole[:length])
            found.append(outcome(cut))
        recovered = [states.index(state) for state in found if isinstance(state, bytes)]
        assert recovered == sorted(recovered)  # more bytes never give less
        assert set(recovered) == set(range(len(HISTORY)))
        refused = [text for text in found if isinstance(text, str)]
        assert len(refused) == len(Header(Kind.LOG, 1, 0, "0" * 16).encode())  # a log is created with its header
        assert all("header is truncated" in text and "What to do: restore" in text for text in refused)

    run(main())


@pytest.mark.parametrize("flip", [0x01, 0x10, 0xFF])
def test_directory_with_any_flipped_byte_is_refused_with_instructions(flip):
    async def main():
        disk = MemoryDisk()
        await run_history(disk)
        refused = 0
        for name in disk.names():
            whole = disk.read(name)
            for place in range(len(whole)):
                data = bytearray(whole)
                data[place] ^= flip
                broken = copy(disk)
                broken.put(name, bytes(data))
                found = outcome(broken)
                assert isinstance(found, str), f"flipped byte {place} of {name} was not detected"
                assert name in found
                assert "What to do: " in found or "newer version" in found
                refused += 1
        assert refused > 500

    run(main())


def test_snapshot_truncated_at_any_byte_is_refused():
    async def main():
        disk = MemoryDisk()
        await run_history(disk)
        name = snapshot_name(1)
        whole = disk.read(name)
        for length in range(len(whole)):
            cut = copy(disk)
            cut.put(name, whole[:length])
            assert isinstance(outcome(cut), str)

    run(main())


def two_logs() -> tuple[MemoryDisk, list[bytes]]:
    """The files after a kill between the start of a log and the end of its snapshot."""
    disk, engine, states = MemoryDisk(), Engine(), []
    generation = "0123456789abcdef"
    write_snapshot(disk, 1, 0, generation, capture(engine))
    states.append(snapshot(engine))
    for number, ops in enumerate((HISTORY[:3], HISTORY[3:]), start=1):
        first = len(states) - 1
        frames = b""
        for op, origin in ops:
            frames += encode_entries(len(states) - 1, [Entry(op, origin)])
            engine.apply(op, 0.0, origin)
            states.append(snapshot(engine))
        begin_log(disk, number, first, generation, frames)
    return disk, states


def test_consecutive_logs_are_all_replayed():
    disk, states = two_logs()
    assert outcome(disk) == states[-1]


def test_truncated_log_is_refused_unless_it_is_the_last():
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


def test_unused_log_of_a_failed_rotation_is_ignored():
    disk, states = two_logs()
    begin_log(disk, 3, 4, "0123456789abcdef", b"")  # created after entry 4, but then the second log got two more
    assert outcome(disk) == states[-1]

    async def main():
        server = make(disk)
        assert log_name(3) not in disk.names()
        await kill(server)

    run(main())


# --- missing and foreign files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda disk: disk.remove(snapshot_name(1)), "there is a log, but no snapshot"),
        (lambda disk: disk.remove(log_name(1)), f"{log_name(1)} is damaged: it is missing, and {log_name(2)} is there"),
        (lambda disk: disk.rename(log_name(2), log_name(3)), f"{log_name(2)} is damaged: it is missing"),
        (lambda disk: disk.put(log_name(2), disk.read(log_name(1))), "its header has number 1"),
        (lambda disk: disk.put(log_name(2), disk.read(snapshot_name(1))), "it is not a log"),
        (
            lambda disk: disk.put(log_name(2), Header(Kind.LOG, 2, 3, "f" * 16).encode()),
            "it belongs to another directory",
        ),
        (
            lambda disk: disk.put(log_name(2), Header(Kind.LOG, 2, 9, "0123456789abcdef").encode()),
            "it begins with entry 9, and the files before it end with 2",
        ),
        (lambda disk: disk.put(log_name(2), b"not ours at all, but long enough to be a header"), "does not start like"),
    ],
)
def test_directory_with_something_missing_or_foreign_is_refused(damage, message):
    disk, _ = two_logs()
    damage(disk)
    found = outcome(disk)
    assert isinstance(found, str)
    assert message in found


def test_missing_log_after_a_snapshot_is_refused():
    async def main():
        disk = MemoryDisk()
        await run_history(disk, bounds=Bounds(log_entries=2))
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


def test_other_files_in_the_directory_are_left_alone(tmp_path):
    async def main():
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "log-1").write_text("mine, too")
        await kill(make(Directory(tmp_path)))
        await kill(make(Directory(tmp_path)))
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"notes.txt", "log-1", "lock", snapshot_name(1), log_name(1)}

    run(main())


# --- a torn end -------------------------------------------------------------------------------------------------------


def test_torn_end_is_cut_off_with_a_warning():
    async def main():
        disk = MemoryDisk("there")
        states = await run_history(disk)
        whole = disk.read(log_name(1))
        disk.put(log_name(1), whole[:-7])
        events: list[object] = []
        engine, journal = open_data(disk, emit=Emitter(events.append))
        assert snapshot(engine) == states[-2]
        (cut,) = [event for event in events if isinstance(event, LogCut)]
        assert str(cut) == (
            f"server: cut off the last {cut.bytes} bytes of there/{log_name(1)}: they were being written when the "
            f"server died"
        )
        assert disk.read(log_name(1)) == whole[: len(whole) - 7 - cut.bytes]
        await journal.close()
        assert outcome(disk) == states[-2]

    run(main())


# --- power failure ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(150))
def test_acknowledged_changes_survive_a_power_failure_at_any_moment(seed):
    """Operations one by one or in groups, with snapshots in between, and a power failure at a random moment."""

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
