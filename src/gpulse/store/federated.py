"""Answer from one head's data directory, a time-series database and a shared database, as one store."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import TypeVar

from gpulse.errors import GpulseError, UsageError
from gpulse.model.columns import time_span
from gpulse.model.metric import Scope
from gpulse.model.natural import natural_key
from gpulse.model.series import EXPOSED
from gpulse.model.session import Session
from gpulse.store.coverage import Coverage, CoverageLoader, Hole, apart, outside
from gpulse.store.incomplete import left_out
from gpulse.store.local import LocalStore
from gpulse.store.log.records import Entry
from gpulse.store.merge import better_series, interleaved, merged_holdings, merged_shares, united_series
from gpulse.store.outage import Outage
from gpulse.store.registry import Register
from gpulse.store.store import (
    ALWAYS,
    Holding,
    Query,
    Samples,
    Series,
    Share,
    Store,
    StoredEvent,
    StoredFinding,
    StoredGpu,
    StoredNode,
    StoredProcess,
    microseconds,
)

_MAX_AHEAD_SECONDS = 60.0
"""No sample is later than this after now, whatever a node's clock says."""
_MIN_PAUSE_SECONDS = 5.0
_PAUSE_FACTOR = 3.0
"""A backend that failed is not asked again for a multiple of the time that it took to fail."""

_ALWAYS = Query(*ALWAYS)

_MAX_NAMES = 5

T = TypeVar("T")


class Backend:
    """A store outside of this machine that may fail. After a failure it is left alone for a while."""

    def __init__(self, store: Store | None, now: Callable[[], float]) -> None:
        self.store = store
        self._now = now
        self._pause = (-math.inf, -math.inf)
        self._trying = threading.Lock()
        self.outage: Outage | None = None
        """Why it does not answer; None while it does."""

    def ask(
        self, question: Callable[[Store, Query], list[T]], query: Query, *, is_strict: bool
    ) -> list[T] | None:
        """Return the answer; None when there is no backend, or when it fails.

        Raises:
            GpulseError: It fails, and the answer must not be incomplete.
        """
        if self.store is None:
            return None
        outage = self.outage  # another thread may set it at any time
        if outage is None or is_strict:
            return self._try(question, query, self.store, is_strict=is_strict)
        begin, end = self._pause
        if begin <= self._now() < end or not self._trying.acquire(blocking=False):
            _left_out(outage)
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
            outage = Outage(asked_at if before is None else before.since, error.message, error.hint)
            self.outage = outage
            if is_strict:
                raise
            _left_out(outage)
            return None
        self.outage = None
        return found


def _left_out(outage: Outage) -> None:
    left_out(f"a part is missing: {outage.message}")


