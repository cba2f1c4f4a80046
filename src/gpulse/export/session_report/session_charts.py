"""Charts of a session as PNG, SVG or PDF, or as an HTML page with all figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gpulse.charts import chart_files, html_page
from gpulse.charts.chart_model import (
    MAX_LANES,
    Axis,
    Chart,
    ChartGap,
    ChartLine,
    ChartPage,
    ChartPanel,
    ChartSpan,
    QuartileColumn,
    Quartiles,
    QuartileTable,
    arrange_lines,
    make_axis,
    number_text,
)
from gpulse.charts.html_page import badge, bullets, table
from gpulse.charts.style import severity_color
from gpulse.charts.svg_renderer import safe
from gpulse.export.session_file.frame_grid import BYTES_PER_GB, FrameQuantity
from gpulse.export.session_file.gpu_statistics import ColumnStatistics
from gpulse.export.session_report import session_figures
from gpulse.export.session_report.session_figures import (
    GpuFigures,
    NodeFigures,
    QuantityStatistics,
    SessionReport,
)
from gpulse.model.formatting import energy

MAX_LISTED_ROWS = 200
"""Maximum number of gaps or interruptions that a page lists."""
_MAX_POINTS = 700
"""Maximum number of points of one line, of which a page may have many."""
_MAX_DRAWN_GAPS, _MAX_DRAWN_OUTAGES = 500, 100
_MAX_FINDINGS = 12
_MAX_BOXES = 64
_STATISTICS = ("mean", "p50", "p95", "max")
_NO_DATA = "no data"
_NOTHING = "This session has no measurements of any GPU."
_BOXES_NOTE = (
    "Boxes span the interquartile range of all frames (25th to 75th percentile), lines span the 5th to the 95th percentile, "
    "and a tick marks the maximum."
)


def check_output_path(path: Path) -> None:
    """Check early that charts can be written to a path.

    Raises:
        UsageError: The extension is unknown, or the file cannot be created there.
        MissingExtraError: The format needs matplotlib, which is not installed.
    """
    chart_files.check_chart_path(path, example=path.stem or "report")


def write_charts(report: SessionReport, path: Path) -> None:
    """Draw a report to a file; an existing file is replaced atomically.

    Raises:
        UsageError: The extension is unknown, or the file cannot be created there.
        MissingExtraError: The format needs matplotlib, which is not installed.
        OSError: The file cannot be written.
    """
    check_output_path(path)
    chart_files.write_chart(path, build_picture(report), lambda: build_page(report))


def build_picture(report: SessionReport) -> ChartPage:
    """Return the charts of a report: over time, then box plots."""
    if not report.quantities:
        return ChartPage(
            session_figures.headline(report), f"{session_figures.subtitle(report)}. {_NOTHING}", ()
        )
    return ChartPage(
        session_figures.headline(report),
        session_figures.subtitle(report),
        (build_time_chart(report), build_box_plots(report)),
    )


def build_page(report: SessionReport) -> str:
    """Return the charts with the report's findings, gaps and tables as one HTML page."""
    parts: list[str | Chart] = [
        *_labels(report),
        *(("<h2>Over time</h2>", build_time_chart(report)) if report.quantities else (f"<p>{_NOTHING}</p>",)),
        *_findings(report),
        *_list(
            "Interruptions",
            [session_figures.describe_outage(report, outage) for outage in report.outages[:MAX_LISTED_ROWS]],
        ),
        *_more(len(report.outages)),
        *_list("Gaps", [session_figures.describe_gap(report, gap) for gap in report.gaps[:MAX_LISTED_ROWS]]),
        *_more(len(report.gaps)),
        "<h2>Nodes</h2>",
        *_table(report, report.nodes),
        "<h2>GPUs</h2>",
        *((build_box_plots(report),) if report.quantities else ()),
        *_table(report, report.gpus),
    ]
    return html_page.page(session_figures.headline(report), session_figures.subtitle(report), parts)


def build_time_chart(report: SessionReport) -> Chart:
    """Return each quantity of all GPUs over time, with outages of the head and findings above them."""
    end = _end(report)
    panels = tuple(_panel(report, quantity, end) for quantity in session_figures.shown_quantities(report))
    return Chart(report.start, end, panels, spans=(*_outage_spans(report, end), *_finding_spans(report, end)))


