"""How the work of real clusters is counted: every number is worked out by hand and looked for in the files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import pytest
from dask.delayed import delayed

from gpulse.integrations.dask import Monitor
from tests.integration import dask_tasks as tasks
from tests.integration.cluster import until
from tests.integration.dask_machine import DaskMachine, Row, dask_machine, read_rows, rows_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[DaskMachine]:
    """Two workers with a GPU and two threads each."""
    with dask_machine(tmp_path_factory.mktemp("jobs"), nvml_library) as made:
        made.start_workers(["0", "1"], threads=2)
        yield made


Label = tuple[int, int]
"""A job and a graph in it."""


class Instant(NamedTuple):
    """What a worker was at."""

    tasks: frozenset[str]
    labels: frozenset[Label]


class Watched(NamedTuple):
    """A cluster that is monitored."""

    machine: DaskMachine
    monitor: Monitor
    folder: Path

    def instants(self) -> list[Instant]:
        """Stop; the moments at which something was executed on a worker."""
        self.monitor.stop()
        found = []
        for path in self.monitor.to_csv(self.folder):
            for _, lines in groupby(read_rows(path), lambda row: row.timestamp):
                rows = list(lines)
                assert 1 == len({str(row.cells) for row in rows}), "one measurement, one set of readings"
                assert len(rows) == len({row.label for row in rows})
                if rows[0].cells["tasks"]:
                    found.append(
                        Instant(frozenset(rows[0].cells["tasks"]), frozenset(row.label for row in rows))
                    )
        return found

    def check(self, expected: dict[str, Label]) -> list[Instant]:
        """Stop; whenever tasks were executed there was a line for each of their graphs and no other, and all were seen."""
        instants = self.instants()
        assert expected.keys() == {key for instant in instants for key in instant.tasks}
        for instant in instants:
            assert {expected[key] for key in instant.tasks} == instant.labels, instant
        return instants


@contextmanager
def watching(machine: DaskMachine, folder: Path, **given: Any) -> Iterator[Watched]:
    """Monitor a cluster at the fastest pace."""
    with machine.client() as client:
        monitor = Monitor(client)
        monitor.attach(["tasks", "compute-util"], [tasks.BEAT], polling_interval=50, **given)
        monitor.start()
        try:
            yield Watched(machine, monitor, folder)
        finally:
            monitor.detach()


@pytest.fixture
def watched(machine: DaskMachine, tmp_path: Path) -> Iterator[Watched]:
    """The cluster, monitored anew."""
    with watching(machine, tmp_path) as made:
        yield made


def test_each_submission_is_a_graph(machine: DaskMachine, watched: Watched) -> None:
    """Futures: a submit is a graph, a map is one graph, and what comes of them belongs to its own."""

    with machine.client() as client:
        first = client.submit(tasks.seen, key="alone")
        many = client.map(tasks.seen, range(5), key=[f"many-{number}" for number in range(5)])
        last = client.submit(tasks.seen, first, *many, key="after")
        client.gather([last])

    watched.check({"alone": (1, 1), **{f"many-{number}": (1, 2) for number in range(5)}, "after": (1, 3)})


def test_collections(machine: DaskMachine, watched: Watched) -> None:
    """`map_blocks` and `persist`: each computation of a collection is a graph, however many tasks it has."""

    with machine.client() as client, client.as_current():
        given = {"meta": np.ones(0), "dtype": float}
        blocks = da.ones(4, chunks=1).map_blocks(tasks.seen_block, name="persisted", **given).persist()
        more = blocks.map_blocks(tasks.seen_block, name="computed", **given)
        total = more.compute().sum()

    watched.check({f"('{name}', {block})": (1, dag) for dag, name in NAMED for block in range(4)})
    assert 4.0 == total


NAMED = ((1, "persisted"), (2, "computed"))


def test_two_clients_at_once(machine: DaskMachine, watched: Watched, tmp_path: Path) -> None:
    """Two people's graphs on one worker at one instant: a line for each, with the same time and readings."""

    go, (worker, _) = tmp_path / "go", machine.workers.values()
    with machine.client() as one, machine.client() as other:
        futures = []
        for client, name in ((one, "one"), (other, "other")):
            begun = tmp_path / name
            futures.append(
                client.submit(tasks.held, str(begun), str(go), key=f"{name}-1", workers=[worker.address])
            )
            until(begun.exists, f"the task of {name}")
        go.touch()
        one.gather(futures[0])
        other.gather(futures[1])
        other.submit(tasks.seen, key="other-2").result()
        one.submit(tasks.seen, key="one-2").result()
        with machine.client() as third:
            third.submit(tasks.seen, key="third").result()

    instants = watched.check(
        {"one-1": (1, 1), "other-1": (2, 1), "other-2": (2, 2), "one-2": (1, 2), "third": (3, 1)}
    )
    assert Instant(frozenset({"one-1", "other-1"}), frozenset({(1, 1), (2, 1)})) in instants


