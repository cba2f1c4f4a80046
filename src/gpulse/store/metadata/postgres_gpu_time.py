"""How the time of GPUs was divided among processes, in PostgreSQL: rows by the hour and by the day.

Rows of a day hold the sums of its hours, so that months add up quickly. Of an hour that is only partly in a time range the
part counts that its process was seen in it, by length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gpulse.store.metadata.database import Rows
from gpulse.store.metadata.postgres import PostgresDatabase
from gpulse.store.metadata.schema import GPU_DAYS, GPU_HOURS
from gpulse.store.store import Holding, Query, Share

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
_PART = f"""CASE WHEN first IS NULL OR last <= first
    THEN (least(time + {HOUR_US}, ?) - greatest(time, ?)) / {HOUR_US}::float8
    ELSE greatest(0, least(last, ?) - greatest(first, ?)) / (last - first) END"""
"""How much of an hour's row lies in a time range."""
_ADDED = f"""
SELECT {_KEY}, min(first), max(last), max(memory_max), {{0}} FROM ({{1}}) AS rows {{2}} GROUP BY {_KEY}
"""
MIN_UNCOUNTED_SECONDS = 30.0
"""Less than this is not worth a word."""
_UNCOUNTED = """
SELECT count(*), min(counted) FROM (
    SELECT seen.node, seen.seen,
        coalesce(
            (SELECT max("end") FROM counted_time AS claims WHERE claims.node = seen.node) / 1e6::float8, first_seen
        ) AS counted
    FROM (SELECT node, max(seen) AS seen FROM node_seen {0} GROUP BY node) AS seen JOIN nodes ON nodes.id = seen.node
) AS nodes WHERE least(seen, ?) - greatest(counted, ?) > ?
"""
_ADD = f"""
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


def find_gpu_time(rows: Rows, query: Query) -> list[Share]:
    """Divide the time of GPUs among processes; see `store.store.Store`."""
    found = []
    for node, gpu, pid, start, first, last, memory_max, *sums in _find(rows, query, _SUMS):
        seconds, known, busy, idle, energy, seen = sums
        span = (None, None) if pid is None else _within(query, first, last)
        found.append(
            Share(node, pid, start, gpu, *span, seconds, known, busy, idle, energy, memory_max, seen)
        )
    return sorted(found, key=lambda share: (share.node, share.pid or 0, share.start or 0.0, share.uuid))


def find_uncounted(rows: Rows, query: Query) -> tuple[int, float] | None:
    """Return of how many nodes the newest time is not counted yet, and since when; None when all of it is."""
    chosen = "" if query.nodes is None else "WHERE node = ANY(?)"
    values = [] if query.nodes is None else [list(query.nodes)]
    ((count, since),) = rows(
        _UNCOUNTED.format(chosen), [*values, query.end, query.start, MIN_UNCOUNTED_SECONDS]
    )
    return (count, max(since, query.start)) if count else None


def find_holders(rows: Rows, query: Query) -> list[Holding]:
    """Return what processes held on which GPUs; see `store.store.Store`."""
    found = []
    for node, gpu, pid, start, first, last, memory_max, *sums in _find(rows, query, _HELD_SUMS):
        memory, memory_weight, sm, sm_weight = sums
        if pid is not None and first is not None and last is not None:
            found.append(
                Holding(
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


def _within(query: Query, first: float | None, last: float | None) -> tuple[float | None, float | None]:
    """Return the part of a span that lies in a time range."""
    if first is None or last is None:
        return None, None
    return max(first, query.start), min(last, query.end)


def _find(rows: Rows, query: Query, sums: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return rows by process and GPU: key, first, last, memory_max and the sums of some columns."""
    start, end = query.start_us, query.end_us
    if start >= end:
        return []
    columns = f"{_KEY}, first, last, memory_max"
    parts: list[str] = []
    values: list[Any] = []
    for table, begin, stop in _pieces(start, end):
        parts.append(f"SELECT {columns}, {', '.join(sums)} FROM {table} WHERE time >= ? AND time < ?")
        values += [begin, stop]
    for hour in {start // HOUR_US * HOUR_US, end // HOUR_US * HOUR_US}:
        if hour < start or hour + HOUR_US > end:
            weighed = ", ".join(f"part * {name} AS {name}" for name in sums)
            parts.append(
                f"SELECT {columns}, {weighed} FROM (SELECT *, {_PART} AS part FROM {GPU_HOURS} WHERE time = ?) AS edge "
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
    return rows(_ADDED.format(added, " UNION ALL ".join(parts), where), values)


def _pieces(start: int, end: int) -> list[tuple[str, int, int]]:
    """Cut the whole hours of a range into days and the hours before and after them."""
    first, last = -(-start // HOUR_US) * HOUR_US, end // HOUR_US * HOUR_US
    day, days_end = -(-first // DAY_US) * DAY_US, last // DAY_US * DAY_US
    if day >= days_end:
        pieces = [(GPU_HOURS, first, last)]
    else:
        pieces = [(GPU_HOURS, first, day), (GPU_DAYS, day, days_end), (GPU_HOURS, days_end, last)]
    return [piece for piece in pieces if piece[1] < piece[2]]


class NewRow(NamedTuple):
    """What a process had of a GPU within an hour, in the order of the columns of both tables."""

    node: int
    gpu: str
    pid: int | None
    start: float | None
    time: int
    """When the hour begins, in microseconds."""
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


def new_row(share: Share, held: Holding | None, hour_us: int) -> NewRow:
    """Return the row of a share; means count for as long as the process was seen."""
    weight = 0.0 if held is None else max(held.last - held.first, 1e-3)
    memory = None if held is None else held.memory_mean
    sm = None if held is None else held.sm_mean
    return NewRow(
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


def add_rows(database: PostgresDatabase, rows: Sequence[NewRow]) -> None:
    """Add rows to both tables."""
    if rows:
        columns = [list(column) for column in zip(*rows, strict=True)]
        for table, length in ((GPU_HOURS, HOUR_US), (GPU_DAYS, DAY_US)):
            database.execute(_ADD.format(table, length), columns)