def build_box_plots(report: SessionReport) -> Chart:
    """Return box plots of each quantity by GPU, or by node where there are many GPUs."""
    subject = "GPU" if len(report.gpus) <= _MAX_BOXES else "node"
    rows = _box_rows(report)
    columns = tuple(
        QuartileColumn(
            f"{quantity.title} by {subject}",
            _axis(report, quantity),
            tuple(_quartiles(quantity, figures.get(quantity.name)) for _, figures in rows),
        )
        for quantity in session_figures.shown_quantities(report)
    )
    boxes = QuartileTable(tuple(name for name, _ in rows), columns, _BOXES_NOTE)
    return Chart(report.start, _end(report), (ChartPanel("Distribution", boxes),))


def _end(report: SessionReport) -> float:
    return max(report.end, report.start + report.interval_seconds)


def _scale(quantity: FrameQuantity) -> float:
    return 1.0 if quantity.is_percent else BYTES_PER_GB


def _axis(report: SessionReport, quantity: FrameQuantity) -> Axis:
    """Return the axis of a quantity; percents always go up to 100%, to show unused capacity."""
    highest = [gpu.statistics[quantity.name].max for gpu in report.gpus if quantity.name in gpu.statistics]
    return make_axis(
        "percent" if quantity.is_percent else "bytes/second",
        np.array(highest, np.float64) * _scale(quantity),
        is_whole=True,
    )


def _panel(report: SessionReport, quantity: FrameQuantity, end: float) -> ChartPanel:
    axis = _axis(report, quantity)
    lines = [_line(report, quantity, place, axis) for place in range(len(report.gpus))]
    content = arrange_lines(lines, report.start, end, [gpu.node for gpu in report.gpus])
    return ChartPanel(quantity.title, content, axis, tuple(_gaps(report)))


def _line(report: SessionReport, quantity: FrameQuantity, gpu: int, axis: Axis) -> ChartLine:
    """Return a quantity of one GPU, interrupted where the GPU has no data."""
    max_points = _MAX_POINTS if 1 < len(report.gpus) <= MAX_LANES else 2 * _MAX_POINTS
    curve = report.series.curve(quantity.name, gpu, max_points=max_points)
    breaks = np.array([gap.start for gap in report.gaps if gpu in gap.gpus], np.float64)
    places = np.searchsorted(curve.times, breaks)
    distances = np.diff(curve.times)
    is_inside = (places > 0) & (places < len(curve.times))
    # A gap within one time step does not interrupt the line.
    is_inside[is_inside] = distances[places[is_inside] - 1] > 1.5 * distances.min(initial=np.inf)
    places, breaks = places[is_inside], breaks[is_inside]
    scale = _scale(quantity)
    low, values, high = (
        np.insert(array * scale, places, np.nan) for array in (curve.low, curve.mean, curve.high)
    )
    times = np.clip(np.insert(curve.times, places, breaks), report.start, _end(report))
    is_range = not np.array_equal(curve.low, curve.high)
    return ChartLine(
        report.gpus[gpu].short,
        times,
        values,
        low if is_range else None,
        high if is_range else None,
        note=_range_text(axis, scale, report.gpus[gpu].statistics.get(quantity.name)),
    )


def _range_text(axis: Axis, scale: float, found: ColumnStatistics | None) -> str:
    """Return the lowest and the highest value in the unit of the axis, as a short note next to a lane."""
    if found is None:
        return ""
    drawn = (value * scale / axis.factor for value in (found.min, found.max))
    low, high = (number_text(round(value, 0 if axis.high >= 50 and value >= 10 else 1)) for value in drawn)
    return low if low == high else f"{low} to {high}"


def _gaps(report: SessionReport) -> Iterator[ChartGap]:
    """Yield the longest gaps."""
    for gap in sorted(report.gaps, key=lambda gap: -gap.seconds)[:_MAX_DRAWN_GAPS]:
        yield ChartGap(gap.start, gap.end, _NO_DATA, () if len(gap.gpus) == len(report.gpus) else gap.gpus)


