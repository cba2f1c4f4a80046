from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpulse.model.frame import CgroupReading
from gpulse.model.metric_catalog import metric_names
from gpulse.model.process import Owner, ProcessIdentity, ProcessReading
from gpulse.sources.process_owners import JobRegistry
from gpulse.sources.processes import ProcessReader
from gpulse.sources.procfs import Roots
from tests.unit.trees import grow, pid_stat

HZ = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
BOOT = 1_000_000
NOW = BOOT + 10_000.0
MACHINE = {
    "proc/stat": f"btime {BOOT}\n",
    "proc/sys/kernel/task_delayacct": "1\n",
    "sys/devices/system/cpu/online": "0-7\n",
}
INITIAL = {"proc/self/ns/pid": "pid:[4026531836]"}
CONTAINER = {"proc/self/ns/pid": "pid:[4026532000]"}


def process(pid: int, line: bytes, **files: str | bytes) -> dict[str, str | bytes]:
    """The files of one process."""
    content: dict[str, str | bytes] = {
        "stat": line,
        "status": "Uid:\t0\t0\t0\t0\nCpus_allowed_list:\t0-63\n",
        "cmdline": b"python3\0train.py\0",
        "cgroup": "0::/\n",
        **files,
    }
    return {f"proc/{pid}/{name}": text for name, text in content.items()}


def machine(root: Path, *processes: dict[str, str | bytes], links: dict[str, str] | None = None) -> Roots:
    """A tree with these processes."""
    files: dict[str, str | bytes] = dict(MACHINE)
    for one in processes:
        files.update(one)
    return grow(root, files, INITIAL if links is None else links)


def pids(readings: tuple[ProcessReading, ...]) -> list[tuple[int, bool]]:
    """Which processes were read, and whether they hold a GPU."""
    return [(reading.pid, reading.on_gpu) for reading in readings]


def test_a_process_is_read_in_base_units(tmp_path: Path) -> None:
    """Ticks become seconds, pages bytes and nanoseconds seconds, under the catalogue's names."""

    line = pid_stat(
        7, 3, user=250, system=50, start=100 * HZ, resident=5, threads=9, faults=4, cpu=2, blocked=HZ
    )
    files = process(
        7,
        line,
        io="rchar: 1\nwchar: 2\nsyscr: 9\nsyscw: 9\nread_bytes: 3\nwrite_bytes: 4\ncancelled_write_bytes: 0\n",
        schedstat="5 1500000000 3\n",
        environ=b"SLURM_JOB_ID=12\0",
    )

    readings, cgroups, health = ProcessReader(machine(tmp_path, files)).read(NOW, [7])

    assert ((), []) == (cgroups, health)
    assert (
        ProcessReading(
            identity=ProcessIdentity(
                pid=7,
                parent_pid=3,
                start_time=BOOT + 100.0,
                name="python3",
                command=("python3", "train.py"),
                owner=Owner("root", 0, "slurm:12"),
                cgroup="/",
            ),
            state="S",
            values={
                "cpu_user_seconds_total": 250 / HZ,
                "cpu_system_seconds_total": 50 / HZ,
                "host_memory_bytes": 5 * PAGE,
                "threads": 9,
                "last_cpu": 2,
                "cpus_allowed": 8,
                "major_faults_total": 4,
                "block_wait_seconds_total": 1.0,
                "run_wait_seconds_total": 1.5,
                "read_chars_total": 1,
                "written_chars_total": 2,
                "read_bytes_total": 3,
                "written_bytes_total": 4,
            },
            on_gpu=True,
        ),
    ) == readings
    assert {"gpu_memory_bytes", "sm_ratio"} == set(metric_names("process", derived=False)) - readings[
        0
    ].values.keys()


def test_what_a_process_says_of_its_job_is_judged_anew_when_more_is_known(tmp_path: Path) -> None:
    """At once, not when it is next looked at: its job is heard of later, and so is that it is somebody else's."""

    files = process(7, pid_stat(7, start=100 * HZ), environ=b"SLURM_JOB_ID=12\0")
    reader = ProcessReader(machine(tmp_path, files))
    registers = [
        JobRegistry(),
        JobRegistry(has_groups=True),
        JobRegistry(users={"slurm:12": 0}, has_groups=True),
        JobRegistry(users={"slurm:12": 1001}, has_groups=True),
    ]
    seen = [reader.read(NOW + 0.1 * tick, [7], None, one)[0] for tick, one in enumerate(registers)]

    assert ["slurm:12", None, "slurm:12", None] == [reading.identity.owner.job for [reading] in seen]
    assert [] == reader.job_claims()


