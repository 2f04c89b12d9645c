"""Fuzzes a real server while honest clients use it: mutated frames after authentication, random bytes before it.

    python -m tests.fuzz.campaign --frames 1000000 --junk-mb 100 --seed 1

Prints a report, and fails if the server died, exceeded its memory bound, or gave an honest client a wrong or late
answer. The same seed sends the same bytes.
"""

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.wire.frames import GREETING, Framer, frame
from rallypoint.wire.messages import AskStatus, ClientFrame, Hello, encoder, welcome_decoder
from tests.fuzz.mutants import Mutants

TOKEN = "the token of the campaign"
PATIENCE_S = 60.0
PATIENT_TIMES = 3
BATCH = 24
CLIENTS = 2_000
MOST_RSS_MB = 700
LIMITS = (
    "--hello-timeout=2",
    "--max-keys=20000",
    "--max-bytes=64MiB",
    "--max-bytes-per-run=32MiB",
    "--max-leases=20000",
)
STATUS_TAG = 4
NEVER = ("Traceback", "the server failed on a frame", "is no longer the coordinator")
"""Texts that must never be in the server's log."""


@dataclass
class Report:
    """The results of a campaign."""

    frames: int = 0
    accepted: int = 0
    refused: int = 0
    connections: int = 0
    junk_bytes: int = 0
    junk_connections: int = 0
    junk_received: int = 0
    took_s: float = 0.0
    rss_mb: dict[str, float] = field(default_factory=dict)
    honest: dict[str, Any] = field(default_factory=dict)
    status: dict[str, str] = field(default_factory=dict)
    log_lines: int = 0

    def __str__(self) -> str:
        refusals = {name: count for name, count in self.status.items() if name.startswith("refused_")}
        return "\n".join(
            [
                f"mutated frames  {self.frames} ({self.accepted} accepted, {self.refused} refused), "
                f"{self.connections} connections",
                f"junk            {self.junk_bytes / 1e6:.1f} MB sent on {self.junk_connections} connections before "
                f"authentication, {self.junk_received / 1e6:.1f} MB of it read by the server",
                f"took            {self.took_s:.0f} s",
                f"memory (RSS)    {', '.join(f'{what} {size:.0f} MB' for what, size in self.rss_mb.items())}",
                f"honest clients  {_rounded(self.honest)}",
                f"counted         {refusals}",
                f"lines logged    {self.log_lines}",
            ]
        )


def _rounded(figures: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {when: {name: round(value, 1) for name, value in seen.items()} for when, seen in figures.items()}


class Target:
    """A process of `rallypoint serve`."""

    def __init__(self, folder: Path, *options: str) -> None:
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        command = [sys.executable, "-m", "rallypoint", "serve", "--bind", "127.0.0.1:0", "--token-file", str(token)]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*command, *LIMITS, *options], stderr=log)
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"listening on (127\.0\.0\.1):(\d+)", self.log.read_text())):
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        self.address = (found[1], int(found[2]))
        self.endpoint = f"{found[1]}:{found[2]}"

    @property
    def rss_mb(self) -> float:
        return self._memory("VmRSS")

    @property
    def peak_mb(self) -> float:
        return self._memory("VmHWM")

    def _memory(self, name: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"{name}:\s+(\d+) kB", status)
        assert found, status
        return int(found[1]) / 1024

    def check(self) -> None:
        """Check that it runs, and that its log has no forbidden text."""
        assert self.process.poll() is None, f"the server died: {self.log.read_text()[-3_000:]}"
        lines = self.log.read_text().splitlines()
        for number, line in enumerate(lines):
            assert not any(word in line for word in NEVER), "\n".join(lines[number : number + 30])

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0


