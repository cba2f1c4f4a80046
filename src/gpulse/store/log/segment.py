"""The files of a log: their names, the header that ties each to the one before it, and the checks of that chain."""

from __future__ import annotations

import os
import re
import struct
from contextlib import suppress
from typing import NamedTuple
from zlib import crc32

from gpulse.errors import LogError
from gpulse.store.disk import sync_directory, write_at
from gpulse.store.log.record import damaged

VERSION = 1
_MAGIC = b"\x89gplog\r\n"
_HEADER = struct.Struct("<8sIQQQQ16sI")
HEADER_BYTES = _HEADER.size
_NAME = re.compile(r"(\d{16})\.log", re.ASCII)
_LISTINGS = 5
"""How often a directory is listed again when segments seem to be missing, since one may be removed meanwhile."""


class Header(NamedTuple):
    """What the first 64 bytes of a segment say."""

    number: int
    """Counts from 1 without gaps; the file is named after it."""
    first: int
    """The position of its first record, whether or not there is one yet."""
    previous_bytes: int
    """How long the segment before it is: from now on that one never changes."""
    created_ns: int
    """Nanoseconds since the epoch."""
    log_id: bytes
    """Sixteen random bytes, the same in every segment of a log."""

    @property
    def marker(self) -> bytes:
        """Four bytes that begin every record of this segment and that no outsider can know; never all zero."""
        return (crc32(self.log_id, self.number) | 1).to_bytes(4, "little")

    def encode(self) -> bytes:
        """The header as it is written."""
        text = _HEADER.pack(_MAGIC, VERSION, *self, 0)[:-4]
        return text + crc32(text).to_bytes(4, "little")


def segment_path(directory: str, number: int) -> str:
    """The file of a segment."""
    return f"{directory}/{number:016d}.log"


def list_numbers(directory: str) -> list[int]:
    """The numbers of the segments in a directory, oldest first; files of other names are not ours.

    Raises:
        LogError: One between them is missing.
        OSError: The directory cannot be read.
    """
    numbers: list[int] = []
    for _ in range(_LISTINGS):
        names = map(_NAME.fullmatch, os.listdir(directory))
        numbers = sorted(int(name[1]) for name in names if name)
        if not numbers or numbers[-1] - numbers[0] == len(numbers) - 1:
            return numbers
    missing = next(number for number in range(numbers[0], numbers[-1]) if number not in numbers)
    raise LogError(
        f"{segment_path(directory, missing)} is missing: segments before and after it are there",
        hint="restore the file from a copy, or move the whole directory away to begin a new log",
    )


def create_segment(directory: str, header: Header) -> int:
    """Make a segment, complete on disk before anything is written into it.

    Raises:
        OSError: It cannot be made; unless it cannot be removed either, nothing of it is left.
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


def open_segment(directory: str, number: int, *, write: bool = False) -> tuple[int, Header | None]:
    """Open a segment and check its header; None for a header when a crash or a busy writer left it unfinished.

    Raises:
        LogError: The header is not one of ours, damaged, or of a newer version.
        OSError: The file cannot be opened.
    """
    path = segment_path(directory, number)
    file = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW)
    try:
        return file, _decode(path, number, file)
    except BaseException:
        os.close(file)
        raise


def read_header(directory: str, number: int) -> Header | None:
    """The header of a segment; None when the file is not there or not finished.

    Raises:
        LogError: The header is not one of ours, damaged, or of a newer version.
        OSError: The file cannot be read.
    """
    with suppress(FileNotFoundError):
        file, header = open_segment(directory, number)
        os.close(file)
        return header
    return None


def read_headers(directory: str) -> list[Header]:
    """The headers of all segments, oldest first; one that is being made just now is left out.

    Raises:
        LogError: A segment is missing, or has no header that could be ours.
        OSError: They cannot be read.
    """
    while True:
        headers: list[Header] = []
        numbers = list_numbers(directory)
        for number in numbers:
            header = read_header(directory, number)
            if header is not None:
                headers.append(header)
            elif not os.path.exists(segment_path(directory, number)):
                break  # dropped meanwhile: look again
            elif number != numbers[-1]:
                raise unfinished(directory, number)
        else:
            return headers


def unfinished(directory: str, number: int) -> LogError:
    """The error for a segment that has no header though it is not the newest."""
    return damaged(segment_path(directory, number), 0, "the header is empty, and a newer segment is there")


def _decode(path: str, number: int, file: int) -> Header | None:
    text = os.pread(file, HEADER_BYTES, 0)
    begun = len(text) < HEADER_BYTES and text[: len(_MAGIC)] == _MAGIC[: len(text)]
    if begun or (not any(text) and _is_zero(file)):
        return None
    if len(text) < HEADER_BYTES:
        raise damaged(path, 0, "it does not begin like a segment of a gpulse log")
    magic, version, *fields, check = _HEADER.unpack(text)
    if magic != _MAGIC:
        raise damaged(path, 0, "it does not begin like a segment of a gpulse log")
    if version > VERSION:
        raise LogError(
            f"{path} is of format {version} (byte 8); this gpulse reads up to {VERSION}",
            hint="use the newer gpulse that wrote it, or another directory",
        )
    if version != VERSION or crc32(text[:-4]) != check:
        raise damaged(path, 0, "the checksum of the header is wrong")
    header = Header(*fields)
    if header.number != number:
        raise damaged(path, 0, f"it is segment {header.number} under another name")
    return header


def _is_zero(file: int) -> bool:
    offset = 0
    while chunk := os.pread(file, 1 << 20, offset):
        if chunk.count(0) != len(chunk):
            return False
        offset += len(chunk)
    return True


def check_link(directory: str, older: Header, newer: Header, older_bytes: int) -> None:
    """Check that one segment continues the one before it, as far as headers and sizes tell.

    Raises:
        LogError: It does not.
    """
    if newer.log_id != older.log_id:
        raise damaged(segment_path(directory, newer.number), 0, "it belongs to another log")
    if newer.first < older.first:
        raise damaged(segment_path(directory, newer.number), 0, "its positions run backwards")
    if older_bytes != newer.previous_bytes:
        raise damaged(
            segment_path(directory, older.number),
            min(older_bytes, newer.previous_bytes),
            f"it has {older_bytes} bytes instead of {newer.previous_bytes}",
        )
