"""Write a head's log to sealed segments, and thin and remove old ones."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import duckdb

from gpulse.atomic_files import make_directories
from gpulse.errors import LogError
from gpulse.model.metric_catalog import CATALOG, Scope
from gpulse.model.packed_columns import ColumnLayout
from gpulse.model.series_labels import EXPOSED_SCOPES
from gpulse.store.disk_errors import disk_errors
from gpulse.store.history import compaction, gpu_share_files, rollup
from gpulse.store.history.frame_blocks import BlockCollector, BlockGroup
from gpulse.store.history.parquet import (
    FAST_COMPRESSION,
    open_database,
    read_column_types,
    write_file,
    write_table,
)
from gpulse.store.history.parquet_columns import build_table, quote_name, quote_text
from gpulse.store.history.segments import (
    NODES_PER_FILE,
    DamagedFile,
    DaySummary,
    SealedFile,
    Segment,
    check_segment,
    new_segment,
    newest_us,
    read_oldest,
    read_segments,
    read_summaries,
    remove_leftovers,
    remove_segments,
    remove_stale_summaries,
    sealed_to,
    set_damaged_segments_aside,
    valid_summaries,
    write_meta,
    write_oldest,
)
from gpulse.store.log.reader import LogCursor, LogReader
from gpulse.store.log.record_payloads import BATCH, FACT, PROBE, FrameBatch, LostTime, parse_fact
from gpulse.store.log.segment import DAMAGED, LogRecord, read_headers

log = logging.getLogger(__name__)

LOCAL_SCOPES: tuple[Scope, ...] = tuple(scope for scope in CATALOG if scope not in EXPOSED_SCOPES)
"""Scopes that are not sent to a time-series database: processes and cgroups."""


def find_outdated(
    segments: list[Segment],
    *,
    now: float,
    keep_seconds: float | None,
    limit_bytes: int | None,
    summaries: Sequence[DaySummary] = (),
) -> list[Segment]:
    """Return the segments to remove. The newest always stays, because its name shows up to where the log is sealed.

    Args:
        segments: All segments, oldest first.
        now: Epoch seconds.
        keep_seconds: Remove segments older than this; None keeps everything.
        limit_bytes: Maximum total size; None for no limit.
        summaries: The valid summaries; each is removed together with its first segment.
    """
    lost = {item.members[0].first: item.segment.size_bytes for item in summaries}
    size = sum(segment.size_bytes for segment in segments) + sum(lost.values())
    gone: list[Segment] = []
    for segment in segments[:-1]:
        is_old = keep_seconds is not None and (segment.end is None or segment.end / 1e6 < now - keep_seconds)
        if not is_old and (limit_bytes is None or size <= limit_bytes):
            break
        size -= segment.size_bytes + lost.get(segment.first, 0)
        gone.append(segment)
    return gone


def apply_retention(
    directory: str, *, now: float, keep_seconds: float | None, limit_bytes: int | None
) -> list[str]:
    """Remove the oldest segments and return their names. Only for the writer of the directory.

    Raises:
        LogError: A segment is damaged.
        DiskError: A segment cannot be removed.
    """
    segments = read_segments(directory)
    gone = find_outdated(
        segments,
        now=now,
        keep_seconds=keep_seconds,
        limit_bytes=limit_bytes,
        summaries=valid_summaries(read_summaries(directory), segments),
    )
    names = [segment.name for segment in gone]
    if names:
        write_oldest(directory, segments[len(names)].first)
        remove_segments(directory, names)
        remove_stale_summaries(directory)
    return names


def find_thinnable(
    segments: Sequence[Segment],
    *,
    now: float,
    whole_seconds: float,
    sent: tuple[int, int] | None = None,
) -> list[Segment]:
    """Return the segments that may be thinned, oldest first: never the newest, and only those with share files.

    Args:
        segments: All segments, oldest first.
        now: Epoch seconds.
        whole_seconds: Age up to which all samples are kept.
        sent: The log positions after which and up to which the time-series database has all samples; None if it has all of
            them.
    """
    return [
        segment
        for segment in segments[:-1]
        if segment.thinned is None
        and (sent is None or sent[0] < segment.first <= segment.last <= sent[1])
        and segment.end is not None
        and segment.end / 1e6 < now - whole_seconds
        and gpu_share_files.has_shares(segment)
    ]


def thin_segment(database: duckdb.DuckDBPyConnection, directory: str, segment: Segment) -> None:
    """Remove the samples from a segment that a time-series database has. Only for the writer of the directory.

    Processes, GPU time, and the GPU metrics per minute from which it is computed are kept.

    Raises:
        GpulseError: The thinned segment could not be written; the directory is unchanged.
    """
    source = f"{directory}/{segment.name}"
    with new_segment(directory, segment.first, segment.last, is_thin=True) as target:
        files = [file for file in segment.files if file.scope in LOCAL_SCOPES]
        for file in files:
            _link_or_copy(f"{source}/{file.name}", f"{target}/{file.name}")
        files += [
            _write_needed_metrics(database, source, file, target)
            for file in segment.files
            if file.scope == "gpu" and file.seconds == rollup.FINE_SECONDS
        ]
        write_meta(target, segment._replace(files=tuple(files), thinned=segment.end))
    remove_segments(directory, [segment.name])


def _write_needed_metrics(
    database: duckdb.DuckDBPyConnection, source: str, file: SealedFile, target: str
) -> SealedFile:
    """Write the minutes of GPUs with only the metrics that GPU time needs, which is a fifth of the size."""
    columns = [
        name for name in rollup.rollup_columns("gpu", gpu_share_files.GPU_METRICS) if name in file.columns
    ]
    rows = f"read_parquet({quote_text(f'{source}/{file.name}')})"
    query = f"SELECT {', '.join(map(quote_name, columns))} FROM {rows}"
    return write_file(database, query, target, file)


def _link_or_copy(source: str, target: str) -> None:
    with disk_errors(f"cannot write {target}"):
        try:
            os.link(source, target)
        except OSError:  # not every filesystem supports hard links
            shutil.copyfile(source, target)
            with open(target, "rb") as file:
                os.fsync(file.fileno())


class NamedNode(Protocol):
    """A node with its name."""

    @property
    def name(self) -> str:
        """Its display name."""


class MetadataSource(Protocol):
    """Look-up of layouts and nodes whose facts the log may have dropped."""

    def layouts(self, numbers: Collection[int]) -> Mapping[int, str]:
        """Return the JSON texts of layouts by ID."""

    def nodes(self, numbers: Collection[int]) -> Mapping[int, NamedNode]:
        """Return nodes by number."""


class LayoutLookup:
    """Cache of layouts and node names, from the metadata and the log."""

    def __init__(self, log: LogReader, metadata: MetadataSource) -> None:
        """Start empty.

        Args:
            log: Searched for facts that the metadata does not have.
            metadata: Searched first.
        """
        self.names: dict[int, str] = {}
        self.layouts: dict[int, ColumnLayout] = {}
        self._log = log
        self._metadata = metadata

    def apply_fact(self, payload: bytes) -> None:
        """Add a layout or a node from a fact; skip unreadable facts, which the metadata reports."""
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            fact = parse_fact(payload)
            if fact["fact"] == "layout":
                self._add_layout(fact["id"], fact["text"])
            elif fact["fact"] == "node":
                self.names[int(fact["id"])] = str(fact["name"])

    def look_up(self, layouts: Collection[int], nodes: Collection[int]) -> set[int]:
        """Look up what is not cached, and return the layouts that were not found.

        Raises:
            LogError: The metadata or the log cannot be read.
        """
        if self._unknown(layouts, nodes):
            self._read_metadata(layouts, nodes)
        if self._unknown(layouts, nodes):
            self._read_log()
        return set(layouts).difference(self.layouts)

    def _unknown(self, layouts: Collection[int], nodes: Collection[int]) -> bool:
        return bool(set(layouts).difference(self.layouts) or set(nodes).difference(self.names))

    def _add_layout(self, number: Any, text: str) -> None:
        key = int(number)
        if key not in self.layouts:
            self.layouts[key] = ColumnLayout.from_json(text)

    def _read_metadata(self, layouts: Collection[int], nodes: Collection[int]) -> None:
        for number, text in self._metadata.layouts(set(layouts).difference(self.layouts)).items():
            with suppress(ValueError):  # an unreadable layout counts as missing
                self._add_layout(number, text)
        for number, node in self._metadata.nodes(set(nodes).difference(self.names)).items():
            self.names[number] = node.name

    def _read_log(self) -> None:
        """Read all facts of the log, since the metadata may not have been written when the head stopped."""
        for record in self._log.read():
            if record.kind == FACT:
                self.apply_fact(record.payload)


class PendingSegment(NamedTuple):
    """The collected records for one segment."""

    first: int
    last: int
    blocks: BlockCollector
    received: tuple[int, int] | None
    lost: LostTime
    """Records that the log dropped or lost before they were sealed."""
    unreadable: int
    """Number of batches that could not be read."""


def collect_records(
    records: Iterable[LogRecord], layouts: LayoutLookup, first: int, *, max_bytes: int, since_us: int = 0
) -> PendingSegment:
    """Collect records until there are enough for a segment; unreadable batches are counted and skipped.

    Args:
        records: In the order of the log.
        layouts: Gets the layouts and nodes among them.
        first: The first position of the segment.
        max_bytes: Approximate maximum size of the batches.
        since_us: When the last batch before them was received; 0 if that is unknown.

    Raises:
        LogError: A record has a kind that only a newer version knows.
    """
    blocks = BlockCollector()
    last, unreadable, received, lost = first - 1, 0, None, LostTime(since_us)
    for record in records:
        lost.lose(record.position - last - 1 + (record.kind == DAMAGED))
        last = record.position
        if record.kind == FACT:
            layouts.apply_fact(record.payload)
        elif record.kind == BATCH:
            try:
                batch = FrameBatch.from_bytes(record.payload)
                blocks.add(batch)
            except ValueError:
                unreadable += 1
                continue
            lost.receive(batch.received_us)
            low, high = received or (batch.received_us, batch.received_us)
            received = min(low, batch.received_us), max(high, batch.received_us)
        elif record.kind not in (PROBE, DAMAGED):
            raise LogError(
                f"the record at position {record.position} of the log has an unknown kind: {record.kind}",
                hint="use the newer version of gpulse that wrote it",
            )
        if blocks.size_bytes >= max_bytes:
            break
    return PendingSegment(first, last, blocks, received, lost, unreadable)


def write_segment(
    database: duckdb.DuckDBPyConnection,
    directory: str,
    log: str,
    pending: PendingSegment,
    layouts: LayoutLookup,
) -> Segment:
    """Write a segment; when this returns, the segment is visible and on disk.

    Raises:
        GpulseError: The segment could not be written; nothing is left behind.
    """
    blocks = pending.blocks
    nodes = blocks.nodes()
    unknown = layouts.look_up(blocks.layouts(), nodes)
    blocks.drop(unknown)
    span = pending.lost.span(pending.received[1] if pending.received else 0)
    if unknown:
        span = pending.received
    damaged = (
        ()
        if span is None
        else (
            DamagedFile(
                "log",
                "column layouts are missing" if unknown else "records of the log are missing",
                None,
                None,
                *span,
                True,
            ),
        )
    )
    with new_segment(directory, pending.first, pending.last) as path:
        files: list[SealedFile] = []
        for shard, members in enumerate(_split_nodes(nodes, blocks.size_bytes)):
            groups = blocks.take(members, layouts.layouts)
            files += [
                _write_file(database, path, f"{scope}-{shard:06d}.parquet", scope, found, layouts)
                for scope, found in sorted(groups.items())
            ]
        files += gpu_share_files.write_share_files(database, path, files, level=FAST_COMPRESSION)
        segment = Segment(
            pending.first,
            pending.last,
            log,
            blocks.frames,
            pending.received,
            False,
            tuple(files),
            damaged=damaged,
        )
        write_meta(path, segment)
    return segment


def _split_nodes(nodes: Sequence[int], size_bytes: int) -> list[Sequence[int]]:
    """Divide the nodes of a segment among files: a file has a fixed cost, and is built in memory."""
    files = min(-(-size_bytes // _MAX_FILE_BYTES), -(-len(nodes) // NODES_PER_FILE)) or 1
    length = -(-len(nodes) // files) or 1
    return [nodes[place : place + length] for place in range(0, len(nodes), length)]


def _write_file(
    database: duckdb.DuckDBPyConnection,
    path: str,
    name: str,
    scope: Scope,
    groups: list[BlockGroup],
    layouts: LayoutLookup,
) -> SealedFile:
    table = build_table(scope, groups, layouts.names)
    with disk_errors(f"cannot write {path}/{name}"):
        written = write_table(database, table, f"{path}/{name}")
    nodes = tuple(sorted({node for group in groups for node in group.nodes}))
    columns = read_column_types(database, f"{path}/{name}")
    return SealedFile(
        name,
        scope,
        nodes,
        table.rows,
        written.size_bytes,
        table.start,
        table.end,
        columns,
        checksum=written.checksum,
    )


_MAX_SEGMENT_BYTES = 64 << 20
"""Maximum size of the log records in one segment, so that it fits in memory."""
_MAX_FILE_BYTES = 16 << 20
"""Maximum size of the log records in one file of a segment with more than `NODES_PER_FILE` nodes."""
_SUMMARY_SECONDS = 5.0
"""Approximate maximum time that sealing waits while a summary is written."""
_THIN_SECONDS = 20.0
"""Approximate maximum time that sealing waits while segments are thinned."""
_LOCK_SECONDS = 30.0
"""A sealing process ends soon after its head is killed. One that keeps the lock for longer belongs to another head."""


class HistoryWriter:
    """The only writer of a history directory, which it locks."""

    def __init__(self, data_dir: str, metadata: MetadataSource) -> None:
        """Lock the directory and remove leftovers of an earlier process.

        Args:
            data_dir: A head's data directory.
            metadata: Its layouts and nodes.

        Raises:
            GpulseError: The directory is damaged, or another process has the lock.
        """
        self.history = f"{data_dir}/history"
        self._summary: Generator[str | None, None, None] | None = None
        """The summary being written."""
        self._log = LogReader(f"{data_dir}/log")
        self._cursor: LogCursor | None = None
        """Where the next seal continues to read the log; a new cursor would read its segment from the start."""
        self._layouts = LayoutLookup(self._log, metadata)
        with disk_errors(f"cannot write to {self.history}"):
            make_directories(self.history)
        self._lock = _acquire_lock(f"{self.history}/lock")
        try:
            for damage in set_damaged_segments_aside(self.history):
                log.error("%s", damage.sentence)
            self.tidied = [*remove_leftovers(self.history), *remove_stale_summaries(self.history)]
            segments = read_segments(self.history)
            self.sealed_to = sealed_to(segments)
            self._newest_us = newest_us(segments)
            self._record_oldest(segments)
            self._check_log(segments)
            self._database = open_database(f"{self.history}/.unfinished-spill")
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Release the directory."""
        self._stop_summary()
        self._close_cursor()
        self._database.close()
        os.close(self._lock)

    def seal(self, position: int) -> dict[str, Any]:
        """Seal the log up to a position that is on disk."""
        try:
            return self._seal(position)
        except BaseException:
            self._close_cursor()  # it may have passed records that are not sealed
            raise

    def _seal(self, position: int) -> dict[str, Any]:
        made, missing, unreadable = [], 0, 0
        log = self._log_number()
        if not self.sealed_to and read_oldest(self.history) is None:
            write_oldest(self.history, 1)
        self._cursor = self._cursor or self._log.follow(self.sealed_to + 1)
        records = _records_up_to(position, self._cursor)
        while self.sealed_to < position:
            pending = collect_records(
                records,
                self._layouts,
                self.sealed_to + 1,
                max_bytes=_MAX_SEGMENT_BYTES,
                since_us=self._newest_us,
            )
            if pending.last <= self.sealed_to:
                raise LogError(
                    f"cannot write the log up to position {position} to the history: the log in {self._log.directory} ends at {self.sealed_to}",
                    hint="only records that are on disk can be written to the history",
                )
            segment = write_segment(self._database, self.history, log, pending, self._layouts)
            made.append(segment.name)
            missing += pending.lost.records
            unreadable += pending.unreadable + pending.blocks.unreadable
            self.sealed_to = segment.last
            self._newest_us = segment.received[1] if segment.received else self._newest_us
        return {"sealed_to": self.sealed_to, "segments": made, "missing": missing, "unreadable": unreadable}

    def _close_cursor(self) -> None:
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            cursor.close()

    def _record_oldest(self, segments: Sequence[Segment]) -> None:
        """Record the oldest segment if that was not done yet."""
        if segments and read_oldest(self.history) is None:
            write_oldest(self.history, segments[0].first)

    def compact(self) -> dict[str, Any]:
        """Merge the segments of the oldest whole hour; if there is none, summarize the oldest day."""
        merged = compaction.compact(self._database, self.history, read_segments(self.history))
        return {"compacted": merged or self._summarise()}

    def _summarise(self) -> list[str]:
        """Continue the summary of a day for a few seconds, since sealing must not wait; return its name once it is done."""
        if self._summary is None:
            segments = read_segments(self.history)
            self._summary = compaction.summarize_day(self._database, self.history, segments)
        deadline = time.monotonic() + _SUMMARY_SECONDS
        try:
            for name in self._summary:
                if name is not None:
                    self._summary = None
                    return [name]
                if time.monotonic() >= deadline:
                    return []
        except BaseException:
            self._summary = None
            raise
        self._summary = None
        return []

    def _stop_summary(self) -> None:
        """Discard an unfinished summary."""
        unfinished, self._summary = self._summary, None
        if unfinished is not None:
            unfinished.close()

    def retain(
        self,
        now: float,
        keep_seconds: float | None,
        limit_bytes: int | None,
        whole_seconds: float | None = None,
        sent: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        """Thin old segments and remove the oldest; the arguments are those of `SealClient.retain`."""
        thinned: list[str] = []
        try:
            if whole_seconds is not None:
                self._thin(now, whole_seconds, sent, thinned)
        finally:
            removed = apply_retention(
                self.history, now=now, keep_seconds=keep_seconds, limit_bytes=limit_bytes
            )
            if removed or thinned:
                self._stop_summary()  # it may include these segments
        return {"removed": removed, "thinned": thinned}

    def _thin(self, now: float, whole_seconds: float, sent: tuple[int, int] | None, done: list[str]) -> None:
        """Thin the oldest segments for a few seconds, since sealing must not wait."""
        deadline = time.monotonic() + _THIN_SECONDS
        segments = read_segments(self.history)
        for segment in find_thinnable(segments, now=now, whole_seconds=whole_seconds, sent=sent):
            checked = check_segment(self.history, segment)
            if gpu_share_files.has_shares(checked):
                thin_segment(self._database, self.history, checked)
                done.append(segment.name)
            if time.monotonic() >= deadline:
                break

    def _log_number(self) -> str:
        with disk_errors(f"cannot read the log in {self._log.directory}"):
            is_there = os.path.isdir(self._log.directory)
            headers = read_headers(self._log.directory) if is_there else []
        return headers[-1].log_id.hex() if headers else ""

    def _check_log(self, segments: Sequence[Segment]) -> None:
        log = self._log_number()
        if segments and log and segments[-1].log != log:
            raise LogError(
                f"{self.history} does not belong to the log in {self._log.directory}",
                hint="move one of the two directories away",
            )


def _records_up_to(position: int, cursor: LogCursor) -> Iterator[LogRecord]:
    """Yield the records up to a position without reading the one after it."""
    for record in cursor:
        if record.position > position:  # that one was dropped from the log
            return
        yield record
        if record.position == position:
            return


def _acquire_lock(path: str) -> int:
    with disk_errors(f"cannot open {path}"):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(file)
                raise LogError(
                    f"another process is writing to {os.path.dirname(path)}", hint="stop that process first"
                ) from None
            time.sleep(0.05)
