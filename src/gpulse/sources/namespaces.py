"""Which process of this /proc is meant by a number from the driver: a container has numbers of its own."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from gpulse.sources.procfs import Roots, due, list_names, read_link, try_read
from gpulse.sources.procpid import parse_pid_status

_OF_HOSTS = frozenset({"pid:[4026531836]"})
"""Where the driver's numbers are everybody's: the namespace that a machine begins with."""
_PROOF_SECONDS = 3.0
"""A process that ended is still on the driver's list for a moment; what stays there without being here is somebody else's."""
_HELD_SECONDS, _NOT_HELD_SECONDS = 30.0, 1.0


class Numbering:
    """Finds the processes that the driver means.

    On the host its numbers are those of /proc. In a container older drivers give the host's numbers; newer ones give the
    container's own and leave out everybody else (seen with driver 580). None does both: as soon as one number stays on the
    list that is nobody here who holds a GPU, all of them are the host's, and one that fits a process here fits it by chance.
    """

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._own = read_link(f"{roots.proc}/self/ns/pid")
        self._is_native = self._own is None or self._own in _OF_HOSTS
        status = parse_pid_status(try_read(f"{roots.proc}/self/status") or b"")
        self._depth = max(0, len(status.namespace_pids) - 1)
        """How far below the namespace that /proc shows we are."""
        self._inner: dict[int, int] = {}
        self._inner_at: float | None = None
        self._held: dict[int, tuple[float, bool | None]] = {}
        self._strays: dict[int, float] = {}
        self._fitted = False
        self._is_foreign = False

    def believed(self, now: float, numbers: Collection[int], gone: Collection[int] = ()) -> Mapping[int, int]:
        """Those of the driver's numbers that mean processes of this /proc, there or gone, each with its number in /proc.

        Args:
            now: Epoch seconds.
            numbers: What the driver lists.
            gone: Those of them that were believed before and have ended since.
        """
        if self._is_native:
            return {number: number for number in numbers}
        if self._depth and (inner := self._translated(now, numbers)):
            return inner
        self._held = {number: self._look(number, now) for number in numbers if number not in gone}
        strays = [number for number, (_, holds) in self._held.items() if holds is False]
        self._strays = {number: min(self._strays.get(number, now), now) for number in strays}
        if any(now - since >= _PROOF_SECONDS for since in self._strays.values()):
            self._is_foreign = True
        self._fitted = self._fitted or not strays
        if self._is_foreign or (strays and not self._fitted):
            return {}
        return {number: number for number in numbers if number in gone or self._held[number][1]}

    def _look(self, pid: int, now: float) -> tuple[float, bool | None]:
        at, holds = self._held.get(pid, (None, None))
        if at is not None and not due(now, at, _HELD_SECONDS if holds else _NOT_HELD_SECONDS):
            return at, holds
        seen = holds_gpu(self._roots, f"{self._roots.proc}/{pid}")
        return now, holds if seen is None else seen

    def _translated(self, now: float, numbers: Collection[int]) -> Mapping[int, int]:
        """Our namespace's numbers as an outer one's, in whose /proc we look; nothing unless all of them are ours."""
        is_new = not self._inner.keys() >= set(numbers)
        if due(now, self._inner_at, _NOT_HELD_SECONDS if is_new else _HELD_SECONDS):
            self._inner_at, self._inner = now, self._neighbours()
        if not self._inner.keys() >= set(numbers):
            return {}
        return {number: self._inner[number] for number in numbers}

    def _neighbours(self) -> dict[int, int]:
        """By their numbers in our namespace the processes in it that hold a GPU."""
        found: dict[int, int] = {}
        for name in list_names(self._roots.proc):
            folder = f"{self._roots.proc}/{name}"
            if (
                name.isdecimal()
                and read_link(f"{folder}/ns/pid") == self._own
                and holds_gpu(self._roots, folder)
            ):
                pids = parse_pid_status(try_read(f"{folder}/status") or b"").namespace_pids
                if len(pids) > self._depth:
                    found[pids[self._depth]] = int(name)
        return found


def holds_gpu(roots: Roots, folder: str) -> bool | None:
    """Whether a process has a GPU's device file open, None when it does not let itself be asked.

    One that is ending has given all its files back, and may stay on the driver's list for long after that.
    """
    prefix = f"{roots.dev}/nvidia"
    try:
        descriptors = os.listdir(f"{folder}/fd")
    except PermissionError:
        return None
    except OSError:
        return False
    if not descriptors:
        return None
    targets = (read_link(f"{folder}/fd/{descriptor}") for descriptor in descriptors)
    return any(target is not None and target.startswith(prefix) for target in targets)
