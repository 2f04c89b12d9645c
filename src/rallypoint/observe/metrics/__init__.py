"""Metrics for Prometheus: of a server, of a node, and of the runs that a process follows.

    registry = server_registry(server)              # reads the server's counters on each scrape, and only then
    listener = serve_metrics(registry, "127.0.0.1", 9400)
    body, content_type = exposition(registry)       # for a process that has an HTTP server already

`table` defines every metric; docs/metrics.md is generated from it. This package needs `prometheus-client` (extra
`dashboard`); without it, the import raises an ImportError that says so. Nothing else imports this package.
"""

from __future__ import annotations

try:
    import prometheus_client as _prometheus_client  # noqa: F401 - for the error below
except ImportError as error:
    raise ImportError("metrics need prometheus-client: pip install 'rallypoint[dashboard]'") from error

from rallypoint.observe.metrics.listener import MetricsListener, exposition, serve_metrics
from rallypoint.observe.metrics.node import NodeMetrics
from rallypoint.observe.metrics.runs import RunMetrics
from rallypoint.observe.metrics.server import ServerBusy, server_registry

__all__ = [
    "MetricsListener",
    "NodeMetrics",
    "RunMetrics",
    "ServerBusy",
    "exposition",
    "serve_metrics",
    "server_registry",
]
