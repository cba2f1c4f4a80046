"""Store over the PostgreSQL database that several heads share: metadata and GPU time of all heads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from gpulse.background_call import start_background_call
from gpulse.model.session import Session
from gpulse.model.time_text import format_iso
from gpulse.store.incomplete_answers import note_missing
from gpulse.store.metadata.postgres_connection import (
    UNREACHABLE_HINT,
    DatabaseConfig,
    DatabaseError,
    DeadlineConnection,
    close,
    connect,
    database_errors,
)
from gpulse.store.metadata.postgres_gpu_time import find_gpu_time, find_holders, find_uncounted
from gpulse.store.metadata.reader import MetadataReader
from gpulse.store.metadata.sql_dialects import QueryRunner, postgres_values, to_postgres
from gpulse.store.store import (
    GpuHolding,
    GpuShare,
    Query,
    Samples,
    Series,
    Store,
    StoredEvent,
    StoredFinding,
    StoredGpu,
    StoredNode,
    StoredProcess,
)


class NodeNumbers:
    """Mapping between PostgreSQL IDs and one head's numbers of nodes. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[int, int] = {}
        self._ids: dict[int, int] = {}

    def add(self, numbers: Mapping[int, int]) -> None:
        """Add numbers by PostgreSQL ID."""
        with self._lock:
            for node, number in numbers.items():
                self._numbers[node] = number
                self._ids[number] = node

    def number(self, node: int) -> int | None:
        """Return the number of a node; None if it is unknown."""
        with self._lock:
            return self._numbers.get(node)

    def by_id(self, ids: Iterable[int]) -> dict[int, int]:
        """Return the known numbers of some nodes, by ID."""
        with self._lock:
            return {node: self._numbers[node] for node in ids if node in self._numbers}

    def by_number(self, numbers: Iterable[int]) -> dict[int, int]:
        """Return the known IDs of some nodes, by number."""
        with self._lock:
            return {number: self._ids[number] for number in numbers if number in self._ids}


MAX_ANSWER_SECONDS = 8.0
"""Maximum time of a query."""
_MAX_IDLE_CONNECTIONS = 4
_NO_SAMPLES = "some data is missing: process samples that other heads received are stored only on the disks of those heads"
_MACHINES = "SELECT id, host, machine FROM nodes WHERE id = ANY(?)"
_IDS = """
SELECT nodes.id, nodes.host, nodes.machine FROM nodes
JOIN unnest(?::text[], ?::text[]) AS known (host, machine) ON nodes.host = known.host AND nodes.machine = known.machine
"""


