"""Disks and file systems, NFS included, from /proc and /sys."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import NamedTuple

from gpulse.model.frame import DiskReading, FilesystemReading
from gpulse.model.metric_catalog import Values
from gpulse.model.source_health import Health
from gpulse.sources.procfs import (
    KernelFile,
    Mount,
    Roots,
    is_due,
    list_names,
    parse_diskstats,
    parse_mounts,
    read_bytes,
    read_link,
    text,
    try_read,
    unescape,
    unreadable_health,
)
from gpulse.sources.timeout_pool import PoolBatch, TimeoutPool

NFS_TYPES = frozenset({"nfs", "nfs4"})
NFS_COUNTERS = (
    "nfs_reads_total",
    "nfs_read_bytes_total",
    "nfs_read_round_trip_seconds_total",
    "nfs_read_seconds_total",
    "nfs_writes_total",
    "nfs_written_bytes_total",
    "nfs_retransmissions_total",
)

MountKey = tuple[str, bytes]
"""The device and the mount point, byte for byte."""

_READS = (b"READ", b"READ_PLUS")
"""NFS 4.2 may read with READ_PLUS, which skips holes in files."""
_WRITES = (b"WRITE",)
_NFS_LINE = re.compile(rb"\n[\t ]+(bytes|READ|READ_PLUS|WRITE):([^\n]*)")
"""The needed lines of a mount, found without looping over its eighty or so lines in Python."""
_OPERATIONS, _TRANSMISSIONS, _ROUND_TRIP_MS, _EXECUTE_MS = 0, 1, 6, 7
_OPERATION_FIELDS = 8
"""Fields of an operation that every version writes; later versions add an error count."""
_SERVER_READ, _SERVER_WRITTEN = 4, 5
_COUNTER_RANGE = 1 << 64
_SIGN_BIT = 1 << 63
"""Larger times are negative: some kernels let them run below zero and print them unsigned."""


def parse_mountstats(data: bytes) -> dict[MountKey, Values]:
    """/proc/self/mountstats: the counters of each NFS mount under the catalogue's names; never raises."""
    mounts: dict[MountKey, Values] = {}
    for section in (b"\n" + data).split(b"\ndevice "):
        key = _parse_nfs_heading(section.partition(b"\n")[0])
        if key is not None:
            mounts[key] = _build_mount_values(
                {name: _parse_nfs_counters(rest) for name, rest in _NFS_LINE.findall(section)}
            )
    return mounts


def _parse_nfs_heading(heading: bytes) -> MountKey | None:
    """Device and mount point of `srv:/data mounted on /data with fstype nfs4 statvers=1.1`."""
    words = heading.split(b" ", 7)
    if len(words) < 7 or text(words[6]) not in NFS_TYPES:
        return None
    return text(unescape(words[0])), unescape(words[3])


def _parse_nfs_counters(data: bytes) -> tuple[int, ...]:
    try:
        counters = tuple(map(int, data.split()))
    except ValueError:
        return ()
    return counters if all(0 <= counter < _COUNTER_RANGE for counter in counters) else ()


def _build_mount_values(lines: dict[bytes, tuple[int, ...]]) -> Values:
    values: Values = {}
    moved = lines.get(b"bytes", ())
    if len(moved) > _SERVER_WRITTEN:
        values["nfs_read_bytes_total"] = moved[_SERVER_READ]
        values["nfs_written_bytes_total"] = moved[_SERVER_WRITTEN]
    reads, writes = _sum_operations(lines, _READS), _sum_operations(lines, _WRITES)
    if reads:
        values["nfs_reads_total"] = reads[_OPERATIONS]
        if reads[_ROUND_TRIP_MS] < _SIGN_BIT:
            values["nfs_read_round_trip_seconds_total"] = reads[_ROUND_TRIP_MS] / 1000
        if reads[_EXECUTE_MS] < _SIGN_BIT:
            values["nfs_read_seconds_total"] = reads[_EXECUTE_MS] / 1000
    if writes:
        values["nfs_writes_total"] = writes[_OPERATIONS]
    if reads and writes:
        values["nfs_retransmissions_total"] = _count_retransmissions(reads) + _count_retransmissions(writes)
    return values


