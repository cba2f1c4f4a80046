"""Jobs and graphs are numbered by who submits what, and tasks and rows carry the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.integrations.dask import job_labels as module
from gpulse.integrations.dask.job_labels import (
    ANNOTATION_KEY,
    NO_GRAPH,
    SUBMITTING_LABEL,
    GraphLabel,
    GraphLabelling,
    IdleLabels,
    JobNumbering,
    find_label,
    label_of,
)
from gpulse.integrations.dask.trackable_metrics import ArgumentError
from gpulse.integrations.dask.worker_plugin import find_executing
from gpulse.integrations.dask.worker_registry import WorkerCommand


def test_every_client_that_submits_is_a_job() -> None:
    """Graphs count within it, and a connection that submits again goes on where it was."""
    numbering = JobNumbering("client")

    found = [numbering.submitted(client)[:2] for client in ("a", "b", "a", "b", "b")]

    assert [(1, 1), (2, 1), (1, 2), (2, 2), (2, 3)] == found
    assert (2, 5) == (numbering.jobs, numbering.graphs)


def test_what_a_task_submits_belongs_to_its_graph() -> None:
    """It is no graph of its own, and the worker's client is no job."""
    numbering = JobNumbering("client")
    cause = numbering.submitted("a")

    assert cause == numbering.submitted("worker", cause)
    assert (1, 2) == numbering.submitted("a")[:2]
    assert 1 == numbering.jobs


def test_manual_jobs_move_when_they_are_set() -> None:
    """Whoever submits, and a job that is gone back to counts its graphs on."""
    numbering = JobNumbering("manual")
    first = [numbering.submitted(client)[:2] for client in ("a", "b")]
    second = numbering.new_job(), numbering.submitted("a")[:2]
    seventh = numbering.new_job(7), numbering.submitted("a")[:2]
    again = numbering.new_job(1), numbering.submitted("b")[:2]

    assert [(1, 1), (1, 2)] == first
    assert [(2, (2, 1)), (7, (7, 1)), (1, (1, 3))] == [second, seventh, again]
    assert 7 == numbering.jobs


@pytest.mark.parametrize("job", [0, -1, True, 1.5, "2"])
def test_jobs_are_numbers_from_one_on(job: object) -> None:
    """Anything else is refused."""
    with pytest.raises(ArgumentError, match="a job number must be"):
        JobNumbering("manual").new_job(job)  # type: ignore[arg-type]


def test_with_clients_nobody_moves_the_job() -> None:
    """The error says how it is asked for."""
    with pytest.raises(ValueError, match="job_type='manual'"):
        JobNumbering("client").new_job()


def test_a_worker_at_rest_is_labelled_by_the_others() -> None:
    """The newest graph that runs, then the newest job whose client is there, then nothing."""
    numbering = JobNumbering("client")
    older, newer = numbering.submitted("a"), numbering.submitted("b")

    assert newer == numbering.idle_label([older, newer])
    assert older == numbering.idle_label([older])
    assert (2, 0) == numbering.idle_label([])[:2]
    numbering.left("b")
    assert (1, 0) == numbering.idle_label([])[:2]
    numbering.left("a")
    assert (0, 0) == numbering.idle_label([])[:2]


def test_a_manual_job_is_there_before_anything_is_submitted() -> None:
    """And after everything has ended."""
    numbering = JobNumbering("manual")

    assert (1, 0) == numbering.idle_label([])[:2]
    numbering.new_job()
    assert (2, 0) == numbering.idle_label([])[:2]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_numbers_have_no_holes(history: list[tuple[str, bool]]) -> None:
    """Whoever submits in whichever order, jobs and the graphs of each count 1, 2, 3."""
    numbering = JobNumbering("client")
    seen: list[GraphLabel] = []
    for client, from_task in history:
        cause = seen[-1] if from_task and seen else None
        label = numbering.submitted(client, cause)
        if cause is None:
            seen.append(label)

    jobs = list(dict.fromkeys(label.job for label in seen))
    assert list(range(1, len(jobs) + 1)) == jobs
    for job in jobs:
        dags = [label.dag for label in seen if label.job == job]
        assert list(range(1, len(dags) + 1)) == dags
    assert list(range(1, len(seen) + 1)) == [label.serial for label in seen]


def test_lines_without_a_label_get_that_of_their_moment() -> None:
    """Whatever was noted since; what has one keeps it."""
    idle = IdleLabels()
    idle.note(1.0, GraphLabel(1, 1, 1))
    idle.note(2.0, GraphLabel(1, 0))
    idle.note(3.0, GraphLabel(2, 1, 2))

    filled = idle.filled(b',,0.500,"[1, 2]"\n,,1.000,[]\n5,6,1.500,[]\n,,2.999\n,,9.000,x\n')

    assert b'0,0,0.500,"[1, 2]"\n1,1,1.000,[]\n5,6,1.500,[]\n1,0,2.999\n2,1,9.000,x\n' == filled


def test_what_is_long_past_is_forgotten() -> None:
    """However often the label changes."""
    idle = IdleLabels()
    for second in range(10_000):
        idle.note(float(second), GraphLabel(1, second + 1, second))

    assert len(idle._since) < 2_000
    assert (1, 9_990) == idle.at(9_989.5)[:2]
    assert (1, 9_200) == idle.at(9_199.5)[:2]
    assert NO_GRAPH != idle.at(0.0)


