"""Store of one head's data directory: log, metadata and history. For a running head, or offline for a stopped one."""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, Self

from gpulse.errors import DiskError, GpulseError, LogError
from gpulse.model.packed_columns import ColumnLayout, PackedFrame
from gpulse.model.session import Session
from gpulse.store.damage import METADATA_SCOPE, Damage, DamageList, count_damaged_files
from gpulse.store.disk_errors import disk_errors
from gpulse.store.format_version import check_format, prepare_format
from gpulse.store.history.duckdb_query import SealedHistory
from gpulse.store.history.reader import HistoryReader
from gpulse.store.history.recent_frames import RecentFrames
from gpulse.store.history.segments import Segment, find_history_gaps, set_damaged_segments_aside
from gpulse.store.log.lock import acquire_lock, find_writer
from gpulse.store.log.log import Log
from gpulse.store.log.reader import LogReader
from gpulse.store.log.record_payloads import BATCH, PROBE, FrameBatch, LogEntry, LostTime
from gpulse.store.log.segment import DAMAGED, DamagedLogError, LogRecord
from gpulse.store.metadata.file_check import METADATA_FILE, copy_backup, find_damage
from gpulse.store.metadata.local_metadata import Metadata, StoredRun
from gpulse.store.metadata.log_updates import MetadataUpdate, build_update, parse_entry
from gpulse.store.recovery import (
    add_lost_records,
    add_lost_time,
    add_unreadable_time,
    find_lost_nodes,
    open_log,
    open_metadata,
    record_files,
    set_damaged_state_files_aside,
)
from gpulse.store.seal_client import SealClient, SealResult
from gpulse.store.store import Query, Store, StoredEvent, StoredFinding, StoredGpu, StoredNode, StoredProcess


class StoreReader(HistoryReader, Store):
    """Read access to a data directory (`store.store.Store`)."""

    def __init__(
        self,
        metadata: Metadata,
        history: SealedHistory,
        recent: RecentFrames,
        damage: DamageList | None = None,
    ) -> None:
        super().__init__(history, recent, damage)
        self._metadata = metadata

    def nodes(self) -> dict[int, StoredNode]:
        """Return all nodes, by number."""
        return self._metadata.nodes()

    def gpus(self) -> list[StoredGpu]:
        """Return all GPUs, ordered by node and index."""
        return self._metadata.gpus()

    def sessions(self) -> list[Session]:
        """Return all sessions, oldest first."""
        return self._metadata.sessions()

    def events(self, query: Query) -> list[StoredEvent]:
        """Return events; see `store.store.Store`."""
        self._note_damage(query, METADATA_SCOPE)
        return self._metadata.events(query)

    def findings(self, query: Query) -> list[StoredFinding]:
        """Return findings; see `store.store.Store`."""
        self._note_damage(query, METADATA_SCOPE)
        return self._metadata.findings(query)

    def processes(self, query: Query) -> list[StoredProcess]:
        """Return processes; see `store.store.Store`."""
        self._note_damage(query, METADATA_SCOPE)
        return self._metadata.processes(query)

    def job_events(self, word: str) -> list[StoredEvent]:
        """Return the events of jobs that a word may refer to; see `store.store.Store`."""
        return self._metadata.job_events(word)

    def job_names(self) -> list[str]:
        """Return the jobs of all processes that were ever seen."""
        return self._metadata.job_names()


log = logging.getLogger(__name__)

SEAL_SECONDS = 600.0
SEAL_BYTES = 48 << 20
"""Sealing starts when either limit is reached. Frames stay in memory until they are sealed. What comes until it starts still
fits into the same segment (`history.writer`), even from a large fleet."""
_SEGMENT_BYTES = 256 << 20
_MAX_WRITE_BYTES = 16 << 20
"""Maximum size of one write."""


