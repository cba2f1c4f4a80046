"""Segment files of a log: encoding of records, and the header that links each file to the previous one.

A record is a head of 25 bytes and a payload. The head contains the segment's marker, the kind, the payload's length, the
record's position, the payload's checksum, and a checksum of all these fields. The marker is random for every log, so no
payload, however hostile, can pass for a record. The position makes a copied or moved record invalid.

A record before which everything was synced when it was written has the highest bit of its kind set. A power cut can leave
holes in what was written since the last sync: an invalid record with valid ones after it. If one of those has the bit,
the invalid record was synced, and the file is damaged; otherwise nobody relied on it, and the rest is cut off.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple
from zlib import crc32

from gpulse.atomic_files import sync_directory
from gpulse.errors import LogError
from gpulse.store.disk_errors import write_at

MAX_WRITE_BYTES = 64 << 20
"""Maximum size of one record, or of several records that are written at once."""
_FIELDS = struct.Struct("<4sBIQI")
_CHECK = struct.Struct("<I")
_HEAD = struct.Struct("<4sBIQII")
RECORD_HEAD_BYTES = _HEAD.size
_CHUNK_BYTES = 1 << 20
_NO_LIMIT = 1 << 64
MAX_KIND = 126
DAMAGED = 127
"""Kind of the records that take the place of damaged ones. Their payload has no meaning."""
_KIND_BITS = 127
_AFTER_SYNC = 128


class LogRecord(NamedTuple):
    """One record of a log."""

    position: int
    """Numbered from 1 without gaps over the lifetime of the log."""
    kind: int
    payload: bytes


def encode_record(
    marker: bytes, position: int, kind: int, payload: bytes, *, after_sync: bool = False
) -> tuple[bytes, bytes, bytes]:
    """Return the bytes of one record, in pieces to be joined."""
    stored_kind = kind | _AFTER_SYNC if after_sync else kind
    fields = _FIELDS.pack(marker, stored_kind, len(payload), position, crc32(payload))
    return fields, _CHECK.pack(crc32(fields)), payload


class RecordScan:
    """Reads the records of one segment from an offset, up to the first invalid or incomplete record."""

    def __init__(
        self, file: int, marker: bytes, offset: int, position: int, bound: Callable[[], int] | None = None
    ) -> None:
        self._file = file
        self._marker = marker
        self._bound = bound
        self.offset = offset
        """Offset at which the next record is expected."""
        self.position = position
        """Position of the next record."""
        self.limit = _NO_LIMIT
        """The position up to which the bytes read last were known to be complete."""

    def __iter__(self) -> Iterator[LogRecord]:
        wanted = _CHUNK_BYTES
        while True:
            # Called before the bytes are read: later writes may replace the bytes of a failed write.
            limit = self.limit if self._bound is None else self._bound()
            self.limit = limit
            chunk = os.pread(self._file, wanted, self.offset)
            begin, size, asked, wanted = 0, len(chunk), wanted, _CHUNK_BYTES
            while size - begin >= RECORD_HEAD_BYTES and self.position <= limit:
                marker, kind, length, position, payload_check, head_check = _HEAD.unpack_from(chunk, begin)
                body = begin + RECORD_HEAD_BYTES
                if (
                    marker != self._marker
                    or position != self.position
                    or crc32(chunk[begin : body - _CHECK.size]) != head_check
                    or length > MAX_WRITE_BYTES
                ):
                    return
                end = body + length
                if end > size:
                    wanted = max(_CHUNK_BYTES, end - begin)
                    break
                payload = chunk[body:end]
                if crc32(payload) != payload_check:
                    return
                self.offset += end - begin
                self.position += 1
                begin = end
                yield LogRecord(position, kind & _KIND_BITS, payload)
            if self.position > limit or (not begin and size < asked):
                return


def find_valid_record(file: int, marker: bytes, offset: int) -> int | None:
    """Return the offset of the first valid record at or after an offset, whatever its position; None if there is none."""
    while chunk := os.pread(file, _CHUNK_BYTES + RECORD_HEAD_BYTES - 1, offset):
        begin = chunk.find(marker)
        while begin >= 0:
            if _is_valid_at(file, chunk[begin : begin + RECORD_HEAD_BYTES], offset + begin):
                return offset + begin
            begin = chunk.find(marker, begin + 1)
        offset += _CHUNK_BYTES
    return None


def find_synced_record(file: int, header: SegmentHeader, offset: int) -> int | None:
    """Return the offset of a valid record after an offset that shows that everything before it was synced.

    None if there is none. Segments of version 1 do not have this information, so that any record shows it.
    """
    valid = find_valid_record(file, header.marker, offset)
    while valid is not None and header.version > 1:
        if os.pread(file, 1, valid + len(header.marker))[0] & _AFTER_SYNC:
            break
        valid = find_valid_record(file, header.marker, valid + 1)
    return valid


def _is_valid_at(file: int, head: bytes, offset: int) -> bool:
    if len(head) < RECORD_HEAD_BYTES:
        return False
    length: int
    payload_check: int
    _, _, length, _, payload_check, head_check = _HEAD.unpack(head)
    if crc32(head[: -_CHECK.size]) != head_check or length > MAX_WRITE_BYTES:
        return False
    payload = os.pread(file, length, offset + RECORD_HEAD_BYTES)
    return len(payload) == length and crc32(payload) == payload_check


class DamagedLogError(LogError):
    """A log is damaged; its writer can repair it."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, hint=_DAMAGE_HINT)
        self.reason = reason


