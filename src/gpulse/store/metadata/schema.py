"""Tables of the metadata, and their format version."""

from __future__ import annotations

import sqlite3
import uuid

from gpulse.errors import LogError
from gpulse.store.metadata.sql_dialects import split_statements, to_postgres_tables

VERSION = 2
"""Stored as `user_version` in SQLite, and in the table `meta` in PostgreSQL."""
APPLICATION_ID = 0x6750426B
"""`gPBk`: identifies the SQLite files of gpulse."""

_TABLES = """
CREATE TABLE nodes (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, host TEXT NOT NULL, machine TEXT NOT NULL,
    first_seen REAL NOT NULL, facts TEXT NOT NULL, labels TEXT NOT NULL
);
CREATE TABLE runs (
    run BLOB PRIMARY KEY, node INTEGER, last INTEGER NOT NULL DEFAULT 0,
    time REAL, version TEXT, pid INTEGER, boot TEXT
) WITHOUT ROWID;
CREATE TABLE starts (node INTEGER NOT NULL, run BLOB NOT NULL, time REAL NOT NULL, PRIMARY KEY (node, run)) WITHOUT ROWID;
CREATE TABLE gpus (
    node INTEGER NOT NULL, uuid TEXT NOT NULL, "index" INTEGER NOT NULL, mig_index INTEGER, name TEXT NOT NULL,
    device TEXT NOT NULL, first_seen REAL NOT NULL, last_seen REAL NOT NULL, PRIMARY KEY (node, uuid)
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
    job TEXT, job_number TEXT, job_array TEXT, job_name TEXT, detail TEXT NOT NULL
);
CREATE INDEX events_time ON events (time);
CREATE INDEX events_node ON events (node, time);
CREATE INDEX events_kind ON events (node, kind, time);
CREATE INDEX events_job ON events (job) WHERE job IS NOT NULL;
CREATE INDEX events_job_number ON events (job_number) WHERE job_number IS NOT NULL;
CREATE INDEX events_job_array ON events (job_array) WHERE job_array IS NOT NULL;
CREATE INDEX events_job_name ON events (job_name, time) WHERE job_name IS NOT NULL;
CREATE TABLE latest (
    kind TEXT NOT NULL, node INTEGER NOT NULL, time REAL NOT NULL, detail TEXT NOT NULL, PRIMARY KEY (kind, node)
) WITHOUT ROWID;
CREATE TABLE processes (
    id INTEGER PRIMARY KEY, node INTEGER NOT NULL, pid INTEGER NOT NULL, start_time REAL, run BLOB NOT NULL,
    first_seen REAL NOT NULL, ended REAL, sequence INTEGER NOT NULL, job TEXT, identity TEXT NOT NULL
);
CREATE UNIQUE INDEX processes_key ON processes (node, pid, coalesce(start_time, -1));
CREATE INDEX processes_open ON processes (node) WHERE ended IS NULL;
CREATE INDEX processes_ended ON processes (ended, first_seen);
CREATE INDEX processes_job ON processes (job) WHERE job IS NOT NULL;
CREATE TABLE findings (
    id INTEGER PRIMARY KEY, node INTEGER, "key" TEXT NOT NULL, start REAL NOT NULL, last REAL NOT NULL,
    "end" REAL, is_over INTEGER NOT NULL, by_head INTEGER NOT NULL, detail TEXT NOT NULL
);
CREATE INDEX findings_key ON findings (node, "key", start);
CREATE INDEX findings_open ON findings (node) WHERE is_over = 0;
CREATE INDEX findings_time ON findings ("end", start);
"""
"""Tables in both databases."""
_SQLITE_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE layouts (id TEXT PRIMARY KEY, text TEXT NOT NULL);
"""
_POSTGRES_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE UNIQUE INDEX nodes_machine ON nodes (host, machine);
CREATE SEQUENCE changes;
ALTER TABLE sessions ADD COLUMN change INTEGER NOT NULL DEFAULT 0;
CREATE INDEX sessions_change ON sessions (change);
ALTER TABLE processes ADD COLUMN change INTEGER NOT NULL DEFAULT 0;
CREATE INDEX processes_change ON processes (change);
ALTER TABLE latest ADD COLUMN change INTEGER NOT NULL DEFAULT 0;
CREATE TABLE seen_frames (run BLOB NOT NULL, sequence INTEGER NOT NULL, time REAL NOT NULL, PRIMARY KEY (run, sequence));
CREATE INDEX seen_frames_time ON seen_frames (time);
CREATE TABLE early_ends (
    node INTEGER NOT NULL, pid INTEGER NOT NULL, start_time REAL NOT NULL, run BLOB NOT NULL, sequence INTEGER NOT NULL,
    time REAL NOT NULL, PRIMARY KEY (node, pid, start_time)
);
CREATE TABLE heads (
    id TEXT PRIMARY KEY, host TEXT NOT NULL, position INTEGER NOT NULL, counted INTEGER NOT NULL DEFAULT 0,
    newest REAL, seen TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(), is_stopped INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE node_seen (
    node INTEGER NOT NULL, head TEXT NOT NULL, seen REAL NOT NULL, version TEXT NOT NULL, PRIMARY KEY (node, head)
) WITH (fillfactor = 50);
CREATE TABLE counted_time (node INTEGER NOT NULL, start INTEGER NOT NULL, "end" INTEGER NOT NULL, head TEXT NOT NULL);
CREATE INDEX counted_time_node ON counted_time (node, "end");
"""
"""Additional tables for several heads: the heads, the frames already applied, and the time already counted."""
_NUMBER_CHANGES = (
    """
    CREATE FUNCTION number_change() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        NEW.change = nextval('gpulse.changes');
        RETURN NEW;
    END
    $$
    """,
    *(
        f"CREATE TRIGGER number_change BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION number_change()"
        for table in ("sessions", "processes", "latest")
    ),
)
"""Number rows as they change. Heads write one at a time, so each finds new rows by the last number that it read."""
_GPU_TIME = """
CREATE TABLE {0} (
    node INTEGER NOT NULL, gpu TEXT NOT NULL, pid INTEGER, start_time REAL, time INTEGER NOT NULL, first REAL, last REAL,
    seconds REAL NOT NULL, known_seconds REAL NOT NULL, busy_seconds REAL NOT NULL, idle_seconds REAL NOT NULL,
    energy_joules REAL, memory_max REAL, seen_seconds REAL NOT NULL,
    memory_sum REAL NOT NULL, memory_weight REAL NOT NULL, sm_sum REAL NOT NULL, sm_weight REAL NOT NULL
);
CREATE UNIQUE INDEX {0}_key ON {0} (time, node, gpu, coalesce(pid, -1), coalesce(start_time, -1));
"""
GPU_HOURS, GPU_DAYS = "gpu_hours", "gpu_days"
"""Tables with the GPU time of processes per hour and per day."""


