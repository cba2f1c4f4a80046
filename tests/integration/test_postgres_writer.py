"""How a head's records reach PostgreSQL: in batches that fit, without pause, and nothing that is still wanted is deleted."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.metadata import postgres_writer
from gpulse.store.metadata.postgres_connection import PostgresDatabase
from tests.integration.cluster import until
from tests.integration.postgres import PostgresServer
from tests.integration.postgres_heads import START, SmallHead, config_of, ended, process

pytestmark = pytest.mark.requires("PostgreSQL")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def database(server: PostgresServer) -> str:
    """An empty database."""
    return server.make_database()


@pytest.fixture
def idle(tmp_path: Path, server: PostgresServer, database: str) -> Iterator[SmallHead]:
    """A head whose writer was not started."""
    head = SmallHead(tmp_path / "a", config_of(server, database))
    yield head
    head.end()


def event(kind: str) -> LogEntry:
    """Something happened to no node."""
    return LogEntry.of_fact("event", time=START, kind=kind, node=None, detail={})


def test_a_commit_of_which_a_part_is_confirmed_is_read_from_the_log(idle: SmallHead) -> None:
    """The log was read while the commit was accepted, but not handed over yet."""

    idle.commit(event("one"), event("two"), event("three"))
    idle.commit(event("four"))
    writer = idle.shared.writer
    writer._confirm(2)

    assert [] == writer._queued()
    (step,) = writer._logged()
    assert (3, ["three"]) == (step.position, [fact["kind"] for fact in step.facts])
    writer._confirm(3)
    assert [4] == [step.position for step in writer._queued()]


def test_a_batch_that_takes_too_long_is_written_in_smaller_ones(
    idle: SmallHead, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The network is slow. That PostgreSQL is available again is logged when something was written."""

    execute = PostgresDatabase.execute

    def execute_slowly(database: PostgresDatabase, statement: str, values: Sequence[Any] = ()) -> Any:
        time.sleep(0.003)
        return execute(database, statement, values)

    monkeypatch.setattr(PostgresDatabase, "execute", execute_slowly)
    monkeypatch.setattr(postgres_writer, "_WRITE_SECONDS", 0.6)
    monkeypatch.setattr(postgres_writer, "MAX_RETRY_SECONDS", 0.1)
    caplog.set_level(logging.WARNING)
    kinds = [f"e{number}" for number in range(600)]
    idle.commit(*map(event, kinds))
    writer = idle.shared.writer
    writer.start()
    until(lambda: writer.waiting_records == 0 and writer.outage is None, "everything in the database")
    assert kinds == idle.kinds()
    said = [record.getMessage() for record in caplog.records]
    ends = [message.partition(" (")[0].endswith("is available again") for message in said]
    assert [False, True] * (len(said) // 2) == ends
    assert 2 <= len(said) <= 8


_OLD_SECONDS = 1000.0


def fill(head: SmallHead, server: PostgresServer, database: str) -> None:
    """Have something old and something new in the database, by the server's clock."""
    node = head.node("gpu01")
    head.frame(node, 1, process(7), ended(7), {"event": "old"})
    head.frame(node, 1000, {"event": "new"})
    head.session("run")
    head.settle()
    shift = f"extract(epoch FROM now()) - {_OLD_SECONDS} - {START}"
    server.rows(
        database,
        f"UPDATE events SET time = time + {shift}; "
        f"UPDATE processes SET first_seen = first_seen + {shift}, ended = ended + {shift}; "
        "INSERT INTO gpu_hours SELECT 1, 'g', 1, 1, hour, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 "
        "FROM unnest(ARRAY[(extract(epoch FROM now()) - 9e5) * 1e6, extract(epoch FROM now()) * 1e6]) AS hours (hour)",
    )


def prune(head: SmallHead, now: float) -> None:
    """Let a head delete what is older than ten minutes."""
    writer = head.shared.writer
    head.time = now
    writer._keep_seconds = 600.0
    writer._pruned_at = float("-inf")
    until(lambda: math.isfinite(writer._pruned_at) and not writer._deletes, "the end of deleting")


def test_what_is_too_old_goes(idle: SmallHead, server: PostgresServer, database: str) -> None:
    """After the retention of a head; sessions and nodes stay."""

    idle.shared.writer.start()
    fill(idle, server, database)
    prune(idle, time.time())
    assert ["new"] == idle.kinds()
    assert {} == idle.lives()
    assert [(1,)] == server.rows(database, "SELECT count(*) FROM gpu_hours")
    assert ["run"] == [one.name for one in idle.shared.store.sessions()]


@pytest.mark.parametrize("seconds", [-1e8, 1e8])
def test_a_clock_that_jumped_deletes_nothing(
    idle: SmallHead, server: PostgresServer, database: str, seconds: float
) -> None:
    """What is too old by the clock of this head is not by the server's, or the other way round."""

    idle.shared.writer.start()
    fill(idle, server, database)
    if seconds > 0:  # nothing is old by the server's clock
        server.rows(database, f"UPDATE events SET time = time + {_OLD_SECONDS}")
    prune(idle, time.time() + seconds)
    assert ["old", "new"] == idle.kinds()


def test_deleting_never_keeps_a_head_from_its_work(
    idle: SmallHead, server: PostgresServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One statement at a time; one that fails is left for later."""

    monkeypatch.setattr(postgres_writer, "_MAX_DELETED_ROWS", 1)
    monkeypatch.setattr(postgres_writer, "_DELETE_SECONDS", 0.5)
    monkeypatch.setattr(postgres_writer, "HEARTBEAT_SECONDS", 0.1)
    writer = idle.shared.writer
    writer.start()
    fill(idle, server, database)
    user = dict(writer.config.parameters)
    with psycopg.connect(**{**user, "options": "-c search_path=gpulse"}) as other:  # type: ignore[arg-type]
        other.execute("SELECT 1 FROM processes FOR UPDATE")
        pruned = threading.Thread(target=prune, args=(idle, time.time()))
        pruned.start()
        idle.event("meanwhile", None)
        idle.commit()
        idle.settle()
        pruned.join()
        assert writer.outage is None
    assert "old" not in idle.kinds()
    assert {7} == set(idle.lives())


def test_what_waits_for_postgresql_does_not_count_for_the_disk_limit(
    tmp_path: Path, server: PostgresServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a limit of its own: an outage must not cost local history."""

    monkeypatch.setattr("gpulse.store.local._SEGMENT_BYTES", 4096)
    head = SmallHead(tmp_path / "b", config_of(server, database))
    try:
        for number in range(200):
            head.commit(event(f"e{number}"))
        size = head.archive.usage().log_bytes
        assert 3 * 4096 < size
        assert 0 == head.archive._own_log_bytes()
        head.shared.writer._confirm(100)
        assert head.archive._own_log_bytes() == pytest.approx(size / 2, rel=0.05)
        head.shared.writer._confirm(head.archive.accepted)
        assert size == head.archive._own_log_bytes()
    finally:
        head.end()
