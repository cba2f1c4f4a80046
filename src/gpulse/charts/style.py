"""Colors, sizes and text of charts: the same in every renderer."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.charts.chart_model import (
    Array,
    Boxes,
    Chart,
    ChartPanel,
    ChartSpan,
    HeatMap,
    Lines,
    QuartileTable,
    elapsed_unit,
)
from gpulse.model.safe_text import printable

Pixels = NDArray[np.uint8]
"""Rows of red, green, blue and alpha values."""


class Color(NamedTuple):
    """A color for light and for dark backgrounds."""

    light: str
    dark: str


COLORS: dict[str, Color] = {
    "paper": Color("#ffffff", "#14171a"),
    "ink": Color("#1f2328", "#e6e6e6"),
    "quiet": Color("#59636e", "#a0a6ab"),
    "grid": Color("#e4e4e4", "#2b3035"),
    "base": Color("#aaaaaa", "#555b61"),
    "card": Color("#f6f8fa", "#1c2024"),
    "gap": Color("#d9d9d9", "#3a4046"),
    "away": Color("#e69f00", "#8f6400"),
    "line0": Color("#0072b2", "#4da3dd"),
    "line1": Color("#d55e00", "#f0803c"),
    "line2": Color("#009e73", "#2cc498"),
    "line3": Color("#cc79a7", "#e29cc2"),
    "line4": Color("#e69f00", "#f0b429"),
    "line5": Color("#56b4e9", "#8fd0f5"),
    "line6": Color("#000000", "#ffffff"),
    "line7": Color("#8c8c8c", "#9aa0a6"),
    "band0": Color("#dce6ef", "#26333f"),
    "band1": Color("#efe7d6", "#3a3424"),
    "band2": Color("#e3ebdc", "#2b3a2c"),
    "heat0": Color("#eaeff5", "#1b222b"),
    "heat1": Color("#a6c8ec", "#1d426b"),
    "heat2": Color("#2a72c2", "#3f88d9"),
    "critical": Color("#de6a73", "#b0434d"),
    "high": Color("#f0a08c", "#9c4a37"),
    "medium": Color("#f5cb7a", "#86611a"),
    "low": Color("#f3eba3", "#6b6320"),
    "info": Color("#d8d8d8", "#474d53"),
}
"""Lines have the palette of Okabe and Ito without its yellow, which people with any color vision can distinguish.

