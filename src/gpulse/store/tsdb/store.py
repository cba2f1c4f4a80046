"""Read series from a time-series database, as every store answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from gpulse.model.metric import CATALOGUE
from gpulse.store.merge import merged_series
from gpulse.store.store import (
    Query,
    Samples,
    Series,
    SeriesKey,
    Statistic,
    Store,
    StoredNode,
    microseconds,
)
from gpulse.store.tsdb.promql import PromqlClient
from gpulse.store.tsdb.results import at, samples_of, series_of, steps_of
from gpulse.store.tsdb.series_query import Line, SeriesClient, Signature, Target
from gpulse.store.tsdb.split_query import Piece, scan_pieces, step_pieces

_MIN_STEP_US = 1_000_000
"""Shorter steps are made here, from every sample."""
_MIN_ODD_STEP_US = 60_000_000
"""So are shorter ones that are no whole milliseconds."""
_UNSETTLED_SECONDS = 90.0
_SETTLED_STEP_US = 60_000_000
"""VictoriaMetrics changes the newest points of steps that are shorter than this; those are made here, too."""
_MAX_TIME_MS = 4_102_444_800_000
"""Later than any sample: time-series databases refuse times that are too far away."""
_VALUES: dict[Statistic, str] = {
    "mean": "avg_over_time({0}[{1}ms])",
    "min": "min_over_time({0}[{1}ms])",
    "max": "max_over_time({0}[{1}ms])",
    "last": "last_over_time({0}[{1}ms])",
}
_COUNT = "count_over_time({0}[{1}ms])"
_END = "timestamp({0})"
_EARLIER_END = "max_over_time(timestamp({0})[{1}ms:5m])"
_LOOK_BACK_MS = 300_000
"""A selector without a range finds nothing older than this."""


class TsdbStore(Store):
    """What a time-series database has of the nodes that are known here (`store.store.Store`): samples, nothing else.

    Times are known to the millisecond. Safe to use from several threads.
    """

    def __init__(
        self,
        client: PromqlClient,
        nodes: Callable[[], Mapping[int, StoredNode]],
        *,
        labels: Mapping[str, str] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Prepare to ask.

        Args:
            client: The time-series database.
            nodes: The nodes that are known, by number; in the database they go by their names.
            labels: What every series of ours has.
            now: The time in epoch seconds.
        """
        self._series = SeriesClient(client, nodes, labels or {})
        self._nodes = nodes
        self._now = now

    def series(self, query: Query) -> list[Series]:
        """Return metrics over time; see `store.store.Store`.

        Raises:
            TsdbError: The database does not answer, or refuses.
        """
        found: list[Series] = []
        span, step_us = _span(query), query.step_us
        settled, newest = self._halves(span, step_us)
        targets = list(self._series.targets(query))
        for metric in query.metrics:
            for target in targets:
                lines = self._raw(target, metric, newest)
                if step_us is None:
                    found += [series_of(line, metric, query.start) for line in lines]
                else:
                    found += self._stepped(target, metric, settled, step_us, query)
                    found += [
                        steps_of(line, metric, query.start_us, step_us, query.statistic) for line in lines
                    ]
        return merged_series(found, query.metrics, query.statistic)

    def scan(self, query: Query) -> Iterator[Samples]:
        """Yield every sample; see `store.store.Store`. Runs and numbers of frames are unknown here.

        Raises:
            TsdbError: The database does not answer, or refuses.
        """
        targets = list(self._series.targets(query))
        series = len(query.metrics) * sum(target.series for target in targets)
        for begin, stop in self._series.days(targets, query.metrics, *_span(query)):
            for first, until in scan_pieces(begin, stop, series):
                lines = {
                    metric: [
                        line for target in targets for line in self._series.raw(target, metric, first, until)
                    ]
                    for metric in query.metrics
                }
                if any(lines.values()):
                    yield samples_of(lines, query.start)

    def nodes(self) -> dict[int, StoredNode]:
        """Return the nodes that are known here."""
        return dict(self._nodes())

    def _halves(self, span: tuple[int, int], step_us: int | None) -> tuple[tuple[int, int], tuple[int, int]]:
        """The time whose steps the database makes, and the time of which every sample is asked for."""
        start, end = span
        if step_us is None or _is_fine(step_us):
            return (start, start), span
        if step_us >= _SETTLED_STEP_US:
            return span, (end, end)
        cut = microseconds(self._now() - _UNSETTLED_SECONDS) // step_us * step_us // 1000
        cut = max(start, min(end, cut))
        return (start, cut), (cut, end)

    def _raw(self, target: Target, metric: str, span: tuple[int, int]) -> list[Line]:
        """Every sample, one line a subject."""
        found: dict[SeriesKey, list[Line]] = {}
        for begin, end in self._series.days([target], [metric], *span):
            for line in self._series.raw(target, metric, begin, end):
                found.setdefault(line.key, []).append(line)
        return [
            Line(
                key,
                np.concatenate([line.times for line in lines]),
                np.concatenate([line.values for line in lines]),
            )
            for key, lines in found.items()
        ]

    def _stepped(
        self, target: Target, metric: str, span: tuple[int, int], step_us: int, query: Query
    ) -> Iterator[Series]:
        """One entry a step, as the database makes it."""
        low: Statistic = "min" if query.spread else query.statistic
        high: Statistic = "max" if query.spread else query.statistic
        pieces = list(step_pieces(*span, step_us, target.series))
        counts = self._series.evaluated(target, metric, _COUNT, pieces)
        if not counts:
            return
        lines = {
            wanted: self._values(target, metric, wanted, pieces) for wanted in {query.statistic, low, high}
        }
        ends = self._series.evaluated(target, metric, _END, pieces)
        long = [piece for piece in pieces if piece.window > _LOOK_BACK_MS]
        earlier = self._series.evaluated(target, metric, _EARLIER_END, long) if long else {}
        for signature, line in lines[query.statistic].items():
            begins = line.times * 1000 // step_us * step_us
            end = np.fmax(at(ends.get(signature), line.times), at(earlier.get(signature), line.times))
            yield Series(
                line.key,
                metric,
                begins / 1e6,
                line.values,
                at(lines[low].get(signature), line.times),
                at(lines[high].get(signature), line.times),
                np.where(end >= np.maximum(begins // 1000, span[0]) / 1000, end, np.nan),
                at(counts.get(signature), line.times, 1).astype(np.int64),
            )

    def _values(
        self, target: Target, metric: str, statistic: Statistic, pieces: Sequence[Piece]
    ) -> dict[Signature, Line]:
        """One value a step, in the unit of the catalogue."""
        factor = CATALOGUE[target.scope][metric].prometheus_factor
        lines = self._series.evaluated(target, metric, _VALUES[statistic], pieces)
        return {which: line._replace(values=line.values / factor) for which, line in lines.items()}


def _is_fine(step_us: int) -> bool:
    """Whether steps are too short, or too odd, for a time-series database."""
    return step_us < (_MIN_ODD_STEP_US if step_us % 1000 else _MIN_STEP_US)


def _span(query: Query) -> tuple[int, int]:
    """A time in whole milliseconds; so cut that of two that follow each other no sample is in both or in none."""
    first, last = (max(0, min(_MAX_TIME_MS, moment // 1000)) for moment in (query.start_us, query.end_us))
    return first, max(first, last)
