from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.model.counter_rates import compute_rates
from gpulse.model.device import Node
from gpulse.model.frame import FilesystemReading, Frame
from gpulse.model.metric_catalog import metric_names
from gpulse.sources.disks import NFS_COUNTERS, FilesystemReader, parse_mountstats
from tests.unit.trees import grow

MODERN = b"""\
device proc mounted on /proc with fstype proc
no device mounted on /old with fstype rootfs
device filer:/data mounted on /data\\040sets with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=1048576,wsize=1048576,proto=tcp,timeo=600
\tage:\t86400
\timpl_id:\tname='filer 9
(built at home)',domain='',date='0,0'
\tcaps:\tcaps=0x3ffbffff,wtmult=512,dtsize=1048576,bsize=0,namlen=255
\tnfsv4:\tbm0=0xfdffbfff,bm1=0x40f9be3e,bm2=0x60803,acl=0x3,sessions,pnfs=not configured
\tsec:\tflavor=1,pseudoflavor=1
\tevents:\t7 7 0 7 7 7 7 7 7 0 7 7 0 7 7 0 0 7 0 0 7 0 0 0 0 0 0
\tbytes:\t1000 2000 30 40 5000000 600000 1220 146
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\ttcp 700 1 2 0 3 940 940 0 1900 0 16 5 60
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
\t        READ: 900 903 2 144000 5100000 18446744073709551610 12386 12407 0
\t       WRITE: 20 21 0 3000 2000 1 500 700 1
\t   READ_PLUS: 2 2 0 300 4000 0 14 93 0

device filer:/home mounted on /home with fstype nfs statvers=1.0
\tbytes:\t1 2 3 4 50 60
\tRPC iostats version: 1.0  p/v: 100003/3 (nfs)
\tper-op statistics
\t        READ: 10 10 0 1 2 3 40 50
\t       WRITE: 7 5 0 1 2 3 4 5
device /dev/sda1 mounted on / with fstype ext4
"""
DATA = {
    "nfs_reads_total": 902,
    "nfs_read_bytes_total": 5_000_000,
    "nfs_read_round_trip_seconds_total": 12.4,
    "nfs_read_seconds_total": 12.5,
    "nfs_writes_total": 20,
    "nfs_written_bytes_total": 600_000,
    "nfs_retransmissions_total": 4,
}
HOME = {
    "nfs_reads_total": 10,
    "nfs_read_bytes_total": 50,
    "nfs_read_round_trip_seconds_total": 0.04,
    "nfs_read_seconds_total": 0.05,
    "nfs_writes_total": 7,
    "nfs_written_bytes_total": 60,
    "nfs_retransmissions_total": 0,
}


def stats(reads: int, milliseconds: int, server: str = "filer:/data") -> str:
    """/proc/self/mountstats of one mount at /data that read so often, for so long."""
    return (
        f"device {server} mounted on /data with fstype nfs4 statvers=1.1\n"
        f"\tbytes:\t0 0 0 0 {reads * 1000} 0 0 0\n"
        "\tper-op statistics\n"
        f"\t        READ: {reads} {reads} 0 0 0 0 {milliseconds // 2} {milliseconds} 0\n"
        "\t       WRITE: 0 0 0 0 0 0 0 0 0\n"
    )


def mounted(root: Path, mountstats: str) -> FilesystemReader:
    """A machine with /data from a file server."""
    files = {"proc/self/mounts": "filer:/data /data nfs4 rw 0 0\n", "proc/self/mountstats": mountstats}
    return FilesystemReader(grow(root, files), statvfs=lambda _: os.statvfs("/"))


def test_both_versions_are_read_in_base_units() -> None:
    """Milliseconds become seconds, both ways of reading are one, and other file systems are left out."""

    assert {("filer:/data", b"/data sets"): DATA, ("filer:/home", b"/home"): HOME} == parse_mountstats(MODERN)


def test_all_names_are_in_the_catalogue() -> None:
    """All that it knows of NFS is read."""

    wanted = {name for name in metric_names("filesystem", derived=False) if name.startswith("nfs_")}

    assert wanted == DATA.keys() == set(NFS_COUNTERS)


@pytest.mark.parametrize(
    ("lines", "known"),
    [
        (b"", set()),
        (b"\tbytes:\t1 2 3 4 5 6\n", {"nfs_read_bytes_total", "nfs_written_bytes_total"}),
        (b"\tbytes:\t1 2 3 4\n\t READ: 1 2 3\n\t WRITE: x\n", set()),
        (b"\t WRITE: 1 1 1 1 1 1 1 1\n", {"nfs_writes_total"}),
        (b"\t READ: 1 1 1 1 1 1 1 -1\n", set()),
        (
            b"\t READ: 1 1 1 1 1 1 1 18446744073709551610",
            {"nfs_reads_total", "nfs_read_round_trip_seconds_total"},
        ),
        (b"\t READ: 1 1 1 1 1 1 1 " + b"9" * 400 + b"\n", set()),
    ],
)
def test_what_is_not_there_is_absent(lines: bytes, known: set[str]) -> None:
    """Never zero."""

    [values] = parse_mountstats(b"device a:/b mounted on /b with fstype nfs\n" + lines).values()

    assert known == values.keys()


@given(st.binary(max_size=400) | st.text(max_size=400).map(str.encode))
def test_rubbish_does_not_raise(data: bytes) -> None:
    """Whatever the file holds, also below the line of a mount."""

    parse_mountstats(data)
    parse_mountstats(b"device a:/b mounted on /b with fstype nfs\n\tREAD:" + data)


