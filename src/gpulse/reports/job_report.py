"""The report about a job: figures of the whole, of each GPU, and what is not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct, field

from gpulse.model import iso_time
from gpulse.model.metric import CATALOGUE
from gpulse.model.natural import natural_key
from gpulse.model.units import duration
from gpulse.reports import efficiency, gpu_time
from gpulse.reports.efficiency import ClusterTime, Figures, GpuUse, HeldTime, Use, rounded
from gpulse.reports.gaps import Gap, total_gap_seconds
from gpulse.reports.gpu_time import STEP_SECONDS, GpuTime
from gpulse.reports.gpu_use import MIN_MISSING_RATIO, JobData
from gpulse.reports.job_findings import JobFinding
from gpulse.reports.job_series import JobSeries, make_series
from gpulse.reports.occupancy import Work
from gpulse.reports.process_index import owner_of, text
from gpulse.reports.subject import JobKind, JobState, Subject

_MAX_GPUS = 4096
_MAX_GAPS = 100
_MAX_NAMED_GPUS = 6


class JobMetric(Struct, frozen=True, kw_only=True):
    """A metric in the job's time."""

    unit: str
    mean: float
    max: float


class JobGpu(HeldTime, frozen=True, kw_only=True):
    """What a job had of one GPU."""

    node: str
    gpu: str | None
    uuid: str
    model: str | None
    use: Use | None
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


def make_report(
    data: JobData,
    uses: Sequence[GpuUse],
    gaps: Sequence[Gap],
    findings: list[JobFinding],
    incomplete: Sequence[str],
    max_steps: int,
) -> JobReport:
    """Return the report about a job.

    Args:
        data: What the store has about it.
        uses: What it had of each GPU.
        gaps: Times without samples.
        findings: What was wrong.
        incomplete: What the store could not answer, in words.
        max_steps: At most this many steps of the series; 0 for no series.
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
        user=job.get("user") or _user(data),
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
        allocated_seconds=_sum(use.granted_seconds for use in uses),
        unused_seconds=_sum(use.unused_seconds for use in uses),
        untouched_gpus=_untouched(subject, uses),
        **efficiency.held_time(whole, (use.held for use in uses)),
        metrics=_metrics(efficiency.combine(use.figures for use in used)),
        cluster=efficiency.cluster_time(
            shares, data.harvested, gpu_time.capacity(shares, data.gpus.values())
        ),
        findings=findings,
        truncated=len(uses) > _MAX_GPUS,
        gpu_rows=[_gpu(use, data.names[use.key[0]]) for use in uses[:_MAX_GPUS]],
        missing_seconds=total_gap_seconds(gaps),
        missing=[JobGap(node=data.names[gap.node], start=gap.start, end=gap.end) for gap in gaps[:_MAX_GAPS]],
        data_gaps=list(_data_gaps(data, uses, gaps, incomplete)),
        series=make_series(data, {use.key for use in used}, max_steps),
    )


def _gpu(use: GpuUse, node: str) -> JobGpu:
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
        allocated_seconds=rounded(use.granted_seconds, 3),
        unused_seconds=rounded(use.unused_seconds, 3),
        **efficiency.held_time(use.time, [use.held]),
        metrics=_metrics(use.figures),
    )


def _metrics(figures: Figures) -> dict[str, JobMetric]:
    return {
        metric: JobMetric(
            unit=CATALOGUE["gpu"][metric].unit,
            mean=round(figure.mean, efficiency.DIGITS),
            max=round(figure.max, efficiency.DIGITS),
        )
        for metric, figure in figures.items()
    }


def _user(data: JobData) -> str | None:
    """Return the user of most of the processes; a session has none."""
    users = Counter(
        user for process in data.subject.processes if (user := text(owner_of(process).get("user")))
    )
    return users.most_common(1)[0][0] if users else None


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of what is known; None when nothing is."""
    known = [value for value in values if value is not None]
    return round(sum(known), 3) if known else None


def _untouched(subject: Subject, uses: Sequence[GpuUse]) -> int | None:
    if subject.kind != "session" and not any(use.granted_seconds is not None for use in uses):
        return None
    return sum(use.use == "untouched" for use in uses)


def _data_gaps(
    data: JobData, uses: Sequence[GpuUse], gaps: Sequence[Gap], incomplete: Sequence[str]
) -> Iterator[str]:
    """Yield what the report does not know, in words."""
    subject = data.subject
    yield from subject.data_gaps
    if not uses:
        yield "No GPU of it was ever seen"
    if subject.kind == "job" and uses and not any(use.granted_seconds is not None for use in uses):
        yield "Which GPUs the scheduler allocated is unknown; only those that processes held are listed"
    for use in uses:
        if use.use == "unattributed":
            yield f"{_name(data, use)} was busy, but no process of the job was seen on it"
    unattributed = [use for use in uses if use.unattributed_seconds]
    if unattributed:
        most = duration(max(use.unattributed_seconds for use in unattributed))
        yield (
            f"Which processes were on GPUs is unknown for {most}; their GPU time then is missing on: "
            f"{_names(data, unattributed)}"
        )
    unknown = [use for use in uses if use.time.processes and not use.held.known]
    if unknown:
        yield f"Utilization is unknown on: {_names(data, unknown)}"
    partly = [use for use in uses if use.held.known and _is_partly_known(use.held)]
    if partly:
        known, held = sum(use.held.known for use in partly), sum(use.held.seconds for use in partly)
        yield f"Utilization is missing for {100 - 100 * known / held:.0f}% of the time on: {_names(data, partly)}"
    shared = [use for use in uses if use.is_shared and use.time.processes]
    if shared and subject.kind != "session":
        yield f"Others held GPUs at the same time, and their work is in the means of: {_names(data, shared)}"
    yield from incomplete
    slow = [use for use in shared if data.occupancy[use.key].pace.usual > STEP_SECONDS]
    if slow:
        yield f"Samples are more than a minute apart, so the GPU time is too short on these shared GPUs: {_names(data, slow)}"
    for node in sorted({gap.node for gap in gaps}, key=lambda node: natural_key(data.names[node])):
        own = [gap for gap in gaps if gap.node == node]
        yield (
            f"There are no samples of {data.names[node]} for {duration(sum(gap.seconds for gap in own))}"
            f" between {iso_time.iso(own[0].start)} and {iso_time.iso(own[-1].end)}"
        )


def _is_partly_known(work: Work) -> bool:
    """Return whether the utilization is missing for a part of the time that matters."""
    return work.seconds - work.known > max(STEP_SECONDS, MIN_MISSING_RATIO * work.seconds)


def _name(data: JobData, use: GpuUse) -> str:
    return f"{data.names[use.key[0]]}:{use.key[1] if use.gpu is None else use.gpu.label}"


def _names(data: JobData, uses: Sequence[GpuUse]) -> str:
    more = len(uses) - _MAX_NAMED_GPUS
    return ", ".join(_name(data, use) for use in uses[:_MAX_NAMED_GPUS]) + (
        f" and {more} more" if more > 0 else ""
    )
