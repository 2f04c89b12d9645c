"""Quotas on stored keys, bytes and leases, in total and for each run. A request that would exceed one is refused.

The cost for most requests must be one subtraction: the length of a frame bounds what it can add, and `room` is a lower
bound of what may still be added to any run. The sums are recomputed only when `room` is used up, and operations are
checked one by one only when a sum is close to its quota.
"""

from __future__ import annotations

from rallypoint.kv.engine import Engine
from rallypoint.kv.types import Add, BranchOp, Failure, FailureCode, Grant, Op, Origin, Put, Txn
from rallypoint.kv.usage import run_of
from rallypoint.server.admission.limits import ServerLimits
from rallypoint.server.admission.refusals import Refusal

LEAST_KEY_BYTES = 5
"""The shortest encoding of an operation that writes a key."""
LEAST_LEASE_BYTES = 3
"""The shortest encoding of an operation that creates a lease."""
NUMBER_BYTES = 20
"""The longest value of a counter."""
ADVICE = "delete what is not needed, or raise"


class QuotaExceeded(Exception):
    """An operation would exceed a quota. `kind`: which one."""

    def __init__(self, kind: Refusal, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class Quota:
    """The quotas of one engine. Every frame reduces `room` by its length; below zero, `is_tight` must be called."""

    def __init__(self, engine: Engine, limits: ServerLimits) -> None:
        self._engine = engine
        self._limits = limits
        self.room = 0
        self.max_value = limits.max_value

    def is_tight(self, length: int) -> bool:
        """Whether the operations of a frame of this length must be checked one by one. Recomputes `room`."""
        usage, limits = self._engine.usage, self._limits
        runs = usage.runs.values()
        free_keys = min(limits.max_keys - usage.keys, limits.max_keys_per_run - max((u.keys for u in runs), default=0))
        free_bytes = min(
            limits.max_bytes - usage.size, limits.max_bytes_per_run - max((u.size for u in runs), default=0)
        )
        free_leases = limits.max_leases - len(self._engine.leases)
        self.room = min(free_bytes, free_keys * LEAST_KEY_BYTES, free_leases * LEAST_LEASE_BYTES) - length
        return self.room < 0 or length > self.max_value

    def refusal(self, op: Op, origin: Origin | None) -> tuple[Refusal, Failure] | None:
        """Why an operation is refused; None if it is within the quotas, or is a resend that was executed before."""
        try:
            match op:
                case Txn(_, then, otherwise):
                    self._check(then)
                    self._check(otherwise)
                case Add(key):
                    self._check((Put(key, bytes(NUMBER_BYTES)),))
                case Grant() if len(self._engine.leases) >= self._limits.max_leases:
                    raise QuotaExceeded(Refusal.LEASES, _full("leases", self._limits.max_leases, "--max-leases"))
                case _:
                    pass
        except QuotaExceeded as exceeded:
            if origin is not None and self._engine.dedupe.lookup(origin) is not None:
                return None
            return exceeded.kind, Failure(FailureCode.INVALID, str(exceeded))
        return None

    def _check(self, branch: tuple[BranchOp, ...]) -> None:
        """QuotaExceeded if the puts of a branch would exceed a quota of their runs or of the server."""
        items, usage, limits = self._engine.items, self._engine.usage, self._limits
        added: dict[str, list[int]] = {}
        for step in branch:
            if not isinstance(step, Put):
                continue
            if len(step.value) > limits.max_value:
                size = len(step.value)
                raise QuotaExceeded(
                    Refusal.VALUE,
                    f"the value of {step.key[:200]!r} has {size} bytes, and the server takes {limits.max_value} at "
                    f"most (--max-value)",
                )
            old = items.get(step.key)
            more = added.setdefault(run_of(step.key), [0, 0])
            more[0] += old is None
            more[1] += len(step.value) - len(old.value) if old is not None else len(step.key) + len(step.value)
        for run, (keys, size) in added.items():
            used = usage.runs.get(run)
            if keys > 0 and keys + (used.keys if used else 0) > limits.max_keys_per_run:
                raise QuotaExceeded(Refusal.KEYS, _full_run(run, "keys", limits.max_keys_per_run, "--max-keys-per-run"))
            if size > 0 and size + (used.size if used else 0) > limits.max_bytes_per_run:
                raise QuotaExceeded(
                    Refusal.BYTES, _full_run(run, "bytes", limits.max_bytes_per_run, "--max-bytes-per-run")
                )
        keys, size = (sum(more[index] for more in added.values()) for index in (0, 1))
        if keys > 0 and keys + usage.keys > limits.max_keys:
            raise QuotaExceeded(Refusal.KEYS, _full("keys", limits.max_keys, "--max-keys"))
        if size > 0 and size + usage.size > limits.max_bytes:
            raise QuotaExceeded(Refusal.BYTES, _full("bytes of keys and values", limits.max_bytes, "--max-bytes"))


def _full(what: str, limit: int, option: str) -> str:
    return f"the server holds {limit} {what} at most, and this would be more: {ADVICE} {option}"


def _full_run(run: str, what: str, limit: int, option: str) -> str:
    return f"run {run[:200]!r} may hold {limit} {what} at most, and this would be more: {ADVICE} {option}"
