"""The GPU time in PostgreSQL is what the heads' own data say: nothing is lost, and no moment counts twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpulse.model.time_text import format_iso
from gpulse.store.incomplete_answers import collect_missing
from gpulse.store.local import LocalStore
from gpulse.store.metadata.postgres_connection import (
    DatabaseConfig,
    DatabaseError,
    DeadlineConnection,
    close,
    connect,
    prepare_schema,
    transaction,
)
from gpulse.store.metadata.postgres_gpu_time import GpuTimeWriter
from gpulse.store.metadata.postgres_replication import NodeIds
from gpulse.store.metadata.postgres_store import PostgresStore
from gpulse.store.store import GpuShare, Query, StoredNode
from tests.contract.store_lab import BEGIN, END, EVERY, FRAMES, HALF, LATE, NODES, Feeder
from tests.integration.postgres import PostgresServer
from tests.integration.postgres_heads import config_of
from tests.queries import query

pytestmark = [pytest.mark.requires("PostgreSQL"), pytest.mark.slow]

_HOUR = 3600.0


def node_of(number: int) -> StoredNode:
    """A node as its head knows it."""
    return StoredNode(number, NODES[number], f"n{number}", f"m{number}", BEGIN, {}, {})


class Head:
    """One head with a data directory, whose GPU time is counted when a test says so."""

    def __init__(
        self, name: str, directory: Path, config: DatabaseConfig, connection: DeadlineConnection
    ) -> None:
        self.time = BEGIN
        self.archive = LocalStore(str(directory / name))
        self.before_query: Callable[[Query], None] = lambda _: None
        self._name = name
        self._config = config
        self._connection = connection
        self._feeders: dict[int, Feeder] = {}
        self.restart()

    def restart(self) -> None:
        """Forget what is not on disk."""
        self.writer = GpuTimeWriter(
            self,
            self._config,
            head=self._name,
            node_of=node_of,
            is_ready=lambda: True,
            now=lambda: self.time,
        )

    def feed(self, node: int, numbers: range, *, run: int = 0) -> None:
        """Receive frames of a node; they are one batch."""
        if node not in self._feeders:
            self._feeders[node] = Feeder(self.archive, node)
        entries = self._feeders[node].feed(numbers, run=run)
        self.writer.add(entry.batch for entry in entries if entry.batch is not None)

    def count(self, time: float) -> None:
        """Count what was received up to a time."""
        self.time = time
        self.writer._count(self._connection)

    @property
    def oldest(self) -> float | None:
        """The oldest samples of its own data."""
        return self.archive.oldest

    def series(self, asked: Query) -> list[Any]:
        """Metrics from its own data."""
        return self.archive.series(asked)

    def gpu_holders(self, asked: Query) -> list[Any]:
        """Holders from its own data."""
        return self.archive.gpu_holders(asked)

    def gpu_time(self, asked: Query) -> list[GpuShare]:
        """GPU time from its own data."""
        self.before_query(asked)
        return self.archive.gpu_time(asked)


class Lab:
    """A database and its heads."""

    def __init__(self, directory: Path, config: DatabaseConfig, stack: ExitStack) -> None:
        self._directory = directory
        self._config = config
        self._stack = stack
        self.connection = connect(config, timeout_seconds=20.0)
        stack.callback(close, self.connection)
        prepare_schema(config, self.connection)

    def execute(self, statement: str, values: Iterable[object] = ()) -> None:
        """Change something in the database."""
        with transaction(self._config, self.connection, 20.0) as database:
            database.execute(statement, list(values))

    def head(self, name: str) -> Head:
        """Start a head."""
        head = Head(name, self._directory, self._config, self.connection)
        self._stack.callback(head.archive.close)
        self.register(name)
        return head

    def register(self, name: str) -> None:
        """Have a head in the database."""
        self.execute("INSERT INTO heads (id, host, position) VALUES (?, ?, 0)", (name, name))

    def learn(self, *nodes: int) -> None:
        """Have nodes in the database."""
        with transaction(self._config, self.connection, 20.0) as database:
            NodeIds(node_of).learn(database, nodes)

    def empty(self) -> None:
        """Replace the database by an empty one."""
        self.execute("TRUNCATE nodes, heads, counted_time, gpu_hours, gpu_days")

    def seconds(self, start: float = BEGIN - _HOUR, end: float = END + _HOUR) -> dict[tuple[int, str], float]:
        """The GPU time in the database, by node and GPU."""
        return seconds_of(self.gpu_time(query(start=start, end=end)))

    def gpu_time(self, asked: Query) -> list[GpuShare]:
        """What the database answers."""
        store = PostgresStore(self._config, nodes=dict, number_of=lambda host, _: int(host[1:]))
        try:
            return store.gpu_time(asked)
        finally:
            store.close()


def seconds_of(shares: Iterable[GpuShare]) -> dict[tuple[int, str], float]:
    """GPU time by node and GPU."""
    return {(share.node, share.uuid): share.seconds for share in shares}


def own_seconds(head: Head, frames: int = FRAMES) -> Any:
    """What a head's own data say up to the last frame, give or take one sample."""
    end = BEGIN + (frames - 1) * EVERY + LATE
    found = seconds_of(head.archive.gpu_time(query(start=BEGIN, end=end)))
    assert set(found.values()) != {0.0}
    return pytest.approx(found, abs=EVERY + 0.1)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def lab(tmp_path: Path, server: PostgresServer) -> Iterator[Lab]:
    """An empty database."""
    with ExitStack() as stack:
        yield Lab(tmp_path, config_of(server, server.make_database()), stack)


