"""What was measured on one worker, as the scheduler keeps it: compressed lines in memory, and on disk beyond a limit."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

_BLOCK_BYTES = 1 << 16
"""Lines are compressed together once they are so long."""
_LEVEL = 1
_PAGE_BYTES = 1 << 21


class Record:
    """Lines in the order in which they came; blocks of them have numbers that never change."""

    def __init__(self, path: str | None = None, limit: int | None = None) -> None:
        """Begin an empty record.

        Args:
            path: The file for what does not stay in memory.
            limit: How many measurements stay in memory at most; all when None.
        """
        self._path = path
        self._limit = limit
        self._tail = bytearray()
        self._blocks: list[bytes] = []
        self._in_memory = 0
        self._ends: list[int] = [0]
        """Where the blocks in the file end."""
        self.measurements = 0
        self.last: float | None = None
        """The timestamp of the newest."""
        self.trouble: str | None = None
        """Why the file cannot be written; everything stays in memory then."""

    def add(self, lines: bytes, measurements: int, last: float) -> None:
        """Append whole lines."""
        self._tail += lines
        self.measurements += measurements
        self._in_memory += measurements
        self.last = last
        if len(self._tail) >= _BLOCK_BYTES:
            self._press()
        if self._limit is not None and self._in_memory >= self._limit:
            self._dump()

    def page(self, position: int) -> tuple[list[bytes], int | None]:
        """Some compressed blocks from one on, and the number of the block to go on with; None at the end.

        What the file has lost is left out, and told by `trouble`.
        """
        blocks: list[bytes] = []
        size = 0
        for block in self._from(position):
            blocks.append(block)
            position += 1
            size += len(block)
            if size >= _PAGE_BYTES:
                return blocks, position
        if self._tail:
            blocks.append(zlib.compress(self._tail, _LEVEL))
        return blocks, None

    def close(self) -> None:
        """Forget everything, on disk as well."""
        self._tail.clear()
        self._blocks.clear()
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)

    def _from(self, position: int) -> Iterator[bytes]:
        filed = len(self._ends) - 1
        if position < filed:
            yield from self._filed(position)
        yield from self._blocks[max(0, position - filed) :]

    def _filed(self, position: int) -> Iterator[bytes]:
        """Blocks of the file; what is not in it any more is an empty one, so that the others keep their numbers."""
        sizes = [end - start for start, end in pairwise(self._ends[position:])]
        try:
            with open(self._path or "", "rb") as file:
                file.seek(self._ends[position])
                blocks = [file.read(size) for size in sizes]
        except OSError:
            blocks = [b""] * len(sizes)
        for block, size in zip(blocks, sizes, strict=True):
            if len(block) < size:
                self.trouble = f"{self._path} was removed or cut off: what was in it is lost"
            yield block if len(block) == size else zlib.compress(b"")

    def _press(self) -> None:
        if self._tail:
            self._blocks.append(zlib.compress(self._tail, _LEVEL))
            self._tail.clear()

    def _dump(self) -> None:
        """Move what is in memory to the file, all of it or nothing."""
        if self._path is None:
            return
        self._press()
        try:
            with open(self._path, "ab") as file:
                if file.tell() < self._ends[-1]:
                    raise OSError(errno.EIO, "it was removed or cut off")
                file.truncate(self._ends[-1])
                file.write(b"".join(self._blocks))
        except OSError as error:
            self.trouble = f"cannot write {self._path}: {error.strerror or error}; the record stays in memory"
            return
        self.trouble = None
        for block in self._blocks:
            self._ends.append(self._ends[-1] + len(block))
        self._blocks.clear()
        self._in_memory = 0


def unpacked(block: bytes) -> bytes:
    """The lines of a block."""
    return zlib.decompress(block)