def _sum_operations(lines: dict[bytes, tuple[int, ...]], names: tuple[bytes, ...]) -> tuple[int, ...]:
    known = [
        lines[name][:_OPERATION_FIELDS] for name in names if len(lines.get(name, ())) >= _OPERATION_FIELDS
    ]
    return tuple(map(sum, zip(*known, strict=True)))


def _count_retransmissions(operation: tuple[int, ...]) -> int:
    # Older kernels count an operation that was killed before it was ever sent.
    return max(0, operation[_TRANSMISSIONS] - operation[_OPERATIONS])


_PSEUDO_TYPES = frozenset(
    "autofs binfmt_misc bpf cgroup cgroup2 configfs debugfs devpts devtmpfs efivarfs fusectl fuse.gvfsd-fuse "  # noqa: SIM905  words read better as words
    "fuse.lxcfs fuse.portal hugetlbfs iso9660 mqueue nsfs proc pstore ramfs rootfs rpc_pipefs securityfs "
    "selinuxfs squashfs sysfs tracefs".split()
)
NETWORK_TYPES = frozenset(
    "9p afs beegfs ceph cifs fuse.ceph fuse.cvmfs2 fuse.gcsfuse fuse.glusterfs fuse.juicefs fuse.s3fs fuse.sshfs "  # noqa: SIM905  see above
    "glusterfs gpfs lustre nfs nfs4 smb3 smbfs virtiofs wekafs".split()
)
_CONTAINER_FILES = frozenset({"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"})
"""Files that container runtimes mount one by one; they show the host's disk, not a place for data."""


def find_data_mounts(mounts: list[Mount]) -> list[Mount]:
    """Return the mounts that hold data, each device once: at `/` if it is mounted there, else at its shortest path."""
    visible = {mount.mount_point: mount for mount in mounts}
    chosen: dict[tuple[str, ...], Mount] = {}
    for mount in sorted(visible.values(), key=_preference):
        if _holds_data(mount):
            chosen.setdefault(_device_key(mount), mount)
    return sorted(chosen.values(), key=lambda mount: mount.mount_point)


def _preference(mount: Mount) -> tuple[bool, int, str]:
    return mount.mount_point in _CONTAINER_FILES, len(mount.mount_point), mount.mount_point


def _device_key(mount: Mount) -> tuple[str, ...]:
    # FUSE programs name their device as they like, often all the same.
    own = mount.type.startswith("fuse.") and ":" not in mount.device
    return (mount.device, mount.mount_point) if own else (mount.device,)


def _holds_data(mount: Mount) -> bool:
    if mount.type == "tmpfs":
        return mount.mount_point == "/dev/shm"  # noqa: S108  the one tmpfs that data loaders fill
    if mount.type == "overlay":
        return mount.mount_point == "/"
    return mount.type not in _PSEUDO_TYPES and not mount.mount_point.startswith("/snap/")


_SECTOR_BYTES = 512
_USAGE_PERIOD_SECONDS = 30.0
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


class _DiskIdentity(NamedTuple):
    name: str
    kind: str | None
    model: str | None
    often_unused: bool


class DiskReader:
    """Reads the counters of whole disks; the kind and model are looked up when the set of disks changes."""

    def __init__(self, roots: Roots = Roots()) -> None:  # noqa: B008  frozen
        self._roots = roots
        self._file = KernelFile(f"{roots.proc}/diskstats")
        self._names: list[str] = []
        self._disks: list[_DiskIdentity] = []

    def read(self, now: float) -> tuple[tuple[DiskReading, ...], list[Health]]:
        """Return a reading of each disk; `now` is in epoch seconds."""
        try:
            stats = parse_diskstats(self._file.read())
        except OSError as error:
            return (), [unreadable_health("disks", self._file.path, error, now, _COUNTERS)]
        if (names := list(stats)) != self._names:
            self._names, self._disks = names, self._scan()
        readings = [
            DiskReading(disk.name, disk.kind, _build_values(counters), disk.model)
            for disk in self._disks
            if (counters := stats.get(disk.name)) and not (disk.often_unused and _is_unused(counters))
        ]
        return tuple(readings), []

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _scan(self) -> list[_DiskIdentity]:
        block = f"{self._roots.sys}/block"
        return [
            _DiskIdentity(
                name,
                find_disk_kind(self._roots, name),
                _read_model(self._roots, name),
                name.startswith(_OFTEN_UNUSED),
            )
            for name in sorted(list_names(block))
            # A path of a multipath NVMe disk is counted in the disk itself.
            if (try_read(f"{block}/{name}/hidden") or b"0").strip() != b"1"
        ]


