"""Checks liveness after a burst was healed: the guarantees "once faults stop" must hold within their bounds.

A bound is widened by the time in which the involved processes got no processor, as measured by them and by this process
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
    """Measured durations by name, each with its bound."""

    seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, what: str, took_s: float, bound_s: float) -> None:
        self.seen.setdefault(what, []).append((took_s, bound_s))


@dataclass(frozen=True)
class Loss:
    """A lost member, of which the others must be told."""

    victim: Place
    number: int
    at: float
    bound_s: float
    what: str
    waited: Waited


class Liveness:
    """The liveness checks of one world."""

    def __init__(self, world: World, stalls: Sequence[Stalls], times: Times) -> None:
        """`stalls`: of this process, and of the disk unless the server measures that."""
        self.world = world
        self.stalls = stalls
        self.times = times
        self.not_judged = 0

    # --- the state of the world ---------------------------------------------------------------------------------------

    def allowance(self, since: float, processes: Iterable[Process]) -> float:
        """The time since then in which the processes could not run."""
        theirs = sum(stalled_s(process, since) + stalled_s(process, since, "disk") for process in processes)
        return sum(stalls.since(since) for stalls in self.stalls) + theirs

    def all_processes(self) -> list[Process]:
        server = self.world.server
        return [*self.world.nodes, *([server] if server is not None else [])]

    def inside(self) -> tuple[int, list[Place]]:
        """The newest round with a member, and its members."""
        found = [(place, standing(place.node)) for place in self.world.places if place.node in self.world.nodes]
        rounds = [(fact["round"], fact["size"], place) for place, fact in found if fact and fact["kind"] == "round"]
        newest = max((number for number, _, _ in rounds), default=0)
        return newest, [place for number, size, place in rounds if number == newest]

    def why_unsettled(self) -> str | None:
        """Why the world has not settled; None: as many nodes as possible are in one round, which has not changed."""
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
        """Wait until the world has settled and stays so for a renewal interval; how long it took to settle."""
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
            if why is not None and took_s > bound_s + self.allowance(began_at, self.all_processes()):
                raise broke(f"{what}: not settled within {bound_s:.0f} s: {why}")
            time.sleep(LOOK_S)
        self.times.add(what, good[0] - began_at, bound_s)
        return good[0] - began_at

    # --- the probes ---------------------------------------------------------------------------------------------------

    def probe(self, burst: Burst) -> str:
        """Run the test of a burst; a description of its result."""
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
        """Detection by every survivor, a round without the victim if they are enough, and Admission of its return."""
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
        """Wait until every survivor knows; how long the last one took. A survivor that left the round knows."""
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
        """How long the involved processes could not run: the survivor, the coordinator, and proxies between them."""
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
        """At most one round became active without the node after it had joined."""
        node = place.node
        assert node is not None
        own = standing(node)
        asked_at = next((fact["at"] for fact in _since(node, began_at) if fact["kind"] == "joins"), None)
        if own is None or own["kind"] != "round" or asked_at is None:
            return
        if any(fact.get("event") == "SessionLost" and fact["at"] > asked_at for fact in _since(node, began_at)):
            return  # the machine was too busy for its renewals: it had to join again
        others = {
            fact["round"]
            for one in self.world.nodes
            for fact in _since(one, asked_at)
            if fact["kind"] == "round" and fact["round"] < own["round"]
        }
        if len(others) > 1:
            raise BrokeAdmission(f"{node.name} was admitted in round {own['round']}, after rounds {sorted(others)}")

    def _outage(self) -> str:
        """An outage of the control plane that is shorter than a lease disturbs no member."""
        world, plan = self.world, self.world.plan
        number, places = self.inside()
        began_at = time.monotonic()
        if world.cluster is not None:
            leader = world.cluster.leader
            leader.kill()
            world.note(f"etcd {leader.name}", "is killed")
            _ = world.cluster.leader  # wait for a new leader
            outage_s = time.monotonic() - began_at
            leader.start()
            world.cluster.wait_ready()
        else:
            world.kill_server()
            world.start_server()
            outage_s = time.monotonic() - began_at
        time.sleep(plan.ttl_s)
        outage_s += self.allowance(began_at, self.all_processes())
        is_short = outage_s + 1.0 < 0.6 * plan.ttl_s
        if is_short:
            for place in places:
                told = [fact for fact in _since(place.node, began_at) if fact["kind"] in STANDING]
                if told:
                    raise BrokeOutageTolerance(
                        f"{place.name} was disturbed in round {number} by an outage of {outage_s:.1f} s: {told[0]}"
                    )
            self.times.add("an unnoticed outage", outage_s, 0.6 * plan.ttl_s)
        else:
            self.not_judged += 1
        self.settle("after an outage")
        return f"an outage of {outage_s:.1f} s{'' if is_short else ', too long to be judged'}"


def stalled_s(process: Process, since: float, of: str = "") -> float:
    """How long a process got no processor by its own measurement, or waited for its disk."""
    return sum(
        fact["length_s"] for fact in _since(process, since) if fact["kind"] == "stall" and fact.get("of", "") == of
    )


def _since(process: Process | Node | None, at: float) -> list[Fact]:
    """Its reports since then, in order."""
    found: list[Fact] = []
    for fact in reversed(process.facts if process is not None else []):
        if fact.get("at", at) < at:
            break
        if "at" in fact:
            found.append(fact)
    found.reverse()
    return found


def standing(node: Process | None) -> Fact | None:
    """The last report that says which round a node is in."""
    facts = node.facts if node is not None else []
    return next((facts[i] for i in range(len(facts) - 1, -1, -1) if facts[i]["kind"] in STANDING), None)


def _in_words(fact: Fact | None) -> str:
    if fact is None:
        return "has said nothing"
    return " ".join(str(fact[key]) for key in ("kind", "round", "cause", "error") if key in fact)
