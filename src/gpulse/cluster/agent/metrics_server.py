"""Serve an agent's `/metrics` with a small HTTP server, because nodes do not have the web framework installed."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from email.message import Message
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from typing import NamedTuple, TypeVar

from gpulse._version import __version__
from gpulse.cluster.access_control import AccessPolicy, HttpRequest, find_client_user
from gpulse.cluster.agent.identity import AgentIdentity
from gpulse.cluster.socket_owner import describe_listener
from gpulse.errors import GpulseError
from gpulse.export.prometheus import self_metrics
from gpulse.export.prometheus.metrics_page import format_metrics
from gpulse.export.prometheus.node_state import HolderLimit, NodeState, stale_seconds
from gpulse.export.prometheus.text_format import CONTENT_TYPE, MetricFamily, accepts_gzip
from gpulse.model.counter_rates import compute_rates
from gpulse.model.finding import Finding
from gpulse.model.frame import DiskReading, FilesystemReading, Frame, GpuReading, HostReading, NetworkReading
from gpulse.model.metric_catalog import Values
from gpulse.model.xid import XidCounts


class _NewestFrames(NamedTuple):
    """The newest frame and the one before it."""

    frame: Frame | None = None
    before: Frame | None = None
    findings: tuple[Finding, ...] = ()
    interval_seconds: float = 0.0
    """Time until the next frame."""

    def rated(self) -> Frame | None:
        """Return the newest frame with the rates since the one before it."""
        if self.frame is None or self.before is None:
            return self.frame
        bare = [frame._replace(processes=(), cgroups=()) for frame in (self.before, self.frame)]
        rates = compute_rates(*bare, cores=False)
        frame = self.frame
        return frame._replace(
            gpus=tuple(_add_rates(gpu, rates.gpus.get(gpu.device.uuid)) for gpu in frame.gpus),
            host=None if frame.host is None else _add_rates(frame.host, rates.host),
            disks=tuple(_add_rates(disk, rates.disks.get(disk.name)) for disk in frame.disks),
            filesystems=tuple(
                _add_rates(item, rates.filesystems.get(item.mount_point)) for item in frame.filesystems
            ),
            network=tuple(_add_rates(link, rates.network.get(link.name)) for link in frame.network),
        )


_Reading = TypeVar("_Reading", GpuReading, HostReading, DiskReading, FilesystemReading, NetworkReading)


def _add_rates(reading: _Reading, rates: Values | None) -> _Reading:
    return reading._replace(values={**rates, **reading.values}) if rates else reading


class MetricsPage:
    """The metrics page of this machine: the sampling thread updates it, the server renders it."""

    def __init__(
        self,
        me: AgentIdentity,
        *,
        dcgm_names: bool = False,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without a frame.

        Args:
            me: Identity of this machine.
            dcgm_names: Use DCGM's metric names instead of gpulse's.
            clock: Returns epoch seconds.
            monotonic: The monotonic clock of the frames.
        """
        self._dcgm_names = dcgm_names
        self._clock = clock
        self._monotonic = monotonic
        self._started = clock()
        self._xids = XidCounts()
        self._holder_limit = HolderLimit()
        self._frames = 0
        self._me = NodeState(me.host, None, (), self._xids, me.host, me.machine, __version__)
        self._newest = _NewestFrames()

    def show(self, frame: Frame, findings: Sequence[Finding], interval_seconds: float) -> None:
        """Set the newest frame; called by the sampling thread.

        Args:
            frame: The frame.
            findings: The findings as of this frame.
            interval_seconds: Time until the next frame.
        """
        self._xids.follow(frame)
        self._frames += 1
        self._newest = _NewestFrames(frame, self._newest.frame, tuple(findings), interval_seconds)

    def pieces(self) -> Iterator[str]:
        """Return the text of the page in pieces."""
        newest = self._newest
        return format_metrics(
            [self._me._replace(frame=newest.rated(), findings=newest.findings)],
            now=self._now(newest.frame),
            interval_seconds=newest.interval_seconds,
            version=__version__,
            dcgm_names=self._dcgm_names,
            more=self._own(),
            holder_limit=self._holder_limit,
        )

    def trouble(self) -> str | None:
        """Return why the agent is not ready; None if it is."""
        newest = self._newest
        if newest.frame is None:
            return "the agent has not taken a sample yet"
        age = self._now(newest.frame) - newest.frame.time
        if age > stale_seconds(newest.interval_seconds):
            return f"the newest sample is {age:.0f} s old"
        return None

    def _now(self, newest: Frame | None) -> float:
        """Return the current time by the clock as it was when a frame was taken, even if the clock was set since."""
        return self._clock() if newest is None else newest.time + self._monotonic() - newest.monotonic

    def _own(self) -> Iterator[MetricFamily]:
        yield from self_metrics.process_families(self._started)
        yield from self_metrics.agent_families(self._frames)


