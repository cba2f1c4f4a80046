"""Rules on clocks: heat, power, settings and fans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpulse.diagnosis.rule import Rule, RuleMatch, SignalText
from gpulse.model.clock_event_reasons import CLOCK_REASONS
from gpulse.model.finding import Advice, Evidence, Severity
from gpulse.model.frame import GpuReading

if TYPE_CHECKING:  # a snapshot needs only the hardware rules, not the modules for time windows
    from gpulse.diagnosis.evidence import GpuEvidence
    from gpulse.diagnosis.second_summary import SecondSummary

THERMAL = 0x20
HARDWARE_THERMAL = 0x40
POWER_BRAKE = 0x80
SLOWDOWN = 0x8
POWER_CAP = 0x4
APPLICATION = 0x2

INSTANT_FAULTS: dict[int, tuple[str, Severity]] = {
    THERMAL: ("thermal_throttle", "high"),
    HARDWARE_THERMAL: ("thermal_throttle", "critical"),
    POWER_BRAKE: ("power_brake", "critical"),
    SLOWDOWN: ("hw_slowdown", "critical"),
}
"""Reasons that are always faults, with the finding and the severity of each."""


_SEEN_SHARE = 0.9
"""Fraction of the time that cannot fall between frames."""
_LOWERING = (APPLICATION, POWER_CAP, SLOWDOWN, 0x10, THERMAL, HARDWARE_THERMAL, POWER_BRAKE, 0x100)
"""Reasons with which the driver explains clocks below the maximum."""
_MAX_REASON_SHARE = 0.1
_NEAR_LIMIT = 0.9
"""Power draw relative to the limit from which the power cap may act between two frames."""


def _share(seconds: Sequence[SecondSummary], bit: int) -> float:
    frames = sum(second.frames for second in seconds)
    return sum(second.reasons.get(bit, 0) for second in seconds) / frames if frames else 0.0


def _counted(seconds: Sequence[SecondSummary], name: str) -> float | None:
    """Return the fraction of the time from a counter of seconds, which misses nothing between two samples."""
    first, last = seconds[0].reading.get(name), seconds[-1].reading.get(name)
    span = seconds[-1].end - seconds[0].end
    if first is None or last is None or span <= 0 or last < first:
        return None
    return (last - first) / span


def _counts_as_heat(seconds: Sequence[SecondSummary]) -> bool:
    """Whether the driver counts time as heat that no frame shows: it does so while the clocks are locked."""
    counted = _counted(seconds, "thermal_slowdown_seconds_total")
    return _share(seconds, THERMAL) == 0.0 and (counted or 0.0) >= _SEEN_SHARE


def _slowed(gpu: GpuEvidence, bit: int, counter: str | None, severity: Severity) -> RuleMatch | None:
    seconds = gpu.window.seconds_seen
    share = _share(seconds, bit)
    counted = None if counter is None else _counted(seconds, counter)
    if share == 0.0 and (counted or 0.0) >= _SEEN_SHARE:
        return None  # frames cannot miss this much: while the clocks are locked, the driver counts that time here
    if share < gpu.t.slowed_share and (counted or 0.0) < gpu.t.slowed_share:
        return None
    reason = next(entry for entry in CLOCK_REASONS if entry.bit == bit)
    evidence = [Evidence(f"clocks_event_{bit:#x}_ratio", "share", share, ">=", gpu.t.slowed_share)]
    if counter is not None and counted is not None:
        evidence.append(Evidence(counter, "rate", counted, ">=", gpu.t.slowed_share))
    clock = gpu.window.mean("sm_clock_hertz", seconds)
    at = ""
    if clock is not None:
        evidence.append(Evidence("sm_clock_hertz", "mean", clock, ">=", 0.0))
        at = f", at {clock / 1e6:.0f} MHz on average"
    return RuleMatch(
        summary=f"reports a {reason.name} for {max(share, counted or 0.0):.0%} of the time{at}: {reason.text}",
        severity=severity,
        confidence=1.0,
        evidence=tuple(evidence),
        start=seconds[0].start,
        end=seconds[-1].end,
    )


def thermal_throttle(gpu: GpuEvidence) -> RuleMatch | None:
    """Heat lowers the clocks."""
    return _slowed(gpu, HARDWARE_THERMAL, "hardware_thermal_slowdown_seconds_total", "critical") or _slowed(
        gpu, THERMAL, "thermal_slowdown_seconds_total", "high"
    )


def power_brake(gpu: GpuEvidence) -> RuleMatch | None:
    """The power supply lowers the clocks."""
    return _slowed(gpu, POWER_BRAKE, "power_brake_seconds_total", "critical")


def hw_slowdown(gpu: GpuEvidence) -> RuleMatch | None:
    """The hardware lowers the clocks and does not report why."""
    if thermal_throttle(gpu) or power_brake(gpu):
        return None  # the bit only repeats those two
    # A single frame with it is a change of the performance state.
    frames = sum(second.reasons.get(SLOWDOWN, 0) for second in gpu.window.seconds_seen)
    return _slowed(gpu, SLOWDOWN, None, "critical") if frames >= 2 else None


def power_capped(gpu: GpuEvidence) -> RuleMatch | None:
    """The power limit is set below the board's default, and the workload reaches it."""
    limit, default = gpu.window.fact("power_limit_watts"), gpu.window.fact("power_default_limit_watts")
    share = _share(gpu.window.seconds_seen, POWER_CAP)
    if limit is None or share < gpu.t.power_capped_share:
        return None
    if default is None:
        return _capped_below_maximum(gpu, limit, share)
    if limit >= default - 1:
        return None
    return RuleMatch(
        summary=f"is held back {share:.0%} of the time by a power limit of {limit:.0f} W; the default is {default:.0f} W",
        severity="low",
        confidence=0.9,
        evidence=(Evidence("power_limit_watts", "last", limit, "<", default), _cap_evidence(gpu, share)),
        start=gpu.window.seconds_seen[0].start,
    )


