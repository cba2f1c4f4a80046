"""Estimates for GPUs without GPM, from what NVML reports of every GPU: power, utilization and PCIe rates.

- Power: kernels that fill the GPU draw much more than kernels that occupy a few of its SMs. What a program on an idle
  GPU draws is subtracted first; it is learned from each board while it is idle.
- Memory utilization: NVML reads 100% where about 80% of the peak bandwidth is in use.
- Copies: NVML's utilization counts copies as work. The time that the bytes took to cross the link is subtracted, unless
  the power draw shows that kernels ran meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from gpulse.diagnosis.second_summary import SecondSummary, WeightedMean
from gpulse.model.frame import GpuReading

DRAM_PER_MEMORY_UTILIZATION = 0.80
"""Share of the peak memory bandwidth in use where NVML's memory utilization reads 100%."""

MIN_INFERRED_COPIES = float(2**30)
"""PCIe bytes per second below which copies take no time worth subtracting."""

_CONTEXT_WATTS = 15.0
_CONTEXT_SHARE = 0.15
"""Power of a board that is idle at its maximum clock, as long as it was not seen so: a fixed part, and a share of its limit."""
_CONTEXT_CLOCK_SHARE = 0.6
"""Part of the idle power that is proportional to the clock."""
_CLOCK_EXPONENT = 1.5
"""Power of full kernels by clock: between a constant voltage (1) and one that falls with the clock (3).

On an H200 it is about 1, because its limit holds full kernels back at the maximum clock. A larger value makes a GPU at a
low clock look fuller, never emptier.
"""
_LEARNED_ERROR_WATTS = 6.0
_GUESSED_ERROR_SHARE = 0.02
"""How far the idle power may be off: it rises with the temperature, and a guess depends on the board."""
_SAME_CLOCK = 0.10
"""Relative difference of two clocks at which a board draws about the same power when idle."""
_BUCKET_HERTZ = 50e6
_MAX_BUCKETS = 64
_MAX_HOURS = 24
_LINK_EFFICIENCY = 0.90
"""Part of a PCIe link's raw capacity that large copies reach."""
_SMOOTHED_SECONDS = 5.0
"""PCIe rates are means over this time before and after: NVML measures them for 20 ms now and then."""

_PCIE_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_RATES = ("pcie_rx_bytes_per_second", "pcie_tx_bytes_per_second", "copies")


class _HourMinimum(NamedTuple):
    """Lowest power in the idle seconds of one hour."""

    hour: int
    """Hours since the epoch."""
    watts: float


