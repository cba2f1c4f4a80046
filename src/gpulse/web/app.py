"""The ASGI application of a head: routes from the table of operations, the dashboard, metrics and the live stream."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulse._version import __version__
from gpulse.cluster.access_control import AccessPolicy
from gpulse.cluster.protocol.answers import Status
from gpulse.cluster.protocol.codec import answer_for_exception, error_answer, read_body
from gpulse.cluster.protocol.head_interface import Download, HeadInterface, LiveNode
from gpulse.cluster.protocol.load_limits import BusyError, LoopShare
from gpulse.cluster.protocol.operations import OPERATIONS, Operation, call_operation, open_download
from gpulse.cluster.protocol.requests import MAX_REPEATED_FIELDS
from gpulse.errors import GpulseError, UsageError
from gpulse.export.prometheus import self_metrics
from gpulse.export.prometheus.metrics_page import format_metrics
from gpulse.export.prometheus.node_state import HolderLimit, NodeState
from gpulse.export.prometheus.text_format import CONTENT_TYPE, MetricFamily, accepts_gzip
from gpulse.model.safe_text import quoted
from gpulse.web import openapi
from gpulse.web.access import IS_TRUSTED, AccessMiddleware
from gpulse.web.dashboard import Dashboard
from gpulse.web.live_stream import MAX_CONNECTIONS, LiveStreams
from gpulse.web.responses import (
    ClientLimits,
    EncodedAnswer,
    SlicedResponse,
    busy_response,
    drain,
    encode_cooperatively,
    error_response,
    iterate_cooperatively,
    json_response,
    prefers_html,
    read_request_body,
)

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    # A stricter policy would make browsers send `Origin: null` with our own form.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_RESPONSE_STARTS = frozenset({"http.response.start", "websocket.http.response.start"})

logger = logging.getLogger(__name__)
_MAX_SILENCE_SECONDS = 86_400.0
"""A node that has been silent for longer is left out."""
_MAX_HOLD_SECONDS = 0.005
"""How long a scrape may block the event loop at a time."""
_GZIP_WINDOW_BITS = 31
"""The value with which zlib writes the gzip format."""
_BLOCK_CHARS = 1 << 18
_GUNZIP_BYTE_SECONDS = 4e-9
"""Estimated loop time of decompressing and sending one byte."""
_GZIP_LEVEL = 1
"""Names and labels repeat so much that a higher level hardly helps."""


class OuterMiddleware:
    """Outermost middleware: adds security headers, and turns exceptions into responses with status 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        has_started = False

        async def wrapped(message: Message) -> None:
            nonlocal has_started
            if message["type"] in _RESPONSE_STARTS:
                has_started = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._app(scope, receive, wrapped)
        except Exception:
            if has_started or scope["type"] != "http":
                raise  # the answer is incomplete: the server closes the connection to show that
            logger.exception("a request failed with an unexpected error")
            answer = error_response(
                500,
                "internal error in the head; see its log for details",
                "try again; if the error occurs again, report it with the head's log",
            )
            await answer(scope, receive, wrapped)


Endpoint = Callable[[Request], Awaitable[Response]]
_MAX_DRAINED_BYTES = 256_000_000
_MAX_DECODE_SECONDS = 0.005
"""How long decoding frames may block the event loop at a time."""


def make_app(
    head: HeadInterface,
    access: AccessPolicy,
    *,
    clock: Callable[[], float] = time.time,
    dashboard: Dashboard | None = None,
    max_live_streams: int = MAX_CONNECTIONS,
    dcgm_names: bool = False,
) -> ASGIApp:
    """Return the application.

    Args:
        head: The head to serve.
        access: The access rules.
        clock: The head's clock, in epoch seconds.
        dashboard: Page of `GET /` for browsers, and its files; the one of this package by default.
        max_live_streams: Number of live streams that may be open at once.
        dcgm_names: Serve `/metrics` under DCGM's names instead of ours.
    """
    shown = dashboard or Dashboard()
    limits = ClientLimits()
    table: dict[str, dict[str, Endpoint]] = {}
    for operation in OPERATIONS:
        for path in operation.paths:
            table.setdefault(path, {})[operation.method] = _make_endpoint(head, operation, clock, limits)
    table["/"]["GET"] = _negotiate_html(table["/"]["GET"], shown.page)
    table.update(_metrics_routes(head, clock, limits, dcgm_names=dcgm_names))
    table["/openapi.json"] = table["/api/v1/openapi.json"] = {"GET": _serve_openapi}
    app = Starlette(
        routes=[
            *(Route(path, _MethodRouter(answers)) for path, answers in _sort_fixed_paths_first(table)),
            WebSocketRoute(
                "/api/v1/live", LiveStreams(head, clock, limits, max_connections=max_live_streams).serve
            ),
            *shown.routes(),
        ],
        exception_handlers={HTTPException: _handle_http_exception},
    )
    app.router.redirect_slashes = False
    return OuterMiddleware(AccessMiddleware(app, access, shown))


