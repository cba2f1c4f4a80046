"""Replicate one head's log, or a copy of its metadata, to the tables that all heads share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from gpulse.model.packed_columns import ColumnLayout
from gpulse.store.metadata.frame_events import apply_frame
from gpulse.store.metadata.log_facts import Fact, apply_fact, layout_gpus
from gpulse.store.metadata.log_updates import MetadataUpdate
from gpulse.store.metadata.postgres_connection import (
    DATA_ERRORS,
    DatabaseConfig,
    DatabaseError,
    DeadlineConnection,
    PostgresDatabase,
    lock_for_writing,
    transaction,
)
from gpulse.store.metadata.sql_dialects import postgres_text
from gpulse.store.metadata.sqlite_file import MetadataFile
from gpulse.store.metadata.value_checks import FORMAT_ERRORS, dump_json
from gpulse.store.store import StoredNode

log = logging.getLogger(__name__)

_PRIVATE_FACTS = frozenset({"layout", "forget", "settings"})
"""Facts that are not replicated, because they concern only one head."""
_NEW_NODES = """
INSERT INTO nodes (name, host, machine, first_seen, facts, labels)
SELECT * FROM unnest(?::text[], ?::text[], ?::text[], ?::float8[], ?::text[], ?::text[])
ON CONFLICT (host, machine) DO NOTHING
"""
_NODE_IDS = """
SELECT nodes.id, nodes.host, nodes.machine FROM nodes
JOIN unnest(?::text[], ?::text[]) AS known (host, machine) ON nodes.host = known.host AND nodes.machine = known.machine
"""


class NodeIds:
    """PostgreSQL IDs of nodes, by the node numbers of one head."""

    def __init__(self, node_of: Callable[[int], StoredNode | None]) -> None:
        """Start empty.

        Args:
            node_of: Returns the node with a number of this head.
        """
        self._node_of = node_of
        self._ids: dict[int, int] = {}

    def clear(self) -> None:
        """Forget all IDs, since the database may be another one."""
        self._ids.clear()

    def known(self, number: int) -> int | None:
        """Return the ID of a node; None if it is unknown."""
        return self._ids.get(number)

    def learn(self, database: PostgresDatabase, numbers: Iterable[int]) -> None:
        """Look up the IDs of nodes, and insert missing nodes."""
        unknown = set(numbers) - self._ids.keys()
        nodes = [node for number in unknown if (node := self._node_of(number)) is not None]
        if not nodes:
            return
        database.execute(
            _NEW_NODES,
            (
                [node.name for node in nodes],
                [postgres_text(node.host) for node in nodes],
                [postgres_text(node.machine) for node in nodes],
                [node.first_seen for node in nodes],
                [dump_json(dict(node.facts)) for node in nodes],
                [dump_json(dict(node.labels)) for node in nodes],
            ),
        )
        self._ids |= find_ids(database, nodes)


def find_ids(database: PostgresDatabase, nodes: Iterable[StoredNode]) -> dict[int, int]:
    """Return the PostgreSQL IDs of nodes by number, without nodes that do not exist there."""
    known = {(postgres_text(node.host), postgres_text(node.machine)): node.id for node in nodes}
    columns = [host for host, _ in known], [machine for _, machine in known]
    found = database.execute(_NODE_IDS, columns).fetchall()
    return {known[host, machine]: node for node, host, machine in found}


def run_or_skip(database: PostgresDatabase, work: Callable[[], object]) -> bool:
    """Run a function within the caller's transaction; return False if PostgreSQL rejected a value."""
    try:
        with database.connection.transaction():
            work()
    except DATA_ERRORS as error:
        log.error("skipped a record of this head that PostgreSQL rejected: %s", str(error)[:200])
        return False
    return True