def test_a_kernel_that_does_not_count_disk_waits_is_not_believed(tmp_path: Path) -> None:
    """With delay accounting switched off the counter is zero for all, which says nothing."""

    roots = machine(tmp_path, process(7, pid_stat(7)), {"proc/sys/kernel/task_delayacct": "0\n"})

    assert "block_wait_seconds_total" not in ProcessReader(roots).read(NOW, [7])[0][0].values


def test_descendants_are_read_too(tmp_path: Path) -> None:
    """Children and grandchildren of a GPU process are there, and nobody else."""

    family = [
        process(pid, pid_stat(pid, parent))
        for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1), (21, 20))
    ]

    readings, _, _ = ProcessReader(machine(tmp_path, *family)).read(NOW, {10})

    assert [(10, True), (11, False), (12, False)] == pids(readings)


def test_a_descendant_that_holds_a_gpu_is_read_once(tmp_path: Path) -> None:
    """A worker that is on a GPU itself counts as that."""

    family = [process(pid, pid_stat(pid, parent)) for pid, parent in ((10, 1), (11, 10))]

    assert [(10, True), (11, True)] == pids(ProcessReader(machine(tmp_path, *family)).read(NOW, [11, 10])[0])


def test_a_new_child_is_found_within_a_second(tmp_path: Path) -> None:
    """The list of processes is looked at once a second."""

    reader = ProcessReader(machine(tmp_path, process(10, pid_stat(10))))
    reader.read(NOW, [10])
    machine(tmp_path, process(11, pid_stat(11, 10)))

    assert [(10, True)] == pids(reader.read(NOW + 0.9, [10])[0])
    assert [(10, True), (11, False)] == pids(reader.read(NOW + 1.0, [10])[0])


def test_orphans_go_to_whoever_adopted_them(tmp_path: Path) -> None:
    """When a process between is gone, its children are asked for their new parent."""

    family = [process(pid, pid_stat(pid, parent)) for pid, parent in ((10, 1), (11, 10), (12, 11), (13, 11))]
    reader = ProcessReader(machine(tmp_path, *family))
    reader.read(NOW, [10])
    shutil.rmtree(tmp_path / "proc/11")
    machine(tmp_path, process(12, pid_stat(12, 10)), process(13, pid_stat(13, 1)))
    reader.read(NOW + 1, [10])

    assert [(10, True), (12, False)] == pids(reader.read(NOW + 2, [10])[0])


def test_a_process_that_ended_is_absent(tmp_path: Path) -> None:
    """The driver may still list it for a while: it was here, so it is not hidden."""

    reader = ProcessReader(machine(tmp_path, process(7, pid_stat(7))))
    reader.read(NOW, [7])
    shutil.rmtree(tmp_path / "proc/7")

    assert ((), (), []) == reader.read(NOW + 0.1, [7])
    assert ((), (), []) == reader.read(NOW + 0.2, [7])


def test_a_pid_that_was_never_here_is_not_visible(tmp_path: Path) -> None:
    """A process of another PID namespace, or one that /proc hides, is shown by its pid alone."""

    readings, _, health = ProcessReader(machine(tmp_path)).read(NOW, [4711])

    assert (ProcessReading(ProcessIdentity(pid=4711), None, {}, on_gpu=True),) == readings
    assert [("processes", "not_visible", "pid 4711", NOW)] == [
        (entry.source, entry.code, entry.subject, entry.since) for entry in health
    ]
    assert "namespace" in str(health[0].hint)


def test_a_pid_used_again_is_another_process(tmp_path: Path) -> None:
    """The start time tells two processes with the same pid apart."""

    reader = ProcessReader(machine(tmp_path, process(7, pid_stat(7, start=HZ), cmdline=b"old\0")))
    before = reader.read(NOW, [7])[0][0].identity
    machine(tmp_path, process(7, pid_stat(7, start=2 * HZ), cmdline=b"new\0"))
    after = reader.read(NOW + 0.1, [7])[0][0].identity

    assert [(("old",), BOOT + 1.0), (("new",), BOOT + 2.0)] == [
        (identity.command, identity.start_time) for identity in (before, after)
    ]


