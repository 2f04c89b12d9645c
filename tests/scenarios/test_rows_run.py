"""Rows about `rallypoint run` whose workers communicate, and about what is known of an incident afterwards."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.backends.etcd.kit import EtcdCluster, needs
from tests.e2e.browser import Looking, chromium, why_no_browser
from tests.e2e.kit import HERE, PORT, Fact, Machine, Stage, _tether, loopback
from tests.e2e.launching import Launcher, Run
from tests.e2e.operating import ask, ask_json, until_said
from tests.scenarios.places import Place
from tests.scenarios.record import Recorder
from tests.scenarios.test_rows_members import last, one_round, told

pytestmark = pytest.mark.scenarios

RING = str(HERE / "ring_worker.py")
START_S = 1.0
"""The promised time from the notice of a loss to the first line of the new round's workers."""


class RingJob:
    """A run of three launchers with one worker each, which communicate in a ring. `launchers`: by rank."""

    def __init__(self, stage: Stage, place: Place, folder: Path, nnodes: str, restarts: int, ttl_s: float) -> None:
        _, _, endpoint = place.root.partition("://")
        flags = ["--rdzv-backend", place.backend, "--max-restarts", str(restarts)]
        conf = f"keep_alive_interval={ttl_s / 3:g},keep_alive_max_attempt=3"
        self.run = Run(stage, endpoint, folder, nnodes, *flags, conf=conf)
        self.url = f"{place.root}/{self.run.id}"
        self.number = 0
        self.launchers: list[Launcher] = []

    def start(self, *names: str, quiet_limit: str = "", machines: Sequence[Machine] = ()) -> None:
        """Start launchers; `quiet_limit`: their workers fail when a peer has been silent for so many seconds."""
        words = (quiet_limit,) if quiet_limit else ()
        places = machines or [None] * len(names)
        self.launchers += [
            self.run.start(name, words=words, program=RING, machine=machine)
            for name, machine in zip(names, places, strict=True)
        ]
        self.wait_round()

    def wait_round(self) -> list[Fact]:
        """The workers of the next round, which has all launchers."""
        size = len(self.launchers)
        workers = [one.workers(size, above=self.number)[0] for one in self.launchers]
        (self.number,) = {worker["RALLYPOINT_ROUND"] for worker in workers}
        by_rank = sorted(zip(workers, self.launchers, strict=True), key=lambda pair: int(pair[0]["rank"]))
        self.launchers = [launcher for _, launcher in by_rank]
        return [worker for worker, _ in by_rank]

    def goes_on(self) -> float:
        """When the first worker of the next round said something. No launcher has counted a restart."""
        workers = self.wait_round()
        assert {worker["TORCHELASTIC_RESTART_COUNT"] for worker in workers} == {0}
        return min(worker["at"] for worker in workers)

    def finish(self) -> None:
        """Let the workers finish: every launcher exits with 0."""
        self.run.finish(*self.launchers)
        assert not [line for one in self.launchers for line in one.errors if "root cause" in line]


def test_row_29_launchers_of_a_job_that_communicates_are_killed(
    row: Recorder, stage: Stage, place: Place, tmp_path: Path
):
    job = RingJob(stage, place, tmp_path, "1:3", restarts=0, ttl_s=place.ttl_s)
    job.start("a", "b", "c")
    for rank in (1, 0, 2):
        victim = job.launchers.pop(rank)
        killed_at = victim.kill()
        row(
            f"kill -9 of the launcher of rank {rank} until the first line of the new round's workers",
            job.goes_on() - killed_at,
            place.loss_s + START_S,
        )
        for one in job.launchers:
            assert one.wait_line(f": {victim.name} (", "is taken for its echo, and no restart is counted")
        job.start(f"{victim.name}{rank}")
    job.finish()
    row("no restart was counted, with --max-restarts 0: three launchers finished with exit code 0")


