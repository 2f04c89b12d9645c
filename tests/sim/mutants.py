"""Mutants: deliberately broken variants of the algorithm, its drivers and the engine, each with its edits.

They prove that the checkers can fail and that the worlds exercise every rule: there is at least one mutant for every
rule of the protocol and for every guarantee. The simulator detects a mutant in the world of the seed in `caught.json`
(`pytest tests/sim/test_mutants.py --rewrite` searches new seeds). If only one order of events in a million shows it, an
exhaustive world detects it.

For some rules a second rule gives the same protection, so that a mutant without the first breaks no guarantee. Such
mutants remove both, and name the second line of defence.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from rallypoint.backends.session import LeaseSession
from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.kv import log, snapshot_parts
from rallypoint.kv.engine import Engine
from rallypoint.rendezvous import attempt, decide, ranks
from rallypoint.rendezvous.coordinator import Coordinator
from rallypoint.rendezvous.election import Election
from rallypoint.rendezvous.fenced_writer import FencedWriter
from rallypoint.rendezvous.join_deadline import JoinDeadline
from rallypoint.rendezvous.kept_events import KeptEvents
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.node import Node
from rallypoint.rendezvous.node_session import NodeSession
from rallypoint.rendezvous.node_view import NodeView
from rallypoint.rendezvous.round_end import Leavings
from rallypoint.rendezvous.run_config import RunConfig
from rallypoint.rendezvous.view import View
from rallypoint.server.clients import Clients
from rallypoint.server.durability.journal import Journal
from rallypoint.server.durability.server import DurableConnection
from rallypoint.server.runs import Runs
from rallypoint.store import AsyncStore
from rallypoint.testing.exhaustive import Budget, Setup
from tests.sim.edits import Edit, edited

GUARANTEES = (
    *("Barrier", "Agreement", "Ranks", "Exclusivity", "Monotonicity", "Freshness", "Fencing", "Finality"),
    *("Completion", "Detection", "Admission", "Release", "OutageTolerance"),
    "Memory",  # of what happened: not a guarantee, but checked
    "Cause",  # of a round's end: not a guarantee, but checked
)
RULES = range(1, 11)
"""Of the protocol: numbers, joins, coordinator writes, node writes, sessions, view, finality, join, floor, order."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A broken variant: its edits, its rule if it breaks one, and the guarantees that it breaks."""

    name: str
    breaks: tuple[str, ...]
    """The guarantees, each of which may be the first to be detected as broken."""
    edits: tuple[Edit, ...]
    rule: int | None = None
    second_line: str = ""
    """The second line of defence, which is removed, too."""
    world: Setup | None = None
    """The exhaustive world that detects it; None: the simulator does."""
    is_wired: bool = False
    """Whether only a wire world can detect it."""
    has_data: bool = False
    """Whether only a world whose server has data can detect it."""

    def applied(self) -> AbstractContextManager[None]:
        """Apply the mutant."""
        return edited(*self.edits)


def alone(begin: str = "nothing", **budget: int) -> Setup:
    """An exhaustive world of one node."""
    return Setup("", nodes=1, min_nodes=1, max_nodes=1, begin=begin, budget=Budget(**budget))


NOWHERE = 'self._keys.control + "nowhere"'
"""A key that never exists."""

