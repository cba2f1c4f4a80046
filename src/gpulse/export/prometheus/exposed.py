"""What a scrape shows of a node: its newest frame while that is fresh, and who holds its GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpulse.model.device import Device
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric import Scope, Values
from gpulse.model.process import Owner
from gpulse.model.series import MOST_SUBJECTS, is_exposed
from gpulse.model.xid import XidLedger

STALE_SECONDS = 10.0
MOST_KEPT = 20_000
"""Labels that are kept as they are written, from one scrape to the next."""
_FACTS = Device._fields.index("facts")
"""What comes before it in a device is text and numbers that name it."""
_STALE_INTERVALS = 5
_READINGS: dict[Scope, str] = {
    "gpu": "gpus",
    "disk": "disks",
    "filesystem": "filesystems",
    "network": "network",
}
"""The fields of a frame that hold the subjects of a scope."""
_MOST_HOLDERS = 16
"""Of one GPU: each is a series."""
MOST_HOLDERS_A_DAY = 500
"""Of one GPU; who comes later that day is not told."""
_DAY_SECONDS = 86_400


class Exposed(NamedTuple):
    """One node and the newest frame of it, if any came."""

    name: str
    frame: Frame | None
    findings: Sequence[Finding] = ()
    xids: XidLedger | None = None
    host: str = ""
    machine: str = ""
    version: str = ""
    """Of the gpulse that watches it."""
    interval_seconds: float | None = None
    """From one of its frames to the next, where that is a matter of its own."""


class Fresh(NamedTuple):
    """A node whose newest frame may be shown."""

    node: Exposed
    frame: Frame
    held: Mapping[str, Sequence[Holder]]
    """By UUID who holds a GPU now."""


class Holder(NamedTuple):
    """On whose behalf something holds a GPU."""

    job: str | None = None
    user: str | None = None
    pod: str | None = None
    container: str | None = None


class Census:
    """Counts the holders of each GPU in a day: each is a series, and what a process calls its job is its own word."""

    def __init__(self) -> None:
        self._day = -1
        self._seen: dict[tuple[str, str], set[Holder]] = {}

    def admitted(
        self, node: str, held: Mapping[str, Sequence[Holder]], now: float
    ) -> Mapping[str, Sequence[Holder]]:
        """Those holders of a node's GPUs that are among the first of the day."""
        if not held:
            return held
        day = int(now // _DAY_SECONDS)
        if day != self._day:
            self._day = day
            self._seen.clear()
        return {
            uuid: [holder for holder in holders if self._admits((node, uuid), holder)]
            for uuid, holders in held.items()
        }

    def _admits(self, gpu: tuple[str, str], holder: Holder) -> bool:
        seen = self._seen.setdefault(gpu, set())
        if holder not in seen and len(seen) < MOST_HOLDERS_A_DAY:
            seen.add(holder)
        return holder in seen


def known(gpu: GpuReading) -> Values:
    """The readings of a GPU and the facts of its device as one table."""
    return {**gpu.device.facts, **gpu.values}


def naming(device: Device) -> tuple[Any, ...]:
    """What a device is, its facts aside, fit to be looked up; an agent may describe it by anything."""
    fields = device[:_FACTS]
    try:
        hash(fields)
    except TypeError:
        return tuple(value if isinstance(value, bool | int | str | None) else str(value) for value in fields)
    return fields


def finite(values: Values) -> Values:
    """The readings without what is no number; all of them, nearly always."""
    if all(map(math.isfinite, values.values())):
        return values
    return {name: value for name, value in values.items() if math.isfinite(value)}


def stale_after(interval_seconds: float) -> float:
    """How old a frame may be whose values are still served."""
    return max(STALE_SECONDS, _STALE_INTERVALS * interval_seconds)


def fresh(
    nodes: Sequence[Exposed], *, now: float, interval_seconds: float, census: Census | None = None
) -> list[Fresh]:
    """The nodes whose newest frame is young enough to pass for the present."""
    census = census or Census()
    return [
        Fresh(node, frame, census.admitted(node.name, holders(frame), now))
        for node, frame in _young(nodes, now, interval_seconds)
    ]


def _young(nodes: Sequence[Exposed], now: float, interval_seconds: float) -> Iterator[tuple[Exposed, Frame]]:
    for node in nodes:
        limit = stale_after(node.interval_seconds or interval_seconds)
        if node.frame is not None and now - node.frame.time <= limit:
            yield node, bounded(node.frame)


def bounded(frame: Frame) -> Frame:
    """A frame with no more subjects than get series; itself, nearly always."""
    crowded: dict[str, Any] = {
        name: _with_series(scope, getattr(frame, name))[:MOST_SUBJECTS]
        for scope, name in _READINGS.items()
        if len(getattr(frame, name)) > MOST_SUBJECTS
    }
    return frame._replace(**crowded) if crowded else frame


def left_out(frame: Frame) -> dict[Scope, int]:
    """By scope how many subjects of a frame get no series because there are too many."""
    counts = {
        scope: len(_with_series(scope, getattr(frame, name))) - MOST_SUBJECTS
        for scope, name in _READINGS.items()
        if len(getattr(frame, name)) > MOST_SUBJECTS
    }
    return {scope: count for scope, count in counts.items() if count > 0}


def _with_series(scope: Scope, readings: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(reading for reading in readings if is_exposed(scope, reading._asdict()))


def holders(frame: Frame) -> dict[str, list[Holder]]:
    """By UUID who holds a GPU now: jobs, people, pods, never single processes, and no more than a few."""
    owners = {process.pid: process.identity.owner for process in frame.processes}
    found: dict[str, dict[Holder, None]] = {}
    for gpu in frame.gpus:
        for process in gpu.processes or ():
            holder = _holder(owners.get(process.pid))
            if holder is not None:
                found.setdefault(gpu.device.uuid, {})[holder] = None
    for job in frame.jobs:
        for uuid in job.gpus:
            here = found.setdefault(uuid, {})
            if all(holder.job != job.id for holder in here):
                here[Holder(job.id, job.user)] = None
    return {uuid: list(here)[:_MOST_HOLDERS] for uuid, here in found.items()}


def _holder(owner: Owner | None) -> Holder | None:
    if owner is None or not (owner.job or owner.user or owner.pod):
        return None
    # A container that no pod is known of is a thing of a moment, as a process is.
    return Holder(owner.job, owner.user, owner.pod, owner.container if owner.pod else None)
