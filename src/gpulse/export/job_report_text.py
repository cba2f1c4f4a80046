"""Texts of a job report, the same in terminals and pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from gpulse.diagnosis.line_search import describe_first_line
from gpulse.model.finding import Advice, FindingGroup, group_similar_findings
from gpulse.model.formatting import (
    UNKNOWN,
    duration,
    energy,
    hours,
    local_time,
    rate,
    share,
    size,
    time_zone,
    watts,
)
from gpulse.model.safe_text import printable
from gpulse.model.time_text import parse_iso
from gpulse.reports.job_gpu_use import SharedTime
from gpulse.reports.job_report import JobFinding, JobGpu, JobGpuSeries, JobReport

MAX_SUMMARY_CHARACTERS = 198
_MAX_NAMED_NODES = 8
_STATES = {"running": "running", "lost": "lost: its nodes stopped reporting"}
USE_TEXTS = {"used": "", "untouched": "never used", "unattributed": "no process of the job was seen"}
"""Remarks on how a GPU was used."""
_ALL_RATIO = 0.995
"""From this ratio on, a part counts as the whole."""
_ISO_TIME = re.compile(r"\b\d{4}-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-5]\d(?:\.\d+)?Z")
"""A time in a sentence of the head."""
_MAX_CODE_CHARS = 400


class MetricText(NamedTuple):
    """A metric as text."""

    name: str
    title: str
    mean: str
    peak: str
    cluster: str
    """The mean of the whole cluster; empty where that is unknown."""


class JobFindingText(NamedTuple):
    """A finding as text, for all GPUs that have it."""

    severity: str
    id: str
    text: str
    """The GPUs or nodes, and the summary of the worst finding."""
    when: str
    advice: tuple[Advice, ...]
    code: str | None
    """The line of code behind it, or why there is none."""


_SUMMARY_METRICS = (("sm_active_ratio", "SM"), ("tensor_active_ratio", "tensor"), ("power_watts", "power"))
"""Metrics in the one-line summary, with their labels."""
_METRICS: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("gpu_utilization_ratio", "GPU busy", share),
    ("sm_active_ratio", "SMs in use", share),
    ("tensor_active_ratio", "tensor cores", share),
    ("dram_active_ratio", "memory interface", share),
    ("memory_used_bytes", "memory in use", size),
    ("power_watts", "power", watts),
    ("pcie_rx_bytes_per_second", "PCIe traffic to the GPU", rate),
    ("pcie_tx_bytes_per_second", "PCIe traffic from the GPU", rate),
)


def headline(report: JobReport) -> str:
    """Return the subject of the report: `job slurm:4711 (train) of ada`."""
    name = clean_text(report.job, 100)
    user = f" of {clean_text(report.user, 40)}" if report.user else ""
    match report.kind:
        case "session":
            return f"session {name}"
        case "process":
            node, _, pid = name.rpartition(":")
            return f"process {pid} on {node}{user}"
    task = f"task {clean_text(report.array, 40)}" if report.array else ""
    names = [word for word in (clean_text(report.name or "", 60), task) if word]
    called = f" ({', '.join(names)})" if names else ""
    return f"job {name}{called}{user}"


def subtitle(report: JobReport) -> str:
    """Return the state, the time range and the nodes."""
    start, end = report.start, report.end
    until = "now, " if report.to_now else ""
    when = (
        f"{local_time(start)} to {until}{local_time(end, start)} {time_zone(end)} ({duration(end - start)})"
    )
    state = _STATES.get(report.state, "ended")
    return f"{state}, {when}, {count_noun(report.gpus, 'GPU')} on {_nodes(report)}"


def describe_facts(report: JobReport) -> Iterator[tuple[str, str]]:
    """Yield facts, each as a name and a text."""
    yield "GPU time", _gpu_time(report)
    yield "held but idle", _idle(report)
    untouched = report.untouched_gpus
    if report.unused_seconds:
        never = f"; {count_noun(untouched, 'GPU')} never used" if untouched else ""
        yield "not held", f"{gpu_hours(report.unused_seconds)} allocated, but not held by any process{never}"
    elif untouched and report.kind == "session":
        yield "not held", f"{count_noun(untouched, 'GPU')} idle and not held by any process"
    yield "energy", energy(report.energy_joules)
    if report.program:
        yield (
            "program",
            f"{clean_text(report.program, 200)} ({count_noun(report.processes, 'process', 'processes')})",
        )
    scheduler = [("partition", report.partition), ("account", report.account)]
    known = [f"{word} {clean_text(value, 60)}" for word, value in scheduler if value]
    if known:
        yield "scheduler", ", ".join(known)


def describe_metrics(report: JobReport) -> list[MetricText]:
    """Return the known metrics as text."""
    of_cluster = {
        "gpu_utilization_ratio": report.cluster.utilization_mean,
        "power_watts": report.cluster.power_watts_mean,
    }
    found = []
    for name, title, written in _METRICS:
        metric = report.metrics.get(name)
        if metric is not None:
            own = report.utilization_mean if name == "gpu_utilization_ratio" else None
            cluster = of_cluster.get(name)
            found.append(
                MetricText(
                    name,
                    title,
                    written(metric.mean if own is None else own),
                    written(metric.max),
                    "" if cluster is None else written(cluster),
                )
            )
    return found


def one_line_summary(report: JobReport) -> str:
    """Return the most important figures on one line, for the end of a job's output."""
    cluster = report.cluster.utilization_mean
    comparison = f" (cluster mean {share(cluster)})" if cluster is not None else ""
    known = {one.name: one for one in describe_metrics(report)}
    parts = [
        f"{count_noun(report.gpus, 'GPU')} for {duration(report.end - report.start)}",
        gpu_hours(report.gpu_seconds),
        f"busy {share(report.utilization_mean)}{comparison}",
        f"idle {idle_share(report)}",
        *(f"{word} {known[name].mean}" for name, word in _SUMMARY_METRICS if name in known),
        *(f"memory {known[name].peak}" for name in ("memory_used_bytes",) if name in known),
        *([] if report.energy_joules is None else [energy(report.energy_joules)]),
        *_describe_problems(report),
    ]
    user = f" {clean_text(report.user, 24)}" if report.user else ""
    return clean_text(f"{clean_text(report.job, 40)}{user}: {', '.join(parts)}", MAX_SUMMARY_CHARACTERS)


