"""The head's gRPC side: agents' streams, and the same operations that HTTP offers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from gpulse.cluster import wire
from gpulse.cluster.head.connection import Allowed
from gpulse.cluster.head.decode import Refused, read_message
from gpulse.cluster.head.ingest import Ingest
from gpulse.cluster.protocol.codec import encode, failure, read_body
from gpulse.cluster.protocol.interface import HeadInterface
from gpulse.cluster.protocol.operations import call, changes_anything, fetch
from gpulse.cluster.wire_pb2 import Reply, Request
from gpulse.errors import GpulseError

log = logging.getLogger(__name__)

_MAX_STREAMS = 20_000


class Calls:
    """Operations over gRPC."""

    def __init__(self, head: HeadInterface, allowed: Allowed, *, now: Callable[[], float]) -> None:
        """Prepare to answer.

        Args:
            head: Who is asked.
            allowed: Who may ask.
            now: The head's clock.
        """
        self._head = head
        self._allowed = allowed
        self._now = now

    async def call(self, data: bytes, context: Any) -> bytes:
        """One operation."""
        request = await self._request(data, context)
        try:
            body = read_body(request.body)
        except GpulseError as error:
            return _reply(*failure(error))
        return _reply(*await call(self._head, request.operation, body, now=self._now()))

    async def download(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        """A file: the first reply says what comes, the others are its pieces."""
        request = await self._request(data, context)
        try:
            file = await fetch(self._head, request.operation, read_body(request.body), now=self._now())
            first = {"name": file.name, "media_type": file.media_type}
            yield _reply(200, first)
            async for piece in file.pieces:
                yield Reply(status=200, body=piece).SerializeToString()
        except GpulseError as error:
            yield _reply(*failure(error))

    async def _request(self, data: bytes, context: Any) -> Request:
        await self._check(context, changes=False)
        try:
            request = read_message(Request, data)
        except Refused as refusal:
            await context.abort(refusal.code, refusal.reason)
            raise AssertionError from None  # abort never returns
        if changes_anything(request.operation):
            await self._check(context, changes=True)
        return request

    async def _check(self, context: Any, *, changes: bool) -> None:
        metadata = context.invocation_metadata() or ()
        refused = await self._allowed(context.peer(), metadata, changes=changes)
        if refused is not None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refused)


def _reply(status: int, answer: object) -> bytes:
    return Reply(status=status, body=encode(answer)).SerializeToString()


def make_server(ingest: Ingest, calls: Calls) -> grpc.aio.Server:
    """The server, with no port yet."""
    server = grpc.aio.server(options=wire.server_options(), maximum_concurrent_rpcs=_MAX_STREAMS)
    handlers: dict[str, Any] = {
        "Stream": grpc.stream_stream_rpc_method_handler(ingest.stream),
        "Call": grpc.unary_unary_rpc_method_handler(calls.call),
        "Download": grpc.unary_stream_rpc_method_handler(calls.download),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
    return server


async def stop(server: grpc.aio.Server) -> None:
    """End it, whatever agents do meanwhile."""
    await server.stop(grace=1.0)
    await asyncio.sleep(0)
