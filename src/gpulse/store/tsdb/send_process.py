"""Process that sends the log to a time-series database: `python -m gpulse.store.tsdb.send_process DATA_DIR`.

The first line of standard input is the configuration; each further line is the position up to which the log is on disk. The
process writes its status as one JSON object per line. When its input is closed, it sends the rest, unless the time-series
database is unavailable, and exits.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from gpulse.atomic_files import replace_file
from gpulse.errors import GpulseError
from gpulse.store.damage import add_checksum, strip_checksum
from gpulse.store.disk_errors import disk_errors
from gpulse.store.log.reader import LogCursor, LogReader
from gpulse.store.log.record_payloads import BATCH, FACT, FrameBatch
from gpulse.store.log.segment import read_headers
from gpulse.store.metadata.file_check import METADATA_FILE
from gpulse.store.metadata.reader import MetadataLookup
from gpulse.store.tsdb.config import RemoteWriteState, SendingState, TsdbConfig
from gpulse.store.tsdb.request_builder import BlockSeries, LayoutCache, RequestBuilder
from gpulse.store.tsdb.write_client import redact_url
from gpulse.store.tsdb.write_delivery import ParallelDelivery, Unavailable, WriteRejected

RESEND_SECONDS = 90.0
"""Samples confirmed within this time before a failure are sent again, since the database may have lost them."""
_MIN_REWIND_SECONDS = 300.0
"""Minimum time between two rewinds while the database responds, even if only with errors; otherwise it would never catch up."""


class ResendWindow:
    """The log positions that were confirmed recently and must be sent again after a failure."""

    def __init__(self, position: int, ends: Iterable[int] = ()) -> None:
        """Start at a position.

        Args:
            position: Nothing up to here has to be sent again.
            ends: Positions at which earlier requests after it ended.
        """
        self._safe = position
        self._recent: deque[tuple[float, int]] = deque()
        self._owed: int | None = None
        self._rewound: float | None = None
        self.reached = position
        """The position up to which everything is confirmed since the last rewind."""
        self.furthest = position
        """The highest position that was ever confirmed."""
        self._ends: deque[int] = deque(ends)
        self._repeat: deque[int] = deque(self._ends)

    @property
    def safe(self) -> int:
        """The position up to which nothing will be sent again."""
        return self._safe if self._owed is None else min(self._safe, self._owed)

    @property
    def ends(self) -> list[int]:
        """The end positions of requests that may be sent again."""
        return list(self._ends)

    def next_end(self) -> int | None:
        """Return where the next request must end because it is repeated; None for a new request."""
        while self._repeat and self._repeat[0] <= self.reached:
            self._repeat.popleft()
        return self._repeat[0] if self._repeat else None

    def confirmed(self, end: int, now: float) -> None:
        """Record that the time-series database confirmed everything up to a position."""
        self.reached = end
        self.furthest = max(self.furthest, end)
        self._recent.append((now, end))
        if not self._ends or end > self._ends[-1]:
            self._ends.append(end)
        while self._recent[0][0] < now - RESEND_SECONDS:
            self._safe = max(self._safe, self._recent.popleft()[1])
        while self._ends and self._ends[0] <= self.safe:
            self._ends.popleft()

    def failed(self, now: float, *, hard: bool) -> bool:
        """Record that a request failed or that the database was restarted; return whether it was rewound.

        Args:
            now: Monotonic seconds.
            hard: Whether the database may have died; otherwise it responded with an error or too slowly.
        """
        if self._owed is None:
            self._owed = self._safe
        if not hard and self._rewound is not None and now - self._rewound < _MIN_REWIND_SECONDS:
            return False
        self.rewind(now)
        return True

    def due(self, now: float) -> bool:
        """Whether a rewind for an earlier failure is due."""
        return (
            self._owed is not None
            and self._rewound is not None
            and now - self._rewound >= _MIN_REWIND_SECONDS
        )

    def rewind(self, now: float) -> None:
        """Go back to the first position that may have been lost."""
        self._rewound = now
        self.reached, self._owed = self.safe, None
        self._recent.clear()
        self._repeat = deque(self._ends)


_MAX_BATCH_BYTES = 256 << 10
"""Approximate maximum size of the log records in one batch, which is about fifty thousand samples."""


class SendBatch(NamedTuple):
    """Consecutive log records that are sent together."""

    last: int
    """The position of the last record."""
    entries: tuple[FrameBatch | bytes, ...]
    """Frame batches and encoded facts, in the order of the log."""
    missing: int
    """Number of records that were dropped from the log before they were read."""
    is_repeated: bool
    """True if the same records were sent together before."""

    @property
    def began(self) -> float | None:
        """When the head received the first frames; None if there are none."""
        return min(self._times(), default=None)

    @property
    def received(self) -> float | None:
        """When the head received the last frames; None if there are none."""
        return max(self._times(), default=None)

    def _times(self) -> list[float]:
        return [entry.received_us / 1e6 for entry in self.entries if isinstance(entry, FrameBatch)]


class LogFollower:
    """Reads a growing log in batches."""

    def __init__(self, log: LogReader, after: int) -> None:
        self._log = log
        self._after = after
        self._cursor: LogCursor = log.follow(after + 1)

    def seek(self, after: int) -> None:
        """Continue with the record after a position."""
        self._cursor.close()
        self._after = after
        self._cursor = self._log.follow(after + 1)

    def take(self, bound: int, end: int | None = None) -> SendBatch | None:
        """Return the next batch; None if there are no new records.

        Args:
            bound: The position up to which the log is on disk.
            end: The position at which the batch must end; None to limit it by size.

        Raises:
            LogError: The log is damaged.
            DiskError: The log cannot be read.
        """
        last = bound if end is None else min(end, bound)
        if self._after >= last:
            return None
        found: list[FrameBatch | bytes] = []
        begin, size, read = self._after, 0, 0
        for record in self._cursor:
            self._after = record.position
            read += 1
            size += len(record.payload)
            if record.kind == BATCH:
                with suppress(ValueError):  # the metadata reports it
                    found.append(FrameBatch.from_bytes(record.payload))
            elif record.kind == FACT:
                found.append(record.payload)
            if self._after >= last or (end is None and size >= _MAX_BATCH_BYTES):
                break
        if not read:
            return None
        return SendBatch(self._after, tuple(found), self._after - begin - read, end is not None)

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes of the log that were not read yet."""
        return self._cursor.waiting_bytes

    def close(self) -> None:
        """Close the log."""
        self._cursor.close()


