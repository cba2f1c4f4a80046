"""A report about a job, from what was found of it: figures of the whole, of each GPU, and what is not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from gpulse.cluster.api.interface import Document
from gpulse.cluster.head import describe
from gpulse.cluster.head.past import chart, efficiency, series, usage
from gpulse.cluster.head.past.efficiency import GpuKey, GpuUse
from gpulse.cluster.head.past.missing import Missing, seconds_of
from gpulse.cluster.head.past.people import Key, People, Person, owner_of, text
from gpulse.cluster.head.past.subject import Subject
from gpulse.cluster.head.past.usage import Tally
from gpulse.model.packing import SLOW_SECONDS
from gpulse.model.units import duration
from gpulse.store.base import Share, Steps, StoredGpu

_MOST_GPUS = 4096
_MOST_GAPS = 100
_MOST_NAMED = 6


class Found:
    """What a store says about a subject."""

    def __init__(
        self,
        subject: Subject,
        names: Mapping[int, str],
        shares: Mapping[GpuKey, Sequence[Share]],
        people: People,
        harvested: Collection[Key],
        gpus: Mapping[GpuKey, StoredGpu],
        moments: chart.Grid,
        steps: Mapping[GpuKey, Sequence[Steps]],
    ) -> None:
        """Keep it together.

        Args:
            subject: What the report is about.
            names: The nodes'.
            shares: Everybody's, by GPU.
            people: Whose its own processes are.
            harvested: Processes of harvests.
            gpus: All there are.
            moments: The grid of the steps.
            steps: Of the subject's GPUs, by GPU.
        """
        self.subject = subject
        self.names = names
        self.shares = shares
        self.people = people
        self.harvested = harvested
        self.gpus = gpus
        self.moments = moments
        self.steps = steps

    @cached_property
    def keys(self) -> set[Key]:
        """What the subject's own processes are known by."""
        return self.subject.keys

    def is_own(self, person: Person) -> bool:
        """Whether a process belongs to the subject; everybody's does to a session."""
        return self.subject.kind == "session" or person.key in self.keys


def wanted(
    subject: Subject,
    shares: Mapping[GpuKey, Sequence[Share]],
    people: People,
    gpus: Mapping[GpuKey, StoredGpu],
) -> list[GpuKey]:
    """The GPUs that a report is about, by node and index."""
    keys = subject.keys
    found = {(gpu.node, gpu.uuid) for gpu in subject.gpus}
    found |= {(grant.node, uuid) for grant in subject.grants for uuid in grant.gpus}
    if subject.kind != "session":
        found |= {
            key
            for key, some in shares.items()
            if any(share.pid is not None and people.of(share).key in keys for share in some)
        }
    return sorted(found, key=lambda key: (key[0], _place(gpus.get(key)), key[1]))


def _place(gpu: StoredGpu | None) -> tuple[int, ...]:
    return (1 << 30,) if gpu is None else tuple(map(int, gpu.label.split(":")))


def uses(found: Found, gaps: Sequence[Missing]) -> list[GpuUse]:
    """What the subject had of each of its GPUs, other than when nothing is known."""
    return [_use(found, key, [gap for gap in gaps if gap.node == key[0]]) for key in found.steps]


def _use(found: Found, key: GpuKey, gaps: Sequence[Missing]) -> GpuUse:
    subject, tally, others = found.subject, Tally(), False
    held: list[tuple[float, float | None]] = []
    for share in found.shares.get(key, ()):
        if share.pid is None:
            continue
        person = found.people.of(share)
        if found.is_own(person):
            tally.add(share, person)
            held.append((share.first or 0.0, (share.last or 0.0) + SLOW_SECONDS))
        else:
            others = True
    granted = subject.within(
        (grant.start, grant.end) for grant in subject.grants if grant.node == key[0] and key[1] in grant.gpus
    )
    is_held = bool(held) and subject.kind != "session"
    during = subject.within(held) if is_held else granted or subject.spans(key[0])
    figures = {
        steps.metric: figure
        for steps in found.steps[key]
        if (figure := efficiency.figure(steps, found.moments, during)) is not None
    }
    seconds = sum(last - first for first, last in granted) if granted else None
    unseen = sum(
        max(0.0, min(last, gap.end) - max(first, gap.start)) for first, last in granted for gap in gaps
    )
    return GpuUse(key, found.gpus.get(key), tally, figures, seconds, unseen, others)


