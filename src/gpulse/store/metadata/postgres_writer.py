"""The thread that copies what a head has committed to PostgreSQL, from its log, and learns what other heads wrote there.

The log stays the truth. Each batch of records and the position of the last of them are one transaction, so that nothing is
lost and nothing is applied twice, whatever ends in between. Nobody waits for this thread.
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
from gpulse.model.columns import Layout
from gpulse.store.log.reader import LogReader
from gpulse.store.metadata.metadata import DROP_BEFORE, Metadata
from gpulse.store.metadata.postgres import (
    Connection,
    DatabaseConfig,
    DatabaseError,
    close,
    connect,
    lock_for_writing,
    prepare,
    transaction,
)
from gpulse.store.metadata.postgres_apply import NodeIds, StepApplier
from gpulse.store.metadata.postgres_copy import copy_metadata
from gpulse.store.metadata.schema import GPU_DAYS, GPU_HOURS
from gpulse.store.metadata.step import Step, steps_of
from gpulse.store.outage import Outage
from gpulse.store.store import StoredNode

log = logging.getLogger(__name__)

ALIVE_SECONDS = 15.0
"""A head that has said nothing for longer counts as gone."""
BEAT_SECONDS = 1.0
MAX_RETRY_SECONDS = 10.0
MAX_QUEUED_STEPS = 120
"""What is further behind is read from the log."""
_STATEMENT_SECONDS = 20.0
_WRITE_SECONDS = 60.0
_STEPS_AT_ONCE = 20
_MAX_RECORDS_AT_ONCE = 2_000
_SEEN_SECONDS = 4.0
_PRUNE_SECONDS = 3600.0
_KEEP_FRAMES_SECONDS = 2 * 86_400.0
"""No agent sends a frame again after that."""
_SHOW_SECONDS = 86_400.0
"""A node that reported to no head for longer is not shown by heads that never had it."""
_LATE_SECONDS = 600.0
"""What another head writes may be this old: it was behind, or its clock differs."""
_MAX_DELETED_ROWS = 2_000
_DELETE_SECONDS = 5.0
"""Limits of one statement that deletes: other heads take one that says nothing for longer for dead."""
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
_BEAT = """
UPDATE heads SET seen = clock_timestamp(), newest = coalesce(?, newest), is_stopped = ? WHERE id = ?
"""
_HEADS = """
SELECT id, host, is_stopped = 0 AND clock_timestamp() - seen < make_interval(secs => ?), newest FROM heads ORDER BY host, id
"""
_SESSIONS = "SELECT change, document FROM sessions WHERE change > ? ORDER BY change"
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


class OtherHead(NamedTuple):
    """Another head of the same database."""

    id: str
    host: str
    is_alive: bool
    newest: float | None
    """When it last received frames."""


class SeenNode(NamedTuple):
    """When a node last reported, and the version of its agent."""

    node: int
    seen: float
    version: str


class News(NamedTuple):
    """What is new in the database."""

    heads: Sequence[OtherHead]
    sessions: Sequence[str]
    """Documents of sessions that were changed, by whichever head."""
    nodes: Sequence[tuple[Any, ...]]
    """Rows of nodes that are new: id, name, host, machine, first seen, facts and labels."""
    gpus: Mapping[int, Sequence[str]]
    """By node the documents of its GPUs, oldest first, where one of them is new."""
    seen: Sequence[SeenNode] | None
    """What other heads said about their nodes; None when that was not asked this time."""
    reports: Sequence[tuple[int, str, float, str]] = ()
    """What is new of the findings and health of their nodes: node, kind, time and document."""
    processes: Sequence[tuple[int, bool, str]] = ()
    """Which processes began or ended there: node, whether it ended, and identity."""
    is_first: bool = False
    """Whether it is the first since connecting: the database may be another one, with other ids of nodes."""


class Source(Protocol):
    """The store whose log is followed."""

    @property
    def directory(self) -> str:
        """The data directory."""

    @property
    def accepted(self) -> int:
        """Up to which position of the log everything is on disk."""

    @property
    def newest(self) -> float | None:
        """When frames came last."""

    @property
    def layouts(self) -> Mapping[int, Layout]:
        """The layouts that frames refer to."""

    @property
    def metadata(self) -> Metadata:
        """The head's own metadata."""


