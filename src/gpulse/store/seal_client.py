"""Client of the sealing process: starts it, sends requests, and restarts it if it dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from gpulse.errors import ClosedError, DiskError, GpulseError, LogError

_ERRORS: dict[str, type[GpulseError]] = {"disk": DiskError, "log": LogError}
_MAX_ATTEMPTS = 2
_EXIT_SECONDS = 5.0


class SealResult(NamedTuple):
    """Result of a seal request."""

    position: int
    """Everything up to this log position is in the history, on disk."""
    segments: tuple[str, ...]
    """Names of the new segments."""
    missing: int = 0
    """Number of records that the log dropped before they were sealed."""
    unreadable: int = 0
    """Number of batches and blocks that could not be read and are not in the history."""


class SealClient:
    """Client of one data directory's sealing process. Safe to use from several threads; requests run one at a time."""

    def __init__(self, data_dir: str | os.PathLike[str]) -> None:
        self._data_dir = os.fspath(data_dir)
        self._process: subprocess.Popen[str] | None = None
        self._sealed_to = 0
        self._closed = False
        # The kernel kills the process when the thread that started it ends, so one thread starts it every time.
        self._thread = ThreadPoolExecutor(1, "sealer")

    @property
    def sealed_to(self) -> int:
        """The log position up to which everything is sealed, as last reported by the process."""
        return self._sealed_to

    @property
    def pid(self) -> int | None:
        """The PID of the process; None while it does not run."""
        return self._process.pid if self._process else None

    def start(self) -> int:
        """Start the process, and return the log position up to which everything is sealed.

        Raises:
            GpulseError: The data directory cannot be used.
        """
        self._run(self._ensure)
        return self._sealed_to

    def seal(self, position: int) -> SealResult:
        """Seal the log up to a position, which must be on disk, and wait until the history is on disk too.

        Raises:
            DiskError: The disk is full or failing; try again later.
            LogError: The log or the history is damaged.
            GpulseError: The process died twice.
        """
        reply = self._run(lambda: self._ask({"do": "seal", "to": position}))
        self._sealed_to = reply["sealed_to"]
        return SealResult(reply["sealed_to"], tuple(reply["segments"]), reply["missing"], reply["unreadable"])

    def compact(self) -> tuple[str, ...]:
        """Merge the oldest whole hour, or summarize the oldest day; return the names of merged or new segments.

        Raises:
            GpulseError: As for `seal`.
        """
        return tuple(self._run(lambda: self._ask({"do": "compact"}))["compacted"])

    def retain(
        self,
        now: float,
        keep_seconds: float | None,
        limit_bytes: int | None,
        whole_seconds: float | None = None,
        sent: tuple[int, int] | None = None,
    ) -> tuple[str, ...]:
        """Remove the oldest segments by age and size and return their names.

        Args:
            now: Epoch seconds.
            keep_seconds: Remove segments older than this; None keeps everything.
            limit_bytes: Maximum total size; None for no limit.
            whole_seconds: Remove samples older than this if a time-series database has them; None keeps them.
            sent: The log positions after which and up to which the database has all samples; None if it has all of them.

        Raises:
            GpulseError: As for `seal`.
        """
        request = {
            "do": "retain",
            "now": now,
            "keep_seconds": keep_seconds,
            "limit_bytes": limit_bytes,
            "whole_seconds": whole_seconds,
            "sent": sent,
        }
        return tuple(self._run(lambda: self._ask(request))["removed"])

    def close(self) -> None:
        """Kill the process. Its unfinished work is repeated after the next start."""
        self._closed = True
        process = self._process
        if process is not None:
            with suppress(OSError):
                process.kill()  # safe: unfinished segments are renamed only when complete
        self._thread.submit(self._end)
        self._thread.shutdown()

    def _run(self, work: Any) -> Any:
        try:
            return self._thread.submit(work).result()
        except RuntimeError as error:
            if self._closed:
                raise ClosedError("the process that writes the history has been stopped") from error
            raise

    def _ensure(self) -> subprocess.Popen[str]:
        if self._closed:
            raise ClosedError("the process that writes the history has been stopped")
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        try:
            self._process = subprocess.Popen(  # noqa: S603  our own module
                [sys.executable, "-m", "gpulse.store.seal_process", self._data_dir],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            raise GpulseError(
                f"cannot start the process that writes the history: {error.strerror}",
                hint="check whether the machine has run out of memory or processes; the start will be retried",
            ) from error
        reply = self._receive(self._process)
        if reply is None:
            raise self._died()
        self._sealed_to = _check_reply(reply)["sealed_to"]
        return self._process

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request; send it once more if the process dies, which is safe for every request."""
        for _ in range(_MAX_ATTEMPTS):
            process = self._ensure()
            with suppress(OSError):
                assert process.stdin is not None  # noqa: S101  a pipe was requested
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            reply = self._receive(process)
            if reply is not None:
                return _check_reply(reply)
            if self._closed:
                raise ClosedError("the process that writes the history has been stopped")
        raise self._died()

    @staticmethod
    def _receive(process: subprocess.Popen[str]) -> dict[str, Any] | None:
        assert process.stdout is not None  # noqa: S101  a pipe was requested
        line = process.stdout.readline()
        if not line.endswith("\n"):
            process.wait()
            return None
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:  # not written by gpulse
            process.kill()
            process.wait()
            return None
        return reply

    def _died(self) -> GpulseError:
        code = self._process.returncode if self._process else None
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return GpulseError(
            f"the process that writes the history ended with {how}",
            hint="see the head's output for the cause; new data stays in the log, and writing to the history will be retried",
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            process.stdin and process.stdin.close()
        try:
            process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _check_reply(reply: dict[str, Any]) -> dict[str, Any]:
    if "error" in reply:
        raise _ERRORS.get(reply.get("kind", ""), GpulseError)(reply["error"], hint=reply.get("hint"))
    return reply
