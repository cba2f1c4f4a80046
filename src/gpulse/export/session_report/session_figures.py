"""Figures of one session: downsampled series, statistics of GPUs and nodes, times without data, and the texts that all views share.

The figures by which a session file is compared with another session are computed from these.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.diagnosis.line_search import describe_first_line
from gpulse.export.session_file.file_document import statistics_by_name
from gpulse.export.session_file.frame_grid import BYTES_PER_GB, QUANTITIES, UTIL, FrameQuantity
from gpulse.export.session_file.gpu_statistics import ColumnStatistics
from gpulse.export.session_report.session_json_reader import parse_epoch
from gpulse.model.device import IDLE_RATIO
from gpulse.model.finding import (
    FindingGroup,
    finding_from_document,
    finite_number,
    group_similar_findings,
)
from gpulse.model.formatting import UNKNOWN, duration, local_time, rate, time_zone
from gpulse.model.safe_text import printable
from gpulse.model.time_text import format_iso
from gpulse.reports.run_figures import FindingShare, Measure, RunFigures, merge_findings
from gpulse.reports.session_run import find_working_part, lost_by_finding

Array = NDArray[np.float64]
FloatArray = NDArray[np.float32]

MAX_TIME_STEPS = 2048
_MANY_GPUS = 256
_MIN_STEPS = 10
_ENERGY_NOTE = "its energy is averaged over the whole session, including start-up and idle time"


class Curve(NamedTuple):
    """One quantity of one GPU; time steps without data are left out."""

    times: Array
    """Middle of each time step."""
    low: Array
    mean: Array
    high: Array


class _StepTable(NamedTuple):
    """Aggregates with a row for each time step and a column for each GPU."""

    low: FloatArray
    high: FloatArray
    sum: FloatArray
    known: NDArray[np.int32]

    @classmethod
    def empty(cls, rows: int, gpus: int) -> _StepTable:
        shape = (rows, gpus)
        return cls(
            np.full(shape, np.inf, np.float32),
            np.full(shape, -np.inf, np.float32),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.int32),
        )

    def grown(self, rows: int, gpus: int) -> _StepTable:
        """Return the table enlarged to at least this size."""
        rows, gpus = max(rows, self.low.shape[0]), max(gpus, self.low.shape[1])
        if (rows, gpus) == self.low.shape:
            return self
        larger = _StepTable.empty(rows, gpus)
        for new, old in zip(larger, self, strict=True):
            new[: old.shape[0], : old.shape[1]] = old
        return larger

    def halved(self) -> _StepTable:
        """Return the table with every two rows merged."""
        even = self.grown(self.low.shape[0] + self.low.shape[0] % 2, 0)
        return _StepTable(
            np.minimum(even.low[::2], even.low[1::2]),
            np.maximum(even.high[::2], even.high[1::2]),
            even.sum[::2] + even.sum[1::2],
            even.known[::2] + even.known[1::2],
        )


class DownsampledSeries:
    """Collects samples of many GPUs in a bounded number of time steps, which become longer with the session."""

    def __init__(self, width_seconds: float) -> None:
        self.width = width_seconds
        self._start: float | None = None
        self._cells: dict[str, _StepTable] = {}
        self._rows = 0

    def add(self, times: Array, values: dict[str, Array]) -> None:
        """Add a row for each frame, roughly in the order of time."""
        if not len(times):
            return
        if self._start is None:
            self._start = float(times[0])
        gpus = max((matrix.shape[1] for matrix in values.values()), default=0)
        max_columns = MAX_TIME_STEPS if gpus <= _MANY_GPUS else MAX_TIME_STEPS // 2
        while (float(times.max()) - self._start) / self.width >= max_columns:
            self.width *= 2
            self._rows = (self._rows + 1) // 2
            self._cells = {name: cells.halved() for name, cells in self._cells.items()}
        places = np.clip(((times - self._start) / self.width + 1e-3).astype(np.int64), 0, None)
        order = np.argsort(places, kind="stable")
        sorted_places = places[order]
        first = np.flatnonzero(np.concatenate(([True], sorted_places[1:] != sorted_places[:-1])))
        rows = sorted_places[first]
        self._rows = max(self._rows, int(rows[-1]) + 1)
        for name, matrix in values.items():
            cells = self._cells.get(name) or _StepTable.empty(0, 0)
            self._cells[name] = cells = cells.grown(self._rows, matrix.shape[1])
            _add_rows(cells, rows, first, matrix[order])

    @property
    def start(self) -> float:
        """Start of the first time step."""
        return self._start or 0.0

    @property
    def columns(self) -> int:
        """Number of time steps."""
        return self._rows

    def has(self, name: str) -> bool:
        """Return whether a quantity was measured."""
        return name in self._cells and bool(self._cells[name].known.any())

    def curve(self, name: str, gpu: int, max_points: int = MAX_TIME_STEPS) -> Curve:
        """Return a quantity of one GPU in at most this many points."""
        cells = self._cells.get(name)
        if cells is None or gpu >= cells.low.shape[1]:
            return Curve(*(np.empty(0) for _ in range(4)))
        cells = _StepTable(*(array[:, gpu : gpu + 1] for array in cells))  # type: ignore[arg-type]  # each as it was
        width, gpu = self.width, 0
        while len(cells.low) > max_points:
            cells, width = cells.halved(), 2 * width
        rows = np.flatnonzero(cells.known[:, gpu])
        return Curve(
            np.asarray(self.start + (rows + 0.5) * width, np.float64),
            cells.low[rows, gpu].astype(np.float64),
            (cells.sum[rows, gpu] / cells.known[rows, gpu]).astype(np.float64),
            cells.high[rows, gpu].astype(np.float64),
        )

    def means(self, name: str, gpus: int) -> Array:
        """Return the means, with a row for each GPU and a column for each time step; NaN is unknown."""
        cells = self._cells.get(name) or _StepTable.empty(0, 0)
        cells = cells.grown(self._rows, gpus)
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.where(cells.known > 0, cells.sum / cells.known, np.nan)
        return found.T.astype(np.float64)


def _add_rows(cells: _StepTable, rows: NDArray[np.int64], first: NDArray[np.int64], matrix: Array) -> None:
    known = ~np.isnan(matrix)
    width = matrix.shape[1]
    low = np.minimum.reduceat(np.where(known, matrix, np.inf), first, axis=0).astype(np.float32)
    high = np.maximum.reduceat(np.where(known, matrix, -np.inf), first, axis=0).astype(np.float32)
    cells.low[rows, :width] = np.minimum(cells.low[rows, :width], low)
    cells.high[rows, :width] = np.maximum(cells.high[rows, :width], high)
    cells.sum[rows, :width] += np.add.reduceat(np.where(known, matrix, 0.0), first, axis=0).astype(np.float32)
    cells.known[rows, :width] += np.add.reduceat(known, first, axis=0, dtype=np.int32)


QuantityStatistics = Mapping[str, ColumnStatistics]
"""Statistics by quantity, without those that are unknown."""


class DataGap(NamedTuple):
    """Time in which some GPUs have no data."""

    start: float
    end: float
    gpus: tuple[int, ...]
    """Their indexes in the report."""

    @property
    def seconds(self) -> float:
        """Length of the gap."""
        return self.end - self.start


class HeadOutage(NamedTuple):
    """Time in which the head was down; agents may have spooled their frames meanwhile."""

    start: float
    end: float | None
    """None when the head never resumed the session."""


class GpuFigures(NamedTuple):
    """Figures of one GPU."""

    id: str
    node: str
    label: str
    """`3`, `3:1` for a MIG instance, empty when the file does not say."""
    model: str
    availability_ratio: float
    """Fraction of the frames in which it has data."""
    energy_joules: float | None
    statistics: QuantityStatistics

    @property
    def short(self) -> str:
        """`n1 GPU 3`, or the whole ID if it has another form."""
        return f"{self.node} GPU {self.label}" if self.label else self.id

    @property
    def full_name(self) -> str:
        """`n1 GPU 3, NVIDIA H200`, or the whole ID if it has another form."""
        return f"{self.short}, {self.model}" if self.label and self.model else self.short


class NodeFigures(NamedTuple):
    """Figures of all GPUs of one node."""

    name: str
    gpus: tuple[int, ...]
    """Their indexes in the report."""
    availability_ratio: float
    energy_joules: float | None
    statistics: QuantityStatistics


class SessionReport(NamedTuple):
    """Figures of one session."""

    name: str
    start: float
    end: float
    interval_seconds: float
    frames: int
    gpus: tuple[GpuFigures, ...]
    nodes: tuple[NodeFigures, ...]
    gaps: tuple[DataGap, ...]
    quantities: tuple[FrameQuantity, ...]
    """Quantities that were measured."""
    labels: Mapping[str, str]
    findings: tuple[Mapping[str, Any], ...]
    events: tuple[Mapping[str, Any], ...]
    interruptions: tuple[Mapping[str, Any], ...]
    strange_values: int
    """Number of values that are not numbers and count as unknown."""
    series: DownsampledSeries

    @property
    def outages(self) -> tuple[HeadOutage, ...]:
        """Outages of the head, oldest first; malformed entries of the file are ignored."""
        found = []
        for entry in self.interruptions:
            start, end = parse_epoch(entry.get("start_time")), parse_epoch(entry.get("end_time"))
            if start is not None and (end is None or end >= start):
                found.append(HeadOutage(start, end))
        return tuple(sorted(found, key=lambda outage: outage.start))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return {
            "session_name": self.name,
            "start_time": format_iso(self.start),
            "end_time": format_iso(self.end),
            "interval_ms": round(self.interval_seconds * 1000, 3),
            "frames": self.frames,
            "labels": dict(self.labels),
            "gpus": [{"gpu_id": gpu.id, "node": gpu.node, **self._figures(gpu)} for gpu in self.gpus],
            "nodes": [
                {
                    "name": node.name,
                    "gpus": [self.gpus[index].id for index in node.gpus],
                    **self._figures(node),
                }
                for node in self.nodes
            ],
            "gaps": [
                {
                    "start_time": format_iso(gap.start),
                    "end_time": format_iso(gap.end),
                    "seconds": round(gap.seconds, 3),
                    "gpu_id": [self.gpus[index].id for index in gap.gpus],
                }
                for gap in self.gaps
            ],
            "findings": _without_infinities(self.findings),
            "events": _without_infinities(self.events),
            "interruptions": _without_infinities(self.interruptions),
            "strange_values": self.strange_values,
        }

    def _figures(self, subject: GpuFigures | NodeFigures) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "availability_ratio": round(subject.availability_ratio, 6),
            "energy_joules": subject.energy_joules,
        }
        for quantity in QUANTITIES:
            if quantity in self.quantities:
                figures |= statistics_by_name(quantity, subject.statistics.get(quantity.name))
        return figures


def _without_infinities(raw: Any) -> Any:
    """Return a copy with null in place of numbers that JSON does not allow."""
    if isinstance(raw, Mapping):
        return {str(key): _without_infinities(value) for key, value in raw.items()}
    if isinstance(raw, list | tuple):
        return [_without_infinities(value) for value in raw]
    return None if isinstance(raw, float) and not math.isfinite(raw) else raw


_MAX_NAMED_GPUS = 6
_MAX_NAMED_PLACES = 4
_MAX_CODE_CHARS = 400


def shown_quantities(report: SessionReport) -> tuple[FrameQuantity, ...]:
    """Return the quantities to show; a link's two directions are shown as one sum."""
    return tuple(quantity for quantity in report.quantities if not quantity.name.endswith(("_rx", "_tx")))


