"""What holds the clocks down: heat, power, settings, fans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpulse.diagnosis.rule import Match, Rule
from gpulse.model.clocks import REASONS
from gpulse.model.finding import Advice, Evidence, Severity
from gpulse.model.frame import GpuReading

if TYPE_CHECKING:  # a look needs the facts alone, not what windows of time are made of
    from gpulse.diagnosis.case import Case
    from gpulse.diagnosis.seconds import Second

THERMAL = 0x20
HARDWARE_THERMAL = 0x40
POWER_BRAKE = 0x80
SLOWDOWN = 0x8
POWER_CAP = 0x4
APPLICATION = 0x2

INSTANT: dict[int, tuple[str, Severity]] = {
    THERMAL: ("thermal_throttle", "high"),
    HARDWARE_THERMAL: ("thermal_throttle", "critical"),
    POWER_BRAKE: ("power_brake", "critical"),
    SLOWDOWN: ("hw_slowdown", "critical"),
}
"""The bits that are faults wherever they are seen, with the finding they make."""


def _share(seconds: Sequence[Second], bit: int) -> float:
    frames = sum(second.frames for second in seconds)
    return sum(second.reasons.get(bit, 0) for second in seconds) / frames if frames else 0.0


def _counted(seconds: Sequence[Second], name: str) -> float | None:
    """Share of the time by a counter of seconds, which misses nothing between two samples."""
    first, last = seconds[0].reading.get(name), seconds[-1].reading.get(name)
    span = seconds[-1].end - seconds[0].end
    if first is None or last is None or span <= 0 or last < first:
        return None
    return (last - first) / span


def _slowed(case: Case, bit: int, counter: str | None, severity: Severity) -> Match | None:
    seconds = case.stretch.seconds_seen
    share = _share(seconds, bit)
    counted = None if counter is None else _counted(seconds, counter)
    if share < case.t.slowed_share and (counted or 0.0) < case.t.slowed_share:
        return None
    reason = next(entry for entry in REASONS if entry.bit == bit)
    evidence = [Evidence(f"clocks_event_{bit:#x}_ratio", "share", share, ">=", case.t.slowed_share)]
    if counter is not None and counted is not None:
        evidence.append(Evidence(counter, "rate", counted, ">=", case.t.slowed_share))
    clock = case.stretch.mean("sm_clock_hertz", seconds)
    at = ""
    if clock is not None:
        evidence.append(Evidence("sm_clock_hertz", "mean", clock, ">=", 0.0))
        at = f", at {clock / 1e6:.0f} MHz on average"
    return Match(
        summary=f"{reason.name} for {max(share, counted or 0.0):.0%} of the time{at}: {reason.text}",
        severity=severity,
        confidence=1.0,
        evidence=tuple(evidence),
        start=seconds[0].start,
        end=seconds[-1].end,
    )


def thermal_throttle(case: Case) -> Match | None:
    """Heat holds the clocks down."""
    return _slowed(case, HARDWARE_THERMAL, "hardware_thermal_slowdown_seconds_total", "critical") or _slowed(
        case, THERMAL, "thermal_slowdown_seconds_total", "high"
    )


def power_brake(case: Case) -> Match | None:
    """The power supply holds the clocks down."""
    return _slowed(case, POWER_BRAKE, "power_brake_seconds_total", "critical")


def hw_slowdown(case: Case) -> Match | None:
    """The hardware holds the clocks down and does not say why."""
    if thermal_throttle(case) or power_brake(case):
        return None  # the bit only repeats what those two say
    # A single frame with it is a change of the performance state.
    frames = sum(second.reasons.get(SLOWDOWN, 0) for second in case.stretch.seconds_seen)
    return _slowed(case, SLOWDOWN, None, "critical") if frames >= 2 else None


def power_capped(case: Case) -> Match | None:
    """Somebody set the power limit below the board's own, and it is reached."""
    limit, default = case.stretch.fact("power_limit_watts"), case.stretch.fact("power_default_limit_watts")
    share = _share(case.stretch.seconds_seen, POWER_CAP)
    if limit is None or default is None or limit >= default - 1 or share < case.t.power_capped_share:
        return None
    return Match(
        summary=f"runs into a power limit of {limit:.0f} W, set below the board's own {default:.0f} W, {share:.0%} of the time",
        severity="low",
        confidence=0.9,
        evidence=(
            Evidence("power_limit_watts", "last", limit, "<", default),
            Evidence(f"clocks_event_{POWER_CAP:#x}_ratio", "share", share, ">=", case.t.power_capped_share),
        ),
        start=case.stretch.seconds_seen[0].start,
    )


