"""Read and parse the kernel's text files about the machine and about single processes, and track descendants of processes.

A parser takes the bytes of one file and never raises: it returns what it understood.
"""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Collection, Mapping
from functools import cache
from operator import itemgetter
from typing import NamedTuple

from gpulse.model.device import parse_cpu_ranges
from gpulse.model.source_health import Health

_MAX_NUMBER_BYTES = 48
"""Blanks and digits of a number in a file of the kernel."""


class Roots(NamedTuple):
    """Mount points of the kernel's file systems."""

    proc: str = "/proc"
    sys: str = "/sys"
    dev: str = "/dev"
    run: str = "/run"


_MAX_KEPT_FILES = 1024


@cache
def _count_kept_files() -> int:
    """Return how many files of the kernel may stay open: a small part of what this process may open."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_KEPT_FILES if allowed == resource.RLIM_INFINITY else min(_MAX_KEPT_FILES, allowed // 4)


class KernelFile:
    """A file of the kernel that is read again and again; it stays open, because opening it costs as much as reading it.

    Only files of the kernel itself stay open: in a copy of /proc, a file of a process that ended would stay readable.
    """

    __slots__ = ("_descriptor", "path")

    _kept = 0
    """Number of open files of all readers in this process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor: int | None = None

    def read_record(self, size: int = 4096) -> bytes:
        """Return the first `size` bytes of a file that the kernel writes in one go.

        Raises:
            OSError: The file cannot be read.
        """
        descriptor = self._open()
        if descriptor is not None:
            try:
                return os.pread(descriptor, size, 0)
            except OSError:
                self.close()  # its process has ended; another one may have its PID by now
        return read_record(self.path, size)

    def read(self) -> bytes:
        """Return the whole content.

        Raises:
            OSError: The file cannot be read.
        """
        descriptor = self._open()
        if descriptor is None:
            return read_bytes(self.path)
        data = chunk = os.pread(descriptor, 1 << 16, 0)
        while chunk:  # the kernel returns long files a page at a time: a short read is not the end
            chunk = os.pread(descriptor, 1 << 16, len(data))
            data += chunk
        return data

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self._descriptor is not None:
            KernelFile._kept -= 1
            os.close(self._descriptor)
            self._descriptor = None

    __del__ = close

    def _open(self) -> int | None:
        if (
            self._descriptor is None
            and KernelFile._kept < _count_kept_files()
            and self.path.startswith("/proc/")
        ):
            self._descriptor = os.open(self.path, os.O_RDONLY)
            KernelFile._kept += 1
        return self._descriptor


def read_record(path: str, size: int = 4096) -> bytes:
    """Return the first `size` bytes of a file that the kernel writes in one go, such as /proc/PID/stat.

    Raises:
        OSError: The file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def read_bytes(path: str, most: int = 16 << 20) -> bytes:
    """Return the content of a file, up to `most` bytes.

    Raises:
        OSError: The file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        chunks: list[bytes] = []
        # The kernel returns long files a page at a time: a short read is not the end.
        while most > 0 and (chunk := os.read(descriptor, min(most, 1 << 16))):
            chunks.append(chunk)
            most -= len(chunk)
    finally:
        os.close(descriptor)
    return b"".join(chunks)


def try_read(path: str) -> bytes | None:
    """Return a small file's bytes; None when it cannot be read."""
    try:
        return read_record(path)
    except OSError:
        return None


def list_names(path: str) -> list[str]:
    """Return the names in a directory; empty when it cannot be listed."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def read_link(path: str) -> str | None:
    """Return the target of a symbolic link; None when it does not exist or is hidden."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def text(data: bytes) -> str:
    """Decode bytes of the kernel or a program to a string that can be printed and stored."""
    return data.decode("utf-8", "replace")


def number(token: bytes | None) -> int | None:
    """Parse a decimal number; None for anything else."""
    if token is None:
        return None
    try:
        return int(token)
    except ValueError:
        return None


def is_due(now: float, last: float | None, period_seconds: float) -> bool:
    """True when the period is over, or when the clock was set back."""
    return last is None or not 0 <= now - last < period_seconds


def unreadable_health(
    source: str, path: str, error: OSError, now: float, metrics: tuple[str, ...] = ()
) -> Health:
    """Return the health entry for a file that could not be read."""
    denied = isinstance(error, PermissionError)
    return Health(
        source=source,
        code="no_permission" if denied else "unreadable",
        detail=f"{path}: {error.strerror or error}",
        since=now,
        subject=path,
        metrics=metrics,
    )


class KernelStat(NamedTuple):
    """/proc/stat; CPU times are ticks: user nice system idle iowait irq softirq steal."""

    total: tuple[int, ...] | None
    cores: tuple[tuple[int, ...], ...]
    context_switches: int | None
    processes_running: int | None
    processes_blocked: int | None
    boot_time: int | None


