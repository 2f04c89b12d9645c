"""Carries out the commands of a text trace on a world of nodes, and writes down what happens. See `traces`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rallypoint.backends.contract import Backend
from rallypoint.backends.memory import MemoryBackend
from rallypoint.errors import RallypointError
from rallypoint.events import Event, JoinFailed, NodeLeft, RoundEntered
from rallypoint.kv.types import Put
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Joined
from rallypoint.rendezvous.ranks import natural_key
from rallypoint.rendezvous.records import NodePhase
from rallypoint.rendezvous.run_config import RunConfig
from rallypoint.testing.brief import brief_key, brief_value
from rallypoint.testing.line import Line
from rallypoint.testing.loop import VirtualTimeLoop
from rallypoint.testing.world import EPOCH_S, Process, World

LONGEST_S = 10_000_000.0
RUN_ID = "run"
DATA = {"assign", "history", "roster", "store"}
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


class TraceError(RallypointError):
    """The text is not a trace; `line` is where."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line


@dataclass(frozen=True, slots=True)
class Command:
    """One command line, taken apart."""

    line: int
    verb: str
    names: tuple[str, ...]
    options: dict[str, str]
    rest: str
    """Everything after the first word."""


class Stage:
    """Carries out commands on a world, and writes down what happens."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self._loop = loop
        self._world: World | None = None
        self._keys = RunKeys("rallypoint", RUN_ID)
        self._output: list[str] = []
        self._last: tuple[float, list[str], str] | None = None
        self._level = logging.DEBUG
        self._lines: dict[str, Line] = {}
        self._line_state: Callable[[Line], None] = Line.heal
        self._shown_ids: dict[str, str] = {}
        self._lives: dict[str, int] = {}
        self._hidden: list[tuple[float, str, str]] = []
        """Events for which the result of the call is shown: time, node, content."""
        self._again: set[str] = set()
        self._calls: dict[asyncio.Task[Any], str] = {}
        self._line_number = 0
        self._quiet = False

    async def do(self, command: Command) -> None:
        """Carry out one command and let everything happen that can happen at this instant."""
        self._line_number = command.line
        await VERBS[command.verb](self, command)
        await self._settle()

    def take_output(self) -> list[str]:
        """What happened since the last time."""
        self._end_group()
        output, self._output = self._output, []
        return output

    async def end(self) -> None:
        """Nothing is shown any more; everything ends."""
        if self._world is None:
            return
        self._world.on_event = None
        self._quiet = True
        for line in self._lines.values():
            line.heal()
            line.release()
        await self._world.stop()

    # --- commands -----------------------------------------------------------------------------------------------------

    async def _run(self, command: Command) -> None:
        self._no_names(command)
        options: dict[str, Any] = dict(command.options)
        self._world = World(run_id=RUN_ID, wrap=self._wrap, **options)
        self._world.on_event = self._on_event

    async def _show(self, command: Command) -> None:
        level = LEVELS.get(command.rest)
        if level is None:
            raise self._error(f"show takes one of {', '.join(LEVELS)}, not {command.rest!r}")
        self._level = level

    async def _advance(self, command: Command) -> None:
        seconds = self._seconds(command.rest)
        if not 0 <= seconds <= LONGEST_S:
            raise self._error(f"{command.rest} s cannot pass")
        await asyncio.sleep(seconds)

    async def _start(self, command: Command) -> None:
        for name in self._names(command):
            self._start_one(name, command.options)
            await self._settle()

    async def _join(self, command: Command) -> None:
        for name in self._names(command):
            if self._started(name, command.options):
                self._join_one(name)

    async def _work(self, command: Command) -> None:
        for name in self._names(command):
            if self._started(name, command.options):
                process = self._process(name)
                process.node.listen(lambda cause, reason, process=process: self._on_changed(process))  # type: ignore[misc]
                self._join_one(name)

    async def _leave(self, command: Command) -> None:
        process, reason = self._who_and_why(command)
        self._call(process, process.node.leave(reason))

    async def _close(self, command: Command) -> None:
        process, reason = self._who_and_why(command)
        self._call(process, process.node.close_run(reason))

    async def _reopen(self, command: Command) -> None:
        process, reason = self._who_and_why(command)
        self._call(process, process.node.reopen_run(reason))

    async def _drain(self, command: Command) -> None:
        node, _, reason = command.rest.partition(" ")
        world = self._stage()
        settings = next((process.node.settings for process in world.processes.values()), None)
        if settings is None:
            raise self._error("nobody can be drained: no process runs")
        backend = MemoryBackend(world.server)
        operator = RunConfig(backend, self._keys, settings, "operator", str, lambda: EPOCH_S + self._loop.time())
        try:
            await operator.drain(node, reason)
        except RallypointError as error:
            self._say("operator", _result(error))

    async def _crash(self, command: Command) -> None:
        for name in self._names(command):
            self._process(name)
            for task, caller in self._calls.items():
                if caller == name:
                    task.cancel()
            self._stage().crash(name)
            self._lines.pop(name).refuse()

    async def _cut(self, command: Command) -> None:
        self._throw(command, Line.cut)

    async def _refuse(self, command: Command) -> None:
        self._throw(command, Line.refuse)

    async def _heal(self, command: Command) -> None:
        self._throw(command, Line.heal)

    async def _hang(self, command: Command) -> None:
        for name in self._names(command):
            self._process(name)
            self._lines[name].withhold(self._is_confirmation)

    async def _unhang(self, command: Command) -> None:
        for name in self._names(command):
            self._process(name)
            self._lines[name].release()

    async def _freeze(self, command: Command) -> None:
        for name in self._names(command):
            self._process(name)
            self._stage().freeze(name)

    async def _thaw(self, command: Command) -> None:
        for name in self._names(command):
            self._process(name)
            self._stage().thaw(name)

    async def _clock(self, command: Command) -> None:
        name, _, seconds = command.rest.partition(" ")
        clocks = self._stage().clocks
        clocks[name] = clocks.get(name, 0.0) + self._seconds(seconds)

    async def _put(self, command: Command) -> None:
        key, _, value = command.rest.partition(" ")
        if not value:
            raise self._error("put takes a key and a value")
        for process in self._stage().processes.values():
            key = key.replace(f"<{process.name}>", process.node.identity.id)
        root = self._keys.data if key.split("/")[0] in DATA else self._keys.control
        await MemoryBackend(self._stage().server).txn((), [Put(root + key, value.encode())])

    async def _show_keys(self, command: Command) -> None:
        backend = MemoryBackend(self._stage().server)
        for prefix in (self._keys.control, self._keys.data):
            items = (await backend.scan(prefix)).items
            values = {self._readable(brief_key(item.key[len(prefix) :])): item.value for item in items}
            for key in sorted(values):
                if key.startswith(command.rest):
                    self._print(f"{key}: {self._readable(brief_value(values[key]))}")

    async def _waiting(self, command: Command) -> None:
        for name in self._names(command):
            self._print(f"{name}: {self._process(name).node.waiting_count()}")

    async def _members(self, command: Command) -> None:
        for name in self._names(command):
            process = self._process(name)
            if process.node.current is None:
                self._print(f"{name}: in no round")
                continue
            try:
                members = await process.node.roster(process.node.current)
            except RallypointError as error:
                self._print(f"{name}: {_result(error)}")
                continue
            ranked = " ".join(member.name for member in members)
            self._print(f"{name}: round {process.node.current.number}: {ranked}")

    # --- processes ----------------------------------------------------------------------------------------------------

    def _started(self, name: str, options: dict[str, str]) -> bool:
        if name not in self._stage().processes:
            return self._start_one(name, options)
        if options:
            raise self._error(f"{name} runs already: its options cannot change")
        return True

    def _start_one(self, name: str, options: dict[str, str]) -> bool:
        world = self._stage()
        if name in world.processes:
            raise self._error(f"{name} runs already")
        try:
            process = world.start(name, **options)
        except RallypointError as error:
            self._say(name, _result(error))
            return False
        life = self._lives[name] = self._lives.get(name, 0) + 1
        self._shown_ids[process.node.identity.id] = name if life == 1 else f"{name}#{life}"
        return True

    def _wrap(self, name: str, backend: Backend) -> Line:
        line = self._lines[name] = Line(backend)
        self._line_state(line)
        return line

    def _join_one(self, name: str) -> None:
        process = self._process(name)
        self._again.discard(name)
        call = self._stage().join(name)
        call.add_done_callback(lambda task: self._on_joined(process, task))

    def _on_joined(self, process: Process, task: asyncio.Task[Joined]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._say_result(process.name, _result(error), f"{type(error).__name__}: {error}")
            return
        joined = task.result()
        place = f"round {joined.number}, rank {joined.rank} of {joined.size}"
        self._say_result(process.name, f"-> {place}, {joined.addr}:{joined.port}", place)
        self._join_again(process)

    def _on_changed(self, process: Process) -> None:
        self._again.add(process.name)
        self._loop.call_soon(self._join_again, process)

    def _join_again(self, process: Process) -> None:
        alive = self._stage().processes.get(process.name) is process and not self._quiet
        if alive and process.name in self._again and (process.call is None or process.call.done()):
            self._join_one(process.name)

    def _call(self, process: Process, coro: Coroutine[Any, Any, object]) -> None:
        """Something a node does that may take its time; only a failure and a refusal are worth a line."""

        def ended(task: asyncio.Task[object]) -> None:
            del self._calls[task]
            if task.cancelled():
                return
            error = task.exception()
            if error is not None:
                self._say(process.name, _result(error))
            elif task.result() is False:
                self._say(process.name, "-> there was nothing to do")

        task = self._stage().call(process.name, coro)
        self._calls[task] = process.name
        task.add_done_callback(ended)

    def _throw(self, command: Command, switch: Callable[[Line], None]) -> None:
        if not command.names:
            self._line_state = switch
        for name in command.names or tuple(self._lines):
            self._process(name)
            switch(self._lines[name])

    def _is_confirmation(self, put: Put) -> bool:
        member = f'"phase":"{NodePhase.MEMBER.value}"'
        return put.key.startswith(self._keys.nodes) and member.encode() in put.value

    # --- arguments ----------------------------------------------------------------------------------------------------

    def _stage(self) -> World:
        assert self._world is not None, "run comes first"
        return self._world

    def _process(self, name: str) -> Process:
        process = self._stage().processes.get(name)
        if process is None:
            raise self._error(f"{name!r} is no running process")
        return process

    def _names(self, command: Command) -> tuple[str, ...]:
        if not command.names:
            raise self._error(f"{command.verb} takes one name or more")
        return command.names

    def _no_names(self, command: Command) -> None:
        if command.names:
            raise self._error(f"{command.verb} takes OPTION=VALUE only, not {command.names[0]!r}")

    def _who_and_why(self, command: Command) -> tuple[Process, str]:
        name, _, reason = command.rest.partition(" ")
        if not reason:
            raise self._error(f"{command.verb} takes a name and a reason")
        return self._process(name), reason

    def _seconds(self, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise self._error(f"{text!r} is no number of seconds") from None

    def _error(self, message: str) -> TraceError:
        return TraceError(self._line_number, message)

    # --- output -------------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        while not self._loop.is_idle:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def _on_event(self, at: float, event: Event) -> None:
        match event:
            case RoundEntered():
                self._hidden.append((at, event.by, f"round {event.round}, rank {event.rank} of {event.world_size}"))
            case JoinFailed():
                self._hidden.append((at, event.by, f"{event.error}: {event.reason}"))
            case NodeLeft():
                self._hidden.append((at, event.by, f"RendezvousGracefulExitError: {event.reason}"))
                self._say(event.by, event.text())
            case _ if event.level >= self._level:
                self._say(event.by, event.text())

    def _say_result(self, who: str, sentence: str, content: str) -> None:
        said = (self._loop.time(), who, content) in self._hidden
        self._say(who, sentence if said else f"{sentence} (no event says so)")

    def _say(self, who: str, sentence: str) -> None:
        """A line of the output, or one more who says the same at the same time."""
        now = self._loop.time()
        if self._last is not None and self._last[0] == now and self._last[2] == sentence and who not in self._last[1]:
            self._last[1].append(who)
            return
        self._end_group()
        self._last = (now, [who], sentence)

    def _end_group(self) -> None:
        if self._last is not None:
            at, names, sentence = self._last
            self._last = None
            who = " ".join(sorted(names, key=natural_key))
            self._output.append(self._readable(f"{at:9.3f} {who}: {sentence}"))

    def _print(self, line: str) -> None:
        self._end_group()
        self._output.append(line)

    def _readable(self, text: str) -> str:
        """Names instead of ids."""
        for node_id, name in self._shown_ids.items():
            text = text.replace(node_id, name)
        return text


def _result(error: BaseException) -> str:
    return f"-> {type(error).__name__}: {error}"


VERBS: dict[str, Callable[[Stage, Command], Coroutine[Any, Any, None]]] = {
    "run": Stage._run,
    "show": Stage._show,
    "advance": Stage._advance,
    "start": Stage._start,
    "join": Stage._join,
    "work": Stage._work,
    "leave": Stage._leave,
    "close": Stage._close,
    "reopen": Stage._reopen,
    "drain": Stage._drain,
    "crash": Stage._crash,
    "cut": Stage._cut,
    "refuse": Stage._refuse,
    "heal": Stage._heal,
    "hang": Stage._hang,
    "unhang": Stage._unhang,
    "freeze": Stage._freeze,
    "thaw": Stage._thaw,
    "clock": Stage._clock,
    "put": Stage._put,
    "keys": Stage._show_keys,
    "waiting": Stage._waiting,
    "members": Stage._members,
}
