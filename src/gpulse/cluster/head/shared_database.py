"""Share sessions, nodes and heartbeats with other heads through one PostgreSQL database."""

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

from gpulse.cluster.head.finding_operations import FindingResponses
from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.maintenance import FactWriter
from gpulse.cluster.head.session_lifecycle import SessionRegistry, recover_session, restore_session
from gpulse.cluster.protocol.answers import OtherHead, SharedDatabaseStatus
from gpulse.model.frame_packing import device_from_subject
from gpulse.model.session import Session
from gpulse.store.event_decoder import JSON_ERRORS, check_event
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.metadata.log_facts import is_newer
from gpulse.store.metadata.postgres_connection import DatabaseConfig, DatabaseError
from gpulse.store.metadata.postgres_gpu_time import GpuTimeWriter
from gpulse.store.metadata.postgres_store import PostgresStore
from gpulse.store.metadata.postgres_writer import DatabaseChanges, PostgresWriter, SeenNode
from gpulse.store.metadata.value_checks import parse_object

log = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 1.5
"""How long a query waits for PostgreSQL to have what this head committed."""
_WAKE_SECONDS = 10.0
"""A head that cannot reach PostgreSQL for this long after its start assumes that it is the only one."""
_FINISH_SECONDS = 3.0
_MIN_INTERRUPTION_SECONDS = 1e-3
"""Length of an interruption during which another head ran; the later version of a session wins."""


