"""Reports of code blocks: as data, as text for terminals, and as tables for notebooks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from gpulse.model.formatting import UNKNOWN, long_size, ratio, short_duration, size, watts
from gpulse.model.safe_text import plain
from gpulse.profiling.block_usage import ACTIVITY, MEMORY, OWN_MEMORY, UTILIZATION, BlockUsage, GpuUsage
from gpulse.profiling.import_lock import import_lock

if TYPE_CHECKING:
    from gpulse.model.finding import Diagnosis, Finding

_NAMES = (UTILIZATION, *ACTIVITY)
_MIN_INTERVALS = 10
"""Minimum length of a run in readings; shorter runs give only an estimate."""


class BlockGpuReport(NamedTuple):
    """Usage of one GPU by a block; unknown values are None."""

    label: str
    """Name of the GPU for people: `3`, or `3:1` for a MIG instance."""
    uuid: str
    name: str
    samples: int
    """Number of readings while the block was open; without any, energy is an estimate from neighboring readings."""
    measured_seconds: float
    """Time of the block with measured energy."""
    energy_joules: float | None
    power_watts: float | None
    """Mean power."""
    memory_peak_bytes: int | None
    """Peak memory use on the GPU by all processes."""
    memory_total_bytes: int | None
    process_memory_peak_bytes: int | None
    """Peak memory use of this process alone."""
    activity: dict[str, float]
    """Means by metric name."""

    @classmethod
    def of(cls, gpu_usage: GpuUsage) -> BlockGpuReport:
        """Build the report from the usage."""
        known = gpu_usage.seconds > 0
        joules = gpu_usage.joules + gpu_usage.rough_joules
        total = gpu_usage.device.facts.get("memory_total_bytes")
        return cls(
            label=gpu_usage.device.label,
            uuid=gpu_usage.device.uuid,
            name=gpu_usage.device.name,
            samples=gpu_usage.samples,
            measured_seconds=gpu_usage.seconds,
            energy_joules=joules if known else None,
            power_watts=joules / gpu_usage.seconds if known else None,
            memory_peak_bytes=_whole(gpu_usage.peaks.get(MEMORY)),
            memory_total_bytes=_whole(total),
            process_memory_peak_bytes=_whole(gpu_usage.peaks.get(OWN_MEMORY)),
            activity={
                name: gpu_usage.sums[name][0] / gpu_usage.sums[name][1]
                for name in _NAMES
                if name in gpu_usage.sums
            },
        )


class BlockReport(NamedTuple):
    """Usage of a block over all its runs; unknown values are None."""

    name: str
    runs: int
    is_open: bool
    """Whether a run is active, so that the figures are not final."""
    seconds: float
    """Time with at least one active run."""
    run_seconds: float | None
    """Mean length of a run; None while a run is active or before the first one."""
    measured_seconds: float
    """The part of `seconds` between two readings of the GPUs."""
    interval_seconds: float
    """Time between two readings."""
    samples: int
    """Number of readings while it was open."""
    energy_joules: float | None
    """Energy of all its GPUs."""
    memory_peak_bytes: int | None
    """Peak memory of the GPU with the largest peak."""
    process_memory_peak_bytes: int | None
    activity: dict[str, float]
    """Means over its GPUs, by metric name."""
    gpus: tuple[BlockGpuReport, ...]
    diagnosis: Diagnosis
    trouble: str | None
    """Why GPU readings are missing."""

    @classmethod
    def of(
        cls,
        usage: BlockUsage,
        now: float,
        diagnosis: Diagnosis,
        *,
        interval_seconds: float,
        used_uuids: Collection[str] = (),
        trouble: str | None = None,
    ) -> BlockReport:
        """Build the report.

        Args:
            usage: Usage of the block.
            now: Current time on the monotonic clock.
            diagnosis: Diagnosis of the block.
            interval_seconds: Time between two readings.
            used_uuids: UUIDs of the GPUs that this process uses; others are ignored, unless it is empty.
            trouble: Why GPU readings are missing.
        """
        run_times = usage.run_times
        gpu_usages = sorted(usage.gpu_usages.values(), key=lambda gpu_usage: _order(gpu_usage.device.label))
        mine = [gpu_usage for gpu_usage in gpu_usages if gpu_usage.device.uuid in used_uuids] or gpu_usages
        gpus = tuple(BlockGpuReport.of(gpu_usage) for gpu_usage in mine)
        energies = [gpu.energy_joules for gpu in gpus if gpu.energy_joules is not None]
        return cls(
            name=usage.name,
            runs=run_times.count,
            is_open=run_times.depth > 0,
            seconds=run_times.seconds(now),
            run_seconds=run_times.runs_seconds(now) / run_times.count
            if run_times.count and not run_times.depth
            else None,
            measured_seconds=usage.measured_seconds,
            interval_seconds=interval_seconds,
            samples=max((gpu.samples for gpu in gpus), default=0),
            energy_joules=sum(energies) if energies else None,
            memory_peak_bytes=_largest(gpu.memory_peak_bytes for gpu in gpus),
            process_memory_peak_bytes=_largest(gpu.process_memory_peak_bytes for gpu in gpus),
            activity=_mean(gpus),
            gpus=gpus,
            diagnosis=diagnosis,
            trouble=trouble,
        )

    @property
    def is_estimate(self) -> bool:
        """Whether its runs are too short to separate their usage from what ran right before and after."""
        if not self.runs:
            return False
        length = self.seconds / self.runs if self.run_seconds is None else self.run_seconds
        return length < _MIN_INTERVALS * self.interval_seconds

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings, worst first; there are none for less than ten seconds."""
        return self.diagnosis.findings

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return {
            **self._asdict(),
            "is_estimate": self.is_estimate,
            "gpus": [gpu._asdict() for gpu in self.gpus],
            "diagnosis": self.diagnosis.to_dict(),
        }

    def __str__(self) -> str:
        return report_text(self)

    def _repr_html_(self) -> str:
        return report_html(self)


