"""What `gpulse report` says: a session's GPUs and nodes in figures, its gaps, what was found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpulse.export.report import words
from gpulse.export.report.model import GpuReport, NodeReport, Report
from gpulse.terminal import format as f
from gpulse.terminal.table import Cell, Column, Paint, cut, render, wrapped

_MOST_GAPS = 20
_PARTS = (("mean", 0), ("p50", 3), ("p95", 1), ("max", 2))
"""What is told of every quantity, and in which order it gives way to a narrow window."""
_STYLES = {"critical": "warn", "high": "warn", "medium": "notice", "low": "notice"}
_LOW_AVAILABILITY = 0.99


def report_lines(report: Report, width: int, paint: Paint) -> Iterator[str]:
    """The whole report, as lines no wider than `width`."""
    yield paint("title", cut(f.plain(words.headline(report)), width))
    yield from wrapped(f.plain(words.subtitle(report)), width)
    if report.labels:
        told = ", ".join(f"{name}: {value}" for name, value in report.labels.items())
        yield from (paint("dim", line) for line in wrapped(f.plain(told), width))
    for section in (
        _gpus(report, width, paint),
        _nodes(report, width, paint) if len(report.nodes) > 1 else iter(()),
        _absences(report, width, paint),
        _gaps(report, width, paint),
        _findings(report, width, paint),
        _notes(report, width, paint),
    ):
        lines = list(section)
        if lines:
            yield ""
            yield from lines


def _gpus(report: Report, width: int, paint: Paint) -> Iterator[str]:
    columns = [
        Column("Node", right=False, least=8),
        Column("GPU", right=False, optional=True),
        Column("Model", right=False, drop=30, least=8, optional=True),
    ]
    rows: list[list[Cell | str]] = [
        [f.plain(gpu.node if gpu.label else gpu.id), gpu.label, f.plain(gpu.model), *_cells(report, gpu)]
        for gpu in report.gpus
    ]
    yield from render([*columns, *_columns(report)], rows, width, paint)


def _nodes(report: Report, width: int, paint: Paint) -> Iterator[str]:
    columns = [Column("Node", right=False, least=8), Column("GPUs")]
    rows: list[list[Cell | str]] = [
        [f.plain(node.name), str(len(node.gpus)), *_cells(report, node)] for node in report.nodes
    ]
    yield from render([*columns, *_columns(report)], rows, width, paint)


def _columns(report: Report) -> list[Column]:
    columns = []
    for place, quantity in enumerate(words.shown(report)):
        short = {"Utilization": "Util", "Memory": "Mem"}.get(quantity.title, quantity.title)
        columns += [
            Column(f"{short} {part}" if part == "mean" else part, drop=10 + 4 * place + drop if drop else 0)
            for part, drop in _PARTS
        ]
    return [*columns, Column("Energy", drop=8, optional=True), Column("Seen", drop=5)]


def _cells(report: Report, row: GpuReport | NodeReport) -> Iterator[Cell]:
    for quantity in words.shown(report):
        found = row.statistics.get(quantity.name)
        for part, _ in _PARTS:
            yield Cell(words.value(quantity, None if found is None else getattr(found, part)))
    yield Cell(words.energy(row.energy_joules))
    ratio = row.availability_ratio
    yield Cell(words.availability(ratio), "notice" if ratio < _LOW_AVAILABILITY else "")


def _absences(report: Report, width: int, paint: Paint) -> Iterator[str]:
    if not report.absences:
        return
    yield paint("title", "Interruptions")
    for absence in report.absences[:_MOST_GAPS]:
        yield from wrapped(f"  {words.absence(report, absence)}", width, "    ")
    if len(report.absences) > _MOST_GAPS:
        yield paint("dim", f"  and {len(report.absences) - _MOST_GAPS} more")


def _gaps(report: Report, width: int, paint: Paint) -> Iterator[str]:
    if not report.gaps:
        return
    longest = sorted(report.gaps, key=lambda gap: -gap.seconds)[:_MOST_GAPS]
    yield paint("title", "Gaps")
    for gap in sorted(longest):
        yield from wrapped(f"  {f.plain(words.gap(report, gap))}", width, "    ")
    if len(report.gaps) > _MOST_GAPS:
        yield paint("dim", f"  and {len(report.gaps) - _MOST_GAPS} shorter ones")


def _findings(report: Report, width: int, paint: Paint) -> Iterator[str]:
    if not report.findings:
        return
    yield paint("title", words.findings_title(report))
    for told in words.findings(report):
        text = f"  {told.severity}: {told.place}: {told.summary}  {told.when}"
        lines: Sequence[str] = list(wrapped(f.plain(text), width, "    "))
        style = _STYLES.get(told.severity, "dim")
        yield from (paint(style, line) for line in lines)


def _notes(report: Report, width: int, paint: Paint) -> Iterator[str]:
    if report.strange_values:
        count = f"{report.strange_values} values are not numbers and count as unknown"
        yield from (paint("dim", line) for line in wrapped(count, width))
