from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulse.model.frame import DiskReading, FilesystemReading
from gpulse.model.metric_catalog import Values, metric_names
from gpulse.sources.disks import DiskReader, FilesystemReader, find_data_mounts, find_disk_of_device
from gpulse.sources.procfs import parse_mounts
from tests.unit.trees import grow

BUSY = "10 1 20 3000 40 2 50 6000 7 8000 9000"
IDLE = "0 0 0 0 0 0 0 0 0 0 0"


def block(*names: str) -> dict[str, str]:
    """Whole disks as /sys shows them."""
    return {f"sys/block/{name}/size": "1\n" for name in names}


def diskstats(**disks: str) -> dict[str, str]:
    """/proc/diskstats of these disks; underscores stand for dashes."""
    return {
        "proc/diskstats": "".join(
            f" 8 0 {name.replace('_', '-')} {counters}\n" for name, counters in disks.items()
        )
    }


def test_a_disk_is_read_in_base_units(tmp_path: Path) -> None:
    """Sectors become bytes and milliseconds seconds, under the catalogue's names."""

    model = {"sys/block/sda/device/model": "SAMSUNG MZ7L3   \n", "sys/block/sda/queue/rotational": "0\n"}
    roots = grow(tmp_path, {**diskstats(sda=BUSY, sda1=BUSY), **block("sda"), **model})

    readings, health = DiskReader(roots).read(1.0)

    assert [] == health
    assert (
        DiskReading(
            "sda",
            "ssd",
            {
                "reads_total": 10,
                "read_bytes_total": 20 * 512,
                "read_seconds_total": 3.0,
                "writes_total": 40,
                "written_bytes_total": 50 * 512,
                "write_seconds_total": 6.0,
                "requests_in_flight": 7,
                "busy_seconds_total": 8.0,
                "queue_seconds_total": 9.0,
            },
            "SAMSUNG MZ7L3",
        ),
    ) == readings
    assert set(metric_names("disk", derived=False)) == readings[0].values.keys()


def test_only_whole_disks_that_are_used_are_shown(tmp_path: Path) -> None:
    """No partitions, no idle loop devices, no paths of a multipath disk; mapped disks and arrays stay."""

    used = diskstats(
        sda=IDLE, sda1=BUSY, loop0=IDLE, loop1=BUSY, zram0=IDLE, dm_0=IDLE, md0=IDLE, nvme0c0n1=BUSY
    )
    folders = block("sda", "loop0", "loop1", "zram0", "dm-0", "md0", "nvme0c0n1")
    roots = grow(tmp_path, {**used, **folders, "sys/block/nvme0c0n1/hidden": "1\n"})

    assert ["dm-0", "loop1", "md0", "sda"] == [disk.name for disk in DiskReader(roots).read(1.0)[0]]


@pytest.mark.parametrize(
    ("name", "files", "target", "kind"),
    [
        ("nvme0n1", {"queue/rotational": "0\n"}, None, "nvme"),
        ("sda", {"queue/rotational": "0\n"}, None, "ssd"),
        ("sda", {"queue/rotational": "1\n"}, None, "hdd"),
        ("sda", {}, None, None),
        ("vda", {"queue/rotational": "1\n"}, None, "virtual"),
        ("xvda", {"queue/rotational": "0\n"}, None, "virtual"),
        ("sda", {"queue/rotational": "1\n", "device/model": "QEMU HARDDISK\n"}, None, "virtual"),
        ("sda", {"queue/rotational": "1\n"}, "../devices/pci0000:00/virtio1/host2/block/sda", "virtual"),
        ("sda", {"queue/rotational": "1\n"}, "../devices/LNXSYSTM:00/VMBUS:01/host0/block/sda", "virtual"),
        ("zram0", {"queue/rotational": "0\n"}, None, "memory"),
    ],
)
def test_the_kind_of_a_disk(
    tmp_path: Path, name: str, files: dict[str, str], target: str | None, kind: str | None
) -> None:
    """A virtual disk is named as such, since its word on rotation means nothing."""

    place = f"sys/block/{name}" if target is None else f"sys/{target.removeprefix('../')}"
    tree = {f"{place}/{file}": content for file, content in {"size": "1\n", **files}.items()}
    roots = grow(
        tmp_path,
        {**diskstats(**{name: BUSY}), **tree},
        {} if target is None else {f"sys/block/{name}": target},
    )

    assert [kind] == [disk.kind for disk in DiskReader(roots).read(1.0)[0]]


