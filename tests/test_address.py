"""The address of this machine: one look-up with a time limit."""

import asyncio
import socket
import threading

from rallypoint import _address


def test_fqdn_is_looked_up_once(monkeypatch):
    asked = []
    monkeypatch.setattr(_address, "_found", None)
    monkeypatch.setattr(socket, "getfqdn", lambda: asked.append(1) or "head.example")
    assert asyncio.run(_address.own_address()) == "head.example"
    assert asyncio.run(_address.own_address()) == "head.example"
    assert len(asked) == 1


def test_silent_name_server_delays_by_two_seconds_and_gives_the_short_name(monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(_address, "_found", None)
    monkeypatch.setattr(_address, "LOOKUP_TIMEOUT_S", 0.05)
    monkeypatch.setattr(socket, "getfqdn", lambda: answers.wait(30) and "late.example")
    assert asyncio.run(_address.own_address()) == socket.gethostname()
    answers.set()


def test_failed_look_up_gives_the_short_name(monkeypatch):
    def getfqdn():
        raise UnicodeError("label too long")

    monkeypatch.setattr(_address, "_found", None)
    monkeypatch.setattr(socket, "getfqdn", getfqdn)
    assert asyncio.run(_address.own_address()) == socket.gethostname()
