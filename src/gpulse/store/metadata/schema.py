"""The tables of the book, their version, and how a file becomes a book or an older book a newer one."""

from __future__ import annotations

import sqlite3
import uuid

from gpulse.errors import LogError
from gpulse.store.metadata import findings

VERSION = 1
"""Kept as the file's `user_version`."""
APPLICATION_ID = 0x6750426B
"""`gPBk`: how a database says whose it is."""

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE nodes (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, host TEXT NOT NULL, machine TEXT NOT NULL,
    first_seen REAL NOT NULL, facts TEXT NOT NULL, labels TEXT NOT NULL, via TEXT
);
CREATE TABLE runs (
    run BLOB PRIMARY KEY, node INTEGER, last INTEGER NOT NULL DEFAULT 0,
    time REAL, version TEXT, pid INTEGER, boot TEXT
) WITHOUT ROWID;
CREATE TABLE starts (node INTEGER NOT NULL, run BLOB NOT NULL, time REAL NOT NULL, PRIMARY KEY (node, run)) WITHOUT ROWID;
CREATE TABLE layouts (id TEXT PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE gpus (
    node INTEGER NOT NULL, uuid TEXT NOT NULL, "index" INTEGER NOT NULL, mig_index INTEGER, name TEXT NOT NULL,
    device TEXT NOT NULL, first_seen REAL NOT NULL, last_seen REAL NOT NULL, via TEXT, PRIMARY KEY (node, uuid)
) WITHOUT ROWID;
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, start REAL NOT NULL, "end" REAL, state TEXT NOT NULL,
    document TEXT NOT NULL
);
CREATE INDEX sessions_name ON sessions (name);
CREATE INDEX sessions_start ON sessions (start);
CREATE INDEX sessions_end ON sessions ("end");
CREATE INDEX sessions_state ON sessions (state);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, node INTEGER, kind TEXT NOT NULL, from_frame INTEGER NOT NULL,
    detail TEXT NOT NULL, via TEXT
);
CREATE INDEX events_time ON events (time);
CREATE INDEX events_node ON events (node, time);
CREATE TABLE latest (
    kind TEXT NOT NULL, node INTEGER NOT NULL, time REAL NOT NULL, detail TEXT NOT NULL, PRIMARY KEY (kind, node)
) WITHOUT ROWID;
CREATE TABLE processes (
    id INTEGER PRIMARY KEY, node INTEGER NOT NULL, pid INTEGER NOT NULL, start_time REAL, run BLOB NOT NULL,
    first_seen REAL NOT NULL, ended REAL, identity TEXT NOT NULL, sequence INTEGER NOT NULL DEFAULT 0,
    via TEXT
);
CREATE UNIQUE INDEX processes_key ON processes (node, pid, ifnull(start_time, -1));
CREATE INDEX processes_open ON processes (node) WHERE ended IS NULL;
CREATE INDEX processes_ended ON processes (ended, first_seen);
"""
_LATER = """
CREATE INDEX IF NOT EXISTS events_kind ON events (node, kind, time);
CREATE INDEX IF NOT EXISTS events_job ON events (
    substr(json_extract(detail, '$.id'), instr(json_extract(detail, '$.id'), ':') + 1)) WHERE kind = 'job';
CREATE INDEX IF NOT EXISTS events_job_array ON events (json_extract(detail, '$.array')) WHERE kind = 'job';
CREATE INDEX IF NOT EXISTS events_job_name ON events (json_extract(detail, '$.name'), time) WHERE kind = 'job';
CREATE INDEX IF NOT EXISTS events_job_end ON events (json_extract(detail, '$.job')) WHERE kind = 'job_end';
CREATE INDEX IF NOT EXISTS processes_job ON processes (json_extract(identity, '$.owner.job'));
CREATE TABLE IF NOT EXISTS told (
    run BLOB NOT NULL, sequence INTEGER NOT NULL, time REAL NOT NULL, PRIMARY KEY (run, sequence)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS told_time ON told (time);
CREATE TABLE IF NOT EXISTS early_ends (
    node INTEGER NOT NULL, pid INTEGER NOT NULL, start_time REAL NOT NULL, run BLOB NOT NULL, sequence INTEGER NOT NULL,
    time REAL NOT NULL, PRIMARY KEY (node, pid, start_time)
) WITHOUT ROWID;
"""
_LATER_COLUMNS = (
    ("processes", "sequence", "INTEGER NOT NULL DEFAULT 0"),
    ("nodes", "via", "TEXT"),
    ("gpus", "via", "TEXT"),
    ("events", "via", "TEXT"),
    ("processes", "via", "TEXT"),
)
"""What older files of this version lack; they can be read without it."""


def check_version(database: sqlite3.Connection, path: str) -> int:
    """The version of the tables in a file; 0 when there are none yet.

    Raises:
        LogError: A newer gpulse made them, or another program.
    """
    owner: int = database.execute("PRAGMA application_id").fetchone()[0]
    version: int = database.execute("PRAGMA user_version").fetchone()[0]
    tables: int = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if owner != APPLICATION_ID and (owner or version or tables):
        raise LogError(
            f"{path} is another program's database", hint="move that file away, or use another directory"
        )
    if version > VERSION:
        raise LogError(
            f"{path} is of format {version}; this gpulse reads up to {VERSION}",
            hint="use the newer gpulse that wrote it, or another directory",
        )
    return version


def prepare(database: sqlite3.Connection, path: str) -> None:
    """Make the tables, or bring those of an older version up to date; within the caller's transaction.

    Raises:
        LogError: A newer gpulse made them, or another program.
    """
    version = check_version(database, path)
    if version == VERSION:
        _execute(database, _LATER + findings.TABLE)
        for table, column, kind in _LATER_COLUMNS:
            if column not in columns(database, table):
                database.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
        return
    # A step from each older version to the next one belongs here; there is none yet.
    _execute(database, _TABLES + _LATER + findings.TABLE)
    database.executemany(
        "INSERT INTO meta VALUES (?, ?)", (("head_id", str(uuid.uuid4())), ("applied", 0), ("settings", None))
    )
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute(f"PRAGMA user_version = {VERSION}")


def columns(database: sqlite3.Connection, table: str) -> set[str]:
    """The columns that a table has."""
    return {row[1] for row in database.execute(f"PRAGMA table_info({table})")}


def _execute(database: sqlite3.Connection, statements: str) -> None:
    """Run several statements, within the caller's transaction."""
    for statement in filter(None, map(str.strip, statements.split(";"))):
        database.execute(statement)
