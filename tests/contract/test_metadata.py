"""What both databases for metadata must answer alike: SQLite for one head, PostgreSQL for all of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import FrameBatch
from gpulse.store.metadata.local_metadata import Metadata
from gpulse.store.metadata.log_updates import MetadataUpdate, split_updates
from gpulse.store.metadata.postgres_connection import (
    DatabaseConfig,
    DeadlineConnection,
    close,
    connect,
    lock_for_writing,
    prepare_schema,
    transaction,
)
from gpulse.store.metadata.postgres_gpu_time import GpuTimeWriter
from gpulse.store.metadata.postgres_replication import NodeIds, UpdateApplier, copy_metadata
from gpulse.store.metadata.postgres_store import NodeNumbers, PostgresStore
from gpulse.store.store import StoredNode
from tests.contract.store_lab import BEGIN, END, FRAMES, HALF, NODES, Feeder
from tests.integration.postgres import PostgresServer
from tests.integration.postgres_heads import config_of
from tests.queries import query
from tests.unit.metadata_records import batch, fact, gpu_layout, layout_facts, node_fact, records

pytestmark = [pytest.mark.requires("PostgreSQL"), pytest.mark.slow]

_RUNS = [bytes([number]) * 16 for number in range(3)]
_TIMES = st.integers(1, 12).map(float)
_NODES = st.integers(1, 2)
_KEYS = st.fixed_dictionaries({"pid": st.integers(1, 3), "start_time": st.sampled_from([None, 1.0])})
_FINDING = {"severity": "high", "summary": "waits", "gpu": 0, "label": "0"}
_EVENTS = st.one_of(
    st.builds(
        lambda key, job: {"event": "process", **key, "name": "a", "owner": {"job": job}},
        _KEYS,
        st.sampled_from([None, "slurm:1", "slurm:2"]),
    ),
    st.builds(lambda key: {"event": "process_end", **key}, _KEYS),
    st.just({"event": "agent_started"}),
    st.just({"event": "agent_stopping"}),
    st.builds(lambda n: {"event": "health", "entries": [n]}, st.integers(0, 9)),
    st.builds(
        lambda ids: {"event": "findings", "findings": [{"id": one, **_FINDING} for one in ids]},
        st.lists(st.sampled_from(["slow", "hot"]), max_size=2, unique=True),
    ),
    st.builds(
        lambda number: {"event": "job", "id": f"slurm:{number}", "name": "train", "array": f"{number}_1"},
        st.integers(1, 2),
    ),
    st.builds(lambda number: {"event": "job_end", "job": f"slurm:{number}"}, st.integers(1, 2)),
)
_FACTS = st.one_of(
    st.builds(lambda node, time: node_fact(node, f"n{node}", time=time), _NODES, _TIMES),
    st.builds(
        lambda time, node: fact("event", time=time, kind="node_lost", node=node, detail={}), _TIMES, _NODES
    ),
    st.builds(
        lambda time: fact(
            "event",
            time=time,
            kind="node_missing",
            node=None,
            detail={"name": "x", "finding": {"id": "node_missing"}},
        ),
        _TIMES,
    ),
    st.builds(lambda time: fact("newer", time=time), _TIMES),
)
_FRAMES = st.tuples(
    st.sampled_from(_RUNS),
    _NODES,
    st.lists(st.tuples(_TIMES, st.lists(_EVENTS, max_size=3)), min_size=1, max_size=3),
)
_LOGS = st.lists(_FACTS | _FRAMES, max_size=25)


def known_node(number: int) -> StoredNode:
    """A node as its head knows it."""
    return StoredNode(number, f"n{number}", f"n{number}", f"m{number}", 100.0, {"driver": "580"}, {})


class Shared:
    """The tables of PostgreSQL, filled by steps of one head."""

    def __init__(self, config: DatabaseConfig) -> None:
        self.config = config
        self.connection: DeadlineConnection = connect(config, timeout_seconds=20.0)
        prepare_schema(config, self.connection)
        self.ids = NodeIds(known_node)
        self.store = PostgresStore(
            config,
            nodes=lambda: {number: known_node(number) for number in (1, 2)},
            number_of=lambda host, _: int(host[1:]),
        )
        self.store.sessions()  # the connection stays: no test opens one

    def empty(self) -> None:
        """Remove all rows."""
        self.ids.clear()
        self.store.numbers = NodeNumbers()
        tables = "nodes, runs, starts, gpus, sessions, events, latest, processes, findings, seen_frames, early_ends"
        self.connection.execute(f"TRUNCATE {tables} RESTART IDENTITY".encode())

    def apply(self, steps: Sequence[MetadataUpdate]) -> None:
        """Apply steps as a head does."""
        applier = UpdateApplier(self.ids, lambda _: None)
        for step in steps:
            with transaction(self.config, self.connection, 20.0) as database:
                lock_for_writing(database)
                applier.apply(database, [step])

    def close(self) -> None:
        """Close the connections."""
        close(self.connection)
        self.store.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """The tables, empty at first."""
    with PostgresServer() as server:
        made = Shared(config_of(server, server.make_database()))
        yield made
        made.close()


def logged(items: Sequence[Any]) -> list[dict[str, Any] | bytes]:
    """The payloads of a log; each run counts its frames from one."""
    numbers = dict.fromkeys(_RUNS, 1)
    payloads: list[dict[str, Any] | bytes] = []
    for item in items:
        if isinstance(item, dict):
            payloads.append(item)
            continue
        run, node, frames = item
        node = _RUNS.index(run) % 2 + 1  # a run is one node's
        texts = [(time, json.dumps(events).encode() if events else b"") for time, events in frames]
        first = numbers[run]
        numbers[run] += len(frames)
        payloads.append(
            FrameBatch.from_bytes(batch(*texts, node=node, run=run))._replace(first=first).to_bytes()
        )
    return payloads


def answers(store: Any) -> dict[str, Any]:
    """Everything that either answers."""
    return {
        "nodes": {number: node[1:] for number, node in store.nodes().items()},
        "gpus": store.gpus(),
        "events": sorted(json.dumps(event) for event in store.events(query(start=0, end=100))),
        "of one node": sorted(json.dumps(e) for e in store.events(query(start=2, end=8, nodes=[1]))),
        "of a job": sorted(json.dumps(event) for event in store.job_events("1")),
        "processes": [
            p._replace(identity=dict(p.identity)) for p in store.processes(query(start=0, end=100))
        ],
        "of jobs": [p.pid for p in store.processes(query(start=-1e9, end=1e9, jobs=["slurm:1"]))],
        "job names": sorted(store.job_names()),
        "findings": list(store.findings(query(start=0, end=100))),
    }


@given(_LOGS, st.integers(1, 9))
@example([(_RUNS[0], 1, [(3.0, [{"event": "gap"}, {"event": "gap"}])])], 1)
@example(
    [
        (_RUNS[0], 1, [(1.0, [{"event": "findings", "findings": [{"id": "slow", **_FINDING}]}])]),
        fact("event", time=1.0, kind="node_lost", node=1, detail={}),
    ],
    1,
)
@example(
    [
        fact("event", time=2.0, kind="node_lost", node=2, detail={}),
        (_RUNS[1], 1, [(1.0, [{"event": "findings", "findings": [{"id": "slow", **_FINDING}]}])]),
        fact("event", time=1.0, kind="node_lost", node=2, detail={}),
    ],
    1,
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_log_gives_the_same_answers_from_both(shared: Shared, items: list[Any], at_once: int) -> None:
    """However it is cut into steps, and whether PostgreSQL got it from the log or as a copy of SQLite."""
    gpus = layout_facts(gpu_layout((0, None), (1, 2), (1, None)), node=2)
    log = records([node_fact(1, "n1"), node_fact(2, "n2"), *gpus, *logged(items)])
    shared.empty()
    with tempfile.TemporaryDirectory() as directory, Metadata(f"{directory}/metadata.sqlite") as metadata:
        metadata.replay(log)
        expected = answers(metadata)
        shared.apply([step for step, _ in split_updates(log, at_once)])
        assert expected == answers(shared.store)
        for _ in range(2):
            copy_metadata(
                metadata.file, shared.config, shared.connection, shared.ids, sessions=[], pause=lambda: None
            )
            assert expected == answers(shared.store)
        shared.empty()
        copy_metadata(
            metadata.file, shared.config, shared.connection, shared.ids, sessions=[], pause=lambda: None
        )
        assert expected == answers(shared.store)


@given(_LOGS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_comes_twice_counts_once(shared: Shared, items: list[Any]) -> None:
    """A head that was restored from a copy sends records again; another one sends the same frames."""
    frames = [item for item in items if not isinstance(item, dict)]
    log = records([node_fact(1, "n1"), node_fact(2, "n2"), *logged(frames)])
    steps = [step for step, _ in split_updates(log, 3)]
    shared.empty()
    shared.apply(steps)
    expected = answers(shared.store)
    shared.apply(steps)
    assert expected == answers(shared.store)


def test_time_that_two_heads_received_is_counted_once(shared: Shared, tmp_path: Path) -> None:
    """Each GPU's time adds up to what one head that has everything says, by the hour and by the day."""
    shared.empty()
    times = [BEGIN + 600.0]
    with LocalStore(str(tmp_path / "whole")) as whole:
        for node in NODES:
            Feeder(whole, node).feed(range(FRAMES))
        truth = whole.gpu_time(query(start=BEGIN, end=END))

    def node_of(number: int) -> StoredNode:
        return StoredNode(number, NODES[number], f"n{number}", f"m{number}", BEGIN, {}, {})

    with transaction(shared.config, shared.connection, 20.0) as database:
        NodeIds(node_of).learn(database, NODES)
        for head in "ab":
            database.execute("INSERT INTO heads (id, host, position) VALUES (?, ?, 0)", (head, head))
    for head, numbers in (("a", range(HALF + 9)), ("b", range(HALF - 9, FRAMES))):
        with LocalStore(str(tmp_path / head)) as archive:
            writer = GpuTimeWriter(
                archive,
                shared.config,
                head=head,
                node_of=node_of,
                is_ready=lambda: True,
                now=lambda: times[0],
            )
            for node in NODES:
                entries = Feeder(archive, node).feed(numbers)
                writer.add(entry.batch for entry in entries if entry.batch is not None)
            writer._counted = (
                0 if head == "a" else None
            )  # the other one finds everything on its disk once more
            times[0] = END + 300.0
            writer._count(shared.connection)
            writer._count(shared.connection)
    store = PostgresStore(shared.config, nodes=dict, number_of=lambda host, _: int(host[1:]))
    try:
        found = store.gpu_time(query(start=BEGIN - 3600, end=END + 3600))
        some = store.gpu_time(query(start=BEGIN + 60, end=BEGIN + 120))
        holders = store.gpu_holders(query(start=BEGIN - 3600, end=END + 3600, nodes=[1]))
    finally:
        store.close()

    assert [(share.node, share.pid, share.uuid) for share in truth] == [
        (share.node, share.pid, share.uuid) for share in found
    ]
    for one, other in zip(truth, found, strict=True):
        assert one.seconds == pytest.approx(other.seconds, abs=15.0)
        assert one.seen_seconds == pytest.approx(other.seen_seconds, abs=15.0)
        assert one.energy_joules == pytest.approx(other.energy_joules, rel=0.02)
    assert [pytest.approx(60.0, abs=3.0)] * len(some) == [share.seconds for share in some]
    assert {4000, 4001} == {share.pid for share in some}
    assert {(1 << 30, 0.5)} == {(held.memory_mean, held.sm_mean) for held in holders}
