"""Jobs of a batch scheduler, and the GPUs of a node allocated to them."""

from __future__ import annotations

from typing import Any, NamedTuple

JOB, JOB_END = "job", "job_end"
"""Kinds of job events: a new or changed job, and the end of a job."""


class Job(NamedTuple):
    """A job with an allocation on a node, whether or not it uses a GPU."""

    id: str
    """With its scheduler, such as `slurm:4711`; the same as `Owner.job` of its processes."""
    user: str | None = None
    uid: int | None = None
    name: str | None = None
    partition: str | None = None
    account: str | None = None
    gpus: tuple[str, ...] = ()
    """UUIDs of its GPUs and MIG instances on this node; empty when unknown."""
    source: str | None = None
    """Where its GPUs are known from: `devices`, `map`, `environment`; None while unknown."""
    array: str | None = None
    """For an array task, the array and task numbers, such as `4711_3`."""


def job_from_document(raw: Any) -> Job:
    """Return the job of an event or a recording; unknown fields are ignored.

    Raises:
        ValueError: The document does not describe a job.
    """
    known = raw if isinstance(raw, dict) else {}
    number, gpus, uid = known.get("id"), known.get("gpus") or (), known.get("uid")
    if not isinstance(number, str) or not isinstance(gpus, list | tuple):
        raise ValueError("the document does not describe a job")  # noqa: TRY004  bad input, not a bad call
    return Job(
        id=number[:_MAX_TEXT_CHARS],
        uid=uid if isinstance(uid, int) else None,
        gpus=tuple(str(gpu)[:_MAX_TEXT_CHARS] for gpu in gpus[:_MAX_GPUS]),
        **{
            name: value[:_MAX_TEXT_CHARS]
            for name in _TEXT_FIELDS
            if isinstance(value := known.get(name), str)
        },
    )


_TEXT_FIELDS = ("user", "name", "partition", "account", "source", "array")
_MAX_TEXT_CHARS = 256
_MAX_GPUS = 1024