def headline(report: SessionReport) -> str:
    """Return the name of the session."""
    return printable(report.name, 100)


def subtitle(report: SessionReport) -> str:
    """Return when the session was, how long it took, and how many frames, GPUs and nodes it has."""
    gpus, nodes = len(report.gpus), len(report.nodes)
    zones = time_zone(report.start), time_zone(report.end)
    first = (
        f" {zones[0]}" if zones[0] != zones[1] else ""
    )  # for example when daylight saving time began in between
    return (
        f"{local_time(report.start)}{first} to {local_time(report.end, report.start)} {zones[1]} "
        f"({format_length(report.end - report.start)}), "
        f"{_count_noun(report.frames, 'frame')}, one every {report.interval_seconds:g} s, "
        f"{_count_noun(gpus, 'GPU')} on {_count_noun(nodes, 'node')}"
    )


def format_value(quantity: FrameQuantity, number: float | None) -> str:
    """Format a value with its unit."""
    if number is None:
        return UNKNOWN
    return f"{number:.0f}%" if quantity.is_percent else rate(number * BYTES_PER_GB)


def format_availability(ratio: float) -> str:
    """Format an availability in percent; it is 100% only when nothing is missing."""
    if ratio >= 1:
        return "100%"
    return f"{min(99.9, ratio * 100):.1f}%" if ratio >= 0.9 else f"{ratio * 100:.0f}%"


