"""A chart drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpulse.export.report.canvas import GREY, PALE
from gpulse.integrations.dask.drawing.charts import (
    Array,
    Boxes,
    Chart,
    HeatMap,
    Lines,
    Panel,
)
from gpulse.integrations.dask.drawing.graphs import Band, job_starts, named
from gpulse.integrations.dask.drawing.heat_map import draw_heat_map
from gpulse.integrations.dask.drawing.paper import BANDS, COLORS, Paper
from gpulse.integrations.dask.drawing.units import time_ticks, time_unit, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEFT, _NAMES, _RIGHT, _SCALE = 1.0, 0.5, 0.35, 0.75
_HEAD, _FOOT, _GAP, _LANE = 0.85, 0.6, 0.5, 0.24
_LETTER = 0.085
"""Inches of a digit."""
_MARKS_PER_INCH = 10


def draw(figure: Figure, chart: Chart) -> None:
    """Draw it onto an empty figure, whatever its size."""
    width, height = map(float, figure.get_size_inches())
    has_map = any(isinstance(panel.content, HeatMap) for panel in chart.panels)
    left = _LEFT + (_NAMES if any(_is_named(panel) for panel in chart.panels) else 0.0)
    paper = Paper(figure, width, height, left, _RIGHT + (_SCALE if has_map else 0.0))
    figure.text(0.3 / width, 1 - 0.32 / height, chart.title, fontsize=15, fontweight="bold", va="center")
    figure.text(0.3 / width, 1 - 0.62 / height, chart.note, fontsize=10.5, color=GREY, va="center")
    down = _HEAD
    if chart.bands:
        _draw_strip(paper, chart, down)
        down += chart.lanes * _LANE
    pitch = max(0.1, height - down - _FOOT) / len(chart.panels)
    inches = max(0.55 * pitch, pitch - _GAP)
    for place, panel in enumerate(chart.panels):
        axes = paper.axes(down + place * pitch + pitch - inches, inches)
        axes.set_xlim(chart.start, chart.end)
        _draw_panel(paper, axes, panel, chart)
        _draw_time(axes, chart, paper, is_last=place == len(chart.panels) - 1)


def _is_named(panel: Panel) -> bool:
    """Whether names stand beside it that are longer than numbers."""
    beside = panel.has_lanes or isinstance(panel.content, HeatMap)
    return beside and max(map(len, panel.labels), default=0) > 8


def _draw_strip(paper: Paper, chart: Chart, down: float) -> None:
    """The graphs by number, where there is room for it."""
    axes = paper.axes(down, chart.lanes * _LANE)
    axes.set_xlim(chart.start, chart.end)
    axes.set_ylim(chart.lanes, 0)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([chart.lanes / 2])
    axes.set_yticklabels(["job.graph" if "." in chart.bands[0].label else "graph"])
    for (lane, shade), spans in _spans(chart.bands).items():
        axes.broken_barh(spans, (lane + 0.08, 0.84), color=BANDS[shade], linewidth=0)
    second = paper.inside / (chart.end - chart.start)
    longest = max(len(band.label) for band in chart.bands)
    found = named(chart.bands, (_LETTER * longest + 0.06) / second)
    for band in found:
        axes.text(
            band.middle,
            band.lane + 0.52,
            band.label,
            fontsize=9,
            color="#333333",
            ha="center",
            va="center",
        )
    starts = job_starts(chart.bands)
    if len(found) < len(chart.bands) and len(starts) <= paper.inside * _MARKS_PER_INCH:
        axes.vlines(
            starts, chart.lanes - 0.08, chart.lanes + 0.3, color="#333333", linewidth=1.4, clip_on=False
        )


def _spans(bands: Iterable[Band]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """Where bands begin and how long they are, by their lane and shade."""
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for band in bands:
        found.setdefault((band.lane, band.shade), []).append((band.start, band.end - band.start))
    return found


def _draw_panel(paper: Paper, axes: Axes, panel: Panel, chart: Chart) -> None:
    axes.set_title(panel.title, loc="left", fontsize=11.5, fontweight="bold", pad=7)
    if isinstance(panel.content, HeatMap):
        draw_heat_map(paper, axes, panel, panel.content)
        return
    for (_, shade), spans in _spans(chart.bands).items():
        axes.broken_barh(
            spans,
            (0, 1),
            color=BANDS[shade],
            alpha=0.45,
            linewidth=0,
            zorder=0.2,
            transform=axes.get_xaxis_transform(),
        )
    if panel.has_lanes:
        _draw_lanes(axes, panel)
    else:
        _draw_scale(axes, panel)
        _draw_legend(paper, axes, panel.labels)
    if isinstance(panel.content, Lines):
        _draw_lines(axes, panel, panel.content)
    else:
        _draw_boxes(axes, panel, panel.content)


def _draw_scale(axes: Axes, panel: Panel) -> None:
    axes.set_ylim(panel.axis.low, panel.axis.high)
    axes.set_yticks(panel.axis.ticks)
    axes.set_yticklabels([written(value) for value in panel.axis.ticks])
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_lanes(axes: Axes, panel: Panel) -> None:
    """A lane for each curve, the first on top, all to the same scale."""
    count = len(panel.labels)
    axes.set_ylim(0, count)
    axes.set_yticks([count - place - 0.55 for place in range(count)])
    axes.set_yticklabels(panel.labels)
    for place in range(count):
        axes.axhline(count - place - 0.95, color="#BBBBBB", linewidth=0.6)
    axes.set_title(f"each lane {panel.range_words}", loc="right", fontsize=10, color=GREY, pad=7)


class _Lane(NamedTuple):
    """Where values of a curve lie: on the panel's own scale, or in a lane."""

    base: float
    low: float
    scale: float

    def __call__(self, values: Array) -> Array:
        return self.base + (values - self.low) * self.scale


