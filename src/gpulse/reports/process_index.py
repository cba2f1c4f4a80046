"""Find the stored process that held a GPU, and its ancestors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpulse.store.store import Holding, Share, StoredProcess

_MAX_ANCESTORS = 64
_SLACK_SECONDS = 60.0
"""A process is seen on a GPU a little before or after the store knows it."""

ProcessKey = tuple[int, int, float | None]
"""Node, pid and start time of a process."""


class ProcessInfo(NamedTuple):
    """What is known about a process."""

    key: ProcessKey
    user: str | None = None
    job: str | None = None
    container: str | None = None
    pod: str | None = None
    name: str | None = None
    command: tuple[str, ...] = ()
    first_seen: float | None = None
    """None when the store does not know the process."""
    ended: float | None = None

    @property
    def program(self) -> str | None:
        """Its command line, or else its name."""
        return " ".join(self.command) or self.name


class ProcessIndex:
    """The processes of a time range by node and pid."""

    def __init__(self, processes: Iterable[StoredProcess]) -> None:
        self._by_pid: dict[tuple[int, int], list[StoredProcess]] = {}
        for process in processes:
            self._by_pid.setdefault((process.node, process.pid), []).append(process)

    def find(self, held: Holding | Share) -> ProcessInfo:
        """Return the process that held a GPU; of one that the store does not know, only the key is known."""
        return _info(self._stored(held), held)

    def find_root(self, held: Holding | Share) -> ProcessInfo:
        """Return the topmost known ancestor of the process that held a GPU."""
        found = self._stored(held)
        if found is None:
            return _info(None, held)
        *_, top = self.lineage(found)
        return _info(top, held)

    def lineage(self, process: StoredProcess) -> Iterator[StoredProcess]:
        """Yield a process and its known ancestors, the closest first."""
        found: StoredProcess | None = process
        for _ in range(_MAX_ANCESTORS):
            if found is None:
                return
            yield found
            found = self._parent(found)

    def _stored(self, held: Holding | Share) -> StoredProcess | None:
        """Return the process with the pid and start time, or, where that is unknown, one that lived then."""
        if held.pid is None:
            return None
        candidates = self._by_pid.get((held.node, held.pid), [])
        if held.start is not None:
            return next((process for process in candidates if process.start == held.start), None)
        near = [
            process for process in candidates if _lived_during(process, held.first or 0.0, held.last or 0.0)
        ]
        return near[-1] if near else None

    def _parent(self, child: StoredProcess) -> StoredProcess | None:
        """Return the process that had the parent's pid when the child was first seen."""
        pid = child.identity.get("parent_pid")
        for process in self._by_pid.get((child.node, pid), []) if isinstance(pid, int) else []:
            if process is not child and _lived_during(process, child.first_seen, child.first_seen):
                return process
        return None


def _lived_during(process: StoredProcess, first: float, last: float) -> bool:
    return process.first_seen - _SLACK_SECONDS <= last and (
        process.ended is None or process.ended + _SLACK_SECONDS >= first
    )


def _info(process: StoredProcess | None, held: Holding | Share) -> ProcessInfo:
    if process is None:
        return ProcessInfo((held.node, held.pid or 0, held.start))
    identity, owner = process.identity, owner_of(process)
    command = identity.get("command")
    return ProcessInfo(
        key_of(process),
        user=text(owner.get("user")),
        job=text(owner.get("job")),
        container=text(owner.get("container")),
        pod=text(owner.get("pod")),
        name=text(identity.get("name")),
        command=tuple(str(word) for word in command) if isinstance(command, (list, tuple)) else (),
        first_seen=process.first_seen,
        ended=process.ended,
    )


def key_of(process: StoredProcess) -> ProcessKey:
    """Return what tells a process from others."""
    return process.node, process.pid, process.start


def owner_of(process: StoredProcess) -> Mapping[str, Any]:
    """Return the stored fields of a process's `model.process.Owner`."""
    owner = process.identity.get("owner")
    return owner if isinstance(owner, Mapping) else {}


def text(value: Any) -> str | None:
    """Return a text that is not empty; None for anything else."""
    return value if isinstance(value, str) and value else None
