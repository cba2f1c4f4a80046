"""What a writer finds when it opens a log: a sound chain of segments, perhaps with an unfinished write to cut off."""

from __future__ import annotations

import os
from typing import NamedTuple

from gpulse.store.log.record import Scan, damaged, find_valid
from gpulse.store.log.segment import (
    HEADER_BYTES,
    Header,
    check_link,
    list_numbers,
    open_segment,
    segment_path,
    unfinished,
)


class Found(NamedTuple):
    """A log after recovery."""

    sealed: tuple[Header, ...] = ()
    sizes: tuple[int, ...] = ()
    """Of the sealed segments, in bytes."""
    active: Header | None = None
    """The newest segment's; None when the log is to be begun."""
    file: int = -1
    offset: int = 0
    """Where the next record goes."""
    last: int = 0
    lost_bytes: int = 0
    """Of an unfinished write, cut off."""


def recover(directory: str) -> Found:
    """Check the chain of segments and every record of the newest, and cut off what a crash left unfinished.

    Raises:
        LogError: Anything but the very end is damaged.
        OSError: It cannot be read or cut.
    """
    numbers = list_numbers(directory)
    lost_bytes = 0
    if numbers and (unmade_bytes := _unmade_bytes(directory, numbers[-1])) is not None:
        path = segment_path(directory, numbers[-1])
        if len(numbers) == 1 and numbers[0] > 1:
            raise damaged(path, 0, "the header is empty, and no segment before it is left")
        os.unlink(path)
        numbers.pop()
        lost_bytes = unmade_bytes
    if not numbers:
        return Found(lost_bytes=lost_bytes)
    headers, sizes = zip(*(_measure(directory, number) for number in numbers), strict=True)
    for older, newer, size in zip(headers, headers[1:], sizes, strict=False):
        check_link(directory, older, newer, size)
    file, _ = open_segment(directory, numbers[-1], write=True)
    try:
        scan, cut_bytes = _cut(segment_path(directory, numbers[-1]), file, headers[-1])
    except BaseException:
        os.close(file)
        raise
    return Found(
        headers[:-1], sizes[:-1], headers[-1], file, scan.offset, scan.position - 1, lost_bytes + cut_bytes
    )


def _unmade_bytes(directory: str, number: int) -> int | None:
    """The length of a segment whose header was never finished; None when it was."""
    file, header = open_segment(directory, number)
    try:
        return os.fstat(file).st_size if header is None else None
    finally:
        os.close(file)


def _measure(directory: str, number: int) -> tuple[Header, int]:
    file, header = open_segment(directory, number)
    try:
        if header is None:
            raise unfinished(directory, number)
        return header, os.fstat(file).st_size
    finally:
        os.close(file)


def _cut(path: str, file: int, header: Header) -> tuple[Scan, int]:
    """Read the newest segment to its end, and cut off what is not a whole record there."""
    scan = Scan(file, header.marker, HEADER_BYTES, header.first)
    for _ in scan:
        pass
    rest = os.fstat(file).st_size - scan.offset
    if rest:
        valid = find_valid(file, header.marker, scan.offset)
        if valid is not None:
            raise damaged(path, scan.offset, f"the record is not valid, but one at byte {valid} is")
        os.ftruncate(file, scan.offset)
    os.fdatasync(file)
    return scan, rest
