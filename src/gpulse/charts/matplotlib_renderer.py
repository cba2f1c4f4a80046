"""Render charts with matplotlib: PNG, SVG, PDF, and figures for notebooks."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gpulse.charts.chart_model import (
    Array,
    Boxes,
    Chart,
    ChartLine,
    ChartPage,
    ChartPanel,
    HeatMap,
    Lines,
    QuartileColumn,
    QuartileTable,
    end_ticks,
    number_text,
    time_ticks,
    visible_labels,
)
from gpulse.charts.style import (
    COLORS,
    LANE_PIXELS,
    heat_ramp,
    legend,
    line_color,
    panel_height,
    right_margin,
    short_labels,
    time_title,
    tint_opacity,
)
from gpulse.model.safe_text import printable

WIDTH_INCHES = 12.0
_PIXELS = 88.0
"""Pixels per inch, to convert the sizes of `style`."""
_LEFT, _COLUMN_GAP = 1.5, 0.4
_MARGIN = 0.25
_TITLE, _CAPTION, _FOOT, _END = 0.36, 0.3, 0.36, 0.14
_NOTE = 0.22
"""Height of a text line under box plots in inches."""
_LETTER = 0.078
"""Width of a letter in span labels in inches."""
_LETTER_PER_POINT = 0.0081
"""Width of a letter in inches per point of its font size."""
_MAX_TITLE_LINES = 4
_MAX_LABEL_CHARS = 18


def draw_figure(picture: ChartPage, figure: Figure | None = None) -> Figure:
    """Draw a chart page on an empty figure of any size, or on a new one with the height that it needs."""
    with style():
        width = WIDTH_INCHES if figure is None else float(figure.get_size_inches()[0])
        lines = _title_lines(picture, width)
        needed = _heights(picture, len(lines))
        if figure is None:
            figure = Figure(
                figsize=(WIDTH_INCHES, max(1.0, needed.total)), dpi=100, facecolor=_color("paper")
            )
        height = float(figure.get_size_inches()[1])
        spare = height - needed.fixed
        sheet = _Sheet(figure, width, height, max(0.15, spare / needed.panels) if needed.panels else 1.0)
        _draw_picture(sheet, picture, lines)
    return figure


def render_figure(figure: Figure, kind: str) -> bytes:
    """Return a figure as the bytes of a `png`, `svg` or `pdf` file; the same figure always gives the same bytes.

    Raises:
        OSError, RuntimeError, ValueError: Matplotlib cannot draw this kind here.
    """
    metadata: dict[str, Any] | None = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    content = io.BytesIO()
    with warnings.catch_warnings(), style():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        figure.savefig(content, format=kind, metadata=metadata)
    return content.getvalue()


@contextmanager
def style() -> Iterator[None]:
    """Set matplotlib options: no math in texts (dollar signs), and reproducible files."""
    with mpl.rc_context({"text.parse_math": False, "svg.hashsalt": "gpulse", "svg.fonttype": "none"}):
        yield


@dataclass(frozen=True)
class _Heights:
    """Heights of a chart page in inches: the fixed parts, and the panels, which can be scaled."""

    fixed: float
    panels: float

    @property
    def total(self) -> float:
        return self.fixed + self.panels


def _heights(picture: ChartPage, title_lines: int) -> _Heights:
    fixed = 0.62 + 0.22 * title_lines
    panels = 0.0
    for chart in picture.charts:
        fixed += (_TITLE if chart.title else 0.0) + chart.lanes * LANE_PIXELS / _PIXELS + _END
        fixed += len(chart.panels) * _CAPTION + (_FOOT if chart.has_time else 0.0)
        fixed += sum(
            _FOOT + (_NOTE if panel.content.note else 0.0)
            for panel in chart.panels
            if isinstance(panel.content, QuartileTable)
        )
        panels += sum(panel_height(panel) / _PIXELS for panel in chart.panels)
    return _Heights(fixed, panels)


def _title_lines(picture: ChartPage, width: float) -> list[str]:
    letters = _letters(width - 2 * _MARGIN, 12)
    return textwrap.wrap(printable(picture.title), letters, max_lines=_MAX_TITLE_LINES, placeholder="…") or [
        ""
    ]


def _letters(inches: float, size: float) -> int:
    """Return how many letters of a font size in points fit."""
    return max(2, int(inches / (_LETTER_PER_POINT * size)))


@dataclass(frozen=True)
class _Sheet:
    """A figure with coordinates in inches from its upper left corner."""

    figure: Figure
    width: float
    height: float
    panel_scale: float

    def right(self, chart: Chart) -> float:
        return 0.2 + right_margin(chart) / _PIXELS

    def inside(self, chart: Chart) -> float:
        return max(0.3, self.width - _LEFT - self.right(chart))

    def shortened(self, text: str, size: float) -> str:
        """Cut untrusted text to one line."""
        return printable(text, _letters(self.width - 2 * _MARGIN, size))

    def text(self, down: float, text: str, size: float, *, bold: bool = False, quiet: bool = False) -> None:
        self.figure.text(
            _MARGIN / self.width,
            1 - down / self.height,
            text,
            fontsize=size,
            fontweight="bold" if bold else "normal",
            color=_color("quiet" if quiet else "ink"),
            va="top",
            linespacing=1.3,
        )

    def axes(self, left: float, down: float, width: float, height: float) -> Axes:
        box = (left / self.width, 1 - (down + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(_color("base"))
        axes.tick_params(length=0, colors=_color("quiet"), labelsize=8.5)
        axes.tick_params(axis="x", pad=5)
        return axes


def _color(name: str) -> str:
    return COLORS[name].light


def _draw_picture(sheet: _Sheet, picture: ChartPage, lines: Sequence[str]) -> None:
    sheet.text(0.18, "\n".join(lines), 12, bold=True)
    down = 0.24 + 0.22 * len(lines)
    sheet.text(down, sheet.shortened(picture.note, 9), 9, quiet=True)
    down += 0.38
    for chart in picture.charts:
        down = _draw_chart(sheet, chart, down)


def _draw_chart(sheet: _Sheet, chart: Chart, down: float) -> float:
    """Draw a chart `down` inches below the top, and return where it ends."""
    if chart.title:
        sheet.text(down + 0.06, sheet.shortened(chart.title, 10.5), 10.5, bold=True)
        down += _TITLE
    if chart.spans:
        height = chart.lanes * LANE_PIXELS / _PIXELS
        _draw_spans(sheet, sheet.axes(_LEFT, down, sheet.inside(chart), height), chart)
        down += height
    timed = [panel for panel in chart.panels if not isinstance(panel.content, QuartileTable)]
    for panel in chart.panels:
        down += _CAPTION
        height = panel_height(panel) / _PIXELS * sheet.panel_scale
        if isinstance(panel.content, QuartileTable):
            _draw_quartiles(sheet, panel.content, down, height)
            down += height + _FOOT + (_NOTE if panel.content.note else 0.0)
            continue
        axes = sheet.axes(_LEFT, down, sheet.inside(chart), height)
        axes.set_xlim(chart.start, chart.end)
        _draw_panel(sheet, axes, chart, panel)
        _draw_times(sheet, axes, chart, is_last=panel is timed[-1])
        down += height
    return down + (_FOOT if timed else 0.0) + _END


def _draw_spans(sheet: _Sheet, axes: Axes, chart: Chart) -> None:
    axes.set_xlim(chart.start, chart.end)
    axes.set_ylim(chart.lanes, 0)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([chart.lanes / 2] if chart.spans_title else [])
    axes.set_yticklabels([printable(chart.spans_title)] if chart.spans_title else [])
    length = chart.end - chart.start
    by_color: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for span in chart.spans:
        seen = max(span.end - span.start, 0.002 * length)  # an instant is drawn as a thin line
        by_color.setdefault((span.lane, span.color), []).append((min(span.start, chart.end - seen), seen))
    for (lane, color), bars in by_color.items():
        axes.broken_barh(bars, (lane + 0.08, 0.84), color=_color(color), linewidth=0)
    look: dict[str, Any] = {"fontsize": 8.5, "color": _color("ink"), "va": "center_baseline"}
    if chart.spans_title:
        longest = max(len(span.label) for span in chart.spans)
        room = (_LETTER * longest + 0.06) * length / sheet.inside(chart)
        for span in visible_labels(chart.spans, room):
            axes.text(span.middle, span.lane + 0.52, printable(span.label), ha="center", **look)
        return
    for span in chart.spans:
        is_late = span.start - chart.start > 0.7 * length
        x = span.start + (-0.004 if is_late else 0.004) * length
        axes.text(x, span.lane + 0.52, printable(span.label), ha="right" if is_late else "left", **look)


def _draw_panel(sheet: _Sheet, axes: Axes, chart: Chart, panel: ChartPanel) -> None:
    axes.set_title(printable(panel.heading, 100), loc="left", fontsize=9.5, fontweight="bold", pad=5)
    _draw_areas(axes, chart, panel)
    if isinstance(panel.content, HeatMap):
        _draw_heat_map(sheet, axes, panel, panel.content)
    elif panel.has_lanes:
        _draw_lanes(axes, panel)
    else:
        axes.set_ylim(panel.axis.low, panel.axis.top)
        axes.set_yticks(panel.axis.ticks)
        axes.set_yticklabels([number_text(value) for value in panel.axis.ticks])
        axes.grid(axis="y", color=_color("grid"), linewidth=0.8)
        axes.set_axisbelow(True)
    _draw_legend(sheet, axes, chart, panel)
    match panel.content:
        case Lines(lines):
            for row, line in enumerate(lines):
                _draw_line(axes, panel, row, line)
        case Boxes():
            _draw_boxes(axes, panel, panel.content)
    if panel.content.is_empty:
        axes.text(
            0.5, 0.5, "no data", transform=axes.transAxes, color=_color("quiet"), ha="center", va="center"
        )
    for mark in chart.marks:
        axes.axvline(mark.time, color=_color("quiet"), linewidth=0.8, linestyle=(0, (3, 3)))


def _draw_areas(axes: Axes, chart: Chart, panel: ChartPanel) -> None:
    """Tint the spans, and draw the gaps."""
    if isinstance(panel.content, HeatMap):  # unknown cells are already gray
        return
    tinted: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for span in chart.spans:
        tinted.setdefault((span.color, tint_opacity(span)), []).append((span.start, span.end - span.start))
    for (color, opacity), bars in tinted.items():
        axes.broken_barh(
            bars,
            (0, 1),
            color=_color(color),
            alpha=opacity,
            linewidth=0,
            zorder=0.2,
            transform=axes.get_xaxis_transform(),
        )
    for gap in panel.gaps:
        look: dict[str, Any] = {"alpha": 0.55, "linewidth": 0, "zorder": 0.3}
        if not gap.rows:
            axes.axvspan(gap.start, gap.end, color=_color(gap.color), **look)
        for row in gap.rows:
            if panel.has_lanes:
                top = len(panel.labels) - row - 0.1
                axes.fill_between([gap.start, gap.end], top - 0.85, top, color=_color(gap.color), **look)
            else:
                axes.axvspan(
                    gap.start, gap.end, ymin=0, ymax=0.035, color=_color(line_color(row)), linewidth=0
                )


def _draw_lanes(axes: Axes, panel: ChartPanel) -> None:
    """Label one lane per row, the first on top, all with the same scale."""
    count = len(panel.labels)
    axes.set_ylim(0, count)
    axes.set_yticks([count - place - 0.55 for place in range(count)])
    axes.set_yticklabels(short_labels(panel.labels, _MAX_LABEL_CHARS))
    for place in range(count):
        axes.axhline(count - place - 0.95, color=_color("grid"), linewidth=0.8)
    if isinstance(panel.content, Lines):
        for place, line in enumerate(panel.content.lines):
            axes.annotate(
                printable(line.note),
                (1.0, count - place - 0.55),
                xytext=(4, 0),
                xycoords=axes.get_yaxis_transform(),
                textcoords="offset points",
                fontsize=8,
                color=_color("quiet"),
                va="center",
                annotation_clip=False,
            )


def _lane(panel: ChartPanel, row: int, values: Array) -> Array:
    """Return the positions of values, on the panel's scale or in a lane."""
    axis = panel.axis
    drawn = np.clip(axis.drawn(values), axis.low, axis.high)
    if not panel.has_lanes:
        return drawn
    return len(panel.labels) - row - 0.95 + 0.85 * (drawn - axis.low) / (axis.high - axis.low)


