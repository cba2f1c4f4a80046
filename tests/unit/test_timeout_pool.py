from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpulse.sources.timeout_pool import PoolBatch, TimeoutPool

PATIENCE_SECONDS = 60.0
"""How long a test waits for what must happen; only a failing test waits that long."""


class Sick:
    """Work that hangs for some items until it is let go."""

    def __init__(self, *items: int) -> None:
        self.items = set(items)
        self.entered = threading.Semaphore(0)
        self.released = threading.Event()
        self.threads: dict[int, str] = {}

    def __call__(self, item: int) -> int:
        """Answer, sooner or later."""
        self.threads[item] = threading.current_thread().name
        if item in self.items:
            self.entered.release()
            self.released.wait()
        return item * 10


@contextmanager
def lanes_of(width: int, sick: Sick | None = None) -> Iterator[TimeoutPool[int]]:
    """Lanes that are closed afterwards, with whatever hung released."""
    lanes: TimeoutPool[int] = TimeoutPool("test", width)
    try:
        yield lanes
    finally:
        if sick is not None:
            sick.released.set()
        lanes.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread to get somewhere."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.001)


def round_with_a_hang(lanes: TimeoutPool[int], sick: Sick, items: list[int]) -> PoolBatch[int, int]:
    """Carry out a round in which one call hangs, and write that call off once it is the only one that is out."""
    run = lanes.start(items, sick)
    sick.entered.acquire()
    if lanes.width > 1:
        until(lambda: len(run.results) == len(items) - 1)
    lanes.sweep(run, 0.0)
    until(lambda: run.finished)
    return run


def test_every_item_comes_back() -> None:
    """A round brings one result for each item."""

    with lanes_of(3) as lanes:
        run = lanes.start(range(100), lambda item: item * item)
        lanes.finish(run, PATIENCE_SECONDS)

    assert {item: item * item for item in range(100)} == run.results
    assert run.finished


def test_an_empty_round_is_finished_at_once() -> None:
    """Nothing to do is done."""

    with lanes_of(1) as lanes:
        run = lanes.start([], lambda item: item)

        assert run.finished


def test_work_that_raises_costs_only_its_item() -> None:
    """The error is kept with its item; the others are not touched, and the thread lives on."""

    with lanes_of(1) as lanes:
        run: PoolBatch[int, float] = lanes.start([1, 0, 2], lambda item: 6 / item)
        lanes.finish(run, PATIENCE_SECONDS)

    assert {1: 6.0, 2: 3.0} == run.results
    assert [0] == list(run.errors)
    assert isinstance(run.errors[0], ZeroDivisionError)


@pytest.mark.parametrize("width", [1, 3])
def test_a_hang_costs_only_its_item(width: int) -> None:
    """The items behind a call that hangs come home in the same round, before that call does."""

    patience = 2.0
    sick = Sick(2)
    with lanes_of(width, sick) as lanes:
        run = lanes.start(range(6), sick)
        sick.entered.acquire()
        lanes.finish(run, patience)

        assert {item: item * 10 for item in (0, 1, 3, 4, 5)} == run.results
        assert run.finished
        assert (lanes.stuck_seconds(2) or 0) >= 0.9 * patience
        assert lanes.stuck_seconds(1) is None


def test_a_stuck_item_is_left_out_of_new_rounds() -> None:
    """While a call is out, nobody calls again, and the round does not wait."""

    sick = Sick(1)
    with lanes_of(1, sick) as lanes:
        round_with_a_hang(lanes, sick, [0, 1, 2])
        run = lanes.start([0, 1, 2], sick)
        lanes.finish(run, PATIENCE_SECONDS)

        assert (0, 2) == run.items
        assert {0: 0, 2: 20} == run.results


def test_probation_is_spent_apart_and_ends_with_one_good_call() -> None:
    """After its call came back, an item runs on a thread of its own once, and then with the others again."""

    sick = Sick(1)
    with lanes_of(1, sick) as lanes:
        round_with_a_hang(lanes, sick, [0, 1])
        sick.released.set()
        until(lambda: lanes.stuck_seconds(1) is None)
        names = []
        for _ in range(2):
            run = lanes.start([0, 1], sick)
            lanes.finish(run, PATIENCE_SECONDS)
            names.append(sick.threads[1])

    assert {0: 0, 1: 10} == run.results
    assert ["gpulse-test-apart", "gpulse-test"] == names


def test_a_slow_item_on_probation_delays_nobody() -> None:
    """An item that hangs again costs its own thread and no other."""

    sick = Sick(1)
    with lanes_of(1, sick) as lanes:
        round_with_a_hang(lanes, sick, [0, 1])
        sick.released.set()
        until(lambda: lanes.stuck_seconds(1) is None)
        sick.released.clear()
        run = lanes.start([0, 1, 2], sick)
        until(lambda: {0, 2} <= run.results.keys())
        lanes.finish(run, 0.05)

        assert {0: 0, 2: 20} == run.results
        assert lanes.stuck_seconds(1) is not None


def test_a_late_result_still_lands_in_its_round() -> None:
    """What comes back after it was given up is kept, for who still wants it."""

    sick = Sick(1)
    with lanes_of(1, sick) as lanes:
        run = round_with_a_hang(lanes, sick, [1])
        before = dict(run.results)
        sick.released.set()
        until(lambda: lanes.stuck_seconds(1) is None)

    assert {} == before
    assert {1: 10} == run.results


