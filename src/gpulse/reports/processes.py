"""The processes that held GPUs in a stretch of time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from gpulse.reports.document import Document
from gpulse.reports.owners import Key, People, Person
from gpulse.store.store import Holding

_LATE_SECONDS = 60.0
"""A process that nobody told of has ended when it was not seen for so long."""


class Found(NamedTuple):
    """A process and what it held."""

    person: Person
    held: list[Holding]

    @property
    def first(self) -> float:
        """When it was seen first."""
        seen = min(holding.first for holding in self.held)
        known = self.person.first_seen
        return seen if known is None else known

    def ended(self, end: float) -> float | None:
        """When it ended; None while it lives."""
        if self.person.first_seen is not None:
            return self.person.ended
        last = max(holding.last for holding in self.held)
        return last if last < end - _LATE_SECONDS else None


def gathered(
    held: Iterable[Holding], people: People, users: Collection[str], jobs: Collection[str]
) -> list[Found]:
    """The processes of these users and jobs, or all, newest first."""
    found: dict[Key, Found] = {}
    for holding in held:
        person = people.of(holding)
        if (users and person.user not in users) or (jobs and person.job not in jobs):
            continue
        found.setdefault(person.key, Found(person, [])).held.append(holding)
    return sorted(found.values(), key=lambda one: (-one.first, one.person.key[:2]))


def described(
    found: Found, end: float, names: Mapping[int, str], labels: Mapping[tuple[int, str], str]
) -> Document:
    """A process as the API tells of it."""
    node, pid, start = found.person.key
    return {
        "node": names[node],
        "pid": pid,
        "start_time": start,
        "first_seen": found.first,
        "ended": found.ended(end),
        "user": found.person.user,
        "job": found.person.job,
        "container": found.person.container,
        "pod": found.person.pod,
        "name": found.person.name,
        "command": list(found.person.command),
        "gpus": [
            {
                "gpu": labels.get((node, holding.uuid)),
                "uuid": holding.uuid,
                "from": holding.first,
                "to": holding.last,
                "memory_bytes_mean": holding.memory_mean,
                "memory_bytes_max": holding.memory_max,
                "sm_ratio_mean": holding.sm_mean,
            }
            for holding in sorted(found.held, key=lambda holding: (holding.first, holding.uuid))
        ],
    }