def _draw_line(axes: Axes, panel: ChartPanel, row: int, line: ChartLine) -> None:
    color = _color(line_color(0 if panel.has_lanes else row, line.color))
    look = "--" if row >= 8 and not panel.has_lanes else "-"
    for segment in line.segments():
        times, values = line.times[segment], _lane(panel, row, line.values[segment])
        if panel.has_lanes:
            axes.fill_between(
                times, len(panel.labels) - row - 0.95, values, color=color, alpha=0.2, linewidth=0
            )
        if line.low is not None and line.high is not None:
            low, high = _lane(panel, row, line.low[segment]), _lane(panel, row, line.high[segment])
            axes.fill_between(times, low, high, color=color, alpha=0.22, linewidth=0)
        mark = "o" if len(times) == 1 else None
        axes.plot(
            times,
            values,
            color=color,
            linestyle=look,
            linewidth=1.4,
            marker=mark,
            markersize=3,
            solid_capstyle="round",
            clip_on=False,
        )


def _draw_boxes(axes: Axes, panel: ChartPanel, boxes: Boxes) -> None:
    boxes_per_slot = 1 if boxes.has_lanes else max(1, len(boxes.rows))
    for place, row in enumerate(boxes.rows):
        color = _color(line_color(0 if boxes.has_lanes else place))
        fields = np.array(
            [(box.start, box.end, box.low, box.q1, box.median, box.q3, box.high) for box in row.boxes],
            np.float64,
        ).reshape(-1, 7)
        starts, ends = fields[:, 0], fields[:, 1]
        low, q1, median, q3, high = _lane(panel, place, fields[:, 2:]).T
        width = 0.86 * (ends - starts) / boxes_per_slot
        left = starts + 0.07 * (ends - starts) + place % boxes_per_slot * width
        axes.vlines(left + width / 2, low, high, color=color, linewidth=0.9)
        one, other = left + 0.08 * width, left + 0.92 * width
        corners = np.stack((one, q1, one, q3, other, q3, other, q1), axis=1).reshape(-1, 4, 2)
        faces = PolyCollection(
            list(corners), facecolors=[_pale(color)], edgecolors=[color], linewidths=0.9, zorder=2
        )
        axes.add_collection(faces, autolim=False)
        axes.hlines(median, one, other, color=color, linewidth=2.0, zorder=3)


