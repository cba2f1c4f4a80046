"""Limits for what clients cost a head, so that agents never wait for them.

Agents and clients share one event loop. Answers that are the same for everyone are computed once and shared, and requests
get a part of the loop's time: when it is used up they wait, and those that would wait too long are refused.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Hashable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from gpulse.errors import RefusedError

_Result = TypeVar("_Result")

MIN_SHARED_SECONDS = 0.02
"""A result that took less CPU time is not reused, so that small heads always answer with their newest data."""
REUSE_FACTOR = 4
"""A result is reused for this many times the time that it took."""
MAX_REUSE_SECONDS = 5.0
REQUEST_SECONDS = 0.0006
"""Estimated loop time of a request whose answer is small and known."""
BYTE_SECONDS = 1e-9
"""Estimated loop time of sending one byte."""
MAX_LOOP_SHARE = 0.3
"""Part of the loop's time for requests, and as much again for live streams."""
_BURST_SECONDS = 0.3
"""Loop time that requests may use at once after a pause."""
MAX_WAIT_SECONDS = 5.0
"""A request that would wait longer is refused."""
MAX_REPORTS_AT_ONCE = 4
"""Reports that are computed at the same time, in threads that compete with the loop for the interpreter."""
MAX_REPORTS_WAITING = 64


class BusyError(RefusedError):
    """The head has no time for a request."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            503, "the head is busy with other requests", hint="try again later, and send requests less often"
        )
        self.retry_seconds = max(1, math.ceil(seconds))
        """When to try again."""


class LoopShare:
    """A part of the event loop's time, for which requests wait in the order of their arrival."""

    def __init__(
        self, share: float = MAX_LOOP_SHARE, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = share
        self._monotonic = monotonic
        self._free_at = monotonic()
        """When the time that was used so far is paid for."""

    def charge(self, seconds: float) -> None:
        """Count loop time that was used."""
        self._free_at = max(self._free_at, self._monotonic()) + seconds / self._share

    def wait_seconds(self) -> float:
        """Return how long a request must wait that arrives now."""
        return max(0.0, self._free_at - _BURST_SECONDS / self._share - self._monotonic())

    async def admit(
        self, seconds: float = REQUEST_SECONDS, max_wait_seconds: float = MAX_WAIT_SECONDS
    ) -> None:
        """Wait until there is time for a request, and charge what it will use.

        Raises:
            BusyError: That would take too long.
        """
        wait = self.wait_seconds()
        if wait > max_wait_seconds:
            raise BusyError(wait - max_wait_seconds)
        self.charge(seconds)
        if wait:
            await asyncio.sleep(wait)


class _Entry(NamedTuple):
    work: asyncio.Future[Any]
    expires: list[float]
    """One number, set when the result is known."""


class _TimedWork:
    """Awaits something, and counts the CPU time that it takes in this thread, without what runs while it waits."""

    def __init__(self, work: Awaitable[Any], cpu_seconds: Callable[[], float]) -> None:
        self._work = work
        self._cpu_seconds = cpu_seconds
        self.used_seconds = 0.0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        advance: Callable[[], Any] = steps.__next__
        while True:
            began = self._cpu_seconds()
            try:
                awaited = advance()
            except StopIteration as end:
                return end.value
            finally:
                self.used_seconds += self._cpu_seconds() - began
            try:
                yield awaited
            except BaseException as error:  # passed on, such as a cancellation  # noqa: BLE001
                advance = partial(steps.throw, error)
            else:
                advance = steps.__next__


class SharedResults:
    """Results that are the same for all callers: computed once, and reused for a while if they are costly.

    A result waits only for itself: one that takes long does not delay those with other keys.
    """

    def __init__(
        self,
        share: LoopShare,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        cpu_seconds: Callable[[], float] = time.thread_time,
    ) -> None:
        """Start empty.

        Args:
            share: Charged for the CPU time of computing.
            monotonic: The clock.
            cpu_seconds: CPU time of this thread.
        """
        self._share = share
        self._monotonic = monotonic
        self._cpu_seconds = cpu_seconds
        self._entries: dict[Hashable, _Entry] = {}

    def clear(self) -> None:
        """Forget all results, because something was changed."""
        self._entries.clear()

    async def get(self, key: Hashable, compute: Callable[[], Awaitable[_Result]]) -> _Result:
        """Return a result: the current one, the one that is being computed, or a new one."""
        self._expire()
        entry = self._entries.get(key)
        if entry is None:
            expires = [math.inf]
            work = asyncio.ensure_future(self._compute(compute, expires))
            entry = self._entries[key] = _Entry(work, expires)
            work.add_done_callback(_retrieve)
        result: _Result = await asyncio.shield(entry.work)
        return result

    def _expire(self) -> None:
        now = self._monotonic()
        for key in [key for key, entry in self._entries.items() if entry.expires[0] <= now]:
            del self._entries[key]

    async def _compute(self, compute: Callable[[], Awaitable[_Result]], expires: list[float]) -> _Result:
        began = self._monotonic()
        work = _TimedWork(compute(), self._cpu_seconds)
        try:
            result: _Result = await work
        except BaseException:
            expires[0] = began
            raise
        took = self._monotonic() - began
        self._share.charge(work.used_seconds)
        is_cheap = work.used_seconds < MIN_SHARED_SECONDS
        expires[0] = began if is_cheap else began + took + min(MAX_REUSE_SECONDS, REUSE_FACTOR * took)
        return result


def _retrieve(work: asyncio.Future[Any]) -> None:
    """Mark an error as seen: its callers may have gone."""
    if not work.cancelled():
        work.exception()


class ReportLimit:
    """Limits how many reports are computed at the same time, and how many requests wait for that."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MAX_REPORTS_AT_ONCE)
        self._waiting = 0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot while the block runs.

        Raises:
            BusyError: Too many requests wait already, or the wait was too long.
        """
        if self._waiting >= MAX_REPORTS_WAITING:
            raise BusyError(MAX_WAIT_SECONDS)
        self._waiting += 1
        try:
            async with asyncio.timeout(2 * MAX_WAIT_SECONDS):
                await self._slots.acquire()
        except TimeoutError:
            raise BusyError(MAX_WAIT_SECONDS) from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._slots.release()