def format_length(seconds: float) -> str:
    """Format a length of time: `0.5s`, `45s`, `1:00:00`."""
    return f"{seconds:.3g}s" if seconds < 10 else duration(seconds)


def describe_outage(report: SessionReport, found: HeadOutage) -> str:
    """Describe an outage: `the head was down from 14:03:10 to 14:03:17 (7s)`."""
    start = local_time(found.start, report.start)
    if found.end is None:
        return f"the head was down from {start} on"
    end = local_time(found.end, found.start)
    return f"the head was down from {start} to {end} ({format_length(found.end - found.start)})"


def describe_gap(report: SessionReport, found: DataGap) -> str:
    """Describe a gap: `14:00:05 to 14:00:35 (30s): n1 (8 GPUs)`."""
    start = local_time(found.start, report.start)
    end = local_time(found.end, found.start)
    return f"{start} to {end} ({format_length(found.seconds)}): {name_gpus(report, found.gpus)}"


def name_gpus(report: SessionReport, gpus: Iterable[int]) -> str:
    """Return the names of GPUs; if all GPUs of a node are included, only the node is named."""
    missing = set(gpus)
    if len(missing) == len(report.gpus):
        return "all GPUs"
    names = []
    for node in report.nodes:
        indexes = [index for index in node.gpus if index in missing]
        if len(indexes) == len(node.gpus):
            names.append(f"{printable(node.name)} ({_count_noun(len(indexes), 'GPU')})")
        else:
            names += [printable(report.gpus[index].short) for index in indexes]
    more = len(names) - _MAX_NAMED_GPUS
    return ", ".join(names[:_MAX_NAMED_GPUS]) + (f" and {more} more" if more > 0 else "")


