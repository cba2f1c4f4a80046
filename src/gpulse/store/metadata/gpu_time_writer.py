"""The thread that adds this head's GPU time to PostgreSQL: who held which GPU, by the hour and by the day.

A moment of a node is counted once, by the head that claims it first: an agent that changes heads sends its newest frames
again. Claims and the rows that follow from them are one transaction.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from gpulse.errors import GpulseError
from gpulse.model.columns import time_span
from gpulse.store.log.records import Batch
from gpulse.store.metadata.postgres import (
    Connection,
    DatabaseConfig,
    PostgresDatabase,
    close,
    connect,
    transaction,
)
from gpulse.store.metadata.postgres_gpu_time import HOUR_US, add_rows, new_row
from gpulse.store.store import Holding, Query, Series, Share

log = logging.getLogger(__name__)

COUNT_SECONDS = 60.0
"""How often time is counted."""
ALIGN_SECONDS = 60.0
"""What is counted ends at multiples of this, while more may come."""
SETTLE_SECONDS = 60.0
"""A node that has sent nothing for so long gets its last moments counted."""
_LOOK_BACK_SECONDS = 3600.0
"""After a start, what was received before the last count may not be counted yet; it is looked at again."""
_STATEMENT_SECONDS = 60.0
_COUNT_LOCK = 0x6750_4275
_MINUTE_US = 60_000_000
_METRICS = ("power_watts", "memory_used_bytes", "gpu_utilization_ratio")
"""Nearly every sample of a GPU has one of these."""
_CLAIMS = """
SELECT node, start, "end" FROM counted_time
JOIN unnest(?::int8[], ?::int8[], ?::int8[]) AS wanted (id, first, stop) ON node = id AND start < stop AND "end" > first
"""
_EXTEND = """
UPDATE counted_time SET "end" = stop FROM unnest(?::int8[], ?::int8[], ?::int8[]) AS claimed (id, first, stop)
WHERE node = id AND "end" = first AND head = ? RETURNING node, first
"""
_CLAIM = 'INSERT INTO counted_time (node, start, "end", head) SELECT *, ? FROM unnest(?::int8[], ?::int8[], ?::int8[])'


class TimeSpan(NamedTuple):
    """A stretch of a node's time, in microseconds; the end is not within any more."""

    node: int
    start: int
    end: int


class Source(Protocol):
    """The head's own store."""

    def gpu_time(self, query: Query) -> list[Share]:
        """Divide the time of GPUs among the processes that held them."""

    def gpu_holders(self, query: Query) -> list[Holding]:
        """Return what processes held on which GPUs."""

    def series(self, query: Query) -> list[Series]:
        """Return metrics over time."""

    @property
    def oldest(self) -> float | None:
        """When the oldest samples were taken."""


