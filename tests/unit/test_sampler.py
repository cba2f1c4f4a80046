from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from queue import Empty

import pytest

from gpulse.errors import ClosedError, RecordingError, UsageError
from gpulse.model.device import Node
from gpulse.model.frame import Frame
from gpulse.sampling import sampler as module
from gpulse.sampling.sampler import Sampler
from gpulse.sources.frame_source import EndOfRecordingError

INTERVAL = 0.05


class Clock:
    """Time that goes on only when somebody waits; takes the place of the sampler's `time` and of its wake-up queue."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        patch.setattr(module, "time", self)
        patch.setattr(module, "SimpleQueue", lambda: self)

    def time(self) -> float:
        """Return the wall clock."""
        return self.seconds

    def monotonic(self) -> float:
        """Return the steady clock."""
        return self.seconds

    def get(self, timeout: float) -> None:
        """Wait for a wake-up that does not come."""
        self.sleep(timeout)
        raise Empty

    def sleep(self, seconds: float) -> None:
        """Let time go on."""
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Samplers of this test live in a time of its own."""
    return Clock(monkeypatch)


class Scripted:
    """A source that follows a script, and then continues forever."""

    def __init__(self, *steps: Callable[[], object], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._steps = list(steps)
        self._monotonic = monotonic
        self.times: list[float] = []
        self.closed = 0

    def sample(self, now: float) -> Frame:
        """One frame, after whatever is scripted."""
        self.times.append(self._monotonic())
        if self._steps:
            self._steps.pop(0)()
        return Frame(now, 1000.0 + len(self.times), Node("scripted"))

    def close(self) -> None:
        """Count it."""
        self.closed += 1


def fail(error: Exception) -> Callable[[], object]:
    """A step that raises."""

    def step() -> None:
        raise error

    return step


def nothing() -> None:
    """A step that goes well."""


def take(sampler: Sampler, count: int) -> list[Frame]:
    """The first frames."""
    frames = []
    for frame in sampler:
        frames.append(frame)
        if len(frames) == count:
            break
    return frames


def test_ticks_keep_to_a_grid(clock: Clock) -> None:
    """Frames come at multiples of the interval after the first, and do not drift with what a sample takes."""

    source = Scripted(*[lambda: clock.sleep(0.4 * INTERVAL)] * 11, monotonic=clock.monotonic)
    take(Sampler(source, interval_seconds=INTERVAL), 11)
    ticks = [(moment - source.times[0]) / INTERVAL for moment in source.times]

    assert pytest.approx([*range(11)]) == ticks


def test_a_late_tick_does_not_move_the_later_ones(clock: Clock) -> None:
    """A sample that takes two and a half intervals skips the ticks it missed; the next ones are on the grid."""

    source = Scripted(nothing, lambda: clock.sleep(2.5 * INTERVAL), monotonic=clock.monotonic)
    take(Sampler(source, interval_seconds=INTERVAL), 5)
    ticks = [(moment - source.times[0]) / INTERVAL for moment in source.times]

    assert pytest.approx([0, 1, 4, 5, 6]) == ticks


def test_a_slow_consumer_gets_the_present_and_not_the_past(clock: Clock) -> None:
    """Missed samples are skipped."""

    source = Scripted(monotonic=clock.monotonic)
    sampler = Sampler(source, interval_seconds=INTERVAL)
    for number, _ in enumerate(sampler):
        if number == 0:
            clock.sleep(5.5 * INTERVAL)
        if number == 2:
            break
    ticks = [(moment - source.times[0]) / INTERVAL for moment in source.times]

    assert pytest.approx([0, 6, 7]) == ticks


def test_stop_from_another_thread_returns_at_once() -> None:
    """A sampler that waits for a far tick ends without waiting for it."""

    sampler = Sampler(Scripted(), interval_seconds=600.0)
    stopper = threading.Timer(0.05, sampler.stop)
    stopper.start()
    frames = list(sampler)
    stopper.join()

    assert 1 == len(frames)


def test_stop_from_a_signal_handler_returns_at_once() -> None:
    """The handler interrupts the very wait that it ends."""

    sampler = Sampler(Scripted(), interval_seconds=600.0)
    before = signal.signal(signal.SIGUSR1, lambda *_: sampler.stop())
    sender = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    sender.start()
    try:
        frames = list(sampler)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)

    assert 1 == len(frames)


