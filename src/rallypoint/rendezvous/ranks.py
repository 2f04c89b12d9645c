"""Who gets a place in a round, and which rank each of them has.

Pure functions of their arguments: the same candidates, in whatever order they are listed, get the same places and
ranks. Never reads a clock, draws a random number, logs or does I/O; never adds, drops or repeats a candidate while
ranking.

The policies, for n candidates:

* `sticky`: a survivor (a candidate with a last rank) keeps that rank if it is below n. The ranks that are left are
  filled from the lowest: first by the survivors whose old rank is gone, in order of it, then by the newcomers, in
  natural order. So a replacement inherits the hole, a shrink moves only those it has to, and a first round is in
  natural order.
* `node_rank`: if every asked rank is below n, each is honoured exactly; otherwise (nodes are missing) those that asked
  take 0, 1, 2, ... in order of what they asked for. Those that did not ask fill the ranks that are left, as in
  `sticky`.
* `natural`: natural order of name, then of address; ids, which mean nothing, decide between equals.
* `topology:a+b`: nodes with equal label a are adjacent, and among them those with equal label b. Groups are in natural
  order of the label's value, nodes without the label last; inside a group survivors come by last rank, then newcomers
  in natural order.

Whoever joined first wins a last rank or an asked rank that several claim; the others count as having claimed none.

A pinned rank 0 moves as few as it can. `sticky` and `node_rank` give out seats: the pinned node swaps with the node on
rank 0, nobody else moves. `natural` and `topology` are orders: the pinned node goes to the front and the rest keep
their order; under `topology` its groups go to the front with it, so that neighbours stay neighbours.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import msgspec

NaturalKey: TypeAlias = tuple[tuple[tuple[str, int, str], ...], str]

MOST_KNOWN = 16_384
"""Of so many texts the key is remembered."""
_TEXT_THEN_DIGITS = re.compile(r"([^0-9]*)([0-9]*)")


class Candidate(msgspec.Struct, frozen=True):
    """A node that could be a member of the next round. Ids are unique among the candidates; names need not be."""

    id: str
    name: str
    addr: str
    order: int  # of joining: smaller came earlier
    labels: Mapping[str, str]
    node_rank: int | None  # the rank the node asked for
    was_member: bool  # of the last active round
    last_rank: int | None  # the rank that its name had in the last active round
    held_back: bool = False


@lru_cache(maxsize=MOST_KNOWN)
def natural_key(text: str) -> NaturalKey:
    """A sort key that puts host9 before host10: runs of ASCII digits compare as numbers, the rest as text.

    Defined for every text, and equal only for equal texts: those that differ in leading zeros alone compare as text.
    """
    # A number is compared by its length and then its digits: int() refuses very long runs.
    runs = ((word, digits and (digits.lstrip("0") or "0")) for word, digits in _TEXT_THEN_DIGITS.findall(text))
    return tuple((word, len(number), number) for word, number in runs), text


def choose(candidates: Iterable[Candidate], places: int) -> list[Candidate]:
    """The candidates that get the places: members of the last active round first, then by order of joining.

    Those that were held back come last of all, even if they were members.
    """
    by_claim = sorted(candidates, key=lambda c: (c.held_back, not c.was_member, *_joining(c)))
    return by_claim[: max(places, 0)]


def rank(candidates: Iterable[Candidate], policy: str, rank0: str | None = None) -> list[Candidate]:
    """The candidates in rank order (index = rank), each exactly once.

    `rank0` names the node that is to have rank 0; with several of that name it is the one that joined first, with none
    the policy alone decides. Raises ValueError for an unknown policy, also when there are no candidates.
    """
    pool = list(candidates)
    pinned = min((c for c in pool if c.name == rank0), key=_joining, default=None)
    match policy.partition(":"):
        case ("sticky", "", ""):
            return _swapped_to_front(_sticky(pool, {}), pinned)
        case ("node_rank", "", ""):
            return _swapped_to_front(_as_asked(pool), pinned)
        case ("natural", "", ""):
            return _moved_to_front(_in_natural_order(pool), pinned, ())
        case ("topology", ":", names) if all(labels := names.split("+")):
            return _moved_to_front(_by_topology(pool, labels), pinned, labels)
    raise ValueError(f"unknown rank policy {policy!r}: use sticky, node_rank, natural or topology:LABEL[+LABEL...]")


def _joining(candidate: Candidate) -> tuple[int, str]:
    return candidate.order, candidate.id


def _in_natural_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    # Each text once: thousands of nodes may share a name or an address.
    texts = sorted({text for c in candidates for text in (c.name, c.addr)}, key=natural_key)
    place = {text: index for index, text in enumerate(texts)}
    return sorted(candidates, key=lambda c: (place[c.name], place[c.addr], c.id))


def _claims(
    candidates: Iterable[Candidate], claim_of: Callable[[Candidate], int | None]
) -> tuple[dict[int, Candidate], list[Candidate]]:
    """Each claimed rank with the first to join of those that claim it, and everyone who is left without a claim."""
    claims: dict[int, Candidate] = {}
    others: list[Candidate] = []
    for candidate in sorted(candidates, key=_joining):
        claimed = claim_of(candidate)
        if claimed is None or claimed < 0 or claimed in claims:
            others.append(candidate)
        else:
            claims[claimed] = candidate
    return claims, others


def _sticky(candidates: Sequence[Candidate], taken: Mapping[int, Candidate]) -> list[Candidate]:
    """The candidates seated around those who have taken their ranks already (which are below the total)."""
    if not taken and all(c.last_rank is None for c in candidates):
        return _in_natural_order(candidates)  # as below, in less time: everybody waits for a first round
    size = len(candidates) + len(taken)
    survivors, newcomers = _claims(candidates, lambda c: c.last_rank)
    kept = {old: c for old, c in survivors.items() if old < size and old not in taken}
    displaced = [survivors[old] for old in sorted(survivors.keys() - kept.keys())]
    seats = {**taken, **kept}
    unseated = iter([*displaced, *_in_natural_order(newcomers)])
    return [seats[place] if place in seats else next(unseated) for place in range(size)]


def _as_asked(candidates: Sequence[Candidate]) -> list[Candidate]:
    asked, others = _claims(candidates, lambda c: c.node_rank)
    if max(asked, default=0) >= len(candidates):
        asked = {place: asked[wanted] for place, wanted in enumerate(sorted(asked))}
    return _sticky(others, asked)


def _by_topology(candidates: Sequence[Candidate], labels: Sequence[str]) -> list[Candidate]:
    survivors, newcomers = _claims(candidates, lambda c: c.last_rank)
    inside_groups = [*(survivors[old] for old in sorted(survivors)), *_in_natural_order(newcomers)]
    # Sorting is stable: the order made above holds inside each group.
    return sorted(inside_groups, key=lambda c: tuple(_group(c.labels.get(label)) for label in labels))


def _group(value: str | None) -> tuple[bool, NaturalKey]:
    return value is None, natural_key(value or "")


def _swapped_to_front(ranked: list[Candidate], pinned: Candidate | None) -> list[Candidate]:
    if pinned is None:
        return ranked
    place = next(index for index, c in enumerate(ranked) if c is pinned)
    swapped = list(ranked)
    swapped[0], swapped[place] = ranked[place], ranked[0]
    return swapped


def _moved_to_front(ranked: list[Candidate], pinned: Candidate | None, labels: Sequence[str]) -> list[Candidate]:
    """The pinned candidate first, then its neighbours, nearest first; the order is otherwise as it was."""
    if pinned is None:
        return ranked
    return sorted(ranked, key=lambda c: (-_shared(c, pinned, labels), c is not pinned))


def _shared(one: Candidate, other: Candidate, labels: Sequence[str]) -> int:
    """On how many labels, counted from the first, the two agree without a difference before."""
    for count, label in enumerate(labels):
        if one.labels.get(label) != other.labels.get(label):
            return count
    return len(labels)
