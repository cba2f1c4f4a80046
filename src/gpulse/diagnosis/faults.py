"""What the driver itself reports as a fault: facts, not inferences, so one frame is enough."""

from __future__ import annotations

from collections.abc import Iterator

from gpulse.model.clocks import reasons
from gpulse.model.finding import SEVERITIES, Advice, Evidence, Family, Finding, Severity
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.health import Code, Health, gathered

_RECOVERY = {
    1: "a reset of the GPU",
    2: "a reboot of the node",
    3: "its peers to be drained",
    4: "to be drained and reset",
}
_CLOCK_FAULTS: dict[int, tuple[str, Severity]] = {
    0x20: ("thermal_throttle", "high"),
    0x40: ("thermal_throttle", "critical"),
    0x80: ("power_brake", "critical"),
    0x8: ("hw_slowdown", "critical"),
}
_COOLING = Advice(
    "check airflow, fans, dust and the room's temperature",
    "the clocks stay low for as long as the GPU is too hot",
    "temperature_celsius falls and the slowdown ends when the load is paused for a minute",
)
_SUPPLY = Advice(
    "check the power supply, its cables and the rack's power budget",
    "the board is told from outside to use less power",
    "the brake ends when other loads on the same supply are paused",
)
_SERVICE = Advice(
    "stop using this GPU for work that matters and reset it, or have it replaced",
    "memory that fails once tends to fail again, and results can be wrong",
    "run `nvidia-smi -q -d ECC,ROW_REMAPPER` after a reset: the counters stay at zero on a sound board",
)

READINGS = frozenset(
    {
        "clocks_event_reasons",
        "ecc_uncorrected_errors_total",
        "recovery_action",
        "remapped_rows_failed",
        "remapped_rows_pending",
        "retired_pages_pending",
    }
)
"""What is looked at, besides health and the Xids, which are seen only while somebody watches."""

_DRIVER_FAULTS: frozenset[Code] = frozenset(
    {"driver_missing", "driver_mismatch", "driver_unloaded", "not_answering", "failed", "no_permission"}
)
_GPU_FAULTS: frozenset[Code] = frozenset(
    {"gpu_lost", "not_answering", "driver_missing", "driver_mismatch", "driver_unloaded"}
)


def faults(frame: Frame) -> list[Finding]:
    """The faults that NVML reports in this frame, worst first."""
    found = [*_out_of_reach(frame)]
    found += [finding for gpu in frame.gpus if gpu.device.mig_index is None for finding in _of(gpu, frame)]
    return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))


def _of(gpu: GpuReading, frame: Frame) -> Iterator[Finding]:
    yield from _clocks(gpu, frame)
    yield from _memory(gpu, frame)
    recovery = gpu.get("recovery_action")
    if recovery:
        wanted = _RECOVERY.get(int(recovery), f"recovery action {recovery}")
        yield _finding(
            gpu,
            frame,
            "gpu_fault",
            "fault",
            "critical",
            f"the driver asks for {wanted}",
            "recovery_action",
            recovery,
            0,
            _SERVICE,
        )
    xid = gpu.get("xid_last_code")
    if xid is not None:
        advice = Advice(
            f"look up Xid {xid:.0f} in NVIDIA's catalogue and see `dmesg | grep -i xid`",
            "the driver logs why it stopped or reset a channel",
            "the same program on another GPU tells whether the program or the board is at fault",
        )
        yield _finding(
            gpu,
            frame,
            "gpu_fault",
            "fault",
            "high",
            f"the driver reported Xid {xid:.0f}",
            "xid_errors_total",
            gpu.get("xid_errors_total") or 1,
            0,
            advice,
        )


def _out_of_reach(frame: Frame) -> Iterator[Finding]:
    """The driver, or GPUs, that cannot be asked; GPUs with the same trouble in one finding."""
    for health in gathered(frame.health):
        if health.source != "nvml":
            continue
        if health.subject is None:
            # A machine without a driver and without GPUs is sound.
            if health.code in _DRIVER_FAULTS and (health.code != "driver_missing" or frame.gpus):
                yield _unreachable(health, frame, health.detail, None)
        elif health.code in _GPU_FAULTS:
            meant = [gpu.device for gpu in frame.gpus if _is_about(health, gpu)]
            label = meant[0].label if meant else health.subject.removeprefix("gpu ")
            yield _unreachable(
                health, frame, f"GPU {label}: {health.detail}", meant[0].index if meant else None
            )


def _is_about(health: Health, gpu: GpuReading) -> bool:
    return health.subject in (f"gpu {gpu.device.label}", gpu.device.uuid)


def _unreachable(health: Health, frame: Frame, summary: str, gpu: int | None) -> Finding:
    whole = health.subject is None
    advice = Advice(
        health.hint or "see `dmesg | grep -i -e xid -e nvrm`, then reset or reboot",
        "without the driver no GPU can be used or read" if whole else "nothing can be read from it like this",
        "`gpulse doctor` finds the driver in order" if whole else "`gpulse doctor` names the GPU again",
    )
    return Finding(
        "gpu_fault",
        "fault",
        "critical",
        1.0,
        summary,
        gpu=gpu,
        start=health.since,
        end=frame.time,
        advice=(advice,),
    )


def _clocks(gpu: GpuReading, frame: Frame) -> Iterator[Finding]:
    bits = {reason.bit: reason for reason in reasons(gpu)}
    for bit, (name, severity) in _CLOCK_FAULTS.items():
        if bit in bits and not (
            bit == 0x8 and bits.keys() & {0x40, 0x80}
        ):  # 0x8 only repeats what those two say
            clock = gpu.get("sm_clock_hertz")
            at = f" at {clock / 1e6:.0f} MHz" if clock is not None else ""
            summary = f"{bits[bit].name}{at}: {bits[bit].text}"
            advice = _COOLING if name == "thermal_throttle" else _SUPPLY
            mask = gpu.get("clocks_event_reasons") or 0
            yield _finding(
                gpu,
                frame,
                name,
                "clocks",
                severity,
                summary,
                "clocks_event_reasons",
                mask,
                bit,
                advice,
                "has bit",
            )


def _memory(gpu: GpuReading, frame: Frame) -> Iterator[Finding]:
    broken: tuple[tuple[str, Severity, str], ...] = (
        (
            "ecc_uncorrected_errors_total",
            "critical",
            "{} memory errors could not be corrected since the driver was loaded",
        ),
        ("remapped_rows_failed", "critical", "a broken memory row could not be remapped"),
        ("remapped_rows_pending", "medium", "a memory row waits for a reset to be remapped"),
        ("retired_pages_pending", "medium", "a memory page waits for a reset to be retired"),
    )
    for name, severity, words in broken:
        value = gpu.get(name)
        if value:
            yield _finding(
                gpu, frame, "gpu_fault", "fault", severity, words.format(value), name, value, 0, _SERVICE
            )


def _finding(
    gpu: GpuReading,
    frame: Frame,
    name: str,
    family: Family,
    severity: Severity,
    summary: str,
    signal: str,
    value: float,
    threshold: float,
    advice: Advice,
    comparison: str = ">",
) -> Finding:
    return Finding(
        id=name,
        family=family,
        severity=severity,
        confidence=1.0,
        summary=f"GPU {gpu.device.label}: {summary}",
        gpu=gpu.device.index,
        start=frame.time,
        end=frame.time,
        evidence=(Evidence(signal, "now", value, comparison, threshold),),
        advice=(advice,),
    )
