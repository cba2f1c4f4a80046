"""Repair a damaged log in place: records without meaning take the place of damaged ones, so that everything else stays.

A replacement fills exactly the bytes and the positions that are damaged. Offsets, sizes and the links between segments
therefore stay as they were, and processes that read the log at the same time are not disturbed. The damaged file is copied
to the directory of damaged files first.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

from gpulse.atomic_files import sync_directory
from gpulse.errors import LogError
from gpulse.store.damage import free_damaged_path
from gpulse.store.disk_errors import write_at
from gpulse.store.log.segment import (
    DAMAGED,
    MAX_WRITE_BYTES,
    RECORD_HEAD_BYTES,
    SEGMENT_HEADER_BYTES,
    DamagedLogError,
    RecordScan,
    SegmentHeader,
    create_segment,
    encode_record,
    find_synced_record,
    find_valid_record,
    list_segment_numbers,
    open_segment,
    read_header,
    read_position,
    segment_path,
)

_COPY_BYTES = 1 << 20


class LostRecords(NamedTuple):
    """Damaged records of a log that were replaced."""

    path: str
    offset: int
    first: int
    """Position of the first lost record."""
    last: int
    """Position of the last lost record; less than the first if only a header was damaged."""
    reason: str
    copy: str | None
    """The copy of the damaged file."""


class _OpenEnd(NamedTuple):
    """The end of a log that is being written."""

    offset: int
    next_position: int


def repair_log(
    directory: str,
    *,
    written: int = 0,
    end: tuple[int, int] | None = None,
    log_id: bytes | None = None,
    keep_unsynced: bool = False,
    only: Collection[int] | None = None,
) -> list[LostRecords]:
    """Replace what is damaged in a log, and return it. Only for the writer of the log.

    What a power cut left of writes that were not synced is not replaced: `recover_log` cuts it off.

    Args:
        directory: The directory of the log.
        written: The position up to which records are known to have been written.
        end: For a log that is open: the offset in the newest segment and the position at which the next record is written.
        log_id: The ID of the log if it is known from elsewhere.
        keep_unsynced: Keep valid records after an invalid one, even if they were never synced.
        only: The numbers of the damaged segments, if they are known; the others are not read.

    Raises:
        LogError: The log has a newer format, or cannot be repaired.
        OSError: The log cannot be read or written.
    """
    numbers = list_segment_numbers(directory, check=False)
    if not numbers:
        return []
    repair = _Repair(directory, numbers, log_id, keep_unsynced=keep_unsynced)
    for number in range(numbers[0], numbers[-1] + 1):
        if only is not None and number not in only and repair.skip(number):
            continue
        repair.segment(number, written, None if end is None else _OpenEnd(*end))
    sync_directory(directory)
    return repair.lost


def find_log_id(directory: str) -> bytes | None:
    """Return the ID of a log from the first header that is not damaged; None if there is none.

    Raises:
        LogError: A segment has a newer format.
        OSError: The log cannot be read.
    """
    for number in list_segment_numbers(directory, check=False):
        with suppress(DamagedLogError):
            header = read_header(directory, number)
            if header is not None:
                return header.log_id
    return None


def find_damaged_records(
    directory: str, number: int, end: tuple[int, int] | None = None
) -> list[LostRecords]:
    """Return what is damaged in one segment, without changing it. Its writer may be running.

    Args:
        directory: The directory of the log.
        number: The segment.
        end: For the newest segment of a log that is open: an offset and the position of the record that is written there.

    Raises:
        LogError: The segment has a newer format.
        OSError: The segment cannot be read.
    """
    path = segment_path(directory, number)
    try:
        file, header = open_segment(directory, number)
    except DamagedLogError as error:
        return [LostRecords(path, 0, 0, -1, error.reason, None)]
    except FileNotFoundError:
        numbers = list_segment_numbers(directory, check=False)
        is_dropped = not numbers or number < numbers[0]
        return [] if is_dropped else [LostRecords(path, 0, 0, -1, "the segment is missing", None)]
    try:
        newer = None
        with suppress(DamagedLogError):  # reported for that segment
            newer = read_header(directory, number + 1)
        if header is None:
            if number == max(list_segment_numbers(directory, check=False)):
                return []  # it is being created
            return [LostRecords(path, 0, 0, -1, "the header is empty", None)]
        return [
            LostRecords(path, one.begin, one.first, one.last, "a record is invalid", None)
            for one in _find_regions(
                file, header, newer, 0, None if end is None else _OpenEnd(*end), is_replaced=False
            )
        ]
    finally:
        os.close(file)


class _Repair:
    """The repair of one log, segment by segment."""

    def __init__(
        self, directory: str, numbers: list[int], log_id: bytes | None, *, keep_unsynced: bool
    ) -> None:
        self._directory = directory
        self._keep_unsynced = keep_unsynced
        self._newest = numbers[-1]
        self.lost: list[LostRecords] = []
        self._headers: dict[int, SegmentHeader] = {}
        self._reasons: dict[int, str] = {}
        """What is wrong with the headers of the other segments."""
        for number in range(numbers[0], numbers[-1] + 1):
            self._read_header(number)
        ids = [header.log_id for header in self._headers.values()]
        self._log_id = max(set(ids), key=ids.count) if ids else log_id
        for number, header in list(self._headers.items()):
            if header.log_id != self._log_id:
                self._reasons[number] = "the segment belongs to another log"
                del self._headers[number]
        self._next = 0
        """The position after the previous segment; 0 if that is unknown."""
        self._size = 0
        """The size of the previous segment."""

    def _read_header(self, number: int) -> None:
        try:
            file, header = open_segment(self._directory, number)
            os.close(file)
        except FileNotFoundError:
            self._reasons[number] = "the segment is missing"
        except DamagedLogError as error:
            self._reasons[number] = error.reason
        else:
            if header is None:
                self._reasons[number] = "the header is empty"
            else:
                self._headers[number] = header

    def skip(self, number: int) -> bool:
        """Skip a segment that is known to be undamaged; return False if it must be read to repair the next one."""
        newer = self._headers.get(number + 1)
        if number not in self._headers or (newer is None and number != self._newest):
            return False
        if newer is not None:
            self._next, self._size = newer.first, newer.previous_bytes
        return True

    def segment(self, number: int, written: int, end: _OpenEnd | None) -> None:
        """Repair one segment."""
        path = segment_path(self._directory, number)
        newer = self._headers.get(number + 1)
        copy: list[str | None] = []

        def keep() -> str | None:
            if not copy:
                copy.append(_copy_aside(path))
            return copy[0]

        header = self._headers.get(number)
        reason = self._reasons.get(number)
        if header is None:
            if reason != "the segment is missing":
                keep()
            header = self._make_header(number, newer, written)
            if header is None:
                return  # nothing is known about it and no record is left
            if reason == "the segment is missing":
                os.close(create_segment(self._directory, header))
        elif self._size and (header.previous_bytes != self._size or header.first < self._next):
            # The previous segment could not get its old size back.
            header = header._replace(previous_bytes=self._size, first=max(header.first, self._next))
            keep()
            reason = "its reference to the previous segment is wrong"
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if reason is not None:
                write_at(file, header.encode(), 0)
                self._headers[number] = header
                if reason != "the segment is missing":
                    copied = keep()
                    self.lost.append(LostRecords(path, 0, header.first, header.first - 1, reason, copied))
            for region in _find_regions(
                file,
                header,
                newer,
                written if number == self._newest else 0,
                end if number == self._newest else None,
                is_replaced=True,
                stops_unsynced=number == self._newest and end is None and not self._keep_unsynced,
            ):
                if (
                    number == self._newest
                    and end is not None
                    and region.filled_bytes != region.stop - region.begin
                ):
                    raise LogError(
                        f"cannot repair {path} because another process is writing to it: its size has changed",
                        hint="restart the head, which then repairs the file",
                    )
                copied = None if reason == "the segment is missing" else keep()
                what = reason or (
                    "records are missing" if region.begin >= _size(file) else "a record is invalid"
                )
                self.lost.append(LostRecords(path, region.begin, region.first, region.last, what, copied))
                _replace(file, header.marker, region)
            os.fdatasync(file)
            scan = RecordScan(file, header.marker, SEGMENT_HEADER_BYTES, header.first)
            for _ in scan:
                pass
            self._next, self._size = scan.position, scan.offset
        finally:
            os.close(file)

    def _make_header(self, number: int, newer: SegmentHeader | None, written: int) -> SegmentHeader | None:
        """Return a header for a segment whose own is damaged or missing; None if nothing is known about it."""
        log_id, first, path = self._log_id, self._next, segment_path(self._directory, number)
        if os.path.exists(path):
            log_id, found = _find_first(path, number, log_id)
            first = first or found
        if not first:
            first = newer.first - 1 if newer is not None else written
        if log_id is None:
            log_id = os.urandom(16)
        self._log_id = log_id
        return SegmentHeader(number, first, self._size, 0, log_id) if first > 0 else None


def _find_first(path: str, number: int, log_id: bytes | None) -> tuple[bytes | None, int]:
    """Return the ID of the log and the first position of a segment without a usable header, from its records.

    The ID is the known one, or the one in the damaged header if records confirm it.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        own = os.pread(file, 16, SEGMENT_HEADER_BYTES - 20)
        for one in (log_id, own):
            if one is None or len(one) < 16:
                continue
            marker = SegmentHeader(number, 0, 0, 0, one).marker
            valid = find_valid_record(file, marker, SEGMENT_HEADER_BYTES)
            if valid is not None:
                position = read_position(file, valid)
                return one, position if valid == SEGMENT_HEADER_BYTES else max(1, position - 1)
    finally:
        os.close(file)
    return log_id, 0


