"""A server with its page, on a loop in a thread, and an HTTP client that behaves like a browser."""

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from rallypoint import aio
from rallypoint.backends.tls import TlsFiles
from rallypoint.dashboard.address import bind_page
from rallypoint.dashboard.app import Metrics
from rallypoint.dashboard.child import prepare_page
from rallypoint.dashboard.process import serve_page
from rallypoint.dashboard.source import behind
from rallypoint.dashboard.web_server import WebServer
from rallypoint.events import DashboardListens, Emitter, Event
from rallypoint.server.admission.admission import Admission
from rallypoint.server.admission.credentials import Credentials
from rallypoint.server.admission.limits import ServerLimits
from rallypoint.server.server import Server
from tests.patience import PATIENCE_S, until

T = TypeVar("T")
RUN = "my-run"


class Site:
    """A server in this process, and a page for it: of the same process unless a subclass says otherwise."""

    server: Server
    web: WebServer
    admission: Admission

    def __init__(
        self,
        *,
        token: str = "",
        tls: TlsFiles | None = None,
        limits: ServerLimits | None = None,
        names: tuple[str, ...] = (),
        metrics: Metrics | None = None,
    ) -> None:
        self.events: list[Event] = []
        self.port = 0
        self.tokens = (token,) if token else ()
        self.tls = tls
        self.limits = limits or ServerLimits()
        self.names = names
        self._metrics = metrics
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="site of a test", daemon=True)
        self._stack = AsyncExitStack()
        self._handlers: list[aio.AsyncHandler] = []

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.ask(self._open())
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.ask(self._close())
        finally:
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    async def _open(self) -> None:
        self.server = Server(emit=Emitter(self.events.append))
        await self.server.listen([socket.create_server(("127.0.0.1", 0))])
        await self._open_page()

    async def _open_page(self) -> None:
        address = bind_page("127.0.0.1:0")
        self.port = address.port
        emit = Emitter(self.events.append)
        self.admission = Admission(self.limits, emit, "dashboard")
        context = self.tls.server_context() if self.tls is not None else None
        self.web = await self._stack.enter_async_context(
            serve_page(
                behind(f"tcp://{self.server.addresses[0]}"), address, self.admission, emit, names=self.names,
                tokens=lambda: self.tokens, tls=lambda: context, may_act_openly=True, metrics=self._metrics,
            )
        )  # fmt: skip

    async def _close(self) -> None:
        for handler in self._handlers:
            await handler.abandon()
        try:
            await self.stop_page()
        finally:
            await self.server.stop()

    async def stop_page(self) -> None:
        await self._stack.aclose()

    def ask(self, what: Coroutine[Any, Any, T] | Callable[[], T]) -> T:
        """The result of a coroutine or function, run on the loop of the site."""

        async def call() -> T:
            return what() if callable(what) else await what

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(PATIENCE_S)

    def node_options(self) -> str:
        return ""

    def join(self, *names: str, run: str = RUN) -> list[aio.AsyncHandler]:
        """Nodes, in a round of exactly them."""
        url = f"tcp://{self.server.addresses[0]}/{run}?min_nodes={len(names)}{self.node_options()}"

        async def all_join() -> list[aio.AsyncHandler]:
            made = [aio.create_handler(f"{url}&name={name}") for name in names]
            self._handlers += made
            await asyncio.gather(*(one.next_rendezvous() for one in made))
            return made

        return self.ask(all_join())

    def browser(self, **options: Any) -> "Browser":
        return Browser(self.port, **options)


