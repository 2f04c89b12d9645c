"""The compare-and-set contract on every shipped cell, and what each cell does with damaged or foreign content."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rallypoint.backends.register.file_cell import FileCell
from rallypoint.backends.register.store_cell import NOTHING, StoreCell
from rallypoint.errors import RendezvousConnectionError, RendezvousStateError
from rallypoint.testing.cells import MemoryCell
from rallypoint.testing.conformance.cell import CELL_CHECKS, CellKit, run_cell_checks
from rallypoint.testing.conformance.kit import NotConforming
from tests.register.stores import STORES, store_maker


@pytest.mark.parametrize("check", CELL_CHECKS)
def test_memory_cell_conforms(check):
    cell = MemoryCell()
    check(CellKit(lambda: cell))


@pytest.mark.parametrize("check", CELL_CHECKS)
def test_file_cell_conforms(check, tmp_path):
    check(CellKit(lambda: FileCell(tmp_path / "cell")))
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("check", CELL_CHECKS)
def test_cell_in_a_torch_store_conforms(check, kind, tmp_path):
    with store_maker(kind, tmp_path) as make:
        check(CellKit(lambda: StoreCell(make(), "run")))


@pytest.mark.parametrize("kind", STORES)
def test_backend_of_torch_itself_passes_the_suite(kind, tmp_path):
    """The suite requires nothing that torch's own cell does not do."""
    pytest.importorskip("torch")
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

    with store_maker(kind, tmp_path) as make:
        report = run_cell_checks(lambda number: CellKit(lambda: C10dRendezvousBackend(make(), f"run{number}")))
    assert report.conforming, str(report)


# --- the suite can fail -----------------------------------------------------------------------------------------------


class Careless(MemoryCell):
    """Ignores the token."""

    def set_state(self, state, token=None):
        return super().set_state(state, self._version if self._state is not None else None)


class Forgetful(MemoryCell):
    """Sometimes returns old content."""

    def get_state(self):
        found = super().get_state()
        return (b"old", found[1]) if found is not None and self.reads % 3 == 0 else found


class Liar(MemoryCell):
    """Claims that refused writes were executed."""

    def set_state(self, state, token=None):
        answer = super().set_state(state, token)
        return None if answer is None else (*answer[:2], True)


@pytest.mark.parametrize("kind", [Careless, Forgetful, Liar])
def test_cell_that_breaks_its_promises_is_noticed(kind):
    def make(number):
        cell = kind()
        return CellKit(lambda: cell)

    report = run_cell_checks(make)
    assert report.failed
    assert all(isinstance(error, NotConforming) for error in report.failed.values()), str(report)


# --- files ------------------------------------------------------------------------------------------------------------


def damaged(content: bytes):
    """The content with one thing wrong."""
    yield "empty", b""
    yield "cut off", content[:-1]
    yield "cut in its head", content[:10]
    yield "longer", content + b"x"
    yield "one bit", content[:-1] + bytes([content[-1] ^ 1])
    yield "one bit of its head", content[:20] + bytes([content[20] ^ 1]) + content[21:]
    yield "newer", content.replace(b"rallypoint cell 1", b"rallypoint cell 2", 1)
    yield "something else", b"#!/bin/sh\necho hello\n"


def test_damaged_file_is_never_half_read_and_never_overwritten(tmp_path):
    cell = FileCell(tmp_path / "cell")
    _, token, _ = cell.set_state(b"content", None)
    whole = cell.path.read_bytes()
    for what, content in damaged(whole):
        cell.path.write_bytes(content)
        for call in (cell.get_state, lambda: cell.set_state(b"new", token), lambda: cell.set_state(b"new", None)):
            with pytest.raises(RendezvousStateError) as caught:
                call()
            assert str(cell.path) in str(caught.value), what
            assert "remove it" in str(caught.value), what
        assert cell.path.read_bytes() == content, what
    cell.path.write_bytes(whole)
    assert cell.get_state() == (b"content", token)