def test_a_sampler_that_was_stopped_gives_nothing_more() -> None:
    """Not even one frame."""

    sampler = Sampler(Scripted(), interval_seconds=INTERVAL)
    sampler.stop()

    assert [] == list(sampler)


def test_the_end_of_a_recording_ends_the_frames() -> None:
    """As a plain end, not as an error."""

    sampler = Sampler(
        Scripted(nothing, nothing, fail(EndOfRecordingError("over"))), interval_seconds=INTERVAL
    )

    assert 2 == len(list(sampler))


def test_an_error_meant_for_people_is_raised() -> None:
    """A recording that is damaged in the middle is not something to go on from."""

    sampler = Sampler(Scripted(nothing, fail(RecordingError("line 3"))), interval_seconds=INTERVAL)

    with pytest.raises(RecordingError, match="line 3"):
        list(sampler)


def test_a_source_that_is_closed_under_the_sampler_ends_it() -> None:
    """Whoever closes a sampler from another thread meant it to end."""

    sampler = Sampler(Scripted(nothing, fail(ClosedError("closed"))), interval_seconds=INTERVAL)
    frames = []
    for frame in sampler:
        frames.append(frame)
        if len(frames) == 1:
            threading.Timer(0.0, sampler.stop).run()

    assert 1 == len(frames)


def test_a_closed_source_is_an_error() -> None:
    """This sampler was not stopped."""

    with pytest.raises(ClosedError):
        list(Sampler(Scripted(fail(ClosedError("closed"))), interval_seconds=INTERVAL))


def test_a_fault_in_a_source_is_a_frame_that_says_so() -> None:
    """The sampler does not die of it: the frame is empty, its health says why, and the next one is whole."""

    steps = (nothing, fail(ZeroDivisionError("oops")), fail(KeyError("again")))
    frames = take(Sampler(Scripted(*steps), interval_seconds=INTERVAL), 4)
    first, second = frames[1].health[0], frames[2].health[0]

    assert [(), (), None] == [frames[1].gpus, frames[1].processes, frames[1].host]
    assert ("sampler", "failed", True) == (first.source, first.code, "oops" in first.detail)
    assert frames[1].time == first.since == second.since
    assert [(), ()] == [frames[0].health, frames[3].health]


def test_the_frame_of_a_fault_fits_between_the_others() -> None:
    """It is of the same node, and its clock goes on from the source's own."""

    frames = take(Sampler(Scripted(nothing, fail(ValueError("x"))), interval_seconds=INTERVAL), 3)

    assert [Node("scripted")] * 3 == [frame.node for frame in frames]
    assert frames[0].monotonic < frames[1].monotonic < frames[2].monotonic


def test_a_fault_in_the_very_first_frame() -> None:
    """There is no node yet to go by; the frame names this machine."""

    frame = take(Sampler(Scripted(fail(ValueError("x"))), interval_seconds=INTERVAL), 1)[0]

    assert os.uname().nodename == frame.node.name


def test_interrupts_are_not_swallowed() -> None:
    """Ctrl-C inside a source ends the program, not the frame."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(Sampler(Scripted(interrupt), interval_seconds=INTERVAL))


@pytest.mark.parametrize("interval", [0.0, -1.0, 0.049, float("nan")])
def test_an_interval_that_is_too_short_is_refused(interval: float) -> None:
    """Before anything is opened."""

    with pytest.raises(UsageError) as caught:
        Sampler(Scripted(), interval_seconds=interval)

    assert "choose a longer interval" == caught.value.hint


def test_leaving_the_context_closes_the_source() -> None:
    """Even when the frames were never asked for."""

    source = Scripted()
    with Sampler(source, interval_seconds=INTERVAL):
        pass

    assert 1 == source.closed
