"""How a report about a job says things: the same words in terminals and pages."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from gpulse.model.finding_group import FindingGroup, grouped
from gpulse.model.units import UNKNOWN, duration, energy, hours, rate, share, size, watts

Document = Mapping[str, Any]

LINE_CHARACTERS = 198
_MOST_NODES = 8
_STATES = {"running": "running", "lost": "not heard of any more"}
_WHOLE = 0.995
"""What is less than that of something is less, not rounded."""
_MOMENT = re.compile(r"\b\d{4}-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-5]\d(?:\.\d+)?Z")
"""How heads tell moments in words."""
_MOST_PLACES = 4


class Measured(NamedTuple):
    """A metric in words."""

    name: str
    title: str
    mean: str
    peak: str
    cluster: str
    """What everybody had on average; nothing where that is not told."""


class Told(NamedTuple):
    """A finding in words, of all GPUs that have it."""

    severity: str
    id: str
    places: str
    summary: str
    when: str
    advice: tuple[Document, ...]


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


def headline(report: Document) -> str:
    """What the report is about."""
    name = text(report.get("job"), 100)
    user = f" of {text(report['user'], 40)}" if report.get("user") else ""
    match report.get("kind"):
        case "session":
            return f"session {name}"
        case "process":
            node, _, pid = name.rpartition(":")
            return f"process {pid} on {node}{user}"
    task = f"task {text(report['array'], 40)}" if report.get("array") else ""
    told = [word for word in (text(report.get("name") or "", 60), task) if word]
    called = f" ({', '.join(told)})" if told else ""
    return f"job {name}{called}{user}"


def subtitle(report: Document) -> str:
    """When it was, for how long, and where."""
    start, end = number(report.get("from")) or 0.0, number(report.get("to")) or 0.0
    until = "now, " if report.get("to_now") else ""
    when = f"{moment(start)} to {until}{moment(end, start)} {zone(end)} ({duration(end - start)})"
    state = _STATES.get(str(report.get("state")), "ended")
    return f"{state}, {when}, {many(report.get('gpus'), 'GPU')} on {_nodes(report)}"


def facts(report: Document) -> Iterator[tuple[str, str]]:
    """What there is to say in a line each: a name and a text."""
    cluster = report.get("cluster") or {}
    yield "GPU time", _gpu_time(report)
    yield "held but idle", _idle(report, cluster)
    untouched = report.get("untouched_gpus")
    if number(report.get("unused_seconds")):
        never = f"; {many(untouched, 'GPU')} never touched" if untouched else ""
        yield "not held", f"{gpu_hours(report.get('unused_seconds'))} allocated that no process held{never}"
    elif untouched and report.get("kind") == "session":
        yield "not held", f"{many(untouched, 'GPU')} that nobody held and that did nothing"
    yield "energy", energy(number(report.get("energy_joules")))
    if report.get("program"):
        yield (
            "program",
            f"{text(report['program'], 200)} ({many(report.get('processes'), 'process', 'processes')})",
        )
    scheduler = [f"{word} {text(report[word], 60)}" for word in ("partition", "account") if report.get(word)]
    if scheduler:
        yield "scheduler", ", ".join(scheduler)


def measured(report: Document) -> list[Measured]:
    """What the GPUs did, metric by metric, as far as it is known."""
    metrics, cluster = report.get("metrics") or {}, report.get("cluster") or {}
    others = {
        "gpu_utilization_ratio": cluster.get("utilization_mean"),
        "power_watts": cluster.get("power_watts_mean"),
    }
    found = []
    for name, title, written in _METRICS:
        known = metrics.get(name)
        if known:
            own = report.get("utilization_mean") if name == "gpu_utilization_ratio" else None
            mean = number(own) if own is not None else number(known.get("mean"))
            theirs = number(others.get(name))
            found.append(
                Measured(
                    name,
                    title,
                    written(mean),
                    written(number(known.get("max"))),
                    written(theirs) if theirs is not None else "",
                )
            )
    return found


def line(report: Document) -> str:
    """Everything that matters on one short line, for the end of a job's output."""
    seconds = (number(report.get("to")) or 0.0) - (number(report.get("from")) or 0.0)
    others = number((report.get("cluster") or {}).get("utilization_mean"))
    beside = f" (cluster {share(others)})" if others is not None else ""
    known = {one.name: one for one in measured(report)}
    parts = [
        f"{many(report.get('gpus'), 'GPU')} for {duration(seconds)}",
        gpu_hours(report.get("gpu_seconds")),
        f"busy {share(number(report.get('utilization_mean')))}{beside}",
        f"idle {idle_share(report)}",
        *(f"{word} {known[name].mean}" for name, word in _SHORT if name in known),
        *(f"mem {known[name].peak}" for name in ("memory_used_bytes",) if name in known),
        *([energy(joules)] if (joules := number(report.get("energy_joules"))) is not None else []),
        *_troubles(report),
    ]
    user = f" {text(report['user'], 24)}" if report.get("user") else ""
    return text(f"{text(report.get('job'), 40)}{user}: {', '.join(parts)}", LINE_CHARACTERS)