def clocks_locked(case: Case) -> Match | None:
    """Somebody set the clocks lower."""
    wanted, most = case.stretch.fact("sm_clock_application_hertz"), case.stretch.fact("sm_clock_max_hertz")
    share = _share(case.stretch.seconds_seen, APPLICATION)
    if wanted is None or most is None or share < 0.5 or most - wanted < case.t.clock_below_hertz:
        return None
    return Match(
        summary=f"has its clock set to {wanted / 1e6:.0f} MHz, below its highest of {most / 1e6:.0f} MHz",
        severity="low",
        confidence=0.9,
        evidence=(
            Evidence("sm_clock_application_hertz", "last", wanted, "<", most),
            Evidence(f"clocks_event_{APPLICATION:#x}_ratio", "share", share, ">=", 0.5),
        ),
        start=case.stretch.seconds_seen[0].start,
    )


def memory_overtemperature(case: Case) -> Match | None:
    """The memory is hotter than it may be at full speed."""
    limit = case.stretch.fact("memory_temperature_max_celsius")
    temperatures = [
        value
        for second in case.stretch.seconds_seen
        if (value := second.reading.get("memory_temperature_celsius")) is not None
    ]
    if limit is None or limit <= 0 or not temperatures or max(temperatures) < limit:
        return None
    return Match(
        summary=f"has memory at {max(temperatures):.0f} C, and may have {limit:.0f} C at full speed",
        severity="high",
        confidence=1.0,
        evidence=(Evidence("memory_temperature_celsius", "max", max(temperatures), ">=", limit),),
        start=case.stretch.seconds_seen[0].start,
    )


def fan_failure(case: Case) -> Match | None:
    """A fan that should turn does not, and the GPU is hot."""
    t = case.t
    seen = [
        (speed, target, heat)
        for second in case.stretch.seconds_seen
        if (speed := second.reading.get("fan_speed_ratio")) is not None
        and (target := second.reading.get("fan_target_ratio")) is not None
        and (heat := second.reading.get("temperature_celsius")) is not None
    ]
    stopped = [
        entry
        for entry in seen
        if entry[0] < t.fan_stopped and entry[1] >= t.fan_wanted and entry[2] >= t.fan_hot_celsius
    ]
    if not seen or 2 * len(stopped) < len(seen):
        return None
    speed, target, heat = stopped[-1]
    return Match(
        summary=f"has fans at {speed:.0%} that should turn at {target:.0%}, and is {heat:.0f} C hot",
        severity="high",
        confidence=0.9,
        evidence=(
            Evidence("fan_speed_ratio", "last", speed, "<", t.fan_stopped),
            Evidence("fan_target_ratio", "last", target, ">=", t.fan_wanted),
            Evidence("temperature_celsius", "last", heat, ">=", t.fan_hot_celsius),
        ),
        start=case.stretch.seconds_seen[0].start,
    )


