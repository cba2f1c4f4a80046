"""The HTTP API of a head, as an ASGI application: routes from the table of operations, and a few of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute

from gpulse._version import __version__
from gpulse.cluster.protocol.codec import failure, read_body, refusal
from gpulse.cluster.protocol.interface import Download, HeadInterface
from gpulse.cluster.protocol.operations import OPERATIONS, Operation, call, fetch
from gpulse.cluster.protocol.values import MAX_REPEATED
from gpulse.cluster.security import Access
from gpulse.errors import GpulseError, UsageError
from gpulse.web import metrics, openapi
from gpulse.web.access import Door
from gpulse.web.answer import drain, json_response, read, refused
from gpulse.web.dashboard import Dashboard
from gpulse.web.live import MOST_CONNECTIONS, Live
from gpulse.web.negotiate import prefers_html
from gpulse.web.shell import Shell

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

Answer = Callable[[Request], Awaitable[Response]]
_DRAIN_KNOWN = 256_000_000


def make_app(
    head: HeadInterface,
    access: Access,
    *,
    clock: Callable[[], float] = time.time,
    dashboard: Dashboard | None = None,
    most_live: int = MOST_CONNECTIONS,
    dcgm_names: bool = False,
) -> ASGIApp:
    """The application.

    Args:
        head: What is asked and told.
        access: Who may.
        clock: The head's clock, in epoch seconds.
        dashboard: What `GET /` shows to who prefers HTML, and its files; that of this package when left out.
        most_live: How many live streams may be open at once.
        dcgm_names: Serve `/metrics` under DCGM's names, not under ours.
    """
    shown = dashboard or Dashboard()
    table: dict[str, dict[str, Answer]] = {}
    for operation in OPERATIONS:
        for path in operation.paths:
            table.setdefault(path, {})[operation.method] = _answering(head, operation, clock)
    table["/"]["GET"] = _negotiated(table["/"]["GET"], shown.page)
    table.update(metrics.routes(head, clock, dcgm_names=dcgm_names))
    table["/openapi.json"] = table["/api/v1/openapi.json"] = {"GET": _described}
    app = Starlette(
        routes=[
            *(Route(path, _Methods(answers)) for path, answers in _fixed_first(table)),
            WebSocketRoute("/api/v1/live", Live(head, clock, most_connections=most_live).serve),
            *shown.routes(),
        ],
        exception_handlers={HTTPException: _unknown},
    )
    app.router.redirect_slashes = False
    return Shell(Door(app, access, shown))


class _Methods:
    """One path: which method is answered how."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self._answers = answers
        self._allowed = ", ".join([*answers, *(["HEAD"] if "GET" in answers else []), "OPTIONS"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        method = "GET" if request.method == "HEAD" else request.method
        if method == "OPTIONS":
            answer: Response = Response(status_code=204, headers={"Allow": self._allowed})
        elif method not in self._answers:
            answer = refused(
                405,
                f"{method[:20]} is not possible here",
                f"there is: {self._allowed}",
                {"Allow": self._allowed},
            )
        else:
            answer = await self._answers[method](request)
        if answer.status_code == 413:
            await drain(receive, most_bytes=_DRAIN_KNOWN, seconds=10.0)
        await answer(scope, receive, send)


async def _fields(request: Request, operation: Operation[Any]) -> dict[str, Any]:
    """Return the fields of a request, wherever they are."""
    in_path: dict[str, Any] = dict(request.path_params)
    if operation.method == "GET":
        others = _from_query(request, operation)
    else:
        others = read_body(await read(request))
        if request.query_params:
            raise UsageError(
                "fields of a POST belong into its body, not into the address", hint="send them as JSON"
            )
    for name in others:
        if name in in_path:
            raise UsageError(f"{name} is in the path already", hint="leave it out elsewhere")
    return {**in_path, **others}


def _from_query(request: Request, operation: Operation[Any]) -> dict[str, Any]:
    lists = {name for name, field in operation.fields.items() if field.is_list}
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in lists:
            given.setdefault(name, []).append(value)
            if len(given[name]) > MAX_REPEATED:
                raise UsageError(f"{name} is given more than {MAX_REPEATED} times", hint="use commas")
        elif name in given:
            raise UsageError(f"{name[:60]!a} is given twice", hint="give it once")
        else:
            given[name] = value
    return given


def _answering(head: HeadInterface, operation: Operation[Any], clock: Callable[[], float]) -> Answer:
    async def answer(request: Request) -> Response:
        try:
            fields = await _fields(request, operation)
            if operation.is_file:
                return await _file(request, await fetch(head, operation.name, fields, now=clock()))
        except GpulseError as error:
            status, problem = failure(error)
            return await json_response(problem, status)
        try:
            status, result = await call(head, operation.name, fields, now=clock())
        except asyncio.CancelledError:  # the server ends, and has given open requests their time
            return await json_response(refusal("the head is stopping", "ask again when it is back"), 503)
        return await json_response(result, status)

    return answer


async def _file(request: Request, file: Download) -> Response:
    safe = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "_" for letter in file.name
    )
    headers = {"Content-Disposition": f'attachment; filename="{safe}"', "Content-Type": file.media_type}
    if request.method == "HEAD":
        await _close(file.pieces)
        return Response(headers=headers)
    return StreamingResponse(file.pieces, headers=headers)


async def _close(pieces: AsyncIterator[bytes]) -> None:
    close = getattr(pieces, "aclose", None)
    if close is not None:
        await close()


async def _described(_request: Request) -> Response:
    return await json_response(openapi.document(__version__))


def _negotiated(documents: Answer, page: Answer) -> Answer:
    async def answer(request: Request) -> Response:
        chosen = page if prefers_html(request.headers.get("accept")) else documents
        response = await chosen(request)
        response.headers["Vary"] = "Accept"
        return response

    return answer


async def _unknown(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return refused(404, "there is nothing at this path", "GET /openapi.json lists what there is")
    return refused(status, str(getattr(error, "detail", error)))


def _fixed_first(table: Mapping[str, dict[str, Answer]]) -> Collection[tuple[str, dict[str, Answer]]]:
    """Paths without a field before those with one, which would match them too."""
    return sorted(table.items(), key=lambda item: "{" in item[0])