class SessionFindingText(NamedTuple):
    """Findings of one kind as text."""

    id: str
    severity: str
    place: str
    text: str
    """The place, and the summary of the worst finding."""
    when: str
    start: float | None
    end: float | None
    code: str | None
    """The line of code behind it, or why there is none."""


def describe_findings(report: SessionReport) -> list[SessionFindingText]:
    """Describe the findings, worst first; those of one kind are merged."""
    return [_finding(report, group) for group in group_similar_findings(report.findings)]


def findings_title(report: SessionReport) -> str:
    """Return `Findings`, with their number where it differs from the number of kinds."""
    kinds = len(group_similar_findings(report.findings))
    if kinds == len(report.findings):
        return "Findings"
    return f"Findings ({len(report.findings)}, of {_count_noun(kinds, 'kind')})"


def _finding(report: SessionReport, group: FindingGroup) -> SessionFindingText:
    starts = [start for one in group.members if (start := parse_epoch(one.get("first_time"))) is not None]
    ends = [end for one in group.members if (end := parse_epoch(one.get("last_time"))) is not None]
    start, end, when = min(starts, default=None), max(ends, default=None), ""
    if start is not None and end is not None:
        before = " (before the session)" if start < report.start else ""
        ongoing = any(one.get("is_ongoing") is True for one in group.members)
        until = f"{local_time(end, start)}{' or later' if ongoing else ''}"
        when = f"{local_time(start, report.start)}{before} to {until} ({_describe_times(group, end - start)})"
    places = list(group.places)
    more = len(places) - _MAX_NAMED_PLACES
    return SessionFindingText(
        group.id,
        group.severity,
        (", ".join(places[:_MAX_NAMED_PLACES]) or "?")
        + (f" and {_count_noun(more, 'more node')}" if more > 0 else ""),
        group.text,
        when,
        start,
        end,
        None if (code := describe_first_line(group.members)) is None else printable(code, _MAX_CODE_CHARS),
    )


