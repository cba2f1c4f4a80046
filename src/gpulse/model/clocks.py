"""What holds a GPU's clocks down: the bits of NVML's clocks event reasons in words."""

from __future__ import annotations

from typing import Literal, NamedTuple

from gpulse.model.frame import GpuReading

Weight = Literal["normal", "notice", "fault"]


class Reason(NamedTuple):
    """One bit."""

    bit: int
    name: str
    text: str
    weight: Weight


REASONS = (
    Reason(0x1, "idle", "nothing runs on the GPU", "normal"),
    Reason(0x2, "application clocks", "somebody set the clocks lower", "notice"),
    Reason(0x4, "power cap", "the power limit is reached", "normal"),
    Reason(
        0x8, "hardware slowdown", "the hardware halves the clocks: heat, power brake or power supply", "fault"
    ),
    Reason(0x10, "sync boost", "another GPU of the sync-boost group holds this one back", "notice"),
    Reason(0x20, "thermal slowdown", "the GPU or its memory is above its operating temperature", "fault"),
    Reason(0x40, "hardware thermal slowdown", "the hardware slows down because of heat", "fault"),
    Reason(0x80, "power brake", "the power supply asks the GPU to slow down", "fault"),
    Reason(0x100, "display clocks", "a display setting holds the clocks", "notice"),
)


def reasons(gpu: GpuReading) -> list[Reason]:
    """The reasons of this instant, heaviest first; empty when unknown or none."""
    mask = gpu.get("clocks_event_reasons")
    if mask is None:
        return []
    order: tuple[Weight, ...] = ("fault", "notice", "normal")
    return sorted((r for r in REASONS if int(mask) & r.bit), key=lambda r: order.index(r.weight))


def is_lowered_cap(gpu: GpuReading) -> bool:
    """Whether the power limit in force is below the one the board ships with."""
    limit, default = gpu.get("power_limit_watts"), gpu.get("power_default_limit_watts")
    return limit is not None and default is not None and limit < default - 1
