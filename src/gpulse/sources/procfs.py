"""The kernel's text files about the whole machine: where they are, how to read them, what they say.

A parser takes the bytes of one file and never raises: it returns what it understood.
"""

from __future__ import annotations

import math
import os
import re
from typing import NamedTuple

from gpulse.model.device import cpus_in
from gpulse.model.health import Health


class Roots(NamedTuple):
    """Where the kernel's file systems are mounted."""

    proc: str = "/proc"
    sys: str = "/sys"
    dev: str = "/dev"
    run: str = "/run"


def read_record(path: str, size: int = 4096) -> bytes:
    """The first `size` bytes of a file that the kernel writes in one go, such as /proc/PID/stat.

    Raises:
        OSError: The file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def read_bytes(path: str, most: int = 16 << 20) -> bytes:
    """All of a file, up to `most` bytes.

    Raises:
        OSError: The file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        chunks: list[bytes] = []
        # The kernel hands out files of many lines a page at a time: a short read is not the end.
        while most > 0 and (chunk := os.read(descriptor, min(most, 1 << 16))):
            chunks.append(chunk)
            most -= len(chunk)
    finally:
        os.close(descriptor)
    return b"".join(chunks)


def try_read(path: str) -> bytes | None:
    """A small file's bytes, None when it cannot be read."""
    try:
        return read_record(path)
    except OSError:
        return None


def list_names(path: str) -> list[str]:
    """The names in a directory, none when it cannot be listed."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def read_link(path: str) -> str | None:
    """Where a symbolic link points, None when there is none or it is hidden."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def text(data: bytes) -> str:
    """What the kernel or a program wrote, as a string that can be printed and stored."""
    return data.decode("utf-8", "replace")


def number(token: bytes | None) -> int | None:
    """A decimal number, None for anything else."""
    if token is None:
        return None
    try:
        return int(token)
    except ValueError:
        return None


def due(now: float, last: float | None, period_seconds: float) -> bool:
    """True when the period is over, or when somebody set the clock back."""
    return last is None or not 0 <= now - last < period_seconds


def unreadable(source: str, path: str, error: OSError, now: float, metrics: tuple[str, ...] = ()) -> Health:
    """The health entry of a file that could not be read."""
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
    """/proc/stat."""
    total: tuple[int, ...] | None = None
    cores: list[tuple[int, ...]] = []
    counts: dict[bytes, bytes] = {}
    for line in data.split(b"\n"):
        if line.startswith(b"cpu"):
            ticks = _ticks(line)
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


def _ticks(line: bytes) -> tuple[int, ...]:
    ticks = _numbers(line.split()[1:9])
    return ticks + (0,) * (8 - len(ticks)) if len(ticks) >= 4 else ()


def _numbers(tokens: list[bytes]) -> tuple[int, ...]:
    try:
        return tuple(map(int, tokens))
    except ValueError:
        return ()


def parse_meminfo(data: bytes) -> dict[str, int]:
    """/proc/meminfo, in bytes."""
    values: dict[str, int] = {}
    for line in data.split(b"\n"):
        name, _, rest = line.partition(b":")
        words = rest.split()
        if words and (amount := number(words[0])) is not None:
            values[text(name)] = amount * 1024 if words[-1] == b"kB" else amount
    return values


def parse_loadavg(data: bytes) -> tuple[float, float, float] | None:
    """/proc/loadavg: the averages over one, five and fifteen minutes."""
    try:
        one, five, fifteen = map(float, data.split()[:3])
    except ValueError:
        return None
    loads = (one, five, fifteen)
    return loads if all(map(math.isfinite, loads)) else None


def parse_vmstat(data: bytes) -> dict[str, int]:
    """/proc/vmstat, and any other file of `name number` lines, such as a control group's."""
    values: dict[str, int] = {}
    for line in data.split(b"\n"):
        name, _, count = line.partition(b" ")
        try:
            values[name.decode()] = int(count)
        except ValueError:
            continue
    return values


_PRESSURE = re.compile(rb"^(some|full) [^\n]*?total=(\d{1,20})\b", re.MULTILINE)


def parse_pressure(data: bytes) -> dict[str, int]:
    """/proc/pressure/*: microseconds waited, by `some` and `full`."""
    return {share.decode(): int(total) for share, total in _PRESSURE.findall(data)}


def parse_diskstats(data: bytes) -> dict[str, tuple[int, ...]]:
    """/proc/diskstats: the first eleven counters of each disk and partition.

    Reads, merged, sectors, milliseconds; the same for writes; requests in flight, milliseconds busy,
    milliseconds of all requests added up.
    """
    disks: dict[str, tuple[int, ...]] = {}
    for line in data.split(b"\n"):
        fields = line.split(None, 14)
        counters = _numbers(fields[3:14])
        if len(counters) == 11:
            disks[text(fields[2])] = counters
    return disks


def parse_net_dev(data: bytes) -> dict[str, tuple[int, ...]]:
    """/proc/net/dev: the sixteen counters of each interface, eight received and eight sent."""
    links: dict[str, tuple[int, ...]] = {}
    for line in data.split(b"\n"):
        name, _, rest = line.rpartition(b":")
        counters = _numbers(rest.split(None, 16)[:16])
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
    """The mount point byte for byte, to open it by."""


_OCTAL = re.compile(rb"\\([0-7]{3})")


def parse_mounts(data: bytes) -> list[Mount]:
    """/proc/self/mounts, in the order in which they were mounted."""
    mounts: list[Mount] = []
    for line in data.split(b"\n"):
        fields = [unescape(field) for field in line.split(b" ")]
        if len(fields) >= 4:
            device, path, kind, options = fields[:4]
            mounts.append(Mount(text(device), text(path), text(kind), tuple(text(options).split(",")), path))
    return mounts


def unescape(field: bytes) -> bytes:
    """A name in a list of mounts as it is: the kernel writes blanks and backslashes in octal."""
    return _OCTAL.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), field)


def parse_cpu_list(data: bytes) -> frozenset[int]:
    """A list of CPUs such as `0-3,8`."""
    return cpus_in(text(data))
