"""A small machine made by hand: one job, whose GPU and host do what a test asks for, second by second."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gpulse.model.device import Device, Node
from gpulse.model.frame import (
    CgroupReading,
    FilesystemReading,
    Frame,
    GpuReading,
    HostReading,
    NetworkReading,
)
from gpulse.model.metric_catalog import Values
from gpulse.model.process import GpuProcess, ProcessIdentity, ProcessReading, Thread

GIB = 2**30
NOON = 1_700_049_600.0
PID = 4000
CGROUP = "/job"

FACTS: Values = {
    "memory_total_bytes": 140 * GIB,
    "power_limit_watts": 700,
    "power_default_limit_watts": 700,
    "sm_clock_max_hertz": 1_980_000_000,
    "pcie_link_generation_max": 5,
    "pcie_link_width_max": 16,
}
BUSY: Values = {
    "gpu_utilization_ratio": 0.99,
    "graphics_active_ratio": 0.99,
    "sm_active_ratio": 0.90,
    "tensor_active_ratio": 0.50,
    "dram_active_ratio": 0.35,
    "fp32_active_ratio": 0.10,
    "pcie_rx_bytes_per_second": 20e6,
    "pcie_tx_bytes_per_second": 5e6,
    "memory_used_bytes": 40 * GIB,
    "power_watts": 660,
    "temperature_celsius": 60,
    "sm_clock_hertz": 1_755_000_000,
    "clocks_event_reasons": 0x4,
    "pcie_link_generation": 5,
    "pcie_link_width": 16,
    "pcie_replays_total": 0,
}
"""A healthy run at its power limit."""


def lost(share: float, **values: float) -> Values:
    """A GPU that works for the rest of the time only."""
    busy = 1.0 - share
    return {
        **BUSY,
        **{name: BUSY[name] * busy for name in BUSY if name.endswith("active_ratio")},
        "gpu_utilization_ratio": busy,
        "graphics_active_ratio": busy,
        "power_watts": 130 + 530 * busy,
        "clocks_event_reasons": 0,
        **values,
    }


class Doing(NamedTuple):
    """What the machine does at one moment; rates are counted up by `play`."""

    gpu: Values = BUSY
    cores: float = 1.0
    """CPUs that the process on the GPU uses, on one thread."""
    helpers: tuple[float, ...] = ()
    """The same of each of its workers."""
    state: str = "R"
    helper_state: str = "S"
    on_gpu: bool = True
    """Whether the process is there at all."""
    read: float = 0.0
    """Bytes a second that each helper reads from disks."""
    run_wait: float = 0.0
    throttled: float = 0.0
    """Share of scheduling periods."""
    host: Values = {}  # noqa: RUF012  a default of a NamedTuple
    """Readings of the host."""
    growing: Values = {}  # noqa: RUF012
    """Counters of the host, by what they grow a second."""
    nfs_in_flight: float = 0.0
    network: float = 0.0
    """Share of the link in use."""
    errors: float = 0.0
    """Share of packets in error."""
    last_cpu: int = 0
    name: str = "python3"


class _Clock:
    """Counters that grow with what is done."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}

    def add(self, name: str, amount: float) -> float:
        self.totals[name] = self.totals.get(name, 0.0) + amount
        return self.totals[name]


def play(
    seconds: float,
    doing: Doing | Callable[[float], Doing] | None = None,
    *,
    step: float = 0.25,
    age: float = 3600.0,
    facts: Values | None = None,
    node: Node | None = None,
    numa_node: int | None = None,
    index: int = 0,
    parent: int = 1,
) -> list[Frame]:
    """Frames of a machine that does this for so long; `age` is that of the job at the start."""
    clock = _Clock()
    device = Device(
        index,
        f"GPU-{index}",
        "NVIDIA H200",
        numa_node=numa_node,
        has_gpm=True,
        facts={**FACTS, **(facts or {})},
    )
    frames = []
    for number in range(int(seconds / step) + 1):
        now = number * step
        at = doing(now) if callable(doing) else doing or Doing()
        frames.append(
            _frame(now, at, step if number else 0.0, clock, device, node or Node("node1"), age, parent)
        )
    return frames