MUTANTS = (
    # --- the ten rules ------------------------------------------------------------------------------------------------
    Mutant(
        "the number of an attempt that was given up is used again",
        ("Monotonicity", "Agreement"),
        (Edit(View, "next_number", "self.round.number if", "self.round.last_active if"),),
        rule=1,
    ),
    Mutant(
        "a coordinator does not continue the kept events of the one before",
        ("Memory",),
        (Edit(KeptEvents, "load", "self._next = first + count", "pass"),),
    ),
    Mutant(
        "a write of kept events without an answer is repeated under the next number",
        ("Memory",),
        (Edit(KeptEvents, "settle", "self.in_doubt = None", "self._next += 1"),),
    ),
    Mutant(
        "a coordinator notes a round that the one before has noted",
        ("Memory",),
        (Edit(KeptEvents, "note", "number == self.last_active", "False"),),
    ),
    Mutant(
        "a coordinator notes a round again whose event is no longer kept",
        ("Memory",),
        (Edit(KeptEvents, "_continue", "self.last_active = record.active", "pass"),),
    ),
    Mutant(
        "a member that comes back and says why it left stays unknown",
        ("Cause",),
        (Edit(Leavings, "note", "self._vanished.pop(node_id, None)", "pass"),),
    ),
    Mutant(
        "the last failure in a round is reported as its cause",
        ("Cause",),
        (Edit(Leavings, "note", "< (first.revision, first.name)", "> (first.revision, first.name)"),),
    ),
    Mutant(
        "an echo is reported as the cause of a round's end",
        ("Cause",),
        (Edit(Leavings, "root", "first = min(self._first", "first = max(self._first"),),
    ),
    Mutant(
        "a member that joins again counts as lost",
        ("Cause",),
        (
            Edit(
                View,
                "_note_leaving",
                "self.leavings.note(record.id, Leaving(node.mod_revision, record.name, left.kind, left.why))",
                "self.leavings.note_lost(record.id, record.name, node.mod_revision)",
            ),
        ),
    ),
    Mutant(
        "a member that leaves without a cause counts as lost",
        ("Cause",),
        (
            Edit(
                View,
                "_note_leaving",
                "self.leavings.note(record.id, Leaving(node.mod_revision, record.name, LeaveKind.REQUESTED, why))",
                "self.leavings.note_lost(record.id, record.name, node.mod_revision)",
            ),
        ),
    ),
    Mutant(
        "a planned member with another join counts as present",
        ("Barrier",),
        (Edit(View, "_check_plan", "elif seen.record.join != join:", "elif False:"),),
        rule=2,
        world=alone("forming", expire=1),
    ),
    Mutant(
        "an assignment may answer another join",
        ("Barrier",),
        (
            Edit(Node, "_advance", "assign.join != own.join", "False"),
            Edit(View, "_check_plan", "elif seen.record.join != join:", "elif False:"),
        ),
        rule=2,
        second_line="a planned member with another join is gone",
    ),
    Mutant(
        "a coordinator does not compare its term",
        ("Fencing",),
        (
            Edit(
                FencedWriter,
                "write",
                "CreateRevisionIs(self._keys.coordinator, self._term)",
                f"ModRevisionIs({NOWHERE}, 0)",
            ),
        ),
        rule=3,
    ),
    Mutant(
        "a coordinator does not compare state/round",
        ("Monotonicity", "Exclusivity", "Agreement", "Barrier", "Finality"),
        (
            Edit(
                FencedWriter,
                "write",
                "ModRevisionIs(self._keys.round, round_revision)",
                f"ModRevisionIs({NOWHERE}, 0)",
            ),
        ),
        rule=3,
        world=alone(ghost=1, leave=1),
    ),
    Mutant(
        "a node does not compare its own key",
        ("Barrier",),
        (
            Edit(
                NodeSession,
                "write",
                "ModRevisionIs(self._key, self.revision)",
                'ModRevisionIs(self._key + "nowhere", 0)',
            ),
        ),
        rule=4,
        world=alone(ghost=1),
    ),
    Mutant(
        "a node's first write overwrites an existing key",
        ("Barrier",),
        (
            Edit(
                NodeSession,
                "write",
                "ModRevisionIs(self._key, self.revision)",
                'ModRevisionIs(self._key + ("" if self.revision else "nowhere"), self.revision)',
            ),
        ),
        rule=4,
        world=alone(ghost=1),
    ),
    Mutant(
        "a node that gives up keeps its session",
        ("Completion", "Detection"),
        (
            Edit(
                NodeSession,
                "end",
                "await session.close()\n    except TimeoutError:\n        pass  # the lease ends by time\n"
                "    finally:\n        session.abandon()",
                "pass\n    except TimeoutError:\n        pass",
            ),
        ),
        rule=5,
    ),
    Mutant(
        "a coordinator begins with the nodes that it saw before its election",
        ("Exclusivity",),
        (
            Edit(
                Coordinator,
                "_scan",
                "self._view.load(scanned.items,",
                "old = [item for item in scanned.items if item.key.startswith(self._keys.nodes)]\n"
                "    if not self._has_history:\n"
                "        old = self._backend.__dict__.setdefault('warm', old)\n"
                "    new = [item for item in scanned.items if not item.key.startswith(self._keys.nodes)]\n"
                "    self._view.load([*new, *old],",
            ),
        ),
        rule=6,
    ),
    Mutant(
        "a round is written without comparing state/closed",
        ("Finality",),
        (Edit(FencedWriter, "write_round", "(closed, *writes.compares)", "writes.compares"),),
        rule=7,
        world=alone("forming", close=1),
    ),
    Mutant(
        "a node joins a run that was closed after its read",
        ("Finality",),
        (
            Edit(Node, "_join_with", "NodePhase.JOINING, compares=compares", "NodePhase.JOINING"),
            Edit(
                Node,
                "_advance",
                "view.closed_revision > snapshot.closed_revision",
                "view.closed_revision > self._node_session.revision",
            ),
        ),
        rule=8,
        second_line="a node that waits also notices a close from before its join",
        world=alone(close=1),
    ),
    Mutant(
        "round numbers ignore the floors",
        ("Monotonicity",),
        (Edit(View, "next_number", "max(floors, default=0)", "0"),),
        rule=9,
    ),
    Mutant(
        "members of a lost round do not block the next",
        ("Exclusivity",),
        (
            Edit(decide, "decide", "if view.above:", "if False:"),
            Edit(View, "is_gathering", "and not self.above", ""),
        ),
        rule=9,
    ),
    Mutant(
        "a member does not notice that its round was lost",
        ("Completion",),
        (
            Edit(
                NodeView,
                "what_changed",
                "if self.round is None or self.round.number != current.number or is_forgotten:",
                "if self.round is not None and self.round.number > current.number:",
            ),
        ),
        rule=9,
    ),
    Mutant(
        "the roster is written after the round",
        ("Ranks", "Agreement", "Barrier"),
        (
            Edit(
                attempt,
                "forming_writes",
                "return writes",
                "writes.ops.append(writes.ops.pop(0)); writes.marker -= 1\n    return writes",
            ),
        ),
        rule=10,
    ),
    # --- the guarantees -----------------------------------------------------------------------------------------------
    Mutant(
        "a round is active with one confirmation missing",
        ("Barrier",),
        (Edit(decide, "_follow", "if not plan.pending:", "if len(plan.pending) < 2:"),),
    ),
    Mutant(
        "a round is larger than allowed",
        ("Barrier",),
        (Edit(ranks, "choose", "max(places, 0)", "places + 1"),),
    ),
    Mutant(
        "members get the ranks in the opposite order",
        ("Agreement",),
        (
            Edit(
                attempt,
                "_assignments",
                "number=number, rank=rank,",
                "number=number, rank=~rank % len(attempt.members),",
            ),
        ),
    ),
    Mutant(
        "a node is in a round twice",
        ("Ranks",),
        (
            Edit(
                attempt, "new_attempt", "for c in decision.ranked]", "for c in (*decision.ranked, decision.ranked[0])]"
            ),
        ),
    ),
    Mutant(
        "a round is decided while another is active",
        ("Exclusivity",),
        (
            Edit(decide, "decide", "if view.members:", "if view.members and not view.candidates:"),
            Edit(View, "is_gathering", "and not self.members", ""),
        ),
    ),
    Mutant(
        "an activation does not compare the confirmations",
        ("Freshness",),
        (Edit(Coordinator, "_activate", "still_confirmed[:room]", "[]"),),
        world=alone("forming", expire=1),
    ),
    Mutant(
        "a store is written without comparing the membership",
        ("Fencing",),
        (
            Edit(
                AsyncStore,
                "__init__",
                "ModRevisionIs(keys.node(node_id), joined.own_revision)",
                'ModRevisionIs(keys.control + "nowhere", 0)',
            ),
        ),
    ),
    Mutant(
        "all rounds have one store",
        ("Fencing",),
        (Edit(RunKeys, "store", "{number:012d}", "{0:012d}"),),
    ),
    Mutant(
        "the old store of a reused round number is kept",
        ("Fencing",),
        (Edit(attempt, "activation_writes", "DeleteRange(keys.store(record.number))", "DeleteRange(keys.store(0))"),),
    ),
    Mutant(
        "an attempt survives a close and a reopening",
        ("Finality",),
        (Edit(View, "_change", "if self.plan is not None:", "if False:"),),
        world=alone("forming", close=1, reopen=1),
    ),
    Mutant(
        "waiting nodes are not told of a close",
        ("Finality",),
        (Edit(Node, "_advance", "view.closed_revision > snapshot.closed_revision", "False"),),
    ),
    Mutant(
        "a broken attempt is never given up",
        ("Completion",),
        (Edit(decide, "decide", "return GiveUp((), view.plan.broken)", "return Wait(view.plan.broken)"),),
    ),
    Mutant(
        "a node that did not confirm once is left out for ever",
        ("Completion",),
        (
            Edit(
                View,
                "_group_of",
                "self.unconfirmed.get(record.id) == node.mod_revision",
                "record.id in self.unconfirmed",
            ),
        ),
    ),
    Mutant(
        "no node stands for election again",
        ("Completion", "Detection"),
        (Edit(Election, "_wait_until_vacant", "change.item is None", "False"),),
    ),
    Mutant(
        "lost members are not counted",
        ("Detection",),
        (Edit(decide, "summarise", "lost=view.lost,", "lost=0,"),),
    ),
    Mutant(
        "the admission window never ends",
        ("Admission",),
        (Edit(decide, "_window_ends_at", "return min(", 'return float("inf") + min('),),
    ),
    Mutant(
        "a node has no deadline",
        ("Release",),
        (Edit(JoinDeadline, "update", "None if is_spare else self._deadline", "None"),),
    ),
    Mutant(
        "a time-out does not name the missing nodes",
        ("Release",),
        (Edit(JoinDeadline, "error", "reason or", '"" or'),),
    ),
    Mutant(
        "one missed renewal ends the session",
        ("OutageTolerance",),
        (
            Edit(
                LeaseSession,
                "_keep_renewing",
                "pause_s = min(self._interval_s / 5, RETRY_S)",
                "return self.lost.set('one renewal was missed')",
            ),
        ),
    ),
    # --- the engine ---------------------------------------------------------------------------------------------------
    Mutant(
        "a request that is sent again is executed again",
        ("Fencing",),
        (Edit(Engine, "apply", "self.dedupe.lookup(origin) if origin is not None else None", "None"),),
    ),
    Mutant(
        "the keys of a lease outlive it",
        ("Completion", "Detection"),
        (Edit(Engine, "_end", "sorted(lease.keys)", "()"),),
    ),
    Mutant(
        "a revision that was compared may have changed",
        ("Exclusivity", "Monotonicity", "Agreement", "Barrier", "Finality", "Fencing", "Freshness"),
        (Edit(Engine, "_holds", "(item.mod_revision if item else 0) == compare.revision", "True"),),
    ),
    Mutant(
        "the nodes of a run do not renew its lease",
        ("OutageTolerance", "Completion"),
        (Edit(RunConfig, "keep_alive", "await self._backend.keep_alive(config().run_lease)", "pass"),),
    ),
    # --- the server and its client ------------------------------------------------------------------------------------
    Mutant(
        "the answers to a client are dropped when it reconnects",
        ("Fencing",),
        (
            Edit(
                Clients,
                "connected",
                "client = self._clients.get(client_id)",
                "client = self._clients.get(client_id)\n    self._host.engine.dedupe.clients.pop(client_id, None)",
            ),
        ),
        is_wired=True,
    ),
    Mutant(
        "a node forgets that its run was closed when the server loses its data",
        ("Finality",),
        (Edit(Node, "_make_claim", "self.view.mark", "None"),),
        is_wired=True,
    ),
    Mutant(
        "a server without data leaves a run open that a returning node knows to be closed",
        ("Finality",),
        (Edit(Runs, "_close_again", "if item.version > 1 or", "if True or"),),
        is_wired=True,
    ),
    Mutant(
        "a watch is resumed one revision too late",
        ("Completion", "OutageTolerance", "Detection", "Release", "Finality"),
        (
            Edit(
                TcpBackend,
                "_welcomed",
                "WatchStart(number, watch.prefix, watch.after)",
                "WatchStart(number, watch.prefix, watch.after + 1)",
            ),
        ),
        is_wired=True,
    ),
    Mutant(
        "a reconnecting client does not resume its sessions",
        ("OutageTolerance",),
        (Edit(Clients, "connected", "for session in held:", "for session in ():"),),
        is_wired=True,
    ),
    Mutant(
        "an old connection that closes after a reconnect shortens the sessions",
        ("OutageTolerance",),
        (
            Edit(
                Clients,
                "disconnected",
                "if client.connection is not connection:\n        return",
                "if client.connection is not connection:\n"
                "        for lease, grace_s in client.sessions.items():\n"
                "            self._shorten(lease, grace_s)\n"
                "        return",
            ),
        ),
        is_wired=True,
    ),
    Mutant(
        "a connection that the peer closed shortens no session",
        ("Detection",),
        (Edit(Clients, "disconnected", "if by_peer:", "if False:"),),
        is_wired=True,
    ),
    Mutant(
        "the grace of a session runs while the server is paused",
        ("OutageTolerance",),
        (
            Edit(
                Clients,
                "_shorten",
                "self._begin_grace(lease, grace_s)",
                "self._host.execute(Shorten(lease, grace_s))",
            ),
        ),
        is_wired=True,
    ),
    Mutant(
        "sessions are shortened however many connections close at once",
        ("OutageTolerance",),
        (Edit(Clients, "_shorten", "if len(closed) <= MASS_SESSIONS or", "if True or"),),
        is_wired=True,
    ),
    Mutant(
        "a server without its data does not wait for the members",
        ("Exclusivity",),
        (Edit(decide, "decide", "if view.returning is not None and (until", "if False and (until"),),
        is_wired=True,
    ),
    # --- its data -----------------------------------------------------------------------------------------------------
    Mutant(
        "answers and pushes are sent before they are durable",
        ("Barrier", "Agreement", "Exclusivity", "OutageTolerance", "Monotonicity", "Fencing"),
        (
            Edit(
                DurableConnection,
                "_write",
                "self._journal.when_durable(partial(self._write_now, data))",
                "self._write_now(data)",
            ),
        ),
        has_data=True,
    ),
    Mutant(
        "the answers to clients are not kept",
        ("Fencing",),
        (
            Edit(log, "replay", "engine.apply(op, now, entry.origin)", "engine.apply(op, now)"),
            Edit(snapshot_parts, "capture", "in engine.dedupe.clients.items()", "in ()"),
        ),
        has_data=True,
    ),
    Mutant(
        "the end of a lease by time is not kept",
        ("OutageTolerance", "Monotonicity", "Exclusivity", "Agreement", "Freshness", "Barrier"),
        (Edit(log, "perform", "entries.append(Entry(Revoke(lease)))", "pass"),),
        has_data=True,
    ),
    Mutant(
        "a log is continued after a failed sync",
        ("OutageTolerance",),
        (
            Edit(
                Journal,
                "_committed",
                "if error is not None:\n        self._fail(error)\n        return",
                "",
            ),
        ),
        has_data=True,
    ),
)