def test_a_container_believes_only_pids_that_hold_the_gpu_here(tmp_path: Path) -> None:
    """In another PID namespace the driver's number may belong to an unrelated local process."""

    links = {**CONTAINER, "proc/7/fd/3": f"{tmp_path}/dev/nvidia0", "proc/8/fd/3": "/dev/null"}
    roots = machine(
        tmp_path, process(7, pid_stat(7)), process(8, pid_stat(8)), process(9, pid_stat(9, 8)), links=links
    )
    ours = ProcessReader(roots).read(NOW, [7])
    readings, _, health = ProcessReader(roots).read(NOW, [8])

    assert [(7, "S")] == [(reading.pid, reading.state) for reading in ours[0]]
    assert [(8, None, None)] == [(reading.pid, reading.state, reading.identity.name) for reading in readings]
    assert ["pid 8"] == [entry.subject for entry in health]


def test_who_a_process_is_gets_read_when_its_name_changes(tmp_path: Path) -> None:
    """A call of exec shows at once, while the rest of the identity is kept for half a minute."""

    reader = ProcessReader(machine(tmp_path, process(7, pid_stat(7, comm=b"bash"), cmdline=b"bash\0")))
    commands = [reader.read(NOW, [7])[0][0].identity.command]
    machine(tmp_path, process(7, pid_stat(7, comm=b"bash"), cmdline=b"titled\0"))
    commands.append(reader.read(NOW + 25, [7])[0][0].identity.command)
    commands.append(reader.read(NOW + 30, [7])[0][0].identity.command)
    machine(tmp_path, process(7, pid_stat(7, comm=b"python3"), cmdline=b"python3\0"))
    commands.append(reader.read(NOW + 30.1, [7])[0][0].identity.command)

    assert [("bash",), ("bash",), ("titled",), ("python3",)] == commands


def test_a_young_process_is_looked_at_every_second(tmp_path: Path) -> None:
    """In its first seconds a process moves into its control group and changes its command line."""

    start = BOOT + 100.0
    reader = ProcessReader(machine(tmp_path, process(7, pid_stat(7, start=100 * HZ), cmdline=b"early\0")))
    reader.read(start, [7])
    machine(tmp_path, process(7, pid_stat(7, start=100 * HZ), cmdline=b"late\0"))

    assert ("early",) == reader.read(start + 0.9, [7])[0][0].identity.command
    assert ("late",) == reader.read(start + 1.0, [7])[0][0].identity.command


def test_a_process_that_waits_in_the_kernel_is_not_asked_for_its_memory(tmp_path: Path) -> None:
    """Its command line could hang with it, so the last one is kept and a first one is read later."""

    reader = ProcessReader(machine(tmp_path, process(7, pid_stat(7, state=b"D"))))
    commands = [reader.read(NOW, [7])[0][0].identity.command]
    machine(tmp_path, process(7, pid_stat(7)))
    commands.append(reader.read(NOW + 1, [7])[0][0].identity.command)
    machine(tmp_path, process(7, pid_stat(7, state=b"D"), cmdline=b"new\0"))
    commands.append(reader.read(NOW + 60, [7])[0][0].identity.command)

    assert [(), ("python3", "train.py"), ("python3", "train.py")] == commands


def test_a_refused_file_is_not_asked_for_every_time(tmp_path: Path) -> None:
    """What may not be read costs its own values, and is tried again when the identity is."""

    reader = ProcessReader(machine(tmp_path, process(7, pid_stat(7))))
    reader.read(NOW, [7])
    machine(tmp_path, process(7, pid_stat(7), io="rchar: 1\n", schedstat="1 2 3\n"))
    early, late = reader.read(NOW + 1, [7])[0][0].values, reader.read(NOW + 30, [7])[0][0].values

    assert {"read_chars_total", "run_wait_seconds_total"} == late.keys() - early.keys()


def test_files_that_cannot_be_read_cost_only_their_values(tmp_path: Path) -> None:
    """With nothing but the stat line, the numbers in it are still reported."""

    readings, _, health = ProcessReader(machine(tmp_path, {"proc/7/stat": pid_stat(7, user=HZ)})).read(
        NOW, [7]
    )

    assert [] == health
    assert Owner() == readings[0].identity.owner
    assert 1.0 == readings[0].values["cpu_user_seconds_total"]
    assert "cpus_allowed" not in readings[0].values


