"""Finds out why an endpoint cannot be used, by a plain HTTP request: gRPC's own errors do not say."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

from rallypoint.backends.etcd.security import Security
from rallypoint.backends.resolver_threads import addresses_of
from rallypoint.errors import Rejected
from rallypoint.settings import DEFAULT_PORTS
from rallypoint.urls import parse_endpoint

PROBE_S = 2.0
MOST_READ = 4_096


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with an endpoint."""

    text: str
    is_permanent: bool = False
    """A retry does not help: the configuration has to be changed."""
    is_down: bool = False
    """The member certainly takes no part in the cluster now: there is no process, or it knows of no leader."""


NO_TLS = Problem("it does not speak TLS: give protocol=http", is_permanent=True)


async def probe(endpoint: str, security: Security) -> Problem:
    """What is wrong with an endpoint. Does not raise; takes at most `PROBE_S`."""
    try:
        async with asyncio.timeout(PROBE_S):
            try:
                return await _look(endpoint, security)
            except ConnectionResetError:
                if security.is_tls and "is an etcd" in (await _look(endpoint, Security())).text:
                    return NO_TLS
                raise
    except TimeoutError:
        return Problem(f"no answer within {PROBE_S:g} s")
    except ConnectionRefusedError:
        return Problem("connection refused", is_down=True)
    except ssl.SSLCertVerificationError as error:
        return Problem(f"its certificate is not accepted ({error.verify_message}): check cacert", is_permanent=True)
    except ssl.SSLError as error:
        return _tls_problem(error, security)
    except Rejected as error:
        return Problem(str(error), is_permanent=True)
    except OSError as error:
        return Problem((error.strerror or str(error) or type(error).__name__).lower())


async def _look(endpoint: str, security: Security) -> Problem:
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
        return Problem("it speaks TLS: give protocol=https, with cacert", is_permanent=True)
    return _judge_answer(answer, security)


async def _connect(
    host: str, port: int, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address that accepts. ConnectionRefusedError only if all of them refuse."""
    name = host if context is not None else None
    problems: list[OSError] = [OSError(f"{host!r} has no address")]
    for address in await addresses_of(host, port):
        try:
            return await asyncio.open_connection(address, port, ssl=context, server_hostname=name)
        except ssl.SSLError:
            raise
        except OSError as error:
            problems.append(error)
    raise next((error for error in problems[1:] if not isinstance(error, ConnectionRefusedError)), problems[-1])


async def _speaks_tls(host: str, port: int) -> bool:
    """Whether the server speaks TLS. No data is sent, so its certificate is not checked."""
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


def _judge_answer(answer: bytes, security: Security) -> Problem:
    """What the answer to a request for etcd's version says."""
    if b"etcdserver" in answer:
        return Problem("it is an etcd but does not answer requests")
    if b"HTTPS server" in answer:
        return Problem("it speaks TLS: give protocol=https, with cacert", is_permanent=True)
    if not answer:
        hint = ": it may need a client certificate (cert, key)" if security.is_tls and security.cert is None else ""
        return Problem(f"it closed the connection{hint}")
    if answer[:1] == b"\x15":
        return Problem("it is not an etcd, or speaks TLS: give protocol=https, with cacert", is_permanent=True)
    line = answer.splitlines()[0][:60].decode(errors="backslashreplace")
    if line.startswith("HTTP/1.") and line.split()[1:2] and line.split()[1].startswith("5"):
        return Problem(f"the proxy in front of it answered {line!r}")
    return Problem(f"it is not an etcd: it answered a request for its version with {line!r}", is_permanent=True)


def _tls_problem(error: ssl.SSLError, security: Security) -> Problem:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "wrong version number" in reason or "record layer" in reason or "http request" in reason:
        return NO_TLS
    if "certificate required" in reason or ("alert" in reason and security.cert is None):
        return Problem("it needs a client certificate: give cert and key", is_permanent=True)
    if "alert" in reason:
        return Problem(f"it does not accept the client certificate ({reason}): check cert and key", is_permanent=True)
    return Problem(f"no TLS connection could be made ({reason})")
