"""Spool: a bounded log on disk of frames that no head has acknowledged, their layouts, and the states of their runs.

Each segment of the log starts with the run states and has every layout before the first frame that uses it, so that
the oldest segments can be dropped at any time without making the others unreadable.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from gpulse.cluster.agent.frame_buffer import BufferedFrame, parse_run_states
from gpulse.cluster.agent.run_index import (
    DEFAULT_INTERVAL_MS,
    AgentRunState,
    DamagedRange,
    RunIndex,
    SpoolRange,
)
from gpulse.errors import DiskError, LogError
from gpulse.model.packed_columns import layout_id, read_frame_times, split_packed_frames
from gpulse.store.disk_errors import disk_errors
from gpulse.store.log.log import Log
from gpulse.store.log.reader import LogCursor
from gpulse.store.log.repair import find_log_id
from gpulse.store.log.segment import (
    DAMAGED,
    RECORD_HEAD_BYTES,
    DamagedLogError,
    LogRecord,
    list_segment_numbers,
    read_headers,
    segment_path,
)

FRAME = 1
LAYOUT = 2
RUN_STATES = 3
SEGMENT_RUN_STATES = 4
"""Run states at the start of a segment."""
DEFAULT_LIMIT_BYTES = 1 << 30
MIN_LIMIT_BYTES = 1 << 20
_MAX_SEGMENT_BYTES = 16 << 20
_MIN_SEGMENTS = 8
_FRAME_HEADER = struct.Struct("<16sQQ")
"""Run ID, frame number, and the last acknowledged number of the run at the time of writing."""
_MAX_SKIPPED_RECORDS = 10_000
"""Up to this many records are skipped by reading on; beyond that the reader seeks."""


_SLOT = struct.Struct("<16sQQ")
"""Run ID, number of its newest frame, and the same number with all bits inverted."""
_SLOTS = 64


class LastFrameFile:
    """File in memory with the number of the newest frame of each run, which a killed agent leaves to the next one.

    The file must be on a filesystem in memory, such as /dev/shm: counting a frame then never waits for a disk, and
    works if the disk is full.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            OSError: The file cannot be created, or is not a regular file of this user.
        """
        self._path = path
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstat(file)
            if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                raise PermissionError(
                    f"{path} must be a regular file that belongs to this user and has no other hard links"
                )
            os.posix_fallocate(file, 0, _SLOT.size * _SLOTS)
            self._memory = mmap.mmap(file, _SLOT.size * _SLOTS)
        finally:
            os.close(file)
        self._offset = 0

    def read(self) -> dict[bytes, int]:
        """Return the newest frame of each run."""
        slots = _SLOT.iter_unpack(self._memory[:])
        return {run: number for run, number, check in slots if any(run) and number ^ check == _ALL_BITS}

    def begin(self, run: bytes) -> None:
        """Start to count the frames of a run; beyond the number of slots, an old run is forgotten."""
        empty = (
            place
            for place in range(0, len(self._memory), _SLOT.size)
            if not any(self._memory[place : place + 16])
        )
        self._offset = next(empty, 0)
        _SLOT.pack_into(self._memory, self._offset, run, 0, _ALL_BITS)

    def count(self, number: int) -> None:
        """Set the newest frame of the run, unless the file is closed."""
        with suppress(ValueError):
            _NUMBER.pack_into(self._memory, self._offset + 16, number, number ^ _ALL_BITS)

    def keep(self, runs: Container[bytes]) -> None:
        """Forget all runs but these."""
        for place in range(0, len(self._memory), _SLOT.size):
            if self._memory[place : place + 16] not in runs:
                self._memory[place : place + _SLOT.size] = bytes(_SLOT.size)

    def close(self, *, remove: bool) -> None:
        """Close the file; remove it if the run has ended and the spool says so."""
        self._memory.close()
        if remove:
            with suppress(OSError):
                os.unlink(self._path)


_NUMBER = struct.Struct("<QQ")
_ALL_BITS = (1 << 64) - 1


_MARK_FILE = "synced"
_MARK = struct.Struct("<16sQI")
"""ID of the log, position up to which it is on disk, and CRC-32 of both."""
_CRC_BYTES = 4


class SyncedMark:
    """File that says up to which position a spool is on disk, so that an end that was cut off is noticed.

    It is written after each sync and not synced itself: what a power cut leaves of it is still true, or is ignored.
    """

    def __init__(self, directory: str) -> None:
        self._path = f"{directory}/{_MARK_FILE}"
        self._written = 0

    def read(self) -> tuple[bytes | None, int]:
        """Return the ID of the log and the position; None and 0 if they are unknown.

        Raises:
            OSError: The file cannot be read.
        """
        with suppress(FileNotFoundError, struct.error), open(self._path, "rb") as file:
            data = file.read()
            log_id, position, check = _MARK.unpack(data)
            if crc32(data[:-_CRC_BYTES]) == check:
                return log_id, position
        return None, 0

    def write(self, log_id: bytes, position: int) -> None:
        """Record a position, unless that fails: the mark is only the second witness."""
        if position <= self._written:
            return
        text = _MARK.pack(log_id, position, 0)[:-_CRC_BYTES]
        with suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(file, text + crc32(text).to_bytes(_CRC_BYTES, "little"), 0)
                self._written = position
            finally:
                os.close(file)


class SpoolContents(NamedTuple):
    """Content of a spool at the time it was opened."""

    run_index: RunIndex
    head: str
    damage: DamagedRange | None = None
    """Damage that cannot be assigned to a run."""


class Spool:
    """The only writer of a spool; other threads may read at the same time."""

    def __init__(self, directory: str | os.PathLike[str], *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        """Open or create a spool.

        Args:
            directory: Created if missing.
            limit_bytes: Maximum size; the oldest frames are dropped beyond it.

        Raises:
            LogError: The spool cannot be repaired, is from a newer version, or in use by another process.
            DiskError: The disk is full, read-only or broken.
        """
        self._segment_bytes = min(_MAX_SEGMENT_BYTES, limit_bytes // _MIN_SEGMENTS)
        self._mark = SyncedMark(os.fspath(directory))
        log_id, written = self._read_mark(os.fspath(directory))
        self.log = Log(
            directory,
            segment_bytes=self._segment_bytes,
            segment_seconds=inf,
            limit_bytes=limit_bytes,
            keep_unsynced=True,
            repairs=True,
            written=written,
            log_id=log_id,
        )
        self._directory = self.log.directory
        self._segment = 0
        self._written: set[int] = set()
        """The layouts that the current segment has."""

    def _read_mark(self, directory: str) -> tuple[bytes | None, int]:
        """Return the ID of the log, if it is known, and the position up to which it was written."""
        with disk_errors(f"cannot read {directory}"):
            log_id, written = self._mark.read()
            found = find_log_id(directory) if os.path.isdir(directory) else None
        return (log_id, written) if found in (None, log_id) else (None, 0)

    def sync(self) -> None:
        """Wait until everything written so far is on disk.

        Raises:
            DiskError: It is unknown what is on disk. The spool must be opened again.
        """
        self._mark.write(self.log.log_id, self.log.sync())

    def scan(self) -> SpoolContents:
        """Read the whole spool, without damaged records, and return which frames are still to be sent.

        Raises:
            LogError: The spool cannot be repaired.
            DiskError: The spool cannot be read.
        """
        try:
            return self._scan()
        except DamagedLogError:
            self.log.repair()
            return self._scan()

    def _scan(self) -> SpoolContents:
        run_index, head = RunIndex(), ""
        scan = _SpoolScan(run_index)
        for record in self.log.read():
            if record.kind == FRAME:
                _index_frame(run_index, record)
                scan.frame(record)
            elif record.kind == DAMAGED:
                scan.damaged()
            elif record.kind in (RUN_STATES, SEGMENT_RUN_STATES):
                try:
                    notes, head = parse_run_states(record.payload)
                except ValueError as error:
                    raise LogError(f"the spool in {self._directory} is damaged: {error}") from error
                _merge_run_states(run_index, notes)
        return SpoolContents(run_index, head, scan.end())

    def append(
        self,
        run: bytes,
        frames: Sequence[BufferedFrame],
        acked: int,
        texts: Mapping[int, bytes],
        notes: bytes,
    ) -> int:
        """Write frames with the layouts that they need; return the position of the first frame.

        Args:
            run: The run of the frames.
            frames: The frames in order: at least one, and not many at once.
            acked: The last acknowledged number of the run.
            texts: All layouts that the frames use.
            notes: The run states, in case this starts a segment.

        Raises:
            DiskError: The frames could not be written; none of them is in the spool.
        """
        used = dict.fromkeys(layout for frame in frames for layout in frame.layouts)
        records = [(FRAME, _FRAME_HEADER.pack(run, frame.sequence, acked) + frame.data) for frame in frames]
        layouts = [(LAYOUT, texts[layout]) for layout in used if layout not in self._written]
        if self._begins_segment(layouts + records):
            layouts = [(SEGMENT_RUN_STATES, notes), *((LAYOUT, texts[layout]) for layout in used)]
            self._written.clear()
        positions = self._append([*layouts, *records])
        self._written.update(used)
        return positions[len(layouts)]

    def note(self, notes: bytes) -> None:
        """Write the run states.

        Raises:
            DiskError: They could not be written.
        """
        record = (RUN_STATES, notes)
        if self._begins_segment([record]):
            record = (SEGMENT_RUN_STATES, notes)
            self._written.clear()
        self._append([record])

    def close(self) -> None:
        """Sync and close the spool, even if the sync fails."""
        with suppress(DiskError):
            self.sync()
        with suppress(DiskError):
            self.log.close()

    def _begins_segment(self, records: Sequence[tuple[int, bytes]]) -> bool:
        """Return whether the log will start a segment for these records, by the same rule as the log itself."""
        if not self._segment:
            self._segment = self._newest()
            return True
        with disk_errors(f"cannot read {self._directory}"):
            size = os.stat(segment_path(self._directory, self._segment)).st_size
        return size + sum(RECORD_HEAD_BYTES + len(payload) for _, payload in records) > self._segment_bytes

    def _append(self, records: Sequence[tuple[int, bytes]]) -> range:
        try:
            positions = self.log.append_many(records)
        except ValueError as error:
            raise DiskError(
                f"cannot write to the spool: {error}", hint="allow a larger spool with --spool-limit"
            ) from error
        except DiskError:
            self._segment = 0  # a segment may have been started: the next write adds all layouts again
            raise
        newest = self._newest()
        if newest != self._segment:
            self._segment = newest
            if records[0][0] != SEGMENT_RUN_STATES:
                self._segment = 0
        return positions

    def _newest(self) -> int:
        with disk_errors(f"cannot read {self._directory}"):
            return list_segment_numbers(self._directory)[-1]


class _SpoolScan:
    """Finds when runs last wrote, and which frames the damaged parts of a spool held, from all frames in order."""

    def __init__(self, run_index: RunIndex) -> None:
        self._run_index = run_index
        self._newest: dict[bytes, tuple[int, int, int]] = {}
        """Number and times of the newest frame, by run; the run with the last frame of all comes last."""
        self._found = False
        self._is_pending = False
        """Whether a damaged part was found and no frame since."""

    def damaged(self) -> None:
        """Record a damaged part."""
        self._found = self._is_pending = True

    def frame(self, record: LogRecord) -> None:
        """Look at the next frame."""
        run, sequence, acked = _FRAME_HEADER.unpack_from(record.payload)
        before, start_us, _ = self._newest.pop(run, (acked, 0, 0))
        time_us, monotonic_us = read_frame_times(record.payload, _FRAME_HEADER.size)
        self._newest[run] = sequence, time_us, monotonic_us
        if self._is_pending:
            self._is_pending = False
            self._add(run, DamagedRange(before + 1, sequence - 1, start_us, time_us))

    def end(self) -> DamagedRange | None:
        """Look at the ends of runs; return damage that cannot be assigned to any run."""
        for run, (number, time_us, monotonic_us) in self._newest.items():
            note = self._run_index.runs.get(run)
            if note is None:
                continue
            self._run_index.runs[run] = note._replace(alive_us=max(note.alive_us, monotonic_us))
            if self._found and note.last > max(number, note.acked):
                self._is_pending = False
                self._add(run, DamagedRange(max(number, note.acked) + 1, note.last, time_us))
        if not self._is_pending:
            return None
        if self._newest and (run := next(reversed(self._newest))) in self._run_index.runs:
            number, time_us, _ = self._newest[run]
            self._add(run, DamagedRange(number + 1, number, time_us))
            return None
        return DamagedRange(0, 0)

    def _add(self, run: bytes, damage: DamagedRange) -> None:
        note = self._run_index.runs[run]
        if damage not in note.damaged:
            self._run_index.runs[run] = note._replace(damaged=(*note.damaged, damage))


def _index_frame(run_index: RunIndex, record: LogRecord) -> None:
    run, sequence, acked = _FRAME_HEADER.unpack_from(record.payload)
    if run not in run_index.runs:
        run_index.begin(AgentRunState(run, "", DEFAULT_INTERVAL_MS))
    run_index.spooled(record.position, run, sequence)
    run_index.acknowledge(run, acked)


def _merge_run_states(run_index: RunIndex, notes: Mapping[bytes, AgentRunState]) -> None:
    """Apply run states; runs that they no longer list had no frames left to send."""
    for run in [run for run in run_index.runs if run not in notes]:
        run_index.forget(run)
    for run, note in notes.items():
        known = run_index.runs.get(run, note)
        damaged = tuple(dict.fromkeys((*known.damaged, *note.damaged)))
        run_index.runs[run] = note._replace(
            acked=known.acked,
            last=max(known.last, note.last),
            alive_us=max(known.alive_us, note.alive_us),
            damaged=damaged,
        )
        run_index.acknowledge(run, note.acked)


class SpoolReader:
    """Reads frames in order; for use by one thread at a time."""

    def __init__(self, log: Callable[[], Log | None]) -> None:
        """Prepare to read.

        Args:
            log: Returns the current log of the spool; None while it cannot be used.
        """
        self._log = log
        self._of: Log | None = None
        self._cursor: LogCursor | None = None
        self._records: Iterator[LogRecord] = iter(())
        self._ahead: LogRecord | None = None
        self._passed = 0
        """Position of the last record that was consumed."""
        self.texts: dict[int, bytes] = {}
        """Layouts of the frames that were read last."""

    def read(self, piece: SpoolRange, max_frames: int, max_bytes: int) -> list[BufferedFrame]:
        """Return the first frames of a range, within the limits.

        Raises:
            LogError: The spool is damaged.
            DiskError: The spool cannot be read.
        """
        log = self._log()
        if log is None:
            return []
        if log is not self._of or not 0 < piece.position - self._passed <= _MAX_SKIPPED_RECORDS:
            self._seek(log, piece.position)
        frames: list[BufferedFrame] = []
        size = 0
        while len(frames) < max_frames and (record := self._next()) is not None:
            run, sequence, _ = _FRAME_HEADER.unpack_from(record.payload)
            if run != piece.run or sequence < piece.first:
                if frames:
                    self._put_back(record)
                    break
                continue
            size += len(record.payload)
            if sequence > piece.last or (
                frames and (size > max_bytes or sequence != frames[-1].sequence + 1)
            ):
                self._put_back(record)
                break
            frames.append(_decode_frame(sequence, record.payload[_FRAME_HEADER.size :]))
        self._complete(log, frames)
        return frames

    def close(self) -> None:
        """Close the files."""
        cursor, self._cursor, self._of, self._ahead = self._cursor, None, None, None
        self._records = iter(())
        if cursor is not None:
            cursor.close()

    def _seek(self, log: Log, position: int) -> None:
        """Go to the start of the segment with a position, because the layouts are there."""
        self.close()
        with disk_errors(f"cannot read {log.directory}"):
            firsts = [header.first for header in read_headers(log.directory)]
        start = max((first for first in firsts if first <= position), default=0)
        self.texts.clear()
        self._of, self._cursor = log, log.follow(start)
        self._records = iter(self._cursor)

    def _put_back(self, record: LogRecord) -> None:
        self._ahead, self._passed = record, record.position - 1

    def _next(self) -> LogRecord | None:
        record, self._ahead = self._ahead, None
        if record is None:
            record = self._next_frame()
        if record is None and self._cursor is not None:
            self._records = iter(self._cursor)  # records written since
            record = self._next_frame()
        if record is not None:
            self._passed = record.position
        return record

    def _next_frame(self) -> LogRecord | None:
        for record in self._records:
            if record.kind == FRAME:
                return record
            if record.kind == LAYOUT:
                self.texts[layout_id(record.payload)] = record.payload
            elif record.kind == SEGMENT_RUN_STATES:
                self._forget_layouts()
        return None

    def _forget_layouts(self) -> None:
        """Drop old layouts at the start of a segment; frames just read may still need those of the last segment."""
        if len(self.texts) > 1000:
            for layout in list(self.texts)[:-500]:
                del self.texts[layout]

    def _complete(self, log: Log, frames: Sequence[BufferedFrame]) -> None:
        """Search the whole log for layouts that are missing from the segment."""
        missing = {layout for frame in frames for layout in frame.layouts} - self.texts.keys()
        if not missing:
            return
        for record in log.read():
            if record.kind == LAYOUT and (found := layout_id(record.payload)) in missing:
                self.texts[found] = record.payload


def _decode_frame(sequence: int, data: bytes) -> BufferedFrame:
    packed = next(split_packed_frames(data))
    layouts = tuple(block.layout for block in packed.blocks)
    return BufferedFrame(sequence, data, layouts, packed.time_us - packed.monotonic_us)
