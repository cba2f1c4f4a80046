from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulse.model.device import Node
from gpulse.model.metric_catalog import metric_names
from gpulse.sources.host import HostReader, read_node
from tests.unit.trees import grow

HZ = os.sysconf("SC_CLK_TCK")
FILES = {
    "proc/stat": "cpu  100 0 50 4000 20 0 0 5\ncpu0 60 0 30 2000 10 0 0 3\ncpu1 40 0 20 2000 10 0 0 2\nctxt 9\nprocs_running 2\nprocs_blocked 1\n",
    "proc/loadavg": "0.50 1.25 2.00 1/234 5678\n",
    "proc/meminfo": "MemTotal: 8 kB\nMemFree: 2 kB\nMemAvailable: 4 kB\nCached: 1 kB\nShmem: 3 kB\nDirty: 5 kB\nWriteback: 6 kB\nSwapTotal: 7 kB\nSwapFree: 0 kB\n",
    "proc/vmstat": "pswpin 1\npswpout 2\npgmajfault 3\npgsteal_direct 4\nworkingset_refault_file 5\noom_kill 6\n",
    "proc/pressure/cpu": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "proc/pressure/io": "some avg10=0.00 avg60=0.00 avg300=0.00 total=2\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n",
    "proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=4\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=3\n",
}
EXPECTED = {
    "cpu_user_seconds_total": 100 / HZ,
    "cpu_nice_seconds_total": 0.0,
    "cpu_system_seconds_total": 50 / HZ,
    "cpu_idle_seconds_total": 4000 / HZ,
    "cpu_iowait_seconds_total": 20 / HZ,
    "cpu_irq_seconds_total": 0.0,
    "cpu_softirq_seconds_total": 0.0,
    "cpu_steal_seconds_total": 5 / HZ,
    "cpus": 2,
    "context_switches_total": 9,
    "processes_running": 2,
    "processes_blocked": 1,
    "load1": 0.5,
    "load5": 1.25,
    "load15": 2.0,
    "memory_total_bytes": 8192,
    "memory_free_bytes": 2048,
    "memory_available_bytes": 4096,
    "memory_cached_bytes": 1024,
    "memory_shared_bytes": 3072,
    "memory_dirty_bytes": 5120,
    "memory_writeback_bytes": 6144,
    "swap_total_bytes": 7168,
    "swap_free_bytes": 0,
    "swap_in_pages_total": 1,
    "swap_out_pages_total": 2,
    "major_faults_total": 3,
    "direct_reclaim_pages_total": 4,
    "refaults_total": 5,
    "oom_kills_total": 6,
    "pressure_cpu_some_seconds_total": 1.5,
    "pressure_io_some_seconds_total": 0.000002,
    "pressure_io_full_seconds_total": 0.000001,
    "pressure_memory_some_seconds_total": 0.000004,
    "pressure_memory_full_seconds_total": 0.000003,
}


def test_everything_is_read_in_base_units(tmp_path: Path) -> None:
    """Ticks become seconds, kilobytes bytes and microseconds seconds, under the catalogue's names."""

    reading, health = HostReader(grow(tmp_path, FILES)).read(1.0)

    assert [] == health
    assert reading is not None
    assert EXPECTED == reading.values
    assert ((60, 0, 30, 2000, 10, 0, 0, 3), (40, 0, 20, 2000, 10, 0, 0, 2)) == reading.cores


def test_all_names_are_in_the_catalogue() -> None:
    """All that the catalogue knows of a host is read, but for what the kernel does not define."""

    assert {"pressure_cpu_full_seconds_total"} == set(metric_names("host", derived=False)) - EXPECTED.keys()
    assert set() == EXPECTED.keys() - set(metric_names("host", derived=False))


