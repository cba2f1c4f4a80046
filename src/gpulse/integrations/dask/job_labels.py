"""Number jobs and graphs, and label tasks and rows of measurements with them."""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gpulse.integrations.dask.trackable_metrics import ArgumentError

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

JobType = Literal["client", "manual"]
ANNOTATION_KEY = "gpulse"
"""Key of the task annotation that names the graph."""

_HISTORY_SECONDS = 900.0
"""Rows can be late: a worker keeps them while the scheduler does not accept them."""
SUBMITTING_LABEL: ContextVar[GraphLabel | None] = ContextVar("gpulse_cause", default=None)
"""The graph of the task that submits the graph now being processed."""
_RESUBMITTED_STATES = frozenset({"released", "forgotten"})
_PENDING_STATES = frozenset({"waiting", "processing", "queued", "no-worker"})
_MAX_EXAMINED_TASKS = 8
"""Tasks of a worker that are examined to find the graphs that the cluster executes."""
_WORKER_CLIENT_PREFIX = "Client-worker-"


class GraphLabel(NamedTuple):
    """The graph that a task belongs to."""

    job: int
    dag: int
    """Within the job; 0 between two graphs."""
    serial: int = 0
    """Counts all graphs in the order in which they were submitted."""

    def mark(self, token: str) -> str:
        """Return the text that tasks carry; a string costs little in messages and in garbage collection.

        Args:
            token: Token of the monitor that assigned the numbers: tasks can outlive it.
        """
        return f"{token}:{self.job}.{self.dag}.{self.serial}"


def find_label(annotations: Mapping[str, Any] | None, token: str) -> GraphLabel | None:
    """Return the graph that a task's annotations name; None when they name none or another monitor wrote them."""
    mark = annotations.get(ANNOTATION_KEY) if annotations else None
    return None if mark is None else label_of(mark, token)


def label_of(mark: object, token: str) -> GraphLabel | None:
    """Parse a mark; None when it is not one of this monitor's."""
    if not isinstance(mark, str):
        return None
    monitor_token, _, numbers = mark.partition(":")
    try:
        return GraphLabel(*map(int, numbers.split("."))) if monitor_token == token else None
    except (TypeError, ValueError):  # an annotation of the same name by another program
        return None


NO_GRAPH = GraphLabel(0, 0)
"""Label while there is no job."""


class JobNumbering:
    """Numbers jobs, and graphs within them, from 1.

    With job type `client` each connection that submits work is a job. With `manual` the user sets the job.
    """

    def __init__(self, job_type: JobType) -> None:
        self.job_type = job_type
        self.jobs = 1 if job_type == "manual" else 0
        """The highest number given to a job so far."""
        self.graphs = 0
        """Number of graphs submitted in all jobs."""
        self._current = 1
        """The job of manual numbering."""
        self._dags: dict[int, int] = {}
        self._of_client: dict[str, int] = {}
        self._here: set[str] = set()

    @property
    def job(self) -> int:
        """The newest job, or the current one of manual numbering; 0 before the first."""
        return self._current if self.job_type == "manual" else self.jobs

    def submitted(self, client: str, cause: GraphLabel | None = None) -> GraphLabel:
        """Return the label of a graph that a client has just submitted.

        Args:
            client: The connection.
            cause: The graph of the task that submitted it, which it then belongs to.
        """
        if cause is not None:
            return cause
        job = self._job_of(client)
        self.graphs += 1
        self._dags[job] = self._dags.get(job, 0) + 1
        return GraphLabel(job, self._dags[job], self.graphs)

    def left(self, client: str) -> None:
        """Note that a client closed its connection."""
        self._here.discard(client)

    def new_job(self, job: int | None = None) -> int:
        """Begin another job: the next one, or the one with a number.

        Raises:
            ArgumentError: Jobs are numbered by clients, or the number is wrong.
        """
        if self.job_type != "manual":
            raise ArgumentError(
                "new_job() requires attach(job_type='manual'); with the current job_type, each client that submits work gets its own job"
            )
        self._current = self._current + 1 if job is None else _check_job_number(job)
        self.jobs = max(self.jobs, self._current)
        return self._current

    def idle_label(self, executing: Iterable[GraphLabel]) -> GraphLabel:
        """Return the label of a worker that executes nothing itself, given what others execute.

        It is the newest graph; between two graphs the newest job whose client is still connected.
        """
        newest = max(executing, key=lambda label: label.serial, default=None)
        if newest is not None:
            return newest
        if self.job_type == "manual":
            return GraphLabel(self._current, 0)
        return GraphLabel(max((self._of_client[client] for client in self._here), default=0), 0)

    def _job_of(self, client: str) -> int:
        if self.job_type == "manual":
            return self._current
        self._here.add(client)
        if client not in self._of_client:
            self.jobs += 1
            self._of_client[client] = self.jobs
        return self._of_client[client]


def _check_job_number(job: object) -> int:
    if not isinstance(job, int) or isinstance(job, bool) or job < 1:
        raise ArgumentError(f"a job number must be an integer of at least 1, not {job!r}")
    return job


