"""Subject of a report: a job, a session or a process tree, with its nodes, GPUs and times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from gpulse.model.intervals import Interval, cut
from gpulse.model.job import JOB, JOB_END, Job, job_from_document
from gpulse.reports.process_report import ProcessKey, process_key
from gpulse.store.store import StoredEvent, StoredGpu, StoredProcess

AGENT_STARTED = "agent_started"
_REPORTED_AGAIN_SECONDS = 60.0
"""After its start, an agent reports the running jobs within this time."""


class Grant(NamedTuple):
    """GPUs of one node that a scheduler granted to a job for some time."""

    node: int
    start: float
    end: float | None
    """None while the job has them."""
    gpus: frozenset[str] = frozenset()
    """UUIDs of the GPUs; empty when they are unknown."""


def job_id(event: StoredEvent) -> str | None:
    """Return the ID of the job that an event is about."""
    name = event.detail.get("id" if event.kind == JOB else "job") if event.kind in (JOB, JOB_END) else None
    return name if isinstance(name, str) and name else None


def read_job(event: StoredEvent) -> Job | None:
    """Return the job that an event describes; None for other or malformed events."""
    try:
        return job_from_document(dict(event.detail)) if event.kind == JOB else None
    except ValueError:
        return None


def find_grants(events: Iterable[StoredEvent], job: str, now: float) -> list[Grant]:
    """Return the grants of a job, in the order of time.

    An agent that was down when a job ended does not report its end. A job that it does not report again after its
    next start ended before that.

    Args:
        events: Starts and ends of jobs and starts of agents, in the order of time; other jobs are ignored.
        job: ID of the job.
        now: Epoch seconds.
    """
    held: dict[int, Grant] = {}
    started: dict[int, float] = {}
    """When a node's agent started, if it has not reported the job since."""
    done: list[Grant] = []
    for event in events:
        if event.node is None:
            continue
        if event.kind == AGENT_STARTED:
            started.setdefault(event.node, event.time)
        elif job_id(event) == job:
            grant = held.pop(event.node, None)
            grant, over = _end_by_restart(grant, started.pop(event.node, None), event.time)
            done += over
            if event.kind == JOB:
                held[event.node], over = _with_gpus(grant or Grant(event.node, event.time, None), event)
                done += over
            elif grant is not None:
                done.append(grant._replace(end=event.time))
    for node, last in held.items():
        grant, over = _end_by_restart(last, started.get(node), now)
        done += over if grant is None else [grant]
    return sorted(done, key=lambda grant: (grant.start, grant.node))


def _end_by_restart(
    grant: Grant | None, started: float | None, reported: float
) -> tuple[Grant | None, list[Grant]]:
    """Return the open grant and the ended ones; a grant ends if its agent restarted and did not report the job again."""
    if grant is None or started is None or reported <= started + _REPORTED_AGAIN_SECONDS:
        return grant, []
    return None, [grant._replace(end=max(started, grant.start))]


def _with_gpus(grant: Grant, event: StoredEvent) -> tuple[Grant, list[Grant]]:
    """Return a grant with the GPUs of an event, and the previous grant as ended if its GPUs were different.

    The GPUs that are reported first belong to the job from its start: an agent needs a while to find them.
    """
    job = read_job(event)
    gpus = frozenset() if job is None else frozenset(job.gpus)
    if not gpus or gpus == grant.gpus:
        return grant, []
    if not grant.gpus:
        return grant._replace(gpus=gpus), []
    return Grant(event.node or grant.node, event.time, None, gpus), [grant._replace(end=event.time)]


JobState = Literal["running", "ended", "lost"]
"""Lost: its nodes stopped reporting before it ended."""
TimeRange = tuple[float | None, float | None]
"""Start and end in epoch seconds; None for no bound."""
JobKind = Literal["job", "session", "process"]
"""Subject of a report: a scheduler's job, a session, or a process and its descendants."""

_SLACK_SECONDS = 60.0
"""A process may be seen on a GPU a little before or after the time that is stored for it."""


class ReportSubject(NamedTuple):
    """Subject of a report."""

    kind: JobKind
    name: str
    start: float = 0.0
    """Epoch seconds."""
    end: float = 0.0
    state: JobState = "ended"
    is_now: bool = False
    """Whether it is still running, so that its end is the present."""
    job: Mapping[str, Any] = {}
    """Description of the job by its scheduler: fields of `model.job.Job`."""
    processes: Sequence[StoredProcess] = ()
    """Its own processes; a session has none."""
    grants: Sequence[Grant] = ()
    gpus: Sequence[StoredGpu] = ()
    """GPUs of a session."""
    data_gaps: Sequence[str] = ()
    """Sentences about data that its figures leave out."""

    @property
    def keys(self) -> set[ProcessKey]:
        """Keys of its own processes."""
        return {process_key(process) for process in self.processes}

    @property
    def nodes(self) -> set[int]:
        """Numbers of its nodes."""
        parts: tuple[Sequence[Any], ...] = self.processes, self.grants, self.gpus
        return {one.node for part in parts for one in part}

    def spans(self, node: int) -> list[Interval[float]]:
        """Return the time spans in which it was on a node."""
        if self.kind == "session":
            return [Interval(self.start, self.end)]
        found = [(grant.start, grant.end) for grant in self.grants if grant.node == node]
        found += [(one.first_seen, one.ended) for one in self.processes if one.node == node]
        return self.clip(found)

    def process_spans(self, node: int) -> Callable[[int], list[Interval[float]] | None]:
        """Return a function from a PID to the spans in which that process belonged to the subject; None means always."""
        by_pid: dict[int, list[tuple[float, float | None]]] = {}
        for one in self.processes:
            if one.node == node:
                last = None if one.ended is None else one.ended + _SLACK_SECONDS
                by_pid.setdefault(one.pid, []).append((one.first_seen - _SLACK_SECONDS, last))
        if self.kind == "session":
            return lambda _: None
        return lambda pid: self.clip(by_pid.get(pid, ()))

    def clip(self, spans: Iterable[tuple[float, float | None]]) -> list[Interval[float]]:
        """Return time spans clipped to the subject's time, in order; spans that touch are merged."""
        known = ((first, self.end if last is None else last) for first, last in spans)
        return cut(known, self.start, self.end)
