"""GPU time of processes, added up."""

from __future__ import annotations

from collections.abc import Iterable

from gpulse.reports.process_index import ProcessInfo, ProcessKey
from gpulse.store.store import Share, StoredGpu

STEP_SECONDS = 60.0
"""Held and idle time is computed in steps of a minute."""

GpuKey = tuple[int, str]
"""Node and UUID of a GPU."""


class GpuTime:
    """The GPU time of some processes, and what the GPUs did in it."""

    def __init__(self) -> None:
        self.seconds = self.known = self.busy = self.idle = 0.0
        self.energy: float | None = None
        self.memory: float | None = None
        self.first, self.last = float("inf"), float("-inf")
        self.gpus: set[GpuKey] = set()
        self.processes: dict[ProcessKey, float] = {}
        """Seconds by process."""
        self._largest: tuple[float, ProcessInfo] | None = None

    def add(self, share: Share, process: ProcessInfo) -> None:
        """Add a process's share of a GPU."""
        self.seconds += share.seconds
        self.known += share.known_seconds
        self.busy += share.busy_seconds
        self.idle += share.idle_seconds
        if share.energy_joules is not None:
            self.energy = (self.energy or 0.0) + share.energy_joules
        if share.memory_max is not None:
            self.memory = max(self.memory or 0.0, share.memory_max)
        if share.first is not None and share.last is not None:
            self.first, self.last = min(self.first, share.first), max(self.last, share.last)
        seconds = self.processes[process.key] = self.processes.get(process.key, 0.0) + share.seconds
        if self._largest is None or seconds > self._largest[0]:
            self._largest = seconds, process
        self.gpus.add((share.node, share.uuid))

    def include(self, other: GpuTime) -> None:
        """Add all that another one has."""
        self.seconds += other.seconds
        self.known += other.known
        self.busy += other.busy
        self.idle += other.idle
        if other.energy is not None:
            self.energy = (self.energy or 0.0) + other.energy
        if other.memory is not None:
            self.memory = max(self.memory or 0.0, other.memory)
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.gpus |= other.gpus
        for key, seconds in other.processes.items():
            self.processes[key] = self.processes.get(key, 0.0) + seconds
        if other._largest is not None:
            key = other._largest[1].key
            if self._largest is None or self.processes[key] > self._largest[0]:
                self._largest = self.processes[key], other._largest[1]

    @property
    def program(self) -> str | None:
        """The program of its largest process."""
        return self._largest[1].program if self._largest else None


def capacity(shares: Iterable[Share], gpus: Iterable[StoredGpu]) -> dict[GpuKey, float]:
    """Return for how many seconds each GPU was there; a GPU that is split counts as its instances alone."""
    split = {(gpu.node, gpu.device.get("parent_uuid")) for gpu in gpus}
    found: dict[GpuKey, float] = {}
    for share in shares:
        key = share.node, share.uuid
        if key not in split:
            found[key] = found.get(key, 0.0) + share.seen_seconds
    return found
