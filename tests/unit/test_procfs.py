from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.model.device import parse_cpu_ranges
from gpulse.sources import procfs
from gpulse.sources.procfs import KernelStat, Mount, PidIo, PidStat, PidStatus, SchedStat
from tests.unit.trees import pid_stat

PARSERS = (
    procfs.parse_stat,
    lambda data: procfs.find_counts(data, {b"MemTotal:": "total", b"cpu ": "cpu"}),
    procfs.parse_loadavg,
    procfs.parse_vmstat,
    procfs.parse_pressure,
    procfs.parse_diskstats,
    procfs.parse_net_dev,
    procfs.parse_mounts,
    procfs.parse_cpu_list,
    procfs.parse_pid_stat,
    procfs.parse_pid_io,
    procfs.parse_pid_status,
    procfs.parse_schedstat,
    procfs.parse_cgroup,
    procfs.parse_command,
)

STAT = b"""\
cpu  100 1 50 4000 20 3 4 5 6 7
cpu0 60 1 30 2000 10 2 2 3 0 0
cpu1 40 0 20 2000 10 1 2 2 0 0
intr 12345 0 0 0
ctxt 354474
btime 1794730371
processes 5124
procs_running 2
procs_blocked 1
"""
MEMINFO = b"MemTotal:       24684100 kB\nMemFree:  1000 kB\nHugePages_Total:       3\nBroken: x kB\n"
PRESSURE = (
    b"some avg10=0.00 avg60=0.00 avg300=0.05 total=5792994\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
)
DISKSTATS = b"""\
   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
 254       0 vda 32355 8183 1985882 4338 19793 15439 1978680 6702 1 4036 11521 7742 52 264352 370 3012 110
 8 1 sda1 1 2 3
"""
NET_DEV = b"""\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    3193      29    0    0    0     0          0         0     3193      29    0    0    0     0       0          0
eth0:1:184374048 5383 1 2 3 4 5 6 323974 3829 7 8 9 10 11 12
"""
STATUS = b"Name:\tpy\\nthon\nUid:\t1000\t0\t0\t0\nNSpid:\t4711\t12\nCpus_allowed_list:\t0-2,5\n"
CGROUP = b"4:memory:/a:b\n2:cpu,cpuacct:/slurm/uid_0/job_2\n1:name=systemd:/\n0::/system.slice/x.scope\n"
SAMPLES = (STAT, MEMINFO, PRESSURE, DISKSTATS, NET_DEV, STATUS, CGROUP, pid_stat(7), b"1 2 3", b"0-3,7")


def test_machine_wide_cpu_times_and_counts_are_read() -> None:
    """/proc/stat gives eight times for all CPUs and for each, the counts, and the boot time."""

    assert KernelStat(
        total=(100, 1, 50, 4000, 20, 3, 4, 5),
        cores=((60, 1, 30, 2000, 10, 2, 2, 3), (40, 0, 20, 2000, 10, 1, 2, 2)),
        context_switches=354474,
        processes_running=2,
        processes_blocked=1,
        boot_time=1794730371,
    ) == procfs.parse_stat(STAT)


def test_times_that_an_old_kernel_does_not_keep_are_zero() -> None:
    """A CPU line of four times still has eight columns."""

    assert (1, 2, 3, 4, 0, 0, 0, 0) == procfs.parse_stat(b"cpu  1 2 3 4\n").total


def test_counts_are_found_by_what_their_lines_start_with() -> None:
    """Only lines with these names count, on the first line too, and one without a number is left out."""

    wanted = {b"MemTotal:": "total", b"MemFree:": "free", b"Total:": "other", b"HugePages_Total:": "pages"}
    assert {"total": 24684100, "free": 1000, "pages": 3} == procfs.find_counts(MEMINFO, wanted)
    assert {} == procfs.find_counts(b"MemTotal:\nMemFree: kB\n", {b"MemFree:": "free", b"oom ": "oom"})


def test_a_kept_file_shows_what_the_kernel_says_now_and_is_closed_at_last() -> None:
    """A second read of a file that stayed open is a new one, and no descriptor is left."""

    before = len(os.listdir("/proc/self/fd"))
    file = procfs.KernelFile("/proc/uptime")
    first = float(file.read_record().split()[0])
    assert before + 1 == len(os.listdir("/proc/self/fd"))
    assert float(file.read().split()[0]) >= first
    file.close()
    assert before == len(os.listdir("/proc/self/fd"))


