"""Render panels as SVG, for printing and for pages without JavaScript."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np

from gpulse.charts.chart_model import (
    Array,
    Axis,
    Boxes,
    Chart,
    ChartLine,
    ChartPanel,
    HeatMap,
    Lines,
    QuartileColumn,
    Quartiles,
    QuartileTable,
    end_ticks,
    number_text,
    time_ticks,
    value_text,
    visible_labels,
)
from gpulse.charts.style import (
    LANE_PIXELS,
    LEFT_PIXELS,
    MAX_LABEL_CHARS,
    MAX_PHONE_LABEL_CHARS,
    heat_colors,
    heat_map_colors,
    line_color,
    panel_height,
    png,
    right_margin,
    short_labels,
    tint_opacity,
)
from gpulse.model.safe_text import printable

WIDTH = 960
_NARROW_WIDTH, _NARROW_LEFT_PIXELS = 360, 72
"""Width of a drawing for phones, and of the labels in it."""
_FOOT_PIXELS = 14
_LETTER_PIXELS = 6.6
_COLUMN_GAP = 34
_COLUMN_TITLE_PIXELS, _NOTE_PIXELS = 18, 20


def safe(text: object) -> str:
    """Escape untrusted text for HTML and attributes."""
    return escape(printable(text))


@dataclass(frozen=True)
class _PlotArea:
    """Position and scale of a panel's plot in its SVG."""

    chart: Chart
    panel: ChartPanel
    height: float

    @property
    def right(self) -> float:
        return WIDTH - right_margin(self.chart)

    def x(self, moment: float) -> float:
        return _x(self.chart, moment)

    def y(self, row: int, drawn: float) -> float:
        """Return the vertical position of a value, in its lane or on the panel's scale."""
        axis = self.panel.axis
        share = axis.share(drawn)
        if not self.panel.has_lanes:
            return self.height * (1 - share * (axis.high - axis.low) / (axis.top - axis.low))
        lane = self.height / max(1, len(self.panel.labels))
        return lane * (row + 0.95 - 0.85 * share)


def _x(chart: Chart, moment: float) -> float:
    share = (min(max(moment, chart.start), chart.end) - chart.start) / (chart.end - chart.start)
    return LEFT_PIXELS + (WIDTH - right_margin(chart) - LEFT_PIXELS) * share


def spans_svg(chart: Chart) -> Iterator[str]:
    """Yield the lanes of spans above the panels."""
    height = chart.lanes * LANE_PIXELS + 2
    yield _opening(height, chart.spans_title or "time spans")
    if chart.spans_title:
        yield _text(LEFT_PIXELS - 8, height / 2 + 4, chart.spans_title, "end")
    for span in chart.spans:
        left, right = _x(chart, span.start), _x(chart, span.end)
        yield (
            f'<g><title>{safe(span.text or span.label)}</title><rect class="span c-{span.color}" x="{left:.1f}" '
            f'y="{span.lane * LANE_PIXELS + 2}" width="{max(2.0, right - left):.1f}" height="{LANE_PIXELS - 3}"/></g>'
        )
    yield from _span_labels(chart)
    yield "</svg>"


def _span_labels(chart: Chart) -> Iterator[str]:
    if not chart.spans_title:
        for span in chart.spans:
            left = _x(chart, span.start)
            is_late = left > LEFT_PIXELS + 0.7 * (WIDTH - LEFT_PIXELS)
            x, anchor = (left - 5, "end") if is_late else (left + 5, "start")
            yield _text(x, span.lane * LANE_PIXELS + 16, span.label, anchor, "ink")
        return
    second = (WIDTH - right_margin(chart) - LEFT_PIXELS) / (chart.end - chart.start)
    longest = max(len(span.label) for span in chart.spans)
    for span in visible_labels(chart.spans, (_LETTER_PIXELS * longest + 4) / second):
        yield _text(_x(chart, span.middle), span.lane * LANE_PIXELS + 16, span.label, "middle", "ink")


