"""How a head's records reach PostgreSQL: in batches that fit, without pause, and nothing that is still wanted is deleted."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpulse.store.log.records import Entry
from gpulse.store.metadata import postgres_writer
from gpulse.store.metadata.postgres import PostgresDatabase
from tests.integration.cluster import until
from tests.integration.postgres import PostgresServer
from tests.integration.postgres_heads import START, SmallHead, config_of

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


def event(kind: str) -> Entry:
    """Something happened to no node."""
    return Entry.of_fact("event", time=START, kind=kind, node=None, detail={})


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
    """The network is slow. That PostgreSQL works again is said when something was written."""

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
    ends = [message.partition(" (")[0].endswith("works again") for message in said]
    assert [False, True] * (len(said) // 2) == ends
    assert 2 <= len(said) <= 8
