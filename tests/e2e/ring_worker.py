"""A worker that fails within milliseconds when a worker of another rank is gone, as collectives do. Needs no torch.

    ring_worker.py DIRECTORY [quiet-limit]

Each rank sends a beat to its right neighbour, and fails when its left neighbour's connection ends, or when it has been
silent for `quiet-limit` seconds (default: never). Rank 0 tells the others the addresses, on `MASTER_PORT`.

`finish`: exit with 0, all together. `do-RANK`: take the file away, and do what it says: `exit N`, `signal NAME`,
`raise TEXT`, `record TEXT` (as `raise`, and as torch's `@record` would write it down).
"""

import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

BEAT_S = 0.02
CONNECT_S = 20.0
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def say(kind: str, **more: object) -> None:
    names = ("RALLYPOINT_ROUND", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE", "RANK")
    facts = {name: int(os.environ[name]) for name in names}
    print(json.dumps({"kind": kind, "rank": RANK, "at": time.monotonic(), "pid": os.getpid(), **facts, **more}))
    sys.stdout.flush()


def main() -> None:
    directory = Path(sys.argv[1])
    quiet_s = float(sys.argv[2]) if len(sys.argv) > 2 else float("inf")
    left, right = neighbours() if SIZE > 1 else (None, None)
    say("worker", node=os.environ["RALLYPOINT_NODE"])
    selector = selectors.DefaultSelector()
    if left is not None:
        selector.register(left, selectors.EVENT_READ)
    heard_at = time.monotonic()
    is_finishing = False
    while True:
        obey(directory / f"do-{RANK}")
        is_finishing = is_finishing or (directory / "finish").exists()
        if right is not None:
            right.sendall(b"f" if is_finishing else b".")
        if left is None:
            if is_finishing:
                return
            time.sleep(BEAT_S)
            continue
        if selector.select(BEAT_S):
            beats = left.recv(4096)
            if not beats:
                raise ConnectionError(f"connection closed by rank {(RANK - 1) % SIZE}")
            heard_at = time.monotonic()
            if is_finishing and b"f" in beats:
                return
            time.sleep(BEAT_S)
        elif time.monotonic() - heard_at > quiet_s:
            raise TimeoutError(f"rank {(RANK - 1) % SIZE} has been silent for {quiet_s:g} s")


def neighbours() -> tuple[socket.socket, socket.socket]:
    """The connections from the left and to the right neighbour."""
    own = socket.create_server(("127.0.0.1", 0))
    ports = exchange(own.getsockname()[1])
    right = connect(ports[(RANK + 1) % SIZE])
    own.settimeout(CONNECT_S)
    left, _ = own.accept()
    return left, right


def exchange(port: int) -> list[int]:
    """The ports of all ranks. Rank 0 collects them on `MASTER_PORT`, and tells all."""
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if RANK == 0:
        ports, others = {0: port}, []
        with socket.create_server(where) as server:
            server.settimeout(CONNECT_S)
            for _ in range(SIZE - 1):
                other, _ = server.accept()
                others.append(other)
                rank, its_port = other.recv(100).split()
                ports[int(rank)] = int(its_port)
        for other in others:
            other.sendall(" ".join(str(ports[rank]) for rank in range(SIZE)).encode())
            other.close()
        return [ports[rank] for rank in range(SIZE)]
    with connect(where[1], where[0]) as master:
        master.sendall(f"{RANK} {port}".encode())
        told = master.recv(4096)
        if not told:
            raise ConnectionError("connection closed by rank 0")
        return [int(word) for word in told.split()]


def connect(port: int, host: str = "127.0.0.1") -> socket.socket:
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def obey(file: Path) -> None:
    """Do what the file says, if there is one."""
    try:
        verb, _, rest = file.read_text().partition(" ")
        file.unlink()
    except OSError:
        return
    match verb:
        case "exit":
            sys.exit(int(rest))
        case "signal":
            os.kill(os.getpid(), signal.Signals[rest])
        case "raise":
            raise RuntimeError(rest)
        case "record":
            try:
                raise RuntimeError(rest)
            except RuntimeError as error:
                extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
                message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
                Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": message}))
                raise


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
        sys.exit(0)
    raise ConnectionError(f"connection closed by rank {(RANK + 1) % SIZE}")
