"""GPU time: divide the time of GPUs among processes, and write it to files of shares so that weeks add up quickly.

A file of shares has rows of three kinds. Most are finished: the share of a GPU that a process had in an hour (`FINISHED`).
A node's first and last minute in a segment may continue in another segment, so these are kept as minutes of processes
(`PROCESS_MINUTE`) and of GPUs (`GPU_MINUTE`), and are divided when a question is answered. This is enough as long as the
segments of a node follow one another in time; where they overlap, their samples are divided again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from gpulse.errors import DiskError, GpulseError
from gpulse.model.idleness import IDLE_RATIO
from gpulse.model.packing import SLOW_SECONDS
from gpulse.store.history.parquet import duckdb_errors, temporary_table, write_file
from gpulse.store.history.query import Window
from gpulse.store.history.relation import Sources, relation
from gpulse.store.history.rollup import FINE_SECONDS, MINUTE_US
from gpulse.store.history.segments import NODES_PER_FILE, SHARES, SealedFile, Segment

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

HOUR_US = 3_600_000_000
FINISHED, PROCESS_MINUTE, GPU_MINUTE = 0, 1, 2
PROCESS_METRICS = ("gpu_memory_bytes", "sm_ratio")
GPU_METRICS = ("gpu_utilization_ratio", "graphics_active_ratio", "sm_active_ratio", "power_watts")
KEY = "node_id, pid, start_time, gpu"
_MAX_NODES_DIVIDED = 32
"""Of this many nodes at most the minutes of an hour are divided at once."""
_SCOPES = ("process", "gpu")

_PROCESS_MINUTES = f"""
SELECT {KEY}, time // {MINUTE_US} * {MINUTE_US} AS time, sum(samples)::BIGINT AS samples, min(first) AS first,
    max(last) AS last, max(h0) AS h0, sum(m1 * n1) / nullif(sum(n1), 0) AS m1, sum(n1)::BIGINT AS n1
FROM ({{0}}) WHERE gpu IS NOT NULL AND pid IS NOT NULL GROUP BY {KEY}, time // {MINUTE_US}
"""
_GPU_MINUTES = f"""
SELECT node_id, subject AS gpu, time // {MINUTE_US} * {MINUTE_US} AS time, sum(samples)::BIGINT AS samples,
    min(first) AS first, max(last) AS last,
    {", ".join(f"sum(m{n} * n{n}) / nullif(sum(n{n}), 0) AS m{n}, sum(n{n})::BIGINT AS n{n}" for n in range(len(GPU_METRICS)))}
FROM ({{0}}) GROUP BY node_id, subject, time // {MINUTE_US}
"""
_DIVIDED = f"""
WITH held AS (
    SELECT *, hash(node_id, gpu, time) AS place, {{room}} AS room FROM ({{held}})
), worked AS (
    SELECT hash(node_id, gpu, time) AS place, node_id AS node, gpu AS uuid, time AS moment, samples AS frames,
        {{room}} AS whole, if(frames > 1, (last - first) / 1e6 / (frames - 1), whole) AS interval_seconds,
        least(whole, frames * interval_seconds) AS seen, coalesce(m0, m1, m2) AS utilization, m3 AS power
    FROM ({{worked}})
), timed AS (
    SELECT *, CASE
        WHEN samples > 1 THEN (last - first) / 1e6 / (samples - 1)
        ELSE greatest({SLOW_SECONDS}, coalesce(interval_seconds, 0))
    END AS pace, least(coalesce(seen, room), samples * pace) AS seconds
    FROM held FULL JOIN worked USING (place)
), together AS (
    SELECT place, count(*) AS holders, sum(seconds) AS total, max(seconds) AS longest,
        greatest(longest, least(any_value(coalesce(seen, room)), total, max(last / 1e6 + pace) - min(first) / 1e6)) AS held_seconds,
        count(m1) = holders AND sum(seconds * m1) > 0 AS by_sm, sum(seconds * m1) AS total_sm
    FROM timed WHERE pid IS NOT NULL GROUP BY place
    HAVING holders > 1
), divided AS (
    SELECT timed.*, coalesce(holders, 1) AS holders, if(total > longest, (total - held_seconds) / (total - longest), 0) AS overlap,
        if(holders IS NULL, seconds, (1 - overlap) * seconds
            + overlap * longest * if(by_sm, seconds * m1 / total_sm, seconds / total)) AS share
    FROM timed LEFT JOIN together USING (place)
)
SELECT coalesce(node_id, node) AS node_id, pid, start_time, coalesce(gpu, uuid) AS gpu,
    coalesce(time, moment) // {HOUR_US} * {HOUR_US} AS hour,
    min(first) AS first, max(last) AS last, coalesce(sum(share), 0.0) AS seconds,
    coalesce(sum(share) FILTER (utilization IS NOT NULL), 0.0) AS known_seconds,
    coalesce(sum(share * utilization), 0.0) AS busy_seconds,
    coalesce(sum(share) FILTER (utilization <= {IDLE_RATIO}), 0.0) AS idle_seconds,
    sum(share * power) AS energy_joules, max(h0) AS memory_max,
    coalesce(sum(seen / holders), 0.0) AS seen_seconds
