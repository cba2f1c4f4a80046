"""The live stream: changes of all nodes over a WebSocket, as often as the client wants and can take."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NamedTuple

from msgspec import Meta
from msgspec.structs import asdict
from starlette.websockets import WebSocket, WebSocketDisconnect

from gpulse._version import __version__
from gpulse.cluster.access_control import AccessRefusal
from gpulse.cluster.protocol.codec import answer_for_exception, decode_request, encode, read_body
from gpulse.cluster.protocol.head_interface import HeadInterface, LiveNode
from gpulse.cluster.protocol.load_limits import BYTE_SECONDS, REQUEST_SECONDS
from gpulse.cluster.protocol.requests import Duration, Request, Texts
from gpulse.diagnosis.rule_registry import find_category
from gpulse.errors import GpulseError, UsageError
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric_catalog import CATALOG, Scope, Value
from gpulse.model.process import GpuProcess, ProcessIdentity
from gpulse.model.safe_text import quoted
from gpulse.web.access import reject_websocket
from gpulse.web.responses import ClientLimits, iterate_cooperatively

METRICS = (
    "gpu_utilization_ratio",
    "memory_used_bytes",
    "memory_total_bytes",
    "power_watts",
    "temperature_celsius",
)
"""GPU metrics of a client that names none."""
MAX_INTERVAL_SECONDS = 60.0
MIN_INTERVAL_SECONDS = 0.1


class Subscription(NamedTuple):
    """What a client receives, and how often."""

    nodes: frozenset[str] | None = None
    metrics: tuple[str, ...] = METRICS
    host_metrics: tuple[str, ...] = ()
    interval_seconds: float = 1.0
    details: bool = False


class LiveRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Message of a client that changes its subscription."""

    nodes: Annotated[Texts, Meta(description="send only these nodes; default: all")] = ()
    metrics: Annotated[Texts, Meta(description="names of GPU metrics to send")] = METRICS
    host_metrics: Annotated[Texts, Meta(description="names of host metrics to send")] = ()
    interval: Annotated[Duration, Meta(description="seconds between messages, from 0.1 to 60")] = Duration(
        1.0
    )
    details: Annotated[
        bool, Meta(description="also send processes, disks, network and findings when they change")
    ] = False


def parse_subscription(text: str) -> Subscription:
    """Parse a client's message.

    Raises:
        UsageError: It is not valid.
    """
    body = read_body(text.encode("utf-8", "replace"))
    request = decode_request(LiveRequest, body, now=0.0, in_address=False)
    if not MIN_INTERVAL_SECONDS <= request.interval <= MAX_INTERVAL_SECONDS:
        raise UsageError("interval must be between 0.1 and 60 seconds")
    return Subscription(
        frozenset(request.nodes) or None,
        _check_metrics("gpu", request.metrics),
        _check_metrics("host", request.host_metrics),
        float(request.interval),
        request.details,
    )


