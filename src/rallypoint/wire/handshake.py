"""The handshake: protocol version, authentication, and replies to clients of other protocols.

Pure decisions about received bytes; the caller sends the result and closes the connection. Nothing but its prefix may
be decoded of a hello without a valid token.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import msgspec

from rallypoint.wire.messages import (
    NEWEST_VERSION,
    OLDEST_VERSION,
    Hello,
    RefusalCode,
    Refused,
    hello_decoder,
    hello_prefix_decoder,
)

LONGEST_NAME = 512
STRANGER = "this is a Rallypoint server, and it was sent"
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Versions:
    """The protocol versions that one side supports."""

    oldest: int = OLDEST_VERSION
    newest: int = NEWEST_VERSION

    def agree(self, oldest: int, newest: int) -> int | None:
        """The newest version that both sides support; None: there is none."""
        version = min(self.newest, newest)
        return version if version >= max(self.oldest, oldest) else None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The hello is accepted."""

    version: int
    hello: Hello


def judge(payload: bytes, token: str | tuple[str, ...] | None, versions: Versions) -> Accepted | Refused:
    """Accept or refuse a hello. Without a valid token only its prefix is decoded.

    Each of the tokens is valid. None, or an empty value: no token is required.
    """
    try:
        if token:
            given = hello_prefix_decoder.decode(payload).token
            if not _is_one_of(given, (token,) if isinstance(token, str) else token):
                why = "the token is wrong" if given else "this server asks for a token and none was given"
                return Refused(RefusalCode.TOKEN, f"{why}: set token_file to the file that contains it")
        hello = hello_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Refused(RefusalCode.MALFORMED, "the first frame is not a hello: is this a Rallypoint client?")
    version = versions.agree(hello.oldest, hello.newest)
    if version is None:
        older = hello.newest < versions.oldest
        advice = "upgrade the client" if older else "upgrade the server"
        return Refused(
            RefusalCode.VERSION,
            f"the client ({hello.software or 'unknown'}) speaks {_span(hello.oldest, hello.newest)} of the protocol "
            f"and the server {_span(versions.oldest, versions.newest)}: {advice}",
        )
    if not 0 < len(hello.client) <= LONGEST_NAME or len(hello.run) > LONGEST_NAME:
        return Refused(RefusalCode.MALFORMED, "the hello contains no client name, or a name is too long")
    return Accepted(version, hello)


def _is_one_of(given: str, tokens: tuple[str, ...]) -> bool:
    """Compare in constant time, whatever was given and whichever token matches. Digests have equal lengths."""
    digest = hashlib.sha256(given.encode()).digest()
    matches = [hmac.compare_digest(digest, hashlib.sha256(token.encode()).digest()) for token in tokens]
    return any(matches)


def _span(oldest: int, newest: int) -> str:
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"


def stranger_line(first: bytes) -> bytes:
    """The reply to a client of another protocol: one line, as an HTTP response to an HTTP request."""
    protocol = describe(first)
    advice = "it speaks plain text, leave out tls_*" if protocol == "TLS" else "connect with tcp:// URLs of Rallypoint"
    line = f"{STRANGER} {protocol}; {advice}\n".encode()
    if is_http(first):
        head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(line)}\r\n"
        return head.encode() + b"Connection: close\r\n\r\n" + line
    return line


def is_http(first: bytes) -> bool:
    """Whether these bytes begin an HTTP request."""
    method, _, rest = first.partition(b" ")
    return method.isalpha() and method.isupper() and rest[:1] in (b"/", b"*", b"h") and len(method) <= 7


def describe(first: bytes) -> str:
    """The protocol that these first bytes belong to, or the bytes in printable form."""
    if is_http(first) or first.startswith(b"HTTP/"):
        return "HTTP"
    if first[:2] in (b"\x16\x03", b"\x15\x03"):
        return "TLS"
    if first[:1] == b"\x80" and first[1:2] in b"\x02\x03\x04\x05":
        return "a pickle"
    if first.startswith(b"SSH-"):
        return "SSH"
    text = first[:_SHOWN]
    return (
        repr(text.decode()) if text.isascii() and text.decode().isprintable() else f"bytes that begin with {text[:8]!r}"
    )
