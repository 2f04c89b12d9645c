"""The plan of a seed: the size of the world, its settings, its network conditions, and its faults.

A plan is a value: the same seed gives the same plan, and a plan without some of its actions is again a plan, which is
used to reduce a failing world.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, replace

from rallypoint.backends.register.cell_latency import TURNS

FEWEST_ACTIONS = 6
WIRED = 0.4
MOST_ON_A_REGISTER = 8


class Fault(enum.Enum):
    """The faults of a world. Most of them last for some time and end by themselves."""

    CRASH = "a process dies; later its machine starts a new one"
    PAUSE = "a process is paused"
    CUT = "no messages between a process and the server arrive"
    CUT_UP = "no messages from a process to the server arrive"
    CUT_DOWN = "no messages from the server to a process, or to its watches, arrive"
    RESET = "a connection is reset and reconnects"
    SLOW = "messages of a process are slow"
    LOSSY = "messages of a process are lost or repeated"
    LATE = "requests of a process arrive long after their time-out"
    MUTE = "confirmations of a process are never sent"
    SESSION_END = "the session of a living process ends while a round forms"
    KILL_COORDINATOR = "the coordinator dies after its next writes"
    PAUSE_COORDINATOR = "the coordinator is paused"
    SERVER_RESTART = "the server restarts with its data"
    SERVER_WIPE = "the server restarts without its data"
    SERVER_CUT = "no process can reach the server"
    CLOSE = "an operator closes the run"
    CLOSE_FORMING = "an operator closes the run while a round forms, and perhaps reopens it at once"
    REOPEN = "an operator reopens the run"
    LEAVE = "a node leaves and comes back"
    REJOIN = "a member joins again"
    DRAIN = "an operator drains a node"
    LEASE_END = "the run's own lease ends while it has nodes"
    CLOCK = "a wall clock jumps"


@dataclass(frozen=True, slots=True)
class Action:
    """One fault: when, on which node (a number modulo the number of nodes), and for how long."""

    at_s: float
    fault: Fault
    target: int
    length_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """All parameters of a world."""

    seed: int
    nodes: int
    min_nodes: int
    max_nodes: int
    step: int
    keep_alive_interval_s: float
    last_call_timeout_s: float
    last_call_mode: str
    confirm_timeout_s: float
    admission_window_s: float
    join_timeout_s: float
    reopen_after_s: float
    hold_back_losses: int
    ranks: str
    start_within_s: float
    slowest_s: float
    server_coordinator: bool
    max_txn_ops: int
    history: int
    restless: float
    thorough: bool
    """Whether a crash, a late node and an outage follow after the world has settled."""
    wired: bool
    """Whether the real server and client communicate over simulated connections; else the engine is reached by
    simulated messages."""
    disconnect_grace_s: float
    call_timeout_s: float
    stall_s: float
    actions: tuple[Action, ...]
    register: bool = False
    """Whether the backend is a register on one compare-and-set cell."""

    @property
    def ttl_s(self) -> float:
        return self.keep_alive_interval_s * 3

    @property
    def may_be_too_slow(self) -> bool:
        """Whether the cell of a register may be too slow for these time-outs: then nodes are refused.

        A turn takes four one-way delays.
        """
        return self.register and self.ttl_s < TURNS * 4 * self.slowest_s * self.nodes

    @property
    def faults_end_at_s(self) -> float:
        return max((action.at_s + action.length_s for action in self.actions), default=0.0) + 1.0

    @property
    def has_data(self) -> bool:
        """Whether the server uses a log and snapshots on a simulated disk."""
        return self.wired and any(action.fault is Fault.SERVER_RESTART for action in self.actions)

    def keeping(self, indices: frozenset[int]) -> Plan:
        """The same world with only these actions."""
        return replace(self, actions=tuple(a for i, a in enumerate(self.actions) if i in indices))


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"plan {seed}")
    wire = random.Random(f"wire {seed}")  # of its own, so that the other draws are what they were without it
    wired = wire.random() < WIRED
    large = rng.random() < 0.32
    nodes = rng.choice((20, 20, 20, 21, 22, 24)) if large else rng.choice((2, 3, 3, 4, 5, 6, 8))
    step = 2 if nodes >= 4 and rng.random() < 0.15 else 1
    min_nodes = max(step, rng.randint(1, max(1, nodes * 2 // 3)) // step * step)
    max_nodes = max(min_nodes, rng.randint(min_nodes, nodes + 2) // step * step)
    interval_s = rng.choice((1.0, 2.0) if large else (0.5, 1.0, 2.0))
    calm = rng.sample(list(Fault), k=rng.randint(3, len(Fault)))
    count = rng.randint(FEWEST_ACTIONS, FEWEST_ACTIONS + (4 if large else 8))
    within_s = rng.choice((1.0, 3.0) if large else (2.0, 6.0, 12.0))
    return Plan(
        seed=seed,
        nodes=nodes,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        step=step,
        keep_alive_interval_s=interval_s,
        last_call_timeout_s=rng.choice((0.1, 1.0, 3.0)),
        last_call_mode=rng.choice(("adaptive", "adaptive", "fixed")),
        confirm_timeout_s=rng.choice((0.5, 2.0, 5.0)),
        admission_window_s=rng.choice((0.0, 0.2, 1.0)),
        join_timeout_s=rng.choice((10.0, 30.0, 120.0)),
        reopen_after_s=rng.choice((0.0, 2.0, 20.0)),
        hold_back_losses=rng.choice((0, 0, 2)),
        ranks=rng.choice(("sticky", "sticky", "natural", "node_rank")),
        start_within_s=rng.choice((0.0, 0.5, 5.0)),
        slowest_s=rng.choice((0.001, 0.005, 0.05)),
        server_coordinator=(rng.random() < 0.4) or wired,
        max_txn_ops=rng.choice((5, 12, 128, 10_000)),
        history=rng.choice((20, 200, 100_000)),
        restless=0.0 if large else rng.choice((0.0, 0.3, 0.7)),
        thorough=rng.random() < (0.15 if large else 0.3),
        wired=wired,
        disconnect_grace_s=wire.choice((0.3, 1.0)),
        call_timeout_s=wire.choice((interval_s * 1.5, 60.0)),
        stall_s=wire.choice((interval_s * 0.9, 6.0)),
        actions=tuple(
            sorted(
                (_action(rng, calm, within_s, interval_s * 3) for _ in range(count)),
                key=lambda action: action.at_s,
            )
        ),
    )


def draw_register(seed: int) -> Plan:
    """The plan of a seed for a world on a register: as `draw`, without a server, and with few nodes.

    The writes of nodes take turns: there must be time for all of them to confirm.
    """
    plan = draw(seed)
    step = plan.step
    nodes = min(plan.nodes, MOST_ON_A_REGISTER)
    min_nodes = max(step, min(plan.min_nodes, nodes * 2 // 3) // step * step)
    max_nodes = max(min_nodes, min(plan.max_nodes, nodes + 2) // step * step)
    return replace(
        plan,
        nodes=nodes,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        confirm_timeout_s=max(plan.confirm_timeout_s, 8 * plan.slowest_s * nodes),
        wired=False,
        server_coordinator=False,
        register=True,
    )


def _action(rng: random.Random, faults: list[Fault], within_s: float, ttl_s: float) -> Action:
    lasting = rng.choice((0.2, 0.5, 0.9, 1.2, 2.0)) * ttl_s * rng.uniform(0.5, 1.0)
    return Action(rng.uniform(0.0, within_s), rng.choice(faults), rng.randrange(1000), lasting)