class ContextPower:
    """Learns what one board draws while programs have it open and no kernel runs, by clock."""

    def __init__(self) -> None:
        self._lowest: dict[int, deque[_HourMinimum]] = {}
        """The last hours with idle seconds, by clock in steps of 50 MHz: a wrong reading is forgotten after them."""
        self._was_idle_at: float | None = None
        """Clock of the second before, when it was idle."""

    def follow(self, second: SecondSummary) -> float | None:
        """Learn from the next second, and return the power in watts that is known for its clock."""
        clock, watts = second.mean("sm_clock_hertz"), second.mean("power_watts")
        if clock is None or watts is None or watts <= 0:
            self._was_idle_at = None
            return None
        before = self._was_idle_at
        self._was_idle_at = clock if second.mean("gpu_utilization_ratio") == 0 else None
        # The driver averages power over about a second, so the first idle second is only partly idle.
        if self._was_idle_at is not None and before is not None and _is_same_clock(before, clock):
            place = round(clock / _BUCKET_HERTZ)
            if place in self._lowest or len(self._lowest) < _MAX_BUCKETS:
                hours = self._lowest.setdefault(place, deque(maxlen=_MAX_HOURS))
                hour = int(second.end // 3600)
                if hours and hours[-1].hour == hour:
                    watts = min(watts, hours.pop().watts)
                hours.append(_HourMinimum(hour, watts))
        near = [
            least.watts
            for place, hours in self._lowest.items()
            if _is_same_clock(place * _BUCKET_HERTZ, clock)
            for least in hours
        ]
        return min(near, default=None)


def _is_same_clock(first: float, second: float) -> bool:
    return abs(first - second) <= _SAME_CLOCK * max(first, second)


class FillEstimate(NamedTuple):
    """How much of the GPU is in use while kernels run, estimated from power."""

    ratio: float
    error: float
    """How far it may be off because the idle power is not known exactly; more so for a GPU that is rarely busy."""
    is_learned: bool
    """Whether the idle power of this board was seen."""

    def is_surely_below(self, limit: float) -> bool:
        """Return whether it is below a limit, whatever the idle power is."""
        return self.ratio + self.error < limit


class PowerModel(NamedTuple):
    """What one board draws when it is idle with a program on it, and with kernels that fill it."""

    context_watts: float
    full_watts: float
    """At the maximum clock: the board's default limit, which a lowered limit does not change."""
    max_clock_hertz: float | None = None
    is_learned: bool = False
    """Whether the board was seen idle; otherwise its idle power is a guess from its limit."""

    def full_kernel_watts(self, clock: float | None) -> float:
        """Return what kernels that fill the GPU draw at a clock, beyond an idle GPU."""
        span = self.full_watts - self.context_watts
        if clock is None or not self.max_clock_hertz:
            return span
        return span * float(min(1.0, clock / self.max_clock_hertz) ** _CLOCK_EXPONENT)

    def used_ratio(self, watts: float, clock: float | None) -> float:
        """Return the part of the GPU that was in use on average, 0 to 1."""
        full = self.full_kernel_watts(clock)
        return min(1.0, max(0.0, (watts - self.context_watts) / full)) if full > 0 else 1.0

    def fill(self, watts: float, duty: float, clock: float | None) -> FillEstimate | None:
        """Return the part of the GPU that was in use while kernels ran; None when none ran."""
        full = duty * self.full_kernel_watts(clock)
        if full <= 0:
            return None
        doubt = _LEARNED_ERROR_WATTS if self.is_learned else _GUESSED_ERROR_SHARE * self.full_watts
        ratio = min(1.0, self.used_ratio(watts, clock) / duty)
        return FillEstimate(ratio, doubt / full, self.is_learned)


def model_power(seconds: Sequence[SecondSummary]) -> PowerModel | None:
    """Return the power model of the GPU of these seconds; None when its power or its limit is unknown."""
    if not seconds:
        return None
    reading = seconds[-1].reading
    full = full_power_watts(reading)
    drawn = [watts for second in seconds if (watts := second.mean("power_watts")) is not None]
    if not full or not drawn:
        return None
    most = reading.get("sm_clock_max_hertz")
    learned = next((s.context_watts for s in reversed(seconds) if s.context_watts is not None), None)
    context = min(*drawn, _guess_context_watts(full, seconds, most)) if learned is None else learned
    if context >= full:
        return None
    return PowerModel(context, full, most, is_learned=learned is not None)


def _guess_context_watts(full: float, seconds: Sequence[SecondSummary], max_clock: float | None) -> float:
    clocks = [clock for second in seconds if (clock := second.mean("sm_clock_hertz")) is not None]
    ratio = min(1.0, sum(clocks) / len(clocks) / max_clock) if clocks and max_clock else 1.0
    return (_CONTEXT_WATTS + _CONTEXT_SHARE * full) * (1.0 - _CONTEXT_CLOCK_SHARE * (1.0 - ratio))


def full_power_watts(reading: GpuReading) -> float | None:
    """Return what the board draws under full load at its maximum clock: a lowered limit does not change it."""
    return _first_known(reading, "power_default_limit_watts", "power_max_limit_watts", "power_limit_watts")


def _first_known(reading: GpuReading, *names: str) -> float | None:
    return next((float(value) for name in names if (value := reading.get(name)) is not None), None)


def estimate_dram_ratio(memory_utilization: float) -> float:
    """Return the share of the peak memory bandwidth in use."""
    return DRAM_PER_MEMORY_UTILIZATION * memory_utilization


def link_bytes_per_second(reading: GpuReading) -> float | None:
    """Return the raw capacity of the GPU's PCIe link in one direction, before packet overhead."""
    generation = _first_known(reading, "pcie_link_generation_max", "pcie_link_generation")
    width = _first_known(reading, "pcie_link_width_max", "pcie_link_width")
    if not generation or not width:
        return None
    return _PCIE_LANE_BYTES_PER_SECOND.get(int(generation), 7.563e9) * width


def estimate_copy_ratio(bytes_per_second: float, link: float) -> float:
    """Return the least share of the time that copies at this average rate took, at the full speed of the link."""
    return min(1.0, bytes_per_second / (_LINK_EFFICIENCY * link)) if link > 0 else 1.0


def infer_duty(utilization: float, copying: float, used: float) -> float:
    """Return the fraction of the time in which kernels ran.

    Args:
        utilization: Fraction of the time in which kernels or copies ran.
        copying: Fraction of the time in which copies ran.
        used: The part of the GPU that was in use on average, which kernels cannot exceed: copies behind them took no time.
    """
    return min(utilization, max(utilization - copying, used, 0.0))


def infer_seconds(seconds: Sequence[SecondSummary], model: PowerModel | None) -> Sequence[SecondSummary]:
    """Return the seconds of a GPU without GPM with smoothed PCIe rates, and without copies in their duty."""
    if not any("copies" in second.gpu for second in seconds):
        return seconds
    rates = _smoothed_rates(seconds)
    return [_inferred(second, rate, model) for second, rate in zip(seconds, rates, strict=True)]


def _inferred(second: SecondSummary, rates: dict[str, float], model: PowerModel | None) -> SecondSummary:
    if rates.get("copies", 0.0) < MIN_INFERRED_COPIES:
        return second
    gpu = {**second.gpu, **{name: WeightedMean(rate, 1) for name, rate in rates.items()}}
    link, duty = link_bytes_per_second(second.reading), second.gpu.get("duty")
    if link and duty is not None:
        copying = estimate_copy_ratio(max(rates.get(name, 0.0) for name in _RATES[:2]), link)
        watts, memory = second.mean("power_watts"), second.mean("memory_utilization_ratio")
        used = 1.0  # without a power draw it stays unknown whether kernels hid the copies
        if model is not None and watts is not None:
            used = max(model.used_ratio(watts, second.mean("sm_clock_hertz")), memory or 0.0)
        gpu["duty"] = WeightedMean(infer_duty(duty.mean, copying, used) * duty.count, duty.count)
    return second._replace(gpu=gpu)


def _smoothed_rates(seconds: Sequence[SecondSummary]) -> list[dict[str, float]]:
    """Return the mean PCIe rates around each second."""
    found: list[dict[str, float]] = []
    first = last = 0
    for second in seconds:
        while seconds[first].end <= second.start - _SMOOTHED_SECONDS:
            first += 1
        while last < len(seconds) and seconds[last].start < second.end + _SMOOTHED_SECONDS:
            last += 1
        around = seconds[first:last]
        known = {name: [each.gpu[name].mean for each in around if name in each.gpu] for name in _RATES}
        found.append({name: sum(rates) / len(rates) for name, rates in known.items() if rates})
    return found
