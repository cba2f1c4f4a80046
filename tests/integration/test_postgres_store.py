"""Questions to the database that heads share: they end by their deadline, and get the right nodes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from gpulse.store.incomplete_answers import collect_missing
from gpulse.store.metadata.postgres_connection import (
    DatabaseConfig,
    DatabaseError,
    DeadlineConnection,
    connect,
    prepare_schema,
    transaction,
)
from gpulse.store.metadata.postgres_replication import NodeIds
from gpulse.store.metadata.postgres_store import PostgresStore
from gpulse.store.store import StoredNode
from tests.integration.cluster import until
from tests.integration.postgres import PASSWORD, PostgresServer
from tests.integration.postgres_heads import config_of
from tests.queries import query

pytestmark = pytest.mark.requires("PostgreSQL")

_DEADLINE_SECONDS = 0.5
_MAX_SECONDS = 2.5
"""With some patience for a busy machine; without a deadline it is five seconds and more."""
_NODE = StoredNode(7, "n1", "n1", "m1", 1.0, {}, {})
_RANGE: dict[str, Any] = {"start": 0.0, "end": 100.0}


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def config(server: PostgresServer) -> DatabaseConfig:
    """A database with one event of a node that has another id there than the number that this head gave it."""
    config = config_of(server, server.make_database())
    with closing(connect(config, timeout_seconds=20.0)) as connection:
        prepare_schema(config, connection)
        _fill(config, connection)
    return config


def _fill(config: DatabaseConfig, connection: DeadlineConnection) -> None:
    ids = NodeIds(lambda _: _NODE)
    with transaction(config, connection, 20.0) as database:
        ids.learn(database, [_NODE.id])
        database.execute(
            "INSERT INTO events (time, node, kind, from_frame, detail) VALUES (1, ?, 'gap', 1, '{}')",
            (ids.known(_NODE.id),),
        )


def _store(
    config: DatabaseConfig,
    number_of: Callable[[str, str], int | None] = lambda *_: _NODE.id,
    check_ready: Callable[[float], None] = lambda _: None,
) -> PostgresStore:
    return PostgresStore(
        config, nodes=lambda: {_NODE.id: _NODE}, number_of=number_of, check_ready=check_ready
    )


def _refused_seconds(question: Callable[[float], object]) -> float:
    """Return how long a question took that was not answered."""
    began = time.monotonic()
    with pytest.raises(DatabaseError):
        question(began + _DEADLINE_SECONDS)
    return time.monotonic() - began


def test_connecting_ends_by_the_deadline(server: PostgresServer, config: DatabaseConfig) -> None:
    """And a connection that opens later is there for the next question."""
    with closing(_store(config)) as store:
        server.signal(signal.SIGSTOP)
        try:
            seconds = _refused_seconds(lambda latest: store.events(query(**_RANGE, deadline=latest)))
        finally:
            server.signal(signal.SIGCONT)
        until(lambda: store._idle, "the connection")
        events = store.events(query(**_RANGE))

    assert seconds < _MAX_SECONDS
    assert [(event.kind, event.node) for event in events] == [("gap", _NODE.id)]


def test_looking_up_nodes_ends_by_the_deadline(server: PostgresServer, config: DatabaseConfig) -> None:
    """The ids of a query, and the numbers of what was found."""
    with (
        closing(_store(config)) as store,
        psycopg.connect(
            host="127.0.0.1",
            port=server.port,
            user="postgres",
            password=PASSWORD,
            dbname=dict(config.parameters)["dbname"],
        ) as other,
    ):
        store.sessions()  # it is connected
        other.execute("LOCK TABLE gpulse.nodes IN ACCESS EXCLUSIVE MODE")
        by_number = _refused_seconds(
            lambda latest: store.events(query(**_RANGE, nodes=[_NODE.id], deadline=latest))
        )
        by_id = _refused_seconds(lambda latest: store.events(query(**_RANGE, deadline=latest)))
        other.rollback()

    assert by_number < _MAX_SECONDS
    assert by_id < _MAX_SECONDS


def test_every_question_checks_that_the_database_is_ready(config: DatabaseConfig) -> None:
    """GPU time too: tables of another version must not be read. It is told how long the question may take."""
    deadlines: list[float] = []

    def refuse(deadline: float) -> None:
        deadlines.append(deadline)
        raise DatabaseError("the tables are of another format")

    with closing(_store(config, check_ready=refuse)) as store:
        asked = query(**_RANGE, deadline=time.monotonic() + _DEADLINE_SECONDS)
        for question in (store.events, store.findings, store.processes, store.gpu_time, store.gpu_holders):
            with pytest.raises(DatabaseError, match="another format"):
                question(asked)

    assert deadlines == [asked.deadline] * 5


def test_nodes_are_known_although_the_connections_are_closed_meanwhile(config: DatabaseConfig) -> None:
    """Another thread does that when the head connects again."""

    def number_of(*_: str) -> int:
        store.disconnect()
        return _NODE.id

    with closing(_store(config, number_of)) as store:
        assert [_NODE.id] == [event.node for event in store.events(query(**_RANGE))]
        assert [_NODE.id] == [event.node for event in store.events(query(**_RANGE, nodes=[_NODE.id]))]


def test_samples_of_processes_are_said_to_be_missing(config: DatabaseConfig) -> None:
    """They are on the disks of the heads that received them."""
    asked = query("process", "gpu_memory_bytes", **_RANGE)
    with closing(_store(config)) as store:
        for question in (store.series, store.scan):
            with collect_missing() as incomplete:
                assert [] == list(question(asked))
            assert 1 == len(incomplete)
            assert "other heads" in incomplete[0]
