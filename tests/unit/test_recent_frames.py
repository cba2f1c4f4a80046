"""What came since the last sealing: asked, dropped, valid_summaries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from gpulse.errors import UsageError
from gpulse.store.history.duckdb_query import SealedHistory
from gpulse.store.history.reader import HistoryReader
from gpulse.store.history.recent_frames import RecentFrames
from tests.queries import query
from tests.unit.history_frames import BEGIN, GPUS, Fleet, power, run_of


@pytest.fixture
def history(tmp_path: Path) -> Iterator[SealedHistory]:
    """Nothing is sealed yet."""
    with closing(SealedHistory(tmp_path)) as empty:
        yield empty


def filled(fleet: Fleet, seconds: int = 300) -> RecentFrames:
    """Two nodes, one batch of ten frames after the other; positions count from 1."""
    recent = RecentFrames(fleet.layouts)
    position = 0
    for second in range(0, seconds, 10):
        for node in (1, 2):
            position += 1
            recent.add(position, fleet.batch(node, second, 10))
    return recent


def test_every_sample_comes_back_with_its_value(history: SealedHistory) -> None:
    """A query without a step gives all samples of a GPU in order, in the base unit."""
    samples = HistoryReader(history, filled(Fleet()))
    found = samples.series(query("gpu", "power_watts", start=BEGIN, end=BEGIN + 300, nodes=[2]))
    assert [(2, "GPU-2-0"), (2, "GPU-2-1")] == [tuple(series.key) for series in found]
    for gpu, series in enumerate(found):
        assert [*range(BEGIN, BEGIN + 300)] == series.times.tolist()
        assert np.allclose([power(2, gpu, second) for second in range(300)], series.values)


@pytest.mark.parametrize(
    ("statistic", "wanted"),
    [
        ("mean", [100.0295, 100.0895]),
        ("min", [100.0, 100.06]),
        ("max", [100.059, 100.119]),
        ("last", [100.059, 100.119]),
    ],
)
def test_steps_begin_at_multiples_of_their_length(
    history: SealedHistory, statistic: str, wanted: list[float]
) -> None:
    """A point stands at its step's beginning and is made of that step's samples alone."""
    found = HistoryReader(history, filled(Fleet())).series(
        query(
            "gpu",
            "power_watts",
            start=BEGIN,
            end=BEGIN + 120,
            step=60,
            subjects=["GPU-1-0"],
            statistic=statistic,
        )
    )
    assert [BEGIN, BEGIN + 60] == found[0].times.tolist()
    assert np.allclose(wanted, found[0].values)


def test_an_absent_value_is_unknown(history: SealedHistory) -> None:
    """NaN without steps; with steps only what is known counts, and a step without anything has no point."""
    recent = HistoryReader(history, filled(Fleet()))
    question = {"start": BEGIN, "end": BEGIN + 4, "subjects": ["GPU-1-0"]}
    plain = recent.series(query("gpu", "sm_active_ratio", **question))[0]
    assert [True, False, True, False] == np.isnan(plain.values).tolist()
    stepped = recent.series(query("gpu", "sm_active_ratio", step=1, **question))[0]
    assert [BEGIN + 1, BEGIN + 3] == stepped.times.tolist()
    assert [0.5, 0.5] == stepped.values.tolist()
    assert [] == recent.series(query("gpu", "temperature_celsius", **question))


def test_what_was_sealed_is_forgotten(history: SealedHistory) -> None:
    """Dropping goes by log positions, also in the middle of what lies together in memory."""
    fleet = Fleet()
    recent = filled(fleet)
    recent.drop_through(21)
    assert 39 * len(fleet.batch(1, 0, 10).frames) == recent.bytes
    ends = {
        series.key.node: series.times[0]
        for series in HistoryReader(history, recent).series(
            query("host", "cpu_utilization_ratio", start=0, end=BEGIN * 2)
        )
    }
    assert {1: BEGIN + 110, 2: BEGIN + 100} == ends
    recent.drop_through(60)
    assert (0, 0, []) == (recent.bytes, recent.last, list(recent._blocks))


def test_a_scan_gives_runs_and_sequence_numbers(history: SealedHistory) -> None:
    """Each sample says which frame of which run it was, and samples come in the order of time."""
    fleet = Fleet()
    samples = HistoryReader(history, filled(fleet, 10))
    (part,) = samples.scan(query("gpu", ["power_watts", "sm_active_ratio"], start=BEGIN, end=BEGIN + 600))
    assert 10 * 2 * GPUS == len(part.times)
    assert sorted(part.times.tolist()) == part.times.tolist()
    of_one = part.series == part.keys.index((2, "GPU-2-1"))
    assert [*range(1, 11)] == part.sequences[of_one].tolist()
    assert {int.from_bytes(run_of(2)[:8], "big")} == set(part.runs[of_one].tolist())
    assert {"power_watts", "sm_active_ratio"} == set(part.values)


def test_a_wrong_clock_is_put_right(history: SealedHistory) -> None:
    """The batch's shift is added to the times of its frames."""
    fleet = Fleet()
    recent = RecentFrames(fleet.layouts)
    recent.add(1, fleet.batch(1, 0, shift=-3_600_000_000))
    (series,) = HistoryReader(history, recent).series(
        query("host", "cpu_utilization_ratio", start=0, end=BEGIN * 2)
    )
    assert [BEGIN - 3600] == series.times.tolist()


def test_unknown_names_are_refused(history: SealedHistory) -> None:
    """Only the catalogue's metrics can be asked for."""
    recent = HistoryReader(history, RecentFrames({}))
    with pytest.raises(UsageError):
        recent.series(query("gpu", "power_watts; DROP TABLE x", start=0, end=1))
    with pytest.raises(UsageError):
        recent.series(query("moon", "power_watts", start=0, end=1))
    with pytest.raises(UsageError):
        recent.series(query("gpu", "power_watts", start=0, end=1, step=-1))
