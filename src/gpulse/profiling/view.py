"""Blocks as people read them: text for terminals, a small table for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from gpulse.model.units import UNKNOWN, long_size, ratio, seconds, size, watts
from gpulse.profiling.meter import ACTIVITY, UTILIZATION
from gpulse.profiling.report import GpuReport, Report
from gpulse.terminal.format import plain
from gpulse.terminal.table import Column, painter, render

_WIDTH = 100
_FEW_RUNS = 1
_TITLES = dict(zip((UTILIZATION, *ACTIVITY), ("GPU", "SM", "TENSOR", "DRAM"), strict=True))
_HOUR_JOULES = 3600.0
_COMPLETE = 0.9
"""Share of a block that must have been measured for its figures to need no word about it."""
_TABLE = "border-collapse:collapse;margin:.3em 0;color:inherit;font:inherit;font-variant-numeric:tabular-nums"
_HEAD = (
    "text-align:right;padding:.15em .7em;border-bottom:1px solid currentColor;font-weight:600;background:none"
)
_CELL = "text-align:right;white-space:nowrap;padding:.15em .7em;background:none"
_FRAME = "overflow-x:auto"
_LEFT = "text-align:left;"
_DIM = "opacity:.7;margin:.2em 0"


class _Line(NamedTuple):
    """One row of a table, by the titles of its columns."""

    cells: dict[str, str]


def report_text(report: Report) -> str:
    """One block: what it took, what each GPU did, and what held it up."""
    columns, rows = _table(_of_gpu(gpu) for gpu in report.gpus)
    lines = [f"{plain(report.name)}: {_headline(report)}"]
    if rows:
        right = [Column(title, right=title != "NAME") for title in columns]
        lines += ["  " + line for line in render(right, rows, _WIDTH, painter(color=False))]
    lines += [f"  {plain(line)}" for line in _remarks(report)]
    return "\n".join(lines)


def report_html(report: Report) -> str:
    """One block for a notebook."""
    parts = [f"<div><b>{escape(report.name)}</b>: {escape(_headline(report))}</div>"]
    if report.gpus:
        parts.append(_html_table(*_table(_of_gpu(gpu) for gpu in report.gpus)))
    parts += [f'<div style="{_DIM}">{escape(line)}</div>' for line in _remarks(report)]
    return f'<div style="{_FRAME}">{"".join(parts)}</div>'


def summary_text(reports: Sequence[Report]) -> str:
    """All blocks, a line each."""
    if not reports:
        return "No block was profiled."
    titles, rows = _table(_of_block(report) for report in reports)
    columns = [Column(title, right=title != "BLOCK", least=12 if title == "BLOCK" else 0) for title in titles]
    lines = render(columns, [[plain(cell) for cell in row] for row in rows], _WIDTH, painter(color=False))
    return "\n".join([*lines, *(plain(line) for line in _common(reports))])


def summary_html(reports: Sequence[Report]) -> str:
    """All blocks for a notebook."""
    if not reports:
        return "<div>No block was profiled.</div>"
    parts = [_html_table(*_table(_of_block(report) for report in reports))]
    parts += [f'<div style="{_DIM}">{escape(line)}</div>' for line in _common(reports)]
    return f'<div style="{_FRAME}">{"".join(parts)}</div>'


def energy(joules: float | None) -> str:
    """`512 J`, `7.3 kJ`, and from a tenth of a kilowatt-hour on `0.25 kWh`."""
    if joules is None:
        return UNKNOWN
    if joules < 1000:
        return f"{joules:.0f} J" if joules >= 10 else f"{joules:.2g} J"
    if joules < 100 * _HOUR_JOULES:
        return f"{joules / 1000:.1f} kJ"
    return f"{joules / 1000 / _HOUR_JOULES:.2f} kWh"


def moment(value: float | None) -> str:
    """`18 µs`, `4.2 ms`, `3.6 s`, and from a minute on as a clock shows it."""
    if value is None:
        return UNKNOWN
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs" if value >= 1e-6 or value == 0 else "<1 µs"
    if value < 1:
        return f"{value * 1e3:.1f} ms" if value < 0.01 else f"{value * 1e3:.0f} ms"
    return seconds(value)


def _headline(report: Report) -> str:
    words = [moment(report.seconds)]
    if report.runs > _FEW_RUNS:
        each = "" if report.run_seconds is None else f", {moment(report.run_seconds)} each"
        words[0] += f" in {report.runs} runs{each}"
    if report.is_open:
        words.append("still open")
    if report.energy_joules is not None:
        words.append(f"{'about ' if report.is_estimate else ''}{energy(report.energy_joules)}")
    if report.memory_peak_bytes is not None:
        own = report.process_memory_peak_bytes
        mine = "" if own is None else f" ({long_size(own)} of this process)"
        words.append(f"peak {long_size(report.memory_peak_bytes)}{mine}")
    return ", ".join(words)


def _of_gpu(gpu: GpuReport) -> _Line:
    return _Line(
        {
            "GPU": gpu.label,
            "NAME": plain(gpu.name),
            "ENERGY": energy(gpu.energy_joules),
            "POWER": watts(gpu.power_watts),
            "PEAK MEM": size(gpu.memory_peak_bytes),
            "OF": size(gpu.memory_total_bytes),
            "PROCESS": size(gpu.process_memory_peak_bytes),
            **_activity(gpu.activity, busy="BUSY"),
            "SAMPLES": str(gpu.samples),
        }
    )


def _of_block(report: Report) -> _Line:
    return _Line(
        {
            "BLOCK": report.name,
            "RUNS": str(report.runs),
            "TIME": moment(report.seconds),
            "EACH": moment(report.run_seconds),
            "ENERGY": _about(report),
            "PEAK MEM": size(report.memory_peak_bytes),
            "PROCESS": size(report.process_memory_peak_bytes),
            **_activity(report.activity, busy="GPU"),
            "SAMPLES": str(report.samples),
        }
    )


def _about(report: Report) -> str:
    text = energy(report.energy_joules)
    return f"~{text}" if report.is_estimate and report.energy_joules is not None else text


def _activity(means: dict[str, float], *, busy: str) -> dict[str, str]:
    titles = {**_TITLES, UTILIZATION: busy}
    return {titles[name]: ratio(means.get(name)) for name in titles}


def _table(lines: Iterable[_Line]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows, without the columns in which nothing is known."""
    kept = [line.cells for line in lines]
    titles = [
        title
        for title in (kept[0] if kept else {})
        if any(cells[title] not in ("", UNKNOWN) for cells in kept)
    ]
    return titles, [[cells[title] for title in titles] for cells in kept]


