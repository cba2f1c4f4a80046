"""GPUs that a scheduler granted to a job, from what agents reported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpulse.model.job import JOB, JOB_END, Job, from_document
from gpulse.store.store import StoredEvent

STARTED = "agent_started"
_REPORTED_AGAIN_SECONDS = 60.0
"""An agent that starts reports the jobs that it finds within this time."""


class Grant(NamedTuple):
    """GPUs of one node for some time."""

    node: int
    start: float
    end: float | None
    """None while the job has them."""
    gpus: frozenset[str] = frozenset()
    """By UUID; empty when it is unknown which."""


def job_of(event: StoredEvent) -> str | None:
    """Return the id of the job that an event is about."""
    name = event.detail.get("id" if event.kind == JOB else "job") if event.kind in (JOB, JOB_END) else None
    return name if isinstance(name, str) and name else None


def read_job(event: StoredEvent) -> Job | None:
    """Return the job that an event describes; None for other events and for one that cannot be read."""
    try:
        return from_document(dict(event.detail)) if event.kind == JOB else None
    except ValueError:
        return None


def find_grants(events: Iterable[StoredEvent], job: str, now: float) -> list[Grant]:
    """Return what a job was granted, in the order of time.

    An agent that was away when a job ended does not report the end. What it does not report again after it has started
    had ended by then.

    Args:
        events: Jobs, their ends and the starts of agents, in the order of time; those of other jobs are ignored.
        job: Its id.
        now: Epoch seconds.
    """
    held: dict[int, Grant] = {}
    started: dict[int, float] = {}
    """When a node's agent started, if it has not reported the job since."""
    done: list[Grant] = []
    for event in events:
        if event.node is None:
            continue
        if event.kind == STARTED:
            started.setdefault(event.node, event.time)
        elif job_of(event) == job:
            grant = held.pop(event.node, None)
            grant, over = _after_start(grant, started.pop(event.node, None), event.time)
            done += over
            if event.kind == JOB:
                held[event.node], over = _with_gpus(grant or Grant(event.node, event.time, None), event)
                done += over
            elif grant is not None:
                done.append(grant._replace(end=event.time))
    for node, last in held.items():
        grant, over = _after_start(last, started.get(node), now)
        done += over if grant is None else [grant]
    return sorted(done, key=lambda grant: (grant.start, grant.node))


def _after_start(
    grant: Grant | None, started: float | None, reported: float
) -> tuple[Grant | None, list[Grant]]:
    """Return what is left of a grant, and what has ended, if its agent started before it reported the job."""
    if grant is None or started is None or reported <= started + _REPORTED_AGAIN_SECONDS:
        return grant, []
    return None, [grant._replace(end=max(started, grant.start))]


def _with_gpus(grant: Grant, event: StoredEvent) -> tuple[Grant, list[Grant]]:
    """Return a grant with the GPUs that an event reports, and the one that has ended if they are others than before.

    The GPUs that are reported first are the job's from its beginning: it takes an agent a while to find them.
    """
    job = read_job(event)
    gpus = frozenset() if job is None else frozenset(job.gpus)
    if not gpus or gpus == grant.gpus:
        return grant, []
    if not grant.gpus:
        return grant._replace(gpus=gpus), []
    return Grant(event.node or grant.node, event.time, None, gpus), [grant._replace(end=event.time)]
