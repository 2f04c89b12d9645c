"""A run is closed, and the node that hosts its server goes, in order or by `kill -9`: the run must not come back.

    python -m tests.e2e.closed --times 50 [--face handler|run|torchrun] [--how kill|shutdown|operator]

Plays each case so many times, and prints how often the run came back and how long the end took. `make closed` does it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rallypoint.launcher.policy import CLOSED
from tests.e2e.kit import Stage, loopback
from tests.e2e.launching import Run
from tests.e2e.operating import command
from tests.integrations.kit import Job

WHY = "the work is done"
SOON_S = 3.0
"""A node that was told of the close says so at once; the rest is for a loaded machine."""
STAYS_S = 5.0
"""How long it is watched afterwards."""
END_S = 30.0
CODE = 7


@dataclass(frozen=True)
class End:
    """How one try ended. `came_back`: what shows that the run was there again; empty if it stayed closed."""

    came_back: str
    host_s: float
    """How long the hosting node took to end: `shutdown()`, or from the failure to the exit of launcher or agent."""
    others_s: float
    """How long the other node took to know that it must end."""


def play_handler(stage: Stage, how: str, folder: Path) -> End:
    """Node a closes the run and goes. Node b, which was told, asks for a next round."""
    url = f"tcp://{loopback()}/done?min_nodes=1&max_nodes=2&last_call_timeout=60&local_addr=127.0.0.1"
    a = stage.node(url, "a", "hand")
    asked = a.ask("next")
    a.event("Hosting")
    b = stage.node(url, "b", "hand")
    b.call("next")
    assert a.outcome(asked)["kind"] == "done", a.story
    host_s = 0.0
    if how == "shutdown":
        fact = a.outcome(a.ask("shutdown"))
        assert (fact["kind"], fact["result"]) == ("done", True), fact
        host_s = fact["took_s"]
    else:
        a.call("set_closed", WHY)
        b.until(lambda: b.call("is_closed"), "the close")
        a.kill()
    found = []
    until = time.monotonic() + STAYS_S
    others_s = 0.0
    while time.monotonic() < until:
        if not b.call("is_closed"):
            found.append("is_closed() is False")
        fact = b.outcome(b.ask("next"))
        others_s = max(others_s, fact["took_s"])
        if fact["kind"] == "done":
            found.append(f"b entered round {fact['result']}")
        elif fact["error"] != "RendezvousClosedError" or "closed by a: " not in fact["text"]:
            found.append(f"{fact['error']}: {fact['text']}")
        time.sleep(0.5)
    if b.events("Hosting"):
        found.append("b serves the run")
    return End("; ".join(found), host_s, others_s)


def play_run(stage: Stage, how: str, folder: Path) -> End:
    """A worker of the hosting launcher fails, and the run has no restarts: both launchers must end with its code.

    The launcher is killed while it waits for another worker that ignores SIGTERM; the run is closed by then. If an
    operator closed the run instead, the other launcher's workers go on until they have finished.
    """
    deaf = ("deaf",) if how == "kill" else ()
    run = Run(
        stage,
        loopback(),
        folder,
        "1:2",
        "--max-restarts",
        "0",
        "--nproc-per-node",
        "2",
        conf="last_call_timeout=60,keep_alive_interval=1",
    )
    a = run.start("a", words=deaf)
    a.wait_line("serves this run itself")
    b = run.start("b")
    workers = a.workers(4, count=2)
    b.workers(4, count=2)
    at = time.monotonic()
    expected, host_s = CODE, 0.0
    if how == "operator":
        expected = CLOSED
        done = command("close", run.url, "--reason", WHY, "-y")
        assert done.returncode == 0, done
        a.kill()
    else:
        run.say(f"fail-{workers[0]['rank']}", str(CODE))
    if how == "operator":
        at = time.monotonic()
        run.say("finish")
    elif how == "kill":
        a.wait("deaf")
        b.wait_line("the run has no restarts")
        a.kill()
    else:
        code = a.wait_exit(END_S)
        host_s = time.monotonic() - at
        assert code == CODE, a.story
    code = b.wait_exit(END_S)
    others_s = time.monotonic() - at
    found = []
    if code != expected:
        found.append(f"b ended with {code}")
    if len(b.all("worker")) != 2:
        found.append("b started its workers again")
    return End("; ".join(found), host_s, others_s)


def play_torchrun(stage: Stage, how: str, folder: Path) -> End:
    """The hosting agent ends because its worker failed, or is killed after the run was closed. b must end with 1."""
    job = Job(stage, folder, endpoint=loopback())
    a = job.agent("a", "1:2", conf="last_call_timeout=60", restarts=0)
    a.wait_line("serves this run itself")
    b = job.agent("b", "1:2", conf="last_call_timeout=60", restarts=0)
    fact = a.started(2)
    b.started(2)
    at = time.monotonic()
    if how == "kill":
        done = command("close", f"tcp://{job.endpoint}/{job.run_id}", "--reason", WHY, "-y")
        assert done.returncode == 0, done
        at = a.kill()
        host_s = 0.0
    else:
        at = a.kill_worker(fact)
        assert a.wait_exit(END_S) == 1, a.story
        host_s = time.monotonic() - at
    code = b.wait_exit(END_S)
    others_s = time.monotonic() - at
    found = []
    if code != 1:
        found.append(f"b ended with {code}")
    if len(b.all("start")) != 1:
        found.append("b started its worker again")
    if "RendezvousClosedError" not in b.said:
        found.append("b does not say that the run was closed")
    return End("; ".join(found), host_s, others_s)


PLAYS: dict[str, Callable[[Stage, str, Path], End]] = {
    "handler": play_handler,
    "run": play_run,
    "torchrun": play_torchrun,
}
CASES = [
    *(("handler", how) for how in ("kill", "shutdown")),
    *(("run", how) for how in ("kill", "shutdown", "operator")),
    *(("torchrun", how) for how in ("kill", "shutdown")),
]


def play(face: str, how: str) -> End:
    """One try on a stage of its own."""
    with tempfile.TemporaryDirectory() as folder, Stage() as stage:
        return PLAYS[face](stage, how, Path(folder))


def campaign(face: str, how: str, times: int) -> bool:
    """Play a case so many times, and print what was seen. Whether the run always stayed closed."""
    ends = [play(face, how) for _ in range(times)]
    back = [end.came_back for end in ends if end.came_back]
    host, others = [end.host_s for end in ends], [end.others_s for end in ends]
    took = "" if how != "shutdown" else f"; the host ended in {statistics.median(host):.2f} s (at most {max(host):.2f})"
    print(
        f"{face}, {how}: {times} tries, came back {len(back)} times{took}; the other node knew it in "
        f"{statistics.median(others):.2f} s (at most {max(others):.2f})",
        flush=True,
    )
    for what in back:
        print(f"  {what}")
    return not back


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--face", choices=PLAYS, action="append")
    parser.add_argument("--how", choices=sorted({how for _, how in CASES}), action="append")
    given = parser.parse_args()
    chosen = [case for case in CASES if case[0] in (given.face or case) and case[1] in (given.how or case)]
    stayed = [campaign(face, how, given.times) for face, how in chosen]
    return 0 if all(stayed) else 1


if __name__ == "__main__":
    sys.exit(main())