def test_rounds_that_wait_behind_a_hang_are_not_lost() -> None:
    """A second round over the same item ends, even though the thread it waited for was written off."""

    sick = Sick(1)
    with lanes_of(1, sick) as lanes:
        first = lanes.start([1], sick)
        sick.entered.acquire()
        second = lanes.start([2], sick)
        lanes.sweep(first, 0.0)

        assert second.wait(PATIENCE_SECONDS)
        assert {2: 20} == second.results


def test_several_rounds_of_an_item_on_probation_all_end() -> None:
    """The first good call ends the probation; the rounds begun with it are still carried out."""

    sick = Sick(1)
    with lanes_of(4, sick) as lanes:
        round_with_a_hang(lanes, sick, [1])
        sick.released.set()
        until(lambda: lanes.stuck_seconds(1) is None)
        runs = [lanes.start([1], sick) for _ in range(3)]

        assert [True] * 3 == [run.wait(PATIENCE_SECONDS) for run in runs]
        assert [{1: 10}] * 3 == [run.results for run in runs]


def test_an_item_stuck_twice_stays_stuck_until_both_calls_are_back() -> None:
    """Two rounds may hang on one item; the first to come back does not clear the other."""

    calls = [Sick(1), Sick(1)]
    with lanes_of(4) as lanes:
        runs = [lanes.start([1], sick) for sick in calls]
        for sick, run in zip(calls, runs, strict=True):
            sick.entered.acquire()
            lanes.sweep(run, 0.0)
        calls[0].released.set()
        until(lambda: 1 in runs[0].results)
        still = lanes.stuck_seconds(1)
        calls[1].released.set()
        until(lambda: lanes.stuck_seconds(1) is None)

        assert still is not None
        assert not lanes.busy


def test_work_for_another_round_does_not_wait_while_threads_are_free() -> None:
    """With room for two, a busy thread does not hold up the next round."""

    sick = Sick(1)
    with lanes_of(2, sick) as lanes:
        lanes.start([1], sick)
        sick.entered.acquire()
        run = lanes.start([2], sick)

        assert run.wait(PATIENCE_SECONDS)


def test_no_more_threads_stay_than_the_width() -> None:
    """Threads taken on to get past a hang leave again."""

    sick = Sick(0, 1)
    with lanes_of(2, sick) as lanes:
        run = lanes.start(range(20), sick)
        for _ in sick.items:
            sick.entered.acquire()
        lanes.finish(run, 0.05)
        sick.released.set()
        until(lambda: lanes.stuck_seconds(0) is None and lanes.stuck_seconds(1) is None)

        until(lambda: sum(t.name.startswith("gpulse-test") for t in threading.enumerate()) <= 2)


def test_close_with_a_hung_call_does_not_wait_for_it() -> None:
    """Closing says that a call is still out, and does so before that call is back."""

    sick = Sick(1)
    lanes: TimeoutPool[int] = TimeoutPool("test", 2)
    round_with_a_hang(lanes, sick, [0, 1])
    calm = lanes.close(0.2)
    sick.released.set()

    assert not calm


def test_close_waits_for_a_call_that_is_nearly_done() -> None:
    """A call that comes back in time makes a calm end."""

    with lanes_of(1) as lanes:
        lanes.start([1], lambda _: time.sleep(0.05))

        assert lanes.close(PATIENCE_SECONDS)


def test_closing_twice_is_fine() -> None:
    """The second close has nothing left to do."""

    lanes: TimeoutPool[int] = TimeoutPool("test", 2)
    lanes.finish(lanes.start([0], lambda item: item), PATIENCE_SECONDS)

    assert [True, True] == [lanes.close(), lanes.close()]


@pytest.mark.parametrize("width", [1, 3])
def test_no_result_is_lost_under_stress(width: int) -> None:
    """After a thousand rounds with odd delays and now and then a slow item, every item is answered."""

    chance = random.Random(7)

    def work(item: int) -> int:
        time.sleep(0.03 if chance.random() < 0.002 else chance.random() * 0.0002)
        return item

    with lanes_of(width) as lanes:
        for _ in range(1000):
            run = lanes.start(range(8), work)
            lanes.finish(run, 0.01)
            assert run.finished
        until(lambda: not lanes.busy)
        last = lanes.start(range(8), lambda item: item)
        lanes.finish(last, PATIENCE_SECONDS)

    assert {item: item for item in range(8)} == last.results


def test_concurrent_rounds_keep_their_own_results() -> None:
    """Several threads share the lanes; each gets what it asked for."""

    with lanes_of(4) as lanes:
        answers: dict[int, bool] = {}

        def ask(caller: int) -> None:
            rounds = [lanes.start(range(10), lambda item: (caller, item)) for _ in range(50)]
            answers[caller] = all(
                run.wait(PATIENCE_SECONDS) and run.results == {item: (caller, item) for item in range(10)}
                for run in rounds
            )

        threads = [threading.Thread(target=ask, args=(caller,)) for caller in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert dict.fromkeys(range(6), True) == answers
