"""HTTP requests with a deadline for the whole exchange, however slowly the server responds.

A socket timeout is not sufficient, because it restarts with every byte received.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


def send_request(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
    *,
    deadline: float,
) -> http.client.HTTPResponse:
    """Send a request and return the response; the deadline also applies to reading its content.

    Args:
        connection: A new or reused connection.
        method: The HTTP method.
        path: The path of the URL.
        body: The content to send.
        headers: The headers to send.
        deadline: When to give up, in monotonic seconds.

    Raises:
        TimeoutError: The deadline has passed.
        OSError: The server cannot be reached, or closed the connection.
        HTTPException: The response is not valid HTTP.
    """
    connection.timeout = _seconds_left(deadline)
    if connection.sock is not None:
        connection.sock.settimeout(connection.timeout)
    connection.response_class = partial(_DeadlineResponse, deadline=deadline)  # type: ignore[assignment]
    connection.request(method, path, body, dict(headers))
    return connection.getresponse()


class _DeadlineResponse(http.client.HTTPResponse):
    """A response with a deadline for reading it."""

    def __init__(self, sock: socket.socket, *arguments: Any, deadline: float, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_DeadlineReader(self.fp.detach(), sock, deadline))


class _DeadlineReader(io.RawIOBase):
    """Reader of a socket with a deadline."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._raw = raw
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        """Wait for bytes until the deadline."""
        self._sock.settimeout(_seconds_left(self._deadline))
        found: int | None = self._raw.readinto(buffer)
        return found

    def close(self) -> None:
        """Close the socket."""
        self._raw.close()
        super().close()


def _seconds_left(deadline: float) -> float:
    """Return the time until a deadline; raise TimeoutError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
