"""`/metrics` of an agent: a small HTTP server of its own, because an agent's machine has no web framework installed."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from contextlib import suppress
from email.message import Message
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from typing import NamedTuple

from gpulse._version import __version__
from gpulse.cluster.agent.board import Board
from gpulse.cluster.ports import who_listens
from gpulse.cluster.security import Access, HttpRequest, client_user
from gpulse.errors import GpulseError
from gpulse.export.prometheus.text import CONTENT_TYPE, accepts_gzip

_MOST_CONNECTIONS = 32
_LONGEST_HEAD = 32 * 1024
_REQUEST_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
_JSON = "application/json"
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
_SAFE = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Connection": "close"}


class _Asked(NamedTuple):
    """A request, its body aside: nobody here takes one."""

    method: str
    path: str
    headers: Message


class _Answer(NamedTuple):
    """What is said to it."""

    status: HTTPStatus
    body: bytes
    headers: dict[str, str]


class Exporter:
    """A server in the running loop; at most so many connections, each for one request and a few seconds."""

    def __init__(self, board: Board, access: Access) -> None:
        """Prepare to serve.

        Args:
            board: What there is to show.
            access: Who may see it.
        """
        self._board = board
        self._access = access
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], None] = {}
        """Those that have not said what they want, the oldest first."""
        self.address = ""
        """Where it listens."""

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Args:
            host: The address to listen on.
            port: The port; 0 takes any that is free.

        Raises:
            GpulseError: The port cannot be listened on.
        """
        try:
            self._server = await asyncio.start_server(
                self._connected, host, port, limit=_LONGEST_HEAD, reuse_address=True
            )
        except OSError as error:
            holder = who_listens(port) if port else None
            taken = f": {holder} has that port" if holder else f": {error.strerror or error}"
            raise GpulseError(
                f"cannot serve metrics on {host}:{port}{taken}",
                hint="stop that program, or choose another --metrics-port or --metrics-host",
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop, and end what is under way."""
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
        if len(self._open) >= _MOST_CONNECTIONS and not self._has_ended_one():
            writer.transport.abort()
            return
        self._open.add(task)
        self._silent[task] = None
        try:
            raw = await _request(reader)
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
        """Make room by ending who has been silent for longest: who says nothing must not keep others out."""
        for task in self._silent:
            del self._silent[task]
            task.cancel()
            return True
        return False

    async def _serve(self, raw: bytes, writer: asyncio.StreamWriter) -> None:
        asked = _read(raw) if raw else _TOO_LONG
        answer = asked if isinstance(asked, _Answer) else self._answer(asked, writer)
        body = b"" if isinstance(asked, _Asked) and asked.method == "HEAD" else answer.body
        writer.write(_spelled(answer) + body)
        async with asyncio.timeout(_ANSWER_SECONDS):
            await writer.drain()

    def _answer(self, asked: _Asked, client: asyncio.StreamWriter) -> _Answer:
        refused = self._access.http(_described(asked, client))
        if refused is not None:
            status, message, hint = refused
            extra = {"WWW-Authenticate": 'Bearer realm="gpulse"'} if status == HTTPStatus.UNAUTHORIZED else {}
            return _refused(HTTPStatus(status), message, hint, extra)
        found = {"/metrics": self._metrics, "/-/healthy": _healthy, "/-/ready": self._ready}.get(asked.path)
        if found is None:
            return _refused(
                HTTPStatus.NOT_FOUND,
                "there is nothing at this path",
                "there is: /metrics, /-/ready, /-/healthy",
            )
        if asked.method not in {"GET", "HEAD"}:
            allowed = {"Allow": "GET, HEAD"}
            return _refused(HTTPStatus.METHOD_NOT_ALLOWED, "that is not possible here", "GET it", allowed)
        return found(asked)

    def _metrics(self, asked: _Asked) -> _Answer:
        body = "".join(self._board.pieces()).encode()
        headers = {"Content-Type": CONTENT_TYPE, "Vary": "Accept-Encoding"}
        if accepts_gzip(asked.headers.get("accept-encoding")):
            return _Answer(
                HTTPStatus.OK, gzip.compress(body, 1, mtime=0), {**headers, "Content-Encoding": "gzip"}
            )
        return _Answer(HTTPStatus.OK, body, headers)

    def _ready(self, _asked: _Asked) -> _Answer:
        trouble = self._board.trouble()
        if trouble is None:
            return _document(HTTPStatus.OK, {"status": "ok"})
        return _refused(HTTPStatus.SERVICE_UNAVAILABLE, trouble, "the agent's log says more")


def _healthy(_asked: _Asked) -> _Answer:
    return _document(HTTPStatus.OK, {"status": "ok", "version": __version__})


async def _request(reader: asyncio.StreamReader) -> bytes | None:
    """A request, its body aside; empty when it is too long, None when none comes."""
    async with asyncio.timeout(_REQUEST_SECONDS):
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            return b""


def _read(raw: bytes) -> _Asked | _Answer:
    """The request in some bytes, or what is said to them when they are none."""
    line, _, rest = raw.partition(b"\r\n")
    words = line.decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        return _refused(HTTPStatus.BAD_REQUEST, "that is no HTTP request", "GET /metrics")
    try:
        headers = parse_headers(io.BytesIO(rest))
    except HTTPException:  # so it says of too many, and of lines that are too long
        return _TOO_LONG
    if len(headers.get_all("host", ())) > 1:
        return _refused(HTTPStatus.BAD_REQUEST, "it is addressed to two names", "one Host header")
    return _Asked(words[0], words[1].partition("?")[0], headers)


def _described(asked: _Asked, client: asyncio.StreamWriter) -> HttpRequest:
    """What the rules look at."""
    headers, peer = asked.headers, client.get_extra_info("peername")

    def only(name: str) -> str | None:
        values = headers.get_all(name)
        return ", ".join(map(str, values)) if values else None

    return HttpRequest(
        client_host=str(peer[0]) if peer else None,
        user=client_user(client.get_extra_info("socket")),
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


def _spelled(answer: _Answer) -> bytes:
    lines = [f"HTTP/1.1 {answer.status.value} {answer.status.phrase}"]
    headers = {**answer.headers, **_SAFE, "Content-Length": str(len(answer.body))}
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def _document(status: HTTPStatus, document: object, headers: dict[str, str] | None = None) -> _Answer:
    return _Answer(status, json.dumps(document).encode(), {"Content-Type": _JSON, **(headers or {})})


def _refused(status: HTTPStatus, message: str, hint: str, headers: dict[str, str] | None = None) -> _Answer:
    return _document(status, {"error": message, "hint": hint, "detail": message}, headers)


_TOO_LONG = _refused(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "its headers are too long, or too many", "leave some out"
)
