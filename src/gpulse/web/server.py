"""Serve an application with uvicorn in the running loop, with limits and timeouts for slow and greedy clients."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gpulse.cluster.access_control import AccessPolicy, find_client_user
from gpulse.cluster.protocol.codec import encode, error_answer
from gpulse.cluster.protocol.head_interface import HeadInterface
from gpulse.cluster.socket_owner import describe_listener
from gpulse.cluster.tls_files import TlsFiles
from gpulse.errors import GpulseError
from gpulse.web.access import CLIENT_USER
from gpulse.web.app import HEADERS, make_app
from gpulse.web.dashboard import Dashboard

MAX_CONNECTIONS = 512
_MAX_HEADERS_BYTES = 256 * 1024
_MAX_MESSAGE_BYTES = 64 * 1024
_SHUTDOWN_SECONDS = 1.0
_ABORT_SECONDS = 0.5
_BACKLOG = 512
KEEP_ALIVE_SECONDS = 15
"""How long a connection may be idle between two requests."""
REQUEST_SECONDS = 30.0
"""How long a client may take to send a whole request, its body included."""
LINGER_SECONDS = 2.0
"""How long a refused client may keep sending; if it were disconnected at once, it would not see the reason."""
READ_SECONDS = 60.0
"""How long a client may take to read `MIN_READ_BYTES` of a pending answer."""
MIN_READ_BYTES = 16 * 1024
"""How much a slow client must read in that time to keep its connection."""


class Deadline:
    """Calls a function when a client neither reads nor does what it should within some seconds.

    A client that is still reading an answer gets the same time again. Progress is measured in the kernel's queue, which
    may hold megabytes: a transport only reports that it is full, and that it is empty again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, act: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._act = act
        self._timer: asyncio.TimerHandle | None = None

    @property
    def when(self) -> float | None:
        """The loop's time of the call; None while it is not scheduled."""
        return None if self._timer is None else self._timer.when()

    def start(self, transport: asyncio.Transport) -> None:
        """Start to wait for the client of a transport, unless already waiting."""
        if self._timer is None:
            self._wait(transport, unread_bytes(transport))

    def stop(self) -> None:
        """Cancel the call."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, transport: asyncio.Transport, unread: int) -> None:
        self._timer = self._loop.call_later(self._seconds, self._check, transport, unread)

    def _check(self, transport: asyncio.Transport, before: int) -> None:
        unread = unread_bytes(transport)
        if unread < before and (not unread or before - unread >= MIN_READ_BYTES):
            self._wait(transport, unread)
        else:
            self._timer = None
            self._act()


class TimeoutHttpProtocol(H11Protocol):
    """HTTP/1.1 that closes stalled connections, and makes room for new ones."""

    request_seconds = REQUEST_SECONDS
    read_seconds = READ_SECONDS

    def __init__(self, config: uvicorn.Config, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self._max_connections = config.limit_concurrency
        self.limit_concurrency = None  # uvicorn would refuse newcomers for the sake of idle connections
        self.arrival = Deadline(self.loop, self.request_seconds, self._abort)
        self._reading = Deadline(self.loop, self.read_seconds, self._abort)
        self._lingering = Deadline(self.loop, LINGER_SECONDS, self._abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        has_room = (
            self._max_connections is None
            or len(self.connections) < self._max_connections
            or self._make_room()
        )
        super().connection_made(transport)
        self.app_state = {**self.app_state, CLIENT_USER: find_client_user(transport.get_extra_info("socket"))}
        if has_room:
            self._watch()
        else:
            self._refuse(503, b"Service Unavailable", "too many connections are open", "try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all deadlines."""
        self._stop_deadlines()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process a part of a request."""
        if self._lingering.when is None and not self.transport.is_closing():
            super().data_received(data)
            self._watch()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand over the connection, without the deadline of its request."""
        super().handle_websocket_upgrade(event)
        has_unread_answer = self._reading.when is not None
        self._stop_deadlines()
        if has_unread_answer:  # the transport says so only once
            protocol: Any = self.transport.get_protocol()
            protocol.pause_writing()

    def on_response_complete(self) -> None:
        """Start to wait for the next request."""
        super().on_response_complete()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; one whose answer is still being read is not idle."""
        if unread_bytes(self.transport):
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        """Start the deadline of reading: the client is slower than the answer."""
        super().pause_writing()
        self._reading.start(self.transport)

    def resume_writing(self) -> None:
        """Stop the deadline of reading."""
        self._reading.stop()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP, in the format of all errors."""
        self._refuse(400, b"Bad Request", msg, "use HTTP/1.1")

    def _refuse(self, status: int, reason: bytes, message: str, hint: str) -> None:
        body = encode(error_answer(message, hint))
        headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        try:
            for event in (
                h11.Response(status_code=status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            self.transport.close()  # an answer is under way already
            return
        self.arrival.stop()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._lingering.start(self.transport)

    def _watch(self) -> None:
        """Start or stop the deadline of the request, depending on whether the client must send."""
        is_http = self.transport.get_protocol() is self  # after an upgrade h11 still waits for a body
        is_clients_turn = is_http and self.conn.their_state in {h11.IDLE, h11.SEND_BODY}
        if is_clients_turn and self._lingering.when is None and not self.transport.is_closing():
            self.arrival.start(self.transport)
        else:
            self.arrival.stop()

    def _stop_deadlines(self) -> None:
        self.arrival.stop()
        self._reading.stop()
        self._lingering.stop()

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for its client; False when none waits."""
        waiting = [
            (other.arrival.when, number, other)
            for number, other in enumerate(self.connections)
            if isinstance(other, TimeoutHttpProtocol) and other.arrival.when is not None
        ]
        if not waiting:
            return False
        oldest = min(waiting)[2]
        oldest.arrival.stop()
        _abort_connection(oldest.transport)
        return True

    def _abort(self) -> None:
        _abort_connection(self.transport)


class TimeoutWebSocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket that is closed when its client stops reading."""

    read_seconds = READ_SECONDS

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reading = Deadline(self.loop, self.read_seconds, self._abort)

    async def send(self, message: Any) -> None:
        """Send a part of an answer; the end of a refusal completes the handshake, which uvicorn does not notice."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True

    def pause_writing(self) -> None:
        """Start the deadline of reading: the client is slower than the stream."""
        super().pause_writing()
        self._reading.start(self.transport)

    def resume_writing(self) -> None:
        """Stop the deadline of reading."""
        self._reading.stop()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadline."""
        self._reading.stop()
        super().connection_lost(exc)
        self.writable.set()

    def _abort(self) -> None:
        _abort_connection(self.transport)


def unread_bytes(transport: asyncio.Transport) -> int:
    """Return the bytes that were written but not delivered, in the transport and in the kernel."""
    connection = transport.get_extra_info("socket")
    queued = bytes(4)
    if connection is not None and connection.fileno() >= 0:
        queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, queued)
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)


