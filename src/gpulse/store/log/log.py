"""An append-only log on disk: what append() returned for survives kill -9, what sync() returned for a power cut.

A directory of segments (`segment.py`) of records (`record.py`) and a lock file. Opening checks the headers and sizes of
all segments and every record of the newest; records of older segments are checked when they are read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple, Self

from gpulse.errors import ClosedError, DiskError
from gpulse.store.disk import disk_error, disk_errors, sync_directory, write_at
from gpulse.store.log.lock import take_lock
from gpulse.store.log.reader import Cursor
from gpulse.store.log.record import HEAD_BYTES, MOST_BYTES, Record, frame
from gpulse.store.log.recovery import recover
from gpulse.store.log.sealed import SealedSegments
from gpulse.store.log.segment import HEADER_BYTES, Header, create_segment, segment_path

_SEGMENT_BYTES = 64 << 20
_SEGMENT_SECONDS = 3600.0
_LEAST_LIMIT_BYTES = 64 << 10
_SEGMENTS_IN_LIMIT = 8
"""A bounded log has at least so many segments, so that little more than needed is dropped at a time."""


class _End(NamedTuple):
    """Where the next record goes. Replaced as a whole, so that an interrupt never leaves half of it."""

    header: Header
    file: int
    offset: int
    last: int


class Log:
    """The one writer of a log; safe to use from several threads.

    A segment is complete on disk before the next one is begun, so the append that begins one waits for the disk. No
    other append does.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        segment_bytes: int = _SEGMENT_BYTES,
        segment_seconds: float = _SEGMENT_SECONDS,
        limit_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open a log, or begin one.

        Args:
            directory: Made when it is not there.
            segment_bytes: A new segment is begun when one would get longer, though never for less than one record.
            segment_seconds: The same for its age.
            limit_bytes: When the log would get longer, its oldest segments are dropped.
            clock: Seconds since the epoch, for the age of segments.

        Raises:
            LogError: It is damaged, of a newer version, or another process writes it.
            DiskError: The disk is full, read-only or broken.
        """
        if limit_bytes is not None:
            if limit_bytes < _LEAST_LIMIT_BYTES:
                raise ValueError(f"limit_bytes must be at least {_LEAST_LIMIT_BYTES}")
            segment_bytes = min(segment_bytes, limit_bytes // _SEGMENTS_IN_LIMIT)
        self.directory = os.fspath(directory)
        self.dropped_records = 0
        """How many were removed since the log was opened because it reached its limit."""
        self._segment_bytes = segment_bytes
        self._segment_seconds = segment_seconds
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._lock = threading.Lock()
        """For those who append or drop."""
        self._sync_lock = threading.Lock()
        """For those who sync. Taken after the other one, and by an append only to begin a new segment."""
        self._failed: DiskError | None = None
        self._closed = False
        self._uncut = False
        """True while bytes after the end may belong to a write that failed."""
        self._unmade = False
        """True while the next segment may exist by half."""
        self._lock_file = take_lock(self.directory)
        try:
            with disk_errors(f"open the log in {self.directory}"):
                self._open()
        except BaseException:
            os.close(self._lock_file)
            raise

    def _open(self) -> None:
        found = recover(self.directory)
        self.recovered = found.lost_bytes
        """How many bytes of an unfinished write were cut off when the log was opened."""
        self._sealed = SealedSegments(self.directory, zip(found.sealed, found.sizes, strict=True))
        if found.active is None:
            self._end = self._create(Header(1, 1, 0, self._now_ns(), os.urandom(16)))
            self._unmade = False
        else:
            self._end = _End(found.active, found.file, found.offset, found.last)
        self._durable = self._end.last
        self._directory_changed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def first(self) -> int:
        """The oldest position; one more than the last when the log is empty."""
        with self._lock:
            return self._sealed.first(self._end.header)

    @property
    def last(self) -> int:
        """The newest position; 0 when nothing was ever written."""
        return self._end.last

    @property
    def durable(self) -> int:
        """Up to which position a power cut costs nothing."""
        return self._durable

    @property
    def size_bytes(self) -> int:
        """What the segments take on disk."""
        with self._lock:
            return self._sealed.size_bytes + self._end.offset

    def append(self, kind: int, payload: bytes) -> int:
        """Write one record and give its position; it then outlives the process.

        Raises:
            DiskError: It could not be written, and nothing of it is left. It can be tried again.
            ValueError: The kind is not 0..255, or the payload is too large.
        """
        return self.append_many(((kind, payload),))[0]

    def append_many(self, records: Iterable[tuple[int, bytes]]) -> range:
        """Write several records at once and give their positions.

        Raises:
            DiskError: They could not be written, and nothing of them is left. It can be tried again.
            ValueError: A kind is not 0..255, or the records are too large together.
        """
        records = tuple(records)
        size = 0
        for kind, payload in records:
            size += HEAD_BYTES + len(payload)
            if not 0 <= kind <= 255:
                raise ValueError(f"the kind of a record must be 0..255, not {kind}")
        most = min(MOST_BYTES, self._limit_bytes or MOST_BYTES) - HEADER_BYTES
        if size > most:
            raise ValueError(f"{size} bytes are too many to be written at once; at most {most} are allowed")
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
                for piece in frame(marker, position, *record)
            ]
            self._write(b"".join(pieces), len(records))
        return positions

    def sync(self) -> int:
        """Wait until what was written so far is on disk, and give the last position of it.

        Others can append meanwhile.

        Raises:
            DiskError: It is not certain what is on disk: the log takes nothing more until it is opened again.
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

    def read(self, start: int = 0) -> Iterator[Record]:
        """Give the records from a position on, or from the oldest that is left, up to the present end.

        Raises:
            LogError: The log is damaged; what came before the damage has been given.
            DiskError: It cannot be read.
        """
        with self.follow(start) as cursor:
            yield from cursor

    def follow(self, start: int = 0) -> Cursor:
        """A place in the log that can be asked again and again for what is new."""
        return Cursor(self.directory, start, lambda: self._end.last)

    def drop_before(self, position: int) -> None:
        """Remove the segments that hold nothing at or after a position; the newest always stays.

        Raises:
            DiskError: One could not be removed.
        """
        with self._lock:
            self._check_usable()
            while self._sealed and self._sealed.second(self._end.header) <= position:
                self._drop_oldest()

    def shorten(self, limit_bytes: int, position: int) -> None:
        """Remove the oldest segments while the log is longer than that, except those that hold a position or later ones.

        Raises:
            DiskError: One could not be removed.
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
        """Sync and let go; the log cannot be used afterwards.

        Raises:
            DiskError: It is not certain what is on disk.
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
        if self._uncut:
            with disk_errors(f"write {self._path}"):
                os.ftruncate(self._end.file, self._end.offset)
            self._uncut = False

    def _fail(self, error: OSError) -> DiskError:
        """From now on every use is refused: the kernel forgets what it failed to write, and says so only once."""
        told = disk_error(f"sync {self._path}", error)
        hint = "the last seconds may not be on disk: see `dmesg`, then open the log again"
        self._failed = DiskError(told.message, hint=hint)
        return self._failed

    def _is_full(self, incoming: int) -> bool:
        end = self._end
        if self._unmade:
            return True
        if end.last < end.header.first:
            return False
        return (
            end.offset + incoming > self._segment_bytes
            or self._clock() - end.header.created_ns / 1e9 >= self._segment_seconds
        )

    def _write(self, data: bytes, count: int) -> None:
        end = self._end
        self._uncut = True
        try:
            write_at(end.file, data, end.offset)
        except OSError as error:
            with suppress(OSError):  # else the next use begins with it
                os.ftruncate(end.file, end.offset)
                self._uncut = False
            raise disk_error(f"write {self._path}", error) from error
        self._end = _End(end.header, end.file, end.offset + len(data), end.last + count)
        self._uncut = False

    def _rotate(self, incoming: int) -> None:
        """Seal the segment and begin the next one."""
        self._make_room(HEADER_BYTES + incoming)
        with self._sync_lock:
            old = self._end
            try:
                os.fdatasync(old.file)
            except OSError as error:
                raise self._fail(error) from error
            self._durable = old.last
            self._end = self._create(
                Header(old.header.number + 1, old.last + 1, old.offset, self._now_ns(), old.header.log_id)
            )
            self._sealed.add(old.header, old.offset)
            self._unmade = False
            os.close(old.file)

    def _create(self, header: Header) -> _End:
        """Begin a segment."""
        path = segment_path(self.directory, header.number)
        self._unmade = True
        try:
            with disk_errors(f"create {path}"):
                file = create_segment(self.directory, header)
        except DiskError:
            self._unmade = os.path.lexists(path)
            raise
        return _End(header, file, HEADER_BYTES, header.first - 1)

    def _make_room(self, incoming: int) -> None:
        if self._limit_bytes is None:
            return
        while self._sealed and self._sealed.size_bytes + self._end.offset + incoming > self._limit_bytes:
            self.dropped_records += self._drop_oldest()

    def _drop_oldest(self) -> int:
        """Remove a segment; gives how many records were in it."""
        first = self._sealed.first(self._end.header)
        self._sealed.drop_oldest()
        self._directory_changed = True
        return self._sealed.first(self._end.header) - first
