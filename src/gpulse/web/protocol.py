"""Uvicorn's protocols with patience that ends: for requests that do not arrive and answers that nobody reads."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gpulse.cluster.api.answers import dumps, refusal
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
"""How long a client may leave an answer unread."""


class Deadline:
    """Something that happens unless it is called off in time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, act: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._act = act
        self._timer: asyncio.TimerHandle | None = None

    @property
    def when(self) -> float | None:
        """The loop's time at which it happens; None while it does not."""
        return None if self._timer is None else self._timer.when()

    def start(self) -> None:
        """Begin to wait, unless that is so already."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._act)

    def stop(self) -> None:
        """Call it off."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
        if has_room:
            self._watch()
        else:
            self._refuse(503, b"Service Unavailable", "too many connections are open", "try again in a while")

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self.arrival.stop()
        self._reading.stop()
        self._lingering.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Part of a request."""
        if self._lingering.when is None and not self.transport.is_closing():
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        """The next request may come."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is answered."""
        super().pause_writing()
        self._reading.start()

    def resume_writing(self) -> None:
        """The client has read on."""
        self._reading.stop()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the words of every other refusal."""
        self._refuse(400, b"Bad Request", msg, "send HTTP/1.1")

    def _refuse(self, status: int, reason: bytes, message: str, hint: str) -> None:
        body = dumps(refusal(message, hint)).encode()
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
        self._lingering.start()

    def _watch(self) -> None:
        """Start or stop the clock, by whose turn it is."""
        is_clients_turn = self.conn.their_state in {h11.IDLE, h11.SEND_BODY}
        if is_clients_turn and self._lingering.when is None and not self.transport.is_closing():
            self.arrival.start()
        else:
            self.arrival.stop()

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
        self._reading.start()

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


def _cut(transport: asyncio.Transport) -> None:
    """End a connection at once: what the client has not read is not kept for it, by the kernel neither."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
