"""The links of a GPU: PCIe and where its processes run."""

from __future__ import annotations

import math

from gpulse.diagnosis.case import Case
from gpulse.diagnosis.rule import Match, Rule
from gpulse.model.finding import Advice, Evidence

_GIGATRANSFERS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


def pcie_link_degraded(case: Case) -> Match | None:
    """The link runs below what GPU and slot can do, under load."""
    t = case.t
    loaded = [
        second
        for second in case.stretch.seconds_seen
        if (second.mean("duty") or 0.0) >= 0.5
        or (second.mean("copies") or 0.0) >= t.link_busy_bytes_per_second
    ]
    if len(loaded) < 5:
        return None  # an idle link slows down by design
    for name, words in (("pcie_link_width", "lanes"), ("pcie_link_generation", "PCIe generation")):
        most = case.stretch.fact(f"{name}_max")
        seen = [value for second in loaded if (value := second.reading.get(name)) is not None]
        if most is None or not seen or max(seen) >= most:
            continue
        slow = case.cause == "copies"
        return Match(
            summary=f"has a slower link than it could: {words} {max(seen):.0f} of {most:.0f} under load",
            severity="high" if slow else "low",
            confidence=0.9,
            evidence=(Evidence(name, "max under load", max(seen), "<", most),),
            start=loaded[0].start,
        )
    return None


def pcie_replays(case: Case) -> Match | None:
    """Packets are sent again more often than the standard's error rate explains."""
    seconds = case.stretch.seconds_seen
    first, last = seconds[0].reading.get("pcie_replays_total"), seconds[-1].reading.get("pcie_replays_total")
    minutes = (seconds[-1].end - seconds[0].end) / 60
    generation, width = (
        case.stretch.fact("pcie_link_generation_max"),
        case.stretch.fact("pcie_link_width_max"),
    )
    if first is None or last is None or generation is None or width is None or minutes <= 0 or last <= first:
        return None
    limit = math.ceil(0.06 * _GIGATRANSFERS.get(int(generation), 32.0) * width)
    rate = (last - first) / max(minutes, 1.0)
    if rate <= limit:
        return None
    return Match(
        summary=f"sends PCIe packets again {rate:.0f} times a minute; {limit} would be normal",
        severity="medium",
        confidence=0.9,
        evidence=(Evidence("pcie_replays_total", "rise a minute", rate, ">", limit),),
        start=seconds[0].start,
    )


def numa_mismatch(case: Case) -> Match | None:
    """The job's threads run far from the GPU, and data moves."""
    remote = case.stretch.cpu("remote_cpus")
    moved = case.stretch.mean("pcie_rx_bytes_per_second") or 0.0
    if remote is None or remote < case.t.numa_remote:
        return None
    if case.cause not in ("copies", "main") and moved < 2 * case.t.copy_bytes_per_second:
        return None
    return Match(
        summary=f"is fed from the other side of the machine: {remote:.0%} of its processes' CPU time is on another NUMA node",
        severity="medium" if case.cause == "copies" else "low",
        confidence=0.6,
        evidence=(Evidence("remote_cpu_ratio", "mean", remote, ">=", case.t.numa_remote),),
        lost_ratio=case.lost,
        start=case.stretch.start,
    )


RULES = (
    Rule(
        id="pcie_link_degraded",
        family="link",
        title="The PCIe link is slower than it could be",
        means="The link runs with fewer lanes or an older generation than GPU and slot can do together: a bad seat, a riser, a setting.",
        recognised="Width or generation below the maximum of GPU and slot in every second under load; idle links slow down by design and are not looked at.",
        severity="Low; high when copies are what the GPU waits for.",
        advice=(
            Advice(
                "reseat the board, check riser and BIOS settings",
                "half the lanes are half the speed of every copy",
                "`nvidia-smi -q | grep -A3 'Link Width'` under load",
            ),
        ),
        check=pcie_link_degraded,
        sources=("NVML: current and maximal link", "DCGM: PCIe width check"),
    ),
    Rule(
        id="pcie_replays",
        family="link",
        title="PCIe packets are sent again too often",
        means="Errors on the link make packets be sent again; each costs time, and many announce a failing connection.",
        recognised="More replays a minute than 0.06 for each GT/s and lane, which is what the standard's error rate allows.",
        severity="Medium.",
        advice=(
            Advice(
                "reseat the board, replace the riser, open a ticket if it goes on",
                "the rate tells a bad contact from chance",
                "`gpulse -v` shows the counter standing still",
            ),
        ),
        check=pcie_replays,
        sources=("DCGM: PCIe replay limit",),
    ),
    Rule(
        id="numa_mismatch",
        family="link",
        title="The job runs far from its GPU",
        means="The job's threads run on CPUs of another NUMA node than the one the GPU hangs on; every copy crosses the link between the sockets.",
        recognised="At least 80 % of the CPU time of the job's processes on a remote node, while copies or the host's thread hold the GPU up.",
        severity="Low; medium when copies are what the GPU waits for.",
        advice=(
            Advice(
                "`numactl --cpunodebind=N --membind=N`, or the scheduler's GPU affinity",
                "memory and PCIe of the other socket are slower",
                "`nvidia-smi topo -m` names the GPU's CPUs; run there once",
            ),
        ),
        check=numa_mismatch,
        needs=("processes",),
        sources=("NVML: CPU affinity", "numactl(8)"),
        shown=False,
    ),
)