def _describe_problems(report: JobReport) -> Iterator[str]:
    if report.state == "lost":
        yield "lost"
    if report.untouched_gpus:
        yield f"{count_noun(report.untouched_gpus, 'GPU')} never used"
    if report.missing_seconds:
        yield f"no data for {duration(report.missing_seconds)}"
    worst = describe_findings(report)[:1]
    if worst and worst[0].severity != "info":
        yield worst[0].id


def group_findings(findings: Sequence[JobFinding]) -> list[FindingGroup]:
    """Return findings in groups of one kind each, worst first."""
    return group_similar_findings(msgspec.to_builtins(findings))


def describe_findings(report: JobReport) -> list[JobFindingText]:
    """Return the findings, worst first; a finding that several GPUs have is listed once."""
    return [_finding(group, report.start) for group in group_findings(report.findings)]


def _finding(group: FindingGroup, start: float) -> JobFindingText:
    """Return the findings of one kind, with the summary of the worst one."""
    begin = min(one["from"] for one in group.members)
    ends = [one["to"] for one in group.members]
    until = "now" if None in ends else local_time(max(ends), begin)
    before = " (before the start of the report)" if begin < start else ""
    most = "up to " if len(group.members) > 1 else ""
    often = f"{group.times} times, " if group.times > len(group.members) else ""
    return JobFindingText(
        group.severity,
        clean_text(group.id, 60),
        clean_text(group.text, 600),
        f"{local_time(begin, start)}{before} to {until}, {often}{most}{duration(group.seconds)}",
        tuple(
            Advice(*(clean_text(item[name], 400) for name in Advice._fields))
            for item in group.worst["advice"]
        ),
        None if (code := describe_first_line(group.members)) is None else clean_text(code, _MAX_CODE_CHARS),
    )


def gpu_name(row: JobGpu | JobGpuSeries) -> str:
    """Return a name such as `n1 GPU 3`."""
    gpu = f"GPU {clean_text(row.gpu, 44)}" if row.gpu else clean_text(row.uuid, 44)
    return f"{clean_text(row.node, 60)} {gpu}"


def gpu_hours(seconds: float | None) -> str:
    """Format GPU-seconds: `192.0 GPU-hours`, `12 GPU-min`."""
    if seconds is None:
        return UNKNOWN
    amount, unit = hours(seconds).split(" ")
    return f"{amount} GPU-{'hours' if unit == 'h' else unit}"


def _gpu_time(report: JobReport) -> str:
    held, allocated, own = report.held_seconds, report.allocated_seconds, report.gpu_seconds
    text = f"{gpu_hours(held)} held"
    if allocated is not None:
        text += (
            f" of {gpu_hours(allocated)} allocated" if held < allocated else ", which is the whole allocation"
        )
    if own < _ALL_RATIO * held:
        text += f"; the job's share is {gpu_hours(own)}, because other jobs held the same GPUs"
    return text


def _idle(report: JobReport) -> str:
    idle = report.idle_seconds
    if idle is None:
        return UNKNOWN
    others = idle_share(report.cluster)
    comparison = f" (cluster mean {others})" if others != UNKNOWN else ""
    if not idle:
        return f"none{comparison}"
    return f"{gpu_hours(idle)}, {idle_share(report)} of the time held{comparison}"


def idle_share(time: SharedTime) -> str:
    """Return the idle time in percent of the time with known utilization."""
    idle, known = time.idle_seconds, time.known_seconds
    return UNKNOWN if idle is None or not known else share(idle / known)


def describe_data_gaps(report: JobReport) -> list[str]:
    """Return sentences about missing data, with times in local time."""
    return [_ISO_TIME.sub(_to_local_time, clean_text(gap, 400)) for gap in report.data_gaps]


def _to_local_time(found: re.Match[str]) -> str:
    when = parse_iso(found[0])
    return found[0] if when is None else f"{local_time(when)} {time_zone(when)}"


def span_hours(seconds: float | None) -> str:
    """Format seconds of one GPU: `1.8 h`, `30 min`."""
    return UNKNOWN if seconds is None else hours(seconds)


def _nodes(report: JobReport) -> str:
    names = [clean_text(name, 60) for name in report.nodes]
    return f"{len(names)} nodes" if len(names) > _MAX_NAMED_NODES else ", ".join(names) or "unknown nodes"


def count_noun(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 GPU`, `8 GPUs`."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def clean_text(value: object, max_characters: int) -> str:
    """Return foreign text without control characters, cut with `~` as in the tables of a terminal."""
    return printable(value, max_characters, ellipsis="~")
