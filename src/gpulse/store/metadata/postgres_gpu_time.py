"""GPU time of processes in PostgreSQL, per hour and per day: rows, queries, and the thread that adds rows.

Rows of a day are the sums of its hours, so that months add up quickly. An hour that is only partly within a time range counts
in proportion to the time for which the process was seen within it.

Each moment of a node is counted once, by the head that claims it first, because an agent that switches heads resends its
newest frames. A claim and its rows are one transaction.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from gpulse.errors import GpulseError
from gpulse.model.intervals import merge, subtract
from gpulse.model.packed_columns import packed_time_range
from gpulse.store.log.record_payloads import FrameBatch
from gpulse.store.metadata.postgres_connection import (
    DatabaseConfig,
    DeadlineConnection,
    PostgresDatabase,
    close,
    connect,
    transaction,
)
from gpulse.store.metadata.postgres_replication import find_ids
from gpulse.store.metadata.schema import GPU_DAYS, GPU_HOURS
from gpulse.store.metadata.sql_dialects import QueryRunner
from gpulse.store.store import GpuHolding, GpuShare, Query, Series, StoredNode

HOUR_US, DAY_US = 3_600_000_000, 86_400_000_000
_KEY = "node, gpu, pid, start_time"
_SUMS = ("seconds", "known_seconds", "busy_seconds", "idle_seconds", "energy_joules", "seen_seconds")
_HELD_SUMS = ("memory_sum", "memory_weight", "sm_sum", "sm_weight")
_COLUMNS = (
    *("node", "gpu", "pid", "start_time", "time", "first", "last"),
    *(
        "seconds",
        "known_seconds",
        "busy_seconds",
        "idle_seconds",
        "energy_joules",
        "memory_max",
        "seen_seconds",
    ),
    *_HELD_SUMS,
)
_HOUR_PART = f"""CASE WHEN first IS NULL OR last <= first
    THEN (least(time + {HOUR_US}, ?) - greatest(time, ?)) / {HOUR_US}::float8
    ELSE greatest(0, least(last, ?) - greatest(first, ?)) / (last - first) END"""
"""The fraction of an hour's row that lies within a time range."""
_SUM_SQL = f"""
SELECT {_KEY}, min(first), max(last), max(memory_max), {{0}} FROM ({{1}}) AS rows {{2}} GROUP BY {_KEY}
"""
MIN_UNCOUNTED_SECONDS = 30.0
"""Less uncounted time than this is not reported."""
_UNCOUNTED = """
SELECT count(*), min(counted) FROM (
    SELECT seen.node, seen.seen,
        coalesce(
            (SELECT max("end") FROM counted_time AS claims WHERE claims.node = seen.node) / 1e6::float8, first_seen
        ) AS counted
    FROM (SELECT node, max(seen) AS seen FROM node_seen {0} GROUP BY node) AS seen JOIN nodes ON nodes.id = seen.node
) AS nodes WHERE least(seen, ?) - greatest(counted, ?) > ?
"""
_ADD_SQL = f"""
WITH new_gpu_time AS (
    SELECT * FROM unnest(
        ?::int8[], ?::text[], ?::int8[], ?::float8[], ?::int8[], {", ".join(["?::float8[]"] * (len(_COLUMNS) - 5))}
    ) AS new ({", ".join(_COLUMNS)})
)
INSERT INTO {{0}} ({", ".join(_COLUMNS)})
SELECT {_KEY}, time / {{1}} * {{1}}, min(first), max(last), sum(seconds), sum(known_seconds), sum(busy_seconds),
    sum(idle_seconds), sum(energy_joules), max(memory_max), sum(seen_seconds),
    {", ".join(f"sum({name})" for name in _HELD_SUMS)}
FROM new_gpu_time GROUP BY {_KEY}, time / {{1}} * {{1}}
ON CONFLICT (time, node, gpu, coalesce(pid, -1), coalesce(start_time, -1)) DO UPDATE SET
    first = least({{0}}.first, excluded.first), last = greatest({{0}}.last, excluded.last),
    memory_max = greatest({{0}}.memory_max, excluded.memory_max),
    energy_joules = coalesce({{0}}.energy_joules + excluded.energy_joules, {{0}}.energy_joules, excluded.energy_joules),
    {", ".join(f"{name} = {{0}}.{name} + excluded.{name}" for name in (*_SUMS, *_HELD_SUMS) if name != "energy_joules")}
"""