def _check_metrics(scope: Scope, names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in CATALOG[scope]:
            raise UsageError(
                f"there is no {scope} metric {quoted(name)}",
                hint="see docs/reference/metrics.md for all metrics",
            )
    return tuple(dict.fromkeys(names))


Details = dict[str, Any]

_FACTS = ("driver", "cuda", "kernel", "cpu_model")
_DISK = ("read_bytes_per_second", "written_bytes_per_second", "busy_ratio")
_FILESYSTEM = ("size_bytes", "used_bytes", "available_bytes")
_NETWORK = ("rx_bytes_per_second", "tx_bytes_per_second", "link_bits_per_second")
_PROCESS = ("cpu_percent", "host_memory_bytes")
_FINDING = ("id", "cause", "family", "severity", "gpu", "label", "pids", "summary", "lost_ratio", "start")
_MAX_PROCESSES_PER_GPU = 100
"""More would not fit into a table."""


def describe(node: LiveNode) -> Details:
    """Return everything about a node except the readings that change with every frame."""
    frame = node.frame
    return {
        "version": node.version,
        "labels": dict(node.labels),
        "facts": {name: getattr(frame.node, name) for name in _FACTS} if frame else {},
        "disks": [
            {"name": disk.name, "kind": disk.kind, "model": disk.model, **_finite_values(disk.values, _DISK)}
            for disk in (frame.disks if frame else ())
        ],
        "filesystems": [
            {
                "mount_point": mounted.mount_point,
                "device": mounted.device,
                "type": mounted.type,
                "disk": mounted.disk,
                "kind": mounted.kind,
                **_finite_values(mounted.values, _FILESYSTEM),
            }
            for mounted in (frame.filesystems if frame else ())
        ],
        "network": [
            {"name": link.name, "kind": link.kind, "up": link.up, **_finite_values(link.values, _NETWORK)}
            for link in (frame.network if frame else ())
        ],
        "processes": _processes(node, frame) if frame else [],
        "findings": [_finding(item) for item in node.findings],
        "health": [entry._asdict() for entry in (frame.health if frame else ()) if entry.is_problem],
    }


def _processes(node: LiveNode, frame: Frame) -> list[list[Details] | None]:
    """Return the processes of each GPU; None for a GPU where they are unknown."""
    known = {reading.pid: reading for reading in frame.processes}
    identities = {**{pid: reading.identity for pid, reading in known.items()}, **node.processes}

    def of(gpu: GpuReading) -> list[Details] | None:
        if gpu.processes is None:
            return None
        return [
            {
                **_describe_use(process),
                **_identity(identities.get(process.pid)),
                **_finite_values(known[process.pid].values if process.pid in known else {}, _PROCESS),
            }
            for process in gpu.processes[:_MAX_PROCESSES_PER_GPU]
        ]

    return [of(gpu) for gpu in frame.gpus]


def _describe_use(process: GpuProcess) -> Details:
    return {
        "pid": process.pid,
        "kind": process.kind,
        "gpu_memory_bytes": process.gpu_memory_bytes,
        **_finite_values({} if process.sm_ratio is None else {"sm_ratio": process.sm_ratio}, ("sm_ratio",)),
    }


def _identity(identity: ProcessIdentity | None) -> Details:
    known = identity or ProcessIdentity(0)
    return {
        "user": known.owner.user,
        "uid": known.owner.uid,
        "job": known.owner.job,
        "container": known.owner.container,
        "pod": known.owner.pod,
        "name": known.name,
        "command": list(known.command),
        "start_time": known.start_time,
    }


def _finding(finding: Finding) -> Details:
    return {
        "category": find_category(finding.id, finding.family),
        **{name: getattr(finding, name) for name in _FINDING},
    }


def _finite_values(values: Mapping[str, Value], names: Sequence[str]) -> dict[str, Value | None]:
    found = {name: values.get(name) for name in names}
    return {name: value if value is None or math.isfinite(value) else None for name, value in found.items()}


_MAX_CACHED_TEXTS = 20_000


class NodeRevision(NamedTuple):
    """Version of a node's data, by which changes are detected."""

    state: str
    connected: bool
    time: float | None
    gpus: tuple[str, ...] | None

    @classmethod
    def of(cls, node: LiveNode) -> NodeRevision:
        """Return the version of a node's current data."""
        time = None if node.frame is None else node.frame.time
        return cls(
            node.state,
            node.connected or node.at_other_head,
            time,
            tuple(device.uuid for device in node.devices),
        )


class SentState(NamedTuple):
    """The data of a node that was last sent to clients."""

    shown: NodeRevision
    details: str


_NOTHING_SENT = SentState(NodeRevision("", connected=False, time=None, gpus=None), "")


class UpdateWriter:
    """Encodes updates of nodes; caches the latest of each, because many clients get the same."""

    def __init__(self, head: HeadInterface) -> None:
        self._head = head
        self._texts: dict[tuple[int, tuple[str, ...], tuple[str, ...]], tuple[NodeRevision, str]] = {}
        self._details: dict[int, tuple[NodeRevision, str]] = {}
        """Details by node; the same object as long as they are equal."""

    def clear(self) -> None:
        """Empty the caches when no client is left."""
        self._texts.clear()
        self._details.clear()

    def since(self, wanted: Subscription, sent: dict[int, SentState]) -> Iterator[str]:
        """Yield the nodes that changed since they were last sent, and note in `sent` that they were."""
        for node in self._head.iter_live_nodes():
            if wanted.nodes is not None and node.name not in wanted.nodes:
                continue
            now = SentState(NodeRevision.of(node), "")
            if wanted.details:
                now = now._replace(details=self._detailed(node, now.shown))
            before = sent.get(node.id, _NOTHING_SENT)
            if before == now:
                continue
            sent[node.id] = now
            gpus = (
                f'"gpus":{encode(describe_gpus(node)).decode()},'
                if before.shown.gpus != now.shown.gpus
                else ""
            )
            details = f'"details":{now.details},' if before.details != now.details else ""
            yield f"{{{gpus}{details}{self._text(node, now.shown, wanted)}}}"

    def _detailed(self, node: LiveNode, now: NodeRevision) -> str:
        before = self._details.get(node.id)
        if before is None or before[0] != now:
            text = encode(describe(node)).decode()
            if before is not None and before[1] == text:
                text = before[1]
            before = self._details[node.id] = (now, text)
        return before[1]

    def _text(self, node: LiveNode, now: NodeRevision, wanted: Subscription) -> str:
        key = (node.id, wanted.metrics, wanted.host_metrics)
        before = self._texts.get(key)
        if before is None or before[0] != now:
            if len(self._texts) >= _MAX_CACHED_TEXTS:
                self._texts.clear()
            before = self._texts[key] = (now, encode(_document(node, wanted))[1:-1].decode())
        return before[1]


def describe_gpus(node: LiveNode) -> list[dict[str, str]]:
    """Describe a node's GPUs, in the order of their values."""
    return [{"id": device.label, "uuid": device.uuid, "name": device.name} for device in node.devices]


def _document(node: LiveNode, wanted: Subscription) -> dict[str, Any]:
    frame = node.frame
    document: dict[str, Any] = {
        "node": node.name,
        "state": node.state,
        "connected": node.connected or node.at_other_head,
        "time": None if frame is None else frame.time,
        "seen": round(node.seen, 3),
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


def _finite(value: Value | None) -> Value | None:
    return value if value is not None and math.isfinite(value) else None


_POLL_SECONDS = 1.0
"""How late a node that stopped reporting may be noticed."""


class Broadcast:
    """Produces the updates of one subscription for all clients that share it, once per interval."""

    def __init__(
        self,
        head: HeadInterface,
        writer: UpdateWriter,
        wanted: Subscription,
        clock: Callable[[], float],
        limits: ClientLimits,
    ) -> None:
        self._limits = limits
        self._head = head
        self._writer = writer
        self._wanted = wanted
        self._clock = clock
        self._listeners: set[asyncio.Event] = set()
        self._work: asyncio.Task[None] | None = None
        self._sequence = -1
        self.number = 0
        """Number of the latest update."""
        self.text = ""
        """The latest update, for clients that have the one before it."""

    @property
    def is_empty(self) -> bool:
        """True when no client listens."""
        return not self._listeners

    @contextmanager
    def listening(self, changed: asyncio.Event) -> Iterator[None]:
        """Set the event with every update while the block runs."""
        self._listeners.add(changed)
        if self._work is None:
            self._work = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._listeners.discard(changed)
            if not self._listeners:
                self._work.cancel()

    def check(self) -> None:
        """Raise the error that ended the work, if any."""
        if self._work is not None and self._work.done():
            self._work.result()

    async def full_update(self) -> str:
        """Return a full update, for a client that is new or fell behind; clients that need it at the same time share it."""
        return await self._limits.results.get((self._wanted, self.number), self._full_update)

    async def _full_update(self) -> str:
        parts = [part async for part in iterate_cooperatively(self._writer.since(self._wanted, {}))]
        return self._update(parts, list(self._head.missing()))

    async def _run(self) -> None:
        try:
            await self._send_updates()
        finally:
            for listener in self._listeners:
                listener.set()

    async def _send_updates(self) -> None:
        loop = asyncio.get_running_loop()
        sent: dict[int, SentState] = {}
        missing: list[str] | None = None
        share = self._limits.live_share
        while True:
            used = time.thread_time()
            parts = [part async for part in iterate_cooperatively(self._writer.since(self._wanted, sent))]
            share.charge(time.thread_time() - used)
            absent, missing = missing, list(self._head.missing())
            ended = loop.time()
            if parts or absent != missing:
                self.number += 1
                self.text = self._update(parts, missing if absent != missing else None)
                for listener in self._listeners:
                    listener.set()
                share.charge(len(self._listeners) * (REQUEST_SECONDS + len(self.text) * BYTE_SECONDS))
            self._sequence = await self._head.wait(self._sequence, _POLL_SECONDS)
            pause = ended + self._wanted.interval_seconds - loop.time()
            await asyncio.sleep(max(pause, share.wait_seconds()))

    def _update(self, parts: list[str], missing: list[str] | None) -> str:
        also = "" if missing is None else f'"missing":{encode(missing).decode()},'
        start = f'{{"type":"update","sequence":{self._sequence},"time":{self._clock()!r},{also}'
        return f'{start}"nodes":[{",".join(parts)}]}}'


MAX_CONNECTIONS = 256
_OPEN_SECONDS = 0.003
"""Estimated loop time of opening a stream. Hundreds of pages that are opened at once wait for one another."""
_FIRST_SUBSCRIPTION_SECONDS = 0.2
"""How long to wait for a client's subscription before it gets the default one."""


class LiveStreams:
    """All live streams of a head."""

    def __init__(
        self,
        head: HeadInterface,
        clock: Callable[[], float],
        limits: ClientLimits,
        *,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._limits = limits
        self._head = head
        self._clock = clock
        self._max_connections = max_connections
        self._open = 0
        self._writer = UpdateWriter(head)
        self._broadcasts: dict[Subscription, Broadcast] = {}

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one client from its first to its last message."""
        if self._open >= self._max_connections:
            await reject_websocket(
                websocket,
                AccessRefusal(
                    503,
                    f"the limit of {self._max_connections} open live streams has been reached",
                    "close one of the streams",
                ),
            )
            return
        self._open += 1
        try:
            with suppress(WebSocketDisconnect):
                await self._limits.live_share.admit(_OPEN_SECONDS, math.inf)
                await websocket.accept()
                await self._run_client(websocket)
        finally:
            self._open -= 1
            if not self._open:
                self._writer.clear()

    async def _run_client(self, websocket: WebSocket) -> None:
        client = _StreamClient(websocket)
        listening = asyncio.create_task(client.listen())
        sending = asyncio.create_task(self._send_updates(client))
        try:
            await asyncio.wait((listening, sending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (listening, sending):
                task.cancel()
            results = await asyncio.gather(listening, sending, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
                raise result

    async def _send_updates(self, client: _StreamClient) -> None:
        """Send the list of nodes, then a full update and changes for the client's subscription, until it changes."""
        await client.send(await self._hello())
        await client.wait_for_subscription(_FIRST_SUBSCRIPTION_SECONDS)
        while True:
            wanted = client.subscription
            broadcast = self._broadcasts.setdefault(
                wanted, Broadcast(self._head, self._writer, wanted, self._clock, self._limits)
            )
            try:
                with broadcast.listening(client.changed):
                    await self._follow(client, broadcast, wanted)
            finally:
                if broadcast.is_empty:
                    self._broadcasts.pop(wanted, None)
            await asyncio.sleep(MIN_INTERVAL_SECONDS)  # limits how often a client can change its subscription

    async def _follow(self, client: _StreamClient, broadcast: Broadcast, wanted: Subscription) -> None:
        """Send update after update; a full one to a client that missed the one before."""
        has = 0  # the first update is a full one
        while client.subscription is wanted:
            client.changed.clear()
            broadcast.check()
            before, has = has, broadcast.number
            if before == has:
                await client.changed.wait()
            elif before + 1 == has:
                await client.send(broadcast.text)
            else:
                text = await broadcast.full_update()
                await self._limits.live_share.admit(len(text) * BYTE_SECONDS, math.inf)
                await client.send(text)

    async def _hello(self) -> str:
        nodes, interval_ms = await self._limits.results.get("hello", self._describe_nodes)
        start = encode(
            {
                "type": "hello",
                "version": __version__,
                "sequence": await self._head.wait(-1, 0.0),
                "time": self._clock(),
                "interval_ms": interval_ms,
                "metrics": list(METRICS),
                "missing": list(self._head.missing()),
            }
        ).decode()
        return f'{start[:-1]},"nodes":[{nodes}]}}'

    async def _describe_nodes(self) -> tuple[str, int]:
        """Return the nodes as JSON, and the sampling interval."""
        nodes = (
            encode(
                {
                    "node": node.name,
                    "state": node.state,
                    "labels": dict(node.labels),
                    "gpus": describe_gpus(node),
                }
            ).decode()
            for node in self._head.iter_live_nodes()
        )
        parts = [part async for part in iterate_cooperatively(nodes)]
        return ",".join(parts), self._head.status().freq


class _StreamClient:
    """A client of a live stream."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self.subscription = Subscription()
        self.changed = asyncio.Event()
        """Set when there is an update to send, or a new subscription."""

    async def listen(self) -> None:
        """Read subscriptions until the client disconnects."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                if message.get("text") is None:
                    raise UsageError(
                        "a subscription must be text, not bytes", hint="send JSON as a text message"
                    )
                self.subscription = parse_subscription(message["text"])
                self.changed.set()
            except GpulseError as error:
                await self.send(encode({"type": "error", **asdict(answer_for_exception(error)[1])}).decode())

    async def wait_for_subscription(self, seconds: float) -> None:
        """Wait this long, or until the client subscribes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.changed.wait()

    async def send(self, text: str) -> None:
        """Send a message after those before it."""
        await self._websocket.send_text(text)