def _cap_evidence(gpu: GpuEvidence, share: float) -> Evidence:
    return Evidence(f"clocks_event_{POWER_CAP:#x}_ratio", "share", share, ">=", gpu.t.power_capped_share)


def _capped_below_maximum(gpu: GpuEvidence, limit: float, share: float) -> RuleMatch | None:
    """Compare with the highest limit that the board allows, where its default is not known.

    Most boards for data centers have the highest limit as their default, but others have up to a third more room.
    """
    most = gpu.window.fact("power_max_limit_watts")
    if most is None or limit >= most - 1:
        return None
    is_lowered = limit < gpu.t.lowered_limit * most
    return RuleMatch(
        summary=f"is held back {share:.0%} of the time by a power limit of {limit:.0f} W; up to {most:.0f} W can be set, and the default is not known",
        severity="low" if is_lowered else "info",
        confidence=0.6 if is_lowered else 0.3,
        evidence=(Evidence("power_limit_watts", "last", limit, "<", most), _cap_evidence(gpu, share)),
        start=gpu.window.seconds_seen[0].start,
    )


def clocks_locked(gpu: GpuEvidence) -> RuleMatch | None:
    """The clocks are set below the maximum, by application clocks or by a locked range."""
    wanted, most = gpu.window.fact("sm_clock_application_hertz"), gpu.window.fact("sm_clock_max_hertz")
    share = _share(gpu.window.seconds_seen, APPLICATION)
    if most is None:
        return None
    if wanted is None or share < 0.5 or most - wanted < gpu.t.clock_below_hertz:
        return _locked_without_reason(gpu, most)
    return RuleMatch(
        summary=f"has its clock set to {wanted / 1e6:.0f} MHz; its maximum is {most / 1e6:.0f} MHz",
        severity="low",
        confidence=0.9,
        evidence=(
            Evidence("sm_clock_application_hertz", "last", wanted, "<", most),
            Evidence(f"clocks_event_{APPLICATION:#x}_ratio", "share", share, ">=", 0.5),
        ),
        start=gpu.window.seconds_seen[0].start,
    )


