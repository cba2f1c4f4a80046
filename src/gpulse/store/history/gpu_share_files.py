"""Divide the time of GPUs among processes, and write the shares to files, so that weeks of GPU time add up quickly.

A share file has rows of three kinds. Most are finished: the share of a GPU that a process had in an hour (`FINISHED`). A node's
first and last minute in a segment may continue in another segment, so these are stored as minutes of processes
(`PROCESS_MINUTE`) and of GPUs (`GPU_MINUTE`), and are divided when a query is answered. This is exact while the segments of a
node follow one another in time; where they overlap, shares are computed from the samples again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from typing import Any, NamedTuple

import duckdb

from gpulse.errors import DiskError, GpulseError
from gpulse.model.device import IDLE_RATIO
from gpulse.model.frame_packing import SLOW_SECONDS
from gpulse.store.history.duckdb_query import SampleWindow
from gpulse.store.history.parquet import duckdb_errors, temporary_table, write_file
from gpulse.store.history.rollup import FINE_SECONDS, MINUTE_US
from gpulse.store.history.sample_relation import SampleSources, build_relation
from gpulse.store.history.segments import NODES_PER_FILE, SHARE_SECONDS, SealedFile, Segment

log = logging.getLogger(__name__)

HOUR_US = 3_600_000_000
FINISHED, PROCESS_MINUTE, GPU_MINUTE = 0, 1, 2
PROCESS_METRICS = ("gpu_memory_bytes", "sm_ratio")
GPU_METRICS = ("gpu_utilization_ratio", "graphics_active_ratio", "sm_active_ratio", "power_watts")
SHARE_KEY = "node_id, pid, start_time, gpu"
_MAX_NODE_MINUTES_DIVIDED = 32 * 60
"""Maximum number of minutes, times nodes, for which GPU time is divided at once: an hour of 32 nodes."""
_MAX_UNDIVIDED_MINUTES = 2
"""The first and the last minute of a segment are not divided."""
_SHARDS_TOGETHER = 4
"""Files of a segment with few minutes have this many times `NODES_PER_FILE` nodes, because each file has a fixed cost."""
_SCOPES = ("process", "gpu")

_PROCESS_MINUTES = f"""
SELECT {SHARE_KEY}, time // {MINUTE_US} * {MINUTE_US} AS time, sum(samples)::BIGINT AS samples, min(first) AS first,
    max(last) AS last, max(h0) AS h0, sum(m1 * n1) / nullif(sum(n1), 0) AS m1, sum(n1)::BIGINT AS n1
FROM ({{0}}) WHERE gpu IS NOT NULL AND pid IS NOT NULL GROUP BY {SHARE_KEY}, time // {MINUTE_US}
"""
_GPU_MINUTES = f"""
SELECT node_id, subject AS gpu, time // {MINUTE_US} * {MINUTE_US} AS time, sum(samples)::BIGINT AS samples,
    min(first) AS first, max(last) AS last,
    {", ".join(f"sum(m{n} * n{n}) / nullif(sum(n{n}), 0) AS m{n}, sum(n{n})::BIGINT AS n{n}" for n in range(len(GPU_METRICS)))}
