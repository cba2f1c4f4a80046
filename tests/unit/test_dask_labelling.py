"""Which graph a task belongs to, as the scheduler marks it and as a worker reads it, whoever submitted it and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from gpulse.integrations.dask import labelling as module
from gpulse.integrations.dask.jobs import ANNOTATION, Label, Numbering, label_of
from gpulse.integrations.dask.labelling import CAUSE, Labelling
from gpulse.integrations.dask.wire import Order
from gpulse.integrations.dask.worker import executing


@dataclass(eq=False)
class Task:
    """What a scheduler knows of a task."""

    key: str
    state: str = "processing"
    annotations: dict[str, Any] | None = None
    dependencies: list[Task] = field(default_factory=list)


class Queue:
    """The tasks that a worker has; it counts how many of them are looked at."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = list(tasks)
        self.looked_at = 0

    def __iter__(self) -> Iterator[Task]:
        for task in self._tasks:
            self.looked_at += 1
            yield task


class Cluster:
    """A scheduler with clients and a worker for each of them."""

    def __init__(self, **wanted: list[Task]) -> None:
        """Clients that are connected, and the tasks that each waits for."""
        self.clients = {name: SimpleNamespace(wants_what=tasks) for name, tasks in wanted.items()}
        self.client_comms: dict[str, None] = dict.fromkeys(wanted)
        self.tasks = {task.key: task for tasks in wanted.values() for task in tasks}
        self.workers: dict[str, Any] = {
            name: SimpleNamespace(processing=[task for task in tasks if task.state == "processing"])
            for name, tasks in wanted.items()
        }

    def monitored(self) -> Labelling:
        """Begin to number it."""
        scheduler: Any = self
        labels = Labelling(scheduler, Numbering("client"))
        labels.adopt()
        return labels

    def read_on(self, worker: str, labels: Labelling) -> set[tuple[int, int] | None]:
        """What that worker takes for the graphs of its tasks, whose annotations it got before the start."""
        order = Order(running=True, token=labels.token, adopted=labels.adopted_on(self.workers[worker]))
        here: Any = SimpleNamespace(
            active_keys={task.key for task in self.workers[worker].processing},
            state=SimpleNamespace(tasks={task.key: task for task in self.tasks.values()}),
        )
        return {None if label is None else label[:2] for label in executing(here, order, keys=False).labels}


def test_each_client_that_waits_at_the_start_has_a_job_of_its_own() -> None:
    """With what it submitted before, and also with what that needs first."""
    needed = Task("needed")
    cluster = Cluster(one=[Task("first", "waiting", dependencies=[needed])], two=[Task("second")])
    cluster.workers["one"].processing = [needed]
    cluster.tasks["needed"] = needed

    labels = cluster.monitored()

    assert [{(1, 1)}, {(2, 1)}] == [cluster.read_on(name, labels) for name in ("one", "two")]
    assert [(1, 1), (2, 1)] == [labels.newest_on(cluster.workers[name])[:2] for name in ("one", "two")]
    assert (1, 2) == labels.numbering.submitted("one")[:2]


def test_the_first_row_of_a_task_from_before_has_its_own_label() -> None:
    """A worker got its tasks without a mark, and learns the marks with the order to begin, each worker its own."""
    cluster = Cluster(one=[Task("first")], two=[Task("second")])
    sent = {key: dict(task.annotations or {}) for key, task in cluster.tasks.items()}
    labels = cluster.monitored()
    for key, before in sent.items():
        cluster.tasks[key] = Task(key, annotations=before)

    assert [{"first"}, {"second"}] == [
        set(labels.adopted_on(cluster.workers[name])) for name in ("one", "two")
    ]
    assert [{(1, 1)}, {(2, 1)}] == [cluster.read_on(name, labels) for name in ("one", "two")]


def test_the_numbers_of_an_earlier_monitor_do_not_count() -> None:
    """A task that it marked and that still runs is adopted under the new numbers; an earlier one knows nothing of it."""
    old = Label(1, 4, 6).mark("abcdef")
    task = Task("long", annotations={ANNOTATION: old, "retries": 2})
    cluster = Cluster(two=[Task("done", "memory")], one=[task])
    labels = cluster.monitored()
    renewed = dict(task.annotations or {})
    task.annotations = {ANNOTATION: old}  # as the worker still has it

    assert {(1, 1)} == cluster.read_on("one", labels)
    assert 2 == renewed["retries"]
    assert renewed[ANNOTATION].startswith(f"{labels.token}:")
    assert (1, 1) == (labels.numbering.jobs, labels.numbering.graphs)


