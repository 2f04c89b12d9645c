"""A server with data over real connections: it acknowledges only durable changes, and keeps what it acknowledged."""

import asyncio
import errno
import threading
from pathlib import Path

import pytest

from rallypoint.errors import DataError, HistoryGone, OutcomeUnknown, Unavailable
from rallypoint.events import DataGoesOn, DataLoaded, DataTrouble, Emitter, SnapshotTaken
from rallypoint.kv.snapshot import snapshot
from rallypoint.kv.types import Add, Grant
from rallypoint.server.durability.data import open_data
from rallypoint.server.durability.disk import Directory
from rallypoint.server.durability.journal import Bounds, Sync
from rallypoint.testing.disk import FaultyDisk, MemoryDisk
from tests.ports import free_port
from tests.server.durability.kit import kill, make, serving_from
from tests.server.kit import PATIENCE_S, client_of, eventually, put, run, take


def gated() -> tuple[FaultyDisk, threading.Event]:
    """A disk, and a gate: syncs of logs block while it is closed."""
    gate = threading.Event()
    gate.set()

    def before(call: str, name: str) -> None:
        if call == "sync" and name.startswith("log-"):
            assert gate.wait(PATIENCE_S)

    return FaultyDisk(MemoryDisk(), before), gate


# --- only durable state leaves the server -----------------------------------------------------------------------------


def test_answer_is_sent_when_the_change_is_durable():
    async def main():
        disk, gate = gated()
        async with serving_from(disk) as server, client_of(server.addresses[0]) as client:
            await put(client, "a", b"1")
            gate.clear()
            writing = asyncio.create_task(put(client, "a", b"2"))
            await eventually(lambda: server.engine_host.engine.items["a"].value == b"2", "it is executed")
            await eventually(lambda: disk.calls[-1].startswith("sync log-"), "it is being written")
            await asyncio.sleep(0.05)
            assert not writing.done()
            gate.set()
            await writing

    run(main())


def test_change_that_is_not_durable_is_not_visible_to_any_client():
    async def main():
        disk, gate = gated()
        async with (
            serving_from(disk) as server,
            client_of(server.addresses[0]) as writer,
            client_of(server.addresses[0]) as reader,
        ):
            before = await put(writer, "a", b"1")
            watch = reader.watch("a", before)
            pushed = asyncio.create_task(anext(watch))
            await reader.get("a")
            gate.clear()
            writing = asyncio.create_task(put(writer, "a", b"2"))
            await eventually(lambda: server.engine_host.engine.items["a"].value == b"2", "it is executed")
            reading = asyncio.create_task(reader.get("a"))
            late_watch = writer.watch("a", before)
            pushed_late = asyncio.create_task(anext(late_watch))
            await asyncio.sleep(0.1)
            assert [task.done() for task in (writing, reading, pushed, pushed_late)] == [False] * 4
            gate.set()
            assert (await reading).item.value == b"2"
            assert (await pushed).revision == (await pushed_late).revision == await writing

    run(main())


def test_expiry_of_a_lease_is_pushed_when_it_is_durable():
    async def main():
        disk, gate = gated()
        async with serving_from(disk) as server, client_of(server.addresses[0]) as client:
            lease = await client.grant(0.3)
            revision = await put(client, "a", lease=lease)
            watch = client.watch("a", revision)
            pushed = asyncio.create_task(anext(watch))
            gate.clear()
            await eventually(lambda: "a" not in server.engine_host.engine.items, "the lease ends")
            await asyncio.sleep(0.05)
            assert not pushed.done()
            gate.set()
            assert (await pushed).changes[0].item is None

    run(main())


def test_requests_that_arrive_during_a_commit_share_the_next_one():
    async def main():
        disk, gate = gated()
        async with serving_from(disk) as server, client_of(server.addresses[0]) as client:
            await put(client, "a")
            gate.clear()
            first = asyncio.create_task(put(client, "b"))
            await eventually(lambda: "b" in server.engine_host.engine.items, "the first is executed")
            await eventually(lambda: disk.calls[-1].startswith("sync log-"), "the first is being written")
            rest = [asyncio.create_task(put(client, f"c{number}")) for number in range(50)]
            await eventually(lambda: len(server.engine_host.engine.items) == 52, "the others are executed")
            commits = server.journal.commits
            gate.set()
            await asyncio.gather(first, *rest)
            assert server.journal.commits == commits + 2

    run(main())