def parse_stat(data: bytes) -> KernelStat:
    """Parse /proc/stat."""
    total: tuple[int, ...] | None = None
    cores: list[tuple[int, ...]] = []
    counts: dict[bytes, bytes] = {}
    for line in data.split(b"\n"):
        if line.startswith(b"cpu"):
            ticks = _parse_ticks(line)
            if ticks and line.startswith(b"cpu "):
                total = ticks
            elif ticks:
                cores.append(ticks)
        elif line.startswith((b"ctxt ", b"btime ", b"procs_")):
            name, _, count = line.partition(b" ")
            counts[name] = count
    return KernelStat(
        total=total,
        cores=tuple(cores),
        context_switches=number(counts.get(b"ctxt")),
        processes_running=number(counts.get(b"procs_running")),
        processes_blocked=number(counts.get(b"procs_blocked")),
        boot_time=number(counts.get(b"btime")),
    )


def _parse_ticks(line: bytes) -> tuple[int, ...]:
    ticks = _parse_numbers(line.split()[1:9])
    return ticks + (0,) * (8 - len(ticks)) if len(ticks) >= 4 else ()


def _parse_numbers(tokens: list[bytes]) -> tuple[int, ...]:
    try:
        return tuple(map(int, tokens))
    except ValueError:
        return ()


def parse_loadavg(data: bytes) -> tuple[float, float, float] | None:
    """Parse /proc/loadavg: the averages over 1, 5 and 15 minutes."""
    try:
        one, five, fifteen = map(float, data.split()[:3])
    except ValueError:
        return None
    loads = (one, five, fifteen)
    return loads if all(map(math.isfinite, loads)) else None


def parse_vmstat(data: bytes) -> dict[str, int]:
    """Parse /proc/vmstat, or any other file of `name number` lines, such as those of control groups."""
    values: dict[str, int] = {}
    for line in data.split(b"\n"):
        name, _, count = line.partition(b" ")
        try:
            values[name.decode()] = int(count)
        except ValueError:
            continue
    return values


def find_counts(data: bytes, names: Mapping[bytes, str]) -> dict[str, int]:
    """Return numbers of a file of `name number` lines, by other names, without parsing the other lines.

    Args:
        data: The content of the file.
        names: The name of each number in the result, by what its line starts with.
    """
    values: dict[str, int] = {}
    data = b"\n" + data
    for word, name in names.items():
        begin = data.find(b"\n" + word)
        if begin >= 0:
            fields = data[begin + 1 + len(word) : begin + 1 + len(word) + _MAX_NUMBER_BYTES].split(None, 1)
            if fields and (count := number(fields[0])) is not None:
                values[name] = count
    return values


_PRESSURE = re.compile(rb"^(some|full) [^\n]*?total=(\d{1,20})\b", re.MULTILINE)


def parse_pressure(data: bytes) -> dict[str, int]:
    """Parse /proc/pressure/*: microseconds waited, by `some` and `full`."""
    return {share.decode(): int(total) for share, total in _PRESSURE.findall(data)}


def parse_diskstats(data: bytes) -> dict[str, tuple[int, ...]]:
    """Parse /proc/diskstats: the first eleven counters of each disk and partition.

    Reads, merged, sectors, milliseconds; the same for writes; requests in flight, milliseconds busy,
    milliseconds of all requests added up.
    """
    disks: dict[str, tuple[int, ...]] = {}
    for line in data.split(b"\n"):
        fields = line.split(None, 14)
        counters = _parse_numbers(fields[3:14])
        if len(counters) == 11:
            disks[text(fields[2])] = counters
    return disks


def parse_net_dev(data: bytes) -> dict[str, tuple[int, ...]]:
    """Parse /proc/net/dev: the sixteen counters of each interface, eight received and eight sent."""
    links: dict[str, tuple[int, ...]] = {}
    for line in data.split(b"\n"):
        name, _, rest = line.rpartition(b":")
        counters = _parse_numbers(rest.split(None, 16)[:16])
        if name and len(counters) == 16:
            links[text(name.strip())] = counters
    return links


class Mount(NamedTuple):
    """One line of /proc/self/mounts."""

    device: str
    mount_point: str
    type: str
    options: tuple[str, ...]
    path: bytes
    """The mount point's exact bytes, for opening it."""


_OCTAL = re.compile(rb"\\([0-7]{3})")


def parse_mounts(data: bytes) -> list[Mount]:
    """Parse /proc/self/mounts, in mount order."""
    mounts: list[Mount] = []
    for line in data.split(b"\n"):
        fields = [unescape(field) for field in line.split(b" ")]
        if len(fields) >= 4:
            device, path, kind, options = fields[:4]
            mounts.append(Mount(text(device), text(path), text(kind), tuple(text(options).split(",")), path))
    return mounts


