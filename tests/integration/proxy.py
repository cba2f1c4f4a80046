"""A way between an agent and its head that can be cut, slowed and healed from a test."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Self, TypeVar

_PIECE_BYTES = 16 << 10
_QUEUE_PIECES = 16
_RETRANSMIT_SECONDS = 0.2
"""What a lost packet costs TCP at least: all that follows it waits for so long."""

_Result = TypeVar("_Result")


class Proxy:
    """Passes TCP connections on to a port, in a thread of its own."""

    def __init__(self, target: int) -> None:
        """Begin to listen.

        Args:
            target: The port on this machine that connections are passed on to.
        """
        self.port = 0
        self.delay_seconds = 0.0
        """In each direction."""
        self.loss = 0.0
        """The chance that a piece has to be sent twice."""
        self.passed_bytes = 0
        """Both directions together."""
        self._target = target
        self._chance = random.Random(1)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refuses = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._flows = self._do(self._listen())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self) -> None:
        """End all connections at once and take no new ones: as if the other machine were switched off."""
        self._do(self._cut())

    def swallow(self) -> None:
        """Pass nothing on any more, and tell nobody: as if packets were dropped on the way."""
        self._now(self._flows.clear)

    def heal(self) -> None:
        """Pass everything on again, also what was held back."""
        self._refuses = False
        self._now(self._flows.set)

    def close(self) -> None:
        """End everything."""
        self._do(self._close())
        self._now(self._loop.stop)
        self._thread.join(60.0)
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60.0)

    def _now(self, step: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(step)

    async def _listen(self) -> asyncio.Event:
        self._server = await asyncio.start_server(self._taken, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        flows = asyncio.Event()
        flows.set()
        return flows

    async def _cut(self) -> None:
        self._refuses = True
        for writer in self._writers:
            writer.transport.abort()

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def _taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            if self._refuses:
                return
            await self._flows.wait()
            answers, other = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(other)
            ways = [asyncio.ensure_future(self._way(a, b)) for a, b in ((reader, other), (answers, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass
        finally:
            for end in (writer, other):
                if end is not None:
                    self._writers.discard(end)
                    end.transport.abort()
            self._tasks.discard(task)

    async def _way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction: pieces leave in the order they came, each as late as it must."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUE_PIECES)
        leaving = asyncio.ensure_future(self._leave(queue, writer))
        try:
            with suppress(OSError):
                while data := await reader.read(_PIECE_BYTES):
                    lost = _RETRANSMIT_SECONDS if self._chance.random() < self.loss else 0.0
                    due = self._loop.time() + self.delay_seconds + lost
                    put = asyncio.ensure_future(queue.put((due, data)))
                    await asyncio.wait({put, leaving}, return_when=asyncio.FIRST_COMPLETED)
                    if leaving.done():
                        put.cancel()
                        return
                await queue.put((0.0, b""))
                await leaving
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    async def _leave(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while True:
                due, data = await queue.get()
                if not data:
                    return
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
                self.passed_bytes += len(data)