class ChildSite(Site):
    """The server of `rallypoint serve --http`, with the page in a child process."""

    def __init__(
        self,
        folder: Path,
        *,
        token: str = "",
        make_server: Callable[..., Server] = Server,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.token_file: str | None = None
        self._make_server = make_server
        if token:
            path = folder / "token"
            path.write_text(token, encoding="utf-8")
            path.chmod(0o600)
            self.token_file = str(path)

    async def _open(self) -> None:
        credentials = Credentials(self.token_file, self.tls, is_client=False)
        self.server = self._make_server(
            token=credentials.tokens,
            tls=credentials.server_context(),
            limits=self.limits,
            emit=Emitter(self.events.append),
        )
        page = prepare_page(
            "127.0.0.1:0", names=self.names, token_file=self.token_file, tls=self.tls, insecure=False,
            exposition=lambda: (b"rallypoint_rounds_total 1\n", "text/plain; version=0.0.4"),
        )  # fmt: skip
        await self.server.listen([socket.create_server(("127.0.0.1", 0))])
        self._page = asyncio.create_task(self._run_page(page(self.server, credentials)))
        self._stopping = asyncio.Event()

    async def _run_page(self, page: contextlib.AbstractAsyncContextManager[None]) -> None:
        async with page:
            await self._stopping.wait()

    def __enter__(self) -> Self:
        super().__enter__()
        until(lambda: self._page.done() or self.urls, "the page is served")
        if self.urls:
            self.port = int(self.urls[0].rstrip("/").rpartition(":")[2])
        return self

    async def stop_page(self) -> None:
        self._stopping.set()
        await self._page

    @property
    def urls(self) -> list[str]:
        return [event.url for event in self.events if isinstance(event, DashboardListens)]

    def node_options(self) -> str:
        return f"&token_file={self.token_file}" if self.token_file else ""


class Answer:
    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self.body = answer.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Browser:
    """Keeps its cookie and sends its origin."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None, host: str | None = None) -> None:
        self.port = port
        self.context = context
        self.host = host or f"127.0.0.1:{port}"
        self.origin = f"{'https' if context else 'http'}://{self.host}"
        self.cookie = ""
        self.csrf = ""

    def connect(self) -> http.client.HTTPConnection:
        if self.context is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=PATIENCE_S, context=self.context)

    def headers(self, more: dict[str, str | None]) -> dict[str, str]:
        found: dict[str, str | None] = {"host": self.host, **({"cookie": self.cookie} if self.cookie else {}), **more}
        return {name: value for name, value in found.items() if value is not None}

    def get(self, path: str, **more: str | None) -> Answer:
        connection = self.connect()
        try:
            connection.request("GET", path, headers=self.headers(_header_names(more)))
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **more: str | None) -> Answer:
        """With the headers that our page sends, changed by `more`: None leaves a header out."""
        usual = {"origin": self.origin, "content-type": "application/json", "x-rallypoint-csrf": self.csrf}
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = self.connect()
        try:
            connection.request("POST", path, text, self.headers({**usual, **_header_names(more)}))
            answer = Answer(connection.getresponse())
        finally:
            connection.close()
        if cookie := answer.headers.get("set-cookie"):
            self.cookie = cookie.partition(";")[0]
        return answer

    def login(self, token: str) -> Answer:
        answer = self.post("/api/login", {"token": token})
        if answer.status == 200:
            self.load_csrf()
        return answer

    def load_csrf(self) -> None:
        self.csrf = self.get("/api/me").json["csrf"]

    def stream(self, path: str, **more: str | None) -> "Stream":
        connection = self.connect()
        connection.request("GET", path, headers=self.headers(_header_names(more)))
        return Stream(connection)


def _header_names(more: dict[str, str | None]) -> dict[str, str | None]:
    return {name.replace("_", "-"): value for name, value in more.items()}


class Stream:
    """Server-sent events, one after the other."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._answer = connection.getresponse()
        self.status = self._answer.status
        self.headers = self._answer.headers
        self.last_id = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._answer.close()
        self._connection.close()

    def next(self) -> tuple[str, Any]:
        """Kind and content of the next event. EOFError at the end."""
        kind, data = "", ""
        while True:
            line = self._answer.readline().decode()
            if not line:
                raise EOFError
            name, _, value = line.rstrip("\n").partition(": ")
            if name == "event":
                kind = value
            elif name == "id":
                self.last_id = value
            elif name == "data":
                data = value
            elif not line.strip() and kind:
                return kind, json.loads(data)

    def rest(self) -> list[tuple[str, Any]]:
        """Everything until its end."""
        found = []
        with contextlib.suppress(EOFError):
            while True:
                found.append(self.next())
        return found

    def until(self, wanted: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """The first update that `wanted` is true for."""
        while True:
            kind, data = self.next()
            if kind == "update" and wanted(data):
                return data


def phase(message: dict[str, Any]) -> Any:
    return (message.get("state") or {}).get("phase")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def page_processes(pid: int) -> list[int]:
    """The running page processes that a process has started."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # a thread of it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text(encoding="utf-8").split())
    return [one for one in found if is_running(one) and b"--from-server" in Path(f"/proc/{one}/cmdline").read_bytes()]
