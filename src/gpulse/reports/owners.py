"""Whose a process is, by its pid and when it started, or when it was seen if nobody knows that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpulse.store.store import Holding, Share, StoredProcess

_DEEPEST = 64
_SLACK_SECONDS = 60.0
"""A process is seen on a GPU a little before or after the book knows it."""

Key = tuple[int, int, float | None]
"""Node, pid and start of a process."""


class Person(NamedTuple):
    """What is told of a process."""

    key: Key
    user: str | None = None
    job: str | None = None
    container: str | None = None
    pod: str | None = None
    name: str | None = None
    command: tuple[str, ...] = ()
    first_seen: float | None = None
    """None when nobody told of it."""
    ended: float | None = None

    @property
    def program(self) -> str | None:
        """Its command line, or else its name."""
        return " ".join(self.command) or self.name


class People:
    """The processes of a stretch of time."""

    def __init__(self, processes: Iterable[StoredProcess]) -> None:
        self._by_pid: dict[tuple[int, int], list[StoredProcess]] = {}
        for process in processes:
            self._by_pid.setdefault((process.node, process.pid), []).append(process)

    def of(self, held: Holding | Share) -> Person:
        """Whose what was held is; of a process that nobody told of only its key is known."""
        return person(self._stored(held), held)

    def root(self, held: Holding | Share) -> Person:
        """The process from which the holder descends, as far up as processes are known."""
        found = self._stored(held)
        if found is None:
            return person(None, held)
        *_, top = self.line(found)
        return person(top, held)

    def line(self, process: StoredProcess) -> Iterator[StoredProcess]:
        """A process and those it descends from, as far up as processes are known."""
        found: StoredProcess | None = process
        for _ in range(_DEEPEST):
            if found is None:
                return
            yield found
            found = self._alive(found.node, found.identity.get("parent_pid"), found)

    def _stored(self, held: Holding | Share) -> StoredProcess | None:
        if held.pid is None:
            return None
        candidates = self._by_pid.get((held.node, held.pid), [])
        for process in candidates:
            if process.start == held.start and held.start is not None:
                return process
        if held.start is not None:
            return None
        near = [process for process in candidates if _meets(process, held.first or 0.0, held.last or 0.0)]
        return near[-1] if near else None

    def _alive(self, node: int, pid: Any, child: StoredProcess) -> StoredProcess | None:
        """The process of that pid when a child of it was seen first."""
        for process in self._by_pid.get((node, pid), []) if isinstance(pid, int) else []:
            if process is not child and _meets(process, child.first_seen, child.first_seen):
                return process
        return None


def _meets(process: StoredProcess, first: float, last: float) -> bool:
    return process.first_seen - _SLACK_SECONDS <= last and (
        process.ended is None or process.ended + _SLACK_SECONDS >= first
    )


def person(process: StoredProcess | None, held: Holding | Share) -> Person:
    """What a stored process says of itself, as far as that makes sense."""
    if process is None:
        return Person((held.node, held.pid or 0, held.start))
    identity, owner = process.identity, owner_of(process)
    command = identity.get("command")
    return Person(
        (process.node, process.pid, process.start),
        user=text(owner.get("user")),
        job=text(owner.get("job")),
        container=text(owner.get("container")),
        pod=text(owner.get("pod")),
        name=text(identity.get("name")),
        command=tuple(str(word) for word in command) if isinstance(command, (list, tuple)) else (),
        first_seen=process.first_seen,
        ended=process.ended,
    )


def owner_of(process: StoredProcess) -> Mapping[str, Any]:
    """On whose behalf a process runs: the fields of `model.process.Owner`, as they were told."""
    owner = process.identity.get("owner")
    return owner if isinstance(owner, Mapping) else {}


def text(value: Any) -> str | None:
    """A text that says something; None for anything else."""
    return value if isinstance(value, str) and value else None
