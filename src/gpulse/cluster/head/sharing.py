"""What several heads share through a directory: each tells the others what it knows, and takes in what they tell.

The directory is on a file server, which may hang, be full or be gone. So a thread of its own touches it, nobody waits for
that thread, and what it could not write stays in the head's log until it can.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from gpulse.cluster.api.interface import Document
from gpulse.cluster.head.courier import Courier
from gpulse.cluster.head.exchange import Exchange, check_directory
from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.interpreter import Interpreter
from gpulse.cluster.head.sessions import Sessions, recovered, woken
from gpulse.cluster.head.upkeep import Notes
from gpulse.model.session import Session
from gpulse.store.agent_events import decode_events
from gpulse.store.archive import Archive
from gpulse.store.book.foreign import Reached
from gpulse.store.book.values import UNREADABLE
from gpulse.store.entry import Entry
from gpulse.store.shared.copying import Copier
from gpulse.store.shared.reading import Stretch
from gpulse.store.shared.tables import SharedTables
from gpulse.store.trouble import Trouble

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_COPY_SECONDS = 10.0
_FINISH_SECONDS = 3.0
_MOMENT_SECONDS = 1e-3
"""How long an interruption was during which another head was there; the later word counts."""
_MOST_LOG_BYTES = 2 << 30
"""With more of the log waiting, the file server is not waited for any more."""
_LIMIT_LOOK_SECONDS = 10.0


class Sharing:
    """One head among others."""

    def __init__(
        self,
        archive: Archive,
        directory: str,
        *,
        head_id: str,
        notes: Notes,
        sessions: Sessions,
        fleet: Fleet,
        now: Callable[[], float],
        keep_seconds: float = math.inf,
        resume: bool = False,
    ) -> None:
        """Prepare to share; the directory is not touched yet.

        Args:
            archive: This head's store.
            directory: The one that all heads see.
            head_id: Which head this is.
            notes: Where facts are written down.
            sessions: Those of this head.
            fleet: Its nodes.
            now: Its clock.
            keep_seconds: For how long facts are kept there.
            resume: Go on with sessions that nobody carried on.
        """
        self.directory = directory
        self._archive = archive
        self._notes = notes
        self._sessions = sessions
        self._fleet = fleet
        fleet.shares = True
        self._now = now
        self._keep_seconds = keep_seconds
        self._resume = resume
        self._interpreter = Interpreter(fleet, notes, now=now)
        self._reached: dict[str, Reached] = archive.book.shared()
        self._exchange = Exchange(
            archive,
            directory,
            head_id,
            reached=self._reached,
            take=lambda *told: self._call(self._take, *told),
            now=now,
            keep_seconds=keep_seconds,
        )
        self._started = now()
        self._left_at = archive.newest
        """When the head before this one got frames last."""
        self._left_active = {session.id for session in sessions.active()}
        self._is_awake = False
        self._is_ending = False
        self._hold = 0
        """Up to which position the log may go although it is not told."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.tables = SharedTables(directory, archive.nodes, own=archive, own_id=head_id)
        """What processes did that other heads saw."""
        self._copier = Copier(archive.directory, f"{directory}/{head_id}", archive.nodes)
        self.facts_courier = Courier(
            "sharing", directory, ("write", self._tell), ("read", self._hear), seconds=_LOOK_SECONDS, now=now
        )
        self.tables_courier = Courier(
            "sharing-tables", directory, ("write tables to", self._copy), seconds=_COPY_SECONDS, now=now
        )

    # --- what others ask

    @property
    def shared_to(self) -> int:
        """Up to which position the log is not needed for this any more."""
        return max(self._exchange.outbox.durable, self._hold)

    @property
    def is_carried_on(self) -> bool:
        """Whether another head is there that goes on with sessions when this one ends."""
        return any(map(self._exchange.is_alive, self._exchange.others.values()))

    @property
    def trouble(self) -> Trouble | None:
        """Why not everything is shared at the moment."""
        couriers = self.facts_courier.trouble or self.tables_courier.trouble
        return couriers or self._exchange.trouble or self.tables.trouble

    def state(self, reading: Trouble | None = None) -> Document:
        """How it is, for people; `reading` is why somebody could not read what others share."""
        trouble, exchange = self.trouble or reading, self._exchange
        return {
            "state": "ok" if trouble is None else "failing",
            "directory": self.directory,
            "error": trouble.message if trouble else None,
            "hint": trouble.hint if trouble else None,
            "since": trouble.since if trouble else None,
            "heads": [
                {"id": life.id, "host": life.host, "alive": exchange.is_alive(life), "newest": life.newest}
                for life in exchange.others.values()
            ],
            "waiting_records": exchange.outbox.behind,
            "lost_records": exchange.outbox.lost,
        }

    # --- the loop's side

    async def run(self) -> None:
        """Share until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._notes.note("sharing", time=self._now())
        self.facts_courier.start()
        self.tables_courier.start()
        told: str | None = None
        looked = -math.inf
        try:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                trouble = self.trouble
                told = _told(trouble, told)
                if trouble is not None and time.monotonic() - looked >= _LIMIT_LOOK_SECONDS:
                    looked = time.monotonic()
                    await self._check_limit()
        finally:
            self.close()

    async def _check_limit(self) -> None:
        """Let the log go when too much of it waits for the file server."""
        with suppress(OSError):
            usage = await asyncio.to_thread(self._archive.usage)
            if usage.log_bytes > _MOST_LOG_BYTES:
                self._hold = self._archive.accepted

    def committed(self, entries: Sequence[Entry]) -> None:
        """Entries are on disk: others are to be told, and what others told counts here from now on."""
        self._exchange.outbox.committed(entries, self._fleet.register.by_id)
        for entry in entries:
            if entry.fact is not None and entry.fact["fact"] == "shared":
                for fact in entry.fact["facts"]:
                    with suppress(*UNREADABLE):  # an older version may have written down what is none
                        self._took(fact)
                self._reached[entry.fact["head"]] = Reached(*entry.fact["to"])
        self.facts_courier.wake()

    def _took(self, fact: Document) -> None:
        if fact["fact"] == "session":
            self._heard_session(Session.from_dict(fact))
        elif fact["fact"] == "frame":
            member = self._fleet.members.get(fact["node"])
            if member is not None and not member.connected:
                self._fleet.heard_elsewhere(member, fact["time"])
                member.happened(decode_events(fact["events"].encode()).events, fact["time"])

    def _heard_session(self, told: Session) -> None:
        """Take in what another head says of a session; it took itself for the last one in vain when this one was there."""
        if self._sessions.hear(told) and told.state == "interrupted":
            since = told.interruptions[-1].start
            if self._started < since and not self._is_ending:
                left = recovered(told, since + _MOMENT_SECONDS)
                self._notes.note("session", **left.to_dict())
                log.warning("session %s goes on here, though another head left it", left.name)

    def _take(self, head: str, before: Reached, stretch: Stretch) -> None:
        """Write down what another head told, and how far that is."""
        facts = list(self._interpreter.translated(head, stretch.facts))
        if stretch.unreadable:
            log.error("%d lines of %s in %s cannot be read", stretch.unreadable, head, self.directory)
        places = {
            "from": list(before),
            "to": [stretch.file, stretch.offset, max(before.position, stretch.position)],
        }
        self._notes.note("shared", head=head, time=self._now(), facts=facts, **places)

    def _wake_sessions(self) -> None:
        """Sessions that went on when the last head ended are interrupted since then, unless another head was there."""
        if self.is_carried_on:
            return
        moments = (self._left_at, *(life.newest for life in self._exchange.others.values()))
        newest = max((moment for moment in moments if moment is not None), default=None)
        for session in self._sessions.all():
            if session.is_active and session.id not in self._left_active:
                continue  # it began here since then
            left = woken(session, newest, self._started, resume=self._resume)
            if left != session:
                self._notes.note("session", **left.to_dict())
                log.warning(
                    "session %s was interrupted; %s",
                    left.name,
                    "it goes on" if left.is_active else f"to go on: gpulse session recover {left.name}",
                )

    async def finish(self) -> None:
        """Tell the rest, and that this head is gone; for a moment at most."""
        self._is_ending = True
        await asyncio.to_thread(self.facts_courier.finish, _FINISH_SECONDS)

    def close(self) -> None:
        """End the threads that do not wait for the file server; the others end with the process."""
        if self.facts_courier.close():  # else closing a file might wait, too
            self._exchange.outbox.close()
        if self.tables_courier.close():
            self.tables.close()

    def _call(self, work: Callable[..., None], *arguments: object) -> None:
        """Have something done by the loop's thread."""
        if self._loop is None:
            work(*arguments)
            return
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(work, *arguments)

    # --- the threads' side

    def _tell(self) -> None:
        self._exchange.tell(is_ending=self._is_ending)

    def _hear(self) -> None:
        if not self._is_ending:
            self._exchange.hear()
            if not self._is_awake and self._exchange.is_known:
                self._is_awake = True
                self._call(self._wake_sessions)

    def _copy(self) -> None:
        check_directory(self.directory)
        while not self._is_ending and self._copier.copy():
            pass
        if math.isfinite(self._keep_seconds):
            self._copier.drop_before(self._now() - self._keep_seconds)


def _told(trouble: Trouble | None, before: str | None) -> str | None:
    """Say what is new about trouble; what was said last."""
    now = None if trouble is None else trouble.message
    if now == before:
        return before
    if trouble is None:
        log.warning("the shared directory can be used again")
    else:
        log.error("%s%s", trouble.message, f" ({trouble.hint})" if trouble.hint else "")
    return now
