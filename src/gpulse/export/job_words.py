"""How a report about a job says things: the same words in terminals and pages."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from gpulse.model.finding_group import FindingGroup, grouped
from gpulse.model.units import UNKNOWN, duration, energy, hours, rate, share, size, watts
from gpulse.reports.efficiency import SharedTime
from gpulse.reports.job_findings import JobFinding
from gpulse.reports.job_report import JobGpu, JobReport
from gpulse.reports.job_series import JobGpuSeries

LINE_CHARACTERS = 198
_MAX_NODES = 8
_STATES = {"running": "running", "lost": "not heard of any more"}
_WHOLE = 0.995
"""What is less than that of something is less, not rounded."""
_MOMENT = re.compile(r"\b\d{4}-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-5]\d(?:\.\d+)?Z")
"""A moment in a sentence of the head."""
_MAX_PLACES = 4


class Measured(NamedTuple):
    """A metric in words."""

    name: str
    title: str
    mean: str
    peak: str
    cluster: str
    """The mean of the whole cluster; empty where that is unknown."""


class FindingText(NamedTuple):
    """A finding in words, of all GPUs that have it."""

    severity: str
    id: str
    places: str
    summary: str
    when: str
    advice: tuple[tuple[str, str], ...]
    """What to do, and why."""


_SHORT = (("sm_active_ratio", "SM"), ("tensor_active_ratio", "tensor"), ("power_watts", "power"))
"""What the one line says of them."""
_METRICS: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("gpu_utilization_ratio", "GPU busy", share),
    ("sm_active_ratio", "SMs active", share),
    ("tensor_active_ratio", "tensor cores", share),
    ("dram_active_ratio", "memory interface", share),
    ("memory_used_bytes", "memory in use", size),
    ("power_watts", "power", watts),
    ("pcie_rx_bytes_per_second", "PCIe to the GPU", rate),
    ("pcie_tx_bytes_per_second", "PCIe from the GPU", rate),
)


def headline(report: JobReport) -> str:
    """Return what the report is about."""
    name = text(report.job, 100)
    user = f" of {text(report.user, 40)}" if report.user else ""
    match report.kind:
        case "session":
            return f"session {name}"
        case "process":
            node, _, pid = name.rpartition(":")
            return f"process {pid} on {node}{user}"
    task = f"task {text(report.array, 40)}" if report.array else ""
    names = [word for word in (text(report.name or "", 60), task) if word]
    called = f" ({', '.join(names)})" if names else ""
    return f"job {name}{called}{user}"


def subtitle(report: JobReport) -> str:
    """Return when it was, for how long, and where."""
    start, end = report.start, report.end
    until = "now, " if report.to_now else ""
    when = f"{moment(start)} to {until}{moment(end, start)} {zone(end)} ({duration(end - start)})"
    state = _STATES.get(report.state, "ended")
    return f"{state}, {when}, {many(report.gpus, 'GPU')} on {_nodes(report)}"


def facts(report: JobReport) -> Iterator[tuple[str, str]]:
    """Yield facts of a line each: a name and a text."""
    yield "GPU time", _gpu_time(report)
    yield "held but idle", _idle(report)
    untouched = report.untouched_gpus
    if report.unused_seconds:
        never = f"; {many(untouched, 'GPU')} never touched" if untouched else ""
        yield "not held", f"{gpu_hours(report.unused_seconds)} allocated that no process held{never}"
    elif untouched and report.kind == "session":
        yield "not held", f"{many(untouched, 'GPU')} that nobody held and that did nothing"
    yield "energy", energy(report.energy_joules)
    if report.program:
        yield (
            "program",
            f"{text(report.program, 200)} ({many(report.processes, 'process', 'processes')})",
        )
    scheduler = [("partition", report.partition), ("account", report.account)]
    known = [f"{word} {text(value, 60)}" for word, value in scheduler if value]
    if known:
        yield "scheduler", ", ".join(known)


def measured(report: JobReport) -> list[Measured]:
    """Return what the GPUs did, metric by metric, as far as it is known."""
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
                Measured(
                    name,
                    title,
                    written(metric.mean if own is None else own),
                    written(metric.max),
                    "" if cluster is None else written(cluster),
                )
            )
    return found


def line(report: JobReport) -> str:
    """Return everything that matters on one short line, for the end of a job's output."""
    cluster = report.cluster.utilization_mean
    beside = f" (cluster {share(cluster)})" if cluster is not None else ""
    known = {one.name: one for one in measured(report)}
    parts = [
        f"{many(report.gpus, 'GPU')} for {duration(report.end - report.start)}",
        gpu_hours(report.gpu_seconds),
        f"busy {share(report.utilization_mean)}{beside}",
        f"idle {idle_share(report)}",
        *(f"{word} {known[name].mean}" for name, word in _SHORT if name in known),
        *(f"mem {known[name].peak}" for name in ("memory_used_bytes",) if name in known),
        *([] if report.energy_joules is None else [energy(report.energy_joules)]),
        *_troubles(report),
    ]
    user = f" {text(report.user, 24)}" if report.user else ""
    return text(f"{text(report.job, 40)}{user}: {', '.join(parts)}", LINE_CHARACTERS)