def test_tasks_carry_their_graph_as_text() -> None:
    """What others wrote under that name is none, nor is what an earlier monitor wrote."""
    label = GraphLabel(3, 14, 159)

    assert label == find_label({"gpulse": label.mark("ab"), "retries": 2}, "ab")
    assert find_label({"gpulse": label.mark("ab")}, "cd") is None
    for foreign in (
        None,
        {},
        {"retries": 2},
        {"gpulse": 5},
        {"gpulse": "ab:a.b.c"},
        {"gpulse": "ab:1.2.3.4"},
    ):
        assert find_label(foreign, "ab") is None


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

    def monitored(self) -> GraphLabelling:
        """Begin to number it."""
        scheduler: Any = self
        labels = GraphLabelling(scheduler, JobNumbering("client"))
        labels.adopt()
        return labels

    def read_on(self, worker: str, labels: GraphLabelling) -> set[tuple[int, int] | None]:
        """What that worker takes for the graphs of its tasks, whose annotations it got before the start."""
        command = WorkerCommand(
            running=True, token=labels.token, adopted=labels.adopted_on(self.workers[worker])
        )
        here: Any = SimpleNamespace(
            active_keys={task.key for task in self.workers[worker].processing},
            state=SimpleNamespace(tasks={task.key: task for task in self.tasks.values()}),
        )
        return {
            None if label is None else label[:2] for label in find_executing(here, command, keys=False).labels
        }


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
    """A worker got its tasks without a mark, and learns the marks with the command to begin, each worker its own."""
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
    old = GraphLabel(1, 4, 6).mark("abcdef")
    task = Task("long", annotations={ANNOTATION_KEY: old, "retries": 2})
    cluster = Cluster(two=[Task("done", "memory")], one=[task])
    labels = cluster.monitored()
    renewed = dict(task.annotations or {})
    task.annotations = {ANNOTATION_KEY: old}  # as the worker still has it

    assert {(1, 1)} == cluster.read_on("one", labels)
    assert 2 == renewed["retries"]
    assert renewed[ANNOTATION_KEY].startswith(f"{labels.token}:")
    assert (1, 1) == (labels.numbering.jobs, labels.numbering.graphs)


def test_an_old_number_that_nobody_adopts_is_none() -> None:
    """The worker leaves it to the scheduler to say what the cluster is at, and the scheduler does not count it either."""
    task = Task("orphan", annotations={ANNOTATION_KEY: GraphLabel(3, 4, 6).mark("abcdef")})
    cluster = Cluster(one=[task])
    cluster.client_comms.clear()
    labels = cluster.monitored()
    labels.look(1.0)

    assert {None} == cluster.read_on("one", labels)
    assert (0, 0) == labels.idle.now[:2] == labels.newest_on(cluster.workers["one"])[:2]


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


def submit(labels: GraphLabelling, client: str, parent: str | None, key: str) -> None:
    """A graph of one task arrives, which a task has submitted."""
    token = SUBMITTING_LABEL.set(labels.cause(client, parent))
    labels.submitted(client, [key], 1.0)
    SUBMITTING_LABEL.reset(token)


@pytest.mark.parametrize("parent", [None, "orphan"])
def test_what_the_client_of_a_worker_submits_is_no_job_either(parent: str | None) -> None:
    """Also when nobody knows whose task it was that submitted it, because that is older than the monitoring."""
    cluster = Cluster(**{"Client-worker-1": [Task("orphan")]})
    labels = cluster.monitored()
    cluster.tasks["child"] = Task("child", "released")
    submit(labels, "Client-worker-1", parent, "child")

    assert 0 == labels.numbering.jobs
    assert (0, 0) == labels.idle.now[:2]


def test_what_an_adopted_task_submits_is_of_its_graph() -> None:
    """And of no other job."""
    cluster = Cluster(**{"Client-1": [Task("parent")]})
    labels = cluster.monitored()
    cluster.tasks["child"] = child = Task("child", "released")
    submit(labels, "Client-worker-1", "parent", "child")

    assert {ANNOTATION_KEY: GraphLabel(1, 1, 1).mark(labels.token)} == child.annotations
    assert (1, 1) == (labels.numbering.jobs, labels.numbering.graphs)


@pytest.mark.parametrize("backlog", [100, 1000])
def test_one_look_at_many_workers_costs_little(monkeypatch: pytest.MonkeyPatch, backlog: int) -> None:
    """It does not grow with the tasks that wait, and a graph is made out once, however many tasks it has."""
    cluster = Cluster()
    labels = cluster.monitored()
    mark = labels.numbering.submitted("one").mark(labels.token)
    queues = [
        Queue(Task(f"{worker}-{number}", annotations={ANNOTATION_KEY: mark}) for number in range(backlog))
        for worker in range(200)
    ]
    cluster.workers = {str(number): SimpleNamespace(processing=queue) for number, queue in enumerate(queues)}
    made_out = []

    def counted(mark: object, token: str) -> GraphLabel | None:
        made_out.append(mark)
        return label_of(mark, token)

    monkeypatch.setattr(module, "label_of", counted)
    labels.look(1.0)

    assert (1, 1) == labels.idle.now[:2]
    assert max(queue.looked_at for queue in queues) <= 10
    assert 1 == len(made_out)