class PostgresStore(Store):
    """The data of all heads, with this head's node numbers (`store.store.Store`). Safe to use from several threads.

    Rows of nodes without a number at this head are omitted; new nodes get a number within seconds.
    """

    def __init__(
        self,
        config: DatabaseConfig,
        *,
        nodes: Callable[[], Mapping[int, StoredNode]],
        number_of: Callable[[str, str], int | None],
        check_ready: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Create the store; it does not connect yet.

        Args:
            config: The database.
            nodes: Returns the nodes of this head, by number.
            number_of: Returns the number of a machine by host name and machine ID.
            check_ready: Called before each query with its deadline in monotonic seconds; raises while the database lacks
                data that this head has committed.
        """
        self._config = config
        self._nodes = nodes
        self._number_of = number_of
        self._check_ready = check_ready
        self._lock = threading.Lock()
        self._idle: list[DeadlineConnection] = []
        self._is_closed = False
        self.numbers = NodeNumbers()

    # --- metadata

    def nodes(self) -> dict[int, StoredNode]:
        """Return all nodes, by this head's numbers."""
        question = self._begin(None)
        found = question.reader.nodes()
        numbers = question.numbers_of(found)
        return {
            numbers[node.id]: node._replace(id=numbers[node.id])
            for node in found.values()
            if node.id in numbers
        }

    def gpus(self) -> list[StoredGpu]:
        """Return all GPUs, ordered by node and index."""
        question = self._begin(None)
        found = question.reader.gpus()
        numbers = question.numbers_of(gpu.node for gpu in found)
        return [gpu._replace(node=numbers[gpu.node]) for gpu in found if gpu.node in numbers]

    def sessions(self) -> list[Session]:
        """Return all sessions, oldest first."""
        return self._begin(None).reader.sessions()

    def events(self, query: Query) -> list[StoredEvent]:
        """Return events; see `store.store.Store`."""
        question = self._begin(query.deadline)
        return question.with_numbers(question.reader.events(question.translated(query)))

    def findings(self, query: Query) -> list[StoredFinding]:
        """Return findings; see `store.store.Store`."""
        question = self._begin(query.deadline)
        found = question.reader.findings(question.translated(query))
        numbers = question.numbers_of(one.node for one in found if one.node is not None)
        return [
            one if one.node is None else one._replace(node=numbers[one.node])
            for one in found
            if one.node is None or one.node in numbers
        ]

    def processes(self, query: Query) -> list[StoredProcess]:
        """Return processes; see `store.store.Store`."""
        question = self._begin(query.deadline)
        found = question.reader.processes(question.translated(query))
        numbers = question.numbers_of(one.node for one in found)
        return [one._replace(node=numbers[one.node]) for one in found if one.node in numbers]

    def job_events(self, word: str) -> list[StoredEvent]:
        """Return the events of jobs that a word may refer to; see `store.store.Store`."""
        question = self._begin(None)
        return question.with_numbers(question.reader.job_events(word))

    def job_names(self) -> list[str]:
        """Return the jobs of all processes that were ever seen."""
        return self._begin(None).reader.job_names()

    # --- samples and GPU time

    def series(self, query: Query) -> list[Series]:  # noqa: ARG002
        """Return nothing and note it as missing: this database has no samples."""
        note_missing(_NO_SAMPLES)
        return []

    def scan(self, query: Query) -> Iterator[Samples]:  # noqa: ARG002
        """Yield nothing and note it as missing: this database has no samples."""
        note_missing(_NO_SAMPLES)
        return iter(())

    def gpu_time(self, query: Query) -> list[GpuShare]:
        """Return the GPU time of processes; hours at the edges of the range count in proportion."""
        question = self._begin(query.deadline)
        translated = question.translated(query)
        found = find_gpu_time(question.rows, translated)
        uncounted = find_uncounted(question.rows, translated)
        if uncounted is not None:
            count, since = uncounted
            note_missing(
                f"GPU time of {count} {'node' if count == 1 else 'nodes'} of other heads since {format_iso(since)} has not been counted yet"
            )
        numbers = question.numbers_of(share.node for share in found)
        return [share._replace(node=numbers[share.node]) for share in found if share.node in numbers]

    def gpu_holders(self, query: Query) -> list[GpuHolding]:
        """Return which processes used which GPUs, and how."""
        question = self._begin(query.deadline)
        found = find_holders(question.rows, question.translated(query))
        numbers = question.numbers_of(one.node for one in found)
        return [one._replace(node=numbers[one.node]) for one in found if one.node in numbers]

    def _begin(self, deadline: float | None) -> _PostgresRequest:
        """Start a request once the database has everything that this head committed; its queries have one deadline."""
        latest = time.monotonic() + MAX_ANSWER_SECONDS
        deadline = latest if deadline is None else min(deadline, latest)
        self._check_ready(deadline)

        def rows(statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
            return self._rows(statement, values, deadline)

        return _PostgresRequest(rows, self.numbers, self._nodes, self._number_of)

    # --- connections

    def _rows(self, statement: str, values: Sequence[Any], deadline: float) -> list[tuple[Any, ...]]:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._connect(deadline)
        try:
            with database_errors(self._config):
                connection.deadline = deadline
                found = connection.execute(
                    to_postgres(statement).encode(), postgres_values(values)
                ).fetchall()
        except BaseException:
            close(connection)
            raise
        self._keep(connection)
        return found

    def _connect(self, deadline: float) -> DeadlineConnection:
        """Open a connection by a deadline; a connection that opens later is kept for the next query.

        Raises:
            DatabaseError: Connecting failed or took too long.
        """
        # Resolving the server's name may hang.
        made = start_background_call(
            lambda: connect(self._config, timeout_seconds=MAX_ANSWER_SECONDS), name="postgres-connect"
        )
        try:
            return made.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            made.add_done_callback(self._keep_late)
            raise DatabaseError(
                f"PostgreSQL at {self._config.shown}: the connection attempt timed out", hint=UNREACHABLE_HINT
            ) from None

    def _keep_late(self, made: Future[DeadlineConnection]) -> None:
        if made.exception() is None:
            self._keep(made.result())

    def _keep(self, connection: DeadlineConnection) -> None:
        """Keep a connection for the next query, unless there are enough."""
        with self._lock:
            if not self._is_closed and len(self._idle) < _MAX_IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        close(connection)

    def disconnect(self) -> None:
        """Close idle connections, since the server was restarted and may have another database."""
        with self._lock:
            idle, self._idle = self._idle, []
            self.numbers = NodeNumbers()  # running queries keep the old ones
        for connection in idle:
            close(connection)

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        self.disconnect()


class _PostgresRequest:
    """One request: its queries, and the translation of node numbers."""

    def __init__(
        self,
        rows: QueryRunner,
        numbers: NodeNumbers,
        nodes: Callable[[], Mapping[int, StoredNode]],
        number_of: Callable[[str, str], int | None],
    ) -> None:
        self.rows = rows
        self.reader = MetadataReader(rows)
        self._numbers = numbers
        self._nodes = nodes
        self._number_of = number_of

    def with_numbers(self, events: Sequence[StoredEvent]) -> list[StoredEvent]:
        """Return events with this head's node numbers, without events of nodes that have none."""
        numbers = self.numbers_of(event.node for event in events if event.node is not None)
        return [
            event if event.node is None else event._replace(node=numbers[event.node])
            for event in events
            if event.node is None or event.node in numbers
        ]

    def numbers_of(self, ids: Iterable[int]) -> Mapping[int, int]:
        """Return this head's node numbers by PostgreSQL ID, without nodes that have none."""
        wanted = set(ids)
        found = self._numbers.by_id(wanted)
        unknown = wanted - found.keys()
        if unknown:
            new = {
                node: number
                for node, host, machine in self.rows(_MACHINES, [list(unknown)])
                if (number := self._number_of(host, machine)) is not None
            }
            self._numbers.add(new)
            found |= new
        return found

    def translated(self, query: Query) -> Query:
        """Return a query with PostgreSQL IDs instead of node numbers."""
        if query.nodes is None:
            return query
        found = self._numbers.by_number(query.nodes)
        unknown = query.nodes - found.keys()
        if unknown:
            found |= self._find_ids(unknown)
        return replace(query, nodes=frozenset(found.values()))

    def _find_ids(self, numbers: Collection[int]) -> dict[int, int]:
        known = self._nodes()
        machines = {
            (known[number].host, known[number].machine): number for number in numbers if number in known
        }
        columns = [host for host, _ in machines], [machine for _, machine in machines]
        found = {machines[host, machine]: node for node, host, machine in self.rows(_IDS, columns)}
        self._numbers.add({node: number for number, node in found.items()})
        return found