def test_an_agent_that_restarts_counts_once(lab: Lab) -> None:
    """Its two time ranges lie within the range of another node."""
    a = lab.head("a")
    lab.learn(1, 2)
    a.feed(1, range(12))
    a.feed(2, range(4))
    a.feed(2, range(4, 12), run=1)
    a.count(END)

    assert lab.seconds() == own_seconds(a, 12)


def test_a_part_of_an_hour_has_the_capacity_of_that_part(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GPUs that nobody holds as well, and of an hour in which a node came late."""
    a = lab.head("a")
    lab.learn(1)
    a.feed(1, range(FRAMES))

    def idle(asked: Query) -> list[GpuShare]:
        none = (0.0, 0.0, 0.0, 0.0, None, None)
        return [GpuShare(1, None, None, "GPU-1-0", None, None, *none, asked.end - asked.start)]

    monkeypatch.setattr(a, "gpu_time", idle)
    a.count(END)
    (share,) = lab.gpu_time(query(start=BEGIN + 120.0, end=BEGIN + 480.0))

    assert (None, None, None) == (share.pid, share.first, share.last)
    assert 360.0 == pytest.approx(share.seen_seconds, abs=2 * EVERY)


def test_time_that_is_not_counted_yet_is_named(lab: Lab) -> None:
    """Heads count now and then; until then an answer about their nodes is short, and says so."""
    a = lab.head("a")
    lab.learn(1)
    a.feed(1, range(FRAMES))
    a.count(END)
    lab.execute("INSERT INTO node_seen VALUES (1, 'a', ?, '1')", (END + 120.0,))
    with collect_missing() as incomplete:
        lab.gpu_time(query(start=BEGIN, end=END - 120.0))
        lab.gpu_time(query(start=BEGIN, end=END - 40.0))
    assert [] == incomplete
    with collect_missing() as incomplete:
        lab.gpu_time(query(start=BEGIN, end=END + 20.0))
    (text,) = incomplete
    assert text.startswith("GPU time of 1 node of other heads since 20")
    assert text.endswith("has not been counted yet")


def test_a_new_node_is_uncounted_since_it_came(lab: Lab) -> None:
    """Not since the beginning of whatever time was asked for."""
    lab.learn(1)
    lab.execute("INSERT INTO node_seen VALUES (1, 'a', ?, '1')", (BEGIN + 120.0,))
    with collect_missing() as incomplete:
        lab.gpu_time(query(start=BEGIN - 86_400.0, end=BEGIN + 120.0))

    assert [
        f"GPU time of 1 node of other heads since {format_iso(BEGIN)} has not been counted yet"
    ] == incomplete


def test_frames_that_come_twice_count_once(lab: Lab) -> None:
    """An agent that did not hear of the acknowledgement sends its newest frames again."""
    a = lab.head("a")
    lab.learn(1)
    a.feed(1, range(20))
    a.feed(1, range(10, 30))
    a.count(END)
    a.count(END + 60.0)

    assert lab.seconds() == own_seconds(a, 30)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_node_that_is_not_in_the_database_yet_is_counted_later(lab: Lab, is_restarted: bool) -> None:
    """Also by a head that was restarted meanwhile, however long ago the time was."""
    a = lab.head("a")
    lab.learn(1)
    a.feed(1, range(FRAMES))
    a.feed(2, range(FRAMES))
    for minute in range(5):
        a.count(END + 5 * _HOUR + 60.0 * minute)
    assert {1} == {node for node, _ in lab.seconds()}
    if is_restarted:
        a.restart()
    lab.learn(2)
    a.count(END + 6 * _HOUR)

    assert lab.seconds() == own_seconds(a)


def test_a_failure_between_two_spans_loses_nothing(lab: Lab) -> None:
    """What is counted stays, and the rest is counted the next time."""
    a = lab.head("a")
    lab.learn(1, 2)
    a.feed(1, range(100))
    a.feed(2, range(50, 150))
    asked: list[Query] = []

    def fail(query: Query) -> None:
        asked.append(query)
        if len(asked) == 2:
            raise DatabaseError("the connection is lost")

    a.before_query = fail
    with pytest.raises(DatabaseError):
        a.count(END)
    a.count(END)

    assert lab.seconds() == own_seconds(a, 150)


def test_a_catch_up_that_is_interrupted_goes_on_after_the_next_start(lab: Lab) -> None:
    """The head ends after the first of two hours."""
    a = lab.head("a")
    lab.learn(1)
    a.feed(1, range(12))
    a.feed(1, range(1000, 1012))
    a.time = END + 5 * _HOUR
    a.restart()
    a.before_query = lambda _: a.writer.close()
    a.count(END + 5 * _HOUR)
    first_hour = lab.seconds()
    a.before_query = lambda _: None
    a.time = END + 10 * _HOUR
    a.restart()
    a.count(END + 10 * _HOUR)

    assert first_hour == own_seconds(a, 12)
    assert lab.seconds(end=END + 3 * _HOUR) == own_seconds(a, 1012)


@pytest.mark.parametrize("is_counted_between", [False, True])
def test_a_database_that_is_replaced_by_an_empty_one_gets_everything(
    lab: Lab, is_counted_between: bool
) -> None:
    """What was counted in the other one is counted again."""
    a = lab.head("a")
    lab.learn(1, 2)
    a.feed(1, range(HALF))
    a.feed(2, range(HALF))
    a.count(END + 5 * _HOUR)
    lab.empty()
    if is_counted_between:
        a.count(END + 5 * _HOUR + 60.0)  # before this head and its nodes are there
    lab.register("a")
    lab.learn(2, 1)
    for node in (1, 2):
        a.feed(node, range(HALF, FRAMES))
    a.count(END + 6 * _HOUR)
    a.count(END + 6 * _HOUR + 60.0)

    assert lab.seconds() == own_seconds(a)


def test_of_a_span_that_another_head_counts_meanwhile_the_rest_is_counted(lab: Lab) -> None:
    """Both heads have the first frames, one of them has all."""
    a, b = lab.head("a"), lab.head("b")
    lab.learn(1)
    a.feed(1, range(30))
    b.feed(1, range(60))
    b.before_query = lambda _: a.count(END)
    b.count(END)
    b.before_query = lambda _: None
    b.count(END + 60.0)

    assert lab.seconds() == own_seconds(b, 60)
