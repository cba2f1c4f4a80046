"""Figures of a session of a head, to compare it with another session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.model.device import IDLE_RATIO
from gpulse.model.frame_packing import SLOW_SECONDS
from gpulse.model.session import Session, find_session
from gpulse.reports.job_lookup import JobRequest
from gpulse.reports.job_report import JobGpu, JobReport, JobSeries
from gpulse.reports.job_report_builder import build_job_report
from gpulse.reports.process_report import ProcessRow, build_process_report
from gpulse.reports.run_comparison import RunComparison, compare_runs
from gpulse.reports.run_figures import (
    MAX_SAMPLES,
    FindingShare,
    Measure,
    RunFigures,
    RunFinding,
    StepRhythm,
    find_rhythm,
    measure,
    merge_findings,
    name_program,
)
from gpulse.reports.time_grid import ReportContext
from gpulse.store.incomplete_answers import collect_missing
from gpulse.store.store import Query

Array = NDArray[np.float64]

_SETTLED = 0.25
"""Start-up is below this fraction of the usual utilization."""
_YOUNG_SECONDS = 60.0
"""A program that is older than this at the start of a session has finished its start-up."""
_MAX_STEPS = 1500
_MIN_STEPS = 10
_MAX_READ_FINDINGS = 100
_ACTIVITY = "sm_active_ratio"


class WorkingPart(NamedTuple):
    """The part of a session in which its GPUs worked, as a range of its steps."""

    first: int
    last: int
    """Inclusive."""

    def measure(self, values: Sequence[float | None], step: float) -> Measure | None:
        """Return the mean of a quantity in this part."""
        return measure((step, value) for value in values[self.first : self.last + 1])

    def seconds(self, step: float) -> float:
        """Return the length of this part."""
        return (self.last - self.first + 1) * step


def find_working_part(
    utilization: Sequence[float | None], held: tuple[int, int] | None = None, *, is_starting: bool = True
) -> WorkingPart | None:
    """Return the steps in which a job was at work; None when there were none.

    The start-up of a program before it uses the GPU, and the time after its end, say nothing about its speed.

    Args:
        utilization: A value for each step; None is unknown.
        held: The first and the last step in which programs held the GPUs; None when that is unknown, and the work
            lasts until the last activity.
        is_starting: Whether the program may not have begun its work at the first of these steps.
    """
    begin, end = held or (0, len(utilization) - 1)
    inside = utilization[begin : end + 1]
    working = [value for value in inside if value is not None and value > IDLE_RATIO]
    if not working:
        return None
    least = max(IDLE_RATIO, _SETTLED * float(np.median(working)))
    first = next(place for place, value in enumerate(inside, begin) if value is not None and value >= least)
    last = max(place for place, value in enumerate(inside, begin) if value is not None and value > IDLE_RATIO)
    return WorkingPart(first if is_starting else begin, last if held is None else end)


def lost_by_finding(
    findings: Sequence[RunFinding], *, is_diagnosed: bool
) -> Mapping[str, float | None] | None:
    """Return the lost time by finding: agents report the causes of lost time as findings.

    Args:
        findings: Findings of a session.
        is_diagnosed: Whether agents diagnosed the GPUs; otherwise the causes are unknown.
    """
    if not is_diagnosed:
        return None
    lost: dict[str, float | None] = {}
    for one in findings:
        before = lost.get(one.id, 0.0)
        lost[one.id] = None if before is None or one.lost_ratio is None else min(1.0, before + one.lost_ratio)
    return lost


def build_session_comparison(context: ReportContext, before: str, after: str, *, now: float) -> RunComparison:
    """Compare two sessions.

    Args:
        context: Source of the data.
        before: Name or ID of the session before a change.
        after: Name or ID of the session after it.
        now: Epoch seconds, the end of a session that is still active.

    Raises:
        RefusedError: There is no such session.
    """
    sessions = context.store.sessions()
    found = find_session(sessions, before), find_session(sessions, after)
    return compare_runs(*(_read_figures(context, session, now) for session in found))


def _read_figures(context: ReportContext, session: Session, now: float) -> RunFigures:
    request = JobRequest(session.id, "session", None, (None, None))
    report = build_job_report(context, request, max_steps=_MAX_STEPS, now=now)
    empty = RunFigures(
        name=session.name,
        start=report.start,
        recorded_seconds=report.end - report.start,
        seconds=0.0,
        labels=dict(session.labels),
        notes=tuple(report.data_gaps),
    )
    used = [row for row in report.gpu_rows if row.use != "untouched"]
    series = report.series
    if series is None or not used:
        return empty._replace(missing="its GPUs were not used" if report.gpu_rows else "it has no GPUs")
    utilization = series.metrics.get("gpu_utilization_ratio") or series.metrics.get(_ACTIVITY)
    with collect_missing() as incomplete:
        programs = _read_programs(context, report, used)
    part = None if utilization is None else _find_part(utilization, series, programs, report)
    if utilization is None or part is None:
        return empty._replace(
            missing="its utilization is unknown" if utilization is None else "its GPUs were idle"
        )
    if part.last - part.first + 1 < _MIN_STEPS:
        return empty._replace(missing=f"its GPUs worked for only {part.seconds(series.step):.0f} s")
    findings = _read_findings(report, len(used))
    with collect_missing() as incomplete_rhythm:
        rhythm = _read_rhythm(context, report, used, series, part)
    return empty._replace(
        seconds=min(part.seconds(series.step), empty.recorded_seconds),
        models=tuple(row.model or "" for row in used),
        programs=tuple(programs.names) or None,
        utilization=part.measure(utilization, series.step),
        sm_activity=_measure(series, part, _ACTIVITY),
        tensor_activity=_measure(series, part, "tensor_active_ratio"),
        power_watts=_measure(series, part, "power_watts"),
        lost_time=lost_by_finding(findings, is_diagnosed=_is_diagnosed(context, used, now)),
        rhythm=rhythm,
        findings=findings,
        notes=tuple(dict.fromkeys((*report.data_gaps, *incomplete, *incomplete_rhythm))),
    )


def _measure(series: JobSeries, part: WorkingPart, metric: str) -> Measure | None:
    values = series.metrics.get(metric)
    return None if values is None else part.measure(values, series.step)


def _read_findings(report: JobReport, gpus: int) -> tuple[RunFinding, ...]:
    length = max(1e-9, report.end - report.start)
    return merge_findings(
        (
            FindingShare(
                one.id, one.severity, one.summary, one.lost_ratio, one.cause, one.active_seconds / length
            )
            for one in report.findings
            if one.node is not None
        ),
        gpus,
    )


def _is_diagnosed(context: ReportContext, used: Sequence[JobGpu], now: float) -> bool:
    """Return whether agents of these GPUs ever had findings about GPUs: an agent may run without diagnosis."""
    query = Query(
        0.0, now, nodes=_node_ids(context, used), limit=_MAX_READ_FINDINGS, deadline=context.deadline
    )
    return any(stored.finding.label is not None for stored in context.store.findings(query))


class _Programs(NamedTuple):
    """The programs that held the GPUs of a session."""

    names: Sequence[str]
    """Those that held GPUs longest first."""
    start: float | None
    """When the first of them was first seen on a GPU; None when none was seen."""
    end: float | None
    """When the last of them was last seen on a GPU."""
    started: float | None
    """When the first of them was started, if that is known."""


def _read_programs(context: ReportContext, report: JobReport, used: Sequence[JobGpu]) -> _Programs:
    query = Query(
        report.start,
        report.end,
        "process",
        nodes=_node_ids(context, used),
        gpus=frozenset(row.uuid for row in used),
        deadline=context.deadline,
    )
    processes = build_process_report(context, query, users=(), jobs=()).processes
    working = [row for row in processes if any(gpu.sm_ratio_mean != 0 for gpu in row.gpus)] or processes
    held: dict[str, float] = {}
    for row in working:
        name = name_program(row.name, row.command)
        if name is not None:
            held[name] = held.get(name, 0.0) + sum(gpu.end - gpu.start for gpu in row.gpus)
    first = min(working, key=_first_seen, default=None)
    return _Programs(
        sorted(held, key=lambda name: (-held[name], name)),
        None if first is None else _first_seen(first),
        max((gpu.end for row in working for gpu in row.gpus), default=None),
        None if first is None else first.start_time,
    )


def _first_seen(row: ProcessRow) -> float:
    return min(gpu.start for gpu in row.gpus)


def _find_part(
    utilization: Sequence[float | None], series: JobSeries, programs: _Programs, report: JobReport
) -> WorkingPart | None:
    if programs.start is None or programs.end is None:
        return find_working_part(utilization)
    count, begin, step = len(utilization), series.times[0], series.step
    first, last = (int((time - begin) // step) for time in (programs.start, programs.end + SLOW_SECONDS))
    started = programs.start if programs.started is None else programs.started
    held = min(count - 1, max(0, first)), min(count - 1, max(0, last))
    return find_working_part(utilization, held, is_starting=started > report.start - _YOUNG_SECONDS)


def _read_rhythm(
    context: ReportContext, report: JobReport, used: Sequence[JobGpu], series: JobSeries, part: WorkingPart
) -> StepRhythm | None:
    """Return the rhythm of the busiest GPU, from the newest samples of its work."""
    busiest = max(used, key=lambda row: row.mean(_ACTIVITY) or 0.0)
    if busiest.mean(_ACTIVITY) is None:
        return None
    end = min(report.end, series.times[part.last] + series.step)
    start = max(series.times[part.first], end - MAX_SAMPLES * context.interval_seconds)
    query = Query(
        start,
        end,
        metrics=(_ACTIVITY,),
        nodes=_node_ids(context, (busiest,)),
        subjects=frozenset({busiest.uuid}),
        deadline=context.deadline,
    )
    for found in context.store.series(query):
        return find_rhythm(found.times, found.values)
    return None


def _node_ids(context: ReportContext, rows: Sequence[JobGpu]) -> frozenset[int]:
    names = {row.node for row in rows}
    return frozenset(number for number, name in context.node_names.items() if name in names)
