"""Processes that have GPUs open: read from their descriptors in /proc, identified, and matched with the driver's list."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import CLOCK_BOOTTIME, clock_gettime
from typing import Literal, NamedTuple

from gpulse.harvest.events import GpuHolder, ObservedUse
from gpulse.harvest.watch.gpu_contexts import GpuLoad
from gpulse.model.process import GpuProcess
from gpulse.sources.process_owners import user_name
from gpulse.sources.procfs import (
    PidStat,
    Roots,
    parse_command,
    parse_pid_stat,
    parse_pid_status,
    read_link,
    text,
    try_read,
)

ScanDepth = Literal["calm", "quick", "listed", "polled", "whole"]
"""calm: nothing was opened since the last scan; only processes that may have their own device files are read again.
quick: processes whose number of descriptors is another. listed: those with other descriptors.
polled: those too, and every descriptor of processes that may use a GPU; for machines where opens are not reported.
whole: every descriptor of every process."""
HeldGpus = Mapping[int, Mapping[int, frozenset[int]]]
"""By minor number and pid, the descriptors."""
_SCAN_TURNS = 30
"""Every process is read completely once in this many scans: a descriptor can be closed and reopened as something else."""
_POLLED_TURNS = 3
"""The same where opens are not reported."""
_MIN_USER_ID = 1000
"""People's processes have this number or a higher one."""
_MAX_REREAD_DESCRIPTORS = 256
"""Of a process with more descriptors than this only the new ones are read, but for its turn."""
_NVIDIA_MAJOR = 195
_DELETED = " (deleted)"
_MAX_COMMAND_BYTES = 4096
_INIT_PID = "1"
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
OpenFiles = Mapping[int, frozenset[int]]
"""By pid, the descriptors under which it has the GPU open."""


class _DescriptorTable:
    """Descriptors of one process, as they were last read."""

    __slots__ = ("count", "driven", "files", "here", "names", "path", "read", "refused", "turn")

    def __init__(self, path: str, turn: int) -> None:
        self.path = path
        self.turn = turn
        self.count = -1
        """The number of descriptors that could be listed."""
        self.names: list[str] = []
        self.files: dict[str, int] = {}
        """Minor numbers by the descriptors that have a GPU open."""
        self.driven = False
        """Whether it has anything of the driver's open."""
        self.refused = False
        self.read = 0
        """How often, up to twice: one that was just started may still move into a container."""
        self.here = False
        """Whether it sees the same files as we do, so that its opens are reported."""


class DescriptorScanner:
    """Reads the descriptors of all processes, again only those that may have changed."""

    def __init__(self, roots: Roots, minors: Iterable[int]) -> None:
        self._proc = roots.proc
        self._dev = os.path.realpath(roots.dev)
        self._mounts = read_link(f"{roots.proc}/self/ns/mnt")
        self._minors = frozenset(minors)
        self._tables: dict[str, _DescriptorTable] = {}
        self._turn = 0
        self._counted = _directory_size(f"{roots.proc}/self/fd") > 0
        """Whether the kernel reports the number of descriptors as the size of the directory."""
        self.refused = 0
        """Processes whose descriptors could not be read at the last scan."""
        self.newcomers: list[int] = []
        """Those of them that were not there at the scan before."""
        self.sees_init = True
        """Whether process 1 could be seen."""

    def scan(self, depth: ScanDepth, *, turn: bool = True) -> HeldGpus:
        """Return who has which GPU open now.

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
            self._turn = (self._turn + 1) % _SCAN_TURNS
        names = [name for name in os.listdir(self._proc) if name.isdecimal()]
        quick, polled = depth == "quick" or (calm and self._counted), depth == "polled"
        turns = _POLLED_TURNS if polled else _SCAN_TURNS
        due = self._turn % turns if turn else -1
        tables: dict[str, _DescriptorTable] = {}
        # The youngest first: a process that just opened something, and may soon be gone, is most likely new.
        for name in reversed(names):
            table = self._tables.get(name)
            if table is None:
                table = _DescriptorTable(f"{self._proc}/{name}/fd", int(name) % _SCAN_TURNS)
            elif (
                (quick or calm)
                and table.turn != due
                and not table.files
                and table.read > 1
                and ((calm and table.here) or (quick and _directory_size(table.path) == table.count))
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
        self.refused = sum(table.refused for name, table in tables.items() if name != _INIT_PID)
        self.sees_init = _INIT_PID in tables
        return self._held()

    def _held(self) -> HeldGpus:
        held: dict[int, dict[int, set[int]]] = {minor: {} for minor in self._minors}
        for name, table in self._tables.items():
            for descriptor, minor in table.files.items():
                if minor in self._minors:
                    held[minor].setdefault(int(name), set()).add(int(descriptor))
        return {
            minor: {pid: frozenset(files) for pid, files in holders.items()}
            for minor, holders in held.items()
        }

    def _read(self, table: _DescriptorTable, *, whole: bool, polled: bool) -> bool:
        """Bring one process's table up to date; False when the process is gone."""
        try:
            folder = os.open(table.path, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:
            table.refused, table.count = True, _directory_size(table.path)
            table.names, table.files = [], {}
            table.read, table.here = 2, True  # there is nothing to learn of it before its turn
            return True
        except OSError:
            return False
        try:
            names = os.listdir(folder)
            whole = whole or (polled and (table.driven or os.fstat(folder).st_uid >= _MIN_USER_ID))
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

    def _follow(self, folder: int, names: list[str], table: _DescriptorTable, *, whole: bool) -> None:
        """Read where the descriptors lead."""
        known = set(table.names) if len(names) > _MAX_REREAD_DESCRIPTORS and not whole else set()
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
        """Return the GPU whose device file this is; None when it is another file."""
        place, _, number = target.removesuffix(_DELETED).rpartition("/nvidia")
        if not (number.isascii() and number.isdecimal()):
            return None
        if place == self._dev:
            return int(number)
        # In a container or a chroot the file may be anywhere: its device numbers identify it.
        try:
            found = os.stat(name, dir_fd=folder)
        except OSError:
            return None
        is_gpu = stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) == _NVIDIA_MAJOR
        return os.minor(found.st_rdev) if is_gpu else None


