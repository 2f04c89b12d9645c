"""Settings from what torchrun was given: its endpoint, its `--rdzv-conf` and a few environment variables.

Pure but for the environment, which is an argument. Everything unacceptable is a SettingsError, which is a ValueError.
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
"""Where torchrun takes --node-rank from if it is not given; the flag itself never reaches a backend like this one."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_SIZES = ("min_nodes", "max_nodes", "min_workers", "max_workers")
_PLACES = frozenset({"file", "memory"})
"""Schemes whose endpoint may have slashes in it."""
_OPEN_TO_ALL = frozenset({"etcd"})
"""Where one cluster serves many runs, always."""


def settings_of(params: Parameters, environ: Mapping[str, str]) -> Settings:
    """The settings of this node. The endpoint is `host[:port]`, or a URL without a run id and without sizes."""
    options = _options(params, environ)
    endpoint = params.endpoint.strip()
    start = _URL.match(endpoint)
    if start is None:
        settings = Settings.build(scheme=DEFAULT_SCHEME, endpoints=endpoint, run_id=params.run_id, **options)
    else:
        settings = Settings.from_url(_run_url(endpoint, start, params.run_id), **options)
    if settings.run_id == TORCHRUN_DEFAULT_RUN_ID and settings.scheme in _OPEN_TO_ALL:
        raise SettingsError(
            f"run id {settings.run_id!r} is what torchrun calls every run without an id, and {settings.scheme}:// "
            f"serves many: two jobs would become one. Give this one an id of its own with --rdzv-id",
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
    asks = options.get("node_rank") is not None or options.get("rank") is not None
    if asks and "ranks" not in options:
        options["ranks"] = "node_rank"  # whoever says which rank a node is to have means it
    options["min_nodes"], options["max_nodes"] = params.min_nodes, params.max_nodes
    return options


def _run_url(endpoint: str, start: re.Match[str], run_id: str) -> str:
    """The endpoint's URL, completed to that of the run."""
    location, mark, query = endpoint[start.end() :].partition("?")
    location = location.rstrip("/")
    if "/" in location and start[1].lower() not in _PLACES:
        raise SettingsError(
            f"the endpoint {shown(endpoint)} names a run ({location.partition('/')[2]}): leave that to --rdzv-id",
            option="endpoint",
            value=endpoint,
        )
    for part in query.split("&"):
        if part.partition("=")[0] in _SIZES:
            _refuse_size(part.partition("=")[0], f"in the endpoint ({part})")
    return f"{start[0]}{location}/{quote(run_id, safe='')}{mark}{query}"


def _refuse_size(name: str, where: str) -> None:
    raise SettingsError(f"{name} is given {where}: leave it out, --nnodes=MIN:MAX says it", option=name)
