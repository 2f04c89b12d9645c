"""CPU time and memory of a process, and the payload of its connections. Linux only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SS_TIMEOUT_S = 20.0
INTERVAL_S = 0.3
_COUNTERS = re.compile(r"\bbytes_(sent|received|retrans):(\d+)")


def cpu_s(pid: int) -> float:
    """Seconds of CPU time so far, in user and kernel mode, of all its threads."""
    try:
        # Nanoseconds; `stat` counts ticks of 10 ms, too coarse for an idle server.
        threads = [path.read_text(encoding="utf-8") for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    except OSError:
        threads = []
    if threads:
        return sum(int(text.split()[0]) for text in threads) / 1e9
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    user, system = text.rpartition(")")[2].split()[11:13]  # the name in parentheses may contain blanks
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def wait_until_idle(pids: Sequence[int], cores: float, timeout_s: float) -> None:
    """Until these processes together use less than `cores`, or time is up. Returns at once without /proc."""
    if sys.platform != "linux":
        return
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        before, before_at = _cpu_of_all(pids), time.monotonic()
        time.sleep(INTERVAL_S)
        if _cpu_of_all(pids) - before < cores * (time.monotonic() - before_at):
            return


def _cpu_of_all(pids: Sequence[int]) -> float:
    total = 0.0
    for pid in pids:
        with suppress(OSError):  # it has ended
            total += cpu_s(pid)
    return total


def rss_bytes(pid: int) -> int:
    """Resident memory now."""
    text = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8")
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def payload(port: int) -> dict[str, int] | None:
    """Bytes sent and received so far on each open connection of a server, by peer address; None without `ss`.

    Without the headers of TCP and IP, and without retransmissions.
    """
    program = shutil.which("ss")
    if program is None:
        return None
    done = subprocess.run(
        [program, "-tniOH", "state", "established", f"sport = :{port}"],
        capture_output=True,
        text=True,
        timeout=SS_TIMEOUT_S,
        check=True,
    )
    return counted(done.stdout)


def counted(listing: str) -> dict[str, int]:
    """The sums in the output of `ss -tniOH`, one line a connection, by peer address."""
    found = {}
    for line in listing.splitlines():
        counters = {name: int(number) for name, number in _COUNTERS.findall(line)}
        total = counters.get("sent", 0) + counters.get("received", 0) - counters.get("retrans", 0)
        found[line.split()[3]] = total
    return found


def grown(before: dict[str, int], after: dict[str, int]) -> int:
    """Bytes between two countings: also on new connections, not on those that have closed."""
    return sum(total - before.get(peer, 0) for peer, total in after.items())
