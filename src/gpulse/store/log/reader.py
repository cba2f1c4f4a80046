"""Reader of a log that may be written at the same time, by this or another process. It does not need the lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, Self

from gpulse.store.disk_errors import disk_errors
from gpulse.store.log.segment import (
    SEGMENT_HEADER_BYTES,
    LogRecord,
    RecordScan,
    SegmentHeader,
    check_link,
    damage_error,
    find_synced_record,
    list_segment_numbers,
    open_segment,
    read_header,
    read_headers,
    segment_path,
    unfinished_error,
)


class _OpenSegment(NamedTuple):
    """The segment that a cursor is reading."""

    header: SegmentHeader
    file: int
    scan: RecordScan


class LogCursor:
    """A read position in a log. Iterating yields the existing records; iterating again yields those added since.

    Every record is checked as it is read. Records that were dropped before the cursor reached them are skipped. Positions
    have no other gaps, so a reader can tell how many were dropped.
    """

    def __init__(self, directory: str, start: int = 0, bound: Callable[[], int] | None = None) -> None:
        """Start at a position.

        Args:
            directory: The directory of the log.
            start: The first position to read.
            bound: Returns the position up to which the log is complete, for readers in the writer's process. Other
                readers stop at the first incomplete record, provided that no valid record follows it.
        """
        self._directory = directory
        self._bound = bound
        self._place: _OpenSegment | None = None
        self.position = start
        """The position of the next record to yield."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[LogRecord]:
        """Yield records up to the current end.

        Raises:
            LogError: The log is damaged; the records before the damage were yielded.
            DiskError: The log cannot be read.
        """
        with disk_errors(f"cannot read the log in {self._directory}"):
            while place := self._place or self._enter():
                for record in place.scan:
                    if record.position >= self.position:
                        self.position = record.position + 1
                        yield record
                if not self._advance(place):
                    return

    @property
    def reached(self) -> int:
        """The position that was read last, even if it was not yielded."""
        return self._place.scan.position - 1 if self._place else 0

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes of the log after the last record that was read."""
        with disk_errors(f"cannot read the log in {self._directory}"):
            held = self._place.header.number if self._place else 0
            total = os.fstat(self._place.file).st_size - self._place.scan.offset if self._place else 0
            for number in list_segment_numbers(self._directory):
                if number > held:
                    with suppress(FileNotFoundError):
                        total += os.stat(segment_path(self._directory, number)).st_size
        return total

    def close(self) -> None:
        """Close the file."""
        place, self._place = self._place, None
        if place is not None:
            os.close(place.file)

    def _enter(self) -> _OpenSegment | None:
        """Open the segment that contains the position, or the oldest one; None if there is no segment yet."""
        while headers := read_headers(self._directory):
            held = [header for header in headers if header.first <= self.position] or headers[:1]
            if self._open(held[-1].number):
                break
        return self._place

    def _open(self, number: int) -> bool:
        """Move to the start of a segment; return False if it does not exist or is not complete."""
        try:
            file, header = open_segment(self._directory, number)
        except FileNotFoundError:
            return False
        if header is None:
            os.close(file)
            return False
        self.close()
        scan = RecordScan(file, header.marker, SEGMENT_HEADER_BYTES, header.first, self._bound)
        self._place = _OpenSegment(header, file, scan)
        return True

    def _advance(self, place: _OpenSegment) -> bool:
        """Continue after the last readable record; return False at the current end of the log."""
        header, file, scan = place
        following = header.number + 1
        numbers = list_segment_numbers(self._directory)
        after = read_header(self._directory, following)
        if after is not None:
            return self._pass(place, after)
        if numbers and numbers[-1] >= following and header.number not in numbers:
            self.close()  # it was dropped together with later ones
            return self._enter() is not None
        if numbers and numbers[-1] > following:
            if os.path.exists(segment_path(self._directory, following)):
                raise unfinished_error(self._directory, following)
            return self._advance(place)  # dropped since the directory was listed
        if self._bound is not None:
            return scan.position <= scan.limit and self._retry(place, "the record is invalid")
        valid = find_synced_record(file, header, scan.offset)
        return valid is not None and self._retry(
            place, f"the record is invalid, but a valid record follows at byte {valid}"
        )

    def _pass(self, place: _OpenSegment, after: SegmentHeader) -> bool:
        """Continue with the next segment if this one is read completely."""
        header, file, scan = place
        # Only now is the end of this segment certain: records may have been written since it was read.
        check_link(self._directory, header, after, os.fstat(file).st_size)
        if scan.position < after.first and scan.offset < after.previous_bytes:
            return self._retry(place, "the record is invalid")
        if (scan.position, scan.offset) != (after.first, after.previous_bytes):
            raise damage_error(
                self._path(place),
                scan.offset,
                f"the record at position {after.first} should follow here, but does not",
            )
        return self._open(after.number) or self._advance(place)

    def _retry(self, place: _OpenSegment, what: str) -> bool:
        """Read the same record again, since the writer may have been writing it; if it is still invalid, it is damaged."""
        scan = place.scan
        again = RecordScan(place.file, place.header.marker, scan.offset, scan.position)
        if next(iter(again), None) is None:
            raise damage_error(self._path(place), scan.offset, what)
        return True

    def _path(self, place: _OpenSegment) -> str:
        return segment_path(self._directory, place.header.number)


class LogReader:
    """Read-only access to a log, which another process may write."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.fspath(directory)

    @property
    def first(self) -> int:
        """The oldest position; one more than the last if the log is empty."""
        with disk_errors(f"cannot read the log in {self.directory}"):
            headers = read_headers(self.directory)
        return headers[0].first if headers else 1

    @property
    def last(self) -> int:
        """The newest position, found by reading the newest segment; 0 if nothing was ever written."""
        with LogCursor(self.directory, (1 << 64) - 1) as cursor:
            for _ in cursor:
                pass
            return cursor.reached

    @property
    def size_bytes(self) -> int:
        """Size of the segments on disk."""
        total = 0
        with disk_errors(f"cannot read the log in {self.directory}"):
            for number in list_segment_numbers(self.directory):
                with suppress(FileNotFoundError):
                    total += os.stat(segment_path(self.directory, number)).st_size
        return total

    def bytes_after(self, position: int, last: int) -> int:
        """Estimate the number of bytes after a position, as if all records of a segment had the same size.

        Args:
            position: Count the records after this one.
            last: The newest position.

        Raises:
            LogError: The log is damaged.
            DiskError: The log cannot be read.
        """
        total = 0.0
        with disk_errors(f"cannot read the log in {self.directory}"):
            headers = read_headers(self.directory)
            ends = [*(header.first for header in headers[1:]), last + 1]
            for header, end in zip(headers, ends, strict=True):
                count = end - max(header.first, position + 1)
                if count > 0:
                    with suppress(FileNotFoundError):
                        size = os.stat(segment_path(self.directory, header.number)).st_size
                        total += size * count / (end - header.first)
        return round(total)

    def read(self, start: int = 0) -> Iterator[LogRecord]:
        """Yield the records from a position to the current end.

        Raises:
            LogError: The log is damaged; the records before the damage were yielded.
            DiskError: The log cannot be read.
        """
        with self.follow(start) as cursor:
            yield from cursor

    def follow(self, start: int = 0) -> LogCursor:
        """Return a cursor that can be iterated repeatedly to get new records."""
        return LogCursor(self.directory, start)
