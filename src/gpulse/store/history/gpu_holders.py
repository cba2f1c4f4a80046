"""Who held which GPU: processes and GPUs brought together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpulse.model.metric import Scope
from gpulse.store.history.gpu_time import (
    GPU_METRICS,
    HOUR_US,
    PROCESS_METRICS,
    SPANS,
    Span,
    added,
    conflicts,
    divided,
    finished,
    gpu_minutes,
    open_gpu_minutes,
    open_process_minutes,
    process_minutes,
)
from gpulse.store.history.query import History, Window
from gpulse.store.history.relation import Relation, Sources, edges_of, relation
from gpulse.store.history.rollup import COARSE_SECONDS, FINE_SECONDS, MINUTE_US
from gpulse.store.merge import merged_shares
from gpulse.store.store import Holding, Share

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BOTH: tuple[Scope, ...] = ("process", "gpu")
_ROWS_AT_ONCE = 125_000
"""So many minutes of processes or GPUs are divided at once."""
_SHARES_AT_ONCE = 1_000_000
"""So many finished shares are added up at once."""

_HELD = "node_id, pid, start_time, gpu"
_HOLDINGS = f"""
SELECT {_HELD}, min(first) AS first, max(last) AS last,
    sum(m0 * n0) / nullif(sum(n0), 0) AS memory_mean, max(h0) AS memory_max,
    sum(m1 * n1) / nullif(sum(n1), 0) AS sm_mean