def test_a_kept_file_of_a_process_that_ended_cannot_be_read() -> None:
    """The open file of an ended process does not hide its end."""

    child = subprocess.Popen(["sleep", "600"])
    file = procfs.KernelFile(f"/proc/{child.pid}/stat")
    assert file.read_record().startswith(str(child.pid).encode())
    child.kill()
    child.wait()
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        file.read_record()


def test_load_is_three_finite_numbers_or_nothing() -> None:
    """The three averages are returned, and None when one of them is not a number."""

    assert (0.5, 1.25, 2.0) == procfs.parse_loadavg(b"0.50 1.25 2.00 1/234 5678\n")
    assert procfs.parse_loadavg(b"0.50 nan 2.00") is None
    assert procfs.parse_loadavg(b"0.50") is None


def test_vmstat_keeps_the_lines_it_understands() -> None:
    """A line that is not a name and a number does not cost the others."""

    assert {"pswpin": 3, "oom_kill": 1} == procfs.parse_vmstat(b"pswpin 3\nrubbish\n\xff 4\noom_kill 1\n")


def test_pressure_is_the_running_total_in_microseconds() -> None:
    """The averages are ignored: only the total can be turned into a share of any interval."""

    assert {"some": 5792994, "full": 7} == procfs.parse_pressure(PRESSURE)


def test_disks_have_eleven_counters() -> None:
    """The counters that newer kernels append are dropped, and a short line is left out."""

    assert {
        "loop0": (0,) * 11,
        "vda": (32355, 8183, 1985882, 4338, 19793, 15439, 1978680, 6702, 1, 4036, 11521),
    } == procfs.parse_diskstats(DISKSTATS)


def test_interfaces_may_have_a_colon_in_their_name() -> None:
    """The name ends at the last colon, and the two header lines are no interfaces."""

    assert {
        "lo": (3193, 29, 0, 0, 0, 0, 0, 0, 3193, 29, 0, 0, 0, 0, 0, 0),
        "eth0:1": (184374048, 5383, 1, 2, 3, 4, 5, 6, 323974, 3829, 7, 8, 9, 10, 11, 12),
    } == procfs.parse_net_dev(NET_DEV)


def test_mount_points_are_unescaped() -> None:
    """Spaces, tabs and backslashes come as octal numbers; the path stays openable byte for byte."""

    data = b"srv:/my\\040data /mnt/a\\040b\\134c\xff nfs4 rw,vers=4.2 0 0\n"

    assert [
        Mount("srv:/my data", "/mnt/a b\\c\ufffd", "nfs4", ("rw", "vers=4.2"), b"/mnt/a b\\c\xff")
    ] == procfs.parse_mounts(data)


@pytest.mark.parametrize(
    ("data", "cpus"),
    [
        (b"0-3,8\n", {0, 1, 2, 3, 8}),
        (b"", set()),
        (b"7,x,2-", {7}),
        (b"5-4", set()),
        (b"-1", set()),
    ],
)
def test_cpu_lists(data: bytes, cpus: set[int]) -> None:
    """Ranges and single CPUs are understood, the rest is left out."""

    assert cpus == procfs.parse_cpu_list(data)


def test_cpu_lists_as_text() -> None:
    """As the model keeps them."""

    assert {0, 1, 64} == parse_cpu_ranges("0-1,64")
    assert set() == parse_cpu_ranges("\ud800,-,,1-x")


def test_an_absurd_range_of_cpus_costs_no_memory() -> None:
    """A range that no machine has is cut off."""

    assert len(procfs.parse_cpu_list(b"0-99999999999999")) == 1 << 16


def test_a_process_is_read_from_its_stat_line() -> None:
    """Name, state, parent, times, threads, start, memory, CPU and disk wait are found in their columns."""

    line = pid_stat(
        42,
        7,
        comm=b"a) R (b",
        state=b"D",
        user=11,
        system=12,
        start=13,
        resident=14,
        threads=15,
        faults=16,
        cpu=17,
        blocked=18,
    )

    assert PidStat(b"a) R (b", "D", 7, 16, 11, 12, 15, 13, 14, 17, 18) == procfs.parse_pid_stat(line)


@pytest.mark.parametrize(
    "data", [b"", b"1 python S 1", b")(", b"1 (x)", b"1 (x) S 1 2 3", b"1 (x) S a" + b" 1" * 60]
)
def test_a_line_that_is_no_stat_line_is_no_process(data: bytes) -> None:
    """Without a name in parentheses and enough numbers after it there is nothing to report."""

    assert procfs.parse_pid_stat(data) is None