# --- acknowledged changes survive -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", Sync)
def test_acknowledged_changes_survive_a_kill(tmp_path, sync):
    async def main():
        port, events = free_port(), []
        async with serving_from(Directory(tmp_path / "d"), port, sync=sync) as server:
            async with client_of(server.addresses[0]) as client:
                await put(client, "a", b"1")
                assert (await client.add("n", 5)).value == 5
                lease = await client.grant(60)
                await put(client, "b", b"x", lease)
            generation, before = server.generation, snapshot(server.engine_host.engine)
            await kill(server)
        async with serving_from(Directory(tmp_path / "d"), port, sync=sync, events=events) as server:
            assert server.generation == generation
            assert snapshot(server.engine_host.engine) == before
            async with client_of(server.addresses[0]) as client:
                assert (await client.get("a")).item.value == b"1"
                assert (await client.add("n", 5)).value == 10
                assert await client.keep_alive(lease)
        loaded = next(event for event in events if isinstance(event, DataLoaded))
        assert (loaded.keys, loaded.leases) == (3, 1)

    run(main())


def test_sessions_watches_and_unanswered_requests_survive_a_kill():
    async def main():
        disk, port = MemoryDisk(), free_port()
        async with serving_from(disk, port) as server:
            client_options = {"stall_s": 1.0}
            async with client_of(server.addresses[0], **client_options) as client:
                session = await client.open_session(3.0)
                revision = await put(client, "a", lease=session.lease)
                watch = client.watch("a", revision)
                waiting = asyncio.create_task(anext(watch))
                await client.add("n", 1)
                await kill(server)
                adding = asyncio.create_task(client.add("n", 1))
                async with serving_from(disk, port):
                    assert (await adding).value == 2
                    later = await put(client, "a", b"2", session.lease)
                    assert (await waiting).revision == later
                    assert not session.lost.is_set()
                await session.close()

    run(main())


def test_durable_request_without_an_answer_is_not_executed_again_after_a_kill():
    async def main():
        disk, port = MemoryDisk(), free_port()
        async with serving_from(disk, port) as server, client_of(server.addresses[0], stall_s=1.0) as client:
            await client.add("n", 1)
            server.journal.when_durable = lambda callback: None  # every answer is lost from here on
            adding = asyncio.create_task(client.add("n", 1))
            await eventually(lambda: server.engine_host.engine.items["n"].value == b"2", "it is executed")
            await eventually(lambda: server.journal.is_settled, "it is durable")
            await kill(server)
            async with serving_from(disk, port) as server:
                assert (await adding).value == 2
                assert server.engine_host.engine.items["n"].value == b"2"

    run(main())


def test_lease_has_its_full_time_after_a_restart():
    async def main():
        disk = MemoryDisk()
        server = make(disk)
        server.engine_host.execute(Grant(2.0, 7))
        await server.journal.wait_durable()
        await asyncio.sleep(1.0)
        await kill(server)
        server = make(disk)
        left_s = server.engine_host.engine.leases.get(7).deadline - asyncio.get_running_loop().time()
        await kill(server)
        assert 1.5 < left_s <= 2.0

    run(main())


def test_watch_from_a_compacted_revision_must_scan_again_after_a_restart():
    async def main():
        disk, port = MemoryDisk(), free_port()
        async with serving_from(disk, port, history=5) as server:
            async with client_of(server.addresses[0]) as client:
                first = await put(client, "a")
                for _ in range(20):
                    last = await put(client, "a")
            await kill(server)
        async with serving_from(disk, port, history=5) as server, client_of(server.addresses[0]) as client:
            with pytest.raises(HistoryGone):
                await take(client.watch("a", first), 1)
            assert await take(client.watch("a", last - 3), 3) == [last - 2, last - 1, last]

    run(main())


def test_wiped_directory_is_a_new_generation_with_higher_revisions():
    async def main():
        disk = MemoryDisk()
        server = make(disk)
        generation = server.generation
        await kill(server)
        server = make(MemoryDisk())
        assert server.generation != generation
        await kill(server)

    run(main())


# --- snapshots --------------------------------------------------------------------------------------------------------


