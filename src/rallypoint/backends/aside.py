"""Questions that may block for long (to a name server above all), asked on threads that nobody waits for.

Not by the loop: uvloop asks on threads of libuv, and a child that is forked from this process then crashes when it
ends, because it waits for threads that it does not have. Nor on one of a pool, which would keep the process from ending
while the name server is silent.
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
"""What `socket.getaddrinfo` says of an address: family, kind, protocol, canonical name, and the address itself."""
_Asked: TypeAlias = dict[tuple[str, int, int], asyncio.Future[list[AddressInfo]]]

_asked: dict[asyncio.AbstractEventLoop, _Asked] = {}
"""What nobody has answered yet, by loop."""


def aside(question: Callable[[], T], name: str) -> asyncio.Future[T]:
    """The answer, or what the question raised; the thread has that name."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(found: T | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(found)  # type: ignore[arg-type]  # it was answered
        else:
            answer.set_exception(error)
            answer.exception()  # perhaps nobody waits for it any more

    def ask() -> None:
        found, error = None, None
        try:
            found = question()
        except Exception as raised:
            error = raised.with_traceback(None)  # or it would refer to itself through this frame
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, found, error)

    threading.Thread(target=ask, name=name, daemon=True).start()
    return answer


async def resolve(host: str, port: int, flags: int = 0) -> list[AddressInfo]:
    """As `socket.getaddrinfo`. However often it is asked while there is no answer, one thread waits for it."""
    for loop in [loop for loop in _asked if loop.is_closed()]:
        del _asked[loop]  # nobody will be told there any more
    asked = _asked.setdefault(asyncio.get_running_loop(), {})
    question = host, port, flags
    answer = asked.get(question)
    if answer is None:
        answer = asked[question] = aside(lambda: _look_up(*question), "addresses")
        answer.add_done_callback(lambda _: asked.pop(question))
    try:
        return await asyncio.shield(answer)
    finally:
        del answer  # or an error would refer to itself through this frame


def _look_up(host: str, port: int, flags: int) -> list[AddressInfo]:
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))


async def addresses_of(host: str, port: int) -> list[str]:
    """The addresses of a name, in the order to try them."""
    return list(dict.fromkeys(str(address[0]) for *_, address in await resolve(host, port)))