def panel_svg(chart: Chart, panel: ChartPanel, *, is_last: bool) -> Iterator[str]:
    """Yield one panel; the last one has the time axis under it."""
    height = panel_height(panel)
    place = _PlotArea(chart, panel, height)
    if isinstance(panel.content, QuartileTable):
        note = _NOTE_PIXELS if panel.content.note else 0
        yield _opening(_COLUMN_TITLE_PIXELS + height + 12 + _FOOT_PIXELS + note, panel.heading)
        yield f'<g transform="translate(0 {_COLUMN_TITLE_PIXELS + 6})">'
        yield from _quartiles(panel.content, height)
    else:
        yield _opening(height + 12 + (_FOOT_PIXELS if is_last else 0), panel.heading)
        yield '<g transform="translate(0 6)">'
        yield from _background(place)
        match panel.content:
            case Lines():
                yield from _scale(place)
                yield from _lines(place, panel.content)
            case Boxes():
                yield from _scale(place)
                yield from _boxes(place, panel.content)
            case HeatMap():
                yield from _heat_map(place, panel.content)
        yield from _foreground(place)
        if is_last:
            yield from _times(place)
    yield "</g></svg>"


def narrow_quartiles_svg(panel: ChartPanel, table: QuartileTable) -> Iterator[str]:
    """Yield box plots for phones: the quantities below each other, without the note."""
    height = panel_height(panel)
    step = _COLUMN_TITLE_PIXELS + height + 12 + _FOOT_PIXELS
    yield _opening(step * len(table.columns), panel.heading, _NARROW_WIDTH)
    for position, column in enumerate(table.columns):
        yield f'<g transform="translate(0 {position * step + _COLUMN_TITLE_PIXELS:.1f})">'
        yield from _row_labels(table, _NARROW_LEFT_PIXELS, height, MAX_PHONE_LABEL_CHARS)
        width = _NARROW_WIDTH - _NARROW_LEFT_PIXELS - 4
        yield from _quartile_column(column, _NARROW_LEFT_PIXELS, width, height)
        yield "</g>"
    yield "</svg>"


def _opening(height: float, label: str, width: float = WIDTH) -> str:
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{safe(label)}">'


