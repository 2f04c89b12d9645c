"""TLS contexts from files, and error messages for failed handshakes.

Contexts are made from the PEM files named in options. An error in a file names the file, and is raised before anything
is sent. A failed handshake becomes a message that says what to do; most causes need an operator, so they are Rejected
and not retried.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from rallypoint.errors import BackendError, Rejected, Unavailable
from rallypoint.wire.frames import GREETING
from rallypoint.wire.handshake import STRANGER, describe

ACCESS_DENIED = b"\x15\x03\x03\x00\x02\x02\x31"
"""The fatal alert `access_denied`, unencrypted like all alerts before the handshake: the server refuses for now."""


class PlainText(ssl.SSLError):
    """The other side does not speak TLS; `first` are its first bytes."""

    def __init__(self, first: bytes) -> None:
        super().__init__("the other side does not speak TLS")
        self.first = first


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of one side: the authorities that it trusts, and its certificate. At least one of them is given."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @staticmethod
    def given(ca: str | None, cert: str | None, key: str | None) -> TlsFiles | None:
        """None: no TLS."""
        return TlsFiles(ca, cert, key) if ca is not None or cert is not None else None

    def client_context(self) -> ssl.SSLContext:
        """Checks the server's certificate and name against `ca` (without it: the authorities of this machine)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca is not None:
            self._trust(context, self.ca)
        else:
            context.load_default_certs()
        if self.cert is not None:
            self._load_certificate(context, self.cert)
        return _strict(context)

    def server_context(self) -> ssl.SSLContext:
        """Presents `cert`; with `ca`, clients need a certificate signed by it."""
        if self.cert is None:
            raise Rejected("a server that speaks TLS needs tls_cert (and tls_key): give its certificate")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load_certificate(context, self.cert)
        if self.ca is not None:
            self._trust(context, self.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # no session resumption: every connection presents its certificate
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        return _strict(context)

    def stamp(self) -> tuple[object, ...]:
        """A value that changes when any of the files changes."""
        return tuple(map(stamp_of, (self.ca, self.cert, self.key)))

    def warnings(self) -> list[str]:
        """Warnings for the operator about the files."""
        secret = self.key or self.cert
        return [] if secret is None else exposure("tls_key" if self.key else "tls_cert", secret)

    def _trust(self, context: ssl.SSLContext, path: str) -> None:
        _read("tls_ca", path)
        try:
            context.load_verify_locations(cafile=path)
        except ssl.SSLError as error:
            raise Rejected(f"tls_ca {path!r} holds no certificate in PEM form: {error.reason or error}") from error

    def _load_certificate(self, context: ssl.SSLContext, path: str) -> None:
        text = _read("tls_cert", path)
        if b"-----BEGIN CERTIFICATE-----" not in text:
            raise Rejected(f"tls_cert {path!r} holds no certificate in PEM form")
        named, where = ("tls_key", self.key) if self.key is not None else ("tls_cert", path)
        if b"PRIVATE KEY-----" not in _read(named, where):
            advice = "" if self.key is not None else ": give tls_key, or put the key into the same file"
            raise Rejected(f"{named} {where!r} holds no private key in PEM form{advice}")

        def ask() -> str:
            raise Rejected(f"{named} {where!r} is locked with a password: give a key without one")

        try:
            context.load_cert_chain(path, self.key, password=ask)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise Rejected(f"{named} {where!r} is not the key of tls_cert {path!r}") from error
            raise Rejected(
                f"tls_cert {path!r} and {named} {where!r} cannot be used: {error.reason or error}"
            ) from error


def _strict(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # accept an intermediate authority or the certificate itself
    return context


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Rejected(f"{option} {path!r} cannot be read: {error.strerror or error}") from error


def stamp_of(path: str | None) -> tuple[int, int, int] | None:
    """A value that changes with the file; None: there is no such file."""
    try:
        found = os.stat(path) if path is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)


def exposure(option: str, path: str) -> list[str]:
    """A warning if all users of this machine may read or change a file with a secret."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return []
    if not mode & 0o006:
        return []
    what = "changed" if mode & 0o002 else "read"
    return [f"{option} {path!r} can be {what} by everybody on this machine: chmod 600 it"]


# --- messages for failed handshakes -----------------------------------------------------------------------------------

_EXPIRED, _NOT_YET, _SELF_SIGNED, _SELF_SIGNED_ROOT = 10, 9, 18, 19
_UNKNOWN = frozenset({2, 20, 21})
_OTHER_NAME = frozenset({62, 64})


def trouble_with_server(endpoint: str, error: Exception | None) -> BackendError | None:
    """The client's error for a TLS error, with advice; None if it is another error."""
    if isinstance(error, PlainText):
        return _plain(endpoint, error.first)
    if isinstance(error, ssl.SSLCertVerificationError):
        return Rejected(f"{endpoint} is not trusted: {_not_trusted(endpoint.rpartition(':')[0], error)}")
    if not isinstance(error, ssl.SSLError):
        return None
    reason = error.reason or ""
    if "ALERT_ACCESS_DENIED" in reason:
        return Unavailable("it refuses this address for now (too many failed logins, or too many connections)")
    if refusal := _certificate_refused(reason):
        return Rejected(f"{endpoint} refused: {refusal}")
    if "PROTOCOL_VERSION" in reason or "UNSUPPORTED_PROTOCOL" in reason:
        return Rejected(f"{endpoint} speaks no TLS of version 1.2 or later")
    return Rejected(f"TLS with {endpoint} failed: {_words(error)}")


def _plain(endpoint: str, first: bytes) -> Rejected:
    if first.startswith((GREETING[:1], STRANGER.encode()[: len(first)])):
        return Rejected(
            f"{endpoint} speaks plain text, not TLS: leave out tls_ca, tls_cert and tls_key, or start the server with "
            f"tls_cert"
        )
    return Rejected(f"{endpoint} does not speak TLS: it answered with {describe(first)}. Is the port right?")


def _not_trusted(host: str, error: ssl.SSLCertVerificationError) -> str:
    code, said = error.verify_code, error.verify_message
    if code == _EXPIRED:
        return "its certificate has expired: give the server a new one (and see that this machine's clock is right)"
    if code == _NOT_YET:
        return "its certificate is not valid yet: see that the clocks are right"
    if code == _SELF_SIGNED:
        return "its certificate is self-signed and not in tls_ca: give the authority that signed it, or itself"
    if code in _UNKNOWN or code == _SELF_SIGNED_ROOT:
        return "its certificate was signed by an authority that is not in tls_ca: give the one that signed it"
    if code in _OTHER_NAME:
        return (
            f"its certificate is not for {host!r}: use a name or address of the certificate in the URL, or add this "
            f"one to the certificate (subjectAltName)"
        )
    return f"its certificate is refused: {said}"


def _certificate_refused(reason: str) -> str | None:
    """The server's alert about this side's certificate."""
    if "CERTIFICATE_REQUIRED" in reason or "ALERT_HANDSHAKE_FAILURE" in reason:
        return "it asks for a certificate (mutual TLS) and none was given: give tls_cert and tls_key"
    if "ALERT_CERTIFICATE_EXPIRED" in reason:
        return "this side's certificate (tls_cert) has expired: give a new one"
    if "ALERT_UNKNOWN_CA" in reason:
        return (
            "this side's certificate (tls_cert) was signed by an authority that the server does not trust (its tls_ca)"
        )
    if "ALERT" in reason and "CERTIFICATE" in reason:
        return f"this side's certificate (tls_cert) was not accepted: {reason.replace('_', ' ').lower()}"
    return None


def trouble_with_client(error: Exception) -> tuple[bool, str]:
    """A failed handshake at a server: whether it counts as a failed login, and the message."""
    reason = getattr(error, "reason", None) or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True, f"its certificate is refused: {error.verify_message}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return True, "this server asks for a certificate (mutual TLS) and none was given"
    if "ALERT" in reason and ("UNKNOWN_CA" in reason or "CERTIFICATE" in reason):
        return False, f"it does not accept this server's certificate: {_words(error)}"
    return False, f"TLS failed: {_words(error)}"


def _words(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else str(error)
