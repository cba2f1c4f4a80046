from __future__ import annotations

import pytest

from gpulse.cluster.head.head import SteadyClock


class Machine:
    """A machine whose clock can be set."""

    def __init__(self) -> None:
        self.wall = 1_000_000.0
        self.monotonic = 50.0
        self.clock = SteadyClock(lambda: self.wall, lambda: self.monotonic)

    def passes(self, seconds: float) -> None:
        """Both clocks go on."""
        self.wall += seconds
        self.monotonic += seconds


def test_it_tells_the_machines_time() -> None:
    """While nobody touches the clock there is no difference."""

    machine = Machine()
    machine.passes(10.0)

    assert machine.clock.now() == 1_000_010.0
    assert machine.clock.step() is None


def test_a_clock_that_is_set_back_is_sat_out() -> None:
    """Time goes on, and the step is told once."""

    machine = Machine()
    machine.wall -= 3600.0

    assert machine.clock.step() == pytest.approx(-3600.0)
    machine.passes(10.0)
    assert machine.clock.step() is None
    assert machine.clock.now() == 1_000_010.0


def test_a_clock_that_is_set_forward_is_followed() -> None:
    """A machine that started in 1970 and learnt the time later."""

    machine = Machine()
    machine.wall += 3600.0

    assert machine.clock.step() == pytest.approx(3600.0)
    assert machine.clock.now() == 1_003_600.0


def test_a_step_back_that_is_undone_leaves_no_trace() -> None:
    """Back by an hour and forward again: the same time as ever."""

    machine = Machine()
    machine.wall -= 3600.0
    machine.clock.step()
    machine.passes(5.0)
    machine.wall += 3600.0

    assert machine.clock.step() == pytest.approx(3600.0)
    assert machine.clock.now() == 1_000_005.0


def test_the_next_head_continues_after_the_last() -> None:
    """A clock that was set back while no head ran, or before the last head ended."""

    machine = Machine()
    assert machine.clock.continue_from(1_000_600.0) == pytest.approx(600.0)
    assert machine.clock.now() == pytest.approx(1_000_600.0)
    machine.passes(10.0)
    assert machine.clock.step() is None
    assert machine.clock.now() == pytest.approx(1_000_610.0)
    machine.wall += 700.0
    machine.clock.step()
    assert machine.clock.now() == pytest.approx(1_000_710.0)


def test_time_passes_between_two_heads() -> None:
    """The next head knows how far the last one was ahead, so that the times of frames in between are in order."""

    machine = Machine()
    machine.wall -= 600.0
    machine.clock.step()
    assert machine.clock.ahead_seconds == pytest.approx(600.0)
    last = machine.clock.now()
    machine.passes(20.0)
    clock = SteadyClock(lambda: machine.wall, lambda: machine.monotonic)
    assert clock.continue_from(last, machine.clock.ahead_seconds) == pytest.approx(600.0)
    assert clock.now() == pytest.approx(last + 20.0)


def test_a_clock_that_is_ahead_of_the_last_head_is_followed() -> None:
    """As after every ordinary start."""

    machine = Machine()
    assert machine.clock.continue_from(999_000.0) == 0.0
    assert machine.clock.now() == 1_000_000.0


def test_a_head_that_lived_in_the_far_future_is_not_continued() -> None:
    """Its clock was wrong: waiting for that time would take years."""

    machine = Machine()
    assert machine.clock.continue_from(9_000_000.0) == pytest.approx(8_000_000.0)
    assert machine.clock.now() == 1_000_000.0


def test_small_corrections_are_taken_over_without_running_backwards() -> None:
    """What a time daemon steers is no step."""

    machine = Machine()
    before = machine.clock.now()
    for _ in range(100):
        machine.passes(1.0)
        machine.wall -= 0.005
        assert machine.clock.step() is None
        assert machine.clock.now() > before
        before = machine.clock.now()

    assert machine.clock.now() == pytest.approx(machine.wall, abs=0.01)
