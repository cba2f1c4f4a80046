"""Query sealed history and recent frames together, without counting anything twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpulse.model.intervals import groups
from gpulse.model.metric_catalog import Scope
from gpulse.store.damage import DamageList
from gpulse.store.history.duckdb_query import SampleWindow, SealedHistory, fill_mask, to_rows
from gpulse.store.history.gpu_share_files import (
    GPU_METRICS,
    HOUR_US,
    PROCESS_METRICS,
    SHARE_KEY,
    SPANS_QUERY,
    FileMinutes,
    divide_query,
    find_overlaps,
    finished_query,
    gpu_minutes_query,
    open_gpu_minutes_query,
    open_process_minutes_query,
    process_minutes_query,
    sum_query,
)
from gpulse.store.history.recent_frames import RecentFrames
from gpulse.store.history.rollup import COARSE_SECONDS, FINE_SECONDS, MINUTE_US
from gpulse.store.history.sample_relation import SampleRelation, SampleSources, build_relation, window_edges
from gpulse.store.history.segments import sealed_to, valid_summaries
from gpulse.store.merge import concatenate_samples, merge_shares
from gpulse.store.store import GpuHolding, GpuShare, Query, Samples, Series, SeriesKey, Statistic

_GPU_TIME_SCOPES: tuple[Scope, ...] = ("process", "gpu")
_MAX_MINUTES = 125_000
"""Maximum number of process or GPU minutes to divide at once, to limit memory use."""
_MAX_SHARES = 1_000_000
"""Maximum number of finished shares to add up at once."""


def divide_gpu_time(history: SealedHistory, sources: SampleSources, window: SampleWindow) -> list[GpuShare]:
    """Divide the time of GPUs in a window of scope `process`; see `store.store.Store`.

    Whole hours are added up from share files; the rest is computed from samples.
    """
    files = _ShareFiles(history, sources, window)
    inner = files.hours()
    windows = [window] if inner is None else [*window_edges(window, inner), *files.from_samples(inner)]
    pieces = [
        _ShareRelations(*_minute_relations(sources, part))
        for some in windows
        for part in _split_window(sources, some)
    ]
    if inner is not None:
        pieces += [files.relations(part) for part in files.parts(inner)]
    return merge_shares(share for piece in pieces for share in _query_shares(history, piece, window))


class _ShareRelations(NamedTuple):
    """The relations from which the shares of one time range are computed."""

    processes: SampleRelation
    gpus: SampleRelation
    done: SampleRelation | None = None


def _query_shares(history: SealedHistory, parts: _ShareRelations, window: SampleWindow) -> list[GpuShare]:
    processes, gpus, done = parts
    query = divide_query(process_minutes_query(processes.query), gpu_minutes_query(gpus.query), window)
    bound, files = processes.bound + gpus.bound, processes.files + gpus.files
    if done is not None:
        query = f"SELECT * FROM ({query}) UNION ALL {done.query}"
        bound, files = bound + done.bound, files + done.files
    found = history.run(sum_query(query, hourly=False), bound, files, {**processes.tables, **gpus.tables})
    return [
        GpuShare(node, pid, start, uuid, _to_seconds(first), _to_seconds(last), *others)
        for node, pid, start, uuid, first, last, *others in to_rows(found, tuple(found))
    ]


def _minute_relations(sources: SampleSources, window: SampleWindow) -> tuple[SampleRelation, SampleRelation]:
    """Return the relations with minutes of processes and of GPUs."""
    processes = build_relation(sources, window, PROCESS_METRICS, grain=FINE_SECONDS)
    gpus = window._replace(scope="gpu")
    return processes, build_relation(sources, gpus, GPU_METRICS, grain=FINE_SECONDS, name="gpus", nearly=True)


class _OverlappingHours(NamedTuple):
    """Hours in which segments of some nodes overlap in time, so that share files are not sufficient."""

    start: int
    end: int
    nodes: frozenset[int]


class _ShareFiles:
    """The share files for a window, and the hours that must be computed from samples instead."""

    def __init__(self, history: SealedHistory, sources: SampleSources, window: SampleWindow) -> None:
        self._history = history
        self._sources = sources
        self._window = window
        summaries = [item for item in sources.summaries if item.segment.shares]
        covered = {member.first for item in summaries for member in item.members}
        alone = [segment for segment in sources.segments if segment.first not in covered]
        segments = [*(item.segment for item in summaries), *alone]
        self._files = [
            (segment, file) for segment in segments for file in segment.shares if window.meets(file)
        ]
        self._others = [segment for segment in alone if not segment.shares]
        self._open: Counter[int] = Counter()
        """Number of undivided minutes in each file."""
        self._overlaps = _merge_overlaps([*self._overlapping(), *self._unshared()]) if self._files else []

    def hours(self) -> SampleWindow | None:
        """Return the part of the window for which share files have whole hours; None if there is none."""
        if not self._files:
            return None
        window = self._window
        start, end = -(-window.start // HOUR_US) * HOUR_US, window.end // HOUR_US * HOUR_US
        latest, whole = max(file.end for _, file in self._files), _minute_start(window.end)
        if latest <= whole:  # the finished shares of the last hour lie within the window
            end = window.end if latest < whole else whole
        return window._replace(start=start, end=end) if start < end else None

    def from_samples(self, inner: SampleWindow) -> list[SampleWindow]:
        """Return the parts of these hours that must be divided from samples."""
        found = []
        for start, end, nodes in self._overlaps:
            part = inner._replace(
                start=max(start, inner.start),
                end=min(end, inner.end),
                nodes=nodes if inner.nodes is None else nodes & inner.nodes,
            )
            if part.start < part.end and part.nodes:
                found.append(part)
        return found

    def _overlapping(self) -> Iterator[_OverlappingHours]:
        """Yield the hours of nodes whose minutes in one file overlap with those in other files or in memory."""
        paths = self._sources.paths(self._files)
        places = {path: place for place, path in enumerate(paths)}
        found = self._history.run(SPANS_QUERY, [paths], self._files)
        spans: dict[tuple[int | None, int], FileMinutes] = {}
        for path, node, start, stop, rows in to_rows(found, ("filename", "node_id", "start", "stop", "rows")):
            spans[places[path], node] = FileMinutes(node, start, stop, places[path])
            self._open[places[path]] += rows
        if self._sources.recent is not None:
            for node, (start, end) in self._sources.recent.spans().items():
                spans[None, node] = FileMinutes(node, _minute_start(start), _minute_start(end), None)
        for place, nodes in find_overlaps(spans.values()).items():
            for node in nodes:
                yield _round_to_hours(*spans[place, node][1:3], {node})

    def _unshared(self) -> Iterator[_OverlappingHours]:
        """Yield the hours of segments without share files."""
        for segment in self._others:
            for file in segment.samples:
                if file.scope in _GPU_TIME_SCOPES:
                    yield _round_to_hours(file.start, file.end, file.nodes)

    def parts(self, inner: SampleWindow) -> Iterator[SampleWindow]:
        """Split the hours into parts that fit in memory."""
        begin, room = inner.start, 1.0
        for place in sorted(range(len(self._files)), key=lambda place: self._files[place][1].start):
            _, file = self._files[place]
            needed = self._open[place] / 2 / _MAX_MINUTES + file.rows / _MAX_SHARES
            cut = file.start // HOUR_US * HOUR_US
            if needed > room and begin < cut < inner.end:
                yield inner._replace(start=begin, end=cut)
                begin, room = cut, 1.0
            room -= needed
        yield inner._replace(start=begin)

    def relations(self, window: SampleWindow) -> _ShareRelations:
        """Return the relations for whole hours, without the hours that are computed from samples."""
        newest = _minute_relations(self._sources._replace(segments=(), summaries=()), window)
        processes, gpus = (
            one._replace(query=f"SELECT * FROM ({one.query}) WHERE {self._not_overlapping('time')}")
            for one in newest
        )
        files = [(segment, file) for segment, file in self._files if window.meets(file)]
        if not files:
            return _ShareRelations(processes, gpus)
        condition, more = window.condition()
        condition += f" AND {self._not_overlapping('epoch_us(time)')}"
        bound = [self._sources.paths(files), *more]
        kept = [
            SampleRelation(query(condition), bound, files, {})
            for query in (open_process_minutes_query, open_gpu_minutes_query, finished_query)
        ]
        return _ShareRelations(
            _union_relations([processes, kept[0]]), _union_relations([gpus, kept[1]]), kept[2]
        )

    def _not_overlapping(self, time: str) -> str:
        """Return the condition for rows outside of overlapping hours.

        Args:
            time: The SQL expression for the time in microseconds.
        """
        return (
            "".join(
                f"NOT ({time} >= {start} AND {time} < {end} AND node_id IN ({', '.join(map(str, sorted(nodes)))})) AND "
                for start, end, nodes in self._overlaps
            )
            + "true"
        )


def _minute_start(time: int) -> int:
    """Return the start of the minute that contains a time."""
    return time // MINUTE_US * MINUTE_US


def _round_to_hours(start: int, end: int, nodes: Iterable[int]) -> _OverlappingHours:
    return _OverlappingHours(start // HOUR_US * HOUR_US, (end // HOUR_US + 1) * HOUR_US, frozenset(nodes))


def _merge_overlaps(overlaps: Iterable[_OverlappingHours]) -> list[_OverlappingHours]:
    """Merge overlapping hours."""
    return [
        _OverlappingHours(
            group[0].start, max(one.end for one in group), frozenset().union(*(one.nodes for one in group))
        )
        for group in groups(overlaps, lambda one: (one.start, one.end), touching=False)
    ]


def _union_relations(relations: Sequence[SampleRelation]) -> SampleRelation:
    return SampleRelation(
        " UNION ALL ".join(one.query for one in relations),
        [value for one in relations for value in one.bound],
        [file for one in relations for file in one.files],
        {name: table for one in relations for name, table in one.tables.items()},
    )


def _split_window(sources: SampleSources, window: SampleWindow) -> Iterator[SampleWindow]:
    """Split a window at whole minutes into parts that fit in memory."""
    files = [
        file
        for scope in _GPU_TIME_SCOPES
        for seconds in (0, 60)
        for _, file in window._replace(scope=scope).files(sources.segments, seconds=seconds)
    ]
    spans = [(file.start, file.end) for file in files]
    if sources.recent is not None and (span := sources.recent.span) is not None:
        spans.append(span)
    begin = max(window.start, min((first for first, _ in spans), default=window.end))
    latest = max((last for _, last in spans), default=window.start)
    end = min(window.end, (latest // MINUTE_US + 1) * MINUTE_US)
    minutes = max(
        sum(file.rows for file in files if file.seconds and file.scope == scope) for scope in _GPU_TIME_SCOPES
    )
    pieces = 1 + minutes // _MAX_MINUTES
    length = -(-(end - begin) // pieces // MINUTE_US) * MINUTE_US + MINUTE_US
    while begin < end:
        stop = min(end, (begin // MINUTE_US) * MINUTE_US + length)
        yield window._replace(start=begin, end=stop)
        begin = stop


def _to_seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / 1e6


_HOLDINGS_SQL = f"""
SELECT {SHARE_KEY}, min(first) AS first, max(last) AS last,
    sum(m0 * n0) / nullif(sum(n0), 0) AS memory_mean, max(h0) AS memory_max,
    sum(m1 * n1) / nullif(sum(n1), 0) AS sm_mean