def instant(gpu: GpuReading, time: float) -> Iterator[tuple[str, Match]]:
    """The faults of the clocks that one reading shows, with their findings' ids."""
    mask = int(gpu.get("clocks_event_reasons") or 0)
    clock = gpu.get("sm_clock_hertz")
    at = f" at {clock / 1e6:.0f} MHz" if clock is not None else ""
    for reason in REASONS:
        known = INSTANT.get(reason.bit)
        if known is None or not mask & reason.bit:
            continue
        if reason.bit == SLOWDOWN and mask & (HARDWARE_THERMAL | POWER_BRAKE):
            continue  # it only repeats what those two say
        if reason.bit == THERMAL and mask & HARDWARE_THERMAL:
            continue  # the same heat, and the worse of the two
        name, severity = known
        yield (
            name,
            Match(
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
    "check airflow, fans, dust and the room's temperature",
    "the clocks stay low for as long as the GPU is too hot",
    "temperature_celsius falls and the slowdown ends when the load is paused for a minute",
)
_SUPPLY = Advice(
    "check the power supply, its cables and the rack's power budget",
    "the board is told from outside to use less power",
    "the brake ends when other loads on the same supply are paused",
)

RULES = (
    Rule(
        id="thermal_throttle",
        family="clocks",
        title="Heat holds the clocks down",
        means="The GPU or its memory is too hot, and the driver or the hardware lowers the clocks until it cools.",
        recognised="The clocks event reasons name heat for 2 % of the time or more, or the driver's counter of such time grows by that much.",
        severity="High when the driver slows it down, critical when the hardware does.",
        advice=(_COOLING,),
        check=thermal_throttle,
        sources=("NVML: clocks event reasons", "DCGM: bad clock reasons 0xE8"),
    ),
    Rule(
        id="power_brake",
        family="clocks",
        title="The power supply slows the GPU down",
        means="A signal from the power supply or the chassis tells the board to use less power, and it halves its clocks.",
        recognised="The clocks event reasons name the power brake, or its counter grows.",
        severity="Critical.",
        advice=(_SUPPLY,),
        check=power_brake,
        sources=("NVML: clocks event reasons", "DCGM: bad clock reasons 0xE8"),
    ),
    Rule(
        id="hw_slowdown",
        family="clocks",
        title="The hardware slows the GPU down",
        means="The hardware halves the clocks because of heat, a power brake or the supply, and does not say which.",
        recognised="The reason is set in two frames or more and for 2 % of the time; one frame alone is a change of performance state.",
        severity="Critical.",
        advice=(_SUPPLY, _COOLING),
        check=hw_slowdown,
        sources=("NVML: clocks event reasons", "DCGM: bad clock reasons 0xE8"),
    ),
    Rule(
        id="fan_failure",
        family="clocks",
        title="A fan does not turn",
        means="The driver asks the fans to turn, they do not, and the GPU is hot. Boards without fans of their own (SXM) are cooled by the chassis and never show this.",
        recognised="Fan speed below 10 % with a target of 30 % or more, at 60 C or more.",
        severity="High.",
        advice=(
            Advice(
                "have the fan replaced, and lower the power limit until then",
                "without it the GPU throttles, then switches off",
                "the speed follows the target after the repair",
            ),
        ),
        check=fan_failure,
        sources=("NVML: fan speed and target",),
    ),
    Rule(
        id="memory_overtemperature",
        family="clocks",
        title="The GPU's memory is too hot",
        means="The device memory is hotter than it may be at full speed; the driver will slow the GPU down, and errors become likelier.",
        recognised="The memory's temperature reaches the maximum that the board states.",
        severity="High.",
        advice=(_COOLING,),
        check=memory_overtemperature,
        sources=("NVML: memory temperature and its maximum",),
    ),
    Rule(
        id="power_capped",
        family="clocks",
        title="The power limit was lowered",
        means="Somebody set a power limit below the one the board ships with, and the work reaches it, so the clocks stay lower than they could be. At the default limit this is normal and no finding.",
        recognised="The limit in force is below the default one, and the power cap holds the clocks down half of the time or more.",
        severity="Low.",
        advice=(
            Advice(
                "`sudo nvidia-smi -pl WATTS` with the default, unless the limit is the site's policy",
                "the last watts buy few percent of speed; a low limit costs much",
                "sm_clock_hertz rises under the same load",
            ),
        ),
        check=power_capped,
        sources=("NVML: enforced and default power limit", "DCGM: the power cap is not a bad clock reason"),
    ),
    Rule(
        id="clocks_locked",
        family="clocks",
        title="The clocks were set lower",
        means="Somebody set application clocks below the highest, for quiet or for repeatable measurements.",
        recognised="The reason `application clocks` holds for half of the time, and the clock asked for is at least 75 MHz below the highest.",
        severity="Low.",
        advice=(
            Advice(
                "`sudo nvidia-smi -rac` (and `-rgc`) gives the clocks back",
                "settings stay until they are reset or the node reboots",
                "sm_clock_hertz rises under the same load",
            ),
        ),
        check=clocks_locked,
        sources=("NVML: application clocks", "GCM: 75 MHz"),
    ),
)
