"""What `torch.distributed.elastic.rendezvous.utils` has."""

from __future__ import annotations

from rallypoint.urls import parse_endpoint

__all__ = ["parse_rendezvous_endpoint"]


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """(host, port) of `host[:port]` or `[v6][:port]`; nothing is localhost. ValueError says what is wrong."""
    return parse_endpoint(endpoint or "", default_port, lowest_port=0)
