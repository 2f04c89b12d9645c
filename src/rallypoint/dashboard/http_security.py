"""Checks and headers for every HTTP request.

The name in the `Host` header must be one of this page's, against DNS rebinding: a foreign site whose name was made to
lead to this address. An address is always accepted, because it involves no name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


def own_names(bound: str, more: Iterable[str]) -> frozenset[str]:
    """The host names that this page is served under."""
    host = socket.gethostname().lower()
    return frozenset({"localhost", bound.lower(), host, host.partition(".")[0], *(name.lower() for name in more)})


def host_of(header: str) -> str:
    """The name or address in a Host header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


def is_own(header: str, names: frozenset[str]) -> bool:
    """Whether a Host header is an address or one of our names."""
    host = host_of(header).lower().rstrip(".")
    if host in names or host.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_same_origin(headers: Headers) -> bool:
    """Whether a request came from this page: browsers send `Origin` with every request that changes something.

    Only host and port are compared: a proxy in front may speak TLS for the page.
    """
    _, separator, origin = headers.get("origin", "").partition("://")
    return bool(separator) and origin.lower() == headers.get("host", "").lower()


class HttpSecurity:
    """ASGI middleware: refuses foreign names, and sets `HEADERS` on every response."""

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        hosts = Headers(scope=scope).getlist("host")
        if len(hosts) != 1 or not is_own(hosts[0], self._names):
            shown = host_of(hosts[0])[:80] if len(hosts) == 1 else ""
            refused = PlainTextResponse(
                f"This page is not served as {shown!r}: use an address, or start it with --http-name.\n",
                421,
            )
            await refused(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)