def _html_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    left = ("BLOCK", "NAME")
    head = "".join(
        f'<th style="{_HEAD};{_LEFT if title in left else ""}">{escape(title)}</th>' for title in titles
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="{_CELL};{_LEFT if title in left else ""}">{escape(cell)}</td>'
            for title, cell in zip(titles, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _remarks(report: Report) -> list[str]:
    """What held it up, and what its figures are worth."""
    remarks = [f"{report.diagnosis.verdict}"]
    for finding in report.findings:
        remarks += [f"{finding.summary}: {advice.do}" for advice in finding.advice[:1]]
    if report.trouble is not None and report.trouble not in report.diagnosis.verdict:
        remarks.append(f"{report.trouble}.")
    elif report.gpus and report.is_estimate:
        runs = "" if report.run_seconds is None else f"runs of {moment(report.run_seconds)}, and "
        remarks.append(f"An estimate: {runs}GPUs were read every {moment(report.interval_seconds)}.")
    elif report.gpus and report.measured_seconds < _COMPLETE * report.seconds and not report.is_open:
        remarks.append(f"Measured for {moment(report.measured_seconds)} of {moment(report.seconds)}.")
    return remarks


def _common(reports: Sequence[Report]) -> list[str]:
    troubles = dict.fromkeys(report.trouble for report in reports if report.trouble is not None)
    words = [f"{trouble}." for trouble in troubles]
    if any(report.is_estimate and report.energy_joules is not None for report in reports):
        interval = max(report.interval_seconds for report in reports)
        words.append(f"~ estimated: runs too short to be told apart by readings every {moment(interval)}.")
    return words
