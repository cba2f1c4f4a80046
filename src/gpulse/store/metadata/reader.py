"""Questions about metadata, asked in the same words of SQLite and of PostgreSQL."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

from gpulse.model.natural import natural_key
from gpulse.model.session import Session
from gpulse.store.metadata.database import Rows
from gpulse.store.metadata.events import find_events, job_events
from gpulse.store.metadata.findings import find_findings
from gpulse.store.metadata.lazy_json import LazyJson
from gpulse.store.metadata.values import read_object
from gpulse.store.store import Query, StoredEvent, StoredFinding, StoredGpu, StoredNode, StoredProcess

_NODES = "SELECT id, name, host, machine, first_seen, facts, labels FROM nodes ORDER BY id"
_GPUS = """
SELECT node, nodes.name, uuid, "index", mig_index, gpus.name, device
FROM gpus LEFT JOIN nodes ON nodes.id = node ORDER BY node, "index", mig_index NULLS FIRST, uuid
"""


class MetadataReader:
    """Answers questions from the tables of either database. Safe to use from several threads."""

    def __init__(self, rows: Rows) -> None:
        """Prepare to answer.

        Args:
            rows: Returns what a statement finds.
        """
        self._rows = rows

    def nodes(self) -> dict[int, StoredNode]:
        """Return all nodes, by their numbers."""
        return {
            number: StoredNode(
                number, name, host, machine, first_seen, read_object(facts), read_object(labels)
            )
            for number, name, host, machine, first_seen, facts, labels in self._rows(_NODES)
        }

    def gpus(self) -> list[StoredGpu]:
        """Return all GPUs, by the names of their nodes and by index."""
        rows = self._rows(_GPUS)
        found = [
            StoredGpu(
                node,
                str(node) if node_name is None else node_name,
                uuid,
                index,
                str(index) if mig_index is None else f"{index}:{mig_index}",
                name,
                read_object(device),
            )
            for node, node_name, uuid, index, mig_index, name, device in rows
        ]
        return sorted(found, key=lambda gpu: natural_key(gpu.node_name))

    def sessions(self) -> list[Session]:
        """Return all sessions, oldest first; what only a newer version can read is left out."""
        found = []
        for row in self._rows("SELECT document FROM sessions ORDER BY start, id"):
            with suppress(ValueError):
                found.append(Session.from_dict(json.loads(row[0])))
        return found

    def session(self, session_id: str) -> Session | None:
        """Return one session; None when there is none of that id."""
        for row in self._rows("SELECT document FROM sessions WHERE id = ?", (session_id,)):
            with suppress(ValueError):
                return Session.from_dict(json.loads(row[0]))
        return None

    def events(self, query: Query) -> list[StoredEvent]:
        """Return what happened; see `store.store.Store`."""
        return find_events(self._rows, query)

    def findings(self, query: Query) -> list[StoredFinding]:
        """Return the findings that held; see `store.store.Store`."""
        return find_findings(self._rows, query)

    def processes(self, query: Query) -> list[StoredProcess]:
        """Return the processes that lived; see `store.store.Store`."""
        chosen = ["1 = 1"]
        values: list[Any] = []
        if query.start > -math.inf:
            chosen.append("(ended IS NULL OR ended >= ?)")
            values.append(query.start)
        if query.end < math.inf:
            chosen.append("first_seen < ?")
            values.append(query.end)
        for column, wanted in (("node", query.nodes), ("pid", query.pids), ("job", query.jobs)):
            if wanted is not None:
                chosen.append(f"{column} = ANY(?)")
                values.append(list(wanted))
        rows = self._rows(
            "SELECT node, pid, start_time, first_seen, ended, identity FROM processes "
            f"WHERE {' AND '.join(chosen)} ORDER BY first_seen, node, pid, start_time NULLS FIRST",
            values,
        )
        return [
            StoredProcess(node, pid, began, first_seen, ended, LazyJson(identity))
            for node, pid, began, first_seen, ended, identity in rows
        ]

    def job_events(self, word: str) -> list[StoredEvent]:
        """Return what was reported of the jobs that a word may mean; see `store.store.Store`."""
        return job_events(self._rows, word)

    def job_names(self) -> list[str]:
        """Return the jobs that processes belong to, whenever they lived."""
        return [name for (name,) in self._rows("SELECT DISTINCT job FROM processes WHERE job IS NOT NULL")]

    def latest(self, kind: str) -> dict[int, tuple[float, dict[str, Any]]]:
        """Return by node its last event of a kind that holds a whole state (`health`, `findings`), and when that was.

        Nothing of a node whose agent started again and has not said anything since.
        """
        rows = self._rows("SELECT node, time, detail FROM latest WHERE kind = ? ORDER BY node", (kind,))
        return {node: (time, read_object(detail)) for node, time, detail in rows}
