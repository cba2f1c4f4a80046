"""What a picture of a diagnosis shows: curves of each GPU, and where its findings lie. No drawing in here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpulse.diagnosis.seconds import Second
from gpulse.model.finding import Diagnosis, Finding, Severity
from gpulse.model.units import long_size, rate, share, watts

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
"""Okabe and Ito's palette, which people with any colour vision can tell apart."""
SEVERITY_COLORS: dict[Severity, str] = {
    "critical": "#DE6A73",
    "high": "#F0A08C",
    "medium": "#F5CB7A",
    "low": "#F3EBA3",
    "info": "#D8D8D8",
}
"""Light enough for black letters, and none of them the colour of a curve."""
_PAUSES = frozenset({"checkpoint_stall", "periodic_stall"})
"""Findings that come and go: work lies between their start and their end."""
_MOST_POINTS = 1500
_GAP_SECONDS = 1.5
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)

Point = tuple[float, float]


class Curve(NamedTuple):
    """One quantity over time."""

    label: str
    color: str
    runs: tuple[tuple[Point, ...], ...]
    """Points without a gap between them; between two runs nothing is known."""

    @property
    def highest(self) -> float:
        """The largest value."""
        return max((value for run in self.runs for _, value in run), default=0.0)


class Panel(NamedTuple):
    """Curves that share an axis."""

    title: str
    curves: tuple[Curve, ...]
    top: float
    written: Callable[[float], str]
    """How a value is told."""
    ticks: tuple[float, ...]


class Mark(NamedTuple):
    """A finding and the time it covers."""

    name: str
    text: str
    color: str
    start: float
    end: float
    shaded: bool
    """Whether its time is marked in the curves too: that of a finding is, that of a note is not."""


class Chart(NamedTuple):
    """One GPU."""

    title: str
    panels: tuple[Panel, ...]
    marks: tuple[Mark, ...]
    start: float
    end: float


def charts(seconds: Mapping[str, Sequence[Second]], diagnosis: Diagnosis) -> list[Chart]:
    """The GPUs with a finding; without any those that were judged, or all that were seen."""
    seen = {entries[-1].reading.device.label: entries for entries in seconds.values() if entries}
    told = {finding.label for finding in diagnosis.findings}
    if not told or None in told:
        told |= {judged.label for judged in diagnosis.judged}
    shown = {label: entries for label, entries in seen.items() if label in told} or seen
    return [_chart(label, entries, diagnosis) for label, entries in sorted(shown.items(), key=_by_label)]