def _mean(gpus: tuple[BlockGpuReport, ...]) -> dict[str, float]:
    means: dict[str, float] = {}
    for name in _NAMES:
        known = [gpu.activity[name] for gpu in gpus if name in gpu.activity]
        if known:
            means[name] = sum(known) / len(known)
    return means


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _largest(values: Any) -> int | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)


def _order(label: str) -> tuple[int, ...]:
    return tuple(int(part) for part in label.split(":"))


_WIDTH = 100
_FEW_RUNS = 1
_TITLES = dict(zip((UTILIZATION, *ACTIVITY), ("GPU", "SM", "TENSOR", "DRAM"), strict=True))
_HOUR_JOULES = 3600.0
_COMPLETE = 0.9
"""A block with a smaller measured fraction gets a note."""
_TABLE = "border-collapse:collapse;margin:.3em 0;color:inherit;font:inherit;font-variant-numeric:tabular-nums"
_HEAD = (
    "text-align:right;padding:.15em .7em;border-bottom:1px solid currentColor;font-weight:600;background:none"
)
_CELL = "text-align:right;white-space:nowrap;padding:.15em .7em;background:none"
_FRAME = "overflow-x:auto"
_LEFT = "text-align:left;"
_DIM = "opacity:.7;margin:.2em 0"


class _TableRow(NamedTuple):
    """One table row: cells by column title."""

    cells: dict[str, str]


def report_text(report: BlockReport) -> str:
    """Format the report of one block as text."""
    columns, rows = _table(_of_gpu(gpu) for gpu in report.gpus)
    lines = [f"{plain(report.name)}: {_headline(report)}"]
    if rows:
        lines += ["  " + line for line in _text_table(columns, rows, left="NAME")]
    lines += [f"  {plain(line)}" for line in _remarks(report)]
    return "\n".join(lines)


def report_html(report: BlockReport) -> str:
    """Format the report of one block for a notebook."""
    parts = [f"<div><b>{escape(report.name)}</b>: {escape(_headline(report))}</div>"]
    if report.gpus:
        parts.append(_html_table(*_table(_of_gpu(gpu) for gpu in report.gpus)))
    parts += [f'<div style="{_DIM}">{escape(line)}</div>' for line in _remarks(report)]
    return f'<div style="{_FRAME}">{"".join(parts)}</div>'


def summary_text(reports: Sequence[BlockReport]) -> str:
    """Format all blocks as a table, one line each."""
    if not reports:
        return "No blocks were profiled."
    titles, rows = _table(_of_block(report) for report in reports)
    lines = _text_table(titles, [[plain(cell) for cell in row] for row in rows], left="BLOCK", least=12)
    return "\n".join([*lines, *(plain(line) for line in _common(reports))])


def summary_html(reports: Sequence[BlockReport]) -> str:
    """Format all blocks for a notebook."""
    if not reports:
        return "<div>No blocks were profiled.</div>"
    parts = [_html_table(*_table(_of_block(report) for report in reports))]
    parts += [f'<div style="{_DIM}">{escape(line)}</div>' for line in _common(reports)]
    return f'<div style="{_FRAME}">{"".join(parts)}</div>'