def _abort_connection(transport: asyncio.Transport) -> None:
    """Close a connection at once, and discard unread data, also in the kernel."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


async def serve(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    tls: TlsFiles | None = None,
    ready: Callable[[int], None] | None = None,
    max_connections: int = MAX_CONNECTIONS,
) -> None:
    """Serve until cancelled; then give open requests a second to finish, and close WebSockets.

    Args:
        app: The application.
        host: The address to listen on; a name listens on all its addresses, an empty one on all interfaces.
        port: The port; 0 picks any.
        tls: Files for HTTPS.
        ready: Called with the port once connections are accepted.
        max_connections: With this many, idle connections are closed for new ones.

    Raises:
        GpulseError: The port cannot be listened on.
    """
    sockets = await listen(host, port)
    real_port: int = sockets[0].getsockname()[1]
    try:
        server = _Server(_make_config(app, tls, max_connections), lambda: ready(real_port) if ready else None)
        running = asyncio.create_task(server.serve(sockets=sockets))
        try:
            await asyncio.shield(running)
        finally:
            server.should_exit = True
            await _wait_for_end(server, running)
    finally:
        for each in sockets:
            each.close()


async def listen(host: str, port: int) -> list[socket.socket]:
    """Open sockets that listen on all addresses of a name, all on one port.

    Raises:
        GpulseError: The name is unknown, or the port is in use or forbidden.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise GpulseError(
            f"{host} is not an address of this machine: {error.strerror}", hint="--host 127.0.0.1"
        ) from error
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            chosen = sockets[0].getsockname()[1] if sockets else port
            bound = _open_socket(family, (address[0], chosen, *address[2:]))
            if bound is not None:
                sockets.append(bound)
        if not sockets:
            raise GpulseError(f"cannot listen on {host or 'any address'}", hint="--host 127.0.0.1")
    except OSError as error:
        for each in sockets:
            each.close()
        raise _listen_error(host, port, error) from error
    return sockets