def test_row_29_launcher_of_a_job_that_communicates_is_frozen(
    row: Recorder, stage: Stage, place: Place, tmp_path: Path
):
    ttl_s, quiet_s = 3.0, 1.0
    job = RingJob(stage, place, tmp_path, "1:3", restarts=0, ttl_s=ttl_s)
    job.start("a", "b", "c", quiet_limit=f"{quiet_s:g}")
    victim = job.launchers.pop(1)
    frozen_at = time.monotonic()
    victim.freeze_all()
    row(
        f"SIGSTOP of a launcher and its worker, with a time to live of {ttl_s:g} s; the peers' workers failed after "
        f"{quiet_s:g} s: until the first line of the new round's workers",
        job.goes_on() - frozen_at,
        ttl_s + 1 + START_S,
    )
    for one in job.launchers:
        assert one.wait_line(f": {victim.name} (", "is taken for its echo, and no restart is counted")
    _comes_back(row, job, victim, victim.thaw_all, "SIGCONT")

    victim = job.launchers.pop(1)
    stopped_at = victim.stop()
    row(
        "SIGSTOP of a launcher alone, whose worker went on: until the first line of the new round's workers",
        job.goes_on() - stopped_at,
        ttl_s + 1 + START_S,
    )
    _comes_back(row, job, victim, victim.go_on, "SIGCONT")
    job.finish()
    row("no restart was counted, with --max-restarts 0: three launchers finished with exit code 0")


def _comes_back(row: Recorder, job: RingJob, victim: Launcher, go_on: Callable[[], object], what: str) -> None:
    going_at = time.monotonic()
    go_on()
    job.launchers.append(victim)
    row(f"{what} until the first line of a worker in a round of three again", job.goes_on() - going_at)


@pytest.mark.parametrize("backend", ["tcp", "etcd"])
def test_row_29_machine_of_a_job_that_communicates_is_cut_off(
    row: Recorder, network: Stage, backend: str, tmp_path: Path
):
    """Neither side sees the end of a connection."""
    ttl_s, quiet_s = 3.0, 1.0
    home, *machines = network.machines(4)
    with served(network, home, backend, tmp_path / "data") as endpoint:
        place = Place(backend, f"{backend}://{endpoint}", ttl_s, is_told_of_deaths=False)
        (tmp_path / "job").mkdir()
        job = RingJob(network, place, tmp_path / "job", "1:3", restarts=0, ttl_s=ttl_s)
        job.start("a", "b", "c", quiet_limit=f"{quiet_s:g}", machines=machines)
        victim = job.launchers.pop(1)
        plug = f"to{2 + 'abc'.index(victim.name)}"
        home.ip("link", "set", plug, "down")
        cut_at = time.monotonic()
        row(
            f"the cable of a machine was pulled, with a time to live of {ttl_s:g} s; all workers failed after "
            f"{quiet_s:g} s: until the first line of the new round's workers",
            job.goes_on() - cut_at,
            place.loss_s + START_S,
        )
        _comes_back(row, job, victim, lambda: home.ip("link", "set", plug, "up"), "the cable was back")
        job.finish()
    row("no restart was counted, with --max-restarts 0: three launchers finished with exit code 0")


@contextmanager
def served(stage: Stage, machine: Machine, backend: str, data: Path) -> Iterator[str]:
    """A server, or an etcd of one member, on this machine: its endpoint."""
    if backend == "tcp":
        yield stage.serve(f"{machine.address}:{PORT}", "--insecure", machine=machine).wait_listening()
        return
    data.mkdir()
    within = ["ip", "netns", "exec", machine.name, *_tether]
    etcd = EtcdCluster(needs("system"), data, 1, hosts=[machine.address], prefixes=[within])
    try:
        etcd.start()
        yield etcd.endpoints
    finally:
        etcd.stop()


# --- afterwards -------------------------------------------------------------------------------------------------------


