"""A worker that communicates in a ring of sockets, and fails within milliseconds when a peer has died.

rallypoint run ... losses_ring.py DIRECTORY
"""

import json
import os
import socket
import sys
import time

from stepping import Steps

CONNECT_S = 60.0


def receive(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise ConnectionError("connection closed by peer")
        data += part
    return data


def meet(rank: int, size: int) -> tuple[socket.socket, socket.socket]:
    """The connections to the next and from the previous rank. Rank 0 tells everybody where its neighbour listens."""
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    own = socket.create_server(("", master[1] if rank == 0 else 0), backlog=size)
    if rank == 0:
        peers = []
        where = [master] * size
        while len(peers) < size - 1:
            peer, (host, *_) = own.accept()
            peers.append(peer.makefile("rw"))
            number, port = json.loads(peers[-1].readline())
            where[number] = host, port
        for peer in peers:
            print(json.dumps(where), file=peer, flush=True)
    else:
        with dialled(master) as master_link, master_link.makefile("rw") as peer:
            print(json.dumps([rank, own.getsockname()[1]]), file=peer, flush=True)
            where = json.loads(peer.readline())
    following = dialled(tuple(where[(rank + 1) % size]))
    previous, _ = own.accept()
    return following, previous


def dialled(where: tuple[str, int]) -> socket.socket:
    """A connection, once somebody listens there."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection(where, timeout=CONNECT_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def main() -> None:
    steps = Steps(sys.argv[1])
    following, previous = meet(steps.rank, steps.size)
    for peer in (following, previous):
        peer.settimeout(None)  # as collectives do: only the launcher ends a wait for a silent peer
    while True:
        number = steps.number.to_bytes(8, "big")
        for _ in range(steps.size):  # once around: everybody knows that everybody was there
            following.sendall(number)
            number = receive(previous, 8)
        steps.did()


if __name__ == "__main__":
    main()
