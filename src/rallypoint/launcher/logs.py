"""Where each worker's output goes: to the console, to a file, or to both, as torchrun's `--redirects` and `--tee`."""

from __future__ import annotations

import enum
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from rallypoint.errors import SettingsError


class Std(enum.IntFlag):
    """A choice of a worker's output streams, with torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """The chosen streams: the same ones for all workers, or by local rank (workers not in the list: none)."""

    everywhere: Std = Std.NONE
    by_rank: tuple[tuple[int, Std], ...] = ()

    def of(self, local_rank: int) -> Std:
        return dict(self.by_rank).get(local_rank, self.everywhere)

    @property
    def is_any(self) -> bool:
        return self.everywhere is not Std.NONE or any(std is not Std.NONE for _, std in self.by_rank)

    @classmethod
    def parse(cls, name: str, text: str) -> StreamChoice:
        """From `3` (all workers) or `0:1,1:2` (by local rank). SettingsError for anything else."""
        try:
            if ":" not in text:
                return cls(_std(text))
            pairs = [part.partition(":") for part in text.split(",")]
            return cls(by_rank=tuple((int(rank), _std(std)) for rank, _, std in pairs))
        except ValueError:
            raise SettingsError(
                f"{name}={text!r} is not valid: give 0 (none), 1 (stdout), 2 (stderr) or 3 (both) for all workers, "
                f"or a choice by local rank such as 0:3,1:1",
                option=name,
                value=text,
            ) from None


NO_STREAMS = StreamChoice()


def _std(text: str) -> Std:
    number = int(text)
    if number not in (0, 1, 2, 3):
        raise ValueError(text)
    return Std(number)


class PrivateDirectory:
    """A temporary directory of this launcher, made at its first use. It may be removed and then used again."""

    def __init__(self) -> None:
        self._made: Path | None = None

    @property
    def path(self) -> Path:
        if self._made is None:
            self._made = Path(tempfile.mkdtemp(prefix="rallypoint-"))
        return self._made

    def remove(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class WorkerLogs:
    """The log files of one round on one node. `directory` None: only error files, in the private directory."""

    directory: Path | None
    redirects: StreamChoice = NO_STREAMS
    tee: StreamChoice = NO_STREAMS
    private: PrivateDirectory = field(default_factory=PrivateDirectory)

    def path(self, local_rank: int, stream: int) -> Path | None:
        """The file for a worker's stream (1: stdout, 2: stderr), or None."""
        std = Std(stream)
        if self.directory is None or not (self.redirects.of(local_rank) | self.tee.of(local_rank)) & std:
            return None
        return self.directory / str(local_rank) / ("stdout.log" if stream == 1 else "stderr.log")

    def error_file(self, local_rank: int) -> str:
        """The file that torch's `@record` writes when a worker fails. Its directory is made."""
        directory = self.directory or self.private.path
        path = directory.absolute() / str(local_rank) / "error.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(path)

    def open(self, local_rank: int, stream: int) -> tuple[bool, int | None]:
        """Whether the stream is shown on the console, and the file descriptor of its file, if it has one.

        OSError if the file cannot be opened.
        """
        path = self.path(local_rank, stream)
        if path is None:
            return True, None
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return bool(self.tee.of(local_rank) & Std(stream)), file