def thread(pid: int, tid: int, ticks: int) -> dict[str, str | bytes]:
    """The files of one thread."""
    return {
        f"proc/{pid}/task/{tid}/stat": pid_stat(tid, comm=b"t%d" % tid, user=ticks),
        f"proc/{pid}/task/{tid}/schedstat": "1 2000000000 3\n",
    }


def test_the_busiest_threads_and_the_main_one_are_reported(tmp_path: Path) -> None:
    """What counts is the CPU time of the last second, not of the whole life; between, only those are read."""

    ids = range(7, 27)
    roots = machine(tmp_path, process(7, pid_stat(7)), *(thread(7, tid, tid * 100) for tid in ids))
    reader = ProcessReader(roots, threads=True)
    first = [thread.tid for thread in reader.read(NOW, [7])[0][0].threads]
    grow(tmp_path, {name: text for tid in ids for name, text in thread(7, tid, tid * 100 + 50 - tid).items()})
    held = [thread.tid for thread in reader.read(NOW + 0.5, [7])[0][0].threads]
    second = reader.read(NOW + 1, [7])[0][0].threads

    assert [7, *range(26, 18, -1)] == first == held
    assert list(range(7, 15)) == [thread.tid for thread in second]
    assert ("t8", "S", 842 / HZ, 2.0) == tuple(second[1][1:])


def test_threads_are_read_only_when_asked_for_and_only_on_the_gpu(tmp_path: Path) -> None:
    """Descendants have none, and neither has anybody without the wish."""

    files = [process(7, pid_stat(7)), process(8, pid_stat(8, 7)), thread(7, 7, 1), thread(8, 8, 1)]
    roots = machine(tmp_path, *files)

    assert [0, 0] == [len(reading.threads) for reading in ProcessReader(roots).read(NOW, [7])[0]]
    assert [1, 0] == [
        len(reading.threads) for reading in ProcessReader(roots, threads=True).read(NOW, [7])[0]
    ]


def test_a_thread_that_ended_is_left_out(tmp_path: Path) -> None:
    """A thread may end between two reads."""

    roots = machine(tmp_path, process(7, pid_stat(7)), thread(7, 7, 1), thread(7, 8, 1))
    reader = ProcessReader(roots, threads=True)
    reader.read(NOW, [7])
    shutil.rmtree(tmp_path / "proc/7/task/8")

    assert [7] == [thread.tid for thread in reader.read(NOW + 0.1, [7])[0][0].threads]


V2 = "sys/fs/cgroup"
V2_MOUNT = {"proc/self/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n"}


def limits(
    root: Path, files: dict[str, str], mounts: dict[str, str], cgroup: str
) -> tuple[CgroupReading, ...]:
    """What is read of the control group of one process."""
    roots = machine(root, process(7, pid_stat(7), cgroup=cgroup), {**files, **mounts})
    return ProcessReader(roots).read(NOW, [7])[1]


def test_the_tightest_limit_of_version_2_wins(tmp_path: Path) -> None:
    """Limits are looked for up to the root, and what they cost is read where the limit is set."""

    files = {
        f"{V2}/a/cpu.max": "200000 100000\n",
        f"{V2}/a/cpu.stat": "usage_usec 9\nnr_periods 10\nnr_throttled 3\nthrottled_usec 1500000\n",
        f"{V2}/a/b/cpu.max": "max 100000\n",
        f"{V2}/a/b/c/cpu.max": "400000 100000\n",
        f"{V2}/a/b/c/memory.max": "max\n",
        f"{V2}/a/b/memory.max": "4096\n",
        f"{V2}/a/b/memory.current": "1024\n",
        f"{V2}/a/b/memory.events": "low 0\noom 2\noom_kill 1\n",
        f"{V2}/a/memory.max": "8192\n",
    }

    readings = limits(tmp_path, files, V2_MOUNT, "0::/a/b/c\n")

    assert (
        CgroupReading(
            "/a/b/c",
            {
                "cpu_limit_cores": 2.0,
                "cpu_periods_total": 10,
                "cpu_throttled_periods_total": 3,
                "cpu_throttled_seconds_total": 1.5,
                "memory_limit_bytes": 4096,
                "memory_used_bytes": 1024,
                "oom_kills_total": 1,
            },
        ),
    ) == readings
    assert set(metric_names("cgroup", derived=False)) == readings[0].values.keys()


