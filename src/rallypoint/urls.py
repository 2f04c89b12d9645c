"""Parsers of user input: run URLs, endpoints, and the values of options.

A run URL is `scheme://endpoint[,endpoint…]/run-id?option=value`. Invalid input is a `SettingsError` that quotes the
input and says what to write instead. Only syntax is checked here: which schemes exist is known to the registry, which
options exist and fit together to `options` and `settings`.
"""

from __future__ import annotations

import enum
import ipaddress
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from urllib.parse import unquote

import msgspec

from rallypoint.errors import SettingsError

DEFAULT_PORTS = {"tcp": 29400, "static": 29500, "etcd": 2379}
EXAMPLE_URL = "tcp://head:29400/my-run?min_nodes=2&max_nodes=4"
RANK_POLICIES = ("sticky", "node_rank", "natural")
TOPOLOGY = "topology"

_ONE_ENDPOINT = frozenset({"tcp", "static", "file", "memory"})
_NAMES_A_PLACE = frozenset({"file", "memory"})  # the endpoint is a path or a name, not a list of addresses
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NOT_IN_A_HOST = re.compile(r"[\s/\\@?#%\[\],\x00-\x1f\x7f]")
_HIGHEST_PORT = 65535
_LONGEST_HOST = 253
_TRUE = frozenset({"1", "true", "t", "yes", "y"})
_FALSE = frozenset({"0", "false", "f", "no", "n"})
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
_LONGEST_QUOTE = 160


def shown(value: object) -> str:
    """`value` as quoted in errors: shortened, and never raises."""
    try:
        text = repr(value)
    except Exception:  # a foreign __repr__, or an integer with more digits than Python prints
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 3] + "..."


def refusal(name: str, value: object, problem: str, advice: str) -> SettingsError:
    """The error for option `name`: "name=value `problem`: `advice`"."""
    return SettingsError(f"{name}={shown(value)} {problem}: {advice}", option=name, value=value)


class RunUrl(msgspec.Struct, frozen=True):
    """The decoded parts of a run URL; `query` holds each option as written, in order."""

    scheme: str
    endpoints: tuple[str, ...]
    run_id: str
    query: dict[str, str]


def parse_url(url: object) -> RunUrl:
    """The parts of `url`. SettingsError, with an example of a valid URL, if it is malformed."""
    if not isinstance(url, str):
        raise _malformed(url, "it is not a string")
    text = url.strip()
    if not text:
        raise _malformed(url, "it is empty")
    start = _SCHEME.match(text)
    if start is None:
        raise _malformed(url, "it has no scheme such as tcp:// in front")
    scheme = start[1].lower()
    location, _, query = text[start.end() :].partition("?")
    endpoint, run_id = _split_location(url, scheme, location)
    return RunUrl(scheme, split_endpoints(scheme, endpoint), _decoded(url, run_id), _split_query(url, query))


def split_endpoints(scheme: str, text: str) -> tuple[str, ...]:
    """The endpoints in `text`; a path or a name is never split."""
    return (text,) if scheme in _NAMES_A_PLACE else tuple(text.split(","))


def normalise_endpoints(scheme: str, endpoints: Sequence[object]) -> tuple[str, ...]:
    """The endpoints in their normal form. SettingsError if `scheme` does not accept them.

    Addresses become "host:port", paths lose trailing slashes; endpoints of other schemes only lose blanks.
    """
    given = [_endpoint_text(endpoint) for endpoint in endpoints] or [""]
    if scheme in _ONE_ENDPOINT and len(given) > 1:
        raise _bad_endpoint(",".join(given), f"a {scheme}:// run takes exactly one endpoint")
    if len(given) > 1 and "" in given:
        raise _bad_endpoint(",".join(given), "one of the endpoints is empty")
    if scheme in DEFAULT_PORTS:
        return tuple(format_endpoint(*parse_endpoint(text, DEFAULT_PORTS[scheme])) for text in given)
    if scheme == "file":
        if not given[0]:
            raise SettingsError("a file:// run needs a directory: file:///mnt/shared/my-run", option="endpoint")
        return (given[0].rstrip("/") or "/",)
    return tuple(given)