class PostgresWriter:
    """Follows the log of one head. All methods but `run` may be called from any thread and never wait for PostgreSQL."""

    def __init__(
        self,
        source: Source,
        config: DatabaseConfig,
        *,
        host: str,
        node_of: Callable[[int], StoredNode | None],
        seen: Callable[[], Sequence[SeenNode]],
        heard: Callable[[News], None],
        now: Callable[[], float],
        keep_seconds: float = math.inf,
    ) -> None:
        """Prepare to follow; nothing is connected yet.

        Args:
            source: The head's store.
            config: Where the database is.
            host: The name of this machine.
            node_of: Returns the node that a number stands for.
            seen: Returns when the nodes of this head last reported.
            heard: Called with what other heads wrote, from this thread.
            now: The head's clock.
            keep_seconds: How long events, findings, processes and GPU time are kept.
        """
        self.config = config
        self._keep_seconds = keep_seconds
        self._source = source
        self._head = source.metadata.head_id
        self._host = host
        self._seen = seen
        self._heard = heard
        self._now = now
        self.ids = NodeIds(node_of)
        self._applier = StepApplier(self.ids, source.layouts.get)
        self._news = threading.Condition()
        self._queue: deque[tuple[int, Step]] = deque()
        self._confirmed = 0
        self._is_known = False
        """Whether PostgreSQL has said how far this head is."""
        self._records_at_once = _MAX_RECORDS_AT_ONCE
        """Less after a batch that failed, which may have been too long for the time it has."""
        self._is_closing = False
        self.outage: Outage | None = Outage(now(), f"PostgreSQL at {config.shown}: not connected yet")
        self._is_logged = False
        self._heads: Sequence[OtherHead] = ()
        self._deletes: deque[tuple[str, float, int]] = deque()
        """What is still to do of this hour: statement, age in seconds, and units of time per second."""
        self._change, self._node = 0, 0
        self._report = 0
        """Number of the last change of a finding or process that was read."""
        self._are_all_wanted = True
        """Whether all findings and open processes are wanted once more, besides what has changed."""
        self._seen_at = self._pruned_at = self._gpus_at = -math.inf
        self._thread = threading.Thread(target=self.run, name="postgres-writer", daemon=True)

    # --- for others

    @property
    def confirmed(self) -> int:
        """Up to which position the log is in PostgreSQL; 0 as long as that is not known."""
        return self._confirmed

    @property
    def limit_bytes(self) -> int:
        """How much of the log may wait for PostgreSQL."""
        return self.config.limit_bytes

    @property
    def heads(self) -> Sequence[OtherHead]:
        """The other heads, as far as they are known."""
        return self._heads

    @property
    def is_known(self) -> bool:
        """Whether PostgreSQL was reached since the start."""
        return self._is_known

    @property
    def waiting_records(self) -> int:
        """How many records of the log PostgreSQL does not have yet."""
        return max(0, self._source.accepted - self._confirmed)

    @property
    def waiting_bytes(self) -> int:
        """How much of the log PostgreSQL does not have yet.

        Raises:
            GpulseError: The log cannot be read.
        """
        return LogReader(f"{self._source.directory}/log").bytes_after(self._confirmed, self._source.accepted)

    def start(self) -> None:
        """Begin to follow the log."""
        logging.getLogger("psycopg").setLevel(logging.CRITICAL)  # what it reports is reported here
        self._thread.start()

    def committed(self, first: int, step: Step) -> None:
        """Take in what was committed from a position on."""
        with self._news:
            self._queue.append((first, step))
            if len(self._queue) > MAX_QUEUED_STEPS:
                self._queue.clear()  # the log has it
            self._news.notify_all()

    def wait_for(self, position: int, seconds: float) -> bool:
        """Wait until PostgreSQL has the log up to a position; False when that takes longer or it does not answer."""
        with self._news:
            self._news.wait_for(
                lambda: self.outage is not None or self._confirmed >= position, timeout=seconds
            )
            return self.outage is None and self._confirmed >= position

    def report_again(self) -> None:
        """Have all findings and processes of other heads' nodes in the next news, not only what is new."""
        self._are_all_wanted = True

    def close(self, seconds: float) -> None:
        """End, after a moment for what is on its way."""
        with self._news:
            self._is_closing = True
            self._news.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)

    # --- the thread

    def run(self) -> None:
        """Follow the log until `close`."""
        wait_seconds = 1.0
        while not self._is_closing:
            try:
                self._follow()
                return
            except GpulseError as error:
                wait_seconds = 1.0 if self.outage is None else min(2 * wait_seconds, MAX_RETRY_SECONDS)
                self._failed(error)
            except Exception as error:  # the guard: a fault here must not end the head
                log.exception("a fault in gpulse; what is committed does not reach PostgreSQL for now")
                wait_seconds = MAX_RETRY_SECONDS
                self._failed(DatabaseError(f"a fault in gpulse: {type(error).__name__}"))
            with self._news:
                self._news.wait_for(lambda: self._is_closing, wait_seconds)

    def _failed(self, error: GpulseError) -> None:
        with self._news:
            before = self.outage
            is_news = not self._is_logged or before is None or before.hint != error.hint
            since = self._now() if before is None else before.since
            self.outage = Outage(since, error.message, error.hint)
            self._news.notify_all()
        if is_news:
            self._is_logged = True
            log.warning("%s%s", error.message, f" ({error.hint})" if error.hint else "")

    def _works(self) -> None:
        """Note that PostgreSQL takes what waits for it."""
        if self.outage is None:
            return
        with self._news:
            self.outage = None
            self._news.notify_all()
        if self._is_logged:
            log.warning("PostgreSQL at %s works again", self.config.shown)
        self._is_logged = False

    def _follow(self) -> None:
        connection = connect(self.config, timeout_seconds=_STATEMENT_SECONDS)
        try:
            prepare(self.config, connection)
            self._learn_nodes(connection)
            self._change = self._node = 0
            self._are_all_wanted = True
            self._seen_at = self._gpus_at = -math.inf
            self._confirm(self._begin(connection))
            beaten = -math.inf
            while True:
                is_last = self._is_closing
                while self._write_next(connection):
                    if time.monotonic() - beaten >= BEAT_SECONDS:
                        break
                self._works()
                if time.monotonic() - beaten >= BEAT_SECONDS or is_last:
                    is_stopped = is_last and self.waiting_records == 0
                    self._beat(connection, is_first=math.isinf(beaten), is_stopped=is_stopped)
                    beaten = time.monotonic()
                    if is_stopped:
                        return
                    self._prune(connection)
                self._wait(beaten)
        finally:
            close(connection)

    def _wait(self, beaten: float) -> None:
        with self._news:
            self._news.wait_for(
                lambda: self._is_closing or self.waiting_records > 0,
                max(0.0, beaten + BEAT_SECONDS - time.monotonic()),
            )

    def _learn_nodes(self, connection: Connection) -> None:
        """Learn the ids of all nodes of this head; what was known of another database or of a failed transaction is wrong."""
        self.ids.clear()
        with transaction(self.config, connection, _WRITE_SECONDS) as database:
            lock_for_writing(database)
            self.ids.learn(database, self._source.metadata.nodes())

    def _begin(self, connection: Connection) -> int:
        """Return the position that PostgreSQL has of this head; copy everything where the log does not reach back to it."""
        with transaction(self.config, connection, _STATEMENT_SECONDS) as database:
            row = database.execute(_REGISTER, (self._head, self._host)).fetchone()
        position = 0 if row is None else int(row[0])
        oldest = LogReader(f"{self._source.directory}/log").first
        if oldest - 1 <= position <= self._source.accepted:
            return position
        return self._copy(connection)

    def _copy(self, connection: Connection) -> int:
        metadata = self._source.metadata
        position = metadata.applied
        log.info("copying this head's metadata to PostgreSQL at %s", self.config.shown)
        with self._news:
            since = self._now() if self.outage is None else self.outage.since
            self.outage = Outage(since, f"PostgreSQL at {self.config.shown}: copying this head's metadata")
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
            raise DatabaseError("the head ends")

    def _write_next(self, connection: Connection) -> bool:
        """Write the next records; False when there are none."""
        is_short = self._records_at_once < _MAX_RECORDS_AT_ONCE
        steps = [] if is_short else self._queued()  # a commit may be too long
        if not steps:
            steps = self._logged()
        if not steps:
            return False
        began = time.monotonic()
        try:
            try:
                self._write(connection, steps)
            except DatabaseError as error:
                if not error.is_about_data:
                    raise
                self._learn_nodes(
                    connection
                )  # ids of nodes that were new in these steps do not exist any more
                self._write(connection, steps, one_by_one=True)
        except DatabaseError:
            self._records_at_once = max(1, (steps[-1].position - self._confirmed) // 2)
            raise
        if time.monotonic() - began < _WRITE_SECONDS / 4:
            self._records_at_once = min(2 * self._records_at_once, _MAX_RECORDS_AT_ONCE)
        return True

    def _queued(self) -> list[Step]:
        """Return the next steps as far as they are in memory."""
        with self._news:
            while self._queue and self._queue[0][0] <= self._confirmed:
                self._queue.popleft()  # the log has the rest of one that is partly confirmed
            found: list[Step] = []
            expected = self._confirmed + 1
            for first, step in self._queue:
                if first != expected or len(found) == _STEPS_AT_ONCE:
                    break
                found.append(step)
                expected = step.position + 1
            return found

    def _logged(self) -> list[Step]:
        """Return the next steps as far as they are in the log alone."""
        last = self._source.accepted
        if last <= self._confirmed:
            return []
        with self._news:
            if self._queue and self._queue[0][0] > self._confirmed + 1:
                last = min(last, self._queue[0][0] - 1)
        reader = LogReader(f"{self._source.directory}/log")
        records = takewhile(lambda record: record.position <= last, reader.read(self._confirmed + 1))
        for step, count in steps_of(records, self._records_at_once):
            if step.position - count != self._confirmed:
                raise DatabaseError("the log was shortened before PostgreSQL had it; it is copied anew")
            return [step]
        return []

    def _write(self, connection: Connection, steps: Sequence[Step], *, one_by_one: bool = False) -> None:
        position = steps[-1].position
        with transaction(self.config, connection, _WRITE_SECONDS) as database:
            lock_for_writing(database)
            row = database.execute("SELECT position FROM heads WHERE id = ?", (self._head,)).fetchone()
            if row is None or row[0] != self._confirmed:
                raise DatabaseError(
                    f"somebody else writes to {self.config.shown} as this head",
                    hint="stop the other head that uses a copy of this data directory, or give it another one",
                )
            self._applier.apply(database, steps, one_by_one=one_by_one)
            database.execute(
                "UPDATE heads SET position = ?, seen = clock_timestamp() WHERE id = ?", (position, self._head)
            )
        self._confirm(position)

    def _confirm(self, position: int) -> None:
        with self._news:
            self._confirmed = position
            self._is_known = True
            self._news.notify_all()

    def _beat(self, connection: Connection, *, is_first: bool = False, is_stopped: bool = False) -> None:
        """Say that this head is alive, and learn what is new."""
        now = time.monotonic()
        is_time_for_nodes = now - self._seen_at >= _SEEN_SECONDS
        seen = self._own_nodes() if is_time_for_nodes else []
        last_report = self._report
        with transaction(self.config, connection, _STATEMENT_SECONDS) as database:
            database.execute(_BEAT, (self._source.newest, is_stopped, self._head))
            if seen:
                columns = [list(column) for column in zip(*seen, strict=True)]
                database.execute(_PUT_SEEN, (self._head, *columns))
            heads = database.execute(_HEADS, (ALIVE_SECONDS,)).fetchall()
            sessions = database.execute(_SESSIONS, (self._change,)).fetchall()
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
        self._heads = [OtherHead(*row) for row in heads if row[0] != self._head]
        self._change = sessions[-1][0] if sessions else self._change
        self._node = nodes[-1][0] if nodes else self._node
        self._heard(
            News(
                self._heads,
                [document for _, document in sessions],
                nodes,
                gpus,
                None if others is None else [SeenNode(*row) for row in others],
                reports,
                processes,
                is_first,
            )
        )

    def _prune(self, connection: Connection) -> None:
        """Delete some rows that are older than the retention of this head: one statement at a time, once an hour each."""
        if not self._deletes:
            if time.monotonic() - self._pruned_at < _PRUNE_SECONDS:
                return
            self._pruned_at = time.monotonic()
            self._deletes.extend((statement, _KEEP_FRAMES_SECONDS, 1) for statement in _DROP_FRAMES)
            if math.isfinite(self._keep_seconds):
                self._deletes.extend((statement, self._keep_seconds, 1) for statement in DROP_BEFORE)
                self._deletes.extend(
                    (statement, self._keep_seconds, 1_000_000) for statement in _DROP_GPU_TIME
                )
        try:
            is_done = self._delete(connection, *self._deletes[0])
        except DatabaseError as error:
            if connection.closed:
                raise
            log.warning("old rows were not deleted, which is tried again in an hour: %s", error.message)
            is_done = True
        if is_done:
            self._deletes.popleft()

    def _delete(self, connection: Connection, statement: str, keep_seconds: float, unit: int) -> bool:
        """Delete what is too old by the clocks of both the server and this head; whether that was all of it."""
        with transaction(self.config, connection, _STATEMENT_SECONDS) as database:
            database.execute(f"SET LOCAL statement_timeout TO '{_DELETE_SECONDS:g}s'")
            clock = database.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
            now = self._now() if clock is None else min(self._now(), float(clock[0]))
            before = round((now - keep_seconds) * unit)
            return database.execute(statement, (before, _MAX_DELETED_ROWS)).rowcount < _MAX_DELETED_ROWS

    def _own_nodes(self) -> list[SeenNode]:
        """Return when the nodes of this head last reported, by PostgreSQL's ids."""
        return [
            one._replace(node=node) for one in self._seen() if (node := self.ids.known(one.node)) is not None
        ]
