"""Report on a job: figures of the whole job and of each GPU, series over time, findings about it, and missing data."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from gpulse.model import time_text
from gpulse.model.finding import SEVERITIES, Advice, Finding, FindingKey, Severity
from gpulse.model.formatting import duration
from gpulse.model.metric_catalog import CATALOG
from gpulse.model.safe_text import natural_key
from gpulse.reports import job_gpu_use, process_report
from gpulse.reports.finding_report import ReportedFinding, finding_fields
from gpulse.reports.gpu_process_spans import GpuWork, place_on_grid
from gpulse.reports.job_gpu_use import (
    BUSY_METRICS,
    METRICS,
    MIN_MISSING_RATIO,
    ClusterTime,
    GpuUse,
    HeldTime,
    JobData,
    MetricFigures,
    NodeGap,
    UseClass,
    round_or_none,
    total_gap_seconds,
)
from gpulse.reports.process_report import (
    STEP_SECONDS,
    GpuKey,
    GpuTime,
    ProcessKey,
    stored_owner,
    text_or_none,
)
from gpulse.reports.report_subject import JobKind, JobState, ReportSubject
from gpulse.store.store import Series, StoredFinding

_MAX_FINDINGS = 200
_MIN_IDLE_RATIO = 0.25
"""Minimum idle part of the time held for a finding that GPUs were idle."""
_MIN_IDLE_SECONDS = 600.0
"""A shorter idle time is the start or the end of a program."""


class JobFinding(ReportedFinding, frozen=True, kw_only=True):
    """A finding about a job's GPUs, with how often and how long it held during the job's time."""

    node: str | None
    """null for a finding about the whole job."""
    times: int
    active_seconds: float


def merge_findings(
    held: Iterable[StoredFinding],
    names: Mapping[int, str],
    labels: Mapping[int, Collection[str]],
    pids: Mapping[int, Collection[int]] | None,
    start: float,
    end: float,
) -> list[JobFinding]:
    """Return each finding about a job's GPUs once, with how often and how long it held.

    Args:
        held: Findings of the job's nodes during its time, oldest first.
        names: Names of the nodes.
        labels: Labels of the job's GPUs, by node.
        pids: PIDs of the job's processes, by node; findings that are only about other processes are left out. None
            for all processes.
        start: Start of the job's time.
        end: End of the job's time.
    """
    found: dict[tuple[int, FindingKey], JobFinding] = {}
    for stored in held:
        node, span, finding = stored.node, stored.span, stored.finding
        if node is None or node not in names:
            continue
        if finding.label is not None and finding.label not in labels.get(node, ()):
            continue
        if pids is not None and finding.pids and set(finding.pids).isdisjoint(pids.get(node, ())):
            continue
        until = end if span.end is None else min(span.end, end)
        key = node, finding.key
        before = found.get(key)
        found[key] = JobFinding(
            node=names[node],
            start=span.start if before is None else before.start,
            end=span.end,
            times=1 + (0 if before is None else before.times),
            active_seconds=max(0.0, until - max(span.start, start))
            + (0.0 if before is None else before.active_seconds),
            **finding_fields(finding),
        )
    return [replace(finding, active_seconds=round(finding.active_seconds, 3)) for finding in found.values()]


def rank_findings(found: Iterable[JobFinding]) -> list[JobFinding]:
    """Return the findings, worst first, up to a maximum."""
    return sorted(found, key=_rank)[:_MAX_FINDINGS]


def _rank(finding: JobFinding) -> tuple[object, ...]:
    return (
        -SEVERITIES.index(finding.severity),
        -finding.active_seconds,
        natural_key(finding.node or ""),
        natural_key(finding.label or ""),
    )


def find_job_problems(uses: Sequence[GpuUse], start: float, end: float) -> Iterator[JobFinding]:
    """Yield findings about a job as a whole."""
    granted = [use for use in uses if use.granted_seconds is not None]
    untouched = [use for use in granted if use.use == "untouched"]
    if untouched:
        lost = sum(use.granted_seconds or 0.0 for use in untouched)
        yield _build_finding(
            "gpus_untouched",
            "high" if 2 * len(untouched) >= len(granted) else "medium",
            f"{len(untouched)} of {len(granted)} allocated {'GPU' if len(granted) == 1 else 'GPUs'} {'was' if len(untouched) == 1 else 'were'} never used "
            f"({lost / 3600:.1f} GPU-hours)",
            Advice(
                _advise_fewer_gpus(len(granted) - len(untouched)),
                "no process of the job was ever seen on them, and they were idle",
                "`gpulse job JOB` lists them as never used",
            ),
            (start, end),
            lost / max(1.0, sum(use.granted_seconds or 0.0 for use in granted)),
        )
    held = sum(use.held.known for use in uses)
    idle = sum(use.held.idle for use in uses)
    if held and idle >= _MIN_IDLE_RATIO * held and idle >= _MIN_IDLE_SECONDS:
        yield _build_finding(
            "gpus_held_idle",
            "high" if 2 * idle >= held else "medium",
            f"GPUs were held but idle for {100 * idle / held:.0f}% of the time ({idle / 3600:.1f} GPU-hours)",
            Advice(
                "end the program when its work is done, and prepare data before requesting GPUs",
                "during this time the job held the GPUs, but none of its kernels ran on them",
                "the Idle column shows which GPUs were idle; the chart in the HTML report shows when",
            ),
            (start, end),
            idle / held,
        )


def _advise_fewer_gpus(needed: int) -> str:
    if not needed:
        return "request GPUs only if the program uses them, and check that it can find them"
    return f"request only {needed} {'GPU' if needed == 1 else 'GPUs'}, or let the program use all the GPUs it gets"


def _build_finding(
    id_: str, severity: Severity, summary: str, advice: Advice, span: tuple[float, float], lost: float
) -> JobFinding:
    finding = Finding(id_, "gpu_use", severity, 1.0, summary, lost_ratio=round(lost, 4), advice=(advice,))
    return JobFinding(
        node=None,
        start=span[0],
        end=span[1],
        times=1,
        active_seconds=round(span[1] - span[0], 3),
        **finding_fields(finding),
    )


def pids_by_node(keys: Iterable[ProcessKey]) -> dict[int, set[int]]:
    """Return PIDs by node."""
    found: dict[int, set[int]] = {}
    for node, pid, _ in keys:
        found.setdefault(node, set()).add(pid)
    return found


_MAX_SERIES_GPUS = 64
"""Maximum number of GPUs with series."""
_DIGITS = 4


class JobGpuSeries(Struct, frozen=True, kw_only=True):
    """Utilization of one GPU, with a value per step."""

    node: str
    gpu: str | None
    uuid: str
    values: list[float | None]


class JobSeries(Struct, frozen=True, kw_only=True):
    """Metrics of a job over time; null is unknown."""

    step: float
    times: list[float]
    metrics: dict[str, list[float | None]]
    """Mean of the job's GPUs, by metric."""
    gpus: list[JobGpuSeries]