class SharedDatabase:
    """One head's connection to the shared database; all but the two database threads runs in the head's event loop."""

    def __init__(
        self,
        archive: LocalStore,
        config: DatabaseConfig,
        *,
        fleet: Fleet,
        sessions: SessionRegistry,
        responses: FindingResponses,
        notes: FactWriter,
        changed: Callable[[], None],
        now: Callable[[], float],
        resume: bool,
        keep_seconds: float = math.inf,
    ) -> None:
        """Prepare to share; nothing is connected yet.

        Args:
            archive: This head's store.
            config: Connection settings of the database.
            fleet: The nodes.
            sessions: The sessions.
            responses: What people have acknowledged and silenced.
            notes: Writes facts to the log of this head.
            changed: Called after every change.
            now: The head's clock.
            resume: Continue sessions that no other head continued.
            keep_seconds: Retention in the database of everything but sessions and nodes.
        """
        self._archive = archive
        self._config = config
        self._fleet = fleet
        self._sessions = sessions
        self._responses = responses
        self._own_sessions = {session.id for session in sessions.all()}
        """IDs of the sessions in this head's log."""
        self._notes = notes
        self._changed = changed
        self._now = now
        self._resume = resume
        self._started = now()
        self._left_at = archive.newest
        """When the previous head last received frames."""
        self._sessions_restored = self._is_ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.writer = PostgresWriter(
            archive,
            config,
            host=socket.gethostname(),
            node_of=fleet.register.by_id.get,
            seen=self._seen,
            on_changes=self._on_changes,
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

    # --- called by the head

    @property
    def has_live_peer(self) -> bool:
        """Whether another live head continues the sessions when this one ends."""
        return self.writer.outage is None and any(head.is_alive for head in self.writer.heads)

    def status(self) -> SharedDatabaseStatus:
        """Return the status of the shared database."""
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
        """Run until cancelled."""
        self._loop = asyncio.get_running_loop()
        self.writer.start()
        self._gpu_time.start()
        await asyncio.sleep(_WAKE_SECONDS)
        if not self._sessions_restored and self.writer.outage is not None:
            self._restore_sessions()
        await asyncio.Event().wait()

    def committed(self, entries: Sequence[LogEntry]) -> None:
        """Record which frames and sessions are on this head's disk."""
        self._gpu_time.add(entry.batch for entry in entries if entry.batch is not None)
        for entry in entries:
            if entry.fact is not None and entry.fact["fact"] == "session":
                self._own_sessions.add(str(entry.fact["id"]))

    async def finish(self) -> None:
        """Write the remaining changes and that this head ends, with a time limit."""
        self._is_ending = True
        await asyncio.to_thread(self._gpu_time.close)
        await asyncio.to_thread(self.writer.close, _FINISH_SECONDS)
        self.store.close()

    # --- called by the writer, in its thread

    def _seen(self) -> list[SeenNode]:
        """Return when the nodes that are connected here last reported."""
        members = list(self._fleet.members.values())
        return [
            SeenNode(member.stored.id, member.seen, member.version) for member in members if member.is_here
        ]

    def _on_changes(self, changes: DatabaseChanges) -> None:
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._apply_changes, changes)

    def _check_ready(self, deadline: float) -> None:
        """Wait briefly, at most until a deadline, until PostgreSQL has what this head committed.

        Raises:
            DatabaseError: PostgreSQL is behind or does not answer.
        """
        seconds = min(MAX_WAIT_SECONDS, max(0.0, deadline - time.monotonic()))
        if not self.writer.wait_for(self._archive.accepted, seconds):
            outage = self.writer.outage
            if outage is not None:
                raise DatabaseError(outage.message, hint=outage.hint)
            raise DatabaseError(f"PostgreSQL at {self._config.shown} lags behind this head's log")

    # --- in the event loop

    def _apply_changes(self, changes: DatabaseChanges) -> None:
        """Apply changes from the database."""
        if self._is_ending:
            return
        if changes.is_first:
            self.store.disconnect()
        for document in changes.sessions:
            with suppress(ValueError):
                self._apply_session(Session.from_dict(json.loads(document)))
        if not self._sessions_restored:
            self._restore_sessions()
        for kind, moment, detail in changes.responses:
            self._responses.apply(kind, moment, parse_object(detail))
        self._apply_nodes(changes)

    def _apply_nodes(self, changes: DatabaseChanges) -> None:
        register, numbers = self._fleet.register, self.store.numbers
        for node, name, host, machine, first_seen, facts, labels in changes.nodes:
            known = register.add_from_other_head(
                host, machine, first_seen, name=name, facts=parse_object(facts), labels=parse_object(labels)
            )
            numbers.add({node: known.id})
        for node, documents in changes.gpus.items():
            number = numbers.number(node)
            if number is not None and number in register.other_head_ids:
                with suppress(ValueError):
                    devices = [device_from_subject(parse_object(document)) for document in documents]
                    # Where one GPU took another's place, the newer one counts.
                    newest = {device.label: device for device in devices}
                    register.set_other_head_gpus(register.by_id[number], newest.values())
        if changes.seen is None:
            return
        for seen in changes.seen:
            stored = register.by_id.get(numbers.number(seen.node) or 0)
            if stored is None:
                continue
            member = self._fleet.members.get(stored.id) or self._fleet.member(stored, 0.0)
            if not member.is_here:
                member.version = seen.version or member.version
                member.last_devices = register.other_head_devices(stored.id) or member.last_devices
                was_here = not member.is_at_other_head
                self._fleet.update_from_other_head(member, seen.seen)
                if was_here and member.is_at_other_head:  # all of its processes and findings are needed
                    self.writer.request_full_report()
        self._apply_reports(changes)
        self._fleet.asked = self._now()
        if changes.seen:
            self._changed()

    def _apply_reports(self, changes: DatabaseChanges) -> None:
        """Apply what nodes reported to other heads: findings, health, and processes that started or ended."""
        events: list[tuple[int, float, dict[str, Any]]] = [
            (node, moment, {**parse_object(detail), "event": kind})
            for node, kind, moment, detail in changes.reports
        ]
        for node, is_over, identity in changes.processes:
            document = parse_object(identity)
            if is_over:
                document = {"pid": document.get("pid"), "start_time": document.get("start_time")}
            events.append((node, self._now(), {**document, "event": "process_end" if is_over else "process"}))
        for node, moment, event in events:
            member = self._fleet.members.get(self.store.numbers.number(node) or 0)
            if member is not None and member.is_at_other_head:
                with suppress(*JSON_ERRORS):
                    member.apply_events([check_event(event)], moment)

    def _apply_session(self, session: Session) -> None:
        """Apply a version of a session, unless a newer one is here."""
        known = self._sessions.get(session.id)
        if known is not None and not is_newer(session, known):
            return
        self._sessions.put(session)
        since = session.interruptions[-1].start if session.state == "interrupted" else None
        if since is not None and self._started < since:
            session = recover_session(session, since + _MIN_INTERRUPTION_SECONDS)
            log.warning(
                "session %s continues here although another head marked it as interrupted", session.name
            )
        elif session.id not in self._own_sessions:
            return
        self._notes.note("session", **session.to_dict())

    def _restore_sessions(self) -> None:
        """Mark sessions that were active when the last head ended as interrupted, unless another head continued them."""
        self._sessions_restored = True
        if self.has_live_peer:
            return
        moments = (self._left_at, *(head.newest for head in self.writer.heads))
        newest = max((moment for moment in moments if moment is not None), default=None)
        for session in self._sessions.all():
            if session.is_active and session.created >= self._started:
                continue
            left = restore_session(session, newest, self._started, resume=self._resume)
            if left != session:
                self._notes.note("session", **left.to_dict())
                log.warning(
                    "session %s was interrupted; %s",
                    left.name,
                    "resuming it" if left.is_active else f"to resume it: gpulse session recover {left.name}",
                )