def unescape(field: bytes) -> bytes:
    """Unescape a field of /proc/self/mounts, where the kernel writes blanks and backslashes in octal."""
    return _OCTAL.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), field)


def parse_cpu_list(data: bytes) -> frozenset[int]:
    """Parse a list of CPUs such as `0-3,8`."""
    return parse_cpu_ranges(text(data))


class PidStat(NamedTuple):
    """/proc/PID/stat, or that of one thread; times are ticks."""

    comm: bytes
    state: str
    parent_pid: int
    major_faults: int
    user_ticks: int
    system_ticks: int
    threads: int
    start_ticks: int
    resident_pages: int
    last_cpu: int
    block_ticks: int


_STAT = itemgetter(1, 9, 11, 12, 17, 19, 21, 36, 39)


def parse_pid_stat(data: bytes) -> PidStat | None:
    """Parse /proc/PID/stat; the name can contain anything, so the fields start after the last parenthesis."""
    begin, end = data.find(b"("), data.rfind(b")")
    if begin < 0 or end < begin:
        return None
    fields = data[end + 1 :].split(None, 40)
    try:
        return PidStat(data[begin + 1 : end], text(fields[0]), *map(int, _STAT(fields)))
    except (ValueError, IndexError):
        return None


class PidIo(NamedTuple):
    """/proc/PID/io; `chars` count what went through the page cache, `bytes` what reached a disk."""

    read_chars: int | None
    written_chars: int | None
    read_bytes: int | None
    written_bytes: int | None


def parse_pid_io(data: bytes) -> PidIo:
    """Parse /proc/PID/io."""
    fields = data.split()
    counts = dict(zip(fields[::2], fields[1::2], strict=False)).get
    return PidIo(
        number(counts(b"rchar:")),
        number(counts(b"wchar:")),
        number(counts(b"read_bytes:")),
        number(counts(b"write_bytes:")),
    )


class PidStatus(NamedTuple):
    """The needed fields of /proc/PID/status."""

    uid: int | None
    """The real user."""
    cpus_allowed: frozenset[int]
    namespace_pids: tuple[int, ...]
    """The pid in each PID namespace, outermost first."""


def parse_pid_status(data: bytes) -> PidStatus:
    """Parse /proc/PID/status."""
    uids = _find_line(data, b"Uid:").split()
    pids = [number(pid) for pid in _find_line(data, b"NSpid:").split()]
    return PidStatus(
        uid=number(uids[0]) if uids else None,
        cpus_allowed=parse_cpu_list(_find_line(data, b"Cpus_allowed_list:")),
        namespace_pids=tuple(pid for pid in pids if pid is not None),
    )


def _find_line(data: bytes, name: bytes) -> bytes:
    """Return what follows a name at the start of a line; empty when there is no such line."""
    begin = 0 if data.startswith(name) else data.find(b"\n" + name) + 1
    if not begin and not data.startswith(name):
        return b""
    return data[begin + len(name) :].partition(b"\n")[0]


class SchedStat(NamedTuple):
    """/proc/PID/schedstat of one thread."""

    run_nanoseconds: int
    wait_nanoseconds: int
    """Time in which it could run but no CPU was free."""


def parse_schedstat(data: bytes) -> SchedStat | None:
    """Parse /proc/PID/schedstat; None from a kernel without it, which writes `0 0 0`."""
    fields = data.split(None, 3)
    if len(fields) < 3:
        return None
    run, wait, slices = (number(field) for field in fields[:3])
    return SchedStat(run, wait) if run is not None and wait is not None and slices else None


def parse_cgroup(data: bytes) -> dict[str, str]:
    """Parse /proc/PID/cgroup: path by controller, that of the unified hierarchy (version 2) under ``""``."""
    paths: dict[str, str] = {}
    for line in data.split(b"\n"):
        fields = line.split(b":", 2)
        if len(fields) == 3 and fields[2].startswith(b"/"):
            path = text(fields[2])
            paths.update((text(controller), path) for controller in fields[1].split(b","))
    return paths


def parse_command(data: bytes) -> tuple[str, ...]:
    """Parse /proc/PID/cmdline, or any list of NUL-terminated strings."""
    return tuple(map(text, data.removesuffix(b"\0").split(b"\0"))) if data else ()


_SCAN_SECONDS = 1.0
_LIST_SECONDS = 30.0
_NO_PARENT = 0


