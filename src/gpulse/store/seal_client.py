"""Client of the sealing process: starts it, sends requests, and restarts it when it died."""

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
_MAX_TRIES = 2
_END_SECONDS = 5.0


class SealResult(NamedTuple):
    """The answer to a request to seal."""

    position: int
    """Everything up to here is in the history, on disk."""
    segments: tuple[str, ...]
    """The segments that were made."""
    missing: int = 0
    """How many records the log had dropped before they were sealed."""
    unreadable: int = 0
    """How many batches and parts of batches could not be read, and are not in the history."""


class SealClient:
    """The sealing process of one data directory. Safe to use from several threads, one request at a time."""

    def __init__(self, data_dir: str | os.PathLike[str]) -> None:
        self._data_dir = os.fspath(data_dir)
        self._process: subprocess.Popen[str] | None = None
        self._sealed_to = 0
        self._closed = False
        # The kernel ends the process together with the thread that started it, so that thread is always the same one.
        self._thread = ThreadPoolExecutor(1, "sealer")

    @property
    def sealed_to(self) -> int:
        """Up to which position the process said that everything is sealed."""
        return self._sealed_to

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return self._process.pid if self._process else None

    def start(self) -> int:
        """Start the process and return the position up to which everything is sealed.

        Raises:
            GpulseError: The directory cannot be used.
        """
        self._run(self._ensure)
        return self._sealed_to

    def seal(self, position: int) -> SealResult:
        """Seal the log up to a position, which must be on disk, and wait until the history is on disk too.

        Raises:
            DiskError: The disk is full or broken. It can be tried again.
            LogError: The log or the history is damaged.
            GpulseError: The process ended, twice.
        """
        reply = self._run(lambda: self._ask({"do": "seal", "to": position}))
        self._sealed_to = reply["sealed_to"]
        return SealResult(reply["sealed_to"], tuple(reply["segments"]), reply["missing"], reply["unreadable"])

    def compact(self) -> tuple[str, ...]:
        """Merge the oldest whole hour, or summarise the oldest day; return the names of what was merged or made.

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
            keep_seconds: Remove what is older; None to keep everything.
            limit_bytes: The most bytes that may stay; None for no limit.
            whole_seconds: Remove older samples that a time-series database has; None to keep them.
            sent: After which log position, and up to which one, it has them; None when it has all of them.

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
        """Kill the process; its unfinished work is repeated next time."""
        self._closed = True
        process = self._process
        if process is not None:
            with suppress(OSError):
                process.kill()  # what it writes counts only once it is renamed
        self._thread.submit(self._end)
        self._thread.shutdown()

    def _run(self, work: Any) -> Any:
        try:
            return self._thread.submit(work).result()
        except RuntimeError as error:
            if self._closed:
                raise ClosedError("the sealing process was closed") from error
            raise

    def _ensure(self) -> subprocess.Popen[str]:
        if self._closed:
            raise ClosedError("the sealing process was closed")
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
                f"the sealing process cannot be started: {error.strerror}",
                hint="memory or processes ran out; sealing is tried again",
            ) from error
        reply = self._receive(self._process)
        if reply is None:
            raise self._died()
        self._sealed_to = _checked(reply)["sealed_to"]
        return self._process

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and send it again when the process dies: every request can be repeated."""
        for _ in range(_MAX_TRIES):
            process = self._ensure()
            with suppress(OSError):
                assert process.stdin is not None  # noqa: S101  it was asked for
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            reply = self._receive(process)
            if reply is not None:
                return _checked(reply)
            if self._closed:
                raise ClosedError("the sealing process was closed")
        raise self._died()

    @staticmethod
    def _receive(process: subprocess.Popen[str]) -> dict[str, Any] | None:
        assert process.stdout is not None  # noqa: S101  it was asked for
        line = process.stdout.readline()
        if not line.endswith("\n"):
            process.wait()
            return None
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:  # nothing of ours prints there
            process.kill()
            process.wait()
            return None
        return reply

    def _died(self) -> GpulseError:
        code = self._process.returncode if self._process else None
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return GpulseError(
            f"the sealing process ended with {how}",
            hint="see the head's log; new data stays in its log meanwhile, and sealing is tried again",
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            process.stdin and process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _checked(reply: dict[str, Any]) -> dict[str, Any]:
    if "error" in reply:
        raise _ERRORS.get(reply.get("kind", ""), GpulseError)(reply["error"], hint=reply.get("hint"))
    return reply
