"""Files that are replaced as a whole, and one that may be on a disk for which nobody can wait."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress

log = logging.getLogger(__name__)

_LAST_SECONDS = 2.0
"""How long the end waits for the last writing."""


def replace(path: str, data: bytes, mode: int, *, lasting: bool = True) -> None:
    """Replace a file as a whole; nobody ever sees a part of it.

    Args:
        path: The file.
        data: All of it.
        mode: Its permissions.
        lasting: It must survive a loss of power.

    Raises:
        OSError: It cannot be.
    """
    temporary = f"{path}.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


class Scribe:
    """Writes on a thread of its own, the newest only; what cannot be written is said once."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._next: tuple[str, bytes, int] | None = None
        self._closed = False
        self._complained = False
        self._thread: threading.Thread | None = None

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Have it written soon; what was to be written before and is not yet is forgotten."""
        with self._news:
            self._next = (path, data, mode)
            self._news.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="gpulse-scribe", daemon=True)
            self._thread.start()

    def close(self, seconds: float = _LAST_SECONDS) -> None:
        """Write what is left, if that does not take too long."""
        with self._news:
            self._closed = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join(seconds)

    def _work(self) -> None:
        while True:
            with self._news:
                while self._next is None:
                    if self._closed:
                        return
                    self._news.wait()
                path, data, mode = self._next
                self._next = None
            try:
                replace(path, data, mode)
                self._complained = False
            except OSError as error:
                if not self._complained:
                    self._complained = True
                    log.warning("cannot write %s: %s", path, error.strerror)
