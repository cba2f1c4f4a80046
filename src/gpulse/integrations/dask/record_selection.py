"""Select the part of a record for a chart: a job's times, some metrics as numbers, and when task graphs ran, with their spans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from gpulse.charts.chart_model import Array, ChartSpan, TimeMark
from gpulse.integrations.dask.csv_files import WorkerTable
from gpulse.integrations.dask.metric_peaks import format_indices, not_numeric_error
from gpulse.integrations.dask.trackable_metrics import ArgumentError
from gpulse.model.intervals import groups

MAX_LANES = 3
"""Graphs at the same time that lie under each other; the others share the last lane, without a label."""
_MAX_MARKS = 150
_COLORS = ("band0", "band1", "band2")
"""Two for graphs that follow each other, and one for graphs between them."""


class GraphTime(NamedTuple):
    """A time in which a task graph ran."""

    job: int
    dag: int
    start: float
    end: float


class GraphSpans(NamedTuple):
    """Task graphs above a chart."""

    spans: tuple[ChartSpan, ...] = ()
    marks: tuple[TimeMark, ...] = ()
    """Where jobs begin, except the first."""
    unlabelled: int = 0
    """How many graphs ran at the same time beyond those that have a lane."""


def merge_worker_times(times: Iterable[GraphTime], step: float) -> list[GraphTime]:
    """Return when each graph ran on any worker; pauses of up to one step are ignored."""
    by_graph: dict[tuple[int, int], list[GraphTime]] = {}
    for time in sorted(times, key=lambda one: one.start):
        by_graph.setdefault((time.job, time.dag), []).append(time)
    return [
        group[0]._replace(end=max(time.end for time in group))
        for several in by_graph.values()
        for group in groups(several, lambda time: (time.start, time.end + step))
    ]


def remove_short_overlaps(times: Iterable[GraphTime], slack: float) -> list[GraphTime]:
    """Remove the short overlaps of consecutive graphs that come from the workers' different sampling times.

    Args:
        times: Those of all workers.
        slack: Overlap up to which two graphs are taken to have run one after the other.
    """
    found: list[GraphTime] = []
    running: list[int] = []
    for time in sorted(times, key=_sort_key):
        running = [place for place in running if found[place].end > time.start]
        for place in running:
            before = found[place]
            if before.start < time.start and before.end - time.start <= slack:
                found[place] = before._replace(end=time.start)
        running.append(len(found))
        found.append(time)
    return found


def build_graph_spans(times: Iterable[GraphTime], *, with_jobs: bool) -> GraphSpans:
    """Return the spans of graphs, those at the same time under each other.

    Args:
        times: When which graph ran.
        with_jobs: Whether labels are `job.graph` instead of the graph alone.
    """
    ordered = sorted(times, key=_sort_key)
    spans: list[ChartSpan] = []
    newest: list[ChartSpan] = []
    """The last span of each lane, also of those that are not drawn."""
    numbers: dict[tuple[int, int], int] = {}
    for time in ordered:
        lane = next(
            (place for place, span in enumerate(newest) if span.end <= time.start + 1e-6), len(newest)
        )
        number = numbers.setdefault((time.job, time.dag), len(numbers) + 1)
        label = f"{time.job}.{time.dag}" if with_jobs else str(time.dag)
        text = f"job {time.job}, graph {time.dag}"
        span = ChartSpan(
            time.start,
            time.end,
            label if lane < MAX_LANES else "",
            text,
            _choose_color(text, [*spans[-1:], *newest[lane : lane + 1]]),
            min(lane, MAX_LANES - 1),
            number=number if with_jobs else time.dag,
        )
        newest[lane : lane + 1] = [span]
        spans.append(span)
    return GraphSpans(tuple(spans), tuple(_find_job_marks(ordered)), max(0, len(newest) - MAX_LANES))


def _sort_key(time: GraphTime) -> tuple[float, int, int]:
    return time.start, time.job, time.dag


def _choose_color(text: str, near: Sequence[ChartSpan]) -> str:
    """Return the color of the adjacent part of the same graph, else the first color that no neighbor has."""
    own = [span.color for span in near if span.text == text]
    taken = {span.color for span in near if span.text != text}
    return next(color for color in (*own, *_COLORS) if color not in taken)


def _find_job_marks(times: Iterable[GraphTime]) -> Iterator[TimeMark]:
    """Yield where each job but the first begins, unless there are too many to see."""
    starts: dict[int, float] = {}
    for time in times:
        starts.setdefault(time.job, time.start)
    later = sorted((start, job) for job, start in starts.items())[1:]
    if len(later) <= _MAX_MARKS:
        yield from (TimeMark(start, f"job {job}") for start, job in later)


_NUMBERS = frozenset((int, float, type(None)))
_GAP_STEPS = 2.5
_MIN_GAP_SECONDS = 0.5
_MAX_VALUE = 1e300
"""Larger numbers cannot be drawn and count as unknown."""


class MetricValues(NamedTuple):
    """One metric as numbers."""

    metric: str
    names: tuple[str, ...]
    """Names of its columns: GPUs, disks, interfaces; one empty name for a metric of the whole worker."""
    values: Array
    """A row per time, a column per name; NaN where there is no value."""


class RecordSelection(NamedTuple):
    """Part of a record."""

    times: Array
    metrics: tuple[MetricValues, ...]
    graphs: tuple[GraphTime, ...]
    step: float
    """Usual seconds between two measurements."""
    jobs: frozenset[int]
    """All jobs of the record."""
    job: int | None
    """The selected one; None for all."""

    @property
    def gap(self) -> float:
        """Seconds between two measurements above which the time between them counts as a gap."""
        return _find_gap_seconds(self.step)


def select_record(table: WorkerTable, job: int | None, metrics: Sequence[str]) -> RecordSelection:
    """Return a job's part of a record, or all of it.

    Raises:
        ArgumentError: A metric has no numbers.
        RecordingError: The record is broken.
    """
    matrices = [_MetricMatrix(metric) for metric in metrics]
    labels = [np.empty((0, 3))]
    for batch in table.batches():
        labels.append(np.array((batch.jobs, batch.dags, batch.timestamps), np.float64).T)
        for matrix in matrices:
            matrix.add(batch.values(matrix.metric))
    jobs, dags, times = np.concatenate(labels).T
    chosen = np.ones(len(times), np.bool_) if job is None else jobs == _to_float(job)
    first = np.flatnonzero(chosen)
    first = first[np.diff(times[first], prepend=-np.inf) != 0]
    step = _find_step(times)
    runs = np.cumsum(np.diff(times, prepend=times[:1]) > _find_gap_seconds(step))
    graphs = np.stack((jobs, dags, runs, times, _find_ends(times, step)))[:, chosen]
    return RecordSelection(
        times[first],
        tuple(MetricValues(each.metric, each.names, each.array()[first]) for each in matrices),
        tuple(sorted(_find_graph_times(graphs, _find_gap_seconds(step)), key=lambda time: time.start)),
        step,
        frozenset(int(number) for number in np.unique(jobs)),
        job,
    )


def check_job(job: int | None, there: Iterable[int], source: str) -> None:
    """Check that a job is in a record.

    Raises:
        ArgumentError: It is not; the error names those that are.
    """
    known = sorted(there)
    if job is not None and job not in known:
        raise ArgumentError(
            f"there is no job {job} in {source}; jobs: {format_indices([one for one in known if one])}"
        )


def _find_step(times: Array) -> float:
    distances = np.diff(times)
    distances = distances[distances > 0]
    return float(np.median(distances)) if len(distances) else 1.0


def _find_gap_seconds(step: float) -> float:
    return max(_GAP_STEPS * step, _MIN_GAP_SECONDS)


def _find_ends(times: Array, step: float) -> Array:
    """Return until when each line is valid: until the next time, but at most one step."""
    moments = np.append(np.unique(times), np.inf)
    after: Array = moments[np.searchsorted(moments, times, side="right")]
    return np.asarray(np.minimum(times + step, after), np.float64)


def _find_graph_times(graphs: Array, gap: float) -> Iterator[GraphTime]:
    """Yield when each graph ran, from rows of jobs, graphs, runs of the record, times and until when they hold.

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
        yield GraphTime(job, dag, float(part[3, 0]), float(part[4, -1]))


class _MetricMatrix:
    """Collects the cells of a metric as numbers, a column for each name that turns up."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self._places: dict[str, int] = {}
        self._parts: list[Array] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its columns."""
        return tuple(self._places)

    def add(self, values: list[Any]) -> None:
        """Add the cells of some lines."""
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
        """Return all cells: a row per line."""
        width = len(self._places)
        whole = np.full((sum(map(len, self._parts)), width), np.nan)
        down = 0
        for part in self._parts:
            whole[down : down + len(part), : part.shape[1]] = part
            down += len(part)
        whole[~(np.abs(whole) <= _MAX_VALUE)] = np.nan
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
        """Add cells of any kind, one by one."""
        found = [
            (row, self._place(name), number)
            for row, value in enumerate(values)
            for name, number in self._cells(value)
        ]
        part = np.full((len(values), len(self._places)), np.nan)
        for row, place, number in found:
            if number is not None:
                part[row, place] = _to_float(number)
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
            raise not_numeric_error(self.metric)


def _to_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return np.nan
