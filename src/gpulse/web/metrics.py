"""`GET /metrics`, `/-/healthy` and `/-/ready` of a head: for Prometheus and whoever restarts programs."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gpulse._version import __version__
from gpulse.cluster.protocol.answers import Status
from gpulse.cluster.protocol.interface import HeadInterface, LiveNode
from gpulse.export.prometheus import own
from gpulse.export.prometheus.exposed import Census, Exposed
from gpulse.export.prometheus.page import exposition
from gpulse.export.prometheus.text import CONTENT_TYPE, Family, accepts_gzip
from gpulse.web.answer import json_response, refused, without_holding

Answer = Callable[[Request], Awaitable[Response]]
_FORGET_SECONDS = 86_400.0
"""A node that was silent for so long is not missed any more."""
_HOLD_SECONDS = 0.005
"""How long a scrape may keep agents waiting at a time."""
_GZIP = 31
"""zlib's word for a stream in gzip's format."""
_BLOCK_LETTERS = 1 << 18
_LEVEL = 1
"""Names and labels repeat so much that more effort hardly helps."""


def routes(
    head: HeadInterface, clock: Callable[[], float], *, dcgm_names: bool = False
) -> dict[str, dict[str, Answer]]:
    """The answers by path and method.

    Args:
        head: What is asked.
        clock: The head's clock, in epoch seconds.
        dcgm_names: Serve readings under DCGM's names, not under ours.
    """
    return {
        "/metrics": {"GET": _metrics(head, clock, dcgm_names=dcgm_names)},
        "/-/healthy": {"GET": _healthy},
        "/-/ready": {"GET": _ready(head)},
    }


def _metrics(head: HeadInterface, clock: Callable[[], float], *, dcgm_names: bool) -> Answer:
    started, census = clock(), Census()

    async def answer(request: Request) -> Response:
        headers = {"Content-Type": CONTENT_TYPE, "Vary": "Accept-Encoding"}
        if request.method == "HEAD":
            return Response(headers=headers)
        nodes = await _nodes(head, clock())
        status = head.status()
        pieces = exposition(
            nodes,
            now=clock(),
            interval_seconds=status.freq / 1000,
            version=__version__,
            dcgm_names=dcgm_names,
            more=_own(status, started),
            census=census,
        )
        if not accepts_gzip(request.headers.get("accept-encoding")):
            return StreamingResponse(without_holding(pieces, _HOLD_SECONDS), headers=headers)
        headers["Content-Encoding"] = "gzip"
        return StreamingResponse(_packed(without_holding(pieces, _HOLD_SECONDS)), headers=headers)

    return answer


def _own(status: Status, started: float) -> Iterable[Family]:
    yield from own.of_process(started)
    slim = msgspec.structs.replace(status, gpu_info={}, findings=())  # nothing counts these
    yield from own.of_head(msgspec.to_builtins(slim))


async def _nodes(head: HeadInterface, now: float) -> list[Exposed]:
    """What is to be shown, with a turn for everybody else now and then: taking frames apart takes its time."""
    found: list[Exposed] = []
    started = time.perf_counter()
    for node in head.one_by_one():
        if _is_served(node, now):
            found.append(_exposed(node))
        if time.perf_counter() - started > _HOLD_SECONDS:
            await asyncio.sleep(0)
            started = time.perf_counter()
    return found


def _is_served(node: LiveNode, now: float) -> bool:
    """Whether a node is one of those that belong on the page: names that come and go must not make it grow."""
    if node.elsewhere:  # the head that has it serves it: a scrape of all heads has each node once
        return False
    return node.connected or not (node.left or now - node.seen > _FORGET_SECONDS)


def _exposed(node: LiveNode) -> Exposed:
    return Exposed(
        node.name,
        node.frame,
        findings=node.findings,
        xids=node.xids,
        host=node.host,
        machine=node.machine,
        version=node.version,
        interval_seconds=node.interval_seconds,
    )


async def _packed(pieces: AsyncIterator[str]) -> AsyncIterator[bytes]:
    """The pieces in gzip's format; one block is packed in a thread while the next one is written."""
    loop = asyncio.get_running_loop()
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
    packing: asyncio.Future[bytes] | None = None
    block: list[str] = []
    size = 0
    async for piece in pieces:
        block.append(piece)
        size += len(piece)
        if size >= _BLOCK_LETTERS:
            if packing is not None and (done := await packing):
                yield done
            packing = loop.run_in_executor(None, packer.compress, "".join(block).encode())
            block, size = [], 0
    if packing is not None:
        yield await packing
    yield packer.compress("".join(block).encode()) + packer.flush()


async def _healthy(_request: Request) -> Response:
    return await json_response({"status": "ok", "version": __version__})


def _ready(head: HeadInterface) -> Answer:
    async def answer(_request: Request) -> Response:
        storage = head.status().storage
        if storage.state == "ok":
            return await json_response({"status": "ok"})
        return refused(503, f"the head cannot store anything: {storage.error}", "make room on its disk")

    return answer