def test_of_two_equal_limits_the_outer_one_is_reported(tmp_path: Path) -> None:
    """The outer group shares its limit with others, so that is where the waiting happens."""

    files = {
        f"{V2}/a/cpu.max": "100000 100000\n",
        f"{V2}/a/cpu.stat": "nr_periods 10\nnr_throttled 9\n",
        f"{V2}/a/b/cpu.max": "100000 100000\n",
        f"{V2}/a/b/cpu.stat": "nr_periods 10\nnr_throttled 0\n",
    }

    assert [9] == [
        group.values["cpu_throttled_periods_total"]
        for group in limits(tmp_path, files, V2_MOUNT, "0::/a/b\n")
    ]


def test_version_1_next_to_version_2(tmp_path: Path) -> None:
    """Where both are mounted, each controller is read from the hierarchy that has it."""

    mounts = {
        "proc/self/mounts": "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\n"
        "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
    }
    job = "slurm/uid_0/job_2"
    files = {
        f"{V2}/cpu/{job}/cpu.cfs_quota_us": "150000\n",
        f"{V2}/cpu/{job}/cpu.cfs_period_us": "100000\n",
        f"{V2}/cpu/{job}/cpu.stat": "nr_periods 4\nnr_throttled 1\nthrottled_time 2000000000\n",
        f"{V2}/cpu/cpu.cfs_quota_us": "-1\n",
        f"{V2}/cpu/cpu.cfs_period_us": "100000\n",
        f"{V2}/memory/{job}/memory.limit_in_bytes": "4096\n",
        f"{V2}/memory/{job}/memory.usage_in_bytes": "2048\n",
        f"{V2}/memory/{job}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        f"{V2}/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }

    assert (
        CgroupReading(
            f"/{job}",
            {
                "cpu_limit_cores": 1.5,
                "cpu_periods_total": 4,
                "cpu_throttled_periods_total": 1,
                "cpu_throttled_seconds_total": 2.0,
                "memory_limit_bytes": 4096,
                "memory_used_bytes": 2048,
                "oom_kills_total": 0,
            },
        ),
    ) == limits(tmp_path, files, mounts, f"4:memory:/{job}\n2:cpu,cpuacct:/{job}\n0::/\n")


def test_a_group_without_limits_has_none(tmp_path: Path) -> None:
    """No limit is absent; what the group uses is still known, and the root is nobody's group."""

    files = {
        f"{V2}/a/memory.current": "5\n",
        f"{V2}/a/memory.max": "max\n",
        f"{V2}/a/cpu.max": "max 100000\n",
    }

    assert (CgroupReading("/a", {"memory_used_bytes": 5}),) == limits(tmp_path, files, V2_MOUNT, "0::/a\n")
    assert () == limits(tmp_path / "root", files, V2_MOUNT, "0::/\n")


def test_a_container_finds_its_limit_at_the_mount_point(tmp_path: Path) -> None:
    """The path of a process may be the host's, which does not exist inside the container."""

    files = {f"{V2}/memory.max": "4096\n", f"{V2}/memory.current": "1\n"}

    assert (CgroupReading("/docker/x", {"memory_limit_bytes": 4096, "memory_used_bytes": 1}),) == limits(
        tmp_path, files, V2_MOUNT, "0::/docker/x\n"
    )


def test_groups_are_read_once_a_second(tmp_path: Path) -> None:
    """Between two reads the last values are repeated; processes of one group share one reading."""

    used = f"{V2}/a/memory.current"
    family = [process(pid, pid_stat(pid), cgroup="0::/a\n") for pid in (7, 8)]
    reader = ProcessReader(machine(tmp_path, *family, {used: "1\n"}, dict(V2_MOUNT)))
    seen = []
    for now, amount in ((NOW, "1\n"), (NOW + 0.9, "2\n"), (NOW + 1, "3\n")):
        grow(tmp_path, {used: amount})
        seen.append([group.values["memory_used_bytes"] for group in reader.read(now, [7, 8])[1]])

    assert [[1], [1], [3]] == seen


@pytest.mark.parametrize("line", [b"", b"garbage", b"7 (x"])
def test_a_stat_line_that_makes_no_sense_is_no_process(tmp_path: Path, line: bytes) -> None:
    """A pid whose file cannot be understood is as good as hidden."""

    assert [None] == [
        reading.state for reading in ProcessReader(machine(tmp_path, {"proc/7/stat": line})).read(NOW, [7])[0]
    ]