def parse_endpoint(text: str, default_port: int, lowest_port: int = 1) -> tuple[str, int]:
    """(host, port) of `host[:port]` or `[v6][:port]`; an empty host is localhost. SettingsError for anything else."""
    if not isinstance(text, str):
        raise _bad_endpoint(text, "it is not a string")
    rest = text.strip()
    if rest.startswith("["):
        host, bracket, rest = rest[1:].partition("]")
        if not bracket:
            raise _bad_endpoint(text, "the closing bracket is missing")
        _check_ipv6(text, host)
        if rest and not rest.startswith(":"):
            raise _bad_endpoint(text, f"{shown(rest)} follows the closing bracket where :port should")
    else:
        if rest.count(":") > 1:
            raise _bad_endpoint(text, "it has more than one colon: an IPv6 address goes in brackets")
        host = rest.partition(":")[0]
        rest = rest[len(host) :]
        _check_host_name(text, host)
    return host or "localhost", _port(text, rest[1:], lowest_port) if rest else default_port


def format_endpoint(host: str, port: int) -> str:
    """The text that `parse_endpoint` reads back as (host, port)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split_location(url: str, scheme: str, location: str) -> tuple[str, str]:
    """(endpoint, run id) from the part between `://` and `?`."""
    if scheme == "file":
        endpoint, slash, run_id = location.rpartition("/")
        if slash and not location.startswith("/"):
            raise _malformed(url, "its path is not absolute; three slashes are needed, as in file:///mnt/shared/my-run")
        endpoint = _decoded(url, endpoint) or "/"
    else:
        endpoint, slash, run_id = location.partition("/")
        if "/" in run_id:
            raise _malformed(url, f"the run id {shown(run_id)} contains a slash; write it as %2F")
        endpoint = _decoded(url, endpoint) if scheme in _NAMES_A_PLACE else endpoint
    if not slash or not run_id:
        raise _malformed(url, "it has no run id after the endpoint")
    return endpoint, run_id


def _split_query(url: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        name = _decoded(url, name)
        if not name or not equals:
            raise _malformed(url, f"{shown(part)} is not of the form option=value")
        if name in options:
            raise SettingsError(f"option {name} is given twice in {shown(url)}: give it once", option=name)
        options[name] = _decoded(url, value)
    return options


def _decoded(url: str, text: str) -> str:
    """`text` without percent escapes. A plus stays a plus: labels are joined by it."""
    try:
        return unquote(text, errors="strict")
    except UnicodeError as error:
        raise _malformed(url, f"{shown(text)} is not UTF-8 once decoded") from error


def _endpoint_text(endpoint: object) -> str:
    if not isinstance(endpoint, str):
        raise _bad_endpoint(endpoint, "it is not a string")
    return endpoint.strip()


def _check_ipv6(text: str, host: str) -> None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError as error:
        raise _bad_endpoint(text, f"{shown(host)} is not an IPv6 address") from error


def _check_host_name(text: str, host: str) -> None:
    wrong = _NOT_IN_A_HOST.search(host)
    if wrong:
        raise _bad_endpoint(text, f"the host contains {shown(wrong[0])}")
    if len(host) > _LONGEST_HOST:
        raise _bad_endpoint(text, f"the host is longer than {_LONGEST_HOST} characters")
    try:
        host.encode("idna")  # as name resolution does; it refuses empty and overlong labels
    except UnicodeError as error:
        raise _bad_endpoint(text, "the host is not a valid name") from error


def _port(text: str, digits: str, lowest: int) -> int:
    if not digits:
        raise _bad_endpoint(text, "the port after the colon is missing")
    if not (digits.isascii() and digits.isdigit()):
        raise _bad_endpoint(text, f"the port {shown(digits)} is not a number")
    if len(digits) > 5 or not lowest <= int(digits) <= _HIGHEST_PORT:
        raise _bad_endpoint(text, f"the port {shown(digits)} is not in {lowest}..{_HIGHEST_PORT}")
    return int(digits)


def _malformed(url: object, problem: str) -> SettingsError:
    return SettingsError(f"{shown(url)} is not a run URL: {problem}. Write it like {EXAMPLE_URL}", value=url)


def _bad_endpoint(text: object, problem: str) -> SettingsError:
    message = f"bad endpoint {shown(text)}: {problem}. Write it like head:29400 or [fd00::7]:29400"
    return SettingsError(message, option="endpoint", value=text)


def parse_bool(name: str, value: object) -> bool:
    """True for 1 true t yes y, False for 0 false f no n, in any case; int 0 and 1 and bool as they are."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return value == 1
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise refusal(name, value, "is not a boolean", "write true or false (or 1/0, t/f, yes/no, y/n)")