The colors of spans and severities are light enough for text on them.
"""
LINE_COLORS = 8
SEVERITIES = ("critical", "high", "medium", "low", "info")
HEAT = ("heat0", "heat1", "heat2")
"""Colors of heat maps from the least to the most: the blue of load, paler or darker towards the background."""

LEFT_PIXELS = 122
MAX_LABEL_CHARS = 15
"""Characters of a row label that fit to the left of a panel."""
MAX_PHONE_LABEL_CHARS = 9
RIGHT_PIXELS = 18
SCALE_PIXELS = 52
"""Width of the color scale to the right of a heat map."""
LANE_PIXELS = 22
"""Height of a lane of spans."""
_LINES_PIXELS = 118
_LINE_LANE_PIXELS = 26
_MIN_MAP_PIXELS, _MAX_MAP_PIXELS = 110, 560


def line_color(position: int, color: str = "") -> str:
    """Return the color name of a line: its own, or the one of its position."""
    return color or f"line{position % LINE_COLORS}"


def severity_color(severity: str) -> str:
    """Return the color name of a severity; an unknown one gets the color of `info`."""
    return severity if severity in SEVERITIES else "info"


def tint_opacity(span: ChartSpan) -> float:
    """Return the opacity with which a span tints the panels: more for pale bands than for strong severity colors."""
    if not span.is_shaded:
        return 0.0
    return 0.45 if span.color.startswith("band") else 0.16


def legend(chart: Chart, panel: ChartPanel) -> list[tuple[str, str, bool]]:
    """Return the legend of a panel: label, color name and whether it is an area."""
    found: list[tuple[str, str, bool]] = []
    match panel.content:
        case Lines(lines, has_lanes) if not has_lanes:
            found = [(line.label, line_color(row, line.color), False) for row, line in enumerate(lines)]
        case Boxes(rows, has_lanes) if not has_lanes:
            found = [(row.label, line_color(number), True) for number, row in enumerate(rows)]
    if len(found) == 1 and found[0][0] == panel.title:
        found = []
    if panel is chart.panels[0]:
        gaps = [gap for each in chart.panels for gap in each.gaps]
        for color in dict.fromkeys(gap.color for gap in gaps):
            reasons = {gap.reason for gap in gaps if gap.color == color}
            found.append((reasons.pop() if len(reasons) == 1 else "", color, True))
    return [(label or "no data", color, is_area) for label, color, is_area in found]


def short_labels(labels: Sequence[str], max_characters: int) -> list[str]:
    """Shorten row labels so that as many as possible stay distinct.

    The middle is cut first, because node names differ at their start and GPUs at their end; if that hides the
    difference, the common prefix is cut too.
    """
    texts = [printable(label) for label in labels]
    if all(len(text) <= max_characters for text in texts):
        return texts
    pairs = zip(min(texts), max(texts), strict=False)
    shared = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    words = len(shared) - len(re.split(r"[^0-9A-Za-z]", shared)[-1])
    starts = sorted(range(1, max_characters - 1), key=lambda start: abs(start - max_characters // 2))
    ways = [
        [_cut(text, dropped, start, max_characters) for text in texts]
        for start in starts
        for dropped in (0, words)
    ]
    return max(ways, key=lambda cut: len(set(cut)))


def _cut(text: str, dropped: int, start: int, max_characters: int) -> str:
    """Return a text without its first characters and its middle; unchanged if it fits."""
    if len(text) > max_characters and dropped:
        text = f"…{text[dropped:]}"
    if len(text) <= max_characters:
        return text
    return f"{text[:start]}…{text[start + 1 - max_characters :]}"


def time_title(chart: Chart) -> str:
    """Return the title of the time axis, with the unit if times are not times of day."""
    unit = f" ({elapsed_unit(chart.end)})" if chart.time_title and chart.clock == "elapsed" else ""
    return f"{printable(chart.time_title)}{unit}"


def panel_height(panel: ChartPanel) -> float:
    """Return the height of a panel in pixels."""
    if panel.height is not None:
        return panel.height
    match panel.content:
        case HeatMap(labels):
            return min(_MAX_MAP_PIXELS, max(_MIN_MAP_PIXELS, (16 if len(labels) <= 32 else 6) * len(labels)))
        case QuartileTable(labels):
            return len(labels) * (25 if len(labels) <= 16 else 16)
        case Lines() | Boxes():
            return max(_LINES_PIXELS, _LINE_LANE_PIXELS * len(panel.labels) if panel.has_lanes else 0)


def right_margin(chart: Chart) -> float:
    """Return the margin to the right of a chart in pixels: it holds color scales and notes of lanes."""
    contents = [panel.content for panel in chart.panels]
    is_wide = any(isinstance(one, HeatMap) or (isinstance(one, Lines) and one.has_notes) for one in contents)
    return RIGHT_PIXELS + (SCALE_PIXELS if is_wide else 0)


def heat_ramp() -> list[tuple[int, int, int]]:
    """Return red, green and blue of the colors of heat maps on light backgrounds."""
    codes = [COLORS[name].light for name in HEAT]
    return [(int(code[1:3], 16), int(code[3:5], 16), int(code[5:7], 16)) for code in codes]


def heat_colors(ratios: Array) -> Pixels:
    """Return the colors of values from 0 to 1; NaN is transparent."""
    known = np.clip(np.nan_to_num(ratios), 0.0, 1.0)
    ramp = heat_ramp()
    places = np.linspace(0.0, 1.0, len(ramp))
    channels = [np.interp(known, places, [color[channel] for color in ramp]) for channel in range(3)]
    alpha = np.where(np.isnan(ratios), 0.0, 255.0)
    return np.asarray(np.rint(np.stack([*channels, alpha], axis=-1)), np.uint8)


def heat_map_colors(panel: ChartPanel, heat_map: HeatMap) -> Pixels:
    """Return the colors of the cells of a heat map."""
    axis = panel.axis
    return heat_colors((axis.drawn(heat_map.cells) - axis.low) / (axis.high - axis.low))


def png(colors: Pixels) -> bytes:
    """Return a PNG file of rows of pixels."""
    height, width, _ = colors.shape
    rows = np.concatenate((np.zeros((height, 1), np.uint8), colors.reshape(height, width * 4)), axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
