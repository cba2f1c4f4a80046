"""Collect stacks of Python processes in the background, a few times a second and at a bounded cost."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable

from gpulse.model.finding import CodeRole
from gpulse.model.python_stack import ProcessStacks, StackProblem, StackTarget, is_given_up
from gpulse.sources.python_stacks import StackReader

INTERVAL_SECONDS = 0.5
"""Time between two reads of the same process."""
MAX_CPU_SHARE = 0.1
"""Largest part of one CPU that all reads together may use."""
_MAX_UNTAKEN = 1000
_MAX_WAIT_SECONDS = 30.0
_CLOSE_SECONDS = 5.0

StackFunction = Callable[[int], ProcessStacks]


class StackCollector:
    """Reads the stacks of the wanted processes in a thread of its own, until no process is wanted.

    The processes on the GPU and their workers are read in turn: a trainer with many workers is still read about twice
    a second. The time between two reads grows with what they cost, so that they stay below `MAX_CPU_SHARE`. A process
    whose stacks cannot be read is given up: at once where this will not change, else after several failures in a row.
    """

    def __init__(
        self,
        read: StackFunction,
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        max_cpu_share: float = MAX_CPU_SHARE,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the collection; the thread starts with the first process that is wanted.

        Args:
            read: Returns the stacks of one process.
            interval_seconds: Time between two reads of the same process.
            max_cpu_share: Largest part of one CPU that the reads may use.
            monotonic: Clock for the intervals.
        """
        self._read = read
        self._interval = interval_seconds
        self._max_cpu_share = max_cpu_share
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._targets: tuple[StackTarget, ...] = ()
        self._due: dict[int, float] = {}
        """Monotonic time of the next read of each process."""
        self._resume_at = -math.inf
        """Monotonic time before which nothing is read, because of what the last read cost."""
        self._role_read_at: dict[CodeRole, float] = {}
        self._failures: dict[int, int] = {}
        """Number of failures in a row of each process."""
        self._unreadable: set[int] = set()
        self._done: list[ProcessStacks] = []
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self.reads = 0
        """Number of reads so far."""
        self.cpu_seconds = 0.0
        """CPU time of all reads so far."""

    def watch(self, targets: Iterable[StackTarget]) -> None:
        """Read these processes from now on, and no others; none stops reading."""
        with self._changed:
            self._targets = tuple(dict.fromkeys(targets))
            wanted = {target.pid for target in self._targets}
            self._due = {pid: due for pid, due in self._due.items() if pid in wanted}
            self._failures = {pid: count for pid, count in self._failures.items() if pid in wanted}
            self._unreadable &= (
                wanted  # a process that is wanted again later may be another one with the same ID
            )
            is_running = self._thread is not None and self._thread.is_alive()
            if self._targets and not is_running and not self._is_closed:
                self._start()
            self._changed.notify()

    def take(self) -> list[ProcessStacks]:
        """Return the stacks since the last call, oldest first."""
        with self._changed:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Stop reading; a read in progress is waited for."""
        with self._changed:
            self._is_closed = True
            self._targets = ()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_SECONDS)

    def _start(self) -> None:
        """Start the thread; where the system has no thread left, the next call of `watch` tries again."""
        thread = threading.Thread(target=self._run, name="gpulse-stacks", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._done += [_failed(target.pid, error) for target in self._targets]
            del self._done[:-_MAX_UNTAKEN]
        else:
            self._thread = thread

    def _run(self) -> None:
        while (target := self._next()) is not None:
            try:
                stacks = self._read(target.pid)
            except Exception as error:  # noqa: BLE001  such as too little memory: the others can still be read
                stacks = _failed(target.pid, error)
            with self._changed:
                self._note(target, stacks, self._monotonic())

    def _next(self) -> StackTarget | None:
        """Wait until a process is due, and return it; None when the collection is closed."""
        with self._changed:
            while not self._is_closed:
                now = self._monotonic()
                targets = [target for target in self._targets if target.pid not in self._unreadable]
                due = [target for target in targets if self._due.get(target.pid, now) <= now]
                if due and self._resume_at <= now:
                    return min(due, key=self._order)
                soonest = min((self._due.get(target.pid, now) for target in targets), default=math.inf)
                wait = max(soonest, self._resume_at) - now
                self._changed.wait(min(wait, _MAX_WAIT_SECONDS))
            return None

    def _order(self, target: StackTarget) -> tuple[float, float]:
        """Sort key: the role that was not read for longer first, then the process that is due for longer."""
        return self._role_read_at.get(target.role, -math.inf), self._due.get(target.pid, -math.inf)

    def _note(self, target: StackTarget, stacks: ProcessStacks, now: float) -> None:
        self.reads += 1
        self.cpu_seconds += stacks.cpu_seconds
        self._role_read_at[target.role] = now
        self._due[target.pid] = now + self._interval
        self._resume_at = now + stacks.cpu_seconds / self._max_cpu_share
        if stacks.problem is None:
            self._failures.pop(target.pid, None)
        else:
            failures = self._failures[target.pid] = self._failures.get(target.pid, 0) + 1
            if is_given_up(stacks.problem, failures):
                self._unreadable.add(target.pid)
        self._done.append(stacks)
        del self._done[:-_MAX_UNTAKEN]


def collect_with(reader: StackReader) -> StackCollector:
    """Return a collector that reads processes with py-spy."""
    return StackCollector(lambda pid: reader.read(pid, time.time))


def _failed(pid: int, error: Exception) -> ProcessStacks:
    problem = StackProblem("failed", f"process {pid} could not be read: {str(error) or type(error).__name__}")
    return ProcessStacks(pid, time.time(), problem=problem)
