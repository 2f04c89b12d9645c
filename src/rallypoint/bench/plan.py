"""What is measured, and the messages between the command and the process of a case."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence

import msgspec

MOST_PROCESSES = 128
"""Up to here every node is a process of its own; above, `SHARED_PROCESSES` processes share the nodes."""
SHARED_PROCESSES = 4
COPY_MEMORY_UP_TO = 33
"""Up to here each node process copies the memory it shares with its parent; for more there is not enough memory."""
LIMIT_S = 60.0
"""How long one sample may take before it counts as none."""
IDLE_AFTER_S = 2.0
"""Pause between the first round and the beginning of an idle measurement."""
LAST_CALL_S = 1
POLL_S = 0.1
"""How often torch's agent asks for waiting nodes."""
MAX_PHASE_S = 1.0
"""Nodes that poll have a phase: a random part of the settle time keeps it out of the figures."""
DELAYED_SETTLE_S = 3.0
"""How much longer nodes settle whose messages are delayed."""
SETTLED_CORES = 0.5
"""Nodes and server have settled when together they use less of a core than this."""


class Bench(enum.Enum):
    """What is measured: a command of `rallypoint bench`."""

    RENDEZVOUS = "rendezvous"
    RECOVERY = "recovery"
    IDLE = "idle"
    STORE = "store"
    RESTART = "restart"
    SCALE = "scale"
    TRIPS = "trips"


class Competitor(enum.Enum):
    """A system that Rallypoint can be compared with."""

    TORCH = "torch"
    TORCHFT = "torchft"
    TORCH_ETCD = "torch-etcd"
    JAX = "jax"


class Side(enum.Enum):
    """One side of a comparison: a system in one variant. The value is its name in commands and JSON."""

    RALLYPOINT = "rallypoint"
    TORCH_STOCK = "torch-stock"
    TORCH_LEAN = "torch-lean"
    TORCH_UNSHARED = "torch-unshared"
    TORCH_POLLING = "torch-polling"
    TORCHFT = "torchft"
    TORCHFT_TWICE = "torchft-twice"
    RALLYPOINT_ETCD = "rallypoint-etcd"
    TORCH_ETCD = "torch-etcd"
    TORCH_ETCD_V2 = "torch-etcd-v2"
    JAX = "jax"


OURS = (Side.RALLYPOINT, Side.RALLYPOINT_ETCD)

TITLES = {
    Side.RALLYPOINT: "rallypoint",
    Side.TORCH_STOCK: "torch",
    Side.TORCH_LEAN: "torch, lean",
    Side.TORCH_UNSHARED: "torch, lean, store sharing off",
    Side.TORCH_POLLING: "torch, polling as its agent does",
    Side.TORCHFT: "torchft lighthouse",
    Side.TORCHFT_TWICE: "torchft lighthouse, asked twice",
    Side.RALLYPOINT_ETCD: "rallypoint on etcd",
    Side.TORCH_ETCD: "torch, etcd",
    Side.TORCH_ETCD_V2: "torch, etcd-v2",
    Side.JAX: "JAX coordination service",
}

LAST_ARRIVAL = "last arrival until all released"
COLD_START = "cold start"
LOSS_TOLD = "loss, survivors told by the rendezvous"
LOSS_REJOIN = "loss, survivors re-join at once"
LATE_NODE = "late node"
CPU = "server CPU"
CPU_PER_NODE = "server CPU per node"
RSS = "server RSS"
RSS_PER_NODE = "server RSS growth per node"
BYTES = "payload"
BYTES_PER_NODE = "payload per node"
FROM_SNAPSHOT = "restart until the first answer, all in a snapshot"
FROM_LOG = "restart until the first answer, all in the log"
RATE_NONE = "writes, many in flight, without --data"
RATE_OS = "writes, many in flight, --sync os"
RATE_ALWAYS = "writes, many in flight, --sync always"
LATENCY_NONE = "one write, without --data"
LATENCY_OS = "one write, --sync os"
LATENCY_ALWAYS = "one write, --sync always"

