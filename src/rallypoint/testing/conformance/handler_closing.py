"""Checks of closing, shutdown and reopening of a run."""

from __future__ import annotations

from rallypoint.errors import RendezvousClosedError, RendezvousGracefulExitError
from rallypoint.testing.conformance.handler_kit import HandlerCheck, HandlerKit, gather, names_of
from rallypoint.testing.conformance.kit import expect, expect_same


def check_a_run_that_does_not_exist_is_not_closed(kit: HandlerKit) -> None:
    """`is_closed` is False for a run that no node has joined, and does not create it."""
    with kit.nodes("a", "b", min_nodes=1) as (a, b):
        expect_same("a run that does not exist", (a.handler.is_closed(), a.handler.is_closed()), (False, False))
        expect_same("its first round", b.join().result().world_size, 1)
        expect_same("a run that exists", a.handler.is_closed(), False)


def check_closing_is_seen_by_everybody_and_idempotent(kit: HandlerKit) -> None:
    """After `set_closed` the run is closed for all nodes; closing it again has no effect."""
    with kit.nodes("a", "b", "c", min_nodes=2) as (a, b, c):
        gather([a, b])
        a.handler.set_closed()
        a.handler.set_closed()
        b.handler.set_closed()
        for node in (a, b, c):
            kit.until("the run is closed for all nodes", node.handler.is_closed)
            expect_same("no node waits in a closed run", node.handler.num_nodes_waiting(), 0)


def check_who_never_joined_can_close(kit: HandlerKit) -> None:
    """`set_closed` works on a node that never joined, even if the run did not exist."""
    with kit.nodes("closer", "late", min_nodes=1) as (closer, late):
        closer.handler.set_closed()
        expect_same("the run is closed", late.handler.is_closed(), True)
        late.join().error("no node can join a closed run", RendezvousClosedError)


def check_who_waits_is_told_of_the_close(kit: HandlerKit) -> None:
    """Waiting nodes get the closed error, which names the closing node; so does every later call."""
    with kit.nodes("a", "closer", "late", min_nodes=3) as (a, closer, late):
        waiting = a.join()
        waiting.still_blocks("one of three")
        closer.handler.set_closed()
        error = waiting.error("a waiting node is told", RendezvousClosedError)
        expect("it names the closing node", "closer" in str(error), str(error))
        for _ in range(2):
            late.join().error("later nodes are told", RendezvousClosedError)


def check_a_close_does_not_interrupt_the_round(kit: HandlerKit) -> None:
    """Members of an active round can still use their store; their next `next_rendezvous` raises."""
    with kit.nodes("a", "b", min_nodes=2) as nodes:
        one, other = gather(nodes)
        nodes[0].handler.set_closed()
        one.store.set("key", b"value")
        expect_same("the store works", other.store.get("key"), b"value")
        expect_same("the round is as it was", (other.changed.is_set(), sorted(names_of(other))), (False, ["a", "b"]))
        for call in [node.join() for node in nodes]:
            call.error("there is no next round", RendezvousClosedError)


def check_a_spare_exits_gracefully_when_the_run_is_closed(kit: HandlerKit) -> None:
    """A spare of a closed run gets the graceful-exit error."""
    with kit.nodes("a", "b", min_nodes=2) as members, kit.node("c", min_nodes=2) as spare:
        gather(members)
        waiting = spare.join()
        waiting.still_blocks("a spare waits")
        members[0].handler.set_closed()
        waiting.error("a spare exits gracefully", RendezvousGracefulExitError)


def check_shutdown_leaves_and_closes(kit: HandlerKit) -> None:
    """`shutdown` returns True: the node has left and the run is closed; calling it again has no effect."""
    with kit.nodes("a", "b", min_nodes=2) as (a, b):
        gather([a, b])
        expect_same("shutdown", (a.handler.shutdown(), a.handler.shutdown()), (True, True))
        kit.until("the run is closed for the others", b.handler.is_closed)
        b.join().error("there is no next round", RendezvousClosedError)
        expect_same("shutdown of a closed run", b.handler.shutdown(), True)


def check_who_never_joined_can_shut_down(kit: HandlerKit) -> None:
    """`shutdown` of a node that never joined closes the run, too."""
    with kit.nodes("a", "b", min_nodes=1) as (a, b):
        expect_same("shutdown", a.handler.shutdown(), True)
        expect_same("the run is closed", b.handler.is_closed(), True)


def check_a_closed_run_can_be_reopened(kit: HandlerKit) -> None:
    """`reopen` lets nodes join again, and returns whether the run was closed."""
    with kit.nodes("a", "b", min_nodes=1) as (a, b):
        first = a.join().result()
        expect_same("an open run cannot be reopened", a.handler.reopen(), False)
        a.handler.set_closed()
        expect_same("reopening", b.handler.reopen(), True)
        a.handler.leave()
        again = b.join().result()
        expect("new rounds form", again.round > first.round, (first.round, again.round))
        kit.until("it is open for all nodes", lambda: not a.handler.is_closed())


CHECKS: tuple[HandlerCheck, ...] = (
    check_a_run_that_does_not_exist_is_not_closed,
    check_closing_is_seen_by_everybody_and_idempotent,
    check_who_never_joined_can_close,
    check_who_waits_is_told_of_the_close,
    check_a_close_does_not_interrupt_the_round,
    check_a_spare_exits_gracefully_when_the_run_is_closed,
    check_shutdown_leaves_and_closes,
    check_who_never_joined_can_shut_down,
    check_a_closed_run_can_be_reopened,
)
