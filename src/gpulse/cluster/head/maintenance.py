"""Maintenance of a head's store: seal the log into history, apply retention, forget unused layouts."""

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
from gpulse.model.finding_acknowledgement import RESPONSE_EVENTS
from gpulse.store.incomplete_answers import BackendOutage
from gpulse.store.local import SEAL_BYTES, SEAL_SECONDS, LocalStore
from gpulse.store.recovery import DAMAGE_EVENT
from gpulse.store.store import Query

log = logging.getLogger(__name__)

_CHECK_SECONDS = 10.0
"""Time between two rounds of maintenance."""
_POLL_SECONDS = 1.0
"""Time between two checks whether enough frames are in memory to start a round at once."""
_FIRST_TIDY_SECONDS = 60.0
_TIDY_SECONDS = 600.0
_MAX_UNSEALED_BYTES = 512 << 20
"""If sealing keeps failing and this much is in memory, the older half is released and stays on disk only."""
_MARGIN_SECONDS = 1.0
_CHECKED_BYTES = 128 << 20
"""How much of the history is checked against its checksums at once, until all of it was checked since the start."""
_RETENTION_HOLD_SECONDS = 6 * 3600.0


MIN_CLOCK_STEP_SECONDS = 1.0
"""A larger change means that the clock was set; smaller ones are slewing."""
MAX_BEHIND_SECONDS = 86_400.0
"""A head continues after its newest data if the machine's clock is behind it by no more than this."""
_MIN_AWAY_SECONDS = 86_400.0
"""If the newest data is older, the machine's clock may be wrong, and nothing is dropped because of its age at once."""
LAST_TIME = 1e12
"""After all times that can be stored."""


def find_last_clock(archive: LocalStore) -> tuple[float, float]:
    """Return the last time that earlier heads of a data directory used, and how far they were ahead of the machine's clock."""
    kinds = frozenset({"head_started", "head_stopped", "head_clock_step"}) | RESPONSE_EVENTS
    newest = [
        event
        for chosen in (kinds, frozenset({"head_clock_step"}))
        for event in archive.events(Query(0.0, LAST_TIME, kinds=chosen, limit=1))
    ]
    times = [event.time for event in newest]
    times += [session.last_time for session in archive.sessions()]
    ahead = newest[-1].detail.get("ahead") if newest else None
    return max([*times, archive.newest or 0.0]), ahead if isinstance(ahead, int | float) else 0.0


class RetentionRules(NamedTuple):
    """Retention: how long and how much data is kept."""

    keep_seconds: float = 30 * 86_400.0
    limit_bytes: int | None = None
    seal_seconds: float = SEAL_SECONDS
    """How long frames may be in the log and in memory only."""
    metadata_seconds: float | None = None
    """Retention of nodes, sessions, events and processes; the same as for samples when None."""


class SealSchedule:
    """When to seal: after a time, or when many frames are in memory; after failures, less and less often."""

    def __init__(self, seconds: float, now: float) -> None:
        """Start to count.

        Args:
            seconds: How long frames may be unsealed.
            now: A time on the monotonic clock, as in all methods.
        """
        self._seconds = seconds
        self._sealed = self._retry_at = now
        self._wait_seconds = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt failed."""
        return self._wait_seconds > 0

    def is_due(self, now: float, unsealed_bytes: int) -> bool:
        """Whether to seal now."""
        is_wanted = unsealed_bytes >= SEAL_BYTES or now - self._sealed >= self._seconds
        return is_wanted and now >= self._retry_at

    def done(self, now: float) -> None:
        """Record success."""
        self._sealed = self._retry_at = now
        self._wait_seconds = 0.0

    def failed(self, now: float) -> None:
        """Record a failure: each one doubles the time until the next attempt, up to the time between two."""
        longest = max(_CHECK_SECONDS, self._seconds)
        self._wait_seconds = min(longest, max(_CHECK_SECONDS, 2 * self._wait_seconds))
        self._retry_at = now + self._wait_seconds


class FactWriter(Protocol):
    """Writes facts and events to the head's log."""

    def note(self, fact: str, **fields: Any) -> None:
        """Write a fact."""

    def event(self, kind: str, node: int | None, **detail: Any) -> None:
        """Write an event."""