FROM ({{0}}) WHERE gpu IS NOT NULL AND pid IS NOT NULL GROUP BY {SHARE_KEY} ORDER BY first, {SHARE_KEY}
"""


def query_gpu_holders(
    history: SealedHistory, sources: SampleSources, window: SampleWindow
) -> list[GpuHolding]:
    """Return which processes used which GPUs in a window of scope `process`."""
    source = build_relation(sources, window, PROCESS_METRICS, grain=COARSE_SECONDS)
    found = history.run(_HOLDINGS_SQL.format(source.query), source.bound, source.files, source.tables)
    return [
        GpuHolding(node, pid, start, uuid, first / 1e6, last / 1e6, *others)
        for node, pid, start, uuid, first, last, *others in to_rows(found, tuple(found))
    ]


_SAMPLE_EXPRESSIONS: Mapping[Statistic, str] = {
    "mean": "avg(m{0})",
    "min": "min(m{0})",
    "max": "max(m{0})",
    "last": "arg_max(m{0}, time)",
}
"""SQL expressions for the value of a step if rows are samples; `{0}` is the index of the metric."""
_ROLLUP_EXPRESSIONS: Mapping[Statistic, str] = {
    "mean": "sum(m{0} * n{0}) / nullif(sum(n{0}), 0)",
    "min": "min(l{0})",
    "max": "max(h{0})",
}
"""SQL expressions for the value of a step if a row may cover several samples."""


def find_row_seconds(query: Query) -> int:
    """Return how many seconds a row may cover for an exact answer to a query; 0 if it needs every sample."""
    if query.step_us is None or query.statistic == "last":
        return 0
    return next(
        (seconds for seconds in (COARSE_SECONDS, FINE_SECONDS) if query.step_us % (seconds * 1_000_000) == 0),
        0,
    )


def series_statement(source: str, query: Query) -> str:
    """Return the statement for `build_series`.

    Args:
        source: A statement with the columns of `SampleRelation`.
        query: The query to answer.
    """
    step, places = query.step_us, range(len(query.metrics))
    if step is None:
        values = "".join(f", m{place}" for place in places)
        return f"SELECT node_id, subject, time{values} FROM ({source}) ORDER BY node_id, subject, time"
    expressions = _ROLLUP_EXPRESSIONS if find_row_seconds(query) else _SAMPLE_EXPRESSIONS
    count = "sum(n{0})::BIGINT" if find_row_seconds(query) else "count(m{0})"
    wanted = [f"node_id, subject, time // {step} * {step} AS step, max(last) AS last"]
    for place in places:
        columns = {"m": expressions[query.statistic], "n": count}
        if query.spread:
            columns |= {"l": expressions["min"], "h": expressions["max"]}
        wanted += [f"{column.format(place)} AS {side}{place}" for side, column in columns.items()]
    return (
        f"SELECT {', '.join(wanted)} FROM ({source}) GROUP BY node_id, subject, step "
        "ORDER BY node_id, subject, step"
    )


def build_series(found: Mapping[str, NDArray[Any]], query: Query) -> list[Series]:
    """Return the series of all subjects and metrics with known values, ordered by subject."""
    nodes, subjects = found["node_id"], found["subject"]
    is_new = np.ones(len(nodes) + 1, bool)
    is_new[1:-1] = (nodes[1:] != nodes[:-1]) | (subjects[1:] != subjects[:-1])
    parts = list(pairwise(np.flatnonzero(is_new).tolist()))
    columns = _sample_series(found, query) if query.step is None else _step_series(found, query)
    answer = []
    for begin, end in parts:
        key = SeriesKey(int(nodes[begin]), str(subjects[begin]))
        for whole in columns:
            part = whole.only(slice(begin, end))
            known = ~np.isnan(part.values)
            if known.any():
                is_whole = query.step is None or known.all()
                answer.append((part if is_whole else part.only(known))._replace(key=key))
    return answer


_NO_KEY = SeriesKey(0, "")


def _sample_series(found: Mapping[str, NDArray[Any]], query: Query) -> list[Series]:
    """Return one series per metric, with the samples of all subjects one after the other."""
    times = fill_mask(found["time"], np.int64) / 1e6
    columns = []
    for place, metric in enumerate(query.metrics):
        values = fill_mask(found[f"m{place}"], np.float64)
        columns.append(Series(_NO_KEY, metric, times, values, values, values, times))
    return columns


def _step_series(found: Mapping[str, NDArray[Any]], query: Query) -> list[Series]:
    times, ends = fill_mask(found["step"], np.int64) / 1e6, fill_mask(found["last"], np.int64) / 1e6
    columns = []
    for place, metric in enumerate(query.metrics):
        sides = "mlh" if query.spread else "mmm"
        values, lows, highs = (fill_mask(found[f"{side}{place}"], np.float64) for side in sides)
        counts = fill_mask(found[f"n{place}"], np.int64)
        columns.append(Series(_NO_KEY, metric, times, values, lows, highs, ends, counts))
    return columns


_SCAN_ROWS = 200_000
"""Approximate number of samples that a scan has in memory at once."""
_MIN_SCAN_US, _FIRST_SCAN_US, _MAX_SCAN_US = 1_000_000, 16_000_000, 600_000_000
"""Minimum, initial and maximum time range that a scan reads at once; it adapts to the number of samples."""
_MAX_GROWTH_FACTOR = 4.0

T = TypeVar("T")


class HistoryReader:
    """Queries for the samples of one data directory (a part of `store.store.Store`)."""

    def __init__(
        self, history: SealedHistory, recent: RecentFrames, damage: DamageList | None = None
    ) -> None:
        """Combine sealed history and recent frames.

        Args:
            history: The sealed history; refresh it after sealing, before frames are dropped from `recent`.
            recent: All frames after the sealed position; earlier frames are ignored.
            damage: Known damage; answers say what is missing because of it.
        """
        self._history = history
        self._recent = recent
        self.damage = DamageList() if damage is None else damage
        self._division_lock = threading.Lock()
        """Only one query at a time divides GPU time: two could exceed the memory limit of queries."""

    def series(self, query: Query) -> list[Series]:
        """Return metrics over time; see `store.store.Store`.

        Raises:
            LogError: A file of the history cannot be read.
        """
        window, grain = SampleWindow.of(query), find_row_seconds(query)

        def ask(sources: SampleSources) -> list[Series]:
            source = build_relation(sources, window, query.metrics, grain=grain)
            statement = series_statement(source.query, query)
            return build_series(
                self._history.run(statement, source.bound, source.files, source.tables), query
            )

        return self._run_query(ask, query)

    def scan(self, query: Query) -> Iterator[Samples]:
        """Yield every sample; see `store.store.Store`.

        Raises:
            LogError: A file of the history cannot be read.
        """
        window, length = SampleWindow.of(query), _FIRST_SCAN_US
        begin = window.start
        while True:
            spans = [
                (file.start, file.end)
                for _, file in window._replace(start=begin).files(self._history.segments)
            ]
            if (span := self._recent.view(query.nodes).span) is not None:
                spans.append(span)
            begin = max(begin, min((first for first, last in spans if last >= begin), default=window.end))
            if begin >= window.end:
                return
            part = window._replace(start=begin, end=min(begin + length, window.end))
            begin = part.end
            found = self._run_query(lambda sources, part=part: self._samples(sources, part, query), query)  # type: ignore[misc]
            rows = sum(len(piece.times) for piece in found)
            if rows:
                yield concatenate_samples(found, query.metrics)
            growth = min(_MAX_GROWTH_FACTOR, _SCAN_ROWS / max(1, rows))
            length = max(_MIN_SCAN_US, min(_MAX_SCAN_US, round(length * growth)))

    def _samples(self, sources: SampleSources, window: SampleWindow, query: Query) -> list[Samples]:
        sealed = self._history.samples(sources.segments, window, query.metrics)
        newer = () if sources.recent is None else sources.recent.samples(window, query.metrics)
        return [*([] if sealed is None else [sealed]), *newer]

    def gpu_holders(self, query: Query) -> list[GpuHolding]:
        """Return which processes used which GPUs; see `store.store.Store`.

        Raises:
            LogError: A file of the history cannot be read.
        """
        window = SampleWindow.of_processes(query)
        return self._run_query(
            lambda sources: query_gpu_holders(self._history, sources, window), query, ("process",)
        )

    def gpu_time(self, query: Query) -> list[GpuShare]:
        """Divide the time of GPUs among processes; see `store.store.Store`.

        Raises:
            LogError: A file of the history cannot be read.
        """
        window = SampleWindow.of_processes(query)._replace(gpus=None)
        with self._division_lock:
            found = self._run_query(
                lambda sources: divide_gpu_time(self._history, sources, window), query, _GPU_TIME_SCOPES
            )
        return found if query.gpus is None else [share for share in found if share.uuid in query.gpus]

    def _note_damage(self, query: Query, scope: str) -> None:
        """Say what is missing from an answer because of damage."""
        self.damage.note_gaps(query.start, query.end, query.nodes, scope)

    def _run_query(
        self, question: Callable[[SampleSources], T], query: Query, scopes: Sequence[str] | None = None
    ) -> T:
        """Run a query over the sealed history and recent frames."""
        found = self._run_question(question, query)
        for scope in (query.scope,) if scopes is None else scopes:
            self._note_damage(query, scope)
        return found

    def _run_question(self, question: Callable[[SampleSources], T], query: Query) -> T:

        def ask() -> T:
            # In this order: frames are dropped from `recent` only after they are in the history.
            view = self._recent.view(query.nodes)
            segments = self._history.segments
            summaries = valid_summaries(self._history.summaries, segments)
            newer = view.since(sealed_to(segments))
            return question(SampleSources(self._history.paths, segments, newer, summaries))

        return self._history.retry_if_moved(ask)