def _describe_times(group: FindingGroup, seconds: float) -> str:
    """Return for how long findings held; for one that came and went, this is less than from its first to its last time."""
    held = max(0.0, seconds)
    if group.seconds is not None and 0 <= group.seconds <= seconds:
        held = group.seconds
    often = f"{group.times} times, " if group.times > len(group.members) else ""
    most = "up to " if len(group.members) > 1 else ""
    return f"{often}{most}{format_length(held)}{' in total' if often else ''}"


def _count_noun(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def session_file_figures(report: SessionReport) -> RunFigures:
    """Return the figures of a session file.

    A file has neither the activity of SMs nor programs, so these are unknown. Without findings, nothing tells whether
    its GPUs were diagnosed.
    """
    empty = RunFigures(
        name=report.name,
        start=report.start,
        recorded_seconds=report.end - report.start,
        seconds=0.0,
        labels=dict(report.labels),
    )
    busy = report.series.means(UTIL.name, len(report.gpus)) / 100
    used = [place for place, row in enumerate(busy) if _highest(row) > IDLE_RATIO]
    if not used:
        is_known = report.series.has(UTIL.name)
        return empty._replace(missing="its GPUs were idle" if is_known else "its utilization is unknown")
    utilization = _mean_of_gpus(busy[used])
    part, step = find_working_part(utilization), report.series.width
    if part is None or part.last - part.first + 1 < _MIN_STEPS:
        return empty._replace(
            missing=f"its GPUs worked for only {0 if part is None else part.seconds(step):.0f} s"
        )
    gpus = [report.gpus[place] for place in used]
    energies = [gpu.energy_joules for gpu in gpus]
    known = [energy for energy in energies if energy is not None]
    is_energy_known = len(known) == len(energies) and empty.recorded_seconds > 0
    findings = merge_findings(
        (_share(document, empty.recorded_seconds) for document in report.findings), len(gpus)
    )
    return empty._replace(
        seconds=min(part.seconds(step), empty.recorded_seconds),
        models=tuple(gpu.model for gpu in gpus),
        utilization=part.measure(utilization, step),
        power_watts=Measure(sum(known) / len(known) / empty.recorded_seconds) if is_energy_known else None,
        lost_time=lost_by_finding(findings, is_diagnosed=bool(report.findings)),
        findings=findings,
        notes=(_ENERGY_NOTE,) if is_energy_known else (),
    )


def _highest(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else 0.0


def _mean_of_gpus(rows: NDArray[np.float64]) -> list[float | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step without known values stays NaN
        found = np.nanmean(rows, axis=0)
    return [None if math.isnan(value) else value for value in found.tolist()]


def _share(document: Mapping[str, Any], seconds: float) -> FindingShare:
    finding = finding_from_document(document)
    active, lost = finite_number(document.get("active_seconds")), finding.lost_ratio
    return FindingShare(
        finding.id,
        finding.severity,
        finding.summary,
        None if lost is None else min(1.0, max(0.0, lost)),
        finding.cause,
        active / seconds if active is not None and seconds > 0 else 1.0,
    )
