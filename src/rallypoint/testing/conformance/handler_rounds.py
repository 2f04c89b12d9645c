"""Checks of the handler over several rounds: barrier, late nodes, spares, losses, ranks, attributes of a round."""

from __future__ import annotations

import socket
from functools import partial

from rallypoint.api import RendezvousStoreInfo
from rallypoint.errors import RendezvousTimeoutError, SettingsMismatchError
from rallypoint.testing.conformance.handler_kit import HandlerCheck, HandlerKit, gather, names_of, ranks_of
from rallypoint.testing.conformance.kit import NotConforming, expect, expect_same


def check_nobody_returns_before_the_minimum_has_joined(kit: HandlerKit) -> None:
    """All calls block until `min_nodes` have joined; then all return the same round."""
    with kit.nodes("a", "b", "c", min_nodes=3) as (a, b, c):
        calls = [a.join(), b.join()]
        for call in calls:
            call.still_blocks("no call returns with fewer than min_nodes")
        worlds = [call.result() for call in [*calls, c.join()]]
        expect_same("one round", len({world.round for world in worlds}), 1)
        expect_same("its size", [world.world_size for world in worlds], [3, 3, 3])
        expect_same("ranks are 0 to n-1, each once", sorted(ranks_of(worlds)), [0, 1, 2])


def check_the_last_call_admits_latecomers_and_then_ends(kit: HandlerKit) -> None:
    """After the minimum has joined, a round forms at the end of the last call with all nodes that joined by then."""
    with kit.nodes("a", "b", "c", min_nodes=1, max_nodes=4, last_call_timeout=1.0) as nodes:
        worlds = gather(nodes)
        expect_same("all who came during the last call", [world.world_size for world in worlds], [3, 3, 3])


def check_a_full_round_forms_at_once(kit: HandlerKit) -> None:
    """When `max_nodes` have joined, the round forms without waiting for the last call."""
    with kit.nodes("a", "b", min_nodes=1, max_nodes=2, last_call_timeout=3600) as nodes:
        expect_same("a full round", [world.world_size for world in gather(nodes)], [2, 2])


def check_members_agree_on_everything(kit: HandlerKit) -> None:
    """All members of a round have the same members, in rank order, and the same bootstrap address and port."""
    with kit.nodes("a", "b", "c", min_nodes=3, local_addr="127.0.0.1") as nodes:
        worlds = gather(nodes)
        by_rank = {world.rank: node.name for node, world in zip(nodes, worlds, strict=True)}
        for world in worlds:
            expect_same("members in rank order", names_of(world), [by_rank[rank] for rank in range(3)])
            expect_same("members' addresses", {member.addr for member in world.members}, {"127.0.0.1"})
        infos = {world.bootstrap_store_info for world in worlds}
        expect_same("one bootstrap address and port", len(infos), 1)
        (info,) = infos
        expect_same("the bootstrap address is rank 0's", info.master_addr, "127.0.0.1")
        expect("the bootstrap port can be used", 0 < info.master_port < 65536, info)


def check_a_round_is_described_by_its_info(kit: HandlerKit) -> None:
    """`next_rendezvous` returns store, rank, world_size, bootstrap_store_info, round and members."""
    with kit.node("only", min_nodes=1, labels="zone=a") as node:
        info = node.join().result()
        expect_same("rank and size", (info.rank, info.world_size), (0, 1))
        expect("rounds count from 1", info.round >= 1, info.round)
        expect_same("members", names_of(info), ["only"])
        expect("the bootstrap info", isinstance(info.bootstrap_store_info, RendezvousStoreInfo), info)
        info.store.set("key", b"value")
        expect_same("the store", info.store.get("key"), b"value")
        expect("its text says what it is", "rank=0" in repr(info) and "world_size=1" in repr(info), repr(info))


def check_a_handler_knows_its_run_and_backend(kit: HandlerKit) -> None:
    """`get_run_id` and `get_backend` work without a connection, before and after shutdown."""
    with kit.node("a", min_nodes=1) as node:
        handler = node.handler
        expect_same("the run id", handler.get_run_id(), kit.run_id)
        expect_same("the backend", handler.get_backend(), handler.settings.scheme)
        expect_same("the agent's store is not for the workers", handler.use_agent_store, False)
        handler.shutdown()
        expect_same("the run id after shutdown", handler.get_run_id(), kit.run_id)


