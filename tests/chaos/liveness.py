"""After a burst is healed: what is promised "once faults stop" must follow within its bounds.

A bound is widened by the time that the processes which had to act were not let run, as they and this one measured it
(`stalls`), and by nothing else.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rallypoint.testing.checkers import BrokeAdmission, BrokeCompletion, BrokeDetection, BrokeOutageTolerance
from tests.chaos.plan import Backend, Burst, Probe
from tests.chaos.stalls import Stalls, Waited
from tests.chaos.world import Place, World
from tests.e2e.kit import Fact, Node, Process

LOOK_S = 0.05
STANDING = ("round", "changed", "over", "joins", "raised", "exit", "closed")


@dataclass
class Times:
    """Seconds that were measured, by what: with the bound of each."""

    seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, what: str, took_s: float, bound_s: float) -> None:
        self.seen.setdefault(what, []).append((took_s, bound_s))


@dataclass(frozen=True)
class Loss:
    """A member that is gone, of which the others have to be told."""

    victim: Place
    number: int
    at: float
    bound_s: float
    what: str
    waited: Waited


class Liveness:
    """Looks at one world."""

    def __init__(self, world: World, stalls: Sequence[Stalls], times: Times) -> None:
        """`stalls`: of this process, and of the disk where it is not the server that measures that."""
        self.world = world
        self.stalls = stalls
        self.times = times
        self.not_judged = 0

    # --- how it stands ------------------------------------------------------------------------------------------------

    def allowance(self, since: float, processes: Iterable[Process]) -> float:
        """So long they could not act, since then."""
        theirs = sum(stalled_s(process, since) + stalled_s(process, since, "disk") for process in processes)
        return sum(stalls.since(since) for stalls in self.stalls) + theirs

    def everybody(self) -> list[Process]:
        server = self.world.server
        return [*self.world.nodes, *([server] if server is not None else [])]

    def inside(self) -> tuple[int, list[Place]]:
        """The newest round that anybody is in, and those who are in it."""
        found = [(place, standing(place.node)) for place in self.world.places if place.node in self.world.nodes]
        rounds = [(fact["round"], fact["size"], place) for place, fact in found if fact and fact["kind"] == "round"]
        newest = max((number for number, _, _ in rounds), default=0)
        return newest, [place for number, size, place in rounds if number == newest]

    def why_unsettled(self) -> str | None:
        """None: as many as may be are in one round, and nobody was told that it has changed."""
        living = len(self.world.nodes)
        size = min(living, self.world.plan.max_nodes)
        number, places = self.inside()
        sizes = {fact["size"] for place in places if (fact := standing(place.node)) is not None}
        if len(places) == size and sizes == {size}:
            return None
        stands = ", ".join(f"{node.name} {_in_words(standing(node))}" for node in self.world.nodes)
        return f"{len(places)} of {size} are in round {number}: {stands}"

    # --- Completion ---------------------------------------------------------------------------------------------------

    def settle(self, what: str, broke: type[AssertionError] = BrokeCompletion, since: float | None = None) -> float:
        """Until all is as it should be and stays so while everybody renews; how long it took to become so."""
        plan = self.world.plan
        began_at = time.monotonic() if since is None else since
        bound_s = 4 * plan.ttl_s + 3 * plan.last_call_s + 4 * plan.confirm_timeout_s + 2 * plan.admission_window_s + 20
        good: tuple[float, int] | None = None
        while True:
            now = time.monotonic()
            why = self.why_unsettled()
            number, _ = self.inside()
            if why is not None:
                good = None
            elif good is None or good[1] != number:
                good = (now, number)
            elif now - good[0] > plan.interval_s + 0.5:
                break
            took_s = now - began_at
            if why is not None and took_s > bound_s + self.allowance(began_at, self.everybody()):
                raise broke(f"{what}: not settled within {bound_s:.0f} s: {why}")
            time.sleep(LOOK_S)
        self.times.add(what, good[0] - began_at, bound_s)
        return good[0] - began_at

    # --- the probes ---------------------------------------------------------------------------------------------------

    def probe(self, burst: Burst) -> str:
        """What the burst says; in words, what came of it."""
        match burst.probe:
            case Probe.KILL:
                return self._lose(burst.victim, is_killed=True)
            case Probe.PAUSE:
                return self._lose(burst.victim, is_killed=False)
            case Probe.OUTAGE:
                return self._outage()
            case Probe.NOTHING:
                return "nothing"

    def _lose(self, pick: int, is_killed: bool) -> str:
        """Detection by every survivor, a round without it where they are enough, and Admission of it again."""
        world, plan = self.world, self.world.plan
        number, places = self.inside()
        victim = places[pick % len(places)]
        survivors = [place for place in places if place is not victim]
        is_seen = is_killed and plan.backend is not Backend.ETCD
        bound_s = plan.grace_s + 0.5 if is_seen else plan.ttl_s + 1.0
        what = "a death is told" if is_seen else "a loss is told"
        node = victim.node
        waited = Waited(world.pids)
        died_at = world.kill_node(victim) if is_killed else world.pause(node)
        assert died_at is not None
        worst_s = self._all_told(survivors, Loss(victim, number, died_at, bound_s, what, waited))
        if is_killed and len(world.nodes) >= plan.min_nodes:
            self.settle("the others go on")
        began_at = time.monotonic()
        if is_killed:
            world.start_node(victim)
        else:
            world.resume(node)
        self.settle("it is let in again", BrokeAdmission)
        if len(world.places) <= plan.max_nodes:
            self._admitted_soon(victim, began_at)
        return f"{what} in {worst_s:.1f} s"

    def _all_told(self, survivors: list[Place], loss: Loss) -> float:
        """Until every survivor knows; how long the last of them took. Whoever has gone on by itself knows."""
        untold, worst_s = list(survivors), 0.0
        while untold:
            for place in list(untold):
                node = place.node
                assert node is not None
                knows = [fact["at"] for fact in _since(node, loss.at) if fact["kind"] in STANDING]
                took_s = (min(knows) if knows else time.monotonic()) - loss.at
                forgiven_s = self._forgiven(place, loss)
                if took_s > loss.bound_s + forgiven_s:
                    raise BrokeDetection(
                        f"{node.name} in round {loss.number} was told of {loss.victim.name} after {took_s:.1f} s"
                        f"{'' if knows else ' not yet'}; allowed: {loss.bound_s:g} s, and {forgiven_s:.1f} s of stalls"
                    )
                if knows:
                    untold.remove(place)
                    worst_s = max(worst_s, took_s)
                    self.times.add(loss.what, took_s, loss.bound_s)
            time.sleep(LOOK_S)
        return worst_s

    def _forgiven(self, place: Place, loss: Loss) -> float:
        """How long those who had to act could not: the survivor, who decides, and whatever is between them."""
        world, since = self.world, loss.at

        def of(process: Process) -> float:
            return max(loss.waited.of(process.popen.pid), stalled_s(process, since))

        assert place.node is not None
        total_s = sum(stalls.since(since) for stalls in self.stalls) + of(place.node)
        if world.server is not None:
            total_s += of(world.server) + stalled_s(world.server, since, "disk")
        else:
            total_s += max((of(node) for node in world.nodes if node is not place.node), default=0.0)
        if place.is_proxied or loss.victim.is_proxied:
            total_s += sum(of(proxy) for proxy in world.proxies)
        members = world.cluster.members if world.cluster is not None else []
        return total_s + max((loss.waited.of(member.pid) for member in members), default=0.0)

    def _admitted_soon(self, place: Place, began_at: float) -> None:
        """At most one round became active without it after it had asked."""
        node = place.node
        assert node is not None
        own = standing(node)
        asked_at = next((fact["at"] for fact in _since(node, began_at) if fact["kind"] == "joins"), None)
        if own is None or own["kind"] != "round" or asked_at is None:
            return
        if any(fact.get("event") == "SessionLost" and fact["at"] > asked_at for fact in _since(node, began_at)):
            return  # on a machine so busy that it could not renew: then it had to ask again
        others = {
            fact["round"]
            for one in self.world.nodes
            for fact in _since(one, asked_at)
            if fact["kind"] == "round" and fact["round"] < own["round"]
        }
        if len(others) > 1:
            raise BrokeAdmission(f"{node.name} was let in in round {own['round']}; rounds {sorted(others)} went before")

    def _outage(self) -> str:
        """The control plane goes and comes back within a lease: no member is disturbed."""
        world, plan = self.world, self.world.plan
        number, places = self.inside()
        began_at = time.monotonic()
        if world.cluster is not None:
            leader = world.cluster.leader
            leader.kill()
            world.note(f"etcd {leader.name}", "is killed")
            _ = world.cluster.leader  # another one leads
            outage_s = time.monotonic() - began_at
            leader.start()
            world.cluster.wait_ready()
        else:
            world.kill_server()
            world.start_server()
            outage_s = time.monotonic() - began_at
        time.sleep(plan.ttl_s)
        outage_s += self.allowance(began_at, self.everybody())
        is_short = outage_s + 1.0 < 0.6 * plan.ttl_s
        if is_short:
            for place in places:
                told = [fact for fact in _since(place.node, began_at) if fact["kind"] in STANDING]
                if told:
                    raise BrokeOutageTolerance(
                        f"{place.name} was disturbed in round {number} by an outage of {outage_s:.1f} s: {told[0]}"
                    )
            self.times.add("an outage nobody noticed", outage_s, 0.6 * plan.ttl_s)
        else:
            self.not_judged += 1
        self.settle("after an outage")
        return f"an outage of {outage_s:.1f} s{'' if is_short else ', too long to be judged'}"


def stalled_s(process: Process, since: float, of: str = "") -> float:
    """So long it was not let run, as it measured it itself; or waited for its disk."""
    return sum(
        fact["length_s"] for fact in _since(process, since) if fact["kind"] == "stall" and fact.get("of", "") == of
    )


def _since(process: Process | Node | None, at: float) -> list[Fact]:
    """What it has said since then, in order."""
    found: list[Fact] = []
    for fact in reversed(process.facts if process is not None else []):
        if fact.get("at", at) < at:
            break
        if "at" in fact:
            found.append(fact)
    found.reverse()
    return found


def standing(node: Process | None) -> Fact | None:
    """The last thing that says where a node stands."""
    facts = node.facts if node is not None else []
    return next((facts[i] for i in range(len(facts) - 1, -1, -1) if facts[i]["kind"] in STANDING), None)


def _in_words(fact: Fact | None) -> str:
    if fact is None:
        return "has said nothing"
    return " ".join(str(fact[key]) for key in ("kind", "round", "cause", "error") if key in fact)
