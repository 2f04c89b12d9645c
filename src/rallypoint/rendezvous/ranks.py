"""The choice of a round's members among the candidates, and their ranks. Pure.

The same candidates, in whatever order they are listed, get the same places and ranks. Ranking never adds, drops or
repeats a candidate (Ranks).

The policies, for n candidates:

* `sticky`: a survivor (a candidate with a last rank) keeps that rank if it is below n. The free ranks are filled from
  the lowest: first with the survivors whose last rank is not below n, in order of last rank, then with the newcomers,
  in natural order. So a replacement gets the free rank, a shrink moves as few survivors as possible, and a first round
  is in natural order.
* `node_rank`: if every requested rank is below n, each request is met exactly; otherwise (nodes are missing) the
  candidates with a request take 0, 1, 2, ... in order of their requests. The others fill the free ranks, as in
  `sticky`.
* `natural`: natural order of name, then of address, then of id.
* `topology:a+b`: nodes with equal label a are adjacent, and among them those with equal label b. Groups are in natural
  order of the label's value, nodes without the label last; inside a group survivors come by last rank, then newcomers
  in natural order.

If several candidates have the same last rank or request the same rank, the one that joined first has it; the others
count as having none.

A pinned rank 0 moves as few nodes as possible. `sticky` and `node_rank` assign ranks: the pinned node swaps with the
node on rank 0, no other node moves. `natural` and `topology` are orders: the pinned node moves to the front and the
rest keep their order; under `topology` its groups move to the front with it, so that their nodes stay adjacent.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import msgspec

NaturalKey: TypeAlias = tuple[tuple[tuple[str, int, str], ...], str]

MAX_CACHED_KEYS = 16_384
"""Sort keys that are cached."""
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


@lru_cache(maxsize=MAX_CACHED_KEYS)
def natural_key(text: str) -> NaturalKey:
    """A sort key that puts host9 before host10: runs of ASCII digits compare as numbers, the rest as text.

    Equal only for equal texts: texts that differ only in leading zeros compare as text.
    """
    # A number is compared by its length and then by its digits: int() refuses very long ones.
    runs = ((letters, digits and (digits.lstrip("0") or "0")) for letters, digits in _TEXT_THEN_DIGITS.findall(text))
    return tuple((letters, len(number), number) for letters, number in runs), text


def choose(candidates: Iterable[Candidate], places: int) -> list[Candidate]:
    """The candidates that get the places: members of the last active round first, then by order of joining.

    Nodes that were held back come last, even if they were members.
    """
    by_priority = sorted(candidates, key=lambda c: (c.held_back, not c.was_member, *_joining(c)))
    return by_priority[: max(places, 0)]


def rank(candidates: Iterable[Candidate], policy: str, rank0: str | None = None) -> list[Candidate]:
    """The candidates in rank order (index = rank), each exactly once.

    `rank0` is the name of the node that gets rank 0: the one that joined first if several have it, and ignored if none
    has. Raises ValueError for an unknown policy, also without candidates.
    """
    pool = list(candidates)
    pinned = min((c for c in pool if c.name == rank0), key=_joining, default=None)
    match policy.partition(":"):
        case ("sticky", "", ""):
            return _swapped_to_front(_sticky(pool, {}), pinned)
        case ("node_rank", "", ""):
            return _swapped_to_front(_as_requested(pool), pinned)
        case ("natural", "", ""):
            return _moved_to_front(_in_natural_order(pool), pinned, ())
        case ("topology", ":", names) if all(labels := names.split("+")):
            return _moved_to_front(_by_topology(pool, labels), pinned, labels)
    raise ValueError(f"unknown rank policy {policy!r}: use sticky, node_rank, natural or topology:LABEL[+LABEL...]")


def _joining(candidate: Candidate) -> tuple[int, str]:
    return candidate.order, candidate.id


def _in_natural_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    # The key of each text is computed once: thousands of nodes may share a name or an address.
    texts = sorted({text for c in candidates for text in (c.name, c.addr)}, key=natural_key)
    position = {text: index for index, text in enumerate(texts)}
    return sorted(candidates, key=lambda c: (position[c.name], position[c.addr], c.id))


def _claims(
    candidates: Iterable[Candidate], claim_of: Callable[[Candidate], int | None]
) -> tuple[dict[int, Candidate], list[Candidate]]:
    """Each claimed rank with the first candidate to join that claims it, and the candidates left without a rank."""
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
    """All in rank order: `taken` on its ranks, which are below the total, and the candidates on the others."""
    if not taken and all(c.last_rank is None for c in candidates):
        return _in_natural_order(candidates)  # the same result as below, but faster for a first round
    size = len(candidates) + len(taken)
    survivors, newcomers = _claims(candidates, lambda c: c.last_rank)
    kept = {old: c for old, c in survivors.items() if old < size and old not in taken}
    displaced = [survivors[old] for old in sorted(survivors.keys() - kept.keys())]
    fixed = {**taken, **kept}
    rest = iter([*displaced, *_in_natural_order(newcomers)])
    return [fixed[number] if number in fixed else next(rest) for number in range(size)]


def _as_requested(candidates: Sequence[Candidate]) -> list[Candidate]:
    requested, others = _claims(candidates, lambda c: c.node_rank)
    if max(requested, default=0) >= len(candidates):
        requested = {number: requested[wanted] for number, wanted in enumerate(sorted(requested))}
    return _sticky(others, requested)


def _by_topology(candidates: Sequence[Candidate], labels: Sequence[str]) -> list[Candidate]:
    survivors, newcomers = _claims(candidates, lambda c: c.last_rank)
    inside_groups = [*(survivors[old] for old in sorted(survivors)), *_in_natural_order(newcomers)]
    # Sorting is stable: inside each group the order of `inside_groups` remains.
    return sorted(inside_groups, key=lambda c: tuple(_group(c.labels.get(label)) for label in labels))


def _group(value: str | None) -> tuple[bool, NaturalKey]:
    return value is None, natural_key(value or "")


def _swapped_to_front(ranked: list[Candidate], pinned: Candidate | None) -> list[Candidate]:
    if pinned is None:
        return ranked
    old_rank = next(index for index, c in enumerate(ranked) if c is pinned)
    swapped = list(ranked)
    swapped[0], swapped[old_rank] = ranked[old_rank], ranked[0]
    return swapped


def _moved_to_front(ranked: list[Candidate], pinned: Candidate | None, labels: Sequence[str]) -> list[Candidate]:
    """The pinned candidate first, then its neighbours by number of shared labels; otherwise the order is unchanged."""
    if pinned is None:
        return ranked
    return sorted(ranked, key=lambda c: (-_shared(c, pinned, labels), c is not pinned))


def _shared(one: Candidate, other: Candidate, labels: Sequence[str]) -> int:
    """The number of leading labels that the two have in common."""
    for count, label in enumerate(labels):
        if one.labels.get(label) != other.labels.get(label):
            return count
    return len(labels)