def _pale(color: str) -> tuple[float, float, float]:
    """Return a pale version of a color."""
    red, green, blue = (0.65 + 0.35 * int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return red, green, blue


def _draw_heat_map(sheet: _Sheet, axes: Axes, panel: ChartPanel, heat_map: HeatMap) -> None:
    count = len(heat_map.labels)
    shades = [tuple(channel / 255 for channel in color) for color in heat_ramp()]
    colors = LinearSegmentedColormap.from_list("gpulse", shades).with_extremes(bad=_color("gap"))
    image = axes.imshow(
        np.ma.masked_invalid(panel.axis.drawn(heat_map.cells)),
        aspect="auto",
        cmap=colors,
        vmin=panel.axis.low,
        vmax=panel.axis.high,
        interpolation="none",
        extent=(heat_map.start, heat_map.end, max(1, count), 0),
    )
    axes.set_facecolor(_color("gap"))
    place = axes.get_position()
    bar = sheet.figure.add_axes((place.x1 + 0.12 / sheet.width, place.y0, 0.11 / sheet.width, place.height))
    scale = sheet.figure.colorbar(image, cax=bar, ticks=list(panel.axis.ticks))
    scale.outline.set_visible(False)
    scale.ax.set_yticklabels([number_text(value) for value in panel.axis.ticks])
    scale.ax.tick_params(length=0, colors=_color("quiet"), labelsize=8)
    ticks = heat_map.row_ticks(int(place.height * sheet.height * 6))
    axes.set_yticks([middle for middle, _ in ticks])
    axes.set_yticklabels(short_labels([label for _, label in ticks], _MAX_LABEL_CHARS))
    for edge in heat_map.group_edges:
        axes.axhline(edge, color=_color("paper"), linewidth=0.8)


def _draw_legend(sheet: _Sheet, axes: Axes, chart: Chart, panel: ChartPanel) -> None:
    """Draw the legend above the panel; labels without room are only counted."""
    keys = [(printable(label, 40), color, is_area) for label, color, is_area in legend(chart, panel)]
    if panel.has_lanes:
        keys.append((f"scale of each lane: {panel.axis.range_text}", "", False))
    if not keys:
        return
    room = sheet.inside(chart) - 0.09 * len(printable(panel.heading, 100)) - 0.4
    shown: list[tuple[str, str, bool]] = []
    for key in keys:
        room -= 0.45 + 0.075 * len(key[0])
        if room < 0 and shown:
            break
        shown.append(key)
    handles: list[Any] = [
        Patch(color=_color(color)) if is_area else Line2D([], [], color=_color(color), linewidth=2.0)
        for _, color, is_area in shown
        if color
    ]
    handles += [Line2D([], [], linewidth=0)] * (len(shown) - len(handles))
    labels = [label for label, _, _ in shown]
    if len(shown) < len(keys):
        handles.append(Line2D([], [], linewidth=0))
        labels.append(f"and {len(keys) - len(shown)} more")
    axes.legend(
        handles,
        labels,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(labels),
        fontsize=8.5,
        labelcolor=_color("quiet"),
        frameon=False,
        borderaxespad=0.1,
        handlelength=1.4,
        columnspacing=1.4,
    )


def _draw_times(sheet: _Sheet, axes: Axes, chart: Chart, *, is_last: bool) -> None:
    ticks = time_ticks(chart.start, chart.end, chart.clock, max(2, min(12, int(sheet.inside(chart) / 1.1))))
    axes.set_xticks([moment for moment, _ in ticks])
    axes.set_xticklabels([text if is_last else "" for _, text in ticks])
    if is_last and chart.time_title:
        axes.set_xlabel(time_title(chart), fontsize=8.5, color=_color("quiet"), labelpad=4)


def _draw_quartiles(sheet: _Sheet, table: QuartileTable, down: float, height: float) -> None:
    """Draw all quantities side by side, so that each row is one device."""
    count = max(1, len(table.columns))
    width = max(0.2, (sheet.width - _LEFT - 0.3 - _COLUMN_GAP * (count - 1)) / count)
    for place, column in enumerate(table.columns):
        axes = sheet.axes(_LEFT + place * (width + _COLUMN_GAP), down, width, max(0.1, height))
        axes.set_title(printable(column.title, 40), loc="left", fontsize=9.5, fontweight="bold", pad=5)
        _draw_quartile_column(axes, column)
        axes.set_ylim(len(table.labels) - 0.4, -0.6)
        axes.set_yticks(range(len(table.labels)))
        axes.set_yticklabels(short_labels(table.labels, _MAX_LABEL_CHARS) if not place else [])
    if table.note:
        sheet.figure.text(
            _LEFT / sheet.width,
            1 - (down + height + _FOOT) / sheet.height,
            printable(table.note),
            fontsize=8,
            color=_color("quiet"),
            va="top",
        )


def _draw_quartile_column(axes: Axes, column: QuartileColumn) -> None:
    axis = column.axis
    fields = {
        place: axis.drawn(np.array([box.low, box.q1, box.median, box.q3, box.high, box.highest])).tolist()
        for place, box in enumerate(column.boxes)
        if box is not None
    }
    known = {place: values for place, values in fields.items() if np.isfinite(values).all()}
    names = ("whislo", "q1", "med", "q3", "whishi")
    line, median = _color("line0"), _color("line1")
    axes.bxp(
        [{**dict(zip(names, values[:5], strict=True)), "fliers": []} for values in known.values()],
        positions=list(known),
        orientation="horizontal",
        widths=0.62,
        patch_artist=True,
        showfliers=False,
        manage_ticks=False,
        boxprops={"facecolor": _pale(line), "edgecolor": line, "linewidth": 0.8},
        medianprops={"color": median, "linewidth": 1.8},
        whiskerprops={"color": line, "linewidth": 0.9},
        capprops={"color": line, "linewidth": 0.9},
    )
    axes.plot([values[5] for values in known.values()], list(known), "|", color=_color("quiet"), markersize=5)
    margin = 0.01 * (axis.high - axis.low)
    axes.set_xlim(axis.low - margin, axis.high + margin)
    ticks = end_ticks(axis)
    axes.set_xticks([value for value, _, _ in ticks])
    labels = axes.set_xticklabels([text for _, text, _ in ticks])
    labels[0].set_horizontalalignment("left")
    labels[-1].set_horizontalalignment("right")
    axes.grid(axis="x", color=_color("grid"), linewidth=0.8)
    axes.set_axisbelow(True)
