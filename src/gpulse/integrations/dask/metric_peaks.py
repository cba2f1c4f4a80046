"""The highest value of a metric, by worker, by job and by GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from numbers import Integral
from typing import Any, SupportsIndex

from gpulse.integrations.dask.csv_files import WorkerTable
from gpulse.integrations.dask.trackable_metrics import ArgumentError

Peak = list[float | int | None]
"""One value per GPU; a single value for a metric that is not per GPU."""

TASKS = "tasks"
_NUMBERS = frozenset((int, float, type(None)))


def compute_peaks(
    tables: Mapping[int, WorkerTable],
    metric: str,
    workers: Sequence[SupportsIndex] | None = None,
    per_job: bool = True,
) -> list[dict[int, Peak]] | list[Peak]:
    """Return the peaks of a metric, one entry for each selected worker.

    Args:
        tables: The records by the index of their worker.
        metric: A metric that was tracked.
        workers: Indices of workers; None for all.
        per_job: Return peaks per job. Measurements without a job count only when this is false.

    Raises:
        ArgumentError: There is no such metric or worker, or the metric has no numbers.
        RecordingError: A record is broken.
    """
    asked = [tables[index] for index in select_workers(tables, workers)]
    for table in asked:
        check_metric(table.tracked, metric)
    if per_job:
        return [
            {job: peak for job, peak in _compute_job_peaks(table, metric).items() if job} for table in asked
        ]
    return [_find_highest(_compute_job_peaks(table, metric).values()) for table in asked]


def select_workers(there: Iterable[int], workers: Any) -> list[int]:
    """Return the requested indices; None requests all.

    Raises:
        ArgumentError: There is no such worker; the error names those that exist.
    """
    known = sorted(there)
    if workers is None:
        return known
    if isinstance(workers, str | bytes) or not isinstance(workers, Iterable):
        raise ArgumentError(f"workers must be a list of indices, not {workers!r}", hint="workers=[0, 1]")
    found: list[Any] = list(workers)
    for index in found:
        if isinstance(index, bool) or not isinstance(index, Integral):
            raise ArgumentError(f"a worker's index must be a number, not {index!r}", hint="workers=[0, 1]")
        if index not in known:
            raise ArgumentError(f"there is no worker {index}; workers: {format_indices(known)}")
    return found


def check_metric(tracked: Sequence[str], metric: str) -> None:
    """Check that a metric was tracked and has numbers.

    Raises:
        ArgumentError: It was not; the error names those that were.
    """
    if metric not in tracked:
        named = ", ".join(name for name in tracked if name != TASKS) or "no numeric metric"
        raise ArgumentError(f"{metric!r} was not tracked; tracked metrics: {named}")
    if metric == TASKS:
        raise not_numeric_error(metric)


def to_gpu_values(value: Any, metric: str) -> Sequence[Any]:
    """Return the numbers of a cell, one per GPU.

    Raises:
        ArgumentError: It holds something else.
    """
    if value is None:
        return ()
    row = value if type(value) is list else (value,)
    if not _NUMBERS.issuperset(map(type, row)):
        raise not_numeric_error(metric)
    return row


def _compute_job_peaks(table: WorkerTable, metric: str) -> dict[int, Peak]:
    """Return the peaks of each job in order, all as long as the longest."""
    found: dict[int, Peak] = {}
    for batch in table.batches():
        lines = zip(batch.jobs, batch.values(metric), strict=True)
        for job, several in groupby(lines, key=lambda line: line[0]):
            peak = list(_find_column_highest([to_gpu_values(value, metric) for _, value in several]))
            found[job] = _find_highest((found[job], peak)) if job in found else peak
    width = max((len(peak) for peak in found.values()), default=0)
    if not width and _is_scalar(table, metric):
        width = 1
    return {job: peak + [None] * (width - len(peak)) for job, peak in sorted(found.items())}


def _is_scalar(table: WorkerTable, metric: str) -> bool:
    """Return whether a metric without any value is one that is not per GPU."""
    return not any([] in batch.values(metric) for batch in table.batches())


def _find_highest(several: Iterable[Sequence[Any]]) -> Peak:
    return list(_find_column_highest(list(several)))


def _find_column_highest(rows: Sequence[Sequence[Any]]) -> Iterator[float | int | None]:
    for column in zip_longest(*rows):
        yield max((value for value in column if value is not None), default=None)


def not_numeric_error(metric: str) -> ArgumentError:
    """Return the error about a metric of text, objects or nested lists."""
    return ArgumentError(
        f"the values of {metric!r} are not numbers, so the metric has no peaks and cannot be drawn; use a numeric metric"
    )


def format_indices(indices: Sequence[int]) -> str:
    """Return sorted numbers as `0 to 7`, or as `0, 2, 5`."""
    if not indices:
        return "none"
    first, last = indices[0], indices[-1]
    if len(indices) > 2 and last - first == len(indices) - 1:
        return f"{first} to {last}"
    return ", ".join(map(str, indices))