def _lane(panel: Panel, place: int) -> _Lane:
    low, high = panel.axis.low, panel.axis.high
    if not panel.has_lanes:
        return _Lane(low, low, 1.0)
    return _Lane(len(panel.labels) - place - 0.95, low, 0.85 / (high - low))


def _draw_lines(axes: Axes, panel: Panel, lines: Lines) -> None:
    for place, curve in enumerate(lines.curves):
        color, lane = COLORS[place % len(COLORS)], _lane(panel, place)
        style = "-" if place < len(COLORS) or lines.apart else "--"
        for piece in curve.pieces:
            mean = lane(piece.mean)
            if lines.apart:
                axes.fill_between(piece.times, lane.base, mean, color=color, alpha=0.13, linewidth=0)
            if piece.is_thinned:
                low, high = lane(piece.low), lane(piece.high)
                axes.fill_between(piece.times, low, high, color=color, alpha=0.2, linewidth=0)
            _draw_piece(axes, piece.times, mean, color, style)
    if not any(curve.pieces for curve in lines.curves):
        _say_nothing(axes)


def _draw_piece(axes: Axes, times: Array, values: Array, color: str, style: str) -> None:
    axes.plot(
        times,
        values,
        color=color,
        linestyle=style,
        linewidth=1.4,
        marker="o" if len(times) == 1 else None,
        markersize=4,
        solid_capstyle="round",
        clip_on=False,
    )


def _draw_boxes(axes: Axes, panel: Panel, boxes: Boxes) -> None:
    from matplotlib.collections import PolyCollection  # noqa: PLC0415  an extra

    beside = 1 if boxes.apart else max(1, len(boxes.rows))
    for place, row in enumerate(boxes.rows):
        color, lane = COLORS[place % len(COLORS)], _lane(panel, place)
        fields: Array = np.array([box[:7] for box in row.boxes], np.float64).reshape(-1, 7)
        starts, ends = fields[:, 0], fields[:, 1]
        low, q1, median, q3, high = lane(fields[:, 2:]).T
        width = 0.86 * (ends - starts) / beside
        left = starts + 0.07 * (ends - starts) + place % beside * width
        axes.vlines(left + width / 2, low, high, color=color, linewidth=0.9)
        one, other = left + 0.08 * width, left + 0.92 * width
        corners = np.stack((one, q1, one, q3, other, q3, other, q1), axis=1).reshape(-1, 4, 2)
        axes.add_collection(
            PolyCollection(
                list(corners), facecolors=[_pale(color)], edgecolors=[color], linewidths=0.9, zorder=2
            ),
            autolim=False,
        )
        axes.hlines(median, one, other, color=color, linewidth=2.0, zorder=3)
    if not any(row.boxes for row in boxes.rows):
        _say_nothing(axes)


def _pale(color: str) -> tuple[float, float, float]:
    """The colour, mostly white."""
    red, green, blue = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return (0.65 + 0.35 * red, 0.65 + 0.35 * green, 0.65 + 0.35 * blue)


def _draw_legend(paper: Paper, axes: Axes, labels: Sequence[str]) -> None:
    """Above the panel, where nothing is hidden by it."""
    from matplotlib.lines import Line2D  # noqa: PLC0415  an extra

    if len(labels) < 2 and not (labels and labels[0].startswith(("GPU", "worker"))):
        return
    longest = max(map(len, labels))
    room = max(1, int((paper.inside - 3.0) / (0.55 + 0.08 * longest)))
    shown = list(labels if len(labels) <= room else labels[: max(1, room - 1)])
    handles = [
        Line2D(
            [],
            [],
            color=COLORS[place % len(COLORS)],
            linestyle="-" if place < len(COLORS) else "--",
            linewidth=2.2,
        )
        for place in range(len(shown))
    ]
    if len(shown) < len(labels):
        handles.append(Line2D([], [], linewidth=0))
        shown.append(f"and {len(labels) - len(shown)} more")
    axes.legend(
        handles,
        shown,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(shown),
        fontsize=10,
        frameon=False,
        borderaxespad=0.15,
        handlelength=1.4,
        columnspacing=1.4,
    )


def _draw_time(axes: Axes, chart: Chart, paper: Paper, *, is_last: bool) -> None:
    ticks, labels = time_ticks(chart.start, chart.end, max(2, min(14, int(paper.inside / 1.1))))
    axes.set_xticks(ticks)
    axes.set_xticklabels(labels if is_last else [""] * len(ticks))
    if is_last:
        words = f"time since monitoring was started ({time_unit(chart.end)})"
        axes.set_xlabel(words, fontsize=10, color=GREY, labelpad=6)


def _say_nothing(axes: Axes) -> None:
    axes.set_yticks([])
    axes.text(
        0.5,
        0.5,
        "nothing is known",
        transform=axes.transAxes,
        fontsize=12,
        color=GREY,
        ha="center",
        va="center",
    )
