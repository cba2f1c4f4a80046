"""Render charts as one self-contained HTML page: interactive with uPlot, as SVG for printing and without JavaScript."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

import numpy as np

from gpulse.charts.chart_model import (
    Array,
    Boxes,
    Chart,
    ChartLine,
    ChartPanel,
    HeatMap,
    Lines,
    QuartileTable,
    local_offsets,
    number_text,
)
from gpulse.charts.style import (
    COLORS,
    LANE_PIXELS,
    LEFT_PIXELS,
    MAX_LABEL_CHARS,
    MAX_PHONE_LABEL_CHARS,
    legend,
    line_color,
    panel_height,
    right_margin,
    severity_color,
    short_labels,
    time_title,
    tint_opacity,
)
from gpulse.charts.svg_renderer import narrow_quartiles_svg, panel_svg, safe, spans_svg
from gpulse.model.finding import Advice
from gpulse.model.safe_text import printable

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_VENDOR = files("gpulse").joinpath("web", "static", "vendor")
_MAX_LEVEL = 65534
"""Number of steps between the lowest and the highest color of a heat map."""


def page(title: str, note: str, parts: Iterable[str | Chart]) -> str:
    """Return a whole page.

    Args:
        title: Its heading.
        note: The line under it.
        parts: Charts, and HTML in which all foreign text is escaped by `safe`.
    """
    listed = list(parts)
    charts = [part for part in listed if isinstance(part, Chart)]
    last_zoomed = max((place for place, chart in enumerate(charts) if _timed_panels(chart)), default=None)
    body = [f'<h1>{safe(title)}</h1><p class="quiet">{safe(note)}</p>']
    number = 0
    for part in listed:
        if isinstance(part, Chart):
            body += _chart(part, number, has_tip=number == last_zoomed)
            number += 1
        else:
            body.append(part)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{safe(title)}</title><style>",
            _style(),
            "</style></head><body>",
            *body,
            *(_scripts(charts) if any(chart.has_time for chart in charts) else ()),
            "</body></html>",
            "",
        ]
    )


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1, groups: Sequence[str] = ()
) -> Iterator[str]:
    """Yield a table, without empty columns.

    Args:
        heads: Headings of the columns.
        rows: Texts of the cells.
        names: Number of the first columns that are names.
        groups: Heading above each column's own; neighbours with the same one share it.
    """
    texts = [list(row) for row in rows]
    kept = [
        place
        for place in range(len(heads))
        if place == 0 or any(row[place] not in ("", "-") for row in texts)
    ]

    def cells(kind: str, row: Sequence[str]) -> str:
        classes = [' class="name"' if place < names else "" for place in kept]
        return "".join(
            f"<{kind}{style}>{safe(row[place])}</{kind}>" for place, style in zip(kept, classes, strict=True)
        )

    yield '<div class="wide"><table><thead>'
    if groups:
        spans = [(name, len(list(places))) for name, places in groupby(groups[place] for place in kept)]
        yield "<tr>"
        yield from (f'<th colspan="{count}">{safe(name)}</th>' for name, count in spans)
        yield "</tr>"
    yield f"<tr>{cells('th', heads)}</tr></thead><tbody>"
    yield from (f"<tr>{cells('td', row)}</tr>" for row in texts)
    yield "</tbody></table></div>"


def prose(text: str) -> str:
    """Return a sentence as HTML; text between backticks becomes code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", safe(text))


def advice_list(advice: Iterable[Advice]) -> Iterator[str]:
    """Yield a list of what to do about a finding, each with its reason and a way to check it; nothing without advice."""
    items = []
    for do, why, confirm in advice:
        reasons = [f"{word}: {prose(text)}." for word, text in (("Why", why), ("Check", confirm)) if text]
        items.append(f'<li>{prose(do)}<br><span class="quiet">{" ".join(reasons)}</span></li>')
    if items:
        yield from ("<ul>", *items, "</ul>")


def badge(severity: str) -> str:
    """Return a severity with its background color."""
    return f'<span class="badge" style="background:var(--{severity_color(severity)})">{safe(severity)}</span>'


def bullets(texts: Iterable[str]) -> Iterator[str]:
    """Yield a list of texts."""
    yield "<ul>"
    yield from (f"<li>{safe(text)}</li>" for text in texts)
    yield "</ul>"


