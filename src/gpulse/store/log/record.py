"""One record of a log as bytes: how it is framed, and how a run of them is read and checked.

A record is a head of 25 bytes and a payload. The head holds the segment's marker, the kind, the payload's length, the
record's position, the payload's checksum, and a checksum over all of these. The marker is random for every log: no
payload, however hostile, can look like a record. The position makes a record that was copied or moved invalid.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple
from zlib import crc32

from gpulse.errors import LogError

MOST_BYTES = 64 << 20
"""The most that one record, or one batch of records, may take."""
_FIELDS = struct.Struct("<4sBIQI")
_CHECK = struct.Struct("<I")
_HEAD = struct.Struct("<4sBIQII")
HEAD_BYTES = _HEAD.size
_CHUNK = 1 << 20
_NO_LIMIT = 1 << 64


class Record(NamedTuple):
    """One entry of a log."""

    position: int
    """Counts from 1 without gaps, for as long as the log exists."""
    kind: int
    payload: bytes


def frame(marker: bytes, position: int, kind: int, payload: bytes) -> tuple[bytes, bytes, bytes]:
    """The bytes of one record, in pieces that are to be joined."""
    fields = _FIELDS.pack(marker, kind, len(payload), position, crc32(payload))
    return fields, _CHECK.pack(crc32(fields)), payload


class Scan:
    """Reads records of one segment from an offset on, up to the first thing that is not the next whole record."""

    def __init__(
        self, file: int, marker: bytes, offset: int, position: int, bound: Callable[[], int] | None = None
    ) -> None:
        self._file = file
        self._marker = marker
        self._bound = bound
        self.offset = offset
        """Where the next record begins, or should."""
        self.position = position
        """The next record's."""
        self.limit = _NO_LIMIT
        """Up to which position the bytes looked at last were known to be complete."""

    def __iter__(self) -> Iterator[Record]:
        wanted = _CHUNK
        while True:
            # Asked before the bytes are read: what is written later may replace bytes that a failed write left.
            limit = self.limit if self._bound is None else self._bound()
            self.limit = limit
            chunk = os.pread(self._file, wanted, self.offset)
            begin, size, asked, wanted = 0, len(chunk), wanted, _CHUNK
            while size - begin >= HEAD_BYTES and self.position <= limit:
                marker, kind, length, position, payload_check, head_check = _HEAD.unpack_from(chunk, begin)
                body = begin + HEAD_BYTES
                if (
                    marker != self._marker
                    or position != self.position
                    or crc32(chunk[begin : body - _CHECK.size]) != head_check
                    or length > MOST_BYTES
                ):
                    return
                end = body + length
                if end > size:
                    wanted = max(_CHUNK, end - begin)
                    break
                payload = chunk[body:end]
                if crc32(payload) != payload_check:
                    return
                self.offset += end - begin
                self.position += 1
                begin = end
                yield Record(position, kind, payload)
            if self.position > limit or (not begin and size < asked):
                return


def find_valid(file: int, marker: bytes, offset: int) -> int | None:
    """Where, from an offset on, the first whole valid record begins, whatever its position."""
    while chunk := os.pread(file, _CHUNK + HEAD_BYTES - 1, offset):
        begin = chunk.find(marker)
        while begin >= 0:
            if _valid_at(file, chunk[begin : begin + HEAD_BYTES], offset + begin):
                return offset + begin
            begin = chunk.find(marker, begin + 1)
        offset += _CHUNK
    return None


def _valid_at(file: int, head: bytes, offset: int) -> bool:
    if len(head) < HEAD_BYTES:
        return False
    length: int
    payload_check: int
    _, _, length, _, payload_check, head_check = _HEAD.unpack(head)
    if crc32(head[: -_CHECK.size]) != head_check or length > MOST_BYTES:
        return False
    payload = os.pread(file, length, offset + HEAD_BYTES)
    return len(payload) == length and crc32(payload) == payload_check


def damaged(path: str, offset: int, what: str) -> LogError:
    """The error for bytes that are not what was written."""
    return LogError(
        f"{path} is damaged at byte {offset}: {what}",
        hint="what comes before it can still be read; restore the file from a copy, or move the whole directory "
        "away to begin a new log",
    )
