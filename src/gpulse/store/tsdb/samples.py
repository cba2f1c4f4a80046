"""Samples that are in an engine, told as every store tells them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import get_args

import numpy as np

from gpulse.errors import UsageError
from gpulse.model.metric import CATALOGUE, Scope
from gpulse.store.history.series import Points, check_metrics, microseconds, step_microseconds, to_series
from gpulse.store.merge import merged_steps
from gpulse.store.store import Holding, Samples, Series, Share, Statistic, Steps, StoredNode
from gpulse.store.tsdb.promql import PromqlClient
from gpulse.store.tsdb.results import at, points_of, samples_of, steps_of
from gpulse.store.tsdb.series_query import Asking, Line, Signature, Target
from gpulse.store.tsdb.split_query import Piece, step_pieces

_SHORTEST_STEP_US = 1_000_000
"""Shorter steps are made here, from every sample."""
_SHORTEST_ODD_STEP_US = 60_000_000
"""So are shorter ones that are no whole milliseconds."""
_UNSETTLED_SECONDS = 90.0
_SETTLED_STEP_US = 60_000_000
"""VictoriaMetrics changes the newest points of steps that are shorter than this; those are made here, too."""
_LATEST = 4_102_444_800_000
"""Later than any sample, in milliseconds: engines refuse times that are too far away."""
_VALUES: dict[Statistic, str] = {
    "mean": "avg_over_time({0}[{1}ms])",
    "min": "min_over_time({0}[{1}ms])",
    "max": "max_over_time({0}[{1}ms])",
    "last": "last_over_time({0}[{1}ms])",
}
_SPREAD: tuple[Statistic, ...] = ("mean", "min", "max")
_COUNT = "count_over_time({0}[{1}ms])"
_END = "timestamp({0})"
_EARLIER_END = "max_over_time(timestamp({0})[{1}ms:5m])"
_LOOK_BACK = 300_000
"""A selector without a range finds nothing older than this, in milliseconds."""


class TsdbSamples:
    """What an engine has of the nodes that are known here. Safe to use from several threads."""

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
            client: The engine.
            nodes: The nodes that are known, by number; in the engine they go by their names.
            labels: What every series of ours has.
            now: The time in epoch seconds.
        """
        self._asking = Asking(client, nodes, labels or {})
        self._now = now

    def query(
        self,
        scope: Scope,
        metric: str,
        *,
        start: float,
        end: float,
        step: float | None = None,
        nodes: Collection[int] | None = None,
        subjects: Collection[str] | None = None,
        statistic: Statistic = "mean",
    ) -> list[Series]:
        """As `SampleSource.query`; times are known to the millisecond.

        Raises:
            UsageError: There is no such scope, metric or statistic, or the step is not positive.
            EngineError: The engine does not answer, or refuses.
        """
        check_metrics(scope, (metric,))
        if statistic not in get_args(Statistic):
            raise UsageError(
                f"there is no statistic {statistic[:40]!r}", hint=f"one of {', '.join(get_args(Statistic))}"
            )
        step_us, span = step_microseconds(step), _span(start, end)
        parts: list[Points] = []
        settled, newest = self._halves(span, step_us)
        for target in self._asking.targets(scope, nodes, subjects):
            if step_us is not None:
                parts += self._stepped(target, metric, settled, step_us, statistic)
            parts += [points_of(line, start, statistic) for line in self._raw(target, metric, newest)]
        return to_series(parts, statistic, step_us)

    def scan(
        self,
        scope: Scope,
        metrics: Sequence[str],
        *,
        start: float,
        end: float,
        nodes: Collection[int] | None = None,
        subjects: Collection[str] | None = None,
        stretch_seconds: float = 600.0,
    ) -> Iterator[Samples]:
        """As `SampleSource.scan`; nobody knows the runs and numbers of frames here, nor times below the millisecond.

        Raises:
            UsageError: There is no such scope or metric.
            EngineError: The engine does not answer, or refuses.
        """
        check_metrics(scope, metrics)
        length = max(1, (step_microseconds(stretch_seconds) or 1) // 1000)
        targets = list(self._asking.targets(scope, nodes, subjects))
        return self._stretches(targets, list(metrics), _span(start, end), length, start)

    def steps(
        self,
        scope: Scope,
        metrics: Sequence[str],
        *,
        start: float,
        end: float,
        step: float,
        nodes: Collection[int] | None = None,
        subjects: Collection[str] | None = None,
        gpus: Collection[str] | None = None,  # noqa: ARG002  of processes, which are no series
    ) -> list[Steps]:
        """As `SummarySource.steps`.

        Raises:
            UsageError: There is no such scope or metric, or the step is not positive.
            EngineError: The engine does not answer, or refuses.
        """
        check_metrics(scope, metrics)
        step_us, span = step_microseconds(step) or 1, _span(start, end)
        found: list[Steps] = []
        settled, newest = self._halves(span, step_us)
        targets = list(self._asking.targets(scope, nodes, subjects))
        for metric in metrics:
            for target in targets:
                found += self._summed_up(target, metric, settled, step_us)
                found += [steps_of(line, metric, step_us) for line in self._raw(target, metric, newest)]
        return merged_steps(found, metrics)

    def _halves(self, span: tuple[int, int], step_us: int | None) -> tuple[tuple[int, int], tuple[int, int]]:
        """The time whose steps an engine makes, and the time of which every sample is asked for."""
        start, end = span
        if step_us is None or _is_fine(step_us):
            return (start, start), span
        if step_us >= _SETTLED_STEP_US:
            return span, (end, end)
        cut = microseconds(self._now() - _UNSETTLED_SECONDS) // step_us * step_us // 1000
        cut = max(start, min(end, cut))
        return (start, cut), (cut, end)

    def holdings(
        self,
        *,
        start: float,  # noqa: ARG002
        end: float,  # noqa: ARG002
        nodes: Collection[int] | None = None,  # noqa: ARG002
        gpus: Collection[str] | None = None,  # noqa: ARG002
    ) -> list[Holding]:
        """None: processes are no series."""
        return []

    def shares(
        self,
        *,
        start: float,  # noqa: ARG002
        end: float,  # noqa: ARG002
        nodes: Collection[int] | None = None,  # noqa: ARG002
    ) -> list[Share]:
        """None: processes are no series."""
        return []

    def _stretches(
        self, targets: Sequence[Target], metrics: list[str], span: tuple[int, int], length: int, start: float
    ) -> Iterator[Samples]:
        for begin, stop in self._asking.days(targets, metrics, *span):
            for first in range(begin, stop, length):
                lines = {
                    metric: [
                        line
                        for target in targets
                        for line in self._asking.raw(target, metric, first, min(stop, first + length))
                    ]
                    for metric in metrics
                }
                if any(lines.values()):
                    yield samples_of(lines, start)

    def _raw(self, target: Target, metric: str, span: tuple[int, int]) -> Iterator[Line]:
        for begin, end in self._asking.days([target], [metric], *span):
            yield from self._asking.raw(target, metric, begin, end)

    def _stepped(
        self, target: Target, metric: str, span: tuple[int, int], step_us: int, statistic: Statistic
    ) -> Iterator[Points]:
        """One point a step."""
        pieces = list(step_pieces(*span, step_us, target.series))
        counts = self._asking.evaluated(target, metric, _COUNT, pieces) if statistic == "mean" else {}
        for signature, line in self._values(target, metric, statistic, pieces).items():
            begins = line.times * 1000 // step_us * step_us
            weights = at(counts.get(signature), line.times, 1).astype(np.int64)
            yield Points([line.key], np.zeros(len(begins), np.int32), begins, line.values, weights)

    def _summed_up(self, target: Target, metric: str, span: tuple[int, int], step_us: int) -> Iterator[Steps]:
        """Everything that is told of a step."""
        pieces = list(step_pieces(*span, step_us, target.series))
        counts = self._asking.evaluated(target, metric, _COUNT, pieces)
        if not counts:
            return
        means, lows, highs = (self._values(target, metric, statistic, pieces) for statistic in _SPREAD)
        ends = self._asking.evaluated(target, metric, _END, pieces)
        long = [piece for piece in pieces if piece.window > _LOOK_BACK]
        earlier = self._asking.evaluated(target, metric, _EARLIER_END, long) if long else {}
        for signature, line in means.items():
            begins = line.times * 1000 // step_us * step_us
            end = np.fmax(at(ends.get(signature), line.times), at(earlier.get(signature), line.times))
            yield Steps(
                line.key,
                metric,
                begins / 1e6,
                line.values,
                at(lows.get(signature), line.times),
                at(highs.get(signature), line.times),
                np.where(end >= np.maximum(begins // 1000, span[0]) / 1000, end, np.nan),
                at(counts.get(signature), line.times, 1).astype(np.int64),
            )

    def _values(
        self, target: Target, metric: str, statistic: Statistic, pieces: Sequence[Piece]
    ) -> dict[Signature, Line]:
        """One value a step, in the unit of the catalogue."""
        factor = CATALOGUE[target.scope][metric].prometheus_factor
        lines = self._asking.evaluated(target, metric, _VALUES[statistic], pieces)
        return {which: line._replace(values=line.values / factor) for which, line in lines.items()}


def _is_fine(step_us: int) -> bool:
    """Whether steps are too short, or too odd, for an engine."""
    return step_us < (_SHORTEST_ODD_STEP_US if step_us % 1000 else _SHORTEST_STEP_US)


def _span(start: float, end: float) -> tuple[int, int]:
    """A time in whole milliseconds; so cut that of two that follow each other no sample is in both or in none."""
    first, last = (max(0, min(_LATEST, microseconds(moment) // 1000)) for moment in (start, end))
    return first, max(first, last)
