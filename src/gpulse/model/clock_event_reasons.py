"""Names and descriptions of NVML's clock event reasons: why a GPU's clocks are lowered."""

from __future__ import annotations

from typing import Literal, NamedTuple

from gpulse.model.frame import GpuReading

ClockReasonWeight = Literal["normal", "notice", "fault"]


class ClockReason(NamedTuple):
    """One bit of the reasons."""

    bit: int
    name: str
    text: str
    weight: ClockReasonWeight


CLOCK_REASONS = (
    ClockReason(0x1, "idle", "nothing runs on the GPU", "normal"),
    ClockReason(0x2, "application clocks", "the clocks are set below the maximum", "notice"),
    ClockReason(0x4, "power cap", "the power limit is reached", "normal"),
    ClockReason(
        0x8,
        "hardware slowdown",
        "the hardware halves the clocks because of heat, a power brake or the power supply",
        "fault",
    ),
    ClockReason(0x10, "sync boost", "another GPU of the sync-boost group holds this one back", "notice"),
    ClockReason(
        0x20, "thermal slowdown", "the GPU or its memory is above its operating temperature", "fault"
    ),
    ClockReason(0x40, "hardware thermal slowdown", "the hardware slows down because of heat", "fault"),
    ClockReason(0x80, "power brake", "the power supply tells the GPU to slow down", "fault"),
    ClockReason(0x100, "display clocks", "a display setting limits the clocks", "notice"),
)


def active_clock_reasons(gpu: GpuReading) -> list[ClockReason]:
    """Return the current reasons, most severe first; empty when there are none or they are unknown."""
    mask = gpu.get("clocks_event_reasons")
    if mask is None:
        return []
    order: tuple[ClockReasonWeight, ...] = ("fault", "notice", "normal")
    return sorted((r for r in CLOCK_REASONS if int(mask) & r.bit), key=lambda r: order.index(r.weight))


def is_power_limit_lowered(gpu: GpuReading) -> bool:
    """Whether the enforced power limit is below the board's default."""
    limit, default = gpu.get("power_limit_watts"), gpu.get("power_default_limit_watts")
    return limit is not None and default is not None and limit < default - 1