def test_tasks_of_tasks(machine: DaskMachine, watched: Watched) -> None:
    """What a task submits, and what that submits, counts to the job and graph that caused it; and is no job of its own."""

    with machine.client() as one, machine.client() as other:
        one.submit(tasks.seen, key="first").result()  # two clients' messages come in any order
        family = one.submit(tasks.spawns_family, "family", key="family")
        host = other.submit(tasks.submits_with_worker_client, "guest", key="host")
        one.gather(family)
        other.gather(host)
        with machine.client() as third:
            third.submit(tasks.seen, key="afterwards").result()

    watched.check(
        {
            "first": (1, 1),
            "family": (1, 2),
            "family-child": (1, 2),
            "family-grandchild": (1, 2),
            "host": (2, 1),
            "guest": (2, 1),
            "afterwards": (3, 1),
        }
    )


def test_tasks_of_two_jobs_that_submit_on_one_worker(machine: DaskMachine, watched: Watched) -> None:
    """Two tasks of two jobs on one worker share the worker's own client, and yet each has its own descendants."""

    (worker, _) = machine.workers.values()
    with machine.client() as one, machine.client() as other:
        submitted = [
            one.submit(tasks.submits_with_worker_client, "one-child", key="one", workers=[worker.address])
        ]
        is_there = lambda dask_scheduler: "one" in dask_scheduler.tasks  # noqa: E731  a lambda travels whole
        until(lambda: one.run_on_scheduler(is_there), "the first job is submitted")
        submitted.append(
            other.submit(
                tasks.submits_with_worker_client, "other-child", key="other", workers=[worker.address]
            )
        )
        one.gather(submitted[:1])
        other.gather(submitted[1:])

    watched.check({"one": (1, 1), "one-child": (1, 1), "other": (2, 1), "other-child": (2, 1)})


def test_resubmission(machine: DaskMachine, watched: Watched) -> None:
    """A key that was forgotten and comes again is of the graph that brought it again; while it is held, of the first."""

    with machine.client() as one, machine.client() as other:
        one.submit(tasks.seen, key="again").result()
        until(lambda: not one.who_has(), "the result to be forgotten")
        again = one.submit(tasks.seen, key="again")
        one.gather(again)
        other.submit(tasks.seen, key="again").result()
        other.submit(tasks.seen, key="other").result()

    assert {
        (frozenset({"again"}), (1, 1)),
        (frozenset({"again"}), (1, 2)),
        (frozenset({"other"}), (2, 2)),
    } == {(instant.tasks, label) for instant in watched.instants() for label in instant.labels}


def test_computed_anew(machine: DaskMachine, watched: Watched) -> None:
    """A result that was let go, and that another graph needs again, is computed for that graph."""

    with machine.client() as client:
        needed = delayed(tasks.seen)(dask_key_name="needed")
        first, second = (
            delayed(tasks.seen_block)(needed, dask_key_name=name) for name in ("first", "second")
        )
        kept = client.compute(first)
        kept.result()
        until(lambda: not client.who_has()["needed"], "its input to be let go")
        client.compute(second).result()

    assert {("needed", (1, 1)), ("first", (1, 1)), ("needed", (1, 2)), ("second", (1, 2))} == {
        (key, label) for instant in watched.instants() for key in instant.tasks for label in instant.labels
    }