def test_a_mapped_disk_is_what_lies_under_it(tmp_path: Path) -> None:
    """A volume on an NVMe partition is NVMe, though the kernel only says that it does not rotate."""

    files = {
        "sys/block/dm-0/slaves/nvme0n1p2/size": "1\n",
        "sys/block/dm-0/queue/rotational": "0\n",
        "sys/devices/pci/block/nvme0n1/nvme0n1p2/partition": "2\n",
    }
    links = {
        "sys/class/block/nvme0n1p2": "../../devices/pci/block/nvme0n1/nvme0n1p2",
        "sys/block/nvme0n1": "../devices/pci/block/nvme0n1",
    }
    roots = grow(tmp_path, {**diskstats(dm_0=BUSY), **files}, links)

    assert ["nvme"] == [disk.kind for disk in DiskReader(roots).read(1.0)[0]]


def test_a_new_disk_is_looked_at_and_a_known_one_is_not(tmp_path: Path) -> None:
    """Facts are remembered until the set of disks changes."""

    model = "sys/block/sda/device/model"
    reader = DiskReader(grow(tmp_path, {**diskstats(sda=BUSY), **block("sda"), model: "OLD\n"}))
    reader.read(1.0)
    grow(tmp_path, {model: "NEW\n"})
    remembered = [disk.model for disk in reader.read(2.0)[0]]
    grow(tmp_path, {**diskstats(sda=BUSY, sdb=BUSY), **block("sdb")})

    assert ["OLD"] == remembered
    assert [("sda", "NEW"), ("sdb", None)] == [(disk.name, disk.model) for disk in reader.read(3.0)[0]]


def test_missing_disk_counters_are_reported(tmp_path: Path) -> None:
    """Without /proc/diskstats there are no disks and one entry says so."""

    readings, health = DiskReader(grow(tmp_path, {})).read(1.0)

    assert () == readings
    assert [("disks", "unreadable")] == [(entry.source, entry.code) for entry in health]


@pytest.mark.parametrize(
    ("lines", "mount_points"),
    [
        (
            ["proc /proc proc rw", "/dev/sda1 / ext4 rw", "tmpfs /run tmpfs rw", "tmpfs /dev/shm tmpfs rw"],
            ["/", "/dev/shm"],
        ),
        (
            [
                "/dev/sda1 / ext4 rw",
                "/dev/sda1 /var/lib/kubelet ext4 rw",
                "/dev/loop3 /snap/core/1 squashfs ro",
            ],
            ["/"],
        ),
        (
            ["overlay / overlay rw", "/dev/sda1 /etc/hosts ext4 rw", "/dev/sda1 /data/long ext4 rw"],
            ["/", "/data/long"],
        ),
        (["/dev/sda1 / ext4 rw", "overlay /var/lib/docker/overlay2/x/merged overlay rw"], ["/"]),
        (
            ["srv:/a /mnt/a nfs4 rw", "srv:/b /mnt/b nfs4 rw", "srv:/a /mnt/also nfs4 rw"],
            ["/mnt/a", "/mnt/b"],
        ),
        (["s3fs /mnt/a fuse.s3fs rw", "s3fs /mnt/b fuse.s3fs rw"], ["/mnt/a", "/mnt/b"]),
        (["/dev/sda1 /mnt ext4 rw", "srv:/x /mnt nfs rw"], ["/mnt"]),
    ],
)
def test_real_file_systems_are_kept_once(lines: list[str], mount_points: list[str]) -> None:
    """Kernel file systems, images and further mounts of the same device are left out."""

    mounts = parse_mounts("".join(f"{line} 0 0\n" for line in lines).encode())

    assert mount_points == [mount.mount_point for mount in find_data_mounts(mounts)]