class PendingTime:
    """What this head received and has not counted yet, by node. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._open: dict[int, tuple[bytes, int]] = {}
        """By node the run and the number of the frame that came last."""

    def add_batch(self, batch: Batch) -> None:
        """Note that frames are on disk."""
        first, last = (moment + batch.shift_us for moment in time_span(batch.frames))
        with self._lock:
            spans = self._spans.setdefault(batch.node, [])
            if spans and self._open.get(batch.node) == (batch.run, batch.first - 1):
                spans[-1] = min(spans[-1][0], first), max(spans[-1][1], last + 1)
            else:
                spans.append((first, last + 1))
            self._open[batch.node] = batch.run, batch.last

    def add(self, spans: Iterable[TimeSpan]) -> None:
        """Add time that was received before; the newest frames of a node stay the last."""
        with self._lock:
            for node, start, end in spans:
                self._spans.setdefault(node, []).insert(0, (start, end))

    def take(self, now_us: int) -> list[TimeSpan]:
        """Take out what can be counted: all but the newest moments of nodes that go on."""
        align, settled = round(ALIGN_SECONDS * 1e6), now_us - round(SETTLE_SECONDS * 1e6)
        found: list[TimeSpan] = []
        with self._lock:
            for node, spans in list(self._spans.items()):
                kept: list[tuple[int, int]] = []
                for place, (start, end) in enumerate(spans):
                    is_open = place == len(spans) - 1 and end > settled
                    cut = end // align * align if is_open else end
                    if start < cut:
                        found.append(TimeSpan(node, start, cut))
                    if is_open:
                        kept.append((max(start, cut), end))
                self._spans[node] = kept
        return found


class GpuTimeWriter:
    """Counts the GPU time of one head. `add` may be called from any thread and never waits for PostgreSQL."""

    def __init__(
        self,
        source: Source,
        config: DatabaseConfig,
        *,
        head: str,
        id_of: Callable[[int], int | None],
        is_ready: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        """Prepare to count.

        Args:
            source: The head's own store.
            config: Where the database is.
            head: The id of this head.
            id_of: Returns PostgreSQL's id of a node.
            is_ready: Whether PostgreSQL answers and has the nodes of this head.
            now: The head's clock.
        """
        self._source = source
        self._config = config
        self._head = head
        self._id_of = id_of
        self._is_ready = is_ready
        self._now = now
        self._started = now()
        self._pending = PendingTime()
        self._is_caught_up = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-time-writer", daemon=True)

    def start(self) -> None:
        """Begin to count."""
        self._thread.start()

    def add(self, batches: Iterable[Batch]) -> None:
        """Note that frames are on disk."""
        for batch in batches:
            if batch.frames:
                self._pending.add_batch(batch)

    def close(self) -> None:
        """End; what is not counted yet is counted after the next start."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._closed.wait(COUNT_SECONDS):
            if not self._is_ready():
                continue
            try:
                connection = connect(self._config, timeout_seconds=_STATEMENT_SECONDS)
                try:
                    self._count(connection)
                finally:
                    close(connection)
            except GpulseError as error:
                log.debug("GPU time is not counted for now: %s", error.message)  # the metadata reports it
            except Exception:  # the guard: a fault here must not end the head
                log.exception("a fault in gpulse; GPU time is not counted for now")

    def _count(self, connection: Connection) -> None:
        if not self._is_caught_up:
            self._catch_up(connection)
            self._is_caught_up = True
        now_us = round(self._now() * 1e6)
        spans = self._pending.take(now_us)
        try:
            for span_group in _groups(self._unclaimed(connection, spans)):
                self._add(connection, span_group)
        except BaseException:
            self._pending.add(spans)  # what is counted already is claimed, and is not counted again
            raise
        with transaction(self._config, connection, _STATEMENT_SECONDS) as database:
            database.execute("UPDATE heads SET counted = ? WHERE id = ?", (now_us, self._head))

    def _catch_up(self, connection: Connection) -> None:
        """Count what was received before this start and may not have been counted."""
        with transaction(self._config, connection, _STATEMENT_SECONDS) as database:
            row = database.execute("SELECT counted FROM heads WHERE id = ?", (self._head,)).fetchone()
        counted = 0.0 if row is None else row[0] / 1e6
        oldest = self._source.oldest
        if oldest is None:
            return
        start = max(oldest, counted - _LOOK_BACK_SECONDS)
        hour = start // 3600.0 * 3600.0
        while hour < self._started and not self._closed.is_set():
            end = min(hour + 3600.0, self._started)
            spans = list(self._received(hour, end))
            for group in _groups(self._unclaimed(connection, spans)):
                self._add(connection, group)
            hour += 3600.0

    def _received(self, start: float, end: float) -> Iterator[TimeSpan]:
        """Yield the time of nodes that samples are there of, up to the last sample."""
        minutes: dict[int, dict[int, int]] = {}
        for series in self._source.series(Query(start, end, "gpu", _METRICS, step=_MINUTE_US / 1e6)):
            known = minutes.setdefault(series.key.node, {})
            for moment, last in zip(series.times.tolist(), series.ends.tolist(), strict=True):
                minute = round(moment * 1e6)
                until = minute + _MINUTE_US if math.isnan(last) else round(last * 1e6) + 1
                known[minute] = max(until, known.get(minute, 0))
        for node, known in minutes.items():
            begin = previous = None
            for minute in sorted(known):
                if begin is None or previous is None:
                    begin = minute
                elif minute - previous > _MINUTE_US:
                    yield TimeSpan(node, begin, known[previous])
                    begin = minute
                previous = minute
            if begin is not None and previous is not None:
                yield TimeSpan(node, begin, known[previous])

    def _unclaimed(self, connection: Connection, spans: Sequence[TimeSpan]) -> list[TimeSpan]:
        """Return what of some spans no head has counted."""
        known = [(span, node) for span in spans if (node := self._id_of(span.node)) is not None]
        if not known:
            return []
        with transaction(self._config, connection, _STATEMENT_SECONDS) as database:
            claims = _claims(database, [span._replace(node=node) for span, node in known])
        return [rest for span, node in known for rest in _without(span, sorted(claims.get(node, ())))]

    def _add(self, connection: Connection, spans: Sequence[TimeSpan]) -> None:
        """Count spans of different nodes that begin and end at nearly the same time, within one hour."""
        start, end = min(span.start for span in spans), max(span.end for span in spans)
        ids = {span.node: self._id_of(span.node) for span in spans}
        query = Query(start / 1e6, end / 1e6, "process", nodes=frozenset(ids))
        held: dict[tuple[object, ...], Holding] = {one[:4]: one for one in self._source.gpu_holders(query)}
        rows = [
            new_row(share._replace(node=node), held.get(share[:4]), start // HOUR_US * HOUR_US)
            for share in self._source.gpu_time(query)
            if (node := ids.get(share.node)) is not None
        ]
        wanted = [span._replace(node=node) for span in spans if (node := ids[span.node]) is not None]
        with transaction(self._config, connection, _STATEMENT_SECONDS) as database:
            database.execute("SELECT pg_advisory_xact_lock(?)", (_COUNT_LOCK,))
            taken = _claims(database, wanted)
            new = [span for span in wanted if span.node not in taken]
            self._claim(database, new)
            free = {span.node for span in new}
            add_rows(database, [row for row in rows if row.node in free])

    def _claim(self, database: PostgresDatabase, spans: Sequence[TimeSpan]) -> None:
        if not spans:
            return
        rows = database.execute(_EXTEND, (*_columns(spans), self._head)).fetchall()
        extended = {(node, start) for node, start in rows}
        rest = [span for span in spans if span[:2] not in extended]
        if rest:
            database.execute(_CLAIM, (self._head, *_columns(rest)))


def _claims(database: PostgresDatabase, spans: Sequence[TimeSpan]) -> Mapping[int, list[tuple[int, int]]]:
    """Return the spans that are counted already and overlap with some, by PostgreSQL's id of the node."""
    found: dict[int, list[tuple[int, int]]] = {}
    if spans:
        for node, start, end in database.execute(_CLAIMS, _columns(spans)).fetchall():
            found.setdefault(node, []).append((start, end))
    return found


def _columns(spans: Sequence[TimeSpan]) -> tuple[list[int], list[int], list[int]]:
    return [span.node for span in spans], [span.start for span in spans], [span.end for span in spans]


def _without(span: TimeSpan, claims: Sequence[tuple[int, int]]) -> Iterator[TimeSpan]:
    """Return the parts of a span that are not claimed."""
    begin = span.start
    for start, end in claims:
        if begin < start:
            yield span._replace(start=begin, end=min(start, span.end))
        begin = max(begin, end)
    if begin < span.end:
        yield span._replace(start=begin)


def _groups(spans: Sequence[TimeSpan]) -> Iterator[list[TimeSpan]]:
    """Put spans together that can be counted at once: of one hour, and alike but for a part of a minute at the start.

    A node has no uncounted samples of this head before its span, so that the others' start does no harm.
    """
    found: dict[tuple[int, int], list[TimeSpan]] = {}
    for span in spans:
        start = span.start
        while start < span.end:
            end = min(span.end, (start // HOUR_US + 1) * HOUR_US)
            align = round(ALIGN_SECONDS * 1e6)
            found.setdefault((start // align, end), []).append(TimeSpan(span.node, start, end))
            start = end
    for group in found.values():
        seen: set[int] = set()
        together: list[TimeSpan] = []
        for span in group:
            if span.node in seen:  # counted apart: its samples must not be taken for another span's
                yield [span]
            else:
                seen.add(span.node)
                together.append(span)
        yield together
