"""One store over a head's data directory, a time-series database and a shared database."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import TypeVar

from gpulse.errors import GpulseError, UsageError
from gpulse.model.metric_catalog import Scope
from gpulse.model.packed_columns import packed_time_range
from gpulse.model.safe_text import natural_key
from gpulse.model.series_labels import EXPOSED_SCOPES
from gpulse.model.session import Session
from gpulse.store.incomplete_answers import BackendOutage, note_missing
from gpulse.store.local import LocalStore
from gpulse.store.local_coverage import CoverageGap, CoverageLoader, LocalCoverage, merge_gaps, subtract_gaps
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.merge import (
    choose_fuller_steps,
    interleave_samples,
    merge_holdings,
    merge_shares,
    union_series,
)
from gpulse.store.node_registry import NodeRegistry
from gpulse.store.store import (
    ALL_TIME,
    GpuHolding,
    GpuShare,
    Query,
    Samples,
    Series,
    Store,
    StoredEvent,
    StoredFinding,
    StoredGpu,
    StoredNode,
    StoredProcess,
    to_microseconds,
)

_MAX_AHEAD_SECONDS = 60.0
"""Samples are at most this far in the future, whatever a node's clock says."""
_MIN_PAUSE_SECONDS = 5.0
_PAUSE_FACTOR = 3.0
"""A backend that failed is not queried again for this multiple of the time that the failure took."""

_ALL_TIME = Query(*ALL_TIME)

_MAX_NAMES_SHOWN = 5

T = TypeVar("T")


class Backend:
    """A store on another machine, which may fail. After a failure, it is not queried for a while."""

    def __init__(self, store: Store | None, now: Callable[[], float]) -> None:
        self.store = store
        self._now = now
        self._pause = (-math.inf, -math.inf)
        self._trying = threading.Lock()
        self.outage: BackendOutage | None = None
        """The current outage; None while the backend answers."""

    def ask(
        self, question: Callable[[Store, Query], list[T]], query: Query, *, is_strict: bool
    ) -> list[T] | None:
        """Return the answer; None if there is no backend or it fails.

        Raises:
            GpulseError: The backend failed, and `is_strict` forbids incomplete answers.
        """
        if self.store is None:
            return None
        outage = self.outage  # another thread may set it at any time
        if outage is None or is_strict:
            return self._try(question, query, self.store, is_strict=is_strict)
        begin, end = self._pause
        if begin <= self._now() < end or not self._trying.acquire(blocking=False):
            _note_outage(outage)
            return None
        try:
            return self._try(question, query, self.store, is_strict=False)
        finally:
            self._trying.release()

    def _try(
        self, question: Callable[[Store, Query], list[T]], query: Query, store: Store, *, is_strict: bool
    ) -> list[T] | None:
        asked_at = self._now()
        try:
            found = question(store, query)
        except UsageError:
            raise
        except GpulseError as error:
            failed_at, before = self._now(), self.outage
            waited = max(0.0, failed_at - asked_at)
            self._pause = failed_at, failed_at + max(_MIN_PAUSE_SECONDS, _PAUSE_FACTOR * waited)
            outage = BackendOutage(asked_at if before is None else before.since, error.message, error.hint)
            self.outage = outage
            if is_strict:
                raise
            _note_outage(outage)
            return None
        self.outage = None
        return found


def _note_outage(outage: BackendOutage) -> None:
    note_missing(f"some data is missing: {outage.message}")


