"""Threads for calls that may never come back, so that one sick device cannot hold up the others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from queue import SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Result = TypeVar("Result")


class Run(Generic[Item, Result]):
    """One round of the same work over several items."""

    def __init__(self, items: Iterable[Item], work: Callable[[Item], Result]) -> None:
        self.results: dict[Item, Result] = {}
        """What came back so far."""
        self.errors: dict[Item, Exception] = {}
        """Items whose work raised, which is a fault of the work: it should report and not raise."""
        self.work = work
        self.todo = deque(items)
        self.pending = len(self.todo)
        self._done = threading.Event()
        if not self.pending:
            self._done.set()

    @property
    def finished(self) -> bool:
        """True when every item came back or was given up."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until the round is finished or the time is over; True when it is finished."""
        return self._done.wait(max(0.0, seconds))

    def settle(self, count: int) -> None:
        """Count items as come back or given up."""
        self.pending -= count
        if self.pending <= 0:
            self._done.set()


class _Lane:
    """One thread that runs what it is handed, in order."""

    def __init__(self, name: str) -> None:
        self.retired = False
        self.call: tuple[Run[Any, Any], Any, float] | None = None
        """The call under way: its round, its item, and the monotonic time at which it began."""
        self._queue: SimpleQueue[Callable[[_Lane], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def hand(self, work: Callable[[_Lane], None]) -> None:
        self._queue.put(work)

    def retire(self) -> None:
        self.retired = True
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _loop(self) -> None:
        while not self.retired and (work := self._queue.get()) is not None:
            work(self)


class Lanes(Generic[Item]):
    """A few threads that share rounds of work and replace each other when a call hangs.

    A call that does not come back in time costs its lane, which is written off and replaced. Until the
    call comes back its item is stuck and left out of new rounds; afterwards the item is on probation and
    runs on a lane of its own, where it cannot delay the others, until it comes back in time once.
    """

    def __init__(self, name: str, width: int) -> None:
        self._name = name
        self._width = max(1, width)
        self._lanes: list[_Lane] = []
        self._apart: dict[Item, _Lane] = {}
        self._lost: set[_Lane] = set()
        self._stuck: dict[Item, float] = {}
        self._lock = threading.Lock()

    def stuck_seconds(self, item: Item) -> float | None:
        """For how long a call about this item has not come back, None when none is out."""
        since = self._stuck.get(item)
        return None if since is None else monotonic() - since

    def start(self, items: Sequence[Item], work: Callable[[Item], Result]) -> Run[Item, Result]:
        """Begin one round over the items that are not stuck."""
        with self._lock:
            free = [item for item in items if item not in self._stuck]
            run = Run(free, work)
            alone = [item for item in free if item in self._apart]
            for item in alone:
                run.todo.remove(item)
                self._apart[item].hand(self._single(run, item))
            self._spread(run, min(self._width, len(run.todo)))
        return run

    def finish(self, run: Run[Item, Any], seconds: float) -> None:
        """Wait for a round, at most twice `seconds`; what has not come back by then is stuck."""
        if run.wait(seconds):
            return
        self.sweep(run, seconds * 0.9)
        with self._lock:
            self._spread(run, len(run.todo))
        if not run.wait(seconds):
            self.sweep(run, 0.0)
            with self._lock:
                run.settle(len(run.todo))
                run.todo.clear()

    def sweep(self, run: Run[Item, Any], seconds: float) -> None:
        """Write off the lanes whose call of this round has been out for longer than `seconds`."""
        now = monotonic()
        with self._lock:
            for lane in [*self._lanes, *self._apart.values()]:
                if lane.call is not None and lane.call[0] is run and now - lane.call[2] >= seconds:
                    self._write_off(lane)

    def close(self, seconds: float = 1.0) -> bool:
        """End the threads; False when one sits in a call that does not come back (it dies with the process)."""
        with self._lock:
            lanes = [*self._lanes, *self._apart.values()]
            self._lanes, self._apart = [], {}
        for lane in lanes:
            lane.retire()
        deadline = monotonic() + seconds
        for lane in [*lanes, *self._lost]:
            lane.join(max(0.0, deadline - monotonic()))
        return not self._lost and all(lane.call is None for lane in lanes)

    def _spread(self, run: Run[Item, Any], count: int) -> None:
        while len(self._lanes) < count:
            self._lanes.append(_Lane(f"gpulse-{self._name}"))
        for lane in self._lanes[:count]:
            lane.hand(lambda lane: self._drain(lane, run))

    def _write_off(self, lane: _Lane) -> None:
        assert lane.call is not None  # noqa: S101  the caller looked, under the same lock
        run, item, since = lane.call
        self._stuck[item] = since
        self._lost.add(lane)
        lane.retire()
        if lane in self._lanes:
            self._lanes.remove(lane)
        self._apart[item] = _Lane(f"gpulse-{self._name}-apart")
        run.settle(1)

    def _drain(self, lane: _Lane, run: Run[Item, Any]) -> None:
        while not lane.retired:
            with self._lock:
                if not run.todo:
                    return
                item = run.todo.popleft()
                lane.call = (run, item, monotonic())
            self._call(lane, run, item)

    def _single(self, run: Run[Item, Any], item: Item) -> Callable[[_Lane], None]:
        def alone(lane: _Lane) -> None:
            with self._lock:
                lane.call = (run, item, monotonic())
            if self._call(lane, run, item):
                with self._lock:
                    self._apart.pop(item, None)
                lane.retire()

        return alone

    def _call(self, lane: _Lane, run: Run[Item, Any], item: Item) -> bool:
        """Do one item's work; True when it came back before its lane was written off."""
        try:
            result, error = run.work(item), None
        except Exception as caught:  # noqa: BLE001  the guard: a fault in one item's work stays with that item
            result, error = None, caught
        with self._lock:
            lane.call = None
            if lane in self._lost:
                self._lost.discard(lane)
                self._stuck.pop(item, None)
                return False
            if error is None:
                run.results[item] = result
            else:
                run.errors[item] = error
            run.settle(1)
        return True
