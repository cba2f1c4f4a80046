"""Middleware that checks every request against the access rules, and logs browsers in and out."""

from __future__ import annotations

from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from gpulse.cluster.access_control import (
    LOGIN_COOKIE,
    LOGIN_SECONDS,
    AccessPolicy,
    AccessRefusal,
    HttpRequest,
)
from gpulse.cluster.protocol.codec import answer_for_exception, read_body
from gpulse.errors import GpulseError, RefusedError
from gpulse.web.dashboard import Dashboard
from gpulse.web.responses import drain, error_response, json_response, prefers_html, read_request_body

_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
IS_TRUSTED = "gpulse.is_trusted"
"""Key of a request's scope: whether its sender may change something, and not only read."""
CLIENT_USER = "gpulse.client_user"
"""Key of a request's state: the user ID of the client's process, looked up once per connection."""
_MAX_REFUSED_BODY_BYTES = 1_000_000
"""Bytes of a refused request that are read before the answer."""


class AccessMiddleware:
    """Rejects requests that are not allowed, logs browsers in and out, and sets CORS headers for allowed origins."""

    def __init__(self, app: ASGIApp, access: AccessPolicy, dashboard: Dashboard) -> None:
        """Wrap an application.

        Args:
            app: The application.
            access: The rules.
            dashboard: Has the login form and its files.
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
        asked = describe_request(scope)
        if self._access.allows_origin(asked.origin):
            send = _with_cors_headers(send, asked.origin or "")
        if _is_preflight(scope) and self._access.allows_origin(asked.origin):
            await _preflight()(scope, receive, send)
            return
        if scope["path"] in {"/login", "/logout"}:
            answer = await self._entry(Request(scope, receive), asked)
            await answer(scope, receive, send)
            return
        is_public = asked.method in {"GET", "HEAD"} and scope["path"].startswith(self._dashboard.public)
        refusal = self._access.check_origin(asked) if is_public else self._access.check_http(asked)
        if refusal is None:
            scope[IS_TRUSTED] = self._access.may_change(asked)
            await self._app(scope, receive, send)
            return
        if asked.has_body:
            await drain(receive, max_bytes=_MAX_REFUSED_BODY_BYTES, seconds=2.0)
        answer = await self._refused(scope, refusal, asked)
        await answer(scope, receive, send)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._access.check_http(describe_request(scope))
        if refusal is None:
            await self._app(scope, receive, send)
            return
        await reject_websocket(WebSocket(scope, receive, send), refusal)

    async def _entry(self, request: Request, asked: HttpRequest) -> Response:
        """Log in or out."""
        is_login = request.url.path == "/login"
        if request.method in {"GET", "HEAD"} and is_login:
            return await self._dashboard.login()
        if request.method != "POST":
            return error_response(
                405, f"the method {request.method} is not allowed here", headers={"Allow": "POST"}
            )
        refusal = self._access.check_origin(asked)
        if refusal is not None:
            return error_response(*refusal)
        try:
            return await (self._login(request, asked) if is_login else _logout(asked))
        except GpulseError as error:
            status, answer = answer_for_exception(error)
            return await json_response(answer, status)

    async def _login(self, request: Request, asked: HttpRequest) -> Response:
        kind = (asked.content_type or "").partition(";")[0].strip().lower()
        is_form = kind == "application/x-www-form-urlencoded"
        if is_form and asked.origin is None:
            raise RefusedError(
                403, "a login form must come from this head's own page", hint="send the token as JSON"
            )
        if not is_form and kind != "application/json":
            raise RefusedError(
                415, "the body of a login request must be a form or JSON", hint='send {"token": "…"}'
            )
        given = _read_token(await read_request_body(request), is_form=is_form)
        if not self._access.is_token(given):
            if is_form:
                return await self._dashboard.login("Wrong token.", status=401)
            raise RefusedError(
                401, "wrong token", hint="print the token on the head's machine with: gpulse token --show"
            )
        answer = RedirectResponse("/", 303) if is_form else await json_response({"success": True})
        answer.set_cookie(
            LOGIN_COOKIE,
            self._access.make_login_cookie(),
            max_age=LOGIN_SECONDS,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    async def _refused(self, scope: Scope, refusal: AccessRefusal, asked: HttpRequest) -> Response:
        headers = {"WWW-Authenticate": 'Bearer realm="gpulse"'} if refusal.status == 401 else {}
        if asked.has_body:
            headers["Connection"] = "close"
        wants_page = scope["path"] == "/" and asked.method in {"GET", "HEAD"}
        if refusal.status == 401 and wants_page and prefers_html(Headers(scope=scope).get("accept")):
            answer = await self._dashboard.login(status=401)
            answer.headers["Vary"] = "Accept"
            return answer
        return error_response(*refusal, headers=headers)


async def reject_websocket(websocket: WebSocket, refusal: AccessRefusal) -> None:
    """Refuse a WebSocket before the handshake."""
    await websocket.send_denial_response(error_response(*refusal))


def describe_request(scope: Scope) -> HttpRequest:
    """Return what the rules check, from the connection and the headers."""
    headers = Headers(scope=scope)
    client = scope.get("client")
    length = headers.get("content-length", "0").strip()
    return HttpRequest(
        client_host=client[0] if client else None,
        host=_header_value(headers, "host"),
        origin=_header_value(headers, "origin"),
        authorization=_header_value(headers, "authorization"),
        cookie="; ".join(headers.getlist("cookie")) or None,
        method=scope.get("method", "GET"),
        content_type=_header_value(headers, "content-type"),
        has_body=length != "0" or "transfer-encoding" in headers,
        forwarded=any(name in headers for name in _PROXY_HEADERS),
        fetch_site=_header_value(headers, "sec-fetch-site"),
        fetch_mode=_header_value(headers, "sec-fetch-mode"),
        user=scope.get("state", {}).get(CLIENT_USER),
    )


def _header_value(headers: Headers, name: str) -> str | None:
    """Return a header's value; a repeated header gives a value that matches nothing."""
    values = headers.getlist(name)
    return ", ".join(values) if values else None


def _read_token(body: bytes, *, is_form: bool) -> str:
    if is_form:
        return parse_qs(body.decode("ascii", "replace")).get("token", [""])[0].strip()
    given = read_body(body).get("token")
    return given.strip() if isinstance(given, str) else ""


async def _logout(asked: HttpRequest) -> Response:
    is_form = (asked.content_type or "").startswith("application/x-www-form-urlencoded")
    answer = RedirectResponse("/", 303) if is_form else await json_response({"success": True})
    answer.delete_cookie(LOGIN_COOKIE, httponly=True, samesite="strict")
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


def _with_cors_headers(send: Send, origin: str) -> Send:
    """Add the headers that let pages of this origin read the answer."""

    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers.add_vary_header("Origin")
        await send(message)

    return wrapped
