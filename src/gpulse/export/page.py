"""A diagnosis as one HTML file that needs nothing else: text, and curves drawn as inline SVG."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from html import escape

from gpulse.diagnosis.signals import told
from gpulse.export.curves import SEVERITY_COLORS, Chart, Mark, Panel, printable, time_ticks, window_words
from gpulse.model.finding import Diagnosis, Finding

_WIDE = 1200
_LEFT, _RIGHT = 84, 44
_LANE, _PANEL, _HEAD, _FOOT = 24, 120, 30, 26

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; line-height: 1.35; } h2 { font-size: 1.05rem; margin: 2rem 0 .3rem; } h3 { font-size: 1rem; margin: 1.6rem 0 .2rem; }
.quiet { color: #666; } svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: #555; } svg .name { fill: #000; } svg .panel { font-weight: 600; fill: #222; }
svg .grid { stroke: #e4e4e4; } svg .base { stroke: #aaa; } svg .here { fill: #000; opacity: 0; } svg .here:hover { opacity: .07; }
table { border-collapse: collapse; margin: .4rem 0; } td { padding: .1rem 1.2rem .1rem 0; } td.value { text-align: right; }
.badge { display: inline-block; padding: 0 .5em; border-radius: .25em; font-size: .85em; color: #000; }
code { font: .92em ui-monospace, monospace; }
"""


def html(drawn: Sequence[Chart], diagnosis: Diagnosis) -> str:
    """The whole page. Every text that is not our own is escaped."""
    body = [f"<h1>{_safe(diagnosis.verdict)}</h1>", f'<p class="quiet">{_safe(window_words(diagnosis))}</p>']
    for chart in drawn:
        body += [f"<h2>{_safe(chart.title)}</h2>", *svg(chart)]
    if diagnosis.findings:
        body.append("<h2>Findings</h2>")
        for finding in diagnosis.findings:
            body += _finding(finding)
    if diagnosis.info:
        body += ["<h2>Worth knowing</h2>", *_list(f"{item.summary} ({item.id})" for item in diagnosis.info)]
    if diagnosis.data_gaps:
        body += ["<h2>What could not be seen</h2>", *_list(diagnosis.data_gaps)]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_safe(diagnosis.verdict)}</title><style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>",
            "",
        ]
    )


def _safe(text: str) -> str:
    return escape(printable(text))


def _list(texts: Iterator[str] | Sequence[str]) -> Iterator[str]:
    yield "<ul>"
    yield from (f"<li>{_safe(text)}</li>" for text in texts)
    yield "</ul>"


def _finding(finding: Finding) -> Iterator[str]:
    color = SEVERITY_COLORS[finding.severity]
    yield f'<h3><span class="badge" style="background:{color}">{finding.severity}</span> {_safe(finding.summary)}</h3>'
    pids = f", pid {' '.join(map(str, finding.pids))}" if finding.pids else ""
    yield f'<p class="quiet"><code>{_safe(finding.id)}</code>, confidence {finding.confidence:.2f}{pids}</p>'
    if finding.evidence:
        yield "<table>"
        for item in finding.evidence:
            said = told(item)
            yield (
                f'<tr title="{_safe(f"{item.signal}, {item.statistic}")}"><td>{_safe(said.words)}</td>'
                f'<td class="value">{_safe(said.value)}</td><td class="quiet">{_safe(said.against)}</td></tr>'
            )
        yield "</table>"
    if finding.advice:
        yield "<ul>"
        for advice in finding.advice:
            yield f'<li>{_safe(advice.do)}<br><span class="quiet">Why: {_safe(advice.why)}. To see: {_safe(advice.confirm)}.</span></li>'
        yield "</ul>"


