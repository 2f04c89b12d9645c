import os
import socket
import sys
import time

import pytest

from rallypoint.bench import usage

LISTING = (
    "0 0 127.0.0.1:29400 127.0.0.1:58400 bbr wscale:10,10 rto:204 bytes_sent:154 bytes_retrans:4 bytes_acked:150 "
    "bytes_received:210 segs_out:6\n"
    "0 0 127.0.0.1:29400 127.0.0.1:58402 cubic rto:204 bytes_received:10\n"
    "0 0 127.0.0.1:29400 127.0.0.1:58404 cubic rto:204\n"
)


def test_payload_is_what_was_sent_once_and_what_was_received():
    assert usage.counted(LISTING) == {"127.0.0.1:58400": 360, "127.0.0.1:58402": 10, "127.0.0.1:58404": 0}


def test_growth_counts_new_connections_and_forgets_those_that_are_gone():
    assert usage.grown({"a": 100, "b": 50}, {"a": 130, "c": 7}) == 37


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processor_time_and_memory_of_a_process_are_read():
    before = usage.cpu_s(os.getpid())
    while usage.cpu_s(os.getpid()) <= before:
        sum(range(10_000))
    assert usage.rss_bytes(os.getpid()) > 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="asks ss")
def test_payload_of_a_server_is_counted():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as accepted:
            before = usage.payload(port)
            if before is None:
                pytest.skip("there is no ss")
            client.sendall(b"x" * 1000)
            received = 0
            while received < 1000:
                received += len(accepted.recv(1000))
            accepted.sendall(b"y" * 10)
            assert client.recv(10) == b"y" * 10
            deadline = time.monotonic() + 30.0
            while usage.grown(before, usage.payload(port) or {}) != 1010:
                assert time.monotonic() < deadline, "the bytes were not counted"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_that_do_nothing_are_calm_and_busy_ones_are_waited_for():
    usage.wait_until_idle([os.getpid()], cores=2.0, timeout_s=30.0)
    started_at = time.monotonic()
    usage.wait_until_idle([os.getpid()], cores=0.0, timeout_s=0.1)
    assert time.monotonic() >= started_at + 0.1
