"""What the GPUs did over the last minutes: a bounded trail of values for each."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from gpulse.model.frame import Frame, GpuReading

LONGEST = 600
"""Values kept for each GPU: ten minutes at one a second."""


class Moment(NamedTuple):
    """One GPU at one instant, each value a share of its most."""

    activity: float | None
    memory: float | None
    power: float | None


class History:
    """The trails of all GPUs, by UUID."""

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._trails: dict[str, deque[Moment]] = {}

    def add(self, frame: Frame) -> None:
        """Take in one frame; a GPU that left is forgotten."""
        present = {gpu.device.uuid for gpu in frame.gpus}
        for uuid in self._trails.keys() - present:
            del self._trails[uuid]
        for gpu in frame.gpus:
            trail = self._trails.setdefault(gpu.device.uuid, deque(maxlen=self._longest))
            trail.append(moment(gpu))

    def last(self, uuid: str, count: int) -> list[Moment]:
        """The newest moments of one GPU, oldest first."""
        trail = self._trails.get(uuid, ())
        begin = max(0, len(trail) - count)
        return [moment for index, moment in enumerate(trail) if index >= begin]

    def copy(self) -> History:
        """The history as it is now, for a view that stands still."""
        other = History(self._longest)
        other._trails = {uuid: trail.copy() for uuid, trail in self._trails.items()}
        return other


def moment(gpu: GpuReading) -> Moment:
    """What the trail keeps of one reading."""
    return Moment(
        activity(gpu),
        share(gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")),
        share(gpu.get("power_watts"), gpu.get("power_limit_watts")),
    )


def activity(gpu: GpuReading) -> float | None:
    """How busy the GPU is: its multiprocessors where that is known, else the time with a kernel on it."""
    busy = gpu.get("sm_active_ratio")
    return gpu.get("gpu_utilization_ratio") if busy is None else busy


def share(part: float | None, whole: float | None) -> float | None:
    """Part over whole, None when either is unknown."""
    return None if part is None or not whole else part / whole
