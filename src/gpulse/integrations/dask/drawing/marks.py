"""Curves, boxes and maps as marks of an SVG."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

import numpy as np

from gpulse.export.curves import printable
from gpulse.integrations.dask.drawing.charts import (
    Array,
    Boxes,
    Chart,
    Content,
    HeatMap,
    Lines,
    Panel,
    shortened,
)
from gpulse.integrations.dask.drawing.graphs import Band
from gpulse.integrations.dask.drawing.pieces import Piece
from gpulse.integrations.dask.drawing.units import written

WIDE, LEFT = 1200, 120
_RIGHT, _SCALE = 16, 64
_COLORS = 8


class Place(NamedTuple):
    """Where a panel is."""

    chart: Chart
    top: float
    bottom: float

    @property
    def height(self) -> float:
        """From its top to its bottom."""
        return self.bottom - self.top

    def x(self, moment: float) -> float:
        """How far right a moment is."""
        share = (moment - self.chart.start) / (self.chart.end - self.chart.start)
        return LEFT + (right_edge(self.chart) - LEFT) * share

    def span(self, band: Band) -> tuple[float, float]:
        """From where to where a band goes."""
        return self.x(band.start), self.x(band.end)

    def y(self, panel: Panel, number: int, value: float) -> float:
        """How far down a value of a curve is, in its lane or on the panel's own scale."""
        share = (value - panel.axis.low) / (panel.axis.high - panel.axis.low)
        if not panel.has_lanes:
            return self.bottom - self.height * share
        lane = self.height / len(panel.labels)
        return self.top + lane * (number + 0.95 - 0.85 * share)


def right_edge(chart: Chart) -> int:
    """Where panels end: a map has its scale beside it."""
    has_map = any(isinstance(panel.content, HeatMap) for panel in chart.panels)
    return WIDE - _RIGHT - (_SCALE if has_map else 0)


def safe(text: str) -> str:
    """Foreign text as harmless text."""
    return escape(printable(text))


def content_marks(panel: Panel, place: Place) -> Iterator[str]:
    """What is in a panel."""
    match panel.content:
        case Lines(curves):
            for number, curve in enumerate(curves):
                for piece in curve.pieces:
                    yield from _piece(panel, place, number, piece)
        case Boxes():
            yield from _boxes(panel, place, panel.content)
        case HeatMap():
            yield from _map(panel, place, panel.content)
    if _is_empty(panel.content):
        middle = (LEFT + right_edge(place.chart)) / 2
        yield f'<text x="{middle:.0f}" y="{(place.top + place.bottom) / 2:.1f}" text-anchor="middle">nothing is known</text>'


def _is_empty(content: Content) -> bool:
    match content:
        case Lines(curves):
            return not any(curve.pieces for curve in curves)
        case Boxes(rows):
            return not any(row.boxes for row in rows)
        case HeatMap():
            return False


def _piece(panel: Panel, place: Place, number: int, piece: Piece) -> Iterator[str]:
    color = number % _COLORS
    down = [
        _points(panel, place, number, piece.times, values) for values in (piece.low, piece.mean, piece.high)
    ]
    low, mean, high = down
    if len(mean) == 1:
        yield f'<circle class="f{color}" cx="{mean[0][0]:.1f}" cy="{mean[0][1]:.1f}" r="2.5"/>'
        return
    if panel.has_lanes:
        base = place.y(panel, number, panel.axis.low)
        yield f'<polygon class="under f{color}" points="{_written([(mean[0][0], base), *mean, (mean[-1][0], base)])}"/>'
    if piece.is_thinned:
        yield f'<polygon class="range f{color}" points="{_written([*low, *reversed(high)])}"/>'
    dash = " dash" if number >= _COLORS and not panel.has_lanes else ""
    yield f'<polyline class="curve s{color}{dash}" points="{_written(mean)}"/>'


def _points(
    panel: Panel, place: Place, number: int, times: Array, values: Array
) -> list[tuple[float, float]]:
    return [
        (place.x(moment), place.y(panel, number, value))
        for moment, value in zip(times.tolist(), values.tolist(), strict=True)
    ]


def _written(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _boxes(panel: Panel, place: Place, boxes: Boxes) -> Iterator[str]:
    beside = 1 if boxes.apart else max(1, len(boxes.rows))
    for number, row in enumerate(boxes.rows):
        color = number % _COLORS
        for box in row.boxes:
            start, end = place.x(box.start), place.x(box.end)
            width = 0.86 * (end - start) / beside
            left = start + 0.07 * (end - start) + number % beside * width
            low, q1, median, q3, high = (place.y(panel, number, value) for value in box[2:7])
            middle, one, wide = left + width / 2, left + 0.08 * width, 0.84 * width
            yield f'<path class="s{color}" d="M{middle:.1f} {low:.1f}V{high:.1f}"/>'
            yield f'<rect class="box f{color} s{color}" x="{one:.1f}" y="{q3:.1f}" width="{wide:.1f}" height="{q1 - q3:.1f}"/>'
            yield f'<path class="median s{color}" d="M{one:.1f} {median:.1f}h{wide:.1f}"/>'


def _map(panel: Panel, place: Place, found: HeatMap) -> Iterator[str]:
    right = right_edge(place.chart)
    box = f'x="{LEFT}" y="{place.top:.1f}" width="{right - LEFT}" height="{place.height:.1f}"'
    yield f'<rect class="silent" {box}/>'
    yield f'<image class="cells" {box} preserveAspectRatio="none" href="{_picture(found.cells, panel)}"/>'
    rows = place.height / max(1, len(found.labels))
    for edge in found.edges:
        down = place.top + rows * edge
        yield f'<line class="edge" x1="{LEFT}" x2="{right}" y1="{down:.1f}" y2="{down:.1f}"/>'
    for middle, name in found.ticks(int(place.height / 15)):
        down = place.top + rows * middle + 4
        yield f'<text x="{LEFT - 8}" y="{down:.1f}" text-anchor="end">{safe(shortened(name, 16))}</text>'
    yield from _color_scale(panel, place, right)


def _color_scale(panel: Panel, place: Place, right: int) -> Iterator[str]:
    low, high = panel.axis.low, panel.axis.high
    shades = np.linspace(high, low, 64)[:, None]
    yield (
        f'<image x="{right + 12}" y="{place.top:.1f}" width="12" height="{place.height:.1f}" '
        f'preserveAspectRatio="none" href="{_picture(shades, panel)}"/>'
    )
    for value in panel.axis.ticks:
        down = place.bottom - place.height * (value - low) / (high - low)
        yield f'<text x="{right + 29}" y="{down + 4:.1f}">{written(value)}</text>'


def _picture(cells: Array, panel: Panel) -> str:
    """Colours as a picture inside the page, seen through where nothing is known."""
    import matplotlib as mpl  # noqa: PLC0415  an extra
    from matplotlib.image import imsave  # noqa: PLC0415

    share = (cells - panel.axis.low) / (panel.axis.high - panel.axis.low)
    colors = mpl.colormaps["viridis"](np.nan_to_num(share), bytes=True)
    colors[..., 3] = np.where(np.isnan(cells), 0, 255)
    file = io.BytesIO()
    imsave(file, colors, format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