def time_ticks(start: float, end: float, most: int = 8) -> list[tuple[float, str]]:
    """Moments at round local times, with how they are called."""
    step = next((step for step in _STEPS if (end - start) / step <= most), _STEPS[-1])
    offset = time.localtime(start).tm_gmtoff
    first = -(-(start + offset) // step) * step - offset
    moments = [first + place * step for place in range(int((end - first) // step) + 1)]
    pattern = "%m-%d %H:%M" if end - start >= 86400 else "%H:%M" if step >= 60 else "%H:%M:%S"
    return [(moment, time.strftime(pattern, time.localtime(moment))) for moment in moments]


def window_words(diagnosis: Diagnosis) -> str:
    """When it was, in local time, and how much was seen."""
    frames = f"{diagnosis.frames} frames"
    if diagnosis.start is None or diagnosis.end is None:
        return frames
    begin, end = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
        for moment in (diagnosis.start, diagnosis.end)
    )
    return f"{begin} to {end}, {diagnosis.end - diagnosis.start:.0f} s, {frames}"


def printable(text: str) -> str:
    """Foreign text without anything that is no character to look at."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _by_label(item: tuple[str, Sequence[Second]]) -> tuple[int, ...]:
    return tuple(int(part) for part in item[0].split(":"))


def _chart(label: str, seconds: Sequence[Second], diagnosis: Diagnosis) -> Chart:
    start, end = seconds[0].start, seconds[-1].end
    device = seconds[-1].reading.device
    return Chart(
        title=printable(f"GPU {label}  {device.name}"),
        panels=tuple(panel for panel in _panels(seconds) if panel.curves),
        marks=tuple(_marks(label, diagnosis, start, end)),
        start=start,
        end=max(end, start + 1.0),
    )


def _panels(seconds: Sequence[Second]) -> Iterator[Panel]:
    quarters = (0.0, 0.25, 0.5, 0.75, 1.0)
    activity = _known(
        _curve("kernels running", BLUE, seconds, lambda s: s.mean("duty")),
        _curve("SMs in use", ORANGE, seconds, lambda s: s.mean("sm_active_ratio")),
        _curve("tensor cores", GREEN, seconds, lambda s: s.mean("tensor_active_ratio")),
        _curve("memory interface", PINK, seconds, lambda s: s.mean("dram_active_ratio")),
    )
    yield Panel("GPU activity", activity, 1.0, share, quarters)
    copies = _known(
        _curve("to the GPU", BLUE, seconds, lambda s: s.mean("pcie_rx_bytes_per_second")),
        _curve("from the GPU", ORANGE, seconds, lambda s: s.mean("pcie_tx_bytes_per_second")),
    )
    yield scaled("PCIe", copies, rate, least=1e6)
    yield Panel("Power and memory", _known(*_levels(seconds)), 1.0, share, quarters)
    cores = _known(
        _curve("the program", BLUE, seconds, lambda s: s.cores),
        _curve("its workers", ORANGE, seconds, _worker_cores),
    )
    yield scaled("CPUs in use", cores, lambda value: f"{value:.3g}", least=1.0)


def _worker_cores(second: Second) -> float | None:
    """CPUs' worth of time of the workers; unknown where the processes could not be read."""
    return None if second.cores is None else sum(helper.cores for helper in second.workers)


def _levels(seconds: Sequence[Second]) -> Iterator[Curve]:
    """Power and memory as shares of what the board allows, so that they fit on one axis."""
    last = seconds[-1].reading
    for name, limit, words, color, written in (
        ("power_watts", "power_limit_watts", "power", BLUE, watts),
        ("memory_used_bytes", "memory_total_bytes", "memory", ORANGE, long_size),
    ):
        whole = last.get(limit)
        of = ""
        if not whole:
            whole = max(
                (value for second in seconds if (value := second.mean(name)) is not None), default=0.0
            )
            of = "its highest, "
        if whole:
            yield _curve(f"{words}, of {of}{written(whole)}", color, seconds, _part(name, float(whole)))


def _part(name: str, whole: float) -> Callable[[Second], float | None]:
    def part(second: Second) -> float | None:
        value = second.mean(name)
        return None if value is None else min(1.0, value / whole)

    return part


def scaled(title: str, curves: tuple[Curve, ...], written: Callable[[float], str], least: float) -> Panel:
    """Curves on an axis that is as high as they are, and never lower than that."""
    highest = max([least, *(curve.highest for curve in curves)])
    step = _round_step(highest / 4)
    count = -(-highest // step)
    return Panel(title, curves, count * step, written, tuple(place * step for place in range(int(count) + 1)))


def _round_step(step: float) -> float:
    """The next round number: 1, 2 or 5 times a power of ten."""
    power = 1.0
    while power * 10 <= step:
        power *= 10
    while power > step:
        power /= 10
    return next(power * times for times in (1, 2, 5, 10) if power * times >= step * 0.999)


def _known(*curves: Curve) -> tuple[Curve, ...]:
    return tuple(curve for curve in curves if curve.runs)


def _curve(
    label: str, color: str, seconds: Sequence[Second], value_of: Callable[[Second], float | None]
) -> Curve:
    runs: list[list[Point]] = [[]]
    before: Second | None = None
    for second in seconds:
        value = value_of(second)
        if value is None or (before is not None and second.start - before.end > _GAP_SECONDS):
            runs.append([])
        if value is not None:
            runs[-1].append(((second.start + second.end) / 2, value))
        before = second
    several = -(-len(seconds) // _MOST_POINTS)
    return Curve(label, color, tuple(tuple(_thinned(run, several)) for run in runs if run))


def _thinned(run: Sequence[Point], several: int) -> Iterator[Point]:
    """Means of so many points each."""
    for place in range(0, len(run), several):
        part = run[place : place + several]
        yield (
            sum(moment for moment, _ in part) / len(part),
            sum(value for _, value in part) / len(part),
        )


def _marks(label: str, diagnosis: Diagnosis, start: float, end: float) -> Iterator[Mark]:
    for finding in (*diagnosis.findings, *diagnosis.info):
        if finding.label in (label, None):
            yield _mark(finding, start, end)


def _mark(finding: Finding, start: float, end: float) -> Mark:
    begin = start if finding.start is None else min(max(finding.start, start), end)
    until = end if finding.end is None else min(max(finding.end, begin), end)
    return Mark(
        name=printable(finding.id) + (", first pause to last" if finding.id in _PAUSES else ""),
        text=printable(finding.summary),
        color=SEVERITY_COLORS[finding.severity],
        start=begin,
        end=until,
        shaded=finding.severity != "info",
    )
