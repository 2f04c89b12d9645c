"""Live-variable analysis: the local variables of a suspended coroutine that may still be read.

The others are not part of its state. A backward data-flow analysis of the bytecode. In doubt a variable counts as live,
which only makes fingerprints less precise.
"""

from __future__ import annotations

import dis
from functools import cache
from types import CodeType

_NO_NEXT = {
    *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD"),
    "JUMP_BACKWARD_NO_INTERRUPT",
}
_WRITES = {"STORE_FAST", "DELETE_FAST"}


@cache
def live_after(code: CodeType, offset: int) -> frozenset[str]:
    """The variables (without cells) that may be read after the instruction at `offset` (negative: from the start)."""
    before, following = _analysed(code)
    if offset < 0:
        return before[0]
    return frozenset().union(*(before[target] for target in following[offset]))


@cache
def _analysed(code: CodeType) -> tuple[dict[int, frozenset[str]], dict[int, list[int]]]:
    """For each instruction: the variables live before it, and its possible successors."""
    instructions = list(dis.get_instructions(code))
    following = _following(code, instructions)
    before: dict[int, frozenset[str]] = {instruction.offset: frozenset() for instruction in instructions}
    changed = True
    while changed:
        changed = False
        for instruction in reversed(instructions):
            live: set[str] = set()
            for target in following[instruction.offset]:
                live |= before[target]
            if instruction.opname in _WRITES:
                live.discard(instruction.argval)
            elif "_FAST" in instruction.opname:
                names = instruction.argval
                live.update(names if isinstance(names, tuple) else (names,))
            if live != before[instruction.offset]:
                before[instruction.offset] = frozenset(live)
                changed = True
    return before, following


def _following(code: CodeType, instructions: list[dis.Instruction]) -> dict[int, list[int]]:
    following: dict[int, list[int]] = {instruction.offset: [] for instruction in instructions}
    for instruction, after in zip(instructions, [*instructions[1:], None], strict=True):
        targets = following[instruction.offset]
        if after is not None and instruction.opname not in _NO_NEXT:
            targets.append(after.offset)
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            targets.append(instruction.argval)
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        for offset, targets in following.items():
            if entry.start <= offset < entry.end:
                targets.append(entry.target)
    return following