def _chart(chart: Chart, number: int, *, has_tip: bool) -> Iterator[str]:
    """Yield a chart: a figure for its spans, and one for each panel."""
    yield '<section class="chart">'
    if chart.title:
        yield f"<h2>{safe(chart.title)}</h2>"
    if chart.spans:
        yield f'<figure data-chart="{number}" data-panel="spans"><div class="plot"></div><div class="static">'
        yield from spans_svg(chart)
        yield "</div></figure>"
    with_time = _timed_panels(chart)
    for place, panel in enumerate(chart.panels):
        has_times = place in with_time[-1:]
        live = (
            f' data-chart="{number}" data-panel="{place}" data-last="{str(has_times).lower()}"'
            if place in with_time
            else ""
        )
        yield f"<figure{live}><figcaption><b>{safe(panel.heading)}</b>{''.join(_keys(chart, panel))}</figcaption>"
        yield '<div class="plot"></div><div class="static">'
        yield from panel_svg(chart, panel, is_last=has_times)
        yield "</div>"
        if isinstance(panel.content, QuartileTable):
            yield '<div class="narrow">'
            yield from narrow_quartiles_svg(panel, panel.content)
            yield f'<p class="quiet note">{safe(panel.content.note)}</p></div>'
        yield "</figure>"
    if chart.time_title:
        yield f'<p class="quiet note">{safe(time_title(chart))}</p>'
    if has_tip:
        yield '<p class="quiet note tip">Drag to zoom, double-click to reset.</p>'
    yield "</section>"


def _timed_panels(chart: Chart) -> list[int]:
    """Return the positions of the panels with a time axis."""
    return [place for place, panel in enumerate(chart.panels) if not isinstance(panel.content, QuartileTable)]


def _keys(chart: Chart, panel: ChartPanel) -> Iterator[str]:
    """Yield the entries of a legend."""
    for label, color, is_area in legend(chart, panel):
        kind = ' class="area"' if is_area else ""
        yield f'<span class="key"><i{kind} style="background:var(--{color})"></i>{safe(label)}</span>'
    if panel.has_lanes:
        yield f'<span class="key">scale of each lane: {safe(panel.axis.range_text)}</span>'


def _style() -> str:
    dark = "".join(f"--{name}:{color.dark};" for name, color in COLORS.items())
    light = "".join(f"--{name}:{color.light};" for name, color in COLORS.items())
    fills = "".join(
        f"svg .c-{name}{{fill:var(--{name})}}svg .s-{name}{{stroke:var(--{name})}}" for name in COLORS
    )
    return "\n".join(
        [
            f":root{{color-scheme:light dark;{light}}}",
            f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}",
            "@media print{:root{color-scheme:light}}",
            fills,
            _vendored("uPlot.min.css"),
            _own("page.css"),
        ]
    )


def _scripts(charts: Sequence[Chart]) -> Iterator[str]:
    document = {"left": LEFT_PIXELS, "charts": [_chart_data(chart) for chart in charts]}
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    # No string can close the script element.
    yield f'<script type="application/json" id="charts">{text.replace("<", chr(92) + "u003c")}</script>'
    yield f"<script>\n/*\n{_vendored('uPlot.LICENSE')}*/\n{_vendored('uPlot.iife.min.js')}</script>"
    yield f"<script>\n{_own('page.js')}</script>"


@cache
def _vendored(name: str) -> str:
    return _VENDOR.joinpath(name).read_text(encoding="utf-8")


@cache
def _own(name: str) -> str:
    return files("gpulse.charts").joinpath(name).read_text(encoding="utf-8")


def _chart_data(chart: Chart) -> dict[str, Any]:
    """Return the data of a chart for `page.js`."""
    return {
        "start": chart.start,
        "end": chart.end,
        "clock": chart.clock,
        "offsets": local_offsets(chart.start, chart.end),
        "right": right_margin(chart),
        "lanes": chart.lanes,
        "spansTitle": printable(chart.spans_title),
        "spansHeight": chart.lanes * LANE_PIXELS,
        "spans": [
            {
                "start": span.start,
                "end": span.end,
                "label": printable(span.label),
                "text": printable(span.text or span.label),
                "color": span.color,
                "lane": span.lane,
                "tint": tint_opacity(span),
                "number": span.number,
            }
            for span in chart.spans
        ],
        "marks": [{"time": mark.time, "label": printable(mark.label)} for mark in chart.marks],
        "panels": [_panel_data(chart, panel) for panel in chart.panels],
    }


