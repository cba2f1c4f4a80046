"""Thread that replicates a head's log to PostgreSQL, and reads what other heads wrote there.

The log remains the source of truth. Each batch of records and its last position are one transaction, so that after any crash
nothing is lost and nothing is applied twice. No other thread waits for this one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from gpulse.errors import GpulseError
from gpulse.model.finding_acknowledgement import RESPONSE_EVENTS
from gpulse.model.packed_columns import ColumnLayout
from gpulse.store.incomplete_answers import BackendOutage
from gpulse.store.log.reader import LogReader
from gpulse.store.metadata.local_metadata import DELETE_OLD, Metadata
from gpulse.store.metadata.log_updates import MetadataUpdate, split_updates
from gpulse.store.metadata.postgres_connection import (
    DatabaseConfig,
    DatabaseError,
    DeadlineConnection,
    close,
    connect,
    lock_for_writing,
    prepare_schema,
    transaction,
)
from gpulse.store.metadata.postgres_replication import NodeIds, UpdateApplier, copy_metadata
from gpulse.store.metadata.schema import GPU_DAYS, GPU_HOURS
from gpulse.store.store import StoredNode

log = logging.getLogger(__name__)

ALIVE_SECONDS = 15.0
"""A head without a heartbeat for longer than this is considered gone."""
HEARTBEAT_SECONDS = 1.0
MAX_RETRY_SECONDS = 10.0
MAX_QUEUED_UPDATES = 120
"""Older updates are read from the log."""
_STATEMENT_SECONDS = 20.0
_WRITE_SECONDS = 60.0
_MAX_UPDATES_AT_ONCE = 20
_MAX_RECORDS_AT_ONCE = 2_000
_SEEN_SECONDS = 4.0
_PRUNE_SECONDS = 3600.0
_KEEP_FRAMES_SECONDS = 2 * 86_400.0
"""Agents do not resend frames after this time."""
_SHOW_SECONDS = 86_400.0
"""A node of other heads that has not reported for longer than this is not shown."""
_LATE_SECONDS = 600.0
"""Data that another head writes may be this old, if the head is behind or its clock differs."""
_MAX_DELETED_ROWS = 2_000
_DELETE_SECONDS = 5.0
"""Limits of one DELETE statement, so that it does not delay the heartbeat."""
_DROP_FRAMES = tuple(
    f"DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE time < ? LIMIT ?))"
    for table in ("seen_frames", "early_ends")
)
_DROP_GPU_TIME = tuple(
    f'DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE "{column}" < ? LIMIT ?))'
    for table, column in ((GPU_HOURS, "time"), (GPU_DAYS, "time"), ("counted_time", "end"))
)
_REGISTER = """
INSERT INTO heads (id, host, position) VALUES (?, ?, 0) ON CONFLICT (id) DO UPDATE SET
    host = excluded.host, seen = clock_timestamp(), is_stopped = 0