class UpdateApplier:
    """Applies updates from one head's log, with its node numbers replaced by PostgreSQL IDs."""

    def __init__(self, ids: NodeIds, layout_of: Callable[[int], ColumnLayout | None]) -> None:
        """Create an applier.

        Args:
            ids: The nodes of this head.
            layout_of: Returns a layout from an earlier update.
        """
        self._ids = ids
        self._layout_of = layout_of
        self._gpu_layouts: dict[int, ColumnLayout] = {}

    def apply(
        self, database: PostgresDatabase, updates: Sequence[MetadataUpdate], *, one_by_one: bool = False
    ) -> None:
        """Apply steps, within the caller's transaction.

        Args:
            database: Where to.
            updates: In the order of the log.
            one_by_one: Skip what PostgreSQL rejects, and keep the rest.
        """
        numbers = {node for update in updates for node in _find_nodes(update)}
        if numbers:
            self._ids.learn(database, numbers)
        for update in updates:
            for fact in update.facts:
                translated = self._translated(fact)
                if translated is not None:
                    self._run(database, partial(apply_fact, database, translated), one_by_one)
            for frame in update.events:
                node = self._ids.known(frame.node)
                if node is not None:
                    own = frame._replace(node=node)
                    self._run(database, partial(apply_frame, database, own), one_by_one)

    def _run(self, database: PostgresDatabase, work: Callable[[], None], one_by_one: bool) -> None:
        if not one_by_one:
            work()
        else:
            run_or_skip(database, work)

    def _translated(self, fact: Fact) -> dict[str, Any] | None:
        """Replace the node number in a fact by the PostgreSQL ID; return None if the fact is not replicated."""
        kind = fact.get("fact")
        try:
            if kind == "layout":
                layout = ColumnLayout.from_json(fact["text"])
                if layout.scope == "gpu":
                    self._gpu_layouts[int(fact["id"])] = layout
            if kind in _PRIVATE_FACTS:
                return None
            found = dict(fact)
            if kind == "devices":
                found["devices"] = self._devices(int(fact["layout"]))
            name = "id" if kind == "node" else "node"
            number = found.get(name)
            if isinstance(number, int):
                found[name] = self._ids.known(number)
                if found[name] is None:
                    return None
        except FORMAT_ERRORS:  # the head's own metadata reports it
            return None
        return found

    def _devices(self, name: int) -> Sequence[Mapping[str, Any]]:
        layout = self._gpu_layouts.get(name) or self._layout_of(name)
        return () if layout is None else layout_gpus(layout)


def _find_nodes(update: MetadataUpdate) -> Iterable[int]:
    for fact in update.facts:
        node = fact.get("id" if fact.get("fact") == "node" else "node")
        if isinstance(node, int) and not isinstance(node, bool):
            yield node
    for frame in update.events:
        yield frame.node


_ROWS_AT_ONCE = 2_000
_SECONDS_AT_ONCE = 60.0
_TABLES: tuple[tuple[int, str, str], ...] = (
    (
        1,
        "SELECT run, node, time, version, pid, boot FROM runs WHERE node IS NOT NULL",
        "INSERT INTO runs (run, node, time, version, pid, boot) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
    ),
    (
        0,
        "SELECT node, run, time FROM starts",
        (
            "INSERT INTO starts VALUES (?, ?, ?) "
            "ON CONFLICT (node, run) DO UPDATE SET time = least(starts.time, excluded.time)"
        ),
    ),
    (
        0,
        'SELECT node, uuid, "index", mig_index, name, device, first_seen, last_seen FROM gpus',
        (
            "INSERT INTO gpus VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (node, uuid) DO UPDATE SET "
            '"index" = excluded."index", mig_index = excluded.mig_index, name = excluded.name, device = excluded.device, '
            "first_seen = least(gpus.first_seen, excluded.first_seen), last_seen = excluded.last_seen "
            "WHERE excluded.last_seen > gpus.last_seen"
        ),
    ),
    (
        1,
        (
            "SELECT time, node, kind, from_frame, job, job_number, job_array, job_name, detail, id FROM events "
            "WHERE id > ? ORDER BY id LIMIT ?"
        ),
        (
            "INSERT INTO events (time, node, kind, from_frame, job, job_number, job_array, job_name, detail) "
            "SELECT * FROM (VALUES (?::float8, ?::int8, ?, ?::int8, ?, ?, ?, ?, ?)) "
            "AS new (time, node, kind, from_frame, job, job_number, job_array, job_name, detail) WHERE NOT EXISTS ("
            "SELECT 1 FROM events AS old WHERE old.time = new.time AND old.kind = new.kind AND old.detail = new.detail "
            "AND old.node IS NOT DISTINCT FROM new.node)"
        ),
    ),
    (
        1,
        "SELECT kind, node, time, detail FROM latest",
        (
            "INSERT INTO latest VALUES (?, ?, ?, ?) ON CONFLICT (kind, node) DO UPDATE SET "
            "time = excluded.time, detail = excluded.detail WHERE latest.time < excluded.time"
        ),
    ),
    (
        0,
        (
            "SELECT node, pid, start_time, run, first_seen, ended, sequence, job, identity, id FROM processes "
            "WHERE id > ? ORDER BY id LIMIT ?"
        ),
        (
            "INSERT INTO processes (node, pid, start_time, run, first_seen, ended, sequence, job, identity) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (node, pid, coalesce(start_time, -1)) DO UPDATE SET "
            "first_seen = least(processes.first_seen, excluded.first_seen), ended = coalesce(processes.ended, excluded.ended)"
        ),
    ),
    (
        0,
        (
            'SELECT node, "key", start, last, "end", is_over, by_head, detail, id FROM findings '
            "WHERE id > ? ORDER BY id LIMIT ?"
        ),
        (
            'WITH new (node, "key", start, last, "end", is_over, by_head, detail) AS ('
            "VALUES (?::int8, ?, ?::float8, ?::float8, ?::float8, ?::int8, ?::int8, ?)), ended AS ("
            'UPDATE findings AS old SET last = new.last, "end" = new."end", is_over = new.is_over, detail = new.detail '
            'FROM new WHERE old.node IS NOT DISTINCT FROM new.node AND old."key" = new."key" AND old.start <= new.last '
            'AND old."end" IS NULL AND old.last BETWEEN new.start AND new."end") '
            'INSERT INTO findings (node, "key", start, last, "end", is_over, by_head, detail) '
            "SELECT * FROM new WHERE NOT EXISTS ("
            'SELECT 1 FROM findings AS old WHERE old.node IS NOT DISTINCT FROM new.node AND old."key" = new."key" '
            'AND old.start <= new.last AND coalesce(old."end", old.last) >= new.start)'
        ),
    ),
)
"""For each table: index of the node column, query for SQLite, and insert statement. Long tables are read in chunks, by ID."""
_NODES = "SELECT id, name, host, machine, first_seen, facts, labels FROM nodes"
_ADD_NODE = """
INSERT INTO nodes (id, name, host, machine, first_seen, facts, labels) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET name = excluded.name, facts = excluded.facts, labels = excluded.labels,
    first_seen = least(nodes.first_seen, excluded.first_seen)
"""


