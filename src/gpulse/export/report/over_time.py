"""What GPUs did, moment by moment: few of them share an axis, up to sixteen get a lane each, more become a heat map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpulse.export.curves import printable, time_ticks
from gpulse.export.report import words
from gpulse.export.report.canvas import (
    AWAY,
    COLORS,
    FOOT,
    GREY,
    LEFT,
    MOST_LANES,
    MOST_LINES,
    PALE,
    PERCENT_TICKS,
    RIGHT,
    SILENT,
    TITLE,
    WIDE,
    axes_at,
    top_of,
)
from gpulse.export.report.heat_map import draw_heat_map, map_inches
from gpulse.export.report.model import Report
from gpulse.export.report.series import Curve
from gpulse.export.session.quantities import Quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_TICKS = 9
_MOST_POINTS = 700
"""Of one lane: several share a page."""
_STRIP_INCHES = 0.06


class Panel(NamedTuple):
    """One quantity with the height that it takes."""

    quantity: Quantity
    inches: float
    top: float
    """The highest value of its axis."""


def panels_of(report: Report) -> Iterator[Panel]:
    """The panels of a report, with their heights."""
    count = len(report.gpus)
    inches = 1.6 if count <= MOST_LINES else 0.3 * count if count <= MOST_LANES else map_inches(count)
    for quantity in words.shown(report):
        yield Panel(quantity, inches, top_of(report, quantity))


def _title(report: Report, quantity: Quantity) -> str:
    """A heat map has no room for units beside its scale."""
    is_bare = len(report.gpus) > MOST_LANES and not quantity.is_percent
    return f"{quantity.title}, bytes a second" if is_bare else quantity.title


def draw_over_time(figure: Figure, report: Report, panels: Sequence[Panel], down: float) -> float:
    """Draw panels from so many inches below the top; where they end."""
    ticks = time_ticks(report.start, report.end, most=_MOST_TICKS)
    ticks = ticks[:: -(-len(ticks) // _MOST_TICKS) or 1]  # of many weeks there is no day for each
    for place, panel in enumerate(panels):
        down += TITLE
        axes = axes_at(figure, LEFT, down, WIDE - LEFT - RIGHT, panel.inches)
        axes.set_xlim(report.start, max(report.end, report.start + report.interval_seconds))
        axes.set_title(
            _title(report, panel.quantity),
            loc="left",
            fontsize=10,
            fontweight="bold",
            pad=6,
        )
        if len(report.gpus) <= MOST_LINES:
            _lines(axes, report, panel)
        elif len(report.gpus) <= MOST_LANES:
            _lanes(axes, report, panel)
        else:
            draw_heat_map(figure, axes, report, panel.quantity, panel.top, panel.inches)
        _mark_absences(axes, report, panel)
        is_last = place == len(panels) - 1
        axes.set_xticks([moment for moment, _ in ticks])
        axes.set_xticklabels([said if is_last else "" for _, said in ticks])
        down += panel.inches
    return down + FOOT


def _mark_absences(axes: Axes, report: Report, panel: Panel) -> None:
    """Shade where the head was away, with a strip on top that a heat map cannot hide."""
    is_map = len(report.gpus) > MOST_LANES
    for absence in report.absences:
        start, end = max(absence.start, report.start), report.end if absence.end is None else absence.end
        end = min(end, report.end)
        if start > end:
            continue
        if not is_map:
            axes.axvspan(start, end, color=AWAY, alpha=0.16, linewidth=0, zorder=0.5)
        for edge in (start, end):
            axes.axvline(edge, color="white" if is_map else AWAY, linewidth=0.7, linestyle=(0, (3, 2)))
        strip = axes.axvspan(
            start,
            end,
            ymin=1.0,
            ymax=1.0 + _STRIP_INCHES / panel.inches,
            facecolor=AWAY,
            edgecolor=AWAY,
            linewidth=0.8,  # seconds of many hours show as well
        )
        strip.set_clip_on(False)


def _pieces(report: Report, gpu: int, curve: Curve) -> Iterator[Curve]:
    """A curve cut where the GPU was silent."""
    if not len(curve.times):
        return
    middles = [(gap.start + gap.end) / 2 for gap in report.gaps if gpu in gap.gpus]
    cuts = np.unique(np.searchsorted(curve.times, middles)).astype(np.int64)
    cuts = cuts[(cuts > 0) & (cuts < len(curve.times))]
    distances = np.diff(curve.times)
    # A gap within one column leaves its neighbours where they are, and no break.
    cuts = cuts[distances[cuts - 1] > 1.5 * distances.min(initial=np.inf)]
    for part in np.split(np.arange(len(curve.times)), cuts):
        if len(part):
            yield Curve(*(array[part] for array in curve))


def _lines(axes: Axes, report: Report, panel: Panel) -> None:
    for gap in report.gaps:
        if len(gap.gpus) == len(report.gpus):
            axes.axvspan(gap.start, gap.end, color=SILENT, alpha=0.6, linewidth=0)
    for place, gpu in enumerate(report.gpus):
        color = COLORS[place % len(COLORS)]
        label: str | None = printable(gpu.short)
        for piece in _pieces(report, place, report.series.curve(panel.quantity.name, place)):
            if not np.array_equal(piece.low, piece.high):
                axes.fill_between(piece.times, piece.low, piece.high, color=color, alpha=0.22, linewidth=0)
            mark = "o" if len(piece.times) == 1 else None
            axes.plot(
                piece.times, piece.mean, color=color, linewidth=1.4, marker=mark, markersize=3, label=label
            )
            label = None
        if len(report.gpus) > 1 and label is None:
            _mark_gaps(axes, report, place, color)
    _scale(axes, panel)
    if len(report.gpus) > 1 or panel.quantity is words.shown(report)[0]:
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1.0, 0.99),
            ncols=MOST_LINES,
            fontsize=8.5,
            frameon=False,
            borderaxespad=0.1,
            handlelength=1.4,
            columnspacing=1.4,
        )


def _mark_gaps(axes: Axes, report: Report, place: int, color: str) -> None:
    """A bar in its own colour under the axis, where one of several GPUs is silent."""
    for gap in report.gaps:
        if place in gap.gpus and len(gap.gpus) < len(report.gpus):
            axes.axvspan(gap.start, gap.end, ymin=0, ymax=0.035, color=color, linewidth=0)
            axes.axvspan(gap.start, gap.end, color=color, alpha=0.07, linewidth=0)


def _scale(axes: Axes, panel: Panel) -> None:
    axes.set_ylim(0, panel.top)
    if panel.quantity.is_percent:
        axes.set_yticks(PERCENT_TICKS[panel.top])
    else:
        axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: words.value(panel.quantity, value))
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def _lanes(axes: Axes, report: Report, panel: Panel) -> None:
    """One lane for each GPU, the first on top, all to the same scale, each with its lowest and highest value."""
    count = len(report.gpus)
    axes.set_ylim(count, 0)
    axes.set_yticks([place + 0.55 for place in range(count)])
    axes.set_yticklabels([words.shortened(gpu.short, 20) for gpu in report.gpus])
    for place in range(count):
        base = place + 0.94
        axes.axhline(base, color=PALE, linewidth=0.6)
        for gap in report.gaps:
            if place in gap.gpus:
                axes.fill_betweenx(
                    [place + 0.1, base], gap.start, gap.end, color=SILENT, alpha=0.7, linewidth=0
                )
        curve = report.series.curve(panel.quantity.name, place, most=_MOST_POINTS)
        for piece in _pieces(report, place, curve):
            high = base - 0.84 * np.clip(piece.high / panel.top, 0, 1)
            mean = base - 0.84 * np.clip(piece.mean / panel.top, 0, 1)
            if len(piece.times) == 1:
                axes.plot(piece.times, mean, color=COLORS[0], marker="o", markersize=2)
                continue
            axes.fill_between(piece.times, base, high, color=COLORS[0], alpha=0.3, linewidth=0)
            axes.fill_between(piece.times, base, mean, color=COLORS[0], alpha=0.85, linewidth=0)
            axes.plot(piece.times, mean, color=COLORS[0], linewidth=0.8)  # what is close to nothing shows too
        _tell_range(axes, report, panel, place)
    axes.text(
        1.0,
        1.0,
        f"each lane 0 to {words.value(panel.quantity, panel.top)}",
        transform=axes.transAxes,
        fontsize=8.5,
        color=GREY,
        ha="right",
        va="bottom",
    )


def _tell_range(axes: Axes, report: Report, panel: Panel, place: int) -> None:
    """Beside a lane from where to where its values go."""
    found = report.gpus[place].statistics.get(panel.quantity.name)
    if found is None:
        return
    low, high = (words.value(panel.quantity, value, short=True) for value in (found.min, found.max))
    axes.annotate(
        low if low == high else f"{low.removesuffix('%')} to {high}",
        (1.0, place + 0.55),
        xytext=(4, 0),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        fontsize=7.5,
        color=GREY,
        va="center",
        annotation_clip=False,
    )