def _directory_size(path: str) -> int:
    """Return the size of a directory, -1 when it is gone, 0 when it is hidden."""
    try:
        return os.stat(path).st_size
    except PermissionError:
        return 0
    except OSError:
        return -1


class HolderIdentity(NamedTuple):
    """Start, names and user of a process."""

    start_ticks: int
    names: tuple[str, ...]
    user: str | None

    def age_seconds(self) -> float:
        """Return how long ago it was started."""
        return clock_gettime(CLOCK_BOOTTIME) - self.start_ticks / _TICKS_PER_SECOND


class HolderIdentities:
    """Names and users of processes on the GPUs; what cannot change is read once."""

    def __init__(self, roots: Roots) -> None:
        self._proc = roots.proc
        self._known: dict[int, tuple[bytes, int | None, HolderIdentity]] = {}

    def of(self, pid: int) -> HolderIdentity | None:
        """Return who it is; None when it is not in our /proc."""
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

    def _read(self, pid: int, found: PidStat) -> tuple[int | None, HolderIdentity]:
        folder = f"{self._proc}/{pid}"
        program = (read_link(f"{folder}/exe") or "").removesuffix(_DELETED)
        # A command line is read out of the process's memory, which hangs with one that waits in the kernel.
        command = b"" if found.state == "D" else (try_read(f"{folder}/cmdline") or b"")[:_MAX_COMMAND_BYTES]
        first = next(iter(parse_command(command)), "")
        names = (text(found.comm), os.path.basename(program), os.path.basename(first))
        uid = parse_pid_status(try_read(f"{folder}/status") or b"").uid
        return uid, HolderIdentity(
            found.start_ticks, tuple(dict.fromkeys(filter(None, names))), user_name(uid)
        )


class UseAnalyzer:
    """Finds out who uses a GPU, from open descriptors and the driver's list of contexts."""

    def __init__(self, identities: HolderIdentities, is_ours: Callable[[int], bool], *, native: bool) -> None:
        """Prepare to analyze.

        Args:
            identities: Who processes are.
            is_ours: Whether a process is of our own making.
            native: The driver's pids are those of our /proc; in a container they are the host's.
        """
        self._identities = identities
        self._is_ours = is_ours
        self._native = native
        self._self = os.getpid()

    def ours(self, pid: int) -> bool:
        """True for this process and everything it started."""
        return pid == self._self or self._is_ours(pid)

    def use(self, files: OpenFiles, load: GpuLoad, *, hidden: bool) -> ObservedUse:
        """Return the use of one GPU, as far as it is known.

        Args:
            files: Who has it open.
            load: What the driver says of it.
            hidden: Some processes cannot be seen.
        """
        listed = {process.pid: process for process in load.processes or ()}
        believed = listed if self._native else {pid: listed[pid] for pid in listed if pid in files}
        strangers = [process for pid, process in listed.items() if pid not in believed]
        own = {pid for pid in (*files, *believed) if self.ours(pid)}
        others = dict.fromkeys(pid for pid in (*files, *believed) if pid not in own)
        silent = [pid for pid in others if pid not in believed]
        room = sum(pid not in believed and pid != self._self for pid in own)
        # Contexts beyond those of our own processes belong to other visible processes, or to hidden ones.
        # Where the driver does not list contexts, every process may have one.
        theirs = load.processes is None or len(strangers) > room
        unseen = strangers if len(strangers) > room + len(silent) else []
        holders = [
            self._holder(pid, files.get(pid, frozenset()), working=pid in believed or theirs)
            for pid in others
        ]
        holders.extend(GpuHolder(process.pid, None, (), None, working=True) for process in unseen)
        unknown = load.trouble
        if unknown is None and load.processes is None and hidden:
            unknown = "neither the driver nor /proc shows all processes that use the GPU"
        return ObservedUse(
            tuple(holder for holder in holders if holder is not None),
            unknown,
            utilization_ratio=load.utilization_ratio,
            memory_bytes=_unexplained_memory(load.memory_bytes, list(listed.values())),
        )

    def _holder(self, pid: int, files: frozenset[int], *, working: bool) -> GpuHolder | None:
        """Return one that is not ours; None when it is gone."""
        identity = self._identities.of(pid)
        if identity is not None:
            return GpuHolder(pid, identity.start_ticks, identity.names, identity.user, working, files)
        return GpuHolder(pid, None, (), None, working, files) if _is_alive(pid) else None


def _unexplained_memory(used: int | None, listed: Sequence[GpuProcess]) -> int | None:
    """Return the memory that none of these processes uses; None when that is unknown."""
    sizes = [process.gpu_memory_bytes for process in listed]
    known = [size for size in sizes if size is not None]
    return None if used is None or len(known) < len(sizes) else max(0, used - sum(known))


def _is_alive(pid: int) -> bool:
    """Return whether there is such a process, even where /proc hides it."""
    try:
        os.close(os.pidfd_open(pid))
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
