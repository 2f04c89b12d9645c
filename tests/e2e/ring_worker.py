"""A worker that communicates in a ring of sockets, and fails within milliseconds when a peer is gone.

    ring_worker.py DIRECTORY [QUIET_LIMIT]

It also fails when its neighbour has been silent for QUIET_LIMIT seconds (default: never). See `stepping` for what the
directory is for. Needs no torch.
"""

import json
import os
import socket
import sys
import time

from stepping import Steps

CONNECT_S = 60.0


def receive(peer: socket.socket) -> bytes:
    data = peer.recv(1)
    if not data:
        raise ConnectionError("connection closed by peer")
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
    following.settimeout(None)
    previous.settimeout(float(sys.argv[2]) if len(sys.argv) > 2 else None)
    while True:
        token = finished = bytes([steps.is_told_to_finish()])
        for _ in range(steps.size):  # once around: everybody has seen the word of everybody
            following.sendall(token)
            token = receive(previous)
            finished = max(finished, token)
        steps.did()
        if any(finished):
            return


if __name__ == "__main__":
    main()