def _text(x: float, y: float, text: object, anchor: str = "start", style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{safe(text)}</text>'


def _background(place: _PlotArea) -> Iterator[str]:
    """Yield the tints of spans and the gaps of all lines."""
    if not isinstance(place.panel.content, HeatMap):
        for span in place.chart.spans:
            if span.is_shaded:
                yield _area(place, span.start, span.end, f"c-{span.color}", opacity=tint_opacity(span))
    for gap in place.panel.gaps:
        style = f"hole c-{gap.color}"
        if not gap.rows:
            yield _area(place, gap.start, gap.end, style, gap.reason)
        elif place.panel.has_lanes:
            lane = place.height / len(place.panel.labels)
            for row in gap.rows:
                yield _area(place, gap.start, gap.end, style, gap.reason, lane * (row + 0.1), lane * 0.85)
        else:
            for row in gap.rows:
                color = f"hole c-{line_color(row)}"
                yield _area(place, gap.start, gap.end, color, gap.reason, place.height - 4, 4)


def _area(
    place: _PlotArea,
    start: float,
    end: float,
    style: str,
    text: str = "",
    y: float = 0,
    height: float | None = None,
    *,
    opacity: float | None = None,
) -> str:
    left, right = place.x(start), place.x(end)
    title = f"<title>{safe(text)}</title>" if text else ""
    high = place.height if height is None else height
    pale = "" if opacity is None else f' opacity="{opacity:g}"'
    return f'<rect class="{style}"{pale} x="{left:.1f}" y="{y:.1f}" width="{max(0.8, right - left):.1f}" height="{high:.1f}">{title}</rect>'


def _foreground(place: _PlotArea) -> Iterator[str]:
    if place.panel.content.is_empty:
        yield _text((LEFT_PIXELS + place.right) / 2, place.height / 2 + 4, "no data", "middle")
    for mark in place.chart.marks:
        x = place.x(mark.time)
        yield f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{place.height:.1f}"><title>{safe(mark.label)}</title></line>'


def _times(place: _PlotArea) -> Iterator[str]:
    chart = place.chart
    for moment, text in time_ticks(chart.start, chart.end, chart.clock):
        x = min(place.x(moment), WIDTH - _LETTER_PIXELS * len(text) / 2 - 2)
        yield _text(x, place.height + 16, text, "middle")


def _scale(place: _PlotArea) -> Iterator[str]:
    axis = place.panel.axis
    if not place.panel.has_lanes:
        for value in axis.ticks:
            y = place.y(0, value)
            yield f'<line class="grid" x1="{LEFT_PIXELS}" x2="{place.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield _text(LEFT_PIXELS - 8, y + 4, number_text(value), "end")
        return
    for row, label in enumerate(short_labels(place.panel.labels, MAX_LABEL_CHARS)):
        base, middle = place.y(row, axis.low), (place.y(row, axis.low) + place.y(row, axis.high)) / 2
        yield f'<line class="grid" x1="{LEFT_PIXELS}" x2="{place.right:.1f}" y1="{base:.1f}" y2="{base:.1f}"/>'
        yield _text(LEFT_PIXELS - 8, middle + 4, label, "end")
    if isinstance(place.panel.content, Lines):
        for row, line in enumerate(place.panel.content.lines):
            middle = (place.y(row, axis.low) + place.y(row, axis.high)) / 2
            yield _text(place.right + 6, middle + 4, line.note)


def _lines(place: _PlotArea, lines: Lines) -> Iterator[str]:
    for row, line in enumerate(lines.lines):
        for segment in line.segments():
            yield from _segment(place, row, line, segment)


def _segment(place: _PlotArea, row: int, line: ChartLine, segment: slice) -> Iterator[str]:
    color = line_color(0 if place.panel.has_lanes else row, line.color)
    points = _points(place, row, line.times[segment], line.values[segment])
    if not points:
        return
    if len(points) == 1:
        yield f'<circle class="c-{color}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2.5"/>'
        return
    if place.panel.has_lanes:
        base = place.y(row, place.panel.axis.low)
        under = [(points[0][0], base), *points, (points[-1][0], base)]
        yield f'<polygon class="under c-{color}" points="{_joined(under)}"/>'
    if line.low is not None and line.high is not None:
        low = _points(place, row, line.times[segment], line.low[segment])
        high = _points(place, row, line.times[segment], line.high[segment])
        yield f'<polygon class="range c-{color}" points="{_joined([*low, *reversed(high)])}"/>'
    dashes = " dashes" if row >= 8 and not place.panel.has_lanes else ""
    yield f'<polyline class="line s-{color}{dashes}" points="{_joined(points)}"/>'


def _points(place: _PlotArea, row: int, times: Array, values: Array) -> list[tuple[float, float]]:
    drawn = place.panel.axis.drawn(values)
    return [
        (place.x(moment), place.y(row, value))
        for moment, value in zip(times.tolist(), drawn.tolist(), strict=True)
        if np.isfinite(value)
    ]


def _joined(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _boxes(place: _PlotArea, boxes: Boxes) -> Iterator[str]:
    boxes_per_slot = 1 if boxes.has_lanes else max(1, len(boxes.rows))
    for number, row in enumerate(boxes.rows):
        color = line_color(0 if boxes.has_lanes else number)
        for box in row.boxes:
            start, end = place.x(box.start), place.x(box.end)
            width = 0.86 * (end - start) / boxes_per_slot
            left = start + 0.07 * (end - start) + number % boxes_per_slot * width
            drawn = place.panel.axis.drawn(np.array([box.low, box.q1, box.median, box.q3, box.high])).tolist()
            if not np.isfinite(drawn).all():
                continue
            low, q1, median, q3, high = (place.y(number, value) for value in drawn)
            inner, wide = left + 0.08 * width, 0.84 * width
            yield f'<path class="s-{color}" d="M{left + width / 2:.1f} {low:.1f}V{high:.1f}"/>'
            yield f'<rect class="box c-{color} s-{color}" x="{inner:.1f}" y="{q3:.1f}" width="{wide:.1f}" height="{q1 - q3:.1f}"/>'
            yield f'<path class="median s-{color}" d="M{inner:.1f} {median:.1f}h{wide:.1f}"/>'


def _heat_map(place: _PlotArea, heat_map: HeatMap) -> Iterator[str]:
    left, right = place.x(heat_map.start), place.x(heat_map.end)
    yield f'<rect class="c-gap" x="{LEFT_PIXELS}" y="0" width="{place.right - LEFT_PIXELS:.1f}" height="{place.height:.1f}"/>'
    if heat_map.cells.size:
        picture = _data_url(png(heat_map_colors(place.panel, heat_map)))
        yield (
            f'<image class="cells" x="{left:.1f}" y="0" width="{right - left:.1f}" height="{place.height:.1f}" '
            f'preserveAspectRatio="none" href="{picture}"/>'
        )
    row = place.height / max(1, len(heat_map.labels))
    for edge in heat_map.group_edges:
        yield f'<line class="edge" x1="{LEFT_PIXELS}" x2="{place.right:.1f}" y1="{edge * row:.1f}" y2="{edge * row:.1f}"/>'
    ticks = heat_map.row_ticks(int(place.height / 14))
    labels = short_labels([label for _, label in ticks], MAX_LABEL_CHARS)
    for (middle, _), label in zip(ticks, labels, strict=True):
        yield _text(LEFT_PIXELS - 8, middle * row + 4, label, "end")
    yield from _color_scale(place)


def _color_scale(place: _PlotArea) -> Iterator[str]:
    picture = _data_url(png(heat_colors(np.linspace(1.0, 0.0, 64)[:, None])))
    yield f'<image x="{place.right + 10:.1f}" y="0" width="10" height="{place.height:.1f}" preserveAspectRatio="none" href="{picture}"/>'
    for value in place.panel.axis.ticks:
        y = place.height * (1 - place.panel.axis.share(value))
        yield _text(place.right + 25, y + 4, number_text(value))


def _data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _quartiles(table: QuartileTable, height: float) -> Iterator[str]:
    """Yield all quantities side by side, so that each row is one device."""
    yield from _row_labels(table, LEFT_PIXELS, height, MAX_LABEL_CHARS)
    count = max(1, len(table.columns))
    width = (WIDTH - LEFT_PIXELS - 20 - _COLUMN_GAP * (count - 1)) / count
    for position, column in enumerate(table.columns):
        yield from _quartile_column(column, LEFT_PIXELS + position * (width + _COLUMN_GAP), width, height)
    if table.note:
        yield _text(LEFT_PIXELS, height + 16 + _NOTE_PIXELS, table.note)


def _row_labels(table: QuartileTable, right: float, height: float, max_characters: int) -> Iterator[str]:
    row = height / max(1, len(table.labels))
    for place, label in enumerate(short_labels(table.labels, max_characters)):
        yield _text(right - 8, (place + 0.5) * row + 4, label, "end")


def _quartile_column(column: QuartileColumn, left: float, width: float, height: float) -> Iterator[str]:
    yield _text(left, -8, printable(column.title, 40), style="ink")
    for value, text, anchor in end_ticks(column.axis):
        x = left + width * column.axis.share(value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height:.1f}"/>'
        yield _text(x, height + 16, text, anchor)
    row = height / max(1, len(column.boxes))
    for place, box in enumerate(column.boxes):
        if box is not None:
            yield from _quartile_box(column.axis, box, left, width, (place + 0.5) * row, 0.31 * row)


def quartiles_text(box: Quartiles, unit: str) -> str:
    """Describe a box in words."""
    low, q1, median, q3, high, highest = (
        value_text(value, "") for value in (box.low, box.q1, box.median, box.q3, box.high, box.highest)
    )
    return f"median {median} {unit}, interquartile range {q1} to {q3}, whiskers {low} to {high}, maximum {highest}"


def _quartile_box(
    axis: Axis, box: Quartiles, left: float, width: float, middle: float, half: float
) -> Iterator[str]:
    drawn = axis.drawn(np.array([box.low, box.q1, box.median, box.q3, box.high, box.highest]))
    if not np.isfinite(drawn).all():
        return
    low, q1, median, q3, high, highest = (left + width * axis.share(value) for value in drawn.tolist())
    text = quartiles_text(Quartiles(*drawn.tolist()), axis.unit)
    yield f"<g><title>{safe(text)}</title>"
    yield f'<path class="s-line0" d="M{low:.1f} {middle:.1f}H{high:.1f}"/>'
    yield f'<rect class="box c-line0 s-line0" x="{q1:.1f}" y="{middle - half:.1f}" width="{q3 - q1:.1f}" height="{2 * half:.1f}"/>'
    yield f'<path class="median s-line1" d="M{median:.1f} {middle - half:.1f}v{2 * half:.1f}"/>'
    yield f'<path class="s-quiet" d="M{highest:.1f} {middle - 0.7 * half:.1f}v{1.4 * half:.1f}"/></g>'
