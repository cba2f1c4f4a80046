"""What a picture needs of a record: a job's moments, the numbers of some metrics, and when each graph ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.integrations.dask.files import WorkerTable
from gpulse.integrations.dask.peaks import listed, no_numbers
from gpulse.integrations.dask.tracking import ArgumentError

Array = NDArray[np.float64]

_NUMBERS = frozenset((int, float, type(None)))
_GAP_STEPS = 2.5
_LEAST_GAP_SECONDS = 0.5
_LARGEST = 1e300
"""What is beyond cannot be drawn, and is unknown."""


class Measured(NamedTuple):
    """One metric in numbers."""

    metric: str
    names: tuple[str, ...]
    """Of its columns: GPUs, disks, interfaces; empty for a metric of the whole worker."""
    values: Array
    """A row a moment, NaN where nothing is known."""


class Stretch(NamedTuple):
    """A time in which a graph ran."""

    job: int
    dag: int
    start: float
    end: float


class Selection(NamedTuple):
    """Some of a record."""

    times: Array
    metrics: tuple[Measured, ...]
    stretches: tuple[Stretch, ...]
    step: float
    """The usual distance of two moments."""
    jobs: frozenset[int]
    """All that are in the record."""

    @property
    def gap(self) -> float:
        """From which distance of two moments on nothing is known between them."""
        return _gap(self.step)


def select(table: WorkerTable, job: int | None, metrics: Sequence[str]) -> Selection:
    """A job's part of a record, or all of it.

    Raises:
        ArgumentError: A metric has no numbers.
        RecordingError: The record is broken.
    """
    matrices = [_Matrix(metric) for metric in metrics]
    labels = [np.empty((0, 3))]
    for batch in table.batches():
        labels.append(np.array((batch.jobs, batch.dags, batch.timestamps), np.float64).T)
        for matrix in matrices:
            matrix.add(batch.values(matrix.metric))
    jobs, dags, times = np.concatenate(labels).T
    chosen = np.ones(len(times), np.bool_) if job is None else jobs == _as_float(job)
    first = np.flatnonzero(chosen)
    first = first[np.diff(times[first], prepend=-np.inf) != 0]
    step = _step(times)
    runs = np.cumsum(np.diff(times, prepend=times[:1]) > _gap(step))
    graphs = np.stack((jobs, dags, runs, times, _ends(times, step)))[:, chosen]
    return Selection(
        times[first],
        tuple(Measured(each.metric, each.names, each.array()[first]) for each in matrices),
        tuple(sorted(_stretches(graphs, _gap(step)), key=lambda stretch: stretch.start)),
        step,
        frozenset(int(number) for number in np.unique(jobs)),
    )


def check_job(job: int | None, there: Iterable[int], source: str) -> None:
    """See to it that a job is there.

    Raises:
        ArgumentError: It is not, and which are.
    """
    known = sorted(there)
    if job is not None and job not in known:
        raise ArgumentError(
            f"there is no job {job} in {source}; there are {listed([one for one in known if one])}"
        )


def _step(times: Array) -> float:
    distances = np.diff(times)
    distances = distances[distances > 0]
    return float(np.median(distances)) if len(distances) else 1.0


def _gap(step: float) -> float:
    return max(_GAP_STEPS * step, _LEAST_GAP_SECONDS)


def _ends(times: Array, step: float) -> Array:
    """Until when each line holds: until the next moment, and no longer than usual."""
    moments = np.append(np.unique(times), np.inf)
    after: Array = moments[np.searchsorted(moments, times, side="right")]
    return np.asarray(np.minimum(times + step, after), np.float64)


def _stretches(graphs: Array, gap: float) -> Iterator[Stretch]:
    """When each graph ran, from rows of jobs, graphs, runs of the record, times and until when they hold.

    Pauses of a graph that are too short to be seen are none, but a gap of the record is.
    """
    graphs = graphs[:, graphs[1] > 0]
    if not graphs.size:
        return
    bearable = max(gap, (graphs[3].max() - graphs[3].min()) / 200)
    graphs = graphs[:, np.lexsort(graphs[::-1])]
    is_new = (np.diff(graphs[:3], axis=1) != 0).any(axis=0) | (np.diff(graphs[3]) > bearable)
    for part in np.split(graphs, np.flatnonzero(is_new) + 1, axis=1):
        job, dag = int(part[0, 0]), int(part[1, 0])
        yield Stretch(job, dag, float(part[3, 0]), float(part[4, -1]))


class _Matrix:
    """Collects the cells of a metric as numbers, a column for each name that turns up."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self._places: dict[str, int] = {}
        self._parts: list[Array] = []

    @property
    def names(self) -> tuple[str, ...]:
        """What its columns are called."""
        return tuple(self._places)

    def add(self, values: list[Any]) -> None:
        """Take the cells of some lines."""
        kinds = set(map(type, values))
        if kinds <= _NUMBERS:
            self._add_bare(values)
        elif kinds == {list} and len(set(map(len, values))) == 1:
            self._check(chain.from_iterable(values))
            for gpu in range(len(values[0])):
                self._place(f"GPU {gpu}")
            self._add_rows(values)
        else:
            self._add_any(values)

    def array(self) -> Array:
        """A row a line."""
        width = len(self._places)
        whole = np.full((sum(map(len, self._parts)), width), np.nan)
        down = 0
        for part in self._parts:
            whole[down : down + len(part), : part.shape[1]] = part
            down += len(part)
        whole[~(np.abs(whole) <= _LARGEST)] = np.nan
        return whole

    def _add_bare(self, values: list[Any]) -> None:
        if any(value is not None for value in values):
            self._add_any(values)
        else:
            self._parts.append(np.empty((len(values), 0)))

    def _add_rows(self, values: list[Any]) -> None:
        if len(values[0]) == len(self._places):
            try:
                self._parts.append(np.array(values, np.float64))
            except OverflowError:
                self._add_any(values)
        else:
            self._add_any(values)

    def _add_any(self, values: list[Any]) -> None:
        """Cell by cell, whatever they are."""
        found = [
            (row, self._place(name), number)
            for row, value in enumerate(values)
            for name, number in self._cells(value)
        ]
        part = np.full((len(values), len(self._places)), np.nan)
        for row, place, number in found:
            if number is not None:
                part[row, place] = _as_float(number)
        self._parts.append(part)

    def _place(self, name: str) -> int:
        return self._places.setdefault(name, len(self._places))

    def _cells(self, value: Any) -> Iterator[tuple[str, Any]]:
        if value is None:
            return
        if isinstance(value, list):
            cells = {f"GPU {gpu}": number for gpu, number in enumerate(value)}
        else:
            cells = value if isinstance(value, dict) else {"": value}
        self._check(cells.values())
        yield from cells.items()

    def _check(self, numbers: Iterable[Any]) -> None:
        if not _NUMBERS.issuperset(map(type, numbers)):
            raise no_numbers(self.metric)


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return np.nan
