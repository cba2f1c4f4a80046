"""Threads for calls that may never come back, so that one sick device cannot hold up the others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from time import monotonic
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Result = TypeVar("Result")


class Run(Generic[Item, Result]):
    """One round of the same work over several items."""

    def __init__(self, items: Iterable[Item], work: Callable[[Item], Result]) -> None:
        self.items = tuple(items)
        self.work = work
        self.results: dict[Item, Result] = {}
        """What came back so far, even if too late to be waited for."""
        self.errors: dict[Item, Exception] = {}
        """Items whose work raised, which is a fault of the work: it should report and not raise."""
        self._pending = len(self.items)
        self._done = threading.Event()
        self.settle(0)

    @property
    def finished(self) -> bool:
        """True when every item came back or was given up."""
        return self._done.is_set()

    def has(self, item: Item) -> bool:
        """True when this item came back."""
        return item in self.results or item in self.errors

    def wait(self, seconds: float) -> bool:
        """Wait until the round is finished or the time is over; True when it is finished."""
        return self._done.wait(max(0.0, seconds))

    def settle(self, count: int) -> None:
        """Count items as come back or given up."""
        self._pending -= count
        if self._pending <= 0:
            self._done.set()


class _Lane:
    """One thread, and the call it is in."""

    def __init__(self) -> None:
        self.call: tuple[Run[Any, Any], Any, float] | None = None
        """The round, the item, and the monotonic time at which the call began."""
        self.thread = threading.Thread()

    def start(self, name: str, target: Callable[..., object], *arguments: object) -> None:
        self.thread = threading.Thread(target=target, args=(self, *arguments), name=name, daemon=True)
        self.thread.start()


class Lanes(Generic[Item]):
    """A few threads that share rounds of work and replace each other when a call hangs.

    A call that does not come back in time costs its thread, which is written off and replaced. Until the
    call comes back its item is stuck and left out of new rounds; afterwards the item is on probation and
    runs on a thread of its own, where it cannot delay the others, until it comes back in time once.
    """

    def __init__(self, name: str, width: int) -> None:
        self._name = f"gpulse-{name}"
        self.width = max(1, width)
        """How many threads share the work when none of them hangs."""
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._waiting: deque[tuple[Run[Item, Any], Item]] = deque()
        self._staff: set[_Lane] = set()
        self._apart: set[_Lane] = set()
        self._lost: set[_Lane] = set()
        self._suspects: set[Item] = set()

    @property
    def busy(self) -> bool:
        """True while any call is out, stuck or not."""
        with self._lock:
            return bool(self._waiting) or any(lane.call for lane in self._all())

    def stuck_seconds(self, item: Item) -> float | None:
        """For how long a call about this item has not come back, None when none is out."""
        if not self._lost:
            return None
        with self._lock:
            since = self._stuck_since(item)
        return None if since is None else monotonic() - since

    def start(self, items: Sequence[Item], work: Callable[[Item], Result]) -> Run[Item, Result]:
        """Begin one round over the items that are not stuck."""
        with self._lock:
            free = [item for item in items if self._stuck_since(item) is None] if self._lost else items
            run = Run(free, work)
            for item in run.items:
                if item in self._suspects:
                    lane = _Lane()
                    lane.call = (run, item, monotonic())
                    self._apart.add(lane)
                    lane.start(f"{self._name}-apart", self._alone, run, item)
                else:
                    self._waiting.append((run, item))
            self._hire(self.width)
        return run

    def finish(self, run: Run[Item, Any], seconds: float) -> None:
        """Wait for a round, at most twice `seconds`; what has not come back by then is stuck."""
        if run.wait(seconds):
            return
        self.sweep(run, seconds * 0.9)
        with self._lock:
            self._hire(len(run.items))
        if not run.wait(seconds):
            with self._lock:
                left = [entry for entry in self._waiting if entry[0] is not run]
                run.settle(len(self._waiting) - len(left))
                self._waiting = deque(left)
            self.sweep(run, 0.0)  # last, so that no thread can begin another call of this round after it

    def sweep(self, run: Run[Item, Any], seconds: float) -> None:
        """Write off the threads whose call of this round has been out for longer than `seconds`."""
        now = monotonic()
        with self._lock:
            for lane in [*self._staff, *self._apart]:
                if lane.call is not None and lane.call[0] is run and now - lane.call[2] >= seconds:
                    self._staff.discard(lane)
                    self._apart.discard(lane)
                    self._lost.add(lane)
                    self._suspects.add(lane.call[1])
                    run.settle(1)
            self._hire(self.width)

    def close(self, seconds: float = 1.0) -> bool:
        """End the threads; False when one sits in a call that does not come back (it dies with the process)."""
        with self._lock:
            lanes = [*self._staff, *self._apart]
            self._staff.clear()
            self._waiting.clear()
            self._work.notify_all()
        deadline = monotonic() + seconds
        for lane in lanes:
            lane.thread.join(max(0.0, deadline - monotonic()))
        return not self._lost and not any(lane.thread.is_alive() for lane in lanes)

    def _all(self) -> list[_Lane]:
        return [*self._staff, *self._apart, *self._lost]

    def _stuck_since(self, item: Item) -> float | None:
        calls = (lane.call for lane in self._lost)
        return min((call[2] for call in calls if call is not None and call[1] == item), default=None)

    def _hire(self, most: int) -> None:
        """Wake or start as many threads as there is work for, up to a number."""
        self._work.notify(len(self._waiting))
        idle = sum(lane.call is None for lane in self._staff)
        for _ in range(min(most - len(self._staff), len(self._waiting) - idle)):
            lane = _Lane()
            self._staff.add(lane)
            lane.start(self._name, self._serve)

    def _serve(self, lane: _Lane) -> None:
        """Take one piece of work after the other, for as long as this lane is on the staff."""
        while True:
            with self._lock:
                while lane in self._staff and not self._waiting:
                    if len(self._staff) > self.width:
                        self._staff.discard(lane)
                    else:
                        self._work.wait()
                if lane not in self._staff:
                    return
                run, item = self._waiting.popleft()
                lane.call = (run, item, monotonic())
            if not self._call(lane, run, item):
                return

    def _alone(self, lane: _Lane, run: Run[Item, Any], item: Item) -> None:
        if self._call(lane, run, item):
            with self._lock:
                self._apart.discard(lane)

    def _call(self, lane: _Lane, run: Run[Item, Any], item: Item) -> bool:
        """Do one item's work; True when it came back before its lane was written off."""
        try:
            result, error = run.work(item), None
        except Exception as caught:  # noqa: BLE001  the guard: a fault in one item's work stays with that item
            result, error = None, caught
        with self._lock:
            lane.call = None
            if error is None:
                run.results[item] = result
            else:
                run.errors[item] = error
            if lane in self._lost:
                self._lost.discard(lane)
                return False
            self._suspects.discard(item)
            run.settle(1)
        return True
