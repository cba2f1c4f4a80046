"""Query the metadata, in SQLite and PostgreSQL alike, and look up single rows in a file that another process writes."""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

from gpulse.errors import LogError
from gpulse.model.safe_text import natural_key
from gpulse.model.session import Session
from gpulse.store.metadata.event_tables import find_events, find_findings, find_job_events
from gpulse.store.metadata.sql_dialects import QueryRunner
from gpulse.store.metadata.value_checks import parse_object
from gpulse.store.store import Query, StoredEvent, StoredFinding, StoredGpu, StoredNode, StoredProcess


@lru_cache(64)
def _parse_cached(text: str) -> dict[str, Any]:
    """Parse an object; the most recent ones are cached."""
    return parse_object(text)


class LazyJson(Mapping[str, Any]):
    """A JSON object that is parsed only when it is accessed."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __getitem__(self, name: str) -> Any:
        return _parse_cached(self._text)[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field; faster than Mapping.get."""
        return _parse_cached(self._text).get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(_parse_cached(self._text))

    def __len__(self) -> int:
        return len(_parse_cached(self._text))

    def __repr__(self) -> str:
        return self._text


_NODES = "SELECT id, name, host, machine, first_seen, facts, labels FROM nodes ORDER BY id"
_GPUS = """
SELECT node, nodes.name, uuid, "index", mig_index, gpus.name, device
FROM gpus LEFT JOIN nodes ON nodes.id = node ORDER BY node, "index", mig_index NULLS FIRST, uuid
"""


class MetadataReader:
    """Queries over the tables of either database. Safe to use from several threads."""

    def __init__(self, rows: QueryRunner) -> None:
        """Create a reader.

        Args:
            rows: Runs a statement and returns its rows.
        """
        self._rows = rows

    def nodes(self) -> dict[int, StoredNode]:
        """Return all nodes, by number."""
        return {
            number: StoredNode(
                number, name, host, machine, first_seen, parse_object(facts), parse_object(labels)
            )
            for number, name, host, machine, first_seen, facts, labels in self._rows(_NODES)
        }

    def gpus(self) -> list[StoredGpu]:
        """Return all GPUs, ordered by node name and index."""
        rows = self._rows(_GPUS)
        found = [
            StoredGpu(
                node,
                str(node) if node_name is None else node_name,
                uuid,
                index,
                str(index) if mig_index is None else f"{index}:{mig_index}",
                name,
                parse_object(device),
            )
            for node, node_name, uuid, index, mig_index, name, device in rows
        ]
        return sorted(found, key=lambda gpu: natural_key(gpu.node_name))

    def sessions(self) -> list[Session]:
        """Return all sessions, oldest first, without sessions that only a newer version can read."""
        found = []
        for row in self._rows("SELECT document FROM sessions ORDER BY start, id"):
            with suppress(ValueError):
                found.append(Session.from_dict(json.loads(row[0])))
        return found

    def session(self, session_id: str) -> Session | None:
        """Return one session by ID; None if it does not exist."""
        for row in self._rows("SELECT document FROM sessions WHERE id = ?", (session_id,)):
            with suppress(ValueError):
                return Session.from_dict(json.loads(row[0]))
        return None

    def events(self, query: Query) -> list[StoredEvent]:
        """Return events; see `store.store.Store`."""
        return find_events(self._rows, query)

    def findings(self, query: Query) -> list[StoredFinding]:
        """Return findings; see `store.store.Store`."""
        return find_findings(self._rows, query)

    def processes(self, query: Query) -> list[StoredProcess]:
        """Return processes; see `store.store.Store`."""
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
        """Return the events of jobs that a word may refer to; see `store.store.Store`."""
        return find_job_events(self._rows, word)

    def job_names(self) -> list[str]:
        """Return the jobs of all processes that were ever seen."""
        return [name for (name,) in self._rows("SELECT DISTINCT job FROM processes WHERE job IS NOT NULL")]

    def latest(self, kind: str) -> dict[int, tuple[float, dict[str, Any]]]:
        """Return by node the time and the content of its last event of a state kind (`health` or `findings`).

        Nodes whose agent restarted and has not reported since are omitted.
        """
        rows = self._rows("SELECT node, time, detail FROM latest WHERE kind = ? ORDER BY node", (kind,))
        return {node: (time, parse_object(detail)) for node, time, detail in rows}


_TIMEOUT_SECONDS = 10.0


class NodeMetadata(NamedTuple):
    """A node as stored in the metadata."""

    name: str
    host: str
    machine: str
    facts: Mapping[str, Any]


class MetadataLookup:
    """Looks up layouts, nodes and runs in a metadata file. If the file does not exist, nothing is found.

    Every method raises LogError if the file cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def layouts(self, numbers: Collection[int]) -> dict[int, str]:
        """Return the JSON texts of layouts, without unknown ones."""
        with self._opened() as database:
            found = {number: _row(database, "text FROM layouts WHERE id", str(number)) for number in numbers}
        return {number: row[0] for number, row in found.items() if row is not None}

    def nodes(self, numbers: Collection[int]) -> dict[int, NodeMetadata]:
        """Return nodes, without unknown ones."""
        columns = "name, host, machine, facts FROM nodes WHERE id"
        with self._opened() as database:
            found = {number: _row(database, columns, number) for number in numbers}
        return {
            number: NodeMetadata(row[0], row[1], row[2], parse_object(row[3]))
            for number, row in found.items()
            if row is not None
        }

    def version(self, run: bytes) -> str | None:
        """Return the agent version of a run; None if it is unknown."""
        with self._opened() as database:
            row = _row(database, "version FROM runs WHERE run", run)
        return None if row is None else row[0]

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection | None]:
        if not os.path.exists(self._path):
            yield None
            return
        address = f"file:{quote(self._path)}?mode=ro"
        try:
            with closing(sqlite3.connect(address, uri=True, timeout=_TIMEOUT_SECONDS)) as database:
                yield database
        except sqlite3.Error as error:
            raise LogError(
                f"cannot read {self._path}: {error}",
                hint="move the file away; it will be rebuilt from the log",
            ) from error


def _row(database: sqlite3.Connection | None, selected: str, key: object) -> tuple[Any, ...] | None:
    if database is None:
        return None
    row: tuple[Any, ...] | None = database.execute(f"SELECT {selected} = ?", (key,)).fetchone()
    return row
