"""Rounds of updates: all clients that want the same get the same text, written once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpulse.cluster.protocol.codec import encode
from gpulse.cluster.protocol.interface import HeadInterface
from gpulse.web.answer import without_holding
from gpulse.web.news import News, Sent
from gpulse.web.wish import Wish

_POLL_SECONDS = 1.0
"""How late a node that fell silent may show."""


class Rounds:
    """What is new for one wish, an interval after the other, while somebody listens."""

    def __init__(self, head: HeadInterface, news: News, wanted: Wish, clock: Callable[[], float]) -> None:
        self._head = head
        self._news = news
        self._wanted = wanted
        self._clock = clock
        self._listeners: set[asyncio.Event] = set()
        self._work: asyncio.Task[None] | None = None
        self._sequence = -1
        self.number = 0
        """Counts the rounds."""
        self.text = ""
        """What the newest one says, to those who have the one before it."""

    @property
    def is_empty(self) -> bool:
        """True when nobody listens."""
        return not self._listeners

    @contextmanager
    def listening(self, stirred: asyncio.Event) -> Iterator[None]:
        """In the block the event is set with every round."""
        self._listeners.add(stirred)
        if self._work is None:
            self._work = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._listeners.discard(stirred)
            if not self._listeners:
                self._work.cancel()

    def check(self) -> None:
        """Raise what ended the work, if something did."""
        if self._work is not None and self._work.done():
            self._work.result()

    async def whole(self) -> str:
        """Everything, for somebody who has nothing, or fell behind."""
        parts = [part async for part in without_holding(self._news.since(self._wanted, {}))]
        return self._update(parts, list(self._head.missing()))

    async def _run(self) -> None:
        try:
            await self._rounds()
        finally:
            for listener in self._listeners:
                listener.set()

    async def _rounds(self) -> None:
        loop = asyncio.get_running_loop()
        sent: dict[int, Sent] = {}
        missing: list[str] | None = None
        while True:
            parts = [part async for part in without_holding(self._news.since(self._wanted, sent))]
            absent, missing = missing, list(self._head.missing())
            ended = loop.time()
            if parts or absent != missing:
                self.number += 1
                self.text = self._update(parts, missing if absent != missing else None)
                for listener in self._listeners:
                    listener.set()
            self._sequence = await self._head.wait(self._sequence, _POLL_SECONDS)
            await asyncio.sleep(ended + self._wanted.interval_seconds - loop.time())

    def _update(self, parts: list[str], missing: list[str] | None) -> str:
        also = "" if missing is None else f'"missing":{encode(missing).decode()},'
        start = f'{{"type":"update","sequence":{self._sequence},"time":{self._clock()!r},{also}'
        return f'{start}"nodes":[{",".join(parts)}]}}'
