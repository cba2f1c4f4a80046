"""The history and what is not sealed yet as one, without counting anything twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar, get_args

from gpulse.errors import UsageError
from gpulse.model.metric import Scope
from gpulse.store.history import gpu_holders, stepping
from gpulse.store.history.query import History, Window
from gpulse.store.history.recent import Recent
from gpulse.store.history.relation import Sources
from gpulse.store.history.segments import counted, sealed_to
from gpulse.store.history.series import (
    Points,
    check_metrics,
    join_samples,
    microseconds,
    step_microseconds,
    to_series,
)
from gpulse.store.store import Holding, Samples, Series, Share, Statistic, Steps

T = TypeVar("T")


class StoredSamples:
    """The history together with what is not sealed yet: what the head answers questions from."""

    def __init__(self, history: History, recent: Recent) -> None:
        """Put two together.

        Args:
            history: To be refreshed after sealing, before `recent` forgets.
            recent: Everything from the position after the history's on; earlier batches do no harm.
        """
        self._history = history
        self._recent = recent
        self._dividing = threading.Lock()
        """Two that divide the time of many GPUs at once would need more memory than queries may use."""

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
        """As `SampleSource.query`.

        Raises:
            UsageError: There is no such scope, metric or statistic, or the step is not positive.
            LogError: A file of the history is damaged.
        """
        check_metrics(scope, (metric,))
        if statistic not in get_args(Statistic):
            raise UsageError(
                f"there is no statistic {statistic[:40]!r}", hint=f"one of {', '.join(get_args(Statistic))}"
            )
        step_us = step_microseconds(step)
        window = _window(scope, start, end, nodes, subjects)

        def ask() -> list[Points]:
            # In this order: what is dropped from the one has been in the other before.
            view = self._recent.view()
            segments = self._history.segments
            newer = view.since(sealed_to(segments)).points(
                scope, metric, (window.start, window.end), window.nodes, window.subjects, statistic
            )
            return [*self._history.points(segments, window, metric, step_us, statistic), newer]

        return to_series(self._history.settled(ask), statistic, step_us)

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
            UsageError: There is no such scope or metric.
            LogError: A file of the history is damaged.
        """
        check_metrics(scope, metrics)
        length = step_microseconds(stretch_seconds)
        window = _window(scope, start, end, nodes, subjects)
        return self._stretches(window, list(metrics), length or 1)

    def _stretches(self, window: Window, metrics: list[str], length: int) -> Iterator[Samples]:
        begin = window.start
        while True:
            spans = [
                (file.start, file.end)
                for _, file in window._replace(start=begin).files(self._history.segments)
            ]
            if (span := self._recent.view().span) is not None:
                spans.append(span)
            begin = max(begin, min((first for first, last in spans if last >= begin), default=window.end))
            if begin >= window.end:
                return
            part = window._replace(start=begin, end=min(begin + length, window.end))
            begin = part.end
            found = self._history.settled(lambda part=part: self._samples(part, metrics))  # type: ignore[misc]
            if any(len(piece.times) for piece in found):
                yield join_samples(found, metrics)

    def _samples(self, window: Window, metrics: Sequence[str]) -> list[Samples]:
        view = self._recent.view()
        segments = self._history.segments
        sealed = self._history.samples(segments, window, metrics)
        newer = view.since(sealed_to(segments)).samples(
            window.scope, metrics, (window.start, window.end), window.nodes, window.subjects
        )
        return [*([] if sealed is None else [sealed]), *newer]

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
        """As `SummarySource.steps`.

        Raises:
            UsageError: There is no such scope or metric, or the step is not positive.
            LogError: A file of the history is damaged.
        """
        check_metrics(scope, metrics)
        step_us = step_microseconds(step) or 1
        window = _window(scope, start, end, nodes, subjects, gpus)
        return self._asked(
            lambda sources: stepping.steps(self._history, sources, window, metrics, step_us), nodes
        )

    def holdings(
        self,
        *,
        start: float,
        end: float,
        nodes: Collection[int] | None = None,
        gpus: Collection[str] | None = None,
    ) -> list[Holding]:
        """As `SummarySource.holdings`.

        Raises:
            LogError: A file of the history is damaged.
        """
        window = _window("process", start, end, nodes, None, gpus)
        return self._asked(lambda sources: gpu_holders.holdings(self._history, sources, window), nodes)

    def shares(self, *, start: float, end: float, nodes: Collection[int] | None = None) -> list[Share]:
        """As `SummarySource.shares`.

        Raises:
            LogError: A file of the history is damaged.
        """
        window = _window("process", start, end, nodes, None)
        with self._dividing:
            return self._asked(lambda sources: gpu_holders.shares(self._history, sources, window), nodes)

    def _asked(self, question: Callable[[Sources], T], nodes: Collection[int] | None) -> T:
        """The answer to a question about the history and what came after it."""

        def ask() -> T:
            # In this order: what is dropped from the one has been in the other before.
            view = self._recent.view(nodes)
            segments = self._history.segments
            summaries = counted(self._history.summaries, segments)
            newer = view.since(sealed_to(segments))
            return question(Sources(self._history.paths, segments, newer, summaries))

        return self._history.settled(ask)


def _window(
    scope: Scope,
    start: float,
    end: float,
    nodes: Collection[int] | None,
    subjects: Collection[str] | None,
    gpus: Collection[str] | None = None,
) -> Window:
    return Window(
        scope,
        microseconds(start),
        microseconds(end),
        None if nodes is None else frozenset(nodes),
        None if subjects is None else frozenset(subjects),
        None if gpus is None else frozenset(gpus),
    )
