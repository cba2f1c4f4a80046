"""Heads without streams and ports that share a directory, one step at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.sessions import Sessions
from gpulse.cluster.head.sharing import Sharing
from gpulse.model.columns import PackedFrame
from gpulse.model.session import Session
from gpulse.store.archive import Archive
from gpulse.store.base import StoredNode
from gpulse.store.book.frames import FrameEvents
from gpulse.store.entry import Entry
from gpulse.store.journal import Batch

START = 1_800_000_000.0
RUN = bytes(range(16))


class TinyHead:
    """One head; what others tell it is taken in by `look`."""

    def __init__(self, data_dir: Path, shared: Path, *, now: float = START, **options: Any) -> None:
        self.time = now
        self._is_ended = False
        self.archive = Archive(str(data_dir))
        self.sessions = Sessions(self.archive.sessions())
        self.fleet = Fleet(self.archive.nodes(), {}, self.archive.layouts)
        self.fleet.restore(self.archive, now)
        self._noted: list[Entry] = []
        self.sharing = Sharing(
            self.archive,
            str(shared),
            head_id=self.archive.head_id,
            notes=self,
            sessions=self.sessions,
            fleet=self.fleet,
            now=lambda: self.time,
            **options,
        )
        self.note("sharing", time=now)
        self.commit()

    @property
    def folder(self) -> Path:
        """Its own, in the shared directory."""
        return Path(self.sharing.directory) / self.archive.head_id

    def note(self, fact: str, **fields: Any) -> None:
        """Write a fact with the next commit."""
        self._noted.append(Entry.of_fact(fact, **fields))

    def event(self, kind: str, node: int | None, **detail: Any) -> None:
        """Write down that something happened."""
        self.note("event", time=self.time, kind=kind, node=node, detail=detail)

    def commit(self, *entries: Entry) -> None:
        """Have what was noted on disk, and these."""
        noted, self._noted = [*self._noted, *entries], []
        if noted:
            self.archive.commit(noted)
            for entry in noted:
                if entry.fact is not None and entry.fact["fact"] == "session":
                    self.sessions.put(Session.from_dict(entry.fact))
            self.sharing.committed(noted)

    def look(self, times: int = 3) -> None:
        """Tell the others, hear them, and take in what they tell."""
        for _ in range(times):
            self.sharing.facts_courier.run_once()
            self.commit()

    def node(self, host: str, machine: str = "m1") -> int:
        """A node joins."""
        node = self.fleet.register.new(host, machine, self.time)
        node = node._replace(facts={"driver_version": "580"}, labels={"rack": "7"})
        self.fleet.member(node, self.time).connected = True
        fields: dict[str, Any] = node._asdict()
        fields["time"] = fields.pop("first_seen")
        self.note("node", **fields)
        self.commit()
        return node.id

    def frame(self, node: int, sequence: int, *events: Mapping[str, Any], run: bytes = RUN) -> None:
        """A frame comes, one second after the one before."""
        moment = START + sequence
        text = json.dumps(events).encode() if events else b""
        packed = PackedFrame(round(moment * 1e6), 0, (), text).to_bytes()
        batch = Batch(run, node, sequence, 1, round(moment * 1e6), 0, packed)
        happened = (FrameEvents(node, run, sequence, moment, text),) if events else ()
        self.commit(Entry.of_batch(batch, happened))

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
        self.commit(Entry.of_fact("session", **session.to_dict()))

    def kinds(self) -> list[str]:
        """Everything that happened."""
        return [event.kind for event in self.archive.events(start=0.0, end=1e11)]

    def nodes(self) -> dict[str, StoredNode]:
        """The nodes by name."""
        return {node.name: node for node in self.archive.nodes().values()}

    def lives(self) -> dict[int, float | None]:
        """By process when it ended."""
        return {one.pid: one.ended for one in self.archive.processes(start=0.0, end=1e11)}

    def end(self) -> None:
        """As kill -9 would: nothing is told, nothing is tidied."""
        if not self._is_ended:
            self._is_ended = True
            self.sharing.close()
            self.archive.close()


def process(pid: int, name: str = "train.py") -> dict[str, Any]:
    """A process began, or changed."""
    return {"event": "process", "pid": pid, "start_time": 50.0, "name": name, "owner": {"user": "eve"}}


def ended(pid: int) -> dict[str, Any]:
    """A process ended."""
    return {"event": "process_end", "pid": pid, "start_time": 50.0}
