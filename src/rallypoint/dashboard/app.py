"""The routes of the page. All but its static files and the login need a logged-in viewer, if a token is needed."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rallypoint.dashboard.access import SESSION_S, Access, LoginBlocked, LoginMethod, Viewer
from rallypoint.dashboard.feeds import Feeds, TooManyRuns, wall
from rallypoint.dashboard.http_security import HttpSecurity, is_same_origin
from rallypoint.dashboard.streams import EventStream
from rallypoint.errors import OutcomeUnknown, Rejected, RendezvousStateError, SettingsError, Unavailable
from rallypoint.observe.follower import read_report
from rallypoint.observe.operator_actions import NoSuchKey, NoSuchRun, Operator, drain_warning

Metrics: TypeAlias = Callable[[], Awaitable[tuple[bytes, str]]]
"""The text of the metrics and its content type. OSError, TimeoutError."""
Body = TypeVar("Body")

PAGE = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
MOST_BODY_BYTES = 16 * 1024
MOST_REASON_CHARACTERS = 500
BODY_S = 10.0
ACT_S = 10.0
MOST_STREAMS = 128
MOST_STREAMS_EACH = 24
"""Of one session; without a login, of one address."""


class HttpError(Exception):
    """An error response with a sentence for the user."""

    def __init__(self, status: int, why: str, **headers: str) -> None:
        super().__init__(why)
        self.status = status
        self.headers = headers


class LoginBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: str


class ActionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: str
    why: str = ""
    node: str = ""
    force: bool = False
    """Drain a node although fewer than `min_nodes` are left."""


class Dashboard:
    """The ASGI application `app`. `names` are those in `own_names`. `close` ends all streams and feeds."""

    def __init__(
        self,
        feeds: Feeds,
        access: Access,
        *,
        names: frozenset[str],
        port: int,
        metrics: Metrics | None = None,
    ) -> None:
        self._feeds = feeds
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
        handlers: Any = {HttpError: _error_response, LoginBlocked: _blocked_response}
        self.app: ASGIApp = HttpSecurity(Starlette(routes=routes, exception_handlers=handlers), names)

    async def close(self) -> None:
        self._stopping.set()
        await self._feeds.close()

    # --- static files -------------------------------------------------------------------------------------------------

    async def _index(self, request: Request) -> Response:
        return self._asset(request, "index.html")

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            raise HttpError(404, "there is no such file")
        return self._asset(request, name)

    def _asset(self, request: Request, name: str) -> Response:
        content, kind = self._files[name]
        tag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    # --- login --------------------------------------------------------------------------------------------------------

    def _cookie_name(self, request: Request) -> str:
        """With the port: cookies do not tell ports apart, and another page on this machine must not overwrite it."""
        name = f"rallypoint-{self._port}"
        return f"__Host-{name}" if request.url.scheme == "https" else name

    def _viewer(self, request: Request) -> Viewer | None:
        cookie = request.cookies.get(self._cookie_name(request), "")
        return self._access.viewer(cookie, request.headers.get("authorization", ""), _peer(request))

    def _require_viewer(self, request: Request) -> Viewer:
        viewer = self._viewer(request)
        if viewer is None:
            raise HttpError(401, "log in with the server's token first", **{"www-authenticate": "Bearer"})
        return viewer

    async def _me(self, request: Request) -> Response:
        viewer = self._viewer(request)
        source = self._feeds.source
        if viewer is None:
            return _json({"logged_in": False})
        return _json(
            {
                "logged_in": True,
                "asks": self._access.needs_login,
                "how": viewer.method.value,
                "csrf": viewer.csrf,
                "may_act": viewer.may_act,
                "where": source.where,
                "only": source.only,
            }
        )

    async def _login(self, request: Request) -> Response:
        _check_origin(request)
        body = await _read(request, LoginBody)
        if not self._access.needs_login:
            raise HttpError(409, "no token is asked for here")
        cookie = self._access.login(body.token.strip(), _peer(request))
        if cookie is None:
            raise HttpError(403, "this is not the server's token: give what is in its --token-file")
        answer = _json({"logged_in": True})
        answer.set_cookie(
            self._cookie_name(request),
            cookie,
            max_age=int(SESSION_S),
            path="/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return answer

    async def _logout(self, request: Request) -> Response:
        viewer = self._require_viewer(request)
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
        """Refuse a change that another site in the same browser asked for (CSRF)."""
        if viewer.method is LoginMethod.TOKEN:
            return  # a browser does not add a token by itself
        _check_origin(request)
        if not self._access.is_current(request.headers.get("x-rallypoint-csrf", ""), viewer):
            raise HttpError(403, "the page is not the one that was loaded last: load it again")

    # --- streams and metrics ------------------------------------------------------------------------------------------

    async def _run_list(self, request: Request) -> Response:
        return self._stream(request, None)

    async def _run(self, request: Request) -> Response:
        self._require_viewer(request)  # first: others do not learn which runs there are
        run_id = request.query_params.get("id", "")
        try:
            self._feeds.source.target(run_id)
        except SettingsError as error:
            raise HttpError(404, str(error)) from None
        return self._stream(request, run_id)

    def _stream(self, request: Request, run_id: str | None) -> Response:
        viewer = self._require_viewer(request)
        if self._streams.total() >= MOST_STREAMS or self._streams[viewer.key] >= MOST_STREAMS_EACH:
            why = "too many pages look at this already: close some"
            raise HttpError(503, why, **{"retry-after": "5"})
        last_id = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return _ContextResponse(self._reading(viewer, run_id, last_id))

    @asynccontextmanager
    async def _reading(self, viewer: Viewer, run_id: str | None, last_id: str) -> AsyncIterator[ASGIApp]:
        self._streams[viewer.key] += 1
        try:
            async with self._feeds.reading(run_id) as feed:
                yield EventStream(feed, last_id, viewer.is_valid, stopping=self._stopping)
        except TooManyRuns as error:
            yield PlainTextResponse(f"{error}\n", 503)
        finally:
            self._streams[viewer.key] -= 1
            self._streams += Counter()  # drops the keys without streams

    async def _exposition(self, request: Request) -> Response:
        self._require_viewer(request)
        if self._metrics is None:
            raise HttpError(404, "there are no metrics here: they are at the /metrics of `rallypoint serve --http`")
        try:
            content, kind = await self._metrics()
        except (OSError, TimeoutError) as error:
            raise HttpError(503, f"the server gave no metrics: {str(error) or 'no answer'}") from None
        return Response(content, headers={"content-type": kind})

    # --- actions ------------------------------------------------------------------------------------------------------

    async def _act(self, request: Request) -> Response:
        viewer = self._require_viewer(request)
        self._check_intent(request, viewer)
        name = request.path_params["act"]
        if name not in ("close", "reopen", "drain"):
            raise HttpError(404, "there is no such thing to do: close, reopen and drain are")
        if not viewer.may_act:
            raise HttpError(403, "this page only shows: serve it with a token for those who may act")
        wanted = await _read(request, ActionBody)
        if len(wanted.why) > MOST_REASON_CHARACTERS:
            raise HttpError(400, f"the reason has more than {MOST_REASON_CHARACTERS} characters")
        by = f"dashboard on {socket.gethostname()}, for {_peer(request)[0]}"
        try:
            target = self._feeds.source.target(wanted.run)
            async with asyncio.timeout(ACT_S), self._feeds.source.open(target) as backend:
                if name == "drain" and not wanted.force:
                    report = await read_report(backend, target.keys, target.where)
                    if warning := drain_warning(report, wanted.node):
                        raise HttpError(409, warning)
                said = await _do(name, wanted, Operator(backend, target, by, wall))
        except (NoSuchRun, NoSuchKey, SettingsError) as error:
            raise HttpError(404, str(error)) from None
        except (TimeoutError, OutcomeUnknown):
            raise HttpError(504, f"no answer within {ACT_S:g} s: look whether it was done") from None
        except (Unavailable, Rejected, RendezvousStateError) as error:
            raise HttpError(502, str(error)) from None
        return _json({"said": said})


async def _do(name: str, wanted: ActionBody, operator: Operator) -> str:
    why = wanted.why.strip()
    if name == "drain":
        ids = await operator.drain(wanted.node, why)
        return f"Asked {wanted.node} to go." if len(ids) == 1 else f"Asked {len(ids)} nodes named {wanted.node} to go."
    done = await (operator.close(why) if name == "close" else operator.reopen(why))
    words = ("is closed", "was closed already") if name == "close" else ("is open again", "was open")
    return f"Run {wanted.run!r} {words[0] if done.changed else words[1]}."


class _ContextResponse(Response):
    """Sends the response that a context manager yields, inside of it."""

    def __init__(self, context: AbstractAsyncContextManager[ASGIApp]) -> None:
        super().__init__()
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._context as app:
            await app(scope, receive, send)


# --- requests and responses -------------------------------------------------------------------------------------------


def _peer(request: Request) -> tuple[str, int]:
    return (request.client.host, request.client.port) if request.client is not None else ("", 0)


def _check_origin(request: Request) -> None:
    if not is_same_origin(request.headers):
        raise HttpError(403, "this was not asked by the page itself (its Origin is another, or missing)")


async def _read(request: Request, kind: type[Body]) -> Body:
    """A JSON body of bounded size, received in bounded time. HttpError."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, "send JSON (content-type application/json)")
    body = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BODY_BYTES:
                    raise HttpError(413, f"the body has more than {MOST_BODY_BYTES} bytes")
        return msgspec.json.decode(body, type=kind)
    except TimeoutError:
        raise HttpError(408, f"the body did not come within {BODY_S:g} s") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not what is expected here: {error}") from None


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _error_response(request: Request, error: HttpError) -> Response:
    body = msgspec.json.encode({"error": str(error)})
    return Response(body, error.status, error.headers, "application/json")


async def _blocked_response(request: Request, error: LoginBlocked) -> Response:
    body = msgspec.json.encode({"error": str(error)})
    return Response(body, 429, {"retry-after": str(int(error.for_s) + 1)}, "application/json")