def check_a_late_node_waits_and_members_are_told(kit: HandlerKit) -> None:
    """A late node blocks and all members count it as waiting; it is admitted when they join again."""
    with kit.nodes("a", "b", min_nodes=2, max_nodes=3) as members, kit.node("c", min_nodes=2, max_nodes=3) as late:
        worlds = gather(members)
        expect_same("no node waits yet", [node.handler.num_nodes_waiting() for node in members], [0, 0])
        waiting = late.join()
        for node, world in zip(members, worlds, strict=True):
            kit.until("a waiting node is counted", partial(node.counts, 1))
            expect("members are told", world.changed.wait(kit.patience_s), world.changed)
            expect_same("and why", world.changed.cause and world.changed.cause.value, "waiting")
        waiting.still_blocks("a late node does not form a group of its own")
        again = gather(members)
        third = waiting.result()
        expect_same("the next round", {world.round for world in again}, {third.round})
        expect_same("all three are in", sorted([*ranks_of(again), third.rank]), [0, 1, 2])
        expect("round numbers grow", third.round > worlds[0].round, (worlds[0].round, third.round))
        kit.until(
            "no node waits any longer",
            lambda: [node.handler.num_nodes_waiting() for node in [*members, late]] == [0] * 3,
        )


def check_nobody_waits_in_a_run_without_a_round(kit: HandlerKit) -> None:
    """`num_nodes_waiting` is 0 for a run that does not exist, and before its first round."""
    with kit.nodes("a", "b", min_nodes=3) as (a, b):
        expect_same("a run that does not exist", a.handler.num_nodes_waiting(), 0)
        expect_same("it is not closed", a.handler.is_closed(), False)
        calls = [a.join(), b.join()]
        for call in calls:
            call.still_blocks("two of three wait")
        expect_same("before the first round", b.handler.num_nodes_waiting(), 0)


def check_a_spare_is_not_counted_and_gets_the_next_free_place(kit: HandlerKit) -> None:
    """A node that joins a full round is a spare, not a waiting node; when a member leaves, it takes the free place."""
    with kit.nodes("a", "b", min_nodes=2) as members, kit.node("c", min_nodes=2, join_timeout=2.0) as spare:
        gather(members)
        waiting = spare.join()
        waiting.still_blocks("a spare waits, longer than its join time-out", 2.5)
        expect_same("a spare is not counted", [node.handler.num_nodes_waiting() for node in members], [0, 0])
        members[1].handler.leave("making room")
        world = members[0].join().result()
        expect_same("the spare has the free place", set(names_of(world)), {"a", "c"})
        expect_same("the spare is in", waiting.result().round, world.round)


def check_survivors_learn_of_a_loss_and_go_on(kit: HandlerKit) -> None:
    """The others notice the death of a member, and can form the next round without it."""
    with kit.nodes("a", "b", "c", min_nodes=2, max_nodes=3) as nodes:
        worlds = gather(nodes)
        lost = nodes.pop(ranks_of(worlds).index(1))
        lost.crash()
        for node in nodes:
            kit.until("a lost member is counted", partial(node.counts, 1))
        told = [world for world in worlds if world.rank != 1]
        for world in told:
            expect("survivors are told", world.changed.wait(kit.patience_s), world.changed)
            expect_same("and why", world.changed.cause and world.changed.cause.value, "loss")
        again = gather(nodes)
        expect_same("the survivors' round", [world.world_size for world in again], [2, 2])
        expect("round numbers grow", again[0].round > worlds[0].round, again[0].round)


def check_a_node_that_dies_while_joining_is_not_waited_for(kit: HandlerKit) -> None:
    """A node that dies before the round is complete is not a member of it."""
    with kit.nodes("a", "b", "dead", min_nodes=2, max_nodes=3, last_call_timeout=2.5) as (a, b, dead):
        calls = [a.join(), dead.join()]
        calls[1].still_blocks("one of two joined")
        dead.crash()
        calls.append(b.join())
        worlds = [calls[0].result(), calls[2].result()]
        expect_same("the living are in", [world.world_size for world in worlds], [2, 2])
        expect_same("and only they", set(names_of(worlds[0])), {"a", "b"})


def check_ranks_are_sticky(kit: HandlerKit) -> None:
    """A member keeps its rank in the next round; a replacement of a member that left inherits its rank."""
    with kit.nodes("a", "b", "c", min_nodes=3) as nodes:
        before = {node.name: world.rank for node, world in zip(nodes, gather(nodes), strict=True)}
        nodes.reverse()
        again = {node.name: world.rank for node, world in zip(nodes, gather(nodes), strict=True)}
        expect_same("ranks after joining again, in another order", again, before)
        gone = nodes.pop(1)
        gone.handler.leave("done here")
        with kit.node("d", min_nodes=3) as new:
            after = {node.name: world.rank for node, world in zip([new, *nodes], gather([new, *nodes]), strict=True)}
        wanted = {"d" if name == gone.name else name: rank for name, rank in before.items()}
        expect_same("members keep their ranks, a new node inherits the free one", after, wanted)


