"""Every error Rallypoint raises, split by what the caller should do.

RallypointError
├── SettingsError (ValueError)          fix the call, the URL or the option, then try again
├── DataError                           do what the text says, or start with another directory
├── RendezvousError                     what the public API raises: catch those below that you can act on
│   ├── RendezvousClosedError           the run was closed: stop, or reopen it
│   ├── RendezvousTimeoutError          the text says who was missing: start them, or wait longer
│   ├── RendezvousConnectionError       check endpoint, token and network: `rallypoint doctor` does
│   ├── RendezvousStateError            look at the key that it names, or use another run id
│   │   └── NewerSchemaError            ... because a newer version wrote it: upgrade this one
│   ├── RendezvousGracefulExitError     this node was a spare of a run that ended: exit with success
│   ├── SettingsMismatchError           give all nodes the same settings, or this one another run id
│   ├── SessionLostError                this node's lease ended: join again
│   └── ForkedProcessError              the object belongs to the parent process: make a new one
├── StoreError                          what the round's store raises: the round may be over
│   ├── StoreTimeoutError (TimeoutError)    look for those that it names, or wait longer
│   └── StoreFencedError                join again: a newer round has a store of its own
└── BackendError                        what a backend raises; it says what may be assumed
    ├── Unavailable                     it did not happen: try again
    ├── OutcomeUnknown                  it may have happened: read again before deciding
    └── Rejected                        it did not happen and never will: do not retry
        ├── LeaseGone                   ... because the lease has ended
        ├── UnreadableState (RendezvousStateError)  ... because it is damaged, or not ours: use another place
        └── HistoryGone                 ... because the watch starts before the kept history: scan again

An error carries its data in attributes and a sentence in ``str()``: what was wanted, what was found, what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable


class RallypointError(Exception):
    """Base of every error of this package."""


class SettingsError(RallypointError, ValueError):
    """A setting, URL or parameter is not acceptable; `option` names it where there is one."""

    def __init__(self, message: str, *, option: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.option = option
        self.value = value


class DataError(RallypointError):
    """The directory of a server's data cannot be used as it is."""


class RendezvousError(RallypointError):
    """Base of what the public rendezvous API raises."""


class RendezvousClosedError(RendezvousError):
    """The run is closed: nobody can join it until it is reopened."""


class RendezvousTimeoutError(RendezvousError):
    """No round within the deadline."""


class RendezvousConnectionError(RendezvousError):
    """The backend could not be reached."""


class RendezvousStateError(RendezvousError):
    """The backend holds something that is not ours or is damaged; `key` says where."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class NewerSchemaError(RendezvousStateError):
    """A record was written by a version too new to be understood here."""


class RendezvousGracefulExitError(RendezvousError):
    """The run ended while this node was a spare: leave with success."""


class SettingsMismatchError(RendezvousError):
    """This node's settings are not those of the run; `differences` maps option to (ours, the run's)."""

    def __init__(self, message: str, *, differences: dict[str, tuple[object, object]]) -> None:
        super().__init__(message)
        self.differences = differences


class SessionLostError(RendezvousError):
    """This node's session ended; it is no longer a member of anything."""


class ForkedProcessError(RendezvousError):
    """An object made before a fork was used in the child."""


class StoreError(RallypointError):
    """Base of what the round's key-value store raises."""


class StoreTimeoutError(StoreError, TimeoutError):
    """Keys (or ranks, for a barrier) that did not come in time are in `missing`."""

    def __init__(self, message: str, *, missing: Iterable[object] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class StoreFencedError(StoreError):
    """The writer is no longer a member of the store's round: nothing was written."""


class BackendError(RallypointError):
    """Base of what a backend raises. Which subclass says what the caller may assume."""


class Unavailable(BackendError):
    """The request was not executed. Trying again is safe.

    `nothing_ended_at`, where it is known: a moment of this loop's clock at which the backend had nobody who could end a
    lease, and after which every lease has its full time again.
    """

    def __init__(self, message: str = "", *, nothing_ended_at: float | None = None) -> None:
        super().__init__(message)
        self.nothing_ended_at = nothing_ended_at


class OutcomeUnknown(BackendError):
    """The request may have been executed, now or later. Read again before deciding."""


class Rejected(BackendError):
    """The request was not executed and would not be if it were sent again."""


class LeaseGone(Rejected):
    """The lease that the request names has ended; `lease` is its id."""

    def __init__(self, message: str, *, lease: int) -> None:
        super().__init__(message)
        self.lease = lease


class HistoryGone(Rejected):
    """A watch asked for revisions that are no longer kept; `oldest` is the first that could still be watched from."""

    def __init__(self, message: str, *, oldest: int) -> None:
        super().__init__(message)
        self.oldest = oldest


class UnreadableState(Rejected, RendezvousStateError):
    """All that the backend holds is one thing, and that cannot be read: it is damaged, or not ours. Left as it is."""
