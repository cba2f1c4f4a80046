"""How a head's records reach PostgreSQL: in batches that fit, without pause, and nothing that is still wanted is deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulse.store.log.records import Entry
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
