"""The address of the page: bound before anything is served, and refused if others could reach it without a login."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from rallypoint.server.process import BindError, bind_to
from rallypoint.urls import format_endpoint, parse_endpoint

HTTP_PORT = 29480


@dataclass(frozen=True, slots=True)
class Address:
    """A bound socket; `host` is what was asked for, perhaps a name."""

    sock: socket.socket
    host: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(str(self.sock.getsockname()[0]).partition("%")[0]).is_loopback

    @property
    def port(self) -> int:
        return int(self.sock.getsockname()[1])

    @property
    def shown(self) -> str:
        return format_endpoint(*self.sock.getsockname()[:2])

    def url(self, *, has_tls: bool) -> str:
        return f"{'https' if has_tls else 'http'}://{self.shown}/"


def bind_page(http: str, inherited: socket.socket | None = None) -> Address:
    """The page's address, bound unless it is `inherited`. BindError, SettingsError."""
    host, port = parse_endpoint(http, HTTP_PORT, lowest_port=0)
    return Address(inherited or bind_to(format_endpoint(host, port)), host)


def check_exposure(address: Address, *, authenticates: bool, has_tls: bool, insecure: bool) -> list[str]:
    """Warnings about a page that other machines reach. BindError if it would ask for no login."""
    if address.is_loopback:
        return []
    if authenticates:
        if has_tls:
            return []
        return [
            "the page's token and cookie cross the network as they are: give --tls-cert too where others can listen"
        ]
    if not insecure:
        shown = address.shown
        address.sock.close()
        raise BindError(
            f"whoever reaches {shown} could see every run there: give --token-file (make one with "
            f"`openssl rand -hex 32`), or --tls-ca for mutual TLS, or --insecure if everybody there may"
        )
    return [f"whoever reaches {address.shown} can see every run there, and act on none (--insecure)"]
