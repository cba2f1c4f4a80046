"""Start, wake and watch the process that sends the log to a time-series database."""

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
from gpulse.store.tsdb.config import TsdbConfig
from gpulse.store.tsdb.state import RemoteState

log = logging.getLogger(__name__)

_END_SECONDS = 3.0
"""So long the process may take to send the rest when the head ends."""
_AGAIN_SECONDS, _MAX_AGAIN_SECONDS = 1.0, 30.0
"""After so long a process that died is started again, and after twice as long each time when it does not live."""
_TOLD_SECONDS = 60.0
_SILENT_SECONDS = 45.0
"""A process that waits for a time-series database says something at least so often."""
_TOTALS = ("samples_total", "refused_total", "lost_total", "resent_total")


class Forwarder:
    """One sending process for a data directory and a time-series database. `wake` and `state` may be called from any thread."""

    def __init__(self, data_dir: str, config: TsdbConfig, *, limit_bytes: int) -> None:
        """Prepare to send.

        Args:
            data_dir: Where the head's log is.
            config: Where to send it.
            limit_bytes: So much of the log may wait for the time-series database; then the oldest is given up.
        """
        self.limit_bytes = limit_bytes
        self._data_dir = os.path.abspath(data_dir)
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._woken = 0
        self._confirmed = self._reached = self._begun = 0
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """For what is written to the process."""
        self._state = RemoteState("ok", _shown(config.write_url), since=time.time())
        self._before = dict.fromkeys(_TOTALS, 0)
        """What processes that ended had counted."""
        self._counted = dict.fromkeys(_TOTALS, 0)
        self._told = 0.0
        self._heard = time.monotonic()
        # The kernel ends the process together with the thread that started it, so that one lives as long.
        self._thread = threading.Thread(target=self._watch, name="remote-write")

    @property
    def confirmed(self) -> int:
        """Up to which position of the log nothing will be sent again."""
        return self._confirmed

    @property
    def begun(self) -> int:
        """What comes after this position was sent, up to what is confirmed; of what is before it something never was."""
        return self._begun

    @property
    def reached(self) -> int:
        """Up to which position of the log the time-series database confirmed everything, since it was last sent again."""
        return self._reached

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Begin to send.

        Raises:
            MissingExtraError: A package is not installed.
        """
        if importlib.util.find_spec("cramjam") is None:
            raise MissingExtraError("sending to a time-series database", "head")
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """How much of the log waits to be sent."""
        return self.state().waiting_bytes

    def wake(self, position: int) -> None:
        """Say that records up to here are on disk; never waits."""
        self._woken = max(self._woken, position)
        process = self._process
        if process is not None and self._lock.acquire(blocking=False):
            try:
                self._write(process)
            finally:
                self._lock.release()

    def state(self) -> RemoteState:
        """How it stands."""
        silent = time.monotonic() - self._heard
        if self._process is None or silent < _SILENT_SECONDS:
            return self._state
        message = f"the sending process has not said anything for {silent:.0f} s"
        hint = "the time-series database may answer too slowly, or the disk not at all; nothing is lost meanwhile"
        return self._state._replace(state="failing", error=message, hint=hint)

    def close(self) -> None:
        """End the process, after a moment for what is on its way."""
        self._closed.set()
        with self._lock:
            process = self._process
            if process is not None and process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)
            process = self._process
            if process is not None:
                process.kill()
            self._thread.join()

    def _watch(self) -> None:
        """Keep a process going, and hear what it says."""
        wait = _AGAIN_SECONDS
        while not self._closed.is_set():
            begun = time.monotonic()
            try:
                self._run()
            except OSError as error:
                self._failed(f"the sending process cannot be started: {error.strerror}")
            lived = time.monotonic() - begun > _MAX_AGAIN_SECONDS
            wait = _AGAIN_SECONDS if lived else min(2 * wait, _MAX_AGAIN_SECONDS)
            self._closed.wait(wait / 2)

    def _run(self) -> None:
        process = subprocess.Popen(  # noqa: S603  our own module
            [sys.executable, "-m", "gpulse.store.tsdb.send_process", self._data_dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018, S101  they were asked for
        try:
            with self._lock:
                process.stdin.write(json.dumps(self._config._asdict()).encode() + b"\n")
                os.set_blocking(process.stdin.fileno(), False)
                self._process, self._heard = process, time.monotonic()
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
                self._hear(json.loads(line))

    def _hear(self, told: dict[str, Any]) -> None:
        self._heard = time.monotonic()
        self._begun = max(self._begun, int(told.pop("begun")))  # before it counts as confirmed
        self._confirmed = max(self._confirmed, int(told.pop("confirmed")))
        self._reached = int(told.pop("reached"))
        self._counted = {name: told[name] for name in _TOTALS}
        totals = {name: self._before[name] + told[name] for name in _TOTALS}
        before, self._state = self._state, RemoteState(**{**told, **totals})
        self._log(before)

    def _log(self, before: RemoteState) -> None:
        """Say what changed, and what does not get better once a minute."""
        state = self._state
        if state.state != before.state and state.state == "ok":
            log.info("the time-series database at %s takes samples", state.url)
        if state.lost_total > before.lost_total:
            lost = state.lost_total - before.lost_total
            log.error(
                "%d records of the log were given up: the time-series database was away for too long", lost
            )
        now = time.monotonic()
        if state.error is not None and (before.error is None or now - self._told >= _TOLD_SECONDS):
            self._told = now
            log.warning("%s%s", state.error, f" ({state.hint})" if state.hint else "")

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        """Tell the process how far the log is; when its pipe is full it has news enough to read."""
        if process.stdin is not None and not process.stdin.closed and self._woken:
            with suppress(OSError):
                process.stdin.write(f"{self._woken}\n".encode())

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._process = None
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._before = {name: self._before[name] + self._counted[name] for name in _TOTALS}
        self._counted = dict.fromkeys(_TOTALS, 0)
        if not self._closed.is_set():
            code = process.returncode
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._failed(f"the sending process ended with {how}")

    def _failed(self, message: str) -> None:
        before = self._state
        hint = "see the head's log; it is started again, and nothing is lost meanwhile"
        since = before.since if before.state == "failing" else time.time()
        self._state = before._replace(state="failing", error=message, hint=hint, since=since)
        self._log(before)


def _shown(url: str) -> str:
    from gpulse.store.tsdb.write_client import shown_url  # noqa: PLC0415  ssl is for those who send

    return shown_url(url)
