"""Job report as one self-contained HTML file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from gpulse.charts import html_page
from gpulse.charts.chart_model import (
    Chart,
    ChartGap,
    ChartLine,
    ChartPanel,
    ChartSpan,
    Lines,
    arrange_lines,
    make_axis,
    make_line,
)
from gpulse.charts.html_page import advice_list, badge, bullets, table
from gpulse.charts.style import severity_color
from gpulse.charts.svg_renderer import safe
from gpulse.export import job_report_text
from gpulse.model.formatting import UNKNOWN, energy, long_size, share, size, sizes, watts
from gpulse.reports.job_report import JobGap, JobGpu, JobReport, JobSeries

_MAX_GPUS = 512
_MAX_SPANS = 12
_NO_DATA = "no data"
_MEMORY = "memory_used_bytes"
_ACTIVITY_METRICS = {
    "gpu_utilization_ratio": "kernels running",
    "sm_active_ratio": "SMs in use",
    "tensor_active_ratio": "tensor cores",
    "dram_active_ratio": "memory interface",
}
_PCIE_METRICS = {"pcie_rx_bytes_per_second": "to the GPU", "pcie_tx_bytes_per_second": "from the GPU"}


def build_page(report: JobReport) -> str:
    """Return the whole page."""
    parts: list[str | Chart] = [
        *_cards(report),
        *_facts(report),
        *_metrics(report),
        *build_charts(report),
        *_findings(report),
        *_gpus(report),
        *_data_gaps(report),
    ]
    return html_page.page(job_report_text.headline(report), job_report_text.subtitle(report), parts)


def _cards(report: JobReport) -> Iterator[str]:
    others = report.cluster.utilization_mean
    cards = [
        (job_report_text.gpu_hours(report.held_seconds), "held"),
        (
            share(report.utilization_mean),
            "GPU busy" + ("" if others is None else f", cluster mean {share(others)}"),
        ),
        (job_report_text.idle_share(report), "of the time held but idle"),
        (energy(report.energy_joules), "energy"),
    ]
    if report.untouched_gpus is not None:
        cards.append(
            (
                str(report.untouched_gpus),
                "GPU never used" if report.untouched_gpus == 1 else "GPUs never used",
            )
        )
    yield '<div class="cards">'
    yield from (
        f'<div class="card"><b>{safe(value)}</b><span>{safe(label)}</span></div>' for value, label in cards
    )
    yield "</div>"


def _facts(report: JobReport) -> Iterator[str]:
    yield "<dl>"
    yield from (
        f"<dt>{safe(name)}</dt><dd>{safe(text)}</dd>" for name, text in job_report_text.describe_facts(report)
    )
    yield "</dl>"


def _metrics(report: JobReport) -> Iterator[str]:
    rows = job_report_text.describe_metrics(report)
    if rows:
        yield "<h2>GPU metrics</h2>"
        yield from table(
            ("", "mean", "peak", "cluster mean"),
            ([one.title, one.mean, one.peak, one.cluster] for one in rows),
        )


def _findings(report: JobReport) -> Iterator[str]:
    found = job_report_text.describe_findings(report)
    if found:
        yield "<h2>Findings</h2>"
    for finding in found:
        yield f"<h3>{badge(finding.severity)} {safe(finding.text)}</h3>"
        yield f'<p class="quiet"><code>{safe(finding.id)}</code>, {safe(finding.when)}</p>'
        if finding.code is not None:
            yield f"<p>Where: <code>{safe(finding.code)}</code></p>"
        yield from advice_list(finding.advice)


def _gpus(report: JobReport) -> Iterator[str]:
    rows = report.gpu_rows
    if not rows:
        return
    yield "<h2>GPUs</h2>"
    heads = (
        "GPU",
        "model",
        "",
        "allocated",
        "held",
        "idle",
        "busy",
        "SM",
        "tensor",
        "DRAM",
        "memory",
        "power",
        "peak",
        "energy",
    )
    yield from table(heads, (_cells(row) for row in rows[:_MAX_GPUS]), names=3)
    if report.gpus > _MAX_GPUS:
        yield f'<p class="quiet">and {report.gpus - _MAX_GPUS} more</p>'


def _cells(row: JobGpu) -> list[str]:
    used, total = row.peak("memory_used_bytes"), row.memory_total_bytes
    remark = job_report_text.USE_TEXTS.get(row.use or "", "")
    return [
        job_report_text.gpu_name(row),
        job_report_text.clean_text(row.model or UNKNOWN, 40),
        "shared" if row.use == "used" and row.shared else remark,
        job_report_text.span_hours(row.allocated_seconds),
        job_report_text.span_hours(row.held_seconds),
        job_report_text.span_hours(row.idle_seconds),
        share(row.utilization_mean),
        *(share(row.mean(name)) for name in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")),
        size(used) if total is None else sizes(used, total),
        watts(row.mean("power_watts")),
        watts(row.peak("power_watts")),
        energy(row.energy_joules),
    ]


def _data_gaps(report: JobReport) -> Iterator[str]:
    gaps = job_report_text.describe_data_gaps(report)
    if gaps:
        yield "<h2>Missing data</h2>"
        yield from bullets(gaps)


def build_charts(report: JobReport) -> Iterator[str | Chart]:
    """Yield the section with charts; nothing when the report has no series."""
    series = report.series
    if series is None or len(series.times) < 2 or series.step <= 0:
        return
    start, end = report.start, max(report.end, report.start + series.step)
    panels = (*_mean_panels(series, report), *_gpu_panel(series, report, start, end))
    yield "<h2>Over time</h2>"
    if panels:
        yield '<p class="quiet">Mean of all GPUs that were used.</p>'
        yield Chart(start, end, panels, spans=tuple(_spans(report, start, end)))


def _mean_panels(series: JobSeries, report: JobReport) -> Iterator[ChartPanel]:
    total = _memory_total(report)
    known = {
        name: values for name, values in series.metrics.items() if any(value is not None for value in values)
    }
    gaps = tuple(_gaps(series, report, list(known.values())))

    def panel(
        title: str, unit: str, labels: Mapping[str, str], *, least: float = 0.0
    ) -> Iterator[ChartPanel]:
        lines = tuple(
            _line(label, series, known[name], report.missing, total if name == _MEMORY and total else 1.0)
            for name, label in labels.items()
            if name in known
        )
        if lines:
            axis = make_axis(unit, *(line.values for line in lines), is_whole=True, min_top=least)
            yield ChartPanel(title, Lines(lines), axis, gaps)

    yield from panel("GPU activity", "ratio", _ACTIVITY_METRICS)
    yield from panel("Power per GPU", "watts", {"power_watts": "power"}, least=100.0)
    used = f"used (of {long_size(total)})" if total else "used"
    yield from panel(
        "Memory per GPU", "ratio" if total else "bytes", {_MEMORY: used}, least=0.0 if total else 2.0**30
    )
    yield from panel("PCIe per GPU", "bytes/second", _PCIE_METRICS, least=1e6)


def _gpu_panel(series: JobSeries, report: JobReport, start: float, end: float) -> Iterator[ChartPanel]:
    """Yield a panel with the utilization of each GPU."""
    gpus = series.gpus
    if not gpus:
        return
    missing = {gpu.node: [gap for gap in report.missing if gap.node == gpu.node] for gpu in gpus}
    lines = [_line(job_report_text.gpu_name(gpu), series, gpu.values, missing[gpu.node]) for gpu in gpus]
    gaps = tuple(
        ChartGap(
            gap.start, gap.end, _NO_DATA, tuple(row for row, gpu in enumerate(gpus) if gpu.node == gap.node)
        )
        for node in missing
        for gap in missing[node]
    )
    axis = make_axis("ratio", *(line.values for line in lines), is_whole=True)
    yield ChartPanel(
        "Utilization of each GPU", arrange_lines(lines, start, end, [gpu.node for gpu in gpus]), axis, gaps
    )


def _memory_total(report: JobReport) -> float | None:
    """Return the memory size of its GPUs; None if they differ."""
    totals = {row.memory_total_bytes for row in report.gpu_rows}
    return totals.pop() if len(totals) == 1 else None


def _is_missing(moment: float, gaps: Sequence[JobGap]) -> bool:
    """Return whether data is missing at this time; otherwise an empty step is only shorter than the sampling interval."""
    return any(gap.start <= moment < gap.end for gap in gaps)


def _line(
    label: str, series: JobSeries, values: Sequence[float | None], gaps: Sequence[JobGap], whole: float = 1.0
) -> ChartLine:
    """Return a line that is interrupted where data is missing."""
    points = [
        (moment, np.nan if value is None else value / whole)
        for moment, value in zip((time + series.step / 2 for time in series.times), values, strict=False)
        if value is not None or _is_missing(moment, gaps)
    ]
    times, found = np.array(points, np.float64).reshape(-1, 2).T
    return make_line(label, times, found, math.inf)


def _gaps(
    series: JobSeries, report: JobReport, metrics: Sequence[Sequence[float | None]]
) -> Iterator[ChartGap]:
    """Yield the times in which data is missing and no metric has a value."""
    middles = [time + series.step / 2 for time in series.times]
    silent = [
        all(values[place] is None for values in metrics if place < len(values))
        and _is_missing(moment, report.missing)
        for place, moment in enumerate(middles)
    ]
    for is_silent, places in groupby(range(len(middles)), key=lambda place: silent[place]):
        if is_silent:
            inside = list(places)
            yield ChartGap(series.times[inside[0]], series.times[inside[-1]] + series.step, _NO_DATA)


def _spans(report: JobReport, start: float, end: float) -> Iterator[ChartSpan]:
    """Yield a span for each kind of finding, from its first to its last occurrence."""
    of_nodes = [finding for finding in report.findings if finding.node is not None]
    for lane, group in enumerate(job_report_text.group_findings(of_nodes)[:_MAX_SPANS]):
        begin = min(one["from"] for one in group.members)
        ends = [end if one["to"] is None else one["to"] for one in group.members]
        yield ChartSpan(
            min(max(begin, start), end),
            min(max(*ends, begin), end),
            job_report_text.clean_text(group.id, 60),
            text=job_report_text.clean_text(group.worst["summary"], 300),
            color=severity_color(group.severity),
            lane=lane,
            is_shaded=False,
        )
