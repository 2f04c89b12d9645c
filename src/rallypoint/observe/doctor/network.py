"""Checks of a TCP endpoint, whatever the backend: does the name resolve, and does the port accept connections."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator

from rallypoint.observe.doctor.checks import Check, failed, ok, warning
from rallypoint.observe.doctor.probe import connect_s, resolve
from rallypoint.urls import format_endpoint

SLOW_NAME_S = 1.0
SLOW_CONNECT_S = 0.5


class Reached:
    """Filled in by `check_network`: the first address that accepted a connection, and how long that took."""

    def __init__(self) -> None:
        self.address: str | None = None
        self.took_s = 0.0


async def check_network(
    host: str, port: int, limit_s: float, reached: Reached, to_start: str, label: str = ""
) -> AsyncIterator[Check]:
    """Resolve and connect. `to_start`: the advice if no process listens; `label` tells several endpoints apart."""
    name_check, connect_check = f"name{label}", f"connect{label}"
    addresses = [host]
    if not _is_literal(host):
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        try:
            addresses = await resolve(host, port, limit_s)
        except TimeoutError:
            yield failed(
                name_check,
                f"no name server answered within {limit_s:g} s for {host!r}",
                "check /etc/resolv.conf on this machine, or give an address instead of the name",
            )
            return
        except OSError as error:
            yield failed(
                name_check,
                f"{host!r} does not resolve: {error.strerror or error}",
                "check the spelling, DNS and /etc/hosts on this machine (in Kubernetes, use the full name "
                "service.namespace.svc); or give an address instead of the name",
            )
            return
        took_s = loop.time() - started_at
        found = f"{host} is {', '.join(addresses)}"
        if took_s > SLOW_NAME_S:
            yield warning(name_check, f"{found}, and the look-up took {took_s:.1f} s", "check the name server")
        else:
            yield ok(name_check, found)
    async for check in _check_connect(host, addresses, port, limit_s, reached, to_start, connect_check):
        yield check


async def _check_connect(
    host: str, addresses: list[str], port: int, limit_s: float, reached: Reached, to_start: str, name: str
) -> AsyncIterator[Check]:
    troubles, refused = [], 0
    for address in addresses:
        where = format_endpoint(address, port)
        try:
            took_s = await connect_s(address, port, limit_s)
        except TimeoutError:
            troubles.append(f"{where}: no answer within {limit_s:g} s")
        except ConnectionRefusedError:
            refused += 1
            troubles.append(f"{where}: connection refused")
        except OSError as error:
            troubles.append(f"{where}: {(error.strerror or str(error)).lower()}")
        else:
            reached.address, reached.took_s = address, took_s
            break
    if reached.address is not None:
        found = f"{format_endpoint(reached.address, port)} accepts connections, in {reached.took_s * 1000:.1f} ms"
        if troubles:
            fix = f"every connection loses time there: remove the address from the name {host}, or serve on it"
            yield warning(name, f"{found}; but {'; '.join(troubles)}", fix)
        elif reached.took_s > SLOW_CONNECT_S:
            yield warning(name, found, "check the network to that address")
        else:
            yield ok(name, found)
    elif refused == len(addresses):
        yield failed(name, f"no process listens there: {'; '.join(troubles)}", to_start)
    else:
        fix = f"check that the machine is up and that firewalls allow port {port}; if so, {to_start}"
        yield failed(name, f"it cannot be reached: {'; '.join(troubles)}", fix)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
