"""Metrics for Prometheus: what a server, a node and whoever follows runs can tell in numbers.

    registry = server_registry(server)              # of a server; reads its counters when it is asked, and not before
    listener = serve_metrics(registry, "127.0.0.1", 9400)
    body, content_type = exposition(registry)       # for whoever serves HTTP already

`table` defines every metric; docs/metrics.md is made from it. Needs `prometheus-client` (extra `dashboard`): importing
this without it raises an ImportError that says so. Nothing else imports this package.
"""

from __future__ import annotations

try:
    import prometheus_client as _prometheus_client  # noqa: F401 - only to say what is missing
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
