"""Wakes a thread that polls."""

from __future__ import annotations

import os
from contextlib import suppress


class Bell:
    """Wakes one thread that polls. May be rung from anywhere, at any time, for as long as somebody has it."""

    def __init__(self) -> None:
        self.fileno = self._to = -1
        if hasattr(os, "eventfd"):
            self.fileno = self._to = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.fileno, self._to = os.pipe()
            os.set_blocking(self.fileno, False)
            os.set_blocking(self._to, False)

    def ring(self) -> None:
        with suppress(BlockingIOError):  # it rings already
            os.write(self._to, b"\x01\0\0\0\0\0\0\0")

    def hush(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.fileno, 4096)

    def __del__(self) -> None:
        for number in {self.fileno, self._to} - {-1}:  # else there was no file left
            os.close(number)
