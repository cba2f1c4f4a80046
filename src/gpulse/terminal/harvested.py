"""GPUs that a harvest uses while nobody else does: who they are, and what to say about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpulse.model.device import ranges
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.harvest import STATE_CODES, is_harvested
from gpulse.model.metric import Value

_WORDS = {
    "people": "used by people",
    "waiting": "waiting",
    "harvested": "harvested",
    "stopping": "being given back",
    "unknown": "not known",
}
_AT_WORK = frozenset({STATE_CODES["harvested"], STATE_CODES["stopping"]})
_BY_CODE: dict[Value, str] = {code: _WORDS[state] for state, code in STATE_CODES.items()}


def state(code: Value) -> str:
    """What a harvest makes of a GPU, in words."""
    return _BY_CODE.get(code, _WORDS["unknown"])


def jobs(frame: Frame) -> dict[int, str]:
    """By pid, the job of each process that belongs to a harvest."""
    found = ((process.pid, process.identity.owner.job) for process in frame.processes)
    return {pid: job for pid, job in found if job is not None and is_harvested(job)}


def is_lent(gpu: GpuReading, harvested: Mapping[int, str], known: Iterable[int]) -> bool:
    """True when only a harvest uses a GPU, so that whoever wants it gets it at once.

    Args:
        gpu: The GPU.
        harvested: The processes of harvests.
        known: The processes of which it is known whose they are.
    """
    pids = {process.pid for process in gpu.processes or ()}
    if (pids - harvested.keys()).intersection(known):
        return False
    return bool(pids & harvested.keys()) or gpu.get("harvest_state") in _AT_WORK


def lent(frame: Frame) -> list[GpuReading]:
    """The GPUs that only a harvest uses."""
    harvested = jobs(frame)
    known = [process.pid for process in frame.processes if process.identity.owner.user is not None]
    return [gpu for gpu in frame.gpus if is_lent(gpu, harvested, known)]


def note(frame: Frame) -> str | None:
    """What whoever looks for a free GPU should know; None when nothing is harvested."""
    labels = [gpu.device.label for gpu in lent(frame)]
    if not labels:
        return None
    is_one = len(labels) == 1
    return (
        f"GPU {ranges(labels)} {'is' if is_one else 'are'} harvested while nobody needs {'it' if is_one else 'them'}: "
        f"start your work there, and {'it is' if is_one else 'they are'} yours at once."
    )
