from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpulse.errors import UsageError
from gpulse.integrations.dask.csv_files import parse_record
from gpulse.integrations.dask.metric_peaks import compute_peaks
from tests.unit.dask_records import Plan, lines_of, record, table

COLUMNS = ("tasks", "mem-util", "cpu", "disks", "word")
TWO = {
    index: table(
        COLUMNS,
        [0, 0, 0.0, [], [99, 1], 0.9, {"sda": 1}, "a"],
        [1, 1, 0.2, ["t"], [10 + index, None], 0.5, {"sda": 1}, "a"],
        [1, 2, 0.4, ["t"], [5, None], None, {"sda": 1}, "a"],
        [2, 1, 0.6, ["t"], [7.25, 8], 0.25, {"sda": 1}, "a"],
        [1, 2, 0.8, ["t"], [12 + index, None], 0.1, {"sda": 1}, "a"],
    )
    for index in (0, 1)
}


def test_peaks_by_job() -> None:
    """One for each GPU, None where it was never known; what was seen without a job is in none of them."""

    assert [{1: [12, None], 2: [7.25, 8]}, {1: [13, None], 2: [7.25, 8]}] == compute_peaks(TWO, "mem-util")


def test_peaks_of_everything() -> None:
    """What was seen without a job counts."""

    assert [[99, 8], [99, 8]] == compute_peaks(TWO, "mem-util", per_job=False)


def test_workers_come_in_the_order_asked_for() -> None:
    """Also twice, and as numbers of numpy."""

    assert [{1: [13, None], 2: [7.25, 8]}] == compute_peaks(TWO, "mem-util", workers=[1])
    assert [[99, 8]] * 3 == compute_peaks(TWO, "mem-util", [1, 0, np.int64(1)], per_job=False)
    assert [] == compute_peaks(TWO, "mem-util", workers=[])
    assert [] == compute_peaks({}, "mem-util")


def test_a_metric_of_the_worker_has_one_peak() -> None:
    """A list all the same."""

    assert [{1: [0.5], 2: [0.25]}] == compute_peaks(TWO, "cpu", [0])
    assert [[0.9]] == compute_peaks(TWO, "cpu", [0], per_job=False)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([[1], [2, 3]], {1: [2, 3], 2: [None, None]}),
        ([[1, 2, 3], [4]], {1: [4, 2, 3], 2: [None] * 3}),
        ([[None, None], None], {1: [None, None], 2: [None, None]}),
        ([None, None], {1: [None], 2: [None]}),
        ([[], []], {1: [], 2: []}),
        ([-5, -3], {1: [-3], 2: [None]}),
        ([2**70, 1.5], {1: [2**70], 2: [None]}),
    ],
)
def test_peaks_of_odd_records(cells: list[Any], expected: dict[int, list[Any]]) -> None:
    """GPUs that came and went, no GPUs, nothing known, negative and huge numbers."""
    lines = [[1, 1, place / 5, cell] for place, cell in enumerate(cells)]

    assert [expected] == compute_peaks({0: table(["m"], *lines, [2, 1, 9.0, None])}, "m")


def test_peaks_of_a_long_record_are_those_of_its_lines() -> None:
    """Blocks of lines come together."""
    plan = Plan(metrics=("compute-util",), lines=6000, gpus=8, jobs=3)
    lines = list(lines_of(plan))
    expected = {
        job: [max(line[3][gpu] for line in lines if line[0] == job) for gpu in range(8)] for job in (1, 2, 3)
    }

    assert [expected] == compute_peaks({0: parse_record(*record(plan))}, "compute-util")


@pytest.mark.parametrize("metric", ["compute-util", "job", "timestamp", "", None, 3])
def test_a_metric_that_was_not_tracked_is_refused_with_those_that_were(metric: Any) -> None:
    """The labels of a record are none either."""

    with pytest.raises(UsageError, match="was not tracked; tracked metrics: mem-util, cpu, disks, word"):
        compute_peaks(TWO, metric)


@pytest.mark.parametrize("metric", ["tasks", "disks", "word"])
def test_a_metric_without_numbers_has_no_peak(metric: str) -> None:
    """Keys of tasks, objects and texts."""

    with pytest.raises(UsageError, match=f"'{metric}' are not numbers"):
        compute_peaks(TWO, metric)


@pytest.mark.parametrize("workers", [[2], [0, -1], [True], ["0"], [0.0], "0", 1])
def test_a_worker_that_does_not_exist_is_refused(workers: Any) -> None:
    """With those there are, or with what an index is."""

    with pytest.raises(UsageError, match=r"workers: 0, 1|must be a number|list of indices"):
        compute_peaks(TWO, "mem-util", workers)


def test_many_workers_are_named_briefly() -> None:
    """From the first to the last."""
    many = dict.fromkeys(range(64), TWO[0])

    with pytest.raises(UsageError, match="there is no worker 64; workers: 0 to 63"):
        compute_peaks(many, "mem-util", [64])
