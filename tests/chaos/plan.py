"""The plan of a seed: successive worlds, each with its sizes, time-outs and bursts of faults.

Pure: the same seed gives the same plan, so that a single world can be repeated. The behaviour of the real processes is
not deterministic.
"""

import enum
import random
from dataclasses import dataclass

RUN_ID = "chaos"


class Backend(enum.Enum):
    """The backend of the run."""

    TCP = "tcp"
    DATA = "tcp with data"
    ETCD = "etcd"


class Fault(enum.Enum):
    """The faults. Most of them last for some time; the rest is healed after the burst."""

    KILL = "a node's process is killed and restarted"
    PAUSE = "a node is paused for less than its time to live"
    PAUSE_LONG = "a node is paused for longer than its time to live"
    CUT = "packets between a node and the backend are dropped"
    CUT_UP = "packets from a node to the backend are dropped"
    CUT_DOWN = "packets from the backend to a node are dropped"
    CLOCK = "the wall clock of a node jumps"
    SLOW = "connections of some nodes to the backend are slow"
    HOLD = "connections of some nodes stall without closing"
    RESET = "connections of some nodes are reset"
    LEAVE = "a node leaves, and joins again"
    REJOIN = "a member joins again"
    NEW = "a node closes its handler, and a new one replaces it"
    DRAIN = "an operator drains a node; a new one replaces it"
    CLOSE = "the run is closed, and reopened later"
    SERVER_KILL = "the server is killed and restarted"
    SERVER_STOP = "the server is shut down and restarted"
    SERVER_PAUSE = "the server is paused"
    SERVER_FORGETS = "the server is killed and restarted without its data"
    SERVER_CLOCK = "the wall clock of the server jumps"
    FDS = "the server has no file descriptors left"
    STRANGERS = "idle connections fill the server"
    DISK_FULL = "the server's disk is full"
    DISK_BROKEN = "the server's disk fails"
    DISK_SLOW = "the server's disk is slow"
    LEADER_KILL = "the leader of etcd is killed and restarted"
    LEADER_PAUSE = "the leader of etcd is paused"
    LEADER_CUT = "packets between the leader of etcd and the other members are dropped"
    FOLLOWER_KILL = "a follower of etcd is killed and restarted"
    QUORUM = "two of three members of etcd are killed and restarted"


class Probe(enum.Enum):
    """The test after healing and settling: here the promised bounds are checked exactly."""

    KILL = "a member is killed: the others are told in time; it restarts and is admitted"
    PAUSE = "a member is paused beyond its time to live: the others are told in time; it is admitted again"
    OUTAGE = "a short outage of the backend: no member is disturbed"
    NOTHING = "nothing"


OF_NODES = (
    Fault.KILL, Fault.PAUSE, Fault.PAUSE_LONG, Fault.CUT, Fault.CUT_UP, Fault.CUT_DOWN, Fault.CLOCK, Fault.SLOW,
    Fault.HOLD, Fault.RESET, Fault.LEAVE, Fault.REJOIN, Fault.NEW, Fault.DRAIN, Fault.CLOSE,
)  # fmt: skip
OF_SERVERS = (
    Fault.SERVER_KILL, Fault.SERVER_STOP, Fault.SERVER_PAUSE, Fault.SERVER_CLOCK, Fault.FDS, Fault.STRANGERS,
)  # fmt: skip
OF_DATA = (Fault.DISK_FULL, Fault.DISK_BROKEN, Fault.DISK_SLOW, Fault.SERVER_FORGETS)
OF_ETCD = (Fault.LEADER_KILL, Fault.LEADER_PAUSE, Fault.LEADER_CUT, Fault.FOLLOWER_KILL, Fault.QUORUM)
FAULTS = {
    Backend.TCP: OF_NODES + OF_SERVERS,
    Backend.DATA: OF_NODES + OF_SERVERS + OF_DATA,
    Backend.ETCD: OF_NODES + OF_ETCD,
}
CHOICES = {"tcp": (Backend.TCP, Backend.DATA), "etcd": (Backend.ETCD,), "both": tuple(Backend)}


