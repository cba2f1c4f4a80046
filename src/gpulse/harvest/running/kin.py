"""Which processes are ours: this one, and whatever descends from it."""

from __future__ import annotations

import os

from gpulse.harvest.running.told import Process
from gpulse.harvest.running.tree import Tree

_TRIES = 3
_MOST_REMEMBERED = 8192


class Kin:
    """Remembers whom it has told apart: a process that is ours stays ours, and no other ever becomes it."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._known: dict[Process, Process | None] = {}
        """Through which child of this process they descend from it; None: they do not."""

    def is_ours(self, pid: int) -> bool:
        """True for this process and for everything whose parents lead to it."""
        me = os.getpid()
        if pid == me:
            return True
        process = self._tree.find(pid)
        if process is None:
            return False
        return (self._known[process] if process in self._known else self._find_out(process, me)) is not None

    def was_below(self, process: Process, child: Process) -> bool:
        """True when this process was seen below that child of ours; it may have lost it since."""
        return self._known.get(process) == child

    def _find_out(self, process: Process, me: int) -> Process | None:
        for _ in range(_TRIES):
            chain = self._tree.lineage(process.pid, me)
            # Parents that are the same twice were the parents in between: no number was used again.
            if chain and chain[0] == process and chain == self._tree.lineage(process.pid, me):
                return self._remember(process, chain[-2] if chain[-1].pid == me else None)
        return None

    def _remember(self, process: Process, child: Process | None) -> Process | None:
        if len(self._known) >= _MOST_REMEMBERED:
            self._known.clear()
        self._known[process] = child
        return child