FROM ({{0}}) GROUP BY node_id, subject, time // {MINUTE_US}
"""
_DIVIDE_SQL = f"""
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
_SUM_SQL = f"""
SELECT {SHARE_KEY}, {{0}} min(first) AS first, max(last) AS last, sum(seconds) AS seconds, sum(known_seconds) AS known_seconds,
    sum(busy_seconds) AS busy_seconds, sum(idle_seconds) AS idle_seconds, sum(energy_joules) AS energy_joules,
    max(memory_max) AS memory_max, sum(seen_seconds) AS seen_seconds
FROM ({{1}}) GROUP BY {{0}} {SHARE_KEY}
"""
_SHARE_COLUMNS = (
    "first, last, seconds, known_seconds, busy_seconds, idle_seconds, energy_joules, memory_max, seen_seconds"
)
_PROCESS_MINUTE_COLUMNS = "time, samples, first, last, h0, m1, n1"
_GPU_MINUTE_COLUMNS = "time, samples, first, last, " + ", ".join(
    f"m{n}, n{n}" for n in range(len(GPU_METRICS))
)
_TABLE_COLUMNS = (
    "kind TINYINT, node_id INTEGER, pid BIGINT, start_time DOUBLE, gpu VARCHAR, time BIGINT, first BIGINT, last BIGINT, "
    "seconds DOUBLE, known_seconds DOUBLE, busy_seconds DOUBLE, idle_seconds DOUBLE, energy_joules DOUBLE, "
    "memory_max DOUBLE, seen_seconds DOUBLE, samples BIGINT, h0 DOUBLE, "
    + ", ".join(f"m{n} DOUBLE, n{n} BIGINT" for n in range(len(GPU_METRICS)))
)
_SPANS_SQL = (
    "SELECT node_id, min(time) AS start, max(time) AS stop FROM (SELECT node_id, time FROM process_minutes "
    "UNION ALL SELECT node_id, time FROM gpu_minutes) GROUP BY node_id"
)
Statement = tuple[str, list[Any]]
"""A query and the values of its parameters."""


def process_minutes_query(source: str) -> str:
    """Return the query for minutes of processes on GPUs, from a relation of scope `process`."""
    return _PROCESS_MINUTES.format(source)


def gpu_minutes_query(source: str) -> str:
    """Return the query for minutes of GPUs, from a relation of scope `gpu`."""
    return _GPU_MINUTES.format(source)


def divide_query(held: str, worked: str, window: SampleWindow | None = None) -> str:
    """Return the query for hourly shares from minutes; with a window, only for the time within it."""
    room = "60.0"
    if window is not None:
        room = f"(least(time + {MINUTE_US}, {window.end}) - greatest(time, {window.start})) / 1e6"
    return _DIVIDE_SQL.format(held=held, worked=worked, room=room)


def sum_query(source: str, *, hourly: bool) -> str:
    """Return the query that adds up the shares of each process and GPU, per hour or in total."""
    return _SUM_SQL.format("hour," if hourly else "", source)


class FileMinutes(NamedTuple):
    """The first and the last minute of a node in a share file, in microseconds."""

    node: int
    start: int
    stop: int
    file: int | None
    """The index of the file; None for samples without shares."""


def find_overlaps(spans: Iterable[FileMinutes]) -> dict[int, set[int]]:
    """Return by file the nodes whose minutes in that file overlap with those of another."""
    found: dict[int, set[int]] = {}
    latest: dict[int, FileMinutes] = {}
    for span in sorted(spans, key=lambda span: (span.node, span.start, span.stop)):
        before = latest.get(span.node)
        if before is not None and span.start < before.stop:
            for file in (before.file, span.file):
                if file is not None:
                    found.setdefault(file, set()).add(span.node)
        if before is None or span.stop > before.stop:
            latest[span.node] = span
    return found


SPANS_QUERY = (
    "SELECT filename, node_id, min(epoch_us(time)) AS start, max(epoch_us(time)) AS stop, count(*) AS rows "
    f"FROM read_parquet(?, filename = true) WHERE kind <> {FINISHED} GROUP BY filename, node_id"
)
"""Query for the time span of each node in each file, and its number of undivided minutes. The parameter is the paths."""


def finished_query(condition: str) -> str:
    """Return the query for finished hourly shares in files. Its first parameter is their paths."""
    return f"SELECT {SHARE_KEY}, epoch_us(time) AS hour, {_SHARE_COLUMNS} FROM read_parquet(?) WHERE kind = {FINISHED} AND {condition}"


def open_process_minutes_query(condition: str) -> str:
    """Return the query for undivided minutes of processes in files. Its first parameter is their paths."""
    none = "NULL::DOUBLE"
    return (
        "SELECT node_id, '' AS subject, pid, start_time, gpu, samples, epoch_us(time) AS time, first, last, "
        f"{none} AS m0, 0::BIGINT AS n0, {none} AS l0, h0, m1, n1, {none} AS l1, {none} AS h1 "
        f"FROM read_parquet(?) WHERE kind = {PROCESS_MINUTE} AND {condition}"
    )


