"""What a process costs: its time on a processor, its memory, and the payload of its connections. Linux only."""

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

PATIENCE_S = 20.0
WINDOW_S = 0.3
_COUNTERS = re.compile(r"\bbytes_(sent|received|retrans):(\d+)")


def cpu_s(pid: int) -> float:
    """Seconds of processor time so far, in user and in kernel mode, of all its threads."""
    try:
        # Nanoseconds; `stat` counts ticks of 10 ms, too coarse for a server that idles.
        threads = [path.read_text(encoding="utf-8") for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    except OSError:
        threads = []
    if threads:
        return sum(int(text.split()[0]) for text in threads) / 1e9
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    user, system = text.rpartition(")")[2].split()[11:13]  # the name in parentheses may contain blanks
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def wait_calm(pids: Sequence[int], cores: float, patience_s: float) -> None:
    """Until these processes together use less of a core than that, or patience ends. Returns at once without /proc."""
    if sys.platform != "linux":
        return
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        before, before_at = _cpu_of_all(pids), time.monotonic()
        time.sleep(WINDOW_S)
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
    """Bytes sent and received so far on each open connection of a server, by the peer; None without `ss`.

    Payload only, without the headers of TCP and IP, and without what was sent again.
    """
    program = shutil.which("ss")
    if program is None:
        return None
    done = subprocess.run(
        [program, "-tniOH", "state", "established", f"sport = :{port}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return counted(done.stdout)


def counted(listing: str) -> dict[str, int]:
    """The sums in a listing of `ss -tniOH`, which has a line for each connection, by the peer's address."""
    found = {}
    for line in listing.splitlines():
        counters = {name: int(number) for name, number in _COUNTERS.findall(line)}
        total = counters.get("sent", 0) + counters.get("received", 0) - counters.get("retrans", 0)
        found[line.split()[3]] = total
    return found


def grown(before: dict[str, int], after: dict[str, int]) -> int:
    """Bytes moved between two looks: on connections that are new as well, not on those that are gone."""
    return sum(total - before.get(peer, 0) for peer, total in after.items())