RETURNING position
"""
_HEARTBEAT = """
UPDATE heads SET seen = clock_timestamp(), newest = coalesce(?, newest), is_stopped = ? WHERE id = ?
"""
_HEADS = """
SELECT id, host, is_stopped = 0 AND clock_timestamp() - seen < make_interval(secs => ?), newest FROM heads ORDER BY host, id
"""
_SESSIONS = "SELECT change, document FROM sessions WHERE change > ? ORDER BY change"
_RESPONSES = """
SELECT id, kind, time, detail FROM events WHERE node IS NULL AND kind = ANY(?) AND id > ? ORDER BY id
"""
_NODES = "SELECT id, name, host, machine, first_seen, facts, labels FROM nodes WHERE id > ? ORDER BY id"
_LAST_REPORT = """
SELECT greatest((SELECT max(change) FROM processes), (SELECT max(change) FROM latest), 0)
"""
_REPORTS = "SELECT node, kind, time, detail FROM latest WHERE node = ANY(?) AND change > ? ORDER BY change"
_OPEN_PROCESSES = "SELECT node, false, identity FROM processes WHERE node = ANY(?) AND ended IS NULL"
_CHANGED_PROCESSES = """
SELECT node, ended IS NOT NULL, identity FROM processes WHERE node = ANY(?) AND change > ? ORDER BY change
"""
_PUT_SEEN = """
INSERT INTO node_seen SELECT node, ?, seen, version FROM unnest(?::int8[], ?::float8[], ?::text[]) AS new (node, seen, version)
ON CONFLICT (node, head) DO UPDATE SET seen = excluded.seen, version = excluded.version
WHERE node_seen.seen < excluded.seen
"""
_GPUS = """
SELECT node, device FROM gpus WHERE node IN (SELECT node FROM gpus WHERE last_seen > ?) ORDER BY node, last_seen, uuid
"""
_SEEN = "SELECT node, max(seen), max(version) FROM node_seen WHERE head <> ? AND seen > ? GROUP BY node"


class PeerHead(NamedTuple):
    """Another head that uses the same database."""

    id: str
    host: str
    is_alive: bool
    newest: float | None
    """When the head last received frames."""


class SeenNode(NamedTuple):
    """When a node last reported, and the version of its agent."""

    node: int
    seen: float
    version: str


class DatabaseChanges(NamedTuple):
    """Changes in the database since the last read."""

    heads: Sequence[PeerHead]
    sessions: Sequence[str]
    """Documents of changed sessions, by any head."""
    nodes: Sequence[tuple[Any, ...]]
    """Rows of new nodes: ID, name, host, machine, first seen, facts and labels."""
    gpus: Mapping[int, Sequence[str]]
    """Documents of all GPUs of a node, oldest first, for nodes with a new GPU."""
    seen: Sequence[SeenNode] | None
    """When nodes of other heads last reported; None if this was not read this time."""
    reports: Sequence[tuple[int, str, float, str]] = ()
    """New findings and health of these nodes: node, kind, time and document."""
    processes: Sequence[tuple[int, bool, str]] = ()
    """Processes that started or ended on these nodes: node, whether it ended, and identity."""
    responses: Sequence[tuple[str, float, str]] = ()
    """New acknowledgements and silences, by any head: kind, time and document."""
    is_first: bool = False
    """Whether this is the first read since connecting; the database may be another one, with other node IDs."""


class ReplicatedStore(Protocol):
    """The store whose log is replicated."""

    @property
    def directory(self) -> str:
        """The data directory."""

    @property
    def accepted(self) -> int:
        """The log position up to which everything is on disk."""

    @property
    def newest(self) -> float | None:
        """When frames last arrived."""

    @property
    def layouts(self) -> Mapping[int, ColumnLayout]:
        """The layouts that frames refer to."""

    @property
    def metadata(self) -> Metadata:
        """The head's own metadata."""


