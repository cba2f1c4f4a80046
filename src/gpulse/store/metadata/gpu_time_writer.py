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
from gpulse.store.metadata.postgres_apply import find_ids
from gpulse.store.metadata.postgres_gpu_time import HOUR_US, add_rows, new_row
from gpulse.store.store import Holding, Query, Series, Share, StoredNode

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
        self._returned: list[TimeSpan] = []

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

    def put_back(self, spans: Iterable[TimeSpan]) -> None:
        """Put back time that was taken and could not be counted; spans of a node that touch become one."""
        with self._lock:
            found: list[TimeSpan] = []
            for span in sorted([*self._returned, *spans]):
                if found and found[-1].node == span.node and found[-1].end >= span.start:
                    found[-1] = found[-1]._replace(end=max(found[-1].end, span.end))
                else:
                    found.append(span)
            self._returned = found

    @property
    def oldest_us(self) -> int | None:
        """When the oldest time begins that is not counted; None when there is none."""
        with self._lock:
            starts = [start for spans in self._spans.values() for start, _ in spans]
            return min([*starts, *(span.start for span in self._returned)], default=None)

    def take(self, now_us: int) -> list[TimeSpan]:
        """Take out what can be counted: all but the newest moments of nodes that go on."""
        align, settled = round(ALIGN_SECONDS * 1e6), now_us - round(SETTLE_SECONDS * 1e6)
        with self._lock:
            found, self._returned = self._returned, []
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
        node_of: Callable[[int], StoredNode | None],
        is_ready: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        """Prepare to count.

        Args:
            source: The head's own store.
            config: Where the database is.
            head: The id of this head.
            node_of: Returns the node that a number of this head stands for.
            is_ready: Whether PostgreSQL answers.
            now: The head's clock.
        """
        self._source = source
        self._config = config
        self._head = head
        self._node_of = node_of
        self._is_ready = is_ready
        self._now = now
        self._started = now()
        self._pending = PendingTime()
        self._counted: int | None = None
        """Until when PostgreSQL has this head's time, as this head wrote it last; another database says something else."""
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
        now = self._now()
        with transaction(self._config, connection, _STATEMENT_SECONDS) as database:
            row = database.execute("SELECT counted FROM heads WHERE id = ?", (self._head,)).fetchone()
        if row is None:  # the database is new, and this head is not registered there yet
            return
        if row[0] != self._counted:
            self._catch_up(connection, row[0] / 1e6, self._started if self._counted is None else now)
        self._add_unclaimed(connection, self._pending.take(round(now * 1e6)))
        if self._closed.is_set():
            return
        oldest = self._pending.oldest_us
        counted = round(now * 1e6) if oldest is None else min(oldest, round(now * 1e6))
        with transaction(self._config, connection, _STATEMENT_SECONDS) as database:
            database.execute("UPDATE heads SET counted = ? WHERE id = ?", (counted, self._head))
        self._counted = counted

    def _catch_up(self, connection: Connection, counted: float, end: float) -> None:
        """Count what was received before and may not have been counted.

        Args:
            connection: To the database.
            counted: Until when the database has this head's time.
            end: What was received later is pending.
        """
        oldest = self._source.oldest
        if oldest is None:
            return
        hour = max(oldest, counted - _LOOK_BACK_SECONDS) // 3600.0 * 3600.0
        while hour < end and not self._closed.is_set():
            self._add_unclaimed(connection, list(self._received(hour, min(hour + 3600.0, end))))
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

    def _add_unclaimed(self, connection: Connection, spans: Sequence[TimeSpan]) -> None:
        """Count what of some spans no head has counted; what cannot be counted now is pending again."""
        left = spans
        try:
            nodes = [node for number in {span.node for span in spans} if (node := self._node_of(number))]
            with transaction(self._config, connection, _STATEMENT_SECONDS) as database:
                ids = find_ids(database, nodes)
                groups = list(_groups(_unclaimed(database, spans, ids)))
            late = [span for span in spans if span.node not in ids]
            for start, end, numbers in groups:
                if self._closed.is_set():
                    return
                late += self._add(connection, start, end, {number: ids[number] for number in numbers})
            left = late
        finally:
            self._pending.put_back(left)  # what of it is counted is claimed, and is not counted again

    def _add(self, connection: Connection, start: int, end: int, ids: Mapping[int, int]) -> list[TimeSpan]:
        """Count a span within one hour of several nodes; return those of which another head has counted something.

        Args:
            connection: To the database.
            start: When the span begins, in microseconds.
            end: When it ends.
            ids: The nodes' ids in PostgreSQL, by this head's numbers.
        """
        query = Query(start / 1e6, end / 1e6, "process", nodes=frozenset(ids))
        held: dict[tuple[object, ...], Holding] = {one[:4]: one for one in self._source.gpu_holders(query)}
        rows = []
        for share in self._source.gpu_time(query):
            row = share._replace(node=ids[share.node])
            if row.pid is None:  # nobody held the GPU: the row says over which time that was counted
                row = row._replace(first=start / 1e6, last=end / 1e6)
            rows.append(new_row(row, held.get(share[:4]), start // HOUR_US * HOUR_US))
        wanted = [TimeSpan(node, start, end) for node in ids.values()]
        with transaction(self._config, connection, _STATEMENT_SECONDS) as database:
            database.execute("SELECT pg_advisory_xact_lock(?)", (_COUNT_LOCK,))
            taken = _claims(database, wanted)
            self._claim(database, [span for span in wanted if span.node not in taken])
            add_rows(database, [row for row in rows if row.node not in taken])
        return [TimeSpan(number, start, end) for number, node in ids.items() if node in taken]

    def _claim(self, database: PostgresDatabase, spans: Sequence[TimeSpan]) -> None:
        if not spans:
            return
        rows = database.execute(_EXTEND, (*_columns(spans), self._head)).fetchall()
        extended = {(node, start) for node, start in rows}
        rest = [span for span in spans if span[:2] not in extended]
        if rest:
            database.execute(_CLAIM, (self._head, *_columns(rest)))


def _claims(database: PostgresDatabase, spans: Sequence[TimeSpan]) -> dict[int, list[tuple[int, int]]]:
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
        if begin < (stop := min(start, span.end)):
            yield span._replace(start=begin, end=stop)
        begin = max(begin, end)
    if begin < span.end:
        yield span._replace(start=begin)


def _unclaimed(
    database: PostgresDatabase, spans: Sequence[TimeSpan], ids: Mapping[int, int]
) -> Iterator[TimeSpan]:
    """Yield what of some spans nobody has counted, each moment of a node once; nodes without an id are left out."""
    known = [span for span in spans if span.node in ids]
    claims = _claims(database, [span._replace(node=ids[span.node]) for span in known])
    for span in known:
        claimed = claims.setdefault(ids[span.node], [])
        found = list(_without(span, sorted(claimed)))
        claimed += [(part.start, part.end) for part in found]
        yield from found


def _groups(spans: Iterable[TimeSpan]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield spans within one hour, each with the nodes that have exactly this span.

    A node whose span is shorter must not be among them: what lies before and after it is counted apart, or by another head.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for node, begin, stop in spans:
        start = begin
        while start < stop:
            end = min(stop, (start // HOUR_US + 1) * HOUR_US)
            found.setdefault((start, end), []).append(node)
            start = end
    for (start, end), nodes in sorted(found.items()):
        yield start, end, nodes