def _locked_without_reason(gpu: GpuEvidence, most: float) -> RuleMatch | None:
    """Infer a locked range of clocks (`nvidia-smi -lgc`), for which the driver reports no reason.

    A busy GPU runs at its boost clock unless the driver reports why not. Some boards never reach their maximum, but
    their boost clocks are close to it and change with temperature and load.
    """
    t, limit = gpu.t, gpu.window.fact("power_limit_watts")
    seconds = [
        second
        for second in gpu.window.seconds_seen
        if (second.mean("duty") or 0.0) >= t.between_stalls_duty
        and second.mean("sm_clock_hertz") is not None
        and second.reading.get("clocks_event_reasons") is not None
    ]
    if sum(second.seconds for second in seconds) < t.min_seconds / 2:
        return None
    clocks = [second.mean("sm_clock_hertz") or 0.0 for second in seconds]
    clock = sum(clocks) / len(clocks)
    highest = (
        most - t.clock_below_hertz if _counts_as_heat(gpu.window.seconds_seen) else t.locked_clock * most
    )
    if clock >= highest or max(clocks) - min(clocks) > t.locked_clock_spread * most:
        return None
    explained = max(_share(seconds, bit) for bit in _LOWERING)
    drawn = gpu.window.mean("power_watts", seconds)
    if explained > _MAX_REASON_SHARE or (limit and drawn is not None and drawn >= _NEAR_LIMIT * limit):
        return None
    evidence = [
        Evidence("sm_clock_hertz", "average while busy", clock, "<", most),
        Evidence("clock_reasons_ratio", "share while busy", explained, "<=", _MAX_REASON_SHARE),
    ]
    power = ""
    if limit and drawn is not None:
        evidence.append(Evidence("power_watts", "average while busy", drawn, "<", _NEAR_LIMIT * limit))
        evidence.append(Evidence("power_limit_watts", "last", limit, ">", 0))
        power = f", drawing {drawn:.0f} of {limit:.0f} W"
    return RuleMatch(
        summary=f"runs at {clock / 1e6:.0f} MHz while busy{power}; its maximum is {most / 1e6:.0f} MHz, and the driver reports no reason for lower clocks, so they are probably locked",
        severity="low",
        confidence=0.7,
        evidence=tuple(evidence),
        start=seconds[0].start,
    )


def memory_overtemperature(gpu: GpuEvidence) -> RuleMatch | None:
    """The memory is hotter than its limit for full speed."""
    limit = gpu.window.fact("memory_temperature_max_celsius")
    temperatures = [
        value
        for second in gpu.window.seconds_seen
        if (value := second.reading.get("memory_temperature_celsius")) is not None
    ]
    if limit is None or limit <= 0 or not temperatures or max(temperatures) < limit:
        return None
    return RuleMatch(
        summary=f"has a memory temperature of {max(temperatures):.0f} C; the limit for full speed is {limit:.0f} C",
        severity="high",
        confidence=1.0,
        evidence=(Evidence("memory_temperature_celsius", "max", max(temperatures), ">=", limit),),
        start=gpu.window.seconds_seen[0].start,
    )


