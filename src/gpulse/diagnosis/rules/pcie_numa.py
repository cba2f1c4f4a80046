"""Rules on the PCIe link and on NUMA placement."""

from __future__ import annotations

import math

from gpulse.diagnosis.evidence import GpuEvidence
from gpulse.diagnosis.rule import Rule, RuleMatch, SignalText
from gpulse.model.finding import Advice, Evidence

_GIGATRANSFERS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


def pcie_link_degraded(gpu: GpuEvidence) -> RuleMatch | None:
    """Under load, the link runs below the maximum of GPU and slot."""
    t = gpu.t
    loaded = [
        second
        for second in gpu.window.seconds_seen
        if (second.mean("duty") or 0.0) >= 0.5
        or (second.mean("copies") or 0.0) >= t.link_busy_bytes_per_second
    ]
    if len(loaded) < 5:
        return None  # an idle link slows down by design
    for name, words in (("pcie_link_width", "width"), ("pcie_link_generation", "generation")):
        most = gpu.window.fact(f"{name}_max")
        seen = [value for second in loaded if (value := second.reading.get(name)) is not None]
        if most is None or not seen or max(seen) >= most:
            continue
        slow = gpu.cause == "copies"
        return RuleMatch(
            summary=f"has a slow PCIe link: {words} {max(seen):.0f} instead of {most:.0f} under load",
            severity="high" if slow else "low",
            confidence=0.9,
            evidence=(Evidence(name, "max under load", max(seen), "<", most),),
            start=loaded[0].start,
        )
    return None


def pcie_replays(gpu: GpuEvidence) -> RuleMatch | None:
    """Packets are resent more often than the standard's error rate explains."""
    seconds = gpu.window.seconds_seen
    first, last = seconds[0].reading.get("pcie_replays_total"), seconds[-1].reading.get("pcie_replays_total")
    minutes = (seconds[-1].end - seconds[0].end) / 60
    generation, width = (
        gpu.window.fact("pcie_link_generation_max"),
        gpu.window.fact("pcie_link_width_max"),
    )
    if first is None or last is None or generation is None or width is None or minutes <= 0 or last <= first:
        return None
    limit = math.ceil(0.06 * _GIGATRANSFERS.get(int(generation), 32.0) * width)
    rate = (last - first) / max(minutes, 1.0)
    if rate <= limit:
        return None
    return RuleMatch(
        summary=f"resends {rate:.0f} PCIe packets per minute; up to {limit} per minute are normal",
        severity="medium",
        confidence=0.9,
        evidence=(Evidence("pcie_replays_total", "rise per minute", rate, ">", limit),),
        start=seconds[0].start,
    )


def numa_mismatch(gpu: GpuEvidence) -> RuleMatch | None:
    """The job's threads run on a remote NUMA node, and data moves."""
    remote = gpu.window.cpu("remote_cpus")
    moved = gpu.window.mean("pcie_rx_bytes_per_second") or 0.0
    if remote is None or remote < gpu.t.numa_remote:
        return None
    if gpu.cause not in ("copies", "main") and moved < 2 * gpu.t.copy_bytes_per_second:
        return None
    return RuleMatch(
        summary=f"is fed from another NUMA node, where its processes spend {remote:.0%} of their CPU time",
        severity="medium" if gpu.cause == "copies" else "low",
        confidence=0.6,
        evidence=(Evidence("remote_cpu_ratio", "mean", remote, ">=", gpu.t.numa_remote),),
        lost_ratio=gpu.lost,
        start=gpu.window.start,
    )


RULES = (
    Rule(
        id="pcie_link_degraded",
        family="link",
        title="The PCIe link runs below its maximum speed",
        means="The link runs with fewer lanes or at an older PCIe generation than the GPU and the slot support. Typical causes are a badly seated board, a riser, or a BIOS setting.",
        recognised="The width or generation of the link stays below the maximum that the GPU and the slot support in every second under load. Idle links slow down by design and are ignored.",
        severity="Low; high when the GPU waits for copies.",
        advice=(
            Advice(
                "reseat the board, and check the riser and the BIOS settings",
                "with half the lanes, every copy runs at half the speed",
                "`nvidia-smi -q | grep -A3 'Link Width'` under load should show the maximum width",
            ),
        ),
        check=pcie_link_degraded,
        limits=("link_busy_bytes_per_second",),
        sources=("NVML: current and maximum PCIe link", "DCGM: PCIe width check"),
    ),
    Rule(
        id="pcie_replays",
        family="link",
        title="Too many PCIe packets are resent",
        means="Errors on the link cause packets to be resent. Each resend costs time, and many of them indicate a failing connection.",
        recognised="More packets are resent (replayed) per minute than the PCIe standard's error rate allows: 0.06 per GT/s and lane.",
        severity="Medium.",
        advice=(
            Advice(
                "reseat the board or replace the riser; open a ticket if the resends continue",
                "this rate is too high to be a coincidence; a bad contact is likely",
                "`gpulse -v` should show that the counter no longer grows",
            ),
        ),
        check=pcie_replays,
        sources=("DCGM: PCIe replay limit",),
    ),
    Rule(
        id="numa_mismatch",
        family="link",
        title="The job runs on a different NUMA node than its GPU",
        means="The job's threads run on CPUs of a different NUMA node than the one the GPU is attached to, so every copy crosses the link between the sockets.",
        recognised="At least 80% of the CPU time of the job's processes is spent on a remote node, while the GPU waits for copies or for the program.",
        severity="Low; medium when the GPU waits for copies.",
        advice=(
            Advice(
                "use `numactl --cpunodebind=N --membind=N`, or the scheduler's GPU affinity",
                "access to the memory and PCIe devices of another socket is slower",
                "`nvidia-smi topo -m` lists the CPUs near the GPU; run the job on them and compare",
            ),
        ),
        check=numa_mismatch,
        needs=("processes",),
        limits=("numa_remote",),
        quantities={"remote_cpu_ratio": SignalText("CPU time on a remote NUMA node", "share")},
        sources=("NVML: CPU affinity", "numactl(8)"),
        shown=False,
    ),
)