def _frame(
    now: float, at: Doing, step: float, clock: _Clock, device: Device, node: Node, age: float, parent: int
) -> Frame:
    pid = PID + 100 * device.index
    start = NOON - age
    trainer = ProcessReading(
        ProcessIdentity(pid, parent, start, at.name, (at.name, "train.py"), cgroup=CGROUP),
        at.state,
        {
            "cpu_user_seconds_total": clock.add("cpu", at.cores * step),
            "cpu_system_seconds_total": 0.0,
            "host_memory_bytes": 4 * GIB,
            "last_cpu": at.last_cpu,
            "cpus_allowed": 16,
            "run_wait_seconds_total": clock.add("wait", at.run_wait * step),
            "read_bytes_total": 0,
            "written_bytes_total": 0,
            "written_chars_total": 0,
        },
        (Thread(pid, at.name, at.state, clock.totals["cpu"]),),
        on_gpu=True,
    )
    helpers = [
        ProcessReading(
            ProcessIdentity(pid + 1 + place, pid, start, at.name, cgroup=CGROUP),
            at.helper_state,
            {
                "cpu_user_seconds_total": clock.add(f"cpu {place}", cores * step),
                "cpu_system_seconds_total": 0.0,
                "host_memory_bytes": GIB,
                "cpus_allowed": 16,
                "read_bytes_total": clock.add(f"read {place}", at.read * step),
                "written_bytes_total": 0,
            },
        )
        for place, cores in enumerate(at.helpers)
    ]
    bits = 100e9
    packets = clock.add("packets", 1e6 * step)
    host: Values = {
        "cpus": 16,
        "processes_running": 2,
        "memory_available_bytes": 64 * GIB,
        "cpu_user_seconds_total": clock.add("host", at.cores * step),
        "cpu_idle_seconds_total": clock.add("idle", (16 - at.cores) * step),
        "swap_in_pages_total": 0,
        "oom_kills_total": 0,
        **{
            f"pressure_{what}_{share}_seconds_total": 0.0
            for what in ("cpu", "io", "memory")
            for share in ("some", "full")
        },
        **at.host,
        **{name: clock.add(name, amount * step) for name, amount in at.growing.items()},
    }
    return Frame(
        NOON + now,
        500.0 + now,
        node,
        gpus=(
            GpuReading(
                device, dict(at.gpu), (GpuProcess(pid, "compute", 30 * GIB, 0.9),) if at.on_gpu else ()
            ),
        ),
        host=HostReading(host),
        filesystems=(
            FilesystemReading(
                "/data",
                "server:/data",
                "nfs4",
                None,
                None,
                {
                    "nfs_reads_total": clock.add("nfs reads", 100 * at.nfs_in_flight * step),
                    "nfs_read_seconds_total": clock.add("nfs", at.nfs_in_flight * step),
                },
            ),
        ),
        network=(
            NetworkReading(
                "eth0",
                "ethernet",
                True,
                {
                    "link_bits_per_second": bits,
                    "rx_bytes_total": clock.add("rx", at.network * bits / 8 * step),
                    "tx_bytes_total": clock.add("tx", 1e6 * step),
                    "rx_packets_total": packets,
                    "tx_packets_total": packets,
                    "rx_errors_total": clock.add("errors", 2e6 * at.errors * step),
                    "tx_errors_total": 0,
                },
            ),
        ),
        processes=(trainer, *helpers) if at.on_gpu else (),
        cgroups=(
            CgroupReading(
                CGROUP,
                {
                    "cpu_periods_total": clock.add("periods", 10 * step),
                    "cpu_throttled_periods_total": clock.add("throttled", 10 * at.throttled * step),
                },
            ),
        ),
    )


def together(*machines: list[Frame]) -> list[Frame]:
    """The GPUs of several machines as those of one."""
    return [
        parts[0]._replace(
            gpus=tuple(gpu for part in parts for gpu in part.gpus),
            processes=tuple(process for part in parts for process in part.processes),
        )
        for parts in zip(*machines, strict=True)
    ]
