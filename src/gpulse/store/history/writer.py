"""Write the log of a head into segments, merge them, and remove the oldest."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Generator, Sequence
from itertools import takewhile
from typing import Any

from gpulse.errors import LogError
from gpulse.store.disk import disk_errors
from gpulse.store.history import compaction, day_summaries, retention, segment_writer
from gpulse.store.history.layouts import KnownNodes, LayoutLookup
from gpulse.store.history.parquet import connect
from gpulse.store.history.segments import (
    Segment,
    read_segments,
    remove_leftovers,
    remove_stale_summaries,
    sealed_to,
)
from gpulse.store.log.reader import LogReader
from gpulse.store.log.segment import read_headers

_MAX_SEGMENT_BYTES = 64 << 20
"""At most this much of the log goes into one segment, so that it fits in memory."""
_SUMMARY_SECONDS = 5.0
"""Sealing waits about this long at most while files of a summary are made."""
_THIN_SECONDS = 20.0
"""Sealing waits about this long at most while segments are thinned."""
_LOCK_SECONDS = 30.0
"""A process whose head was killed ends within a moment; one that keeps the lock for longer belongs to another head."""


class HistoryWriter:
    """The one writer of a history directory, which it locks."""

    def __init__(self, data_dir: str, metadata: KnownNodes) -> None:
        """Lock the directory and remove what an ended process left behind.

        Args:
            data_dir: The data directory of a head.
            metadata: Its layouts and nodes.

        Raises:
            GpulseError: The directory is damaged, or another process has the lock.
        """
        self.history = f"{data_dir}/history"
        self._summary: Generator[str | None, None, None] | None = None
        """The summary that is being made."""
        self._log = LogReader(f"{data_dir}/log")
        self._layouts = LayoutLookup(self._log, metadata)
        with disk_errors(f"write {self.history}"):
            os.makedirs(self.history, mode=0o700, exist_ok=True)
        self._lock = _lock(f"{self.history}/lock")
        try:
            self.tidied = [*remove_leftovers(self.history), *remove_stale_summaries(self.history)]
            segments = read_segments(self.history)
            self.sealed_to = sealed_to(segments)
            self._check_log(segments)
            self._database = connect(f"{self.history}/.unfinished-spill")
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Release the directory."""
        self._stop_summary()
        self._database.close()
        os.close(self._lock)

    def seal(self, position: int) -> dict[str, Any]:
        """Seal the log up to a position that is on disk."""
        made, missing, unreadable = [], 0, 0
        log = self._log_number()
        with self._log.follow(self.sealed_to + 1) as cursor:
            records = takewhile(lambda record: record.position <= position, iter(cursor))
            while self.sealed_to < position:
                pending = segment_writer.collect(
                    records, self._layouts, self.sealed_to + 1, max_bytes=_MAX_SEGMENT_BYTES
                )
                if pending.last <= self.sealed_to:
                    raise LogError(
                        f"the log in {self._log.directory} ends at {self.sealed_to}, before {position}",
                        hint="only what is on disk in the log can be sealed",
                    )
                segment = segment_writer.write_segment(
                    self._database, self.history, log, pending, self._layouts
                )
                made.append(segment.name)
                missing += pending.missing
                unreadable += pending.unreadable + pending.blocks.unreadable
                self.sealed_to = segment.last
        return {"sealed_to": self.sealed_to, "segments": made, "missing": missing, "unreadable": unreadable}

    def compact(self) -> dict[str, Any]:
        """Merge the oldest segments that make up an hour, or else summarise the oldest day, if there is one."""
        merged = compaction.compact(self._database, self.history, read_segments(self.history))
        return {"compacted": merged or self._summarise()}

    def _summarise(self) -> list[str]:
        """Continue the summary of a day for a few seconds, since sealing must not wait; return its name when it is done."""
        if self._summary is None:
            segments = read_segments(self.history)
            self._summary = day_summaries.summarise(self._database, self.history, segments)
        deadline = time.monotonic() + _SUMMARY_SECONDS
        try:
            for name in self._summary:
                if name is not None:
                    self._summary = None
                    return [name]
                if time.monotonic() >= deadline:
                    return []
        except BaseException:
            self._summary = None
            raise
        self._summary = None
        return []

    def _stop_summary(self) -> None:
        """Discard an unfinished summary."""
        unfinished, self._summary = self._summary, None
        if unfinished is not None:
            unfinished.close()

    def retain(
        self,
        now: float,
        keep_seconds: float | None,
        limit_bytes: int | None,
        whole_seconds: float | None = None,
        sent: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        """Thin old segments and remove the oldest; the arguments are those of `SealClient.retain`."""
        thinned: list[str] = []
        try:
            if whole_seconds is not None:
                self._thin(now, whole_seconds, sent, thinned)
        finally:
            removed = retention.apply_retention(
                self.history, now=now, keep_seconds=keep_seconds, limit_bytes=limit_bytes
            )
            if removed or thinned:
                self._stop_summary()  # it may be of these segments
        return {"removed": removed, "thinned": thinned}

    def _thin(self, now: float, whole_seconds: float, sent: tuple[int, int] | None, done: list[str]) -> None:
        """Thin the oldest segments for a few seconds, since sealing must not wait."""
        deadline = time.monotonic() + _THIN_SECONDS
        segments = read_segments(self.history)
        for segment in retention.thinnable(segments, now=now, whole_seconds=whole_seconds, sent=sent):
            retention.thin(self._database, self.history, segment)
            done.append(segment.name)
            if time.monotonic() >= deadline:
                break

    def _log_number(self) -> str:
        with disk_errors(f"read the log in {self._log.directory}"):
            is_there = os.path.isdir(self._log.directory)
            headers = read_headers(self._log.directory) if is_there else []
        return headers[-1].log_id.hex() if headers else ""

    def _check_log(self, segments: Sequence[Segment]) -> None:
        log = self._log_number()
        if segments and log and segments[-1].log != log:
            raise LogError(
                f"{self.history} was made from another log than {self._log.directory}",
                hint="move one of the two directories away",
            )


def _lock(path: str) -> int:
    with disk_errors(f"open {path}"):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(file)
                raise LogError(
                    f"another process seals into {os.path.dirname(path)}", hint="stop that process first"
                ) from None
            time.sleep(0.05)