class _Region(NamedTuple):
    """A damaged region of a segment, and the positions of the records that were in it."""

    begin: int
    stop: int
    """The offset at which it ends; may be beyond the end of the file."""
    first: int
    last: int
    """Less than the first if the region has bytes that do not belong there, but no record is missing."""
    is_tail: bool = False
    """Whether nothing valid follows it."""

    @property
    def filled_bytes(self) -> int:
        """The size of its replacement: that of the region, if all replacement records fit."""
        needed = RECORD_HEAD_BYTES * (self.last - self.first + 1)
        return max(needed, self.stop - self.begin) if needed else 0


def _find_regions(
    file: int,
    header: SegmentHeader,
    newer: SegmentHeader | None,
    written: int,
    end: _OpenEnd | None,
    *,
    is_replaced: bool,
    stops_unsynced: bool = False,
) -> Iterator[_Region]:
    """Yield the damaged regions; with `is_replaced`, each must be replaced before the next one is requested.

    With `stops_unsynced`, stop at an invalid record that was never synced: it is no damage, and what follows it is cut off.
    """
    scan = RecordScan(file, header.marker, SEGMENT_HEADER_BYTES, header.first)
    while True:
        for _ in scan:
            pass
        begin, position = scan.offset, scan.position
        valid = _find_following(file, header.marker, begin, position) if begin < _size(file) else None
        if end is not None and begin >= end.offset:
            return  # what follows is being written
        if stops_unsynced and position > written and find_synced_record(file, header, begin) is None:
            return
        if valid is not None:
            region = _Region(begin, valid, position, read_position(file, valid) - 1)
            yield region
            scan.offset = begin + region.filled_bytes if is_replaced else valid
            scan.position = region.last + 1
            continue
        following = max(position, written + 1) if end is None else end.next_position
        stop = begin if end is None else end.offset
        if newer is not None:
            stop, following = max(begin, newer.previous_bytes), max(position, newer.first)
        is_foreign = newer is not None or find_valid_record(file, header.marker, begin) is not None
        if following > position or (is_foreign and _size(file) > begin):
            yield _Region(begin, stop, position, following - 1, is_tail=True)
        return


