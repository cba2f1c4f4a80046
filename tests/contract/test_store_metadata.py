"""What every store with metadata and GPU time must answer alike."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from gpulse.model.job import Job
from gpulse.model.session import Session
from gpulse.store.federated import FederatedStore
from gpulse.store.local import LocalStore, OfflineStore
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.metadata.postgres_connection import connect, prepare_schema
from gpulse.store.metadata.postgres_replication import NodeIds, copy_metadata
from gpulse.store.metadata.postgres_store import PostgresStore
from gpulse.store.store import Store
from tests.integration.postgres import PostgresServer
from tests.integration.postgres_heads import config_of
from tests.queries import query
from tests.unit.report_lab import BEGIN, Held, Lab

_STORES = ("local", "offline", "federated")
_POSTGRES = pytest.param("postgres", marks=[pytest.mark.requires("PostgreSQL"), pytest.mark.slow])
END = BEGIN + 600.0
SESSION = Session("s1", "run", BEGIN + 1.0, BEGIN, 1000, state="finished", end=END)


def _fill(lab: Lab) -> None:
    """Two nodes: a job on the first one that ends, another process on the second one, events and findings."""
    job = Job("slurm:7", name="train", array="6_1")
    ada, bob = Held(100, ("0", "1"), job="slurm:7"), Held(200, user="bob", sm=0.5)
    finding = {"id": "gpu_hot", "severity": "warning", "label": "0"}
    lab.archive.commit(
        [
            LogEntry.of_fact(
                "event", time=BEGIN + 10.0, kind="findings", node=1, detail={"findings": [finding]}
            ),
            LogEntry.of_fact("event", time=BEGIN + 40.0, kind="findings", node=1, detail={"findings": []}),
            LogEntry.of_fact("event", time=BEGIN + 20.0, kind="rack_moved", node=2, detail={"rack": "a"}),
            LogEntry.of_fact("event", time=BEGIN + 30.0, kind="rack_moved", node=None, detail={"rack": "b"}),
            LogEntry.of_fact("session", **SESSION.to_dict()),
        ]
    )
    lab.fill(range(0, 300, 5), ada, jobs=(job,))
    lab.fill(range(300, 600, 5))
    lab.fill(range(0, 600, 5), bob, node=2)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Store]]:
    """Every store with the same in it; some of it is sealed."""
    directory: Path = tmp_path_factory.mktemp("metadata")
    with Lab(directory, ("0", "1"), ("0",)) as lab:
        _fill(lab)
        lab.archive.seal()
        lab.fill(range(600, 660, 5), node=2)
    shutil.copytree(directory / "data", directory / "copy")
    with ExitStack() as stack:
        local = stack.enter_context(LocalStore(str(directory / "data")))
        offline = stack.enter_context(OfflineStore(str(directory / "copy")))
        yield {
            "local": local,
            "offline": offline,
            "federated": FederatedStore(local, now=lambda: END),
        }


@pytest.fixture(scope="module")
def postgres(stores: dict[str, Store]) -> Iterator[Store]:
    """PostgreSQL with the metadata of the head."""
    local = stores["local"]
    assert isinstance(local, LocalStore)
    nodes = local.nodes()
    numbers = {(node.host, node.machine): number for number, node in nodes.items()}
    with PostgresServer() as server:
        config = config_of(server, server.make_database())
        store = PostgresStore(config, nodes=local.nodes, number_of=lambda *machine: numbers.get(machine))
        with closing(store), closing(connect(config, timeout_seconds=20.0)) as connection:
            prepare_schema(config, connection)
            copy_metadata(
                local.metadata.file,
                config,
                connection,
                NodeIds(nodes.__getitem__),
                sessions=[session.to_dict() for session in local.sessions()],
                pause=lambda: None,
            )
            store.sessions()  # the connection stays: no test opens one
            yield store


@pytest.fixture(scope="module", params=(*_STORES, _POSTGRES))
def store(request: pytest.FixtureRequest, stores: dict[str, Store]) -> Store:
    """One that has metadata."""
    if request.param != "postgres":
        return stores[request.param]
    found: Store = request.getfixturevalue("postgres")
    return found


@pytest.fixture(params=_STORES)
def divider(request: pytest.FixtureRequest, stores: dict[str, Store]) -> Store:
    """One that divides the time of GPUs; PostgreSQL has the results by the hour."""
    return stores[request.param]


def test_nodes_gpus_and_sessions(store: Store) -> None:
    """All there are, by number and in order."""
    assert {1: "n1", 2: "n2"} == {number: node.name for number, node in store.nodes().items()}
    assert ["n1:0", "n1:1", "n2:0"] == [f"{gpu.node_name}:{gpu.label}" for gpu in store.gpus()]
    assert [SESSION] == store.sessions()


def test_events_by_time_kind_and_node(store: Store) -> None:
    """Oldest first; the end is not within; a limit keeps the newest."""

    def found(**asked: Any) -> list[float]:
        events = store.events(query(**{"start": BEGIN, "end": END, "kinds": {"rack_moved"}, **asked}))
        return [event.time - BEGIN for event in events]

    assert [20.0, 30.0] == found()
    assert [30.0] == found(limit=1)
    assert [20.0] == found(end=BEGIN + 30.0)
    assert [20.0] == found(nodes={2})
    assert [] == found(nodes={1})
    assert [] == found(kinds=())


def test_findings_that_held_at_some_time(store: Store) -> None:
    """Also those that began earlier, with their own start."""

    def found(start: float, end: float, **asked: Any) -> list[tuple[int | None, Any, float, float | None]]:
        return [
            (one.node, one.finding.id, one.span.start - BEGIN, one.span.end and one.span.end - BEGIN)
            for one in store.findings(query(start=BEGIN + start, end=BEGIN + end, **asked))
        ]

    hot = (1, "gpu_hot", 10.0, 40.0)
    assert [hot] == found(0.0, 600.0)
    assert [hot] == found(20.0, 30.0, nodes={1}, limit=5)
    assert ([], []) == (found(100.0, 600.0), found(0.0, 600.0, nodes={2}))


def test_processes_by_time_node_pid_and_job(store: Store) -> None:
    """Those that lived then; whenever that was when all times are asked for."""

    def found(**asked: Any) -> list[int]:
        return [one.pid for one in store.processes(query(**{"start": -math.inf, "end": math.inf, **asked}))]

    assert [100, 200] == found()
    assert [200] == found(start=BEGIN + 400.0)
    assert [100] == found(nodes={1})
    assert [200] == found(pids={200, 300})
    assert [100] == found(jobs={"slurm:7", "slurm:8"})
    assert ([], []) == (found(jobs=()), found(jobs={"slurm:7"}, nodes={2}))


def test_what_schedulers_reported_of_a_job(store: Store) -> None:
    """By its number, task, array or name, and its end with it."""
    assert ["slurm:7"] == store.job_names()
    for word in ("7", "slurm:7", "6_1", "6", "train"):
        assert ["job", "job_end"] == [event.kind for event in store.job_events(word)]
    assert [] == store.job_events("8")


def test_gpu_time_is_divided_among_those_who_held_it(divider: Store) -> None:
    """By process and GPU, and what nobody held."""
    shares = divider.gpu_time(query(start=BEGIN, end=END))
    seconds = {(one.node, one.pid, one.uuid): one.seconds for one in shares if one.pid is not None}

    assert {(1, 100, "GPU-1-0"), (1, 100, "GPU-1-1"), (2, 200, "GPU-2-0")} == set(seconds)
    assert [300.0, 300.0, 600.0] == [pytest.approx(one, abs=5.0) for one in seconds.values()]
    assert 1800.0 == pytest.approx(sum(one.seen_seconds for one in shares), abs=15.0)
    assert [200] == [one.pid for one in divider.gpu_time(query(start=BEGIN, end=END, nodes={2}))]
    assert {"GPU-1-1"} == {
        one.uuid for one in divider.gpu_time(query(start=BEGIN, end=END, gpus={"GPU-1-1"}))
    }


def test_holders_of_gpus(divider: Store) -> None:
    """From when to when each was seen there."""

    def found(**asked: Any) -> list[tuple[int, str, float, float]]:
        return [
            (one.pid, one.uuid, one.first - BEGIN, one.last - BEGIN)
            for one in divider.gpu_holders(query(**{"start": BEGIN, "end": END, **asked}))
        ]

    assert [
        (100, "GPU-1-0", 0.0, 295.0),
        (100, "GPU-1-1", 0.0, 295.0),
        (200, "GPU-2-0", 0.0, 595.0),
    ] == found()
    assert [(200, "GPU-2-0", 0.0, 595.0)] == found(nodes={2})
    assert [(100, "GPU-1-1", 0.0, 295.0)] == found(gpus={"GPU-1-1"})
    assert [(200, "GPU-2-0", 400.0, 595.0)] == found(start=BEGIN + 400.0)
