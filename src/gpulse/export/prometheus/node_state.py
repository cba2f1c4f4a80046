"""State of nodes for a scrape: the newest frame while it is fresh, and the jobs and users on the GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpulse.model.device import Device
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric_catalog import Scope, Values
from gpulse.model.process import Owner
from gpulse.model.series_labels import MAX_EXPOSED_SUBJECTS, is_exposed
from gpulse.model.xid import XidCounts

STALE_SECONDS = 10.0
MAX_CACHED_LABELS = 20_000
"""Label texts that are kept from one scrape to the next."""
_FACTS = Device._fields.index("facts")
"""The fields before it are texts and numbers that identify a device."""
_STALE_INTERVALS = 5
_READINGS: dict[Scope, str] = {
    "gpu": "gpus",
    "disk": "disks",
    "filesystem": "filesystems",
    "network": "network",
}
"""The fields of a frame that hold the subjects of a scope."""
_MAX_HOLDERS = 16
"""Holders of one GPU; each is a series."""
MAX_HOLDERS_PER_DAY = 500
"""Holders of one GPU in a day; later ones get no series."""
_DAY_SECONDS = 86_400


class NodeState(NamedTuple):
    """Node with its newest frame, if there is one."""

    name: str
    frame: Frame | None
    findings: Sequence[Finding] = ()
    xids: XidCounts | None = None
    host: str = ""
    machine: str = ""
    version: str = ""
    """Version of gpulse on the node."""
    interval_seconds: float | None = None
    """Sampling interval, where it differs from that of the others."""


class FreshNode(NamedTuple):
    """Node whose newest frame is fresh."""

    node: NodeState
    frame: Frame
    held: Mapping[str, Sequence[HolderLabels]]
    """Holders of each GPU by its UUID."""


class HolderLabels(NamedTuple):
    """Job, user and pod of the processes on a GPU."""

    job: str | None = None
    user: str | None = None
    pod: str | None = None
    container: str | None = None


class HolderLimit:
    """Limits the holders of each GPU in a day: each is a series, and a process can claim any job."""

    def __init__(self) -> None:
        self._day = -1
        self._seen: dict[tuple[str, str], set[HolderLabels]] = {}

    def admitted(
        self, node: str, held: Mapping[str, Sequence[HolderLabels]], now: float
    ) -> Mapping[str, Sequence[HolderLabels]]:
        """Return the holders of a node's GPUs that are among the first of the day."""
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

    def _admits(self, gpu: tuple[str, str], holder: HolderLabels) -> bool:
        seen = self._seen.setdefault(gpu, set())
        if holder not in seen and len(seen) < MAX_HOLDERS_PER_DAY:
            seen.add(holder)
        return holder in seen


def gpu_values(gpu: GpuReading) -> Values:
    """Return the readings of a GPU and the facts of its device as one table."""
    return {**gpu.device.facts, **gpu.values}


def device_key(device: Device) -> tuple[Any, ...]:
    """Return the fields that identify a device, as a hashable key; an agent may send values of any type."""
    fields = device[:_FACTS]
    try:
        hash(fields)
    except TypeError:
        return tuple(value if isinstance(value, bool | int | str | None) else str(value) for value in fields)
    return fields


def finite_values(values: Values) -> Values:
    """Return the readings that are finite numbers; usually that is all of them."""
    if all(map(math.isfinite, values.values())):
        return values
    return {name: value for name, value in values.items() if math.isfinite(value)}


def stale_seconds(interval_seconds: float) -> float:
    """Return the age in seconds at which a frame becomes stale."""
    return max(STALE_SECONDS, _STALE_INTERVALS * interval_seconds)


def find_fresh_nodes(
    nodes: Sequence[NodeState],
    *,
    now: float,
    interval_seconds: float,
    holder_limit: HolderLimit | None = None,
) -> list[FreshNode]:
    """Return the nodes whose newest frame is not stale."""
    holder_limit = holder_limit or HolderLimit()
    return [
        FreshNode(node, frame, holder_limit.admitted(node.name, find_holders(frame), now))
        for node, frame in _fresh_frames(nodes, now, interval_seconds)
    ]


def _fresh_frames(
    nodes: Sequence[NodeState], now: float, interval_seconds: float
) -> Iterator[tuple[NodeState, Frame]]:
    for node in nodes:
        limit = stale_seconds(node.interval_seconds or interval_seconds)
        if node.frame is not None and now - node.frame.time <= limit:
            yield node, limit_subjects(node.frame)


def limit_subjects(frame: Frame) -> Frame:
    """Return a frame with at most as many subjects as get series; usually that is the frame itself."""
    crowded: dict[str, Any] = {
        name: _with_series(scope, getattr(frame, name))[:MAX_EXPOSED_SUBJECTS]
        for scope, name in _READINGS.items()
        if len(getattr(frame, name)) > MAX_EXPOSED_SUBJECTS
    }
    return frame._replace(**crowded) if crowded else frame


def count_left_out(frame: Frame) -> dict[Scope, int]:
    """Return the number of subjects per scope that get no series because there are too many."""
    counts = {
        scope: len(_with_series(scope, getattr(frame, name))) - MAX_EXPOSED_SUBJECTS
        for scope, name in _READINGS.items()
        if len(getattr(frame, name)) > MAX_EXPOSED_SUBJECTS
    }
    return {scope: count for scope, count in counts.items() if count > 0}


def _with_series(scope: Scope, readings: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(reading for reading in readings if is_exposed(scope, reading._asdict()))


def find_holders(frame: Frame) -> dict[str, list[HolderLabels]]:
    """Return the holders of each GPU by its UUID: at most a few jobs, users and pods, but never single processes."""
    owners = {process.pid: process.identity.owner for process in frame.processes}
    found: dict[str, dict[HolderLabels, None]] = {}
    for gpu in frame.gpus:
        for process in gpu.processes or ():
            holder = _holder(owners.get(process.pid))
            if holder is not None:
                found.setdefault(gpu.device.uuid, {})[holder] = None
    for job in frame.jobs:
        for uuid in job.gpus:
            here = found.setdefault(uuid, {})
            if all(holder.job != job.id for holder in here):
                here[HolderLabels(job.id, job.user)] = None
    return {uuid: list(here)[:_MAX_HOLDERS] for uuid, here in found.items()}


def _holder(owner: Owner | None) -> HolderLabels | None:
    if owner is None or not (owner.job or owner.user or owner.pod):
        return None
    # A container without a pod is as short-lived as a process.
    return HolderLabels(owner.job, owner.user, owner.pod, owner.container if owner.pod else None)
