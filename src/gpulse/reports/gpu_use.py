"""What somebody had of each of their GPUs, from what a store says about them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from gpulse.model.natural import NaturalKey, natural_key
from gpulse.model.packing import SLOW_SECONDS
from gpulse.reports import chart, efficiency, occupancy
from gpulse.reports.efficiency import GpuKey, GpuUse
from gpulse.reports.gaps import Missing
from gpulse.reports.occupancy import Occupancy, Pace, Work
from gpulse.reports.owners import Key, People, Person, text
from gpulse.reports.subject import Subject
from gpulse.reports.usage import STEP_SECONDS, Tally
from gpulse.store.store import Series, Share, StoredGpu

LACKING_RATIO = 0.02
_MOST_DIFFERENCE = 1.2
"""Whoever had more of a GPU's time than there are samples of them was there when only minutes are left."""
_LACKING_SECONDS = 120.0
"""Less than that may be how samples fall."""


class Occupied(NamedTuple):
    """Who was on a GPU when, and how far apart its samples are."""

    held: Occupancy
    pace: Pace


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
        steps: Mapping[GpuKey, Sequence[Series]],
        occupied: Mapping[GpuKey, Occupied],
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
            occupied: Who was on these when.
        """
        self.subject = subject
        self.names = names
        self.shares = shares
        self.people = people
        self.harvested = harvested
        self.gpus = gpus
        self.moments = moments
        self.steps = steps
        self.occupied = occupied
        self.incomplete: Sequence[str] = ()
        """What is elsewhere and not among it, in words."""

    @cached_property
    def keys(self) -> set[Key]:
        """What the subject's own processes are known by."""
        return self.subject.keys

    def is_own(self, person: Person) -> bool:
        """Whether a process belongs to the subject; everybody's does to a session."""
        return self.subject.kind == "session" or person.key in self.keys


def wanted_of(
    subject: Subject,
    shares: Mapping[GpuKey, Sequence[Share]],
    people: People,
    gpus: Mapping[GpuKey, StoredGpu],
) -> list[GpuKey]:
    """The GPUs that a report is about, by node and index.

    One that was given and is split counts as those of its instances that were held.
    """
    keys = subject.keys
    found = {(gpu.node, gpu.uuid) for gpu in subject.gpus}
    if subject.kind != "session":
        found |= {
            key
            for key, some in shares.items()
            if any(share.pid is not None and people.of(share).key in keys for share in some)
        }
    split = {(key[0], parent_of(gpus.get(key))) for key in found}
    granted = {(grant.node, uuid) for grant in subject.grants for uuid in grant.gpus}
    return sorted(
        found | (granted - split), key=lambda key: (_node_order(key, gpus), _place(gpus.get(key)), key[1])
    )


def parent_of(gpu: StoredGpu | None) -> str | None:
    """The UUID of the GPU that an instance is a part of."""
    return None if gpu is None else text(gpu.device.get("parent_uuid"))


def _node_order(key: GpuKey, gpus: Mapping[GpuKey, StoredGpu]) -> tuple[bool, NaturalKey, int]:
    """By the node's name; a GPU that the store does not know comes last."""
    gpu = gpus.get(key)
    return gpu is None, natural_key(gpu.node_name if gpu else ""), key[0]


def _place(gpu: StoredGpu | None) -> tuple[int, ...]:
    return (1 << 30,) if gpu is None else tuple(map(int, gpu.label.split(":")))


def uses_of(found: Found, gaps: Sequence[Missing]) -> list[GpuUse]:
    """What the subject had of each of its GPUs, other than when nothing is known."""
    return [_use(found, key, [gap for gap in gaps if gap.node == key[0]]) for key in found.steps]


def _use(found: Found, key: GpuKey, gaps: Sequence[Missing]) -> GpuUse:
    subject, occupied, gpu = found.subject, found.occupied[key], found.gpus.get(key)
    tally = Tally()
    for share in found.shares.get(key, ()):
        if share.pid is not None and found.is_own(person := found.people.of(share)):
            tally.add(share, person)
    held, names = occupied.held, {key[1], parent_of(gpu)}
    granted = subject.within(
        (grant.start, grant.end)
        for grant in subject.grants
        if grant.node == key[0] and not names.isdisjoint(grant.gpus)
    )
    had = granted or subject.spans(key[0])
    during = held.own if held.own and subject.kind != "session" else had
    figures = {
        steps.metric: figure
        for steps in found.steps[key]
        if steps.metric in efficiency.METRICS
        and (figure := efficiency.figure(steps, found.moments, during)) is not None
    }
    is_shared = held.shared_seconds(held.own or had) > SLOW_SECONDS
    untabled = _untabled(found, key)
    is_known = 2 * untabled <= occupancy.length(had)
    use = efficiency.used(
        figures, is_held=bool(tally.processes or held.own), by_others=is_shared, is_known=is_known
    )
    unused = None
    if granted and use not in ("unattributed", None):
        seen = subject.within([*held.own, *((gap.start, gap.end) for gap in gaps)])
        left = occupancy.length(granted) - occupancy.length(occupancy.overlap(granted, seen))
        sampled = occupancy.length(held.own)
        unsampled = 0.0 if _is_sampled(tally, sampled) else tally.seconds - sampled
        unused = max(0.0, left - untabled - unsampled)
    return GpuUse(
        key,
        gpu,
        tally,
        _settled(found, key, tally, is_shared=is_shared),
        figures,
        occupancy.length(granted) if granted else None,
        unused,
        untabled,
        is_shared,
        use,
    )


def _settled(found: Found, key: GpuKey, tally: Tally, *, is_shared: bool) -> Work:
    """What a GPU did while it was held; what nobody else had a part of is put right in the tally, too.

    Time is divided by the minute. What the subject had alone is known better: from the samples of the time in which it
    was there.
    """
    occupied = found.occupied[key]
    work = occupancy.work(found.steps[key], found.moments, occupied.held, occupied.pace)
    is_slow = occupied.pace.usual > STEP_SECONDS
    is_sampled = _is_sampled(tally, work.seconds)
    if not tally.processes or (is_shared and is_sampled):
        return work
    if not is_sampled or not work.seconds or (found.moments.step > STEP_SECONDS and not is_slow):
        return Work(tally.seconds, tally.known, tally.busy, tally.idle, tally.energy)
    tally.seconds, tally.known, tally.busy, tally.idle, tally.energy = work
    return work


def _is_sampled(tally: Tally, seconds: float) -> bool:
    """Whether the samples of processes, by which they were there for so long, are those of all the time they had."""
    return tally.seconds <= _MOST_DIFFERENCE * seconds + STEP_SECONDS


def _untabled(found: Found, key: GpuKey) -> float:
    """For how long there are samples of a GPU, but no tables of processes: they were dropped, or are elsewhere."""
    subject = found.subject
    stepped = occupancy.sampled(
        found.steps[key], found.moments.step, found.occupied[key].pace, (subject.start, subject.end)
    )
    lacking = stepped - sum(share.seen_seconds for share in found.shares.get(key, ()))
    least = max(min(_LACKING_SECONDS, stepped / 2), LACKING_RATIO * stepped)
    return lacking if lacking > least else 0.0
