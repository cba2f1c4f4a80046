"""Query the series of nodes from a time-series database, split into requests that it can answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.model.metric_catalog import CATALOG, Scope
from gpulse.model.safe_text import replace_surrogates
from gpulse.model.series_labels import EXPOSED_SCOPES, subject_label_name
from gpulse.store.store import Query, Samples, Series, SeriesKey, Statistic, StoredNode
from gpulse.store.tsdb.promql import PromqlClient, RangeSeries

_MAX_NAMES = 250
_MAX_NAMES_CHARS = 6000
"""Maximum number of characters of names in one query, since databases reject queries that are too long."""
_REGEX_CHARS = re.compile(r"[\\.+*?()|\[\]{}^$]")


def build_selector(
    scope: Scope,
    metric: str,
    *,
    nodes: Collection[str] | None,
    subjects: Collection[str] | None,
    labels: Mapping[str, str],
) -> str:
    """Return the PromQL selector for the series of a metric.

    Args:
        scope: The scope of the metric.
        metric: The metric's name in the catalog.
        nodes: Only these nodes, by name; None for all.
        subjects: Only these subjects, named as in `SeriesKey.subject`; None for all.
        labels: Labels that every series must have.
    """
    conditions = [f"{name}={quote_promql(value)}" for name, value in sorted(labels.items())]
    if nodes is not None:
        conditions.append(_label_matcher("node", nodes))
    label = subject_label_name(scope)
    if subjects is not None and label is not None:
        conditions.append(_label_matcher(label, subjects))
    return f"{CATALOG[scope][metric].prometheus}{{{','.join(conditions)}}}"


def build_matchers(
    labels: Mapping[str, str], nodes: Collection[str] | None = None, *, name: str | None = None
) -> str:
    """Return the matchers of a selector in braces: required labels, nodes, and a pattern for the metric name."""
    conditions = [f"{label}={quote_promql(value)}" for label, value in sorted(labels.items())]
    if name is not None:
        conditions.append(f"__name__=~{quote_promql(name)}")
    if nodes is not None:
        conditions.append(_label_matcher("node", nodes))
    return f"{{{','.join(conditions)}}}"


def quote_promql(text: str) -> str:
    """Quote a string for PromQL."""
    escaped = replace_surrogates(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{escaped}"'


def group_names(names: Collection[str]) -> Iterator[Sequence[str]]:
    """Split names into groups that are short enough for one query."""
    group: list[str] = []
    size = 0
    for name in sorted(names):
        length = 2 * len(name.encode("utf-8", "replace")) + 1
        if group and (len(group) >= _MAX_NAMES or size + length > _MAX_NAMES_CHARS):
            yield group
            group, size = [], 0
        group.append(name)
        size += length
    if group:
        yield group


def _label_matcher(label: str, values: Collection[str]) -> str:
    if len(values) == 1:
        return f"{label}={quote_promql(next(iter(values)))}"
    pattern = "|".join(_REGEX_CHARS.sub(r"\\\g<0>", value) for value in sorted(values))
    return f"{label}=~{quote_promql(pattern)}"


DAY_MS = 86_400_000
_MAX_VALUES = 500_000
"""Maximum number of values in one answer, as far as it can be estimated."""
_MAX_STEPS = 10_000
"""Prometheus returns at most 11,000 points per series."""
_SAMPLES_A_SECOND = 2
_MIN_RANGE_MS = 10_000
_MAX_SCAN_MS = 600_000
"""Maximum time range that a scan yields at once."""


class EvaluationRange(NamedTuple):
    """Times at which an expression is evaluated, and the window before each time, in milliseconds."""

    first: int
    last: int
    step: int
    window: int


def split_steps(start: int, end: int, step_us: int, series: int) -> Iterator[EvaluationRange]:
    """Yield the evaluations for all steps in `[start, end)`; partial steps at the edges are evaluated separately.

    Args:
        start: Milliseconds.
        end: Milliseconds.
        step_us: Microseconds; steps that are not whole milliseconds are evaluated one by one.
        series: Approximate number of series in the answer.
    """
    step = step_us // 1000
    most = max(1, min(_MAX_STEPS, _MAX_VALUES // max(1, series)))
    begin = start
    while begin < end:
        until = min(end, -(-(begin * 1000 // step_us + 1) * step_us // 1000))
        is_whole = step_us % 1000 == 0 and begin % step == 0
        many = min(most, (end - begin) // step) if is_whole else 0
        if many:
            until = begin + many * step
            yield EvaluationRange(begin + step - 1, until - 1, step, step)
        else:
            yield EvaluationRange(until - 1, until - 1, step, until - begin)
        begin = until


def split_range(start: int, end: int, series: int) -> Iterator[tuple[int, int]]:
    """Split a time range into parts that are short enough to query every sample."""
    length = max(_MIN_RANGE_MS, min(DAY_MS, 1000 * _MAX_VALUES // (_SAMPLES_A_SECOND * max(1, series))))
    while start < end:
        until = min(end, start + length)
        yield start, until
        start = until


def split_scan(start: int, end: int, series: int) -> Iterator[tuple[int, int]]:
    """Split a time range into parts whose samples fit in memory."""
    for first, until in split_range(start, end, series):
        for begin in range(first, until, _MAX_SCAN_MS):
            yield begin, min(until, begin + _MAX_SCAN_MS)


_SUBJECTS_A_NODE = 8
"""Estimated number of GPUs, disks or interfaces per node."""
_COUNT_BY_DAY = f"count(count_over_time({{}}[{DAY_MS}ms]))"
_FEW_DAYS = 2 * DAY_MS

Signature = frozenset[tuple[str, str]]
"""The labels that identify a series, without the metric name."""


class SeriesPoints(NamedTuple):
    """Times in milliseconds and values of one series."""

    key: SeriesKey
    times: NDArray[np.int64]
    values: NDArray[np.float64]


class SeriesSelection(NamedTuple):
    """Series that one query can select."""

    scope: Scope
    names: Sequence[str] | None
    """Names of the nodes; None for all."""
    subjects: Sequence[str] | None
    numbers: Mapping[str, int]
    """Numbers of the wanted nodes, by name."""
    deadline: float | None = None
    """When to give up, in monotonic seconds."""

    @property
    def series(self) -> int:
        """Estimated number of series per metric."""
        if self.subjects is not None:
            return len(self.subjects)
        each = 1 if self.scope == "host" else _SUBJECTS_A_NODE
        return each * len(self.numbers if self.names is None else self.names)

    def key(self, labels: Mapping[str, str]) -> SeriesKey | None:
        """Return the key of a series by its labels; None if its node is not wanted."""
        number, label = self.numbers.get(labels.get("node", "")), subject_label_name(self.scope)
        return None if number is None else SeriesKey(number, labels.get(label, "") if label else "")


class SeriesClient:
    """Reads the series of known nodes."""

    def __init__(
        self,
        client: PromqlClient,
        nodes: Callable[[], Mapping[int, StoredNode]],
        labels: Mapping[str, str],
    ) -> None:
        """Create the reader.

        Args:
            client: Client of the time-series database.
            nodes: Returns the known nodes, by number.
            labels: Labels that every series must have.
        """
        self._client = client
        self._nodes = nodes
        self._labels = labels

    def targets(self, query: Query) -> Iterator[SeriesSelection]:
        """Split a query into selections; yield nothing for scopes that the database does not have."""
        scope, nodes, subjects = query.scope, query.nodes, query.subjects
        if scope not in EXPOSED_SCOPES:
            return
        known = self._nodes().items()
        numbers = {node.name: number for number, node in known if nodes is None or number in nodes}
        of_nodes: list[Sequence[str] | None] = list(group_names(numbers))
        if nodes is None and len(of_nodes) == 1:
            of_nodes = [None]
        of_subjects: list[Sequence[str] | None] = [None]
        if subjects is not None and subject_label_name(scope) is not None:
            of_subjects = list(group_names(subjects))
        elif subjects is not None and "" not in subjects:
            of_subjects = []
        for names in of_nodes:
            for some in of_subjects:
                yield SeriesSelection(scope, names, some, numbers, query.deadline)

    def days(
        self, targets: Sequence[SeriesSelection], metrics: Sequence[str], start: int, end: int
    ) -> Iterator[tuple[int, int]]:
        """Split a long time range into days, without days that have no samples."""
        if end - start <= _FEW_DAYS:
            if start < end:
                yield start, end
            return
        found: set[int] = set()
        selectors = {
            self._selector(target, metric): target.deadline for target in targets for metric in metrics
        }
        for select, deadline in selectors.items():
            for piece in split_steps(start // DAY_MS * DAY_MS, -(-end // DAY_MS) * DAY_MS, 1000 * DAY_MS, 1):
                count = _COUNT_BY_DAY.format(select)
                for track in self._client.range(count, **_range_parameters(piece), deadline=deadline):
                    found.update((_to_milliseconds(track.times) // DAY_MS).tolist())
        for day in sorted(found):
            yield max(start, day * DAY_MS), min(end, (day + 1) * DAY_MS)

    def raw(self, target: SeriesSelection, metric: str, start: int, end: int) -> Iterator[SeriesPoints]:
        """Yield every sample in `[start, end)` once, even if it was written twice. A series may be yielded in several parts."""
        select, factor = self._selector(target, metric), CATALOG[target.scope][metric].prometheus_factor
        for first, until in split_range(start, end, target.series):
            tracks = self._client.matrix(
                f"{select}[{until - first}ms]", (until - 1) / 1000, deadline=target.deadline
            )
            for key, found in _by_key(target, tracks).items():
                times, places = np.unique(
                    np.concatenate([_to_milliseconds(track.times) for track in found]), return_index=True
                )
                values = np.concatenate([track.values for track in found])[places]
                kept = (times >= first) & (times < until) & ~np.isnan(values)
                if kept.any():
                    yield SeriesPoints(key, times[kept], values[kept] / factor)

    def evaluated(
        self, target: SeriesSelection, metric: str, expression: str, pieces: Iterable[EvaluationRange]
    ) -> dict[Signature, SeriesPoints]:
        """Evaluate an expression and return the results by series, at the times of evaluation.

        Args:
            target: The series to select.
            metric: A metric of the catalog.
            expression: PromQL with `{0}` for the selector and `{1}` for the length of the window in milliseconds.
            pieces: When to evaluate.
        """
        select = self._selector(target, metric)
        found: dict[Signature, list[RangeSeries]] = {}
        for piece in pieces:
            query = expression.format(select, piece.window)
            for track in self._client.range(query, **_range_parameters(piece), deadline=target.deadline):
                found.setdefault(_signature(track), []).append(track)
        lines = {}
        for signature, tracks in found.items():
            key = target.key(tracks[0].labels)
            if key is not None:
                times = _to_milliseconds(np.concatenate([track.times for track in tracks]))
                lines[signature] = SeriesPoints(
                    key, times, np.concatenate([track.values for track in tracks])
                )
        return lines

    def _selector(self, target: SeriesSelection, metric: str) -> str:
        return build_selector(
            target.scope, metric, nodes=target.names, subjects=target.subjects, labels=self._labels
        )


def _range_parameters(piece: EvaluationRange) -> dict[str, float]:
    return {"start": piece.first / 1000, "end": piece.last / 1000, "step": piece.step / 1000}


def _by_key(target: SeriesSelection, tracks: Iterable[RangeSeries]) -> dict[SeriesKey, list[RangeSeries]]:
    found: dict[SeriesKey, list[RangeSeries]] = {}
    for track in tracks:
        key = target.key(track.labels)
        if key is not None:
            found.setdefault(key, []).append(track)
    return found


def _signature(track: RangeSeries) -> Signature:
    """Return the labels without the metric name, which some databases omit from computed series."""
    return frozenset(item for item in track.labels.items() if item[0] != "__name__")


def _to_milliseconds(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(seconds * 1000).astype(np.int64)


def values_at(
    line: SeriesPoints | None, times: NDArray[np.int64], otherwise: float = np.nan
) -> NDArray[np.float64]:
    """Return the values at some times; a default where there is none."""
    values = np.full(len(times), otherwise, np.float64)
    if line is not None and len(line.times):
        places = np.minimum(np.searchsorted(line.times, times), len(line.times) - 1)
        is_there = line.times[places] == times
        values[is_there] = line.values[places[is_there]]
    return values


def build_series(line: SeriesPoints, metric: str, start: float) -> Series:
    """Build a series of every sample. Times were truncated to milliseconds, so they are clipped to the start."""
    times = np.maximum(line.times / 1000, start)
    return Series(line.key, metric, times, line.values, line.values, line.values, times)


def build_steps(line: SeriesPoints, metric: str, start_us: int, step_us: int, statistic: Statistic) -> Series:
    """Aggregate samples into steps; times before the start, due to truncation, count as the start."""
    times = np.maximum(line.times * 1000, start_us) // step_us * step_us
    begins = np.flatnonzero(np.concatenate(([True], times[1:] != times[:-1])))
    counts = np.diff(np.append(begins, len(times)))
    lows, highs = np.minimum.reduceat(line.values, begins), np.maximum.reduceat(line.values, begins)
    lasts = begins + counts - 1
    values: dict[Statistic, NDArray[np.float64]] = {
        "mean": np.add.reduceat(line.values, begins) / counts,
        "min": lows,
        "max": highs,
        "last": line.values[lasts],
    }
    ends = line.times[lasts] / 1000
    return Series(line.key, metric, times[begins] / 1e6, values[statistic], lows, highs, ends, counts)


def build_samples(lines: Mapping[str, Sequence[SeriesPoints]], start: float) -> Samples:
    """Combine the samples of several metrics into one row per subject and time."""
    keys = sorted({line.key for of_metric in lines.values() for line in of_metric})
    places = {key: place for place, key in enumerate(keys)}
    cells = {
        metric: _cells([(line.times * len(keys) + places[line.key], line.values) for line in of_metric])
        for metric, of_metric in lines.items()
    }
    rows = np.unique(np.concatenate([cell for cell, _ in cells.values()]))
    values = {metric: np.full(len(rows), np.nan) for metric in lines}
    for metric, (cell, found) in cells.items():
        values[metric][np.searchsorted(rows, cell)] = found
    times = rows // len(keys)
    return Samples(
        keys,
        (rows % len(keys)).astype(np.int32),
        np.maximum(times / 1000, start),
        np.zeros(len(rows), np.uint64),
        times,
        values,
    )


def _cells(
    lines: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Concatenate the row indices and values of several series."""
    none = np.empty(0, np.int64), np.empty(0)
    cells, values = (np.concatenate(columns) for columns in zip(none, *lines, strict=True))
    return cells, values