def check_who_left_is_not_missed(kit: HandlerKit) -> None:
    """`leave` does not close the run: the others form the next round, and the node can join again."""
    with kit.nodes("a", "b", "c", min_nodes=1, max_nodes=3) as nodes:
        gather(nodes)
        nodes[2].handler.leave("for a while")
        nodes[2].handler.leave("twice is fine")
        expect_same("leaving does not close", nodes[0].handler.is_closed(), False)
        worlds = gather(nodes[:2])
        expect_same("the next round is without it", set(names_of(worlds[0])), {"a", "b"})
        back = nodes[2].join()
        kit.until("it waits", lambda: nodes[0].handler.num_nodes_waiting() == 1)
        expect_same("all are in again", [world.world_size for world in gather(nodes[:2])], [3, 3])
        expect_same("with it", back.result().world_size, 3)


def check_the_join_time_out_says_who_was_there(kit: HandlerKit) -> None:
    """After `join_timeout` a node withdraws with an error that says what was missing, and no longer counts."""
    with kit.nodes("a", "b", min_nodes=3, join_timeout=3.0) as early, kit.nodes("c", "d", "e", min_nodes=3) as nodes:
        for call in [node.join() for node in early]:
            error = call.error("the join time-out", RendezvousTimeoutError)
            expect("it says what was missing", "of at least 3" in str(error), str(error))
        calls = [node.join() for node in nodes[:2]]
        for call in calls:
            call.still_blocks("a withdrawn node does not count")
        expect_same("the others get in", {world.world_size for world in gather(nodes[2:])}, {3})
        expect_same("only they are members", set(names_of(calls[0].result())), {"c", "d", "e"})
        calls[1].result()


def check_stores_of_rounds_are_disjoint(kit: HandlerKit) -> None:
    """All members read what a member has set; the store of the next round does not contain it."""
    with kit.nodes("a", "b", min_nodes=2) as nodes:
        one, other = gather(nodes)
        one.store.set("key", b"first round")
        expect_same("a member gets it", other.store.get("key"), b"first round")
        one, other = gather(nodes)
        expect_same("the next round does not", other.store.check(["key"]), False)


def check_store_info_can_be_built_over_the_store(kit: HandlerKit) -> None:
    """`RendezvousStoreInfo.build`: rank 0 publishes its address and port, and all ranks read the same."""
    with kit.nodes("a", "b", min_nodes=2) as nodes:
        worlds = gather(nodes)
        calls = [
            node.call(partial(RendezvousStoreInfo.build, world.rank, world.store, "10.0.0.7", 1234))
            for node, world in zip(nodes, worlds, strict=True)
        ]
        infos = [call.result() for call in calls]
        expect_same("what rank 0 gave", infos, [RendezvousStoreInfo("10.0.0.7", 1234)] * 2)
        worlds = gather(nodes)
        calls = [
            node.call(partial(RendezvousStoreInfo.build, world.rank, world.store))
            for node, world in zip(nodes, worlds, strict=True)
        ]
        infos = [call.result() for call in calls]
        expect_same("the same for all ranks", infos[0], infos[1])
        expect_same("the name of the machine", infos[0].master_addr, socket.getfqdn())
        expect("a free port", 0 < infos[0].master_port < 65536, infos[0])


def check_other_settings_are_refused_with_both_values(kit: HandlerKit) -> None:
    """A node whose sizes differ from those of the run is refused; the error names both values."""
    with kit.node("a", min_nodes=2) as first, kit.node("b", min_nodes=2, max_nodes=4) as other:
        waiting = first.join()
        waiting.still_blocks("one of two")
        error = other.join().error("other settings are refused", SettingsMismatchError)
        expect(
            "it names the option and both values", all(word in str(error) for word in ("max_nodes", "4", "2")), error
        )
        if not waiting.blocks:
            raise NotConforming("the first node is not disturbed", "it no longer waits")


CHECKS: tuple[HandlerCheck, ...] = (
    check_nobody_returns_before_the_minimum_has_joined,
    check_the_last_call_admits_latecomers_and_then_ends,
    check_a_full_round_forms_at_once,
    check_members_agree_on_everything,
    check_a_round_is_described_by_its_info,
    check_a_handler_knows_its_run_and_backend,
    check_a_late_node_waits_and_members_are_told,
    check_nobody_waits_in_a_run_without_a_round,
    check_a_spare_is_not_counted_and_gets_the_next_free_place,
    check_survivors_learn_of_a_loss_and_go_on,
    check_a_node_that_dies_while_joining_is_not_waited_for,
    check_ranks_are_sticky,
    check_who_left_is_not_missed,
    check_the_join_time_out_says_who_was_there,
    check_stores_of_rounds_are_disjoint,
    check_store_info_can_be_built_over_the_store,
    check_other_settings_are_refused_with_both_values,
)
