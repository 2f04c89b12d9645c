"""Checks of an etcd cluster: each endpoint by itself, then whether a majority is healthy.

They use etcd's unauthenticated HTTP paths on the client port, which answer even when the cluster has no leader.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator

from rallypoint.observe.doctor.checks import Check, failed, ok, register_checks, warning
from rallypoint.observe.doctor.network import Reached, check_network
from rallypoint.observe.doctor.probe import get, identify
from rallypoint.settings import EtcdProtocol, Settings
from rallypoint.urls import DEFAULT_PORTS, parse_endpoint

PAUSED = "it is paused (`kill -CONT` its process), overloaded, or not an etcd: check the process that listens there"
START = "start the etcd member that should listen there, or correct the endpoint"


async def check_etcd(settings: Settings, limit_s: float) -> AsyncIterator[Check]:
    """Check every endpoint, then the cluster."""
    try:
        tls = tls_context(settings)
    except OSError as error:
        yield failed("files", str(error), "correct cert, key or cacert in the URL")
        return
    healthy, troubles = 0, []
    for endpoint in settings.endpoints:
        host, port = parse_endpoint(endpoint, DEFAULT_PORTS["etcd"])
        reached = Reached()
        async for check in check_network(host, port, limit_s, reached, START, f" {endpoint}"):
            # One unreachable member is no failure of the cluster: the check `cluster` decides that.
            yield warning(check.name, check.found, check.fix) if check.is_bad else check
        if reached.address is None:
            troubles.append(f"{endpoint} cannot be reached")
            continue
        check, is_healthy = await _check_member(endpoint, reached.address, port, host, tls, limit_s)
        yield check
        healthy += is_healthy
        if not is_healthy:
            troubles.append(f"{endpoint}: {check.found}")
    yield _cluster(len(settings.endpoints), healthy, troubles)


async def _check_member(
    endpoint: str, address: str, port: int, host: str, tls: ssl.SSLContext | None, limit_s: float
) -> tuple[Check, bool]:
    """Check one member. Also returns whether it is healthy."""
    name = f"member {endpoint}"
    try:
        version = await get(address, port, "/version", tls, limit_s, host)
        health = await get(address, port, "/health", tls, limit_s, host)
    except ssl.SSLError as error:
        fix = "check cacert against etcd's certificate, and protocol=https against what it speaks"
        return warning(name, f"the TLS handshake failed: {error}", fix), False
    told = _json(version)
    if "etcdserver" not in told:
        return await _check_unknown(name, address, port, limit_s), False
    state = _json(health)
    found = f"etcd {told['etcdserver']}"
    if state.get("health") == "true":
        return ok(name, f"{found}, healthy"), True
    metrics = await get(address, port, "/metrics", tls, limit_s, host)
    if metrics is not None and "\netcd_server_has_leader 0\n" in metrics[2]:
        return warning(name, f"{found}, not healthy: it has no leader", "see `cluster` below"), False
    reason = state.get("reason") or (health[0] if health is not None else f"no answer within {limit_s:g} s")
    return warning(name, f"{found}, not healthy: {reason}", "see `cluster` below"), False


async def _check_unknown(name: str, address: str, port: int, limit_s: float) -> Check:
    """The result for an endpoint that did not answer as an etcd."""
    found = await identify(address, port, limit_s)
    if found is not None and found.is_tls:
        return warning(name, "it speaks TLS, but the URL does not ask for TLS", "give protocol=https and cacert")
    if found is not None:
        return warning(name, f"it is not an etcd: it is {found.what}", "correct the port in the URL")
    return warning(name, f"it accepts connections but does not answer within {limit_s:g} s", PAUSED)


def _cluster(endpoints: int, healthy: int, troubles: list[str]) -> Check:
    if healthy == endpoints:
        return ok("cluster", f"{healthy} of {endpoints} endpoint{'s' * (endpoints != 1)} healthy")
    found = f"{healthy} of {endpoints} endpoint{'s' * (endpoints != 1)} healthy: {'; '.join(troubles)}"
    if healthy:
        return warning("cluster", found, "bring the others back: the cluster works as long as it has a majority")
    return failed(
        "cluster",
        found,
        "without a leader nothing can be read or written: a majority of etcd's members must be up and reach each other "
        "(`etcdctl endpoint status --cluster`, `etcdctl member list`)",
    )


def _json(answer: tuple[str, str, str] | None) -> dict[str, str]:
    if answer is None:
        return {}
    try:
        told = json.loads(answer[2])
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in told.items()} if isinstance(told, dict) else {}


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The TLS settings of the URL; None: plain HTTP. OSError if a file cannot be read."""
    if settings.protocol is EtcdProtocol.HTTP:
        return None
    context = ssl.create_default_context(cafile=settings.cacert)
    if settings.cert is not None:
        context.load_cert_chain(settings.cert, settings.key)
    return context


def register() -> None:
    """Register the checks for etcd:// URLs."""
    register_checks("etcd", check_etcd)
