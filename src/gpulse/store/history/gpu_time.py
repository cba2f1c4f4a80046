"""How the time of GPUs is divided among processes, kept beside samples so that weeks of it add up quickly.

A file of shares has rows of three kinds. Most are finished: how much of a GPU a process had in an hour (`FINISHED`). A node's
first and last minute in a segment may go on in another one, so these are kept as minutes of processes (`PROCESS_MINUTE`) and of
GPUs (`GPU_MINUTE`), and divided when somebody asks. As long as a node's segments follow one another in time, nothing else is
needed; where they do not, their minutes are asked.
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
from gpulse.store.history.parquet import temporary, write_file, writing
from gpulse.store.history.query import Window
from gpulse.store.history.relation import Sources, relation
from gpulse.store.history.rollup import FINE_SECONDS, MINUTE_US
from gpulse.store.history.segments import SHARES, SealedFile, Segment

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

HOUR_US = 3_600_000_000
FINISHED, PROCESS_MINUTE, GPU_MINUTE = 0, 1, 2
PROCESS_METRICS = ("gpu_memory_bytes", "sm_ratio")
GPU_METRICS = ("gpu_utilization_ratio", "graphics_active_ratio", "sm_active_ratio", "power_watts")
KEY = "node_id, pid, start_time, gpu"
_NODES_PER_FILE = 256
_NODES_AT_ONCE = 32
"""Their minutes of an hour are divided at once."""
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
"""A query, and what to put where it has question marks."""


def process_minutes(source: str) -> str:
    """The minutes of processes on GPUs, from a relation of the scope `process`."""
    return _PROCESS_MINUTES.format(source)


def gpu_minutes(source: str) -> str:
    """The minutes of GPUs, from a relation of their scope."""
    return _GPU_MINUTES.format(source)


def divided(held: str, worked: str, window: Window | None = None) -> str:
    """Shares by the hour, from minutes; of those at its edges only what lies in the window."""
    room = "60.0"
    if window is not None:
        room = f"(least(time + {MINUTE_US}, {window.end}) - greatest(time, {window.start})) / 1e6"
    return _DIVIDED.format(held=held, worked=worked, room=room)


def added(source: str, *, hourly: bool) -> str:
    """Shares of the same process on the same GPU as one, perhaps one an hour."""
    return _ADDED.format("hour," if hourly else "", source)


class Span(NamedTuple):
    """From which to which minute a node is in a file of shares, in microseconds."""

    node: int
    start: int
    stop: int
    file: int | None
    """The number of the file; None for samples that have no shares."""


def conflicts(spans: Iterable[Span]) -> dict[int, set[int]]:
    """The nodes, by file, whose minutes there are not all that there are of them: others lie between."""
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
"""Gives the spans of all nodes in files, and how many minutes are not divided yet; bind their paths."""


def finished(condition: str) -> str:
    """Shares by the hour that are finished in files; bind their paths."""
    return f"SELECT {KEY}, epoch_us(time) AS hour, {_SHARE_COLUMNS} FROM read_parquet(?) WHERE kind = {FINISHED} AND {condition}"


def open_process_minutes(condition: str) -> str:
    """The minutes of processes in files that are not divided yet, as a relation; bind their paths."""
    none = "NULL::DOUBLE"
    return (
        "SELECT node_id, '' AS subject, pid, start_time, gpu, samples, epoch_us(time) AS time, first, last, "
        f"{none} AS m0, 0::BIGINT AS n0, {none} AS l0, h0, m1, n1, {none} AS l1, {none} AS h1 "
        f"FROM read_parquet(?) WHERE kind = {PROCESS_MINUTE} AND {condition}"
    )


def open_gpu_minutes(condition: str) -> str:
    """The minutes of GPUs in files that are not divided yet, as a relation; bind their paths."""
    metrics = ", ".join(
        f"m{n}, n{n}, NULL::DOUBLE AS l{n}, NULL::DOUBLE AS h{n}" for n in range(len(GPU_METRICS))
    )
    return (
        f"SELECT node_id, gpu AS subject, samples, epoch_us(time) AS time, first, last, {metrics} "
        f"FROM read_parquet(?) WHERE kind = {GPU_MINUTE} AND {condition}"
    )


class ShareFileWriter:
    """Puts one file of shares together, some nodes at a time."""

    def __init__(self, database: duckdb.DuckDBPyConnection, target: str, nodes: tuple[int, ...]) -> None:
        """Begin with nothing.

        Args:
            database: Where to do it.
            target: The directory for the file.
            nodes: Those of the file.

        Raises:
            GpulseError: It cannot be done.
        """
        self._database = database
        self._target = target
        name = f"share-{nodes[0] // _NODES_PER_FILE:06d}.parquet"
        self._file = SealedFile(name, "process", nodes, 0, 0, 0, 0, {}, SHARES)
        self._path = f"{target}/{name}"
        with writing(self._path):
            database.execute(f"CREATE OR REPLACE TEMP TABLE packed ({_PACKED})")

    def add(self, held: Statement, worked: Statement, settled: Statement | None = None) -> None:
        """Take the samples of some nodes in.

        Args:
            held: A relation of processes.
            worked: One of GPUs.
            settled: Shares by the hour that are finished already.

        Raises:
            GpulseError: It cannot be done.
        """
        tables: tuple[tuple[str, str, list[Any]], ...] = (
            ("process_minutes", process_minutes(held[0]), held[1]),
            ("gpu_minutes", gpu_minutes(worked[0]), worked[1]),
            ("spans", _SPANS, []),
        )
        with ExitStack() as stack:
            for name, query, bound in tables:
                stack.enter_context(temporary(self._database, name, query, self._path, bound))
            inner, outer = "time > start AND time < stop", "time = start OR time = stop"
            shares = divided(_within("process_minutes", inner), _within("gpu_minutes", inner))
            done, bound = settled or ("", [])
            source = f"SELECT * FROM ({shares}) UNION ALL {done}" if done else shares
            self._insert(f"{KEY}, time, {_SHARE_COLUMNS}", FINISHED, added(source, hourly=True), bound)
            self._insert(
                f"{KEY}, {_PROCESS_MINUTE_COLUMNS}", PROCESS_MINUTE, _within("process_minutes", outer)
            )
            self._insert(f"node_id, gpu, {_GPU_MINUTE_COLUMNS}", GPU_MINUTE, _within("gpu_minutes", outer))

    def _insert(self, columns: str, kind: int, query: str, bound: Sequence[Any] = ()) -> None:
        chosen = columns.replace("time, first", "hour, first", 1) if kind == FINISHED else columns
        with writing(self._path):
            self._database.execute(
                f"INSERT INTO packed (kind, {columns}) SELECT {kind}, {chosen} FROM ({query})", list(bound)
            )

    def write(self, *, level: int) -> SealedFile:
        """Write what was taken in.

        Raises:
            GpulseError: It cannot be written.
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
    """Write the shares of a segment whose other files are written; none where that needs too much.

    Args:
        database: Where to do it.
        target: The directory with the files.
        files: All of them.
        level: How hard zstd tries.

    Raises:
        DiskError: They cannot be written.
    """
    segment = Segment(0, 0, "", 0, None, False, tuple(files))
    sources = Sources(lambda found: [f"{target}/{file.name}" for _, file in found], (segment,))
    made = []
    try:
        for nodes in shards(files):
            packer = ShareFileWriter(database, target, nodes)
            for held, worked in minutes(sources, nodes, _NODES_AT_ONCE):
                packer.add(held, worked)
            made.append(packer.write(level=level))
    except DiskError:
        raise
    except GpulseError as error:  # who held GPUs is answered from minutes then
        log.warning(
            "a segment has no shares of GPUs, and questions about its time are slow: %s", error.message
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
    """The nodes with samples of GPUs or processes, those of one file together."""
    nodes = {node for file in files if file.scope in _SCOPES for node in file.nodes}
    found: dict[int, list[int]] = {}
    for node in sorted(nodes):
        found.setdefault(node // _NODES_PER_FILE, []).append(node)
    return [tuple(shard) for shard in found.values()]


def minutes(sources: Sources, nodes: Sequence[int], at_once: int) -> Iterator[tuple[Statement, Statement]]:
    """The samples or minutes of processes and GPUs of some nodes, so many nodes at a time."""
    files = [file for segment in sources.segments for file in segment.files if file.scope in _SCOPES]
    begin = min(file.start for file in files) // MINUTE_US * MINUTE_US
    end = (max(file.end for file in files) // MINUTE_US + 1) * MINUTE_US
    for place in range(0, len(nodes), at_once):
        window = Window("process", begin, end, frozenset(nodes[place : place + at_once]))
        held = relation(sources, window, PROCESS_METRICS, grain=FINE_SECONDS)
        worked = relation(sources, window._replace(scope="gpu"), GPU_METRICS, grain=FINE_SECONDS)
        yield (held.query, held.bound), (worked.query, worked.bound)
