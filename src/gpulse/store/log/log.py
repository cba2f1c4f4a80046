"""Writer of an append-only log. Records survive `kill -9` once append() returns, and a power cut once sync() returns.

A log is a directory of segment files (`segment.py`) and a lock file. Opening it checks the headers and sizes of all segments
and every record of the newest one. Records of older segments are checked when they are read. Damage is repaired (`repair.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple, Self

from gpulse.atomic_files import sync_directory
from gpulse.errors import ClosedError, DiskError
from gpulse.store.disk_errors import disk_error, disk_errors, write_at
from gpulse.store.log.lock import acquire_lock
from gpulse.store.log.reader import LogCursor
from gpulse.store.log.repair import LostRecords, find_damaged_records, repair_log
from gpulse.store.log.segment import (
    MAX_KIND,
    MAX_WRITE_BYTES,
    RECORD_HEAD_BYTES,
    SEGMENT_HEADER_BYTES,
    SEGMENT_VERSION,
    DamagedLogError,
    LogRecord,
    RecordScan,
    SegmentHeader,
    check_link,
    create_segment,
    damage_error,
    encode_record,
    find_synced_record,
    find_valid_record,
    list_segment_numbers,
    open_segment,
    segment_path,
    unfinished_error,
)


class RecoveredLog(NamedTuple):
    """State of a log after recovery."""

    sealed: tuple[SegmentHeader, ...] = ()
    sizes: tuple[int, ...] = ()
    """Sizes of the sealed segments in bytes."""
    active: SegmentHeader | None = None
    """The header of the newest segment; None for a new log."""
    file: int = -1
    offset: int = 0
    """Where the next record is written."""
    last: int = 0
    lost_bytes: int = 0
    """Size of an unfinished write that was cut off."""


def recover_log(directory: str, written: int = 0, *, keep_unsynced: bool = False) -> RecoveredLog:
    """Check all segments and every record of the newest one, and cut off a write that a crash left unfinished.

    Args:
        directory: The directory of the log.
        written: The position up to which records are known to have been written.
        keep_unsynced: Do not cut off valid records after an invalid one, even if they were never synced.

    Raises:
        LogError: The log is damaged before its end, or ends before the last record that is known to have been written.
        OSError: The log cannot be read or truncated.
    """
    numbers = list_segment_numbers(directory)
    lost_bytes = 0
    if numbers and (unmade_bytes := _headerless_bytes(directory, numbers[-1])) is not None:
        path = segment_path(directory, numbers[-1])
        if len(numbers) == 1 and numbers[0] > 1:
            raise damage_error(path, 0, "the header is empty, and there is no earlier segment")
        os.unlink(path)
        numbers.pop()
        lost_bytes = unmade_bytes
    if not numbers:
        return RecoveredLog(lost_bytes=lost_bytes)
    headers, sizes = zip(*(_read_size(directory, number) for number in numbers), strict=True)
    for older, newer, size in zip(headers, headers[1:], sizes, strict=False):
        check_link(directory, older, newer, size)
    file, _ = open_segment(directory, numbers[-1], write=True)
    try:
        scan, cut_bytes = _truncate_unfinished(
            segment_path(directory, numbers[-1]), file, headers[-1], written, keep_unsynced=keep_unsynced
        )
    except BaseException:
        os.close(file)
        raise
    return RecoveredLog(
        headers[:-1], sizes[:-1], headers[-1], file, scan.offset, scan.position - 1, lost_bytes + cut_bytes
    )


def _headerless_bytes(directory: str, number: int) -> int | None:
    """Return the size of a segment without a complete header; None if the header is complete."""
    file, header = open_segment(directory, number)
    try:
        return os.fstat(file).st_size if header is None else None
    finally:
        os.close(file)


def _read_size(directory: str, number: int) -> tuple[SegmentHeader, int]:
    file, header = open_segment(directory, number)
    try:
        if header is None:
            raise unfinished_error(directory, number)
        return header, os.fstat(file).st_size
    finally:
        os.close(file)


def _truncate_unfinished(
    path: str, file: int, header: SegmentHeader, written: int, *, keep_unsynced: bool
) -> tuple[RecordScan, int]:
    """Read the newest segment to its end, and cut off an incomplete record there."""
    scan = RecordScan(file, header.marker, SEGMENT_HEADER_BYTES, header.first)
    for _ in scan:
        pass
    if scan.position <= written:
        raise damage_error(path, scan.offset, f"the records from {scan.position} to {written} are missing")
    rest = os.fstat(file).st_size - scan.offset
    if rest:
        valid = (
            find_valid_record(file, header.marker, scan.offset)
            if keep_unsynced
            else find_synced_record(file, header, scan.offset)
        )
        if valid is not None:
            raise damage_error(
                path, scan.offset, f"the record is invalid, but a valid record follows at byte {valid}"
            )
        os.ftruncate(file, scan.offset)
    os.fdatasync(file)
    return scan, rest


class SealedSegments:
    """All segments except the newest."""

    def __init__(self, directory: str, segments: Iterable[tuple[SegmentHeader, int]]) -> None:
        self._directory = directory
        self._segments = deque(segments)
        self.size_bytes = sum(size for _, size in self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, header: SegmentHeader, size_bytes: int) -> None:
        """Add a complete segment."""
        self._segments.append((header, size_bytes))
        self.size_bytes += size_bytes

    def first(self, newest: SegmentHeader) -> int:
        """Return the oldest position of the log, given the header of the newest segment."""
        return self._segments[0][0].first if self._segments else newest.first

    def second(self, newest: SegmentHeader) -> int:
        """Return what the oldest position would be without the oldest segment."""
        return self._segments[1][0].first if len(self._segments) > 1 else newest.first

    def drop_oldest(self) -> None:
        """Remove the oldest segment.

        Raises:
            DiskError: The segment cannot be removed.
        """
        header, size_bytes = self._segments[0]
        path = segment_path(self._directory, header.number)
        with disk_errors(f"cannot remove {path}"), suppress(FileNotFoundError):
            os.unlink(path)
        self._segments.popleft()
        self.size_bytes -= size_bytes


_SEGMENT_BYTES = 64 << 20
_SEGMENT_SECONDS = 3600.0
_REWRITE_BYTES = 1 << 20
_MIN_LIMIT_BYTES = 64 << 10
_MIN_SEGMENTS_IN_LIMIT = 8
"""A log with a size limit has at least this many segments, so that little more than necessary is dropped at a time."""


class _LogEnd(NamedTuple):
    """Where the next record is written. Replaced as a whole, so that an interrupt never leaves it inconsistent."""

    header: SegmentHeader
    file: int
    offset: int
    last: int


class Log:
    """The only writer of a log. Safe to use from several threads.

    A segment is complete on disk before the next one is started, so an append that starts a segment waits for the disk. No
    other append does.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        segment_bytes: int = _SEGMENT_BYTES,
        segment_seconds: float = _SEGMENT_SECONDS,
        limit_bytes: int | None = None,
        keep_unsynced: bool = False,
        clock: Callable[[], float] = time.time,
        repairs: bool = False,
        written: int = 0,
        log_id: bytes | None = None,
        lock_file: int | None = None,
    ) -> None:
        """Open a log, or create it.

        Args:
            directory: Created if it does not exist.
            segment_bytes: Maximum size of a segment; a single larger record gets its own segment.
            segment_seconds: Maximum age of a segment to which records are appended.
            limit_bytes: Maximum size of the log; the oldest segments are dropped to stay below it.
            keep_unsynced: Do not cut off valid records after an invalid one, even if they were never synced.
            clock: Returns epoch seconds, for the age of segments.
            repairs: Repair a damaged log; `lost` says what was lost. Otherwise damage is an error.
            written: The position up to which records are known to have been written; if they are missing, the log is damaged.
            log_id: The ID of the log, if it is known and none of its segments is left.
            lock_file: The lock, if the caller has acquired it already.

        Raises:
            LogError: The log is damaged, from a newer version, or another process writes to it.
            DiskError: The disk is full, read-only or failing.
        """
        if limit_bytes is not None:
            if limit_bytes < _MIN_LIMIT_BYTES:
                raise ValueError(f"limit_bytes must be at least {_MIN_LIMIT_BYTES}")
            segment_bytes = min(segment_bytes, limit_bytes // _MIN_SEGMENTS_IN_LIMIT)
        self.directory = os.fspath(directory)
        self.dropped_records = 0
        """Number of records dropped since opening because of the size limit."""
        self._segment_bytes = segment_bytes
        self._segment_seconds = segment_seconds
        self._limit_bytes = limit_bytes
        self._keep_unsynced = keep_unsynced
        self._clock = clock
        self._lock = threading.Lock()
        """Held to append and to drop."""
        self._sync_lock = threading.Lock()
        """Held to sync. Acquired after `_lock`; an append acquires it only to start a new segment."""
        self._failed: DiskError | None = None
        self._closed = False
        self._has_partial_write = False
        """True while bytes of a failed write may follow the end."""
        self._has_partial_segment = False
        """True while the next segment may be partly created."""
        self.lost: list[LostRecords] = []
        """Damaged records that were replaced since the log was opened."""
        self._lock_file = acquire_lock(self.directory) if lock_file is None else lock_file
        try:
            with disk_errors(f"cannot open the log in {self.directory}"):
                self._open(written, log_id, repairs=repairs)
        except BaseException:
            os.close(self._lock_file)
            raise

    def _open(self, written: int, log_id: bytes | None, *, repairs: bool) -> None:
        try:
            found = recover_log(self.directory, written, keep_unsynced=self._keep_unsynced)
        except DamagedLogError:
            if not repairs:
                raise
            self.lost += repair_log(
                self.directory, written=written, log_id=log_id, keep_unsynced=self._keep_unsynced
            )
            found = recover_log(self.directory, written, keep_unsynced=self._keep_unsynced)
        self.recovered = found.lost_bytes
        """Number of bytes of an unfinished write that were cut off when the log was opened."""
        self._sealed = SealedSegments(self.directory, zip(found.sealed, found.sizes, strict=True))
        if found.active is None:
            if written:
                lost = LostRecords(self.directory, 0, 1, written, "all segments are missing", None)
                self.lost.append(lost)
            self._end = self._create(
                SegmentHeader(1, written + 1, 0, self._now_ns(), log_id or os.urandom(16))
            )
            self._has_partial_segment = False
        else:
            self._end = _LogEnd(found.active, found.file, found.offset, found.last)
        self._durable = self._end.last
        self._directory_changed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def first(self) -> int:
        """The oldest position; one more than the last if the log is empty."""
        with self._lock:
            return self._sealed.first(self._end.header)

    @property
    def last(self) -> int:
        """The newest position; 0 if nothing was ever written."""
        return self._end.last

    @property
    def log_id(self) -> bytes:
        """Sixteen random bytes that identify the log."""
        return self._end.header.log_id

    @property
    def durable(self) -> int:
        """The position up to which records survive a power cut."""
        return self._durable

    @property
    def size_bytes(self) -> int:
        """Size of the segments on disk."""
        with self._lock:
            return self._sealed.size_bytes + self._end.offset

    def append(self, kind: int, payload: bytes) -> int:
        """Write one record and return its position. The record then survives the end of the process.

        Raises:
            DiskError: Writing failed and left nothing behind; try again later.
            ValueError: The kind is not in 0..126, or the payload is too large.
        """
        return self.append_many(((kind, payload),))[0]

    def append_many(self, records: Iterable[tuple[int, bytes]]) -> range:
        """Write several records at once and return their positions.

        Raises:
            DiskError: Writing failed and left nothing behind; try again later.
            ValueError: A kind is not in 0..126, or the records together are too large.
        """
        records = tuple(records)
        size = 0
        for kind, payload in records:
            size += RECORD_HEAD_BYTES + len(payload)
            if not 0 <= kind <= MAX_KIND:
                raise ValueError(f"the kind of a record must be between 0 and {MAX_KIND}, not {kind}")
        most = min(MAX_WRITE_BYTES, self._limit_bytes or MAX_WRITE_BYTES) - SEGMENT_HEADER_BYTES
        if size > most:
            raise ValueError(f"cannot write {size} bytes at once: the maximum is {most}")
        with self._lock:
            self._check_usable()
            if self._is_full(size):
                self._rotate(size)
            self._make_room(size)
            end = self._end
            positions = range(end.last + 1, end.last + 1 + len(records))
            marker = end.header.marker
            pieces = [
                piece
                for position, record in zip(positions, records, strict=True)
                for piece in encode_record(
                    marker, position, *record, after_sync=position == self._durable + 1
                )
            ]
            self._write(b"".join(pieces), len(records))
        return positions

    def sync(self) -> int:
        """Wait until everything written so far is on disk, and return its last position.

        Other threads can append during a sync.

        Raises:
            DiskError: It is unknown what is on disk. The log accepts no more records until it is reopened.
        """
        with self._sync_lock:
            self._check_open()
            end, changed = self._end, self._directory_changed
            if end.last == self._durable and not changed:
                return end.last
            try:
                os.fdatasync(end.file)
                if changed:
                    self._directory_changed = False
                    sync_directory(self.directory)
            except OSError as error:
                raise self._fail(error) from error
            self._durable = end.last
            return end.last

    def read(self, start: int = 0) -> Iterator[LogRecord]:
        """Yield the records from a position, or from the oldest one that is left, to the current end.

        Raises:
            LogError: The log is damaged; the records before the damage were yielded.
            DiskError: The log cannot be read.
        """
        with self.follow(start) as cursor:
            yield from cursor

    def follow(self, start: int = 0) -> LogCursor:
        """Return a cursor that can be iterated repeatedly to get new records."""
        return LogCursor(self.directory, start, lambda: self._end.last)

    def rewrite_newest(self) -> None:
        """Write the newest segment again and sync it.

        After a failed sync, the kernel may take pages for written that never reached the disk. They can still be read,
        and a second sync does not write them.

        Raises:
            DiskError: It is unknown what is on disk.
        """
        with self._lock, self._sync_lock, disk_errors(f"cannot write to {self.directory}"):
            self._check_usable()
            for offset in range(0, self._end.offset, _REWRITE_BYTES):
                size = min(_REWRITE_BYTES, self._end.offset - offset)
                write_at(self._end.file, os.pread(self._end.file, size, offset), offset)
            os.fdatasync(self._end.file)

    def find_damaged_segments(self) -> set[int]:
        """Read the whole log, and return the numbers of the damaged segments. Other threads can append meanwhile.

        Raises:
            LogError: A segment has a newer format.
            DiskError: The log cannot be read.
        """
        with self._lock:
            self._check_usable()
            number, end = self._end.header.number, (self._end.offset, self._end.last + 1)
        with disk_errors(f"cannot read the log in {self.directory}"):
            numbers = list_segment_numbers(self.directory, check=False)
            return {
                one
                for one in range(numbers[0], number + 1)
                if find_damaged_records(self.directory, one, end if one == number else None)
            }

    def repair(self, damaged: Collection[int] | None = None) -> list[LostRecords]:
        """Replace damaged records with records without meaning, and return what was lost. Appends wait for it.

        Args:
            damaged: The damaged segments, if they are known, so that the others are not read.

        Raises:
            LogError: The log cannot be repaired.
            DiskError: The log cannot be read or written.
        """
        with self._lock, self._sync_lock, disk_errors(f"cannot repair the log in {self.directory}"):
            self._check_usable()
            end = self._end.offset, self._end.last + 1
            found = repair_log(self.directory, end=end, log_id=self._end.header.log_id, only=damaged)
            self.lost += found
            return found

    def drop_before(self, position: int) -> None:
        """Remove the segments that have no records at or after a position; the newest segment always stays.

        Raises:
            DiskError: A segment could not be removed.
        """
        with self._lock:
            self._check_usable()
            while self._sealed and self._sealed.second(self._end.header) <= position:
                self._drop_oldest()

    def shorten(self, limit_bytes: int, position: int) -> None:
        """Remove the oldest segments while the log exceeds a size, except those with records at or after a position.

        Raises:
            DiskError: A segment could not be removed.
        """
        with self._lock:
            self._check_usable()
            while (
                self._sealed
                and self._sealed.size_bytes + self._end.offset > limit_bytes
                and self._sealed.second(self._end.header) <= position
            ):
                self._drop_oldest()

    def close(self) -> None:
        """Sync and close the log.

        Raises:
            DiskError: It is unknown what is on disk.
        """
        try:
            if not self._closed and self._failed is None:
                self.sync()
        finally:
            with self._lock, self._sync_lock:
                if not self._closed:
                    self._closed = True
                    os.close(self._end.file)
                    os.close(self._lock_file)

    @property
    def _path(self) -> str:
        return segment_path(self.directory, self._end.header.number)

    def _now_ns(self) -> int:
        return max(0, int(self._clock() * 1e9))

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the log in {self.directory} is closed")
        if self._failed is not None:
            raise DiskError(self._failed.message, hint=self._failed.hint)

    def _check_usable(self) -> None:
        self._check_open()
        if self._has_partial_write:
            with disk_errors(f"cannot write {self._path}"):
                os.ftruncate(self._end.file, self._end.offset)
            self._has_partial_write = False

    def _fail(self, error: OSError) -> DiskError:
        """Reject all further use: the kernel reports a failed write only once and then discards the data."""
        message = disk_error(f"cannot sync {self._path}", error).message
        hint = "see `dmesg`, then reopen the log: the last seconds of data may not be on disk"
        self._failed = DiskError(message, hint=hint)
        return self._failed

    def _is_full(self, incoming: int) -> bool:
        end = self._end
        if self._has_partial_segment:
            return True
        if end.last < end.header.first:
            return False
        return (
            end.offset + incoming > self._segment_bytes
            or end.header.version < SEGMENT_VERSION
            or self._clock() - end.header.created_ns / 1e9 >= self._segment_seconds
        )

    def _write(self, data: bytes, count: int) -> None:
        end = self._end
        self._has_partial_write = True
        try:
            write_at(end.file, data, end.offset)
        except OSError as error:
            with suppress(OSError):  # otherwise the next use truncates it
                os.ftruncate(end.file, end.offset)
                self._has_partial_write = False
            raise disk_error(f"cannot write {self._path}", error) from error
        self._end = _LogEnd(end.header, end.file, end.offset + len(data), end.last + count)
        self._has_partial_write = False

    def _rotate(self, incoming: int) -> None:
        """Complete the segment and start the next one."""
        self._make_room(SEGMENT_HEADER_BYTES + incoming)
        with self._sync_lock:
            old = self._end
            try:
                os.fdatasync(old.file)
            except OSError as error:
                raise self._fail(error) from error
            self._durable = old.last
            self._end = self._create(
                SegmentHeader(
                    old.header.number + 1, old.last + 1, old.offset, self._now_ns(), old.header.log_id
                )
            )
            self._sealed.add(old.header, old.offset)
            self._has_partial_segment = False
            os.close(old.file)

    def _create(self, header: SegmentHeader) -> _LogEnd:
        """Start a segment."""
        path = segment_path(self.directory, header.number)
        self._has_partial_segment = True
        try:
            with disk_errors(f"cannot create {path}"):
                file = create_segment(self.directory, header)
        except DiskError:
            self._has_partial_segment = os.path.lexists(path)
            raise
        return _LogEnd(header, file, SEGMENT_HEADER_BYTES, header.first - 1)

    def _make_room(self, incoming: int) -> None:
        if self._limit_bytes is None:
            return
        while self._sealed and self._sealed.size_bytes + self._end.offset + incoming > self._limit_bytes:
            self.dropped_records += self._drop_oldest()

    def _drop_oldest(self) -> int:
        """Remove the oldest segment and return its number of records."""
        first = self._sealed.first(self._end.header)
        self._sealed.drop_oldest()
        self._directory_changed = True
        return self._sealed.first(self._end.header) - first
