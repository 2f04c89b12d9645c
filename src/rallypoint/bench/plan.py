"""What is to be measured, and the records that travel between the command and the processes of a case. Pure."""

from __future__ import annotations

import enum
import random

import msgspec

MOST_PROCESSES = 128
"""Up to here every node is a process of its own; above, four drivers share the nodes."""
OWN_MEMORY_UP_TO = 33
"""Up to here each of them has a copy of all its memory: of more there would not be room for every side's."""
DRIVERS = 4
LIMIT_S = 60.0
"""How long one sample may take before it counts as none."""
IDLE_AFTER_S = 2.0
"""Pause between the first round and the beginning of an idle measurement."""
LAST_CALL_S = 1
POLL_S = 0.1
"""How often torch's agent asks for waiting nodes."""
MOST_PHASE_S = 1.0
"""Nodes that poll have a phase: a random part of the settle time keeps it out of the figures."""
TRIPS_REST_S = 3.0
"""How much longer nodes settle that are far away."""
CALM_CORES = 0.5
"""Nodes and server have settled when they use less of a core than this together."""


class Bench(enum.Enum):
    """What is measured."""

    RENDEZVOUS = "rendezvous"
    RECOVERY = "recovery"
    IDLE = "idle"
    STORE = "store"
    RESTART = "restart"
    SCALE = "scale"
    TRIPS = "trips"


class Against(enum.Enum):
    """Whom Rallypoint can be measured against."""

    TORCH = "torch"
    TORCHFT = "torchft"
    TORCH_ETCD = "torch-etcd"
    JAX = "jax"


class Side(enum.Enum):
    """One column: whose rendezvous, and in which variant. The value is its name in commands and JSON."""

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
TOGETHER = "all together, connections included"
LOSS_TOLD = "loss, survivors told by the rendezvous"
LOSS_NOTICED = "loss, survivors re-join at once"
LATE_NODE = "late node"
CPU = "server CPU"
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
KEPT_RATE = "keep-alives while idle"
KEPT_BYTES = "payload while idle"
KEPT_CPU = "server CPU while idle"
MEMORY = "server RSS growth"
TRIPS_LAST = "round trips from the last call until all are released"
TRIPS_COLD = "round trips from nothing until all are released"
TRIPS_LATE = "round trips from a late node's call until it is in"
TRIPS_OF = {TRIPS_LAST: LAST_ARRIVAL, TRIPS_COLD: TOGETHER, TRIPS_LATE: LATE_NODE}

STORE_OPS = ("get", "wait", "check", "add", "compare_set", "multi_get of 16", "set", "multi_set of 16")

LACKING = {Side.JAX: ("wait", "check", "compare_set", "multi_get of 16", "multi_set of 16")}
"""What a store does not have."""


def per_call(op: str) -> str:
    """The median of what a call of the store takes."""
    return op


def per_second(op: str) -> str:
    """How many such calls all processes make together."""
    return f"{op}, in all"


MEASURES: dict[Bench, tuple[str, ...]] = {
    Bench.RENDEZVOUS: (LAST_ARRIVAL, TOGETHER),
    Bench.RECOVERY: (LOSS_TOLD, LOSS_NOTICED, LATE_NODE),
    Bench.IDLE: (CPU, RSS, RSS_PER_NODE, BYTES, BYTES_PER_NODE),
    Bench.STORE: tuple(measure for op in STORE_OPS for measure in (per_call(op), per_second(op))),
    Bench.RESTART: (
        *(FROM_SNAPSHOT, FROM_LOG, RATE_NONE, RATE_OS, RATE_ALWAYS),
        *(LATENCY_NONE, LATENCY_OS, LATENCY_ALWAYS),
    ),
    Bench.SCALE: (
        *(ROUND_CPU, ROUND_NODES_CPU, ROUND_FRAMES_IN, ROUND_FRAMES_OUT, ROUND_BYTES),
        *(KEPT_RATE, KEPT_BYTES, KEPT_CPU, MEMORY),
    ),
    Bench.TRIPS: tuple(TRIPS_OF),
}
RATE = "calls/s"
UNITS = {
    CPU: "% of a core",
    RSS: "MiB",
    RSS_PER_NODE: "KiB",
    BYTES: "B/s",
    BYTES_PER_NODE: "B/s",
    **{per_call(op): "µs" for op in STORE_OPS},
    **{per_second(op): RATE for op in STORE_OPS},
    **dict.fromkeys((RATE_NONE, RATE_OS, RATE_ALWAYS), "/s"),
    **dict.fromkeys((ROUND_FRAMES_IN, ROUND_FRAMES_OUT), "frames"),
    ROUND_BYTES: "B",
    KEPT_RATE: "/s",
    KEPT_BYTES: "B/s",
    KEPT_CPU: "% of a core",
    MEMORY: "MiB",
    **dict.fromkeys(TRIPS_OF, "trips"),
}
SECONDS = "s"