@dataclass(frozen=True, slots=True)
class Action:
    """One fault: when in its burst, on which node (modulo their number), for how long, and how strong (0 to 1)."""

    at_s: float
    fault: Fault
    target: int
    length_s: float
    strength: float


@dataclass(frozen=True, slots=True)
class Burst:
    """Some faults, concurrent or close together, and the test after healing."""

    actions: tuple[Action, ...]
    probe: Probe
    victim: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One world."""

    seed: str
    backend: Backend
    nodes: int
    min_nodes: int
    max_nodes: int
    interval_s: float
    grace_s: float
    confirm_timeout_s: float
    join_timeout_s: float
    last_call_s: float
    admission_window_s: float
    entries: int
    """A server with data takes a snapshot after this many changes."""
    sync: str
    bursts: tuple[Burst, ...]

    @property
    def ttl_s(self) -> float:
        return 3 * self.interval_s

    @property
    def options(self) -> str:
        """The options of every node's URL."""
        etcd = self.backend is Backend.ETCD
        return (
            f"min_nodes={self.min_nodes}&max_nodes={self.max_nodes}&keep_alive_interval={self.interval_s:g}"
            f"&keep_alive_max_attempt=3&heartbeat_timeout={self.interval_s:g}&last_call_timeout={self.last_call_s:g}"
            f"&admission_window={self.admission_window_s:g}&confirm_timeout={self.confirm_timeout_s:g}"
            f"&join_timeout={self.join_timeout_s:g}&hold_back_losses=0&read_timeout=5&close_timeout=10"
            + ("" if etcd else f"&disconnect_grace={self.grace_s:g}&is_host=false")
        )


def draw(seed: int, number: int, backends: str = "both", bursts: int | None = None) -> Plan:
    """World `number` of a seed, on the chosen backends in turn."""
    rng = random.Random(f"chaos {seed} {number} {backends}")
    choices = CHOICES[backends]
    backend = choices[number % len(choices)]
    nodes = rng.choice((3, 4, 4, 5))
    max_nodes = nodes if rng.random() < 0.75 else nodes - 1
    min_nodes = rng.randint(2, max(2, max_nodes - 1))
    interval_s = rng.choice((1.0, 2.0))
    ttl_s = 3 * interval_s
    count = bursts if bursts is not None else rng.randint(3, 5)
    return Plan(
        seed=f"{seed}.{number}",
        backend=backend,
        nodes=nodes,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        interval_s=interval_s,
        grace_s=rng.choice((0.3, 1.0)),
        confirm_timeout_s=rng.choice((3.0, 10.0)),
        join_timeout_s=rng.choice((15.0, 60.0)),
        last_call_s=rng.choice((0.3, 1.0)),
        admission_window_s=rng.choice((0.0, 0.2, 1.0)),
        entries=rng.choice((100, 1000)),
        sync=rng.choice(("always", "always", "os")),
        bursts=tuple(_burst(rng, backend, ttl_s) for _ in range(count)),
    )


def _burst(rng: random.Random, backend: Backend, ttl_s: float) -> Burst:
    kinds = FAULTS[backend]
    special = [kind for kind in kinds if kind not in OF_NODES]
    actions = [_action(rng, rng.choice(special), ttl_s)]  # at least one fault of the backend
    actions += [_action(rng, rng.choice(kinds), ttl_s) for _ in range(rng.choice((1, 2, 2, 3, 4, 6)))]
    probes = [Probe.KILL, Probe.KILL, Probe.PAUSE, Probe.NOTHING]
    if backend is not Backend.TCP:
        probes.append(Probe.OUTAGE)
    return Burst(tuple(sorted(actions, key=lambda one: one.at_s)), rng.choice(probes), rng.randrange(1000))


def _action(rng: random.Random, fault: Fault, ttl_s: float) -> Action:
    lasting = rng.choice((0.1, 0.3, 0.6, 1.3, 2.0)) * ttl_s
    if fault is Fault.PAUSE:
        lasting = rng.uniform(0.1, 0.5) * ttl_s
    elif fault is Fault.PAUSE_LONG:
        lasting = rng.uniform(1.2, 2.0) * ttl_s
    return Action(rng.uniform(0.0, 4.0), fault, rng.randrange(1000), lasting, rng.random())
