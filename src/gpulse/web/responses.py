"""JSON responses that do not block the event loop for long, uniform error responses, and request bodies."""

from __future__ import annotations

import asyncio
import gzip
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, AnyStr

from msgspec import UNSET, Struct
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpulse.cluster.protocol.codec import MAX_BODY_BYTES, encode, error_answer
from gpulse.cluster.protocol.load_limits import BYTE_SECONDS, BusyError, LoopShare, ReportLimit, SharedResults
from gpulse.errors import RefusedError
from gpulse.export.prometheus.text_format import accepts_gzip

MAX_HOLD_SECONDS = 0.02
"""How long one response may block the event loop at a time."""
MIN_GZIP_BYTES = 32_768
"""Smaller answers are not compressed."""
_GZIP_LEVEL = 1
_MIN_SPLIT_ENTRIES = 32


_PIECE_BYTES = 1 << 18


class SlicedResponse(Response):
    """A response that sends a large body in pieces, each when the client has read the one before.

    Python's transports copy what a client has not read: a hundred slow clients would have a hundred copies.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        body = memoryview(self.body)
        if len(body) <= _PIECE_BYTES or scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(body), _PIECE_BYTES):
            piece = bytes(body[start : start + _PIECE_BYTES])
            is_last = start + _PIECE_BYTES >= len(body)
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
            await asyncio.sleep(0)


class JsonResponse(SlicedResponse):
    """A response whose body is already JSON."""

    media_type = "application/json"


class EncodedAnswer:
    """An answer as JSON that many clients get; compressed once, for those that accept it."""

    def __init__(self, body: bytes, status: int = 200) -> None:
        self._body = body
        self._status = status
        self._etag = f'"{secrets.token_hex(8)}"'
        self._packed: asyncio.Future[bytes] | None = None

    async def response(self, headers: Headers) -> Response:
        """Return the response to a request with these headers; without a body if the client has it already."""
        if self._status == 200 and self._etag in headers.get("if-none-match", ""):
            return Response(status_code=304, headers={"ETag": self._etag})
        sent = {"ETag": self._etag} if self._status == 200 else {}
        if len(self._body) < MIN_GZIP_BYTES:
            return JsonResponse(self._body, self._status, sent)
        sent["Vary"] = "Accept-Encoding"
        if not accepts_gzip(headers.get("accept-encoding")):
            return JsonResponse(self._body, self._status, sent)
        if self._packed is None:
            self._packed = asyncio.ensure_future(asyncio.to_thread(gzip.compress, self._body, _GZIP_LEVEL))
        sent["Content-Encoding"] = "gzip"
        return JsonResponse(await asyncio.shield(self._packed), self._status, sent)


async def json_response(
    answer: Any,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    *,
    accept_encoding: str | None = None,
) -> JsonResponse:
    """Return an answer as JSON; a large one is compressed for a client that accepts gzip."""
    body = await encode_cooperatively(answer)
    if len(body) < MIN_GZIP_BYTES:
        return JsonResponse(body, status, headers)
    sent = {**(headers or {}), "Vary": "Accept-Encoding"}
    if accepts_gzip(accept_encoding):
        body = await asyncio.to_thread(gzip.compress, body, _GZIP_LEVEL)  # releases the interpreter's lock
        sent["Content-Encoding"] = "gzip"
    return JsonResponse(body, status, sent)


def error_response(
    status: int, message: str, hint: str | None = None, headers: Mapping[str, str] | None = None
) -> JsonResponse:
    """Return an error as JSON."""
    return JsonResponse(encode(error_answer(message, hint)), status, headers)


class ClientLimits:
    """What all clients of one server may use of the head together."""

    def __init__(self) -> None:
        self.share = LoopShare()
        """Loop time of requests."""
        self.live_share = LoopShare()
        """Loop time of live streams."""
        self.results = SharedResults(self.share)
        self.reports = ReportLimit()

    def charge_response(self, response: Response) -> Response:
        """Count the loop time of sending a response, and return it."""
        self.share.charge(len(response.body) * BYTE_SECONDS)
        return response


def busy_response(error: BusyError) -> JsonResponse:
    """Return the response to a request for which the head has no time."""
    return error_response(error.status, error.message, error.hint, {"Retry-After": str(error.retry_seconds)})


async def encode_cooperatively(answer: Any) -> bytes:
    """Return an answer as JSON, encoded a piece at a time."""
    return b"".join([piece async for piece in iterate_cooperatively(_pieces(answer))])


async def iterate_cooperatively(
    pieces: Iterator[AnyStr], hold_seconds: float = MAX_HOLD_SECONDS
) -> AsyncIterator[AnyStr]:
    """Yield the pieces, and let other tasks run whenever they took too long."""
    started = time.perf_counter()
    for piece in pieces:
        if piece:
            yield piece
        if time.perf_counter() - started > hold_seconds:
            await asyncio.sleep(0)
            started = time.perf_counter()


async def read_request_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        RefusedError: It is too large, or incomplete.
    """
    stated = request.headers.get("content-length", "0")
    if stated.isdecimal() and int(stated) > MAX_BODY_BYTES:
        raise RefusedError(
            413, f"the request is larger than {MAX_BODY_BYTES:,} bytes", hint="send a smaller request"
        )
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise RefusedError(
                    413, f"the request is larger than {MAX_BODY_BYTES:,} bytes", hint="send a smaller request"
                )
    except ClientDisconnect:
        raise RefusedError(400, "the request is incomplete: the client closed the connection") from None
    return bytes(body)


