"""Which processes have which GPUs open, read off their descriptors in /proc."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from time import CLOCK_BOOTTIME, clock_gettime
from typing import Literal, NamedTuple

from gpulse.sources.owners import user_name
from gpulse.sources.procfs import Roots, read_link, text, try_read
from gpulse.sources.procpid import PidStat, parse_command, parse_pid_stat, parse_pid_status

Depth = Literal["calm", "quick", "listed", "polled", "whole"]
"""calm: nothing was opened since the last scan, so that only who may have device files of its own is read again.
quick: processes whose number of descriptors is another. listed: those with other descriptors.
polled: those too, and every descriptor of whoever may come to a GPU, for where nothing tells of opens.
whole: every descriptor of every process."""
Held = Mapping[int, Mapping[int, frozenset[int]]]
"""By minor number and pid, the descriptors."""

_TURNS = 30
"""Every process is read whole once in so many scans: a descriptor can be closed and opened as something else."""
_POLLED_TURNS = 3
"""Where nothing tells of opens."""
_FIRST_USER = 1000
"""People's processes have this number or a higher one."""
_MANY = 256
"""Of a process with more descriptors than this only the new ones are read, but for its turn."""
_NVIDIA_MAJOR = 195
_DELETED = " (deleted)"
_MOST_COMMAND = 4096
_INIT = "1"
_TICKS = os.sysconf("SC_CLK_TCK")


class _Table:
    """What is remembered of one process's descriptors."""

    __slots__ = ("count", "driven", "files", "here", "names", "path", "read", "refused", "turn")

    def __init__(self, path: str, turn: int) -> None:
        self.path = path
        self.turn = turn
        self.count = -1
        """How many could be listed."""
        self.names: list[str] = []
        self.files: dict[str, int] = {}
        """Minor numbers by the descriptors that have a GPU open."""
        self.driven = False
        """Whether it has anything of the driver's open."""
        self.refused = False
        self.read = 0
        """How often, up to twice: one that was just started may still move into a container."""
        self.here = False
        """Whether it sees the same files as we do, so that its opens are told."""


class Holdings:
    """Reads the descriptors of all processes, again only those that may have changed."""

    def __init__(self, roots: Roots, minors: Iterable[int]) -> None:
        self._proc = roots.proc
        self._dev = os.path.realpath(roots.dev)
        self._mounts = read_link(f"{roots.proc}/self/ns/mnt")
        self._minors = frozenset(minors)
        self._tables: dict[str, _Table] = {}
        self._turn = 0
        self._counted = _size(f"{roots.proc}/self/fd") > 0
        """Whether the kernel tells the number of descriptors as the size of the directory."""
        self.refused = 0
        """Processes that would not be looked into at the last scan."""
        self.newcomers: list[int] = []
        """Those of them that were not there at the scan before."""
        self.sees_init = True
        """Whether the first process of the machine was in sight."""

    def scan(self, depth: Depth, *, turn: bool = True) -> Held:
        """Who has what open now.

        Args:
            depth: How much is read again.
            turn: Read those whose turn it is whole.

        Raises:
            OSError: /proc itself cannot be listed.
        """
        if depth == "quick" and not self._counted:
            depth = "listed"
        calm = depth == "calm"
        if turn:
            self._turn = (self._turn + 1) % _TURNS
        names = [name for name in os.listdir(self._proc) if name.isdecimal()]
        quick, polled = depth == "quick" or (calm and self._counted), depth == "polled"
        turns = _POLLED_TURNS if polled else _TURNS
        due = self._turn % turns if turn else -1
        tables: dict[str, _Table] = {}
        # The youngest first: whoever just opened something, and may soon be gone, most likely is new.
        for name in reversed(names):
            table = self._tables.get(name)
            if table is None:
                table = _Table(f"{self._proc}/{name}/fd", int(name) % _TURNS)
            elif (
                (quick or calm)
                and table.turn != due
                and not table.files
                and table.read > 1
                and ((calm and table.here) or (quick and _size(table.path) == table.count))
            ):
                tables[name] = table
                continue
            whole = table.turn % turns == due or depth == "whole" or bool(table.files)
            if self._read(table, whole=whole, polled=polled):
                tables[name] = table
        hidden = (name for name, table in tables.items() if table.refused)
        self.newcomers = [int(name) for name in hidden if name not in self._tables] if self._tables else []
        self._tables = tables
        # The machine's first process starts others and uses no GPU itself; some sandboxes shut it off.
        self.refused = sum(table.refused for name, table in tables.items() if name != _INIT)
        self.sees_init = _INIT in tables
        return self._held()

    def _held(self) -> Held:
        held: dict[int, dict[int, set[int]]] = {minor: {} for minor in self._minors}
        for name, table in self._tables.items():
            for descriptor, minor in table.files.items():
                if minor in self._minors:
                    held[minor].setdefault(int(name), set()).add(int(descriptor))
        return {
            minor: {pid: frozenset(files) for pid, files in holders.items()}
            for minor, holders in held.items()
        }

    def _read(self, table: _Table, *, whole: bool, polled: bool) -> bool:
        """Bring one process's table up to date; False when the process is gone."""
        try:
            folder = os.open(table.path, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:
            table.refused, table.count = True, _size(table.path)
            table.names, table.files = [], {}
            table.read, table.here = 2, True  # there is nothing to learn of it before its turn
            return True
        except OSError:
            return False
        try:
            names = os.listdir(folder)
            whole = whole or (polled and (table.driven or os.fstat(folder).st_uid >= _FIRST_USER))
            if whole or names != table.names:
                self._follow(folder, names, table, whole=whole)
        except OSError:  # it ended meanwhile
            return False
        finally:
            os.close(folder)
        # A descriptor that is being opened counts for the kernel before it can be listed.
        table.count = len(names)
        table.read = min(2, table.read + 1)
        if whole or table.read > 1:
            table.here = read_link(f"{table.path[:-2]}ns/mnt") == self._mounts
        return True

    def _follow(self, folder: int, names: list[str], table: _Table, *, whole: bool) -> None:
        """Read where the descriptors lead."""
        known = set(table.names) if len(names) > _MANY and not whole else set()
        files = {name: table.files[name] for name in names if name in known and name in table.files}
        table.refused = False
        table.driven = table.driven and bool(known)
        for name in names:
            if name in known:
                continue
            try:
                target = os.readlink(name, dir_fd=folder)
            except PermissionError:
                table.refused = True
                break
            except OSError:  # closed meanwhile
                continue
            if "/nvidia" in target:
                table.driven = True
                if (minor := self._minor(target, name, folder)) is not None:
                    files[name] = minor
        table.names, table.files = names, files

    def _minor(self, target: str, name: str, folder: int) -> int | None:
        """The GPU whose device file this is, None when it is another file."""
        place, _, number = target.removesuffix(_DELETED).rpartition("/nvidia")
        if not (number.isascii() and number.isdecimal()):
            return None
        if place == self._dev:
            return int(number)
        # Below the root of a container or a chroot the file may be anywhere: its numbers say what it is.
        try:
            found = os.stat(name, dir_fd=folder)
        except OSError:
            return None
        is_gpu = stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) == _NVIDIA_MAJOR
        return os.minor(found.st_rdev) if is_gpu else None


