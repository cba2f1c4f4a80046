from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulse.export.session_file.frame_grid import FrameGrid, FrameRows, SampleTable, StepAssigner

START = 1_800_000_000.0


def steps(*positions: float) -> list[int]:
    """The steps that frames at these positions get."""
    found: list[int] = StepAssigner().steps(np.array(positions)).tolist()
    return found


def filled(
    times: list[float], count: int, cuts: list[int] | None = None, interval: float = 1.0
) -> list[float | None]:
    """The row of one GPU whose samples have their own number as value, given in as many pieces as `cuts` makes."""
    grid = FrameGrid(start=START, interval_seconds=interval, steps=count, nodes=[0], names=["gpu_util"])
    rows: list[FrameRows] = []
    for part in np.split(np.arange(len(times)), cuts or []):
        if len(part):
            moments = START + np.array(times)[part]
            values = {"gpu_util": part.astype(np.float64)}
            rows += grid.add(SampleTable(np.zeros(len(part), np.int64), moments, values))
    rows += grid.finish()
    assert [row.first for row in rows] == np.cumsum([0, *(row.length for row in rows)])[:-1].tolist()
    found = [value for row in rows for value in row.values["gpu_util"][:, 0].tolist()]
    return [None if value != value else value for value in found]  # noqa: PLR0124


def test_frames_in_the_middle_of_steps() -> None:
    """Every frame belongs to the step it was taken in."""
    assert [0, 1, 2, 3] == steps(0.5, 1.5, 2.4, 3.6)


@pytest.mark.parametrize(
    "positions",
    [
        (0.02, 0.98, 2.02, 2.98, 4.02),
        (0.98, 2.02, 3.02, 3.98, 5.02),
        (0.02, 0.97, 1.98, 2.97, 4.01),
        (0.98, 2.02, 2.98, 4.02, 4.98),
    ],
)
def test_jitter_around_the_edge_of_steps_makes_no_gaps(positions: tuple[float, ...]) -> None:
    """A node that samples as often as there are steps fills every one of them, once."""
    assert [0, 1, 2, 3, 4] == steps(*positions)


@pytest.mark.parametrize("phase", [0.0, 0.02, 0.3, 0.5, 0.7, 0.98])
def test_a_missing_second_stays_a_gap(phase: float) -> None:
    """A frame that was not taken leaves one step empty, wherever in a step the node samples."""
    positions = [place + 1 + phase for place in range(20) if place not in (5, 11, 12)]

    found = steps(*positions)

    assert sorted(set(found)) == found
    assert 3 == found[-1] - found[0] + 1 - len(found)
    assert [place for place in range(found[0], found[-1]) if place not in found] == [
        found[0] + 5,
        found[0] + 11,
        found[0] + 12,
    ]


def test_the_newest_of_several_samples_counts() -> None:
    """A node that samples twice a step is not moved about, and a silent second stays empty."""
    times = [0.2, 0.7, 2.2, 2.7, 3.2, 3.7]

    assert [1, None, 3, 5] == filled(times, 4)


def test_a_node_that_samples_more_slowly_leaves_steps_empty() -> None:
    """Nothing is made up between two samples."""
    assert [0, None, 1, None, 2, None] == filled([0.5, 2.5, 4.5], 6)


def test_a_slightly_slow_clock_skips_one_step_now_and_then() -> None:
    """Not a flurry of empty and double steps around every meeting with an edge."""
    found = steps(*(0.4 + place * 1.004 for place in range(1000)))

    assert 1000 == len(set(found))
    assert found[-1] + 1 - 1000 in (3, 4)


def test_a_slightly_fast_clock_drops_one_frame_now_and_then() -> None:
    """And leaves no step empty."""
    found = steps(*(0.4 + place * 0.996 for place in range(1000)))

    assert set(range(found[-1] + 1)) == set(found)
    assert 996 <= len(set(found)) <= 997


@settings(deadline=None)
@given(
    phase=st.floats(0.0, 0.999),
    jitter=st.lists(st.floats(-0.2, 0.2), min_size=30, max_size=120),
    cuts=st.lists(st.integers(1, 119), max_size=4),
)
def test_equal_pace_fills_every_step_once(phase: float, jitter: list[float], cuts: list[int]) -> None:
    """Whatever the phase and the jitter, and wherever the stretches of samples are cut."""
    times = [max(0.0, place + phase + late) for place, late in enumerate(jitter)]
    cut = sorted({place for place in cuts if 20 <= place < len(times) - 20})

    found = filled(times, len(times) + 2, cut)

    known = [value for value in found if value is not None]
    first = found.index(known[0])
    assert list(range(len(times))) == known
    assert len(times) == len(found[first : first + len(times)])
    assert None not in found[first : first + len(times)]


@settings(deadline=None)
@given(
    paces=st.lists(st.floats(0.01, 9.0), min_size=1, max_size=80),
    cuts=st.lists(st.integers(1, 79), max_size=4),
)
def test_no_sample_serves_two_steps_or_one_far_away(paces: list[float], cuts: list[int]) -> None:
    """Whenever samples come: a value stands within half a step of where it was taken, and once."""
    times = np.cumsum(paces).tolist()

    found = filled(times, int(times[-1]) + 2, sorted({place for place in cuts if place < len(times)}))

    known = [(step, int(value)) for step, value in enumerate(found) if value is not None]
    assert len(known) == len({value for _, value in known})
    assert all(
        step - 0.5 <= times[value] + 1e-3 and times[value] - 1e-3 <= step + 1.5 for step, value in known
    )
    assert sorted(value for _, value in known) == [value for _, value in known]


def test_a_week_of_silence_is_given_piece_by_piece() -> None:
    """Rows come in bounded numbers, however long nothing came."""
    grid = FrameGrid(start=START, interval_seconds=0.5, steps=1_209_600, nodes=[0] * 8, names=["gpu_util"])
    late = SampleTable(np.zeros(1, np.int64), np.array([START + 604_000.0]), {"gpu_util": np.array([1.0])})

    lengths = [rows.length for rows in grid.add(late)] + [rows.length for rows in grid.finish()]

    assert 1_209_600 == sum(lengths)
    assert max(lengths) <= 8192


def test_samples_on_the_dot_belong_to_the_step_that_begins() -> None:
    """Though times are kept in binary, and a sum of them can be a little less than it should."""
    times = [round(place * 0.1, 6) for place in range(100)]

    assert list(range(100)) == filled(times, 100, interval=0.1)