@given(
    comm=st.binary(max_size=15).filter(lambda comm: b"\0" not in comm),
    state=st.sampled_from("RSDZTtXI"),
    numbers=st.lists(st.integers(0, 2**64 - 1), min_size=9, max_size=9),
)
def test_any_name_survives_the_stat_line(comm: bytes, state: str, numbers: list[int]) -> None:
    """A name may hold spaces, parentheses, newlines and bytes that are not UTF-8."""

    parent, faults, user, system, threads, start, resident, cpu, blocked = numbers
    line = pid_stat(
        1,
        parent,
        comm=comm,
        state=state.encode(),
        faults=faults,
        user=user,
        system=system,
        threads=threads,
        start=start,
        resident=resident,
        cpu=cpu,
        blocked=blocked,
    )

    assert PidStat(comm, state, *numbers) == procfs.parse_pid_stat(line)


def test_disk_traffic_of_a_process() -> None:
    """What went through the page cache and what reached a disk are kept apart; the rest is unknown."""

    data = b"rchar: 7285\nwchar: 309\nsyscr: 14\nsyscw: 2\nread_bytes: 5\nwrite_bytes: x\n"

    assert PidIo(7285, 309, 5, None) == procfs.parse_pid_io(data)


def test_status_gives_user_cpus_and_pids() -> None:
    """The real user, the CPUs it may use, and its pid in each namespace."""

    assert PidStatus(1000, frozenset({0, 1, 2, 5}), (4711, 12)) == procfs.parse_pid_status(STATUS)
    assert PidStatus(None, frozenset(), ()) == procfs.parse_pid_status(b"")


def test_a_kernel_that_keeps_no_schedstat_is_not_believed() -> None:
    """`0 0 0` means that nothing is counted, since a process that exists has run once."""

    assert SchedStat(792420, 55) == procfs.parse_schedstat(b"792420 55 1\n")
    assert procfs.parse_schedstat(b"0 0 0\n") is None
    assert procfs.parse_schedstat(b"1 2") is None


def test_control_groups_by_controller() -> None:
    """Each controller has its path, the unified hierarchy goes by the empty name, colons stay in paths."""

    assert {
        "memory": "/a:b",
        "cpu": "/slurm/uid_0/job_2",
        "cpuacct": "/slurm/uid_0/job_2",
        "name=systemd": "/",
        "": "/system.slice/x.scope",
    } == procfs.parse_cgroup(CGROUP)


def test_a_command_line_keeps_empty_arguments() -> None:
    """Arguments end with NUL, may be empty, and need not be UTF-8."""

    assert ("python3", "", "-c", "\ufffd") == procfs.parse_command(b"python3\0\0-c\0\xff\0")
    assert () == procfs.parse_command(b"")


@given(st.binary(max_size=400))
def test_no_parser_raises_on_rubbish(data: bytes) -> None:
    """Whatever a file holds, a parser returns."""

    for parse in PARSERS:
        parse(data)


@given(
    sample=st.sampled_from(SAMPLES),
    at=st.integers(0, 2000),
    cut=st.integers(0, 30),
    put=st.one_of(st.binary(max_size=8), st.sampled_from([b"9" * 5000, b" ", b"\n", b":", b"-1", b"1_0"])),
)
def test_no_parser_raises_on_a_damaged_file(sample: bytes, at: int, cut: int, put: bytes) -> None:
    """A real file with a piece cut out or put in is still read."""

    at %= len(sample)
    damaged = sample[:at] + put + sample[at + cut :]

    for parse in PARSERS:
        parse(damaged)


def test_a_long_file_is_read_to_its_end(tmp_path: Path) -> None:
    """A file of more than one chunk is read as a whole, or up to the given size."""

    path = tmp_path / "long"
    path.write_bytes(b"x" * 200_000)

    assert 200_000 == len(procfs.read_bytes(str(path)))
    assert 70_000 == len(procfs.read_bytes(str(path), 70_000))


def test_a_missing_file_raises_and_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """Files that cannot be read raise OSError; none of the ways to read one leaks."""

    before = len(list(Path("/proc/self/fd").iterdir()))
    for read in (procfs.read_bytes, procfs.read_record):
        with pytest.raises(FileNotFoundError):
            read(str(tmp_path / "missing"))
        with pytest.raises(IsADirectoryError):
            read(str(tmp_path))

    assert before == len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("last", "is_due"), [(None, True), (100.0, False), (99.0, False), (98.0, True), (101.0, True)]
)
def test_a_period_is_over_when_its_time_has_passed_or_the_clock_was_set_back(
    last: float | None, is_due: bool
) -> None:
    """A clock that jumps backwards must not stop anything from being read for hours."""

    assert is_due == procfs.is_due(100.0, last, 2.0)
