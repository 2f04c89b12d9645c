"""What browsers read, kept up to date: one feed a run and one for the list of runs, shared by all their readers.

A feed starts with its first reader and stops a while after the last has gone. Readers are sent nothing: each asks for
the difference to what it has, when there is news and it is ready for more. So a slow reader takes no memory.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import msgspec

from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import Backend
from rallypoint.dashboard.run_view import RunView
from rallypoint.dashboard.source import OPEN_S, RunSource
from rallypoint.dashboard.versioned import Versioned
from rallypoint.errors import BackendError, RallypointError, RendezvousStateError
from rallypoint.observe.follower import Follower
from rallypoint.observe.listing import RunSummary, list_runs
from rallypoint.observe.report import Report
from rallypoint.observe.run_events import RunEvents
from rallypoint.observe.target import Target
from rallypoint.rendezvous.records import RosterRecord, decode

BATCH_S = 0.25
"""Changes within this time are one update."""
QUIET_S = 0.1
"""An update waits until nothing changed for so long: a round of a thousand nodes is one update."""
LINGER_S = 60.0
"""A feed outlives its last reader by this, so that a page that is loaded again finds its time line."""
MOST_FEEDS = 64
RETRY_FIRST_S, RETRY_MOST_S = 1.0, 10.0
CACHED_S = 0.5
"""An update contains the time of day, so it is not reused for long."""
LIST_EVERY_S = 2.0
LIST_SHARE = 20
"""Listing the runs takes at most this part of the time: one twentieth."""
logger = logging.getLogger("rallypoint.dashboard")
encoder = msgspec.json.Encoder()


def wall() -> float:
    """The time of day, as people read it."""
    return time.time()


class TooManyRuns(RallypointError):
    """Too many runs are looked at already."""


class VersionedView(Protocol):
    """What a feed shows."""

    @property
    def version(self) -> int:
        """The latest; 0: there is none yet."""

    def since(self, version: int, now: float) -> msgspec.Struct:
        """The difference to a version; 0: everything."""


class Feed:
    """A view, kept up to date by a task: each item of `updates` means that the view has changed."""

    def __init__(self, name: str, view: VersionedView, updates: AsyncIterator[None]) -> None:
        self.epoch = secrets.token_hex(4)
        """Versions of another epoch mean nothing here."""
        self.readers = 0
        self.view = view
        self._news = asyncio.Event()
        self._cached: dict[int, bytes] = {}
        self._cached_for = 0
        self._cached_at = 0.0
        self._task = asyncio.create_task(self._run(updates), name=name)
        self._task.add_done_callback(self._ended)

    @property
    def is_over(self) -> bool:
        """Nothing keeps the view up to date any more."""
        return self._task.done()

    @property
    def news(self) -> asyncio.Event:
        """Set when there is something newer than now."""
        return self._news

    @property
    def version(self) -> int:
        return self.view.version

    def message(self, version: int) -> tuple[int, bytes]:
        """The latest version, and the difference to `version` as JSON. Readers of the same version share the work."""
        latest, now = self.view.version, wall()
        if self._cached_for != latest or abs(now - self._cached_at) > CACHED_S:
            self._cached, self._cached_for, self._cached_at = {}, latest, now
        if version not in self._cached:
            self._cached[version] = encoder.encode(self.view.since(version, now))
        return latest, self._cached[version]

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, updates: AsyncIterator[None]) -> None:
        async for _ in updates:
            news, self._news = self._news, asyncio.Event()
            news.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s has failed; its next reader starts it again", task.get_name(), exc_info=error)
        self._news.set()


class Feeds:
    """All feeds of a page. Belongs to the loop it is used on."""

    def __init__(self, source: RunSource, linger_s: float = LINGER_S) -> None:
        self.source = source
        self._linger_s = linger_s
        self._feeds: dict[str | None, Feed] = {}
        self._timers: dict[str | None, asyncio.TimerHandle] = {}
        """When feeds without readers stop."""
        self._stopping: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._feeds)

    @asynccontextmanager
    async def reading(self, run_id: str | None) -> AsyncIterator[Feed]:
        """The feed of a run, or of the list of runs (None). TooManyRuns; SettingsError for a wrong run id."""
        feed = self._feeds.get(run_id)
        if feed is None or feed.is_over:
            if len(self._feeds) >= MOST_FEEDS and not self._stop_unread():
                raise TooManyRuns(f"{MOST_FEEDS} runs are looked at already: close some of those pages")
            feed = self._feeds[run_id] = self._start(run_id)
        timer = self._timers.pop(run_id, None)
        if timer is not None:
            timer.cancel()
        feed.readers += 1
        try:
            yield feed
        finally:
            feed.readers -= 1
            if feed.readers == 0 and self._feeds.get(run_id) is feed:
                loop = asyncio.get_running_loop()
                self._timers[run_id] = loop.call_later(self._linger_s, self._stop, run_id)

    async def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for run_id in list(self._feeds):
            self._stop(run_id)
        await asyncio.gather(*self._stopping, return_exceptions=True)

    def _start(self, run_id: str | None) -> Feed:
        source = self.source
        if run_id is None:
            runs = RunList(source.only)
            return Feed("list of runs", runs, keep_listing(source, runs))
        target, view = source.target(run_id), RunView(run_id, source.where)
        return Feed(f"feed of run {run_id}", view, keep_following(source, target, view))

    def _stop_unread(self) -> bool:
        """Make room for another feed, if one has no readers."""
        for run_id in list(self._timers):
            self._timers.pop(run_id).cancel()
            self._stop(run_id)
            return True
        return False

    def _stop(self, run_id: str | None) -> None:
        self._timers.pop(run_id, None)
        task = asyncio.create_task(self._feeds.pop(run_id).stop(), name="end of a feed")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)


# --- one run ----------------------------------------------------------------------------------------------------------


async def keep_following(source: RunSource, target: Target, view: RunView) -> AsyncIterator[None]:
    """Yield whenever the view has changed. An outage is shown, and ends nothing."""
    backoff = Backoff(random.Random(), RETRY_FIRST_S, RETRY_MOST_S)
    run_events = RunEvents()
    while True:
        try:
            async with source.open(target) as backend:
                follower = Follower(
                    backend, target.keys, source.where, pause_s=BATCH_S, quiet_s=QUIET_S, on_changes=run_events.take
                )
                async for report in follower:
                    backoff.reset()
                    events, run_events.events = run_events.events, []
                    departures, run_events.departures = run_events.departures, []
                    if report.exists and not view.exists:
                        view.add_past(events, await _rosters(backend, target, report))
                    if view.update(report, events, follower.trouble, wall(), departures):
                        yield
        except RallypointError as error:
            if view.fail(str(error)):
                yield
        await backoff.sleep()


async def _rosters(backend: Backend, target: Target, report: Report) -> dict[int, list[str]]:
    """The members of the last two rounds, as far as the run still has their rosters. In rank order."""
    found: dict[int, list[str]] = {}
    for past in report.rounds[-2:]:
        items = (await backend.scan(target.keys.roster(past.number))).items
        with suppress(RendezvousStateError):  # the follower reports records that cannot be read
            found[past.number] = [member.name for item in items for member in decode(RosterRecord, item).members]
    return found


# --- the list of runs -------------------------------------------------------------------------------------------------


class RunListUpdate(msgspec.Struct, omit_defaults=True, kw_only=True):
    """`full`: the reader starts from nothing."""

    version: int
    now: float
    full: bool = False
    trouble: str = ""
    runs: list[RunSummary] = []
    gone: list[str] = []


class RunList:
    """The runs of a source, with versions. Pure."""

    def __init__(self, only: str | None) -> None:
        self.version = 0
        self._only = only
        self._runs: Versioned[str, RunSummary] = Versioned()
        self._trouble = ""

    def update(self, runs: list[RunSummary], trouble: str = "") -> bool:
        """Whether anything has changed."""
        version, changed = self.version + 1, self.version == 0 or trouble != self._trouble
        self._trouble = trouble
        listed = {run.run_id: run for run in runs if self._only in (None, run.run_id)}
        for run_id, run in listed.items():
            changed |= self._runs.put(run_id, run, version)
        for run_id in [run_id for run_id in self._runs if run_id not in listed]:
            self._runs.remove(run_id, version)
            changed = True
        self.version += changed
        return changed

    def fail(self, trouble: str) -> bool:
        """The runs are as they were, as far as is known; whether anything has changed."""
        return self.update(list(self._runs.changed(-1).values()), trouble)

    def since(self, version: int, now: float) -> RunListUpdate:
        is_known = 0 < version <= self.version and self._runs.knows(version)
        known = version if is_known else -1
        return RunListUpdate(
            version=self.version,
            now=now,
            full=not is_known,
            trouble=self._trouble,
            runs=list(self._runs.changed(known).values()),
            gone=self._runs.removed(known) if is_known else [],
        )


async def keep_listing(source: RunSource, runs: RunList) -> AsyncIterator[None]:
    """Yield whenever the list has changed. An outage is shown, and ends nothing."""
    loop = asyncio.get_running_loop()
    backoff = Backoff(random.Random(), RETRY_FIRST_S, RETRY_MOST_S)
    target = source.any_target()
    while True:
        try:
            async with source.open(target) as backend:
                while True:
                    began_at = loop.time()
                    async with asyncio.timeout(OPEN_S):
                        found = await list_runs(backend, target.settings.etcd_prefix)
                    backoff.reset()
                    if runs.update(found):
                        yield
                    await asyncio.sleep(max(LIST_EVERY_S, (loop.time() - began_at) * LIST_SHARE))
        except (BackendError, TimeoutError) as error:
            if runs.fail(str(error) or f"no answer from {source.where} within {OPEN_S:g} s"):
                yield
        await backoff.sleep()
