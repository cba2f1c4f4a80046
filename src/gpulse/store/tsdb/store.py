"""Store over a time-series database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from gpulse.model.metric_catalog import CATALOG
from gpulse.store.merge import merge_series
from gpulse.store.store import (
    Query,
    Samples,
    Series,
    SeriesKey,
    Statistic,
    Store,
    StoredNode,
    to_microseconds,
)
from gpulse.store.tsdb.promql import PromqlClient
from gpulse.store.tsdb.series_query import (
    EvaluationRange,
    SeriesClient,
    SeriesPoints,
    SeriesSelection,
    Signature,
    build_samples,
    build_series,
    build_steps,
    split_scan,
    split_steps,
    values_at,
)

_MIN_STEP_US = 1_000_000
"""Shorter steps are computed here from every sample."""
_MIN_ODD_STEP_US = 60_000_000
"""The same limit for steps that are not whole milliseconds."""
_UNSETTLED_SECONDS = 90.0
_SETTLED_STEP_US = 60_000_000
"""VictoriaMetrics adjusts the newest points of shorter steps, so these are computed here as well."""
_MAX_TIME_MS = 4_102_444_800_000
"""Later than any sample. Time-series databases reject times that are too far in the future."""
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
    """The samples of known nodes in a time-series database (`store.store.Store`); it has no other data.

    Times have millisecond precision. Safe to use from several threads.
    """

    def __init__(
        self,
        client: PromqlClient,
        nodes: Callable[[], Mapping[int, StoredNode]],
        *,
        labels: Mapping[str, str] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Create the store.

        Args:
            client: Client of the time-series database.
            nodes: Returns the known nodes by number; the database has their names.
            labels: Labels that every series must have.
            now: Returns the time in epoch seconds.
        """
        self._series = SeriesClient(client, nodes, labels or {})
        self._nodes = nodes
        self._now = now

    def series(self, query: Query) -> list[Series]:
        """Return metrics over time; see `store.store.Store`.

        Raises:
            TsdbError: The database does not answer, or reports an error.
        """
        found: list[Series] = []
        span, step_us = _to_millisecond_range(query), query.step_us
        settled, newest = self._halves(span, step_us)
        targets = list(self._series.targets(query))
        for metric in query.metrics:
            for target in targets:
                lines = self._raw(target, metric, newest)
                if step_us is None:
                    found += [build_series(line, metric, query.start) for line in lines]
                else:
                    found += self._stepped(target, metric, settled, step_us, query)
                    found += [
                        build_steps(line, metric, query.start_us, step_us, query.statistic) for line in lines
                    ]
        return merge_series(found, query.metrics, query.statistic)

    def scan(self, query: Query) -> Iterator[Samples]:
        """Yield every sample; see `store.store.Store`. Runs and sequence numbers are unknown here.

        Raises:
            TsdbError: The database does not answer, or reports an error.
        """
        targets = list(self._series.targets(query))
        series = len(query.metrics) * sum(target.series for target in targets)
        for begin, stop in self._series.days(targets, query.metrics, *_to_millisecond_range(query)):
            for first, until in split_scan(begin, stop, series):
                lines = {
                    metric: [
                        line for target in targets for line in self._series.raw(target, metric, first, until)
                    ]
                    for metric in query.metrics
                }
                if any(lines.values()):
                    yield build_samples(lines, query.start)

    def nodes(self) -> dict[int, StoredNode]:
        """Return the known nodes, by number."""
        return dict(self._nodes())

    def _halves(self, span: tuple[int, int], step_us: int | None) -> tuple[tuple[int, int], tuple[int, int]]:
        """Split a time range: steps of the first part come from the database, those of the second from every sample."""
        start, end = span
        if step_us is None or _is_too_fine(step_us):
            return (start, start), span
        if step_us >= _SETTLED_STEP_US:
            return span, (end, end)
        cut = to_microseconds(self._now() - _UNSETTLED_SECONDS) // step_us * step_us // 1000
        cut = max(start, min(end, cut))
        return (start, cut), (cut, end)

    def _raw(self, target: SeriesSelection, metric: str, span: tuple[int, int]) -> list[SeriesPoints]:
        """Return every sample, one series per subject."""
        found: dict[SeriesKey, list[SeriesPoints]] = {}
        for begin, end in self._series.days([target], [metric], *span):
            for line in self._series.raw(target, metric, begin, end):
                found.setdefault(line.key, []).append(line)
        return [
            SeriesPoints(
                key,
                np.concatenate([line.times for line in lines]),
                np.concatenate([line.values for line in lines]),
            )
            for key, lines in found.items()
        ]

    def _stepped(
        self, target: SeriesSelection, metric: str, span: tuple[int, int], step_us: int, query: Query
    ) -> Iterator[Series]:
        """Yield series with one entry per step, computed by the database."""
        low: Statistic = "min" if query.spread else query.statistic
        high: Statistic = "max" if query.spread else query.statistic
        pieces = list(split_steps(*span, step_us, target.series))
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
            end = np.fmax(
                values_at(ends.get(signature), line.times), values_at(earlier.get(signature), line.times)
            )
            yield Series(
                line.key,
                metric,
                begins / 1e6,
                line.values,
                values_at(lines[low].get(signature), line.times),
                values_at(lines[high].get(signature), line.times),
                np.where(end >= np.maximum(begins // 1000, span[0]) / 1000, end, np.nan),
                values_at(counts.get(signature), line.times, 1).astype(np.int64),
            )

    def _values(
        self, target: SeriesSelection, metric: str, statistic: Statistic, pieces: Sequence[EvaluationRange]
    ) -> dict[Signature, SeriesPoints]:
        """Return one value per step, in the unit of the catalog."""
        factor = CATALOG[target.scope][metric].prometheus_factor
        lines = self._series.evaluated(target, metric, _VALUES[statistic], pieces)
        return {which: line._replace(values=line.values / factor) for which, line in lines.items()}


def _is_too_fine(step_us: int) -> bool:
    """Whether steps are too short, or too uneven, for the database to compute."""
    return step_us < (_MIN_ODD_STEP_US if step_us % 1000 else _MIN_STEP_US)


def _to_millisecond_range(query: Query) -> tuple[int, int]:
    """Return the time range of a query in milliseconds; adjacent queries get adjacent ranges."""
    first, last = (max(0, min(_MAX_TIME_MS, moment // 1000)) for moment in (query.start_us, query.end_us))
    return first, max(first, last)