def test_a_partition_belongs_to_its_disk_and_a_mapped_disk_to_itself(tmp_path: Path) -> None:
    """The whole disk is found through /sys even where /dev has no such file."""

    roots = grow(
        tmp_path,
        {"sys/devices/pci/block/sda/sda1/partition": "1\n", "sys/devices/virtual/block/dm-0/size": "1\n"},
        {
            "sys/class/block/sda1": "../../devices/pci/block/sda/sda1",
            "sys/class/block/dm-0": "../../devices/virtual/block/dm-0",
        },
    )

    assert ["sda", "dm-0", None, None] == [
        find_disk_of_device(roots, device)
        for device in ("/dev/sda1", "/dev/dm-0", "/dev/gone", "srv:/export")
    ]


class Server:
    """Answers for file systems, except for those that it was told to keep waiting."""

    def __init__(self) -> None:
        self.dead: set[bytes] = set()
        self.back = threading.Event()
        self.asked: list[bytes] = []

    def statvfs(self, path: bytes) -> os.statvfs_result:
        """Answer as a file system of 1000 blocks of 4096 bytes would."""
        self.asked.append(path)
        if path in self.dead:
            self.back.wait(600)
        return os.statvfs_result((4096, 4096, 1000, 400, 300, 0, 0, 0, 0, 255))


FULL: Values = {"size_bytes": 4_096_000, "used_bytes": 600 * 4096, "available_bytes": 300 * 4096}
MOUNTS = "srv:/a /a nfs4 rw 0 0\nsrv:/b /b nfs4 rw 0 0\nsrv:/c /c nfs4 rw 0 0\n"


@pytest.fixture
def server() -> Iterator[Server]:
    """A file server, which answers everything in the end so that no thread is left behind."""
    server = Server()
    yield server
    server.back.set()


def values(readings: tuple[FilesystemReading, ...]) -> dict[str, bool]:
    """Which file systems have values."""
    return {reading.mount_point: bool(reading.values) for reading in readings}


def test_the_first_read_brings_values(tmp_path: Path, server: Server) -> None:
    """File systems that answer are there at once, under the catalogue's names."""

    roots = grow(tmp_path, {"proc/self/mounts": "tmpfs /dev/shm tmpfs rw 0 0\nsrv:/a /a nfs4 rw 0 0\n"})
    reader = FilesystemReader(roots, statvfs=server.statvfs)

    readings, health = reader.read(1.0)
    reader.close()

    assert [] == health
    assert (
        FilesystemReading("/a", "srv:/a", "nfs4", None, "network", FULL),
        FilesystemReading("/dev/shm", "tmpfs", "tmpfs", None, "memory", FULL),
    ) == readings
    assert {name for name in metric_names("filesystem") if not name.startswith("nfs_")} == FULL.keys()


def test_a_dead_server_costs_only_its_own_values(tmp_path: Path, server: Server) -> None:
    """The others answer though they waited behind it, and the health entry names the mount point."""

    server.dead = {b"/a"}
    reader = FilesystemReader(
        grow(tmp_path, {"proc/self/mounts": MOUNTS}), statvfs=server.statvfs, deadline_seconds=1.0
    )

    readings, health = reader.read(1.0)
    again, still = reader.read(2.0)
    server.back.set()
    reader.close()

    assert {"/a": False, "/b": True, "/c": True} == values(readings) == values(again)
    assert [("disks", "not_answering", "/a")] == [
        (entry.source, entry.code, entry.subject) for entry in health
    ]
    assert ["/a"] == [entry.subject for entry in still]
    assert 1 == server.asked.count(b"/a")