def _troubles(report: Document) -> Iterator[str]:
    if report.get("state") == "lost":
        yield _STATES["lost"]
    if untouched := report.get("untouched_gpus"):
        yield f"{many(untouched, 'GPU')} untouched"
    if missing := number(report.get("missing_seconds")):
        yield f"no data for {duration(missing)}"
    worst = findings(report)[:1]
    if worst and worst[0].severity != "info":
        yield worst[0].id


def findings(report: Document) -> list[Told]:
    """What was wrong, worst first; what several GPUs have is told once."""
    start = number(report.get("from")) or 0.0
    return [_told(group, start) for group in grouped(report.get("findings") or ())]


def _told(group: FindingGroup, start: float) -> Told:
    """Those of one kind, in the words of the worst of them."""
    begin = min(number(one.get("from")) or start for one in group.members)
    ends = [number(one.get("to")) for one in group.members]
    last = None if None in ends else max(end for end in ends if end is not None)
    until = "now" if last is None else moment(last, begin)
    before = " (before the report begins)" if begin < start else ""
    most = "up to " if len(group.members) > 1 else ""
    often = f"{group.times} times, " if group.times > len(group.members) else ""
    return Told(
        group.severity,
        text(group.id, 60),
        _some([text(place, 80) for place in group.places], _MOST_PLACES),
        text(group.worst.get("summary"), 300),
        f"{moment(begin, start)}{before} to {until}, {often}{most}{duration(group.seconds)}",
        tuple(item for item in group.worst.get("advice") or () if isinstance(item, Mapping)),
    )


def gpu_name(row: Document) -> str:
    """`n1:3`."""
    return f"{text(row.get('node'), 60)}:{text(row.get('gpu') or row.get('uuid'), 44)}"


def gpu_hours(value: object) -> str:
    """Seconds of GPUs: `192.0 GPU-hours`, `12 GPU-min`."""
    seconds = number(value)
    if seconds is None:
        return UNKNOWN
    amount, unit = hours(seconds).split(" ")
    return f"{amount} GPU-{'hours' if unit == 'h' else unit}"


def _gpu_time(report: Document) -> str:
    held, allocated = number(report.get("held_seconds")) or 0.0, number(report.get("allocated_seconds"))
    own = number(report.get("gpu_seconds")) or 0.0
    said = f"{gpu_hours(held)} held"
    if allocated is not None:
        said += f" of {gpu_hours(allocated)} allocated" if held < allocated else ", all that was allocated"
    if own < _WHOLE * held:
        said += f"; {gpu_hours(own)} is its part where others held them too"
    return said


def _idle(report: Document, cluster: Document) -> str:
    idle = number(report.get("idle_seconds"))
    if idle is None:
        return UNKNOWN
    others = idle_share(cluster)
    beside = f" (cluster {others})" if others != UNKNOWN else ""
    return f"{gpu_hours(idle)}, {idle_share(report)} of the time held{beside}" if idle else f"none{beside}"


def idle_share(had: Document) -> str:
    """How much of the time for which it is known GPUs did nothing, in percent."""
    return part(had.get("idle_seconds"), had.get("known_seconds"))


def untold(report: Document) -> list[str]:
    """What is not known, in words, with moments in local time."""
    return [_MOMENT.sub(_local, text(gap, 400)) for gap in report.get("data_gaps") or ()]


def _local(told: re.Match[str]) -> str:
    when = datetime.fromisoformat(told[0]).timestamp()
    return f"{moment(when)} {zone(when)}"


def span_hours(value: object) -> str:
    """Seconds of one GPU: `1.8 h`, `30 min`."""
    seconds = number(value)
    return UNKNOWN if seconds is None else hours(seconds)


def part(value: object, whole: object) -> str:
    """A share of a whole in percent."""
    part, of = number(value), number(whole)
    return UNKNOWN if part is None or not of else share(part / of)


def _nodes(report: Document) -> str:
    names = [text(name, 60) for name in report.get("nodes") or ()]
    return f"{len(names)} nodes" if len(names) > _MOST_NODES else ", ".join(names) or "no node"


def _some(words: Sequence[str], most: int) -> str:
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")


def many(count: object, noun: str, plural: str | None = None) -> str:
    """`1 GPU`, `8 GPUs`."""
    amount = count if isinstance(count, int) else 0
    return f"{amount} {noun if amount == 1 else plural or f'{noun}s'}"


def number(value: object) -> float | None:
    """A number, None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def text(value: object, most: int) -> str:
    """Foreign text, harmless and no longer than that."""
    clean = "".join(character if character.isprintable() else "?" for character in str(value)[: most + 1])
    return clean if len(clean) <= most else f"{clean[: most - 1]}~"


def moment(when: float, near: float | None = None) -> str:
    """A moment in local time, without the day when another one on that day was told already."""
    try:
        day, clock = (time.strftime(pattern, time.localtime(when)) for pattern in ("%Y-%m-%d", "%H:%M:%S"))
        is_same = near is not None and time.strftime("%Y-%m-%d", time.localtime(near)) == day
    except (OverflowError, ValueError, OSError):
        return UNKNOWN
    return clock if is_same else f"{day} {clock}"


def zone(when: float) -> str:
    """What local time is at a moment: `UTC`, `UTC+01:00`."""
    try:
        minutes = time.localtime(when).tm_gmtoff // 60
    except (OverflowError, ValueError, OSError):
        return "UTC"
    sign = "-" if minutes < 0 else "+"
    return f"UTC{sign}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}" if minutes else "UTC"
