"""Rules on copies between host and GPU."""

from __future__ import annotations

from gpulse.diagnosis.estimates import link_bytes_per_second
from gpulse.diagnosis.evidence import GpuEvidence
from gpulse.diagnosis.rule import Rule, RuleMatch, SignalText
from gpulse.model.finding import Advice, Evidence
from gpulse.model.formatting import rate


def pcie_copy_bound(gpu: GpuEvidence) -> RuleMatch | None:
    """The GPU waits for data that crosses PCIe."""
    if gpu.cause != "copies":
        return None
    window, seconds, t = gpu.window, gpu.attribution.of("copies"), gpu.t
    rx = window.mean("pcie_rx_bytes_per_second", seconds) or 0.0
    tx = window.mean("pcie_tx_bytes_per_second", seconds) or 0.0
    way, moved = ("rx", rx) if rx >= tx else ("tx", tx)
    copied = window.mean("copies", seconds) or 0.0
    filled = window.mean("sm_active_ratio", seconds)
    cores = window.cpu("cores", seconds)
    evidence = [
        gpu.lost_evidence(),
        gpu.explained_evidence("copies"),
        Evidence("pcie_bytes_per_second", "average while copying", copied, ">=", t.copy_bytes_per_second),
        Evidence(f"pcie_{way}_bytes_per_second", "average while copying", moved, ">=", 0),
    ]
    if filled is not None:
        evidence.append(Evidence("sm_active_ratio", "average while copying", filled, "<", t.copy_sm))
    inferred = ""
    if "gpm" not in window.signals:
        only_copied = max(
            0.0,
            (window.mean("gpu_utilization_ratio", seconds) or 0.0) - (window.mean("duty", seconds) or 0.0),
        )
        evidence.append(Evidence("estimated_copy_ratio", "average while copying", only_copied, ">=", 0.0))
        inferred = " (inferred from sampled PCIe traffic and power)"
    link = link_bytes_per_second(window.seconds_seen[-1].reading)
    kind, advice = "", _ANY
    if link:
        used = moved / link
        if used >= t.link_share:
            kind, advice = f", {used:.0%} of the link's capacity", _LINK
            evidence.append(Evidence("pcie_link_ratio", "average while copying", used, ">=", t.link_share))
        elif used < t.slow_copy_share and (cores or 0.0) >= t.saturated_worker:
            kind, advice = (
                f", {used:.0%} of the link's capacity, because the CPU copies from pageable memory",
                _PAGEABLE,
            )
            evidence.append(
                Evidence("pcie_link_ratio", "average while copying", used, "<", t.slow_copy_share)
            )
            evidence.append(
                Evidence("trainer_cores", "average while copying", cores or 0.0, ">=", t.saturated_worker)
            )
    return RuleMatch(
        summary=f"waits {gpu.lost:.0%} of the time for copies: {rate(moved)} {'to' if way == 'rx' else 'from'} the GPU{kind}{inferred}",
        severity=gpu.severity(gpu.lost),
        confidence=gpu.confidence(gpu.attribution.shares["copies"]),
        evidence=tuple(evidence),
        ruled_out_causes=gpu.ruled_out("copies", "main"),
        lost_ratio=gpu.lost,
        start=gpu.attribution.onset("copies", t),
        advice=(advice,),
        inferred=bool(inferred),
    )


_LINK = Advice(
    "keep data on the GPU instead of sending it at every step, send smaller data types (uint8 images, bf16 weights), and overlap copies with computation on a second stream",
    "the link is full; only less data or better overlap helps",
    "halve the bytes per step: steps should become nearly twice as fast",
)
_PAGEABLE = Advice(
    "use pin_memory=True in the data loader (or tensor.pin_memory() once) and .to('cuda', non_blocking=True)",
    "the CPU first copies pageable memory piece by piece into a small pinned buffer",
    "measure one copy of the same size from pinned memory: it should be several times faster",
)
_ANY = Advice(
    "copy from pinned memory on a second stream, send less data, and keep data that does not change on the GPU",
    "copies and kernels can run at the same time",
    "replace the copied tensor with one that stays on the GPU: the lost time should disappear",
)

RULES = (
    Rule(
        id="pcie_copy_bound",
        family="copy",
        title="The GPU waits for PCIe copies",
        means="Between kernels, the GPU waits for data that moves to or from host memory. Either the link is full, or the CPU copies from pageable memory at a fraction of the link's speed.",
        recognised="GPU time is lost while at least 1 GiB/s crosses the link and less than half of the SMs (streaming multiprocessors) are active, and these copies account for at least half of the lost time. The link counts as full from 70% of its capacity; copies from pageable memory use less than half of it and keep a thread busy. NVML's utilization counts copies as work and may show 100%. Without GPM (GPU performance monitoring), the time that the copies took is therefore subtracted from it, unless the power draw shows that kernels ran at the same time.",
        severity="Depends on the lost GPU time: low from 10%, medium from 20%, high from 40%.",
        advice=(_PAGEABLE, _LINK),
        check=pcie_copy_bound,
        needs=("duty", "copies"),
        limits=("lost", "explained", "copy_bytes_per_second", "copy_sm", "link_share"),
        quantities={"pcie_link_ratio": SignalText("PCIe link utilization", "share")},
        explains="copies",
        inferred_without_gpm=True,
        sources=("CUDA C++ best practices: pinned memory", "Nsight Systems: pageable copies rule"),
    ),
)