def svg(chart: Chart) -> Iterator[str]:
    """Curves, and above them the findings, as a picture in a page."""
    lanes = len(chart.marks) * _LANE
    height = lanes + len(chart.panels) * (_HEAD + _PANEL) + _FOOT
    yield f'<svg viewBox="0 0 {_WIDE} {height}" role="img">'
    for place, mark in enumerate(chart.marks):
        yield from _lane(chart, mark, place * _LANE)
    top = lanes
    for panel in chart.panels:
        yield from _panel(chart, panel, top)
        top += _HEAD + _PANEL
    for moment, words in time_ticks(chart.start, chart.end):
        yield f'<text x="{_x(chart, moment):.1f}" y="{top + 17}" text-anchor="middle">{_safe(words)}</text>'
    yield "</svg>"


def _x(chart: Chart, moment: float) -> float:
    inside = _WIDE - _LEFT - _RIGHT
    return _LEFT + inside * (moment - chart.start) / (chart.end - chart.start)


def _lane(chart: Chart, mark: Mark, top: float) -> Iterator[str]:
    left, right = _x(chart, mark.start), _x(chart, mark.end)
    is_late = left > _LEFT + 0.75 * (_WIDE - _LEFT - _RIGHT)
    x, anchor = (left - 5, "end") if is_late else (left + 5, "start")
    yield f'<g><title>{_safe(mark.text)}</title><rect x="{left:.1f}" y="{top + 3}" width="{max(2.0, right - left):.1f}" height="{_LANE - 6}" rx="2" fill="{mark.color}" />'
    yield f'<text class="name" x="{x:.1f}" y="{top + 16}" text-anchor="{anchor}">{_safe(mark.name)}</text></g>'


def _panel(chart: Chart, panel: Panel, top: float) -> Iterator[str]:
    ceiling, floor = top + _HEAD, top + _HEAD + _PANEL

    def y(value: float) -> float:
        return floor - _PANEL * min(1.0, value / panel.top)

    yield f'<text class="panel" x="{_LEFT}" y="{ceiling - 9}">{_safe(panel.title)}</text>'
    yield from _legend(panel, ceiling - 9)
    for mark in chart.marks:
        left, right = _x(chart, mark.start), _x(chart, mark.end)
        if mark.shaded:
            yield f'<rect x="{left:.1f}" y="{ceiling}" width="{right - left:.1f}" height="{_PANEL}" fill="{mark.color}" opacity=".1"/>'
    for value in panel.ticks:
        style = "base" if value == 0 else "grid"
        yield f'<line class="{style}" x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{_safe(panel.written(value))}</text>'
    for curve in panel.curves:
        for run in curve.runs:
            points = [(_x(chart, moment), y(value)) for moment, value in run]
            if len(points) == 1:
                yield f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2" fill="{curve.color}"/>'
            else:
                drawn = " ".join(f"{x:.1f},{height:.1f}" for x, height in points)
                yield f'<polyline points="{drawn}" fill="none" stroke="{curve.color}" stroke-width="1.8" stroke-linejoin="round"/>'
    yield from _hover(chart, panel, ceiling)


def _legend(panel: Panel, baseline: float) -> Iterator[str]:
    """One text, so that the browser, which knows its letters, sets the distances."""
    gap = "&#160;" * 4
    entries = (
        f'<tspan style="fill:{curve.color};font-weight:700">&#9473;&#9473;</tspan> {_safe(curve.label)}'
        for curve in panel.curves
    )
    yield f'<text x="{_WIDE - _RIGHT}" y="{baseline}" text-anchor="end">{gap.join(entries)}</text>'


def _hover(chart: Chart, panel: Panel, ceiling: float) -> Iterator[str]:
    """A column for each moment that tells its values when somebody points at it."""
    known: dict[float, list[str]] = {}
    for curve in panel.curves:
        for run in curve.runs:
            for moment, value in run:
                known.setdefault(moment, []).append(f"{curve.label} {panel.written(value)}")
    moments = sorted(known)
    wide = (_WIDE - _LEFT - _RIGHT) / max(1, len(moments))
    for moment in moments:
        words = "\n".join([time.strftime("%H:%M:%S", time.localtime(moment)), *known[moment]])
        yield f'<rect class="here" x="{_x(chart, moment) - wide / 2:.1f}" y="{ceiling}" width="{wide:.1f}" height="{_PANEL}"><title>{escape(words)}</title></rect>'