_DAMAGE_HINT = (
    "start the head, which repairs its log and keeps all other data, or restore the file from a backup"
)


def damage_error(path: str, offset: int, what: str) -> DamagedLogError:
    """Return the error for damaged bytes."""
    return DamagedLogError(f"{path} is damaged at byte {offset}: {what}", what)


def read_position(file: int, offset: int) -> int:
    """Return the position of the record at an offset, which must be valid."""
    position: int = _HEAD.unpack(os.pread(file, RECORD_HEAD_BYTES, offset))[3]
    return position


SEGMENT_VERSION = 2
_MAGIC = b"\x89gplog\r\n"
_HEADER = struct.Struct("<8sIQQQQ16sI")
SEGMENT_HEADER_BYTES = _HEADER.size
SEGMENT_NAME = re.compile(r"(\d{16})\.log", re.ASCII)
_MAX_LISTINGS = 5
"""How often a directory is listed while segments seem to be missing, since one may have been removed meanwhile."""


class SegmentHeader(NamedTuple):
    """The first 64 bytes of a segment."""

    number: int
    """Numbered from 1 without gaps; also the name of the file."""
    first: int
    """Position of its first record, even if that is not written yet."""
    previous_bytes: int
    """Final size of the previous segment."""
    created_ns: int
    """Creation time in nanoseconds since the epoch."""
    log_id: bytes
    """Sixteen random bytes, the same in all segments of a log."""
    version: int = SEGMENT_VERSION

    @property
    def marker(self) -> bytes:
        """Four bytes at the start of every record of this segment; secret from senders of payloads, and never all zero."""
        return (crc32(self.log_id, self.number) | 1).to_bytes(4, "little")

    def encode(self) -> bytes:
        """Return the header as bytes."""
        text = _HEADER.pack(_MAGIC, self.version, *self[:-1], 0)[:-4]
        return text + crc32(text).to_bytes(4, "little")


def segment_path(directory: str, number: int) -> str:
    """Return the path of a segment."""
    return f"{directory}/{number:016d}.log"


def list_segment_numbers(directory: str, *, check: bool = True) -> list[int]:
    """Return the numbers of the segments in a directory, oldest first; other files are ignored.

    Args:
        directory: The directory of the log.
        check: Whether a missing segment is an error.

    Raises:
        LogError: A segment in between is missing.
        OSError: The directory cannot be read.
    """
    numbers: list[int] = []
    for _ in range(_MAX_LISTINGS):
        names = map(SEGMENT_NAME.fullmatch, os.listdir(directory))
        numbers = sorted(int(name[1]) for name in names if name)
        if not check or not numbers or numbers[-1] - numbers[0] == len(numbers) - 1:
            return numbers
    missing = next(number for number in range(numbers[0], numbers[-1]) if number not in numbers)
    raise DamagedLogError(
        f"{segment_path(directory, missing)} is missing, but earlier and later segments exist",
        "the segment is missing",
    )


