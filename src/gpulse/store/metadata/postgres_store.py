"""Answer from the PostgreSQL database that several heads share: metadata and GPU time of all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpulse.model.session import Session
from gpulse.store.metadata.database import postgres_values, to_postgres
from gpulse.store.metadata.postgres import Connection, DatabaseConfig, close, connect, database_errors
from gpulse.store.metadata.postgres_gpu_time import find_gpu_time, find_holders
from gpulse.store.metadata.reader import MetadataReader
from gpulse.store.store import (
    Holding,
    Query,
    Share,
    Store,
    StoredEvent,
    StoredFinding,
    StoredGpu,
    StoredNode,
    StoredProcess,
)

ANSWER_SECONDS = 8.0
"""A question that takes longer is given up."""
_MAX_IDLE_CONNECTIONS = 4
_MACHINES = "SELECT id, host, machine FROM nodes WHERE id = ANY(?)"
_IDS = """
SELECT nodes.id, nodes.host, nodes.machine FROM nodes
JOIN unnest(?::text[], ?::text[]) AS known (host, machine) ON nodes.host = known.host AND nodes.machine = known.machine
"""


class PostgresStore(Store):
    """What all heads wrote, with the numbers that this head gave to nodes (`store.store.Store`). For several threads.

    Rows of nodes that this head has no number for yet are left out; it gets to know them within seconds.
    """

    def __init__(
        self,
        config: DatabaseConfig,
        *,
        nodes: Callable[[], Mapping[int, StoredNode]],
        number_of: Callable[[str, str], int | None],
        check_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to ask; nothing is connected yet.

        Args:
            config: Where the database is.
            nodes: Returns the nodes that are known here, by number.
            number_of: Returns the number of a machine, by its host name and machine id.
            check_ready: Called before each question; raises while the database does not have what this head wrote.
        """
        self._config = config
        self._nodes = nodes
        self._number_of = number_of
        self._check_ready = check_ready
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._is_closed = False
        self._numbers: dict[int, int] = {}
        """By PostgreSQL's id of a node, this head's number."""

    # --- metadata

    def nodes(self) -> dict[int, StoredNode]:
        """Return all nodes, by this head's numbers."""
        found = self._asked(None).nodes()
        numbers = self._numbers_of(found)
        return {
            numbers[node.id]: node._replace(id=numbers[node.id])
            for node in found.values()
            if node.id in numbers
        }

    def gpus(self) -> list[StoredGpu]:
        """Return all GPUs, by node and index."""
        found = self._asked(None).gpus()
        numbers = self._numbers_of(gpu.node for gpu in found)
        return [gpu._replace(node=numbers[gpu.node]) for gpu in found if gpu.node in numbers]

    def sessions(self) -> list[Session]:
        """Return all sessions, oldest first."""
        return self._asked(None).sessions()

    def events(self, query: Query) -> list[StoredEvent]:
        """Return what happened; see `store.store.Store`."""
        found = self._asked(query).events(self._translated(query))
        return self._with_numbers(found)

    def findings(self, query: Query) -> list[StoredFinding]:
        """Return the findings that held; see `store.store.Store`."""
        found = self._asked(query).findings(self._translated(query))
        numbers = self._numbers_of(one.node for one in found if one.node is not None)
        return [
            one if one.node is None else one._replace(node=numbers[one.node])
            for one in found
            if one.node is None or one.node in numbers
        ]

    def processes(self, query: Query) -> list[StoredProcess]:
        """Return the processes that lived; see `store.store.Store`."""
        found = self._asked(query).processes(self._translated(query))
        numbers = self._numbers_of(one.node for one in found)
        return [one._replace(node=numbers[one.node]) for one in found if one.node in numbers]

    def job_events(self, word: str) -> list[StoredEvent]:
        """Return what was reported of the jobs that a word may mean; see `store.store.Store`."""
        return self._with_numbers(self._asked(None).job_events(word))

    def job_names(self) -> list[str]:
        """Return the jobs that processes belong to, whenever they lived."""
        return self._asked(None).job_names()

    # --- GPU time

    def gpu_time(self, query: Query) -> list[Share]:
        """Divide the time of GPUs among processes; of an hour at the edges of the range a part, by its length."""
        found = find_gpu_time(self._rows_until(query.deadline), self._translated(query))
        numbers = self._numbers_of(share.node for share in found)
        return [share._replace(node=numbers[share.node]) for share in found if share.node in numbers]

    def gpu_holders(self, query: Query) -> list[Holding]:
        """Return what processes held on which GPUs."""
        found = find_holders(self._rows_until(query.deadline), self._translated(query))
        numbers = self._numbers_of(one.node for one in found)
        return [one._replace(node=numbers[one.node]) for one in found if one.node in numbers]

    # --- numbers of nodes

    def _with_numbers(self, events: Sequence[StoredEvent]) -> list[StoredEvent]:
        numbers = self._numbers_of(event.node for event in events if event.node is not None)
        return [
            event if event.node is None else event._replace(node=numbers[event.node])
            for event in events
            if event.node is None or event.node in numbers
        ]

    def _numbers_of(self, ids: Iterable[int]) -> Mapping[int, int]:
        """Return this head's numbers of nodes, as far as it has any."""
        unknown = set(ids) - self._numbers.keys()
        if unknown:
            for node, host, machine in self._rows_until(None)(_MACHINES, [list(unknown)]):
                number = self._number_of(host, machine)
                if number is not None:
                    self._numbers[node] = number
        return self._numbers

    def _translated(self, query: Query) -> Query:
        """Return a query with PostgreSQL's ids of nodes."""
        if query.nodes is None:
            return query
        by_number = {number: node for node, number in list(self._numbers.items())}
        unknown = query.nodes - by_number.keys()
        if unknown:
            by_number |= self._find_ids(unknown)
        return replace(query, nodes=frozenset(by_number[node] for node in query.nodes if node in by_number))

    def _find_ids(self, numbers: Collection[int]) -> dict[int, int]:
        known = self._nodes()
        machines = {
            (known[number].host, known[number].machine): number for number in numbers if number in known
        }
        columns = [host for host, _ in machines], [machine for _, machine in machines]
        found = {
            machines[host, machine]: node for node, host, machine in self._rows_until(None)(_IDS, columns)
        }
        self._numbers |= {node: number for number, node in found.items()}
        return found

    # --- connections

    def _asked(self, query: Query | None) -> MetadataReader:
        """Return the metadata, once it has everything that this head wrote."""
        self._check_ready()
        return MetadataReader(self._rows_until(None if query is None else query.deadline))

    def _rows_until(self, deadline: float | None) -> Callable[..., list[tuple[Any, ...]]]:
        latest = time.monotonic() + ANSWER_SECONDS
        return lambda statement, values=(): self._rows(
            statement, values, latest if deadline is None else min(deadline, latest)
        )

    def _rows(self, statement: str, values: Sequence[Any], deadline: float) -> list[tuple[Any, ...]]:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = connect(self._config, timeout_seconds=ANSWER_SECONDS)
        try:
            with database_errors(self._config):
                connection.deadline = deadline
                found = connection.execute(
                    to_postgres(statement).encode(), postgres_values(values)
                ).fetchall()
        except BaseException:
            close(connection)
            raise
        with self._lock:
            if not self._is_closed and len(self._idle) < _MAX_IDLE_CONNECTIONS:
                self._idle.append(connection)
                return found
        close(connection)
        return found

    def disconnect(self) -> None:
        """Close the connections that nobody uses: the server was restarted, and may have another database."""
        with self._lock:
            idle, self._idle = self._idle, []
        self._numbers = {}
        for connection in idle:
            close(connection)

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        self.disconnect()
