"""The table of options: every name that a URL, a keyword argument or torch's configuration may use.

The table is the only definition of an option's default, aliases and meaning; settings, their checks and the
documentation are derived from it.
"""

from __future__ import annotations

import difflib
import enum

import msgspec

from rallypoint.errors import SettingsError
from rallypoint.urls import (
    parse_bool,
    parse_choice,
    parse_int,
    parse_labels,
    parse_prefix,
    parse_ranks,
    parse_seconds,
    parse_text,
    refusal,
    shown,
)

LARGEST_INT = 2**31 - 1
LONGEST_S = 1e9  # about thirty years; clocks and leases overflow with much more


class LastCallMode(enum.Enum):
    """How long the last call lasts once the minimum is reached."""

    ADAPTIVE = "adaptive"
    FIXED = "fixed"


class EtcdProtocol(enum.StrEnum):
    """The protocol for etcd."""

    HTTP = "http"
    HTTPS = "https"


class Kind(enum.Enum):
    """The type of an option's value."""

    INT = "whole number"
    SECONDS = "seconds"
    BOOL = "boolean"
    TEXT = "text"
    PREFIX = "key prefix"
    LABELS = "labels"
    RANKS = "rank policy"
    CHOICE = "choice"


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One option.

    `aliases` mean the same as `name`; `fallbacks` are used only if neither is given. `shared` options must be equal on
    all nodes of a run. `backends` are the schemes that the option belongs to; () means all. `default_on` are the
    schemes with another default.
    """

    name: str
    kind: Kind
    meaning: str
    default: object = None
    default_on: tuple[tuple[str, object], ...] = ()
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    shared: bool = False
    backends: tuple[str, ...] = ()
    zero: bool = False
    choices: type[enum.Enum] | None = None

    @property
    def field(self) -> str:
        """The attribute of `Settings` that holds it."""
        return f"{self.name}_s" if self.kind is Kind.SECONDS else self.name

    @property
    def names(self) -> tuple[str, ...]:
        """All accepted names."""
        return (self.name, *self.aliases, *self.fallbacks)

    def default_for(self, scheme: str) -> object:
        """The typed default for a run of `scheme`; None if there is none."""
        default = dict(self.default_on).get(scheme, self.default)
        return None if default is None else self.parse(default)

    def belongs_to(self, scheme: str) -> bool:
        return not self.backends or scheme in self.backends

    def parse(self, value: object, given_as: str | None = None) -> object:
        """The typed value. SettingsError, with the name `given_as`, for an invalid one."""
        name = given_as or self.name
        match self.kind:
            case Kind.INT:
                return self._in_range(name, value, parse_int(name, value))
            case Kind.SECONDS:
                return self._in_range(name, value, parse_seconds(name, value))
            case Kind.BOOL:
                return parse_bool(name, value)
            case Kind.TEXT:
                return parse_text(name, value)
            case Kind.PREFIX:
                return parse_prefix(name, value)
            case Kind.LABELS:
                return parse_labels(name, value)
            case Kind.RANKS:
                return parse_ranks(name, value)
            case Kind.CHOICE:
                assert self.choices is not None
                return parse_choice(name, value, self.choices)

    def _in_range(self, name: str, value: object, number: float) -> float:
        if self.zero and number < 0:
            raise refusal(name, value, "is negative", "give 0 or more")
        if not self.zero and number <= 0:
            advice = "give 1 or more" if self.kind is Kind.INT else "give more than 0 seconds"
            raise refusal(name, value, "is not positive", advice)
        most = LARGEST_INT if self.kind is Kind.INT else LONGEST_S
        if number > most:
            raise refusal(name, value, "is too large", f"give at most {most:.0f}")
        return number


def _seconds(name: str, default: float, meaning: str, *, zero: bool = False, fallbacks: tuple[str, ...] = ()) -> Option:
    return Option(name=name, kind=Kind.SECONDS, default=default, meaning=meaning, zero=zero, fallbacks=fallbacks)


def _text(
    name: str, meaning: str, *, shared: bool = False, backends: tuple[str, ...] = (), aliases: tuple[str, ...] = ()
) -> Option:
    return Option(name=name, kind=Kind.TEXT, meaning=meaning, shared=shared, backends=backends, aliases=aliases)


_EMBEDDED = ("tcp", "static")
_ETCD = ("etcd",)

_SIZES = (
    Option(
        name="min_nodes",
        kind=Kind.INT,
        aliases=("min_workers",),
        shared=True,
        meaning="A round has at least this many members. Required.",
    ),
    Option(
        name="max_nodes",
        kind=Kind.INT,
        aliases=("max_workers",),
        shared=True,
        meaning="A round has at most this many members; by default as many as min_nodes.",
    ),
    Option(
        name="step",
        kind=Kind.INT,
        default=1,
        shared=True,
        meaning="The size of a round is a multiple of this; min_nodes and max_nodes must be too.",
    ),
)

_TIMES = (
    _seconds(
        "join_timeout",
        600.0,
        "How long a node waits for a round; `timeout` is used only if this is absent.",
        fallbacks=("timeout",),
    ),
    _seconds("last_call_timeout", 30.0, "How long to wait for further nodes once min_nodes have joined."),
    _seconds("close_timeout", 30.0, "How long closing the run may take."),
    _seconds("heartbeat_timeout", 5.0, "How long one renewal of the session may take before it counts as missed."),
    _seconds("read_timeout", 60.0, "How long one request to the backend may take."),
    _seconds(
        "confirm_timeout", 10.0, "How long a forming round waits for the next confirmation before it is given up."
    ),
    Option(
        name="last_call_mode",
        kind=Kind.CHOICE,
        default=LastCallMode.ADAPTIVE,
        choices=LastCallMode,
        shared=True,
        meaning="adaptive ends the last call early when, after the first round, every live node has joined; "
        "fixed always waits for its end.",
    ),
    _seconds(
        "admission_window",
        1.0,
        "Time without arrivals before the members are told of waiting nodes; 0: at once.",
        zero=True,
    ),
)

_LIVENESS = (
    Option(
        name="keep_alive_interval",
        kind=Kind.SECONDS,
        default=5.0,
        default_on=(("etcd", 1.25),),  # there only the time to live shows that a process is dead
        meaning="Time between two renewals of a node's session.",
    ),
    Option(
        name="keep_alive_max_attempt",
        kind=Kind.INT,
        default=3,
        default_on=(("etcd", 4),),
        meaning="A session ends after this many missed renewals.",
    ),
    _seconds(
        "disconnect_grace",
        0.3,
        "Time a node has to reconnect to the embedded server after its connection closed; 2 behind a proxy or load "
        "balancer.",
        zero=True,
    ),
    _seconds("reopen_after", 60.0, "Time without any session after which the run id is free again.", zero=True),
    Option(
        name="hold_back_losses",
        kind=Kind.INT,
        default=3,
        zero=True,
        meaning="A node that was lost this many times within hold_back_window is held back; 0: never.",
    ),
    _seconds("hold_back_window", 600.0, "The time within which the losses of a node are counted."),
    _seconds("hold_back", 30.0, "How long a node is held back the first time; it doubles each time.", zero=True),
)

_IDENTITY = (
    _text("name", "The name of this node; by default the host name."),
    Option(
        name="labels",
        kind=Kind.LABELS,
        default="",
        meaning="Labels of this node, such as zone=a+rack=7, for the topology rank policy.",
    ),
    _text("local_addr", "The address of this node for other nodes; by default its fully qualified host name."),
    Option(
        name="node_rank",
        kind=Kind.INT,
        aliases=("rank",),
        zero=True,
        meaning="The rank that this node requests; used by static runs and by ranks=node_rank.",
    ),
    Option(
        name="ranks",
        kind=Kind.RANKS,
        default="sticky",
        shared=True,
        meaning="How ranks are assigned: sticky, node_rank, natural, or topology:label+label.",
    ),
    _text("rank0", "The name of the node that gets rank 0 whenever it is a member.", shared=True),
)

_SERVER = (
    Option(
        name="is_host",
        kind=Kind.BOOL,
        backends=("tcp",),
        meaning="Whether this node hosts the embedded server; by default decided by trying to bind the endpoint.",
    ),
    Option(
        name="insecure",
        kind=Kind.BOOL,
        default=False,
        backends=_EMBEDDED,
        meaning="Allow a node with is_host to bind all addresses of its machine without a token or mutual TLS.",
    ),
    _text("token_file", "A file with the token of the embedded server.", backends=_EMBEDDED),
    _text("tls_ca", "A PEM file with the certificate authorities for checking the peer.", backends=_EMBEDDED),
    _text("tls_cert", "A PEM file with this side's certificate.", backends=_EMBEDDED),
    _text("tls_key", "A PEM file with the key of tls_cert, if it is not in the same file.", backends=_EMBEDDED),
)

DEFAULT_PREFIX = "rallypoint"
"""The prefix of all keys, unless `etcd_prefix` is given."""

_ETCD_ONLY = (
    Option(
        name="etcd_prefix",
        kind=Kind.PREFIX,
        default=DEFAULT_PREFIX,
        backends=_ETCD,
        meaning="All keys of all runs are below this prefix.",
    ),
    Option(
        name="protocol",
        kind=Kind.CHOICE,
        default=EtcdProtocol.HTTP,
        choices=EtcdProtocol,
        backends=_ETCD,
        meaning="http, or https for TLS.",
    ),
    _text("cert", "A PEM file with the client's certificate.", backends=_ETCD, aliases=("ssl_cert",)),
    _text(
        "key",
        "A PEM file with the key of cert, if it is not in the same file.",
        backends=_ETCD,
        aliases=("ssl_cert_key",),
    ),
    _text(
        "cacert",
        "A PEM file with the certificate authorities for checking etcd.",
        backends=_ETCD,
        aliases=("ca_cert",),
    ),
    _text("user", "The etcd user.", backends=_ETCD),
    _text("password_file", "A file with the password of user.", backends=_ETCD),
)

OPTIONS: tuple[Option, ...] = (*_SIZES, *_TIMES, *_LIVENESS, *_IDENTITY, *_SERVER, *_ETCD_ONLY)

_BY_NAME = {name: option for option in OPTIONS for name in option.names}


def find_option(name: str, scheme: str) -> Option:
    """The option with this name or alias, for a run of `scheme`. SettingsError if there is none."""
    option = _BY_NAME.get(name)
    if option is None:
        raise SettingsError(f"unknown option {shown(name)}{_suggestion(name, scheme)}", option=name)
    if not option.belongs_to(scheme):
        schemes = " and ".join(f"{backend}://" for backend in option.backends)
        message = f"option {name} is for {schemes} runs and this is a {scheme}:// run: leave it out"
        raise SettingsError(message, option=name)
    return option


def _suggestion(name: str, scheme: str) -> str:
    known = [given for given, option in _BY_NAME.items() if option.belongs_to(scheme)]
    near = difflib.get_close_matches(name[:64].lower().replace("-", "_"), known, n=1)
    if near:
        return f": did you mean {near[0]}?"
    return f": the options are {', '.join(option.name for option in OPTIONS if option.belongs_to(scheme))}"