_MAX_CONNECTIONS = 32
_MAX_HEADER_BYTES = 32 * 1024
_REQUEST_SECONDS = 5.0
_RESPONSE_SECONDS = 10.0
_JSON = "application/json"
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
_SECURITY_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Connection": "close"}


class _ParsedRequest(NamedTuple):
    """An HTTP request without its body, which no path uses."""

    method: str
    path: str
    headers: Message


class _HttpResponse(NamedTuple):
    """An HTTP response."""

    status: HTTPStatus
    body: bytes
    headers: dict[str, str]


class MetricsServer:
    """HTTP server in the running loop: a limited number of connections, each for one request and a few seconds."""

    def __init__(self, page: MetricsPage, access: AccessPolicy) -> None:
        """Prepare to serve.

        Args:
            page: The metrics page.
            access: Decides who may read it.
        """
        self._page = page
        self._access = access
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], None] = {}
        """Connections that have not sent a request yet, oldest first."""
        self.address = ""
        """Address that the server listens on."""

    async def start(self, host: str, port: int) -> None:
        """Start to listen.

        Args:
            host: The address to listen on.
            port: The port; 0 picks a free one.

        Raises:
            GpulseError: Cannot listen on this port.
        """
        try:
            self._server = await asyncio.start_server(
                self._connected, host, port, limit=_MAX_HEADER_BYTES, reuse_address=True
            )
        except OSError as error:
            holder = describe_listener(port) if port else None
            taken = f": {holder} is using this port" if holder else f": {error.strerror or error}"
            raise GpulseError(
                f"cannot serve metrics on {host}:{port}{taken}",
                hint="stop that program, or choose another --metrics-port or --metrics-host",
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop the server and end open connections."""
        if self._server is None:
            return
        self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  handlers run in tasks
        if len(self._open) >= _MAX_CONNECTIONS and not self._has_ended_one():
            writer.transport.abort()
            return
        self._open.add(task)
        self._silent[task] = None
        try:
            raw = await _read_request(reader)
            self._silent.pop(task, None)
            if raw is not None:
                await self._serve(raw, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._open.discard(task)
            self._silent.pop(task, None)
            with suppress(OSError, asyncio.CancelledError):
                writer.close()
                await writer.wait_closed()

    def _has_ended_one(self) -> bool:
        """Close the connection that has been silent the longest, so that it does not block others."""
        for task in self._silent:
            del self._silent[task]
            task.cancel()
            return True
        return False

    async def _serve(self, raw: bytes, writer: asyncio.StreamWriter) -> None:
        asked = _parse_request(raw) if raw else _HEADERS_TOO_LONG
        answer = asked if isinstance(asked, _HttpResponse) else self._answer(asked, writer)
        body = b"" if isinstance(asked, _ParsedRequest) and asked.method == "HEAD" else answer.body
        writer.write(_encode_response(answer) + body)
        async with asyncio.timeout(_RESPONSE_SECONDS):
            await writer.drain()

    def _answer(self, asked: _ParsedRequest, client: asyncio.StreamWriter) -> _HttpResponse:
        refused = self._access.check_http(_access_request(asked, client))
        if refused is not None:
            status, message, hint = refused
            extra = {"WWW-Authenticate": 'Bearer realm="gpulse"'} if status == HTTPStatus.UNAUTHORIZED else {}
            return _error_response(HTTPStatus(status), message, hint, extra)
        found = {"/metrics": self._metrics, "/-/healthy": _healthy_response, "/-/ready": self._ready}.get(
            asked.path
        )
        if found is None:
            return _error_response(
                HTTPStatus.NOT_FOUND,
                "no such path",
                "use one of: /metrics, /-/ready, /-/healthy",
            )
        if asked.method not in {"GET", "HEAD"}:
            allowed = {"Allow": "GET, HEAD"}
            return _error_response(HTTPStatus.METHOD_NOT_ALLOWED, "method not allowed", "use GET", allowed)
        return found(asked)

    def _metrics(self, asked: _ParsedRequest) -> _HttpResponse:
        body = "".join(self._page.pieces()).encode()
        headers = {"Content-Type": CONTENT_TYPE, "Vary": "Accept-Encoding"}
        if accepts_gzip(asked.headers.get("accept-encoding")):
            return _HttpResponse(
                HTTPStatus.OK, gzip.compress(body, 1, mtime=0), {**headers, "Content-Encoding": "gzip"}
            )
        return _HttpResponse(HTTPStatus.OK, body, headers)

    def _ready(self, _asked: _ParsedRequest) -> _HttpResponse:
        trouble = self._page.trouble()
        if trouble is None:
            return _json_response(HTTPStatus.OK, {"status": "ok"})
        return _error_response(HTTPStatus.SERVICE_UNAVAILABLE, trouble, "see the agent's log")


def _healthy_response(_asked: _ParsedRequest) -> _HttpResponse:
    return _json_response(HTTPStatus.OK, {"status": "ok", "version": __version__})


async def _read_request(reader: asyncio.StreamReader) -> bytes | None:
    """Return the head of a request; empty if it is too long, None if the client sent none."""
    async with asyncio.timeout(_REQUEST_SECONDS):
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            return b""


def _parse_request(raw: bytes) -> _ParsedRequest | _HttpResponse:
    """Return the parsed request, or the error response if it is invalid."""
    line, _, rest = raw.partition(b"\r\n")
    words = line.decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        return _error_response(
            HTTPStatus.BAD_REQUEST, "the request is not a valid HTTP request", "use GET /metrics"
        )
    try:
        headers = parse_headers(io.BytesIO(rest))
    except HTTPException:  # too many headers, or lines that are too long
        return _HEADERS_TOO_LONG
    if len(headers.get_all("host", ())) > 1:
        return _error_response(
            HTTPStatus.BAD_REQUEST, "the request has several Host headers", "send one Host header"
        )
    return _ParsedRequest(words[0], words[1].partition("?")[0], headers)


def _access_request(asked: _ParsedRequest, client: asyncio.StreamWriter) -> HttpRequest:
    """Return the parts of a request that decide whether it is served."""
    headers, peer = asked.headers, client.get_extra_info("peername")

    def only(name: str) -> str | None:
        values = headers.get_all(name)
        return ", ".join(map(str, values)) if values else None

    return HttpRequest(
        client_host=str(peer[0]) if peer else None,
        user=find_client_user(client.get_extra_info("socket")),
        host=only("host"),
        origin=only("origin"),
        authorization=only("authorization"),
        method=asked.method,
        content_type=only("content-type"),
        has_body=headers.get("content-length", "0").strip() != "0" or "transfer-encoding" in headers,
        forwarded=any(name in headers for name in _PROXY_HEADERS),
        fetch_site=only("sec-fetch-site"),
        fetch_mode=only("sec-fetch-mode"),
    )


def _encode_response(answer: _HttpResponse) -> bytes:
    lines = [f"HTTP/1.1 {answer.status.value} {answer.status.phrase}"]
    headers = {**answer.headers, **_SECURITY_HEADERS, "Content-Length": str(len(answer.body))}
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def _json_response(
    status: HTTPStatus, document: object, headers: dict[str, str] | None = None
) -> _HttpResponse:
    return _HttpResponse(status, json.dumps(document).encode(), {"Content-Type": _JSON, **(headers or {})})


def _error_response(
    status: HTTPStatus, message: str, hint: str, headers: dict[str, str] | None = None
) -> _HttpResponse:
    return _json_response(status, {"error": message, "hint": hint, "detail": message}, headers)


_HEADERS_TOO_LONG = _error_response(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "the request has too many headers, or they are too long",
    "send fewer or shorter headers",
)
