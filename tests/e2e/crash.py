"""Kills of a server that keeps its data, under load: `python -m tests.e2e.crash --rounds 500` (`make crash`).

Each round kills the server with -9 at a drawn moment, some while it starts, and starts it again on the same directory.
Then every client has to get an answer to something new, and none may have found a lie (see `ledger`). What the server
says at its start is looked at, too.
"""

import argparse
import random
import re
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.e2e.kit import HERE, PATIENCE_S, Node, Process, Server, Stage, loopback

ENTRIES = 1000
"""So many changes make a snapshot: a kill meets one every few rounds."""
LONGEST_LIFE_S = 0.6
LONG_S = 20 * PATIENCE_S
AT_START = 0.15
"""How often the server is killed while it starts."""


@dataclass
class Figures:
    """What a campaign saw."""

    kills: int = 0
    kills_at_start: int = 0
    cuts: int = 0
    snapshots: int = 0
    slowest_s: float = 0.0
    """From the start of a server until every client had its answer."""
    answers: dict[str, int] = field(default_factory=dict)
    told: int = 0
    rounds: int = 0
    sizes: list[int] = field(default_factory=list)

    def in_words(self) -> str:
        kinds: dict[str, int] = {}
        for who, count in self.answers.items():
            kinds[who.split()[0]] = kinds.get(who.split()[0], 0) + count
        done = ", ".join(f"{count} by {kind}s" for kind, count in sorted(kinds.items()))
        return (
            f"{self.kills} kills ({self.kills_at_start} of them while it started): nothing was lost or doubled. "
            f"Answers: {done}; {self.told} revisions pushed, each once; {self.rounds} returns from rounds judged. "
            f"{self.cuts} torn ends cut off, the log was begun anew {self.snapshots} times; "
            f"data at most {max(self.sizes) // 1024} KiB. "
            f"Slowest restart until everybody was served: {self.slowest_s:.1f} s"
        )


def serve(stage: Stage, bind: str, data: Path, sync: str, entries: int, character: str) -> Server:
    """A server that may be killed before it listens."""
    command = [sys.executable, str(HERE / "small_server.py"), str(entries), character]
    server = Server("server", [*command, "serve", "--bind", bind, "--data", str(data), "--sync", sync])
    stage.processes.append(server)
    return server


def campaign(
    rounds: int, seed: int, tell=lambda figures: None, *, entries: int = ENTRIES, character: str = "honest"
) -> Figures:
    """AssertionError, with the story of whoever found a lie."""
    rng = random.Random(seed)
    figures = Figures()
    with Stage() as stage, tempfile.TemporaryDirectory(prefix="rallypoint-crash-") as place:
        bind, data = loopback(), Path(place) / "data"
        server = serve(stage, bind, data, "always", entries, character)
        server.wait_listening()
        ledger = Node("ledger", [sys.executable, str(HERE / "ledger.py"), bind])
        stage.processes.append(ledger)
        ledger.wait("ready", patience_s=2 * PATIENCE_S)
        for number in range(1, rounds + 1):
            time.sleep(rng.uniform(0.0, LONGEST_LIFE_S))  # the moment of the kill
            kill(server, stage, figures)
            began_at = time.monotonic()
            while rng.random() < AT_START:
                server = serve(stage, bind, data, rng.choice(("always", "os")), entries, character)
                time.sleep(rng.uniform(0.2, 1.0))  # the moment of the kill, before or after it listens
                kill(server, stage, figures)
                figures.kills_at_start += 1
            server = serve(stage, bind, data, rng.choice(("always", "os")), entries, character)
            server.wait_line("listening on", patience_s=LONG_S)
            with suppress(BrokenPipeError):  # one that has found a lie has ended, perhaps before it was asked
                ledger.write("how do the books stand?")
            books = ledger.until(partial(said, ledger, number), "an answer for everybody", LONG_S)
            figures.slowest_s = max(figures.slowest_s, time.monotonic() - began_at)
            figures.answers, figures.told, figures.rounds = books["counts"], books["told"], books["rounds"]
            look(data, figures)
            tell(figures)
        assert ledger.popen.poll() is None, ledger.story
    return figures


def look(data: Path, figures: Figures) -> None:
    """At the directory, while the server works in it."""
    sizes: dict[str, int] = {}
    for path in data.iterdir():
        with suppress(FileNotFoundError):  # a snapshot has taken its place meanwhile
            sizes[path.name] = path.stat().st_size
    figures.sizes.append(sum(sizes.values()))
    logs = [int(name[4:]) for name in sizes if name.startswith("log-") and name[4:].isdecimal()]
    figures.snapshots = max([figures.snapshots, *(number - 1 for number in logs)])


def said(ledger: Process, number: int) -> dict | None:
    """The books after so many questions; a lie ends everything."""
    lies = ledger.all("lie")
    assert not lies, f"{lies}\n{ledger.story}"
    books = ledger.all("books")
    return books[number - 1] if len(books) >= number else None


def kill(server: Server, stage: Stage, figures: Figures) -> None:
    server.kill()
    server.end()
    stage.processes.remove(server)
    figures.kills += 1
    story = "\n".join(server.errors)
    assert "Traceback" not in story, story
    assert "damaged" not in story, story
    figures.cuts += len(re.findall("cut off the last", story))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    began_at = time.monotonic()

    def tell(figures: Figures) -> None:
        if figures.kills % 20 < 2:
            print(f"{time.monotonic() - began_at:6.0f} s: {figures.in_words()}", flush=True)

    figures = campaign(asked.rounds, asked.seed, tell)
    print(f"seed {asked.seed}, {time.monotonic() - began_at:.0f} s: {figures.in_words()}", flush=True)


if __name__ == "__main__":
    main()