class PostgresWriter:
    """Replicates the log of one head. All methods except `run` may be called from any thread and never wait for PostgreSQL."""

    def __init__(
        self,
        source: ReplicatedStore,
        config: DatabaseConfig,
        *,
        host: str,
        node_of: Callable[[int], StoredNode | None],
        seen: Callable[[], Sequence[SeenNode]],
        on_changes: Callable[[DatabaseChanges], None],
        now: Callable[[], float],
        keep_seconds: float = math.inf,
    ) -> None:
        """Create the writer; it does not connect yet.

        Args:
            source: The head's store.
            config: The database.
            host: The name of this machine.
            node_of: Returns the node with a number.
            seen: Returns when the nodes of this head last reported.
            on_changes: Called from this thread with the changes of other heads.
            now: The head's clock.
            keep_seconds: How long events, findings, processes and GPU time are kept.
        """
        self.config = config
        self._keep_seconds = keep_seconds
        self._source = source
        self._head = source.metadata.head_id
        self._host = host
        self._seen = seen
        self._on_changes = on_changes
        self._now = now
        self.ids = NodeIds(node_of)
        self._applier = UpdateApplier(self.ids, source.layouts.get)
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, MetadataUpdate]] = deque()
        self._confirmed = 0
        self._is_known = False
        """Whether this head's position was read from PostgreSQL."""
        self._records_at_once = _MAX_RECORDS_AT_ONCE
        """Reduced after a failed batch, which may have been too large for the time limit."""
        self._is_closing = False
        self.outage: BackendOutage | None = BackendOutage(
            now(), f"PostgreSQL at {config.shown}: not connected yet"
        )
        self._is_logged = False
        self._heads: Sequence[PeerHead] = ()
        self._deletes: deque[tuple[str, float, int]] = deque()
        """Pending deletions: statement, age in seconds, and time units per second."""
        self._change, self._node, self._response = 0, 0, 0
        self._report = 0
        """Number of the last finding or process change that was read."""
        self._are_all_wanted = True
        """Whether the next read must include all findings and open processes, not only changes."""
        self._seen_at = self._pruned_at = self._gpus_at = -math.inf
        self._thread = threading.Thread(target=self.run, name="postgres-writer", daemon=True)

    # --- for other threads

    @property
    def confirmed(self) -> int:
        """The position up to which PostgreSQL has the log; 0 while that is unknown."""
        return self._confirmed

    @property
    def limit_bytes(self) -> int:
        """Maximum number of bytes of the log that are kept for PostgreSQL."""
        return self.config.limit_bytes

    @property
    def heads(self) -> Sequence[PeerHead]:
        """The other known heads."""
        return self._heads

    @property
    def is_known(self) -> bool:
        """Whether PostgreSQL was reached since the start."""
        return self._is_known

    @property
    def waiting_records(self) -> int:
        """Number of log records that PostgreSQL does not have yet."""
        return max(0, self._source.accepted - self._confirmed)

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes of the log that PostgreSQL does not have yet.

        Raises:
            GpulseError: The log cannot be read.
        """
        return LogReader(f"{self._source.directory}/log").bytes_after(self._confirmed, self._source.accepted)

    def start(self) -> None:
        """Start the thread."""
        logging.getLogger("psycopg").setLevel(logging.CRITICAL)  # its errors are reported here
        self._thread.start()

    def committed(self, first: int, update: MetadataUpdate) -> None:
        """Queue an update that starts at a position."""
        with self._changed:
            self._queue.append((first, update))
            if len(self._queue) > MAX_QUEUED_UPDATES:
                self._queue.clear()  # the log has it
            self._changed.notify_all()

    def wait_for(self, position: int, seconds: float) -> bool:
        """Wait until PostgreSQL has the log up to a position; return False on timeout or during an outage."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.outage is not None or self._confirmed >= position, timeout=seconds
            )
            return self.outage is None and self._confirmed >= position

    def request_full_report(self) -> None:
        """Include all findings and processes of other heads' nodes in the next changes."""
        self._are_all_wanted = True

    def close(self, seconds: float) -> None:
        """Stop the thread after trying to write what is queued.

        Args:
            seconds: Maximum time to wait.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)

    # --- the thread

    def run(self) -> None:
        """Replicate the log until `close`."""
        wait_seconds = 1.0
        while not self._is_closing:
            try:
                self._follow()
                return
            except GpulseError as error:
                wait_seconds = 1.0 if self.outage is None else min(2 * wait_seconds, MAX_RETRY_SECONDS)
                self._failed(error)
            except Exception as error:  # a bug here must not stop the head
                log.exception("cannot write metadata to PostgreSQL because of a bug in gpulse; trying again")
                wait_seconds = MAX_RETRY_SECONDS
                self._failed(DatabaseError(f"internal error (a bug in gpulse): {type(error).__name__}"))
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, wait_seconds)

    def _failed(self, error: GpulseError) -> None:
        with self._changed:
            before = self.outage
            is_new = not self._is_logged or before is None or before.hint != error.hint
            since = self._now() if before is None else before.since
            self.outage = BackendOutage(since, error.message, error.hint)
            self._changed.notify_all()
        if is_new:
            self._is_logged = True
            log.warning("%s%s", error.message, f" ({error.hint})" if error.hint else "")

    def _note_recovered(self) -> None:
        """Record that PostgreSQL accepts writes again."""
        if self.outage is None:
            return
        with self._changed:
            self.outage = None
            self._changed.notify_all()
        if self._is_logged:
            log.warning("PostgreSQL at %s is available again", self.config.shown)
        self._is_logged = False

    def _follow(self) -> None:
        connection = connect(self.config, timeout_seconds=_STATEMENT_SECONDS)
        try:
            prepare_schema(self.config, connection)
            self._learn_nodes(connection)
            self._change = self._node = self._response = 0
            self._are_all_wanted = True
            self._seen_at = self._gpus_at = -math.inf
            self._confirm(self._begin(connection))
            heartbeat_at = -math.inf
            while True:
                is_last = self._is_closing
                while self._write_next(connection):
                    if time.monotonic() - heartbeat_at >= HEARTBEAT_SECONDS:
                        break
                self._note_recovered()
                if time.monotonic() - heartbeat_at >= HEARTBEAT_SECONDS or is_last:
                    is_stopped = is_last and self.waiting_records == 0
                    self._send_heartbeat(connection, is_first=math.isinf(heartbeat_at), is_stopped=is_stopped)
                    heartbeat_at = time.monotonic()
                    if is_stopped:
                        return
                    self._prune(connection)
                self._wait(heartbeat_at)
        finally:
            close(connection)

    def _wait(self, heartbeat_at: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closing or self.waiting_records > 0,
                max(0.0, heartbeat_at + HEARTBEAT_SECONDS - time.monotonic()),
            )

    def _learn_nodes(self, connection: DeadlineConnection) -> None:
        """Look up the IDs of all nodes of this head again, after a new connection or a failed transaction."""
        self.ids.clear()
        with transaction(self.config, connection, _WRITE_SECONDS) as database:
            lock_for_writing(database)
            self.ids.learn(database, self._source.metadata.nodes())

    def _begin(self, connection: DeadlineConnection) -> int:
        """Return this head's position in PostgreSQL; if the log no longer has it, copy all metadata first."""
        with transaction(self.config, connection, _STATEMENT_SECONDS) as database:
            row = database.execute(_REGISTER, (self._head, self._host)).fetchone()
        position = 0 if row is None else int(row[0])
        oldest = LogReader(f"{self._source.directory}/log").first
        if oldest - 1 <= position <= self._source.accepted:
            return position
        return self._copy(connection)

    def _copy(self, connection: DeadlineConnection) -> int:
        metadata = self._source.metadata
        position = metadata.applied
        log.info("copying this head's metadata to PostgreSQL at %s", self.config.shown)
        with self._changed:
            since = self._now() if self.outage is None else self.outage.since
            self.outage = BackendOutage(
                since, f"PostgreSQL at {self.config.shown}: copying this head's metadata"
            )
        copy_metadata(
            metadata.file,
            self.config,
            connection,
            self.ids,
            sessions=[session.to_dict() for session in metadata.sessions()],
            pause=self._check_open,
        )
        with transaction(self.config, connection, _STATEMENT_SECONDS) as database:
            database.execute("UPDATE heads SET position = ? WHERE id = ?", (position, self._head))
        return position

    def _check_open(self) -> None:
        if self._is_closing:
            raise DatabaseError("the head is stopping")

    def _write_next(self, connection: DeadlineConnection) -> bool:
        """Write the next records; return False if there are none."""
        is_short = self._records_at_once < _MAX_RECORDS_AT_ONCE
        updates = [] if is_short else self._queued()  # a queued update may be too large
        if not updates:
            updates = self._logged()
        if not updates:
            return False
        began = time.monotonic()
        try:
            try:
                self._write(connection, updates)
            except DatabaseError as error:
                if not error.is_about_data:
                    raise
                self._learn_nodes(connection)  # the transaction that inserted new nodes was rolled back
                self._write(connection, updates, one_by_one=True)
        except DatabaseError:
            self._records_at_once = max(1, (updates[-1].position - self._confirmed) // 2)
            raise
        if time.monotonic() - began < _WRITE_SECONDS / 4:
            self._records_at_once = min(2 * self._records_at_once, _MAX_RECORDS_AT_ONCE)
        return True

    def _queued(self) -> list[MetadataUpdate]:
        """Return the next updates from the queue in memory."""
        with self._changed:
            while self._queue and self._queue[0][0] <= self._confirmed:
                self._queue.popleft()  # if it is partly confirmed, the rest is read from the log
            found: list[MetadataUpdate] = []
            expected = self._confirmed + 1
            for first, update in self._queue:
                if first != expected or len(found) == _MAX_UPDATES_AT_ONCE:
                    break
                found.append(update)
                expected = update.position + 1
            return found

    def _logged(self) -> list[MetadataUpdate]:
        """Return the next updates from the log."""
        last = self._source.accepted
        if last <= self._confirmed:
            return []
        with self._changed:
            if self._queue and self._queue[0][0] > self._confirmed + 1:
                last = min(last, self._queue[0][0] - 1)
        reader = LogReader(f"{self._source.directory}/log")
        records = takewhile(lambda record: record.position <= last, reader.read(self._confirmed + 1))
        for update, count in split_updates(records, self._records_at_once):
            if update.position - count != self._confirmed:
                raise DatabaseError(
                    "records of the log were deleted before they were written to PostgreSQL; all metadata will be copied again"
                )
            return [update]
        return []

    def _write(
        self, connection: DeadlineConnection, updates: Sequence[MetadataUpdate], *, one_by_one: bool = False
    ) -> None:
        position = updates[-1].position
        with transaction(self.config, connection, _WRITE_SECONDS) as database:
            lock_for_writing(database)
            row = database.execute("SELECT position FROM heads WHERE id = ?", (self._head,)).fetchone()
            if row is None or row[0] != self._confirmed:
                raise DatabaseError(
                    f"another process is writing to {self.config.shown} with this head's ID",
                    hint="stop the other head, which uses a copy of this data directory, or give that head an empty data directory",
                )
            self._applier.apply(database, updates, one_by_one=one_by_one)
            database.execute(
                "UPDATE heads SET position = ?, seen = clock_timestamp() WHERE id = ?", (position, self._head)
            )
        self._confirm(position)

    def _confirm(self, position: int) -> None:
        with self._changed:
            self._confirmed = position
            self._is_known = True
            self._changed.notify_all()

    def _send_heartbeat(
        self, connection: DeadlineConnection, *, is_first: bool = False, is_stopped: bool = False
    ) -> None:
        """Send the heartbeat, and read the changes of other heads."""
        now = time.monotonic()
        is_time_for_nodes = now - self._seen_at >= _SEEN_SECONDS
        seen = self._own_nodes() if is_time_for_nodes else []
        last_report = self._report
        with transaction(self.config, connection, _STATEMENT_SECONDS) as database:
            database.execute(_HEARTBEAT, (self._source.newest, is_stopped, self._head))
            if seen:
                columns = [list(column) for column in zip(*seen, strict=True)]
                database.execute(_PUT_SEEN, (self._head, *columns))
            heads = database.execute(_HEADS, (ALIVE_SECONDS,)).fetchall()
            sessions = database.execute(_SESSIONS, (self._change,)).fetchall()
            responses = database.execute(_RESPONSES, (list(RESPONSE_EVENTS), self._response)).fetchall()
            nodes = database.execute(_NODES, (self._node,)).fetchall()
            others, devices, reports, processes = None, [], [], []
            if is_time_for_nodes:
                since = self._now() - _SHOW_SECONDS
                others = database.execute(_SEEN, (self._head, since)).fetchall()
                devices = database.execute(_GPUS, (self._gpus_at,)).fetchall()
                nodes_there = [row[0] for row in others]
                ((last_report,),) = database.execute(_LAST_REPORT).fetchall()
                are_all, self._are_all_wanted = self._are_all_wanted, False
                since_report = 0 if are_all else self._report
                reports = database.execute(_REPORTS, (nodes_there, since_report)).fetchall()
                if are_all:
                    processes = database.execute(_OPEN_PROCESSES, (nodes_there,)).fetchall()
                if self._report:
                    processes += database.execute(_CHANGED_PROCESSES, (nodes_there, self._report)).fetchall()
        if is_time_for_nodes:
            self._seen_at, self._gpus_at = now, self._now() - _LATE_SECONDS
            self._report = last_report
        gpus: dict[int, list[str]] = {}
        for node, device in devices:
            gpus.setdefault(node, []).append(device)
        self._heads = [PeerHead(*row) for row in heads if row[0] != self._head]
        self._change = sessions[-1][0] if sessions else self._change
        self._node = nodes[-1][0] if nodes else self._node
        self._response = responses[-1][0] if responses else self._response
        self._on_changes(
            DatabaseChanges(
                self._heads,
                [document for _, document in sessions],
                nodes,
                gpus,
                None if others is None else [SeenNode(*row) for row in others],
                reports,
                processes,
                [row[1:] for row in responses],
                is_first,
            )
        )

    def _prune(self, connection: DeadlineConnection) -> None:
        """Delete rows older than this head's retention: each statement once an hour, one at a time."""
        if not self._deletes:
            if time.monotonic() - self._pruned_at < _PRUNE_SECONDS:
                return
            self._pruned_at = time.monotonic()
            self._deletes.extend((statement, _KEEP_FRAMES_SECONDS, 1) for statement in _DROP_FRAMES)
            if math.isfinite(self._keep_seconds):
                self._deletes.extend((statement, self._keep_seconds, 1) for statement in DELETE_OLD)
                self._deletes.extend(
                    (statement, self._keep_seconds, 1_000_000) for statement in _DROP_GPU_TIME
                )
        try:
            is_done = self._delete(connection, *self._deletes[0])
        except DatabaseError as error:
            if connection.closed:
                raise
            log.warning("cannot delete old rows from PostgreSQL; trying again in an hour: %s", error.message)
            is_done = True
        if is_done:
            self._deletes.popleft()

    def _delete(self, connection: DeadlineConnection, statement: str, keep_seconds: float, unit: int) -> bool:
        """Delete rows that are too old by the clocks of both the server and this head; return whether that was all."""
        with transaction(self.config, connection, _STATEMENT_SECONDS) as database:
            database.execute(f"SET LOCAL statement_timeout TO '{_DELETE_SECONDS:g}s'")
            clock = database.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
            now = self._now() if clock is None else min(self._now(), float(clock[0]))
            before = round((now - keep_seconds) * unit)
            return database.execute(statement, (before, _MAX_DELETED_ROWS)).rowcount < _MAX_DELETED_ROWS

    def _own_nodes(self) -> list[SeenNode]:
        """Return when the nodes of this head last reported, by PostgreSQL ID."""
        return [
            one._replace(node=node) for one in self._seen() if (node := self.ids.known(one.node)) is not None
        ]
