"""A node that is a process of its own: it does what it is told, and reports the instant of each thing."""

from __future__ import annotations

import socket
import time

from rallypoint.bench.crew import REPORT_S, Command, Do, Report, What
from rallypoint.bench.helper import Gone, Line, own_memory
from rallypoint.bench.plan import OWN_MEMORY_UP_TO
from rallypoint.bench.sides import Client

LONGEST_ERROR = 300


def be_node(sock: socket.socket, number: int, client: Client, most: int) -> None:
    """Until the other end is gone, or a call fails. `most`: the size of a whole world."""
    line = Line(sock, Command)
    try:
        if most <= OWN_MEMORY_UP_TO:
            own_memory()
        client.rehearse()
        line.send([Report(number, What.READY, time.monotonic())])
        while True:
            for command in line.receive():
                wait_until(command.at)
                _obey(command.do, number, client, most, line)
    except Gone:
        return
    except Exception as error:
        line.send([failure(number, error)])


def _obey(do: Do, number: int, client: Client, most: int, line: Line[Command]) -> None:
    match do:
        case Do.CONNECT:
            client.connect()
            line.send([Report(number, What.CONNECTED, time.monotonic())])
        case Do.JOIN:
            _join(number, client, most, line)
        case Do.FOLLOW:
            client.wait_told()
            _join(number, client, most, line)
        case Do.ABANDON:
            raise RuntimeError("a node with a process of its own is killed, not told to abandon its handler")


def _join(number: int, client: Client, most: int, line: Line[Command]) -> None:
    client.create()
    line.send([Report(number, What.INSIDE, time.monotonic())])
    called_at = time.monotonic()
    place = client.join()
    at = time.monotonic()
    if place.size == most:
        time.sleep(REPORT_S)
    line.send([Report(number, What.RELEASED, at, place.rank, place.size, called_at)])


def wait_until(at: float) -> None:
    """Sleep until that instant of the monotonic clock."""
    left_s = at - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


def failure(number: int, error: BaseException) -> Report:
    """What a node says of a call that raised."""
    text = f"{type(error).__name__}: {error}"
    return Report(number, What.FAILED, time.monotonic(), text=text[:LONGEST_ERROR])