def fan_failure(gpu: GpuEvidence) -> RuleMatch | None:
    """A fan does not turn although the driver requests it, and the GPU is hot."""
    t = gpu.t
    seen = [
        (speed, target, heat)
        for second in gpu.window.seconds_seen
        if (speed := second.reading.get("fan_speed_ratio")) is not None
        and (target := second.reading.get("fan_target_ratio")) is not None
        and (heat := second.reading.get("temperature_celsius")) is not None
    ]
    stopped = [
        entry
        for entry in seen
        if entry[0] < t.fan_stopped and entry[1] >= t.fan_requested and entry[2] >= t.fan_hot_celsius
    ]
    if not seen or 2 * len(stopped) < len(seen):
        return None
    speed, target, heat = stopped[-1]
    return RuleMatch(
        summary=f"runs its fans at {speed:.0%} instead of the requested {target:.0%}, at a temperature of {heat:.0f} C",
        severity="high",
        confidence=0.9,
        evidence=(
            Evidence("fan_speed_ratio", "last", speed, "<", t.fan_stopped),
            Evidence("fan_target_ratio", "last", target, ">=", t.fan_requested),
            Evidence("temperature_celsius", "last", heat, ">=", t.fan_hot_celsius),
        ),
        start=gpu.window.seconds_seen[0].start,
    )


def find_instant_faults(gpu: GpuReading, time: float) -> Iterator[tuple[str, RuleMatch]]:
    """Yield the clock faults that one reading shows, with their finding IDs."""
    mask = int(gpu.get("clocks_event_reasons") or 0)
    clock = gpu.get("sm_clock_hertz")
    at = f" at {clock / 1e6:.0f} MHz" if clock is not None else ""
    for reason in CLOCK_REASONS:
        known = INSTANT_FAULTS.get(reason.bit)
        if known is None or not mask & reason.bit:
            continue
        if reason.bit == SLOWDOWN and mask & (HARDWARE_THERMAL | POWER_BRAKE):
            continue  # the bit only repeats those two
        if reason.bit == THERMAL and mask & HARDWARE_THERMAL:
            continue  # the same heat, and the worse of the two
        name, severity = known
        yield (
            name,
            RuleMatch(
                summary=f"GPU {gpu.device.label}: {reason.name}{at}: {reason.text}",
                severity=severity,
                confidence=1.0,
                evidence=(Evidence("clocks_event_reasons", "now", mask, "has bit", reason.bit),),
                pids=(),
                gpu=gpu.device.index,
                start=time,
                end=time,
            ),
        )


_COOLING = Advice(
    "check airflow, fans, dust and the room temperature",
    "the clocks stay low as long as the GPU is too hot",
    "pause the load for a minute: temperature_celsius should fall and the slowdown should end",
)
_SUPPLY = Advice(
    "check the power supply, its cables and the rack's power budget",
    "an external signal tells the board to use less power",
    "pause other loads on the same power supply: the power brake should end",
)