def build_series(data: JobData, used: Collection[GpuKey], max_steps: int) -> JobSeries | None:
    """Return the metrics of a job over time; None if no steps are requested or available.

    Args:
        data: Stored data about the job.
        used: GPUs that the means are computed from.
        max_steps: Maximum number of steps.
    """
    grid = data.grid
    if not max_steps or not grid.count:
        return None
    several = -(-grid.count // max_steps)
    rows = {
        metric: [
            _downsample(place_on_grid(one, grid), several)
            for key, own in data.series.items()
            if key in used
            for one in own
            if one.metric == metric
        ]
        for metric in METRICS
    }
    busy = {key: _pick_busy_series(own) for key, own in list(data.series.items())[:_MAX_SERIES_GPUS]}
    return JobSeries(
        step=grid.step * several,
        times=grid.times()[::several],
        metrics={metric: _round_values(_mean(found)) for metric, found in rows.items() if found},
        gpus=[
            JobGpuSeries(
                node=data.names[key[0]],
                gpu=data.gpus[key].label if key in data.gpus else None,
                uuid=key[1],
                values=_round_values(_downsample(place_on_grid(one, grid), several)),
            )
            for key, one in busy.items()
            if one is not None
        ],
    )


def _pick_busy_series(series: Sequence[Series]) -> Series | None:
    """Return the series of the GPU's utilization; MIG instances have only SM activity."""
    known = {one.metric: one for one in series}
    return next((known[metric] for metric in BUSY_METRICS if metric in known), None)


def _downsample(values: NDArray[np.float64], several: int) -> NDArray[np.float64]:
    """Return the means of groups of this many steps."""
    filled = np.concatenate((values, np.full(-len(values) % several, np.nan)))
    return _mean(list(filled.reshape(-1, several).T))


def _mean(rows: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the mean of the known values of each step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step without known values stays NaN
        found: NDArray[np.float64] = np.nanmean(np.vstack(rows), axis=0)
    return found


def _round_values(values: NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(value) else round(value, _DIGITS) for value in values.tolist()]


_MAX_GPUS = 4096
_MAX_GAPS = 100
_MAX_NAMED_GPUS = 6


class JobMetric(Struct, frozen=True, kw_only=True):
    """Mean and maximum of a metric during the job."""

    unit: str
    mean: float
    max: float


class JobGpu(HeldTime, frozen=True, kw_only=True):
    """How a job used one GPU."""

    node: str
    gpu: str | None
    uuid: str
    model: str | None
    use: UseClass | None
    shared: bool
    memory_total_bytes: float | None
    allocated_seconds: float | None
    unused_seconds: float | None
    metrics: dict[str, JobMetric]

    def mean(self, metric: str) -> float | None:
        """Return the mean of a metric; None when it is unknown."""
        known = self.metrics.get(metric)
        return None if known is None else known.mean

    def peak(self, metric: str) -> float | None:
        """Return the highest value of a metric; None when it is unknown."""
        known = self.metrics.get(metric)
        return None if known is None else known.max


class JobGap(Struct, frozen=True, kw_only=True):
    """A time in which there are no samples of a node."""

    node: str
    start: float = field(name="from")
    end: float = field(name="to")


class JobReport(HeldTime, frozen=True, kw_only=True):
    """How well a job, a session or a process used its GPUs."""

    job: str
    kind: JobKind
    state: JobState
    name: str | None
    array: str | None
    user: str | None
    partition: str | None
    account: str | None
    program: str | None
    start: float = field(name="from")
    end: float = field(name="to")
    to_now: bool
    step: float
    nodes: list[str]
    gpus: int
    processes: int
    allocated_seconds: float | None
    unused_seconds: float | None
    untouched_gpus: int | None
    metrics: dict[str, JobMetric]
    cluster: ClusterTime
    findings: list[JobFinding]
    truncated: bool
    gpu_rows: list[JobGpu]
    missing_seconds: float
    missing: list[JobGap]
    data_gaps: list[str]
    series: JobSeries | None


def compose_report(
    data: JobData,
    uses: Sequence[GpuUse],
    gaps: Sequence[NodeGap],
    findings: list[JobFinding],
    incomplete: Sequence[str],
    max_steps: int,
) -> JobReport:
    """Return the report on a job.

    Args:
        data: Stored data about the job.
        uses: How it used each GPU.
        gaps: Times without samples.
        findings: Findings about the job, worst first.
        incomplete: Sentences about data that the store could not deliver.
        max_steps: Maximum number of steps of the series; 0 for no series.
    """
    subject, job, whole = data.subject, data.subject.job, GpuTime()
    for use in uses:
        whole.include(use.time)
    used = [use for use in uses if use.use != "untouched"] or uses
    shares = [share for some in data.shares.values() for share in some]
    return JobReport(
        job=subject.name,
        kind=subject.kind,
        state=subject.state,
        name=job.get("name"),
        array=job.get("array"),
        user=job.get("user") or _find_user(data),
        partition=job.get("partition"),
        account=job.get("account"),
        program=None if subject.kind == "session" else whole.program,
        start=subject.start,
        end=subject.end,
        to_now=subject.is_now,
        step=data.grid.step,
        nodes=sorted((data.names[node] for node in subject.nodes if node in data.names), key=natural_key),
        gpus=len(uses),
        processes=len(whole.processes),
        allocated_seconds=_sum_known(use.granted_seconds for use in uses),
        unused_seconds=_sum_known(use.unused_seconds for use in uses),
        untouched_gpus=_count_untouched(subject, uses),
        **job_gpu_use.build_held_time(whole, (use.held for use in uses)),
        metrics=_build_metrics(job_gpu_use.combine_figures(use.figures for use in used)),
        cluster=job_gpu_use.build_cluster_time(
            shares, data.harvested, process_report.find_capacity(shares, data.gpus.values())
        ),
        findings=findings,
        truncated=len(uses) > _MAX_GPUS,
        gpu_rows=[_build_gpu_row(use, data.names[use.key[0]]) for use in uses[:_MAX_GPUS]],
        missing_seconds=total_gap_seconds(gaps),
        missing=[JobGap(node=data.names[gap.node], start=gap.start, end=gap.end) for gap in gaps[:_MAX_GAPS]],
        data_gaps=list(_describe_data_gaps(data, uses, gaps, incomplete)),
        series=build_series(data, {use.key for use in used}, max_steps),
    )


def _build_gpu_row(use: GpuUse, node: str) -> JobGpu:
    gpu = use.gpu
    return JobGpu(
        node=node,
        gpu=None if gpu is None else gpu.label,
        uuid=use.key[1],
        model=None if gpu is None else gpu.name,
        use=use.use,
        shared=use.is_shared,
        memory_total_bytes=None
        if gpu is None
        else dict(gpu.device.get("facts") or {}).get("memory_total_bytes"),
        allocated_seconds=round_or_none(use.granted_seconds, 3),
        unused_seconds=round_or_none(use.unused_seconds, 3),
        **job_gpu_use.build_held_time(use.time, [use.held]),
        metrics=_build_metrics(use.figures),
    )


def _build_metrics(figures: MetricFigures) -> dict[str, JobMetric]:
    return {
        metric: JobMetric(
            unit=CATALOG["gpu"][metric].unit,
            mean=round(figure.mean, job_gpu_use.RATIO_DIGITS),
            max=round(figure.max, job_gpu_use.RATIO_DIGITS),
        )
        for metric, figure in figures.items()
    }


def _find_user(data: JobData) -> str | None:
    """Return the user of most of the job's processes; None for a session."""
    users = Counter(
        user
        for process in data.subject.processes
        if (user := text_or_none(stored_owner(process).get("user")))
    )
    return users.most_common(1)[0][0] if users else None


def _sum_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None when there are none."""
    known = [value for value in values if value is not None]
    return round(sum(known), 3) if known else None


def _count_untouched(subject: ReportSubject, uses: Sequence[GpuUse]) -> int | None:
    if subject.kind != "session" and not any(use.granted_seconds is not None for use in uses):
        return None
    return sum(use.use == "untouched" for use in uses)


def _describe_data_gaps(
    data: JobData, uses: Sequence[GpuUse], gaps: Sequence[NodeGap], incomplete: Sequence[str]
) -> Iterator[str]:
    """Yield sentences about missing data."""
    subject = data.subject
    yield from subject.data_gaps
    if not uses:
        yield "No samples have ever been received from its GPUs"
    if subject.kind == "job" and uses and not any(use.granted_seconds is not None for use in uses):
        yield "The GPUs that the scheduler allocated are unknown; only GPUs that processes held are listed"
    for use in uses:
        if use.use == "unattributed":
            yield f"{_gpu_name(data, use)} was busy, but no process of the job was seen on it"
    unattributed = [use for use in uses if use.unattributed_seconds]
    if unattributed:
        most = duration(max(use.unattributed_seconds for use in unattributed))
        yield (
            f"The processes on the GPUs are unknown for up to {most}, so their GPU time is incomplete on: "
            f"{_gpu_names(data, unattributed)}"
        )
    unknown = [use for use in uses if use.time.processes and not use.held.known]
    if unknown:
        yield f"Utilization is unknown on: {_gpu_names(data, unknown)}"
    partly = [use for use in uses if use.held.known and _is_partly_known(use.held)]
    if partly:
        known, held = sum(use.held.known for use in partly), sum(use.held.seconds for use in partly)
        yield f"Utilization is missing for {100 - 100 * known / held:.0f}% of the time on: {_gpu_names(data, partly)}"
    shared = [use for use in uses if use.is_shared and use.time.processes]
    if shared and subject.kind != "session":
        yield f"Other processes held the same GPUs at the same time, so the averages include their work on: {_gpu_names(data, shared)}"
    yield from incomplete
    slow = [use for use in shared if data.process_spans[use.key].intervals.median > STEP_SECONDS]
    if slow:
        yield (
            "Samples are more than a minute apart, so the GPU time is underestimated on these shared GPUs: "
            f"{_gpu_names(data, slow)}"
        )
    for node in sorted({gap.node for gap in gaps}, key=lambda node: natural_key(data.names[node])):
        own = [gap for gap in gaps if gap.node == node]
        yield (
            f"No samples from {data.names[node]} for {duration(sum(gap.seconds for gap in own))}"
            f" between {time_text.format_iso(own[0].start)} and {time_text.format_iso(own[-1].end)}"
        )


def _is_partly_known(work: GpuWork) -> bool:
    """Return whether the utilization is missing for a significant part of the time."""
    return work.seconds - work.known > max(STEP_SECONDS, MIN_MISSING_RATIO * work.seconds)


def _gpu_name(data: JobData, use: GpuUse) -> str:
    return f"{data.names[use.key[0]]} {use.key[1] if use.gpu is None else f'GPU {use.gpu.label}'}"


def _gpu_names(data: JobData, uses: Sequence[GpuUse]) -> str:
    more = len(uses) - _MAX_NAMED_GPUS
    return ", ".join(_gpu_name(data, use) for use in uses[:_MAX_NAMED_GPUS]) + (
        f" and {more} more" if more > 0 else ""
    )
