"""Text traces: scenarios with several nodes as commands and their expected output.

A trace is a text of blocks: comment lines (`#`), command lines, a line `----`, the output up to the next empty line.
`run_trace(text)` runs the commands on a world of real node drivers with a memory backend under virtual time, and
returns the text with the actual outputs; a test compares the two. The same text always gives the same outputs.

    # Two nodes meet.
    run min_nodes=2

    join a b
    ----
        0.000 a b: asks to join (join 1)
        ...
        0.000 a: -> round 1, rank 0 of 2, a:20001

After each command, everything that is ready at that instant runs; only `advance` lets time pass. The commands:

    run OPTION=VALUE...               the options of all nodes; must be the first command
    show debug | info | warning       show events of at least this level from here on (default: debug)
    repeat N                          at the start of a block: repeat the rest of the block N times
    advance SECONDS                   time passes
    start NAME... OPTION=VALUE...     start processes on these machines, without joining
    join NAME... OPTION=VALUE...      join the next round; processes that do not run are started
    work NAME... OPTION=VALUE...      join, and join again whenever the node is told that its round has changed
    leave NAME REASON                 leave, without closing the run
    close NAME REASON                 close the run; `reopen` reopens it
    drain NAME REASON                 an operator asks the node to leave
    crash NAME...                     the processes are killed
    cut NAME...                       calls to the backend time out; without names: for all nodes, also future ones
    refuse NAME...                    calls to the backend are refused; names as for cut
    heal NAME...                      ends cut and refuse
    hang NAME...                      confirmations of the nodes are held back; `unhang` ends it
    freeze NAME...                    the machines are paused, like a process with SIGSTOP; `thaw` ends it
    clock NAME SECONDS                the wall clock of a machine jumps
    put KEY VALUE                     write any key of the run; <NAME> is the id of that node
    keys PREFIX                       show the run's keys and values
    waiting NAME...                   show num_nodes_waiting() of these nodes
    members NAME...                   show the members of these nodes' rounds, in rank order

An event is shown as time, node and sentence; nodes with the same sentence at the same time share a line. The result of
a call, after `->`, replaces the event with the same content.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rallypoint.testing.loop import run
from rallypoint.testing.trace_runner import LONGEST_S, VERBS, Command, TraceError, TraceRunner

__all__ = ["SEPARATOR", "Block", "Command", "TraceError", "parse_trace", "run_trace"]

MOST_TURNS = 100_000
SEPARATOR = "----"


@dataclass(slots=True)
class Block:
    """The text up to the separator, and its commands."""

    text: list[str] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    repeat: int = 1


def run_trace(text: str) -> str:
    """The trace with its actual outputs. TraceError if it is malformed."""
    blocks, tail = parse_trace(text)
    outputs = run(_run_blocks(blocks), limit_s=LONGEST_S, max_iterations=MOST_TURNS)
    lines: list[str] = []
    for block, output in zip(blocks, outputs, strict=True):
        lines += [*block.text, SEPARATOR, *output, ""]
    while lines and not lines[-1] and not tail:
        lines.pop()
    return "\n".join([*lines, *tail]) + "\n"


def parse_trace(text: str) -> tuple[list[Block], list[str]]:
    """The blocks, without their outputs, and the text after the last block."""
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
            raise TraceError(number, "repeat must be at the start of a block, with a number: repeat 20")
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
            raise TraceError(command.line, "run must be the first command, and only there")


async def _run_blocks(blocks: list[Block]) -> list[list[str]]:
    runner = TraceRunner()
    outputs = []
    for block in blocks:
        for _ in range(block.repeat):
            for command in block.commands:
                await runner.do(command)
        outputs.append(runner.take_output())
    await runner.end()
    return outputs
