"""The kernel's text files about one process: what they say.

A parser takes the bytes of one file and never raises: it returns what it understood.
"""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

from gpulse.sources.procfs import number, parse_cpu_list, text


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
    """/proc/PID/stat; the name may hold anything, so the fields begin after its last parenthesis."""
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
    """/proc/PID/io."""
    fields = data.split()
    counts = dict(zip(fields[::2], fields[1::2], strict=False)).get
    return PidIo(
        number(counts(b"rchar:")),
        number(counts(b"wchar:")),
        number(counts(b"read_bytes:")),
        number(counts(b"write_bytes:")),
    )


class PidStatus(NamedTuple):
    """What is needed of /proc/PID/status."""

    uid: int | None
    """The real user."""
    cpus_allowed: frozenset[int]
    namespace_pids: tuple[int, ...]
    """The pid in each PID namespace, outermost first."""


def parse_pid_status(data: bytes) -> PidStatus:
    """/proc/PID/status."""
    lines: dict[bytes, bytes] = {}
    for line in data.split(b"\n"):
        name, _, rest = line.partition(b":")
        lines[name] = rest
    uids = lines.get(b"Uid", b"").split()
    pids = [number(pid) for pid in lines.get(b"NSpid", b"").split()]
    return PidStatus(
        uid=number(uids[0]) if uids else None,
        cpus_allowed=parse_cpu_list(lines.get(b"Cpus_allowed_list", b"")),
        namespace_pids=tuple(pid for pid in pids if pid is not None),
    )


class SchedStat(NamedTuple):
    """/proc/PID/schedstat of one thread."""

    run_nanoseconds: int
    wait_nanoseconds: int
    """Time in which it could run but no CPU was free."""


def parse_schedstat(data: bytes) -> SchedStat | None:
    """/proc/PID/schedstat, None from a kernel that does not keep it: that one says `0 0 0`."""
    fields = data.split(None, 3)
    if len(fields) < 3:
        return None
    run, wait, slices = (number(field) for field in fields[:3])
    return SchedStat(run, wait) if run is not None and wait is not None and slices else None


def parse_cgroup(data: bytes) -> dict[str, str]:
    """/proc/PID/cgroup: path by controller, that of the unified hierarchy (version 2) under ``""``."""
    paths: dict[str, str] = {}
    for line in data.split(b"\n"):
        fields = line.split(b":", 2)
        if len(fields) == 3 and fields[2].startswith(b"/"):
            path = text(fields[2])
            paths.update((text(controller), path) for controller in fields[1].split(b","))
    return paths


def parse_command(data: bytes) -> tuple[str, ...]:
    """/proc/PID/cmdline, or any list of strings that end with NUL."""
    return tuple(map(text, data.removesuffix(b"\0").split(b"\0"))) if data else ()
