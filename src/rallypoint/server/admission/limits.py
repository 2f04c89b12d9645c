"""The limits of a server. A client that exceeds one is told which, and which option raises it."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from rallypoint.wire.frames import DEFAULT_LIMIT

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
OTHER_FILES = 64
"""File descriptors that a server process needs besides its connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The defaults fit 10,000 nodes on one server. Each limit is an option of `rallypoint serve`."""

    max_connections: int = 15_000
    """Connections whose hello was accepted."""
    max_pending: int = 4_096
    """Connections whose hello was not accepted yet."""
    hello_timeout_s: float = 10.0
    max_runs: int = 1_000
    max_keys: int = 4_000_000
    max_keys_per_run: int = 1_000_000
    max_bytes: int = 4 * GIB
    """Size of all keys and values."""
    max_bytes_per_run: int = GIB
    max_value: int = 16 * MIB
    max_frame: int = DEFAULT_LIMIT
    max_leases: int = 200_000
    max_watches: int = 10_000
    """Watches of one connection; also its requests that wait for keys."""
    max_waits: int = 1_000_000
    """Keys that one connection waits for at the same time."""
    max_failed_logins: int = 50
    """Failed logins of one source within a minute, after which it is refused for `login_block_s`."""
    login_block_s: float = 60.0
    log_interval_s: float = 60.0
    """Refusals of the same source and kind are logged once within this time."""


def fit_open_files(limits: ServerLimits) -> tuple[ServerLimits, str | None]:
    """Raise the process's limit on open files as far as allowed. Returns the limits that fit, and a warning if lower.

    The warning is None if the given limits fit.
    """
    wanted = limits.max_connections + limits.max_pending + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits, None
    pending = min(limits.max_pending, max(1, (soft - OTHER_FILES) // 4))
    connections = max(1, soft - OTHER_FILES - pending)
    fitted = ServerLimits(
        **{name: getattr(limits, name) for name in ServerLimits.__slots__}
        | {"max_connections": connections, "max_pending": pending}
    )
    return fitted, (
        f"only {soft} files may be open (ulimit -n), so at most {connections} connections are accepted, not "
        f"{limits.max_connections}: raise the limit on open files, or give a lower --max-connections"
    )