class IdleLabels:
    """History of the label of idle workers."""

    def __init__(self) -> None:
        self._since: list[tuple[float, GraphLabel]] = [(float("-inf"), NO_GRAPH)]

    @property
    def now(self) -> GraphLabel:
        """The newest label."""
        return self._since[-1][1]

    def note(self, timestamp: float, label: GraphLabel) -> None:
        """Set the label from a time on, and drop old history."""
        if label[:2] != self.now[:2]:
            self._since.append((max(timestamp, self._since[-1][0]), label))
        past = self._place(timestamp - _HISTORY_SECONDS)
        if past > len(self._since) / 2:
            del self._since[:past]

    def at(self, timestamp: float) -> GraphLabel:
        """Return the label at a time."""
        return self._since[self._place(timestamp)][1]

    def filled(self, lines: bytes) -> bytes:
        """Return lines with a label wherever the worker left it open."""
        if not lines.startswith(b",") and b"\n," not in lines:
            return lines
        return b"".join(
            self._labelled(line) if line.startswith(b",") else line
            for line in lines.splitlines(keepends=True)
        )

    def _place(self, timestamp: float) -> int:
        return max(0, bisect_right(self._since, timestamp, key=lambda entry: entry[0]) - 1)

    def _labelled(self, line: bytes) -> bytes:
        label = self.at(float(line.split(b",", 3)[2].strip()))
        return b"%d,%d%s" % (label.job, label.dag, line[1:])


class GraphLabelling:
    """Labels tasks of one cluster with job and graph, from the first start of its monitoring."""

    def __init__(self, scheduler: Scheduler, numbering: JobNumbering) -> None:
        self.token = secrets.token_hex(3)
        """Identifies marks of this monitor."""
        self.numbering = numbering
        self.idle = IdleLabels()
        self._scheduler = scheduler
        self._adopted: dict[Any, str] = {}
        """Marks of tasks that workers got before monitoring started."""
        self._newest = NO_GRAPH
        self._of_worker: dict[str, GraphLabel] = {}
        """Graph for which each worker's own client submitted last."""

    def adopt(self) -> None:
        """Label what clients submitted before and still wait for: one graph per client."""
        for client, state in self._scheduler.clients.items():
            if client not in self._scheduler.client_comms or client.startswith(_WORKER_CLIENT_PREFIX):
                continue  # queues, published data and the like are clients too, but not jobs
            waiting = [task for task in state.wants_what if task.state in _PENDING_STATES]
            if waiting:
                self._adopt(waiting, self.numbering.submitted(client).mark(self.token))

    def cause(self, client: str, submitting_task: Any) -> GraphLabel | None:
        """Return the graph whose task submits; None when a client submits.

        What a worker's client submits belongs to the graph of the task that does so. Dask does not know that task when it is
        a coroutine or has handed its client to a thread; then it is the graph that this client last submitted for, or
        the newest that executes.
        """
        task = None if submitting_task is None else self._scheduler.tasks.get(submitting_task)
        label = None if task is None else self._of(task)
        if label is None and client.startswith(_WORKER_CLIENT_PREFIX):
            running = self.idle.now if self.idle.now.dag else self._newest
            label = self._of_worker.get(client, running)
        if label is None or not label.job:
            return None
        self._of_worker[client] = label
        return label

    def submitted(self, client: str, keys: Iterable[Any], elapsed: float) -> None:
        """Label the tasks of a graph that is being submitted; the label goes to the workers with them."""
        tasks, cause = self._scheduler.tasks, SUBMITTING_LABEL.get()
        if cause is None and client.startswith(_WORKER_CLIENT_PREFIX):
            return  # by a task without a label; a worker's client is not a job
        label = self._newest = self.numbering.submitted(client, cause)
        mark = label.mark(self.token)
        for key in keys:
            task = tasks.get(key)
            if task is not None and (task.state in _RESUBMITTED_STATES or self._of(task) is None):
                _mark_task(task, mark)
        self.idle.note(elapsed, label)

    def look(self, elapsed: float) -> None:
        """Note what the cluster executes."""
        marks = {mark for worker in self._scheduler.workers.values() for mark in _read_marks(worker)}
        self.idle.note(elapsed, self.numbering.idle_label(self._labels(marks)))

    def newest_on(self, worker: WorkerState) -> GraphLabel:
        """Return the newest graph on a worker."""
        labels = self._labels(set(_read_marks(worker)))
        return max(labels, key=lambda label: label.serial, default=self.idle.now)

    def adopted_on(self, worker: WorkerState) -> Mapping[Any, str]:
        """Return by key the marks of a worker's tasks that do not carry one themselves."""
        return {task.key: self._adopted[task.key] for task in worker.processing if task.key in self._adopted}

    def _adopt(self, waiting: list[TaskState], mark: str) -> None:
        while waiting:
            task = waiting.pop()
            if self._of(task) is not None:
                continue
            _mark_task(task, mark)
            if task.state == "processing":
                self._adopted[task.key] = mark
            waiting.extend(task.dependencies)

    def _of(self, task: TaskState) -> GraphLabel | None:
        return find_label(task.annotations, self.token)

    def _labels(self, marks: Iterable[str]) -> Iterator[GraphLabel]:
        return (label for mark in marks if (label := label_of(mark, self.token)) is not None)


def _read_marks(worker: WorkerState) -> Iterator[str]:
    for task in islice(worker.processing, _MAX_EXAMINED_TASKS):
        mark = task.annotations.get(ANNOTATION_KEY) if task.annotations else None
        if mark is not None:
            yield mark


def _mark_task(task: TaskState, mark: str) -> None:
    if task.annotations is None:
        task.annotations = {}
    task.annotations[ANNOTATION_KEY] = mark
