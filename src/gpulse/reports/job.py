"""Make the report about a job from a few questions to the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpulse.errors import RefusedError
from gpulse.model.harvest import is_harvested
from gpulse.model.packing import SLOW_SECONDS
from gpulse.reports import efficiency, job_findings, occupancy
from gpulse.reports.context import Context
from gpulse.reports.efficiency import GpuUse
from gpulse.reports.gaps import Gap, find_gaps
from gpulse.reports.gpu_time import GpuKey
from gpulse.reports.gpu_use import GpuOccupancy, JobData, find_gpus, measure_uses
from gpulse.reports.grid import Grid, make_grid
from gpulse.reports.job_findings import JobFinding
from gpulse.reports.job_report import JobReport, make_report
from gpulse.reports.process_index import ProcessIndex, ProcessKey, key_of
from gpulse.reports.processes import read_processes
from gpulse.reports.resolve import JobRequest, find_subject
from gpulse.reports.subject import Subject
from gpulse.store.incomplete import noticing
from gpulse.store.store import ALWAYS, Query, Series, Share

_MAX_STEPS, _MIN_STEPS = 1500, 60
_MAX_CELLS = 250_000
"""Steps of all GPUs together; of many GPUs steps are longer."""
_MAX_FINDINGS = 20_000
"""That are read for a report; of more, those that held last."""
_METRICS = tuple(dict.fromkeys((*efficiency.METRICS, *occupancy.WORK_METRICS)))


def job_report(context: Context, request: JobRequest, *, max_steps: int, now: float) -> JobReport:
    """Return how well a job, a session or a process used its GPUs.

    Args:
        context: What the answer is computed from.
        request: What it is about.
        max_steps: At most this many steps of the series; 0 for no series.
        now: Epoch seconds.

    Raises:
        RefusedError: There is no such job.
    """
    with noticing() as incomplete:
        data = _read_data(context, _find_subject(context, request, now, incomplete))
        gaps = _find_gaps(context, data)
        uses = measure_uses(data, gaps)
        findings = _read_findings(context, data, uses)
    return make_report(data, uses, gaps, findings, incomplete, max_steps)


def _find_subject(context: Context, request: JobRequest, now: float, incomplete: Sequence[str]) -> Subject:
    """Return what a report is about.

    Raises:
        RefusedError: There is no such job, or none in the data that can be read at the moment.
    """
    try:
        return find_subject(context, request, now)
    except RefusedError as error:
        if error.status != 404 or not incomplete:
            raise
        raise RefusedError(
            503, f"{error.message} in the data that can be read now", hint="; ".join(incomplete)
        ) from error


def _read_data(context: Context, subject: Subject) -> JobData:
    start, end = subject.start, subject.end
    shares: dict[GpuKey, list[Share]] = {}
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
        _harvested(context),
        gpus,
        grid,
        series,
        _read_occupancy(context, subject, grid, series, shares, processes),
    )


def _read_processes(
    context: Context, subject: Subject, shares: Mapping[GpuKey, Sequence[Share]]
) -> ProcessIndex:
    """Return the processes that can be the subject's, by their pids."""
    if subject.kind == "session":
        gpus = [(gpu.node, gpu.uuid) for gpu in subject.gpus]
        pids = {share.pid for key in gpus for share in shares.get(key, ()) if share.pid is not None}
    else:
        pids = {process.pid for process in subject.processes}
    query = Query(subject.start, subject.end, nodes=frozenset(subject.nodes), deadline=context.deadline)
    return read_processes(context, query, pids)


def _harvested(context: Context) -> set[ProcessKey]:
    """Return the processes of harvests."""
    names = frozenset(name for name in context.store.job_names() if is_harvested(name))
    found = context.store.processes(Query(*ALWAYS, jobs=names, deadline=context.deadline)) if names else ()
    return {key_of(process) for process in found}


def _read_series(
    context: Context, subject: Subject, wanted: Sequence[GpuKey], grid: Grid
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


def _read_occupancy(
    context: Context,
    subject: Subject,
    grid: Grid,
    series: Mapping[GpuKey, Sequence[Series]],
    shares: Mapping[GpuKey, Sequence[Share]],
    processes: ProcessIndex,
) -> dict[GpuKey, GpuOccupancy]:
    """Return which processes were on each GPU when."""
    found: list[Series] = []
    if grid.count and series:
        query = Query(
            subject.start,
            subject.end,
            "process",
            occupancy.HELD_METRICS,
            nodes=frozenset(node for node, _ in series),
            gpus=frozenset(uuid for _, uuid in series),
            step=grid.step,
            spread=False,
            deadline=context.deadline,
        )
        found = context.store.series(query)
    by_gpu, keys = occupancy.by_process(found), subject.keys
    occupied = {}
    for key, own_series in series.items():
        sampled = by_gpu.get(key, {})
        own: list[Share] = []
        others: list[Share] = []
        for share in shares.get(key, ()):
            if share.pid is not None:
                is_own = subject.kind == "session" or processes.find(share).key in keys
                (own if is_own else others).append(share)
        pace = occupancy.pace_of(own_series, grid.step, context.interval_seconds)
        always = {share.pid for share in own} - {share.pid for share in others}
        spans = subject.process_spans(key[0])

        def own_spans(pid: int) -> occupancy.Spans | None:
            return None if pid in always else spans(pid)  # noqa: B023  called before the next round

        held = occupancy.find_occupancy(sampled, grid.step, pace, own_spans, subject.clip)
        own_unsampled, others_unsampled = (
            [_span(share) for share in side if share.pid not in sampled] for side in (own, others)
        )
        held = held._replace(
            own=subject.clip([*held.own, *own_unsampled]),
            others=subject.clip([*held.others, *others_unsampled]),
            is_sm_known=held.is_sm_known and not own_unsampled,
        )
        occupied[key] = GpuOccupancy(held, pace)
    return occupied


def _span(share: Share) -> tuple[float, float]:
    """Return from when to when a process was on a GPU, if there are no samples of it."""
    return share.first or 0.0, (share.last or 0.0) + SLOW_SECONDS


def _find_gaps(context: Context, data: JobData) -> list[Gap]:
    """Return the times without samples of the job's nodes, in the order of time."""
    gaps = []
    for node in sorted(data.subject.nodes & data.names.keys()):
        series = [one for key, own in data.series.items() if key[0] == node for one in own]
        gaps += find_gaps(node, series, data.grid, data.subject.spans(node), context.interval_seconds)
    return sorted(gaps, key=lambda gap: (gap.start, gap.node))


def _read_findings(context: Context, data: JobData, uses: Sequence[GpuUse]) -> list[JobFinding]:
    """Return what was wrong, worst first."""
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
    pids = None if subject.kind == "session" else job_findings.pids_by_node(data.keys)
    merged = job_findings.merge_findings(held, names, labels, pids, subject.start, subject.end)
    return job_findings.rank_findings([*job_findings.judge_job(uses, subject.start, subject.end), *merged])
