"""Frames on disk until a head has them: a bounded log of frames, the layouts they need, and notes about their runs.

Each segment of the log begins with notes and has every layout before the first frame that uses it, so that the oldest
segments can go at any time without making the others unreadable.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import NamedTuple

from gpulse.cluster.agent.buffer import Kept, read_notes
from gpulse.cluster.agent.ledger import Ledger, Piece, RunNote
from gpulse.errors import DiskError, LogError
from gpulse.model.columns import layout_id, split
from gpulse.store.disk import disk_errors
from gpulse.store.log.log import Log
from gpulse.store.log.reader import Cursor
from gpulse.store.log.record import HEAD_BYTES, Record
from gpulse.store.log.segment import list_numbers, read_headers, segment_path

FRAME = 1
LAYOUT = 2
NOTES = 3
SEGMENT_NOTES = 4
"""Notes that begin a segment."""
LIMIT_BYTES = 1 << 30
LEAST_LIMIT_BYTES = 1 << 20
_SEGMENT_BYTES = 16 << 20
_SEGMENTS = 8
_FRAME = struct.Struct("<16sQQ")
"""Run, number of the frame, and up to which frame the run was acknowledged when this one was written."""
_DEFAULT_INTERVAL_MS = 1000
_NEAR = 10_000
"""What is at most so many records ahead is read on to; what is further away is looked up."""


class Found(NamedTuple):
    """What a spool held when it was opened."""

    ledger: Ledger
    head: str


class Spool:
    """The one writer of a spool. Reading goes on beside it in other threads."""

    def __init__(self, directory: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> None:
        """Open a spool, or begin one.

        Args:
            directory: Made when it is not there.
            limit_bytes: When it would get larger, its oldest frames go.

        Raises:
            LogError: It is damaged, of a newer version, or another process writes it.
            DiskError: The disk is full, read-only or broken.
        """
        self._segment_bytes = min(_SEGMENT_BYTES, limit_bytes // _SEGMENTS)
        self.log = Log(
            directory, segment_bytes=self._segment_bytes, segment_seconds=inf, limit_bytes=limit_bytes
        )
        self._directory = self.log.directory
        self._segment = 0
        self._written: set[int] = set()
        """The layouts that the present segment has."""

    def scan(self) -> Found:
        """Read everything and say what of it is still to be brought home.

        Raises:
            LogError: It is damaged.
            DiskError: It cannot be read.
        """
        ledger, head = Ledger(), ""
        for record in self.log.read():
            if record.kind == FRAME:
                _take(ledger, record)
            elif record.kind in (NOTES, SEGMENT_NOTES):
                try:
                    notes, head = read_notes(record.payload)
                except ValueError as error:
                    raise LogError(f"the spool in {self._directory} holds something else: {error}") from error
                _merge(ledger, notes)
        return Found(ledger, head)

    def append(
        self, run: bytes, frames: Sequence[Kept], acked: int, texts: Mapping[int, bytes], notes: bytes
    ) -> int:
        """Write frames, and whatever is needed to read them; the position of the first one.

        Args:
            run: Whose they are.
            frames: At least one, in order, not many at once.
            acked: Up to which frame that run is acknowledged.
            texts: All layouts that they use.
            notes: What to say about the runs when this begins a segment.

        Raises:
            DiskError: They could not be written, and nothing of them is left.
        """
        used = dict.fromkeys(layout for frame in frames for layout in frame.layouts)
        records = [(FRAME, _FRAME.pack(run, frame.sequence, acked) + frame.data) for frame in frames]
        layouts = [(LAYOUT, texts[layout]) for layout in used if layout not in self._written]
        if self._begins_segment(layouts + records):
            layouts = [(SEGMENT_NOTES, notes), *((LAYOUT, texts[layout]) for layout in used)]
            self._written.clear()
        positions = self._append([*layouts, *records])
        self._written.update(used)
        return positions[len(layouts)]

    def note(self, notes: bytes) -> None:
        """Write what is known about the runs.

        Raises:
            DiskError: It could not be written.
        """
        record = (NOTES, notes)
        if self._begins_segment([record]):
            record = (SEGMENT_NOTES, notes)
            self._written.clear()
        self._append([record])

    def close(self) -> None:
        """Sync and let go; what cannot be synced is let go all the same."""
        with suppress(DiskError):
            self.log.close()

    def _begins_segment(self, records: Sequence[tuple[int, bytes]]) -> bool:
        """Whether the log will begin a segment for these, by the same rule as its own."""
        if not self._segment:
            self._segment = self._newest()
            return True
        with disk_errors(f"read {self._directory}"):
            size = os.stat(segment_path(self._directory, self._segment)).st_size
        return size + sum(HEAD_BYTES + len(payload) for _, payload in records) > self._segment_bytes

    def _append(self, records: Sequence[tuple[int, bytes]]) -> range:
        try:
            positions = self.log.append_many(records)
        except ValueError as error:
            raise DiskError(
                f"cannot write to the spool: {error}", hint="give it more room: --spool-limit"
            ) from error
        except DiskError:
            self._segment = 0  # whether a segment was begun is not known: the next one writes all it needs
            raise
        newest = self._newest()
        if newest != self._segment:
            self._segment = newest
            if records[0][0] != SEGMENT_NOTES:
                self._segment = 0
        return positions

    def _newest(self) -> int:
        with disk_errors(f"read {self._directory}"):
            return list_numbers(self._directory)[-1]


def _take(ledger: Ledger, record: Record) -> None:
    run, sequence, acked = _FRAME.unpack_from(record.payload)
    if run not in ledger.runs:
        ledger.begin(RunNote(run, "", _DEFAULT_INTERVAL_MS))
    ledger.spooled(record.position, run, sequence)
    ledger.acknowledge(run, acked)


def _merge(ledger: Ledger, notes: Mapping[bytes, RunNote]) -> None:
    """Take over what notes say; runs that they no longer name had nothing left to bring home."""
    for run in [run for run in ledger.runs if run not in notes]:
        ledger.forget(run)
    for run, note in notes.items():
        known = ledger.runs.get(run, note)
        ledger.runs[run] = note._replace(acked=known.acked, last=max(known.last, note.last))
        ledger.acknowledge(run, note.acked)


class SpoolReader:
    """Reads frames back, in order; to be used by one thread at a time."""

    def __init__(self, log: Callable[[], Log | None]) -> None:
        """Prepare to read.

        Args:
            log: The spool's log as of now, None while it cannot be used.
        """
        self._log = log
        self._of: Log | None = None
        self._cursor: Cursor | None = None
        self._records: Iterator[Record] = iter(())
        self._ahead: Record | None = None
        self._passed = 0
        """The position of the last record that was read, and is not to be read next."""
        self.texts: dict[int, bytes] = {}
        """The layouts of what was read last."""

    def read(self, piece: Piece, most_frames: int, most_bytes: int) -> list[Kept]:
        """The frames of a piece, or of what is left of it, from its beginning on.

        Raises:
            LogError: The spool is damaged.
            DiskError: It cannot be read.
        """
        log = self._log()
        if log is None:
            return []
        if log is not self._of or not 0 < piece.position - self._passed <= _NEAR:
            self._seek(log, piece.position)
        frames: list[Kept] = []
        size = 0
        while len(frames) < most_frames and (record := self._next()) is not None:
            run, sequence, _ = _FRAME.unpack_from(record.payload)
            if run != piece.run or sequence < piece.first:
                if frames:
                    self._put_back(record)
                    break
                continue
            size += len(record.payload)
            if sequence > piece.last or (
                frames and (size > most_bytes or sequence != frames[-1].sequence + 1)
            ):
                self._put_back(record)
                break
            frames.append(_kept(sequence, record.payload[_FRAME.size :]))
        self._complete(log, frames)
        return frames

    def close(self) -> None:
        """Let go of the files."""
        cursor, self._cursor, self._of, self._ahead = self._cursor, None, None, None
        self._records = iter(())
        if cursor is not None:
            cursor.close()

    def _seek(self, log: Log, position: int) -> None:
        """Go to the beginning of the segment that holds a position: the layouts are there."""
        self.close()
        with disk_errors(f"read {log.directory}"):
            firsts = [header.first for header in read_headers(log.directory)]
        start = max((first for first in firsts if first <= position), default=0)
        self.texts.clear()
        self._of, self._cursor = log, log.follow(start)
        self._records = iter(self._cursor)

    def _put_back(self, record: Record) -> None:
        self._ahead, self._passed = record, record.position - 1

    def _next(self) -> Record | None:
        record, self._ahead = self._ahead, None
        if record is None:
            record = self._next_frame()
        if record is None and self._cursor is not None:
            self._records = iter(self._cursor)  # what has come since
            record = self._next_frame()
        if record is not None:
            self._passed = record.position
        return record

    def _next_frame(self) -> Record | None:
        for record in self._records:
            if record.kind == FRAME:
                return record
            if record.kind == LAYOUT:
                self.texts[layout_id(record.payload)] = record.payload
            elif record.kind == SEGMENT_NOTES:
                self._forget_layouts()
        return None

    def _forget_layouts(self) -> None:
        """A segment has all the layouts it needs; those of the one before may still belong to frames just read."""
        if len(self.texts) > 1000:
            for layout in list(self.texts)[:-500]:
                del self.texts[layout]

    def _complete(self, log: Log, frames: Sequence[Kept]) -> None:
        """Look for layouts that are not where they belong."""
        missing = {layout for frame in frames for layout in frame.layouts} - self.texts.keys()
        if not missing:
            return
        for record in log.read():
            if record.kind == LAYOUT and (found := layout_id(record.payload)) in missing:
                self.texts[found] = record.payload


def _kept(sequence: int, data: bytes) -> Kept:
    packed = next(split(data))
    layouts = tuple(block.layout for block in packed.blocks)
    return Kept(sequence, data, layouts, packed.time_us - packed.monotonic_us)
