"""The door: every request passes the rules of `cluster.security` before anything else sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.websockets import WebSocket

from gpulse.cluster.protocol.codec import failure, read_body
from gpulse.cluster.security import COOKIE, COOKIE_SECONDS, Access, HttpRequest, Refusal
from gpulse.errors import GpulseError, RefusedError
from gpulse.web.answer import drain, json_response, read, refused
from gpulse.web.dashboard import Dashboard
from gpulse.web.negotiate import prefers_html

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
CLIENT_USER = "gpulse.client_user"
"""Key of a request's state: the user id of the process at the other end, looked up once for each connection."""
_DRAIN_STRANGER = 1_000_000
"""Bytes of a refused request that are read before it is answered."""


class Door:
    """Lets in who may come in, logs browsers in and out, and tells allowed origins that they may read."""

    def __init__(self, app: ASGIApp, access: Access, dashboard: Dashboard) -> None:
        """Stand before an application.

        Args:
            app: What is behind the door.
            access: The rules.
            dashboard: Has the form to log in, and the files that it is made of.
        """
        self._app = app
        self._access = access
        self._dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = described(scope)
        if self._access.may_share(asked.origin):
            send = _sharing(send, asked.origin or "")
        if _is_preflight(scope) and self._access.may_share(asked.origin):
            await _preflight()(scope, receive, send)
            return
        if scope["path"] in {"/login", "/logout"}:
            answer = await self._entry(Request(scope, receive), asked)
            await answer(scope, receive, send)
            return
        is_public = asked.method in {"GET", "HEAD"} and scope["path"].startswith(self._dashboard.public)
        refusal = self._access.page(asked) if is_public else self._access.http(asked)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        if asked.has_body:
            await drain(receive, most_bytes=_DRAIN_STRANGER, seconds=2.0)
        answer = await self._refused(scope, refusal, asked)
        await answer(scope, receive, send)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._access.http(described(scope))
        if refusal is None:
            await self._app(scope, receive, send)
            return
        await deny(WebSocket(scope, receive, send), refusal)

    async def _entry(self, request: Request, asked: HttpRequest) -> Response:
        """Logging in and out."""
        is_login = request.url.path == "/login"
        if request.method in {"GET", "HEAD"} and is_login:
            return await self._dashboard.login()
        if request.method != "POST":
            return refused(405, f"{request.method} is not possible here", headers={"Allow": "POST"})
        refusal = self._access.page(asked)
        if refusal is not None:
            return refused(*refusal)
        try:
            return await (self._login(request, asked) if is_login else _logout(asked))
        except GpulseError as error:
            status, answer = failure(error)
            return await json_response(answer, status)

    async def _login(self, request: Request, asked: HttpRequest) -> Response:
        kind = (asked.content_type or "").partition(";")[0].strip().lower()
        is_form = kind == "application/x-www-form-urlencoded"
        if is_form and asked.origin is None:
            raise RefusedError(403, "only the form of this head logs in", hint="send the token as JSON")
        if not is_form and kind != "application/json":
            raise RefusedError(415, "a login is a form or JSON", hint='{"token": "…"}')
        given = _token(await read(request), is_form=is_form)
        if not self._access.is_token(given):
            if is_form:
                return await self._dashboard.login("That is not the token of this head.", status=401)
            raise RefusedError(401, "that is not the token of this head")
        answer = RedirectResponse("/", 303) if is_form else await json_response({"success": True})
        answer.set_cookie(
            COOKIE,
            self._access.login(),
            max_age=COOKIE_SECONDS,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    async def _refused(self, scope: Scope, refusal: Refusal, asked: HttpRequest) -> Response:
        headers = {"WWW-Authenticate": 'Bearer realm="gpulse"'} if refusal.status == 401 else {}
        if asked.has_body:
            headers["Connection"] = "close"
        wants_page = scope["path"] == "/" and asked.method in {"GET", "HEAD"}
        if refusal.status == 401 and wants_page and prefers_html(Headers(scope=scope).get("accept")):
            answer = await self._dashboard.login(status=401)
            answer.headers["Vary"] = "Accept"
            return answer
        return refused(*refusal, headers=headers)


async def deny(websocket: WebSocket, refusal: Refusal) -> None:
    """Refuse a WebSocket before it is one."""
    await websocket.send_denial_response(refused(*refusal))


def described(scope: Scope) -> HttpRequest:
    """What the rules look at, from the connection and the headers."""
    headers = Headers(scope=scope)
    client = scope.get("client")
    length = headers.get("content-length", "0").strip()
    return HttpRequest(
        client_host=client[0] if client else None,
        host=_only(headers, "host"),
        origin=_only(headers, "origin"),
        authorization=_only(headers, "authorization"),
        cookie="; ".join(headers.getlist("cookie")) or None,
        method=scope.get("method", "GET"),
        content_type=_only(headers, "content-type"),
        has_body=length != "0" or "transfer-encoding" in headers,
        forwarded=any(name in headers for name in _PROXY_HEADERS),
        fetch_site=_only(headers, "sec-fetch-site"),
        fetch_mode=_only(headers, "sec-fetch-mode"),
        user=scope.get("state", {}).get(CLIENT_USER),
    )


def _only(headers: Headers, name: str) -> str | None:
    """A header's value; one that came twice becomes something that nothing equals."""
    values = headers.getlist(name)
    return ", ".join(values) if values else None


def _token(body: bytes, *, is_form: bool) -> str:
    if is_form:
        return parse_qs(body.decode("ascii", "replace")).get("token", [""])[0].strip()
    given = read_body(body).get("token")
    return given.strip() if isinstance(given, str) else ""


async def _logout(asked: HttpRequest) -> Response:
    is_form = (asked.content_type or "").startswith("application/x-www-form-urlencoded")
    answer = RedirectResponse("/", 303) if is_form else await json_response({"success": True})
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


def _is_preflight(scope: Scope) -> bool:
    return scope["method"] == "OPTIONS" and "access-control-request-method" in Headers(scope=scope)


def _preflight() -> Response:
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Methods": "GET, POST, HEAD",
            "Access-Control-Allow-Headers": "authorization, content-type",
            "Access-Control-Max-Age": "600",
        },
    )


def _sharing(send: Send, origin: str) -> Send:
    """Tell the browser that pages of this origin may read the answer."""

    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers.add_vary_header("Origin")
        await send(message)

    return wrapped