def _outage_spans(report: SessionReport, end: float) -> Iterator[ChartSpan]:
    """Yield the outages of the head; only the longest one gets a label, since a label may be wider than its span."""
    drawn = [
        (max(outage.start, report.start), end if outage.end is None else min(outage.end, end), outage)
        for outage in report.outages[:_MAX_DRAWN_OUTAGES]
    ]
    longest = max((until - start for start, until, _ in drawn), default=0.0)
    label = "head down"
    for start, until, outage in drawn:
        if start <= until:
            is_longest = until - start == longest
            yield ChartSpan(
                start,
                until,
                label if is_longest else "",
                text=session_figures.describe_outage(report, outage),
                color="away",
            )
            label = "" if is_longest else label


def _finding_spans(report: SessionReport, end: float) -> Iterator[ChartSpan]:
    first_lane = int(any(True for _ in _outage_spans(report, end)))
    timed = [
        found
        for found in session_figures.describe_findings(report)
        if found.start is not None and found.end is not None
    ]
    for lane, found in enumerate(timed[:_MAX_FINDINGS], first_lane):
        start = min(max(found.start or 0.0, report.start), end)
        yield ChartSpan(
            start,
            min(max(found.end or 0.0, start), end),
            f"{found.id}, {found.place}",
            text=found.text,
            color=severity_color(found.severity),
            lane=lane,
            is_shaded=False,
        )


def _box_rows(report: SessionReport) -> list[tuple[str, QuantityStatistics]]:
    """Return a row for each GPU; with many GPUs one for each node, and with many nodes only the least utilized ones."""
    if len(report.gpus) <= _MAX_BOXES:
        return [(gpu.short, gpu.statistics) for gpu in report.gpus]
    nodes = [(node.name, node.statistics) for node in report.nodes]
    if len(nodes) <= _MAX_BOXES:
        return nodes
    nodes.sort(key=lambda node: node[1]["gpu_util"].mean if "gpu_util" in node[1] else -1.0)
    return nodes[:_MAX_BOXES]


def _quartiles(quantity: FrameQuantity, found: ColumnStatistics | None) -> Quartiles | None:
    if found is None:
        return None
    scale = _scale(quantity)
    return Quartiles(
        *(value * scale for value in (found.p5, found.p25, found.p50, found.p75, found.p95, found.max))
    )


def _labels(report: SessionReport) -> Iterator[str]:
    if report.labels:
        pairs = ", ".join(f"{name}: {value}" for name, value in report.labels.items())
        yield f'<p class="quiet">{safe(pairs)}</p>'


def _findings(report: SessionReport) -> Iterator[str]:
    if report.findings:
        yield f"<h2>{safe(session_figures.findings_title(report))}</h2><ul>"
        for found in session_figures.describe_findings(report):
            code = "" if found.code is None else f"<br>Where: <code>{safe(found.code)}</code>"
            yield (
                f"<li>{badge(found.severity)} {safe(found.text)} "
                f'<span class="quiet">{safe(found.when)}</span>{code}</li>'
            )
        yield "</ul>"


def _list(title: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        yield f"<h2>{title}</h2>"
        yield from bullets(texts)


def _more(count: int) -> Iterator[str]:
    if count > MAX_LISTED_ROWS:
        yield f'<p class="quiet">and {count - MAX_LISTED_ROWS} more</p>'


def _table(report: SessionReport, rows: Sequence[GpuFigures] | Sequence[NodeFigures]) -> Iterator[str]:
    quantities = session_figures.shown_quantities(report)
    groups = ["", *(quantity.title for quantity in quantities for _ in _STATISTICS), "", ""]
    heads = ["", *(part for _ in quantities for part in _STATISTICS), "energy", "data"]
    yield from table(heads, (_cells(quantities, row) for row in rows), groups=groups)


def _cells(quantities: Sequence[FrameQuantity], row: GpuFigures | NodeFigures) -> list[str]:
    cells = [row.full_name if isinstance(row, GpuFigures) else row.name]
    for quantity in quantities:
        found = row.statistics.get(quantity.name)
        cells += [
            session_figures.format_value(quantity, None if found is None else getattr(found, part))
            for part in _STATISTICS
        ]
    return [*cells, energy(row.energy_joules), session_figures.format_availability(row.availability_ratio)]