class FederatedStore(Store):
    """The store of a head that has other backends besides its own disk. Safe to use from several threads.

    Data that is complete in the head's own data directory comes from there. Other samples come from the time-series database
    if it has their scope; data about processes comes from the shared database.
    """

    def __init__(
        self,
        local: LocalStore,
        tsdb: Store | None = None,
        database: Store | None = None,
        *,
        now: Callable[[], float],
        register: NodeRegistry | None = None,
    ) -> None:
        """Combine the stores.

        Args:
            local: This head's data directory.
            tsdb: The time-series database; it has all samples of the exposed scopes.
            database: The shared database; it has the metadata and the GPU time of all heads.
            now: Returns the time in epoch seconds.
            register: The nodes of all heads; None for only those in this data directory.
        """
        self._local = local
        self._register = register
        self._tsdb = Backend(tsdb, now)
        self._database = Backend(database, now)
        self._coverage = LocalCoverage()
        self._loader = CoverageLoader(local, self._coverage, now())
        self._now = now
        self.is_strict = False

    @property
    def strict(self) -> FederatedStore:
        """The same store, but for complete answers only: a failing backend is an error."""
        twin = copy(self)
        twin.is_strict = True
        return twin

    @property
    def outage(self) -> BackendOutage | None:
        """Why answers are incomplete; None if they are complete."""
        return self.tsdb_outage or self.database_outage

    @property
    def tsdb_outage(self) -> BackendOutage | None:
        """The outage of the time-series database; None while it answers."""
        return self._tsdb.outage

    @property
    def database_outage(self) -> BackendOutage | None:
        """The outage of the shared database; None while it answers."""
        return self._database.outage

    def committed(self, entries: Iterable[LogEntry]) -> None:
        """Record that entries are on disk, so that queries for them need no other backend."""
        for entry in entries:
            batch = entry.batch
            if batch is not None and batch.frames:
                first, last = (time + batch.shift_us for time in packed_time_range(batch.frames))
                numbers = range(batch.first, batch.last + 1)
                self._coverage.add_frames(batch.node, batch.run, numbers, first / 1e6, last / 1e6)

    # --- samples

    def series(self, query: Query) -> list[Series]:
        """Return metrics over time, without the data of failing backends; see `store.store.Store`."""
        self._note_unshared(query)
        here = self._local.series(query)
        gaps = [_align_to_steps(gap, query) for gap in self._gaps(query, query.scope)]
        there, _ = self._ask(self._backend(query.scope), query, gaps, lambda store, part: store.series(part))
        if not there:
            return here
        merged = union_series if query.step is None else choose_fuller_steps
        return merged(here, there, query.metrics)

    def _note_unshared(self, query: Query) -> None:
        """Note that samples of other heads' nodes are missing if no backend has them."""
        if self._register is None or self._backend(query.scope).store is not None:
            return
        names = [
            self._register.by_id[number].name
            for number in list(self._register.other_head_ids)
            if query.nodes is None or number in query.nodes
        ]
        if names:
            shown = ", ".join(sorted(names, key=natural_key)[:_MAX_NAMES_SHOWN])
            more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
            note_missing(
                f"samples of {shown}{more} are only on other heads; to share samples between heads, use a time-series "
                "database (gpulse head --remote-write)"
            )

    def scan(self, query: Query) -> Iterator[Samples]:
        """Yield every sample; see `store.store.Store`.

        Raises:
            GpulseError: A backend failed. A scan must not miss samples, so there is no incomplete answer.
        """
        store = self._backend(query.scope).store
        begin = query.start
        for gap in [] if store is None else merge_gaps(self._gaps(query, query.scope)):
            if begin < gap.start:
                yield from self._local.scan(replace(query, start=begin, end=gap.start))
            here = self._local.scan(replace(query, start=gap.start, end=gap.end))
            there = (store or self._local).scan(_query_in_gap(query, gap))
            yield from interleave_samples(here, there, query.metrics)
            begin = gap.end
        if begin < query.end:
            yield from self._local.scan(replace(query, start=begin))

    def gpu_holders(self, query: Query) -> list[GpuHolding]:
        """Return which processes used which GPUs, without the data of a failing backend."""
        here = self._local.gpu_holders(query)
        gaps = self._gaps(query, "process")
        there, _ = self._ask(self._database, query, gaps, lambda store, part: store.gpu_holders(part))
        return merge_holdings([*here, *there]) if there else here

    def gpu_time(self, query: Query) -> list[GpuShare]:
        """Divide the time of GPUs among processes, without the data of a failing backend."""
        gaps = self._gaps(query, "process")
        if not gaps:
            return self._local.gpu_time(query)
        found, answered = self._ask(self._database, query, gaps, lambda store, part: store.gpu_time(part))
        for rest in subtract_gaps(answered, query.start, query.end, self._known(query)):
            found += self._local.gpu_time(_query_in_gap(query, rest))
        return merge_shares(found)

    def _ask(
        self,
        backend: Backend,
        query: Query,
        gaps: Iterable[CoverageGap],
        question: Callable[[Store, Query], list[T]],
    ) -> tuple[list[T], list[CoverageGap]]:
        """Return what a backend has for some gaps, and the gaps for which it answered."""
        found: list[T] = []
        answered: list[CoverageGap] = []
        for gap in gaps:
            answer = backend.ask(question, _query_in_gap(query, gap), is_strict=self.is_strict)
            if answer is not None:
                found += answer
                answered.append(gap)
        return found, answered

    def _backend(self, scope: Scope) -> Backend:
        return self._tsdb if scope in EXPOSED_SCOPES else self._database

    def _known(self, query: Query) -> Sequence[int]:
        """Return the nodes of a query that are known here."""
        known = self.nodes()
        return [node for node in known if query.nodes is None or node in query.nodes]

    def _gaps(self, query: Query, scope: Scope) -> list[CoverageGap]:
        """Return the gaps in the local data; empty if there is no backend that could fill them."""
        if self._backend(scope).store is None or not query.start < query.end:
            return []
        now = self._now()
        self._loader.load(query.start, query.end, now)
        first, last = max(0.0, query.start), min(query.end, now + _MAX_AHEAD_SECONDS)
        return self._coverage.gaps(first, last, self._known(query), now, of_samples=scope in EXPOSED_SCOPES)

    # --- metadata

    def nodes(self) -> dict[int, StoredNode]:
        """Return all nodes, by number."""
        return self._local.nodes() if self._register is None else dict(self._register.by_id)

    def gpus(self) -> list[StoredGpu]:
        """Return all GPUs, ordered by node and index."""
        known = self._local.gpus()
        return known if self._register is None else [*known, *self._register.other_head_gpus(known)]

    def sessions(self) -> list[Session]:
        """Return all sessions, oldest first."""
        return self._metadata(lambda store: store.sessions())

    def events(self, query: Query) -> list[StoredEvent]:
        """Return events; see `store.store.Store`."""
        return self._metadata(lambda store: store.events(query))

    def findings(self, query: Query) -> list[StoredFinding]:
        """Return findings; see `store.store.Store`."""
        return self._metadata(lambda store: store.findings(query))

    def processes(self, query: Query) -> list[StoredProcess]:
        """Return processes; see `store.store.Store`."""
        return self._metadata(lambda store: store.processes(query))

    def job_events(self, word: str) -> list[StoredEvent]:
        """Return the events of jobs that a word may refer to; see `store.store.Store`."""
        return self._metadata(lambda store: store.job_events(word))

    def job_names(self) -> list[str]:
        """Return the jobs of all processes that were ever seen."""
        return self._metadata(lambda store: store.job_names())

    def _metadata(self, question: Callable[[Store], list[T]]) -> list[T]:
        """Query the shared database, which has the metadata of all heads; fall back to this head's own metadata.

        Raises:
            GpulseError: The shared database failed, and the answer must not be incomplete.
        """
        answer = self._database.ask(lambda store, _: question(store), _ALL_TIME, is_strict=self.is_strict)
        return question(self._local) if answer is None else answer


def _query_in_gap(query: Query, gap: CoverageGap) -> Query:
    """Return the part of a query that lies in a gap."""
    return replace(query, start=gap.start, end=gap.end, nodes=gap.nodes)


def _align_to_steps(gap: CoverageGap, query: Query) -> CoverageGap:
    """Widen a gap to whole steps, so that each step comes from one store."""
    step = query.step_us
    if step is None:
        return gap
    start = to_microseconds(gap.start) // step * step / 1e6
    end = -(-to_microseconds(gap.end) // step) * step / 1e6
    return CoverageGap(max(query.start, start), min(query.end, end), gap.nodes)
