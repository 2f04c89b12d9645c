"""What went over all connections of a server, in plain numbers: one addition each."""

from __future__ import annotations


class Traffic:
    """Sums since the server was made."""

    __slots__ = ("bytes_in", "bytes_out", "frames_in", "frames_out", "refused", "renewals", "slow")

    def __init__(self) -> None:
        self.bytes_in = self.bytes_out = self.frames_in = self.frames_out = self.refused = self.slow = 0
        self.renewals = 0
        """Of leases, by those who hold them."""
