"""Thread pool for calls that may hang, so that one faulty device cannot delay the others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from time import monotonic
from typing import Any, Generic, TypeVar

_MAX_IDLE_SECONDS = 30.0
"""A thread without work for this long ends."""

Item = TypeVar("Item", bound=Hashable)
Result = TypeVar("Result")


class PoolBatch(Generic[Item, Result]):
    """One batch: the same work for several items."""

    def __init__(self, items: Iterable[Item], work: Callable[[Item], Result]) -> None:
        self.items = tuple(items)
        self.work = work
        self.results: dict[Item, Result] = {}
        """Results so far, including those that came after the timeout."""
        self.errors: dict[Item, Exception] = {}
        """Items whose work raised, which is a bug in the work: it should return its errors."""
        self._pending = len(self.items)
        self._done = threading.Event()
        self.settle(0)

    @property
    def finished(self) -> bool:
        """True when every item has returned or was abandoned."""
        return self._done.is_set()

    def has(self, item: Item) -> bool:
        """True when this item has returned."""
        return item in self.results or item in self.errors

    def wait(self, seconds: float) -> bool:
        """Wait until the batch is finished or the time is over; True when it is finished."""
        return self._done.wait(max(0.0, seconds))

    def settle(self, count: int) -> None:
        """Count items as returned or abandoned."""
        self._pending -= count
        if self._pending <= 0:
            self._done.set()


class _PoolThread:
    """One thread, and the call it is in."""

    def __init__(self) -> None:
        self.call: tuple[PoolBatch[Any, Any], Any, float] | None = None
        """The batch, the item, and the monotonic time at which the call began."""
        self.thread = threading.Thread()

    def start(self, name: str, target: Callable[..., object], *arguments: object) -> None:
        self.thread = threading.Thread(target=target, args=(self, *arguments), name=name, daemon=True)
        self.thread.start()


class TimeoutPool(Generic[Item]):
    """A few threads that share batches of work; a thread whose call hangs is replaced.

    A call that does not return in time loses its thread, which is abandoned and replaced. Until the call
    returns, its item is stuck and left out of new batches; afterwards the item is suspect and runs on a
    thread of its own, where it cannot delay the others, until it returns in time once.
    """

    def __init__(self, name: str, width: int, *, eager: bool = True) -> None:
        """Prepare to work.

        Args:
            name: Of the threads.
            width: How many threads share the work when none of them hangs.
            eager: Share the work from the start. Otherwise one thread does it as long as it does not hang: calls that
                return at once are slower on several threads, which then wait for Python's lock.
        """
        self._eager = eager
        self._name = f"gpulse-{name}"
        self.width = max(1, width)
        """How many threads share the work when none of them hangs."""
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._waiting: deque[tuple[PoolBatch[Item, Any], Item]] = deque()
        self._threads: set[_PoolThread] = set()
        self._suspect_threads: set[_PoolThread] = set()
        self._abandoned: set[_PoolThread] = set()
        self._suspects: set[Item] = set()

    @property
    def busy(self) -> bool:
        """True while any call is pending, stuck or not."""
        with self._lock:
            return bool(self._waiting) or any(pool_thread.call for pool_thread in self._all())

    def stuck_seconds(self, item: Item) -> float | None:
        """Return for how long a call for this item has been stuck; None when none is."""
        if not self._abandoned:
            return None
        with self._lock:
            since = self._stuck_since(item)
        return None if since is None else monotonic() - since

    def start(self, items: Sequence[Item], work: Callable[[Item], Result]) -> PoolBatch[Item, Result]:
        """Start a batch over the items that are not stuck."""
        with self._lock:
            free = [item for item in items if self._stuck_since(item) is None] if self._abandoned else items
            batch = PoolBatch(free, work)
            for item in batch.items:
                if item in self._suspects:
                    pool_thread = _PoolThread()
                    pool_thread.call = (batch, item, monotonic())
                    self._suspect_threads.add(pool_thread)
                    pool_thread.start(f"{self._name}-apart", self._run_suspect, batch, item)
                else:
                    self._waiting.append((batch, item))
            self._start_threads(self.width, None if self._eager else 1)
        return batch

    def finish(self, batch: PoolBatch[Item, Any], seconds: float) -> None:
        """Wait for a batch, at most twice `seconds`; calls that have not returned by then are stuck."""
        if batch.wait(seconds):
            return
        self.sweep(batch, seconds * 0.9)
        with self._lock:
            self._start_threads(len(batch.items))
        if not batch.wait(seconds):
            with self._lock:
                left = [entry for entry in self._waiting if entry[0] is not batch]
                batch.settle(len(self._waiting) - len(left))
                self._waiting = deque(left)
            self.sweep(batch, 0.0)  # last, so that no thread can begin another call of this batch after it

    def sweep(self, batch: PoolBatch[Item, Any], seconds: float) -> None:
        """Abandon the threads whose call of this batch has been pending for longer than `seconds`."""
        now = monotonic()
        with self._lock:
            for pool_thread in [*self._threads, *self._suspect_threads]:
                if (
                    pool_thread.call is not None
                    and pool_thread.call[0] is batch
                    and now - pool_thread.call[2] >= seconds
                ):
                    self._threads.discard(pool_thread)
                    self._suspect_threads.discard(pool_thread)
                    self._abandoned.add(pool_thread)
                    self._suspects.add(pool_thread.call[1])
                    batch.settle(1)
            self._start_threads(self.width)

    def close(self, seconds: float = 1.0) -> bool:
        """End the threads; False when one hangs in a call (it ends with the process)."""
        with self._lock:
            pool_threads = [*self._threads, *self._suspect_threads]
            self._threads.clear()
            self._waiting.clear()
            self._work.notify_all()
        deadline = monotonic() + seconds
        for pool_thread in pool_threads:
            pool_thread.thread.join(max(0.0, deadline - monotonic()))
        return not self._abandoned and not any(pool_thread.thread.is_alive() for pool_thread in pool_threads)

    def _all(self) -> list[_PoolThread]:
        return [*self._threads, *self._suspect_threads, *self._abandoned]

    def _stuck_since(self, item: Item) -> float | None:
        calls = (pool_thread.call for pool_thread in self._abandoned)
        return min((call[2] for call in calls if call is not None and call[1] == item), default=None)

    def _start_threads(self, most: int, wanted: int | None = None) -> None:
        """Wake or start as many threads as there is work for, or as are wanted, up to a maximum."""
        wanted = len(self._waiting) if wanted is None else min(wanted, len(self._waiting))
        self._work.notify(wanted)
        idle = sum(pool_thread.call is None for pool_thread in self._threads)
        for _ in range(min(most - len(self._threads), wanted - idle)):
            pool_thread = _PoolThread()
            self._threads.add(pool_thread)
            pool_thread.start(self._name, self._run_items)

    def _run_items(self, pool_thread: _PoolThread) -> None:
        """Run waiting items one after the other until this thread is abandoned or no longer needed."""
        while True:
            with self._lock:
                while pool_thread in self._threads and not self._waiting:
                    if len(self._threads) > self.width or not (
                        self._work.wait(_MAX_IDLE_SECONDS) or self._waiting
                    ):
                        self._threads.discard(pool_thread)
                if pool_thread not in self._threads:
                    return
                batch, item = self._waiting.popleft()
                pool_thread.call = (batch, item, monotonic())
            if not self._call(pool_thread, batch, item):
                return

    def _run_suspect(self, pool_thread: _PoolThread, batch: PoolBatch[Item, Any], item: Item) -> None:
        if self._call(pool_thread, batch, item):
            with self._lock:
                self._suspect_threads.discard(pool_thread)

    def _call(self, pool_thread: _PoolThread, batch: PoolBatch[Item, Any], item: Item) -> bool:
        """Run one item's work; True when it returned before its thread was abandoned."""
        try:
            result, error = batch.work(item), None
        except Exception as caught:  # noqa: BLE001  an error in one item's work must not affect the others
            result, error = None, caught
        with self._lock:
            pool_thread.call = None
            if error is None:
                batch.results[item] = result
            else:
                batch.errors[item] = error
            if pool_thread in self._abandoned:
                self._abandoned.discard(pool_thread)
                return False
            self._suspects.discard(item)
            batch.settle(1)
        return True