def copy_metadata(
    source: MetadataFile,
    config: DatabaseConfig,
    connection: DeadlineConnection,
    ids: NodeIds,
    *,
    sessions: Sequence[dict[str, Any]],
    pause: Callable[[], None],
) -> None:
    """Copy all metadata of a head to PostgreSQL.

    Args:
        source: The head's own metadata.
        config: The database.
        connection: A connection to the database.
        ids: The nodes of this head.
        sessions: All sessions of this head.
        pause: Called between two chunks; may raise to cancel.

    Raises:
        DatabaseError: PostgreSQL reported an error; try again later.
    """

    def write(work: Callable[[PostgresDatabase], None]) -> None:
        pause()
        with transaction(config, connection, _SECONDS_AT_ONCE) as database:
            lock_for_writing(database)
            work(database)

    nodes = source.rows(_NODES)
    for piece in _split_rows(iter(nodes)):
        write(lambda database, piece=piece: _copy_nodes(database, piece, ids))  # type: ignore[misc]
    for place, read, add in _TABLES:
        for piece in _split_rows(_translate_rows(_rows(source, read), place, ids)):
            try:
                write(lambda database, add=add, piece=piece: database.executemany(add, piece))  # type: ignore[misc]
            except DatabaseError as error:
                if not error.is_about_data:
                    raise
                write(lambda database, add=add, piece=piece: _add_one_by_one(database, add, piece))  # type: ignore[misc]

    def copy_sessions(database: PostgresDatabase) -> None:
        for session in sessions:
            apply_fact(database, {"fact": "session", **session})

    write(copy_sessions)


def _copy_nodes(database: PostgresDatabase, rows: Sequence[tuple[Any, ...]], ids: NodeIds) -> None:
    ids.learn(database, (row[0] for row in rows))
    database.executemany(
        _ADD_NODE, [(ids.known(row[0]), *row[1:]) for row in rows if ids.known(row[0]) is not None]
    )


def _add_one_by_one(database: PostgresDatabase, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, except those that PostgreSQL rejects."""
    for row in rows:
        run_or_skip(database, partial(database.execute, statement, row))


def _rows(source: MetadataFile, read: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table; those of long tables are read in chunks."""
    if "LIMIT" not in read:
        yield from source.rows(read)
        return
    last = 0
    while rows := source.rows(read, (last, _ROWS_AT_ONCE)):
        last = rows[-1][-1]
        for row in rows:
            yield row[:-1]


def _translate_rows(rows: Iterable[tuple[Any, ...]], place: int, ids: NodeIds) -> Iterator[tuple[Any, ...]]:
    """Replace node numbers in rows by PostgreSQL IDs; skip rows of unknown nodes."""
    for row in rows:
        node = None if row[place] is None else ids.known(row[place])
        if node is not None or row[place] is None:
            yield (*row[:place], node, *row[place + 1 :])


def _split_rows(rows: Iterator[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    while piece := list(islice(rows, _ROWS_AT_ONCE)):
        yield piece
