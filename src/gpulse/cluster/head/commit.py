"""Group commit: what came from all agents goes to disk once a second, and only then is acknowledged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gpulse.errors import DiskError, GpulseError
from gpulse.store.entry import Entry

log = logging.getLogger(__name__)

COMMIT_SECONDS = 1.0
_HURRY_BYTES = 16 << 20
"""With so much waiting the next commit comes at once."""
MOST_WAITING_BYTES = 64 << 20
"""With so much waiting agents are not read from until it is less."""
_RETRY_SECONDS = 1.0
_FOUNDATIONS = frozenset({"node", "run", "layout", "devices"})


class Journal(Protocol):
    """Where entries become durable. Its methods block, and are called from one thread at a time."""

    def commit(self, entries: Sequence[Entry]) -> None:
        """Write entries, and return when they are on disk.

        Raises:
            DiskError: It is not certain that they are.
        """

    def repair(self) -> list[Entry]:
        """Make it usable again after a failure; the entries that turn out to be on disk after all.

        Raises:
            GpulseError: It is not usable yet.
        """


class Trouble(NamedTuple):
    """Why nothing can be stored."""

    since: float
    message: str
    hint: str | None


class Committer:
    """Gathers entries, commits them together, and tells whoever waits."""

    def __init__(
        self,
        journal: Journal,
        *,
        now: Callable[[], float],
        done: Callable[[Sequence[Entry]], None],
        failed: Callable[[Trouble], None],
        seconds: float = COMMIT_SECONDS,
    ) -> None:
        """Prepare to commit.

        Args:
            journal: Where entries go.
            now: The head's clock.
            done: Called with entries once they are durable.
            failed: Called when they could not be made so; they are forgotten then.
            seconds: From one commit to the next.
        """
        self.trouble: Trouble | None = None
        self.waiting_bytes = 0
        self._journal = journal
        self._now = now
        self._done = done
        self._failed = failed
        self._seconds = seconds
        self._waiting: list[Entry] = []
        self._hurry = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._barriers: list[asyncio.Future[None]] = []

    def add(self, entry: Entry) -> None:
        """Take one entry for the next commit."""
        self._waiting.append(entry)
        self.waiting_bytes += len(entry.payload)
        if self.waiting_bytes >= _HURRY_BYTES:
            self._hurry.set()
            if self.waiting_bytes >= MOST_WAITING_BYTES:
                self._room.clear()

    async def room(self) -> None:
        """Wait until there is room for more."""
        await self._room.wait()

    async def durable(self) -> None:
        """Wait until everything that was added so far is on disk.

        Raises:
            DiskError: It is not.
        """
        if self.trouble is not None:
            raise DiskError(self.trouble.message, hint=self.trouble.hint)
        barrier = asyncio.get_running_loop().create_future()
        self._barriers.append(barrier)
        self._hurry.set()
        await barrier

    async def run(self) -> None:
        """Commit until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._seconds):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            self._hurry.clear()
            await self.commit()
            while self.trouble is not None:
                await asyncio.sleep(_RETRY_SECONDS)
                await self._repair()

    async def commit(self) -> None:
        """Commit what waits, now."""
        entries, self._waiting = self._waiting, []
        barriers, self._barriers = self._barriers, []
        self.waiting_bytes = 0
        self._room.set()
        try:
            if entries:
                await asyncio.to_thread(self._journal.commit, entries)
        except DiskError as error:
            self._stop(error, entries)
            for barrier in barriers:
                if not barrier.done():
                    barrier.set_exception(DiskError(error.message, hint=error.hint))
            return
        self._done(entries)
        for barrier in barriers:
            if not barrier.done():
                barrier.set_result(None)

    def _stop(self, error: GpulseError, entries: Sequence[Entry]) -> None:
        log.error("nothing is stored: %s%s", error.message, f" ({error.hint})" if error.hint else "")
        self.trouble = Trouble(self._now(), error.message, error.hint)
        self._waiting = [entry for entry in (*entries, *self._waiting) if _is_needed_later(entry)]
        self.waiting_bytes = sum(len(entry.payload) for entry in self._waiting)
        self._failed(self.trouble)

    async def _repair(self) -> None:
        try:
            found = await asyncio.to_thread(self._journal.repair)
        except GpulseError as error:
            if self.trouble is not None and error.message != self.trouble.message:
                log.error("still nothing is stored: %s", error.message)
                self.trouble = self.trouble._replace(message=error.message, hint=error.hint)
            return
        since = 0.0 if self.trouble is None else self._now() - self.trouble.since
        log.warning("storing again after %.0f s", since)
        self.trouble = None
        self._done(found)


def _is_needed_later(entry: Entry) -> bool:
    """Whether frames that come after the failure rely on a fact; writing it twice does no harm."""
    return entry.fact is not None and entry.fact["fact"] in _FOUNDATIONS