def find_gpu_time(rows: QueryRunner, query: Query) -> list[GpuShare]:
    """Divide the time of GPUs among processes; see `store.store.Store`."""
    found = []
    for node, gpu, pid, start, first, last, memory_max, *sums in _find(rows, query, _SUMS):
        seconds, known, busy, idle, energy, seen = sums
        span = (None, None) if pid is None else _clip_span(query, first, last)
        found.append(
            GpuShare(node, pid, start, gpu, *span, seconds, known, busy, idle, energy, memory_max, seen)
        )
    return sorted(found, key=lambda share: (share.node, share.pid or 0, share.start or 0.0, share.uuid))


def find_uncounted(rows: QueryRunner, query: Query) -> tuple[int, float] | None:
    """Return the number of nodes with uncounted time, and since when; None if all time is counted."""
    chosen = "" if query.nodes is None else "WHERE node = ANY(?)"
    values = [] if query.nodes is None else [list(query.nodes)]
    ((count, since),) = rows(
        _UNCOUNTED.format(chosen), [*values, query.end, query.start, MIN_UNCOUNTED_SECONDS]
    )
    return (count, max(since, query.start)) if count else None


def find_holders(rows: QueryRunner, query: Query) -> list[GpuHolding]:
    """Return which processes used which GPUs; see `store.store.Store`."""
    found = []
    for node, gpu, pid, start, first, last, memory_max, *sums in _find(rows, query, _HELD_SUMS):
        memory, memory_weight, sm, sm_weight = sums
        if pid is not None and first is not None and last is not None:
            found.append(
                GpuHolding(
                    node,
                    pid,
                    start,
                    gpu,
                    max(first, query.start),
                    min(last, query.end),
                    memory / memory_weight if memory_weight else None,
                    memory_max,
                    sm / sm_weight if sm_weight else None,
                )
            )
    return sorted(found, key=lambda one: (one.first, one.node, one.pid, one.start or 0.0, one.uuid))


def _clip_span(query: Query, first: float | None, last: float | None) -> tuple[float | None, float | None]:
    """Clip a span to the time range of a query."""
    if first is None or last is None:
        return None, None
    return max(first, query.start), min(last, query.end)


