"""The client's credentials: TLS files, user and password. Checked when the backend is opened."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from rallypoint.backends.etcd.grpc_fork import grpc
from rallypoint.errors import Rejected
from rallypoint.settings import EtcdProtocol, Settings


@dataclass(frozen=True, slots=True)
class Security:
    """With `is_tls` False connections are plain and the files are not used."""

    is_tls: bool = False
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str = ""

    @classmethod
    def of(cls, settings: Settings) -> Security:
        """From settings. Rejected, with the option, for a file that cannot be read."""
        for option, path in (("cacert", settings.cacert), ("cert", settings.cert), ("key", settings.key)):
            if path is not None:
                _read(option, path)
        if settings.user is not None and settings.password_file is None:
            raise Rejected(f"user={settings.user} is given without password_file: give the file with its password")
        if settings.password_file is not None and settings.user is None:
            raise Rejected("password_file is given without user: give the user, too")
        password = b"" if settings.password_file is None else _read("password_file", settings.password_file)
        return cls(
            is_tls=settings.protocol is EtcdProtocol.HTTPS,
            cacert=settings.cacert,
            cert=settings.cert,
            key=settings.key,
            user=settings.user,
            password=password.decode(errors="replace").strip("\r\n"),
        )

    def credentials(self) -> grpc.ChannelCredentials:
        """For gRPC. Without `key` the file of the certificate holds the key, too."""
        roots = self.cacert or _system_roots()
        key = self.key or self.cert
        return grpc.ssl_channel_credentials(
            root_certificates=None if roots is None else _read("cacert", roots),
            private_key=None if key is None else _read("key", key),
            certificate_chain=None if self.cert is None else _read("cert", self.cert),
        )

    def context(self) -> ssl.SSLContext | None:
        """The same for the connection of `probe`. Rejected for files that do not fit together."""
        if not self.is_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.cacert)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (ssl.SSLError, OSError) as error:
            files = ", ".join(
                f"{n}={v}" for n, v in (("cacert", self.cacert), ("cert", self.cert), ("key", self.key)) if v
            )
            raise Rejected(
                f"{files} cannot be used: {error}. They must be PEM files, and key must belong to cert"
            ) from error
        return context


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Rejected(f"{option}={path} cannot be read: {(error.strerror or str(error)).lower()}") from error


def _system_roots() -> str | None:
    """The certificate authorities that this machine trusts; gRPC has its own list otherwise."""
    path: str | None = ssl.get_default_verify_paths().cafile
    return path if path and os.path.exists(path) else None
