"""Samples of this head's disk and of elsewhere as one, none of them twice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy

from gpulse.model.metric import Scope
from gpulse.model.series import EXPOSED
from gpulse.store.coverage import Coverage, Hole, apart, outside
from gpulse.store.elsewhere import Elsewhere
from gpulse.store.history.series import check_metrics, microseconds, step_microseconds
from gpulse.store.learning import Learner
from gpulse.store.local import LocalStore
from gpulse.store.merge import (
    better_steps,
    interleaved,
    merged_holdings,
    merged_shares,
    replaced_series,
    series_of_steps,
    united_series,
)
from gpulse.store.outage import Outage
from gpulse.store.store import Holding, Samples, Series, Share, Statistic, Steps, SummarySource

_AHEAD_SECONDS = 60.0
"""Nothing was taken later than so long after now, whatever a node's clock says."""
_FRESH_SECONDS = 120.0
"""What is newer may not be elsewhere yet."""


class FederatedSamples:
    """As `store.store.SummarySource`. Safe to use from several threads."""

    def __init__(
        self,
        local: LocalStore,
        engine: SummarySource | None,
        tables: SummarySource | None,
        coverage: Coverage,
        *,
        now: Callable[[], float],
    ) -> None:
        """Put them together; see `store.joined.FederatedStore`."""
        self._local = local
        self._engine = Elsewhere(engine, now)
        self._tables = Elsewhere(tables, now)
        self._coverage = coverage
        self._learner = Learner(local, coverage, now())
        self._now = now
        self.is_strict = False

    def strict(self) -> FederatedSamples:
        """The same, but what cannot be had is an error instead of being left out."""
        twin = copy(self)
        twin.is_strict = True
        return twin

    @property
    def trouble(self) -> Outage | None:
        """Why something is missing from answers; None when nothing is."""
        return self.engine_trouble or self.tables_trouble

    @property
    def engine_trouble(self) -> Outage | None:
        """Why series of elsewhere are missing."""
        return self._engine.trouble

    @property
    def tables_trouble(self) -> Outage | None:
        """Why tables of processes of elsewhere are missing."""
        return self._tables.trouble

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
        """As `SampleSource.query`; what is elsewhere and cannot be had is left out, and `trouble` says so."""
        holes = self._holes(scope, start, end, nodes)
        if holes and step is not None and statistic in ("mean", "min", "max"):
            found = self.steps(
                scope, [metric], start=start, end=end, step=step, nodes=nodes, subjects=subjects
            )
            return [series_of_steps(steps, statistic) for steps in found]
        here = self._local.query(
            scope,
            metric,
            start=start,
            end=end,
            step=step,
            nodes=nodes,
            subjects=subjects,
            statistic=statistic,
        )
        there: list[Series] = []
        for hole in _widened(holes, start, end, step):

            def ask(source: SummarySource, hole: Hole = hole) -> list[Series]:
                return source.query(
                    scope,
                    metric,
                    start=hole.start,
                    end=hole.end,
                    step=step,
                    nodes=hole.nodes,
                    subjects=subjects,
                    statistic=statistic,
                )

            there += self._elsewhere(scope).asked(ask, is_strict=self.is_strict)
        if step is None:
            return united_series(here, there)
        return replaced_series(here, there, until=self._now() - _FRESH_SECONDS)

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
        """As `SampleSource.scan`.

        Raises:
            GpulseError: What is elsewhere cannot be had: what is made of all samples must not have a hole.
        """
        check_metrics(scope, metrics)
        holes = apart(self._holes(scope, start, end, nodes))
        return self._stretches(scope, list(metrics), (start, end), nodes, subjects, stretch_seconds, holes)

    def _stretches(
        self,
        scope: Scope,
        metrics: Sequence[str],
        span: tuple[float, float],
        nodes: Collection[int] | None,
        subjects: Collection[str] | None,
        stretch_seconds: float,
        holes: Sequence[Hole],
    ) -> Iterator[Samples]:
        begin, end = span
        source = self._elsewhere(scope).source

        def scanned(
            store: SummarySource, start: float, end: float, nodes: Collection[int] | None
        ) -> Iterator[Samples]:
            return store.scan(
                scope,
                metrics,
                start=start,
                end=end,
                nodes=nodes,
                subjects=subjects,
                stretch_seconds=stretch_seconds,
            )

        for hole in holes if source else ():
            if begin < hole.start:
                yield from scanned(self._local, begin, hole.start, nodes)
            here = scanned(self._local, hole.start, hole.end, nodes)
            there = scanned(source or self._local, hole.start, hole.end, hole.nodes)
            yield from interleaved(here, there, metrics)
            begin = hole.end
        if begin < end:
            yield from scanned(self._local, begin, end, nodes)

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
        gpus: Collection[str] | None = None,
    ) -> list[Steps]:
        """As `SummarySource.steps`; what is elsewhere and cannot be had is left out, and `trouble` says so."""
        found = self._local.steps(
            scope, metrics, start=start, end=end, step=step, nodes=nodes, subjects=subjects, gpus=gpus
        )
        there: list[Steps] = []
        for hole in _widened(self._holes(scope, start, end, nodes), start, end, step):

            def ask(source: SummarySource, hole: Hole = hole) -> list[Steps]:
                return source.steps(
                    scope,
                    metrics,
                    start=hole.start,
                    end=hole.end,
                    step=step,
                    nodes=hole.nodes,
                    subjects=subjects,
                    gpus=gpus,
                )

            there += self._elsewhere(scope).asked(ask, is_strict=self.is_strict)
        return better_steps(found, there, metrics) if there else found

    def holdings(
        self,
        *,
        start: float,
        end: float,
        nodes: Collection[int] | None = None,
        gpus: Collection[str] | None = None,
    ) -> list[Holding]:
        """As `SummarySource.holdings`; what is elsewhere and cannot be had is left out, and `trouble` says so."""
        found = self._local.holdings(start=start, end=end, nodes=nodes, gpus=gpus)
        there: list[Holding] = []
        for hole in self._holes("process", start, end, nodes):

            def ask(source: SummarySource, hole: Hole = hole) -> list[Holding]:
                return source.holdings(start=hole.start, end=hole.end, nodes=hole.nodes, gpus=gpus)

            there += self._tables.asked(ask, is_strict=self.is_strict)
        return merged_holdings([*found, *there]) if there else found

    def shares(self, *, start: float, end: float, nodes: Collection[int] | None = None) -> list[Share]:
        """As `SummarySource.shares`; what is elsewhere and cannot be had is left out, and `trouble` says so."""
        holes = self._holes("process", start, end, nodes)
        if not holes:
            return self._local.shares(start=start, end=end, nodes=nodes)
        found: list[Share] = []
        answered: list[Hole] = []
        for hole in holes:

            def ask(source: SummarySource, hole: Hole = hole) -> list[Share]:
                told = source.shares(start=hole.start, end=hole.end, nodes=hole.nodes)
                answered.append(hole)
                return told

            found += self._tables.asked(ask, is_strict=self.is_strict)
        known = self._local.nodes()
        wanted = known if nodes is None else [node for node in nodes if node in known]
        for rest in outside(answered, start, end, wanted):
            found += self._local.shares(start=rest.start, end=rest.end, nodes=rest.nodes)
        return merged_shares(found)

    def _elsewhere(self, scope: Scope) -> Elsewhere:
        return self._engine if scope in EXPOSED else self._tables

    def _holes(self, scope: Scope, start: float, end: float, nodes: Collection[int] | None) -> list[Hole]:
        """What may not be wholly here, where there is somebody to ask."""
        if self._elsewhere(scope).source is None or not start < end:
            return []
        now = self._now()
        self._learner.learn(start, end, now)
        known = self._local.nodes()
        wanted = known if nodes is None else [node for node in nodes if node in known]
        first, last = max(0.0, start), min(end, now + _AHEAD_SECONDS)
        return self._coverage.holes(first, last, wanted, now, of_samples=scope in EXPOSED)


def _widened(holes: Sequence[Hole], start: float, end: float, step: float | None) -> list[Hole]:
    """Holes from the beginnings of steps on to their ends, so that a step is told by one of two."""
    step_us = step_microseconds(step)
    if step_us is None:
        return list(holes)
    return [
        Hole(
            max(start, microseconds(hole.start) // step_us * step_us / 1e6),
            min(end, -(-microseconds(hole.end) // step_us) * step_us / 1e6),
            hole.nodes,
        )
        for hole in holes
    ]