class Connector:
    """Opens connections, each from a different source address."""

    def __init__(self, address: tuple[str, int], rng: random.Random) -> None:
        self._address = address
        self._rng = rng

    def connect(self) -> socket.socket:
        one = socket.socket()
        one.settimeout(PATIENCE_S)
        source = f"127.{self._rng.randrange(1, 255)}.{self._rng.randrange(256)}.{self._rng.randrange(1, 255)}"
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.bind((source, 0))
        one.connect(self._address)
        return one

    def welcomed(self) -> tuple[socket.socket, Framer]:
        """An authenticated connection, as one of a bounded number of clients."""
        one = self.connect()
        client = f"fuzz{self._rng.randrange(CLIENTS)}"
        one.sendall(GREETING + frame(encoder.encode(Hello(1, 1, client, TOKEN, "fuzz"))))
        framer = Framer(1 << 30)
        while True:
            data = _patiently(one)
            assert data, "an authenticated client was refused"
            for payload in framer.feed(data):
                welcome_decoder.decode(payload)
                return one, framer


class MutantSender:
    """Sends mutants, each followed by a status request: its answer means that the mutant was accepted."""

    def __init__(self, target: Target, seed: int, report: Report) -> None:
        self._connector = Connector(target.address, random.Random(f"shooter {seed}"))
        self._mutants = Mutants(seed)
        self._report = report
        self._waiting: deque[tuple[bytes, bool]] = deque()
        self._asked = 1 << 40

    def send(self, count: int) -> None:
        """Send `count` mutants, until each was accepted or refused."""
        report, goal = self._report, self._report.frames + count
        one: socket.socket | None = None
        while report.frames < goal:
            while len(self._waiting) < min(BATCH, goal - report.frames):
                self._waiting.append(self._mutants.next())
            if one is None:
                one, framer = self._connector.welcomed()
                report.connections += 1
            batch = list(self._waiting)[: self._up_to_wrong_length()]
            taken, is_over = self._send_batch(one, framer, batch)
            for _ in range(taken):
                self._waiting.popleft()
            report.frames += taken
            report.accepted += taken
            if is_over:
                if taken < len(batch):
                    self._waiting.popleft()
                    report.frames += 1
                    report.refused += 1
                one.close()
                one = None
        if one is not None:
            one.close()

    def _up_to_wrong_length(self) -> int:
        """The size of the next batch: a frame with a wrong length in its header is the last."""
        for index, (_, lies) in enumerate(self._waiting):
            if lies:
                return index + 1
        return len(self._waiting)

    def _send_batch(self, one: socket.socket, framer: Framer, batch: list[tuple[bytes, bool]]) -> tuple[int, bool]:
        """The number of accepted mutants, and whether the connection is over."""
        words = b""
        first = self._asked
        for mutant, _ in batch:
            words += mutant + frame(encoder.encode(ClientFrame(0, (AskStatus(self._asked),))))
            self._asked += 1
        try:
            one.sendall(words)
            if batch[-1][1]:
                one.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the connection was closed while sending: the answers tell which mutant was refused
        taken = 0
        while taken < len(batch):
            try:
                data = _patiently(one)
            except ConnectionError:
                return taken, True
            except TimeoutError:
                mutants = [mutant.hex() for mutant, _ in batch]
                raise AssertionError(f"neither answer nor close; {taken} of these were accepted: {mutants}") from None
            if not data:
                return taken, True
            for payload in framer.feed(data):
                for message in msgspec.msgpack.decode(payload):
                    if message[0] == STATUS_TAG and message[1] == first + taken:
                        taken += 1
        return taken, batch[-1][1]


def _patiently(one: socket.socket) -> bytes:
    """Receive with several time-outs: a pause of the whole machine must not count as a missing answer."""
    for _ in range(PATIENT_TIMES):
        try:
            return one.recv(1 << 16)
        except TimeoutError:
            continue
    raise TimeoutError


def junk(target: Target, seed: int, size: int, report: Report) -> None:
    """Send `size` bytes in total on connections without a valid token."""
    rng = random.Random(f"junk {seed}")
    connector = Connector(target.address, rng)
    goal = report.junk_bytes + size
    while report.junk_bytes < goal:
        words = _junk(rng)
        with connector.connect() as one:
            report.junk_connections += 1
            report.junk_bytes += _send(one, words)
            if rng.random() < 0.2:
                _drain(one)


