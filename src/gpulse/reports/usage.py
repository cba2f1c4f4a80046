"""Who held GPUs, for how long, and how much of that they did nothing: shares of processes added up."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from gpulse.model.harvest import is_harvested
from gpulse.model.natural import natural_key
from gpulse.reports.document import Document
from gpulse.reports.owners import Key, People, Person
from gpulse.store.store import Share, StoredGpu

STEP_SECONDS = 60.0
"""Held and idle time is looked at in steps of a minute."""

Grouping = Literal["user", "job"]


class Tally:
    """Time of GPUs, added up."""

    def __init__(self) -> None:
        self.seconds = self.known = self.busy = self.idle = 0.0
        self.energy: float | None = None
        self.memory: float | None = None
        self.first, self.last = float("inf"), float("-inf")
        self.gpus: set[tuple[int, str]] = set()
        self.processes: dict[Key, float] = {}
        self._largest: tuple[float, Person] | None = None

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
        seconds = self.processes[person.key] = self.processes.get(person.key, 0.0) + share.seconds
        if self._largest is None or seconds > self._largest[0]:
            self._largest = seconds, person
        self.gpus.add((share.node, share.uuid))

    def include(self, other: Tally) -> None:
        """Take all that another has in."""
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
        """That of its largest process."""
        return self._largest[1].program if self._largest else None


class Row:
    """What one user or job had of the GPUs: their own time, and what harvests made of GPUs that were idle."""

    def __init__(self, root: Person | None) -> None:
        """Begin with nothing.

        Args:
            root: The process that a job without a scheduler is known by.
        """
        self.root = root
        self.own, self.harvested = Tally(), Tally()
        self._users: dict[str | None, float] = {}
        self._jobs: dict[str | None, float] = {}

    def add(self, share: Share, person: Person) -> None:
        """Take a process's share of a GPU in."""
        (self.harvested if is_harvested(person.job) else self.own).add(share, person)
        for told, what in ((self._users, person.user), (self._jobs, person.job)):
            told[what] = told.get(what, 0.0) + share.seconds

    @property
    def shown(self) -> Tally:
        """What the figures that cannot be added up are about: who has time of their own is not judged by a harvest's."""
        return self.own if self.own.processes else self.harvested

    def document(self, by: Grouping, names: Mapping[int, str]) -> Document:
        """The row as the API tells it."""
        root, own, shown = self.root, self.own, self.shown
        is_job = by == "job"
        return {
            "user": _largest(self._users),
            "job": _largest(self._jobs) if is_job else None,
            "program": shown.program if is_job else None,
            "node": names[root.key[0]] if root else None,
            "pid": root.key[1] if root else None,
            "start_time": root.key[2] if root else None,
            "gpu_seconds": round(own.seconds, 3),
            "idle_seconds": round(own.idle, 3) if own.known else None,
            "harvested_seconds": round(self.harvested.seconds, 3),
            "utilization_mean": round(shown.busy / shown.known, 6) if shown.known else None,
            "memory_bytes_max": None if shown.memory is None else int(shown.memory),
            "energy_joules": _rounded(own.energy),
            "harvested_energy_joules": _rounded(self.harvested.energy),
            "gpus": len(shown.gpus),
            "nodes": sorted({names[node] for node, _ in shown.gpus}, key=natural_key),
            "processes": len(shown.processes),
            "first": shown.first if math.isfinite(shown.first) else None,
            "last": shown.last if math.isfinite(shown.last) else None,
        }


def _rounded(joules: float | None) -> float | None:
    return None if joules is None else round(joules, 3)


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
        key = person.user if by == "user" else _job(person) if root is None else root.key
        if key not in found:
            found[key] = Row(root)
        found[key].add(share, person)
    return sorted(found.values(), key=lambda row: (-row.own.seconds, -row.harvested.seconds, row.shown.first))


def _job(person: Person) -> object:
    """What makes a job one; two users may each call a program of their harvests the same."""
    return (person.job, person.user) if is_harvested(person.job) else person.job


def totals(rows: Iterable[Row]) -> Document:
    """What all rows have together."""
    rows = list(rows)
    owned = [row.own for row in rows if row.own.processes]
    known = [own for own in owned if own.known]
    return {
        "gpu_seconds": round(sum(own.seconds for own in owned), 3),
        "idle_seconds": round(sum(own.idle for own in known), 3) if known or not owned else None,
        "harvested_seconds": round(sum(row.harvested.seconds for row in rows), 3),
    }


def capacity(shares: Iterable[Share], gpus: Iterable[StoredGpu]) -> dict[tuple[int, str], float]:
    """For how long each GPU was there that somebody can hold: one that is split into instances is none of them."""
    split = {(gpu.node, gpu.device.get("parent_uuid")) for gpu in gpus}
    found: dict[tuple[int, str], float] = {}
    for share in shares:
        key = share.node, share.uuid
        if key not in split:
            found[key] = found.get(key, 0.0) + share.seen_seconds
    return found
