"""The names of `torch.distributed.elastic.rendezvous.utils` that are public."""

from __future__ import annotations

from rallypoint.urls import parse_endpoint

__all__ = ["parse_rendezvous_endpoint"]


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """(host, port) of `host[:port]` or `[v6][:port]`; an empty endpoint is localhost. ValueError if it is not valid."""
    return parse_endpoint(endpoint or "", default_port, lowest_port=0)
