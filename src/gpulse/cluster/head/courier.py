"""A thread that deals with a file server so that nobody else has to wait for it, and how that goes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from gpulse.errors import GpulseError
from gpulse.store.disk import disk_error
from gpulse.store.trouble import Trouble

log = logging.getLogger(__name__)

HANGING_SECONDS = 10.0
_JOIN_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 10.0
"""From one try to the next, when the last ones failed."""

Errand = tuple[str, Callable[[], None]]
"""What is done, for errors, and how."""


class Courier:
    """Does the same errands again and again. What fails is kept as trouble, and tried again the next time."""

    def __init__(
        self, name: str, place: str, *errands: Errand, seconds: float, now: Callable[[], float]
    ) -> None:
        """Prepare; nothing is done yet.

        Args:
            name: The thread's.
            place: The directory on the file server.
            errands: What to do each time, in this order.
            seconds: From one time to the next, unless it is woken.
            now: The head's clock.
        """
        self._place = place
        self._errands = errands
        self._seconds = seconds
        self._now = now
        self._failures: dict[str, Trouble] = {}
        self._began: float | None = None
        """Since when the thread waits for the file server, on the monotonic clock."""
        self._news = threading.Event()
        self._urgent = threading.Event()
        """Set when it is to end."""
        self._stopping = threading.Event()
        self._last = threading.Event()
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    @property
    def trouble(self) -> Trouble | None:
        """Why it cannot be done at the moment."""
        began = self._began
        if began is not None and time.monotonic() - began >= HANGING_SECONDS:
            return Trouble(
                self._now() - (time.monotonic() - began),
                f"the shared directory {self._place} does not answer",
                "see whether its file server is there: `df` and `dmesg`; sharing goes on by itself once it answers",
            )
        return next(iter(list(self._failures.values())), None)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """There is something to do."""
        self._news.set()

    def finish(self, seconds: float) -> bool:
        """Do everything for the last time; False when that takes too long."""
        self._last.set()
        self._news.set()
        self._urgent.set()
        return not self._thread.is_alive() or self._is_ended.wait(seconds)

    def close(self) -> bool:
        """End the thread; False when it waits for the file server, and ends with the process."""
        self._stopping.set()
        self._news.set()
        self._urgent.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        return not self._thread.is_alive()

    def _work(self) -> None:
        failed = 0
        try:
            while not self._stopping.is_set():
                self._news.clear()
                is_last = self._last.is_set()
                self.run_once()
                if is_last:
                    return
                failed = failed + 1 if self._failures else 0
                if failed:  # whatever there is to do, it has to wait
                    self._urgent.wait(min(self._seconds * 2**failed, _LONGEST_PAUSE_SECONDS))
                else:
                    self._news.wait(self._seconds)
        finally:
            self._is_ended.set()

    def run_once(self) -> None:
        """Do every errand once."""
        for what, work in self._errands:
            self._began = time.monotonic()
            try:
                work()
                self._failures.pop(what, None)
            except (OSError, GpulseError) as error:
                doing = f"{what} the shared directory {self._place}"
                told = disk_error(doing, error) if isinstance(error, OSError) else error
                self._failed(what, told.message, told.hint)
            except Exception as error:  # the guard: a fault here must not end sharing in silence
                log.exception("a fault in sharing")
                self._failed(
                    what, f"a fault in sharing: {error!r}", "please report this, with the head's log"
                )
            finally:
                self._began = None

    def _failed(self, what: str, message: str, hint: str | None) -> None:
        before = self._failures.get(what)
        self._failures[what] = Trouble(self._now() if before is None else before.since, message, hint)
