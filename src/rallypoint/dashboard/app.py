"""The routes of the page. Everything but the page itself and logging in is for those who may look."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rallypoint.dashboard.access import LASTS_S, Access, Blocked, How, Viewer
from rallypoint.dashboard.guard import Guard, is_same_origin
from rallypoint.dashboard.streams import EventStream
from rallypoint.dashboard.watching import Crowded, Watching, wall
from rallypoint.errors import OutcomeUnknown, Rejected, RendezvousStateError, SettingsError, Unavailable
from rallypoint.observe.operator_actions import NoSuchKey, NoSuchRun, Operator

Metrics = Callable[[], tuple[bytes, str]]
Body = TypeVar("Body")

PAGE = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
LONGEST_BODY = 16 * 1024
LONGEST_WHY = 500
BODY_S = 10.0
ACT_S = 10.0
MOST_STREAMS = 128
MOST_STREAMS_EACH = 24
"""Of one session, or one address where nobody logs in."""


class Refuse(Exception):
    """An answer that is a sentence."""

    def __init__(self, status: int, why: str, **headers: str) -> None:
        super().__init__(why)
        self.status = status
        self.headers = headers


class Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: str


class Act(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: str
    why: str = ""
    node: str = ""


class Dashboard:
    """The application; `app` is what a web server is given. `close` ends its streams and followers."""

    def __init__(
        self,
        watching: Watching,
        access: Access,
        *,
        names: frozenset[str],
        port: int,
        metrics: Metrics | None = None,
    ) -> None:
        self._watching = watching
        self._access = access
        self._metrics = metrics
        self._port = port
        self._streams: Counter[str] = Counter()
        self._stopping = asyncio.Event()
        self._files = {path.name: (path.read_bytes(), TYPES[path.suffix]) for path in PAGE.iterdir() if path.is_file()}
        routes = [
            Route("/", self._index),
            Route("/page/{name}", self._file),
            Route("/api/me", self._me),
            Route("/api/login", self._login, methods=["POST"]),
            Route("/api/logout", self._logout, methods=["POST"]),
            Route("/api/{act:str}", self._act, methods=["POST"]),
            Route("/api/runs", self._run_list),
            Route("/api/run", self._run),
            Route("/metrics", self._exposition),
        ]
        handlers: Any = {Refuse: _refused, Blocked: _blocked}
        self.app: ASGIApp = Guard(Starlette(routes=routes, exception_handlers=handlers), names)

    async def close(self) -> None:
        self._stopping.set()
        await self._watching.close()

    # --- the page -----------------------------------------------------------------------------------------------------

    async def _index(self, request: Request) -> Response:
        return self._asset(request, "index.html")

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            raise Refuse(404, "there is no such file")
        return self._asset(request, name)

    def _asset(self, request: Request, name: str) -> Response:
        content, kind = self._files[name]
        tag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    # --- who is it ----------------------------------------------------------------------------------------------------

    def _cookie_name(self, request: Request) -> str:
        """Cookies know no ports: another page on this machine must not overwrite it."""
        name = f"rallypoint-{self._port}"
        return f"__Host-{name}" if request.url.scheme == "https" else name

    def _viewer(self, request: Request) -> Viewer | None:
        cookie = request.cookies.get(self._cookie_name(request), "")
        return self._access.viewer(cookie, request.headers.get("authorization", ""), _peer(request))

    def _allowed(self, request: Request) -> Viewer:
        viewer = self._viewer(request)
        if viewer is None:
            raise Refuse(401, "log in with the server's token first", **{"www-authenticate": "Bearer"})
        return viewer

    async def _me(self, request: Request) -> Response:
        viewer = self._viewer(request)
        place = self._watching.place
        if viewer is None:
            return _json({"logged_in": False})
        return _json(
            {
                "logged_in": True,
                "asks": self._access.asks,
                "how": viewer.how.value,
                "csrf": viewer.csrf,
                "may_act": viewer.may_act,
                "where": place.where,
                "only": place.only,
            }
        )

    async def _login(self, request: Request) -> Response:
        _check_origin(request)
        body = await _read(request, Login)
        if not self._access.asks:
            raise Refuse(409, "no token is asked for here")
        cookie = self._access.login(body.token.strip(), _peer(request))
        if cookie is None:
            raise Refuse(403, "this is not the server's token: give what is in its --token-file")
        answer = _json({"logged_in": True})
        answer.set_cookie(
            self._cookie_name(request),
            cookie,
            max_age=int(LASTS_S),
            path="/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return answer

    async def _logout(self, request: Request) -> Response:
        viewer = self._allowed(request)
        self._check_intent(request, viewer)
        self._access.logout(request.cookies.get(self._cookie_name(request), ""))
        answer = _json({"logged_in": False})
        answer.delete_cookie(
            self._cookie_name(request),
            path="/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return answer

    def _check_intent(self, request: Request, viewer: Viewer) -> None:
        """A request that changes something was made by our own page, not by another one in the same browser."""
        if viewer.how is How.TOKEN:
            return  # no browser adds that by itself
        _check_origin(request)
        if not self._access.is_current(request.headers.get("x-rallypoint-csrf", ""), viewer):
            raise Refuse(403, "the page is not the one that was loaded last: load it again")

    # --- looking ------------------------------------------------------------------------------------------------------

    async def _run_list(self, request: Request) -> Response:
        return self._stream(request, None)

    async def _run(self, request: Request) -> Response:
        self._allowed(request)  # what is here and what is not is for those who may look
        run_id = request.query_params.get("id", "")
        try:
            self._watching.place.target(run_id)
        except SettingsError as error:
            raise Refuse(404, str(error)) from None
        return self._stream(request, run_id)

    def _stream(self, request: Request, run_id: str | None) -> Response:
        viewer = self._allowed(request)
        if self._streams.total() >= MOST_STREAMS or self._streams[viewer.key] >= MOST_STREAMS_EACH:
            why = "too many pages look at this already: close some"
            raise Refuse(503, why, **{"retry-after": "5"})
        last = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return _Lent(self._reading(viewer, run_id, last))

    @asynccontextmanager
    async def _reading(self, viewer: Viewer, run_id: str | None, last: str) -> AsyncIterator[ASGIApp]:
        self._streams[viewer.key] += 1
        try:
            async with self._watching.reading(run_id) as channel:
                yield EventStream(channel, last, viewer.is_valid, stopping=self._stopping)
        except Crowded as error:
            yield PlainTextResponse(f"{error}\n", 503)
        finally:
            self._streams[viewer.key] -= 1
            self._streams += Counter()  # without those that have none

    async def _exposition(self, request: Request) -> Response:
        self._allowed(request)
        if self._metrics is None:
            raise Refuse(404, "there are no metrics here: they are at the /metrics of `rallypoint serve --http`")
        content, kind = self._metrics()
        return Response(content, headers={"content-type": kind})

    # --- acting -------------------------------------------------------------------------------------------------------

    async def _act(self, request: Request) -> Response:
        viewer = self._allowed(request)
        self._check_intent(request, viewer)
        name = request.path_params["act"]
        if name not in ("close", "reopen", "drain"):
            raise Refuse(404, "there is no such thing to do: close, reopen and drain are")
        if not viewer.may_act:
            raise Refuse(403, "this page only shows: serve it with a token for those who may act")
        wanted = await _read(request, Act)
        if len(wanted.why) > LONGEST_WHY:
            raise Refuse(400, f"the reason has more than {LONGEST_WHY} characters")
        by = f"dashboard on {socket.gethostname()}, for {_peer(request)[0]}"
        try:
            target = self._watching.place.target(wanted.run)
            async with asyncio.timeout(ACT_S), self._watching.place.open(target) as backend:
                said = await _do(name, wanted, Operator(backend, target, by, wall))
        except (NoSuchRun, NoSuchKey, SettingsError) as error:
            raise Refuse(404, str(error)) from None
        except (TimeoutError, OutcomeUnknown):
            raise Refuse(504, f"no answer within {ACT_S:g} s: look whether it was done") from None
        except (Unavailable, Rejected, RendezvousStateError) as error:
            raise Refuse(502, str(error)) from None
        return _json({"said": said})


async def _do(name: str, wanted: Act, operator: Operator) -> str:
    why = wanted.why.strip()
    if name == "drain":
        ids = await operator.drain(wanted.node, why)
        return f"Asked {wanted.node} to go." if len(ids) == 1 else f"Asked {len(ids)} nodes named {wanted.node} to go."
    done = await (operator.close(why) if name == "close" else operator.reopen(why))
    words = ("is closed", "was closed already") if name == "close" else ("is open again", "was open")
    return f"Run {wanted.run!r} {words[0] if done.changed else words[1]}."


class _Lent(Response):
    """An answer that holds something for as long as it is sent."""

    def __init__(self, lending: Any) -> None:
        super().__init__()
        self._lending = lending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._lending as app:
            await app(scope, receive, send)


# --- requests and answers ---------------------------------------------------------------------------------------------


def _peer(request: Request) -> tuple[str, int]:
    return (request.client.host, request.client.port) if request.client is not None else ("", 0)


def _check_origin(request: Request) -> None:
    if not is_same_origin(request.headers):
        raise Refuse(403, "this was not asked by the page itself (its Origin is another, or missing)")


async def _read(request: Request, kind: type[Body]) -> Body:
    """A small JSON body, in bounded time."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refuse(415, "send JSON (content-type application/json)")
    body = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > LONGEST_BODY:
                    raise Refuse(413, f"the body has more than {LONGEST_BODY} bytes")
        return msgspec.json.decode(body, type=kind)
    except TimeoutError:
        raise Refuse(408, f"the body did not come within {BODY_S:g} s") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refuse(400, f"the body is not what is expected here: {error}") from None


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _refused(request: Request, error: Refuse) -> Response:
    body = msgspec.json.encode({"error": str(error)})
    return Response(body, error.status, error.headers, "application/json")


async def _blocked(request: Request, error: Blocked) -> Response:
    body = msgspec.json.encode({"error": str(error)})
    return Response(body, 429, {"retry-after": str(int(error.for_s) + 1)}, "application/json")
