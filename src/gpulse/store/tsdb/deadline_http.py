"""Requests over HTTP whose time is up at one moment, however slowly the other side speaks.

The timeout of a socket begins anew with every byte that comes.
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


def answered(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
    *,
    deadline: float,
) -> http.client.HTTPResponse:
    """Send a request; the answer, whose content is yet to be read until the same moment.

    Args:
        connection: Perhaps one that was used before.
        method: Of HTTP.
        path: What is asked for.
        body: What is sent.
        headers: The same.
        deadline: When to give up, on the monotonic clock.

    Raises:
        TimeoutError: It is that late.
        OSError: The other side is not there, or went away.
        HTTPException: It does not speak HTTP.
    """
    connection.timeout = _left(deadline)
    if connection.sock is not None:
        connection.sock.settimeout(connection.timeout)
    connection.response_class = partial(_Answer, deadline=deadline)  # type: ignore[assignment]
    connection.request(method, path, body, dict(headers))
    return connection.getresponse()


class _Answer(http.client.HTTPResponse):
    """An answer that is read until a moment."""

    def __init__(self, sock: socket.socket, *arguments: Any, deadline: float, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_Reader(self.fp.detach(), sock, deadline))


class _Reader(io.RawIOBase):
    """The bytes of a socket as they come."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._raw = raw
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        """Wait for some bytes, no longer than there is time."""
        self._sock.settimeout(_left(self._deadline))
        found: int | None = self._raw.readinto(buffer)
        return found

    def close(self) -> None:
        """Let go of the socket."""
        self._raw.close()
        super().close()


def _left(deadline: float) -> float:
    """How long may still be waited."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