RULES = (
    Rule(
        id="thermal_throttle",
        family="clocks",
        title="Heat lowers the clocks (thermal throttling)",
        means="The GPU or its memory is too hot, so the driver or the hardware lowers the clocks until it cools down.",
        recognised="The driver's clock event reasons report heat for at least 2% of the time, or its counter of thermal slowdowns grows by that much. A counter that reports 90% of the time or more while no frame shows the reason is ignored, because the driver also counts locked clocks there.",
        severity="High when the driver slows the GPU down, critical when the hardware does.",
        advice=(_COOLING,),
        check=thermal_throttle,
        limits=("slowed_share",),
        sources=("NVML: clock event reasons", "DCGM: clock event reasons treated as faults (mask 0xE8)"),
    ),
    Rule(
        id="power_brake",
        family="clocks",
        title="The power supply slows the GPU down (power brake)",
        category="fault",
        means="A signal from the power supply or the chassis tells the board to use less power, so it halves its clocks.",
        recognised="The driver's clock event reasons report the power brake for at least 2% of the time, or its counter of power brakes grows by that much.",
        severity="Critical.",
        advice=(_SUPPLY,),
        check=power_brake,
        limits=("slowed_share",),
        sources=("NVML: clock event reasons", "DCGM: clock event reasons treated as faults (mask 0xE8)"),
    ),
    Rule(
        id="hw_slowdown",
        family="clocks",
        title="The hardware halves the clocks (slowdown)",
        category="fault",
        means="The hardware halves the clocks because of heat, a power brake or the power supply, and does not report which.",
        recognised="The driver reports a hardware slowdown in at least two frames and for at least 2% of the time; a single frame only indicates a change of performance state.",
        severity="Critical.",
        advice=(_SUPPLY, _COOLING),
        check=hw_slowdown,
        limits=("slowed_share",),
        sources=("NVML: clock event reasons", "DCGM: clock event reasons treated as faults (mask 0xE8)"),
    ),
    Rule(
        id="fan_failure",
        family="clocks",
        title="A fan does not turn",
        category="fault",
        means="The driver tells the fans to turn, but they do not, and the GPU is hot. Boards without fans of their own (SXM) are cooled by the chassis, so this finding does not apply to them.",
        recognised="The fan speed is below 10% although the driver requests at least 30%, and the GPU is at 60 C or more.",
        severity="High.",
        advice=(
            Advice(
                "have the fan replaced, and lower the power limit until then",
                "without the fan, the GPU throttles and then shuts down",
                "after the repair, the fan speed should follow the requested speed",
            ),
        ),
        check=fan_failure,
        limits=("fan_stopped", "fan_requested", "fan_hot_celsius"),
        sources=("NVML: fan speed and target",),
    ),
    Rule(
        id="memory_overtemperature",
        family="clocks",
        title="GPU memory is too hot",
        category="fault",
        means="Device memory is hotter than its limit for full speed; the driver will slow the GPU down, and memory errors become more likely.",
        recognised="The memory temperature reaches the maximum that the board reports.",
        severity="High.",
        advice=(_COOLING,),
        check=memory_overtemperature,
        sources=("NVML: memory temperature and its maximum",),
    ),
    Rule(
        id="power_capped",
        family="clocks",
        title="The power limit is set below the default",
        means="Someone set a power limit below the board's default and the workload reaches it, so the clocks stay lower than they could be. Reaching the default limit is normal and not a finding.",
        recognised="The enforced limit is below the default, and the power cap lowers the clocks at least half of the time. If the default is not known, the limit is compared with the highest one that the board allows: a limit below 70% of that is a finding, and a higher one is informational.",
        severity="Low.",
        advice=(
            Advice(
                "restore the default with `sudo nvidia-smi -pl WATTS`, unless the limit is site policy",
                "the last few watts add little speed, but a limit far below the default costs a lot",
                "sm_clock_hertz should rise under the same load",
            ),
        ),
        check=power_capped,
        limits=("power_capped_share", "lowered_limit"),
        sources=("NVML: enforced and default power limit", "DCGM: the power cap is not treated as a fault"),
    ),
    Rule(
        id="clocks_locked",
        family="clocks",
        title="The clocks are set below the maximum",
        means="Someone set application clocks or a locked range of clocks below the maximum, to reduce noise or power consumption, or to make measurements reproducible.",
        recognised="The driver reports `application clocks` as the reason at least half of the time, and the requested clock is at least 75 MHz below the maximum. Drivers report no reason for clocks that are locked with `nvidia-smi -lgc`, so a busy GPU also has this finding if it runs at a constant clock below 75% of its maximum, without a reported reason and below 90% of its power limit. If the driver counts that time as a thermal slowdown without reporting one, a clock 75 MHz below the maximum is enough.",
        severity="Low.",
        advice=(
            Advice(
                "reset the clocks with `sudo nvidia-smi -rgc` (and `-rac`), unless they are site policy",
                "the setting stays until it is reset or the node reboots",
                "sm_clock_hertz should rise under the same load",
            ),
        ),
        check=clocks_locked,
        limits=("clock_below_hertz", "locked_clock"),
        quantities={
            "clock_reasons_ratio": SignalText("time with a reported reason for lower clocks", "share")
        },
        sources=("NVML: application clocks", "Meta GCM: threshold of 75 MHz"),
    ),
)
