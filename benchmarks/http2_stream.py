"""One gRPC stream over a connection of its own, with as much of HTTP/2 (RFC 9113) as a load generator needs.

A client of grpc.aio takes about as much CPU time per message as the head that it loads. This one takes a small part of
that, so that thousands of agents fit on the machine that runs the head.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Self

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER = struct.Struct(">HBBBI")
"""Length (high 16 bits, low 8 bits), type, flags, and stream."""
_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_MESSAGE_HEADER = struct.Struct(">BI")
"""Whether a gRPC message is compressed, and its length."""
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4
_STREAM = 1
_DEFAULT_WINDOW_BYTES = 65_535
_MAX_WINDOW_BYTES = (1 << 31) - 1
_MAX_FRAME_BYTES = 16_384


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return _FRAME_HEADER.pack(len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload


def _header_field(name: str, value: str) -> bytes:
    """Return a header field as HPACK (RFC 7541) has it: a literal that is not indexed."""
    return b"\x00" + _header_text(name) + _header_text(value)


def _header_text(text: str) -> bytes:
    data = text.encode()
    if len(data) >= 127:
        rest = len(data) - 127
        if rest >= 128:
            raise ValueError(f"the header field is longer than 254 bytes: {text[:20]}…")
        return bytes((127, rest)) + data
    return bytes((len(data),)) + data


class Http2Stream(asyncio.Protocol):
    """The client's side of one stream of messages."""

    def __init__(
        self, path: str, metadata: Iterable[tuple[str, str]], received: Callable[[bytes], None]
    ) -> None:
        """Prepare a call.

        Args:
            path: The path of the method.
            metadata: Metadata of the call.
            received: Called with each message of the server.
        """
        self._fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "head"}
        self._fields |= {"te": "trailers", "content-type": "application/grpc", **dict(metadata)}
        self._received = received
        self._transport: asyncio.Transport
        self._buffer = b""
        self._message = b""
        self._waiting: deque[bytes] = deque()
        """Frames that the server's window has no room for."""
        self._windows = [_DEFAULT_WINDOW_BYTES, _DEFAULT_WINDOW_BYTES]
        """What the server accepts on the connection, and on the stream."""
        self._initial_bytes = _DEFAULT_WINDOW_BYTES
        self.has_ended = False
        """Whether the server has ended the stream."""

    @classmethod
    async def connect(
        cls, address: str, path: str, metadata: Iterable[tuple[str, str]], received: Callable[[bytes], None]
    ) -> Self:
        """Connect to a server and start the call."""
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: cls(path, metadata, received), host, int(port)))[1]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the call."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        fields = b"".join(_header_field(*field) for field in self._fields.items())
        transport.write(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, _SETTING.pack(_INITIAL_WINDOW_SIZE, _MAX_WINDOW_BYTES))
            + _frame(_WINDOW_UPDATE, 0, 0, _NUMBER.pack(_MAX_WINDOW_BYTES - _DEFAULT_WINDOW_BYTES))
            + _frame(_HEADERS, _END_HEADERS, _STREAM, fields)
        )

    def connection_lost(self, _: Exception | None) -> None:
        """Note the end."""
        self.has_ended = True

    def send(self, message: bytes) -> None:
        """Send a message, as soon as the server has room for it."""
        data = _MESSAGE_HEADER.pack(0, len(message)) + message
        self._waiting.extend(
            data[place : place + _MAX_FRAME_BYTES] for place in range(0, len(data), _MAX_FRAME_BYTES)
        )
        self._flush()

    def close(self) -> None:
        """End the stream and the connection."""
        self._transport.write(_frame(_DATA, _END_STREAM, _STREAM))
        self._transport.close()

    def _flush(self) -> None:
        while self._waiting and len(self._waiting[0]) <= min(self._windows):
            data = self._waiting.popleft()
            self._windows = [window - len(data) for window in self._windows]
            self._transport.write(_frame(_DATA, 0, _STREAM, data))

    def data_received(self, data: bytes) -> None:
        """Take the server's frames."""
        data = self._buffer + data
        place, end = 0, len(data)
        while end - place >= _FRAME_HEADER.size:
            high, low, kind, flags, stream = _FRAME_HEADER.unpack_from(data, place)
            begin = place + _FRAME_HEADER.size
            stop = begin + (high << 8 | low)
            if stop > end:
                break
            self._take(kind, flags, stream, data[begin:stop])
            place = stop
        self._buffer = data[place:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        match kind:
            case 0:
                self._take_messages(payload)
            case 4 if not flags & _ACK:
                for name, value in _SETTING.iter_unpack(payload):
                    if name == _INITIAL_WINDOW_SIZE:
                        self._windows[1] += value - self._initial_bytes
                        self._initial_bytes = value
                self._transport.write(_frame(_SETTINGS, _ACK, 0))
                self._flush()
            case 6 if not flags & _ACK:
                self._transport.write(_frame(_PING, _ACK, 0, payload))
            case 8:
                self._windows[stream] += _NUMBER.unpack(payload)[0]
                self._flush()
        if kind in (_RST_STREAM, _GOAWAY) or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self.has_ended = True

    def _take_messages(self, payload: bytes) -> None:
        data = self._message + payload
        place = 0
        while len(data) - place >= _MESSAGE_HEADER.size:
            stop = place + _MESSAGE_HEADER.size + _MESSAGE_HEADER.unpack_from(data, place)[1]
            if stop > len(data):
                break
            self._received(data[place + _MESSAGE_HEADER.size : stop])
            place = stop
        self._message = data[place:]