def _open_socket(family: int, address: tuple[Any, ...]) -> socket.socket | None:
    """Open a listening socket; None where the machine has no such addresses (IPv6 may be off)."""
    try:
        # Without the protocol, asyncio leaves Nagle's algorithm on, which delays the end of every answer by 40 ms.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError:
        return None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(_BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        if family == socket.AF_INET6 and error.errno in {97, 99}:  # no such family, no such address
            return None
        raise
    return made


def _listen_error(host: str, port: int, error: OSError) -> GpulseError:
    where = f"{host or '*'}:{port}"
    if error.errno == 98:
        who = describe_listener(port)
        held = f" by {who}" if who else ""
        return GpulseError(f"port {port} is in use{held}", hint="stop that process, or choose another port")
    return GpulseError(f"cannot listen on {where}: {error.strerror}", hint="choose another port or --host")


def _make_config(app: ASGIApp, tls: TlsFiles | None, max_connections: int) -> uvicorn.Config:
    extra: dict[str, Any] = {}
    if tls is not None:
        context = tls.context()
        extra["ssl_certfile"] = tls.cert
        extra["ssl_context_factory"] = lambda _config, _default: context
    return uvicorn.Config(
        app,
        http=TimeoutHttpProtocol,
        ws=TimeoutWebSocketProtocol,
        ws_max_size=_MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # it would block the loop for longer than it saves on the network
        lifespan="off",
        log_config=None,
        log_level="error",  # otherwise every bad request would be a line
        access_log=False,
        proxy_headers=False,  # no client is trusted about where a request comes from
        server_header=False,
        limit_concurrency=max_connections,
        h11_max_incomplete_event_size=_MAX_HEADERS_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        **extra,
    )


class _Server(uvicorn.Server):
    """Uvicorn's server without its signal handlers."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


async def _wait_for_end(server: uvicorn.Server, running: asyncio.Task[None]) -> None:
    """Wait until the server has stopped; abort first the connections that are left, then their tasks."""
    await asyncio.wait((running,), timeout=_SHUTDOWN_SECONDS)
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    await asyncio.wait((running,), timeout=_ABORT_SECONDS)
    left = {*server.server_state.tasks, running}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


class HttpFrontend:
    """The HTTP server of a head, running in its own task."""

    def __init__(self, address: str, task: asyncio.Task[None]) -> None:
        self.address = address
        """The address it listens on."""
        self._task = task

    async def close(self) -> None:
        """Stop; open requests get a second to finish."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def open_frontend(
    head: HeadInterface,
    access: AccessPolicy,
    *,
    host: str,
    port: int,
    tls: TlsFiles | None,
    clock: Callable[[], float],
    theme_dir: str | None = None,
    dcgm_names: bool = False,
) -> HttpFrontend:
    """Serve a head, and return once connections are accepted.

    Raises:
        GpulseError: The port cannot be listened on.
    """
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    app = make_app(head, access, clock=clock, dashboard=Dashboard(theme_dir), dcgm_names=dcgm_names)
    task = asyncio.create_task(serve(app, host=host, port=port, tls=tls, ready=ready.set_result))
    waiting: list[asyncio.Future[Any]] = [task, ready]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        task.result()  # raises the error
    shown = f"[{host}]" if ":" in host else host
    return HttpFrontend(f"{shown}:{ready.result()}", task)