@given(
    at=st.integers(0, len(MODERN)),
    cut=st.integers(0, 40),
    put=st.one_of(
        st.binary(max_size=8), st.sampled_from([b"9" * 400, b"9" * 5000, b" ", b"\n", b":", b"\\0"])
    ),
)
def test_a_damaged_file_is_still_read(at: int, cut: int, put: bytes) -> None:
    """What is left has the catalogue's names, and no counter is below zero."""

    for values in parse_mountstats(MODERN[:at] + put + MODERN[at + cut :]).values():
        assert values.keys() <= set(NFS_COUNTERS)
        assert all(value >= 0 for value in values.values())


def test_counters_are_new_in_every_frame(tmp_path: Path) -> None:
    """How full a file system is may be held for half a minute; a counter that is held would say: no reads."""

    reader = mounted(tmp_path, stats(100, 1000))
    frames = []
    for second, (reads, milliseconds) in enumerate([(100, 1000), (150, 3000)]):
        grow(tmp_path, {"proc/self/mountstats": stats(reads, milliseconds)})
        filesystems, health = reader.read(1000.0 + second)
        frames.append(Frame(1000.0 + second, 50.0 + second, Node("n"), filesystems=filesystems))
    reader.close()

    assert [] == health
    assert {
        "nfs_reads_per_second": 50.0,
        "nfs_read_bytes_per_second": 50_000.0,
        "nfs_read_await_seconds": 0.04,
        "nfs_read_round_trip_seconds": 0.02,
        "nfs_reads_in_flight": 2.0,
    } == compute_rates(*frames).filesystems["/data"]


def test_counters_belong_to_the_device_that_they_were_counted_for(tmp_path: Path) -> None:
    """A mount that was replaced since the list of mounts was read does not lend its counters."""

    reader = mounted(tmp_path, stats(100, 1000))
    [before], _ = reader.read(1.0)
    grow(tmp_path, {"proc/self/mountstats": stats(100, 1000, server="other:/data")})
    [after], _ = reader.read(2.0)
    reader.close()

    assert set(NFS_COUNTERS) <= before.values.keys()
    assert set() == after.values.keys() & set(NFS_COUNTERS)


def test_counters_are_there_though_the_server_is_not(tmp_path: Path) -> None:
    """This machine's kernel keeps them: a file system that does not answer has them alone."""

    back = threading.Event()

    def dead(_: bytes) -> os.statvfs_result:
        back.wait(600)
        return os.statvfs("/")

    files = {"proc/self/mounts": "filer:/data /data nfs4 rw 0 0\n", "proc/self/mountstats": stats(100, 1000)}
    reader = FilesystemReader(grow(tmp_path, files), statvfs=dead, deadline_seconds=1.0)
    [reading], _ = reader.read(1.0)
    back.set()
    reader.close()

    assert set(NFS_COUNTERS) == reading.values.keys()


def test_a_machine_without_statistics_has_no_counters(tmp_path: Path) -> None:
    """A /proc without the file is a fact, and one that may not be read a problem with an entry."""

    mounts = {"proc/self/mounts": "filer:/data /data nfs4 rw 0 0\n"}
    without = FilesystemReader(grow(tmp_path / "without", mounts), statvfs=lambda _: os.statvfs("/"))
    folder = grow(tmp_path / "broken", {**mounts, "proc/self/mountstats/x": ""})
    broken = FilesystemReader(folder, statvfs=lambda _: os.statvfs("/"))
    found = [reader.read(1.0) for reader in (without, broken)]
    for reader in (without, broken):
        reader.close()

    assert [set(), set()] == [readings[0].values.keys() & set(NFS_COUNTERS) for readings, _ in found]
    assert [[], [("disks", "unreadable", NFS_COUNTERS)]] == [
        [(entry.source, entry.code, entry.metrics) for entry in health] for _, health in found
    ]


def test_a_machine_without_nfs_does_not_read_the_file(tmp_path: Path) -> None:
    """It lists every mount, and containers have many."""

    files = {"proc/self/mounts": "tmpfs /dev/shm tmpfs rw 0 0\n", "proc/self/mountstats/x": ""}
    reader = FilesystemReader(grow(tmp_path, files), statvfs=lambda _: os.statvfs("/"))

    _, health = reader.read(1.0)
    reader.close()

    assert [] == health


def test_no_reads_have_no_mean_time() -> None:
    """A quiet mount reads nothing a second, and how long a read takes is unknown."""

    frames = [
        Frame(
            time,
            time,
            Node("n"),
            filesystems=(FilesystemReading("/d", "a:/b", "nfs", None, "network", DATA),),
        )
        for time in (1.0, 2.0)
    ]

    assert {
        "nfs_reads_per_second": 0.0,
        "nfs_read_bytes_per_second": 0.0,
        "nfs_reads_in_flight": 0.0,
    } == compute_rates(*frames).filesystems["/d"]


def test_another_server_at_the_same_place_gives_no_rate() -> None:
    """Its counters have nothing to do with the ones before."""

    frames = [
        Frame(
            time,
            time,
            Node("n"),
            filesystems=(FilesystemReading("/d", device, "nfs", None, "network", values),),
        )
        for time, device, values in ((1.0, "b:/", HOME), (2.0, "a:/", DATA))
    ]

    assert {} == compute_rates(*frames).filesystems["/d"]
