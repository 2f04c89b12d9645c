"""The disks for tests: what they may lose, and injected faults."""

import errno
import random

import pytest

from rallypoint.errors import DataError
from rallypoint.testing.disk import FaultyDisk, MemoryDisk


def written(disk, name: str, *pieces: bytes, sync: bool = False):
    file = disk.create(name)
    for piece in pieces:
        file.write(piece)
    if sync:
        file.sync()
    return file


def test_renamed_file_has_its_content_under_the_new_name():
    disk = MemoryDisk()
    written(disk, "a", b"one ", b"two")
    disk.rename("a", "b")
    assert (disk.names(), disk.read("b")) == (["b"], b"one two")
    disk.remove("b")
    disk.remove("b")
    assert disk.names() == []
    with pytest.raises(FileNotFoundError):
        disk.read("b")


def test_disk_can_be_locked_by_one_user_at_a_time():
    disk = MemoryDisk()
    disk.lock()
    with pytest.raises(DataError, match="is used by a server that runs"):
        disk.lock()
    disk.close()
    disk.lock()


def test_everything_written_is_there_after_a_kill_and_the_killed_process_cannot_change_it():
    disk = MemoryDisk()
    file = written(disk, "a", b"one")
    after = disk.after_kill()
    file.write(b" more")
    disk.remove("a")
    assert after.read("a") == b"one"
    after.lock()


def test_power_loss_keeps_synced_data_and_sometimes_loses_the_rest():
    lost = names_lost = holes = 0
    for seed in range(300):
        disk = MemoryDisk()
        file = written(disk, "a", b"synced", sync=True)
        disk.sync_names()
        file.write(b"x" * 3000)
        written(disk, "new", b"data", sync=True)
        after = disk.after_power_loss(random.Random(seed))
        data = after.read("a")
        assert data.startswith(b"synced")
        lost += len(data) < 3006
        holes += b"\0" in data
        names_lost += "new" not in after.names()
    assert lost > 100
    assert holes > 10
    assert 50 < names_lost < 250


def test_chosen_calls_fail_the_given_number_of_times():
    disk = FaultyDisk(MemoryDisk())
    disk.fail("sync", errno.ENOSPC, times=1, after=1, name="log")
    file, other = disk.create("log"), disk.create("other")
    file.sync()
    other.sync()
    with pytest.raises(OSError, match="No space left"):
        file.sync()
    file.sync()
    assert disk.calls == ["create log", "create other", "sync log", "sync other", "sync log", "sync log"]


def test_write_that_fails_has_written_a_part_until_the_disk_is_healed():
    disk = FaultyDisk(MemoryDisk())
    disk.fail("write")
    file = disk.create("a")
    with pytest.raises(OSError, match="Input/output error"):
        file.write(b"12345678")
    assert disk.read("a") == b"1234"
    disk.heal()
    file.write(b"5678")
    assert disk.read("a") == b"12345678"
