"""What a report knows about a session."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpulse.export.report.gaps import Absence, Gap
from gpulse.export.report.moments import epoch
from gpulse.export.report.series import Thinned
from gpulse.export.session.outline import statistics_by_name
from gpulse.export.session.quantities import QUANTITIES, Quantity
from gpulse.export.session.statistics import Statistics
from gpulse.model.iso_time import iso

Figures = Mapping[str, Statistics]
"""By quantity; what is not known is not in it."""


class GpuReport(NamedTuple):
    """One GPU."""

    id: str
    node: str
    label: str
    """`3`, `3:1` for a MIG instance, empty when the file does not say."""
    model: str
    availability_ratio: float
    """In what share of the frames something is known of it."""
    energy_joules: float | None
    statistics: Figures

    @property
    def short(self) -> str:
        """`node:3`, or all of the name when it is of another form."""
        return f"{self.node}:{self.label}" if self.label else self.id


class NodeReport(NamedTuple):
    """The GPUs of one node together."""

    name: str
    gpus: tuple[int, ...]
    """Their places in the report."""
    availability_ratio: float
    energy_joules: float | None
    statistics: Figures


class Report(NamedTuple):
    """One session."""

    name: str
    start: float
    end: float
    interval_seconds: float
    frames: int
    gpus: tuple[GpuReport, ...]
    nodes: tuple[NodeReport, ...]
    gaps: tuple[Gap, ...]
    quantities: tuple[Quantity, ...]
    """Those of which something is known."""
    labels: Mapping[str, str]
    findings: tuple[Mapping[str, Any], ...]
    events: tuple[Mapping[str, Any], ...]
    interruptions: tuple[Mapping[str, Any], ...]
    strange_values: int
    """How many values are no numbers, and so count as unknown."""
    series: Thinned

    @property
    def absences(self) -> tuple[Absence, ...]:
        """When the head was away, oldest first; what the file says about it may be anything."""
        found = []
        for told in self.interruptions:
            start, end = epoch(told.get("start_time")), epoch(told.get("end_time"))
            if start is not None and (end is None or end >= start):
                found.append(Absence(start, end))
        return tuple(sorted(found, key=lambda absence: absence.start))

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {
            "session_name": self.name,
            "start_time": iso(self.start),
            "end_time": iso(self.end),
            "interval_ms": round(self.interval_seconds * 1000, 3),
            "frames": self.frames,
            "labels": dict(self.labels),
            "gpus": [{"gpu_id": gpu.id, "node": gpu.node, **self._figures(gpu)} for gpu in self.gpus],
            "nodes": [
                {
                    "name": node.name,
                    "gpus": [self.gpus[place].id for place in node.gpus],
                    **self._figures(node),
                }
                for node in self.nodes
            ],
            "gaps": [
                {
                    "start_time": iso(gap.start),
                    "end_time": iso(gap.end),
                    "seconds": round(gap.seconds, 3),
                    "gpu_id": [self.gpus[place].id for place in gap.gpus],
                }
                for gap in self.gaps
            ],
            "findings": _finite(self.findings),
            "events": _finite(self.events),
            "interruptions": _finite(self.interruptions),
            "strange_values": self.strange_values,
        }

    def _figures(self, of: GpuReport | NodeReport) -> dict[str, Any]:
        told: dict[str, Any] = {
            "availability_ratio": round(of.availability_ratio, 6),
            "energy_joules": of.energy_joules,
        }
        for quantity in QUANTITIES:
            if quantity in self.quantities:
                told |= statistics_by_name(quantity, of.statistics.get(quantity.name))
        return told


def _finite(raw: Any) -> Any:
    """What a file says, without numbers that JSON cannot write."""
    if isinstance(raw, Mapping):
        return {str(key): _finite(value) for key, value in raw.items()}
    if isinstance(raw, list | tuple):
        return [_finite(value) for value in raw]
    return None if isinstance(raw, float) and not math.isfinite(raw) else raw
