"""What a round of processes costs before Rallypoint does anything: the same messages, and nothing else.

N forked processes are connected to a server (uvloop). One of them speaks; the server sends 200 bytes to all, each
answers with 200, and when all have, the server sends 200 to all once more. The time from the first word until the last
process has heard the end is the floor of "last arrival until all released" on this machine:

    python bench/_floor.py blocking 128    the process itself waits on its socket
    python bench/_floor.py asyncio 128     a thread with an event loop does, and wakes the main thread
    python bench/_floor.py uvloop 128      the same on uvloop

The last two are how a blocking handler is built.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import time
from typing import cast

import uvloop

SAMPLES = 4
REST_S = 0.3
MESSAGE = 200
JOIN, ASSIGN, CONFIRM, ACTIVE = b"J", b"A", b"C", b"B"


def serve(listening: socket.socket, nodes: int) -> None:
    """Until it is killed."""
    connections: list[asyncio.Transport] = []
    confirmed = 0

    class Connection(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connections.append(cast(asyncio.Transport, transport))

        def data_received(self, data: bytes) -> None:
            nonlocal confirmed
            confirmed += data[:1] == CONFIRM
            if data[:1] == JOIN or confirmed % nodes == 0:
                words = (ASSIGN if data[:1] == JOIN else ACTIVE) * MESSAGE
                for connection in connections:
                    connection.write(words)

    async def run() -> None:
        await asyncio.get_running_loop().create_server(Connection, sock=listening)
        await asyncio.Event().wait()

    uvloop.run(run())


def node(kind: str, port: int, line: socket.socket, is_last: bool) -> None:
    """Takes part in every sample; says when it began and ended."""
    take_part = blocking(port, is_last) if kind == "blocking" else on_a_thread(kind, port, is_last)
    for _ in range(SAMPLES):
        line.sendall(b"r")
        line.recv(1)
        began_at = time.monotonic()
        take_part()
        line.sendall(f"{began_at} {time.monotonic()}".encode())
        line.recv(1)


def blocking(port: int, is_last: bool):  # type: ignore[no-untyped-def]
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def take_part() -> None:
        if is_last:
            sock.sendall(JOIN)
        sock.recv(MESSAGE)
        sock.sendall(CONFIRM * MESSAGE)
        sock.recv(MESSAGE)

    return take_part


def on_a_thread(kind: str, port: int, is_last: bool):  # type: ignore[no-untyped-def]
    released = threading.Lock()
    released.acquire()
    ready = threading.Event()
    loop = uvloop.new_event_loop() if kind == "uvloop" else asyncio.new_event_loop()

    class Link(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast(asyncio.Transport, transport)
            ready.set()

        def data_received(self, data: bytes) -> None:
            if data[:1] == ASSIGN:
                self.transport.write(CONFIRM * MESSAGE)
            else:
                released.release()

    link = Link()

    def run() -> None:
        loop.run_until_complete(loop.create_connection(lambda: link, "127.0.0.1", port))
        loop.run_forever()

    threading.Thread(target=run, daemon=True).start()
    ready.wait()

    def take_part() -> None:
        if is_last:
            loop.call_soon_threadsafe(link.transport.write, JOIN)
        released.acquire()

    return take_part


def main(kind: str, nodes: int) -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=1000)
    port = listening.getsockname()[1]
    gc.collect()
    gc.freeze()
    lines, children = [], [os.fork()]
    if children[0] == 0:
        serve(listening, nodes)
    try:
        for number in range(nodes):
            ours, theirs = socket.socketpair()
            children.append(os.fork())
            if children[-1] == 0:
                node(kind, port, theirs, is_last=number == nodes - 1)
                os._exit(0)
            lines.append(ours)
        for _ in range(SAMPLES):
            for line in lines:
                line.recv(1)
            time.sleep(REST_S)
            for line in lines[:-1]:
                line.send(b"g")
            time.sleep(REST_S)
            lines[-1].send(b"g")
            times = [tuple(map(float, line.recv(100).split())) for line in lines]
            for line in lines:
                line.send(b"k")
            print(f"{kind} {nodes}: {1000 * (max(end for _, end in times) - times[-1][0]):.1f} ms", flush=True)
    finally:
        for child in children:
            if child:
                os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
