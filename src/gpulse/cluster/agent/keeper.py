"""Writes frames that no head has acknowledged to the spool, from a thread of its own, and lives with broken disks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path

from gpulse.cluster.agent.buffer import Buffer, Kept
from gpulse.cluster.agent.spool import LIMIT_BYTES, Spool
from gpulse.errors import DiskError, GpulseError, LogError
from gpulse.store.log.log import Log

SPOOL_AFTER_SECONDS = 0.65
_TICK_SECONDS = 0.25
"""Both together, and the writing, stay below the second after which every frame is on disk."""
_RETRY_SECONDS = 1.0
_REOPEN_SECONDS = 5.0
_SYNC_SECONDS = 5.0
_NOTES_SECONDS = 5.0
_CHUNK_FRAMES = 200
_CHUNK_BYTES = 64 << 10

_log = logging.getLogger(__name__)


class Keeper:
    """The thread that spools, and the one that syncs."""

    def __init__(
        self,
        buffer: Buffer,
        directory: Path,
        *,
        limit_bytes: int = LIMIT_BYTES,
        opened: Callable[[], None] = lambda: None,
        found: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to keep.

        Args:
            buffer: Where frames come from.
            directory: Of the spool.
            limit_bytes: How large the spool may get.
            opened: Called in the thread once the spool is open, or cannot be opened.
            found: Called in the thread when frames of earlier runs were found.
        """
        self._buffer = buffer
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._opened = opened
        self._found = found
        self._spool: Spool | None = None
        self._writing = threading.Lock()
        """For those who write to the spool."""
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep, name="gpulse-spool", daemon=True),
            threading.Thread(target=self._sync, name="gpulse-sync", daemon=True),
        ]
        self._trouble: str | None = None
        self._retry_at = 0.0
        self._noted = -1
        self._noted_at = -inf
        self._trimmed = 0
        self._adopted = False
        """Whether the buffer knows of what earlier runs left."""
        self._losses = 0
        self._dropped = 0

    @property
    def log(self) -> Log | None:
        """The spool's log as of now, None while it cannot be used."""
        spool = self._spool
        return None if spool is None else spool.log

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def finish(self, patience_seconds: float) -> bool:
        """Write all that is left and an end marker, and stop; False when the disk is too slow for it."""
        self._ending.set()
        deadline = time.monotonic() + patience_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def note(self) -> None:
        """Write down now what is known of the runs, if the disk takes it."""
        with self._writing:
            spool = self._spool
            if spool is not None and self._trouble is None:
                self._guarded(lambda: self._note(spool, self._buffer.changes, time.monotonic()))

    def _keep(self) -> None:
        self._locked(lambda: self._open(time.monotonic()))
        self._opened()
        while not self._ending.wait(_TICK_SECONDS):
            self._locked(lambda: self._tick(time.monotonic()))
        self._locked(self._end)
        with self._writing:
            spool, self._spool = self._spool, None
        if spool is not None:
            spool.close()

    def _locked(self, step: Callable[[], None]) -> None:
        with self._writing:
            self._guarded(step)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Whatever a disk does, and whatever fault we have, sampling and sending go on."""
        try:
            step()
        except GpulseError as error:
            self._failed(error)
        except Exception as error:  # the guard  # noqa: BLE001
            self._failed(DiskError(f"a fault in gpulse: {error!r}"))

    def _failed(self, error: GpulseError) -> None:
        self._retry_at = time.monotonic() + (_REOPEN_SECONDS if self._spool is None else _RETRY_SECONDS)
        if self._trouble is None:
            hint = f" ({error.hint})" if error.hint else ""
            _log.error("going on in memory alone: %s%s", error.message, hint)
        self._trouble = error.message
        spool = self._spool
        if spool is None:
            return
        try:
            spool.log.sync()
        except GpulseError:  # it takes nothing more: open it again
            self._spool = None
            spool.close()

    def _recovered(self) -> None:
        if self._trouble is not None:
            self._trouble = None
            _log.warning("the spool in %s takes frames again", self._directory)

    def _tick(self, now: float) -> None:
        if now < self._retry_at:
            return
        if self._spool is None:
            self._open(now)
        spool = self._spool
        if spool is None:
            return
        self._trim(spool)  # first, since it may make the room that is missing
        self._write(spool, now - SPOOL_AFTER_SECONDS)
        self._tell_losses()
        changed = self._buffer.changes
        if changed != self._noted and now - self._noted_at >= _NOTES_SECONDS:
            self._note(spool, changed, now)

    def _write(self, spool: Spool, before: float) -> None:
        while True:
            frames, acked = self._buffer.due(before, _CHUNK_FRAMES)
            if not frames:
                return
            frames = _chunk(frames)
            texts = self._buffer.texts(layout for frame in frames for layout in frame.layouts)
            if any(layout not in texts for frame in frames for layout in frame.layouts):
                continue  # acknowledged meanwhile
            position = spool.append(self._buffer.run, frames, acked, texts, self._buffer.notes())
            # Layouts may stand between; frames do not.
            self._buffer.spooled(position, frames[0].sequence, len(frames))
            self._buffer.dropped_before(spool.log.first)
            self._recovered()

    def _note(self, spool: Spool, changed: int, now: float) -> None:
        spool.note(self._buffer.notes())
        self._buffer.dropped_before(spool.log.first)
        self._noted, self._noted_at = changed, now
        self._recovered()

    def _trim(self, spool: Spool) -> None:
        needed = self._buffer.needed_from()
        position = spool.log.last + 1 if needed is None else needed
        if position > self._trimmed:
            spool.log.drop_before(position)
            self._trimmed = position

    def _tell_losses(self) -> None:
        losses = self._buffer.losses
        if losses == self._losses:
            return
        self._losses = losses
        dropped = self._buffer.dropped
        if dropped >= max(self._dropped * 1.5, self._dropped + 1):  # said rarely enough not to fill a log
            _log.warning("there was no room for %d of the oldest frames so far", dropped)
            self._dropped = dropped

    def _open(self, now: float) -> None:
        try:
            spool = Spool(self._directory, limit_bytes=self._limit_bytes)
        except LogError as error:
            self._set_aside(error)
            spool = Spool(self._directory, limit_bytes=self._limit_bytes)
        try:
            if self._adopted:
                self._buffer.cut_after(spool.log.last)
            else:
                found = spool.scan()
                self._buffer.adopt(found.ledger)
                self._adopted = True
                self._buffer.head = self._buffer.head or found.head
        except LogError as error:
            spool.close()
            self._set_aside(error)
            raise
        except BaseException:
            spool.close()
            raise
        is_first, self._trimmed = not self._trimmed, 1
        # From here on it can be read, also where nothing can be written: what is brought home makes room.
        self._spool = spool
        if is_first and len(self._buffer.runs()) > 1:
            self._found()
        self._note(spool, self._buffer.changes, now)

    def _set_aside(self, error: LogError) -> None:
        """A damaged spool is kept for whoever wants to look at it, out of the way."""
        aside = self._directory.with_name(f"{self._directory.name}.damaged-{time.time_ns()}")
        try:
            os.rename(self._directory, aside)
        except OSError as failure:
            raise DiskError(f"cannot move {self._directory} away: {failure.strerror}") from failure
        _log.error("%s; it is now %s, and a new spool is begun", error.message, aside)

    def _end(self) -> None:
        self._buffer.end()
        if self._spool is None:
            self._open(time.monotonic())
        spool = self._spool
        if spool is not None:
            self._write(spool, inf)
            self._note(spool, self._buffer.changes, time.monotonic())

    def _sync(self) -> None:
        """Now and then the disk itself; a slow one must not keep frames from being written."""
        while not self._ending.wait(_SYNC_SECONDS):
            log = self.log
            if log is not None:
                with suppress(GpulseError):  # the next append meets it, too
                    log.sync()


def _chunk(frames: list[Kept]) -> list[Kept]:
    """As many as are written at once."""
    size = 0
    for place, frame in enumerate(frames):
        size += len(frame.data)
        if place and size > _CHUNK_BYTES:
            return frames[:place]
    return frames