def test_log_stays_bounded_and_snapshots_replace_older_files():
    async def main():
        disk, events = MemoryDisk(), []
        bounds = Bounds(log_entries=50, log_bytes=1 << 30)
        async with serving_from(disk, bounds=bounds, events=events) as server:
            async with client_of(server.addresses[0]) as client:
                for number in range(500):
                    await put(client, f"k{number % 7}", b"v" * 100)
            await eventually(lambda: server.journal._snapshotting is None, "the last snapshot is written")
            assert server.journal.snapshots >= 5
            assert len(disk.names()) == 2
            before = snapshot(server.engine_host.engine)
            await kill(server)
        assert sum(isinstance(event, SnapshotTaken) for event in events) >= 5
        server = make(disk)
        assert snapshot(server.engine_host.engine) == before
        await kill(server)

    run(main())


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "sync_names"])
def test_failed_snapshot_loses_nothing_and_is_retried(call):
    async def main():
        disk, events = FaultyDisk(MemoryDisk()), []
        bounds = Bounds(log_entries=20, log_bytes=1 << 30, retry_s=0.05, pause_s=0.05)
        async with serving_from(disk, bounds=bounds, events=events) as server:
            async with client_of(server.addresses[0]) as client:
                disk.fail(call, errno.ENOSPC, times=2, name="snapshot-" if call != "sync_names" else "")
                for _ in range(100):
                    await client.add("n", 1)
                await eventually(lambda: any(isinstance(event, DataTrouble) for event in events), "it is reported")
                while server.journal.snapshots == 0:
                    await client.add("m", 1)
                assert (await client.add("n", 0)).value == 100
            before = snapshot(server.engine_host.engine)
            await kill(server)
        server = make(disk)
        assert snapshot(server.engine_host.engine) == before
        await kill(server)

    run(main())


# --- a disk that fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_server_with_a_failing_disk_refuses_requests_and_recovers_by_itself(call, error):
    async def main():
        disk, events = FaultyDisk(MemoryDisk()), []
        async with serving_from(disk, events=events) as server, client_of(server.addresses[0]) as client:
            session = await client.open_session(5.0)
            assert (await client.add("n", 1)).value == 1
            disk.fail(call, error)
            disk.fail("create", error)
            hanging = asyncio.create_task(client.add("n", 1))  # executed before the disk failed
            await eventually(lambda: server.journal.is_failing, "the failure is noticed")
            with pytest.raises(Unavailable, match="cannot write its data"):
                await client.add("n", 1)
            with pytest.raises(Unavailable, match="cannot write its data"):
                await client.get("n")
            assert await client.keep_alive(session.lease)
            await asyncio.sleep(0.2)
            assert not hanging.done()
            async with client_of(server.addresses[0]) as late:
                with pytest.raises(Unavailable, match="cannot write its data"):
                    await late.get("n")
            client._link.abort("it is cut")  # its request is resent, and must not be refused as not executed
            assert await client.keep_alive(session.lease)
            await asyncio.sleep(0.2)
            assert not hanging.done()
            disk.heal()
            assert (await hanging).value == 2
            assert (await client.add("n", 1)).value == 3
            assert not session.lost.is_set()
            assert [type(event) for event in events if isinstance(event, DataTrouble | DataGoesOn)][-1] is DataGoesOn
            assert any("Nothing is acknowledged" in str(event) for event in events if isinstance(event, DataTrouble))
            before = snapshot(server.engine_host.engine)
            await kill(server)
            server = make(disk)
            assert snapshot(server.engine_host.engine) == before
            await kill(server)

    run(main())


def test_new_node_is_told_why_it_gets_no_session_while_the_disk_fails():
    async def main():
        disk = FaultyDisk(MemoryDisk())
        async with serving_from(disk) as server, client_of(server.addresses[0], run="run") as one:
            await put(one, "a", b"1")
            disk.fail("write", errno.ENOSPC)
            disk.fail("create", errno.ENOSPC)
            writing = asyncio.create_task(put(one, "a", b"2"))
            await eventually(lambda: server.journal.is_failing, "the disk is full")
            async with client_of(server.addresses[0], run="run") as fresh:
                with pytest.raises(Unavailable, match="cannot write its data"):
                    await fresh.open_session(5.0)
                assert fresh._link is not None
            assert not sum(server.admission.refusals.counts.values())
            disk.heal()
            await writing

    run(main())


def test_file_is_never_written_again_after_a_failed_sync():
    async def main():
        disk = FaultyDisk(MemoryDisk())
        async with serving_from(disk) as server, client_of(server.addresses[0]) as client:
            await put(client, "a")
            disk.fail("sync", errno.EIO, times=1, name="log-000000000001")
            disk.calls.clear()
            await put(client, "b")
            await put(client, "c")
            failed = disk.calls.index("sync log-000000000001.tmp")  # the name at its creation
            later = [call for call in disk.calls[failed + 1 :] if "log-000000000001" in call]
            assert [call for call in later if not call.startswith("remove")] == []

    run(main())


