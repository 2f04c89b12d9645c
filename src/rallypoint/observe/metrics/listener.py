"""`/metrics` over HTTP, for processes without a web page: one thread that listens, and one for each request.

Every client that reaches the address can read the metrics, as with other exporters. The listener serves nothing else,
and bounds the number of concurrent requests and the duration of each.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

from rallypoint.server.process import BindError
from rallypoint.urls import format_endpoint

MAX_REQUESTS = 8
REQUEST_S = 10.0


def exposition(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """The text of all metrics and its content type. `accept` is the request's Accept header.

    With a server's registry, call it on the server's loop, or in a thread that may block until the loop is free.
    """
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> MetricsListener:
    """Serve `/metrics` in threads of this process until the listener is closed. Port 0: any free port. BindError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return MetricsListener(registry, family, (str(address[0]), int(address[1])))
    except OSError as error:
        why = error.strerror or str(error)
        where = format_endpoint(host, port)
        raise BindError(f"metrics cannot be served on {where}: {why}. Choose another one with --metrics") from error


class MetricsListener(ThreadingHTTPServer):
    """Listens as soon as it is constructed, until `close`. `address` is its numeric address and port."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, registry: CollectorRegistry, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        self.address_family = family
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__(address, partial(_Request, registry))
        self.address = format_endpoint(*self.server_address[:2])  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        """As the base class does, but without its reverse DNS look-up, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # the thread could not be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Limit the whole request by a timer: the socket's time-out applies only to each read."""
        limit = threading.Timer(REQUEST_S, _hang_up, (request,))
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignored: the scraper closed the connection."""

    def close(self) -> None:
        """Stop listening. Running requests are not interrupted; they end with the process at the latest."""
        self.shutdown()
        self.server_close()
        self._thread.join(REQUEST_S)


def _hang_up(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Request(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server_version = "rallypoint"
    sys_version = ""

    def __init__(self, registry: CollectorRegistry, *rest: Any) -> None:
        self._registry = registry
        super().__init__(*rest)

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n", "text/plain; charset=utf-8")
            return
        try:
            body, content_type = exposition(self._registry, self.headers.get("Accept", ""))
        except Exception as error:  # a defect in metrics is reported to the scraper, and must have no other effect
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(), "text/plain; charset=utf-8")
            return
        self._answer(HTTPStatus.OK, body, content_type)

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
