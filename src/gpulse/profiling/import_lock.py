"""A lock for deferred imports, so that no module is half loaded during a fork.

A forked process does not have the thread that loads a module: code that needs the module there would get half of it, or
wait forever.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

_FORK_TIMEOUT_SECONDS = 5.0
"""Maximum time that a fork waits for modules that are being loaded."""


class ImportLock:
    """Lock that is held while modules are loaded, and during forks: `with import_lock: import ...`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_prepared = False

    def prepare(self) -> None:
        """Make forks wait for the lock from now on."""
        if not self._is_prepared:
            self._is_prepared = True
            os.register_at_fork(
                before=self._acquire,
                after_in_parent=self._release_in_parent,
                after_in_child=self._release_in_child,
            )

    def __enter__(self) -> None:
        self.prepare()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _acquire(self) -> None:
        self._lock.acquire(timeout=_FORK_TIMEOUT_SECONDS)

    def _release_in_parent(self) -> None:
        with suppress(RuntimeError):  # the wait timed out, and another thread holds it
            self._lock.release()

    def _release_in_child(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:  # held by a thread that does not exist in the child
            self._lock = threading.RLock()


import_lock = ImportLock()
"""The lock of this process."""
