"""Group commit: write the entries of all agents, facts and events to disk once a second, and only then acknowledge them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

from gpulse.errors import DiskError, GpulseError
from gpulse.store.incomplete_answers import BackendOutage
from gpulse.store.log.record_payloads import LogEntry

log = logging.getLogger(__name__)

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")

COMMIT_SECONDS = 1.0
_COMMIT_NOW_BYTES = 16 << 20
"""When this much is pending, the next commit starts at once."""
MAX_WAITING_BYTES = 64 << 20
"""When this much is pending, the head stops reading from agents until it is less."""
_RETRY_SECONDS = 1.0
MIN_SLOW_SECONDS = 5.0
"""A commit that takes longer means that the disk is too slow."""
_MAX_KEPT_FACTS = 100_000
_MAX_PROBE_BYTES = 1 << 20
_MAX_FACT_BYTES = 32 << 20
"""Half of the maximum size of a log record."""


class Journal(Protocol):
    """The log that makes entries durable. Its methods block, and are called from one thread at a time."""

    def commit(self, entries: Sequence[LogEntry]) -> None:
        """Write entries, and return when they are on disk.

        Raises:
            DiskError: They may not be on disk.
        """

    def repair(self, probe_bytes: int) -> list[LogEntry]:
        """Make the log usable again after a failure; return entries that turn out to be on disk after all.

        Args:
            probe_bytes: The log counts as usable if this much fits.

        Raises:
            GpulseError: The log is not usable yet.
        """


class _PendingEntry(NamedTuple):
    """An entry for the next commit, or a caller that waits for it."""

    entry: LogEntry | None
    future: asyncio.Future[None] | None
    """Resolved once the entry is on disk."""


class Committer:
    """Collects entries, commits them together, and notifies waiting callers."""

    def __init__(
        self,
        journal: Journal,
        *,
        now: Callable[[], float],
        done: Callable[[Sequence[LogEntry]], None],
        failed: Callable[[BackendOutage], None],
        seconds: float = COMMIT_SECONDS,
    ) -> None:
        """Prepare to commit.

        Args:
            journal: The log.
            now: The head's clock.
            done: Called with entries once they are durable.
            failed: Called when a commit failed; its frames are dropped then.
            seconds: Time between two commits.
        """
        self.trouble: BackendOutage | None = None
        self.waiting_bytes = 0
        self._journal = journal
        self._now = now
        self._done = done
        self._failed = failed
        self._seconds = seconds
        self._waiting: list[_PendingEntry] = []
        self._failed_bytes = 0
        self._thread = ThreadPoolExecutor(1, "commit")
        self._began: float | None = None
        self.last_seconds: float | None = None
        """How long the last commit took."""
        self._commit_now = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def slow_seconds(self) -> float | None:
        """How long the current commit has been running, if that is too long."""
        if self._began is None or self._now() - self._began < MIN_SLOW_SECONDS:
            return None
        return self._now() - self._began

    def add(self, entry: LogEntry) -> None:
        """Add an entry to the next commit."""
        self._take(_PendingEntry(entry, None))

    async def durable(self, entry: LogEntry | None = None) -> None:
        """Wait until an entry, and everything added before it, is on disk.

        Raises:
            DiskError: The commit failed.
        """
        if self.trouble is not None:
            raise DiskError(self.trouble.message, hint=self.trouble.hint)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take(_PendingEntry(entry, future))
        self._commit_now.set()
        await future

    def _take(self, waiting: _PendingEntry) -> None:
        self._waiting.append(waiting)
        if waiting.entry is not None:
            self.waiting_bytes += len(waiting.entry.payload)
        if self.waiting_bytes >= _COMMIT_NOW_BYTES:
            self._commit_now.set()
            if self.waiting_bytes >= MAX_WAITING_BYTES:
                self._room.clear()

    async def room(self) -> None:
        """Wait until the pending entries are few enough to add more."""
        await self._room.wait()

    async def _in_thread(self, work: Callable[[_Given], _Result], given: _Given) -> _Result:
        """Run in a dedicated thread, because the shared ones may be busy with queries."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, given)

    def close(self) -> None:
        """Release the thread."""
        self._thread.shutdown(wait=False)

    async def run(self) -> None:
        """Commit until cancelled. The time that a commit takes does not delay the next one."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._seconds
        while True:
            try:
                async with asyncio.timeout_at(due):
                    await self._commit_now.wait()
            except TimeoutError:
                pass
            self._commit_now.clear()
            due = loop.time() + self._seconds
            await self.commit()
            while self.trouble is not None:
                await asyncio.sleep(_RETRY_SECONDS)
                await self._repair()

    async def commit(self) -> None:
        """Commit the pending entries now."""
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
            if waiting.future is not None and not waiting.future.done():
                waiting.future.set_result(None)

    def _stop(self, error: GpulseError, taken: Sequence[_PendingEntry]) -> None:
        """Fail the waiting callers, and keep the facts that no caller waits for."""
        log.error("storage failed: %s%s", error.message, f" ({error.hint})" if error.hint else "")
        self.trouble = BackendOutage(self._now(), error.message, error.hint)
        given_up = [
            *taken,
            *self._waiting,
        ]  # including those that arrived during the failed commit
        self._failed_bytes = sum(len(waiting.entry.payload) for waiting in given_up if waiting.entry)
        for waiting in given_up:
            if waiting.future is not None and not waiting.future.done():
                waiting.future.set_exception(DiskError(error.message, hint=error.hint))
        kept = [
            waiting
            for waiting in given_up
            if waiting.future is None and waiting.entry is not None and waiting.entry.fact is not None
        ]
        self._waiting = kept[-_MAX_KEPT_FACTS:]
        self.waiting_bytes = sum(len(waiting.entry.payload) for waiting in kept if waiting.entry)
        self._failed(self.trouble)

    async def _repair(self) -> None:
        try:
            found = await self._in_thread(self._journal.repair, min(self._failed_bytes, _MAX_PROBE_BYTES))
        except GpulseError as error:
            if self.trouble is not None and error.message != self.trouble.message:
                log.error("storage is still failing: %s", error.message)
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
        log.warning("storage works again after %.0f s", since)
        self.trouble = None
        self._done(found)


class FactRecorder:
    """Writes facts and events."""

    def __init__(self, committer: Callable[[], Committer], now: Callable[[], float]) -> None:
        """Prepare to write.

        Args:
            committer: Makes entries durable.
            now: The head's clock.
        """
        self._committer = committer
        self._now = now

    def note(self, fact: str, **fields: Any) -> None:
        """Write a fact to the log with the next commit; a fact that is too large is replaced by an event."""
        entry = LogEntry.of_fact(fact, **fields)
        if len(entry.payload) > _MAX_FACT_BYTES:
            log.error("the metadata entry %s is too large to be stored: %d bytes", fact, len(entry.payload))
            detail = {"fact": fact, "bytes": len(entry.payload)}
            entry = LogEntry.of_fact(
                "event", time=self._now(), kind="fact_too_large", node=None, detail=detail
            )
        self._committer().add(entry)

    def event(self, kind: str, node: int | None, **detail: Any) -> None:
        """Write an event to the log."""
        self.note("event", time=self._now(), kind=kind, node=node, detail=detail)