def energy(joules: float | None) -> str:
    """Format joules: `512 J`, `7.3 kJ`, from a tenth of a kilowatt-hour `0.25 kWh`."""
    if joules is None:
        return UNKNOWN
    if joules < 1000:
        return f"{joules:.0f} J" if joules >= 10 else f"{joules:.2g} J"
    if joules < 100 * _HOUR_JOULES:
        return f"{joules / 1000:.1f} kJ"
    return f"{joules / 1000 / _HOUR_JOULES:.2f} kWh"


def _headline(report: BlockReport) -> str:
    words = [short_duration(report.seconds)]
    if report.runs > _FEW_RUNS:
        each = "" if report.run_seconds is None else f", {short_duration(report.run_seconds)} each"
        words[0] += f" in {report.runs} runs{each}"
    if report.is_open:
        words.append("still open")
    if report.energy_joules is not None:
        words.append(f"{'about ' if report.is_estimate else ''}{energy(report.energy_joules)}")
    if report.memory_peak_bytes is not None:
        own = report.process_memory_peak_bytes
        mine = "" if own is None else f" ({long_size(own)} by this process)"
        words.append(f"peak memory {long_size(report.memory_peak_bytes)}{mine}")
    return ", ".join(words)


def _of_gpu(gpu: BlockGpuReport) -> _TableRow:
    return _TableRow(
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


def _of_block(report: BlockReport) -> _TableRow:
    return _TableRow(
        {
            "BLOCK": report.name,
            "RUNS": str(report.runs),
            "TIME": short_duration(report.seconds),
            "EACH": short_duration(report.run_seconds),
            "ENERGY": _about(report),
            "PEAK MEM": size(report.memory_peak_bytes),
            "PROCESS": size(report.process_memory_peak_bytes),
            **_activity(report.activity, busy="GPU"),
            "SAMPLES": str(report.samples),
        }
    )


def _about(report: BlockReport) -> str:
    text = energy(report.energy_joules)
    return f"~{text}" if report.is_estimate and report.energy_joules is not None else text


def _activity(means: dict[str, float], *, busy: str) -> dict[str, str]:
    titles = {**_TITLES, UTILIZATION: busy}
    return {titles[name]: ratio(means.get(name)) for name in titles}


def _table(lines: Iterable[_TableRow]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows without empty columns."""
    kept = [line.cells for line in lines]
    titles = [
        title
        for title in (kept[0] if kept else {})
        if any(cells[title] not in ("", UNKNOWN) for cells in kept)
    ]
    return titles, [[cells[title] for title in titles] for cells in kept]


def _text_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: str, least: int = 0
) -> list[str]:
    """Format the rows for a terminal; the column `left` is left-aligned and at least `least` wide."""
    with import_lock:
        from gpulse.terminal.table import TableColumn, make_painter, render_table  # noqa: PLC0415  needed only for printing

    columns = [
        TableColumn(title, right=title != left, least=least if title == left else 0) for title in titles
    ]
    return render_table(columns, rows, _WIDTH, make_painter(color=False))


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


def _remarks(report: BlockReport) -> list[str]:
    """Return the verdict, advice, and notes on the accuracy of the figures."""
    remarks = [f"{report.diagnosis.verdict}"]
    for finding in report.findings:
        remarks += [f"{finding.summary}: {advice.do}" for advice in finding.advice[:1]]
    if report.trouble is not None and report.trouble not in report.diagnosis.verdict:
        remarks.append(f"{report.trouble}.")
    elif report.gpus and report.is_estimate:
        runs = "" if report.run_seconds is None else f"runs last {short_duration(report.run_seconds)}, and "
        remarks.append(f"Estimate: {runs}GPUs are sampled every {short_duration(report.interval_seconds)}.")
    elif report.gpus and report.measured_seconds < _COMPLETE * report.seconds and not report.is_open:
        remarks.append(
            f"GPU data covers {short_duration(report.measured_seconds)} of {short_duration(report.seconds)}."
        )
    return remarks


def _common(reports: Sequence[BlockReport]) -> list[str]:
    troubles = dict.fromkeys(report.trouble for report in reports if report.trouble is not None)
    words = [f"{trouble}." for trouble in troubles]
    if any(report.is_estimate and report.energy_joules is not None for report in reports):
        interval = max(report.interval_seconds for report in reports)
        words.append(f"~ estimated: the runs are too short for samples every {short_duration(interval)}.")
    return words


class ProfileSummary(NamedTuple):
    """All blocks of this process, in the order of their first use."""

    blocks: tuple[BlockReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the blocks as JSON types."""
        return {"blocks": [report.to_dict() for report in self.blocks]}

    def __str__(self) -> str:
        return summary_text(self.blocks)

    def _repr_html_(self) -> str:
        return summary_html(self.blocks)
