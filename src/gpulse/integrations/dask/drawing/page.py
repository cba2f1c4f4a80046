"""A chart as one HTML file that needs nothing else: inline SVG, light and dark, and values under the pointer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

from gpulse.export.curves import printable
from gpulse.integrations.dask.drawing.charts import Boxes, Chart, Lines, Panel
from gpulse.integrations.dask.drawing.graphs import job_starts, named
from gpulse.integrations.dask.drawing.marks import LEFT, WIDE, Place, content_marks, right_edge, safe
from gpulse.integrations.dask.drawing.pointing import told
from gpulse.integrations.dask.drawing.units import time_ticks, time_unit, written

_LANE, _HEAD, _FOOT = 18, 34, 44
_LEAST_PANEL, _LEAST_LANE = 90.0, 24.0
_MOST_NAMED = 12
_LETTER = 7.0
_MOST_MARKS = 150
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(chart: Chart, ratio: float) -> str:
    """The whole page. Every text that is not our own is escaped.

    Args:
        chart: What it shows.
        ratio: Its height over its width, unless its panels need more.
    """
    places = list(_places(chart, ratio))
    data = json.dumps(told(chart, places), separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{safe(chart.title)}</title><style>",
            _file("page.css"),
            "</style></head><body>",
            f'<h1>{safe(chart.title)}</h1><p class="quiet">{safe(chart.note)}</p>',
            '<div class="wide">',
            *_svg(chart, places),
            "</div>",
            '<div id="told"></div>',
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>\n{_file('page.js')}</script>",
            "</body></html>",
            "",
        ]
    )


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _places(chart: Chart, ratio: float) -> Iterator[Place]:
    """Where the panels are."""
    top = float(chart.lanes * _LANE)
    each = (WIDE * ratio - 90 - top - _FOOT) / len(chart.panels) - _HEAD
    for panel in chart.panels:
        least = _LEAST_LANE * len(panel.labels) if panel.has_lanes else _LEAST_PANEL
        bottom = top + _HEAD + max(each, least)
        yield Place(chart, top + _HEAD, bottom)
        top = bottom


def _svg(chart: Chart, places: list[Place]) -> Iterator[str]:
    floor = places[-1].bottom
    yield f'<svg viewBox="0 0 {WIDE} {floor + _FOOT:.0f}" role="img" aria-label="{safe(chart.title)}">'
    yield from _strip(chart)
    for panel, place in zip(chart.panels, places, strict=True):
        yield from _panel(chart, panel, place)
    place = places[-1]
    for moment, words in zip(*time_ticks(chart.start, chart.end, 10), strict=True):
        yield f'<text x="{place.x(moment):.1f}" y="{floor + 17:.1f}" text-anchor="middle">{words}</text>'
    middle = (LEFT + right_edge(chart)) / 2
    unit = time_unit(chart.end)
    yield f'<text x="{middle:.0f}" y="{floor + 36:.1f}" text-anchor="middle">time since monitoring was started ({unit})</text>'
    yield f'<line id="hair" y1="0" y2="{floor:.1f}"/></svg>'


def _strip(chart: Chart) -> Iterator[str]:
    """The graphs by number, all or some of them."""
    if not chart.bands:
        return
    place = Place(chart, 0, 0)
    name = "job.graph" if "." in chart.bands[0].label else "graph"
    yield f'<text x="{LEFT - 8}" y="{chart.lanes * _LANE / 2 + 4:.1f}" text-anchor="end">{name}</text>'
    for band in chart.bands:
        left, right = place.span(band)
        yield f'<rect class="g{band.shade}" x="{left:.1f}" y="{band.lane * _LANE + 1}" width="{right - left:.1f}" height="{_LANE - 3}"><title>{safe(band.words)}</title></rect>'
    second = (right_edge(chart) - LEFT) / (chart.end - chart.start)
    longest = max(len(band.label) for band in chart.bands)
    found = named(chart.bands, (_LETTER * longest + 4) / second)
    for band in found:
        yield f'<text class="number" x="{place.x(band.middle):.1f}" y="{band.lane * _LANE + 12}" text-anchor="middle" pointer-events="none">{safe(band.label)}</text>'
    starts = job_starts(chart.bands)
    if len(found) < len(chart.bands) and len(starts) <= _MOST_MARKS:
        for start in starts:
            yield f'<line class="job" x1="{place.x(start):.1f}" x2="{place.x(start):.1f}" y1="{chart.lanes * _LANE - 2}" y2="{chart.lanes * _LANE + 4}"/>'


def _panel(chart: Chart, panel: Panel, place: Place) -> Iterator[str]:
    yield f'<text class="panel" x="{LEFT}" y="{place.top - 9:.1f}">{safe(panel.title)}</text>'
    if isinstance(panel.content, Lines | Boxes):
        yield from _legend(chart, panel, place)
        for band in chart.bands:
            left, right = place.span(band)
            yield f'<rect class="g{band.shade} shade" x="{left:.1f}" y="{place.top:.1f}" width="{right - left:.1f}" height="{place.height:.1f}"/>'
        yield from _lanes(panel, place) if panel.has_lanes else _scale(panel, place)
    yield from content_marks(panel, place)


def _scale(panel: Panel, place: Place) -> Iterator[str]:
    right = right_edge(place.chart)
    for value in panel.axis.ticks:
        height = place.y(panel, 0, value)
        style = "base" if value == panel.axis.low else "grid"
        yield f'<line class="{style}" x1="{LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{written(value)}</text>'


def _lanes(panel: Panel, place: Place) -> Iterator[str]:
    right = right_edge(place.chart)
    for number, label in enumerate(panel.labels):
        base, top = place.y(panel, number, panel.axis.low), place.y(panel, number, panel.axis.high)
        yield f'<line class="base" x1="{LEFT}" x2="{right}" y1="{base:.1f}" y2="{base:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{(base + top) / 2 + 4:.1f}" text-anchor="end">{safe(label)}</text>'


def _legend(chart: Chart, panel: Panel, place: Place) -> Iterator[str]:
    """One text, so that the browser, which knows its letters, sets the distances."""
    words = [
        f'<tspan class="f{number % 8}" font-weight="700">&#9473;&#9473;</tspan> {safe(label)}'
        for number, label in enumerate(panel.labels[:_MOST_NAMED])
        if label != printable(panel.metric)
    ]
    if len(panel.labels) > _MOST_NAMED:
        words.append(f"and {len(panel.labels) - _MOST_NAMED} more")
    if panel.has_lanes:
        words = [f"each lane {escape(panel.range_words)}"]
    gap = "&#160;" * 4
    yield f'<text x="{right_edge(chart)}" y="{place.top - 9:.1f}" text-anchor="end">{gap.join(words)}</text>'