def test_a_server_that_comes_back_is_asked_again(tmp_path: Path, server: Server) -> None:
    """Once the old call has returned, the file system gets its values without waiting half a minute."""

    server.dead = {b"/a"}
    reader = FilesystemReader(
        grow(tmp_path, {"proc/self/mounts": MOUNTS}), statvfs=server.statvfs, deadline_seconds=1.0
    )
    reader.read(1.0)
    server.dead = set()
    server.back.set()

    readings, health = reader.read(1.1)
    for tenth in range(2, 100_000):
        if values(readings)["/a"]:
            break
        readings, health = reader.read(1.0 + tenth / 100_000)
    reader.close()

    assert {"/a": True, "/b": True, "/c": True} == values(readings)
    assert [] == health


def test_a_server_that_dies_later_is_noticed_without_waiting_for_it(tmp_path: Path, server: Server) -> None:
    """A later round that hangs gives up the one mount, and what waited behind it is asked again."""

    reader = FilesystemReader(
        grow(tmp_path, {"proc/self/mounts": MOUNTS}), statvfs=server.statvfs, deadline_seconds=1.0
    )
    reader.read(1.0)
    server.dead = {b"/a"}
    readings, health = reader.read(31.0)
    before = values(readings)
    deadline = time.monotonic() + 60
    while not (health and server.asked.count(b"/c") >= 2):
        assert time.monotonic() < deadline, "it was not noticed"
        time.sleep(0.001)  # else those who need the interpreter for their answer would not get it
        readings, health = reader.read(31.0)
    server.back.set()
    reader.close()

    assert {"/a": True, "/b": True, "/c": True} == before
    assert {"/a": False, "/b": True, "/c": True} == values(readings)
    assert ["/a"] == [entry.subject for entry in health]


def test_file_systems_are_asked_twice_a_minute(tmp_path: Path, server: Server) -> None:
    """Between two rounds the last answer is repeated, and mounts that appeared are found by the next round."""

    reader = FilesystemReader(
        grow(tmp_path, {"proc/self/mounts": "srv:/a /a nfs4 rw 0 0\n"}), statvfs=server.statvfs
    )
    reader.read(1.0)
    grow(tmp_path, {"proc/self/mounts": MOUNTS})
    early = [reading.mount_point for reading in reader.read(30.9)[0]]
    late = [reading.mount_point for reading in reader.read(31.0)[0]]
    reader.close()

    assert ["/a"] == early
    assert ["/a", "/b", "/c"] == late


def test_a_file_system_that_refuses_has_no_values(tmp_path: Path) -> None:
    """A mount point that may not be asked, or that is not there, is shown without values and asked once."""

    mounts = f"srv:/a {tmp_path}/missing nfs4 rw 0 0\nsrv:/b /b\\000c nfs4 rw 0 0\n"
    reader = FilesystemReader(grow(tmp_path, {"proc/self/mounts": mounts}))

    readings, health = reader.read(1.0)
    reader.close()

    assert [{}, {}] == [reading.values for reading in readings]
    assert [] == health


def test_missing_mounts_are_reported_until_they_are_there(tmp_path: Path) -> None:
    """Without a list of mounts there are no file systems, and each read tries again."""

    reader = FilesystemReader(grow(tmp_path, {}))
    first, second = reader.read(1.0), reader.read(2.0)
    reader.close()

    assert [((), 1), ((), 1)] == [(readings, len(health)) for readings, health in (first, second)]


def test_this_machine_has_a_root_file_system() -> None:
    """On a real kernel `/` is there and has a size."""

    reader = FilesystemReader()
    readings, _ = reader.read(1.0)
    reader.close()

    assert [True] == [reading.values["size_bytes"] > 0 for reading in readings if reading.mount_point == "/"]
