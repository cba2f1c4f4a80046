"""Disks and the file systems on them, from /proc and /sys."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from gpulse.model.frame import DiskReading, FilesystemReading
from gpulse.model.health import Health
from gpulse.model.metric import Values
from gpulse.sources.lanes import Lanes, Run
from gpulse.sources.mounts import NETWORK_TYPES, real_mounts
from gpulse.sources.nfs import NFS_COUNTERS, NFS_TYPES, MountKey, parse_mountstats
from gpulse.sources.procfs import (
    Mount,
    Roots,
    due,
    list_names,
    parse_diskstats,
    parse_mounts,
    read_bytes,
    read_link,
    text,
    try_read,
    unreadable,
)

_SECTOR = 512
_USAGE_PERIOD = 30.0
_COUNTERS = (
    "reads_total",
    "read_bytes_total",
    "read_seconds_total",
    "writes_total",
    "written_bytes_total",
    "write_seconds_total",
    "requests_in_flight",
    "busy_seconds_total",
    "queue_seconds_total",
)
_OFTEN_UNUSED = ("loop", "ram", "zram", "nbd", "sr", "fd")
_VIRTUAL_MODELS = frozenset(
    {"QEMU HARDDISK", "VBOX HARDDISK", "Virtual disk", "Virtual Disk", "PersistentDisk"}
)


class _Disk(NamedTuple):
    name: str
    kind: str | None
    model: str | None
    often_unused: bool


class DiskReader:
    """Reads the counters of whole disks; what a disk is gets looked up when the set of disks changes."""

    def __init__(self, roots: Roots = Roots()) -> None:  # noqa: B008  frozen
        self._roots = roots
        self._path = f"{roots.proc}/diskstats"
        self._names: list[str] = []
        self._disks: list[_Disk] = []

    def read(self, now: float) -> tuple[tuple[DiskReading, ...], list[Health]]:
        """One reading of each disk; `now` is in epoch seconds."""
        try:
            stats = parse_diskstats(read_bytes(self._path))
        except OSError as error:
            return (), [unreadable("disks", self._path, error, now, _COUNTERS)]
        if (names := list(stats)) != self._names:
            self._names, self._disks = names, self._scan()
        readings = [
            DiskReading(disk.name, disk.kind, _values(counters), disk.model)
            for disk in self._disks
            if (counters := stats.get(disk.name)) and not (disk.often_unused and _is_unused(counters))
        ]
        return tuple(readings), []

    def _scan(self) -> list[_Disk]:
        block = f"{self._roots.sys}/block"
        return [
            _Disk(
                name, disk_kind(self._roots, name), _model(self._roots, name), name.startswith(_OFTEN_UNUSED)
            )
            for name in sorted(list_names(block))
            # A path of a multipath NVMe disk is counted in the disk itself.
            if (try_read(f"{block}/{name}/hidden") or b"0").strip() != b"1"
        ]


def _values(counters: tuple[int, ...]) -> Values:
    reads, _, read_sectors, read_ms, writes, _, written_sectors, write_ms, flying, busy_ms, queue_ms = (
        counters
    )
    return {
        "reads_total": reads,
        "read_bytes_total": read_sectors * _SECTOR,
        "read_seconds_total": read_ms / 1000,
        "writes_total": writes,
        "written_bytes_total": written_sectors * _SECTOR,
        "write_seconds_total": write_ms / 1000,
        "requests_in_flight": flying,
        "busy_seconds_total": busy_ms / 1000,
        "queue_seconds_total": queue_ms / 1000,
    }


def _is_unused(counters: tuple[int, ...]) -> bool:
    return not (counters[0] or counters[4])


def _model(roots: Roots, name: str) -> str | None:
    return text(try_read(f"{roots.sys}/block/{name}/device/model") or b"").strip() or None


def disk_kind(roots: Roots, name: str) -> str | None:
    """`nvme`, `ssd`, `hdd`, `virtual` or `memory`; a mapped disk or an array is what lies under it."""
    folder = f"{roots.sys}/block/{name}"
    if name.startswith(("ram", "zram")):
        return "memory"
    if _is_virtual(roots, name):
        return "virtual"
    if name.startswith("nvme"):
        return "nvme"
    if name.startswith(("dm-", "md")) and (parts := list_names(f"{folder}/slaves")):
        kinds = {disk_kind(roots, whole_disk(roots, part) or part) for part in parts}
        if len(kinds) == 1:
            return kinds.pop()
    rotational = (try_read(f"{folder}/queue/rotational") or b"").strip()
    return {b"0": "ssd", b"1": "hdd"}.get(rotational)


def _is_virtual(roots: Roots, name: str) -> bool:
    if name.startswith(("vd", "xvd")) or _model(roots, name) in _VIRTUAL_MODELS:
        return True
    device = (read_link(f"{roots.sys}/block/{name}") or "").lower()
    return "/virtio" in device or "/vmbus" in device


def whole_disk(roots: Roots, name: str) -> str | None:
    """The disk that a block device is or is a partition of, None when there is no such device."""
    folder = f"{roots.sys}/class/block/{name}"
    target = read_link(folder)
    if target is None:
        return None
    return target.split("/")[-2] if try_read(f"{folder}/partition") is not None else target.split("/")[-1]


class _Filesystem(NamedTuple):
    mount: Mount
    disk: str | None
    kind: str | None


class FilesystemReader:
    """Reads how full file systems are, on a thread of its own: a dead file server never answers.

    Only the first read waits, and only a little; later ones take what a round in the background brought.
    What NFS mounts ask of their servers is counted by this machine's kernel, and read anew each time.
    """

    def __init__(
        self,
        roots: Roots = Roots(),  # noqa: B008  frozen
        *,
        deadline_seconds: float = 0.5,
        statvfs: Callable[[bytes], os.statvfs_result] = os.statvfs,
    ) -> None:
        self._roots = roots
        self._statvfs = statvfs
        self._deadline = deadline_seconds
        self._lanes: Lanes[bytes] = Lanes("statvfs", 1)
        self._run: Run[bytes, Values] | None = None
        self._asked: list[bytes] = []
        self._started: float | None = None
        self._filesystems: list[_Filesystem] = []
        self._values: dict[bytes, Values] = {}

    def read(self, now: float) -> tuple[tuple[FilesystemReading, ...], list[Health]]:
        """One reading of each file system; `now` is in epoch seconds."""
        health: list[Health] = []
        is_first = self._run is None
        if is_first or due(now, self._started, _USAGE_PERIOD):
            self._begin(now, health)
        # Before the wait: rates are taken over the time between frames, not between file systems.
        nfs = self._nfs(now, health)
        if self._run is not None:
            if is_first:
                self._lanes.finish(self._run, self._deadline / 2)
            self._collect(self._run)
        return tuple(self._reading(item, nfs, health, now) for item in self._filesystems), health

    def close(self) -> None:
        """End the thread, unless it sits in a call that does not come back."""
        self._lanes.close(self._deadline)

    def _begin(self, now: float, health: list[Health]) -> None:
        path = f"{self._roots.proc}/self/mounts"
        try:
            mounts = real_mounts(parse_mounts(read_bytes(path)))
        except OSError as error:
            health.append(unreadable("disks", path, error, now))
            return
        self._started = now
        self._filesystems = [self._describe(mount) for mount in mounts]
        paths = [mount.path for mount in mounts]
        self._values = {path: self._values[path] for path in paths if path in self._values}
        self._start(paths)

    def _nfs(self, now: float, health: list[Health]) -> dict[MountKey, Values]:
        if not any(item.mount.type in NFS_TYPES for item in self._filesystems):
            return {}
        path = f"{self._roots.proc}/self/mountstats"
        try:
            return parse_mountstats(read_bytes(path))
        except FileNotFoundError:  # sandboxes that make their own /proc do without
            return {}
        except OSError as error:
            health.append(unreadable("disks", path, error, now, NFS_COUNTERS))
            return {}

    def _start(self, paths: list[bytes]) -> None:
        self._asked = [path for path in paths if not self._is_stuck(path)]
        self._run = self._lanes.start(self._asked, self._usage)

    def _collect(self, run: Run[bytes, Values]) -> None:
        if not run.finished:
            self._lanes.sweep(run, self._deadline)
        self._values.update(run.results.copy())
        self._values.update({path: {} for path in run.errors.copy()})
        for path in filter(self._is_stuck, self._asked):
            self._values.pop(path, None)
        if left := self._left(run):
            self._start(left)

    def _left(self, run: Run[bytes, Values]) -> list[bytes]:
        """What waited behind a call that does not come back, or came back after it was given up."""
        if not run.finished:
            abandoned = any(map(self._is_stuck, self._asked))
            paths = [path for path in self._asked if path not in run.results] if abandoned else []
        else:
            paths = [item.mount.path for item in self._filesystems if item.mount.path not in self._values]
        return [path for path in paths if not self._is_stuck(path)]

    def _is_stuck(self, path: bytes) -> bool:
        return self._lanes.stuck_seconds(path) is not None

    def _usage(self, path: bytes) -> Values:
        try:
            usage = self._statvfs(path)
        except OSError:
            return {}
        if not usage.f_blocks:
            return {}
        return {
            "size_bytes": usage.f_blocks * usage.f_frsize,
            "used_bytes": (usage.f_blocks - usage.f_bfree) * usage.f_frsize,
            "available_bytes": usage.f_bavail * usage.f_frsize,
        }

    def _describe(self, mount: Mount) -> _Filesystem:
        if mount.type == "tmpfs":
            return _Filesystem(mount, None, "memory")
        if mount.type in NETWORK_TYPES:
            return _Filesystem(mount, None, "network")
        disk = disk_of(self._roots, mount.device)
        return _Filesystem(mount, disk, None if disk is None else disk_kind(self._roots, disk))

    def _reading(
        self, filesystem: _Filesystem, nfs: dict[MountKey, Values], health: list[Health], now: float
    ) -> FilesystemReading:
        mount, disk, kind = filesystem
        if (seconds := self._lanes.stuck_seconds(mount.path)) is not None:
            health.append(
                Health(
                    source="disks",
                    code="not_answering",
                    detail=f"{mount.device} ({mount.type}) has not answered for {seconds:.0f} s",
                    since=now,
                    subject=mount.mount_point,
                    metrics=("size_bytes", "used_bytes", "available_bytes"),
                    hint="see whether its server is up; programs that touch it hang as well",
                )
            )
        values = {**self._values.get(mount.path, {}), **nfs.get((mount.device, mount.path), {})}
        return FilesystemReading(mount.mount_point, mount.device, mount.type, disk, kind, values)


def disk_of(roots: Roots, device: str) -> str | None:
    """The whole disk under a device such as /dev/sda1 or /dev/mapper/root, None when there is none."""
    if not device.startswith("/dev/"):
        return None
    try:
        number = os.stat(f"{roots.dev}/{device.removeprefix('/dev/')}").st_rdev
    except OSError:
        # Containers see the disk in /sys while their /dev does not have it.
        return whole_disk(roots, device.rpartition("/")[2])
    target = read_link(f"{roots.sys}/dev/block/{os.major(number)}:{os.minor(number)}")
    return whole_disk(roots, (target or device).rpartition("/")[2])
