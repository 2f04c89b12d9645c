"""Mutated frames: valid frames with every message and operation, and their mutations.

The seed determines everything. Mutants that are valid requests to delete foreign keys are left out: a holder of the
token may do that, so it would not be an error of the server.
"""

import random
from collections.abc import Callable
from typing import Any

import msgspec

from rallypoint.kv import types as kv
from rallypoint.wire.frames import frame
from rallypoint.wire.messages import (
    AskStatus,
    Claim,
    ClientFrame,
    Do,
    Hold,
    WatchStart,
    WatchStop,
    client_decoder,
    encoder,
)

OWN = "/rallypoint/fuzz/"
HEADER = 4
NUMBERS = (0, 1, -1, 2, 127, 128, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63))
FLOATS = (0.0, -1.0, 0.001, 5.0, 1e300, float("inf"), float("-inf"), float("nan"))
MARKERS = (0xC0, 0xC1, 0xC2, 0xC4, 0xC6, 0xC9, 0xCA, 0xCB, 0xCF, 0xD3, 0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0x90, 0x80)


class Frames:
    """Valid frames, one message each, of every kind in turn."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._seq = 0
        self._kinds: list[Callable[[], Any]] = [
            *(lambda op=op: Do(self._number(), op()) for op in self._ops()),
            lambda: WatchStart(rng.randrange(20), self._key(), rng.choice((-1, 0, 1, 2**62))),
            lambda: WatchStop(rng.randrange(20)),
            lambda: Hold(self._lease(), rng.random()),
            lambda: Claim(rng.randbytes(rng.randrange(40))),
            lambda: AskStatus(self._number()),
        ]

    def __len__(self) -> int:
        """The number of kinds of messages."""
        return len(self._kinds)

    def valid(self) -> bytes:
        """A valid payload of a frame."""
        messages = [self._rng.choice(self._kinds)() for _ in range(self._rng.choice((1, 1, 1, 2, 5)))]
        return encoder.encode(ClientFrame(max(0, self._seq - self._rng.randrange(20)), tuple(messages)))

    def of_each_kind(self) -> list[bytes]:
        return [encoder.encode(ClientFrame(0, (make(),))) for make in self._kinds]

    def _ops(self) -> list[Callable[[], kv.Op]]:
        rng = self._rng
        compares: list[Callable[[], kv.Compare]] = [
            lambda: kv.Exists(self._key(), rng.random() < 0.5),
            lambda: kv.ValueIs(self._key(), self._value()),
            lambda: kv.VersionIs(self._key(), rng.randrange(3)),
            lambda: kv.CreateRevisionIs(self._key(), rng.choice(NUMBERS[:6])),
            lambda: kv.ModRevisionIs(self._key(), rng.choice(NUMBERS[:6])),
            lambda: kv.RangeEmpty(self._key()),
        ]
        steps: list[Callable[[], kv.BranchOp]] = [
            lambda: kv.Put(self._key(), self._value(), self._lease() if rng.random() < 0.3 else 0),
            lambda: kv.Delete(self._key()),
            lambda: kv.DeleteRange(self._key()),
            lambda: kv.Get(self._key()),
            lambda: kv.Range(self._key(), rng.randrange(3), rng.random() < 0.5),
        ]

        def txn(step: Callable[[], kv.BranchOp]) -> Callable[[], kv.Op]:
            return lambda: kv.Txn((rng.choice(compares)(),), (step(), rng.choice(steps)()), (rng.choice(steps)(),))

        return [
            *(txn(step) for step in steps),
            *(
                lambda compare=compare: kv.Add(self._key(), rng.choice((1, -1, 7)), 0, (compare(),))
                for compare in compares
            ),
            lambda: kv.Grant(rng.choice((0.5, 5.0, 60.0)), self._lease() if rng.random() < 0.5 else 0),
            lambda: kv.KeepAlive(self._lease()),
            lambda: kv.Revoke(self._lease()),
            lambda: kv.Shorten(self._lease(), rng.random()),
            kv.Tick,
        ]

    def _number(self) -> int:
        self._seq += 1
        return self._seq

    def _key(self) -> str:
        return f"{OWN}{self._rng.randrange(3_000)}"

    def _value(self) -> bytes:
        return self._rng.randbytes(self._rng.choice((0, 1, 20, 64, 500, 4_000)))

    def _lease(self) -> int:
        return 1_000_000 + self._rng.randrange(2_000)


class Mutants:
    """Whole frames, including the header, most of them invalid in some way."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"mutants {seed}")
        self.frames = Frames(self._rng)

    def next(self) -> tuple[bytes, bool]:
        """A frame, and whether the length in its header is wrong: then no frame can follow it."""
        while True:
            payload = self.frames.valid()
            if self._rng.random() < 0.03:
                return self._lying(payload), True
            payload = self._rng.choice((self._bytes, self._tree, *[self._leaf] * 4))(payload)
            if not harms_others(payload):
                return frame(payload), False

    def _lying(self, payload: bytes) -> bytes:
        rng = self._rng
        length = rng.choice(
            (0, 1, len(payload) // 2, len(payload) + 1, len(payload) * 3, 2**24, 2**25 + 1, 2**31, 2**32 - 1)
        )
        return length.to_bytes(HEADER, "big") + payload

    def _bytes(self, payload: bytes) -> bytes:
        """Mutate bytes at random."""
        rng = self._rng
        data = bytearray(payload)
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(len(data)) if data else 0
            match rng.randrange(8):
                case 0 if data:
                    data[at] ^= 1 << rng.randrange(8)
                case 1 if data:
                    data[at] = rng.randrange(256)
                case 2 if data:
                    data[at] = rng.choice(MARKERS)
                case 3:
                    data[at:at] = rng.randbytes(rng.randrange(1, 9))
                case 4:
                    del data[at : at + rng.randrange(1, 9)]
                case 5:
                    del data[at:]
                case 6:
                    data[at:at] = data[: rng.randrange(40)]
                case _:
                    data += self.frames.valid()[: rng.randrange(30)]
        return bytes(data)

    def _tree(self, payload: bytes) -> bytes:
        """Mutate the decoded message: other types, extreme numbers, more or fewer fields."""
        tree = msgspec.msgpack.decode(payload)
        return msgspec.msgpack.encode(self._changed(tree))

    def _leaf(self, payload: bytes) -> bytes:
        """Replace single values by others of the same type: most of these can be decoded and are executed."""
        tree = msgspec.msgpack.decode(payload)
        for _ in range(self._rng.choice((1, 1, 3))):
            tree = self._other_leaf(tree)
        return msgspec.msgpack.encode(tree)

    def _other_leaf(self, tree: Any) -> Any:
        rng = self._rng
        match tree:
            case [*parts] if parts:
                at = rng.randrange(len(parts))
                return [*parts[:at], self._other_leaf(parts[at]), *parts[at + 1 :]]
            case bool():
                return not tree
            case int():
                return rng.choice((*NUMBERS, tree // 2 + 1, -tree // 2))
            case float():
                return rng.choice(FLOATS)
            case str():
                return rng.choice((tree + "/x", tree[:-1], tree * 40, OWN, tree.upper(), tree + "\x00", "é"))
            case bytes():
                return rng.randbytes(rng.choice((0, 1, 300, 70_000)))
        return tree

    def _changed(self, tree: Any, depth: int = 0) -> Any:
        rng = self._rng
        if isinstance(tree, list) and tree and (depth < 2 or rng.random() < 0.7):
            at = rng.randrange(len(tree))
            copy = list(tree)
            match rng.randrange(10):
                case 0:
                    del copy[at]
                case 1:
                    copy.insert(at, self._absurd())
                case 2:
                    copy = copy * 2
                case _:
                    copy[at] = self._changed(copy[at], depth + 1)
            return copy
        return self._absurd()

    def _absurd(self) -> Any:
        rng = self._rng
        match rng.randrange(9):
            case 0:
                return rng.choice(NUMBERS)
            case 1:
                return rng.choice(FLOATS)
            case 2:
                return rng.choice(("", OWN, "\x00", "é" * 50, "x" * 3_000, "\U0010ffff"))
            case 3:
                return rng.randbytes(rng.choice((0, 3, 70_000)))
            case 4:
                return None
            case 5:
                return rng.random() < 0.5
            case 6:
                return msgspec.Raw(b"\x91" * rng.choice((3, 60, 2_000, 50_000)) + b"\xc0")
            case 7:
                return {"a": rng.choice(NUMBERS)}
            case _:
                return list(range(rng.choice((0, 1, 9, 5_000))))


def harms_others(payload: bytes) -> bool:
    """Whether it is a valid request that deletes keys outside of the campaign's prefix."""
    try:
        received = client_decoder.decode(payload)
    except Exception:  # not a valid request
        return False
    for message in received.messages:
        if isinstance(message, Do) and isinstance(message.op, kv.Txn):
            for step in (*message.op.then, *message.op.otherwise):
                if isinstance(step, kv.DeleteRange) and not step.prefix.startswith(OWN):
                    return True
    return False