_RIVALS = {
    (Bench.RENDEZVOUS, Against.TORCH): (Side.TORCH_STOCK, Side.TORCH_LEAN),
    (Bench.RENDEZVOUS, Against.TORCHFT): (Side.TORCHFT, Side.TORCHFT_TWICE),
    (Bench.RENDEZVOUS, Against.TORCH_ETCD): (Side.TORCH_ETCD, Side.TORCH_ETCD_V2),
    (Bench.RECOVERY, Against.TORCH): (Side.TORCH_STOCK, Side.TORCH_UNSHARED),
    (Bench.IDLE, Against.TORCH): (Side.TORCH_STOCK, Side.TORCH_POLLING),
    (Bench.STORE, Against.TORCH): (Side.TORCH_STOCK,),
    (Bench.RENDEZVOUS, Against.JAX): (Side.JAX,),
    (Bench.IDLE, Against.JAX): (Side.JAX,),
    (Bench.STORE, Against.JAX): (Side.JAX,),
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
    """Of a restart; its nodes are sessions."""
    only: str = ""
    """One measure of a rendezvous or a recovery; empty: all of them."""

    @property
    def measures(self) -> tuple[str, ...]:
        """What a rendezvous or a recovery measures here."""
        return (self.only,) if self.only else MEASURES[self.bench]

    @property
    def patience_s(self) -> float:
        """How long the whole case may take: what every sample may, and as much again for starting and ending them."""
        samples = self.repeat * (1 if self.bench in (Bench.IDLE, Bench.SCALE) else len(self.measures))
        return 60.0 + samples * (2 * self.limit_s + 20.0 + 0.1 * self.nodes) + samples * self.seconds


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """One measured value, or why there is none."""

    measure: str
    value: float | None
    why_none: str = ""


class Doing(msgspec.Struct, frozen=True, tag="doing"):
    """What a case is at, for who watches."""

    text: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The case ended early, and why."""

    why: str


Line = Sample | Doing | Failed
"""What the process of a case writes, one JSON document a line."""


def columns(bench: Bench, against: Against | None, backend: str = "tcp") -> tuple[Side, ...]:
    """The sides of a table, Rallypoint first. KeyError if there is nothing to compare: see `comparable`."""
    ours = Side.RALLYPOINT_ETCD if backend == "etcd" or against is Against.TORCH_ETCD else Side.RALLYPOINT
    return (ours, *(_RIVALS[bench, against] if against is not None else ()))


def comparable(bench: Bench, against: Against) -> bool:
    """Whether that side can do the work of that measurement."""
    return (bench, against) in _RIVALS


def cases(
    bench: Bench,
    against: Against | None,
    nodes: tuple[int, ...],
    repeat: int,
    seconds: float,
    backend: str = "tcp",
) -> tuple[Case, ...]:
    """All cases in the order in which they are run. Competitors run as processes only, so not above that number."""
    return tuple(
        Case(bench, side, count, repeat, seconds)
        for count in nodes
        for side in columns(bench, against, backend)
        if side is Side.RALLYPOINT or count <= MOST_PROCESSES
    )


def least_settle_s(nodes: int) -> float:
    """How long nodes that are inside their call are given at least to be noted by the server."""
    return 0.5 + 0.01 * min(nodes, MOST_PROCESSES)


def phase_s(nodes: int, repetition: int) -> float:
    """How much longer, at random: the same on all sides of a comparison."""
    return random.Random(f"{nodes}/{repetition}").uniform(0.0, MOST_PHASE_S)
