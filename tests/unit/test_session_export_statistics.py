from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulse.export.session_file.frame_grid import SampleTable
from gpulse.export.session_file.gpu_statistics import Distribution, EnergyMeter

NAN = math.nan


def nearest_rank(values: list[float], percentile: int) -> float:
    """The textbook's percentile."""
    return sorted(values)[math.ceil(percentile / 100 * len(values)) - 1]


@settings(deadline=None)
@given(st.lists(st.integers(0, 10_000).map(lambda hundredths: hundredths / 100), min_size=1, max_size=200))
def test_percentiles_of_percents_are_exact(values: list[float]) -> None:
    """Files write hundredths, and classes are as fine."""
    found = Distribution(is_percent=True)
    for value in values:
        found.add(np.array([[value]]))

    seen = found.of(0)

    assert seen is not None
    assert (len(values), min(values), max(values)) == (seen.known, seen.min, seen.max)
    assert pytest.approx(sum(values) / len(values)) == seen.mean
    for percentile in (5, 25, 50, 75, 90, 95, 99):
        assert pytest.approx(nearest_rank(values, percentile)) == getattr(seen, f"p{percentile}")


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=200))
def test_percentiles_of_rates_are_close(values: list[float]) -> None:
    """Off by half a percent at most; what is below a millionth counts as nothing."""
    found = Distribution(is_percent=False)
    found.add(np.array(values).reshape(-1, 1))

    seen = found.of(0)

    assert seen is not None
    for percentile in (50, 90, 95, 99):
        assert pytest.approx(nearest_rank(values, percentile), rel=0.0051, abs=1e-6) == getattr(
            seen, f"p{percentile}"
        )


def test_several_columns_together_and_columns_that_come_later() -> None:
    """A node's figures are those of all values of its GPUs."""
    found = Distribution(is_percent=True)
    found.add(np.array([[10.0], [20.0]]))
    found.add(np.array([[30.0, 90.0], [NAN, 100.0]]))

    one, both = found.of(0), found.of([0, 1])

    assert one is not None
    assert both is not None
    assert (3, 20.0, 20.0) == (one.known, one.mean, one.p50)
    assert (5, 50.0, 30.0, 100.0) == (both.known, both.mean, both.p50, both.max)
    assert found.of(7) is None


def test_nothing_known_has_no_statistics() -> None:
    """Not zero."""
    found = Distribution(is_percent=True)
    found.add(np.array([[NAN]]))

    assert found.of(0) is None


def energy(times: list[float], power: list[float], counter: list[float], cut: int) -> float | None:
    """The energy of one GPU whose samples come in two pieces."""
    found = EnergyMeter(1, max_gap_seconds=10.0)
    for part in (slice(None, cut), slice(cut, None)):
        table = SampleTable(
            np.zeros(len(times[part]), np.int64),
            np.array(times[part]),
            {"power_watts": np.array(power[part]), "energy_joules_total": np.array(counter[part])},
        )
        found.add(table)
    return found.joules(0)


@pytest.mark.parametrize("cut", [0, 1, 17, 30, 61, 100])
def test_energy_from_the_counter_with_power_at_both_ends(cut: int) -> None:
    """The counter moves every 30 s; before its first and after its last step the power draw tells."""
    times = [float(second) for second in range(101)]
    counter = [1000.0 + 30 * 400.0 * ((second + 10) // 30) for second in range(101)]

    found = energy(times, [300.0] * 101, counter, cut)

    assert pytest.approx(20 * 300 + 60 * 400 + 20 * 300) == found


def test_energy_without_a_counter_or_without_power() -> None:
    """One is enough, and without both nothing is claimed."""
    times = [0.0, 1.0, 2.0, 3.0]

    assert 900.0 == energy(times, [300.0] * 4, [NAN] * 4, 2)
    assert 60.0 == energy(times, [NAN] * 4, [100.0, 120.0, 140.0, 160.0], 2)
    assert energy(times, [NAN] * 4, [NAN] * 4, 2) is None


def test_energy_over_a_silence_is_not_made_up() -> None:
    """Nobody knows what the power was."""
    assert 200.0 == energy([0.0, 1.0, 100.0, 101.0], [100.0] * 4, [NAN] * 4, 1)


def test_a_counter_that_ran_backwards_tells_nothing() -> None:
    """As after a reload of the driver."""
    assert 30.0 == energy([0.0, 1.0, 2.0, 3.0], [NAN] * 4, [100.0, 120.0, 0.0, 10.0], 2)
