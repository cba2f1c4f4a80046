"""Gives tasks the numbers of their job and graph, inside the scheduler."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from itertools import islice
from typing import TYPE_CHECKING, Any

from gpulse.integrations.dask.jobs import ANNOTATION, NOTHING, Label, Numbering, label_of, marked
from gpulse.integrations.dask.resting import Resting

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

CAUSE: ContextVar[Label | None] = ContextVar("gpulse_cause", default=None)
"""The graph of the task that submits the one which is being taken in."""

_SUBMITTED_ANEW = frozenset({"released", "forgotten"})
_UNDER_WAY = frozenset({"waiting", "processing", "queued", "no-worker"})
_MOST_LOOKED_AT = 8
"""Tasks of a worker that are looked at for what the cluster is at."""
_OF_WORKERS = "Client-worker-"


class Labelling:
    """The numbers of one cluster, from the first start of its monitoring on."""

    def __init__(self, scheduler: Scheduler, numbering: Numbering) -> None:
        self.token = secrets.token_hex(3)
        """Tells our marks from those of an earlier monitor."""
        self.numbering = numbering
        self.resting = Resting()
        self._scheduler = scheduler
        self._adopted: dict[Any, str] = {}
        """The marks of tasks that workers had before they could carry one."""
        self._newest = NOTHING
        self._of_worker: dict[str, Label] = {}
        """For which graph each worker's own client has submitted last."""

    def adopt(self) -> None:
        """Number what clients have submitted before and still wait for: one graph of a job each."""
        for client, state in self._scheduler.clients.items():
            if client not in self._scheduler.client_comms or client.startswith(_OF_WORKERS):
                continue  # queues, published data and the like are clients too, but nobody's job
            waiting = [task for task in state.wants_what if task.state in _UNDER_WAY]
            if waiting:
                self._adopt(waiting, self.numbering.submitted(client).mark(self.token))

    def cause(self, client: str, submitting_task: Any) -> Label | None:
        """For which graph something is submitted that has just arrived, None when it is one of its own.

        What a worker's client submits belongs to the graph of the task that does so. Dask does not know that task when it is
        a coroutine or has handed its client to a thread; then it is the graph that this client last submitted for, or
        the newest that executes.
        """
        task = None if submitting_task is None else self._scheduler.tasks.get(submitting_task)
        label = None if task is None else self._of(task)
        if label is None and client.startswith(_OF_WORKERS):
            running = self.resting.now if self.resting.now.dag else self._newest
            label = self._of_worker.get(client, running)
        if label is None or not label.job:
            return None
        self._of_worker[client] = label
        return label

    def submitted(self, client: str, keys: Iterable[Any], elapsed: float) -> None:
        """A graph is being taken in: its tasks carry its numbers from now on, also to the workers."""
        tasks, cause = self._scheduler.tasks, CAUSE.get()
        if cause is None and client.startswith(_OF_WORKERS):
            return  # of a task that has no number itself; a worker's client is nobody's job
        label = self._newest = self.numbering.submitted(client, cause)
        mark = label.mark(self.token)
        for key in keys:
            task = tasks.get(key)
            if task is not None and (task.state in _SUBMITTED_ANEW or self._of(task) is None):
                _mark(task, mark)
        self.resting.note(elapsed, label)

    def look(self, elapsed: float) -> None:
        """Note what the cluster is at."""
        marks = {mark for worker in self._scheduler.workers.values() for mark in _marks(worker)}
        self.resting.note(elapsed, self.numbering.resting(self._labels(marks)))

    def newest_on(self, worker: WorkerState) -> Label:
        """What a worker is at."""
        labels = self._labels(set(_marks(worker)))
        return max(labels, key=lambda label: label.serial, default=self.resting.now)

    def adopted_on(self, worker: WorkerState) -> Mapping[Any, str]:
        """By key, the marks of a worker's tasks that do not carry one themselves."""
        return {task.key: self._adopted[task.key] for task in worker.processing if task.key in self._adopted}

    def _adopt(self, waiting: list[TaskState], mark: str) -> None:
        while waiting:
            task = waiting.pop()
            if self._of(task) is not None:
                continue
            _mark(task, mark)
            if task.state == "processing":
                self._adopted[task.key] = mark
            waiting.extend(task.dependencies)

    def _of(self, task: TaskState) -> Label | None:
        return marked(task.annotations, self.token)

    def _labels(self, marks: Iterable[str]) -> Iterator[Label]:
        return (label for mark in marks if (label := label_of(mark, self.token)) is not None)


def _marks(worker: WorkerState) -> Iterator[str]:
    for task in islice(worker.processing, _MOST_LOOKED_AT):
        mark = task.annotations.get(ANNOTATION) if task.annotations else None
        if mark is not None:
            yield mark


def _mark(task: TaskState, mark: str) -> None:
    if task.annotations is None:
        task.annotations = {}
    task.annotations[ANNOTATION] = mark