class DiskUsage(NamedTuple):
    """Disk usage of a data directory."""

    log_bytes: int
    history_bytes: int
    metadata_bytes: int
    free_bytes: int
    unsealed_bytes: int
    is_behind: bool
    """True while the metadata cannot be written and lags behind the log; new data is not found yet."""
    damaged_files: int
    """Number of damaged files that were moved aside."""


class CommitFollower(Protocol):
    """Receiver of every commit, for which the log is kept until the receiver confirms it."""

    @property
    def confirmed(self) -> int:
        """The position up to which it no longer needs the log."""

    @property
    def limit_bytes(self) -> int:
        """Maximum number of bytes of the log that are kept for it."""

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes of the log that it has not confirmed."""

    def committed(self, first: int, update: MetadataUpdate) -> None:
        """Receive the update that starts at a position; must not block."""


class Forwarder(Protocol):
    """The sender of all samples to a time-series database."""

    limit_bytes: int
    """Maximum number of bytes of the log that are kept for it."""

    @property
    def confirmed(self) -> int:
        """The position up to which it no longer needs the log."""

    @property
    def begun(self) -> int:
        """The position after which everything was sent."""

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes of the log that it has not confirmed."""

    def wake(self, position: int) -> None:
        """Announce the position up to which the log is on disk."""


