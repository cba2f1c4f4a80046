"""The live stream: what is new at the nodes, over a WebSocket, as often as the client wants and can take."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from starlette.websockets import WebSocket, WebSocketDisconnect

from gpulse._version import __version__
from gpulse.cluster.api import fields as f
from gpulse.cluster.api.answers import dumps, failure, read_body
from gpulse.cluster.api.interface import HeadInterface, LiveNode
from gpulse.cluster.security import Refusal
from gpulse.errors import GpulseError, UsageError
from gpulse.model.metric import CATALOGUE, Scope, Value
from gpulse.web.access import deny
from gpulse.web.answer import without_holding

METRICS = (
    "gpu_utilization_ratio",
    "memory_used_bytes",
    "memory_total_bytes",
    "power_watts",
    "temperature_celsius",
)
"""What a client gets that asks for nothing."""
MOST_CONNECTIONS = 64
_POLL_SECONDS = 1.0
"""How late a changed wish, or a node that fell silent, may show."""
_MOST_TEXTS = 20_000
_SLOWEST_SECONDS = 60.0
_FASTEST_SECONDS = 0.1


class Wish(NamedTuple):
    """What a client wants to see."""

    nodes: frozenset[str] | None = None
    metrics: tuple[str, ...] = METRICS
    host_metrics: tuple[str, ...] = ()
    interval_seconds: float = 1.0


_FIELDS = (
    f.Field("nodes", f.TEXTS, "only these nodes; all when left out"),
    f.Field("metrics", f.TEXTS, "names of the catalogue's GPU metrics"),
    f.Field("host_metrics", f.TEXTS, "names of the catalogue's host metrics"),
    f.Field("interval", f.DURATION, "seconds between two messages, from 0.1 to 60"),
)


def wish(text: str) -> Wish:
    """Read what a client asks for.

    Raises:
        UsageError: It makes no sense.
    """
    given = f.parse(_FIELDS, read_body(text.encode("utf-8", "replace")), 0.0)
    interval = given.get("interval", 1.0)
    if not _FASTEST_SECONDS <= interval <= _SLOWEST_SECONDS:
        raise UsageError("interval: it is from 0.1 to 60 seconds")
    return Wish(
        frozenset(given["nodes"]) if given.get("nodes") else None,
        _known("gpu", given.get("metrics", METRICS)),
        _known("host", given.get("host_metrics", ())),
        interval,
    )


class Live:
    """All live streams of a head."""

    def __init__(
        self, head: HeadInterface, clock: Callable[[], float], *, most_connections: int = MOST_CONNECTIONS
    ) -> None:
        self._head = head
        self._clock = clock
        self._most = most_connections
        self._open = 0
        self._texts: dict[tuple[int, tuple[str, ...], tuple[str, ...]], tuple[object, str]] = {}
        """What was last written of a node, for all clients that want the same of it."""

    async def serve(self, websocket: WebSocket) -> None:
        """One client, from its first to its last message."""
        if self._open >= self._most:
            await deny(
                websocket, Refusal(503, f"{self._most} live streams are open already", "close one of them")
            )
            return
        self._open += 1
        try:
            with suppress(WebSocketDisconnect):
                await websocket.accept()
                await self._talk(websocket)
        finally:
            self._open -= 1
            if not self._open:
                self._texts.clear()

    async def _talk(self, websocket: WebSocket) -> None:
        client = _Client(websocket)
        listening = asyncio.create_task(client.listen())
        telling = asyncio.create_task(self._tell(client))
        try:
            await asyncio.wait((listening, telling), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (listening, telling):
                task.cancel()
            results = await asyncio.gather(listening, telling, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
                raise result

    async def _tell(self, client: _Client) -> None:
        """Send what is new; while a client is slow in taking it, newer readings take its place."""
        loop = asyncio.get_running_loop()
        sequence = await self._head.wait(-1, 0.0)
        await client.send(await self._hello(sequence))
        wanted, shown, sent_at = client.wish, dict[int, _Shown](), -math.inf
        while True:
            pause = wanted.interval_seconds
            if client.wish is not wanted:
                wanted, shown, pause = client.wish, {}, _FASTEST_SECONDS
            client.changed.clear()
            if await client.changes(sent_at + pause - loop.time()):
                continue
            parts = [part async for part in without_holding(self._news(wanted, shown))]
            if parts:
                sent_at = loop.time()
                await client.send(
                    f'{{"type":"update","sequence":{sequence},"time":{self._clock()!r},"nodes":[{",".join(parts)}]}}'
                )
            sequence = await self._next(client, sequence)

    async def _next(self, client: _Client, sequence: int) -> int:
        """Wait for news, for another wish, or for the time in which a node may have fallen silent."""
        news = asyncio.create_task(self._head.wait(sequence, _POLL_SECONDS))
        change = asyncio.create_task(client.changed.wait())
        try:
            await asyncio.wait((news, change), return_when=asyncio.FIRST_COMPLETED)
            return news.result() if news.done() else sequence
        finally:
            news.cancel()
            change.cancel()
            await asyncio.gather(news, change, return_exceptions=True)

    def _news(self, wanted: Wish, shown: dict[int, _Shown]) -> Iterator[str]:
        """The nodes that changed since they were shown last, as JSON; remembers that they were."""
        for node in self._head.live():
            if wanted.nodes is not None and node.name not in wanted.nodes:
                continue
            now = _Shown.of(node)
            before = shown.get(node.id)
            if before == now:
                continue
            shown[node.id] = now
            gpus = f'"gpus":{dumps(_gpus(node))},' if before is None or before.gpus != now.gpus else ""
            yield f"{{{gpus}{self._text(node, now, wanted)}}}"

    def _text(self, node: LiveNode, now: _Shown, wanted: Wish) -> str:
        key = (node.id, wanted.metrics, wanted.host_metrics)
        before = self._texts.get(key)
        if before is None or before[0] != now:
            if len(self._texts) >= _MOST_TEXTS:
                self._texts.clear()
            before = self._texts[key] = (now, dumps(_document(node, wanted))[1:-1])
        return before[1]

    async def _hello(self, sequence: int) -> str:
        nodes = (
            dumps({"node": node.name, "state": node.state, "labels": dict(node.labels), "gpus": _gpus(node)})
            for node in self._head.live()
        )
        parts = [part async for part in without_holding(nodes)]
        start = dumps(
            {"type": "hello", "version": __version__, "sequence": sequence, "metrics": list(METRICS)}
        )
        return f'{start[:-1]},"nodes":[{",".join(parts)}]}}'


class _Shown(NamedTuple):
    """What a client last saw of a node, as far as it takes to know that there is more."""

    state: str
    connected: bool
    time: float | None
    gpus: tuple[str, ...]

    @classmethod
    def of(cls, node: LiveNode) -> _Shown:
        frame = node.frame
        if frame is None:
            return cls(node.state, node.connected, None, ())
        return cls(node.state, node.connected, frame.time, tuple(gpu.device.uuid for gpu in frame.gpus))


class _Client:
    """The other end of a stream."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self.wish = Wish()
        self.changed = asyncio.Event()

    async def listen(self) -> None:
        """Take wishes until the client leaves."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                if message.get("text") is None:
                    raise UsageError("a wish is text, not bytes", hint="send JSON as a text message")
                self.wish = wish(message["text"])
                self.changed.set()
            except GpulseError as error:
                await self.send(json.dumps({"type": "error", **failure(error)[1]}))

    async def changes(self, seconds: float) -> bool:
        """Wait for so long; True as soon as the client wants something else."""
        if seconds <= 0:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self.changed.wait()
        return False

    async def send(self, text: str) -> None:
        """Send a message, once those before it are on their way."""
        await self._websocket.send_text(text)


def _document(node: LiveNode, wanted: Wish) -> dict[str, Any]:
    frame = node.frame
    document: dict[str, Any] = {
        "node": node.name,
        "state": node.state,
        "connected": node.connected,
        "time": None if frame is None else frame.time,
        "values": {},
    }
    if frame is not None:
        document["values"] = {name: [_finite(gpu.get(name)) for gpu in frame.gpus] for name in wanted.metrics}
    if wanted.host_metrics:
        values: Mapping[str, Value] = (
            frame.host.values if frame is not None and frame.host is not None else {}
        )
        document["host"] = {name: _finite(values.get(name)) for name in wanted.host_metrics}
    return document


def _gpus(node: LiveNode) -> list[dict[str, str]]:
    if node.frame is None:
        return []
    return [
        {"id": gpu.device.label, "uuid": gpu.device.uuid, "name": gpu.device.name} for gpu in node.frame.gpus
    ]


def _finite(value: Value | None) -> Value | None:
    return value if value is not None and math.isfinite(value) else None


def _known(scope: Scope, names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in CATALOGUE[scope]:
            raise UsageError(f"a {scope} has no metric {name[:60]!a}", hint="docs/metrics.md lists them")
    return tuple(dict.fromkeys(names))
