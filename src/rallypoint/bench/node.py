"""A node that is a process of its own: it carries out commands and reports the instant of each step."""

from __future__ import annotations

import socket
import time

from rallypoint.bench.node_pool import REPORT_DELAY_S, Action, Command, Event, Report
from rallypoint.bench.plan import COPY_MEMORY_UP_TO
from rallypoint.bench.processes import MessageSocket, PeerClosed, copy_shared_memory
from rallypoint.bench.sides import Client

LONGEST_ERROR = 300


def run_node(sock: socket.socket, number: int, client: Client, most: int) -> None:
    """Until the other end is closed, or a call fails. `most`: the size of a complete world."""
    messages = MessageSocket(sock, Command)
    try:
        if most <= COPY_MEMORY_UP_TO:
            copy_shared_memory()
        client.warm_up()
        messages.send([Report(number, Event.READY, time.monotonic())])
        while True:
            for command in messages.receive():
                sleep_until(command.at)
                _carry_out(command.action, number, client, most, messages)
    except PeerClosed:
        return
    except Exception as error:
        messages.send([failure(number, error)])


def _carry_out(action: Action, number: int, client: Client, most: int, messages: MessageSocket[Command]) -> None:
    match action:
        case Action.CONNECT:
            client.connect()
            messages.send([Report(number, Event.CONNECTED, time.monotonic())])
        case Action.JOIN:
            _join(number, client, most, messages)
        case Action.FOLLOW:
            client.wait_changed()
            _join(number, client, most, messages)
        case Action.ABANDON:
            raise RuntimeError("a node with a process of its own is killed, not told to abandon its handler")


def _join(number: int, client: Client, most: int, messages: MessageSocket[Command]) -> None:
    client.create()
    messages.send([Report(number, Event.CALLING, time.monotonic())])
    called_at = time.monotonic()
    place = client.join()
    at = time.monotonic()
    if place.size == most:
        time.sleep(REPORT_DELAY_S)
    messages.send([Report(number, Event.RELEASED, at, place.rank, place.size, called_at)])


def sleep_until(at: float) -> None:
    """Sleep until that instant of the monotonic clock."""
    left_s = at - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


def failure(number: int, error: BaseException) -> Report:
    """The report of a call that raised."""
    text = f"{type(error).__name__}: {error}"
    return Report(number, Event.FAILED, time.monotonic(), error=text[:LONGEST_ERROR])
