"""All errors of Rallypoint, divided by what the caller should do.

RallypointError
├── SettingsError (ValueError)          correct the call, the URL or the option, then try again
├── DataError                           follow the advice in the text, or start with another directory
├── RendezvousError                     catch the ones below that you can handle
│   ├── RendezvousClosedError           the run was closed: stop, or reopen it
│   ├── RendezvousTimeoutError          the text names the missing nodes: start them, or wait longer
│   ├── RendezvousConnectionError       check endpoint, token and network: `rallypoint doctor` does
│   ├── RendezvousStateError            inspect the key that it names, or use another run id
│   │   └── NewerSchemaError            ... because a newer version wrote it: upgrade this one
│   ├── RendezvousGracefulExitError     a spare of a run that ended, or asked to go: exit with success
│   ├── SettingsMismatchError           give all nodes the same settings, or this node another run id
│   ├── SessionLostError                this node's lease ended: join again
│   └── ForkedProcessError              the object belongs to the parent process: create a new one
├── StoreError                          the round may be over
│   ├── StoreTimeoutError (TimeoutError)    check the keys or ranks that it names, or wait longer
│   └── StoreFencedError                join again: a newer round has a store of its own
└── BackendError                        the subclass says whether the request was executed
    ├── Unavailable                     try again
    ├── OutcomeUnknown                  read again before deciding
    └── Rejected                        do not retry
        ├── LeaseGone                   ... because the lease has ended
        ├── UnreadableState (RendezvousStateError)  ... because the state is damaged or foreign: use another place
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
    """The data directory of a server cannot be used as it is."""


class RendezvousError(RallypointError):
    """Base of the errors of the public rendezvous API."""


class RendezvousClosedError(RendezvousError):
    """The run is closed: no node can join it until it is reopened.

    `why`: the reason that was given for the close. `outcome`: the exit code of the run, if it was closed because it has
    ended.
    """

    def __init__(self, message: str = "", *, why: str = "", outcome: int | None = None) -> None:
        super().__init__(message)
        self.why = why
        self.outcome = outcome


class RendezvousTimeoutError(RendezvousError):
    """No round within the deadline, or the run could not be closed or reopened within it."""


class RendezvousConnectionError(RendezvousError):
    """The backend could not be reached, or refused this node."""


class RendezvousStateError(RendezvousError):
    """The backend holds damaged or foreign data; `key` says where."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class NewerSchemaError(RendezvousStateError):
    """A record was written by a newer version that this one does not understand."""


class RendezvousGracefulExitError(RendezvousError):
    """This node is to leave with success: the run ended while it was a spare, or it was asked to go."""


class SettingsMismatchError(RendezvousError):
    """This node's settings differ from those of the run; `differences` maps option to (this node's, the run's)."""

    def __init__(self, message: str, *, differences: dict[str, tuple[object, object]]) -> None:
        super().__init__(message)
        self.differences = differences


class SessionLostError(RendezvousError):
    """This node's session ended; it is no longer a member of any round."""


class ForkedProcessError(RendezvousError):
    """An object that was created before a fork was used in the child."""


class StoreError(RallypointError):
    """Base of the errors of the round's key-value store."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A wait timed out; `missing` contains the missing keys (or ranks, for a barrier)."""

    def __init__(self, message: str, *, missing: Iterable[object] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class StoreFencedError(StoreError):
    """The writer is no longer a member of the store's round: nothing was written."""


class BackendError(RallypointError):
    """Base of the errors of a backend. The subclass says what the caller may assume."""


class Unavailable(BackendError):
    """The request was not executed. A retry is safe.

    `nothing_ended_at`, if known: a time of this loop's clock at which the backend had no leader, so that no lease could
    end, and after which every lease has its full time again.
    """

    def __init__(self, message: str = "", *, nothing_ended_at: float | None = None) -> None:
        super().__init__(message)
        self.nothing_ended_at = nothing_ended_at


class OutcomeUnknown(BackendError):
    """The request may have been executed, or may still be executed later."""


class Rejected(BackendError):
    """The request was not executed, and a retry would fail, too."""


class LeaseGone(Rejected):
    """The lease that the request names has ended; `lease` is its id."""

    def __init__(self, message: str, *, lease: int) -> None:
        super().__init__(message)
        self.lease = lease


class HistoryGone(Rejected):
    """A watch starts at revisions that are no longer kept; `oldest` is the earliest valid start."""

    def __init__(self, message: str, *, oldest: int) -> None:
        super().__init__(message)
        self.oldest = oldest


class UnreadableState(Rejected, RendezvousStateError):
    """The whole state of the backend is one value, which is damaged or foreign. It is not changed."""
