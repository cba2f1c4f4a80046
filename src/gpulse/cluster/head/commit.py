"""Group commit: what came from all agents goes to disk once a second, and only then is acknowledged."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

from gpulse.errors import DiskError, GpulseError
from gpulse.store.log.records import Entry
from gpulse.store.outage import Outage

log = logging.getLogger(__name__)

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")

COMMIT_SECONDS = 1.0
_HURRY_BYTES = 16 << 20
"""With so much waiting the next commit comes at once."""
MOST_WAITING_BYTES = 64 << 20
"""With so much waiting agents are not read from until it is less."""
_RETRY_SECONDS = 1.0
SLOW_SECONDS = 5.0
"""A commit that takes longer means a disk that is too slow."""
_MAX_KEPT_FACTS = 100_000
_MAX_PROBE = 1 << 20


class Journal(Protocol):
    """Where entries become durable. Its methods block, and are called from one thread at a time."""

    def commit(self, entries: Sequence[Entry]) -> None:
        """Write entries, and return when they are on disk.

        Raises:
            DiskError: It is not certain that they are.
        """

    def repair(self, probe_bytes: int) -> list[Entry]:
        """Make it usable again after a failure; the entries that turn out to be on disk after all.

        Args:
            probe_bytes: So much must fit for it to count as usable.

        Raises:
            GpulseError: It is not usable yet.
        """


class _Waiting(NamedTuple):
    """Something for the next commit."""

    entry: Entry | None
    told: asyncio.Future[None] | None
    """For whoever waits until it is on disk."""


class Committer:
    """Gathers entries, commits them together, and tells whoever waits."""

    def __init__(
        self,
        journal: Journal,
        *,
        now: Callable[[], float],
        done: Callable[[Sequence[Entry]], None],
        failed: Callable[[Outage], None],
        seconds: float = COMMIT_SECONDS,
    ) -> None:
        """Prepare to commit.

        Args:
            journal: Where entries go.
            now: The head's clock.
            done: Called with entries once they are durable.
            failed: Called when they could not be made so; frames among them are forgotten then.
            seconds: From one commit to the next.
        """
        self.trouble: Outage | None = None
        self.waiting_bytes = 0
        self._journal = journal
        self._now = now
        self._done = done
        self._failed = failed
        self._seconds = seconds
        self._waiting: list[_Waiting] = []
        self._failed_bytes = 0
        self._thread = ThreadPoolExecutor(1, "commit")
        self._began: float | None = None
        self.last_seconds: float | None = None
        """How long the last commit took."""
        self._hurry = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def slow_seconds(self) -> float | None:
        """For how long the disk has been waited for, when that is longer than it should be."""
        if self._began is None or self._now() - self._began < SLOW_SECONDS:
            return None
        return self._now() - self._began

    def add(self, entry: Entry) -> None:
        """Take one entry for the next commit."""
        self._take(_Waiting(entry, None))

    async def durable(self, entry: Entry | None = None) -> None:
        """Wait until an entry, and everything that was added before it, is on disk.

        Raises:
            DiskError: It is not, and will not be.
        """
        if self.trouble is not None:
            raise DiskError(self.trouble.message, hint=self.trouble.hint)
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take(_Waiting(entry, told))
        self._hurry.set()
        await told

    def _take(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        if waiting.entry is not None:
            self.waiting_bytes += len(waiting.entry.payload)
        if self.waiting_bytes >= _HURRY_BYTES:
            self._hurry.set()
            if self.waiting_bytes >= MOST_WAITING_BYTES:
                self._room.clear()

    async def room(self) -> None:
        """Wait until there is room for more."""
        await self._room.wait()

    async def _in_thread(self, work: Callable[[_Given], _Result], given: _Given) -> _Result:
        """A thread of its own: those of all others may be busy with questions."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, given)

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown(wait=False)

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
        taken, self._waiting = self._waiting, []
        entries = [waiting.entry for waiting in taken if waiting.entry is not None]
        self.waiting_bytes = 0
        self._room.set()
        try:
            if entries:
                self._began = self._now()
                try:
                    await self._in_thread(self._journal.commit, entries)
                finally:
                    self.last_seconds = max(0.0, self._now() - self._began)
                    self._began = None
        except DiskError as error:
            self._stop(error, taken)
            return
        self._done(entries)
        for waiting in taken:
            if waiting.told is not None and not waiting.told.done():
                waiting.told.set_result(None)

    def _stop(self, error: GpulseError, taken: Sequence[_Waiting]) -> None:
        """Tell those who wait that it was in vain, and keep the facts that nobody waits for."""
        log.error("nothing is stored: %s%s", error.message, f" ({error.hint})" if error.hint else "")
        self.trouble = Outage(self._now(), error.message, error.hint)
        given_up = [
            *taken,
            *self._waiting,
        ]  # frames and requests came while the disk was being waited for, too
        self._failed_bytes = sum(len(waiting.entry.payload) for waiting in given_up if waiting.entry)
        for waiting in given_up:
            if waiting.told is not None and not waiting.told.done():
                waiting.told.set_exception(DiskError(error.message, hint=error.hint))
        kept = [
            waiting
            for waiting in given_up
            if waiting.told is None and waiting.entry is not None and waiting.entry.fact is not None
        ]
        self._waiting = kept[-_MAX_KEPT_FACTS:]
        self.waiting_bytes = sum(len(waiting.entry.payload) for waiting in kept if waiting.entry)
        self._failed(self.trouble)

    async def _repair(self) -> None:
        try:
            found = await self._in_thread(self._journal.repair, min(self._failed_bytes, _MAX_PROBE))
        except GpulseError as error:
            if self.trouble is not None and error.message != self.trouble.message:
                log.error("still nothing is stored: %s", error.message)
                self.trouble = self.trouble._replace(message=error.message, hint=error.hint)
            return
        written = Counter(entry.payload for entry in found)
        left = []
        for waiting in self._waiting:
            if waiting.entry is not None and written[waiting.entry.payload]:
                written[waiting.entry.payload] -= 1  # it was on disk after all
            else:
                left.append(waiting)
        self._waiting = left
        since = 0.0 if self.trouble is None else self._now() - self.trouble.since
        log.warning("storing again after %.0f s", since)
        self.trouble = None
        self._done(found)
