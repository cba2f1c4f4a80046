"""Harvest's end of the line to a keeper: JSON documents a line, never waiting for the other side."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any


class Line:
    """Sends at once what fits and the rest as soon as it does; calls `readable` when something came."""

    def __init__(self, end: socket.socket, readable: Callable[[], None]) -> None:
        end.setblocking(False)
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._unread = b""
        self._loop.add_reader(end, readable)

    def send(self, document: str) -> None:
        """Send one line; nothing happens when nobody is there to read it."""
        self._unsent += document.encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            del self._unsent[: self._end.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
        if self._unsent:
            self._loop.add_writer(self._end, self._flush)
        else:
            self._loop.remove_writer(self._end)

    def read(self) -> Iterator[dict[str, Any]]:
        """The documents that came in whole."""
        try:
            while chunk := self._end.recv(1 << 16):
                self._unread += chunk
            self._loop.remove_reader(self._end)
        except BlockingIOError:
            pass
        except OSError:
            self._loop.remove_reader(self._end)
        *lines, self._unread = self._unread.split(b"\n")
        yield from map(json.loads, lines)

    def close(self) -> None:
        """Let go of the keeper: it ends its program by itself."""
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self._end.close()