def test_leases_do_not_expire_while_the_disk_fails_and_are_renewed_afterwards():
    async def main():
        disk = FaultyDisk(MemoryDisk())
        async with serving_from(disk) as server, client_of(server.addresses[0]) as client:
            lease = await client.grant(0.4)
            await put(client, "a", lease=lease)
            disk.fail("sync")
            hanging = asyncio.create_task(put(client, "b"))
            await eventually(lambda: server.journal.is_failing, "the failure is noticed")
            await asyncio.sleep(1.0)
            assert server.engine_host.engine.leases.get(lease) is not None
            disk.heal()
            await hanging
            assert (await client.get("a")).item is not None
            await eventually(lambda: "a" not in server.engine_host.engine.items, "it ends by time again")

    run(main())


def test_disk_that_hangs_counts_as_failing_until_it_answers():
    async def main():
        disk, gate = gated()
        events = []
        slow = Bounds(stall_s=0.2)
        async with serving_from(disk, bounds=slow, events=events) as server, client_of(server.addresses[0]) as client:
            gate.clear()
            hanging = asyncio.create_task(put(client, "a"))
            await eventually(lambda: server.journal.is_failing, "it is noticed")
            with pytest.raises(Unavailable, match="has not answered for"):
                await put(client, "b")
            gate.set()
            await hanging
            await put(client, "b")
            assert isinstance(events[-1], DataGoesOn)

    run(main())


def test_disk_that_hangs_while_a_log_is_started_counts_as_failing_until_it_answers():
    gate = threading.Event()

    def before(call: str, name: str) -> None:
        if call == "create" and name.startswith("log-000000000002"):
            assert gate.wait(PATIENCE_S)

    async def main():
        bounds = Bounds(stall_s=0.2, log_entries=3)
        disk = FaultyDisk(MemoryDisk(), before)
        async with serving_from(disk, bounds=bounds) as server, client_of(server.addresses[0]) as client:
            for _ in range(4):
                await put(client, "a")
            await eventually(lambda: server.journal.is_failing, "it is noticed")
            with pytest.raises(Unavailable, match="has not answered for"):
                await put(client, "b")
            gate.set()
            await eventually(lambda: not server.journal.is_failing, "it is back")
            await put(client, "b")

    run(main())


def test_server_that_stops_while_its_disk_fails_ends_in_time_and_reports_the_loss(monkeypatch):
    monkeypatch.setattr("rallypoint.server.durability.journal.CLOSE_WITHIN_S", 0.3)

    async def main():
        disk, events = FaultyDisk(MemoryDisk()), []
        async with serving_from(disk, events=events) as server, client_of(server.addresses[0], stall_s=1.0) as client:
            disk.fail("write")
            hanging = asyncio.create_task(put(client, "a"))
            await eventually(lambda: server.journal.is_failing, "the failure is noticed")
            await server.stop()
            server.addresses = ()
            assert "1 unacknowledged changes are lost" in str(events[-2]) + str(events[-1])
            hanging.cancel()
            with pytest.raises((asyncio.CancelledError, OutcomeUnknown)):
                await hanging

    run(main())


# --- directories ------------------------------------------------------------------------------------------------------


def refusal_of(disk) -> str:
    async def main():
        with pytest.raises(DataError) as caught:
            open_data(disk, emit=Emitter())
        return str(caught.value)

    return run(main())


def test_directory_of_a_running_server_is_refused(tmp_path):
    async def main():
        server = make(Directory(tmp_path))
        with pytest.raises(DataError, match=r"is used by a server that runs \(process \d+\)"):
            make(Directory(tmp_path))
        await kill(server)
        await kill(make(Directory(tmp_path)))

    run(main())


def test_file_instead_of_the_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "is not a directory" in refusal_of(Directory(tmp_path / "file"))
    assert "is not a directory" in refusal_of(Directory(tmp_path / "file" / "below"))


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "sync_names"])
def test_disk_that_cannot_be_written_at_the_start_is_refused(call):
    disk = FaultyDisk(MemoryDisk("there"))
    disk.fail(call, errno.ENOSPC)
    assert refusal_of(disk) == "there cannot be used: No space left on device"


def test_directory_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    disk = Directory(tmp_path)
    monkeypatch.setattr(disk, "names", lambda: Path("/nowhere/at/all").read_bytes())
    assert "cannot be used: No such file or directory" in refusal_of(disk)


def test_request_of_a_coordinator_returns_when_its_effect_is_durable():
    async def main():
        disk, gate = gated()
        async with serving_from(disk) as server:
            local = server.runs._backend
            gate.clear()
            adding = asyncio.create_task(local.execute(Add("n", 1)))
            await asyncio.sleep(0.05)
            assert server.engine_host.engine.items["n"].value == b"1"
            assert not adding.done()
            gate.set()
            await adding

    run(main())