def _build_values(counters: tuple[int, ...]) -> Values:
    reads, _, read_sectors, read_ms, writes, _, written_sectors, write_ms, flying, busy_ms, queue_ms = (
        counters
    )
    return {
        "reads_total": reads,
        "read_bytes_total": read_sectors * _SECTOR_BYTES,
        "read_seconds_total": read_ms / 1000,
        "writes_total": writes,
        "written_bytes_total": written_sectors * _SECTOR_BYTES,
        "write_seconds_total": write_ms / 1000,
        "requests_in_flight": flying,
        "busy_seconds_total": busy_ms / 1000,
        "queue_seconds_total": queue_ms / 1000,
    }


def _is_unused(counters: tuple[int, ...]) -> bool:
    return not (counters[0] or counters[4])


def _read_model(roots: Roots, name: str) -> str | None:
    return text(try_read(f"{roots.sys}/block/{name}/device/model") or b"").strip() or None


def find_disk_kind(roots: Roots, name: str) -> str | None:
    """Return `nvme`, `ssd`, `hdd`, `virtual` or `memory`; a mapped disk or an array is of the kind of its disks."""
    folder = f"{roots.sys}/block/{name}"
    if name.startswith(("ram", "zram")):
        return "memory"
    if _is_virtual(roots, name):
        return "virtual"
    if name.startswith("nvme"):
        return "nvme"
    if name.startswith(("dm-", "md")) and (parts := list_names(f"{folder}/slaves")):
        kinds = {find_disk_kind(roots, find_whole_disk(roots, part) or part) for part in parts}
        if len(kinds) == 1:
            return kinds.pop()
    rotational = (try_read(f"{folder}/queue/rotational") or b"").strip()
    return {b"0": "ssd", b"1": "hdd"}.get(rotational)


def _is_virtual(roots: Roots, name: str) -> bool:
    if name.startswith(("vd", "xvd")) or _read_model(roots, name) in _VIRTUAL_MODELS:
        return True
    device = (read_link(f"{roots.sys}/block/{name}") or "").lower()
    return "/virtio" in device or "/vmbus" in device


def find_whole_disk(roots: Roots, name: str) -> str | None:
    """Return the disk that a block device is or is a partition of; None when there is no such device."""
    folder = f"{roots.sys}/class/block/{name}"
    target = read_link(folder)
    if target is None:
        return None
    return target.split("/")[-2] if try_read(f"{folder}/partition") is not None else target.split("/")[-1]


class _MountedFilesystem(NamedTuple):
    mount: Mount
    disk: str | None
    kind: str | None


