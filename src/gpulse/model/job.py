"""Jobs of a batch scheduler: who was given which GPUs of a node."""

from __future__ import annotations

from typing import Any, NamedTuple

JOB, JOB_END = "job", "job_end"
"""The kinds of events in which jobs travel: one that is new or has changed, and one that is no longer there."""


class Job(NamedTuple):
    """A job that has an allocation on a node, whether or not it runs anything on a GPU."""

    id: str
    """With its scheduler, such as `slurm:4711`: what `Owner.job` of its processes says."""
    user: str | None = None
    uid: int | None = None
    name: str | None = None
    partition: str | None = None
    account: str | None = None
    gpus: tuple[str, ...] = ()
    """The UUIDs of the GPUs and MIG instances that it was given on this node; empty when that is not known."""
    source: str | None = None
    """Where its GPUs are known from: `devices`, `map`, `environment`; None while they are not."""
    array: str | None = None
    """For a task of an array how people name it: the array's number and the task's, such as `4711_3`."""


def from_document(raw: Any) -> Job:
    """A job as its fields were told, by an event or in a recording; what is not one of them is left out.

    Raises:
        ValueError: It is none.
    """
    known = raw if isinstance(raw, dict) else {}
    number, gpus, uid = known.get("id"), known.get("gpus") or (), known.get("uid")
    if not isinstance(number, str) or not isinstance(gpus, list | tuple):
        raise ValueError("it is no job")  # noqa: TRY004  whoever told it was wrong, not the caller
    return Job(
        id=number[:_MOST_TEXT],
        uid=uid if isinstance(uid, int) else None,
        gpus=tuple(str(gpu)[:_MOST_TEXT] for gpu in gpus[:_MOST_GPUS]),
        **{name: value[:_MOST_TEXT] for name in _WORDS if isinstance(value := known.get(name), str)},
    )


_WORDS = ("user", "name", "partition", "account", "source", "array")
_MOST_TEXT = 256
_MOST_GPUS = 1024