def open_gpu_minutes_query(condition: str) -> str:
    """Return the query for undivided minutes of GPUs in files. Its first parameter is their paths."""
    metrics = ", ".join(
        f"m{n}, n{n}, NULL::DOUBLE AS l{n}, NULL::DOUBLE AS h{n}" for n in range(len(GPU_METRICS))
    )
    return (
        f"SELECT node_id, gpu AS subject, samples, epoch_us(time) AS time, first, last, {metrics} "
        f"FROM read_parquet(?) WHERE kind = {GPU_MINUTE} AND {condition}"
    )


class ShareFileWriter:
    """Writer of one share file. Nodes are added in groups."""

    def __init__(self, database: duckdb.DuckDBPyConnection, target: str, nodes: tuple[int, ...]) -> None:
        """Start an empty file.

        Args:
            database: The connection to use.
            target: The directory for the file.
            nodes: All nodes of the file.

        Raises:
            GpulseError: The temporary table cannot be created.
        """
        self._database = database
        self._target = target
        name = f"share-{nodes[0] // NODES_PER_FILE:06d}.parquet"
        self._file = SealedFile(name, "process", nodes, 0, 0, 0, 0, {}, SHARE_SECONDS)
        self._path = f"{target}/{name}"
        with duckdb_errors(self._path):
            database.execute(f"CREATE OR REPLACE TEMP TABLE packed ({_TABLE_COLUMNS})")

    def add(self, processes: Statement, gpus: Statement, finished: Statement | None = None) -> None:
        """Divide the GPU time of some nodes, and add the shares.

        Args:
            processes: A relation of processes.
            gpus: A relation of GPUs.
            finished: Finished hourly shares to add.

        Raises:
            GpulseError: The samples cannot be read, or memory is insufficient.
        """
        tables: tuple[tuple[str, str, list[Any]], ...] = (
            ("process_minutes", process_minutes_query(processes[0]), processes[1]),
            ("gpu_minutes", gpu_minutes_query(gpus[0]), gpus[1]),
            ("spans", _SPANS_SQL, []),
        )
        with ExitStack() as stack:
            for name, query, bound in tables:
                stack.enter_context(temporary_table(self._database, name, query, self._path, bound))
            inner, outer = "time > start AND time < stop", "time = start OR time = stop"
            shares = divide_query(_select_rows("process_minutes", inner), _select_rows("gpu_minutes", inner))
            done, bound = finished or ("", [])
            source = f"SELECT * FROM ({shares}) UNION ALL {done}" if done else shares
            self._insert(
                f"{SHARE_KEY}, time, {_SHARE_COLUMNS}", FINISHED, sum_query(source, hourly=True), bound
            )
            self._insert(
                f"{SHARE_KEY}, {_PROCESS_MINUTE_COLUMNS}",
                PROCESS_MINUTE,
                _select_rows("process_minutes", outer),
            )
            self._insert(
                f"node_id, gpu, {_GPU_MINUTE_COLUMNS}", GPU_MINUTE, _select_rows("gpu_minutes", outer)
            )

    def add_minutes(self, processes: Statement, gpus: Statement) -> None:
        """Add nodes of which no two minutes have another one between them, so that there is nothing to divide yet.

        Raises:
            GpulseError: The samples cannot be read, or memory is insufficient.
        """
        self._insert(
            f"{SHARE_KEY}, {_PROCESS_MINUTE_COLUMNS}",
            PROCESS_MINUTE,
            process_minutes_query(processes[0]),
            processes[1],
        )
        self._insert(f"node_id, gpu, {_GPU_MINUTE_COLUMNS}", GPU_MINUTE, gpu_minutes_query(gpus[0]), gpus[1])

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
        query = f"SELECT * REPLACE (make_timestamptz(time) AS time) FROM packed ORDER BY kind, {SHARE_KEY}, packed.time"
        try:
            return write_file(self._database, query, self._target, self._file, level=level)
        finally:
            self._database.execute("DROP TABLE IF EXISTS packed")


