"""Who descends from whom, and signals that reach exactly the process that was meant.

A number says little: it is used again. A process that was once below us stays ours for good, so that it is
enough to prove that once, and to know it by its number and its start from then on. It needs the standard
library alone and little of it, because keepers load it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from gpulse.harvest.running.told import Process


class Stat(NamedTuple):
    """What is needed of /proc/PID/stat."""

    state: str
    parent: int
    group: int
    session: int
    start_ticks: int

    @property
    def ended(self) -> bool:
        """It does nothing any more; its parent has not asked for its status yet."""
        return self.state in "ZX"


class Tree:
    """The processes of this machine."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._lists_children: bool | None = None

    def look(self, pid: int) -> Stat | None:
        """One process, None when there is none of that number or it is hidden."""
        data = _read(f"{self._proc}/{pid}/stat")
        return None if data is None else _parse(data)

    def find(self, pid: int) -> Process | None:
        """The process that has this number now."""
        stat = self.look(pid)
        return None if stat is None else Process(pid, stat.start_ticks)

    def myself(self) -> Process:
        """This process."""
        pid = os.getpid()
        return self.find(pid) or Process(pid, 0)

    def is_there(self, process: Process) -> bool:
        """True while this very process has not ended."""
        stat = self.look(process.pid)
        return stat is not None and stat.start_ticks == process.start_ticks and not stat.ended

    def everyone(self) -> dict[int, Stat]:
        """All processes that can be seen."""
        numbers = (int(name) for name in _names(self._proc) if name.isdecimal())
        return {pid: stat for pid in numbers if (stat := self.look(pid)) is not None}

    def children(self, pid: int) -> list[int]:
        """The numbers of a process's children, as far as they can be told at a moment when all of them move."""
        if self._lists_children is None:
            self._lists_children = os.path.exists(f"{self._proc}/{os.getpid()}/task/{os.getpid()}/children")
        if not self._lists_children:
            return [child for child, stat in self.everyone().items() if stat.parent == pid]
        folder = f"{self._proc}/{pid}/task"
        lists = (_read(f"{folder}/{thread}/children") for thread in _names(folder))
        return [int(number) for listed in lists if listed for number in listed.split()]

    def below(self, top: Process) -> dict[Process, Stat]:
        """The descendants of a process, each of them proven."""
        found: dict[Process, Stat] = {}
        queue = [top]
        for parent in queue:
            for child, stat in self._children_of(parent):
                if child not in found:
                    found[child] = stat
                    queue.append(child)
        return found

    def _children_of(self, parent: Process) -> Iterator[tuple[Process, Stat]]:
        numbers = self.children(parent.pid)
        stats = [(pid, stat) for pid in numbers if (stat := self.look(pid)) is not None]
        # The parent that is still there was there all the time: what named it as its parent meant it.
        if self.find(parent.pid) == parent:
            for pid, stat in stats:
                if stat.parent == parent.pid:
                    yield Process(pid, stat.start_ticks), stat

    def kill_family(self, pid: int) -> None:
        """Kill a child of ours and its group; where we may not, whatever is below it.

        What a child leaves behind comes to us: nothing is walked that can be killed level by level.
        """
        if not kill_child(pid) and (child := self.find(pid)) is not None:
            for process in self.below(child):
                self.send(process, signal.SIGKILL)

    def lineage(self, pid: int, top: int) -> tuple[Process, ...]:
        """A process, its parent, and so on up to `top`, or as far as can be seen."""
        chain: list[Process] = []
        seen: set[int] = set()
        while pid not in seen and (stat := self.look(pid)) is not None:
            seen.add(pid)
            chain.append(Process(pid, stat.start_ticks))
            if pid == top:
                break
            pid = stat.parent
        return tuple(chain)

    def send(self, process: Process, number: int) -> bool:
        """Send a signal to exactly this process; False when it has ended or may not be sent one.

        The descriptor is opened before the start is compared: from then on it means one process for good.
        """
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:
            return False
        try:
            if self.find(process.pid) != process:
                return False
            signal.pidfd_send_signal(descriptor, number)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True


def kill_child(pid: int) -> bool:
    """Kill a child of ours that nobody has waited for yet, and its process group; False when we may not.

    Its number is its own until we wait for it, and so is that of its group; a group outside our own session
    was made below us, and so was everybody in it. The kernel kills a group at one stroke, which nothing that
    forks can outrun.
    """
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    with suppress(ProcessLookupError, PermissionError):
        group = os.getpgid(pid)
        if os.getsid(pid) != os.getsid(0):
            os.killpg(group, signal.SIGKILL)
    return True


def _parse(data: bytes) -> Stat | None:
    """The fields begin after the last parenthesis: a name may hold anything."""
    fields = data[data.rfind(b")") + 1 :].split(None, 20)
    try:
        return Stat(fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))
    except (ValueError, IndexError):
        return None


def _read(path: str) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        data = chunk = os.read(descriptor, 1 << 16)
        while chunk:
            chunk = os.read(descriptor, 1 << 16)
            data += chunk
        return data
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
