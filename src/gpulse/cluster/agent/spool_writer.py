"""Write unacknowledged frames to the spool in a separate thread, and continue in memory when the disk fails."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path

from gpulse.cluster.agent.frame_buffer import BufferedFrame, FrameBuffer
from gpulse.cluster.agent.run_index import DamagedRange
from gpulse.cluster.agent.spool import DEFAULT_LIMIT_BYTES, LastFrameFile, Spool
from gpulse.errors import DiskError, GpulseError, LogError
from gpulse.store.log.log import Log
from gpulse.store.log.repair import LostRecords

SPOOL_AFTER_SECONDS = 0.85
"""Together with the write this stays below one second: the time within which every frame is on disk."""
_EARLY_SECONDS = 0.25
"""Frames that are due this soon are written together with those that are due."""
_MIN_WAIT_SECONDS = 0.02
_RETRY_SECONDS = 1.0
_REOPEN_SECONDS = 5.0
_SYNC_SECONDS = 5.0
_RUN_STATES_SECONDS = 5.0
_MAX_CHUNK_FRAMES = 200
_MAX_CHUNK_BYTES = 64 << 10

_log = logging.getLogger(__name__)


class SpoolWriter:
    """The thread that writes to the spool, and the thread that syncs it."""

    def __init__(
        self,
        buffer: FrameBuffer,
        directory: Path,
        *,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        last_frame_file: Path | None = None,
        opened: Callable[[], None] = lambda: None,
        found: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to write.

        Args:
            buffer: The frames.
            directory: Directory of the spool.
            limit_bytes: Maximum size of the spool.
            last_frame_file: File in memory that counts the frames, for the next agent; None for none.
            opened: Called in the thread once the spool is open or cannot be opened.
            found: Called in the thread if frames of earlier runs were found.
        """
        self._buffer = buffer
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._last_frame_path = last_frame_file
        self._last_frame: LastFrameFile | None = None
        self._taken: Mapping[bytes, int] = {}
        """The newest frames of earlier runs."""
        self._opened = opened
        self._found = found
        self._spool: Spool | None = None
        self._writing = threading.Lock()
        """Held while writing to the spool."""
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._write_until_end, name="gpulse-spool", daemon=True),
            threading.Thread(target=self._sync, name="gpulse-sync", daemon=True),
        ]
        self._trouble: str | None = None
        self._repaired = ""
        """The damage that was last repaired while the agent was running."""
        self._damage: DamagedRange | None = None
        """Damage that is not reported with the run that it concerns."""
        self._retry_at = 0.0
        self._noted = -1
        self._noted_at = -inf
        self._trimmed = 0
        self._adopted = False
        """Whether the buffer has taken over the frames of earlier runs."""
        self._losses = 0
        self._dropped = 0
        self._is_noted = False
        """Whether the spool says that this run has ended."""

    @property
    def log(self) -> Log | None:
        """The current log of the spool; None while it cannot be used."""
        spool = self._spool
        return None if spool is None else spool.log

    def start(self) -> None:
        """Start the threads."""
        self._count_frames()
        for thread in self._threads:
            thread.start()

    def _count_frames(self) -> None:
        """Read the numbers that killed agents left, and start to count."""
        if self._last_frame_path is None:
            return
        try:
            self._last_frame = LastFrameFile(self._last_frame_path)
        except (OSError, ValueError) as error:
            _log.warning("cannot open the frame counter in %s: %s", self._last_frame_path, error)
            return
        self._taken = self._last_frame.read()
        self._last_frame.begin(self._buffer.run)
        self._buffer.count_taken = self._last_frame.count

    def finish(self, patience_seconds: float) -> bool:
        """Write the remaining frames and the end of the run, and stop; return False if the disk is too slow."""
        self._ending.set()
        deadline = time.monotonic() + patience_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def note(self) -> None:
        """Write the run states to disk now, unless the disk is failing."""
        with self._writing:
            spool = self._spool
            if spool is not None and self._trouble is None:
                self._guarded(lambda: self._note_durably(spool, time.monotonic()))

    def repair(self, error: LogError) -> bool:
        """Set the damaged parts of a spool aside that cannot be read; return whether that worked.

        Args:
            error: Why the spool cannot be read.
        """
        with self._writing:
            spool, self._spool = self._spool, None
            if spool is None or error.message == self._repaired:
                self._spool = spool
                return False
            self._repaired = error.message
            self._guarded(lambda: self._repair(spool, error))
            self._guarded(lambda: self._open(time.monotonic()))
            return self._spool is not None

    def _write_until_end(self) -> None:
        self._locked(lambda: self._open(time.monotonic()))
        self._opened()
        while not self._ending.wait(self.wait_seconds(time.monotonic())):
            self._locked(lambda: self._tick(time.monotonic()))
        self._locked(self._end)
        self._close()

    def _close(self) -> None:
        with self._writing:
            spool, self._spool = self._spool, None
        if spool is not None:
            spool.close()
        last_frame, self._last_frame = self._last_frame, None
        if last_frame is not None:
            last_frame.close(remove=self._is_noted)

    def wait_seconds(self, now: float) -> float:
        """Return the time until a frame must be written; one that is taken meanwhile need not be written earlier."""
        oldest = self._buffer.oldest_unspooled()
        waits = SPOOL_AFTER_SECONDS if oldest is None else oldest + SPOOL_AFTER_SECONDS - now
        return max(_MIN_WAIT_SECONDS, min(waits, SPOOL_AFTER_SECONDS), self._retry_at - now)

    def _locked(self, step: Callable[[], None]) -> None:
        with self._writing:
            self._guarded(step)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step; log its failure, so that sampling and sending continue."""
        try:
            step()
        except GpulseError as error:
            self._failed(error)
        except Exception as error:  # the guard  # noqa: BLE001
            self._failed(DiskError(f"internal error (a bug in gpulse): {error!r}"))

    def _failed(self, error: GpulseError) -> None:
        self._retry_at = time.monotonic() + (_REOPEN_SECONDS if self._spool is None else _RETRY_SECONDS)
        if self._trouble is None:
            hint = f" ({error.hint})" if error.hint else ""
            _log.error(
                "cannot write to the spool, so frames are kept only in memory: %s%s", error.message, hint
            )
        self._trouble = error.message
        spool = self._spool
        if spool is None:
            return
        try:
            spool.sync()
        except GpulseError:  # the log cannot be written any more: open it again
            self._spool = None
            spool.close()

    def _recovered(self) -> None:
        if self._trouble is not None:
            self._trouble = None
            _log.warning("writing to the spool in %s works again", self._directory)

    def _tick(self, now: float) -> None:
        if now < self._retry_at:
            return
        if self._spool is None:
            self._open(now)
        spool = self._spool
        if spool is None:
            return
        self._trim(spool)  # first, because it may free the space that is missing
        self._write(spool, now - SPOOL_AFTER_SECONDS + _EARLY_SECONDS)
        self._log_losses()
        changed = self._buffer.changes
        if changed != self._noted and now - self._noted_at >= _RUN_STATES_SECONDS:
            self._note(spool, changed, now)

    def _write(self, spool: Spool, before: float) -> None:
        while True:
            frames, acked = self._buffer.due(before, _MAX_CHUNK_FRAMES)
            if not frames:
                return
            frames = _first_chunk(frames)
            texts = self._buffer.texts(layout for frame in frames for layout in frame.layouts)
            if any(layout not in texts for frame in frames for layout in frame.layouts):
                continue  # acknowledged meanwhile
            position = spool.append(
                self._buffer.run, frames, acked, texts, self._buffer.notes(time.monotonic_ns() // 1000)
            )
            # There may be layouts in between, but no other frames.
            self._buffer.spooled(position, frames[0].sequence, len(frames))
            self._buffer.dropped_before(spool.log.first)
            self._recovered()

    def _note(self, spool: Spool, changed: int, now: float) -> None:
        spool.note(self._buffer.notes(round(now * 1e6)))
        self._buffer.dropped_before(spool.log.first)
        self._noted, self._noted_at = changed, now
        if self._last_frame is not None:
            self._last_frame.keep({run.note.id for run in self._buffer.runs()})
        self._recovered()

    def _note_durably(self, spool: Spool, now: float) -> None:
        self._note(spool, self._buffer.changes, now)
        spool.sync()

    def _trim(self, spool: Spool) -> None:
        needed = self._buffer.needed_from()
        position = spool.log.last + 1 if needed is None else needed
        if position > self._trimmed:
            spool.log.drop_before(position)
            self._trimmed = position

    def _log_losses(self) -> None:
        losses = self._buffer.losses
        if losses == self._losses:
            return
        self._losses = losses
        dropped = self._buffer.dropped
        if dropped >= max(self._dropped * 1.5, self._dropped + 1):  # rarely enough not to fill the log
            _log.warning(
                "no space for unsent frames; oldest frames dropped so far: %d (to keep more, increase --spool-limit)",
                dropped,
            )
            self._dropped = dropped

    def _open(self, now: float) -> None:
        try:
            spool = self._open_spool()
        except LogError as error:
            self._set_aside(error)
            self._damage = DamagedRange(0, 0)
            spool = self._open_spool()
        is_first, self._trimmed = not self._trimmed, 1
        # From here on it can be read even if nothing can be written: frames that are sent free space.
        self._spool = spool
        if is_first and len(self._buffer.runs()) > 1:
            self._found()
        self._note_durably(spool, now)  # after a power cut, the next agent must know of this run

    def _open_spool(self) -> Spool:
        spool = Spool(self._directory, limit_bytes=self._limit_bytes)
        try:
            if self._adopted:
                self._buffer.cut_after(spool.log.last)
            else:
                found = spool.scan()
                self._buffer.adopt(found.run_index, self._taken, time.monotonic_ns() // 1000)
                if spool.log.lost:
                    self._damage = DamagedRange(1, 0)  # no frames, unless the scan found some
                self._damage = found.damage or self._damage
                if any(note.damaged for note in found.run_index.runs.values()):
                    self._damage = None
                if self._damage is not None:
                    self._buffer.damaged(self._damage)
                self._adopted = True
                self._buffer.head = self._buffer.head or found.head
        except BaseException:
            spool.close()
            raise
        _log_lost_records(spool.log.lost)
        return spool

    def _repair(self, spool: Spool, error: LogError) -> None:
        """Repair the whole spool and close it; set it aside if it cannot be repaired."""
        try:
            _log_lost_records(spool.log.repair())
            spool.close()
        except LogError:
            spool.close()
            self._set_aside(error)
        except BaseException:
            spool.close()
            raise

    def _set_aside(self, error: LogError) -> None:
        """Move a spool that cannot be repaired aside, so that it can be examined."""
        aside = self._directory.with_name(f"{self._directory.name}.damaged-{time.time_ns()}")
        try:
            os.rename(self._directory, aside)
        except OSError as failure:
            raise DiskError(
                f"cannot move the damaged {self._directory} aside: {failure.strerror}"
            ) from failure
        _log.error("%s; moved it to %s and started a new spool", error.message, aside)

    def _end(self) -> None:
        self._buffer.end()
        if self._spool is None:
            self._open(time.monotonic())
        spool = self._spool
        if spool is not None:
            self._write(spool, inf)
            self._note(spool, self._buffer.changes, time.monotonic())
            self._is_noted = True

    def _sync(self) -> None:
        """Sync now and then in a thread of its own, so that a slow disk does not delay writes."""
        while not self._ending.wait(_SYNC_SECONDS):
            spool = self._spool
            if spool is not None:
                with suppress(GpulseError):  # the next append fails, too, and reports it
                    spool.sync()


def _first_chunk(frames: list[BufferedFrame]) -> list[BufferedFrame]:
    """Return the first frames, as many as are written at once."""
    size = 0
    for place, frame in enumerate(frames):
        size += len(frame.data)
        if place and size > _MAX_CHUNK_BYTES:
            return frames[:place]
    return frames


def _log_lost_records(lost: Iterable[LostRecords]) -> None:
    for path, offset, first, last, reason, copy in lost:
        kept = "" if copy is None else f" (the damaged file was copied to {copy})"
        _log.error(
            "%s is damaged at byte %d: %s; records lost: %d%s", path, offset, reason, last - first + 1, kept
        )
