"""The head's house-keeping: what is in the log becomes history, what is too old goes."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from gpulse.cluster import wire
from gpulse.cluster.head.fleet import Fleet
from gpulse.errors import GpulseError
from gpulse.store.local import SEAL_BYTES, SEAL_SECONDS, LocalStore
from gpulse.store.outage import Outage

log = logging.getLogger(__name__)

_LOOK_SECONDS = 10.0
_FIRST_TIDY_SECONDS = 60.0
_TIDY_SECONDS = 600.0
_MAX_UNSEALED_BYTES = 4 * SEAL_BYTES
"""When sealing fails for so long that this much is in memory, the older half of it is found on disk alone."""
_MARGIN_SECONDS = 1.0
_HOLD_SECONDS = 6 * 3600.0


class Rules(NamedTuple):
    """How long and how much is kept."""

    keep_seconds: float = 30 * 86_400.0
    limit_bytes: int | None = None
    seal_seconds: float = SEAL_SECONDS
    """How long frames may be in the log and in memory alone."""
    book_seconds: float | None = None
    """How long nodes, sessions, events and processes are kept; as long as samples when None."""


class Notes(Protocol):
    """Where facts and events are written down."""

    def note(self, fact: str, **fields: Any) -> None:
        """Write a fact."""

    def event(self, kind: str, node: int | None, **detail: Any) -> None:
        """Write down that something happened."""


class Maintenance:
    """Seals, merges, drops and forgets as time goes by."""

    def __init__(
        self, archive: LocalStore, fleet: Fleet, notes: Notes, rules: Rules, *, now: Callable[[], float]
    ) -> None:
        self.trouble: Outage | None = None
        """Why it cannot be done at the moment."""
        self._archive = archive
        self._fleet = fleet
        self._notes = notes
        self._rules = rules
        self._now = now
        self._held_until = 0.0

    def hold(self) -> None:
        """The clock jumped: drop nothing for its age until somebody had time to see whether it is right."""
        self._held_until = time.monotonic() + _HOLD_SECONDS

    async def run(self) -> None:
        """Do it until cancelled."""
        sealed = time.monotonic()
        tidied = sealed - _TIDY_SECONDS + _FIRST_TIDY_SECONDS
        while True:
            await asyncio.sleep(min(_LOOK_SECONDS, self._rules.seal_seconds))
            now = time.monotonic()
            try:
                unsealed = self._archive.unsealed_bytes
                if unsealed >= SEAL_BYTES or now - sealed >= self._rules.seal_seconds:
                    await self._seal()
                    sealed = now
                if now - tidied >= _TIDY_SECONDS:
                    tidied = now
                    await self._tidy()
                self.trouble = None
            except GpulseError as error:
                self._failed(error)

    async def _seal(self) -> None:
        began = self._now()
        sealed = await asyncio.to_thread(self._archive.seal)
        if sealed.missing:
            log.error("%d records of the log were gone before they became history", sealed.missing)
            self._notes.event("records_lost", None, records=sealed.missing)
        if sealed.unreadable:
            log.error("%d parts of the log cannot be read, and are not in the history", sealed.unreadable)
            self._notes.event("records_unreadable", None, parts=sealed.unreadable)
        needed = await asyncio.to_thread(self._archive.needed_since)
        self._forget_layouts(min(began, needed))

    def _forget_layouts(self, done: float) -> None:
        """Frames that came before `done` are history, which needs no layouts, and nobody has yet to send them on."""
        now = self._now()
        before = min(done - _MARGIN_SECONDS, now - wire.FORGET_SECONDS)
        old = self._fleet.forget_layouts(before, now)
        if old:
            self._notes.note("forget", layouts=[str(layout) for layout in old])

    async def _tidy(self) -> None:
        rules, is_held = self._rules, time.monotonic() < self._held_until
        dropped = await asyncio.to_thread(
            self._archive.tidy,
            self._now(),
            keep_seconds=math.inf if is_held else rules.keep_seconds,
            limit_bytes=rules.limit_bytes,
            book_seconds=rules.book_seconds,
        )
        if dropped:
            log.info("dropped %d old pieces of history", len(dropped))

    def _failed(self, error: GpulseError) -> None:
        if self.trouble is None or self.trouble.message != error.message:
            log.error("%s%s", error.message, f" ({error.hint})" if error.hint else "")
            since = self._now() if self.trouble is None else self.trouble.since
            self.trouble = Outage(since, error.message, error.hint)
        if self._archive.unsealed_bytes > _MAX_UNSEALED_BYTES:
            log.warning(
                "too much waits to become history: the older half is left on disk alone until it does"
            )
            self._archive.relieve()