class FederatedStore(Store):
    """The store that a head answers from which has more than its own disk. Safe to use from several threads.

    What is complete in the head's own data directory comes from there. The rest of the samples comes from the time-series
    database where they are series there, and what is about processes comes from the shared database.
    """

    def __init__(
        self,
        local: LocalStore,
        tsdb: Store | None = None,
        database: Store | None = None,
        *,
        now: Callable[[], float],
        register: Register | None = None,
    ) -> None:
        """Put them together.

        Args:
            local: This head's data directory.
            tsdb: The time-series database; it has all samples of scopes that are series.
            database: The shared database; it has the metadata and the GPU time of all heads.
            now: Returns the time in epoch seconds.
            register: The nodes of all heads, where this one learns of others'; those of this data directory when None.
        """
        self._local = local
        self._register = register
        self._tsdb = Backend(tsdb, now)
        self._database = Backend(database, now)
        self._coverage = Coverage()
        self._loader = CoverageLoader(local, self._coverage, now())
        self._now = now
        self.is_strict = False

    @property
    def strict(self) -> FederatedStore:
        """The same store for answers that must be complete: what a backend does not deliver is an error."""
        twin = copy(self)
        twin.is_strict = True
        return twin

    @property
    def outage(self) -> Outage | None:
        """Why answers are incomplete; None when they are not."""
        return self.tsdb_outage or self.database_outage

    @property
    def tsdb_outage(self) -> Outage | None:
        """Why samples of the time-series database are missing."""
        return self._tsdb.outage

    @property
    def database_outage(self) -> Outage | None:
        """Why data of the shared database are missing."""
        return self._database.outage

    def committed(self, entries: Iterable[Entry]) -> None:
        """Note that entries are on disk: what they hold needs no other backend."""
        for entry in entries:
            batch = entry.batch
            if batch is not None and batch.frames:
                first, last = (time + batch.shift_us for time in time_span(batch.frames))
                numbers = range(batch.first, batch.last + 1)
                self._coverage.add_frames(batch.node, batch.run, numbers, first / 1e6, last / 1e6)

    # --- samples

    def series(self, query: Query) -> list[Series]:
        """Return metrics over time; what a backend does not deliver is left out. See `store.store.Store`."""
        self._note_unshared(query)
        here = self._local.series(query)
        holes = [_aligned(hole, query) for hole in self._holes(query, query.scope)]
        there, _ = self._ask(self._backend(query.scope), query, holes, lambda store, part: store.series(part))
        if not there:
            return here
        merged = united_series if query.step is None else better_series
        return merged(here, there, query.metrics)

    def _note_unshared(self, query: Query) -> None:
        """Say that samples of other heads' nodes are missing where there is no backend that has them."""
        if self._register is None or self._backend(query.scope).store is not None:
            return
        names = [
            self._register.by_id[number].name
            for number in list(self._register.elsewhere)
            if query.nodes is None or number in query.nodes
        ]
        if names:
            shown = ", ".join(sorted(names, key=natural_key)[:_MAX_NAMES])
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            left_out(
                f"samples of {shown}{more} are at other heads; heads share samples through a time-series database "
                "(gpulse head --remote-write)"
            )

    def scan(self, query: Query) -> Iterator[Samples]:
        """Yield every sample; see `store.store.Store`.

        Raises:
            GpulseError: A backend does not deliver: what is made of all samples must not have a hole.
        """
        store = self._backend(query.scope).store
        begin = query.start
        for hole in [] if store is None else apart(self._holes(query, query.scope)):
            if begin < hole.start:
                yield from self._local.scan(replace(query, start=begin, end=hole.start))
            here = self._local.scan(replace(query, start=hole.start, end=hole.end))
            there = (store or self._local).scan(_part(query, hole))
            yield from interleaved(here, there, query.metrics)
            begin = hole.end
        if begin < query.end:
            yield from self._local.scan(replace(query, start=begin))

    def gpu_holders(self, query: Query) -> list[Holding]:
        """Return what processes held on which GPUs; what a backend does not deliver is left out."""
        here = self._local.gpu_holders(query)
        holes = self._holes(query, "process")
        there, _ = self._ask(self._database, query, holes, lambda store, part: store.gpu_holders(part))
        return merged_holdings([*here, *there]) if there else here

    def gpu_time(self, query: Query) -> list[Share]:
        """Divide the time of GPUs among processes; what a backend does not deliver is left out."""
        holes = self._holes(query, "process")
        if not holes:
            return self._local.gpu_time(query)
        found, answered = self._ask(self._database, query, holes, lambda store, part: store.gpu_time(part))
        for rest in outside(answered, query.start, query.end, self._known(query)):
            found += self._local.gpu_time(_part(query, rest))
        return merged_shares(found)

    def _ask(
        self,
        backend: Backend,
        query: Query,
        holes: Iterable[Hole],
        question: Callable[[Store, Query], list[T]],
    ) -> tuple[list[T], list[Hole]]:
        """Return what a backend has of some holes, and for which of them it answered."""
        found: list[T] = []
        answered: list[Hole] = []
        for hole in holes:
            answer = backend.ask(question, _part(query, hole), is_strict=self.is_strict)
            if answer is not None:
                found += answer
                answered.append(hole)
        return found, answered

    def _backend(self, scope: Scope) -> Backend:
        return self._tsdb if scope in EXPOSED else self._database

    def _known(self, query: Query) -> Sequence[int]:
        """The nodes of a query that are known here."""
        known = self.nodes()
        return [node for node in known if query.nodes is None or node in query.nodes]

    def _holes(self, query: Query, scope: Scope) -> list[Hole]:
        """What may not be complete here, where there is a backend to ask."""
        if self._backend(scope).store is None or not query.start < query.end:
            return []
        now = self._now()
        self._loader.load(query.start, query.end, now)
        first, last = max(0.0, query.start), min(query.end, now + _MAX_AHEAD_SECONDS)
        return self._coverage.holes(first, last, self._known(query), now, of_samples=scope in EXPOSED)

    # --- metadata

    def nodes(self) -> dict[int, StoredNode]:
        """Return all nodes, by their numbers."""
        return self._local.nodes() if self._register is None else dict(self._register.by_id)

    def gpus(self) -> list[StoredGpu]:
        """Return all GPUs, by node and index."""
        known = self._local.gpus()
        return known if self._register is None else [*known, *self._register.gpus_elsewhere(known)]

    def sessions(self) -> list[Session]:
        """Return all sessions, oldest first."""
        return self._metadata(lambda store: store.sessions())

    def events(self, query: Query) -> list[StoredEvent]:
        """Return what happened; see `store.store.Store`."""
        return self._metadata(lambda store: store.events(query))

    def findings(self, query: Query) -> list[StoredFinding]:
        """Return the findings that held; see `store.store.Store`."""
        return self._metadata(lambda store: store.findings(query))

    def processes(self, query: Query) -> list[StoredProcess]:
        """Return the processes that lived; see `store.store.Store`."""
        return self._metadata(lambda store: store.processes(query))

    def job_events(self, word: str) -> list[StoredEvent]:
        """Return what was reported of the jobs that a word may mean; see `store.store.Store`."""
        return self._metadata(lambda store: store.job_events(word))

    def job_names(self) -> list[str]:
        """Return the jobs that processes belong to, whenever they lived."""
        return self._metadata(lambda store: store.job_names())

    def _metadata(self, question: Callable[[Store], list[T]]) -> list[T]:
        """Ask the shared database, which has the metadata of all heads; the head's own while it does not answer.

        Raises:
            GpulseError: It does not answer, and the answer must not be incomplete.
        """
        answer = self._database.ask(lambda store, _: question(store), _ALWAYS, is_strict=self.is_strict)
        return question(self._local) if answer is None else answer


def _part(query: Query, hole: Hole) -> Query:
    """The part of a query that is about a hole."""
    return replace(query, start=hole.start, end=hole.end, nodes=hole.nodes)


def _aligned(hole: Hole, query: Query) -> Hole:
    """A hole from the beginning of a step on to the end of one, so that one store answers for the whole step."""
    step = query.step_us
    if step is None:
        return hole
    start = microseconds(hole.start) // step * step / 1e6
    end = -(-microseconds(hole.end) // step) * step / 1e6
    return Hole(max(query.start, start), min(query.end, end), hole.nodes)