def test_retries(machine: DaskMachine, watched: Watched, tmp_path: Path) -> None:
    """A task that is tried again stays in its graph."""

    with machine.client() as client:
        client.submit(tasks.seen_after_failing, str(tmp_path / "failed"), key="tried", retries=2).result()
        client.submit(tasks.seen, key="next").result()

    watched.check({"tried": (1, 1), "next": (1, 2)})


def test_coroutines(machine: DaskMachine, watched: Watched) -> None:
    """A task that is a coroutine runs on no thread, and is seen all the same."""

    with machine.client() as client:
        client.submit(tasks.seen_async, key="coroutine").result()

    watched.check({"coroutine": (1, 1)})


def test_clients_that_submit_nothing(machine: DaskMachine, watched: Watched) -> None:
    """Who only looks, runs functions on workers or monitors is no job."""

    with machine.client() as looker, machine.client() as client:
        looker.run(len, "abc")
        looker.scheduler_info()
        Monitor(looker).status()
        client.submit(tasks.seen, key="work").result()
        watched.check({"work": (1, 1)})

    assert (1, 1) == (watched.monitor.status().jobs, watched.monitor.status().dags)


def test_idle_workers(machine: DaskMachine, watched: Watched) -> None:
    """A worker with nothing to do has the label of the cluster: 0 before, the graph during, the job after it, 0 in the end."""

    (busy, idle) = machine.workers.values()
    (index,) = (w.index for w in watched.monitor.status().workers if w.address == idle.address)

    def rows_now() -> list[Row]:
        watched.monitor.to_csv(watched.folder)
        return read_rows(watched.folder / f"worker-{index}.csv")

    def labelled(label: tuple[int, int]) -> None:
        rows_until(rows_now, lambda rows: bool(rows) and rows[-1].label == label, f"the label {label}")

    labelled((0, 0))
    with machine.client() as client:
        client.submit(tasks.seen, times=4, key="work", workers=[busy.address]).result()
        labelled((1, 0))
    labelled((0, 0))
    watched.monitor.stop()

    rows = rows_now()
    assert [(0, 0), (1, 1), (1, 0), (0, 0)] == [label for label, _ in groupby(rows, lambda row: row.label)]
    assert [[]] == [tasks for tasks, _ in groupby(row.cells["tasks"] for row in rows)]


def test_jobs_by_hand(machine: DaskMachine, tmp_path: Path) -> None:
    """Manual numbering moves with `new_job` alone, whoever submits; graphs count within each job."""

    with watching(machine, tmp_path, job_type="manual") as watched, machine.client() as one:
        monitor = watched.monitor
        one.submit(tasks.seen, key="a").result()
        with machine.client() as other:
            other.submit(tasks.seen, key="b").result()
        numbers = [monitor.new_job()]
        one.submit(tasks.seen, key="c").result()
        numbers.append(Monitor(one).new_job(job=7))
        one.submit(tasks.seen, key="d").result()
        one.submit(tasks.seen, key="e").result()
        numbers.append(monitor.new_job())
        one.submit(tasks.seen, key="f").result()
        numbers.append(monitor.new_job(job=1))
        one.submit(tasks.seen, key="g").result()
        watched.check(
            {"a": (1, 1), "b": (1, 2), "c": (2, 1), "d": (7, 1), "e": (7, 2), "f": (8, 1), "g": (1, 3)}
        )

    assert [2, 7, 8, 1] == numbers


def test_graphs_from_before(machine: DaskMachine, tmp_path: Path) -> None:
    """What a client submitted before and still waits for is the first graph of its job."""

    begun, go = tmp_path / "begun", tmp_path / "go"
    with machine.client() as client:
        future = client.submit(tasks.held, str(begun), str(go), key="old")
        until(begun.exists, "the task")
        with watching(machine, tmp_path) as watched:
            go.touch()
            future.result()
            client.submit(tasks.seen, key="new").result()
            watched.check({"old": (1, 1), "new": (1, 2)})
