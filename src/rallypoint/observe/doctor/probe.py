"""Probes an address: resolves, connects, and identifies the server there. Every step has a time limit.

Other protocols (HTTP, TLS, torch's TCPStore) are tried only if the server did not answer in Rallypoint's.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import struct
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from rallypoint._version import SOFTWARE
from rallypoint.backends.resolver_threads import addresses_of
from rallypoint.wire.frames import GREETING, FrameError, Framer, NotRallypoint, frame
from rallypoint.wire.handshake import Versions, describe
from rallypoint.wire.messages import Hello, Refused, Welcome, encoder, welcome_decoder

TCPSTORE_MAGIC = 0x3C85F7CE
TCPSTORE_VALIDATE, TCPSTORE_PING = 0, 13
NONCE = 0x51A7E5
MAX_BYTES = 64 * 1024
MAX_HTTP_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The server accepted the connection and sent nothing."""


@dataclass(frozen=True, slots=True)
class HungUp:
    """The server accepted the connection and closed it without sending anything."""

    why: str


@dataclass(frozen=True, slots=True)
class OtherServer:
    """A server that does not speak Rallypoint's protocol; `what` describes it."""

    what: str
    is_etcd: bool = False
    is_tls: bool = False


async def resolve(host: str, port: int, limit_s: float) -> list[str]:
    """The addresses of a name. OSError; TimeoutError if the name server does not answer."""
    async with asyncio.timeout(limit_s):
        return await addresses_of(host, port)


async def connect_s(address: str, port: int, limit_s: float) -> float:
    """Connect and disconnect. Returns how long connecting took. OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    async with asyncio.timeout(limit_s):
        _, writer = await asyncio.open_connection(address, port)
    took_s = loop.time() - started_at
    writer.close()
    return took_s


async def greet(
    address: str, port: int, host: str, tls: ssl.SSLContext | None, limit_s: float
) -> Welcome | Refused | NoAnswer | HungUp | OtherServer:
    """Send a hello in Rallypoint's protocol, without a token and without a run, and return the answer.

    OSError, which includes ssl.SSLError, if the connection breaks. The certificate must be valid for `host`.
    """
    versions = Versions()
    hello = Hello(oldest=versions.oldest, newest=versions.newest, client="doctor", software=SOFTWARE)
    name = host if tls is not None else None
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(address, port, ssl=tls, server_hostname=name)
            try:
                writer.write(GREETING + frame(encoder.encode(hello)))
                framer = Framer(MAX_BYTES)
                while data := await reader.read(MAX_BYTES):
                    for payload in framer.feed(data):
                        welcome: Welcome | Refused = welcome_decoder.decode(payload)
                        return welcome
            finally:
                writer.close()
    except TimeoutError:
        return NoAnswer()
    except NotRallypoint as error:
        return OtherServer(describe(error.first), is_tls=error.first[:1] in (b"\x15", b"\x16"))
    except (FrameError, msgspec.DecodeError) as error:
        return OtherServer(f"something whose answer cannot be decoded ({error})")
    except ConnectionError as error:
        return HungUp(str(error) or "the connection was reset")
    return HungUp("the connection was closed")


async def identify(address: str, port: int, limit_s: float) -> OtherServer | None:
    """Identify a server that does not speak Rallypoint's protocol. None if it answers in no known protocol."""
    probes = [probe_http(address, port, limit_s), _probe_tls(address, port, limit_s)]
    probes.append(_probe_tcpstore(address, port, limit_s))
    for found in await asyncio.gather(*probes):
        if found is not None:
            return found
    return None


async def probe_http(address: str, port: int, limit_s: float) -> OtherServer | None:
    """The server if it speaks HTTP, as an etcd does."""
    answer = await get(address, port, "/version", None, limit_s)
    if answer is None:
        return None
    status, head, body = answer
    with suppress(ValueError):
        told = json.loads(body)
        if isinstance(told, dict) and "etcdserver" in told:
            return OtherServer(f"an etcd {told['etcdserver']}", is_etcd=True)
    server = next((line[7:].strip() for line in head.splitlines() if line.lower().startswith("server:")), "")
    if "HTTPS" in body or "HTTPS" in status:
        return OtherServer("an HTTPS server", is_tls=True)
    return OtherServer(f"an HTTP server ({server or status})")


async def get(
    address: str, port: int, path: str, tls: ssl.SSLContext | None, limit_s: float, name: str | None = None
) -> tuple[str, str, str] | None:
    """The status line, head and body of an HTTP answer, or None without one. ssl.SSLError if TLS fails."""
    try:
        async with asyncio.timeout(limit_s):
            sni = name if tls is not None else None
            reader, writer = await asyncio.open_connection(address, port, ssl=tls, server_hostname=sni)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {name or address}\r\nConnection: close\r\n\r\n".encode())
                data = b""
                while len(data) < MAX_HTTP_BYTES and (part := await reader.read(MAX_BYTES)):
                    data += part
            finally:
                writer.close()
    except ssl.SSLError:
        raise
    except (OSError, TimeoutError):
        return None
    if not data.startswith(b"HTTP/"):
        return None
    head, _, body = data.decode("utf-8", "replace").partition("\r\n\r\n")
    return head.partition("\r\n")[0], head, body


async def _probe_tls(address: str, port: int, limit_s: float) -> OtherServer | None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(address, port, ssl=context)
    except ssl.SSLError as error:
        # A TLS alert comes from a TLS server that refused the handshake: it asks for a certificate, for example.
        has_alert = "alert" in str(error).lower()
        return OtherServer("a TLS server", is_tls=True) if has_alert else None
    except (OSError, TimeoutError):
        return None
    writer.close()
    return OtherServer("a TLS server", is_tls=True)


async def _probe_tcpstore(address: str, port: int, limit_s: float) -> OtherServer | None:
    """torch's TCPStore answers a ping with the nonce of that ping."""
    ping = struct.pack("<BIBI", TCPSTORE_VALIDATE, TCPSTORE_MAGIC, TCPSTORE_PING, NONCE)
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                writer.write(ping)
                answer = await reader.readexactly(4)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return None
    return OtherServer("torch's TCPStore") if answer == struct.pack("<I", NONCE) else None
