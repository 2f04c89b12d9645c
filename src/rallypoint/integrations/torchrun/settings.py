"""Settings from the arguments of torchrun: its endpoint, its `--rdzv-conf` and a few environment variables.

The environment is an argument. Every invalid value is a SettingsError, which is a ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

from rallypoint.errors import SettingsError
from rallypoint.server.hosting import TORCHRUN_DEFAULT_RUN_ID
from rallypoint.settings import Parameters, Settings
from rallypoint.urls import shown

DEFAULT_SCHEME = "tcp"
NODE_RANK_VARIABLE = "PET_NODE_RANK"
"""The variable from which torchrun takes a default for --node-rank. The flag itself is not passed to rendezvous
backends."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_SIZES = ("min_nodes", "max_nodes", "min_workers", "max_workers")
_PATHS = frozenset({"file", "memory"})
"""Schemes whose endpoint may contain slashes."""
_MANY_RUNS = frozenset({"etcd"})
"""Schemes whose backend always serves many runs."""


def settings_of(params: Parameters, environ: Mapping[str, str]) -> Settings:
    """The settings of this node. The endpoint is `host[:port]`, or a URL without run id and sizes. SettingsError."""
    options = _options(params, environ)
    endpoint = params.endpoint.strip()
    start = _URL.match(endpoint)
    if start is None:
        settings = Settings.build(scheme=DEFAULT_SCHEME, endpoints=endpoint, run_id=params.run_id, **options)
    else:
        settings = Settings.from_url(_run_url(endpoint, start, params.run_id), **options)
    if settings.run_id == TORCHRUN_DEFAULT_RUN_ID and settings.scheme in _MANY_RUNS:
        raise SettingsError(
            f"run id {settings.run_id!r} is torchrun's default, and {settings.scheme}:// serves many runs: two jobs "
            f"with this id would become one. Give this run a unique id with --rdzv-id",
            option="run_id",
            value=settings.run_id,
        )
    return settings


def _options(params: Parameters, environ: Mapping[str, str]) -> dict[str, object]:
    options: dict[str, object] = dict(params.config)
    for name in _SIZES:
        if name in options:
            _refuse_size(name, f"in --rdzv-conf ({name}={options[name]})")
    if params.local_addr:
        options["local_addr"] = params.local_addr
    if "node_rank" not in options and "rank" not in options:
        options["node_rank"] = environ.get(NODE_RANK_VARIABLE) or None
    has_rank = options.get("node_rank") is not None or options.get("rank") is not None
    if has_rank and "ranks" not in options:
        options["ranks"] = "node_rank"
    options["min_nodes"], options["max_nodes"] = params.min_nodes, params.max_nodes
    return options


def _run_url(endpoint: str, start: re.Match[str], run_id: str) -> str:
    """The URL of the run, from an endpoint that is a URL."""
    location, mark, query = endpoint[start.end() :].partition("?")
    location = location.rstrip("/")
    if "/" in location and start[1].lower() not in _PATHS:
        raise SettingsError(
            f"the endpoint {shown(endpoint)} contains a run id ({location.partition('/')[2]}): give it with --rdzv-id",
            option="endpoint",
            value=endpoint,
        )
    for part in query.split("&"):
        if part.partition("=")[0] in _SIZES:
            _refuse_size(part.partition("=")[0], f"in the endpoint ({part})")
    return f"{start[0]}{location}/{quote(run_id, safe='')}{mark}{query}"


def _refuse_size(name: str, where: str) -> None:
    raise SettingsError(f"{name} is given {where}: omit it, and use --nnodes=MIN:MAX", option=name)
