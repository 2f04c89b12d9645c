"""Injects the faults of a plan. Each method starts a fault and returns the function that ends it, if any."""

import contextlib
import heapq
import itertools
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable

from tests.chaos.plan import Action, Burst, Fault
from tests.chaos.world import Place, World
from tests.e2e.kit import PORT, Process

End = Callable[[], None] | None
JUMPS_S = (-3 * 86400, -3600, -60, 60, 3600, 3 * 86400)
STRANGERS = """
import resource, socket, sys, time
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
while True:
    try:
        if len(held) < int(sys.argv[3]):
            held.append(socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1))
            continue
    except OSError:
        pass
    time.sleep(0.2)
"""


class FaultInjector:
    """Runs bursts of faults. In one thread: child processes die with the thread that started them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.done: Counter[str] = Counter()
        self.was_closed = False

    def run(self, burst: Burst) -> None:
        """Run all actions of a burst, and end those with a duration."""
        began_at = time.monotonic()
        order = itertools.count()
        waiting: list[tuple[float, int, Action | Callable[[], None]]] = []
        for action in burst.actions:
            heapq.heappush(waiting, (action.at_s, next(order), action))
        while waiting:
            at_s, _, what = heapq.heappop(waiting)
            time.sleep(max(0.0, began_at + at_s - time.monotonic()))
            if not isinstance(what, Action):
                what()
                continue
            end = self._begin(what)
            if end is not None:
                heapq.heappush(waiting, (time.monotonic() - began_at + what.length_s, next(order), end))

    def _begin(self, action: Action) -> End:
        world = self.world
        place = world.places[action.target % len(world.places)]
        who = "" if action.fault.name.startswith(("SERVER", "DISK", "FDS", "LEADER")) else f" on {place.name}"
        world.note("fault", f"{action.fault.name}{who} for {action.length_s:.1f} s")
        self.done[action.fault.name.lower()] += 1
        return BEGIN[action.fault](self, action, place)

    # --- nodes --------------------------------------------------------------------------------------------------------

    def kill(self, action: Action, place: Place) -> End:
        self.world.kill_node(place)
        return lambda: self.world.start_node(place)

    def pause(self, action: Action, place: Place) -> End:
        node = place.node
        self.world.pause(node)
        return lambda: self.world.resume(node)

    def cut(self, action: Action, place: Place) -> End:
        for host in self.world.hosts_of(place):
            if action.fault is not Fault.CUT_DOWN:
                self.world.lose(place.machine, host)
            if action.fault is not Fault.CUT_UP:
                self.world.lose(host, place.machine)
        return lambda: self.world.heal_network(place.machine)

    def clock(self, action: Action, place: Place) -> End:
        place.clock.jump(_jump(action))
        return None

    def slow(self, action: Action, place: Place) -> End:
        self.world.tell_proxies(f"delay {0.02 + 0.4 * action.strength:.2f}")
        return lambda: self.world.tell_proxies("delay 0")

    def hold(self, action: Action, place: Place) -> End:
        self.world.tell_proxies("hold")
        return lambda: self.world.tell_proxies("pass")

    def reset(self, action: Action, place: Place) -> End:
        self.world.tell_proxies("cut")
        return None

    def go(self, action: Action, place: Place) -> End:
        self.world.tell_node(place, action.fault.name.lower())
        return None

    def drain(self, action: Action, place: Place) -> End:
        self.world.operate("drain", place.name, "--reason", "chaos", "--force", timeout_s=3.0)
        return None

    def close(self, action: Action, place: Place) -> End:
        self.was_closed = True
        self.world.tell_node(place, "close")
        self.world.note(place.name, "is told to close the run")
        return lambda: self.world.tell_node(place, "reopen")

    # --- the embedded server ------------------------------------------------------------------------------------------

    def server_kill(self, action: Action, place: Place) -> End:
        self.world.kill_server()
        return self._start_server

    def server_stop(self, action: Action, place: Place) -> End:
        self.world.stop_server()
        return self._start_server

    def server_forgets(self, action: Action, place: Place) -> End:
        self.world.kill_server()
        shutil.rmtree(self.world.data, ignore_errors=True)
        return self._start_server

    def _start_server(self) -> None:
        world = self.world
        if world.server is None or world.server.popen.poll() is not None:
            world.start_server()

    def server_pause(self, action: Action, place: Place) -> End:
        server = self.world.server
        self.world.pause(server)
        return lambda: self.world.resume(server)

    def server_clock(self, action: Action, place: Place) -> End:
        self.world.server_clock.jump(_jump(action))
        return None

    def fds(self, action: Action, place: Place) -> End:
        """Also cuts proxied connections: reconnecting needs a descriptor."""
        self.world.tell_server(f"fds {int(4 * action.strength)}")
        self.world.tell_proxies("cut")
        return lambda: self.world.tell_server("fds heal")

    def strangers(self, action: Action, place: Place) -> End:
        world = self.world
        where = [world.homes[0].address, str(PORT), str(int(50 + 500 * action.strength))]
        strangers = Process("strangers", [sys.executable, "-c", STRANGERS, *where], machine=world.strange)
        world.stage.processes.append(strangers)

        def end() -> None:
            world.stage.processes.remove(strangers)
            strangers.end()

        return end

    def disk(self, action: Action, place: Place) -> End:
        word = {Fault.DISK_FULL: "full", Fault.DISK_BROKEN: "broken"}.get(action.fault)
        self.world.tell_server(f"disk {word or f'slow {0.02 + action.strength:.2f}'}")
        return lambda: self.world.tell_server("disk heal")

    # --- etcd ---------------------------------------------------------------------------------------------------------

    def member_kill(self, action: Action, place: Place) -> End:
        member = self.world.member(action.fault is Fault.LEADER_KILL, action.target)
        if member is None:
            return None
        member.kill()
        self.world.note(f"etcd {member.name}", "is killed")
        return lambda: None if member.is_running else member.start()

    def leader_pause(self, action: Action, place: Place) -> End:
        member = self.world.member(True, 0)
        if member is None:
            return None
        member.pause()
        self.world.note(f"etcd {member.name}", "is paused")
        return member.resume

    def leader_cut(self, action: Action, place: Place) -> End:
        member = self.world.member(True, 0)
        if member is None:
            return None
        home = self.world.home_of(member)
        for other in self.world.homes:
            if other is not home:
                self.world.lose(home, other)
                self.world.lose(other, home)
        self.world.note(f"etcd {member.name}", "does not hear the others")
        return lambda: self.world.heal_network(home)

    def quorum(self, action: Action, place: Place) -> End:
        assert self.world.cluster is not None
        two = [m for m in self.world.cluster.members if m.is_running][:2]
        for member in two:
            member.resume()
            member.kill()
            self.world.note(f"etcd {member.name}", "is killed")

        def end() -> None:
            for member in two:
                if not member.is_running:
                    with contextlib.suppress(ProcessLookupError):
                        member.start()

        return end


def _jump(action: Action) -> float:
    return JUMPS_S[action.target % len(JUMPS_S)]


BEGIN: dict[Fault, Callable[[FaultInjector, Action, Place], End]] = {
    Fault.KILL: FaultInjector.kill,
    Fault.PAUSE: FaultInjector.pause,
    Fault.PAUSE_LONG: FaultInjector.pause,
    Fault.CUT: FaultInjector.cut,
    Fault.CUT_UP: FaultInjector.cut,
    Fault.CUT_DOWN: FaultInjector.cut,
    Fault.CLOCK: FaultInjector.clock,
    Fault.SLOW: FaultInjector.slow,
    Fault.HOLD: FaultInjector.hold,
    Fault.RESET: FaultInjector.reset,
    Fault.LEAVE: FaultInjector.go,
    Fault.REJOIN: FaultInjector.go,
    Fault.NEW: FaultInjector.go,
    Fault.DRAIN: FaultInjector.drain,
    Fault.CLOSE: FaultInjector.close,
    Fault.SERVER_KILL: FaultInjector.server_kill,
    Fault.SERVER_STOP: FaultInjector.server_stop,
    Fault.SERVER_PAUSE: FaultInjector.server_pause,
    Fault.SERVER_FORGETS: FaultInjector.server_forgets,
    Fault.SERVER_CLOCK: FaultInjector.server_clock,
    Fault.FDS: FaultInjector.fds,
    Fault.STRANGERS: FaultInjector.strangers,
    Fault.DISK_FULL: FaultInjector.disk,
    Fault.DISK_BROKEN: FaultInjector.disk,
    Fault.DISK_SLOW: FaultInjector.disk,
    Fault.LEADER_KILL: FaultInjector.member_kill,
    Fault.LEADER_PAUSE: FaultInjector.leader_pause,
    Fault.LEADER_CUT: FaultInjector.leader_cut,
    Fault.FOLLOWER_KILL: FaultInjector.member_kill,
    Fault.QUORUM: FaultInjector.quorum,
}
