"""Checks a compare-and-set cell, in four lines:

    @pytest.mark.parametrize("check", CELL_CHECKS)
    def test_my_cell_conforms(check, tmp_path):
        check(CellKit(lambda: MyCell(tmp_path / "cell")))

Without pytest, `print(run_cell_checks(lambda number: CellKit(...)))`, with a fresh cell for each number. A cell that
conforms can be passed to `DynamicRendezvousHandler.from_backend`, which makes a whole backend from it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from rallypoint.backends.register.cell import Cell, Found, Token
from rallypoint.testing.conformance.kit import NotConforming, Report, expect, expect_same

_T = TypeVar("_T")

WRITERS = 4
WRITES = 8
LARGE = 1_000_000


@dataclass(frozen=True)
class CellKit:
    """A cell to check. It must be empty and have no other users."""

    connect: Callable[[], Cell]
    """A new object for the same cell, as in another process. Each is used by one thread."""
    patience_s: float = 60.0
    """How long the checks with several threads may take."""


CellCheck: TypeAlias = Callable[[CellKit], None]


def check_an_empty_cell_holds_nothing(kit: CellKit) -> None:
    """`get_state` returns None before the first write, any number of times."""
    cell = kit.connect()
    for _ in range(2):
        expect_same("nothing was written", cell.get_state(), None)
    expect("a cell has a name", bool(cell.name) and isinstance(cell.name, str), cell.name)


def check_the_first_write_needs_no_token(kit: CellKit) -> None:
    """Writing to an empty cell without a token returns the written content, a token, and True."""
    one, other = kit.connect(), kit.connect()
    token = written(one, b"first", None)
    for reader in (one, other):
        expect_same("what was written is read", held(reader)[0], b"first")
    expect("a token is not None", token is not None, token)


def check_the_current_token_replaces(kit: CellKit) -> None:
    """With the token of the last write, or of a read after it, the content is replaced, whichever object wrote it."""
    one, other = kit.connect(), kit.connect()
    token = written(one, b"1", None)
    token = written(one, b"2", token)
    token = written(other, b"3", held(other)[1])
    token = written(one, b"4", token)
    expect_same("the last write is what is there", held(other)[0], b"4")


def check_an_old_token_is_refused(kit: CellKit) -> None:
    """With an old token, a write returns the current content, its token, and False."""
    one, other = kit.connect(), kit.connect()
    old = written(one, b"1", None)
    written(other, b"2", old)
    current = refused(one, b"3", old, b"2")
    expect_same("a refused write writes nothing", held(other)[0], b"2")
    written(one, b"4", current)
    refused(other, b"5", old, b"4")


def check_no_token_is_refused_where_something_is(kit: CellKit) -> None:
    """A write without a token does not replace content."""
    one, other = kit.connect(), kit.connect()
    written(one, b"1", None)
    current = refused(other, b"2", None, b"1")
    expect_same("a refused write writes nothing", held(one)[0], b"1")
    written(other, b"3", current)


def check_what_is_no_token_is_refused(kit: CellKit) -> None:
    """An invalid token of any type is refused: nothing is replaced and nothing raises."""
    cell = kit.connect()
    written(cell, b"1", None)
    for nonsense in ("nonsense", b"nonsense", object(), 4711, ("a", 1)):
        refused(cell, b"2", nonsense, b"1")


def check_an_old_token_stays_old(kit: CellKit) -> None:
    """A token that was used or refused once is refused for ever, however often the content is replaced."""
    cell = kit.connect()
    first = written(cell, b"x1", None)
    second = written(cell, b"x2", first)
    refused(cell, b"x3", first, b"x2")
    third = written(cell, b"x3", second)
    refused(cell, b"x4", second, b"x3")
    written(cell, b"x4", third)


def check_content_is_kept_as_it_is(kit: CellKit) -> None:
    """Any bytes, also large contents, are read as they were written."""
    one, other = kit.connect(), kit.connect()
    token: Token | None = None
    for content in (bytes(range(256)), b"\x00", b"line\nline\r\n", b"\xff" * LARGE, "größer".encode()):
        token = written(one, content, token)
        expect_same("content is read as it was written", held(other)[0], content)


def check_one_of_many_makes_the_first_write(kit: CellKit) -> None:
    """Of several concurrent first writes one wins; the others get its content."""

    def work(cell: Cell, number: int) -> tuple[bool, bytes]:
        answer = cell.set_state(b"writer %d" % number, None)
        found = answer if answer is not None else (*held(cell), False)
        return found[2], found[0]

    outcomes = in_threads(kit, work)
    winners = [number for number, (has_set, _) in enumerate(outcomes) if has_set]
    expect_same("one wins", len(winners), 1)
    seen = {state for _, state in outcomes} | {held(kit.connect())[0]}
    expect_same("all of them get the winner's content", seen, {b"writer %d" % winners[0]})


def check_no_write_is_lost(kit: CellKit) -> None:
    """A list to which several threads append, by reading and writing with the token, has every entry once."""
    written(kit.connect(), b"start", None)

    def work(cell: Cell, number: int) -> None:
        for n in range(WRITES):
            entry = b" %d.%d" % (number, n)
            state, token = held(cell)
            while True:
                answer = cell.set_state(state + entry, token)
                if answer is None:
                    state, token = held(cell)
                    if entry in state:
                        break
                    continue
                state, token, has_set = answer
                if has_set:
                    break

    in_threads(kit, work)
    entries = held(kit.connect())[0].split()[1:]
    wanted = sorted(b"%d.%d" % (number, n) for number in range(WRITERS) for n in range(WRITES))
    expect_same("every write is there once", sorted(entries), wanted)


def check_no_read_sees_half_a_write(kit: CellKit) -> None:
    """A concurrent read sees one of the written contents, never a part."""

    def content(number: int) -> bytes:
        body = bytes([number % 256]) * (1_000 + 997 * number)
        return hashlib.sha256(body).digest() + body

    token = written(kit.connect(), content(0), None)
    is_over = threading.Event()

    def work(cell: Cell, number: int) -> None:
        nonlocal token
        if number == 0:
            try:
                for n in range(1, 20):
                    token = written(cell, content(n), token)
            finally:
                is_over.set()
            return
        while not is_over.is_set():
            state, _ = held(cell)
            whole = hashlib.sha256(state[32:]).digest() == state[:32]
            expect("a read sees a whole content", whole, f"{len(state)} bytes")

    in_threads(kit, work)


CELL_CHECKS: tuple[CellCheck, ...] = (
    check_an_empty_cell_holds_nothing,
    check_the_first_write_needs_no_token,
    check_the_current_token_replaces,
    check_an_old_token_is_refused,
    check_no_token_is_refused_where_something_is,
    check_what_is_no_token_is_refused,
    check_an_old_token_stays_old,
    check_content_is_kept_as_it_is,
    check_one_of_many_makes_the_first_write,
    check_no_write_is_lost,
    check_no_read_sees_half_a_write,
)


def run_cell_checks(make: Callable[[int], CellKit], checks: Iterable[CellCheck] = CELL_CHECKS) -> Report:
    """Run all checks one after the other, each with a kit of its own; a failing check does not stop the others."""
    passed: list[str] = []
    failed: dict[str, Exception] = {}
    for number, check in enumerate(checks):
        try:
            check(make(number))
        except Exception as error:
            failed[check.__name__] = error
        else:
            passed.append(check.__name__)
    return Report(tuple(passed), failed)


# --- shared by the checks ---------------------------------------------------------------------------------------------


def held(cell: Cell) -> tuple[bytes, Token]:
    """The content and token of a cell that must not be empty."""
    found: Found = cell.get_state()
    if found is None:
        raise NotConforming("what was written is there", "None")
    return found


def written(cell: Cell, state: bytes, token: Token | None) -> Token:
    """A write that must succeed; the new token."""
    answer = cell.set_state(state, token)
    promise = "a write with the right token gives what was written, its token, and True"
    if answer is None:
        raise NotConforming(promise, "None without any fault")
    expect_same(promise, (answer[0], answer[2]), (state, True))
    return answer[1]


def refused(cell: Cell, state: bytes, token: Token | None, there: bytes) -> Token:
    """A write that must be refused; the token of the current content."""
    answer = cell.set_state(state, token)
    promise = "a write with another token gives what is there, its token, and False"
    if answer is None:
        raise NotConforming(promise, "None without any fault")
    expect_same(promise, (answer[0], answer[2]), (there, False))
    return answer[1]


def in_threads(kit: CellKit, work: Callable[[Cell, int], _T]) -> list[_T]:
    """Run `work` in several threads, each with a cell object of its own; the results. Raises the first error."""
    results: dict[int, _T] = {}
    errors: list[Exception] = []
    start = threading.Barrier(WRITERS)

    def run(number: int, cell: Cell) -> None:
        try:
            start.wait(kit.patience_s)
            results[number] = work(cell, number)
        except Exception as error:
            errors.append(error)

    cells = [kit.connect() for _ in range(WRITERS)]
    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(cells)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(kit.patience_s)
    if errors:
        raise errors[0]
    expect("calls of a cell end", not any(thread.is_alive() for thread in threads), "one still runs")
    return [results[number] for number in range(WRITERS)]
