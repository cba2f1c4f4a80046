"""Uvicorn's protocols with deadlines for clients that do not send their request or do not read their answer."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gpulse.cluster.protocol.codec import encode, refusal
from gpulse.cluster.security import client_user
from gpulse.web.access import CLIENT_USER
from gpulse.web.shell import HEADERS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    import uvicorn

REQUEST_SECONDS = 30.0
"""How long a client may take to send a whole request, its body included."""
LINGER_SECONDS = 2.0
"""How long a refused client may go on sending: cut off at once, it would not see why."""
READ_SECONDS = 60.0
"""How long a client may take to read `MIN_READ_BYTES` of an answer that waits for it."""
MIN_READ_BYTES = 16 * 1024
"""How much a slow client must read in that time to keep its connection."""


class Deadline:
    """An act that happens when a client neither reads nor does what it should within some seconds.

    A client that is still reading an answer gets the same time again. Progress is measured in the kernel's queue, which
    may hold megabytes: a transport says only that it is full, and that it is empty again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, act: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._act = act
        self._timer: asyncio.TimerHandle | None = None

    @property
    def when(self) -> float | None:
        """The loop's time at which it happens; None while it does not."""
        return None if self._timer is None else self._timer.when()

    def start(self, transport: asyncio.Transport) -> None:
        """Begin to wait for the client of a transport, unless that is so already."""
        if self._timer is None:
            self._wait(transport, unread_bytes(transport))

    def stop(self) -> None:
        """Call it off."""
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


class PatientHttp(H11Protocol):
    """HTTP/1.1 that ends connections which hold it up, and makes room for new ones."""

    request_seconds = REQUEST_SECONDS
    read_seconds = READ_SECONDS

    def __init__(self, config: uvicorn.Config, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self._most = config.limit_concurrency
        self.limit_concurrency = None  # uvicorn would refuse newcomers for the sake of idle connections
        self.arrival = Deadline(self.loop, self.request_seconds, self._abort)
        self._reading = Deadline(self.loop, self.read_seconds, self._abort)
        self._lingering = Deadline(self.loop, LINGER_SECONDS, self._abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        has_room = self._most is None or len(self.connections) < self._most or self._make_room()
        super().connection_made(transport)
        self.app_state = {**self.app_state, CLIENT_USER: client_user(transport.get_extra_info("socket"))}
        if has_room:
            self._watch()
        else:
            self._refuse(503, b"Service Unavailable", "too many connections are open", "try again in a while")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all deadlines."""
        self._stop_deadlines()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Part of a request."""
        if self._lingering.when is None and not self.transport.is_closing():
            super().data_received(data)
            self._watch()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over, with no deadline of a request left behind."""
        super().handle_websocket_upgrade(event)
        has_unread_answer = self._reading.when is not None
        self._stop_deadlines()
        if has_unread_answer:  # the transport says so only once
            protocol: Any = self.transport.get_protocol()
            protocol.pause_writing()

    def on_response_complete(self) -> None:
        """The next request may come."""
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
        """The client does not read as fast as it is answered."""
        super().pause_writing()
        self._reading.start(self.transport)

    def resume_writing(self) -> None:
        """The client has read on."""
        self._reading.stop()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the words of every other refusal."""
        self._refuse(400, b"Bad Request", msg, "send HTTP/1.1")

    def _refuse(self, status: int, reason: bytes, message: str, hint: str) -> None:
        body = encode(refusal(message, hint))
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
        """Start or stop the deadline of the request, by whose turn it is."""
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
        """End the connection that has waited longest for its client; False when none waits."""
        waiting = [
            (other.arrival.when, number, other)
            for number, other in enumerate(self.connections)
            if isinstance(other, PatientHttp) and other.arrival.when is not None
        ]
        if not waiting:
            return False
        oldest = min(waiting)[2]
        oldest.arrival.stop()
        _cut(oldest.transport)
        return True

    def _abort(self) -> None:
        _cut(self.transport)


class PatientWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket that ends when its client stops reading."""

    read_seconds = READ_SECONDS

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._reading = Deadline(self.loop, self.read_seconds, self._abort)

    async def send(self, message: Any) -> None:
        """Part of an answer; with the end of a refusal the client has its answer, which uvicorn does not see."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True

    def pause_writing(self) -> None:
        """The client does not read as fast as it is sent to."""
        super().pause_writing()
        self._reading.start(self.transport)

    def resume_writing(self) -> None:
        """The client has read on."""
        self._reading.stop()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody waits any more."""
        self._reading.stop()
        super().connection_lost(exc)
        self.writable.set()

    def _abort(self) -> None:
        _cut(self.transport)


def unread_bytes(transport: asyncio.Transport) -> int:
    """Return how much was written and has not arrived: what the transport and the kernel hold."""
    connection = transport.get_extra_info("socket")
    queued = bytes(4)
    if connection is not None and connection.fileno() >= 0:
        queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, queued)
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)


def _cut(transport: asyncio.Transport) -> None:
    """End a connection at once: what the client has not read is not kept for it, by the kernel neither."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
