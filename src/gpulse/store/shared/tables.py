"""Tables of processes that other heads have, or this one had once, read from the shared directory under this head's numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import numpy as np

from gpulse.errors import GpulseError
from gpulse.model.metric import Scope
from gpulse.store.base import (
    Holding,
    Samples,
    Series,
    SeriesKey,
    Share,
    Statistic,
    Steps,
    StoredNode,
    SummarySource,
)
from gpulse.store.history.series import check_metrics, join_samples, microseconds
from gpulse.store.history.thinning import SCOPES
from gpulse.store.left_out import left_out
from gpulse.store.merging import merged_holdings, merged_shares, merged_steps, series_of_steps, united_series
from gpulse.store.shared.division import OWN, Minutes, Part, Span, contested, divided, minutes_of, spans_of
from gpulse.store.shared.errands import Errands
from gpulse.store.shared.head_tables import HeadTables
from gpulse.store.shared.listing import DamagedError, Listing, of_head
from gpulse.store.trouble import Trouble

PATIENCE_SECONDS = 20.0

_Piece = TypeVar("_Piece")


class SharedTables:
    """As `store.base.SummarySource`, for processes and groups; of other scopes it has nothing.

    Safe to use from several threads. A file server that does not answer costs every question a while, and then raises.
    """

    def __init__(
        self,
        directory: str,
        nodes: Callable[[], Mapping[int, StoredNode]],
        *,
        own: SummarySource | None = None,
        own_id: str | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Prepare to answer; nothing is read yet.

        Args:
            directory: The one that heads share.
            nodes: Gives this head's nodes by their numbers.
            own: What this head has itself, a part of shares: each minute is told by whoever has most of it.
            own_id: Which of the heads this one is.
            patience_seconds: So long an answer of the file server is waited for.
        """
        self._nodes = nodes
        self._own = own
        self._own_id = own_id
        self._errands = Errands(f"the shared directory {directory}", patience_seconds=patience_seconds)
        self._listing = Listing(directory)

    @property
    def trouble(self) -> Trouble | None:
        """Why the tables of one of the heads cannot be read at the moment."""
        return self._listing.trouble

    def close(self) -> None:
        """Let go of everything."""
        self._listing.close()

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
            GpulseError: The shared directory does not answer, or something in it is damaged.
        """
        check_metrics(scope, (metric,))
        if step is not None and statistic != "last":
            found = self.steps(
                scope, (metric,), start=start, end=end, step=step, nodes=nodes, subjects=subjects
            )
            return [series_of_steps(steps, statistic) for steps in found]

        def ask(tables: SummarySource, begin: float, stop: float, which: Collection[int]) -> list[Series]:
            return tables.query(scope, metric, start=begin, end=stop, nodes=which, subjects=subjects)

        every: list[Series] = []
        for piece in self._asked(scope, start, end, nodes, ask, _named):
            every = united_series(every, piece)
        return every if step is None else [_last(series, step) for series in every]

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
            GpulseError: The shared directory does not answer, or something in it is damaged.
        """
        check_metrics(scope, metrics)

        def ask(tables: SummarySource, begin: float, stop: float, which: Collection[int]) -> list[Samples]:
            return list(tables.scan(scope, metrics, start=begin, end=stop, nodes=which, subjects=subjects))

        begin, last = self._extent(scope, start, end)
        while begin < last:
            stop = min(begin + stretch_seconds, last)
            found = [
                samples
                for piece in self._asked(scope, begin, stop, nodes, ask, _renamed)
                for samples in piece
                if len(samples.times)
            ]
            if found:
                yield join_samples(found, metrics)
            begin = stop

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
            GpulseError: The shared directory does not answer, or something in it is damaged.
        """
        check_metrics(scope, metrics)

        def ask(tables: SummarySource, begin: float, stop: float, which: Collection[int]) -> list[Steps]:
            return tables.steps(
                scope, metrics, start=begin, end=stop, step=step, nodes=which, subjects=subjects, gpus=gpus
            )

        pieces = self._asked(scope, start, end, nodes, ask, _named)
        return merged_steps([steps for piece in pieces for steps in piece], metrics)

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
            GpulseError: The shared directory does not answer, or something in it is damaged.
        """

        def ask(tables: SummarySource, begin: float, stop: float, which: Collection[int]) -> list[Holding]:
            return tables.holdings(start=begin, end=stop, nodes=which, gpus=gpus)

        pieces = self._asked("process", start, end, nodes, ask, _numbered)
        return merged_holdings([holding for piece in pieces for holding in piece])

    def shares(self, *, start: float, end: float, nodes: Collection[int] | None = None) -> list[Share]:
        """As `SummarySource.shares`, of all heads and of this one.

        Raises:
            GpulseError: The shared directory does not answer, or something in it is damaged.
        """
        own = None if self._own is None else minutes_of(self._own, start, end, nodes)

        def ask(tables: SummarySource, begin: float, stop: float, which: Collection[int]) -> list[Share]:
            return tables.shares(start=begin, end=stop, nodes=which)

        pieces = self._asked("process", start, end, nodes, ask, _numbered, own)
        return merged_shares([share for piece in pieces for share in piece])

    # --- asking

    def _asked(
        self,
        scope: Scope,
        start: float,
        end: float,
        nodes: Collection[int] | None,
        ask: Callable[[SummarySource, float, float, Collection[int]], list[_Piece]],
        named: Callable[[_Piece, Mapping[int, int]], _Piece],
        own: Minutes | None = None,
    ) -> list[list[_Piece]]:
        """What each head says of the time that it answers for, with this head's numbers for nodes.

        Args:
            scope: What is asked for.
            start: From when.
            end: Until when.
            nodes: Of which nodes.
            ask: How to ask a head for a part of that.
            named: Gives an answer this head's numbers.
            own: How much this head has itself; None when it is not asked.
        """
        if scope not in SCOPES:
            return []
        known = self._nodes()
        wanted = known if nodes is None else {number: known[number] for number in nodes if number in known}
        failed: dict[str, GpulseError] = {}
        untold: list[float] = []

        def question() -> tuple[list[list[_Piece]], list[Part]]:
            heads = self._listing.look()
            untold.extend(self._untold(heads, start, end))
            while True:
                try:
                    return answered(heads)
                except DamagedError as error:  # the others have something to say, too
                    failed[error.head] = error.why
                    del heads[error.head]

        def answered(heads: Mapping[str, HeadTables]) -> tuple[list[list[_Piece]], list[Part]]:
            there = {head: tables.numbers(wanted) for head, tables in heads.items()}
            here = {head: {there[head][number]: number for number in there[head]} for head in there}
            parts = self._parts(heads, there, start, end, None if own is None else (frozenset(wanted), own))
            found = []
            for head, begin, stop, which in parts:
                if head != OWN:
                    numbers = [there[head][node] for node in which]
                    with of_head(head):
                        asked = ask(heads[head].samples, begin / 1e6, stop / 1e6, numbers)
                    self._listing.was_read(head)
                    found.append([named(piece, here[head]) for piece in asked])
            return found, [part for part in parts if part.head == OWN]

        if not wanted or start >= end:
            return []
        found, mine = self._errands.ask(question)
        for error in self._listing.missing(failed):
            left_out(f"what a head shares is missing: {error.message}")
        if untold:
            since = f"{datetime.fromtimestamp(min(untold), UTC):%Y-%m-%dT%H:%M:%SZ}"
            left_out(f"what processes did since {since} is not shared by all heads yet")
        if self._own is not None:
            found += [ask(self._own, begin / 1e6, stop / 1e6, which) for _, begin, stop, which in mine]
        return found

    def _parts(
        self,
        heads: Mapping[str, HeadTables],
        there: Mapping[str, Mapping[int, int]],
        start: float,
        end: float,
        own: tuple[frozenset[int], Minutes] | None,
    ) -> list[Part]:
        begin, stop = microseconds(start), microseconds(end)
        spans: dict[str, list[Span]] = {}
        for head, tables in heads.items():
            here = {number: node for node, number in there[head].items()}
            spans[head] = tables.spans(begin, stop, here)
        nodes = {
            head: frozenset[int]().union(*(span.nodes for span in found))
            for head, found in spans.items()
            if found
        }
        if own is not None:
            spans[OWN] = spans_of(own[1])
        disputes = contested(spans)
        minutes: dict[str, Minutes] = {}
        for head in nodes if disputes else ():
            with of_head(head):
                minutes[head] = heads[head].minutes(disputes, there[head])
        if own is not None:
            nodes[OWN], minutes[OWN] = own
        return divided(begin, stop, nodes, disputes, minutes)

    def _untold(self, heads: Mapping[str, HeadTables], start: float, end: float) -> list[float]:
        """Since when each of the other heads has not shared what it got in a time, where that is so."""
        found = (tables.untold_since(start, end) for head, tables in heads.items() if head != self._own_id)
        return [since for since in found if since is not None]

    def _extent(self, scope: Scope, start: float, end: float) -> tuple[float, float]:
        """The part of a time in which there may be something."""
        if scope not in SCOPES:
            return end, end

        def question() -> list[tuple[int, int]]:
            return [
                (file.start, file.end)
                for tables in self._listing.look().values()
                for segment in tables.history.segments
                for file in segment.samples
                if file.scope == scope
            ]

        found = self._errands.ask(question)
        if not found:
            return end, end
        first, last = min(begin for begin, _ in found) / 1e6, max(stop for _, stop in found) / 1e6 + 1.0
        return max(start, first), min(end, last)


def _key(key: SeriesKey, numbers: Mapping[int, int]) -> SeriesKey:
    return key._replace(node=numbers[key.node])


def _named(piece: _Piece, numbers: Mapping[int, int]) -> _Piece:
    """Something with a key."""
    return piece._replace(key=_key(piece.key, numbers))  # type: ignore[attr-defined, no-any-return]


def _numbered(piece: _Piece, numbers: Mapping[int, int]) -> _Piece:
    """Something with a node."""
    return piece._replace(node=numbers[piece.node])  # type: ignore[attr-defined, no-any-return]


def _renamed(samples: Samples, numbers: Mapping[int, int]) -> Samples:
    return samples._replace(keys=[_key(key, numbers) for key in samples.keys])


def _last(series: Series, step: float) -> Series:
    """The last known value of each step."""
    known = ~np.isnan(series.values)
    times, values = series.times[known], series.values[known]
    begins = np.floor(times / step) * step
    is_last = np.append(begins[1:] != begins[:-1], True) if len(begins) else np.empty(0, bool)
    return Series(series.key, begins[is_last], values[is_last])