def test_an_old_number_that_nobody_adopts_is_none() -> None:
    """The worker leaves it to the scheduler to say what the cluster is at, and the scheduler does not count it either."""
    task = Task("orphan", annotations={ANNOTATION: Label(3, 4, 6).mark("abcdef")})
    cluster = Cluster(one=[task])
    cluster.client_comms.clear()
    labels = cluster.monitored()
    labels.look(1.0)

    assert {None} == cluster.read_on("one", labels)
    assert (0, 0) == labels.resting.now[:2] == labels.newest_on(cluster.workers["one"])[:2]


@pytest.mark.parametrize("state", ["memory", "erred", "released", "forgotten"])
def test_what_has_ended_before_the_start_is_no_job(state: str) -> None:
    """Its client only keeps results."""
    labels = Cluster(one=[Task("done", state)]).monitored()

    assert (0, 0) == (labels.numbering.jobs, labels.numbering.graphs)


@pytest.mark.parametrize("name", ["fire-and-forget", "published-data", "queue-work", "variable-best"])
def test_what_only_looks_like_a_client_is_no_job(name: str) -> None:
    """Dask keeps results for these as if they were clients."""
    cluster = Cluster(**{name: [Task("kept")], "Client-1": [Task("real")]})
    del cluster.client_comms[name]
    labels = cluster.monitored()

    assert {None} == cluster.read_on(name, labels)
    assert {(1, 1)} == cluster.read_on("Client-1", labels)
    assert 1 == labels.numbering.jobs


def test_the_client_of_a_worker_is_no_job() -> None:
    """It is connected, and waits for what tasks have submitted before the start."""
    cluster = Cluster(**{"Client-worker-1": [Task("child")], "Client-1": [Task("parent")]})
    labels = cluster.monitored()

    assert {(1, 1)} == cluster.read_on("Client-1", labels)
    assert 1 == labels.numbering.jobs


def submit(labels: Labelling, client: str, parent: str | None, key: str) -> None:
    """A graph of one task arrives, which a task has submitted."""
    token = CAUSE.set(labels.cause(client, parent))
    labels.submitted(client, [key], 1.0)
    CAUSE.reset(token)


@pytest.mark.parametrize("parent", [None, "orphan"])
def test_what_the_client_of_a_worker_submits_is_no_job_either(parent: str | None) -> None:
    """Also when nobody knows whose task it was that submitted it, because that is older than the monitoring."""
    cluster = Cluster(**{"Client-worker-1": [Task("orphan")]})
    labels = cluster.monitored()
    cluster.tasks["child"] = Task("child", "released")
    submit(labels, "Client-worker-1", parent, "child")

    assert 0 == labels.numbering.jobs
    assert (0, 0) == labels.resting.now[:2]


def test_what_an_adopted_task_submits_is_of_its_graph() -> None:
    """And of no other job."""
    cluster = Cluster(**{"Client-1": [Task("parent")]})
    labels = cluster.monitored()
    cluster.tasks["child"] = child = Task("child", "released")
    submit(labels, "Client-worker-1", "parent", "child")

    assert {ANNOTATION: Label(1, 1, 1).mark(labels.token)} == child.annotations
    assert (1, 1) == (labels.numbering.jobs, labels.numbering.graphs)


@pytest.mark.parametrize("backlog", [100, 1000])
def test_one_look_at_many_workers_costs_little(monkeypatch: pytest.MonkeyPatch, backlog: int) -> None:
    """It does not grow with the tasks that wait, and a graph is made out once, however many tasks it has."""
    cluster = Cluster()
    labels = cluster.monitored()
    mark = labels.numbering.submitted("one").mark(labels.token)
    queues = [
        Queue(Task(f"{worker}-{number}", annotations={ANNOTATION: mark}) for number in range(backlog))
        for worker in range(200)
    ]
    cluster.workers = {str(number): SimpleNamespace(processing=queue) for number, queue in enumerate(queues)}
    made_out = []

    def counted(mark: object, token: str) -> Label | None:
        made_out.append(mark)
        return label_of(mark, token)

    monkeypatch.setattr(module, "label_of", counted)
    labels.look(1.0)

    assert (1, 1) == labels.resting.now[:2]
    assert max(queue.looked_at for queue in queues) <= 10
    assert 1 == len(made_out)