def _panel_data(chart: Chart, panel: ChartPanel) -> dict[str, Any]:
    axis = panel.axis
    data: dict[str, Any] = {
        "unit": axis.unit,
        "low": axis.low,
        "high": axis.high,
        "top": axis.top,
        "ticks": axis.ticks,
        "tickTexts": [number_text(value) for value in axis.ticks],
        "height": panel_height(panel),
        "labels": [printable(label) for label in panel.labels],
        "rowTicks": _row_ticks(panel),
        "isApart": panel.has_lanes or isinstance(panel.content, HeatMap),
        "gaps": [
            {
                "start": gap.start,
                "end": gap.end,
                "reason": printable(gap.reason),
                "rows": gap.rows,
                "color": gap.color,
            }
            for gap in panel.gaps
        ],
    }
    match panel.content:
        case Lines(lines):
            rows = [_line_data(chart, panel, row, line) for row, line in enumerate(lines)]
            notes = [printable(line.note) for line in lines] if panel.content.has_notes else []
            return {**data, "kind": "lines", "rows": rows, "notes": notes}
        case Boxes():
            return {**data, "kind": "boxes", "rows": list(_box_data(panel, panel.content))}
        case HeatMap():
            return {**data, "kind": "map", **_map_data(panel, panel.content)}
        case QuartileTable():
            return {"kind": "static"}


def _row_ticks(panel: ChartPanel) -> list[tuple[float, str, str]]:
    """Return the centers of rows with their labels, and shorter labels for phones."""
    if isinstance(panel.content, HeatMap):
        ticks = panel.content.row_ticks(int(panel_height(panel) / 14))
    else:
        ticks = [(row + 0.5, label) for row, label in enumerate(panel.labels)] if panel.has_lanes else []
    middles, labels = [middle for middle, _ in ticks], [label for _, label in ticks]
    wide, narrow = short_labels(labels, MAX_LABEL_CHARS), short_labels(labels, MAX_PHONE_LABEL_CHARS)
    return list(zip(middles, wide, narrow, strict=True))


def _line_data(chart: Chart, panel: ChartPanel, row: int, line: ChartLine) -> dict[str, Any]:
    data: dict[str, Any] = {
        "color": line_color(row, line.color),
        "times": [round(time, 3) for time in (line.times - chart.start).tolist()],
        "values": _numbers(panel.axis.drawn(line.values)),
    }
    if line.low is not None and line.high is not None:
        data["low"] = _numbers(panel.axis.drawn(line.low))
        data["high"] = _numbers(panel.axis.drawn(line.high))
    return data


def _box_data(panel: ChartPanel, boxes: Boxes) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(boxes.rows):
        found = []
        for box in row.boxes:
            drawn = panel.axis.drawn(np.array([box.low, box.q1, box.median, box.q3, box.high]))
            if np.isfinite(drawn).all():
                found.append([box.start, box.end, *_numbers(drawn), box.count])
        yield {"color": line_color(0 if boxes.has_lanes else number), "boxes": found}


def _map_data(panel: ChartPanel, heat_map: HeatMap) -> dict[str, Any]:
    """Return the cells as 16-bit numbers: 0 for unknown values, otherwise the position on the axis."""
    axis = panel.axis
    ratios = (axis.drawn(heat_map.cells) - axis.low) / (axis.high - axis.low)
    levels = np.where(np.isnan(ratios), 0, 1 + np.rint(np.clip(np.nan_to_num(ratios), 0, 1) * _MAX_LEVEL))
    return {
        "start": heat_map.start,
        "end": heat_map.end,
        "columns": heat_map.cells.shape[1],
        "cells": base64.b64encode(levels.astype("<u2").tobytes()).decode(),
        "edges": heat_map.group_edges,
    }


def _numbers(values: Array) -> list[float | int | None]:
    """Return values rounded to four digits; None for unknown ones."""
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
