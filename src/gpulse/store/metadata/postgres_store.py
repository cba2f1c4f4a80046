"""Answer from the PostgreSQL database that several heads share: metadata and GPU time of all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from gpulse.model.iso_time import iso
from gpulse.model.session import Session
from gpulse.store.incomplete import left_out
from gpulse.store.metadata.database import Rows, postgres_values, to_postgres
from gpulse.store.metadata.node_numbers import NodeNumbers
from gpulse.store.metadata.postgres import (
    UNREACHABLE_HINT,
    Connection,
    DatabaseConfig,
    DatabaseError,
    close,
    connect,
    database_errors,
)
from gpulse.store.metadata.postgres_gpu_time import find_gpu_time, find_holders, find_uncounted
from gpulse.store.metadata.reader import MetadataReader
from gpulse.store.store import (
    Holding,
    Query,
    Samples,
    Series,
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
_NO_SAMPLES = "a part is missing: samples of processes that other heads received are on their disks alone"
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
        check_ready: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Prepare to ask; nothing is connected yet.

        Args:
            config: Where the database is.
            nodes: Returns the nodes that are known here, by number.
            number_of: Returns the number of a machine, by its host name and machine id.
            check_ready: Called before each question with its deadline, in monotonic seconds; raises while the database
                does not have what this head wrote.
        """
        self._config = config
        self._nodes = nodes
        self._number_of = number_of
        self._check_ready = check_ready
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
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
        """Return all GPUs, by node and index."""
        question = self._begin(None)
        found = question.reader.gpus()
        numbers = question.numbers_of(gpu.node for gpu in found)
        return [gpu._replace(node=numbers[gpu.node]) for gpu in found if gpu.node in numbers]

    def sessions(self) -> list[Session]:
        """Return all sessions, oldest first."""
        return self._begin(None).reader.sessions()

    def events(self, query: Query) -> list[StoredEvent]:
        """Return what happened; see `store.store.Store`."""
        question = self._begin(query.deadline)
        return question.with_numbers(question.reader.events(question.translated(query)))

    def findings(self, query: Query) -> list[StoredFinding]:
        """Return the findings that held; see `store.store.Store`."""
        question = self._begin(query.deadline)
        found = question.reader.findings(question.translated(query))
        numbers = question.numbers_of(one.node for one in found if one.node is not None)
        return [
            one if one.node is None else one._replace(node=numbers[one.node])
            for one in found
            if one.node is None or one.node in numbers
        ]

    def processes(self, query: Query) -> list[StoredProcess]:
        """Return the processes that lived; see `store.store.Store`."""
        question = self._begin(query.deadline)
        found = question.reader.processes(question.translated(query))
        numbers = question.numbers_of(one.node for one in found)
        return [one._replace(node=numbers[one.node]) for one in found if one.node in numbers]

    def job_events(self, word: str) -> list[StoredEvent]:
        """Return what was reported of the jobs that a word may mean; see `store.store.Store`."""
        question = self._begin(None)
        return question.with_numbers(question.reader.job_events(word))

    def job_names(self) -> list[str]:
        """Return the jobs that processes belong to, whenever they lived."""
        return self._begin(None).reader.job_names()

    # --- samples and GPU time

    def series(self, query: Query) -> list[Series]:  # noqa: ARG002
        """Return nothing, and say so: samples are not in this database."""
        left_out(_NO_SAMPLES)
        return []

    def scan(self, query: Query) -> Iterator[Samples]:  # noqa: ARG002
        """Yield nothing, and say so: samples are not in this database."""
        left_out(_NO_SAMPLES)
        return iter(())

    def gpu_time(self, query: Query) -> list[Share]:
        """Divide the time of GPUs among processes; of an hour at the edges of the range a part, by its length."""
        question = self._begin(query.deadline)
        translated = question.translated(query)
        found = find_gpu_time(question.rows, translated)
        uncounted = find_uncounted(question.rows, translated)
        if uncounted is not None:
            count, since = uncounted
            left_out(
                f"GPU time of {count} {'node' if count == 1 else 'nodes'} at other heads since {iso(since)} is not counted yet"
            )
        numbers = question.numbers_of(share.node for share in found)
        return [share._replace(node=numbers[share.node]) for share in found if share.node in numbers]

    def gpu_holders(self, query: Query) -> list[Holding]:
        """Return what processes held on which GPUs."""
        question = self._begin(query.deadline)
        found = find_holders(question.rows, question.translated(query))
        numbers = question.numbers_of(one.node for one in found)
        return [one._replace(node=numbers[one.node]) for one in found if one.node in numbers]

    def _begin(self, deadline: float | None) -> _Question:
        """Begin to answer, once the database has everything that this head wrote; all of it ends by one deadline."""
        latest = time.monotonic() + ANSWER_SECONDS
        deadline = latest if deadline is None else min(deadline, latest)
        self._check_ready(deadline)

        def rows(statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
            return self._rows(statement, values, deadline)

        return _Question(rows, self.numbers, self._nodes, self._number_of)

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

    def _connect(self, deadline: float) -> Connection:
        """Open a connection by a deadline; one that opens later is kept for the next question.

        Raises:
            DatabaseError: That is not possible, or not in time.
        """
        made: Future[Connection] = Future()

        def work() -> None:
            try:
                made.set_result(connect(self._config, timeout_seconds=ANSWER_SECONDS))
            except Exception as error:  # noqa: BLE001  whoever waits raises it
                made.set_exception(error)

        # A thread, because looking up the server's name cannot be given up.
        threading.Thread(target=work, name="postgres-connect", daemon=True).start()
        try:
            return made.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            made.add_done_callback(self._keep_late)
            raise DatabaseError(
                f"PostgreSQL at {self._config.shown}: connecting took too long", hint=UNREACHABLE_HINT
            ) from None

    def _keep_late(self, made: Future[Connection]) -> None:
        if made.exception() is None:
            self._keep(made.result())

    def _keep(self, connection: Connection) -> None:
        """Keep a connection for the next question, unless there are enough."""
        with self._lock:
            if not self._is_closed and len(self._idle) < _MAX_IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        close(connection)

    def disconnect(self) -> None:
        """Close the connections that nobody uses: the server was restarted, and may have another database."""
        with self._lock:
            idle, self._idle = self._idle, []
            self.numbers = NodeNumbers()  # questions that are under way go on with theirs
        for connection in idle:
            close(connection)

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        self.disconnect()


class _Question:
    """One question on its way: where it reads, and which numbers nodes have."""

    def __init__(
        self,
        rows: Rows,
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
        """Return events with this head's numbers of nodes, without those of nodes that it has no number for."""
        numbers = self.numbers_of(event.node for event in events if event.node is not None)
        return [
            event if event.node is None else event._replace(node=numbers[event.node])
            for event in events
            if event.node is None or event.node in numbers
        ]

    def numbers_of(self, ids: Iterable[int]) -> Mapping[int, int]:
        """Return this head's numbers of nodes by PostgreSQL's ids, as far as it has any."""
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
        """Return a query with PostgreSQL's ids of nodes."""
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
