"""Build the report on a job: read its data from the store, then compute the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpulse.errors import RefusedError
from gpulse.model.frame_packing import SLOW_SECONDS
from gpulse.model.harvest_status import is_harvest_job
from gpulse.reports import gpu_process_spans, job_gpu_use, job_report
from gpulse.reports.job_gpu_use import (
    GpuUse,
    JobData,
    NodeGap,
    SampledSpans,
    find_gaps,
    find_gpus,
    measure_uses,
)
from gpulse.reports.job_lookup import JobRequest, find_subject
from gpulse.reports.job_report import JobFinding, JobReport, compose_report
from gpulse.reports.process_report import GpuKey, ProcessIndex, ProcessKey, process_key, read_processes
from gpulse.reports.report_subject import ReportSubject
from gpulse.reports.time_grid import ReportContext, TimeGrid, make_grid
from gpulse.store.incomplete_answers import collect_missing
from gpulse.store.store import ALL_TIME, GpuShare, Query, Series

_MAX_STEPS, _MIN_STEPS = 1500, 60
_MAX_CELLS = 250_000
"""Maximum steps of all GPUs together; with many GPUs the steps become longer."""
_MAX_FINDINGS = 20_000
"""Maximum findings that are read for a report; if there are more, only the newest ones."""
_METRICS = tuple(dict.fromkeys((*job_gpu_use.METRICS, *gpu_process_spans.WORK_METRICS)))


def build_job_report(context: ReportContext, request: JobRequest, *, max_steps: int, now: float) -> JobReport:
    """Return the report on how well a job, a session or a process used its GPUs.

    Args:
        context: Source of the data.
        request: Name of the job, and where and when to look for it.
        max_steps: Maximum number of steps of the series; 0 for no series.
        now: Epoch seconds.

    Raises:
        RefusedError: There is no such job.
    """
    with collect_missing() as incomplete:
        data = _read_data(context, _find_subject(context, request, now, incomplete))
        gaps = _find_gaps(context, data)
        uses = measure_uses(data, gaps)
        findings = _read_findings(context, data, uses)
    return compose_report(data, uses, gaps, findings, incomplete, max_steps)


def _find_subject(
    context: ReportContext, request: JobRequest, now: float, incomplete: Sequence[str]
) -> ReportSubject:
    """Return the subject of a report.

    Raises:
        RefusedError: There is no such job, or none in the data that is available at the moment.
    """
    try:
        return find_subject(context, request, now)
    except RefusedError as error:
        if error.status != 404 or not incomplete:
            raise
        raise RefusedError(
            503, f"{error.message} in the data that is available now", hint="; ".join(incomplete)
        ) from error


def _read_data(context: ReportContext, subject: ReportSubject) -> JobData:
    start, end = subject.start, subject.end
    shares: dict[GpuKey, list[GpuShare]] = {}
    if start < end:
        for share in context.store.gpu_time(Query(start, end, deadline=context.deadline)):
            if share.node in context.node_names:
                shares.setdefault((share.node, share.uuid), []).append(share)
    processes = _read_processes(context, subject, shares)
    gpus = {(gpu.node, gpu.uuid): gpu for gpu in context.store.gpus()}
    wanted = [key for key in find_gpus(subject, shares, processes, gpus) if key[0] in context.node_names]
    max_steps = max(_MIN_STEPS, min(_MAX_STEPS, _MAX_CELLS // max(1, len(wanted))))
    grid = make_grid(start, end, max_steps, context.interval_seconds)
    series = _read_series(context, subject, wanted, grid)
    return JobData(
        subject,
        subject.keys,
        context.node_names,
        shares,
        processes,
        _read_harvested(context),
        gpus,
        grid,
        series,
        _read_process_spans(context, subject, grid, series, shares, processes),
    )


def _read_processes(
    context: ReportContext, subject: ReportSubject, shares: Mapping[GpuKey, Sequence[GpuShare]]
) -> ProcessIndex:
    """Return the processes that may belong to the subject."""
    if subject.kind == "session":
        gpus = [(gpu.node, gpu.uuid) for gpu in subject.gpus]
        pids = {share.pid for key in gpus for share in shares.get(key, ()) if share.pid is not None}
    else:
        pids = {process.pid for process in subject.processes}
    query = Query(subject.start, subject.end, nodes=frozenset(subject.nodes), deadline=context.deadline)
    return read_processes(context, query, pids)


def _read_harvested(context: ReportContext) -> set[ProcessKey]:
    """Return the processes of harvests."""
    names = frozenset(name for name in context.store.job_names() if is_harvest_job(name))
    found = context.store.processes(Query(*ALL_TIME, jobs=names, deadline=context.deadline)) if names else ()
    return {process_key(process) for process in found}


def _read_series(
    context: ReportContext, subject: ReportSubject, wanted: Sequence[GpuKey], grid: TimeGrid
) -> dict[GpuKey, list[Series]]:
    """Return the series of each GPU."""
    found: dict[GpuKey, list[Series]] = {key: [] for key in wanted}
    if not grid.count or not wanted:
        return found
    query = Query(
        subject.start,
        subject.end,
        "gpu",
        _METRICS,
        nodes=frozenset(node for node, _ in wanted),
        subjects=frozenset(uuid for _, uuid in wanted),
        step=grid.step,
        deadline=context.deadline,
    )
    for series in context.store.series(query):
        if series.key in found:
            found[series.key].append(series)
    return found


def _read_process_spans(
    context: ReportContext,
    subject: ReportSubject,
    grid: TimeGrid,
    series: Mapping[GpuKey, Sequence[Series]],
    shares: Mapping[GpuKey, Sequence[GpuShare]],
    processes: ProcessIndex,
) -> dict[GpuKey, SampledSpans]:
    """Return when processes were on each GPU."""
    found: list[Series] = []
    if grid.count and series:
        query = Query(
            subject.start,
            subject.end,
            "process",
            gpu_process_spans.PROCESS_METRICS,
            nodes=frozenset(node for node, _ in series),
            gpus=frozenset(uuid for _, uuid in series),
            step=grid.step,
            spread=False,
            deadline=context.deadline,
        )
        found = context.store.series(query)
    by_gpu, keys = gpu_process_spans.group_by_process(found), subject.keys
    spans_by_gpu = {}
    for key, own_series in series.items():
        sampled = by_gpu.get(key, {})
        own: list[GpuShare] = []
        others: list[GpuShare] = []
        for share in shares.get(key, ()):
            if share.pid is not None:
                is_own = subject.kind == "session" or processes.find(share).key in keys
                (own if is_own else others).append(share)
        intervals = gpu_process_spans.find_sample_intervals(own_series, grid.step, context.interval_seconds)
        always = {share.pid for share in own} - {share.pid for share in others}
        spans = subject.process_spans(key[0])

        def own_spans(pid: int) -> gpu_process_spans.Spans | None:
            return None if pid in always else spans(pid)  # noqa: B023  called before the next iteration

        held = gpu_process_spans.collect_process_spans(sampled, grid.step, intervals, own_spans, subject.clip)
        own_unsampled, others_unsampled = (
            [_share_span(share) for share in side if share.pid not in sampled] for side in (own, others)
        )
        held = held._replace(
            own=subject.clip([*held.own, *own_unsampled]),
            others=subject.clip([*held.others, *others_unsampled]),
            is_sm_known=held.is_sm_known and not own_unsampled,
        )
        spans_by_gpu[key] = SampledSpans(held, intervals)
    return spans_by_gpu


def _share_span(share: GpuShare) -> tuple[float, float]:
    """Return when a process without samples was on a GPU."""
    return share.first or 0.0, (share.last or 0.0) + SLOW_SECONDS


def _find_gaps(context: ReportContext, data: JobData) -> list[NodeGap]:
    """Return the times without samples of the job's nodes, in the order of time."""
    gaps = []
    for node in sorted(data.subject.nodes & data.names.keys()):
        series = [one for key, own in data.series.items() if key[0] == node for one in own]
        gaps += find_gaps(node, series, data.grid, data.subject.spans(node), context.interval_seconds)
    return sorted(gaps, key=lambda gap: (gap.start, gap.node))


def _read_findings(context: ReportContext, data: JobData, uses: Sequence[GpuUse]) -> list[JobFinding]:
    """Return the findings, worst first."""
    subject = data.subject
    names = {node: data.names[node] for node in subject.nodes if node in data.names}
    query = Query(
        subject.start, subject.end, nodes=frozenset(names), limit=_MAX_FINDINGS, deadline=context.deadline
    )
    held = context.store.findings(query)
    labels: dict[int, set[str]] = {}
    for use in uses:
        if use.gpu is not None:
            labels.setdefault(use.key[0], set()).add(use.gpu.label)
    pids = None if subject.kind == "session" else job_report.pids_by_node(data.keys)
    merged = job_report.merge_findings(held, names, labels, pids, subject.start, subject.end)
    return job_report.rank_findings(
        [*job_report.find_job_problems(uses, subject.start, subject.end), *merged]
    )
