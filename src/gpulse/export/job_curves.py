"""A job over time, for a page: curves of all its GPUs together, and a map of each of them, as inline SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

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
from gpulse.model.finding_group import grouped
from gpulse.model.idleness import IDLE_RATIO
from gpulse.model.units import long_size, rate, share, watts

Document = Mapping[str, Any]
Values = Sequence[float | None]
Gap = tuple[str, float, float]
"""A node, and from when to when nothing is known of it."""

LEVELS = 11
"""Shades of the map: 0 for idle, then tenths; the page has a class `uN` for each."""
_MOST_MARKS = 12
_WIDE, _LEFT, _RIGHT, _ROW = 1200, 84, 44, 16
"""As wide as the curves above the map, so that moments stand under one another."""
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


def severity_color(severity: object) -> str:
    """The colour of a severity, of whatever is none the least."""
    known = {str(name): color for name, color in SEVERITY_COLORS.items()}
    return known.get(str(severity), SEVERITY_COLORS["info"])


def safe(text: object) -> str:
    """Foreign text as a page may have it."""
    return escape(printable(str(text)))


def over_time(report: Document) -> Iterator[str]:
    """The section of a page; nothing when nothing is told over time."""
    series = report.get("series") or {}
    times = [moment for one in series.get("times") or () if (moment := words.number(one)) is not None]
    step = words.number(series.get("step")) or 0.0
    if len(times) < 2 or step <= 0:
        return
    metrics = series.get("metrics") or {}
    start = words.number(report.get("from")) or times[0]
    end = max(words.number(report.get("to")) or 0.0, start + step)
    gaps = [_gap(one) for one in report.get("missing") or ()]
    panels = tuple(
        panel for panel in _panels(metrics, [one + step / 2 for one in times], gaps, report) if panel.curves
    )
    yield "<h2>Over time</h2>"
    if panels:
        yield '<p class="quiet">The mean of its GPUs; those that were never touched are left out.</p>'
        yield from svg(Chart("", panels, tuple(_marks(report, start, end)), start, end))
    yield from _map(series.get("gpus") or (), times, step, (start, end), gaps)


def _panels(
    metrics: Mapping[str, Values], times: Sequence[float], gaps: Sequence[Gap], report: Document
) -> Iterator[Panel]:
    def curve(name: str, label: str, color: str, whole: float = 1.0) -> Curve:
        return Curve(label, color, _runs(times, metrics.get(name) or (), whole, gaps))

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


def _memory_total(report: Document) -> float | None:
    """The memory of its GPUs, where all have as much."""
    totals = {words.number(row.get("memory_total_bytes")) for row in report.get("gpu_rows") or ()}
    return totals.pop() if len(totals) == 1 else None


def _gap(missing: Document) -> Gap:
    start, end = (words.number(missing.get(name)) or 0.0 for name in ("from", "to"))
    return str(missing.get("node")), start, end


def _is_missing(moment: float, gaps: Sequence[Gap]) -> bool:
    """Whether something is missing then; else a step without a value is only shorter than the samples' pace."""
    return any(start <= moment < end for _, start, end in gaps)


def _runs(
    times: Sequence[float], values: Values, whole: float, gaps: Sequence[Gap]
) -> tuple[tuple[Point, ...], ...]:
    runs: list[list[Point]] = [[]]
    for moment, raw in zip(times, values, strict=False):
        value = words.number(raw)
        if value is not None:
            runs[-1].append((moment, value / whole))
        elif _is_missing(moment, gaps):
            runs.append([])
    return tuple(tuple(run) for run in runs if run)


def _marks(report: Document, start: float, end: float) -> Iterator[Mark]:
    """From the first to the last moment of each kind of finding."""
    told = [finding for finding in report.get("findings") or () if finding.get("node") is not None]
    for group in grouped(told)[:_MOST_MARKS]:
        found = group.members
        begin = min(words.number(one.get("from")) or start for one in found)
        ends = [end if (last := words.number(one.get("to"))) is None else last for one in found]
        yield Mark(
            words.text(group.id, 60),
            words.text(group.worst.get("summary"), 300),
            severity_color(group.severity),
            min(max(begin, start), end),
            min(max(*ends, begin), end),
            shaded=False,
        )


def _map(
    gpus: Sequence[Document],
    times: Sequence[float],
    step: float,
    window: tuple[float, float],
    gaps: Sequence[Gap],
) -> Iterator[str]:
    """A row a GPU, darker where it was busier; nothing where nothing is known."""
    if not gpus:
        return
    start, end = window

    def x(moment: float) -> float:
        return _LEFT + (_WIDE - _LEFT - _RIGHT) * (min(max(moment, start), end) - start) / (end - start)

    height = len(gpus) * _ROW + 24
    yield "<h3>How busy each GPU was</h3>"
    yield f'<svg viewBox="0 0 {_WIDE} {height}" role="img">'
    for place, gpu in enumerate(gpus):
        top = place * _ROW
        name = words.gpu_name(gpu)
        yield f'<text x="{_LEFT - 8}" y="{top + 12}" text-anchor="end">{safe(words.text(name, 14))}</text>'
        own = [gap for gap in gaps if gap[0] == gpu.get("node")]
        silent = [_is_missing(moment + step / 2, own) for moment in times]
        for level, first, last in _levels(gpu.get("values") or (), silent):
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
    for place, (raw, is_silent) in enumerate(zip(values, silent, strict=False)):
        value = words.number(raw)
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
