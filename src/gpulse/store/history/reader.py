"""Read sealed history and unsealed frames as one, without counting anything twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from gpulse.store.history.gpu_holders import gpu_holders
from gpulse.store.history.gpu_time import gpu_time
from gpulse.store.history.query import History, Window
from gpulse.store.history.recent import Recent
from gpulse.store.history.relation import Sources, relation
from gpulse.store.history.segments import sealed_to, valid_summaries
from gpulse.store.history.series import grain_of, select_series, series_of
from gpulse.store.merge import join_samples
from gpulse.store.store import Holding, Query, Samples, Series, Share

_SCAN_ROWS = 200_000
"""About this many samples of a scan are in memory at once."""
_MIN_STRETCH_US, _FIRST_STRETCH_US, _MAX_STRETCH_US = 1_000_000, 16_000_000, 600_000_000
"""How much time a scan reads at once: the length follows how many samples the stretch before it had."""
_MAX_GROWTH = 4.0

T = TypeVar("T")


class HistoryReader:
    """The samples of one data directory (the part of `store.store.Store` that is about them)."""

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

    def series(self, query: Query) -> list[Series]:
        """Return metrics over time; see `store.store.Store`.

        Raises:
            LogError: A file of the history is damaged.
        """
        window, grain = Window.of(query), grain_of(query)

        def ask(sources: Sources) -> list[Series]:
            source = relation(sources, window, query.metrics, grain=grain)
            statement = select_series(source.query, query)
            return series_of(self._history.run(statement, source.bound, source.files, source.tables), query)

        return self._asked(ask, query)

    def scan(self, query: Query) -> Iterator[Samples]:
        """Yield every sample; see `store.store.Store`.

        Raises:
            LogError: A file of the history is damaged.
        """
        window, length = Window.of(query), _FIRST_STRETCH_US
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
            found = self._asked(lambda sources, part=part: self._samples(sources, part, query), query)  # type: ignore[misc]
            rows = sum(len(piece.times) for piece in found)
            if rows:
                yield join_samples(found, query.metrics)
            growth = min(_MAX_GROWTH, _SCAN_ROWS / max(1, rows))
            length = max(_MIN_STRETCH_US, min(_MAX_STRETCH_US, round(length * growth)))

    def _samples(self, sources: Sources, window: Window, query: Query) -> list[Samples]:
        sealed = self._history.samples(sources.segments, window, query.metrics)
        newer = () if sources.recent is None else sources.recent.samples(window, query.metrics)
        return [*([] if sealed is None else [sealed]), *newer]

    def gpu_holders(self, query: Query) -> list[Holding]:
        """Return what processes held on which GPUs; see `store.store.Store`.

        Raises:
            LogError: A file of the history is damaged.
        """
        window = Window.of_processes(query)
        return self._asked(lambda sources: gpu_holders(self._history, sources, window), query)

    def gpu_time(self, query: Query) -> list[Share]:
        """Divide the time of GPUs among processes; see `store.store.Store`.

        Raises:
            LogError: A file of the history is damaged.
        """
        window = Window.of_processes(query)._replace(gpus=None)
        with self._dividing:
            found = self._asked(lambda sources: gpu_time(self._history, sources, window), query)
        return found if query.gpus is None else [share for share in found if share.uuid in query.gpus]

    def _asked(self, question: Callable[[Sources], T], query: Query) -> T:
        """Answer a question about the history and what came after it."""

        def ask() -> T:
            # In this order: what is dropped from the one has been in the other before.
            view = self._recent.view(query.nodes)
            segments = self._history.segments
            summaries = valid_summaries(self._history.summaries, segments)
            newer = view.since(sealed_to(segments))
            return question(Sources(self._history.paths, segments, newer, summaries))

        return self._history.settled(ask)
