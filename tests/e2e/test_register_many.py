"""Thirty-two real processes that share nothing but one file: they form, lose and re-form rounds.

What the file held at every revision is recorded by one more reader, and the guarantees are checked on that and on what
the nodes said, with the checkers that the simulator uses.
"""

import asyncio
import threading
from pathlib import Path

from rallypoint.backends.register.backend import RegisterBackend
from rallypoint.backends.register.cell import BlockingCell
from rallypoint.backends.register.file_cell import FileCell, path_of
from rallypoint.kv.types import Batch
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Joined
from rallypoint.rendezvous.records import RoundPhase
from rallypoint.testing.checkers import Safety
from tests.e2e.kit import Node, Stage

NODES = 32
LEAST = 20
PATIENCE_S = 240.0
OPTIONS = (
    f"min_nodes={LEAST}&max_nodes={NODES}&local_addr=127.0.0.1&keep_alive_interval=4&heartbeat_timeout=10"
    "&last_call_timeout=120&confirm_timeout=60&join_timeout=600&admission_window=1"
)


class Recorder:
    """Every revision of a file, from the first on. Reads in a thread until it is stopped."""

    def __init__(self, path: Path) -> None:
        self.batches: list[Batch] = []
        self.error: BaseException | None = None
        self._path = path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder")
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._record())
        except BaseException as error:
            self.error = error

    async def _record(self) -> None:
        backend = RegisterBackend.on(BlockingCell(FileCell(self._path)))
        watch = backend.watch("", (await backend.scan("/")).revision)
        reading = asyncio.create_task(self._read(watch))
        await asyncio.get_running_loop().run_in_executor(None, self._over.wait)
        await backend.close()
        await reading

    async def _read(self, watch) -> None:
        async for batch in watch:
            self.batches.append(batch)

    def stop(self) -> list[Batch]:
        self._over.set()
        self._thread.join(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return self.batches


def check_guarantees(batches: list[Batch], nodes: list[Node]) -> int:
    """Every safety guarantee; how many rounds became active."""
    safety = Safety(RunKeys("rallypoint", "crowd"), LEAST, NODES)
    returns: dict[int, list[tuple[str, Joined]]] = {}
    for node in nodes:
        for fact in node.all("round"):
            place = Joined(fact["round"], fact["rank"], fact["size"], "", 0, 0, 0)
            returns.setdefault(fact["round"], []).append((node.name, place))
    active = 0
    for batch in batches:
        safety.committed(batch.revision, batch.changes)
        now = safety.picture.round
        if now is None or now.phase is not RoundPhase.ACTIVE or now.number not in returns:
            continue
        ids = {record.name: record.id for record in safety.picture.nodes.values()}
        for name, place in returns.pop(now.number):
            safety.returned(name, ids[name], place)
        active += 1
    assert not returns, f"rounds that were never active were returned from: {sorted(returns)}"
    return active


def in_one_round(nodes: list[Node], above: int, size: int) -> int:
    """Wait until all of them are in a round of that size; its number."""
    facts = [node.round(above, size, PATIENCE_S) for node in nodes]
    assert len({fact["round"] for fact in facts}) == 1, sorted({fact["round"] for fact in facts})
    assert sorted(fact["rank"] for fact in facts) == list(range(size))
    assert len({tuple(fact["members"]) for fact in facts}) == 1
    return int(facts[0]["round"])


def test_thirty_two_processes_over_one_file_form_lose_and_re_form(stage: Stage, tmp_path):
    recorder = Recorder(path_of(str(tmp_path), "crowd"))
    try:
        url = f"file://{tmp_path}/crowd?{OPTIONS}"
        nodes = stage.nodes(url, *(f"n{number:02d}" for number in range(NODES)))
        first = in_one_round(nodes, 0, NODES)
        coordinator = next(node for node in nodes if node.events("CoordinatorElected"))
        victims = [coordinator, *[node for node in nodes if node is not coordinator][:3]]
        for victim in victims:
            victim.kill()
        left = [node for node in nodes if node not in victims]
        second = in_one_round(left, first, NODES - 4)
        more = stage.nodes(url, "late0", "late1")
        third = in_one_round([*left, *more], second, NODES - 2)
        assert first < second < third
    finally:
        batches = recorder.stop()
    assert check_guarantees(batches, stage.processes) >= 3  # those who come late may come in one by one
