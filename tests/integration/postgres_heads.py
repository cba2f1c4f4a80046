"""Heads without streams and ports that share a PostgreSQL database, for tests of what they write and read there."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from gpulse.cluster.head.finding_operations import FindingResponses
from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.session_lifecycle import SessionRegistry
from gpulse.cluster.head.shared_database import SharedDatabase
from gpulse.model.packed_columns import PackedFrame
from gpulse.model.session import Session
from gpulse.store.federated import FederatedStore
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import FrameBatch, FrameEvents, LogEntry
from gpulse.store.metadata.postgres_connection import DatabaseConfig, parse_database_url
from gpulse.store.metadata.postgres_writer import DatabaseChanges
from gpulse.store.node_registry import node_fact
from tests.integration.cluster import until
from tests.integration.postgres import PASSWORD, PostgresServer
from tests.queries import query

START = 1_800_000_000.0
RUN = bytes(range(16))


def config_of(server: PostgresServer, database: str) -> DatabaseConfig:
    """Where a database of a server is."""
    return parse_database_url(server.url(database), PASSWORD, 10 << 30)


class SmallHead:
    """One head; what others write is taken in by `look`."""

    def __init__(self, directory: Path, config: DatabaseConfig, *, resume: bool = False) -> None:
        self.time = START
        self._is_ended = False
        self.archive = LocalStore(str(directory))
        self.sessions = SessionRegistry(self.archive.sessions())
        self.fleet = Fleet(self.archive.nodes(), {}, self.archive.layouts)
        self.fleet.restore(self.archive, self.time)
        self.responses = FindingResponses()
        self._noted: list[LogEntry] = []
        self._news: list[DatabaseChanges] = []
        self.shared = SharedDatabase(
            self.archive,
            config,
            fleet=self.fleet,
            sessions=self.sessions,
            responses=self.responses,
            notes=self,
            changed=lambda: None,
            now=lambda: self.time,
            resume=resume,
        )
        self.shared.writer._on_changes = self._news.append
        self.store = FederatedStore(
            self.archive, None, self.shared.store, now=lambda: self.time, register=self.fleet.register
        )

    def __enter__(self) -> Self:
        logging.getLogger("psycopg").setLevel(logging.CRITICAL)
        self.shared.writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def note(self, fact: str, **fields: Any) -> None:
        """Write a fact with the next commit."""
        self._noted.append(LogEntry.of_fact(fact, **fields))

    def event(self, kind: str, node: int | None, **detail: Any) -> None:
        """Write down that something happened."""
        self.note("event", time=self.time, kind=kind, node=node, detail=detail)

    def commit(self, *entries: LogEntry) -> None:
        """Have what was noted on disk, and these."""
        noted, self._noted = [*self._noted, *entries], []
        if noted:
            self.archive.commit(noted)
            for entry in noted:
                if entry.fact is not None and entry.fact["fact"] == "session":
                    self.sessions.put(Session.from_dict(entry.fact))
            self.shared.committed(noted)
            self.store.committed(noted)

    def settle(self) -> None:
        """Wait until everything that was committed is in the database."""
        until(lambda: self.shared.writer.wait_for(self.archive.accepted, 1.0), "everything in the database")

    def look(self) -> None:
        """Take in what the other heads wrote up to now."""
        self.settle()
        count = len(self._news)
        until(lambda: len(self._news) >= count + 2, "news")
        while self._news:
            self.shared._apply_changes(self._news.pop(0))
        self.commit()
        self.settle()

    def node(self, host: str, machine: str = "m1") -> int:
        """A node joins."""
        register = self.fleet.register
        known = register.find(host, machine)
        node = known or register.new(host, machine, self.time)
        node = node._replace(facts={"driver_version": "580"}, labels={"rack": "7"})
        member = self.fleet.member(node, self.time)
        member.connected = True
        self.note("node", **node_fact(node))
        self.commit()
        return node.id

    def frame(self, node: int, sequence: int, *events: Mapping[str, Any], run: bytes = RUN) -> None:
        """A frame comes, one second after the one before."""
        moment = START + sequence
        text = json.dumps(events).encode() if events else b""
        packed = PackedFrame(round(moment * 1e6), 0, (), text).to_bytes()
        batch = FrameBatch(run, node, sequence, 1, round(moment * 1e6), 0, packed)
        happened = (FrameEvents(node, run, sequence, moment, text),) if events else ()
        self.commit(LogEntry.of_batch(batch, happened))

    def session(self, name: str = "run", **changes: Any) -> Session:
        """A session begins."""
        fields = {
            "id": f"id-{name}",
            "name": name,
            "start": self.time,
            "created": self.time,
            "interval_ms": 1000,
        }
        session = Session(**{**fields, **changes})
        self.keep(session)
        return session

    def keep(self, session: Session) -> None:
        """A session is another one by now."""
        self.commit(LogEntry.of_fact("session", **session.to_dict()))

    def kinds(self) -> list[str]:
        """Everything that happened, as the database has it."""
        return [event.kind for event in self.shared.store.events(query(start=0.0, end=1e11))]

    def lives(self) -> dict[int, float | None]:
        """By process when it ended, as the database has it."""
        return {one.pid: one.ended for one in self.shared.store.processes(query(start=0.0, end=1e11))}

    def end(self) -> None:
        """End; with everything written unless the database does not answer."""
        if self._is_ended:
            return
        self._is_ended = True
        self.shared.writer.close(3.0)
        self.shared.store.close()
        self.archive.close()


def process(pid: int, name: str = "train.py", job: str | None = None) -> dict[str, Any]:
    """A process began, or changed."""
    return {
        "event": "process",
        "pid": pid,
        "start_time": 50.0,
        "name": name,
        "owner": {"user": "eve", "job": job},
    }


def ended(pid: int) -> dict[str, Any]:
    """A process ended."""
    return {"event": "process_end", "pid": pid, "start_time": 50.0}