FROM ({{held}}) WHERE gpu IS NOT NULL AND pid IS NOT NULL GROUP BY {_HELD} ORDER BY first, {_HELD}
"""


def holdings(history: History, sources: Sources, window: Window) -> list[Holding]:
    """What processes held on which GPUs in a window of the scope `process`."""
    source = relation(sources, window, PROCESS_METRICS, grain=COARSE_SECONDS)
    found = history.run(_HOLDINGS.format(held=source.query), source.bound, source.files, source.tables)
    rows = _rows(found, ("node_id", "pid", "start_time", "gpu", "first", "last"))
    more = _rows(found, ("memory_mean", "memory_max", "sm_mean"))
    return [
        Holding(node, pid, start, uuid, first / 1e6, last / 1e6, *others)
        for (node, pid, start, uuid, first, last), others in zip(rows, more, strict=True)
    ]


def shares(history: History, sources: Sources, window: Window) -> list[Share]:
    """How the GPUs' time in a window of the scope `process` is divided; see `store.store.Store`.

    Whole hours are added up from files of shares, the rest is divided anew.
    """
    files = _SharedFiles(history, sources, window)
    inner = files.hours()
    anew = [window] if inner is None else [*edges_of(window, inner), *files.anew(inner)]
    questions = [_Question(*_both(sources, part)) for some in anew for part in _stretches(sources, some)]
    if inner is not None:
        questions += [files.question(part) for part in files.parts(inner)]
    return merged_shares(share for question in questions for share in _answered(history, question, window))


class _Question(NamedTuple):
    """What shares of one stretch of time are made of."""

    held: Relation
    worked: Relation
    settled: Relation | None = None


def _answered(history: History, question: _Question, window: Window) -> list[Share]:
    held, worked, settled = question
    query = divided(process_minutes(held.query), gpu_minutes(worked.query), window)
    bound, files = held.bound + worked.bound, held.files + worked.files
    if settled is not None:
        query = f"SELECT * FROM ({query}) UNION ALL {settled.query}"
        bound, files = bound + settled.bound, files + settled.files
    found = history.run(added(query, hourly=False), bound, files, {**held.tables, **worked.tables})
    return [
        Share(node, pid, start, uuid, _seconds(first), _seconds(last), *others)
        for node, pid, start, uuid, first, last, *others in _rows(found, tuple(found))
    ]


def _both(sources: Sources, window: Window) -> tuple[Relation, Relation]:
    """The minutes of processes and of GPUs."""
    held = relation(sources, window, PROCESS_METRICS, grain=FINE_SECONDS)
    gpus = window._replace(scope="gpu")
    return held, relation(sources, gpus, GPU_METRICS, grain=FINE_SECONDS, name="worked", nearly=True)


class _Mixed(NamedTuple):
    """Hours of nodes for which files of shares do not say everything."""

    start: int
    end: int
    nodes: frozenset[int]


class _SharedFiles:
    """The files of shares that answer for a window, and what has to be asked beside them."""

    def __init__(self, history: History, sources: Sources, window: Window) -> None:
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
        """How many minutes of each file are not divided yet."""
        self._mixed = _merged([*self._conflicts(), *self._unshared()]) if self._files else []

    def hours(self) -> Window | None:
        """The part of the window for which files of shares have whole hours; None when there is none."""
        if not self._files:
            return None
        window = self._window
        start, end = -(-window.start // HOUR_US) * HOUR_US, window.end // HOUR_US * HOUR_US
        latest, whole = max(file.end for _, file in self._files), _minute(window.end)
        if latest <= whole:  # what is settled in the last hour is within
            end = window.end if latest < whole else whole
        return window._replace(start=start, end=end) if start < end else None

    def anew(self, inner: Window) -> list[Window]:
        """What of these hours has to be divided anew."""
        found = []
        for start, end, nodes in self._mixed:
            part = inner._replace(
                start=max(start, inner.start),
                end=min(end, inner.end),
                nodes=nodes if inner.nodes is None else nodes & inner.nodes,
            )
            if part.start < part.end and part.nodes:
                found.append(part)
        return found

    def _conflicts(self) -> Iterator[_Mixed]:
        """Where minutes of a node lie between those of a file."""
        paths = self._sources.paths(self._files)
        places = {path: place for place, path in enumerate(paths)}
        found = self._history.run(SPANS, [paths], self._files)
        spans: dict[tuple[int | None, int], Span] = {}
        for path, node, start, stop, rows in _rows(found, ("filename", "node_id", "start", "stop", "rows")):
            spans[places[path], node] = Span(node, start, stop, places[path])
            self._open[places[path]] += rows
        if self._sources.recent is not None:
            for node, (start, end) in self._sources.recent.spans().items():
                spans[None, node] = Span(node, _minute(start), _minute(end), None)
        for place, nodes in conflicts(spans.values()).items():
            for node in nodes:
                yield _in_hours(*spans[place, node][1:3], {node})

    def _unshared(self) -> Iterator[_Mixed]:
        """Where samples may be that are in no file of shares."""
        for segment in self._others:
            for file in segment.samples:
                if file.scope in _BOTH:
                    yield _in_hours(file.start, file.end, file.nodes)

    def parts(self, inner: Window) -> Iterator[Window]:
        """The hours in pieces that can be added up within the memory that there is."""
        begin, room = inner.start, 1.0
        for place in sorted(range(len(self._files)), key=lambda place: self._files[place][1].start):
            _, file = self._files[place]
            needed = self._open[place] / 2 / _ROWS_AT_ONCE + file.rows / _SHARES_AT_ONCE
            cut = file.start // HOUR_US * HOUR_US
            if needed > room and begin < cut < inner.end:
                yield inner._replace(start=begin, end=cut)
                begin, room = cut, 1.0
            room -= needed
        yield inner._replace(start=begin)

    def question(self, window: Window) -> _Question:
        """What to ask about whole hours, where they are not to be divided anew."""
        newest = _both(self._sources._replace(segments=(), summaries=()), window)
        held, worked = (
            one._replace(query=f"SELECT * FROM ({one.query}) WHERE {self._unmixed('time')}") for one in newest
        )
        files = [(segment, file) for segment, file in self._files if window.meets(file)]
        if not files:
            return _Question(held, worked)
        condition, more = window.condition()
        condition += f" AND {self._unmixed('epoch_us(time)')}"
        bound = [self._sources.paths(files), *more]
        kept = [
            Relation(query(condition), bound, files, {})
            for query in (open_process_minutes, open_gpu_minutes, finished)
        ]
        return _Question(_joint([held, kept[0]]), _joint([worked, kept[1]]), kept[2])

    def _unmixed(self, time: str) -> str:
        """The condition for what is not to be divided anew, by the name of the column with microseconds."""
        return (
            "".join(
                f"NOT ({time} >= {start} AND {time} < {end} AND node_id IN ({', '.join(map(str, sorted(nodes)))})) AND "
                for start, end, nodes in self._mixed
            )
            + "true"
        )


def _minute(time: int) -> int:
    """When the minute of a time began."""
    return time // MINUTE_US * MINUTE_US


def _in_hours(start: int, end: int, nodes: Iterable[int]) -> _Mixed:
    return _Mixed(start // HOUR_US * HOUR_US, (end // HOUR_US + 1) * HOUR_US, frozenset(nodes))


def _merged(mixed: Iterable[_Mixed]) -> list[_Mixed]:
    """Those that overlap as one."""
    found: list[_Mixed] = []
    for one in sorted(mixed, key=lambda one: one[:2]):
        if found and one.start < found[-1].end:
            last = found.pop()
            one = _Mixed(last.start, max(last.end, one.end), last.nodes | one.nodes)  # noqa: PLW2901
        found.append(one)
    return found


def _joint(relations: Sequence[Relation]) -> Relation:
    return Relation(
        " UNION ALL ".join(one.query for one in relations),
        [value for one in relations for value in one.bound],
        [file for one in relations for file in one.files],
        {name: table for one in relations for name, table in one.tables.items()},
    )


def _stretches(sources: Sources, window: Window) -> Iterator[Window]:
    """The window cut at whole minutes into pieces that can be divided within the memory that there is."""
    files = [
        file
        for scope in _BOTH
        for seconds in (0, 60)
        for _, file in window._replace(scope=scope).files(sources.segments, seconds=seconds)
    ]
    spans = [(file.start, file.end) for file in files]
    if sources.recent is not None and (span := sources.recent.span) is not None:
        spans.append(span)
    begin = max(window.start, min((first for first, _ in spans), default=window.end))
    latest = max((last for _, last in spans), default=window.start)
    end = min(window.end, (latest // MINUTE_US + 1) * MINUTE_US)
    minutes = max(sum(file.rows for file in files if file.seconds and file.scope == scope) for scope in _BOTH)
    pieces = 1 + minutes // _ROWS_AT_ONCE
    length = -(-(end - begin) // pieces // MINUTE_US) * MINUTE_US + MINUTE_US
    while begin < end:
        stop = min(end, (begin // MINUTE_US) * MINUTE_US + length)
        yield window._replace(start=begin, end=stop)
        begin = stop


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / 1e6


def _rows(found: Mapping[str, NDArray[Any]], names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Columns as rows, None where nothing is known."""
    columns = []
    for name in names:
        column = found[name]
        if isinstance(column, np.ma.MaskedArray):
            known = ~np.ma.getmaskarray(column)
            columns.append(
                [
                    value if is_known else None
                    for value, is_known in zip(column.data.tolist(), known.tolist(), strict=True)
                ]
            )
        else:
            columns.append(column.tolist())
    return list(zip(*columns, strict=True))