def _select_rows(table: str, condition: str) -> str:
    return f"SELECT {table}.* FROM {table} JOIN spans USING (node_id) WHERE {condition}"


def write_share_files(
    database: duckdb.DuckDBPyConnection, target: str, files: Sequence[SealedFile], *, level: int
) -> list[SealedFile]:
    """Write the share files of a segment whose other files are written; return none if memory is insufficient.

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
    sources = SampleSources(lambda found: [f"{target}/{file.name}" for _, file in found], (segment,))
    made = []
    try:
        groups = group_nodes_by_file(files)
        if groups and _count_minutes(files, tuple(chain(*groups))) <= _MAX_UNDIVIDED_MINUTES:
            groups = [
                tuple(chain(*groups[place : place + _SHARDS_TOGETHER]))
                for place in range(0, len(groups), _SHARDS_TOGETHER)
            ]
        for nodes in groups:
            writer = ShareFileWriter(database, target, nodes)
            minutes = _count_minutes(files, nodes)
            add = writer.add_minutes if minutes <= _MAX_UNDIVIDED_MINUTES else writer.add
            for held, worked in minute_statements(
                sources, nodes, max(1, _MAX_NODE_MINUTES_DIVIDED // minutes)
            ):
                add(held, worked)
            made.append(writer.write(level=level))
    except DiskError:
        raise
    except GpulseError as error:  # queries then compute GPU time from minutes
        log.warning(
            "cannot write the GPU time of a history segment; queries that need it will be slower: %s",
            error.message,
        )
        database.execute("DROP TABLE IF EXISTS packed")
        for file in made:
            with suppress(OSError):
                os.unlink(f"{target}/{file.name}")
        return []
    return made


def _count_minutes(files: Iterable[SealedFile], nodes: tuple[int, ...]) -> int:
    """Return how many minutes the samples of some nodes cover."""
    wanted = set(nodes)
    found = [file for file in files if file.scope in _SCOPES and not wanted.isdisjoint(file.nodes)]
    first = min(file.start for file in found) // MINUTE_US
    return max(file.end for file in found) // MINUTE_US - first + 1


def has_shares(segment: Segment) -> bool:
    """Whether a segment is compacted and has its share files; it lacks them if memory was insufficient."""
    return segment.is_compacted and (bool(segment.shares) or not group_nodes_by_file(segment.files))


def group_nodes_by_file(files: Iterable[SealedFile]) -> list[tuple[int, ...]]:
    """Return the nodes with GPU or process samples, grouped by the file to write."""
    nodes = {node for file in files if file.scope in _SCOPES for node in file.nodes}
    found: dict[int, list[int]] = {}
    for node in sorted(nodes):
        found.setdefault(node // NODES_PER_FILE, []).append(node)
    return [tuple(shard) for shard in found.values()]


def minute_statements(
    sources: SampleSources, nodes: Sequence[int], at_once: int
) -> Iterator[tuple[Statement, Statement]]:
    """Yield statements for the minutes of processes and of GPUs, for a few nodes at a time."""
    files = [file for segment in sources.segments for file in segment.files if file.scope in _SCOPES]
    begin = min(file.start for file in files) // MINUTE_US * MINUTE_US
    end = (max(file.end for file in files) // MINUTE_US + 1) * MINUTE_US
    for place in range(0, len(nodes), at_once):
        window = SampleWindow("process", begin, end, frozenset(nodes[place : place + at_once]))
        held = build_relation(sources, window, PROCESS_METRICS, grain=FINE_SECONDS)
        worked = build_relation(sources, window._replace(scope="gpu"), GPU_METRICS, grain=FINE_SECONDS)
        yield (held.query, held.bound), (worked.query, worked.bound)
