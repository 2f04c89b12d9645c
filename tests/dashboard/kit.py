"""A server with its page, on a loop in a thread of their own, and a browser that is no browser."""

import asyncio
import contextlib
import gc
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
from rallypoint.dashboard.process import prepare_beside
from rallypoint.dashboard.serving import Http
from rallypoint.events import Emitter, Event
from rallypoint.server.admission.credentials import Credentials
from rallypoint.server.admission.limits import ServerLimits
from rallypoint.server.server import Server
from tests.patience import PATIENCE_S

T = TypeVar("T")
RUN = "my-run"


class House:
    """`rallypoint serve --http` without the process."""

    server: Server

    def __init__(
        self,
        folder: Path,
        *,
        token: str = "",
        tls: TlsFiles | None = None,
        limits: ServerLimits | None = None,
        names: tuple[str, ...] = (),
        metrics: Any = None,
        draws_apart: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self.port = 0
        self.tls = tls
        self._token_file: str | None = None
        if token:
            self._token_file = str(folder / "token")
            Path(self._token_file).write_text(token, encoding="utf-8")
            Path(self._token_file).chmod(0o600)
        self._limits = limits
        self._names = names
        self._metrics = metrics
        self._draws_apart = draws_apart
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="page of a test", daemon=True)
        self._stack = AsyncExitStack()
        self._handlers: list[aio.AsyncHandler] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self.ask(self._open())
        return self

    def __exit__(self, *exc: object) -> None:
        self.ask(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    async def _open(self) -> None:
        credentials = Credentials(self._token_file, self.tls, is_client=False)
        self.server = Server(
            token=credentials.tokens,
            tls=credentials.server_context(),
            limits=self._limits,
            emit=Emitter(self.events.append),
        )
        await self.server.listen([socket.create_server(("127.0.0.1", 0))])
        beside = prepare_beside(
            "127.0.0.1:0", names=self._names, token_file=self._token_file, tls=self.tls, insecure=False,
            metrics=self._metrics, draws_apart=self._draws_apart,
        )  # fmt: skip
        await self._stack.enter_async_context(beside(self.server, credentials))
        shown = next(event.url for event in self.events if type(event).__name__ == "DashboardListens")
        self.port = int(shown.rstrip("/").rpartition(":")[2])

    async def _close(self) -> None:
        for handler in self._handlers:
            await handler.abandon()
        await self._stack.aclose()
        await self.server.stop()

    async def stop_page(self) -> None:
        await self._stack.aclose()

    def web_connections(self) -> list[Http]:
        """Those of the page. On its loop."""
        return [one for one in gc.get_objects() if type(one) is Http and one in one.connections]

    def ask(self, what: Coroutine[Any, Any, T] | Callable[[], T]) -> T:
        """A coroutine or a function, on the loop of the house."""

        async def call() -> T:
            return what() if callable(what) else await what

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(PATIENCE_S)

    def join(self, *names: str, run: str = RUN) -> list[aio.AsyncHandler]:
        """Nodes, in a round of exactly them."""
        url = f"tcp://{self.server.addresses[0]}/{run}?min_nodes={len(names)}"
        if self._token_file:
            url += f"&token_file={self._token_file}"

        async def all_in() -> list[aio.AsyncHandler]:
            made = [aio.create_handler(f"{url}&name={name}") for name in names]
            self._handlers += made
            await asyncio.gather(*(one.next_rendezvous() for one in made))
            return made

        return self.ask(all_in())

    def browser(self, **options: Any) -> "Browser":
        return Browser(self.port, **options)


class Answer:
    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self.body = answer.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Browser:
    """Keeps its cookie, and says where its pages are from."""

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
            connection.request("GET", path, headers=self.headers(_named(more)))
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **more: str | None) -> Answer:
        """As a page of ours would, unless told otherwise: None leaves a header out."""
        usual = {"origin": self.origin, "content-type": "application/json", "x-rallypoint-csrf": self.csrf}
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = self.connect()
        try:
            connection.request("POST", path, text, self.headers({**usual, **_named(more)}))
            answer = Answer(connection.getresponse())
        finally:
            connection.close()
        if cookie := answer.headers.get("set-cookie"):
            self.cookie = cookie.partition(";")[0]
        return answer

    def login(self, token: str) -> Answer:
        answer = self.post("/api/login", {"token": token})
        if answer.status == 200:
            self.csrf = self.get("/api/me").json["csrf"]
        return answer

    def stream(self, path: str, **more: str | None) -> "Stream":
        connection = self.connect()
        connection.request("GET", path, headers=self.headers(_named(more)))
        return Stream(connection)


def _named(more: dict[str, str | None]) -> dict[str, str | None]:
    return {name.replace("_", "-"): value for name, value in more.items()}


class Stream:
    """Server-sent events, one after the other."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._answer = connection.getresponse()
        self.status = self._answer.status
        self.headers = self._answer.headers
        self.last = ""

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
                self.last = value
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
        """The first picture like that."""
        while True:
            kind, data = self.next()
            if kind == "picture" and wanted(data):
                return data


def phase(message: dict[str, Any]) -> Any:
    return (message.get("state") or {}).get("phase")


def lives(pid: int) -> bool:
    """Whether a process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def studios(pid: int) -> list[int]:
    """The processes that a process has started to draw runs, and that run."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # a thread of it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text(encoding="utf-8").split())
    return [one for one in found if lives(one) and b"studio_process" in Path(f"/proc/{one}/cmdline").read_bytes()]
