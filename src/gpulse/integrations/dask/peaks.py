"""The highest value of a metric, by worker, by job and by GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from numbers import Integral
from typing import Any, SupportsIndex

from gpulse.integrations.dask.files import WorkerTable
from gpulse.integrations.dask.tracking import ArgumentError

Peak = list[float | int | None]
"""A value a GPU; of a metric that GPUs do not have apart, one value."""

TASKS = "tasks"
_NUMBERS = frozenset((int, float, type(None)))


def peaks(
    tables: Mapping[int, WorkerTable],
    metric: str,
    workers: Sequence[SupportsIndex] | None = None,
    per_job: bool = True,
) -> list[dict[int, Peak]] | list[Peak]:
    """The peaks of a metric, one entry for each worker that was asked for.

    Args:
        tables: The records by the index of their worker.
        metric: A metric that was tracked.
        workers: Whose; None is all.
        per_job: Whether each job has peaks of its own. What was seen while no job was there counts only without.

    Raises:
        ArgumentError: There is no such metric or worker, or the metric has no numbers.
        RecordingError: A record is broken.
    """
    asked = [tables[index] for index in asked_workers(tables, workers)]
    for table in asked:
        check_metric(table.tracked, metric)
    if per_job:
        return [{job: peak for job, peak in _by_job(table, metric).items() if job} for table in asked]
    return [_highest(_by_job(table, metric).values()) for table in asked]


def asked_workers(there: Iterable[int], workers: Any) -> list[int]:
    """The indices that were asked for, whatever that was; None is all.

    Raises:
        ArgumentError: There is no such worker, and which there are.
    """
    known = sorted(there)
    if workers is None:
        return known
    if isinstance(workers, str | bytes) or not isinstance(workers, Iterable):
        raise ArgumentError(f"workers must be a list of indices, not {workers!r}", hint="workers=[0, 1]")
    found: list[Any] = list(workers)
    for index in found:
        if isinstance(index, bool) or not isinstance(index, Integral):
            raise ArgumentError(f"the index of a worker is a number, not {index!r}", hint="workers=[0, 1]")
        if index not in known:
            raise ArgumentError(f"there is no worker {index}; there are {listed(known)}")
    return found


def check_metric(tracked: Sequence[str], metric: str) -> None:
    """See to it that a metric was tracked and has numbers.

    Raises:
        ArgumentError: It was not, and which were.
    """
    if metric not in tracked:
        named = ", ".join(name for name in tracked if name != TASKS) or "nothing that has numbers"
        raise ArgumentError(f"{metric!r} was not tracked; tracked was {named}")
    if metric == TASKS:
        raise no_numbers(metric)


def as_row(value: Any, metric: str) -> Sequence[Any]:
    """The numbers of a cell, one a GPU.

    Raises:
        ArgumentError: It holds something else.
    """
    if value is None:
        return ()
    row = value if type(value) is list else (value,)
    if not _NUMBERS.issuperset(map(type, row)):
        raise no_numbers(metric)
    return row


def _by_job(table: WorkerTable, metric: str) -> dict[int, Peak]:
    """The peaks of each job, in order, all as long as the longest."""
    found: dict[int, Peak] = {}
    for batch in table.batches():
        lines = zip(batch.jobs, batch.values(metric), strict=True)
        for job, several in groupby(lines, key=lambda line: line[0]):
            peak = list(_columns_highest([as_row(value, metric) for _, value in several]))
            found[job] = _highest((found[job], peak)) if job in found else peak
    width = max((len(peak) for peak in found.values()), default=0)
    if not width and _is_bare(table, metric):
        width = 1
    return {job: peak + [None] * (width - len(peak)) for job, peak in sorted(found.items())}


def _is_bare(table: WorkerTable, metric: str) -> bool:
    """Whether a metric without any value is one of which GPUs have none apart."""
    return not any([] in batch.values(metric) for batch in table.batches())


def _highest(several: Iterable[Sequence[Any]]) -> Peak:
    return list(_columns_highest(list(several)))


def _columns_highest(rows: Sequence[Sequence[Any]]) -> Iterator[float | int | None]:
    for column in zip_longest(*rows):
        yield max((value for value in column if value is not None), default=None)


def no_numbers(metric: str) -> ArgumentError:
    """The error about a metric of text, objects or lists in lists."""
    return ArgumentError(
        f"the values of {metric!r} are no numbers, so that it has no peaks; metrics of GPUs, hosts and processes have some"
    )


def listed(indices: Sequence[int]) -> str:
    """Numbers in order as `0 to 7`, or as `0, 2, 5`."""
    if not indices:
        return "none"
    first, last = indices[0], indices[-1]
    if len(indices) > 2 and last - first == len(indices) - 1:
        return f"{first} to {last}"
    return ", ".join(map(str, indices))
