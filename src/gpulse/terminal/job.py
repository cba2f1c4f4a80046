"""What `gpulse job` says: how a job used its GPUs, each of them, what was wrong, what is not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpulse.export import job_words as words
from gpulse.terminal import format as f
from gpulse.terminal.table import Cell, Column, Paint, cut, render, wrapped

Document = Mapping[str, Any]

_STYLES = {"critical": "warn", "high": "warn", "medium": "notice", "low": "notice"}
_USES = {"untouched": "notice", "unattributed": "notice"}
_MOST_GPUS = 128
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


def job_lines(report: Document, width: int, paint: Paint) -> Iterator[str]:
    """The whole report, as lines no wider than `width`."""
    yield paint("title", cut(f.plain(words.headline(report)), width))
    yield from wrapped(f.plain(words.subtitle(report)), width)
    for section in (
        _facts(report, width),
        _metrics(report, width, paint),
        _gpus(report, width, paint),
        _findings(report, width, paint),
        _untold(report, width, paint),
    ):
        lines = list(section)
        if lines:
            yield ""
            yield from lines


def _facts(report: Document, width: int) -> Iterator[str]:
    told = list(words.facts(report))
    wide = max(len(name) for name, _ in told) + 2
    for name, text in told:
        yield from wrapped(f"{name:<{wide}}{f.plain(text)}", width, " " * wide)


def _metrics(report: Document, width: int, paint: Paint) -> Iterator[str]:
    rows = [[one.title, one.mean, one.peak, one.cluster] for one in words.measured(report)]
    if rows:
        yield from render(_METRIC_COLUMNS, rows, width, paint)


def _gpus(report: Document, width: int, paint: Paint) -> Iterator[str]:
    rows = report.get("gpu_rows") or []
    if rows:
        yield from render(_GPU_COLUMNS, (_gpu(row) for row in rows[:_MOST_GPUS]), width, paint)
    more = (report.get("gpus") or 0) - _MOST_GPUS
    if more > 0:
        yield paint("dim", f"and {more} more")


def _gpu(row: Document) -> list[Cell | str]:
    metrics = row.get("metrics") or {}

    def mean(name: str) -> float | None:
        return words.number((metrics.get(name) or {}).get("mean"))

    used = words.number((metrics.get("memory_used_bytes") or {}).get("max"))
    total = words.number(row.get("memory_total_bytes"))
    use = str(row.get("use") or "")
    remark = use if use in _USES else "shared" if row.get("shared") else ""
    return [
        f.plain(words.text(row.get("node"), 60)),
        f.plain(words.text(row.get("gpu") or f.UNKNOWN, 10)),
        f.plain(words.text(row.get("model") or f.UNKNOWN, 40)),
        words.span_hours(row.get("allocated_seconds")),
        words.span_hours(row.get("held_seconds")),
        words.span_hours(row.get("idle_seconds")),
        f.share(words.number(row.get("utilization_mean"))),
        f.share(mean("sm_active_ratio")),
        f.share(mean("tensor_active_ratio")),
        f.share(mean("dram_active_ratio")),
        f.size(used) if total is None else f.sizes(used, total),
        f.watts(mean("power_watts")),
        f.energy(words.number(row.get("energy_joules"))),
        Cell(remark, _USES.get(remark, "dim")),
    ]


def _findings(report: Document, width: int, paint: Paint) -> Iterator[str]:
    told = words.findings(report)
    if told:
        yield paint("title", "Findings")
    for finding in told:
        place = f"{finding.places}: " if finding.places else ""
        text = f"  {finding.severity}: {place}{finding.summary} ({finding.id}; {finding.when})"
        style = _STYLES.get(finding.severity, "dim")
        yield from (paint(style, line) for line in wrapped(f.plain(text), width, "    "))
        for advice in finding.advice[:1]:
            yield from wrapped(f.plain(f"    try: {words.text(advice.get('do'), 300)}"), width, "      ")


def _untold(report: Document, width: int, paint: Paint) -> Iterator[str]:
    gaps = words.untold(report)
    if gaps:
        yield paint("title", "What is not known")
    for gap in gaps:
        yield from wrapped(f"  {f.plain(gap)}", width, "    ")
