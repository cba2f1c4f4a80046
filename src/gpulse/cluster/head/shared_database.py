"""A head among other heads of one PostgreSQL database: sessions, nodes and signs of life that they have in common."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.maintenance import Notes
from gpulse.cluster.head.sessions import Sessions, recovered, woken
from gpulse.cluster.protocol.answers import OtherHead, SharedDatabaseStatus
from gpulse.model.packing import device_of
from gpulse.model.session import Session
from gpulse.store.agent_events import UNREADABLE, check_event
from gpulse.store.local import LocalStore
from gpulse.store.log.records import Entry
from gpulse.store.metadata.gpu_time_writer import GpuTimeWriter
from gpulse.store.metadata.postgres import DatabaseConfig, DatabaseError
from gpulse.store.metadata.postgres_store import PostgresStore
from gpulse.store.metadata.postgres_writer import News, PostgresWriter, SeenNode
from gpulse.store.metadata.sessions import is_newer
from gpulse.store.metadata.values import read_object

log = logging.getLogger(__name__)

WAIT_SECONDS = 1.5
"""How long a question waits until PostgreSQL has what this head committed."""
_WAKE_SECONDS = 10.0
"""A head that cannot reach PostgreSQL for so long after its start takes itself for the only one."""
_FINISH_SECONDS = 3.0
_MOMENT_SECONDS = 1e-3
"""The length of an interruption during which another head was there; the later version of a session counts."""


class SharedDatabase:
    """What one head shares with others. Everything but the two threads of the database runs in the head's loop."""

    def __init__(
        self,
        archive: LocalStore,
        config: DatabaseConfig,
        *,
        fleet: Fleet,
        sessions: Sessions,
        notes: Notes,
        changed: Callable[[], None],
        now: Callable[[], float],
        resume: bool,
        keep_seconds: float = math.inf,
    ) -> None:
        """Prepare to share; nothing is connected yet.

        Args:
            archive: This head's store.
            config: Where the database is.
            fleet: The nodes.
            sessions: The sessions.
            notes: Where facts of this head are written down.
            changed: Called when there is something new to see.
            now: The head's clock.
            resume: Go on with sessions that no head carried on.
            keep_seconds: How long the database keeps what is not a session or a node.
        """
        self._archive = archive
        self._config = config
        self._fleet = fleet
        self._sessions = sessions
        self._own_sessions = {session.id for session in sessions.all()}
        """Those in this head's log."""
        self._notes = notes
        self._changed = changed
        self._now = now
        self._resume = resume
        self._started = now()
        self._left_at = archive.newest
        """When the head before this one last received frames."""
        self._is_awake = self._is_ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.writer = PostgresWriter(
            archive,
            config,
            host=socket.gethostname(),
            node_of=fleet.register.by_id.get,
            seen=self._seen,
            heard=self._hear,
            now=now,
            keep_seconds=keep_seconds,
        )
        archive.follow_with(self.writer)
        self._gpu_time = GpuTimeWriter(
            archive,
            config,
            head=archive.head_id,
            node_of=fleet.register.by_id.get,
            is_ready=lambda: self.writer.outage is None,
            now=now,
        )
        register = fleet.register
        self.store = PostgresStore(
            config,
            nodes=lambda: register.by_id,
            number_of=lambda host, machine: (
                None if (node := register.find(host, machine)) is None else node.id
            ),
            check_ready=self._check_ready,
        )

    # --- for the head

    @property
    def is_carried_on(self) -> bool:
        """Whether another head is alive that goes on with sessions when this one ends."""
        return self.writer.outage is None and any(head.is_alive for head in self.writer.heads)

    def status(self) -> SharedDatabaseStatus:
        """Return how it is, for the status of the head."""
        outage = self.writer.outage
        return SharedDatabaseStatus(
            state="ok" if outage is None else "failing",
            database=self._config.shown,
            error=None if outage is None else outage.message,
            hint=None if outage is None else outage.hint,
            since=None if outage is None else outage.since,
            waiting_records=self.writer.waiting_records,
            heads=[
                OtherHead(id=head.id, host=head.host, alive=head.is_alive, newest=head.newest)
                for head in self.writer.heads
            ],
        )

    async def run(self) -> None:
        """Share until cancelled."""
        self._loop = asyncio.get_running_loop()
        self.writer.start()
        self._gpu_time.start()
        await asyncio.sleep(_WAKE_SECONDS)
        if not self._is_awake and self.writer.outage is not None:
            self._wake_sessions()
        await asyncio.Event().wait()

    def committed(self, entries: Sequence[Entry]) -> None:
        """Note which frames and sessions are on this head's disk."""
        self._gpu_time.add(entry.batch for entry in entries if entry.batch is not None)
        for entry in entries:
            if entry.fact is not None and entry.fact["fact"] == "session":
                self._own_sessions.add(str(entry.fact["id"]))

    async def finish(self) -> None:
        """Write the rest, and that this head ends; for a moment at most."""
        self._is_ending = True
        await asyncio.to_thread(self._gpu_time.close)
        await asyncio.to_thread(self.writer.close, _FINISH_SECONDS)
        self.store.close()

    # --- for the writer, from its thread

    def _seen(self) -> list[SeenNode]:
        """Return when the nodes that are connected here last reported."""
        members = list(self._fleet.members.values())
        return [
            SeenNode(member.stored.id, member.seen, member.version) for member in members if member.is_here
        ]

    def _hear(self, news: News) -> None:
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._take, news)

    def _check_ready(self, deadline: float) -> None:
        """Check that PostgreSQL has what this head committed; wait for it for a moment, at most until a deadline.

        Raises:
            DatabaseError: It has not, or does not answer.
        """
        seconds = min(WAIT_SECONDS, max(0.0, deadline - time.monotonic()))
        if not self.writer.wait_for(self._archive.accepted, seconds):
            outage = self.writer.outage
            if outage is not None:
                raise DatabaseError(outage.message, hint=outage.hint)
            raise DatabaseError(f"PostgreSQL at {self._config.shown} is behind")

    # --- in the loop

    def _take(self, news: News) -> None:
        """Take in what is new in the database."""
        if self._is_ending:
            return
        if news.is_first:
            self.store.disconnect()
        for document in news.sessions:
            with suppress(ValueError):
                self._hear_session(Session.from_dict(json.loads(document)))
        if not self._is_awake:
            self._wake_sessions()
        self._take_nodes(news)

    def _take_nodes(self, news: News) -> None:
        register, numbers = self._fleet.register, self.store.numbers
        for node, name, host, machine, first_seen, facts, labels in news.nodes:
            known = register.learn(
                host, machine, first_seen, name=name, facts=read_object(facts), labels=read_object(labels)
            )
            numbers.add({node: known.id})
        for node, documents in news.gpus.items():
            number = numbers.number(node)
            if number is not None and number in register.elsewhere:
                with suppress(ValueError):
                    devices = [device_of(read_object(document)) for document in documents]
                    # Where one GPU took another's place, the newer one counts.
                    newest = {device.label: device for device in devices}
                    register.learn_gpus(register.by_id[number], newest.values())
        if news.seen is None:
            return
        for seen in news.seen:
            stored = register.by_id.get(numbers.number(seen.node) or 0)
            if stored is None:
                continue
            member = self._fleet.members.get(stored.id) or self._fleet.member(stored, 0.0)
            if not member.is_here:
                member.version = seen.version or member.version
                member.known = register.devices_elsewhere(stored.id) or member.known
                was_here = not member.is_elsewhere
                self._fleet.heard_elsewhere(member, seen.seen)
                if (
                    was_here and member.is_elsewhere
                ):  # its processes and findings are needed from the beginning
                    self.writer.report_again()
        self._take_reports(news)
        self._fleet.asked = self._now()
        if news.seen:
            self._changed()

    def _take_reports(self, news: News) -> None:
        """Take in what nodes said to other heads: findings, health, and processes that came and went."""
        events: list[tuple[int, float, dict[str, Any]]] = [
            (node, moment, {**read_object(detail), "event": kind})
            for node, kind, moment, detail in news.reports
        ]
        for node, is_over, identity in news.processes:
            document = read_object(identity)
            if is_over:
                document = {"pid": document.get("pid"), "start_time": document.get("start_time")}
            events.append((node, self._now(), {**document, "event": "process_end" if is_over else "process"}))
        for node, moment, event in events:
            member = self._fleet.members.get(self.store.numbers.number(node) or 0)
            if member is not None and member.is_elsewhere:
                with suppress(*UNREADABLE):
                    member.happened([check_event(event)], moment)

    def _hear_session(self, session: Session) -> None:
        """Take in a version of a session, unless a newer one is known here."""
        known = self._sessions.get(session.id)
        if known is not None and not is_newer(session, known):
            return
        self._sessions.put(session)
        since = session.interruptions[-1].start if session.state == "interrupted" else None
        if since is not None and self._started < since:
            session = recovered(session, since + _MOMENT_SECONDS)
            log.warning("session %s goes on here, though another head left it", session.name)
        elif session.id not in self._own_sessions:
            return
        self._notes.note("session", **session.to_dict())

    def _wake_sessions(self) -> None:
        """Mark sessions that went on when the last head ended as interrupted, unless another head carried them on."""
        self._is_awake = True
        if self.is_carried_on:
            return
        moments = (self._left_at, *(head.newest for head in self.writer.heads))
        newest = max((moment for moment in moments if moment is not None), default=None)
        for session in self._sessions.all():
            if session.is_active and session.created >= self._started:
                continue
            left = woken(session, newest, self._started, resume=self._resume)
            if left != session:
                self._notes.note("session", **left.to_dict())
                log.warning(
                    "session %s was interrupted; %s",
                    left.name,
                    "it goes on" if left.is_active else f"to go on: gpulse session recover {left.name}",
                )