class LocalStore(StoreReader):
    """The only writer of a data directory. Methods that read may be called from any thread.

    A commit is durable once the log is synced. The metadata and the frames in memory are updated at once, the history
    later. Each records the log position up to which it is complete, so that nothing is counted twice or missed.
    """

    def __init__(self, directory: str, *, layouts: dict[int, ColumnLayout] | None = None) -> None:
        """Open a data directory, or create it.

        Args:
            directory: Created if it does not exist.
            layouts: Filled with the known layouts; the caller adds layouts that arrive later.

        Raises:
            LogError: The directory has another format, or another process writes to it.
            DiskError: The disk is full, read-only or failing.
        """
        self.directory = os.path.abspath(directory)
        self.layouts: dict[int, ColumnLayout] = {} if layouts is None else layouts
        damage = DamageList()
        for found in prepare_format(self.directory):
            damage.add(found)
        lock_file = acquire_lock(f"{self.directory}/log")
        try:
            for found in (
                *set_damaged_state_files_aside(self.directory),
                *set_damaged_segments_aside(f"{self.directory}/history"),
            ):
                damage.add(found)
            self.metadata = open_metadata(self.directory, damage)
            self._history = SealedHistory(self.directory, damage=damage, moves_damage=True)
        except BaseException:
            os.close(lock_file)
            raise
        self._log = open_log(
            self.directory,
            self.metadata,
            self._history,
            damage,
            segment_bytes=_SEGMENT_BYTES,
            lock_file=lock_file,
        )
        try:
            self.layouts.update(self.metadata.layouts())
            self._recent = RecentFrames(self.layouts)
            super().__init__(self.metadata, self._history, self._recent, damage)
            self._sealer = SealClient(self.directory)
            self._seen_us: dict[int, int] = {}
            self._newest_us = self._history.newest_us
            self._load_unsealed()
            self._find_gaps()
        except BaseException:
            self._log.close()
            raise
        self._accepted = self._log.last
        """The position of the last accepted entry. Entries whose sync failed may be on disk after it."""
        self._behind = False
        self._follower: CommitFollower | None = None
        self._forwarder: Forwarder | None = None
        self._gpus_version = 0
        self._gpus: list[StoredGpu] | None = None
        """Cached, because every query needs it and it rarely changes."""
        self._lock = threading.Lock()
        """Guards the log: commits, repairs and drops come from different threads."""
        self._metadata_lock = threading.Lock()
        """Guards metadata updates: each must start where the last one ended. Acquired after `_lock`."""
        if any(found.scope == METADATA_SCOPE for found in damage.found):
            self.commit(find_lost_nodes(self.metadata, self._history))

    def _load_unsealed(self) -> None:
        """Keep the frames in memory that are not sealed yet; report those that are lost."""
        lost, last = LostTime(self._newest_us), self._history.sealed_to
        for record in self._log.read(last + 1):
            lost.lose(record.position - last - 1 + (record.kind == DAMAGED))
            last = record.position
            if record.kind == BATCH:
                self._add_recent(record)
                lost.receive(self._newest_us)
        add_lost_time(self.damage, self._log.directory, lost)
        if (span := self._recent.view().unreadable_span) is not None:
            add_unreadable_time(self.damage, self._log.directory, span)

    def check_everything(self) -> None:
        """Check all files of the history and the whole log now, instead of when they are read.

        Raises:
            GpulseError: A file cannot be moved aside, or the log cannot be repaired.
        """
        self._history.check_files()
        self._repair_log()

    def check_history(self, max_bytes: int) -> None:
        """Check the next files of the history that were not read since the start; not more than about this many bytes.

        Raises:
            DiskError: A damaged file cannot be moved aside.
        """
        self._history.check_files(max_bytes)

    def _find_gaps(self) -> None:
        """Find what is missing from the history."""
        for found in find_history_gaps(self._history.path, self._history.segments):
            self.damage.add(found)

    @property
    def accepted(self) -> int:
        """The log position up to which everything is on disk and accepted."""
        return self._accepted

    @property
    def is_behind(self) -> bool:
        """True while the metadata cannot be written and lags behind the log."""
        return self._behind

    def _gpus_changed(self) -> None:
        self._gpus_version += 1
        self._gpus = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- writing

    def commit(self, entries: Sequence[LogEntry]) -> None:
        """Write entries, and return once they are on disk.

        Raises:
            DiskError: The entries may not be on disk.
        """
        with self._lock:
            position = self._log.last + 1
            for piece in _split_entries(entries):
                self._log.append_many((entry.kind, entry.payload) for entry in piece)
            self._log.sync()
            self._accept(position, entries)

    def repair(self, probe_bytes: int = 0) -> list[LogEntry]:
        """Reopen the log after a failed commit, and return the entries that did reach the disk.

        Args:
            probe_bytes: The size of a test write that must succeed.

        Raises:
            GpulseError: The log is still not usable.
        """
        with self._lock:
            accepted = self._accepted
            with suppress(GpulseError):  # entries whose sync failed are read again below
                self._log.close()
            self._log = Log(
                f"{self.directory}/log",
                segment_bytes=_SEGMENT_BYTES,
                repairs=True,
                written=accepted,
                log_id=self._log.log_id,
            )
            add_lost_records(self.damage, self._log.lost, 0)
            self._log.append(PROBE, bytes(probe_bytes))
            self._log.sync()
            self._log.rewrite_newest()
            found = [parse_entry(record) for record in self._log.read(accepted + 1)]
            self._accept(accepted + 1, found)
            return found

    def _accept(self, position: int, entries: Sequence[LogEntry]) -> None:
        """Accept entries that are on disk from a position on: update memory and metadata, and notify the receivers."""
        self._accepted = position + len(entries) - 1
        for place, entry in enumerate(entries):
            if entry.batch is not None:
                self._take(position + place, entry.batch, entry.frames)
        update = build_update(self._accepted, entries)
        try:
            if self._behind:
                self.catch_up()
                return
            with self._metadata_lock:
                self.metadata.apply(update)
            if any(entry.fact is not None and entry.fact["fact"] in _GPU_FACTS for entry in entries):
                self._gpus_changed()
        except (DiskError, LogError) as error:
            if not self._behind:
                log.error("cannot update the metadata, which now lags behind the log: %s", error.message)
            self._behind = True  # it catches up from the log later
        finally:
            if self._forwarder is not None:
                self._forwarder.wake(self._accepted)
            if self._follower is not None:
                self._follower.committed(position, update)

    def forward_to(self, forwarder: Forwarder) -> None:
        """Notify a forwarder of every commit, and keep the log until it has sent it."""
        with self._lock:
            self._forwarder = forwarder
            forwarder.wake(self._accepted)

    def follow_with(self, follower: CommitFollower) -> None:
        """Pass every commit to a follower, and keep the log until it has confirmed it."""
        with self._lock:
            self._follower = follower

    def _add_recent(self, record: LogRecord) -> None:
        """Keep a batch of the log in memory. The metadata reports batches that cannot be read."""
        with suppress(ValueError):
            self._take(record.position, FrameBatch.from_bytes(record.payload))

    def _take(self, position: int, batch: FrameBatch, frames: Sequence[PackedFrame] | None = None) -> None:
        self._recent.add(position, batch, frames)
        self._seen_us[batch.node] = batch.received_us
        self._newest_us = max(self._newest_us, batch.received_us)

    def catch_up(self) -> None:
        """Update the metadata from the log if it lags behind.

        Raises:
            DiskError: The metadata still cannot be written.
        """
        if self._behind:
            with self._metadata_lock:
                durable = self._accepted  # the metadata must not include records that are not synced
                records = self._log.read(self.metadata.applied + 1)
                self.metadata.replay(takewhile(lambda record: record.position <= durable, records))
            self._gpus_changed()
            self._behind = False
            log.warning("the metadata is up to date with the log again")

    def seal(self) -> SealResult:
        """Write what is only in the log to the history, and shorten the log. Normally, nothing is missing or unreadable.

        Raises:
            GpulseError: Sealing failed. No data is lost; try again later.
        """
        try:
            sealed = self._seal()
        except LogError:
            if not self._repair_log():
                raise
            sealed = self._seal()
        kept = min(self.metadata.checkpoint(), self._history.sealed_to)
        record_files(self.directory, self.metadata)
        with self._lock:
            self._shorten_log(kept)
        return sealed

    def _seal(self) -> SealResult:
        self.catch_up()
        target = self.metadata.applied
        if target <= self._history.sealed_to:
            return SealResult(self._history.sealed_to, ())
        sealed = self._sealer.seal(target)
        self._history.refresh()
        self._recent.drop_through(self._history.sealed_to)
        self._find_gaps()
        return sealed

    def _repair_log(self) -> bool:
        """Repair the log while it is open; return whether it was damaged. Commits wait only while something is repaired."""
        damaged = self._log.find_damaged_segments()
        if not damaged:
            return False
        with self._lock:
            lost = self._log.repair(damaged)
        add_lost_records(self.damage, lost, min(self.metadata.applied, self._history.sealed_to))
        return bool(lost)

    def _shorten_log(self, kept: int) -> None:
        """Drop sealed records up to a position, except those that a forwarder or follower still needs."""
        readers = [reader for reader in (self._forwarder, self._follower) if reader is not None]
        if readers:
            self._log.shorten(max(reader.limit_bytes for reader in readers), kept + 1)
            kept = min(kept, *(reader.confirmed for reader in readers))
        self._log.drop_before(kept + 1)

    def needed_since(self) -> float:
        """Return when the oldest frames arrived that a forwarder or follower still needs; infinity if there are none.

        Raises:
            GpulseError: The log cannot be read.
        """
        readers = [reader.confirmed for reader in (self._forwarder, self._follower) if reader is not None]
        if readers:
            for record in self._log.read(min(readers) + 1):
                if record.kind == BATCH:
                    with suppress(ValueError):
                        return FrameBatch.from_bytes(record.payload).received_us / 1e6
        return math.inf

    def drop_older_half(self) -> None:
        """Drop the older half of the frames in memory. They are in the log, and can be queried again once they are sealed."""
        self._recent.drop_through((self._history.sealed_to + self._recent.last) // 2)

    def tidy(
        self,
        now: float,
        *,
        keep_seconds: float,
        limit_bytes: int | None,
        metadata_seconds: float | None = None,
    ) -> list[str]:
        """Compact the history and apply retention by age and size; return the names of removed segments.

        Args:
            now: Epoch seconds.
            keep_seconds: How long samples are kept; infinity keeps everything forever. If this is less than
                `metadata_seconds`, samples that the time-series database does not have are kept as long as the rest.
            limit_bytes: Maximum size of the whole data directory.
            metadata_seconds: How long processes, cgroups and all metadata are kept, which no time-series database has; None
                for as long as samples.

        Raises:
            GpulseError: It failed. No data is lost; try again later.
        """
        while self._sealer.compact():
            self._history.refresh()
        self._find_gaps()
        if limit_bytes is not None:
            limit_bytes = max(0, limit_bytes - self._own_log_bytes() - self.metadata.size_bytes)
        longest = keep_seconds if metadata_seconds is None else max(keep_seconds, metadata_seconds)
        whole_seconds = keep_seconds if keep_seconds < longest else None
        forever = math.isinf(longest)
        sent = None
        if self._forwarder is not None:
            confirmed = self._forwarder.confirmed  # read first: `begun` is set before it
            sent = self._forwarder.begun, confirmed
        dropped = self._sealer.retain(now, None if forever else longest, limit_bytes, whole_seconds, sent)
        self._history.refresh()
        if not forever:
            self.metadata.drop_before(now - longest)
        return list(dropped)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The sealed segments, oldest first; a new tuple whenever they change."""
        return self._history.segments

    def _own_log_bytes(self) -> int:
        """Size of the log without what is kept for a forwarder or follower, which has its own limit."""
        readers = [reader for reader in (self._forwarder, self._follower) if reader is not None]
        waiting = max((reader.waiting_bytes for reader in readers), default=0)
        return max(0, self._log.size_bytes - waiting)

    @property
    def unsealed_bytes(self) -> int:
        """Size of the frames in memory that are not sealed yet."""
        return self._recent.bytes

    def usage(self) -> DiskUsage:
        """Return the disk usage."""
        return DiskUsage(
            self._log.size_bytes,
            self._history.size_bytes,
            self.metadata.size_bytes,
            shutil.disk_usage(self.directory).free,
            self._recent.bytes,
            self._behind,
            count_damaged_files(self.directory),
        )

    def close(self) -> None:
        """Stop the sealing process and close all files."""
        self._sealer.close()
        self._history.close()
        with suppress(GpulseError):
            record_files(self.directory, self.metadata)
        self.metadata.close()
        self._log.close()

    # --- reading

    @property
    def head_id(self) -> str:
        """The random ID of this head."""
        return self.metadata.head_id

    def runs(self) -> Mapping[bytes, StoredRun]:
        """Return all runs of agents, each with its last received sequence number."""
        return self.metadata.runs()

    def settings(self) -> Mapping[str, Any] | None:
        """Return the newest sampling settings for agents; None if there are none."""
        return self.metadata.settings()

    def seen(self, node: int) -> float | None:
        """Return when frames of a node last arrived; None if they are no longer in memory."""
        return self._seen_us[node] / 1e6 if node in self._seen_us else None

    @property
    def newest(self) -> float | None:
        """When any frames last arrived; None if there are none."""
        return self._newest_us / 1e6 if self._newest_us else None

    @property
    def oldest(self) -> float | None:
        """Time of the oldest samples; None if there are none."""
        starts = [file.start for segment in self._history.segments for file in segment.files]
        recent = self._recent.view().span
        if recent is not None:
            starts.append(recent[0])
        return min(starts) / 1e6 if starts else None

    def latest(self, kind: str) -> Mapping[int, tuple[float, dict[str, Any]]]:
        """Return the last event of a kind, by node."""
        return self.metadata.latest(kind)

    def gpus(self) -> list[StoredGpu]:
        """Return all GPUs, ordered by node and index."""
        known, version = self._gpus, self._gpus_version
        if known is None:
            known = super().gpus()
            if version == self._gpus_version:  # otherwise they changed during the query
                self._gpus = known
        return list(known)


_GPU_FACTS = frozenset({"devices", "node"})


def _split_entries(entries: Sequence[LogEntry]) -> Iterator[list[LogEntry]]:
    piece: list[LogEntry] = []
    size = 0
    for entry in entries:
        if piece and size + len(entry.payload) > _MAX_WRITE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(entry)
        size += len(entry.payload)
    if piece:
        yield piece


class OfflineStore(StoreReader):
    """The data directory of a stopped head, read-only (`store.store.Store`)."""

    def __init__(self, directory: str) -> None:
        """Open a data directory.

        Raises:
            GpulseError: The directory has no data, is damaged, has another format, or cannot be read.
        """
        self.directory = os.path.abspath(directory)
        log = LogReader(f"{self.directory}/log")
        if not os.path.isdir(log.directory):
            raise GpulseError(
                f"{self.directory} is not a head's data directory",
                hint="pass the directory that the head uses as --data-dir",
            )
        check_format(self.directory)
        with ExitStack() as stack:
            damage = DamageList()
            metadata = _open_metadata_copy(self.directory, log, stack, damage)
            layouts = metadata.layouts()
            recent = RecentFrames(layouts)
            history = SealedHistory(self.directory, damage=damage)
            stack.callback(history.close)
            super().__init__(metadata, history, recent, damage)
            self._newest_us = history.newest_us
            for record in _readable_records(log, history.sealed_to + 1, damage):
                if record.kind == BATCH:
                    with suppress(ValueError):  # written by another version
                        batch = FrameBatch.from_bytes(record.payload)
                        recent.add(record.position, batch)
                        self._newest_us = max(self._newest_us, batch.received_us)
            for found in find_history_gaps(history.path, history.segments):
                damage.add(found)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._stack.close()

    @property
    def newest(self) -> float | None:
        """When frames last arrived; None if there are none."""
        return self._newest_us / 1e6 if self._newest_us else None


def open_offline(directory: str) -> OfflineStore:
    """Open the data directory of a stopped head for reading.

    Raises:
        GpulseError: The directory has no data, is damaged, has another format, or cannot be read.
    """
    return OfflineStore(directory)


def _readable_records(log: LogReader, start: int, damage: DamageList) -> Iterator[LogRecord]:
    """Yield the records of a log up to the first damaged one, which only a head can repair."""
    try:
        yield from log.read(start)
    except DamagedLogError as error:
        affects = "the records after the damage cannot be read; to repair the log, start the head"
        damage.add(Damage(log.directory, error.message, affects, 0.0, time.time()))


def _open_metadata_copy(directory: str, log: LogReader, stack: ExitStack, damage: DamageList) -> Metadata:
    """Open a copy of the metadata, and bring it up to date with the log.

    A copy, because SQLite recovers the file even for readers, and this must not change the data directory.
    """
    path = f"{directory}/{METADATA_FILE}"
    copy = f"{stack.enter_context(tempfile.TemporaryDirectory(prefix='gpulse-'))}/{METADATA_FILE}"
    with disk_errors(f"cannot copy {path}"):
        reason = find_damage(path)
        if reason is None:
            for suffix in ("", "-wal"):
                if os.path.exists(path + suffix):
                    shutil.copyfile(path + suffix, copy + suffix)
        else:
            copy_backup(path, copy)
            affects = "its backup is used instead; to restore the file, start the head"
            damage.add(Damage(path, reason, affects, 0.0, time.time(), scope=METADATA_SCOPE))
    if find_writer(directory) is not None:
        raise GpulseError(
            f"a head has just started and is now writing to {directory}",
            hint="run the command again; that head will answer it",
        )
    metadata = stack.enter_context(Metadata(copy, shown=path))
    if reason is not None:
        metadata.skip_to(max(metadata.applied, log.first - 1))
    metadata.replay(_readable_records(log, metadata.applied + 1, damage))
    return metadata
