"""What `gpulse job` says: how a job used its GPUs, each of them, what was wrong, what is not known."""

from __future__ import annotations

from collections.abc import Iterator

from gpulse.export import job_words as words
from gpulse.reports.job_report import JobGpu, JobReport
from gpulse.terminal import format as f
from gpulse.terminal.table import Cell, Column, Paint, cut, render, wrapped

_STYLES = {"critical": "warn", "high": "warn", "medium": "notice", "low": "notice"}
_USES = {"untouched": "notice", "unattributed": "notice"}
_MAX_GPUS = 128
_GPU_COLUMNS = (
    Column("Node", right=False, least=8),
    Column("GPU", right=False),
    Column("Model", right=False, drop=11, least=8, optional=True),
    Column("Allocated", drop=10, optional=True),
    Column("Held"),
    Column("Idle", drop=2),
    Column("Busy", drop=1),
    Column("SM", drop=4, optional=True),
    Column("Tensor", drop=5, optional=True),
    Column("DRAM", drop=6, optional=True),
    Column("Memory", drop=3, optional=True),
    Column("Power", drop=7, optional=True),
    Column("Energy", drop=8, optional=True),
    Column("", right=False, drop=9, optional=True),
)
_METRIC_COLUMNS = (
    Column("", right=False),
    Column("mean"),
    Column("peak"),
    Column("cluster", optional=True),
)


def job_lines(report: JobReport, width: int, paint: Paint) -> Iterator[str]:
    """The whole report, as lines no wider than `width`."""
    yield paint("title", cut(f.plain(words.headline(report)), width))
    yield from wrapped(f.plain(words.subtitle(report)), width)
    for section in (
        _facts(report, width),
        _metrics(report, width, paint),
        _gpus(report, width, paint),
        _findings(report, width, paint),
        _data_gaps(report, width, paint),
    ):
        lines = list(section)
        if lines:
            yield ""
            yield from lines


def _facts(report: JobReport, width: int) -> Iterator[str]:
    facts = list(words.facts(report))
    wide = max(len(name) for name, _ in facts) + 2
    for name, text in facts:
        yield from wrapped(f"{name:<{wide}}{f.plain(text)}", width, " " * wide)


def _metrics(report: JobReport, width: int, paint: Paint) -> Iterator[str]:
    rows = [[one.title, one.mean, one.peak, one.cluster] for one in words.measured(report)]
    if rows:
        yield from render(_METRIC_COLUMNS, rows, width, paint)


def _gpus(report: JobReport, width: int, paint: Paint) -> Iterator[str]:
    rows = report.gpu_rows
    if rows:
        yield from render(_GPU_COLUMNS, (_gpu(row) for row in rows[:_MAX_GPUS]), width, paint)
    more = report.gpus - _MAX_GPUS
    if more > 0:
        yield paint("dim", f"and {more} more")


def _gpu(row: JobGpu) -> list[Cell | str]:
    used, total = row.peak("memory_used_bytes"), row.memory_total_bytes
    use = row.use or ""
    remark = use if use in _USES else "shared" if row.shared else ""
    return [
        f.plain(words.text(row.node, 60)),
        f.plain(words.text(row.gpu or f.UNKNOWN, 10)),
        f.plain(words.text(row.model or f.UNKNOWN, 40)),
        words.span_hours(row.allocated_seconds),
        words.span_hours(row.held_seconds),
        words.span_hours(row.idle_seconds),
        f.share(row.utilization_mean),
        f.share(row.mean("sm_active_ratio")),
        f.share(row.mean("tensor_active_ratio")),
        f.share(row.mean("dram_active_ratio")),
        f.size(used) if total is None else f.sizes(used, total),
        f.watts(row.mean("power_watts")),
        f.energy(row.energy_joules),
        Cell(remark, _USES.get(remark, "dim")),
    ]


def _findings(report: JobReport, width: int, paint: Paint) -> Iterator[str]:
    found = words.findings(report)
    if found:
        yield paint("title", "Findings")
    for finding in found:
        place = f"{finding.places}: " if finding.places else ""
        text = f"  {finding.severity}: {place}{finding.summary} ({finding.id}; {finding.when})"
        style = _STYLES.get(finding.severity, "dim")
        yield from (paint(style, line) for line in wrapped(f.plain(text), width, "    "))
        for do, _ in finding.advice[:1]:
            yield from wrapped(f.plain(f"    try: {words.text(do, 300)}"), width, "      ")


def _data_gaps(report: JobReport, width: int, paint: Paint) -> Iterator[str]:
    gaps = words.data_gaps(report)
    if gaps:
        yield paint("title", "What is not known")
    for gap in gaps:
        yield from wrapped(f"  {f.plain(gap)}", width, "    ")
