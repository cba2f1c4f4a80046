"""Answer pieces about GPU time: whole hours from files of shares, the rest from samples and their minutes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gpulse.model.metric import Scope
from gpulse.store.history.query import History, Window, rows_of
from gpulse.store.history.relation import Relation, Sources, edges_of, relation
from gpulse.store.history.rollup import FINE_SECONDS, MINUTE_US
from gpulse.store.history.share_files import (
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
from gpulse.store.merge import merged_shares
from gpulse.store.store import Share

_BOTH: tuple[Scope, ...] = ("process", "gpu")
_MAX_MINUTES = 125_000
"""Divide at most this many minutes of processes or GPUs at once, for the sake of memory."""
_MAX_SHARES = 1_000_000
"""Add up at most this many finished shares at once."""


def gpu_time(history: History, sources: Sources, window: Window) -> list[Share]:
    """Divide the time of GPUs in a window of the scope `process`; see `store.store.Store`.

    Whole hours are added up from files of shares, the rest is divided from samples.
    """
    files = _ShareFiles(history, sources, window)
    inner = files.hours()
    windows = [window] if inner is None else [*edges_of(window, inner), *files.from_samples(inner)]
    pieces = [_Parts(*_both(sources, part)) for some in windows for part in _stretches(sources, some)]
    if inner is not None:
        pieces += [files.relations(part) for part in files.parts(inner)]
    return merged_shares(share for piece in pieces for share in _shares(history, piece, window))


class _Parts(NamedTuple):
    """The relations that the shares of one range of time are made from."""

    processes: Relation
    gpus: Relation
    done: Relation | None = None


def _shares(history: History, parts: _Parts, window: Window) -> list[Share]:
    processes, gpus, done = parts
    query = divided(process_minutes(processes.query), gpu_minutes(gpus.query), window)
    bound, files = processes.bound + gpus.bound, processes.files + gpus.files
    if done is not None:
        query = f"SELECT * FROM ({query}) UNION ALL {done.query}"
        bound, files = bound + done.bound, files + done.files
    found = history.run(added(query, hourly=False), bound, files, {**processes.tables, **gpus.tables})
    return [
        Share(node, pid, start, uuid, _seconds(first), _seconds(last), *others)
        for node, pid, start, uuid, first, last, *others in rows_of(found, tuple(found))
    ]


def _both(sources: Sources, window: Window) -> tuple[Relation, Relation]:
    """Return the minutes of processes and of GPUs."""
    processes = relation(sources, window, PROCESS_METRICS, grain=FINE_SECONDS)
    gpus = window._replace(scope="gpu")
    return processes, relation(sources, gpus, GPU_METRICS, grain=FINE_SECONDS, name="gpus", nearly=True)


class _Overlap(NamedTuple):
    """Hours of nodes whose segments overlap in time, so that files of shares are not enough."""

    start: int
    end: int
    nodes: frozenset[int]


class _ShareFiles:
    """The files of shares for a window, and the hours in it that must be divided from samples."""

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
        self._overlaps = _merged([*self._conflicts(), *self._unshared()]) if self._files else []

    def hours(self) -> Window | None:
        """Return the part of the window for which files of shares have whole hours; None when there is none."""
        if not self._files:
            return None
        window = self._window
        start, end = -(-window.start // HOUR_US) * HOUR_US, window.end // HOUR_US * HOUR_US
        latest, whole = max(file.end for _, file in self._files), _minute(window.end)
        if latest <= whole:  # the finished shares of the last hour lie within the window
            end = window.end if latest < whole else whole
        return window._replace(start=start, end=end) if start < end else None

    def from_samples(self, inner: Window) -> list[Window]:
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

    def _conflicts(self) -> Iterator[_Overlap]:
        """Yield the hours of nodes whose minutes in a file overlap with those elsewhere."""
        paths = self._sources.paths(self._files)
        places = {path: place for place, path in enumerate(paths)}
        found = self._history.run(SPANS, [paths], self._files)
        spans: dict[tuple[int | None, int], Span] = {}
        for path, node, start, stop, rows in rows_of(found, ("filename", "node_id", "start", "stop", "rows")):
            spans[places[path], node] = Span(node, start, stop, places[path])
            self._open[places[path]] += rows
        if self._sources.recent is not None:
            for node, (start, end) in self._sources.recent.spans().items():
                spans[None, node] = Span(node, _minute(start), _minute(end), None)
        for place, nodes in conflicts(spans.values()).items():
            for node in nodes:
                yield _in_hours(*spans[place, node][1:3], {node})

    def _unshared(self) -> Iterator[_Overlap]:
        """Yield the hours of segments without files of shares."""
        for segment in self._others:
            for file in segment.samples:
                if file.scope in _BOTH:
                    yield _in_hours(file.start, file.end, file.nodes)

    def parts(self, inner: Window) -> Iterator[Window]:
        """Yield the hours in parts that can be added up in the available memory."""
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

    def relations(self, window: Window) -> _Parts:
        """Return the relations for whole hours, without those that are divided from samples."""
        newest = _both(self._sources._replace(segments=(), summaries=()), window)
        processes, gpus = (
            one._replace(query=f"SELECT * FROM ({one.query}) WHERE {self._not_overlapping('time')}")
            for one in newest
        )
        files = [(segment, file) for segment, file in self._files if window.meets(file)]
        if not files:
            return _Parts(processes, gpus)
        condition, more = window.condition()
        condition += f" AND {self._not_overlapping('epoch_us(time)')}"
        bound = [self._sources.paths(files), *more]
        kept = [
            Relation(query(condition), bound, files, {})
            for query in (open_process_minutes, open_gpu_minutes, finished)
        ]
        return _Parts(_joint([processes, kept[0]]), _joint([gpus, kept[1]]), kept[2])

    def _not_overlapping(self, time: str) -> str:
        """Return the condition for what files of shares answer.

        Args:
            time: The expression for microseconds.
        """
        return (
            "".join(
                f"NOT ({time} >= {start} AND {time} < {end} AND node_id IN ({', '.join(map(str, sorted(nodes)))})) AND "
                for start, end, nodes in self._overlaps
            )
            + "true"
        )


def _minute(time: int) -> int:
    """Return the start of the minute of a time."""
    return time // MINUTE_US * MINUTE_US


def _in_hours(start: int, end: int, nodes: Iterable[int]) -> _Overlap:
    return _Overlap(start // HOUR_US * HOUR_US, (end // HOUR_US + 1) * HOUR_US, frozenset(nodes))


def _merged(overlaps: Iterable[_Overlap]) -> list[_Overlap]:
    """Merge those that overlap."""
    found: list[_Overlap] = []
    for one in sorted(overlaps, key=lambda one: one[:2]):
        if found and one.start < found[-1].end:
            last = found.pop()
            one = _Overlap(last.start, max(last.end, one.end), last.nodes | one.nodes)  # noqa: PLW2901
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
    """Yield the window in parts, cut at whole minutes, that can be divided in the available memory."""
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
    pieces = 1 + minutes // _MAX_MINUTES
    length = -(-(end - begin) // pieces // MINUTE_US) * MINUTE_US + MINUTE_US
    while begin < end:
        stop = min(end, (begin // MINUTE_US) * MINUTE_US + length)
        yield window._replace(start=begin, end=stop)
        begin = stop


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / 1e6