def test_a_missing_file_costs_only_its_own_values(tmp_path: Path) -> None:
    """Without /proc/meminfo there is no memory to report, and everything else is still there."""

    roots = grow(tmp_path, {name: content for name, content in FILES.items() if name != "proc/meminfo"})

    reading, health = HostReader(roots).read(5.0)

    assert reading is not None
    memory = {name for name in EXPECTED if name.startswith("memory_")} | {
        "swap_total_bytes",
        "swap_free_bytes",
    }
    assert EXPECTED.keys() - memory == reading.values.keys()
    assert [("host", "unreadable", f"{roots.proc}/meminfo", 5.0)] == [
        (entry.source, entry.code, entry.subject, entry.since) for entry in health
    ]
    assert memory == set(health[0].metrics)


def test_a_kernel_without_pressure_is_a_fact_and_no_fault(tmp_path: Path) -> None:
    """One entry says that pressure is not reported, which values that costs, and how to get them."""

    roots = grow(tmp_path, {name: content for name, content in FILES.items() if "pressure" not in name})

    reading, health = HostReader(roots).read(1.0)

    assert reading is not None
    assert not any(name.startswith("pressure") for name in reading.values)
    assert [("not_supported", "pressure", 5, False)] == [
        (entry.code, entry.subject, len(entry.metrics), entry.is_problem) for entry in health
    ]
    assert "psi=1" in str(health[0].hint)


def test_a_file_full_of_rubbish_gives_no_values(tmp_path: Path) -> None:
    """What cannot be understood is absent, never zero."""

    roots = grow(tmp_path, dict.fromkeys(FILES, b"\xff\0 rubbish\n"))

    reading, _ = HostReader(roots).read(1.0)

    assert reading is None


def test_a_machine_without_proc_has_no_reading(tmp_path: Path) -> None:
    """When nothing can be read there is no reading, and each file has its entry."""

    reading, health = HostReader(grow(tmp_path, {})).read(1.0)

    assert reading is None
    assert 5 == len(health)


def test_this_machine_can_be_read() -> None:
    """On a real kernel the memory and the CPUs are there."""

    reading, _ = HostReader().read(1.0)

    assert reading is not None
    assert reading.values["cpus"] == len(reading.cores) > 0
    assert reading.values["memory_total_bytes"] >= reading.values["memory_available_bytes"] > 0
    assert set() == reading.values.keys() - set(metric_names("host", derived=False))


def test_the_node_says_what_it_is(tmp_path: Path) -> None:
    """Name, kernel and CPU model come from /proc; a CPU without a model name has none."""

    files = {
        "proc/sys/kernel/hostname": "gpu07\n",
        "proc/sys/kernel/osrelease": "6.8.0\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD  EPYC 9654\n",
    }

    assert Node("gpu07", kernel="6.8.0", cpu_model="AMD EPYC 9654", ticks_per_second=HZ) == read_node(
        grow(tmp_path, files)
    )
    assert read_node(grow(tmp_path / "arm", {"proc/cpuinfo": "processor\t: 0\n"})).cpu_model is None


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ({}, ()),
        ({"node0": "0-3\n"}, ("0-3",)),
        ({"node10": "4\n", "node0": "0-1,8-9\n", "node2": "2-3\n"}, ("0-1,8-9", "", "2-3", *[""] * 7, "4")),
        ({"node0": "0-3\n", "node1": "\n"}, ("0-3", "")),
        ({"node0": "\n"}, ()),
        ({"node": "1\n", "nodes": "1\n", "node99999999": "1\n", "node-1": "1\n", "xnode0": "1\n"}, ()),
    ],
    ids=["none", "one", "gaps", "memory only", "no CPU", "other names"],
)
def test_the_cpus_of_each_numa_node_are_known(
    tmp_path: Path, nodes: dict[str, str], expected: tuple[str, ...]
) -> None:
    """By the node's number, and nothing where the kernel does not say."""

    files = {f"sys/devices/system/node/{name}/cpulist": cpus for name, cpus in nodes.items()}

    assert expected == read_node(grow(tmp_path, files)).numa_cpus