def test_missing_directory_is_an_error_that_names_it(tmp_path):
    cell = FileCell(tmp_path / "no" / "cell")
    for call in (cell.get_state, lambda: cell.set_state(b"x", None)):
        with pytest.raises(FileNotFoundError) as caught:
            call()
        assert str(tmp_path / "no") in str(caught.value)
        assert "mounted" in str(caught.value)


def test_token_of_a_file_that_was_removed_writes_nothing(tmp_path):
    cell = FileCell(tmp_path / "cell")
    _, token, _ = cell.set_state(b"1", None)
    cell.path.unlink()
    assert cell.set_state(b"2", token) is None
    assert cell.get_state() is None


def hold_lock(path, ready):
    cell = FileCell(path)
    with cell._locked():
        ready.set()
        signal.pause()


def test_lock_held_by_another_process_is_an_error_that_names_the_process(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=hold_lock, args=(tmp_path / "cell", ready))
    holder.start()
    try:
        assert ready.wait(60)
        with pytest.raises(TimeoutError) as caught:
            FileCell(tmp_path / "cell", lock_timeout_s=0.2).set_state(b"x", None)
        assert str(holder.pid) in str(caught.value)
        assert FileCell(tmp_path / "cell").get_state() is None
    finally:
        holder.kill()
        holder.join(60)
    assert FileCell(tmp_path / "cell").set_state(b"x", None)[2]


WRITER = """
import sys, time
from rallypoint.backends.register.file_cell import FileCell
cell = FileCell(sys.argv[1])
print("ready", flush=True)
n = 0
while True:
    found = cell.get_state()
    cell.set_state(b"%d" % n * 2000, found[1] if found else None)
    n += 1
"""


def test_file_cell_survives_writers_that_are_killed_at_any_moment(tmp_path):
    path = tmp_path / "cell"
    cell = FileCell(path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for attempt in range(12):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, env=env)
            for _ in range(2)
        ]
        try:
            for writer in writers:
                assert writer.stdout.readline() == b"ready\n"
            before = cell.get_state()
            deadline = time.monotonic() + 30
            while cell.get_state() == before:
                assert time.monotonic() < deadline
            time.sleep(0.001 * attempt)  # a different moment each time
        finally:
            for writer in writers:
                writer.kill()
            for writer in writers:
                writer.wait(30)
                writer.stdout.close()
        state, token = cell.get_state()
        assert len(set(state)) <= 10
        assert cell.set_state(b"mine", token)[2]
    left = {one.name for one in tmp_path.iterdir()} - {"cell", "cell.lock"}
    assert len(left) <= 2, left  # at most those of the last two writers: earlier ones were removed


# --- stores -----------------------------------------------------------------------------------------------------------


class FakeStore(dict):
    """The two methods of a store that are used."""

    def get(self, key):
        return self[key].encode()

    def compare_set(self, key, expected, desired):
        if self.setdefault(key, desired if not expected else NOTHING) == expected:
            self[key] = desired
        return self[key].encode()


def test_foreign_content_of_the_key_is_an_error_and_is_not_changed():
    store = FakeStore({"rallypoint.register.run": "somebody else's"})
    cell = StoreCell(store, "run")
    for call in (cell.get_state, lambda: cell.set_state(b"new", None)):
        with pytest.raises(RendezvousStateError, match="another run id"):
            call()
    assert store["rallypoint.register.run"] == "somebody else's"


def test_store_that_cannot_be_reached_is_a_connection_error():
    class Gone(FakeStore):
        def get(self, key):
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(RendezvousConnectionError, match="Connection reset by peer"):
        StoreCell(Gone(), "run").get_state()


def test_store_cell_needs_a_run_id():
    with pytest.raises(ValueError, match="run id"):
        StoreCell(FakeStore(), "")


def test_path_of_a_run_is_one_name_in_its_directory():
    from rallypoint.backends.register.file_cell import path_of

    assert path_of("/mnt/x", "my/run 1") == Path("/mnt/x/my%2Frun%201.rallypoint")
