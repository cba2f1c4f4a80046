"""Stacks collected in the background: in turn, at a bounded cost, and only of processes that can be read."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from gpulse.model.python_stack import ProcessStacks, StackProblem, StackTarget
from gpulse.sampling.stack_collector import StackCollector

PATIENCE_SECONDS = 60.0


class Reads:
    """Counts the reads of each process, and wakes up who waits for them."""

    def __init__(self, answer: Callable[[int], ProcessStacks] | None = None) -> None:
        self._answer = answer or (lambda pid: ProcessStacks(pid, 0.0))
        self._changed = threading.Condition()
        self.counts: Counter[int] = Counter()

    def __call__(self, pid: int) -> ProcessStacks:
        """Read a process."""
        with self._changed:
            self.counts[pid] += 1
            self._changed.notify_all()
        return self._answer(pid)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until the reads are as they should be."""
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_SECONDS)


class Clock:
    """A clock that stands still unless it is set, and counts who looks at it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls = threading.Semaphore(0)
        self._seen = 0

    def __call__(self) -> float:
        """The time."""
        self._calls.release()
        return self.now

    def wait_for_calls(self, count: int) -> None:
        """Wait until it was looked at this often in all."""
        while self._seen < count:
            assert self._calls.acquire(timeout=PATIENCE_SECONDS)
            self._seen += 1


def test_nothing_is_read_before_a_process_is_wanted() -> None:
    """There is not even a thread."""
    before = threading.active_count()
    collector = StackCollector(Reads())
    collector.watch(())

    assert before == threading.active_count()
    collector.close()


def test_wanted_processes_are_read_again_and_again() -> None:
    """Their stacks are taken once."""
    reads = Reads()
    collector = StackCollector(reads, interval_seconds=0.001)
    collector.watch([StackTarget(1, "main"), StackTarget(2, "worker")])
    reads.wait(lambda: min(reads.counts[1], reads.counts[2]) >= 3)
    collector.close()
    taken = collector.take()

    assert sum(reads.counts.values()) == len(taken) == collector.reads
    assert [] == collector.take()


def test_a_trainer_is_read_as_often_as_all_its_workers_together() -> None:
    """Roles take turns, however many workers there are."""
    reads = Reads()
    collector = StackCollector(reads, interval_seconds=0.0)
    collector.watch([StackTarget(1, "main"), *(StackTarget(pid, "worker") for pid in range(2, 10))])
    reads.wait(lambda: reads.counts[1] >= 40)
    collector.close()
    workers = sum(count for pid, count in reads.counts.items() if pid != 1)

    assert abs(reads.counts[1] - workers) <= 2
    assert 8 == sum(reads.counts[pid] >= 2 for pid in range(2, 10))


def test_costly_reads_are_spaced_out() -> None:
    """A read that took a second of CPU time is followed by a long pause."""
    reads = Reads(lambda pid: ProcessStacks(pid, 0.0, cpu_seconds=1000.0))
    clock = Clock()
    collector = StackCollector(reads, interval_seconds=0.0, monotonic=clock)
    collector.watch([StackTarget(1, "main")])
    clock.wait_for_calls(3)  # before the read, after it, and before the next one
    clock.now = 9999.0
    collector.watch([StackTarget(1, "main"), StackTarget(2, "main")])
    clock.wait_for_calls(4)
    before = dict(reads.counts)
    clock.now = 10_000.0
    collector.watch([StackTarget(2, "main")])
    reads.wait(lambda: reads.counts[2] >= 1)
    collector.close()

    assert {1: 1} == before
    assert {1: 1, 2: 1} == dict(reads.counts)


def test_a_read_that_raises_is_a_failure() -> None:
    """It is tried again, as any other that may work the next time."""

    def answer(_pid: int) -> ProcessStacks:
        raise MemoryError

    reads = Reads(answer)
    collector = StackCollector(reads, interval_seconds=0.0)
    collector.watch([StackTarget(1, "main")])
    reads.wait(lambda: reads.counts[1] >= 5)
    collector.close()
    problems = [stacks.problem for stacks in collector.take()]

    assert [StackProblem("failed", "process 1 could not be read: MemoryError")] * 5 == problems


def test_a_thread_that_cannot_be_started_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call tries again, and closing works in any case."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    reads = Reads()
    collector, closed = StackCollector(reads, interval_seconds=0.0), StackCollector(reads)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        collector.watch([StackTarget(1, "main")])
        closed.watch([StackTarget(1, "main")])
    closed.close()
    (refused,) = collector.take()
    collector.watch([StackTarget(1, "main")])
    reads.wait(lambda: reads.counts[1] >= 1)
    collector.close()

    assert StackProblem("failed", "process 1 could not be read: can't start new thread") == refused.problem


def test_a_process_that_cannot_be_read_is_tried_once() -> None:
    """One that failed for another reason is tried a few times."""

    def answer(pid: int) -> ProcessStacks:
        codes = {1: "not_permitted", 2: "failed"}
        problem = StackProblem(codes[pid], "no") if pid in codes else None  # type: ignore[arg-type]
        return ProcessStacks(pid, 0.0, problem=problem)

    reads = Reads(answer)
    collector = StackCollector(reads, interval_seconds=0.001)
    collector.watch([StackTarget(1, "main"), StackTarget(2, "main"), StackTarget(3, "main")])
    reads.wait(lambda: reads.counts[3] >= 30)
    collector.close()

    assert (1, 5) == (reads.counts[1], reads.counts[2])


def test_reading_stops_when_nobody_is_wanted() -> None:
    """At most the read that is under way ends."""
    reads = Reads()
    collector = StackCollector(reads, interval_seconds=0.0)
    collector.watch([StackTarget(1, "main")])
    reads.wait(lambda: reads.counts[1] >= 3)
    collector.watch(())
    collector.watch([StackTarget(2, "main")])
    reads.wait(lambda: reads.counts[2] >= 1)
    stopped = reads.counts[1]
    reads.wait(lambda: reads.counts[2] >= 50)
    collector.close()

    assert stopped == reads.counts[1]


def test_a_closed_collector_has_no_thread() -> None:
    """Closing it twice is fine, and it reads nothing anymore."""
    reads = Reads()
    collector = StackCollector(reads, interval_seconds=0.001)
    collector.watch([StackTarget(1, "main")])
    reads.wait(lambda: reads.counts[1] >= 1)
    collector.close()
    collector.close()
    collector.watch([StackTarget(2, "main")])

    assert 0 == reads.counts[2]
    assert not [thread for thread in threading.enumerate() if thread.name == "gpulse-stacks"]
