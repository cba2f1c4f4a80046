"""How jobs and graphs are numbered: events in, numbers out, nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from gpulse.integrations.dask.tracking import ArgumentError

JobType = Literal["client", "manual"]
ANNOTATION = "gpulse"
"""Under which tasks carry their graph."""


class Label(NamedTuple):
    """The graph that a task belongs to."""

    job: int
    dag: int
    """Within the job; 0 between two graphs."""
    serial: int = 0
    """Counts all graphs in the order in which they were submitted."""

    def mark(self, token: str) -> str:
        """As tasks carry it: text, which costs neither the wire nor the garbage collector anything to speak of.

        Args:
            token: Of the monitor that gave the number: tasks can outlive it.
        """
        return f"{token}:{self.job}.{self.dag}.{self.serial}"


def marked(annotations: Mapping[str, Any] | None, token: str) -> Label | None:
    """The graph that a task's annotations name, None when they name none or another monitor wrote them."""
    mark = annotations.get(ANNOTATION) if annotations else None
    return None if mark is None else label_of(mark, token)


def label_of(mark: object, token: str) -> Label | None:
    """The graph of a mark, None when it is none of this monitor's."""
    if not isinstance(mark, str):
        return None
    whose, _, numbers = mark.partition(":")
    try:
        return Label(*map(int, numbers.split("."))) if whose == token else None
    except (TypeError, ValueError):  # somebody else's annotation of that name
        return None


NOTHING = Label(0, 0)
"""Nobody has submitted anything that is still of interest."""


class Numbering:
    """Gives numbers to jobs and to the graphs within them, from 1 on.

    With job type `client` each connection that submits work is a job. With `manual` the job is what it was set to.
    """

    def __init__(self, job_type: JobType) -> None:
        self.job_type = job_type
        self.jobs = 1 if job_type == "manual" else 0
        """The highest number given to a job so far."""
        self.graphs = 0
        """How many were submitted, of all jobs."""
        self._current = 1
        """The job of manual numbering."""
        self._dags: dict[int, int] = {}
        self._of_client: dict[str, int] = {}
        self._here: set[str] = set()

    @property
    def job(self) -> int:
        """The job of a graph that were submitted now by the newest job's client, 0 when there is none yet."""
        return self._current if self.job_type == "manual" else self.jobs

    def submitted(self, client: str, cause: Label | None = None) -> Label:
        """The number of a graph that a client has just submitted.

        Args:
            client: The connection.
            cause: The graph of the task that submitted it, which it then is a part of.
        """
        if cause is not None:
            return cause
        job = self._job_of(client)
        self.graphs += 1
        self._dags[job] = self._dags.get(job, 0) + 1
        return Label(job, self._dags[job], self.graphs)

    def left(self, client: str) -> None:
        """A client has closed its connection."""
        self._here.discard(client)

    def new_job(self, job: int | None = None) -> int:
        """Go on with another job: the next one, or the one that is named.

        Raises:
            ArgumentError: Jobs are numbered by clients, or that is no number.
        """
        if self.job_type != "manual":
            raise ArgumentError(
                "new_job() goes with attach(job_type='manual'); here every client that submits work is a job"
            )
        self._current = self._current + 1 if job is None else _number(job)
        self.jobs = max(self.jobs, self._current)
        return self._current

    def resting(self, executing: Iterable[Label]) -> Label:
        """The label of a worker that executes nothing itself, given what others execute.

        It is the newest graph; between two graphs the newest job whose client is still connected.
        """
        newest = max(executing, key=lambda label: label.serial, default=None)
        if newest is not None:
            return newest
        if self.job_type == "manual":
            return Label(self._current, 0)
        return Label(max((self._of_client[client] for client in self._here), default=0), 0)

    def _job_of(self, client: str) -> int:
        if self.job_type == "manual":
            return self._current
        self._here.add(client)
        if client not in self._of_client:
            self.jobs += 1
            self._of_client[client] = self.jobs
        return self._of_client[client]


def _number(job: object) -> int:
    if not isinstance(job, int) or isinstance(job, bool) or job < 1:
        raise ArgumentError(f"jobs are numbered from 1 on, so that {job!r} is none")
    return job
