"""Traffic counters of a server, over all its connections."""

from __future__ import annotations


class Traffic:
    """Sums since the server was created."""

    __slots__ = ("bytes_in", "bytes_out", "frames_in", "frames_out", "slow")

    def __init__(self) -> None:
        self.bytes_in = self.bytes_out = self.frames_in = self.frames_out = 0
        self.slow = 0
        """Connections that were closed because the peer did not read."""