class ProcessDescendants:
    """Tree of all processes; a process is read when it is new or when its parent is gone.

    New processes have new PIDs, and the kernel tells the newest one. A list of all takes longer the more there are; it
    is made now and then, to forget those that ended.
    """

    def __init__(self, roots: Roots) -> None:
        self._proc = roots.proc
        self._scanned_at: float | None = None
        self._listed_at: float | None = None
        self._newest = _NewestPid(roots.proc)
        self._last_pid: int | None = None
        """The newest PID at the last scan; None when it is unknown."""
        self._unread: set[int] = set()
        """New PIDs that could not be read: some are of a process that is being created."""
        self._names: set[str] = set()
        """The names in /proc at the last list, and those that were added since."""
        self._parents: dict[int, int] = {}
        self._children: dict[int, set[int]] = {}
        self._found: list[int] = []
        """The last descendants."""

    def descendants(self, now: float, pids: Collection[int]) -> list[int]:
        """Return the children of these processes, their children and so on, without the given ones."""
        if pids and is_due(now, self._scanned_at, _SCAN_SECONDS):
            self._scanned_at = now
            self._scan(now)
        seen = set(pids)
        found: list[int] = []
        queue = sorted(seen)
        while queue:
            children = [child for pid in queue for child in self._children.get(pid, ()) if child not in seen]
            queue = sorted(set(children))
            seen.update(queue)
            found.extend(queue)
        self._found = found
        return found

    def note(self, pid: int, parent: int) -> None:
        """Set the parent of a process that the caller has read."""
        if self._parents.get(pid) != parent:
            self._unlink(pid)
            self._parents[pid] = parent
            self._names.add(str(pid))
            self._children.setdefault(parent, set()).add(pid)

    def _scan(self, now: float) -> None:
        before, newest = self._last_pid, self._newest.read()
        self._last_pid = newest
        if (
            before is None
            or newest is None
            or not 0
            <= newest - before
            <= len(self._names) // 8  # reading more than these costs more than the list
            or is_due(now, self._listed_at, _LIST_SECONDS)
        ):
            self._listed_at = now
            self._list()
            return
        self._remove({pid for pid in self._found if not os.path.exists(f"{self._proc}/{pid}")})
        again, self._unread = self._unread, set()
        for pid in (*again, *range(before + 1, newest + 1)):
            if not self._adopt_new(pid) and pid not in again:
                self._unread.add(pid)

    def _list(self) -> None:
        names = set(list_names(self._proc))
        # Names are compared as they are: most of them are the same as the last time.
        gone = {int(name) for name in self._names - names if name.isdecimal()}
        new = {int(name) for name in names - self._names if name.isdecimal()}
        self._names = names
        self._remove(gone)
        for pid in new:
            self._adopt(pid)

    def _remove(self, gone: set[int]) -> None:
        """Remove processes that ended, and read the new parents of their children."""
        orphans: set[int] = set()
        for pid in gone:
            self._names.discard(str(pid))
            self._unlink(pid)
            orphans |= self._children.pop(pid, set())
        for pid in orphans - gone:
            self._adopt(pid)

    def _adopt(self, pid: int) -> None:
        try:
            stat = parse_pid_stat(read_record(f"{self._proc}/{pid}/stat"))
        except PermissionError:
            # /proc is mounted with hidepid: the process will not be readable a second later either.
            self.note(pid, _NO_PARENT)
            return
        except OSError:
            return
        if stat is not None:
            self.note(pid, stat.parent_pid)

    def _adopt_new(self, pid: int) -> bool:
        """Add a process, unless it is a thread of one, whose number is from the same sequence; False if it cannot be read."""
        status = try_read(f"{self._proc}/{pid}/status")
        if status is None:
            return False
        parent = number(_find_line(status, b"PPid:"))
        if parent is not None and number(_find_line(status, b"Tgid:")) == pid:
            self.note(pid, parent)
        return True

    def _unlink(self, pid: int) -> None:
        parent = self._parents.pop(pid, None)
        if parent is not None:
            siblings = self._children.get(parent, set())
            siblings.discard(pid)
            if not siblings:
                self._children.pop(parent, None)


class _NewestPid:
    """Reads the newest PID of a /proc."""

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._file: KernelFile | None = None
        self._is_checked = False

    def read(self) -> int | None:
        """Return the PID that the kernel assigned last; None if it does not tell."""
        if not self._is_checked:
            self._is_checked = True
            self._file = KernelFile(f"{self._proc}/loadavg") if self._is_ours() else None
        if self._file is None:
            return None
        try:
            return number(self._file.read_record().rpartition(b" ")[2])
        except OSError:
            return None

    def _is_ours(self) -> bool:
        """Whether this is the kernel's own /proc of our PID namespace: the kernel tells the newest PID of the reader's."""
        try:
            is_kernels = os.stat(f"{self._proc}/loadavg").st_dev == os.stat(self._proc).st_dev
        except OSError:
            return False
        return is_kernels and read_link(f"{self._proc}/self") == str(os.getpid())
