"""What a seed draws: worlds one after the other, each with its sizes and times, and the bursts of faults in it.

Pure: the same seed gives the same plan, so that a world can be played again by itself. What real processes make of it
is not the same twice.
"""

import enum
import random
from dataclasses import dataclass

RUN_ID = "chaos"


class Backend(enum.Enum):
    """Where the run lives."""

    TCP = "tcp"
    DATA = "tcp with data"
    ETCD = "etcd"


class Fault(enum.Enum):
    """What can happen. Most of them last for a while; what is left of them is healed after the burst."""

    KILL = "a node's process is killed; it is started again"
    PAUSE = "a node stands still for less than its time to live"
    PAUSE_LONG = "a node stands still for longer than its time to live"
    CUT = "a node and the backend do not hear each other"
    CUT_UP = "the backend does not hear a node"
    CUT_DOWN = "a node does not hear the backend"
    CLOCK = "the wall clock of a node jumps"
    SLOW = "the way of some nodes to the backend is slow"
    HOLD = "nothing passes on the way of some nodes, and nothing closes"
    RESET = "all connections on the way of some nodes are reset"
    LEAVE = "a node leaves in good order, and joins again"
    REJOIN = "a member joins again"
    NEW = "a node closes its handler, and another one takes its place"
    DRAIN = "an operator asks a node to go; another one takes its place"
    CLOSE = "the run is closed, and reopened later"
    SERVER_KILL = "the server is killed; it is started again"
    SERVER_STOP = "the server is asked to stop; it is started again"
    SERVER_PAUSE = "the server stands still"
    SERVER_FORGETS = "the server is killed, and its data are gone when it is started again"
    SERVER_CLOCK = "the wall clock of the server jumps"
    FDS = "the server has no file descriptors left"
    STRANGERS = "connections that say nothing fill the server"
    DISK_FULL = "the server's disk is full"
    DISK_BROKEN = "the server's disk fails"
    DISK_SLOW = "the server's disk is slow"
    LEADER_KILL = "the leader of etcd is killed; it is started again"
    LEADER_PAUSE = "the leader of etcd stands still"
    LEADER_CUT = "the leader of etcd does not hear the other members"
    FOLLOWER_KILL = "a follower of etcd is killed; it is started again"
    QUORUM = "two of three members of etcd are killed; they are started again"


class Probe(enum.Enum):
    """What is tried when all is healed and has settled: what is promised then must be kept to the second."""

    KILL = "a member is killed: the others know in time; it comes back and is let in"
    PAUSE = "a member stands still beyond its time to live: the others know in time; it is let in again"
    OUTAGE = "the backend is away for a moment: nobody notices"
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
    """One fault: when in its burst, on which node (modulo those there are), for how long, how much of it (0 to 1)."""

    at_s: float
    fault: Fault
    target: int
    length_s: float
    strength: float


@dataclass(frozen=True, slots=True)
class Burst:
    """Some faults, close together or at once, and what is tried after they are healed."""

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
    """So many changes make a snapshot of a server with data."""
    sync: str
    bursts: tuple[Burst, ...]

    @property
    def ttl_s(self) -> float:
        return 3 * self.interval_s

    @property
    def options(self) -> str:
        """Of every node's URL."""
        etcd = self.backend is Backend.ETCD
        return (
            f"min_nodes={self.min_nodes}&max_nodes={self.max_nodes}&keep_alive_interval={self.interval_s:g}"
            f"&keep_alive_max_attempt=3&heartbeat_timeout={self.interval_s:g}&last_call_timeout={self.last_call_s:g}"
            f"&admission_window={self.admission_window_s:g}&confirm_timeout={self.confirm_timeout_s:g}"
            f"&join_timeout={self.join_timeout_s:g}&hold_back_losses=0&read_timeout=5&close_timeout=10"
            + ("" if etcd else f"&disconnect_grace={self.grace_s:g}&is_host=false")
        )


def draw(seed: int, number: int, backends: str = "both", bursts: int | None = None) -> Plan:
    """World `number` of a seed, on one of the chosen backends: each in its turn."""
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
        grace_s=rng.choice((0.5, 1.0)),
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
    actions = [_action(rng, rng.choice(special), ttl_s)]  # what happens to the backend is half of it
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
