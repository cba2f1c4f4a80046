"""What a scheduler gave a job: GPUs of a node for a stretch of time, from what agents told of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpulse.model.job import JOB, JOB_END, Job, from_document
from gpulse.store.store import StoredEvent

STARTED = "agent_started"
KINDS = (JOB, JOB_END, STARTED)
"""The events that grants are made from."""
_AGAIN_SECONDS = 60.0
"""An agent that starts tells the jobs it finds within so long."""


class Grant(NamedTuple):
    """GPUs of one node for a stretch of time."""

    node: int
    start: float
    end: float | None
    """None while the job has them."""
    gpus: frozenset[str] = frozenset()
    """By UUID; none when nobody knows which."""


def job_of(event: StoredEvent) -> str | None:
    """The job that an event is about."""
    name = event.detail.get("id" if event.kind == JOB else "job") if event.kind in (JOB, JOB_END) else None
    return name if isinstance(name, str) and name else None


def read_job(event: StoredEvent) -> Job | None:
    """The job that an event tells of; None when it tells of none that makes sense."""
    try:
        return from_document(dict(event.detail)) if event.kind == JOB else None
    except ValueError:
        return None


def grants(events: Iterable[StoredEvent], job: str, now: float) -> list[Grant]:
    """What a job was given, in the order of time.

    An agent that was away when a job ended does not tell its end. What it does not tell again after it has started
    was over by then.

    Args:
        events: Of jobs, their ends and the starts of agents, in the order of time; those of other jobs do no harm.
        job: Its name.
        now: Epoch seconds.
    """
    held: dict[int, Grant] = {}
    started: dict[int, float] = {}
    """When a node's agent started, if it has not told of the job since."""
    done: list[Grant] = []
    for event in events:
        if event.node is None:
            continue
        if event.kind == STARTED:
            started.setdefault(event.node, event.time)
        elif job_of(event) == job:
            grant = held.pop(event.node, None)
            grant, over = _followed(grant, started.pop(event.node, None), event.time)
            done += over
            if event.kind == JOB:
                held[event.node], over = _told(grant or Grant(event.node, event.time, None), event)
                done += over
            elif grant is not None:
                done.append(grant._replace(end=event.time))
    for node, last in held.items():
        grant, over = _followed(last, started.get(node), now)
        done += over if grant is None else [grant]
    return sorted(done, key=lambda grant: (grant.start, grant.node))


def _followed(grant: Grant | None, started: float | None, heard: float) -> tuple[Grant | None, list[Grant]]:
    """What is left of a grant, and what of it is over, when its agent started and the job was heard of only then."""
    if grant is None or started is None or heard <= started + _AGAIN_SECONDS:
        return grant, []
    return None, [grant._replace(end=max(started, grant.start))]


def _told(grant: Grant, event: StoredEvent) -> tuple[Grant, list[Grant]]:
    """A grant with the GPUs that were told, and what is over if these are others than before.

    What is told first holds from the beginning: it takes an agent a while to find out.
    """
    job = read_job(event)
    gpus = frozenset() if job is None else frozenset(job.gpus)
    if not gpus or gpus == grant.gpus:
        return grant, []
    if not grant.gpus:
        return grant._replace(gpus=gpus), []
    return Grant(event.node or grant.node, event.time, None, gpus), [grant._replace(end=event.time)]