class FilesystemReader:
    """Reads the usage of file systems on a thread of its own, because a dead file server never answers.

    Only the first read waits, and only briefly; later ones take the results of the last batch in the background.
    The counters of NFS mounts come from this machine's kernel and are read each time.
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
        self._pool: TimeoutPool[bytes] = TimeoutPool("statvfs", 1)
        self._run: PoolBatch[bytes, Values] | None = None
        self._asked: list[bytes] = []
        self._started: float | None = None
        self._filesystems: list[_MountedFilesystem] = []
        self._values: dict[bytes, Values] = {}

    def read(self, now: float) -> tuple[tuple[FilesystemReading, ...], list[Health]]:
        """Return a reading of each file system; `now` is in epoch seconds."""
        health: list[Health] = []
        is_first = self._run is None
        if is_first or is_due(now, self._started, _USAGE_PERIOD_SECONDS):
            self._begin(now, health)
        # Before the wait: rates are taken over the time between frames, not between file systems.
        nfs = self._nfs(now, health)
        if self._run is not None:
            if is_first:
                self._pool.finish(self._run, self._deadline / 2)
            self._collect(self._run)
        return tuple(self._reading(item, nfs, health, now) for item in self._filesystems), health

    def close(self) -> None:
        """End the thread, unless it hangs in a call."""
        self._pool.close(self._deadline)

    def _begin(self, now: float, health: list[Health]) -> None:
        path = f"{self._roots.proc}/self/mounts"
        try:
            mounts = find_data_mounts(parse_mounts(read_bytes(path)))
        except OSError as error:
            health.append(unreadable_health("disks", path, error, now))
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
            health.append(unreadable_health("disks", path, error, now, NFS_COUNTERS))
            return {}

    def _start(self, paths: list[bytes]) -> None:
        self._asked = [path for path in paths if not self._is_stuck(path)]
        self._run = self._pool.start(self._asked, self._usage)

    def _collect(self, run: PoolBatch[bytes, Values]) -> None:
        if not run.finished:
            self._pool.sweep(run, self._deadline)
        self._values.update(run.results.copy())
        self._values.update({path: {} for path in run.errors.copy()})
        for path in filter(self._is_stuck, self._asked):
            self._values.pop(path, None)
        if left := self._left(run):
            self._start(left)

    def _left(self, run: PoolBatch[bytes, Values]) -> list[bytes]:
        """Return the mounts queued behind a call that hangs, or that returned after it was abandoned."""
        if not run.finished:
            abandoned = any(map(self._is_stuck, self._asked))
            paths = [path for path in self._asked if path not in run.results] if abandoned else []
        else:
            paths = [item.mount.path for item in self._filesystems if item.mount.path not in self._values]
        return [path for path in paths if not self._is_stuck(path)]

    def _is_stuck(self, path: bytes) -> bool:
        return self._pool.stuck_seconds(path) is not None

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

    def _describe(self, mount: Mount) -> _MountedFilesystem:
        if mount.type == "tmpfs":
            return _MountedFilesystem(mount, None, "memory")
        if mount.type in NETWORK_TYPES:
            return _MountedFilesystem(mount, None, "network")
        disk = find_disk_of_device(self._roots, mount.device)
        return _MountedFilesystem(mount, disk, None if disk is None else find_disk_kind(self._roots, disk))

    def _reading(
        self, filesystem: _MountedFilesystem, nfs: dict[MountKey, Values], health: list[Health], now: float
    ) -> FilesystemReading:
        mount, disk, kind = filesystem
        if (seconds := self._pool.stuck_seconds(mount.path)) is not None:
            health.append(
                Health(
                    source="disks",
                    code="not_answering",
                    detail=f"{mount.device} ({mount.type}) has not answered for {seconds:.0f} s",
                    since=now,
                    subject=mount.mount_point,
                    metrics=("size_bytes", "used_bytes", "available_bytes"),
                    hint="check that the file server is up; programs that access this file system hang too",
                )
            )
        values = {**self._values.get(mount.path, {}), **nfs.get((mount.device, mount.path), {})}
        return FilesystemReading(mount.mount_point, mount.device, mount.type, disk, kind, values)


def find_disk_of_device(roots: Roots, device: str) -> str | None:
    """Return the whole disk under a device such as /dev/sda1 or /dev/mapper/root; None when there is none."""
    if not device.startswith("/dev/"):
        return None
    try:
        number = os.stat(f"{roots.dev}/{device.removeprefix('/dev/')}").st_rdev
    except OSError:
        # Containers see the disk in /sys while their /dev does not have it.
        return find_whole_disk(roots, device.rpartition("/")[2])
    target = read_link(f"{roots.sys}/dev/block/{os.major(number)}:{os.minor(number)}")
    return find_whole_disk(roots, (target or device).rpartition("/")[2])