async def drain(receive: Receive, *, max_bytes: int, seconds: float) -> None:
    """Read and discard the rest of a request: a client that is still sending would not see the answer."""
    left = max_bytes
    try:
        async with asyncio.timeout(seconds):
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
                left -= len(message.get("body", b""))
    except TimeoutError:
        return


def _pieces(answer: Any) -> Iterator[bytes]:
    """Yield the JSON of an answer in pieces, one per entry of long lists and large objects, two levels deep."""
    if isinstance(answer, Struct):
        names = zip(answer.__struct_encode_fields__, answer.__struct_fields__, strict=True)
        found = [(name, getattr(answer, attribute)) for name, attribute in names]
        yield from _members((name, value) for name, value in found if value is not UNSET)
    elif isinstance(answer, Mapping):
        yield from _members(answer.items())
    else:
        yield encode(answer)


def _members(members: Iterable[tuple[str, Any]]) -> Iterator[bytes]:
    yield b"{"
    for count, (name, value) in enumerate(members):
        yield b"%b%b:" % (b"," if count else b"", encode(name))
        yield from _entries(value)
    yield b"}"


def _entries(value: Any) -> Iterator[bytes]:
    if isinstance(value, (list, tuple)) and len(value) > 1:
        yield b"["
        step = 1 if isinstance(value[0], (Struct, dict, list)) else 4096
        for start in range(0, len(value), step):
            yield b"%b%b" % (b"," if start else b"", encode(value[start : start + step])[1:-1])
        yield b"]"
    elif isinstance(value, Mapping) and len(value) > _MIN_SPLIT_ENTRIES:
        yield b"{"
        for count, (name, entry) in enumerate(value.items()):
            yield b"%b%b:%b" % (b"," if count else b"", encode(name), encode(entry))
        yield b"}"
    else:
        yield encode(value)


def prefers_html(accept: str | None) -> bool:
    """Return whether an Accept header prefers HTML to JSON; without a preference it is JSON."""
    if not accept:
        return False
    ranges = [_parse_media_range(part) for part in accept.split(",")]
    return _quality(ranges, "text", "html") > _quality(ranges, "application", "json")


def _parse_media_range(part: str) -> tuple[str, float]:
    media, *parameters = (piece.strip().lower() for piece in part.split(";"))
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                quality = float(value)
            except ValueError:
                return media, 0.0
            return media, quality if 0 <= quality <= 1 else 0.0
    return media, 1.0


def _quality(ranges: list[tuple[str, float]], kind: str, subtype: str) -> float:
    """Return the quality of a media type, by the most specific entry that covers it."""
    for wanted in (f"{kind}/{subtype}", f"{kind}/*", "*/*"):
        found = [quality for media, quality in ranges if media == wanted]
        if found:
            return max(found)
    return 0.0
