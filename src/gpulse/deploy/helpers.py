"""Programs that help here, such as pip: each in a process group of its own, so that it can be ended with all it started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress


class Helpers:
    """Runs programs in threads, until it is told to end them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_over = False

    def run(self, words: Sequence[str], *, seconds: float) -> tuple[int, str]:
        """Run a program to its end; the exit code, and what it said on standard error.

        Raises:
            OSError: It cannot be started, or no program is to run any more.
            subprocess.TimeoutExpired: It took too long, and was ended.
        """
        with self._lock:
            if self._is_over:
                raise InterruptedError("it was interrupted")
            process = subprocess.Popen(  # noqa: S603  our own Python
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            _, errors = process.communicate(timeout=seconds)
        finally:
            with self._lock:
                self._running.discard(process)
                _end(process)
            process.wait()
        return process.returncode, errors

    def end(self) -> None:
        """End all that run, and let no other begin."""
        with self._lock:
            self._is_over = True
            for process in self._running:
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
