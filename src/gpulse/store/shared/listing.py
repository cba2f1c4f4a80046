"""The heads whose tables are in the shared directory, and why those of some cannot be read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from gpulse.errors import GpulseError, UsageError
from gpulse.store.disk import disk_errors
from gpulse.store.shared.head_tables import HeadTables
from gpulse.store.shared.life import head_ids
from gpulse.store.trouble import Trouble

_REFRESH_SECONDS = 15.0


class DamagedError(Exception):
    """What one head shares cannot be read."""

    def __init__(self, head: str, why: GpulseError) -> None:
        super().__init__(why.message)
        self.head = head
        self.why = why


@contextmanager
def of_head(head: str) -> Iterator[None]:
    """Say whose tables it was that could not be read.

    Raises:
        DamagedError: Something within failed.
    """
    try:
        yield
    except UsageError:
        raise
    except GpulseError as error:
        raise DamagedError(head, error) from error


class Listing:
    """The tables of all heads, looked at again every now and then. Safe to use from several threads."""

    def __init__(self, directory: str) -> None:
        """Nothing is read yet.

        Args:
            directory: The one that heads share.
        """
        self._directory = directory
        self._heads: dict[str, HeadTables] = {}
        self._unlisted: list[GpulseError] = []
        """Why tables of heads could not be looked at."""
        self._unread: dict[str, GpulseError] = {}
        """By head, why what it has could not be read, although it is there."""
        self._since: float | None = None
        """When the first of that was."""
        self._looked = float("-inf")
        self._lock = threading.Lock()

    @property
    def trouble(self) -> Trouble | None:
        """Why the tables of one of the heads cannot be read at the moment."""
        failed = [*self._unlisted, *list(self._unread.values())]
        if not failed:
            self._since = None
            return None
        self._since = time.time() if self._since is None else self._since
        return Trouble(self._since, failed[0].message, failed[0].hint)

    def missing(self, failed: Mapping[str, GpulseError]) -> list[GpulseError]:
        """Take in which heads could not be read for an answer; everything that is missing from it."""
        self._unread |= failed
        return [*self._unlisted, *failed.values()]

    def was_read(self, head: str) -> None:
        """What a head has could be read."""
        self._unread.pop(head, None)

    def look(self) -> dict[str, HeadTables]:
        """The heads' tables as they are by now; reads the shared directory.

        Raises:
            GpulseError: It cannot be read at all.
        """
        with self._lock:
            if time.monotonic() - self._looked >= _REFRESH_SECONDS:
                self._refresh()
                self._looked = time.monotonic()
            return dict(self._heads)

    def _refresh(self) -> None:
        with disk_errors(f"read the shared directory {self._directory}"):
            heads = head_ids(self._directory)
        failed: list[GpulseError] = []
        for head in heads:
            tables = self._heads.pop(head, None)
            try:
                tables = tables or HeadTables(self._directory, head)
                tables.refresh()
            except GpulseError as error:  # the others have something to say, too
                failed.append(error)
                if tables is not None:
                    with suppress(GpulseError):
                        tables.close()
            else:
                self._heads[head] = tables
        self._unlisted = failed
        for head in set(self._heads) - set(heads):
            self._heads.pop(head).close()
        for head in set(self._unread) - set(self._heads):
            self._unread.pop(head, None)

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            heads, self._heads = self._heads, {}
        for tables in heads.values():
            tables.close()
