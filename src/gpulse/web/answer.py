"""Answers: documents as JSON without holding up the loop, and errors that look the same everywhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gpulse.cluster.protocol.answers import LARGEST_BODY, dumps, refusal
from gpulse.errors import RefusedError

if TYPE_CHECKING:
    from starlette.types import Receive

HOLD_SECONDS = 0.02
"""How long one answer may keep everybody else waiting."""
_MANY = 32


class JsonResponse(Response):
    """A document that was written as JSON before."""

    media_type = "application/json"


async def json_response(
    document: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> JsonResponse:
    """A document as an answer."""
    return JsonResponse(await encoded(document), status, headers)


def refused(
    status: int, message: str, hint: str | None = None, headers: Mapping[str, str] | None = None
) -> JsonResponse:
    """A refusal as an answer."""
    return JsonResponse(dumps(refusal(message, hint)).encode(), status, headers)


async def encoded(document: Any) -> bytes:
    """A document as JSON, written a piece at a time."""
    pieces: list[str] = []
    async for piece in without_holding(_pieces(document)):
        pieces.append(piece)  # noqa: PERF401  a comprehension would not be shorter
    return "".join(pieces).encode()


async def without_holding(pieces: Iterator[str], hold_seconds: float = HOLD_SECONDS) -> AsyncIterator[str]:
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
    if stated.isdecimal() and int(stated) > LARGEST_BODY:
        raise RefusedError(
            413, f"the request is larger than {LARGEST_BODY:,} bytes", hint="ask for less at once"
        )
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > LARGEST_BODY:
                raise RefusedError(
                    413, f"the request is larger than {LARGEST_BODY:,} bytes", hint="ask for less at once"
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


def _pieces(document: Any) -> Iterator[str]:
    """The document's JSON, cut where a long list or a large object has its entries, two levels deep."""
    if isinstance(document, dict) and document:
        yield "{"
        for count, (name, value) in enumerate(document.items()):
            yield f"{',' if count else ''}{dumps(str(name))}:"
            yield from _entries(value)
        yield "}"
    else:
        yield dumps(document)


def _entries(value: Any) -> Iterator[str]:
    if isinstance(value, list) and len(value) > 1:
        yield "["
        step = 1 if isinstance(value[0], (dict, list)) else 4096
        for start in range(0, len(value), step):
            yield f"{',' if start else ''}{dumps(value[start : start + step])[1:-1]}"
        yield "]"
    elif isinstance(value, dict) and len(value) > _MANY:
        yield "{"
        for count, (name, entry) in enumerate(value.items()):
            yield f"{',' if count else ''}{dumps(str(name))}:{dumps(entry)}"
        yield "}"
    else:
        yield dumps(value)
