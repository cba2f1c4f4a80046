"""Copies between host and GPU."""

from __future__ import annotations

from gpulse.diagnosis.attribution import link_bytes_per_second
from gpulse.diagnosis.case import Case
from gpulse.diagnosis.rule import Match, Rule
from gpulse.model.finding import Advice, Evidence
from gpulse.model.units import rate


def pcie_copy_bound(case: Case) -> Match | None:
    """The GPU waits for data on its way over PCIe."""
    if case.cause != "copies":
        return None
    stretch, seconds, t = case.stretch, case.attribution.of("copies"), case.t
    rx = stretch.mean("pcie_rx_bytes_per_second", seconds) or 0.0
    tx = stretch.mean("pcie_tx_bytes_per_second", seconds) or 0.0
    way, moved = ("rx", rx) if rx >= tx else ("tx", tx)
    copied = stretch.mean("copies", seconds) or 0.0
    filled = stretch.mean("sm_active_ratio", seconds)
    cores = stretch.cpu("cores", seconds)
    evidence = [
        case.lost_evidence(),
        case.explained_evidence("copies"),
        Evidence("pcie_bytes_per_second", "mean while it copies", copied, ">=", t.copy_bytes_per_second),
        Evidence(f"pcie_{way}_bytes_per_second", "mean while it copies", moved, ">=", 0),
    ]
    if filled is not None:
        evidence.append(Evidence("sm_active_ratio", "mean while it copies", filled, "<", t.copy_sm))
    link = link_bytes_per_second(stretch)
    kind, advice = "", _ANY
    if link:
        used = moved / link
        if used >= t.link_share:
            kind, advice = f", {used:.0%} of what the link carries", _LINK
            evidence.append(Evidence("pcie_link_ratio", "mean while it copies", used, ">=", t.link_share))
        elif used < t.slow_copy_share and (cores or 0.0) >= t.saturated_worker:
            kind, advice = (
                f", {used:.0%} of what the link carries, copied by the CPU out of pageable memory",
                _PAGEABLE,
            )
            evidence.append(Evidence("pcie_link_ratio", "mean while it copies", used, "<", t.slow_copy_share))
            evidence.append(
                Evidence("trainer_cores", "mean while it copies", cores or 0.0, ">=", t.saturated_worker)
            )
    return Match(
        summary=f"waits {case.lost:.0%} of the time for copies: {rate(moved)} {'to' if way == 'rx' else 'from'} the GPU{kind}",
        severity=case.severity(case.lost),
        confidence=case.confidence(case.attribution.shares["copies"]),
        evidence=tuple(evidence),
        ruled_out=case.ruled_out("copies", "main"),
        lost_ratio=case.lost,
        start=case.attribution.onset("copies", t),
        advice=(advice,),
    )


_LINK = Advice(
    "keep on the GPU what is sent at every step, send smaller types (uint8 images, bf16 weights), copy on a second stream while computing",
    "the link is full; only less data or better overlap helps",
    "halve the bytes of a step: the steps come nearly twice as often",
)
_PAGEABLE = Advice(
    "pin_memory=True in the loader (or tensor.pin_memory() once), and .to('cuda', non_blocking=True)",
    "pageable memory is first copied by the CPU into a small pinned buffer, piece by piece",
    "time one copy of the same size from pinned memory: several times faster",
)
_ANY = Advice(
    "copy from pinned memory on a second stream, send less, keep on the GPU what does not change",
    "copies and kernels can run at the same time",
    "replace the copied tensor by one that stays on the GPU: the loss goes away",
)

RULES = (
    Rule(
        id="pcie_copy_bound",
        family="copy",
        title="The GPU waits for copies over PCIe",
        means="Between kernels the GPU waits for data that comes from or goes to the host's memory. Either the link is full, or the CPU copies out of pageable memory at a fraction of the link's speed.",
        recognised="Time is lost while at least 1 GiB/s crosses the link and hardly any multiprocessor works, and these copies account for at least half of the loss. `link`: 70 % of the link in use. `pageable`: less than half of it, with a busy thread. NVML's utilization counts copies as work and reads 100 % here.",
        severity="By lost time: low from 10 %, medium from 20 %, high from 40 %.",
        advice=(_PAGEABLE, _LINK),
        check=pcie_copy_bound,
        needs=("duty", "copies"),
        sources=("CUDA C++ best practices: pinned memory", "Nsight Systems: pageable copies rule"),
    ),
)