def _size(path: str) -> int:
    """The size of a directory, -1 when it is gone, 0 when it is hidden."""
    try:
        return os.stat(path).st_size
    except PermissionError:
        return 0
    except OSError:
        return -1


class Identity(NamedTuple):
    """Who a process is."""

    start_ticks: int
    names: tuple[str, ...]
    user: str | None

    def age_seconds(self) -> float:
        """How long it has been there."""
        return clock_gettime(CLOCK_BOOTTIME) - self.start_ticks / _TICKS


class Identities:
    """Who the processes on the GPUs are; what cannot change is read once."""

    def __init__(self, roots: Roots) -> None:
        self._proc = roots.proc
        self._known: dict[int, tuple[bytes, int | None, Identity]] = {}

    def of(self, pid: int) -> Identity | None:
        """Who it is, None when it is not in our /proc."""
        found = parse_pid_stat(try_read(f"{self._proc}/{pid}/stat") or b"")
        if found is None:
            self._known.pop(pid, None)
            return None
        known = self._known.get(pid)
        if known is not None and known[0] == found.comm and known[2].start_ticks == found.start_ticks:
            return known[2]._replace(user=user_name(known[1]))
        uid, identity = self._read(pid, found)
        if found.state != "D":
            self._known[pid] = (found.comm, uid, identity)
        return identity

    def keep(self, pids: Iterable[int]) -> None:
        """Forget all but these."""
        wanted = set(pids)
        self._known = {pid: known for pid, known in self._known.items() if pid in wanted}

    def _read(self, pid: int, found: PidStat) -> tuple[int | None, Identity]:
        folder = f"{self._proc}/{pid}"
        program = (read_link(f"{folder}/exe") or "").removesuffix(_DELETED)
        # A command line is read out of the process's memory, which hangs with one that waits in the kernel.
        command = b"" if found.state == "D" else (try_read(f"{folder}/cmdline") or b"")[:_MOST_COMMAND]
        first = next(iter(parse_command(command)), "")
        names = (text(found.comm), os.path.basename(program), os.path.basename(first))
        uid = parse_pid_status(try_read(f"{folder}/status") or b"").uid
        return uid, Identity(found.start_ticks, tuple(dict.fromkeys(filter(None, names))), user_name(uid))
