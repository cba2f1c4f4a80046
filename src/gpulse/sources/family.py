"""Who is whose child, kept up to date without reading every process every time."""

from __future__ import annotations

from collections.abc import Collection

from gpulse.sources.procfs import Roots, due, list_names, read_record
from gpulse.sources.procpid import parse_pid_stat

_PERIOD = 1.0
_NOBODY = 0


class Family:
    """The parents of all processes; a process is read when it is new or when its parent is gone."""

    def __init__(self, roots: Roots) -> None:
        self._proc = roots.proc
        self._scanned_at: float | None = None
        self._parents: dict[int, int] = {}
        self._children: dict[int, set[int]] = {}

    def descendants(self, now: float, pids: Collection[int]) -> list[int]:
        """The children of these processes, their children and so on, without the given ones."""
        if due(now, self._scanned_at, _PERIOD):
            self._scanned_at = now
            self._scan()
        seen = set(pids)
        found: list[int] = []
        queue = sorted(seen)
        while queue:
            children = [child for pid in queue for child in self._children.get(pid, ()) if child not in seen]
            queue = sorted(set(children))
            seen.update(queue)
            found.extend(queue)
        return found

    def note(self, pid: int, parent: int) -> None:
        """Take in what somebody else read about a process."""
        if self._parents.get(pid) != parent:
            self._unlink(pid)
            self._parents[pid] = parent
            self._children.setdefault(parent, set()).add(pid)

    def _scan(self) -> None:
        present = {int(name) for name in list_names(self._proc) if name.isdecimal()}
        orphans: set[int] = set()
        for pid in self._parents.keys() - present:
            self._unlink(pid)
            orphans |= self._children.pop(pid, set())
        for pid in (present - self._parents.keys()) | (orphans & present):
            self._adopt(pid)

    def _adopt(self, pid: int) -> None:
        try:
            stat = parse_pid_stat(read_record(f"{self._proc}/{pid}/stat"))
        except PermissionError:
            # Mounted with hidepid: it will not be readable a second later either.
            self.note(pid, _NOBODY)
            return
        except OSError:
            return
        if stat is not None:
            self.note(pid, stat.parent_pid)

    def _unlink(self, pid: int) -> None:
        parent = self._parents.pop(pid, None)
        if parent is not None:
            siblings = self._children.get(parent, set())
            siblings.discard(pid)
            if not siblings:
                self._children.pop(parent, None)
