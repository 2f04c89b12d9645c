"""Who is behind an address: resolving, connecting, and finding out what speaks there. Bounded in time, every step.

Strangers are asked in their own protocols (HTTP, TLS, torch's TCPStore) only when they did not answer in ours.
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
MOST_BYTES = 64 * 1024
MOST_HTTP_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Silent:
    """It accepted the connection and said nothing."""


@dataclass(frozen=True, slots=True)
class HungUp:
    """It accepted the connection and closed it without a word."""

    why: str


@dataclass(frozen=True, slots=True)
class Stranger:
    """It speaks something else: `what` in words, `is_etcd` and `is_tls` if it is that."""

    what: str
    is_etcd: bool = False
    is_tls: bool = False


async def resolve(host: str, port: int, limit_s: float) -> list[str]:
    """The addresses of a name. OSError, or TimeoutError: the name server does not answer."""
    async with asyncio.timeout(limit_s):
        return await addresses_of(host, port)


async def connect_s(address: str, port: int, limit_s: float) -> float:
    """How long a connection takes. OSError or TimeoutError."""
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    async with asyncio.timeout(limit_s):
        _, writer = await asyncio.open_connection(address, port)
    took_s = loop.time() - started_at
    writer.close()
    return took_s


async def greet(
    address: str, port: int, host: str, tls: ssl.SSLContext | None, limit_s: float
) -> Welcome | Refused | Silent | HungUp | Stranger:
    """Say hello in our own protocol, without a token, as somebody who has come for no run.

    OSError if the connection breaks, ssl.SSLError among them; `host` is whom the certificate has to be of.
    """
    versions = Versions()
    hello = Hello(oldest=versions.oldest, newest=versions.newest, client="doctor", software=SOFTWARE)
    name = host if tls is not None else None
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(address, port, ssl=tls, server_hostname=name)
            try:
                writer.write(GREETING + frame(encoder.encode(hello)))
                framer = Framer(MOST_BYTES)
                while data := await reader.read(MOST_BYTES):
                    for payload in framer.feed(data):
                        welcome: Welcome | Refused = welcome_decoder.decode(payload)
                        return welcome
            finally:
                writer.close()
    except TimeoutError:
        return Silent()
    except NotRallypoint as error:
        return Stranger(describe(error.first), is_tls=error.first[:1] in (b"\x15", b"\x16"))
    except (FrameError, msgspec.DecodeError) as error:
        return Stranger(f"something that cannot be read ({error})")
    except ConnectionError as error:
        return HungUp(str(error) or "the connection was reset")
    return HungUp("the connection was closed")


async def who_listens(address: str, port: int, limit_s: float) -> Stranger | None:
    """What it is that does not speak our protocol; None: it answers to nothing that is known here."""
    asked = [ask_http(address, port, limit_s), _ask_tls(address, port, limit_s), _ask_tcpstore(address, port, limit_s)]
    for found in await asyncio.gather(*asked):
        if found is not None:
            return found
    return None


async def ask_http(address: str, port: int, limit_s: float) -> Stranger | None:
    """Whether it is an HTTP server, an etcd for example."""
    answer = await get(address, port, "/version", None, limit_s)
    if answer is None:
        return None
    status, head, body = answer
    with suppress(ValueError):
        told = json.loads(body)
        if isinstance(told, dict) and "etcdserver" in told:
            return Stranger(f"an etcd {told['etcdserver']}", is_etcd=True)
    server = next((line[7:].strip() for line in head.splitlines() if line.lower().startswith("server:")), "")
    if "HTTPS" in body or "HTTPS" in status:
        return Stranger("a TLS server that was spoken to in HTTP", is_tls=True)
    return Stranger(f"an HTTP server ({server or status})")


async def get(
    address: str, port: int, path: str, tls: ssl.SSLContext | None, limit_s: float, name: str | None = None
) -> tuple[str, str, str] | None:
    """Status line, head and body of an HTTP answer; None if there is none. ssl.SSLError if TLS is asked for in vain."""
    try:
        async with asyncio.timeout(limit_s):
            sni = name if tls is not None else None
            reader, writer = await asyncio.open_connection(address, port, ssl=tls, server_hostname=sni)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {name or address}\r\nConnection: close\r\n\r\n".encode())
                data = b""
                while len(data) < MOST_HTTP_BYTES and (part := await reader.read(MOST_BYTES)):
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


async def _ask_tls(address: str, port: int, limit_s: float) -> Stranger | None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(address, port, ssl=context)
    except ssl.SSLError as error:
        # It spoke TLS, and did not like us: it asks for a certificate, for example.
        spoke = "alert" in str(error).lower()
        return Stranger("a TLS server", is_tls=True) if spoke else None
    except (OSError, TimeoutError):
        return None
    writer.close()
    return Stranger("a TLS server", is_tls=True)


async def _ask_tcpstore(address: str, port: int, limit_s: float) -> Stranger | None:
    """torch's TCPStore answers a ping with its number."""
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
    return Stranger("torch's TCPStore") if answer == struct.pack("<I", NONCE) else None