def _find(rows: QueryRunner, query: Query, sums: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return one row per process and GPU: key, first, last, memory_max and the sums of some columns."""
    start, end = query.start_us, query.end_us
    if start >= end:
        return []
    columns = f"{_KEY}, first, last, memory_max"
    parts: list[str] = []
    values: list[Any] = []
    for table, begin, stop in _split_range(start, end):
        parts.append(f"SELECT {columns}, {', '.join(sums)} FROM {table} WHERE time >= ? AND time < ?")
        values += [begin, stop]
    for hour in {start // HOUR_US * HOUR_US, end // HOUR_US * HOUR_US}:
        if hour < start or hour + HOUR_US > end:
            weighed = ", ".join(f"part * {name} AS {name}" for name in sums)
            parts.append(
                f"SELECT {columns}, {weighed} FROM (SELECT *, {_HOUR_PART} AS part FROM {GPU_HOURS} WHERE time = ?) AS edge "
                "WHERE part > 0"
            )
            values += [float(end), float(start), query.end, query.start, hour]
    chosen: list[str] = []
    for column, wanted in (("node", query.nodes), ("gpu", query.gpus), ("pid", query.pids)):
        if wanted is not None:
            chosen.append(f"{column} = ANY(?)")
            values.append(list(wanted))
    where = f"WHERE {' AND '.join(chosen)}" if chosen else ""
    added = ", ".join(f"sum({name})" for name in sums)
    return rows(_SUM_SQL.format(added, " UNION ALL ".join(parts), where), values)


def _split_range(start: int, end: int) -> list[tuple[str, int, int]]:
    """Split the whole hours of a range into days and the hours before and after them."""
    first, last = -(-start // HOUR_US) * HOUR_US, end // HOUR_US * HOUR_US
    day, days_end = -(-first // DAY_US) * DAY_US, last // DAY_US * DAY_US
    if day >= days_end:
        pieces = [(GPU_HOURS, first, last)]
    else:
        pieces = [(GPU_HOURS, first, day), (GPU_DAYS, day, days_end), (GPU_HOURS, days_end, last)]
    return [piece for piece in pieces if piece[1] < piece[2]]


class GpuTimeRow(NamedTuple):
    """The GPU time of a process on a GPU within an hour, in the column order of both tables."""

    node: int
    gpu: str
    pid: int | None
    start: float | None
    time: int
    """Start of the hour in microseconds."""
    first: float | None
    last: float | None
    seconds: float
    known_seconds: float
    busy_seconds: float
    idle_seconds: float
    energy_joules: float | None
    memory_max: float | None
    seen_seconds: float
    memory_sum: float
    memory_weight: float
    sm_sum: float
    sm_weight: float


def build_row(share: GpuShare, held: GpuHolding | None, hour_us: int) -> GpuTimeRow:
    """Build the row for a share; means are weighted by the time for which the process was seen."""
    weight = 0.0 if held is None else max(held.last - held.first, 1e-3)
    memory = None if held is None else held.memory_mean
    sm = None if held is None else held.sm_mean
    return GpuTimeRow(
        share.node,
        share.uuid,
        share.pid,
        share.start,
        hour_us,
        share.first,
        share.last,
        share.seconds,
        share.known_seconds,
        share.busy_seconds,
        share.idle_seconds,
        share.energy_joules,
        share.memory_max,
        share.seen_seconds,
        0.0 if memory is None else memory * weight,
        0.0 if memory is None else weight,
        0.0 if sm is None else sm * weight,
        0.0 if sm is None else weight,
    )


def add_rows(database: PostgresDatabase, rows: Sequence[GpuTimeRow]) -> None:
    """Add rows to both tables."""
    if rows:
        columns = [list(column) for column in zip(*rows, strict=True)]
        for table, length in ((GPU_HOURS, HOUR_US), (GPU_DAYS, DAY_US)):
            database.execute(_ADD_SQL.format(table, length), columns)


log = logging.getLogger(__name__)

COUNT_INTERVAL_SECONDS = 60.0
"""Interval between counts."""
ALIGN_SECONDS = 60.0
"""Counted time ends at multiples of this while a node keeps sending."""
SETTLE_SECONDS = 60.0
"""After this time without frames, a node's last moments are counted too."""
_RECOUNT_SECONDS = 3600.0
"""After a start, this much time before the last count is checked again, since it may not be counted yet."""
_STATEMENT_SECONDS = 60.0
_COUNT_LOCK = 0x6750_4275
_MINUTE_US = 60_000_000
_METRICS = ("power_watts", "memory_used_bytes", "gpu_utilization_ratio")
"""Nearly every GPU sample has one of these metrics."""
_CLAIMS = """
SELECT node, start, "end" FROM counted_time
JOIN unnest(?::int8[], ?::int8[], ?::int8[]) AS wanted (id, first, stop) ON node = id AND start < stop AND "end" > first
"""
_EXTEND = """
UPDATE counted_time SET "end" = stop FROM unnest(?::int8[], ?::int8[], ?::int8[]) AS claimed (id, first, stop)
WHERE node = id AND "end" = first AND head = ? RETURNING node, first
"""
_CLAIM = 'INSERT INTO counted_time (node, start, "end", head) SELECT *, ? FROM unnest(?::int8[], ?::int8[], ?::int8[])'


class NodeTime(NamedTuple):
    """A time range of a node in microseconds; the end is exclusive."""

    node: int
    start: int
    end: int


class GpuTimeSource(Protocol):
    """The head's own store."""

    def gpu_time(self, query: Query) -> list[GpuShare]:
        """Divide the time of GPUs among processes."""

    def gpu_holders(self, query: Query) -> list[GpuHolding]:
        """Return which processes used which GPUs, and how."""

    def series(self, query: Query) -> list[Series]:
        """Return metrics over time."""

    @property
    def oldest(self) -> float | None:
        """Time of the oldest samples."""


class PendingTime:
    """Time that this head received and has not counted yet, by node. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._open: dict[int, tuple[bytes, int]] = {}
        """The run and the sequence number of the last frame, by node."""
        self._returned: list[NodeTime] = []

    def add_batch(self, batch: FrameBatch) -> None:
        """Record that frames are on disk."""
        first, last = (moment + batch.shift_us for moment in packed_time_range(batch.frames))
        with self._lock:
            spans = self._spans.setdefault(batch.node, [])
            if spans and self._open.get(batch.node) == (batch.run, batch.first - 1):
                spans[-1] = min(spans[-1][0], first), max(spans[-1][1], last + 1)
            else:
                spans.append((first, last + 1))
            self._open[batch.node] = batch.run, batch.last

    def put_back(self, spans: Iterable[NodeTime]) -> None:
        """Put back time that could not be counted; adjacent spans of a node are merged."""
        with self._lock:
            by_node: dict[int, list[tuple[int, int]]] = {}
            for node, start, end in (*self._returned, *spans):
                by_node.setdefault(node, []).append((start, end))
            self._returned = [
                NodeTime(node, *span) for node in sorted(by_node) for span in merge(by_node[node])
            ]

    @property
    def oldest_us(self) -> int | None:
        """Start of the oldest uncounted time; None if there is none."""
        with self._lock:
            starts = [start for spans in self._spans.values() for start, _ in spans]
            return min([*starts, *(span.start for span in self._returned)], default=None)

    def take(self, now_us: int) -> list[NodeTime]:
        """Remove and return the time that can be counted: all except the newest moments of nodes that keep sending."""
        align, settled = round(ALIGN_SECONDS * 1e6), now_us - round(SETTLE_SECONDS * 1e6)
        with self._lock:
            found, self._returned = self._returned, []
            for node, spans in list(self._spans.items()):
                kept: list[tuple[int, int]] = []
                for place, (start, end) in enumerate(spans):
                    is_open = place == len(spans) - 1 and end > settled
                    cut = end // align * align if is_open else end
                    if start < cut:
                        found.append(NodeTime(node, start, cut))
                    if is_open:
                        kept.append((max(start, cut), end))
                self._spans[node] = kept
        return found


class GpuTimeWriter:
    """Thread that writes the GPU time of one head. `add` may be called from any thread and never waits for PostgreSQL."""

    def __init__(
        self,
        source: GpuTimeSource,
        config: DatabaseConfig,
        *,
        head: str,
        node_of: Callable[[int], StoredNode | None],
        is_ready: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        """Create the writer; `start` starts its thread.

        Args:
            source: The head's own store.
            config: The database.
            head: The ID of this head.
            node_of: Returns the node with a number of this head.
            is_ready: Whether PostgreSQL is available.
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
        """Until when PostgreSQL has this head's time, as last written here. A new database has another value."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-time-writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, batches: Iterable[FrameBatch]) -> None:
        """Record that frames are on disk."""
        for batch in batches:
            if batch.frames:
                self._pending.add_batch(batch)

    def close(self) -> None:
        """Stop the thread; uncounted time is counted after the next start."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._closed.wait(COUNT_INTERVAL_SECONDS):
            if not self._is_ready():
                continue
            try:
                connection = connect(self._config, timeout_seconds=_STATEMENT_SECONDS)
                try:
                    self._count(connection)
                finally:
                    close(connection)
            except GpulseError as error:
                log.debug(
                    "cannot count GPU time for now: %s", error.message
                )  # the metadata writer reports it
            except Exception:  # a bug here must not stop the head
                log.exception("cannot count GPU time because of a bug in gpulse; trying again")

    def _count(self, connection: DeadlineConnection) -> None:
        now = self._now()
        with transaction(self._config, connection, _STATEMENT_SECONDS) as database:
            row = database.execute("SELECT counted FROM heads WHERE id = ?", (self._head,)).fetchone()
        if row is None:  # a new database in which this head is not registered yet
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

    def _catch_up(self, connection: DeadlineConnection, counted: float, end: float) -> None:
        """Count time that was received earlier and may not be counted yet.

        Args:
            connection: A connection to the database.
            counted: Until when the database has this head's time.
            end: Where to stop; later time is pending.
        """
        oldest = self._source.oldest
        if oldest is None:
            return
        hour = max(oldest, counted - _RECOUNT_SECONDS) // 3600.0 * 3600.0
        while hour < end and not self._closed.is_set():
            self._add_unclaimed(connection, list(self._received(hour, min(hour + 3600.0, end))))
            hour += 3600.0

    def _received(self, start: float, end: float) -> Iterator[NodeTime]:
        """Yield the time for which nodes have samples, up to the last sample."""
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
                    yield NodeTime(node, begin, known[previous])
                    begin = minute
                previous = minute
            if begin is not None and previous is not None:
                yield NodeTime(node, begin, known[previous])

    def _add_unclaimed(self, connection: DeadlineConnection, spans: Sequence[NodeTime]) -> None:
        """Count the parts of spans that no head has counted; what cannot be counted now becomes pending again."""
        left = spans
        try:
            nodes = [node for number in {span.node for span in spans} if (node := self._node_of(number))]
            with transaction(self._config, connection, _STATEMENT_SECONDS) as database:
                ids = find_ids(database, nodes)
                groups = list(_group_by_hour(_find_unclaimed(database, spans, ids)))
            late = [span for span in spans if span.node not in ids]
            for start, end, numbers in groups:
                if self._closed.is_set():
                    return
                late += self._add(connection, start, end, {number: ids[number] for number in numbers})
            left = late
        finally:
            self._pending.put_back(left)  # counted parts are claimed and will not be counted again

    def _add(
        self, connection: DeadlineConnection, start: int, end: int, ids: Mapping[int, int]
    ) -> list[NodeTime]:
        """Count a span within one hour for several nodes; return it for nodes of which another head has counted a part.

        Args:
            connection: A connection to the database.
            start: Start of the span in microseconds.
            end: End of the span in microseconds.
            ids: PostgreSQL IDs of the nodes, by number.
        """
        query = Query(start / 1e6, end / 1e6, "process", nodes=frozenset(ids))
        held: dict[tuple[object, ...], GpuHolding] = {one[:4]: one for one in self._source.gpu_holders(query)}
        rows = []
        for share in self._source.gpu_time(query):
            row = share._replace(node=ids[share.node])
            if row.pid is None:  # the GPU was free: the row records the counted time range
                row = row._replace(first=start / 1e6, last=end / 1e6)
            rows.append(build_row(row, held.get(share[:4]), start // HOUR_US * HOUR_US))
        wanted = [NodeTime(node, start, end) for node in ids.values()]
        with transaction(self._config, connection, _STATEMENT_SECONDS) as database:
            database.execute("SELECT pg_advisory_xact_lock(?)", (_COUNT_LOCK,))
            taken = _find_claims(database, wanted)
            self._claim(database, [span for span in wanted if span.node not in taken])
            add_rows(database, [row for row in rows if row.node not in taken])
        return [NodeTime(number, start, end) for number, node in ids.items() if node in taken]

    def _claim(self, database: PostgresDatabase, spans: Sequence[NodeTime]) -> None:
        if not spans:
            return
        rows = database.execute(_EXTEND, (*_columns(spans), self._head)).fetchall()
        extended = {(node, start) for node, start in rows}
        rest = [span for span in spans if span[:2] not in extended]
        if rest:
            database.execute(_CLAIM, (self._head, *_columns(rest)))


def _find_claims(database: PostgresDatabase, spans: Sequence[NodeTime]) -> dict[int, list[tuple[int, int]]]:
    """Return the counted spans that overlap with given ones, by the node's PostgreSQL ID."""
    found: dict[int, list[tuple[int, int]]] = {}
    if spans:
        for node, start, end in database.execute(_CLAIMS, _columns(spans)).fetchall():
            found.setdefault(node, []).append((start, end))
    return found


def _columns(spans: Sequence[NodeTime]) -> tuple[list[int], list[int], list[int]]:
    return [span.node for span in spans], [span.start for span in spans], [span.end for span in spans]


def _find_unclaimed(
    database: PostgresDatabase, spans: Sequence[NodeTime], ids: Mapping[int, int]
) -> Iterator[NodeTime]:
    """Yield the uncounted parts of spans, each moment of a node once; nodes without an ID are skipped."""
    known = [span for span in spans if span.node in ids]
    claims = _find_claims(database, [span._replace(node=ids[span.node]) for span in known])
    for span in known:
        claimed = claims.setdefault(ids[span.node], [])
        found = subtract([(span.start, span.end)], claimed)
        claimed += found
        yield from (NodeTime(span.node, *part) for part in found)


def _group_by_hour(spans: Iterable[NodeTime]) -> Iterator[tuple[int, int, list[int]]]:
    """Split spans at hours, and yield each distinct span with the nodes that have exactly this span.

    A node with a shorter span must not be included, because the time around it is counted separately or by another head.
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
