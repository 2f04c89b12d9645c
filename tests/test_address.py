"""What this machine is called: asked once, and not for long."""

import asyncio
import socket
import threading

from rallypoint import _address


def test_full_name_is_asked_for_once(monkeypatch):
    asked = []
    monkeypatch.setattr(_address, "_found", None)
    monkeypatch.setattr(socket, "getfqdn", lambda: asked.append(1) or "head.example")
    assert asyncio.run(_address.own_address()) == "head.example"
    assert asyncio.run(_address.own_address()) == "head.example"
    assert len(asked) == 1


def test_name_server_that_is_silent_costs_two_seconds_and_the_full_name(monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(_address, "_found", None)
    monkeypatch.setattr(_address, "PATIENCE_S", 0.05)
    monkeypatch.setattr(socket, "getfqdn", lambda: answers.wait(30) and "late.example")
    assert asyncio.run(_address.own_address()) == socket.gethostname()
    answers.set()


def test_name_that_cannot_be_asked_for_is_the_short_one(monkeypatch):
    def getfqdn():
        raise UnicodeError("label too long")

    monkeypatch.setattr(_address, "_found", None)
    monkeypatch.setattr(socket, "getfqdn", getfqdn)
    assert asyncio.run(_address.own_address()) == socket.gethostname()