class Maintenance:
    """Background task that seals, merges and drops data."""

    def __init__(
        self,
        archive: LocalStore,
        fleet: Fleet,
        notes: FactWriter,
        rules: RetentionRules,
        *,
        now: Callable[[], float],
    ) -> None:
        self.trouble: BackendOutage | None = None
        """Why maintenance is currently failing."""
        self._archive = archive
        self._fleet = fleet
        self._notes = notes
        self._rules = rules
        self._now = now
        self._held_until = 0.0

    def clock_was_set(self, step_seconds: float, ahead_seconds: float) -> None:
        """Record a step of the machine's clock, and suspend retention by age, so that users can check the clock first.

        Args:
            step_seconds: By how much the clock was set.
            ahead_seconds: How far the head's clock is ahead of the machine's now.
        """
        detail = {"seconds": round(step_seconds, 3), "ahead": round(ahead_seconds, 3)}
        self._notes.event("head_clock_step", None, **detail)
        self._hold()

    def check_clock(self, behind_seconds: float, ahead_seconds: float) -> None:
        """Report a machine's clock that does not fit the stored data when the head starts.

        Args:
            behind_seconds: How far it is behind the stored data.
            ahead_seconds: How far the head's clock is ahead of the machine's.
        """
        newest = self._archive.newest
        if behind_seconds >= MIN_CLOCK_STEP_SECONDS:
            log.warning(
                "this machine's clock is %.0f s behind the newest data; %s",
                behind_seconds,
                "timestamps of new data continue from the newest data and stay ahead of the clock until the head has been stopped for that long"
                if behind_seconds <= MAX_BEHIND_SECONDS
                else "new data will have earlier timestamps than existing data",
            )
            self.clock_was_set(-behind_seconds, ahead_seconds)
        elif newest is not None and self._now() - newest > _MIN_AWAY_SECONDS:
            self._hold()

    def _hold(self) -> None:
        self._held_until = time.monotonic() + _RETENTION_HOLD_SECONDS

    async def run(self) -> None:
        """Run until cancelled."""
        schedule = SealSchedule(self._rules.seal_seconds, time.monotonic())
        tidied = time.monotonic() - _TIDY_SECONDS + _FIRST_TIDY_SECONDS
        while True:
            self._report_damage()
            await self._wait(schedule)
            now = time.monotonic()
            try:
                if schedule.is_due(now, self._archive.unsealed_bytes):
                    schedule.failed(now)  # until it is done
                    await self._seal()
                    schedule.done(now)
                if now - tidied >= _TIDY_SECONDS:
                    tidied = now
                    await self._tidy()
                await asyncio.to_thread(self._archive.check_history, _CHECKED_BYTES)
                if not schedule.has_failed:
                    self.trouble = None
            except GpulseError as error:
                self._failed(error)
            if self.trouble is not None and self._archive.unsealed_bytes > _MAX_UNSEALED_BYTES:
                log.warning(
                    "writing to the history keeps failing, and too many frames are in memory; the older half is now kept only on disk"
                )
                self._archive.drop_older_half()

    async def _wait(self, schedule: SealSchedule) -> None:
        """Wait for the next round, or until there is much to seal: a large fleet sends tens of megabytes in ten seconds."""
        end = time.monotonic() + min(_CHECK_SECONDS, self._rules.seal_seconds)
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _POLL_SECONDS))
            if self._archive.unsealed_bytes >= SEAL_BYTES and not schedule.has_failed:
                return

    def _report_damage(self) -> None:
        """Write events about damage that was found since the last call."""
        for damage in self._archive.damage.take():
            self._notes.event(DAMAGE_EVENT, None, **damage.to_detail())

    async def _seal(self) -> None:
        began = self._now()
        sealed = await asyncio.to_thread(self._archive.seal)
        if sealed.missing:
            log.error(
                "log records deleted before they could be written to the history: %d",
                sealed.missing,
            )
            self._notes.event("records_lost", None, records=sealed.missing)
        if sealed.unreadable:
            log.error(
                "unreadable log records or sample blocks, now missing from the history: %d", sealed.unreadable
            )
            self._notes.event("records_unreadable", None, parts=sealed.unreadable)
        needed = await asyncio.to_thread(self._archive.needed_since)
        self._forget_layouts(min(began, needed))

    def _forget_layouts(self, done: float) -> None:
        """Forget unused layouts of frames received before `done`, which are sealed and sent to all databases."""
        now = self._now()
        before = min(done - _MARGIN_SECONDS, now - wire.LAYOUT_EXPIRY_SECONDS)
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
            metadata_seconds=rules.metadata_seconds,
        )
        if dropped:
            log.info("retention deleted old history segments: %d", len(dropped))

    def _failed(self, error: GpulseError) -> None:
        if self.trouble is None or self.trouble.message != error.message:
            log.error("%s%s", error.message, f" ({error.hint})" if error.hint else "")
            since = self._now() if self.trouble is None else self.trouble.since
            self.trouble = BackendOutage(since, error.message, error.hint)
