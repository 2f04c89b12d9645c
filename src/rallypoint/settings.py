"""Validated settings of one node in one run.

`Settings` are created by `from_url`, `build` or `from_parameters`, which check everything that can be checked without
access to the machine; nothing here reads a clock, a file or the environment. Whether the scheme exists, and the name
and address of the node, are determined elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import msgspec

from rallypoint.errors import SettingsError
from rallypoint.options import OPTIONS, EtcdProtocol, Kind, LastCallMode, Option, find_option
from rallypoint.urls import (
    DEFAULT_PORTS,
    normalise_endpoints,
    parse_bool,
    parse_endpoint,
    parse_int,
    parse_text,
    parse_url,
    refusal,
    shown,
    split_endpoints,
)

__all__ = [
    "DEFAULT_PORTS",
    "OPTIONS",
    "EtcdProtocol",
    "Kind",
    "LastCallMode",
    "Option",
    "Parameters",
    "Settings",
    "Timing",
    "parse_bool",
    "parse_endpoint",
    "parse_int",
]

LONGEST_RUN_ID = 256


def _defaults(scheme: str) -> dict[str, Any]:
    """Field -> default of every option for a run of `scheme`."""
    return {option.field: option.default_for(scheme) for option in OPTIONS}


_DEFAULTS = _defaults("")


class Parameters(Protocol):
    """The attributes that `Settings.from_parameters` reads: of Rallypoint's or torch's `RendezvousParameters`."""

    @property
    def endpoint(self) -> str: ...
    @property
    def run_id(self) -> str: ...
    @property
    def min_nodes(self) -> int: ...
    @property
    def max_nodes(self) -> int: ...
    @property
    def local_addr(self) -> str | None: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a coordinator uses and that may differ between nodes."""

    last_call_timeout_s: float = _DEFAULTS["last_call_timeout_s"]
    confirm_timeout_s: float = _DEFAULTS["confirm_timeout_s"]
    admission_window_s: float = _DEFAULTS["admission_window_s"]
    session_ttl_s: float = _DEFAULTS["keep_alive_interval_s"] * _DEFAULTS["keep_alive_max_attempt"]
    reopen_after_s: float = _DEFAULTS["reopen_after_s"]
    hold_back_losses: int = _DEFAULTS["hold_back_losses"]
    hold_back_window_s: float = _DEFAULTS["hold_back_window_s"]
    hold_back_s: float = _DEFAULTS["hold_back_s"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one node in one run, typed and consistent if created by one of the class methods.

    `endpoints` are in their normal form. `name` and `local_addr` are None until they are filled in from the machine's
    host name; `is_host` None means to decide by trying to bind.
    """

    scheme: str
    endpoints: tuple[str, ...]
    run_id: str
    min_nodes: int
    max_nodes: int
    step: int
    join_timeout_s: float
    last_call_timeout_s: float
    close_timeout_s: float
    heartbeat_timeout_s: float
    read_timeout_s: float
    confirm_timeout_s: float
    last_call_mode: LastCallMode
    admission_window_s: float
    keep_alive_interval_s: float
    keep_alive_max_attempt: int
    disconnect_grace_s: float
    reopen_after_s: float
    hold_back_losses: int
    hold_back_window_s: float
    hold_back_s: float
    name: str | None
    labels: dict[str, str]
    local_addr: str | None
    node_rank: int | None
    ranks: str
    rank0: str | None
    is_host: bool | None
    insecure: bool
    token_file: str | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    etcd_prefix: str
    protocol: EtcdProtocol
    cert: str | None
    key: str | None
    cacert: str | None
    user: str | None
    password_file: str | None

    @classmethod
    def from_url(cls, url: str, /, **overrides: object) -> Self:
        """From `scheme://endpoint[,endpoint…]/run-id?option=value`; overrides other than None take precedence."""
        parts = parse_url(url)
        return cls._checked(parts.scheme, parts.endpoints, parts.run_id, parts.query, overrides)

    @classmethod
    def build(cls, *, scheme: str, endpoints: str | Sequence[str] = (), run_id: str, **options: object) -> Self:
        """From keyword arguments; values may be text as in a URL or typed, and None means not given."""
        return cls._checked(scheme, endpoints, run_id, options)

    @classmethod
    def from_parameters(cls, params: Parameters, scheme: str) -> Self:
        """From torch-style parameters for a run of `scheme`; the options are in `params.config`."""
        fixed = {"min_nodes": params.min_nodes, "max_nodes": params.max_nodes, "local_addr": params.local_addr or None}
        return cls._checked(scheme, params.endpoint, params.run_id, {**params.config, **fixed})

    @classmethod
    def _checked(cls, scheme: str, endpoints: str | Sequence[str], run_id: str, *layers: Mapping[str, object]) -> Self:
        """Settings from layers of options; a later layer overrides an earlier one."""
        scheme = parse_text("scheme", scheme).strip().lower()
        if isinstance(endpoints, str):
            endpoints = split_endpoints(scheme, endpoints)
        values = _defaults(scheme) | _resolved(scheme, layers)
        _check_sizes(values)
        _check_certificates(values)
        return cls(
            scheme=scheme, endpoints=normalise_endpoints(scheme, endpoints), run_id=_checked_run_id(run_id), **values
        )

    @property
    def where(self) -> str:
        """Scheme and endpoints, for messages."""
        return f"{self.scheme}://{','.join(self.endpoints)}"

    @property
    def session_ttl_s(self) -> float:
        """How long a session lives without a renewal."""
        return self.keep_alive_interval_s * self.keep_alive_max_attempt

    def shared(self) -> dict[str, int | str]:
        """The options, by public name, that must be equal on all nodes of the run."""
        return {
            "min_nodes": self.min_nodes,
            "max_nodes": self.max_nodes,
            "step": self.step,
            "last_call_mode": self.last_call_mode.value,
            "ranks": self.ranks,
            "rank0": self.rank0 or "",
        }

    def timing(self) -> Timing:
        """The settings that a coordinator on this node uses and that may differ between nodes."""
        return Timing(
            last_call_timeout_s=self.last_call_timeout_s,
            confirm_timeout_s=self.confirm_timeout_s,
            admission_window_s=self.admission_window_s,
            session_ttl_s=self.session_ttl_s,
            reopen_after_s=self.reopen_after_s,
            hold_back_losses=self.hold_back_losses,
            hold_back_window_s=self.hold_back_window_s,
            hold_back_s=self.hold_back_s,
        )


def _resolved(scheme: str, layers: Sequence[Mapping[str, object]]) -> dict[str, Any]:
    """Field -> typed value of every option that is given under any of its names."""
    chosen: dict[str, object] = {}
    fallbacks: dict[str, object] = {}
    for layer in layers:
        named: dict[str, str] = {}  # field -> the name used in this layer
        for name, raw in layer.items():
            option = find_option(name, scheme)
            if raw is None:
                continue
            value = option.parse(raw, name)
            if name in option.fallbacks:
                fallbacks[option.field] = value
                continue
            earlier = named.setdefault(option.field, name)
            if earlier != name and chosen[option.field] != value:
                raise _contradiction(earlier, layer[earlier], name, raw)
            chosen[option.field] = value
    return fallbacks | chosen


def _contradiction(earlier: str, first: object, name: str, second: object) -> SettingsError:
    message = f"{earlier}={shown(first)} and {name}={shown(second)} are the same option: give one of them"
    return SettingsError(message, option=name, value=second)


def _checked_run_id(run_id: object) -> str:
    text = parse_text("run_id", run_id)
    if len(text) > LONGEST_RUN_ID:
        raise refusal("run_id", run_id, f"has {len(text)} characters", f"use at most {LONGEST_RUN_ID}")
    return text


def _check_sizes(values: dict[str, Any]) -> None:
    """Check that min_nodes is given, not above max_nodes, and both are multiples of step; fills in max_nodes."""
    least, step = values["min_nodes"], values["step"]
    if least is None:
        raise SettingsError(
            "min_nodes is missing: give the number of nodes that a round needs, as in min_nodes=2", option="min_nodes"
        )
    most = values["max_nodes"] = least if values["max_nodes"] is None else values["max_nodes"]
    if most < least:
        raise refusal("max_nodes", most, f"is below min_nodes={least}", f"give {least} or more")
    if least % step or most % step:
        sizes = f"min_nodes={least} and max_nodes={most}"
        message = f"{sizes} are not both multiples of step={step}: change the sizes or the step"
        raise SettingsError(message, option="step", value=step)


def _check_certificates(values: dict[str, Any]) -> None:
    """A key needs its certificate, and etcd's certificates need https."""
    for key, cert in (("key", "cert"), ("tls_key", "tls_cert")):
        if values[key] is not None and values[cert] is None:
            raise refusal(key, values[key], f"comes without {cert}", f"give {cert} too, or leave it out")
    for option in ("cert", "cacert"):
        if values[option] is not None and values["protocol"] is EtcdProtocol.HTTP:
            raise refusal(option, values[option], "has no effect with protocol=http", "give protocol=https too")
