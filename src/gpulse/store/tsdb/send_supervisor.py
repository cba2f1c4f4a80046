"""Supervise the process that sends the log to a time-series database."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO, Any

from gpulse.errors import MissingExtraError
from gpulse.store.tsdb.config import RemoteWriteState, TsdbConfig
from gpulse.store.tsdb.write_client import redact_url

log = logging.getLogger(__name__)

_EXIT_SECONDS = 3.0
"""How long the process may take to send the rest when the head stops."""
_RESTART_SECONDS, _MAX_RESTART_SECONDS = 1.0, 30.0
"""Initial and maximum delay before a process that died is restarted; the delay doubles each time."""
_LOG_INTERVAL_SECONDS = 60.0
_SILENT_SECONDS = 45.0
"""Without a status for this long, the process is considered stuck."""
_TOTALS = ("samples_total", "refused_total", "lost_total", "resent_total")


class TsdbForwarder:
    """Supervisor of the sending process of one data directory. `wake` and `state` may be called from any thread."""

    def __init__(self, data_dir: str, config: TsdbConfig, *, limit_bytes: int) -> None:
        """Create the forwarder; `start` starts the process.

        Args:
            data_dir: The head's data directory.
            config: The time-series database.
            limit_bytes: Maximum number of bytes of the log that are kept for the database; then the oldest are dropped.
        """
        self.limit_bytes = limit_bytes
        self._data_dir = os.path.abspath(data_dir)
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._announced = 0
        self._confirmed = self._reached = self._begun = 0
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Guards writes to the process."""
        self._state = RemoteWriteState("ok", _shown(config.write_url), since=time.time())
        self._before = dict.fromkeys(_TOTALS, 0)
        """Totals of earlier processes."""
        self._counted = dict.fromkeys(_TOTALS, 0)
        self._logged_at = 0.0
        self._status_at = time.monotonic()
        # The kernel kills the process when the thread that started it ends, so this thread runs as long as the process.
        self._thread = threading.Thread(target=self._watch, name="remote-write")

    @property
    def confirmed(self) -> int:
        """The log position up to which nothing will be sent again."""
        return self._confirmed

    @property
    def begun(self) -> int:
        """Everything after this log position up to `confirmed` was sent; something before it was not."""
        return self._begun

    @property
    def reached(self) -> int:
        """The log position up to which everything is confirmed since the last rewind."""
        return self._reached

    @property
    def pid(self) -> int | None:
        """The PID of the process; None while it does not run."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process.

        Raises:
            MissingExtraError: A required package is not installed.
        """
        if importlib.util.find_spec("cramjam") is None:
            raise MissingExtraError("sending to a time-series database", "head")
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes of the log that are not sent yet."""
        return self.state().waiting_bytes

    def wake(self, position: int) -> None:
        """Announce that records up to a position are on disk; never blocks."""
        self._announced = max(self._announced, position)
        process = self._process
        if process is not None and self._lock.acquire(blocking=False):
            try:
                self._write(process)
            finally:
                self._lock.release()

    def state(self) -> RemoteWriteState:
        """Return the state of remote write."""
        silent = time.monotonic() - self._status_at
        # What the process reported may be older than the last records, so they are counted here.
        state = self._state._replace(waiting_records=max(0, self._announced - self._reached))
        if self._process is None or silent < _SILENT_SECONDS:
            return state
        message = (
            f"the process that sends samples to the time-series database has not reported for {silent:.0f} s"
        )
        hint = "check whether the time-series database is too slow or the disk hangs; no data is lost in the meantime"
        return state._replace(state="failing", error=message, hint=hint)

    def close(self) -> None:
        """Stop the process, after a moment to send the rest."""
        self._closed.set()
        with self._lock:
            process = self._process
            if process is not None and process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        if self._thread.is_alive():
            self._thread.join(_EXIT_SECONDS)
            process = self._process
            if process is not None:
                process.kill()
            self._thread.join()

    def _watch(self) -> None:
        """Run the process, and restart it whenever it ends."""
        wait = _RESTART_SECONDS
        while not self._closed.is_set():
            begun = time.monotonic()
            try:
                self._run()
            except OSError as error:
                self._failed(
                    f"cannot start the process that sends samples to the time-series database: {error.strerror}"
                )
            lived = time.monotonic() - begun > _MAX_RESTART_SECONDS
            wait = _RESTART_SECONDS if lived else min(2 * wait, _MAX_RESTART_SECONDS)
            self._closed.wait(wait / 2)

    def _run(self) -> None:
        process = subprocess.Popen(  # noqa: S603  our own module
            [sys.executable, "-m", "gpulse.store.tsdb.send_process", self._data_dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018, S101  pipes were requested
        try:
            with self._lock:
                process.stdin.write(json.dumps(self._config._asdict()).encode() + b"\n")
                os.set_blocking(process.stdin.fileno(), False)
                self._process, self._status_at = process, time.monotonic()
                self._write(process)
                if self._closed.is_set():
                    process.stdin.close()
            with open(process.stdout.fileno(), "rb", closefd=False) as lines:
                self._listen(lines)
        finally:
            self._end(process)

    def _listen(self, lines: IO[bytes]) -> None:
        for line in lines:
            with suppress(ValueError, TypeError, LookupError):
                self._update_state(json.loads(line))

    def _update_state(self, status: dict[str, Any]) -> None:
        self._status_at = time.monotonic()
        self._begun = max(self._begun, int(status.pop("begun")))  # before `_confirmed`: see `LocalStore.tidy`
        self._confirmed = max(self._confirmed, int(status.pop("confirmed")))
        self._reached = int(status.pop("reached"))
        self._counted = {name: status[name] for name in _TOTALS}
        totals = {name: self._before[name] + status[name] for name in _TOTALS}
        before, self._state = self._state, RemoteWriteState(**{**status, **totals})
        self._log(before)

    def _log(self, before: RemoteWriteState) -> None:
        """Log changes of the state, and an ongoing error once a minute."""
        state = self._state
        if state.state != before.state and state.state == "ok":
            log.info("the time-series database at %s is accepting samples", state.url)
        if state.lost_total > before.lost_total:
            lost = state.lost_total - before.lost_total
            records = "1 record" if lost == 1 else f"{lost} records"
            log.error(
                "dropped %s of the log that had not been sent: the time-series database was unavailable for too long",
                records,
            )
        now = time.monotonic()
        if state.error is not None and (
            before.error is None or now - self._logged_at >= _LOG_INTERVAL_SECONDS
        ):
            self._logged_at = now
            log.warning("%s%s", state.error, f" ({state.hint})" if state.hint else "")

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        """Send the newest log position to the process; skipped while its pipe is full."""
        if process.stdin is not None and not process.stdin.closed and self._announced:
            with suppress(OSError):
                process.stdin.write(f"{self._announced}\n".encode())

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._process = None
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
        try:
            process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._before = {name: self._before[name] + self._counted[name] for name in _TOTALS}
        self._counted = dict.fromkeys(_TOTALS, 0)
        if not self._closed.is_set():
            code = process.returncode
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._failed(f"the process that sends samples to the time-series database ended with {how}")

    def _failed(self, message: str) -> None:
        before = self._state
        hint = "see the head's output for the cause; the process is restarted, and no data is lost in the meantime"
        since = before.since if before.state == "failing" else time.time()
        self._state = before._replace(state="failing", error=message, hint=hint, since=since)
        self._log(before)


def _shown(url: str) -> str:
    return redact_url(url)
