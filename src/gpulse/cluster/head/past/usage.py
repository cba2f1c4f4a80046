"""Who held GPUs, for how long, and how much of that they did nothing: shares of processes added up."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from gpulse.cluster.api.interface import Document, Grouping
from gpulse.cluster.head.past.people import Key, People, Person
from gpulse.store.base import Share, StoredGpu

STEP_SECONDS = 60.0
"""Held and idle time is looked at in steps of a minute."""


class Row:
    """What one user or job had of the GPUs."""

    def __init__(self, root: Person | None) -> None:
        """Begin with nothing.

        Args:
            root: The process that a job without a scheduler is known by.
        """
        self.root = root
        self.seconds = self.known = self.busy = self.idle = 0.0
        self.energy: float | None = None
        self.memory: float | None = None
        self.first, self.last = float("inf"), float("-inf")
        self._users: dict[str | None, float] = {}
        self._jobs: dict[str | None, float] = {}
        self._processes: dict[Key, float] = {}
        self._largest: tuple[float, Person] | None = None
        self._gpus: set[tuple[int, str]] = set()

    def add(self, share: Share, person: Person) -> None:
        """Take a process's share of a GPU in."""
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
        for told, what in ((self._users, person.user), (self._jobs, person.job)):
            told[what] = told.get(what, 0.0) + share.seconds
        seconds = self._processes[person.key] = self._processes.get(person.key, 0.0) + share.seconds
        if self._largest is None or seconds > self._largest[0]:
            self._largest = seconds, person
        self._gpus.add((share.node, share.uuid))

    def document(self, by: Grouping, names: Mapping[int, str]) -> Document:
        """The row as the API tells it."""
        root = self.root
        is_job = by == "job"
        return {
            "user": _largest(self._users),
            "job": _largest(self._jobs) if is_job else None,
            "program": self._largest[1].program if is_job and self._largest else None,
            "node": names[root.key[0]] if root else None,
            "pid": root.key[1] if root else None,
            "start_time": root.key[2] if root else None,
            "gpu_seconds": round(self.seconds, 3),
            "idle_seconds": round(self.idle, 3) if self.known else None,
            "utilization_mean": round(self.busy / self.known, 6) if self.known else None,
            "memory_bytes_max": None if self.memory is None else int(self.memory),
            "energy_joules": None if self.energy is None else round(self.energy, 3),
            "gpus": len(self._gpus),
            "nodes": sorted({names[node] for node, _ in self._gpus}),
            "processes": len(self._processes),
            "first": self.first if math.isfinite(self.first) else None,
            "last": self.last if math.isfinite(self.last) else None,
        }


def _largest(told: Mapping[str | None, float]) -> str | None:
    """The name with the most time; one that is known before none."""
    return max(told, key=lambda name: (name is not None, told[name]))


def rows(shares: Iterable[Share], people: People, by: Grouping, users: Collection[str]) -> list[Row]:
    """One row a user or a job, the largest first.

    A job is what a scheduler calls one, on all its nodes. A process without one counts with the process it descends from,
    as far up as the store knows processes.
    """
    found: dict[object, Row] = {}
    for share in shares:
        if share.pid is None:
            continue
        person = people.of(share)
        if users and person.user not in users:
            continue
        root = people.root(share) if by == "job" and person.job is None else None
        key = person.user if by == "user" else person.job if root is None else root.key
        if key not in found:
            found[key] = Row(root)
        found[key].add(share, person)
    return sorted(found.values(), key=lambda row: (-row.seconds, row.first))


def capacity(shares: Iterable[Share], gpus: Iterable[StoredGpu]) -> dict[tuple[int, str], float]:
    """For how long each GPU was there that somebody can hold: one that is split into instances is none of them."""
    split = {(gpu.node, gpu.device.get("parent_uuid")) for gpu in gpus}
    found: dict[tuple[int, str], float] = {}
    for share in shares:
        key = share.node, share.uuid
        if key not in split:
            found[key] = found.get(key, 0.0) + share.seen_seconds
    return found
