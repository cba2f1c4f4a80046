"""A job over time, for a page: curves of all its GPUs together, and a map of each of them, as inline SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from gpulse.export import job_words as words
from gpulse.export.curves import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    SEVERITY_COLORS,
    Chart,
    Curve,
    Mark,
    Panel,
    Point,
    printable,
    scaled,
    time_ticks,
)
from gpulse.export.page import svg
from gpulse.model.idleness import IDLE_RATIO
from gpulse.model.units import long_size, rate, share, watts
from gpulse.reports.job_report import JobGap, JobReport
from gpulse.reports.job_series import JobSeries

Values = Sequence[float | None]

LEVELS = 11
"""Shades of the map: 0 for idle, then tenths; the page has a class `uN` for each."""
_MAX_MARKS = 12
_WIDE, _LEFT, _RIGHT, _ROW = 1200, 84, 44, 16
"""As wide as the curves above the map, so that moments stand under one another."""
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


def severity_color(severity: str) -> str:
    """Return the colour of a severity; of anything else that of `info`."""
    known = {str(name): color for name, color in SEVERITY_COLORS.items()}
    return known.get(severity, SEVERITY_COLORS["info"])


def safe(text: object) -> str:
    """Foreign text as a page may have it."""
    return escape(printable(str(text)))


def over_time(report: JobReport) -> Iterator[str]:
    """Yield the section of a page; nothing when the report has no series."""
    series = report.series
    if series is None or len(series.times) < 2 or series.step <= 0:
        return
    start, end = report.start, max(report.end, report.start + series.step)
    panels = tuple(panel for panel in _panels(series, report) if panel.curves)
    yield "<h2>Over time</h2>"
    if panels:
        yield '<p class="quiet">The mean of its GPUs; those that were never touched are left out.</p>'
        yield from svg(Chart("", panels, tuple(_marks(report, start, end)), start, end))
    yield from _map(series, (start, end), report.missing)


def _panels(series: JobSeries, report: JobReport) -> Iterator[Panel]:
    middles = [one + series.step / 2 for one in series.times]

    def curve(name: str, label: str, color: str, whole: float = 1.0) -> Curve:
        return Curve(label, color, _runs(middles, series.metrics.get(name) or (), whole, report.missing))

    def known(*curves: Curve) -> tuple[Curve, ...]:
        return tuple(one for one in curves if one.runs)

    activity = known(
        curve("gpu_utilization_ratio", "kernels running", BLUE),
        curve("sm_active_ratio", "SMs in use", ORANGE),
        curve("tensor_active_ratio", "tensor cores", GREEN),
        curve("dram_active_ratio", "memory interface", PINK),
    )
    yield Panel("GPU activity", activity, 1.0, share, _QUARTERS)
    yield scaled("Power of a GPU", known(curve("power_watts", "power", BLUE)), watts, least=100.0)
    total = _memory_total(report)
    used = curve(
        "memory_used_bytes", f"used of {long_size(total)}" if total else "used", ORANGE, total or 1.0
    )
    if total:
        yield Panel("Memory of a GPU", known(used), 1.0, share, _QUARTERS)
    else:
        yield scaled("Memory of a GPU", known(used), long_size, least=float(1 << 30))
    copies = known(
        curve("pcie_rx_bytes_per_second", "to the GPU", BLUE),
        curve("pcie_tx_bytes_per_second", "from the GPU", ORANGE),
    )
    yield scaled("PCIe of a GPU", copies, rate, least=1e6)


def _memory_total(report: JobReport) -> float | None:
    """Return the memory of its GPUs, where all have the same."""
    totals = {row.memory_total_bytes for row in report.gpu_rows}
    return totals.pop() if len(totals) == 1 else None


def _is_missing(moment: float, gaps: Sequence[JobGap]) -> bool:
    """Return whether data is missing then; otherwise a step without a value is only shorter than the interval."""
    return any(gap.start <= moment < gap.end for gap in gaps)


def _runs(
    times: Sequence[float], values: Values, whole: float, gaps: Sequence[JobGap]
) -> tuple[tuple[Point, ...], ...]:
    runs: list[list[Point]] = [[]]
    for moment, value in zip(times, values, strict=False):
        if value is not None:
            runs[-1].append((moment, value / whole))
        elif _is_missing(moment, gaps):
            runs.append([])
    return tuple(tuple(run) for run in runs if run)


def _marks(report: JobReport, start: float, end: float) -> Iterator[Mark]:
    """Yield a mark for each kind of finding, from its first to its last moment."""
    of_nodes = [finding for finding in report.findings if finding.node is not None]
    for group in words.group_findings(of_nodes)[:_MAX_MARKS]:
        begin = min(one["from"] for one in group.members)
        ends = [end if one["to"] is None else one["to"] for one in group.members]
        yield Mark(
            words.text(group.id, 60),
            words.text(group.worst["summary"], 300),
            severity_color(group.severity),
            min(max(begin, start), end),
            min(max(*ends, begin), end),
            shaded=False,
        )


def _map(series: JobSeries, shown: tuple[float, float], gaps: Sequence[JobGap]) -> Iterator[str]:
    """Yield a row per GPU, darker where it was busier; empty where nothing is known."""
    gpus, times, step = series.gpus, series.times, series.step
    if not gpus:
        return
    start, end = shown

    def x(moment: float) -> float:
        return _LEFT + (_WIDE - _LEFT - _RIGHT) * (min(max(moment, start), end) - start) / (end - start)

    height = len(gpus) * _ROW + 24
    yield "<h3>How busy each GPU was</h3>"
    yield f'<svg viewBox="0 0 {_WIDE} {height}" role="img">'
    for place, gpu in enumerate(gpus):
        top = place * _ROW
        name = words.gpu_name(gpu)
        yield f'<text x="{_LEFT - 8}" y="{top + 12}" text-anchor="end">{safe(words.text(name, 14))}</text>'
        own = [gap for gap in gaps if gap.node == gpu.node]
        silent = [_is_missing(moment + step / 2, own) for moment in times]
        for level, first, last in _levels(gpu.values, silent):
            left, right = x(times[first]), x(times[last] + step)
            said = (
                f"{name} {words.moment(times[first])} to {words.moment(times[last] + step, times[first])}: "
            )
            said += "idle" if level == 0 else f"about {level * 10} %"
            yield (
                f'<rect class="u{level}" x="{left:.1f}" y="{top + 1}" width="{max(0.5, right - left):.1f}" '
                f'height="{_ROW - 2}"><title>{safe(said)}</title></rect>'
            )
    for moment, said in time_ticks(start, end):
        yield f'<text x="{x(moment):.1f}" y="{height - 6}" text-anchor="middle">{safe(said)}</text>'
    yield "</svg>"
    yield from _legend()


def _legend() -> Iterator[str]:
    boxes = "".join(
        f'<rect class="u{level}" x="{_LEFT + 36 + 18 * level}" y="3" width="18" height="12"/>'
        for level in range(LEVELS)
    )
    yield (
        f'<svg viewBox="0 0 {_WIDE} 22"><text x="{_LEFT}" y="14">idle</text>{boxes}'
        f'<text x="{_LEFT + 242}" y="14">100%</text></svg>'
    )


def _levels(values: Values, silent: Sequence[bool]) -> Iterator[tuple[int, int, int]]:
    """Stretches of about the same value: its tenths, its first place, its last."""
    current: tuple[int, int, int] | None = None
    for place, (value, is_silent) in enumerate(zip(values, silent, strict=False)):
        if value is None and not is_silent and current is not None:
            current = current[0], current[1], place
            continue
        level = None if value is None else _level(value)
        if current is not None and level == current[0]:
            current = current[0], current[1], place
            continue
        if current is not None:
            yield current
        current = None if level is None else (level, place, place)
    if current is not None:
        yield current


def _level(value: float) -> int:
    """Tenths; 0 means idle alone."""
    return 0 if value <= IDLE_RATIO else min(10, max(1, round(value * 10)))