FROM divided GROUP BY 1, pid, start_time, 4, 5
"""
_ADDED = f"""
SELECT {KEY}, {{0}} min(first) AS first, max(last) AS last, sum(seconds) AS seconds, sum(known_seconds) AS known_seconds,
    sum(busy_seconds) AS busy_seconds, sum(idle_seconds) AS idle_seconds, sum(energy_joules) AS energy_joules,
    max(memory_max) AS memory_max, sum(seen_seconds) AS seen_seconds
FROM ({{1}}) GROUP BY {{0}} {KEY}
"""
_SHARE_COLUMNS = (
    "first, last, seconds, known_seconds, busy_seconds, idle_seconds, energy_joules, memory_max, seen_seconds"
)
_PROCESS_MINUTE_COLUMNS = "time, samples, first, last, h0, m1, n1"
_GPU_MINUTE_COLUMNS = "time, samples, first, last, " + ", ".join(
    f"m{n}, n{n}" for n in range(len(GPU_METRICS))
)
_PACKED = (
    "kind TINYINT, node_id INTEGER, pid BIGINT, start_time DOUBLE, gpu VARCHAR, time BIGINT, first BIGINT, last BIGINT, "
    "seconds DOUBLE, known_seconds DOUBLE, busy_seconds DOUBLE, idle_seconds DOUBLE, energy_joules DOUBLE, "
    "memory_max DOUBLE, seen_seconds DOUBLE, samples BIGINT, h0 DOUBLE, "
    + ", ".join(f"m{n} DOUBLE, n{n} BIGINT" for n in range(len(GPU_METRICS)))
)
_SPANS = (
    "SELECT node_id, min(time) AS start, max(time) AS stop FROM (SELECT node_id, time FROM process_minutes "
    "UNION ALL SELECT node_id, time FROM gpu_minutes) GROUP BY node_id"
)
Statement = tuple[str, list[Any]]
"""A query, and the values of its parameters."""


def process_minutes(source: str) -> str:
    """Return the query for minutes of processes on GPUs, from a relation of the scope `process`."""
    return _PROCESS_MINUTES.format(source)


def gpu_minutes(source: str) -> str:
    """Return the query for minutes of GPUs, from a relation of their scope."""
    return _GPU_MINUTES.format(source)


def divided(held: str, worked: str, window: Window | None = None) -> str:
    """Return the query for shares by the hour, from minutes; with a window, only of the time within it."""
    room = "60.0"
    if window is not None:
        room = f"(least(time + {MINUTE_US}, {window.end}) - greatest(time, {window.start})) / 1e6"
    return _DIVIDED.format(held=held, worked=worked, room=room)


def added(source: str, *, hourly: bool) -> str:
    """Return the query that adds up shares of the same process on the same GPU, by the hour or all of them."""
    return _ADDED.format("hour," if hourly else "", source)


class Span(NamedTuple):
    """The first and the last minute of a node in a file of shares, in microseconds."""

    node: int
    start: int
    stop: int
    file: int | None
    """The index of the file; None for samples that have no shares."""


def conflicts(spans: Iterable[Span]) -> dict[int, set[int]]:
    """Return the nodes, by file, whose minutes in the file overlap with those elsewhere."""
    found: dict[int, set[int]] = {}
    latest: dict[int, Span] = {}
    for span in sorted(spans, key=lambda span: (span.node, span.start, span.stop)):
        before = latest.get(span.node)
        if before is not None and span.start < before.stop:
            for file in (before.file, span.file):
                if file is not None:
                    found.setdefault(file, set()).add(span.node)
        if before is None or span.stop > before.stop:
            latest[span.node] = span
    return found


SPANS = (
    "SELECT filename, node_id, min(epoch_us(time)) AS start, max(epoch_us(time)) AS stop, count(*) AS rows "
    f"FROM read_parquet(?, filename = true) WHERE kind <> {FINISHED} GROUP BY filename, node_id"
)
"""Selects the spans of all nodes in files, and how many minutes are not divided yet. Its parameter is their paths."""


def finished(condition: str) -> str:
    """Return the query for finished shares in files, by the hour. Its first parameter is their paths."""
    return f"SELECT {KEY}, epoch_us(time) AS hour, {_SHARE_COLUMNS} FROM read_parquet(?) WHERE kind = {FINISHED} AND {condition}"


def open_process_minutes(condition: str) -> str:
    """Return the relation of undivided minutes of processes in files. Its first parameter is their paths."""
    none = "NULL::DOUBLE"
    return (
        "SELECT node_id, '' AS subject, pid, start_time, gpu, samples, epoch_us(time) AS time, first, last, "
        f"{none} AS m0, 0::BIGINT AS n0, {none} AS l0, h0, m1, n1, {none} AS l1, {none} AS h1 "
        f"FROM read_parquet(?) WHERE kind = {PROCESS_MINUTE} AND {condition}"
    )


def open_gpu_minutes(condition: str) -> str:
    """Return the relation of undivided minutes of GPUs in files. Its first parameter is their paths."""
    metrics = ", ".join(
        f"m{n}, n{n}, NULL::DOUBLE AS l{n}, NULL::DOUBLE AS h{n}" for n in range(len(GPU_METRICS))
    )
    return (
        f"SELECT node_id, gpu AS subject, samples, epoch_us(time) AS time, first, last, {metrics} "
        f"FROM read_parquet(?) WHERE kind = {GPU_MINUTE} AND {condition}"
    )


class ShareFileWriter:
    """Writer of one file of shares, which takes some nodes at a time."""

    def __init__(self, database: duckdb.DuckDBPyConnection, target: str, nodes: tuple[int, ...]) -> None:
        """Start an empty file.

        Args:
            database: The connection to use.
            target: The directory for the file.
            nodes: All nodes of the file.

        Raises:
            GpulseError: The database refused.
        """
        self._database = database
        self._target = target
        name = f"share-{nodes[0] // NODES_PER_FILE:06d}.parquet"
        self._file = SealedFile(name, "process", nodes, 0, 0, 0, 0, {}, SHARES)
        self._path = f"{target}/{name}"
        with duckdb_errors(self._path):
            database.execute(f"CREATE OR REPLACE TEMP TABLE packed ({_PACKED})")

    def add(self, processes: Statement, gpus: Statement, finished: Statement | None = None) -> None:
        """Divide the samples of some nodes.

        Args:
            processes: A relation of processes.
            gpus: A relation of GPUs.
            finished: Finished shares by the hour, which are added.

        Raises:
            GpulseError: The samples cannot be read, or there is too little memory.
        """
        tables: tuple[tuple[str, str, list[Any]], ...] = (
            ("process_minutes", process_minutes(processes[0]), processes[1]),
            ("gpu_minutes", gpu_minutes(gpus[0]), gpus[1]),
            ("spans", _SPANS, []),
        )
        with ExitStack() as stack:
            for name, query, bound in tables:
                stack.enter_context(temporary_table(self._database, name, query, self._path, bound))
            inner, outer = "time > start AND time < stop", "time = start OR time = stop"
            shares = divided(_within("process_minutes", inner), _within("gpu_minutes", inner))
            done, bound = finished or ("", [])
            source = f"SELECT * FROM ({shares}) UNION ALL {done}" if done else shares
            self._insert(f"{KEY}, time, {_SHARE_COLUMNS}", FINISHED, added(source, hourly=True), bound)
            self._insert(
                f"{KEY}, {_PROCESS_MINUTE_COLUMNS}", PROCESS_MINUTE, _within("process_minutes", outer)
            )
            self._insert(f"node_id, gpu, {_GPU_MINUTE_COLUMNS}", GPU_MINUTE, _within("gpu_minutes", outer))

    def _insert(self, columns: str, kind: int, query: str, bound: Sequence[Any] = ()) -> None:
        chosen = columns.replace("time, first", "hour, first", 1) if kind == FINISHED else columns
        with duckdb_errors(self._path):
            self._database.execute(
                f"INSERT INTO packed (kind, {columns}) SELECT {kind}, {chosen} FROM ({query})", list(bound)
            )

    def write(self, *, level: int) -> SealedFile:
        """Write the file.

        Raises:
            GpulseError: The file cannot be written.
        """
        query = (
            f"SELECT * REPLACE (make_timestamptz(time) AS time) FROM packed ORDER BY kind, {KEY}, packed.time"
        )
        try:
            return write_file(self._database, query, self._target, self._file, level=level)
        finally:
            self._database.execute("DROP TABLE IF EXISTS packed")


def _within(table: str, condition: str) -> str:
    return f"SELECT {table}.* FROM {table} JOIN spans USING (node_id) WHERE {condition}"


def divide(
    database: duckdb.DuckDBPyConnection, target: str, files: Sequence[SealedFile], *, level: int
) -> list[SealedFile]:
    """Write the shares of a segment whose other files are written; return no files where there is too little memory.

    Args:
        database: The connection to use.
        target: The directory of the segment.
        files: Its other files.
        level: The compression level.

    Raises:
        DiskError: A file cannot be written.
    """
    has_minutes = any(file.seconds == FINE_SECONDS for file in files)
    segment = Segment(0, 0, "", 0, None, has_minutes, tuple(files))
    sources = Sources(lambda found: [f"{target}/{file.name}" for _, file in found], (segment,))
    made = []
    try:
        for nodes in shards(files):
            writer = ShareFileWriter(database, target, nodes)
            for held, worked in minutes(sources, nodes, _MAX_NODES_DIVIDED):
                writer.add(held, worked)
            made.append(writer.write(level=level))
    except DiskError:
        raise
    except GpulseError as error:  # GPU time is then divided from minutes when it is asked for
        log.warning(
            "cannot divide the GPU time of a segment, so questions about it are slow: %s", error.message
        )
        database.execute("DROP TABLE IF EXISTS packed")
        for file in made:
            with suppress(OSError):
                os.unlink(f"{target}/{file.name}")
        return []
    return made


def is_divided(segment: Segment) -> bool:
    """Whether a segment is merged and has its shares; it has none when dividing needed too much memory."""
    return segment.is_compacted and (bool(segment.shares) or not shards(segment.files))


def shards(files: Iterable[SealedFile]) -> list[tuple[int, ...]]:
    """Return the nodes with samples of GPUs or processes, grouped by file."""
    nodes = {node for file in files if file.scope in _SCOPES for node in file.nodes}
    found: dict[int, list[int]] = {}
    for node in sorted(nodes):
        found.setdefault(node // NODES_PER_FILE, []).append(node)
    return [tuple(shard) for shard in found.values()]


def minutes(sources: Sources, nodes: Sequence[int], at_once: int) -> Iterator[tuple[Statement, Statement]]:
    """Yield the relations of processes and of GPUs of some nodes, a few nodes at a time."""
    files = [file for segment in sources.segments for file in segment.files if file.scope in _SCOPES]
    begin = min(file.start for file in files) // MINUTE_US * MINUTE_US
    end = (max(file.end for file in files) // MINUTE_US + 1) * MINUTE_US
    for place in range(0, len(nodes), at_once):
        window = Window("process", begin, end, frozenset(nodes[place : place + at_once]))
        held = relation(sources, window, PROCESS_METRICS, grain=FINE_SECONDS)
        worked = relation(sources, window._replace(scope="gpu"), GPU_METRICS, grain=FINE_SECONDS)
        yield (held.query, held.bound), (worked.query, worked.bound)
