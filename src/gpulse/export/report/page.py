"""A report as one HTML file that needs nothing else: pictures as inline SVG, and the figures as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from gpulse.export.curves import SEVERITY_COLORS, printable
from gpulse.export.report import words
from gpulse.export.report.canvas import svg
from gpulse.export.report.model import Figures, GpuReport, NodeReport, Report
from gpulse.export.report.picture import boxes, over_time

_MOST_GAPS = 200
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
.quiet { color: #666; } svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; white-space: nowrap; } td { text-align: right; white-space: nowrap; }
th, td { padding: .12rem .7rem .12rem 0; } th.name, td.name { text-align: left; } tbody tr:hover { background: #f4f4f4; }
thead tr:last-child th { border-bottom: 1px solid #aaa; }
.badge { display: inline-block; padding: 0 .5em; border-radius: .25em; font-size: .85em; color: #000; }
"""


def page(report: Report) -> str:
    """The whole page. Every text that is not our own is escaped."""
    body = [
        f"<h1>{_safe(words.headline(report))}</h1>",
        f'<p class="quiet">{_safe(words.subtitle(report))}</p>',
        *_labels(report),
        *_over_time(report),
        *_findings(report),
        *_absences(report),
        *_gaps(report),
        "<h2>Nodes</h2>",
        *_table(report, report.nodes),
        "<h2>GPUs</h2>",
        *([svg(boxes(report))] if report.quantities else []),
        *_table(report, report.gpus),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_safe(words.headline(report))}</title><style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>",
            "",
        ]
    )


def _safe(text: str) -> str:
    return escape(printable(text))


def _labels(report: Report) -> Iterator[str]:
    if report.labels:
        told = ", ".join(f"{name}: {value}" for name, value in report.labels.items())
        yield f'<p class="quiet">{_safe(told)}</p>'


def _over_time(report: Report) -> Iterator[str]:
    if report.quantities:
        yield "<h2>Over time</h2>"
        yield svg(over_time(report))
    else:
        yield "<p>No GPU delivered a measurement in this session.</p>"


def _table(report: Report, rows: Sequence[GpuReport] | Sequence[NodeReport]) -> Iterator[str]:
    quantities = words.shown(report)
    heads = "".join(f'<th colspan="4">{_safe(quantity.title)}</th>' for quantity in quantities)
    parts = "<th>mean</th><th>p50</th><th>p95</th><th>max</th>" * len(quantities)
    yield f'<div class="wide"><table><thead><tr><th class="name"></th>{heads}<th></th><th></th></tr>'
    yield f'<tr><th class="name"></th>{parts}<th>energy</th><th>seen</th></tr></thead><tbody>'
    for row in rows:
        name = row.id if isinstance(row, GpuReport) else row.name
        cells = "".join(f"<td>{_safe(cell)}</td>" for cell in _cells(report, row.statistics))
        yield (
            f'<tr><td class="name">{_safe(name)}</td>{cells}<td>{_safe(words.energy(row.energy_joules))}</td>'
            f"<td>{_safe(words.availability(row.availability_ratio))}</td></tr>"
        )
    yield "</tbody></table></div>"


def _cells(report: Report, figures: Figures) -> Iterator[str]:
    for quantity in words.shown(report):
        found = figures.get(quantity.name)
        for part in ("mean", "p50", "p95", "max"):
            yield words.value(quantity, None if found is None else getattr(found, part))


def _absences(report: Report) -> Iterator[str]:
    if report.absences:
        yield "<h2>Interruptions</h2><ul>"
        told = [words.absence(report, absence) for absence in report.absences[:_MOST_GAPS]]
        yield from (f"<li>{_safe(text)}</li>" for text in told)
        if len(report.absences) > _MOST_GAPS:
            yield f"<li>and {len(report.absences) - _MOST_GAPS} more</li>"
        yield "</ul>"


def _gaps(report: Report) -> Iterator[str]:
    if report.gaps:
        yield "<h2>Gaps</h2><ul>"
        yield from (f"<li>{_safe(words.gap(report, gap))}</li>" for gap in report.gaps[:_MOST_GAPS])
        if len(report.gaps) > _MOST_GAPS:
            yield f"<li>and {len(report.gaps) - _MOST_GAPS} more</li>"
        yield "</ul>"


def _findings(report: Report) -> Iterator[str]:
    if report.findings:
        yield f"<h2>{_safe(words.findings_title(report))}</h2><ul>"
        yield from map(_finding, words.findings(report))
        yield "</ul>"


def _finding(told: words.Told) -> str:
    color = {str(name): color for name, color in SEVERITY_COLORS.items()}.get(told.severity, "#D8D8D8")
    return (
        f'<li><span class="badge" style="background:{color}">{_safe(told.severity)}</span> '
        f'{_safe(told.place)}: {_safe(told.summary)} <span class="quiet">{_safe(told.when)}</span></li>'
    )
