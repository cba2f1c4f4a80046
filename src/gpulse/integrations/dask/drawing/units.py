"""In which unit a metric is drawn, and the ticks of its axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gpulse.integrations.dask.tracking import ArgumentError, columns
from gpulse.model.metric import CATALOGUE

_SHARES = {"mem-util": 1.0, "compute-util": 1.0}
_ROUND_SHARES = (10.0, 20.0, 50.0, 100.0)
_BINARY = ((1024.0**4, "TiB"), (1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"), (1.0, "bytes"))
_RATES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
_COUNTS = ((1e9, "billions"), (1e6, "millions"), (1.0, ""))
_SCALES = {
    "bytes": _BINARY,
    "bytes/second": _RATES,
    "bits/second": ((1e9, "Gb/s"), (1e6, "Mb/s"), (1.0, "b/s")),
    "hertz": ((1e6, "MHz"),),
    "watts": ((1.0, "W"),),
    "joules": ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J")),
    "celsius": ((1.0, "°C"),),
    "seconds": ((1.0, "s"), (1e-3, "ms")),
    "percent": ((1.0, "%"),),
    "1/second": ((1e6, "millions/s"), (1.0, "1/s")),
    "1": _COUNTS,
}
_LEAST_RANGE, _LEAST_SHARE = 1e-300, 1e-9
"""What differs by less is the same."""


class Axis(NamedTuple):
    """How values are drawn: divided by a factor, between two ends."""

    unit: str
    factor: float
    low: float
    high: float
    ticks: tuple[float, ...]


class _Known(NamedTuple):
    unit: str
    kind: str


def axis_of(metric: str, lowest: float, highest: float) -> Axis:
    """The axis for values of a metric between these."""
    if metric in _SHARES:
        return _share_axis(1.0, lowest, highest, metric == "compute-util")
    known = _known(metric)
    if known.kind == "ratio":
        return _share_axis(0.01, lowest, highest, "utilization" in metric)
    most = max(abs(lowest), abs(highest))
    scales = _SCALES.get(known.unit, ((1.0, known.unit),))
    factor, unit = next(((factor, unit) for factor, unit in scales if most >= factor), scales[-1])
    is_free = known.kind in ("counter", "") and lowest > 0.6 * highest
    return _axis(unit, factor, lowest if is_free or lowest < 0 else 0.0, highest)


def ticks(low: float, high: float, most: int = 5) -> tuple[float, ...]:
    """Round numbers between two others, at most one more than so many."""
    step = _round_step((high - low) / most)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(place * step for place in range(first, last + 1))


def written(value: float) -> str:
    """A number of an axis."""
    return f"{value:.10g}" if abs(value) < 1e15 else f"{value:.3g}"


def time_ticks(start: float, end: float, most: int = 12) -> tuple[Sequence[float], Sequence[str]]:
    """Round times between two others, and how they are called."""
    steps = (
        0.001,
        0.002,
        0.005,
        0.01,
        0.02,
        0.05,
        0.1,
        0.2,
        0.5,
        1,
        2,
        5,
        10,
        15,
        30,
        60,
        120,
        300,
        600,
        900,
    )
    hours = (1800, 3600, 7200, 14400, 21600, 43200, 86400)
    step = next((step for step in (*steps, *hours) if (end - start) / step <= most), None)
    step = step or 86400 * math.ceil((end - start) / 86400 / most)
    found = [
        place * step for place in range(math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9) + 1)
    ]
    return found, [_clock(moment, end) for moment in found]


def time_unit(end: float) -> str:
    """How times up to that are written."""
    return "s" if end < 120 else "min:s" if end < 3600 else "h:min"


def _clock(moment: float, end: float) -> str:
    if end < 120:
        return f"{moment:.6g}"
    whole = round(moment)
    if end < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    return f"{whole // 3600}:{whole // 60 % 60:02}" + (f":{whole % 60:02}" if whole % 60 else "")


def _known(metric: str) -> _Known:
    """What the catalogue says; of a metric of people's own nothing."""
    if metric == "total-mem":
        return _Known("bytes", "gauge")
    try:
        column = columns([metric])[0]
    except ArgumentError:
        return _Known("1", "")
    if column.scope is None:
        return _Known("1", "")
    found = CATALOGUE[column.scope][column.metric]
    return _Known(found.unit, found.kind)


def _share_axis(factor: float, lowest: float, highest: float, whole: bool) -> Axis:
    """Use is drawn to a hundred, as what is missing is the point of it; a few percent of a memory would be nothing."""
    top = highest / factor
    high = 100.0 if whole and top <= 100 else next((most for most in _ROUND_SHARES if top <= most), 0.0)
    if high and lowest >= 0:
        count = {10.0: 5, 20.0: 4, 50.0: 5, 100.0: 4}[high]
        return Axis("%", factor, 0.0, high, tuple(high * place / count for place in range(count + 1)))
    return _axis("%", factor, min(0.0, lowest), highest)


def _axis(unit: str, factor: float, lowest: float, highest: float) -> Axis:
    low, high = lowest / factor, highest / factor
    if high - low <= max(_LEAST_RANGE, abs(low) * _LEAST_SHARE):
        high = low + max(1.0, abs(low) * 0.1)
    step = _round_step((high - low) / 4)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(unit, factor, low, high, ticks(low, high))


def _round_step(step: float) -> float:
    """The next round number: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= step * 0.999)