ROUND_CPU = "server CPU of a round"
ROUND_NODES_CPU = "CPU of all nodes of a round"
ROUND_FRAMES_IN = "frames to the server in a round"
ROUND_FRAMES_OUT = "frames from the server in a round"
ROUND_BYTES = "payload of a round"
KEEP_ALIVE_RATE = "keep-alives while idle"
IDLE_BYTES = "payload while idle"
IDLE_CPU = "server CPU while idle"
MEMORY = "server RSS growth"
TRIPS_LAST = "round trips from the last call until all are released"
TRIPS_COLD = "round trips from nothing until all are released"
TRIPS_LATE = "round trips from a late node's call until it is in"
TRIPS_OF = {TRIPS_LAST: LAST_ARRIVAL, TRIPS_COLD: COLD_START, TRIPS_LATE: LATE_NODE}

STORE_OPS = ("get", "wait", "check", "add", "compare_set", "multi_get of 16", "set", "multi_set of 16")

UNSUPPORTED_OPS = {Side.JAX: ("wait", "check", "compare_set", "multi_get of 16", "multi_set of 16")}


def per_call(op: str) -> str:
    """The measure "median of the time that one call of the store takes"."""
    return op


def per_second(op: str) -> str:
    """The measure "such calls that all processes together make in a second"."""
    return f"{op}, in all"


MEASURES: dict[Bench, tuple[str, ...]] = {
    Bench.RENDEZVOUS: (LAST_ARRIVAL, COLD_START),
    Bench.RECOVERY: (LOSS_TOLD, LOSS_REJOIN, LATE_NODE),
    Bench.IDLE: (CPU, CPU_PER_NODE, RSS, RSS_PER_NODE, BYTES, BYTES_PER_NODE),
    Bench.STORE: tuple(measure for op in STORE_OPS for measure in (per_call(op), per_second(op))),
    Bench.RESTART: (
        *(FROM_SNAPSHOT, FROM_LOG, RATE_NONE, RATE_OS, RATE_ALWAYS),
        *(LATENCY_NONE, LATENCY_OS, LATENCY_ALWAYS),
    ),
    Bench.SCALE: (
        *(ROUND_CPU, ROUND_NODES_CPU, ROUND_FRAMES_IN, ROUND_FRAMES_OUT, ROUND_BYTES),
        *(KEEP_ALIVE_RATE, IDLE_BYTES, IDLE_CPU, MEMORY),
    ),
    Bench.TRIPS: tuple(TRIPS_OF),
}
RATE = "calls/s"
UNITS = {
    CPU: "% of a core",
    CPU_PER_NODE: "µs/s",
    RSS: "MiB",
    RSS_PER_NODE: "KiB",
    BYTES: "B/s",
    BYTES_PER_NODE: "B/s",
    **{per_call(op): "µs" for op in STORE_OPS},
    **{per_second(op): RATE for op in STORE_OPS},
    **dict.fromkeys((RATE_NONE, RATE_OS, RATE_ALWAYS), "/s"),
    **dict.fromkeys((ROUND_FRAMES_IN, ROUND_FRAMES_OUT), "frames"),
    ROUND_BYTES: "B",
    KEEP_ALIVE_RATE: "/s",
    IDLE_BYTES: "B/s",
    IDLE_CPU: "% of a core",
    MEMORY: "MiB",
    **dict.fromkeys(TRIPS_OF, "trips"),
}
SECONDS = "s"

_SIDES = {
    (Bench.RENDEZVOUS, Competitor.TORCH): (Side.TORCH_STOCK, Side.TORCH_LEAN),
    (Bench.RENDEZVOUS, Competitor.TORCHFT): (Side.TORCHFT, Side.TORCHFT_TWICE),
    (Bench.RENDEZVOUS, Competitor.TORCH_ETCD): (Side.TORCH_ETCD, Side.TORCH_ETCD_V2),
    (Bench.RECOVERY, Competitor.TORCH): (Side.TORCH_STOCK, Side.TORCH_UNSHARED),
    (Bench.IDLE, Competitor.TORCH): (Side.TORCH_STOCK, Side.TORCH_POLLING),
    (Bench.STORE, Competitor.TORCH): (Side.TORCH_STOCK,),
    (Bench.RENDEZVOUS, Competitor.JAX): (Side.JAX,),
    (Bench.IDLE, Competitor.JAX): (Side.JAX,),
    (Bench.STORE, Competitor.JAX): (Side.JAX,),
}