def create_segment(directory: str, header: SegmentHeader) -> int:
    """Create a segment whose header is on disk, and return its file descriptor.

    Raises:
        OSError: The segment cannot be created; it is removed again if possible.
    """
    path = segment_path(directory, header.number)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        write_at(file, header.encode(), 0)
        os.fdatasync(file)
        sync_directory(directory)
    except BaseException:
        os.close(file)
        os.unlink(path)
        raise
    return file


def open_segment(directory: str, number: int, *, write: bool = False) -> tuple[int, SegmentHeader | None]:
    """Open a segment and check its header; the header is None if it is incomplete because of a crash or a busy writer.

    Raises:
        LogError: The header is not from gpulse, damaged, or from a newer version.
        OSError: The file cannot be opened.
    """
    path = segment_path(directory, number)
    file = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW)
    try:
        return file, _decode_header(path, number, file)
    except BaseException:
        os.close(file)
        raise


def read_header(directory: str, number: int) -> SegmentHeader | None:
    """Return the header of a segment; None if the file does not exist or its header is incomplete.

    Raises:
        LogError: The header is not from gpulse, damaged, or from a newer version.
        OSError: The file cannot be read.
    """
    with suppress(FileNotFoundError):
        file, header = open_segment(directory, number)
        os.close(file)
        return header
    return None


def read_headers(directory: str) -> list[SegmentHeader]:
    """Return the headers of all segments, oldest first, without a segment that is just being created.

    Raises:
        LogError: A segment is missing, or has no valid header.
        OSError: The segments cannot be read.
    """
    while True:
        headers: list[SegmentHeader] = []
        numbers = list_segment_numbers(directory)
        for number in numbers:
            header = read_header(directory, number)
            if header is not None:
                headers.append(header)
            elif not os.path.exists(segment_path(directory, number)):
                break  # dropped meanwhile: list again
            elif number != numbers[-1]:
                raise unfinished_error(directory, number)
        else:
            return headers


def unfinished_error(directory: str, number: int) -> LogError:
    """Return the error for a segment that has no header although it is not the newest."""
    return damage_error(segment_path(directory, number), 0, "the header is empty, but a newer segment exists")


def _decode_header(path: str, number: int, file: int) -> SegmentHeader | None:
    text = os.pread(file, SEGMENT_HEADER_BYTES, 0)
    begun = len(text) < SEGMENT_HEADER_BYTES and text[: len(_MAGIC)] == _MAGIC[: len(text)]
    if begun or (not any(text) and _is_zero(file)):
        return None
    if len(text) < SEGMENT_HEADER_BYTES:
        raise damage_error(path, 0, "the file is not a segment of a gpulse log")
    magic, version, *fields, check = _HEADER.unpack(text)
    if magic != _MAGIC:
        raise damage_error(path, 0, "the file is not a segment of a gpulse log")
    if version > SEGMENT_VERSION and crc32(text[:-4]) == check:
        raise LogError(
            f"{path} has log format {version}; this version of gpulse reads up to format {SEGMENT_VERSION}",
            hint="use the newer version of gpulse that wrote it, or another directory",
        )
    if version < 1 or crc32(text[:-4]) != check:
        raise damage_error(path, 0, "the header's checksum is wrong")
    header = SegmentHeader(*fields)._replace(version=version)
    if header.number != number:
        raise damage_error(path, 0, f"the file was renamed: it contains segment {header.number}")
    return header


def _is_zero(file: int) -> bool:
    offset = 0
    while chunk := os.pread(file, 1 << 20, offset):
        if chunk.count(0) != len(chunk):
            return False
        offset += len(chunk)
    return True


def check_link(directory: str, older: SegmentHeader, newer: SegmentHeader, older_bytes: int) -> None:
    """Check by headers and sizes that one segment continues the previous one.

    Raises:
        LogError: The segments do not fit together.
    """
    if newer.log_id != older.log_id:
        raise damage_error(segment_path(directory, newer.number), 0, "the segment belongs to another log")
    if newer.first < older.first:
        raise damage_error(segment_path(directory, newer.number), 0, "it starts before the previous segment")
    if older_bytes != newer.previous_bytes:
        raise damage_error(
            segment_path(directory, older.number),
            min(older_bytes, newer.previous_bytes),
            f"the file has {older_bytes} bytes instead of {newer.previous_bytes}",
        )
