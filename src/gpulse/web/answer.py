"""Answers as JSON without blocking the event loop for long, and errors that look the same everywhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, AnyStr

from msgspec import UNSET, Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gpulse.cluster.protocol.codec import MAX_BODY_BYTES, encode, refusal
from gpulse.errors import RefusedError

if TYPE_CHECKING:
    from starlette.types import Receive

HOLD_SECONDS = 0.02
"""How long one answer may keep everybody else waiting."""
_MANY = 32


class JsonResponse(Response):
    """An answer that is encoded as JSON already."""

    media_type = "application/json"


async def json_response(
    answer: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> JsonResponse:
    """Return an answer as JSON."""
    return JsonResponse(await encoded(answer), status, headers)


def refused(
    status: int, message: str, hint: str | None = None, headers: Mapping[str, str] | None = None
) -> JsonResponse:
    """Return an error as JSON."""
    return JsonResponse(encode(refusal(message, hint)), status, headers)


async def encoded(answer: Any) -> bytes:
    """Return an answer as JSON, encoded a piece at a time."""
    return b"".join([piece async for piece in without_holding(_pieces(answer))])


async def without_holding(
    pieces: Iterator[AnyStr], hold_seconds: float = HOLD_SECONDS
) -> AsyncIterator[AnyStr]:
    """The pieces, with a turn for everybody else whenever they took too long."""
    started = time.perf_counter()
    for piece in pieces:
        if piece:
            yield piece
        if time.perf_counter() - started > hold_seconds:
            await asyncio.sleep(0)
            started = time.perf_counter()


async def read(request: Request) -> bytes:
    """The body of a request.

    Raises:
        RefusedError: It is too large, or not all of it came.
    """
    stated = request.headers.get("content-length", "0")
    if stated.isdecimal() and int(stated) > MAX_BODY_BYTES:
        raise RefusedError(
            413, f"the request is larger than {MAX_BODY_BYTES:,} bytes", hint="ask for less at once"
        )
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise RefusedError(
                    413, f"the request is larger than {MAX_BODY_BYTES:,} bytes", hint="ask for less at once"
                )
    except ClientDisconnect:
        raise RefusedError(400, "the request ended in the middle") from None
    return bytes(body)


async def drain(receive: Receive, *, most_bytes: int, seconds: float) -> None:
    """Read what is left of a request and forget it: who is still sending would not see the answer."""
    left = most_bytes
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
    """The JSON of an answer, cut where a long list or a large object has its entries, two levels deep."""
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
    elif isinstance(value, Mapping) and len(value) > _MANY:
        yield b"{"
        for count, (name, entry) in enumerate(value.items()):
            yield b"%b%b:%b" % (b"," if count else b"", encode(name), encode(entry))
        yield b"}"
    else:
        yield encode(value)
