"""How a report says things: the same words in terminals, pictures and pages."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from gpulse.export.curves import printable
from gpulse.export.report.gaps import Absence, Gap
from gpulse.export.report.model import Report
from gpulse.export.report.moments import epoch
from gpulse.export.session.quantities import BYTES, Quantity
from gpulse.model import units
from gpulse.model.finding_group import FindingGroup, grouped
from gpulse.model.units import UNKNOWN, duration, rate

_MOST_GPUS_NAMED = 6
_MAX_PLACES_NAMED = 4


def shown(report: Report) -> tuple[Quantity, ...]:
    """What to show: both directions of a link together, where both are known together."""
    return tuple(quantity for quantity in report.quantities if not quantity.name.endswith(("_rx", "_tx")))


def headline(report: Report) -> str:
    """What the session is called."""
    return shortened(report.name, 100)


def subtitle(report: Report) -> str:
    """When it was, how long, and how much of it there is."""
    gpus, nodes = len(report.gpus), len(report.nodes)
    zones = zone(report.start), zone(report.end)
    first = f" {zones[0]}" if zones[0] != zones[1] else ""  # the clocks were changed in between
    return (
        f"{moment(report.start)}{first} to {moment(report.end, report.start)} {zones[1]} "
        f"({length(report.end - report.start)}), "
        f"{_many(report.frames, 'frame')} of {report.interval_seconds:g} s, "
        f"{_many(gpus, 'GPU')} on {_many(nodes, 'node')}"
    )


def value(quantity: Quantity, number: float | None, *, short: bool = False) -> str:
    """A value in people's units."""
    if number is None:
        return UNKNOWN
    if quantity.is_percent:
        return f"{number:.0f}%"
    text = rate(number * BYTES)
    return text.removesuffix("B/s").replace(" ", "") if short else text


def energy(joules: float | None) -> str:
    """Energy in watt-hours, as bills have it."""
    return units.energy(joules)


def availability(ratio: float) -> str:
    """A share that says 100% only when nothing is missing."""
    if ratio >= 1:
        return "100%"
    return f"{min(99.9, ratio * 100):.1f}%" if ratio >= 0.9 else f"{ratio * 100:.0f}%"


def length(seconds: float) -> str:
    """`0.5s`, `45s`, `1:00:00`."""
    return f"{seconds:.3g}s" if seconds < 10 else duration(seconds)


def moment(when: float, near: float | None = None) -> str:
    """A moment in local time, without the day when another one on that day was told already."""
    try:
        day, clock = (time.strftime(pattern, time.localtime(when)) for pattern in ("%Y-%m-%d", "%H:%M:%S"))
        is_same = near is not None and time.strftime("%Y-%m-%d", time.localtime(near)) == day
    except (OverflowError, ValueError, OSError):  # a damaged file can claim any time
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


def absence(report: Report, found: Absence) -> str:
    """`the head was away 14:03:10 to 14:03:17 (7s)`."""
    start = moment(found.start, report.start)
    if found.end is None:
        return f"the head was away from {start} on"
    end = moment(found.end, found.start)
    return f"the head was away {start} to {end} ({length(found.end - found.start)})"


def gap(report: Report, found: Gap) -> str:
    """`14:00:05 to 14:00:35 (30s): all 8 GPUs of n1`."""
    start = moment(found.start, report.start)
    end = moment(found.end, found.start)
    return f"{start} to {end} ({length(found.seconds)}): {who(report, found.gpus)}"


def who(report: Report, gpus: Iterable[int]) -> str:
    """GPUs, whole nodes by their name."""
    missing = set(gpus)
    if len(missing) == len(report.gpus):
        return "all GPUs"
    said = []
    for node in report.nodes:
        here = [place for place in node.gpus if place in missing]
        if len(here) == len(node.gpus):
            said.append(f"{printable(node.name)} ({_many(len(here), 'GPU')})")
        else:
            said += [printable(report.gpus[place].short) for place in here]
    more = len(said) - _MOST_GPUS_NAMED
    return ", ".join(said[:_MOST_GPUS_NAMED]) + (f" and {more} more" if more > 0 else "")


class Told(NamedTuple):
    """Findings of one kind in words."""

    severity: str
    place: str
    summary: str
    when: str


def findings(report: Report) -> list[Told]:
    """What was found, worst first; what several GPUs have, or one has again and again, is said once."""
    return [_told(report, group) for group in grouped(report.findings)]


def findings_title(report: Report) -> str:
    """`Findings`, with how many there are of how many kinds."""
    kinds = len(grouped(report.findings))
    if kinds == len(report.findings):
        return "Findings"
    return f"Findings ({len(report.findings)}, of {_many(kinds, 'kind')})"


def _told(report: Report, group: FindingGroup) -> Told:
    starts = [start for one in group.members if (start := epoch(one.get("first_time"))) is not None]
    ends = [end for one in group.members if (end := epoch(one.get("last_time"))) is not None]
    when = ""
    if starts and ends:
        start, end = min(starts), max(ends)
        before = " (before the session)" if start < report.start else ""
        ongoing = any(one.get("is_ongoing") is True for one in group.members)
        until = f"{moment(end, start)}{' and longer' if ongoing else ''}"
        when = f"{moment(start, report.start)}{before} to {until} ({_held(group, end - start)})"
    places = list(group.places)
    more = len(places) - _MAX_PLACES_NAMED
    worst = f" (the worst of {len(group.members)})" if len(group.members) > 1 else ""
    return Told(
        group.severity,
        (", ".join(places[:_MAX_PLACES_NAMED]) or "?")
        + (f" and {_many(more, 'node')} more" if more > 0 else ""),
        f"{group.worst.get('summary') or group.id}{worst}",
        when,
    )


def _held(group: FindingGroup, seconds: float) -> str:
    """For how long findings held; one that came and went held for less than from its first to its last moment."""
    held = max(0.0, seconds)
    if group.seconds is not None and 0 <= group.seconds <= seconds:
        held = group.seconds
    often = f"{group.times} times, " if group.times > len(group.members) else ""
    most = "up to " if len(group.members) > 1 else ""
    return f"{often}{most}{length(held)}{' in all' if often else ''}"


def shortened(text: str, most: int) -> str:
    """Foreign text, harmless and no longer than that."""
    clean = printable(text)
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