def _find_following(file: int, marker: bytes, offset: int, position: int) -> int | None:
    """Return the offset of the first valid record at or after a position; None if there is none."""
    valid = find_valid_record(file, marker, offset)
    while valid is not None and read_position(file, valid) < position:
        valid = find_valid_record(file, marker, valid + 1)
    return valid


def _replace(file: int, marker: bytes, region: _Region) -> None:
    """Replace a region; what follows it moves only if the replacement has another size."""
    begin, stop, first, last, is_tail = region
    size = region.filled_bytes
    tail = b""
    if is_tail:
        os.ftruncate(file, begin)
    elif size != stop - begin:
        tail = os.pread(file, _size(file) - stop, stop)
        os.ftruncate(file, begin)
    offset = begin
    spare = size - RECORD_HEAD_BYTES * (last - first + 1)
    for position in range(first, last + 1):
        room = min(spare, MAX_WRITE_BYTES - RECORD_HEAD_BYTES)
        spare -= room
        data = b"".join(encode_record(marker, position, DAMAGED, bytes(room)))
        write_at(file, data, offset)
        offset += len(data)
    if tail:
        write_at(file, tail, offset)


def _size(file: int) -> int:
    return os.fstat(file).st_size


def _copy_aside(path: str) -> str:
    """Copy a damaged segment to the directory of damaged files, which is beside the log."""
    directory = os.path.dirname(path)
    target = free_damaged_path(
        os.path.dirname(directory), f"{os.path.basename(directory)}-{os.path.basename(path)}"
    )
    with open(path, "rb") as damaged, open(target, "wb") as copy:
        while chunk := damaged.read(_COPY_BYTES):
            copy.write(chunk)
        copy.flush()
        os.fsync(copy.fileno())
    sync_directory(os.path.dirname(target))
    return target
