"""Modules that are loaded when they are first wanted, but never while somebody forks.

What a thread has half loaded stays so in a forked process, where that thread does not exist: who wants it there gets
half a module, or waits for ever.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

_PATIENCE_SECONDS = 5.0
"""The longest that a fork waits for modules that are being loaded."""


class Loading:
    """What is held while modules are loaded, and by who forks: `with loading: import ...`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_prepared = False

    def prepare(self) -> None:
        """Let forks wait from now on."""
        if not self._is_prepared:
            self._is_prepared = True
            os.register_at_fork(
                before=self._hold, after_in_parent=self._let_go, after_in_child=self._begin_anew
            )

    def __enter__(self) -> None:
        self.prepare()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _hold(self) -> None:
        self._lock.acquire(timeout=_PATIENCE_SECONDS)

    def _let_go(self) -> None:
        with suppress(RuntimeError):  # it took too long, and is still somebody else's
            self._lock.release()

    def _begin_anew(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:  # it is held by a thread that does not exist here
            self._lock = threading.RLock()


loading = Loading()
"""The one of this process."""