class DurableMark:
    """The position up to which the log is on disk, as announced by the head. Threads can wait for it to advance."""

    def __init__(self, bound: int = 0) -> None:
        self.bound = bound
        self.ended: float | None = None
        """When the head asked to stop, in monotonic seconds; None while it has not."""
        self._changed = threading.Condition()

    def advance(self, bound: int) -> None:
        """Record that the log is on disk up to a position."""
        with self._changed:
            self.bound = max(self.bound, bound)
            self._changed.notify_all()

    def end(self) -> None:
        """Record that the head asked to stop."""
        with self._changed:
            self.ended = time.monotonic()
            self._changed.notify_all()

    def wait(self, seconds: float, *, after: int | None = None) -> None:
        """Wait for a request to stop, or until the log extends beyond a position."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.ended is not None or (after is not None and self.bound > after), seconds
            )


CURSOR_FILE = "remote.json"
_MAX_DATABASES = 16


class SendCursor(NamedTuple):
    """The stored progress of sending a log to one database."""

    position: int = 0
    """Nothing up to this position has to be sent again."""
    ends: tuple[int, ...] = ()
    """End positions of requests sent after it, so that repeated requests are identical."""
    begun: int = 0
    """Everything after this up to `position` was sent; something before it was not."""


def read_log_id(directory: str) -> str:
    """Return the ID of a log; empty if there is no log yet."""
    headers = read_headers(directory) if os.path.isdir(directory) else []
    return headers[-1].log_id.hex() if headers else ""


def read_cursor(data_dir: str, url: str, log: str) -> SendCursor:
    """Read the progress for a database and log; if it is unknown, return the start."""
    entry = _read_cursors(data_dir).get(url)
    try:
        if entry is not None and entry["log"] == log:
            position, ends = int(entry["position"]), tuple(int(end) for end in entry["ends"])
            return SendCursor(position, ends, int(entry.get("begun", position)))
    except (LookupError, TypeError, ValueError):
        pass  # invalid content: start over, which is harmless
    return SendCursor()


def write_cursor(
    data_dir: str, url: str, log: str, position: int, ends: Sequence[int], begun: int = 0
) -> None:
    """Store the progress for a database and log.

    Raises:
        DiskError: The file cannot be written.
    """
    kept = {name: entry for name, entry in _read_cursors(data_dir).items() if name != url}
    newest = dict(list(kept.items())[-(_MAX_DATABASES - 1) :])
    document = {**newest, url: {"log": log, "position": position, "ends": list(ends), "begun": begun}}
    path = f"{data_dir}/{CURSOR_FILE}"
    with disk_errors(f"cannot write {path}"):
        replace_file(path, add_checksum(json.dumps(document).encode()), 0o600)


def _read_cursors(data_dir: str) -> dict[str, Any]:
    try:
        with open(f"{data_dir}/{CURSOR_FILE}", "rb") as file:
            document = json.loads(strip_checksum(file.read())[0])
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


_PR_SET_PDEATHSIG = 1
_NICE = 5
_REPORT_SECONDS = 1.0
_RESTART_CHECK_SECONDS = 15.0
"""Interval at which the start time of the time-series database is checked."""
_RARE_CHECK_SECONDS = 60.0
"""Additional delay if the database does not report its start time."""
_FIRST_WAIT_SECONDS, _MAX_WAIT_SECONDS = 0.25, 10.0
_REJECTED_WAIT_SECONDS = 10.0
_MAX_REJECTIONS = 30
"""Number of attempts for a request that is rejected as a whole, if others were accepted."""
_BEHIND_SECONDS = 10.0
_SHOW_ERROR_SECONDS = 60.0
_REFUSED_HINT = "check the limits and the log of the database; all other samples are accepted"
_LATE_HINT = (
    "let the database accept older samples, which nodes send after they were disconnected; "
    "for Prometheus, set storage.tsdb.out_of_order_time_window"
)
_UNREADABLE_HINT = (
    "check whether a newer version of gpulse wrote these samples; they are still on the head's disk"
)
_EXIT_SECONDS = 2.5
"""Maximum time to continue sending after the request to stop."""


class Sender:
    """Sends the log to a time-series database, continuing at the stored progress."""

    def __init__(
        self,
        data_dir: str,
        config: TsdbConfig,
        durable: DurableMark,
        send_status: Callable[[dict[str, Any]], None],
    ) -> None:
        """Open the log at the stored progress.

        Args:
            data_dir: The head's data directory.
            config: The time-series database.
            durable: The position announced by the head.
            send_status: Sends the status to the head.

        Raises:
            GpulseError: The log cannot be read.
        """
        self._data_dir = data_dir
        self._send_status = send_status
        self._durable = durable
        self._url = redact_url(config.write_url)
        self._log_id = read_log_id(f"{data_dir}/log")
        place = read_cursor(data_dir, self._url, self._log_id)
        log = LogReader(f"{data_dir}/log")
        begin = place.position or log.first - 1
        self._begun = place.begun if place.position else begin
        self._window = ResendWindow(begin, place.ends)
        self._follower = LogFollower(log, begin)
        self._requests = RequestBuilder(
            LayoutCache(log, MetadataLookup(f"{data_dir}/{METADATA_FILE}")), dict(config.labels)
        )
        self._delivery = ParallelDelivery(config)
        self._state: SendingState = "ok"
        self._error: GpulseError | None = None
        self._since = time.time()
        self._refused: tuple[float, str, str] | None = None
        self._received: float | None = None
        self._failures = 0
        self._rejections = 0
        self._lost = self._resent = self._passed = self._unreadable = 0
        self._started: float | None = None
        self._checked_at = self._reported_at = -_RESTART_CHECK_SECONDS
        self._reported_reached = -1
        self._kept: tuple[int, list[int], int] | None = None

    def run(self) -> None:
        """Send until the head asks to stop, then close everything."""
        try:
            self._run()
        finally:
            self._delivery.close()
            self._follower.close()

    def _run(self) -> None:
        while not self._is_over():
            bound = self._durable.bound
            try:
                if not self._send_next(bound):
                    self._report(at_once=self._window.reached != self._reported_reached)
                    if self._durable.ended is not None:
                        break
                    self._durable.wait(_REPORT_SECONDS, after=bound)
            except Unavailable as error:
                self._handle_outage(error)
            except WriteRejected as error:
                self._handle_rejection(error)
            except GpulseError as error:  # the disk, or the log
                self._set_state("failing", error)
                self._wait_for_retry(_REJECTED_WAIT_SECONDS)
                self._rewind()
        self._store_cursor()

    def _is_over(self) -> bool:
        ended = self._durable.ended
        return ended is not None and (
            self._state in {"failing", "refused"} or time.monotonic() - ended > _EXIT_SECONDS
        )

    def _send_next(self, bound: int) -> bool:
        """Send one batch of what is on disk up to a position; return False if there is nothing to send."""
        now = time.monotonic()
        if self._window.due(now):
            self._window.rewind(now)
            self._rewind()
        self._check_restart(now)
        batch = self._follower.take(bound, self._window.next_end())
        if batch is None:
            return False
        if self._received is None:
            self._received = batch.began
        had_samples = self._send(batch)
        if batch.missing:
            self._begun = max(self._begun, batch.last)
        if batch.last > self._passed:  # otherwise it was counted before the rewind
            self._lost += batch.missing
            self._passed = batch.last
        self._received = batch.received or self._received
        self._window.confirmed(batch.last, time.monotonic())
        if had_samples:  # otherwise the state of the database is unknown
            self._failures = self._rejections = 0
            self._set_state("behind" if self._waiting_seconds() > _BEHIND_SECONDS else "ok", None)
        self._report()
        return True

    def _send(self, batch: SendBatch) -> bool:
        """Send a batch; return whether it had any samples."""
        had_samples = False
        is_resent = batch.last <= self._window.furthest
        skips_refused = self._rejections >= _MAX_REJECTIONS and self._delivery.samples_total > 0
        before = self._delivery.samples_total
        for parts in self._split_requests(batch):
            self._delivery.send(parts, is_repeated=batch.is_repeated, skips_refused=skips_refused)
            had_samples = True
        if is_resent:
            self._resent += self._delivery.samples_total - before
        return had_samples

    def _split_requests(self, batch: SendBatch) -> Iterator[list[BlockSeries]]:
        piece: list[BlockSeries] = []
        size = 0
        for part in self._requests.parts(batch.entries):
            if piece and size + len(part.series) > self._delivery.max_request_bytes:
                yield piece
                piece, size = [], 0
            piece.append(part)
            size += len(part.series)
        if piece:
            yield piece

    def _check_restart(self, now: float) -> None:
        """Check whether the database was restarted unnoticed."""
        if now - self._checked_at < _RESTART_CHECK_SECONDS or self._failures:
            return
        self._checked_at = now
        started = self._delivery.started()
        if started is None:
            self._checked_at = now + _RARE_CHECK_SECONDS
            return
        before, self._started = self._started, started
        if before is not None and before != started:
            self._window.failed(now, hard=True)
            self._rewind()

    def _handle_outage(self, error: Unavailable) -> None:
        self._started = None  # a restart needs no second rewind
        self._window.failed(time.monotonic(), hard=error.hard)
        self._rewind()
        self._set_state("failing", error)
        wait = min(_MAX_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2 ** min(self._failures, 10))
        self._failures += 1
        self._wait_for_retry(max(wait * random.uniform(0.7, 1.0), error.wait_seconds or 0.0))

    def _handle_rejection(self, error: WriteRejected) -> None:
        self._rejections += 1
        self._window.failed(time.monotonic(), hard=False)
        self._rewind()
        self._set_state("refused", error)
        self._wait_for_retry(_REJECTED_WAIT_SECONDS)

    def _rewind(self) -> None:
        """Continue at the rewound position."""
        self._follower.seek(self._window.reached)
        self._requests.resend_info()

    def _wait_for_retry(self, seconds: float) -> None:
        """Wait before a retry, while reporting the status."""
        until = time.monotonic() + seconds
        while self._durable.ended is None and (left := until - time.monotonic()) > 0:
            self._report()
            self._durable.wait(min(left, _REPORT_SECONDS))

    def _set_state(self, state: SendingState, error: GpulseError | None) -> None:
        if state != self._state:
            self._since = time.time()
            self._reported_at = -_REPORT_SECONDS
        self._state, self._error = state, error

    def _waiting_seconds(self) -> float:
        if self._received is None or self._durable.bound <= self._window.furthest:
            return 0.0
        return max(0.0, time.time() - self._received)

    def _report(self, *, at_once: bool = False) -> None:
        """Report the status and store the progress, once a second or when everything was sent."""
        now = time.monotonic()
        is_time = now - self._reported_at >= _REPORT_SECONDS
        if is_time:
            self._reported_at = now
            self._store_cursor()
        elif not at_once:
            return
        self._reported_reached = self._window.reached
        error, hint = self._current_error(now)
        state = RemoteWriteState(
            self._state,
            self._url,
            error,
            hint,
            self._since,
            waiting_bytes=self._follower.waiting_bytes,
            waiting_seconds=self._waiting_seconds(),
            samples_total=self._delivery.samples_total,
            refused_total=self._delivery.refused_total,
            lost_total=self._lost,
            resent_total=self._resent,
        )
        places = {"confirmed": self._window.safe, "reached": self._window.reached, "begun": self._begun}
        self._send_status({**state._asdict(), **places})

    def _current_error(self, now: float) -> tuple[str | None, str | None]:
        if self._error is not None:
            return self._error.message, self._error.hint
        refusals = self._delivery.take_refusals()
        if refusals:
            total = sum(refusal.samples for refusal in refusals)
            samples = "1 sample" if total == 1 else f"{total} samples"
            text = f"the time-series database rejected {samples}, for example of the series {refusals[0].series}: {refusals[0].reason}"
            self._refused = now, text, _LATE_HINT if refusals[0].is_late else _REFUSED_HINT
        elif self._requests.unreadable > self._unreadable:
            lost, self._unreadable = self._requests.unreadable - self._unreadable, self._requests.unreadable
            blocks = "1 block" if lost == 1 else f"{lost} blocks"
            text = (
                f"cannot send {blocks} of samples: the samples are damaged or have an unknown column layout"
            )
            self._refused = now, text, _UNREADABLE_HINT
        if self._refused is not None and now - self._refused[0] < _SHOW_ERROR_SECONDS:
            return self._refused[1:]
        return self._requests.over_limit, None

    def _store_cursor(self) -> None:
        kept = self._window.safe, self._window.ends, self._begun
        if kept != self._kept:
            with suppress(GpulseError):  # the disk may be full; sending again later is harmless
                write_cursor(self._data_dir, self._url, self._log_id, *kept)
                self._kept = kept


def _send_status(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _listen(durable: DurableMark) -> None:
    for line in sys.stdin:
        with suppress(ValueError):
            durable.advance(int(line))
    durable.end()


def main(data_dir: str) -> int:
    """Run the process until its input is closed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the head handles them and closes the input
    with suppress(OSError):
        os.nice(_NICE)
    first = sys.stdin.readline()
    if not first:
        return 0
    config = TsdbConfig(**json.loads(first))
    durable = DurableMark()
    threading.Thread(target=_listen, args=(durable,), daemon=True).start()
    try:
        Sender(data_dir, config, durable, _send_status).run()
    except BrokenPipeError:
        return 0  # the head has exited
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
