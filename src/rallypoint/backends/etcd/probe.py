"""Why an endpoint cannot be used, in words: asked in plain HTTP, once gRPC has only said that it did not work."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

from rallypoint.backends.aside import addresses_of
from rallypoint.backends.etcd.security import Security
from rallypoint.errors import Rejected
from rallypoint.settings import DEFAULT_PORTS
from rallypoint.urls import parse_endpoint

PROBE_S = 2.0
MOST_READ = 4_096


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong with an endpoint."""

    text: str
    is_hopeless: bool = False
    """Trying again will not help: something has to be changed."""
    is_out: bool = False
    """It is certain that this member takes part in nothing now: no process is there, or it knows of no leader."""


NO_TLS = Trouble("it does not speak TLS: give protocol=http", is_hopeless=True)


async def probe(endpoint: str, security: Security) -> Trouble:
    """Look at an endpoint. Does not raise; takes at most `PROBE_S`."""
    try:
        async with asyncio.timeout(PROBE_S):
            try:
                return await _look(endpoint, security)
            except ConnectionResetError:
                if security.is_tls and "is an etcd" in (await _look(endpoint, Security())).text:
                    return NO_TLS
                raise
    except TimeoutError:
        return Trouble(f"nothing was heard from it within {PROBE_S:g} s")
    except ConnectionRefusedError:
        return Trouble("connection refused", is_out=True)
    except ssl.SSLCertVerificationError as error:
        return Trouble(f"its certificate is not accepted ({error.verify_message}): check cacert", is_hopeless=True)
    except ssl.SSLError as error:
        return _tls_trouble(error, security)
    except Rejected as error:
        return Trouble(str(error), is_hopeless=True)
    except OSError as error:
        return Trouble((error.strerror or str(error) or type(error).__name__).lower())


async def _look(endpoint: str, security: Security) -> Trouble:
    host, port = parse_endpoint(endpoint, DEFAULT_PORTS["etcd"])
    context = security.context()
    reader, writer = await _connect(host, port, context)
    try:
        writer.write(f"GET /version HTTP/1.1\r\nHost: {endpoint}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while len(answer) < MOST_READ and (more := await reader.read(MOST_READ)):
            answer += more
    finally:
        writer.transport.abort()
    if not answer and context is None and await _speaks_tls(host, port):
        return Trouble("it speaks TLS: give protocol=https, with cacert", is_hopeless=True)
    return _verdict(answer, security)


async def _connect(
    host: str, port: int, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """By the first address of the name that can be used. A refusal is told only if all of them refuse."""
    name = host if context is not None else None
    troubles: list[OSError] = [OSError(f"{host!r} has no address")]
    for address in await addresses_of(host, port):
        try:
            return await asyncio.open_connection(address, port, ssl=context, server_hostname=name)
        except ssl.SSLError:
            raise
        except OSError as error:
            troubles.append(error)
    raise next((error for error in troubles[1:] if not isinstance(error, ConnectionRefusedError)), troubles[-1])


async def _speaks_tls(host: str, port: int) -> bool:
    """Whether it closed the connection because it was not spoken to in TLS. Nothing is said, so nothing is checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        _, writer = await _connect(host, port, context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
    writer.transport.abort()
    return True


def _verdict(answer: bytes, security: Security) -> Trouble:
    """What an answer to a request for etcd's version says."""
    if b"etcdserver" in answer:
        return Trouble("it is an etcd but does not answer requests")
    if b"HTTPS server" in answer:
        return Trouble("it speaks TLS: give protocol=https, with cacert", is_hopeless=True)
    if not answer:
        hint = ": it may want a client certificate (cert, key)" if security.is_tls and security.cert is None else ""
        return Trouble(f"it closed the connection{hint}")
    if answer[:1] == b"\x15":
        return Trouble("it is no etcd, or speaks TLS: give protocol=https, with cacert", is_hopeless=True)
    line = answer.splitlines()[0][:60].decode(errors="backslashreplace")
    if line.startswith("HTTP/1.") and line.split()[1:2] and line.split()[1].startswith("5"):
        return Trouble(f"what is in front of it answered {line!r}")
    return Trouble(f"it is no etcd: asked for its version it answered {line!r}", is_hopeless=True)


def _tls_trouble(error: ssl.SSLError, security: Security) -> Trouble:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "wrong version number" in reason or "record layer" in reason or "http request" in reason:
        return NO_TLS
    if "certificate required" in reason or ("alert" in reason and security.cert is None):
        return Trouble("it wants a client certificate: give cert and key", is_hopeless=True)
    if "alert" in reason:
        return Trouble(f"it does not accept the client certificate ({reason}): check cert and key", is_hopeless=True)
    return Trouble(f"no TLS connection could be made ({reason})")
