"""The process that turns the log into Parquet files: `python -m gpulse.store.history.seal_process DATA_DIR`.

It reads one JSON object a line from its standard input and answers each with one. It ends when its input is closed, at
once and whatever it is doing: what was not renamed does not exist.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from itertools import takewhile
from typing import Any

from gpulse.errors import DiskError, GpulseError, LogError
from gpulse.store.disk import disk_errors
from gpulse.store.history import compaction, conversion, day_summaries, retention
from gpulse.store.history.layouts import Words
from gpulse.store.history.parquet import connect
from gpulse.store.history.segments import Segment, read_segments, remove_lost_summaries, sealed_to, tidy
from gpulse.store.log.reader import LogReader
from gpulse.store.log.segment import read_headers

_PR_SET_PDEATHSIG = 1
_NICE = 19
_SEGMENT_BYTES = 64 << 20
"""So much of the log at most goes into one segment, so that it can be held in memory."""
_SUM_SECONDS = 5.0
"""So long at once a summary is worked on, about; it is made file by file."""
_THIN_SECONDS = 20.0
"""So long at once segments are thinned, about."""
_LOCK_SECONDS = 30.0
"""A process whose head was killed ends within a moment; one that stays that long belongs to somebody else."""


class Workshop:
    """What the process can do. One is open at a time for a directory."""

    def __init__(self, data_dir: str) -> None:
        """Take the directory and remove what an ended process left behind.

        Raises:
            GpulseError: It is damaged, or another process has it.
        """
        self.history = f"{data_dir}/history"
        self._summing: Generator[str | None, None, None] | None = None
        """The summary that is being made."""
        self._log = LogReader(f"{data_dir}/log")
        self._words = Words(self._log, f"{data_dir}/book.sqlite")
        with disk_errors(f"write {self.history}"):
            os.makedirs(self.history, mode=0o700, exist_ok=True)
        self._lock = _lock(f"{self.history}/lock")
        try:
            self.tidied = [*tidy(self.history), *remove_lost_summaries(self.history)]
            segments = read_segments(self.history)
            self.sealed_to = sealed_to(segments)
            self._check_log(segments)
            self._database = connect(f"{self.history}/.unfinished-spill")
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Let go of the directory."""
        self._stop_summing()
        self._database.close()
        os.close(self._lock)

    def seal(self, position: int) -> dict[str, Any]:
        """Seal everything up to a position that is on disk in the log."""
        made, missing, unreadable = [], 0, 0
        log = self._log_number()
        with self._log.follow(self.sealed_to + 1) as cursor:
            records = takewhile(lambda record: record.position <= position, iter(cursor))
            while self.sealed_to < position:
                haul = conversion.collect(records, self._words, self.sealed_to + 1, most_bytes=_SEGMENT_BYTES)
                if haul.last <= self.sealed_to:
                    raise LogError(
                        f"the log in {self._log.directory} ends at {self.sealed_to}, before {position}",
                        hint="only what is on disk in the log can be sealed",
                    )
                segment = conversion.write_segment(self._database, self.history, log, haul, self._words)
                made.append(segment.name)
                missing += haul.missing
                unreadable += haul.unreadable + haul.piles.unreadable
                self.sealed_to = segment.last
        return {"sealed_to": self.sealed_to, "segments": made, "missing": missing, "unreadable": unreadable}

    def compact(self) -> dict[str, Any]:
        """Merge the oldest segments that make up an hour, or else sum up a day; nothing when there is none."""
        merged = compaction.compact(self._database, self.history, read_segments(self.history))
        return {"compacted": merged or self._summed()}

    def _summed(self) -> list[str]:
        """Go on with the summary of a day, for a moment: sealing must not wait long. Gives its name when it is there."""
        if self._summing is None:
            segments = read_segments(self.history)
            self._summing = day_summaries.summarise(self._database, self.history, segments)
        deadline = time.monotonic() + _SUM_SECONDS
        try:
            for name in self._summing:
                if name is not None:
                    self._summing = None
                    return [name]
                if time.monotonic() >= deadline:
                    return []
        except BaseException:
            self._summing = None
            raise
        self._summing = None
        return []

    def _stop_summing(self) -> None:
        """Begin anew next time."""
        unfinished, self._summing = self._summing, None
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
        """Thin old segments, and remove the oldest."""
        thinned: list[str] = []
        try:
            if whole_seconds is not None:
                self._thin(now, whole_seconds, sent, thinned)
        finally:
            removed = retention.apply_retention(
                self.history, now=now, keep_seconds=keep_seconds, limit_bytes=limit_bytes
            )
            if removed or thinned:
                self._stop_summing()  # some of them may belong to the summary
        return {"removed": removed, "thinned": thinned}

    def _thin(self, now: float, whole_seconds: float, sent: tuple[int, int] | None, done: list[str]) -> None:
        """Take what a time-series database has out of the oldest segments, for a while: sealing must not wait long."""
        deadline = time.monotonic() + _THIN_SECONDS
        segments = read_segments(self.history)
        for segment in retention.thinnable(segments, now=now, whole_seconds=whole_seconds, sent=sent):
            retention.thin(self._database, self.history, segment)
            done.append(segment.name)
            if time.monotonic() >= deadline:
                break

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks for."""
        match request:
            case {"do": "seal", "to": int(position)}:
                return self.seal(position)
            case {"do": "compact"}:
                return self.compact()
            case {"do": "retain", **asked}:
                return self.retain(**asked)
        raise GpulseError(f"the sealing process was asked for {request!r}")

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


def _requests() -> Iterator[str]:
    """Lines of the input, read by a thread that ends the process when there will be no more."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _refusal(error: GpulseError) -> dict[str, Any]:
    kind = "disk" if isinstance(error, DiskError) else "log" if isinstance(error, LogError) else "other"
    return {"error": error.message, "hint": error.hint, "kind": kind}


def main(data_dir: str) -> int:
    """Answer requests until there are no more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the head, which then closes the input
    with suppress(OSError):
        os.nice(_NICE)
    try:
        return _answer_all(data_dir, _requests())
    except BrokenPipeError:
        return 0  # nobody listens any more


def _answer_all(data_dir: str, requests: Iterator[str]) -> int:
    try:
        workshop = Workshop(data_dir)
    except GpulseError as error:
        _say(_refusal(error))
        return error.exit_code
    with closing(workshop):
        _say({"ready": True, "sealed_to": workshop.sealed_to, "tidied": workshop.tidied})
        for line in requests:
            try:
                _say(workshop.answer(json.loads(line)))
            except GpulseError as error:
                _say(_refusal(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