@contextmanager
def opened_page(stage: Stage, url: str) -> Iterator[Looking]:
    """A page process that is started now, and a browser on it."""
    if why := why_no_browser():
        pytest.skip(why)
    root, _, run_id = url.rpartition("/")
    http = loopback().replace(str(PORT), "29480")
    stage.dashboard(root, http)
    with chromium() as browser:
        page = Looking(browser, f"http://{http}").open(f"/?run={run_id}")
        yield page
        page.close()
        assert page.wrong == []


def test_row_31_out_of_memory_on_one_rank_is_named_everywhere_in_the_same_words(
    row: Recorder, stage: Stage, place: Place, tmp_path: Path
):
    job = RingJob(stage, place, tmp_path, "3", restarts=1, ttl_s=place.ttl_s)
    job.start("a", "b", "c")
    number, name = job.number, job.launchers[1].name
    said = "CUDA out of memory. Tried to allocate 20.00 GiB"
    sentence = f"rank 1 on {name} exited with 1: RuntimeError: {said}"
    failed_at = time.monotonic()
    job.run.say("do-1", f"raise {said}")
    workers = job.wait_round()
    assert {worker["TORCHELASTIC_RESTART_COUNT"] for worker in workers} == {1}
    row("the worker failed until the first line of the restarted workers", last(workers) - failed_at)
    for one in job.launchers:
        one.wait_line(f"root cause of the end of round {number}: {sentence}")
        one.wait_line(f"  | RuntimeError: {said}")
    row(f"the output of each of the three launchers has: {sentence}".replace(f" on {name} ", " on NODE "))
    until_said("history", job.url, "--json", parts=(sentence,))
    (ended,) = [one["ended"] for one in ask_json("history", job.url)["rounds"] if one["number"] == number]
    assert sentence in ended
    assert sentence in ask("history", job.url)
    row("`rallypoint history` has it as the end of that round")
    until_said("events", job.url, parts=(sentence,))
    row("`rallypoint events` has it")
    with opened_page(stage, job.url) as page:
        page.until(lambda: sentence in page.text("table.rounds"), "the end of the round in the table of rounds")
        page.until(lambda: sentence in page.text(".lines"), "the end of the round among the events")
    row("a page that was opened afterwards has it, in its table of rounds and among its events")
    job.run.finish(*job.launchers)


def test_row_32_page_opened_long_after_a_loss_shows_it(row: Recorder, stage: Stage, place: Place):
    run, ago_s = place.run(), 30.0
    a, b, c = stage.nodes(place.url("min_nodes=2&max_nodes=3", run), "a", "b", "c")
    number = one_round([a, b, c])[0]["round"]
    c.kill()
    told([a, b], number)
    after = one_round([a, b], above=number)[0]["round"]
    time.sleep(ago_s)  # nobody looks
    lost = f"c (member of round {number}) is lost"
    began_at = time.monotonic()
    assert ask("events", run).count(lost) == 1
    row(f"{ago_s:g} s after the loss `rallypoint events`, with starting its process", time.monotonic() - began_at)
    row("it says once that a member of that round was lost, and which")
    began_at = time.monotonic()
    with opened_page(stage, run) as page:
        shown_at = page.until(lambda: lost in page.text(".lines"), "the loss among the events")
        row("the first page, with starting its process and a browser, until the loss was shown", shown_at - began_at)
        page.until(lambda: "c was lost" in page.text("table.rounds"), "the loss in the table of rounds")
        page.until(lambda: page.page.locator(".mark").count() == 1, "a mark on the time line")
        assert "c: lost" in page.page.locator(".mark").get_attribute("title")
        assert page.standings() == {"a": "member", "b": "member"}
        page.page.get_by_text("The time line as text").click()
        for one in (number, after):
            page.until(lambda one=one: f"member of round {one}" in page.text(".spans"), f"round {one} on the time line")
    row("it is in the table of rounds as the end of its round, and on the time line; both rounds are on the time line")
