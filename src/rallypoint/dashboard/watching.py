"""One follower a run, for all who look: started when the first comes, stopped a while after the last has gone.

Readers are not sent anything: they ask for the difference to what they have, whenever there is news and they are ready
for more. A slow one costs as much as a fast one, and no memory.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import Backend
from rallypoint.dashboard.picture import Picture
from rallypoint.dashboard.places import OPEN_S, Place
from rallypoint.dashboard.versioned import Versioned
from rallypoint.errors import BackendError, RallypointError, RendezvousStateError
from rallypoint.observe.follower import Follower
from rallypoint.observe.listing import RunSummary, list_runs
from rallypoint.observe.run_events import RunEvents
from rallypoint.observe.target import Target
from rallypoint.rendezvous.records import RosterRecord, decode

PAUSE_S = 0.25
"""Changes that come within this time are shown together."""
QUIET_S = 0.1
"""What happens to many nodes at once is shown when nothing came for so long: a round of a thousand is one change."""
LINGER_S = 60.0
"""So long after the last reader has gone, a run is still followed: a page that is loaded again finds its time line."""
MOST_RUNS = 64
"""That are followed at a time."""
FIRST_S, MOST_S = 1.0, 10.0
CACHED_S = 0.5
"""A message says what time it is, so it is not kept for long."""
POLL_SHARE = 20
"""The list of runs is looked at for at most one part in so many of the time."""
logger = logging.getLogger("rallypoint.dashboard")
encoder = msgspec.json.Encoder()


def wall() -> float:
    """The time of day, for people: where the time line begins and ends."""
    return time.time()


class Crowded(RallypointError):
    """Too much is looked at already."""


class Shown(Protocol):
    """What can be shown as versions."""

    @property
    def version(self) -> int: ...

    def since(self, version: int, now: float) -> msgspec.Struct: ...


class Readable(Protocol):
    """Something that is kept up to date, for readers."""

    readers: int

    @property
    def epoch(self) -> str:
        """Versions of another one mean nothing here."""

    @property
    def version(self) -> int:
        """The latest; 0: there is none yet."""

    @property
    def news(self) -> asyncio.Event:
        """Set when there is something newer than now."""

    @property
    def is_over(self) -> bool:
        """It is not kept up to date any more."""

    async def tell(self, version: int) -> tuple[int, bytes] | None:
        """The version that it leads to, and the difference as JSON. None: it is over, and cannot be asked."""

    async def stop(self) -> None:
        """Nobody reads it any more."""


class Elsewhere(Protocol):
    """Who draws runs in another process."""

    def show(self, run_id: str) -> Readable | None:
        """None: it cannot at present, and the run is to be drawn here."""

    async def close(self) -> None:
        """Everything ends."""


class Channel:
    """Something that is kept up to date by a task while it has readers. Belongs to a `Watching`."""

    def __init__(self, name: str, shown: Shown, work: Callable[[Channel], AsyncIterator[None]]) -> None:
        self.epoch = secrets.token_hex(4)
        self.readers = 0
        self.shown = shown
        self._news = asyncio.Event()
        self._cached: dict[int, bytes] = {}
        self._cached_for = 0
        self._cached_at = 0.0
        self._task = asyncio.create_task(self._run(work), name=name)
        self._task.add_done_callback(self._ended)

    @property
    def is_over(self) -> bool:
        """It is not kept up to date any more."""
        return self._task.done()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s has failed; it begins anew when it is looked at again", task.get_name(), exc_info=error)
        self._news.set()

    async def _run(self, work: Callable[[Channel], AsyncIterator[None]]) -> None:
        async for _ in work(self):
            news, self._news = self._news, asyncio.Event()
            news.set()

    @property
    def news(self) -> asyncio.Event:
        """Set when there is something newer than now."""
        return self._news

    def message(self, version: int) -> tuple[int, bytes]:
        """The version that it leads to, and the difference as JSON. Many readers of one version share the work."""
        latest, now = self.shown.version, wall()
        if self._cached_for != latest or abs(now - self._cached_at) > CACHED_S:
            self._cached, self._cached_for, self._cached_at = {}, latest, now
        if version not in self._cached:
            self._cached[version] = encoder.encode(self.shown.since(version, now))
        return latest, self._cached[version]

    @property
    def version(self) -> int:
        return self.shown.version

    async def tell(self, version: int) -> tuple[int, bytes]:
        return self.message(version)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Watching:
    """All that is looked at. Belongs to the loop it is made on. Runs are drawn `elsewhere` if that is given."""

    def __init__(self, place: Place, linger_s: float = LINGER_S, elsewhere: Elsewhere | None = None) -> None:
        self.place = place
        self._linger_s = linger_s
        self._elsewhere = elsewhere
        self._channels: dict[str | None, Readable] = {}
        self._endings: dict[str | None, asyncio.TimerHandle] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    @property
    def followed(self) -> int:
        """How many runs are followed now, and the list if it is."""
        return len(self._channels)

    @asynccontextmanager
    async def reading(self, run_id: str | None) -> AsyncIterator[Readable]:
        """A run, or the list of runs (None). Crowded, and what is wrong with the run id as SettingsError."""
        channel = self._channels.get(run_id)
        if channel is None or channel.is_over:
            if len(self._channels) >= MOST_RUNS and not self._make_room():
                raise Crowded(f"{MOST_RUNS} runs are looked at already: close some of those pages")
            channel = self._channels[run_id] = self._start(run_id)
        ending = self._endings.pop(run_id, None)
        if ending is not None:
            ending.cancel()
        channel.readers += 1
        try:
            yield channel
        finally:
            channel.readers -= 1
            if channel.readers == 0 and self._channels.get(run_id) is channel:
                loop = asyncio.get_running_loop()
                self._endings[run_id] = loop.call_later(self._linger_s, self._end, run_id)

    def _start(self, run_id: str | None) -> Readable:
        place = self.place
        if run_id is None:
            runs = RunList(place.only)
            return Channel("list of runs", runs, lambda _: keep_listing(place, runs))
        place.target(run_id)  # says what is wrong with it
        drawn = None if self._elsewhere is None else self._elsewhere.show(run_id)
        return drawn or draw(place, run_id)

    def _make_room(self) -> bool:
        """One that nobody looks at any more goes at once."""
        for run_id in list(self._endings):
            self._endings.pop(run_id).cancel()
            self._end(run_id)
            return True
        return False

    def _end(self, run_id: str | None) -> None:
        self._endings.pop(run_id, None)
        task = asyncio.create_task(self._channels.pop(run_id).stop(), name="end of a picture")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        """Everything ends."""
        for ending in self._endings.values():
            ending.cancel()
        self._endings.clear()
        for run_id in list(self._channels):
            self._end(run_id)
        await asyncio.gather(*self._stopping, return_exceptions=True)
        if self._elsewhere is not None:
            await self._elsewhere.close()


# --- one run ----------------------------------------------------------------------------------------------------------


def draw(place: Place, run_id: str) -> Channel:
    """The picture of a run, kept up to date here. SettingsError."""
    target, picture = place.target(run_id), Picture(run_id, place.where)
    return Channel(f"picture of {run_id}", picture, lambda _: keep_following(place, target, picture))


async def keep_following(place: Place, target: Target, picture: Picture) -> AsyncIterator[None]:
    """Yields whenever the picture is another. Outages are shown, and lived through."""
    backoff = Backoff(random.Random(), FIRST_S, MOST_S)
    while True:
        try:
            async with place.open(target) as backend:
                if not picture.exists:
                    await _recall(backend, target, picture)
                run_events = RunEvents()
                follower = Follower(
                    backend, target.keys, place.where, pause_s=PAUSE_S, quiet_s=QUIET_S, on_changes=run_events.take
                )
                async for report in follower:
                    backoff.reset()
                    told, run_events.events = run_events.events, []
                    if picture.update(report, told, follower.trouble, wall()):
                        yield
        except RallypointError as error:
            if picture.fail(str(error)):
                yield
        await backoff.sleep()


async def _recall(backend: Backend, target: Target, picture: Picture) -> None:
    """Who was in the round before the current one, as far as the run still knows."""
    from rallypoint.observe.follower import read_report

    report = await read_report(backend, target.keys, target.where)
    over = [past for past in report.rounds if past.lasted_s is not None]
    if not over:
        return
    past = over[-1]
    names = []
    try:
        for item in (await backend.scan(target.keys.roster(past.number))).items:
            names += [member.name for member in decode(RosterRecord, item).members]
    except RendezvousStateError:
        return  # the follower names what cannot be read
    picture.remember(past.number, names, past.active_at, past.active_at + (past.lasted_s or 0.0))


# --- the list of runs -------------------------------------------------------------------------------------------------


class Runs(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What a reader of the list is told."""

    version: int
    now: float
    full: bool = False
    trouble: str = ""
    runs: list[RunSummary] = []
    gone: list[str] = []