class Case(msgspec.Struct, frozen=True):
    """One side with one number of nodes."""

    bench: Bench
    side: Side
    nodes: int
    repeat: int = 3
    seconds: float = 30.0
    limit_s: float = LIMIT_S
    keys: int = 0
    """With RESTART, where `nodes` is the number of sessions."""
    only: str = ""
    """One measure of a rendezvous or a recovery; empty: all of them."""

    @property
    def measures(self) -> tuple[str, ...]:
        """The measures of a rendezvous or a recovery that this case takes."""
        return (self.only,) if self.only else MEASURES[self.bench]

    @property
    def timeout_s(self) -> float:
        """How long all its turns may take: the limit of every sample, and as much again to start and end them."""
        samples = self.repeat * (1 if self.bench in (Bench.IDLE, Bench.SCALE) else len(self.measures))
        return 60.0 + samples * (2 * self.limit_s + 20.0 + 0.1 * self.nodes) + samples * self.seconds


class Turn(msgspec.Struct, frozen=True):
    """A repetition of one measure; of all measures of the case together if `measure` is empty."""

    measure: str
    repetition: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The process of a case has imported what it needs, and waits for its first turn."""


FAILED = "failed"
"""How the reason of a sample begins that has no value because a node failed, not because time ran out."""


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """One measured value, or why there is none."""

    measure: str
    value: float | None
    why_none: str = ""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The current step of a turn, for display."""

    text: str


class TurnEnded(msgspec.Struct, frozen=True, tag="turn ended"):
    """All samples of the turn have been sent."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The case ended early, and why."""

    why: str


Message = Loaded | Sample | Progress | TurnEnded | Failed
"""Written by the process of a case, one JSON document a line. It reads turns."""


def columns(bench: Bench, competitors: Sequence[Competitor], backend: str = "tcp") -> tuple[Side, ...]:
    """The sides of a comparison, Rallypoint first. KeyError if one cannot be compared: see `comparable`."""
    on_etcd = backend == "etcd" or Competitor.TORCH_ETCD in competitors
    ours = Side.RALLYPOINT_ETCD if on_etcd else Side.RALLYPOINT
    return (ours, *(side for competitor in competitors for side in _SIDES[bench, competitor]))


def comparable(bench: Bench, competitor: Competitor) -> bool:
    """Whether the competitor can do the work of that measurement."""
    return (bench, competitor) in _SIDES


def comparisons(
    bench: Bench, sides: Sequence[Side], nodes: Sequence[int], repeat: int, seconds: float
) -> tuple[tuple[Case, ...], ...]:
    """For each number of nodes, the cases that take turns. Only Rallypoint runs more nodes than processes."""
    return tuple(
        tuple(
            Case(bench, side, count, repeat, seconds)
            for side in sides
            if side is Side.RALLYPOINT or count <= MOST_PROCESSES
        )
        for count in nodes
    )


def turns(case: Case) -> list[Turn]:
    """The turns of one case, in order."""
    if case.bench in (Bench.RENDEZVOUS, Bench.RECOVERY):
        return [Turn(measure, repetition) for measure in case.measures for repetition in range(case.repeat)]
    if case.bench is Bench.RESTART:
        return [Turn("", 0)]  # it repeats by itself: its data is written once
    return [Turn("", repetition) for repetition in range(case.repeat)]


def schedule(cases: Sequence[Case]) -> list[tuple[int, Turn]]:
    """The turns of cases that are compared, each with the index of its case: one sample of each side, then the next.

    Every repetition begins with another side, so that none always comes first.
    """
    takers: dict[Turn, list[int]] = {}
    for index, case in enumerate(cases):
        for turn in turns(case):
            takers.setdefault(turn, []).append(index)
    found = []
    for turn in sorted(takers, key=lambda turn: (_place(cases[0].bench, turn.measure), turn.repetition)):
        first = turn.repetition % len(takers[turn])
        found += [(index, turn) for index in (*takers[turn][first:], *takers[turn][:first])]
    return found


def _place(bench: Bench, measure: str) -> int:
    return MEASURES[bench].index(measure) if measure else 0


def least_settle_s(nodes: int) -> float:
    """The least time that the server is given to note the calls of all nodes."""
    return 0.5 + 0.01 * min(nodes, MOST_PROCESSES)


def phase_s(nodes: int, repetition: int) -> float:
    """A random addition to the settle time: the same for all sides of a comparison."""
    return random.Random(f"{nodes}/{repetition}").uniform(0.0, MAX_PHASE_S)
