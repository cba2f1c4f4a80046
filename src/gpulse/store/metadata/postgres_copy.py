"""Copy everything that a head's own metadata holds to PostgreSQL, where the log does not reach back far enough.

Copying twice changes nothing: rows that are there already stay, or become newer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from gpulse.store.metadata.facts import apply_fact
from gpulse.store.metadata.file import MetadataFile
from gpulse.store.metadata.postgres import (
    Connection,
    DatabaseConfig,
    DatabaseError,
    PostgresDatabase,
    lock_for_writing,
    transaction,
)
from gpulse.store.metadata.postgres_apply import NodeIds, run_or_skip

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
"""Which column is the node, what is read from SQLite, and how it is added. Long tables are read a piece at a time, by id."""
_NODES = "SELECT id, name, host, machine, first_seen, facts, labels FROM nodes"
_ADD_NODE = """
INSERT INTO nodes (id, name, host, machine, first_seen, facts, labels) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET name = excluded.name, facts = excluded.facts, labels = excluded.labels,
    first_seen = least(nodes.first_seen, excluded.first_seen)
"""


def copy_metadata(
    source: MetadataFile,
    config: DatabaseConfig,
    connection: Connection,
    ids: NodeIds,
    *,
    sessions: Sequence[dict[str, Any]],
    pause: Callable[[], None],
) -> None:
    """Copy everything.

    Args:
        source: The head's own metadata.
        config: Where to.
        connection: To it.
        ids: The nodes of this head.
        sessions: All of its sessions.
        pause: Called between two pieces; raises to give up.

    Raises:
        DatabaseError: PostgreSQL refused; it can be tried again.
    """

    def write(work: Callable[[PostgresDatabase], None]) -> None:
        pause()
        with transaction(config, connection, _SECONDS_AT_ONCE) as database:
            lock_for_writing(database)
            work(database)

    nodes = source.rows(_NODES)
    for piece in _pieces(iter(nodes)):
        write(lambda database, piece=piece: _copy_nodes(database, piece, ids))  # type: ignore[misc]
    for place, read, add in _TABLES:
        for piece in _pieces(_translated(_rows(source, read), place, ids)):
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
    """Add rows, without those that PostgreSQL refuses."""
    for row in rows:
        run_or_skip(database, partial(database.execute, statement, row))


def _rows(source: MetadataFile, read: str) -> Iterator[tuple[Any, ...]]:
    """Return the rows of a table; where they have ids, only one piece of them is in memory."""
    if "LIMIT" not in read:
        yield from source.rows(read)
        return
    last = 0
    while rows := source.rows(read, (last, _ROWS_AT_ONCE)):
        last = rows[-1][-1]
        for row in rows:
            yield row[:-1]


def _translated(rows: Iterable[tuple[Any, ...]], place: int, ids: NodeIds) -> Iterator[tuple[Any, ...]]:
    """Return rows with PostgreSQL's ids in place of the head's numbers, without those of nodes that nobody knows."""
    for row in rows:
        node = None if row[place] is None else ids.known(row[place])
        if node is not None or row[place] is None:
            yield (*row[:place], node, *row[place + 1 :])


def _pieces(rows: Iterator[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    while piece := list(islice(rows, _ROWS_AT_ONCE)):
        yield piece