def _junk(rng: random.Random) -> bytes:
    size = rng.choice((1, 100, 5_000, 60_000, 300_000, 1_000_000))
    hello = Hello(1, 1, "c", rng.choice(("", "guess", TOKEN[:-1], TOKEN + "x")), "fuzz")
    match rng.randrange(8):
        case 0:
            return rng.randbytes(size)
        case 1:
            return b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * (size // 6)
        case 2:
            return GREETING + rng.randbytes(size)
        case 3:
            return GREETING + frame(rng.randbytes(rng.randrange(16_000))) + rng.randbytes(size)
        case 4:
            return GREETING + frame(encoder.encode(hello)) + rng.randbytes(size)
        case 5:
            return bytes.fromhex("16030100f1010000ed0303") + rng.randbytes(size)
        case 6:
            deep = b"\x98\x01\x01\xa1c" + b"\x91" * rng.randrange(15_000)
            return GREETING + frame(deep) + bytes(size)
        case _:
            return (GREETING + b"\x00\x00\x3f\x00" + rng.randbytes(16_000)) * (size // 16_000 + 1)


def _send(one: socket.socket, words: bytes) -> int:
    sent = 0
    try:
        while sent < len(words):
            sent += one.send(words[sent : sent + 65_536])
    except ConnectionError:
        pass  # the server closed the connection
    return sent


def _drain(one: socket.socket) -> None:
    try:
        while one.recv(1 << 16):
            pass
    except ConnectionError:
        pass


@contextmanager
def honest_beside(target: Target, figures: dict[str, Any]) -> Iterator[None]:
    """Run honest clients during the block; their latencies go into `figures`. Fails if one got a wrong answer."""
    command = [sys.executable, "-m", "tests.fuzz.honest", target.endpoint, TOKEN]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        said, _ = process.communicate("", timeout=PATIENCE_S)
    assert process.returncode == 0, "an honest client got a wrong answer: see above"
    figures.update(json.loads(said))


def run(frames: int, junk_bytes: int, seed: int, say: Any = print) -> Report:
    """Run the whole campaign. Raises AssertionError if the server misbehaves."""
    report = Report()
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder))
        try:
            report.rss_mb["at start"] = target.rss_mb
            quiet: dict[str, Any] = {}
            with honest_beside(target, quiet):
                time.sleep(1.0)  # measures the latency without load
            with honest_beside(target, report.honest):
                sender = MutantSender(target, seed, report)
                while report.frames < frames:
                    sender.send(min(20_000, frames - report.frames))
                    target.check()
                    say(f"{report.frames} frames, {target.rss_mb:.0f} MB, {time.monotonic() - began_at:.0f} s")
                report.rss_mb["after the frames"] = target.rss_mb
                before = int(_status(target)["bytes_in"])
                junk(target, seed, junk_bytes, report)
                report.status = _status(target)
                report.junk_received = int(report.status["bytes_in"]) - before
                report.rss_mb["after the junk"] = target.rss_mb
            report.honest = {"alone": quiet, "under load": dict(report.honest)}
            report.rss_mb["at most"] = target.peak_mb
            target.check()
            report.log_lines = len(target.log.read_text().splitlines())
            target.stop()
        finally:
            if target.process.poll() is None:
                target.process.kill()
                target.process.wait(PATIENCE_S)
    report.took_s = time.monotonic() - began_at
    assert report.rss_mb["at most"] < MOST_RSS_MB, report
    return report


def _status(target: Target) -> dict[str, str]:
    """The status of the server."""
    one, framer = Connector(target.address, random.Random(0)).welcomed()
    with one:
        one.sendall(frame(encoder.encode(ClientFrame(0, (AskStatus(1),)))))
        while True:
            data = one.recv(1 << 16)
            assert data
            for payload in framer.feed(data):
                for message in msgspec.msgpack.decode(payload):
                    if message[0] == STATUS_TAG:
                        return dict(message[3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--junk-mb", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    print(run(args.frames, int(args.junk_mb * 1e6), args.seed, lambda line: print(line, flush=True)))


if __name__ == "__main__":
    main()
