"""Reads a log while it is being written, by the same process or another one, without taking its lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, Self

from gpulse.store.disk import disk_errors
from gpulse.store.log.record import Record, Scan, damaged, find_valid
from gpulse.store.log.segment import (
    HEADER_BYTES,
    Header,
    check_link,
    list_numbers,
    open_segment,
    read_header,
    read_headers,
    segment_path,
    unfinished,
)


class _Place(NamedTuple):
    """The segment a cursor is in."""

    header: Header
    file: int
    scan: Scan


class Cursor:
    """A place in a log. Iterating gives what is there, and iterating again gives what has come since.

    Every record is checked as it is read. Records that were dropped before the cursor came to them are passed over;
    positions have no gaps otherwise, so that the reader sees how many there were.
    """

    def __init__(self, directory: str, start: int = 0, bound: Callable[[], int] | None = None) -> None:
        """Begin at a position.

        Args:
            directory: Where the log is.
            start: The first position wanted.
            bound: Tells up to which position the log is complete, for readers beside the writer in its process. Other
                readers stop at the first thing that is not a whole record, as long as nothing valid follows it.
        """
        self._directory = directory
        self._bound = bound
        self._place: _Place | None = None
        self.position = start
        """The next record's, or the first one wanted."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Record]:
        """Give records up to the present end.

        Raises:
            LogError: The log is damaged; what came before the damage has been given.
            DiskError: It cannot be read.
        """
        with disk_errors(f"read the log in {self._directory}"):
            while place := self._place or self._enter():
                for record in place.scan:
                    if record.position >= self.position:
                        self.position = record.position + 1
                        yield record
                if not self._advance(place):
                    return

    @property
    def reached(self) -> int:
        """The position that was read last, wanted or not."""
        return self._place.scan.position - 1 if self._place else 0

    @property
    def waiting_bytes(self) -> int:
        """How much of the log comes after what was read."""
        with disk_errors(f"read the log in {self._directory}"):
            held = self._place.header.number if self._place else 0
            total = os.fstat(self._place.file).st_size - self._place.scan.offset if self._place else 0
            for number in list_numbers(self._directory):
                if number > held:
                    with suppress(FileNotFoundError):
                        total += os.stat(segment_path(self._directory, number)).st_size
        return total

    def close(self) -> None:
        """Let go of the file."""
        place, self._place = self._place, None
        if place is not None:
            os.close(place.file)

    def _enter(self) -> _Place | None:
        """Open the segment that holds the position, or the oldest; None when there is none yet."""
        while headers := read_headers(self._directory):
            held = [header for header in headers if header.first <= self.position] or headers[:1]
            if self._open(held[-1].number):
                break
        return self._place

    def _open(self, number: int) -> bool:
        """Move to the beginning of a segment; False when it is not there, or not finished."""
        try:
            file, header = open_segment(self._directory, number)
        except FileNotFoundError:
            return False
        if header is None:
            os.close(file)
            return False
        self.close()
        scan = Scan(file, header.marker, HEADER_BYTES, header.first, self._bound)
        self._place = _Place(header, file, scan)
        return True

    def _advance(self, place: _Place) -> bool:
        """Go on after the last record that could be read; False when that is the end of the log for now."""
        header, file, scan = place
        following = header.number + 1
        numbers = list_numbers(self._directory)
        after = read_header(self._directory, following)
        if after is not None:
            return self._pass(place, after)
        if numbers and numbers[-1] >= following and header.number not in numbers:
            self.close()  # it was dropped together with those after it
            return self._enter() is not None
        if numbers and numbers[-1] > following:
            if os.path.exists(segment_path(self._directory, following)):
                raise unfinished(self._directory, following)
            return self._advance(place)  # dropped since the directory was listed
        if self._bound is not None:
            return scan.position <= scan.limit and self._retry(place, "the record is not valid")
        valid = find_valid(file, header.marker, scan.offset)
        return valid is not None and self._retry(
            place, f"the record is not valid, but one at byte {valid} is"
        )

    def _pass(self, place: _Place, after: Header) -> bool:
        """Go on to the next segment, when nothing of this one is left."""
        header, file, scan = place
        # Only now is the end of this segment certain: more may have been written since it was read.
        check_link(self._directory, header, after, os.fstat(file).st_size)
        if scan.position < after.first and scan.offset < after.previous_bytes:
            return self._retry(place, "the record is not valid")
        if (scan.position, scan.offset) != (after.first, after.previous_bytes):
            raise damaged(self._path(place), scan.offset, f"position {after.first} should follow")
        return self._open(after.number) or self._advance(place)

    def _retry(self, place: _Place, what: str) -> bool:
        """Look at the same place again, since the writer may have been busy there; the second time it is damage."""
        scan = place.scan
        again = Scan(place.file, place.header.marker, scan.offset, scan.position)
        if next(iter(again), None) is None:
            raise damaged(self._path(place), scan.offset, what)
        return True

    def _path(self, place: _Place) -> str:
        return segment_path(self._directory, place.header.number)


class LogReader:
    """A log of another process, read-only."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.fspath(directory)

    @property
    def first(self) -> int:
        """The oldest position; one more than the last when the log is empty."""
        with disk_errors(f"read the log in {self.directory}"):
            headers = read_headers(self.directory)
        return headers[0].first if headers else 1

    @property
    def last(self) -> int:
        """The newest position, found by reading the newest segment; 0 when nothing was ever written."""
        with Cursor(self.directory, (1 << 64) - 1) as cursor:
            for _ in cursor:
                pass
            return cursor.reached

    @property
    def size_bytes(self) -> int:
        """What the segments take on disk."""
        total = 0
        with disk_errors(f"read the log in {self.directory}"):
            for number in list_numbers(self.directory):
                with suppress(FileNotFoundError):
                    total += os.stat(segment_path(self.directory, number)).st_size
        return total

    def bytes_after(self, position: int, last: int) -> int:
        """Return about how many bytes come after a position; records of one segment count as equally long.

        Args:
            position: Of the last record that does not count.
            last: The newest position.

        Raises:
            LogError: The log is damaged.
            DiskError: It cannot be read.
        """
        total = 0.0
        with disk_errors(f"read the log in {self.directory}"):
            headers = read_headers(self.directory)
            ends = [*(header.first for header in headers[1:]), last + 1]
            for header, end in zip(headers, ends, strict=True):
                count = end - max(header.first, position + 1)
                if count > 0:
                    with suppress(FileNotFoundError):
                        size = os.stat(segment_path(self.directory, header.number)).st_size
                        total += size * count / (end - header.first)
        return round(total)

    def read(self, start: int = 0) -> Iterator[Record]:
        """Give the records from a position on, up to the present end.

        Raises:
            LogError: The log is damaged; what came before the damage has been given.
            DiskError: It cannot be read.
        """
        with self.follow(start) as cursor:
            yield from cursor

    def follow(self, start: int = 0) -> Cursor:
        """A place in the log that can be asked again and again for what is new."""
        return Cursor(self.directory, start)
