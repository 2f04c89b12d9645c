"""Waiting in tests of threads and processes: always for a condition, always with a deadline."""

import asyncio
import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Set
from concurrent.futures import Future
from typing import Any

from rallypoint import _background

PATIENCE_S = 30.0
_numbers = itertools.count(1)


def unique() -> str:
    """A name that no other test uses."""
    return f"t{next(_numbers)}-{os.getpid()}"


def until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Look again and again until it is true."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what}"
        time.sleep(0.005)


def in_thread(call: Callable[..., Any], *args: object) -> Future[Any]:
    """Call in a thread of its own, which does not keep the process from ending."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            result = call(*args)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="test", daemon=True).start()
    return future


def result_of(call: Future[Any]) -> Any:
    """What the call returned or raised, with patience."""
    return call.result(PATIENCE_S)


def background_threads() -> list[threading.Thread]:
    """The library's own threads."""
    return [thread for thread in threading.enumerate() if thread.name == "rallypoint"]


def users() -> set[int]:
    """Who uses the background loop now."""
    return set(_background._shared.users)


def until_let_go(before: Set[int] = frozenset()) -> None:
    """Whoever has come since has let go of the background loop, and its thread has ended if nobody else is left.

    `before` are those of other tests: what they left to the collector, or to C++, is not this test's to wait for.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (left := users() - before) or (background_threads() and not users()):
        if gc.isenabled():
            gc.collect()  # a handler that was dropped without a word may be part of a cycle
        if time.monotonic() > deadline:
            frames, threads = sys._current_frames(), background_threads()
            held = [f"user {user}: {_background._shared.users.get(user)}" for user in left]
            tasks = [repr(task) for thread in threads for task in tasks_of(thread)]
            stacks = ["".join(traceback.format_stack(frames.get(thread.ident or 0))) for thread in threads]
            raise AssertionError("\n".join([f"a thread is left after {PATIENCE_S:g} s", *held, *tasks, *stacks]))
        time.sleep(0.005)


def tasks_of(thread: threading.Thread) -> list[asyncio.Task[Any]]:
    """What runs on the loop of a background thread."""
    target = getattr(thread, "_target", None)
    return list(asyncio.all_tasks(target.__self__._loop)) if target is not None else []


def script(source: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Python script to its end in a process of its own. What it writes to stderr is a failure."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", *options, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr or done.stdout
    assert said(done.stderr) == [], done.stderr
    return done


def said(errors: str) -> list[str]:
    """The lines of a process's stderr, without what asyncio says in its debug mode of a slow machine."""
    return [line for line in errors.splitlines() if not line.startswith("Executing <")]
