"""Blocking DNS look-ups on daemon threads.

The event loop's own resolver is not used: uvloop resolves on threads of libuv, and a forked child then crashes at exit,
because it waits for threads that it does not have. Nor is a thread pool, which would keep the process from exiting
while a name server does not answer.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
AddressInfo: TypeAlias = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]
"""An entry of `socket.getaddrinfo`: family, kind, protocol, canonical name, and the address itself."""
_Pending: TypeAlias = dict[tuple[str, int, int], asyncio.Future[list[AddressInfo]]]

_pending: dict[asyncio.AbstractEventLoop, _Pending] = {}
"""Look-ups without an answer yet, by loop."""


def run_in_thread(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """The result of a blocking call, made on a new daemon thread with this name."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(result)  # type: ignore[arg-type]  # it was answered
        else:
            answer.set_exception(error)
            answer.exception()  # the caller may have stopped waiting

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as raised:
            error = raised.with_traceback(None)  # its traceback contains this frame: a reference cycle
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return answer


async def resolve(host: str, port: int, flags: int = 0) -> list[AddressInfo]:
    """As `socket.getaddrinfo`. Concurrent look-ups of the same name share one thread."""
    for loop in [loop for loop in _pending if loop.is_closed()]:
        del _pending[loop]  # its look-ups have no callers any more
    pending = _pending.setdefault(asyncio.get_running_loop(), {})
    question = host, port, flags
    answer = pending.get(question)
    if answer is None:
        answer = pending[question] = run_in_thread(lambda: _look_up(*question), "addresses")
        answer.add_done_callback(lambda _: pending.pop(question))
    try:
        return await asyncio.shield(answer)
    finally:
        del answer  # an error's traceback contains this frame: a reference cycle


def _look_up(host: str, port: int, flags: int) -> list[AddressInfo]:
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))


async def addresses_of(host: str, port: int) -> list[str]:
    """The addresses of a name, in the order to try them."""
    return list(dict.fromkeys(str(address[0]) for *_, address in await resolve(host, port)))