def document(
    found: Found, uses: Sequence[GpuUse], gaps: Sequence[Missing], findings: list[Document], points: int
) -> Document:
    """The report as the API tells it.

    Args:
        found: What the store says.
        uses: What the subject had of each GPU.
        gaps: When nothing is known.
        findings: What was wrong.
        points: The most steps of what is told over time; 0 for none of it.
    """
    subject, told, whole = found.subject, found.subject.told, _whole(found, uses)
    worked = _worked(uses)
    everybody = [share for some in found.shares.values() for share in some]
    return {
        "job": subject.name,
        "kind": subject.kind,
        "state": "running" if subject.is_running else "ended",
        "name": told.get("name"),
        "array": told.get("array"),
        "user": told.get("user") or _user(found),
        "partition": told.get("partition"),
        "account": told.get("account"),
        "program": None if subject.kind == "session" else whole.program,
        "from": subject.start,
        "to": subject.end,
        "step": found.moments.step,
        "nodes": sorted(found.names[node] for node in subject.nodes if node in found.names),
        "gpus": len(uses),
        "processes": len(whole.processes),
        "allocated_seconds": _sum(use.granted_seconds for use in uses),
        "unused_seconds": _sum(use.unused_seconds for use in uses),
        "untouched_gpus": _untouched(subject, uses),
        **efficiency.added(whole),
        "metrics": {
            metric: figure.document(metric)
            for metric, figure in efficiency.together(use.figures for use in worked).items()
        },
        "cluster": efficiency.everybody(
            everybody, found.harvested, usage.capacity(everybody, found.gpus.values())
        ),
        "findings": findings,
        "truncated": len(uses) > _MOST_GPUS,
        "gpu_rows": [use.document(found.names[use.key[0]]) for use in uses[:_MOST_GPUS]],
        "missing_seconds": seconds_of(gaps),
        "missing": [
            {"node": found.names[gap.node], "from": gap.start, "to": gap.end} for gap in gaps[:_MOST_GAPS]
        ],
        "data_gaps": list(_untold(found, uses, gaps)),
        "series": series.drawn(
            found.steps, {use.key for use in worked}, found.moments, points, _labels(found)
        ),
    }


def _whole(found: Found, uses: Sequence[GpuUse]) -> Tally:
    """What the subject's processes had of all GPUs together."""
    whole = Tally()
    for use in uses:
        for share in found.shares.get(use.key, ()):
            if share.pid is not None and found.is_own(person := found.people.of(share)):
                whole.add(share, person)
    return whole


def _worked(uses: Sequence[GpuUse]) -> Sequence[GpuUse]:
    """The GPUs that means are of: those that were never touched are told by themselves."""
    return [use for use in uses if use.use != "untouched"] or uses


def _user(found: Found) -> str | None:
    """Whose most of its processes are; a session is nobody's."""
    users = Counter(
        user for process in found.subject.processes if (user := text(owner_of(process).get("user")))
    )
    return users.most_common(1)[0][0] if users else None


def _sum(values: Iterable[float | None]) -> float | None:
    """What is known, added up; None when nothing is."""
    known = [value for value in values if value is not None]
    return round(sum(known), 3) if known else None


def _untouched(subject: Subject, uses: Sequence[GpuUse]) -> int | None:
    if subject.kind != "session" and not any(use.granted_seconds is not None for use in uses):
        return None
    return sum(use.use == "untouched" for use in uses)


def _labels(found: Found) -> dict[GpuKey, Document]:
    return {
        key: {
            "node": found.names[key[0]],
            "gpu": found.gpus[key].label if key in found.gpus else None,
            "uuid": key[1],
        }
        for key in found.steps
    }


def _untold(found: Found, uses: Sequence[GpuUse], gaps: Sequence[Missing]) -> Iterator[str]:
    """What the report does not know, in words."""
    subject = found.subject
    if not uses:
        yield "no GPU of it was ever seen"
    if subject.kind == "job" and uses and not any(use.granted_seconds is not None for use in uses):
        yield "which GPUs the scheduler allocated is not known, only those that processes held"
    for use in uses:
        if use.use == "unattributed":
            yield f"{_name(found, use)} was busy, but no process of the job was seen on it"
    unknown = [use for use in uses if use.tally.processes and not use.tally.known]
    if unknown:
        yield f"how busy they were is not known of: {_named(found, unknown)}"
    shared = [use for use in uses if use.is_shared and use.tally.processes]
    if shared and subject.kind != "session":
        yield f"others held some at the same time, and their work is in the means of: {_named(found, shared)}"
    for node in sorted({gap.node for gap in gaps}):
        own = [gap for gap in gaps if gap.node == node]
        yield (
            f"nothing is known of {found.names[node]} for {duration(sum(gap.seconds for gap in own))}"
            f" between {describe.iso(own[0].start)} and {describe.iso(own[-1].end)}"
        )


def _name(found: Found, use: GpuUse) -> str:
    return f"{found.names[use.key[0]]}:{use.key[1] if use.gpu is None else use.gpu.label}"


def _named(found: Found, some: Sequence[GpuUse]) -> str:
    more = len(some) - _MOST_NAMED
    return ", ".join(_name(found, use) for use in some[:_MOST_NAMED]) + (
        f" and {more} more" if more > 0 else ""
    )
