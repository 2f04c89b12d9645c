"""Text traces: a conversation between nodes, written down as commands and what they lead to.

A trace is a text of blocks: comment lines (`#`), command lines, a line `----`, the output up to the next empty line.
`run_trace(text)` drives a world of real node drivers on a memory backend under virtual time and gives the same text
back with the actual outputs; whoever keeps traces compares the two. The same text always gives the same outputs.

    # Two nodes meet.
    run min_nodes=2

    join a b
    ----
        0.000 a b: asks to join (join 1)
        ...
        0.000 a: -> round 1, rank 0 of 2, a:20001

After each command everything that can happen at that instant happens; only `advance` lets time pass. The commands:

    run OPTION=VALUE...               the options of all nodes; comes first, and once
    show debug | info | warning       the least level of events that is shown from here on (at first: debug)
    repeat N                          at the start of a block: the rest of the block N times
    advance SECONDS                   time passes
    start NAME... OPTION=VALUE...     new processes on these machines, which do not join
    join NAME... OPTION=VALUE...      they ask for the next round; those that do not run are started
    work NAME... OPTION=VALUE...      the same, and again whenever they are told that their round has changed
    leave NAME REASON                 go, without closing the run
    close NAME REASON                 close the run; `reopen` reopens it
    drain NAME REASON                 an operator asks a node to go
    crash NAME...                     the processes die without a word
    cut NAME...                       calls to the backend time out; without names: of all, also of those to come
    refuse NAME...                    calls to the backend are refused; the same
    heal NAME...                      the end of both
    hang NAME...                      the nodes do not get round to confirming; `unhang` ends it
    freeze NAME...                    the machines stand still, as stopped processes do; `thaw` ends it
    clock NAME SECONDS                the wall clock of a machine jumps
    put KEY VALUE                     write a key of the run, whatever it is; <NAME> is the id of that node
    keys PREFIX                       show the run's keys, and what is in them
    waiting NAME...                   show num_nodes_waiting() of these nodes
    members NAME...                   show the members of these nodes' rounds, in rank order

An event is shown as time, node and sentence, nodes that say the same at once on one line; the result of a call, after
`->`, stands for the event of the same content.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.testing.loop import run
from rallypoint.testing.stage import LONGEST_S, VERBS, Command, Stage, TraceError

__all__ = ["SEPARATOR", "Block", "Command", "TraceError", "parse_trace", "run_trace"]

MOST_TURNS = 100_000
SEPARATOR = "----"


@dataclass(slots=True)
class Block:
    """Text up to the separator as it stands, and the commands in it."""

    text: list[str] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    repeat: int = 1


def run_trace(text: str) -> str:
    """The trace with its actual outputs. TraceError if it cannot be understood."""
    blocks, tail = parse_trace(text)
    outputs = run(_run_blocks(blocks), limit_s=LONGEST_S, max_iterations=MOST_TURNS)
    lines: list[str] = []
    for block, output in zip(blocks, outputs, strict=True):
        lines += [*block.text, SEPARATOR, *output, ""]
    while lines and not lines[-1] and not tail:
        lines.pop()
    return "\n".join([*lines, *tail]) + "\n"


def parse_trace(text: str) -> tuple[list[Block], list[str]]:
    """The blocks, without their outputs, and what comes after the last one."""
    blocks: list[Block] = []
    block = Block()
    in_output = False
    for number, line in enumerate(text.splitlines(), start=1):
        if in_output:
            in_output = bool(line.strip())
        elif line == SEPARATOR:
            if not block.commands:
                raise TraceError(number, f"{SEPARATOR} without a command before it")
            blocks.append(block)
            block, in_output = Block(), True
        else:
            block.text.append(line.rstrip())
            if line.strip() and not line.startswith("#"):
                _parse_command(number, line, block)
    if block.commands:
        raise TraceError(block.commands[-1].line, f"{SEPARATOR} is missing after this command")
    _check_run_comes_first(blocks)
    return blocks, block.text


def _parse_command(number: int, line: str, block: Block) -> None:
    verb, *words = line.split()
    if verb == "repeat":
        if block.commands or len(words) != 1 or not words[0].isdecimal():
            raise TraceError(number, "repeat stands at the start of a block, with a number: repeat 20")
        block.repeat = int(words[0])
        return
    if verb not in VERBS:
        raise TraceError(number, f"unknown command {verb!r}: the commands are {', '.join(VERBS)}")
    options = dict(word.split("=", 1) for word in words if "=" in word)
    names = tuple(word for word in words if "=" not in word)
    block.commands.append(Command(number, verb, names, options, line.split(None, 1)[1] if words else ""))


def _check_run_comes_first(blocks: list[Block]) -> None:
    commands = [command for block in blocks for command in block.commands]
    for place, command in enumerate(commands):
        if (command.verb == "run") != (place == 0):
            raise TraceError(command.line, "run comes first, and once")


async def _run_blocks(blocks: list[Block]) -> list[list[str]]:
    stage = Stage()
    outputs = []
    for block in blocks:
        for _ in range(block.repeat):
            for command in block.commands:
                await stage.do(command)
        outputs.append(stage.take_output())
    await stage.end()
    return outputs