def _troubles(report: JobReport) -> Iterator[str]:
    if report.state == "lost":
        yield _STATES["lost"]
    if report.untouched_gpus:
        yield f"{many(report.untouched_gpus, 'GPU')} untouched"
    if report.missing_seconds:
        yield f"no data for {duration(report.missing_seconds)}"
    worst = findings(report)[:1]
    if worst and worst[0].severity != "info":
        yield worst[0].id


def group_findings(findings: Sequence[JobFinding]) -> list[FindingGroup]:
    """Return findings in groups of one kind each, worst first."""
    return grouped(msgspec.to_builtins(findings))


def findings(report: JobReport) -> list[FindingText]:
    """Return what was wrong, worst first; what several GPUs have is listed once."""
    return [_finding(group, report.start) for group in group_findings(report.findings)]


def _finding(group: FindingGroup, start: float) -> FindingText:
    """Return the findings of one kind, in the words of the worst of them."""
    begin = min(one["from"] for one in group.members)
    ends = [one["to"] for one in group.members]
    until = "now" if None in ends else moment(max(ends), begin)
    before = " (before the report begins)" if begin < start else ""
    most = "up to " if len(group.members) > 1 else ""
    often = f"{group.times} times, " if group.times > len(group.members) else ""
    return FindingText(
        group.severity,
        text(group.id, 60),
        _some([text(place, 80) for place in group.places], _MAX_PLACES),
        text(group.worst["summary"], 300),
        f"{moment(begin, start)}{before} to {until}, {often}{most}{duration(group.seconds)}",
        tuple((item["do"], item["why"]) for item in group.worst["advice"]),
    )


def gpu_name(row: JobGpu | JobGpuSeries) -> str:
    """Return a name such as `n1:3`."""
    return f"{text(row.node, 60)}:{text(row.gpu or row.uuid, 44)}"


def gpu_hours(seconds: float | None) -> str:
    """Return seconds of GPUs as text: `192.0 GPU-hours`, `12 GPU-min`."""
    if seconds is None:
        return UNKNOWN
    amount, unit = hours(seconds).split(" ")
    return f"{amount} GPU-{'hours' if unit == 'h' else unit}"


def _gpu_time(report: JobReport) -> str:
    held, allocated, own = report.held_seconds, report.allocated_seconds, report.gpu_seconds
    said = f"{gpu_hours(held)} held"
    if allocated is not None:
        said += f" of {gpu_hours(allocated)} allocated" if held < allocated else ", all that was allocated"
    if own < _WHOLE * held:
        said += f"; {gpu_hours(own)} is its part where others held them too"
    return said


def _idle(report: JobReport) -> str:
    idle = report.idle_seconds
    if idle is None:
        return UNKNOWN
    others = idle_share(report.cluster)
    beside = f" (cluster {others})" if others != UNKNOWN else ""
    return f"{gpu_hours(idle)}, {idle_share(report)} of the time held{beside}" if idle else f"none{beside}"


def idle_share(time: SharedTime) -> str:
    """Return the idle part of the time for which it is known, in percent."""
    idle, known = time.idle_seconds, time.known_seconds
    return UNKNOWN if idle is None or not known else share(idle / known)


def data_gaps(report: JobReport) -> list[str]:
    """Return what is not known, in words, with moments in local time."""
    return [_MOMENT.sub(_local, text(gap, 400)) for gap in report.data_gaps]


def _local(found: re.Match[str]) -> str:
    when = datetime.fromisoformat(found[0]).timestamp()
    return f"{moment(when)} {zone(when)}"


def span_hours(seconds: float | None) -> str:
    """Return seconds of one GPU as text: `1.8 h`, `30 min`."""
    return UNKNOWN if seconds is None else hours(seconds)


def _nodes(report: JobReport) -> str:
    names = [text(name, 60) for name in report.nodes]
    return f"{len(names)} nodes" if len(names) > _MAX_NODES else ", ".join(names) or "no node"


def _some(words: Sequence[str], most: int) -> str:
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")


def many(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 GPU`, `8 GPUs`."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def text(value: object, most: int) -> str:
    """Return foreign text, printable and no longer than that."""
    clean = "".join(character if character.isprintable() else "?" for character in str(value)[: most + 1])
    return clean if len(clean) <= most else f"{clean[: most - 1]}~"


def moment(when: float, near: float | None = None) -> str:
    """Return a moment in local time, without the day when it is the same as that of a moment nearby."""
    try:
        day, clock = (time.strftime(pattern, time.localtime(when)) for pattern in ("%Y-%m-%d", "%H:%M:%S"))
        is_same = near is not None and time.strftime("%Y-%m-%d", time.localtime(near)) == day
    except (OverflowError, ValueError, OSError):
        return UNKNOWN
    return clock if is_same else f"{day} {clock}"


def zone(when: float) -> str:
    """Return the local time zone at a moment: `UTC`, `UTC+01:00`."""
    try:
        minutes = time.localtime(when).tm_gmtoff // 60
    except (OverflowError, ValueError, OSError):
        return "UTC"
    sign = "-" if minutes < 0 else "+"
    return f"UTC{sign}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}" if minutes else "UTC"