class _MethodRouter:
    """Calls the endpoint of a path's method."""

    def __init__(self, answers: Mapping[str, Endpoint]) -> None:
        self._answers = answers
        self._allowed = ", ".join([*answers, *(["HEAD"] if "GET" in answers else []), "OPTIONS"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        method = "GET" if request.method == "HEAD" else request.method
        if method == "OPTIONS":
            answer: Response = Response(status_code=204, headers={"Allow": self._allowed})
        elif method not in self._answers:
            answer = error_response(
                405,
                f"the method {method[:20]} is not allowed here",
                f"use one of: {self._allowed}",
                {"Allow": self._allowed},
            )
        else:
            answer = await self._answers[method](request)
        if answer.status_code == 413:
            await drain(receive, max_bytes=_MAX_DRAINED_BYTES, seconds=10.0)
        await answer(scope, receive, send)


async def _read_fields(request: Request, operation: Operation[Any]) -> dict[str, Any]:
    """Return the fields of a request from its path and its query or body."""
    in_path: dict[str, Any] = dict(request.path_params)
    if operation.method == "GET":
        others = _from_query(request, operation)
    else:
        others = read_body(await read_request_body(request))
        if request.query_params:
            raise UsageError(
                "the fields of a POST request belong in its body, not in the URL", hint="send them as JSON"
            )
    for name in others:
        if name in in_path:
            raise UsageError(
                f"{name} is already given in the URL path",
                hint="remove it from the query string and the body",
            )
    return {**in_path, **others}


def _from_query(request: Request, operation: Operation[Any]) -> dict[str, Any]:
    lists = {name for name, field in operation.fields.items() if field.is_list}
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in lists:
            given.setdefault(name, []).append(value)
            if len(given[name]) > MAX_REPEATED_FIELDS:
                raise UsageError(
                    f"{name} is repeated more than {MAX_REPEATED_FIELDS} times",
                    hint="separate the values with commas",
                )
        elif name in given:
            raise UsageError(f"{quoted(name)} is given twice", hint="use it only once")
        else:
            given[name] = value
    return given


def _make_endpoint(
    head: HeadInterface, operation: Operation[Any], clock: Callable[[], float], limits: ClientLimits
) -> Endpoint:
    is_shared = operation.is_shared

    async def compute(fields: Mapping[str, Any], *, is_trusted: bool) -> EncodedAnswer:
        if is_shared:
            await _decode_frames(head)
        status, result = await call_operation(
            head, operation.name, fields, now=clock(), is_trusted=is_trusted
        )
        return EncodedAnswer(await encode_cooperatively(result), status)

    async def find_answer(fields: Mapping[str, Any], *, is_trusted: bool) -> EncodedAnswer:
        if is_shared and not fields:
            return await limits.results.get(
                (operation.name, is_trusted), lambda: compute(fields, is_trusted=is_trusted)
            )
        if operation.writes:
            try:
                return await compute(fields, is_trusted=is_trusted)
            finally:
                limits.results.clear()
        async with limits.reports.slot():
            return await compute(fields, is_trusted=is_trusted)

    async def answer(request: Request) -> Response:
        is_trusted = request.scope.get(IS_TRUSTED, False)
        try:
            if not operation.writes:
                await limits.share.admit()
            fields = await _read_fields(request, operation)
            if operation.is_file:
                async with limits.reports.slot():
                    file = await open_download(
                        head, operation.name, fields, now=clock(), is_trusted=is_trusted
                    )
                return await _file_response(request, file)
            found = await find_answer(fields, is_trusted=is_trusted)
            return limits.charge_response(await found.response(request.headers))
        except BusyError as error:
            return busy_response(error)
        except GpulseError as error:
            status, problem = answer_for_exception(error)
            return await json_response(problem, status)
        except asyncio.CancelledError:  # the server is stopping, and the time for open requests is over
            return await json_response(
                error_answer("the head is stopping", "try again when the head is running again"), 503
            )

    return answer


async def _decode_frames(head: HeadInterface) -> None:
    """Decode the newest frame of every node, with pauses; the operations then use what is decoded."""
    started = time.perf_counter()
    for _ in head.iter_live_nodes():
        if time.perf_counter() - started > _MAX_DECODE_SECONDS:
            await asyncio.sleep(0)
            started = time.perf_counter()


async def _file_response(request: Request, file: Download) -> Response:
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


async def _serve_openapi(_request: Request) -> Response:
    return await json_response(openapi.document(__version__))


def _negotiate_html(documents: Endpoint, page: Endpoint) -> Endpoint:
    async def answer(request: Request) -> Response:
        chosen = page if prefers_html(request.headers.get("accept")) else documents
        response = await chosen(request)
        response.headers["Vary"] = "Accept"
        return response

    return answer


async def _handle_http_exception(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return error_response(404, "there is nothing at this path", "see GET /openapi.json for all paths")
    return error_response(status, str(getattr(error, "detail", error)))


def _sort_fixed_paths_first(
    table: Mapping[str, dict[str, Endpoint]],
) -> Collection[tuple[str, dict[str, Endpoint]]]:
    """Sort paths without a field before those with one, which would match them too."""
    return sorted(table.items(), key=lambda item: "{" in item[0])


def _metrics_routes(
    head: HeadInterface, clock: Callable[[], float], limits: ClientLimits, *, dcgm_names: bool = False
) -> dict[str, dict[str, Endpoint]]:
    """Return the endpoints by path and method.

    Args:
        head: The head.
        clock: The head's clock, in epoch seconds.
        limits: What clients may use of the head.
        dcgm_names: Serve readings under DCGM's names instead of ours.
    """
    return {
        "/metrics": {"GET": _metrics(head, clock, limits, dcgm_names=dcgm_names)},
        "/-/healthy": {"GET": _healthy},
        "/-/ready": {"GET": _ready(head)},
    }


def _metrics(
    head: HeadInterface, clock: Callable[[], float], limits: ClientLimits, *, dcgm_names: bool
) -> Endpoint:
    started, holder_limit = clock(), HolderLimit()

    async def compute() -> bytes:
        nodes = await _collect_nodes(head, clock())
        status = head.status()
        pieces = format_metrics(
            nodes,
            now=clock(),
            interval_seconds=status.freq / 1000,
            version=__version__,
            dcgm_names=dcgm_names,
            more=_head_families(status, started),
            holder_limit=holder_limit,
        )
        packed = _gzip_pieces(iterate_cooperatively(pieces, _MAX_HOLD_SECONDS))
        return b"".join([piece async for piece in packed])

    async def answer(request: Request) -> Response:
        headers = {"Content-Type": CONTENT_TYPE, "Vary": "Accept-Encoding"}
        if request.method == "HEAD":
            return Response(headers=headers)
        try:
            await limits.share.admit()
        except BusyError as error:
            return busy_response(error)
        page = await limits.results.get("metrics", compute)
        if accepts_gzip(request.headers.get("accept-encoding")):
            headers["Content-Encoding"] = "gzip"
            return limits.charge_response(SlicedResponse(page, headers=headers))
        return StreamingResponse(_gunzip_pieces(page, limits.share), headers=headers)

    return answer


def _head_families(status: Status, started: float) -> Iterable[MetricFamily]:
    yield from self_metrics.process_families(started)
    slim = msgspec.structs.replace(status, gpu_info={}, findings=())  # nothing counts these
    yield from self_metrics.head_families(msgspec.to_builtins(slim))


async def _collect_nodes(head: HeadInterface, now: float) -> list[NodeState]:
    """Return the nodes to serve, and let other tasks run now and then: decoding frames takes time."""
    found: list[NodeState] = []
    started = time.perf_counter()
    for node in head.iter_live_nodes():
        if _is_served(node, now):
            found.append(_node_state(node))
        if time.perf_counter() - started > _MAX_HOLD_SECONDS:
            await asyncio.sleep(0)
            started = time.perf_counter()
    return found


def _is_served(node: LiveNode, now: float) -> bool:
    """Return whether to serve a node; without those that left, the page does not grow forever."""
    if node.at_other_head:  # served by its own head, so that a scrape of all heads has each node once
        return False
    return node.connected or not (node.was_stopped or now - node.seen > _MAX_SILENCE_SECONDS)


def _node_state(node: LiveNode) -> NodeState:
    return NodeState(
        node.name,
        node.frame,
        findings=node.findings,
        xids=node.xids,
        host=node.host,
        machine=node.machine,
        version=node.version,
        interval_seconds=node.interval_seconds,
    )


async def _gzip_pieces(pieces: AsyncIterator[str]) -> AsyncIterator[bytes]:
    """Compress the pieces with gzip, one block in a thread while the next one is produced."""
    loop = asyncio.get_running_loop()
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW_BITS)
    packing: asyncio.Future[bytes] | None = None
    block: list[str] = []
    size = 0
    async for piece in pieces:
        block.append(piece)
        size += len(piece)
        if size >= _BLOCK_CHARS:
            if packing is not None and (done := await packing):
                yield done
            packing = loop.run_in_executor(None, packer.compress, "".join(block).encode())
            block, size = [], 0
    if packing is not None:
        yield await packing
    yield packer.compress("".join(block).encode()) + packer.flush()


async def _gunzip_pieces(page: bytes, share: LoopShare) -> AsyncIterator[bytes]:
    """Decompress a page for a client without gzip; only the compressed one is kept, a tenth of the size."""
    unpacker = zlib.decompressobj(_GZIP_WINDOW_BITS)
    left = page
    while left:
        piece = unpacker.decompress(left, _BLOCK_CHARS)
        left = unpacker.unconsumed_tail
        share.charge(len(piece) * _GUNZIP_BYTE_SECONDS)
        yield piece
        await asyncio.sleep(0)
    yield unpacker.flush()


async def _healthy(_request: Request) -> Response:
    return await json_response({"status": "ok", "version": __version__})


def _ready(head: HeadInterface) -> Endpoint:
    async def answer(_request: Request) -> Response:
        storage = (
            head.status().storage
        )  # not with the shared answers: a slow one must not make the head unready
        if storage.state == "ok":
            return await json_response({"status": "ok"})
        return error_response(
            503, f"the head cannot store data: {storage.error}", "free some space on the head's disk"
        )

    return answer
