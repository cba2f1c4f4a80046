"""Process tree of this machine: descendants of processes, and signals that cannot hit a process with a reused PID.

PIDs are reused. A process that was once below us stays ours for good, so it is enough to prove that once, and to
know it by its PID and start time from then on. This module needs little of the standard library, because every
supervisor loads it.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from gpulse.harvest.events import ProcessId

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_SYS_IOPRIO_SET = {
    "x86_64": 251,
    "aarch64": 30,
    "riscv64": 30,
    "loongarch64": 30,
    "ppc64le": 273,
    "s390x": 282,
}
_IOPRIO_WHO_PROCESS = 1


class ProcessStat(NamedTuple):
    """The fields of /proc/PID/stat that are needed."""

    state: str
    parent: int
    group: int
    session: int
    start_ticks: int

    @property
    def ended(self) -> bool:
        """True when it has ended and its parent has not collected its status yet."""
        return self.state in "ZX"


class MachineProcessTree:
    """The processes of this machine."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._lists_children: bool | None = None

    def look(self, pid: int) -> ProcessStat | None:
        """Return one process; None when there is none with that PID or it is hidden."""
        data = _read_file(f"{self._proc}/{pid}/stat")
        return None if data is None else _parse_stat(data)

    def find(self, pid: int) -> ProcessId | None:
        """Return the process that has this PID now."""
        stat = self.look(pid)
        return None if stat is None else ProcessId(pid, stat.start_ticks)

    def myself(self) -> ProcessId:
        """Return this process."""
        pid = os.getpid()
        return self.find(pid) or ProcessId(pid, 0)

    def is_there(self, process: ProcessId) -> bool:
        """True while this very process has not ended."""
        stat = self.look(process.pid)
        return stat is not None and stat.start_ticks == process.start_ticks and not stat.ended

    def everyone(self) -> dict[int, ProcessStat]:
        """Return all processes that can be seen, by PID."""
        numbers = (int(name) for name in _list_names(self._proc) if name.isdecimal())
        return {pid: stat for pid in numbers if (stat := self.look(pid)) is not None}

    def children(self, pid: int) -> list[int]:
        """Return the PIDs of a process's children; some may be missing while children come and go."""
        if self._lists_children is None:
            self._lists_children = os.path.exists(f"{self._proc}/{os.getpid()}/task/{os.getpid()}/children")
        if not self._lists_children:
            return [child for child, stat in self.everyone().items() if stat.parent == pid]
        folder = f"{self._proc}/{pid}/task"
        lists = (_read_file(f"{folder}/{thread}/children") for thread in _list_names(folder))
        return [int(number) for listed in lists if listed for number in listed.split()]

    def below(self, top: ProcessId) -> dict[ProcessId, ProcessStat]:
        """Return the descendants of a process, each of them proven."""
        found: dict[ProcessId, ProcessStat] = {}
        queue = [top]
        for parent in queue:
            for child, stat in self._children_of(parent):
                if child not in found:
                    found[child] = stat
                    queue.append(child)
        return found

    def _children_of(self, parent: ProcessId) -> Iterator[tuple[ProcessId, ProcessStat]]:
        numbers = self.children(parent.pid)
        stats = [(pid, stat) for pid in numbers if (stat := self.look(pid)) is not None]
        # The parent that is still there was there all the time: what named it as its parent meant it.
        if self.find(parent.pid) == parent:
            for pid, stat in stats:
                if stat.parent == parent.pid:
                    yield ProcessId(pid, stat.start_ticks), stat

    def kill_family(self, pid: int) -> None:
        """Kill one of our children and its group; if that is not permitted, all its descendants.

        Orphaned grandchildren become our children, so the tree is killed level by level without walking it.
        """
        if not kill_child(pid) and (child := self.find(pid)) is not None:
            for process in self.below(child):
                self.send(process, signal.SIGKILL)

    def lineage(self, pid: int, top: int) -> tuple[ProcessId, ...]:
        """Return a process, its parent, and so on up to `top`, or as far as can be seen."""
        chain: list[ProcessId] = []
        seen: set[int] = set()
        while pid not in seen and (stat := self.look(pid)) is not None:
            seen.add(pid)
            chain.append(ProcessId(pid, stat.start_ticks))
            if pid == top:
                break
            pid = stat.parent
        return tuple(chain)

    def send(self, process: ProcessId, number: int) -> bool:
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
    """Kill one of our children whose exit status was not collected yet, and its process group; False if not permitted.

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


def _parse_stat(data: bytes) -> ProcessStat | None:
    """Parse /proc/PID/stat; the fields start after the last parenthesis, because a name can contain anything."""
    fields = data[data.rfind(b")") + 1 :].split(None, 20)
    try:
        return ProcessStat(
            fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19])
        )
    except (ValueError, IndexError):
        return None


def _read_file(path: str) -> bytes | None:
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


def _list_names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def set_subreaper(yes: bool) -> None:
    """Set whether descendants whose parents end become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(yes))


def is_subreaper() -> bool:
    """True when descendants whose parents end become children of this process."""
    answer = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer))
    return bool(answer.value)


def set_name(name: str) -> None:
    """Set the name of this process in lists of processes; the kernel keeps fifteen bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def set_io_priority(value: int) -> None:
    """Set the disk priority of this process and its children.

    Raises:
        OSError: The kernel refuses, or it is not known how to ask it on this kind of machine.
    """
    machine = os.uname().machine
    call = _SYS_IOPRIO_SET.get(machine)
    if call is None:
        raise OSError(f"not supported on {machine}")
    library = ctypes.CDLL(None, use_errno=True)
    _check(library.syscall(ctypes.c_long(call), _IOPRIO_WHO_PROCESS, 0, value))


def _prctl(option: int, argument: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    nothing = ctypes.c_ulong(0)
    _check(library.prctl(option, argument, nothing, nothing, nothing))


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