class RunList:
    """The runs of a place, with versions. Pure."""

    def __init__(self, only: str | None) -> None:
        self.version = 0
        self._only = only
        self._runs: Versioned[str, RunSummary] = Versioned()
        self._trouble = ""

    def update(self, runs: list[RunSummary], trouble: str = "") -> bool:
        """Whether anything is different."""
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
        """What is known stays."""
        return self.update(list(self._runs.changed(-1).values()), trouble)

    def since(self, version: int, now: float) -> Runs:
        is_known = 0 < version <= self.version and self._runs.knows(version)
        known = version if is_known else -1
        return Runs(
            version=self.version,
            now=now,
            full=not is_known,
            trouble=self._trouble,
            runs=list(self._runs.changed(known).values()),
            gone=self._runs.removed(known) if is_known else [],
        )


async def keep_listing(place: Place, runs: RunList) -> AsyncIterator[None]:
    """Yields whenever the list is another."""
    loop = asyncio.get_running_loop()
    backoff = Backoff(random.Random(), FIRST_S, MOST_S)
    target = place.anything()
    while True:
        try:
            async with place.open(target) as backend:
                while True:
                    began_at = loop.time()
                    async with asyncio.timeout(OPEN_S):
                        found = await list_runs(backend, target.settings.etcd_prefix)
                    backoff.reset()
                    if runs.update(found):
                        yield
                    await asyncio.sleep(max(place.poll_s, (loop.time() - began_at) * POLL_SHARE))
        except (BackendError, TimeoutError) as error:
            if runs.fail(str(error) or f"no answer from {place.where} within {OPEN_S:g} s"):
                yield
        await backoff.sleep()