def check_version(database: sqlite3.Connection, path: str) -> int:
    """Return the version of the tables in a file; 0 if there are none yet.

    Raises:
        LogError: The file is from another version of gpulse, or from another program.
    """
    owner: int = database.execute("PRAGMA application_id").fetchone()[0]
    version: int = database.execute("PRAGMA user_version").fetchone()[0]
    tables: int = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if owner != APPLICATION_ID and (owner or version or tables):
        raise LogError(
            f"{path} belongs to another program", hint="move that file away, or use another directory"
        )
    if version not in (0, VERSION):
        raise LogError(
            f"{path} has format {version}; this version of gpulse reads format {VERSION}",
            hint="use the version of gpulse that wrote it, or another directory",
        )
    return version


def create_tables(database: sqlite3.Connection, path: str) -> None:
    """Create the tables if they do not exist, within the caller's transaction.

    Raises:
        LogError: The file is from another version of gpulse, or from another program.
    """
    if check_version(database, path) == VERSION:
        return
    for statement in split_statements(_TABLES + _SQLITE_TABLES):
        database.execute(statement)
    database.executemany(
        "INSERT INTO meta VALUES (?, ?)", (("head_id", str(uuid.uuid4())), ("applied", 0), ("settings", None))
    )
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute(f"PRAGMA user_version = {VERSION}")


def postgres_statements() -> list[str]:
    """Return the statements that create the tables in PostgreSQL."""
    of_gpus = _GPU_TIME.format(GPU_HOURS) + _GPU_TIME.format(GPU_DAYS)
    return [*split_statements(to_postgres_tables(_TABLES + _POSTGRES_TABLES + of_gpus)), *_NUMBER_CHANGES]
