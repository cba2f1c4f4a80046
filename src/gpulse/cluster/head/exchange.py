"""The side of sharing that touches the shared directory: it tells and hears, and may hang whenever it does."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from gpulse.errors import GpulseError
from gpulse.store.archive import Archive
from gpulse.store.book.foreign import NOTHING, Reached
from gpulse.store.disk import disk_error
from gpulse.store.shared.copying import drop_tables
from gpulse.store.shared.folder import drop_files
from gpulse.store.shared.life import Life, head_ids, read_life, server_time, write_life
from gpulse.store.shared.outbox import Outbox
from gpulse.store.shared.reading import Stretch, read_on
from gpulse.store.trouble import Trouble

ALIVE_SECONDS = 90.0
"""A head that said nothing for longer is taken to be gone. NFS may show a directory as it was a minute ago."""
_LIFE_SECONDS = 5.0
_RETRY_SECONDS = 120.0
_DROP_SECONDS = 3600.0
_STRETCH_BYTES = 1 << 20
"""So much is taken in at once, which must not take long."""

Take = Callable[[str, Reached, Stretch], None]
"""Given a head, up to where it was heard, and what it tells after that."""


class Exchange:
    """Tells other heads, and hears them. For one thread; `is_alive`, `others` and what they need may be asked by any."""

    def __init__(
        self,
        archive: Archive,
        directory: str,
        head_id: str,
        *,
        reached: Mapping[str, Reached],
        take: Take,
        now: Callable[[], float],
        keep_seconds: float,
    ) -> None:
        """Prepare; the directory is not touched yet.

        Args:
            archive: This head's store.
            directory: The one that all heads see.
            head_id: Which head this is.
            reached: By head how far it is taken in.
            take: Called with what others tell; `reached` says when it is taken in.
            now: This head's clock.
            keep_seconds: For how long facts are kept there.
        """
        self.outbox = Outbox(archive, directory, head_id, now=now)
        self.others: Mapping[str, Life] = {}
        """The other heads, as they said they are."""
        self.trouble: Trouble | None = None
        """Why one of them cannot be heard at the moment, though the directory can be read."""
        self._archive = archive
        self._directory = directory
        self._id = head_id
        self._reached = reached
        self._take = take
        self._now = now
        self._keep_seconds = keep_seconds
        self._started = now()
        self._looked = -math.inf
        self._handed: dict[str, tuple[Reached, float]] = {}
        """By head after which place something was handed over to be taken in, and when to try that again."""
        self._told = -math.inf
        self._written: float | None = None
        """When this head said how it is, on the file server's clock."""
        self._dropped = -math.inf

    @property
    def is_known(self) -> bool:
        """Whether it is known by now which heads are there."""
        oldest = time.monotonic() - ALIVE_SECONDS
        return self._written is not None and min(self._looked, self._told) > oldest

    def is_alive(self, life: Life) -> bool:
        """Whether a head is there, by the file server's clock: those of heads may differ."""
        own = self._written
        return self.is_known and not life.ended and own is not None and life.written > own - ALIVE_SECONDS

    def tell(self, *, is_ending: bool = False) -> None:
        """Write everything that is committed, and now and then how this head is.

        Raises:
            OSError: It cannot be written.
            GpulseError: The directory is not there, or the log cannot be read.
        """
        check_directory(self._directory)
        if self._written is None:
            self._check_alone()
        self.outbox.write()
        now = time.monotonic()
        if now - self._told >= _LIFE_SECONDS or is_ending:
            told, newest = self.outbox.told, self._archive.newest
            life = Life(
                self._id, socket.gethostname(), self._started, self._now(), newest, told, ended=is_ending
            )
            self._written = write_life(self._directory, life)
            self._told, self.outbox.durable = now, told
        if now - self._dropped >= _DROP_SECONDS and math.isfinite(self._keep_seconds):
            self._dropped = now
            self._drop()

    def _check_alone(self) -> None:
        """See that nobody else is this head.

        Raises:
            OSError: That cannot be seen.
            GpulseError: Somebody is.
        """
        life = read_life(self._directory, self._id)
        if (
            life is None or life.ended or life.host == socket.gethostname()
        ):  # the data directory's lock is enough
            return
        if life.written > server_time(self._directory) - ALIVE_SECONDS:
            raise GpulseError(
                f"the head on {life.host} tells others under the same name as this one",
                hint="one data directory is a copy of the other: begin one of them with an empty one",
            )

    def _drop(self) -> None:
        """Remove what is too old: of this head, and of those that are gone for that long."""
        before = self._now() - self._keep_seconds
        self.outbox.drop_before(before)
        for head, life in self.others.items():
            if life.alive < before:
                with suppress(OSError, GpulseError):  # it may be another user's; whoever can removes it
                    drop_files(f"{self._directory}/{head}", before)
                    drop_tables(f"{self._directory}/{head}", before)

    def hear(self) -> None:
        """Hand over what is new of every other head; one that cannot be read does not keep others from being heard.

        Raises:
            OSError: The directory cannot be read.
        """
        heads = [head for head in head_ids(self._directory) if head != self._id]
        failed: dict[str, OSError] = {}
        lives: dict[str, Life] = {}
        for head in heads:
            try:
                life = read_life(self._directory, head)
            except OSError as error:
                failed[head], life = error, self.others.get(head)
            if life is not None:
                lives[head] = life
        self.others = lives
        self._looked = time.monotonic()
        for head in heads:
            try:
                self._hear(head)
            except OSError as error:
                failed.setdefault(head, error)
        self._remember(failed)

    def _remember(self, failed: Mapping[str, OSError]) -> None:
        """Keep why heads could not be heard, for whoever asks."""
        if not failed:
            self.trouble = None
            return
        head, error = next(iter(failed.items()))
        told = disk_error(f"read what another head tells in {self._directory}/{head}", error)
        since = self._now() if self.trouble is None else self.trouble.since
        self.trouble = Trouble(since, told.message, told.hint)

    def _hear(self, head: str) -> None:
        """Hand over what a head tells, once what it told before is taken in."""
        before = self._reached.get(head, NOTHING)
        handed = self._handed.get(head)
        if handed is not None and handed[0] == before and time.monotonic() < handed[1]:
            return
        stretch = read_on(f"{self._directory}/{head}", *before, most_bytes=_STRETCH_BYTES)
        if stretch is not None:
            # What is handed over again, because it seems to be lost, is taken in once.
            self._handed[head] = before, time.monotonic() + _RETRY_SECONDS
            self._take(head, before, stretch)


def check_directory(directory: str) -> None:
    """See that the shared directory is there: it is not made, since a file system may belong in its place.

    Raises:
        GpulseError: It is not.
    """
    if not os.path.isdir(directory):
        raise GpulseError(
            f"there is no shared directory {directory}", hint="mount its file system, or make it on one"
        )