def parse_int(name: str, value: object) -> int:
    """A whole number, given as int or as decimal digits; blanks around it are fine."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value.strip()):
        try:
            return int(value)
        except ValueError as error:  # more digits than Python converts
            raise refusal(name, value, "is too large", "write a whole number such as 4") from error
    raise refusal(name, value, "is not an integer", "write a whole number such as 4")


def parse_seconds(name: str, value: object) -> float:
    """A finite number of seconds, given as a number, its text, or a timedelta."""
    advice = "write seconds as a plain number, such as 30 or 0.5"
    if isinstance(value, timedelta):
        return value.total_seconds()
    separated = isinstance(value, str) and "_" in value
    if separated or isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise refusal(name, value, "is not a number of seconds", advice)
    try:
        seconds = float(value)
    except ValueError as error:
        raise refusal(name, value, "is not a number of seconds", advice) from error
    except OverflowError as error:
        raise refusal(name, value, "is not finite", advice) from error
    if not math.isfinite(seconds):
        raise refusal(name, value, "is not finite", advice)
    return seconds


def parse_text(name: str, value: object) -> str:
    """Unchanged text that is not blank, can be encoded as UTF-8, and has no control characters."""
    if not isinstance(value, str):
        raise refusal(name, value, "is not text", "give it as a string")
    if not value.strip():
        raise refusal(name, value, "is empty", "give it at least one character that is not a blank")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refusal(name, value, "cannot be written as UTF-8", "use other characters") from error
    if _CONTROLS.search(value):
        raise refusal(
            name, value, "has a control character", "leave it out: it could affect the terminals of other users"
        )
    return value


def parse_prefix(name: str, value: object) -> str:
    """A key prefix without slashes at either end."""
    prefix = parse_text(name, value).strip().strip("/")
    if not prefix:
        raise refusal(name, value, "is empty", "give at least one character besides slashes, such as rallypoint")
    return prefix


def parse_choice(name: str, value: object, choices: type[enum.Enum]) -> enum.Enum:
    """A member of `choices`, given as such or as its value in any case."""
    if isinstance(value, choices):
        return value
    word = value.strip().lower() if isinstance(value, str) else None
    for choice in choices:
        if choice.value == word:
            return choice
    known = " or ".join(str(choice.value) for choice in choices)
    raise refusal(name, value, "is unknown", f"write {known}")


def parse_ranks(name: str, value: object) -> str:
    """A rank policy in its normal form: sticky, node_rank, natural, or topology:a+b without blanks."""
    text = value.strip() if isinstance(value, str) else ""
    policy, colon, labels = text.partition(":")
    policy = policy.strip().lower()
    if policy in RANK_POLICIES and not colon:
        return policy
    if policy == TOPOLOGY:
        names = [label.strip() for label in labels.split("+")]
        if not all(names):
            raise refusal(name, value, "names no label or an empty one", "write it like topology:zone+rack")
        return parse_text(name, f"{TOPOLOGY}:{'+'.join(names)}")
    known = ", ".join(RANK_POLICIES)
    raise refusal(name, value, "is not a rank policy", f"write {known} or {TOPOLOGY}:label+label")


def parse_labels(name: str, value: object) -> dict[str, str]:
    """Labels from `a=1+b=2` or from a mapping of text to text; always a new dict."""
    advice = "write them like zone=a+rack=7"
    if isinstance(value, str):
        pairs = _label_pairs(name, value, advice)
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        raise refusal(name, value, "are not labels", f"{advice} or give a mapping")
    return _checked_labels(name, value, pairs, advice)


def _label_pairs(name: str, value: str, advice: str) -> list[tuple[object, object]]:
    pairs: list[tuple[object, object]] = []
    for part in value.split("+") if value.strip() else ():
        label, equals, content = part.partition("=")
        if not equals:
            raise refusal(name, value, f"has no '=' in {shown(part)}", advice)
        pairs.append((label.strip(), content.strip()))
    return pairs


def _checked_labels(name: str, value: object, pairs: Iterable[tuple[object, object]], advice: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    for label, content in pairs:
        if not isinstance(label, str) or not isinstance(content, str):
            raise refusal(
                name, value, f"has a label that is not text to text, {shown(label)}: {shown(content)}", advice
            )
        if not label.strip() or not content.strip():
            raise refusal(name, value, f"has a label without name or value, {shown(f'{label}={content}')}", advice)
        if "=" in label or "+" in label + content:
            raise refusal(name, value, f"has a reserved character in {shown(f'{label}={content}')}", advice)
        if label in labels:
            raise refusal(name, value, f"has the label {shown(label)} twice", advice)
        labels[parse_text(name, label)] = parse_text(name, content)
    return labels
