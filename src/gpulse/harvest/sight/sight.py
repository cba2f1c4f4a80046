"""Looking at the GPUs and at who is at the machine: everything now and then, one GPU when it is opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from time import monotonic

from gpulse.harvest.settings import Gpu
from gpulse.harvest.sight.contexts import Contexts
from gpulse.harvest.sight.doubts import Doubts
from gpulse.harvest.sight.holders import Depth, Held, Holdings, Identities
from gpulse.harvest.sight.inotify import Bell, reason
from gpulse.harvest.sight.openings import Opened, Openings
from gpulse.harvest.sight.people import People, Watchmen
from gpulse.harvest.sight.seen import Presence, Sighting, Use
from gpulse.harvest.sight.uses import Judge
from gpulse.sources.checkup import INITIAL_PID_NAMESPACE
from gpulse.sources.nvml.cadence import Patience
from gpulse.sources.procfs import Roots, read_link

_LOOK_PATIENCE_SECONDS = 0.25
_GLANCE_PATIENCE_SECONDS = 0.05
"""How long the driver is waited for; what it says later is seen later."""
_LATE_SECONDS = 0.25
_REST_SHARE = 4.0
_LEAST_REST_SECONDS = 0.02
_MOST_REST_SECONDS = 0.25
"""After a glance the next one waits for so many times as long as it took, within these bounds."""
_PEOPLE_SECONDS = 1.0
_YOUNG_SECONDS = 3.0
"""A program that was started so short a time ago may be the one that opened a GPU."""


class Sight:
    """Sees who uses the GPUs and who is at the machine."""

    def __init__(
        self,
        gpus: Sequence[Gpu],
        *,
        is_ours: Callable[[int], bool],
        roots: Roots = Roots(),  # noqa: B008  frozen
        people: bool = False,
        inotify: bool = True,
        patience: Patience | None = None,
    ) -> None:
        """Open the eyes.

        Args:
            gpus: The GPUs to watch.
            is_ours: Whether a process was started by us, whatever became of it since.
            roots: Where /proc, /dev and /run are.
            people: Look at who is at the machine too.
            inotify: Be told of opens; without it everything waits for the next look.
            patience: How long the driver is waited for.
        """
        self._gpus = {gpu.minor: gpu for gpu in gpus}
        self._holdings = Holdings(roots, self._gpus)
        self._identities = Identities(roots)
        self._native = is_native(roots)
        self._judge = Judge(self._identities, is_ours, native=self._native)
        self._contexts = Contexts(gpus, patience)
        self._openings = Openings({minor: f"{roots.dev}/nvidia{minor}" for minor in self._gpus})
        self._roots = roots
        self._people: People | None = None
        self._watchmen: Watchmen | None = None
        self._bell: Bell | None = None
        self._doubts = Doubts()
        self._held: Held | None = None
        """None: /proc cannot be listed, or was not yet."""
        self._young: dict[int, tuple[float, tuple[str, ...]]] = {}
        """Processes out of sight that were started just now: when they were seen, and what they are called."""
        self._told: dict[int, Use] = {}
        self._pending = Opened({})
        self._rest_until = 0.0
        self._closed = False
        self._people_at: float | None = None
        """When somebody's coming is to be looked into."""
        self._people_seen_at = -inf
        self.why_blind: str | None = "inotify is switched off"
        """Why opens are not seen at once, but at the next look; None when they are."""
        if inotify:
            self._open_bell()
        if people:
            self.watch_people(wanted=True)

    @property
    def descriptor(self) -> int | None:
        """Readable when `glance` should be called; None when nothing tells of opens."""
        return None if self._bell is None else self._bell.descriptor

    @property
    def hidden(self) -> str | None:
        """Why not all processes can be looked into; None when they can."""
        if not self._native:
            return "this is a container: the processes outside are out of sight"
        if not self._holdings.sees_init:
            return "/proc hides the processes of others (hidepid)"
        if self._holdings.refused:
            return f"{self._holdings.refused} processes of others may not be looked into"
        return None

    def look(self, now: float) -> Sighting:
        """Look at everything; `now` is in epoch seconds."""
        indices = [gpu.index for gpu in self._gpus.values()]
        self._contexts.ask(indices)
        self._refresh()
        opened = self._merged(self._openings.read())
        clock = monotonic()
        due = self._doubts.due(clock, hidden=self.hidden is not None)
        deep = opened.missed or self._doubts.is_deep(due, hidden=self.hidden is not None)
        calm: Depth = "quick" if opened.minors or due else "calm"
        self._scan("whole" if deep else calm if self.why_blind is None else "polled", turn=True)
        self._contexts.wait(_LOOK_PATIENCE_SECONDS)
        uses = self._weigh(opened, self._gpus, due)
        self._told = uses
        self._identities.keep(holder.pid for use in uses.values() for holder in use.holders)
        people = self._look_at_people(now, ask=True)
        self._set_bell()
        return Sighting(uses, people)

    def glance(self, now: float) -> Sighting | None:
        """Look at what the descriptor became readable for; None when it was nothing of interest."""
        if self._bell is None:
            return None
        rung = self._bell.rung()
        clock = monotonic()
        uses = self._glance_at_gpus(rung, clock)
        people = self._glance_at_people(rung, clock, now)
        self._set_bell()
        return Sighting(uses, people) if uses or people is not None else None

    def watch_people(self, wanted: bool) -> None:
        """Look at who is at the machine too, or no longer; the GPUs are watched as before."""
        if wanted and self._people is None:
            self._people = People(self._roots)
            self._watchmen = None if self._bell is None else Watchmen(self._roots)
            self._refresh_people()
        elif not wanted:
            self._part_from_people()
        self._set_bell()

    def close(self) -> None:
        """Close the eyes; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._part_from_people()
        if self._bell is not None:
            self._bell.close()
            self._bell = None
        self._openings.close()
        self._contexts.close()

    def _part_from_people(self) -> None:
        descriptors = (
            None if self._watchmen is None else self._watchmen.descriptor,
            None if self._people is None else self._people.hints.descriptor,
        )
        for descriptor in descriptors:
            if descriptor is not None and self._bell is not None:
                self._bell.drop(descriptor)
        if self._watchmen is not None:
            self._watchmen.close()
        if self._people is not None:
            self._people.close()
        self._people = self._watchmen = self._people_at = None

    def _open_bell(self) -> None:
        try:
            self._bell = Bell()
        except OSError as error:
            self.why_blind = reason(error)
            return
        self._refresh()

    def _refresh(self) -> None:
        """Watch what came since the last look."""
        if self._bell is None:
            return
        self._openings.refresh()
        self.why_blind = self._openings.trouble
        if self._openings.descriptor is not None:
            self._bell.add(self._openings.descriptor)
        self._refresh_people()

    def _refresh_people(self) -> None:
        if self._bell is None or self._watchmen is None:
            return
        self._watchmen.refresh()
        if self._watchmen.descriptor is not None:
            self._bell.add(self._watchmen.descriptor)

    def _merged(self, opened: Opened) -> Opened:
        """What happened, with what was left for later."""
        earlier, self._pending = self._pending, Opened({})
        kept = {minor: is_open and minor not in opened.closed for minor, is_open in earlier.minors.items()}
        return Opened(
            {**kept, **opened.minors},
            (earlier.closed - opened.minors.keys()) | opened.closed,
            earlier.missed or opened.missed,
            earlier.shut | opened.shut,
        )

    def _glance_at_gpus(self, rung: Collection[int], clock: float) -> dict[int, Use]:
        hidden = self.hidden is not None
        if self._openings.descriptor in rung:
            self._pending = self._merged(self._openings.read())
        due = self._doubts.due(clock, hidden=hidden)
        late = {index for index in self._contexts.awaited if self._told.get(index) is not None}
        if clock < self._rest_until:
            if self._pending.minors and self._openings.descriptor is not None and self._bell is not None:
                self._bell.mute(self._openings.descriptor)
            return {}
        opened, self._pending = self._pending, Opened({})
        minors = set(self._gpus) if opened.missed else {*opened.minors, *due}
        if minors:
            self._contexts.ask(self._gpus[minor].index for minor in minors)
            deep = opened.missed or self._doubts.is_deep(due, hidden=hidden)
            self._scan("whole" if deep else "quick", turn=False)
        elif opened.closed:
            self._doubts.heard({}, opened.closed, clock, hidden=hidden, shut=opened.shut)
        if not minors and not late:
            return {}
        self._contexts.wait(_GLANCE_PATIENCE_SECONDS if minors else 0.0)
        answered = {m for m, gpu in self._gpus.items() if gpu.index in late - set(self._contexts.awaited)}
        uses = self._weigh(opened, minors | answered, due)
        if minors:
            cost = monotonic() - clock
            rest = min(_MOST_REST_SECONDS, max(_LEAST_REST_SECONDS, _REST_SHARE * cost))
            self._rest_until = monotonic() + rest
        news = {index: use for index, use in uses.items() if _is_news(use, self._told.get(index))}
        self._told = {**self._told, **news}
        return news

    def _scan(self, depth: Depth, *, turn: bool) -> None:
        """See who has what open, and what is new about it."""
        before = self._held
        try:
            self._held = self._holdings.scan(depth, turn=turn)
        except OSError:
            self._held = None
            return
        clock = monotonic()
        self._young = {pid: young for pid, young in self._young.items() if clock - young[0] < _YOUNG_SECONDS}
        for pid in self._holdings.newcomers:
            identity = self._identities.of(pid)
            if identity is not None and identity.age_seconds() < _YOUNG_SECONDS:
                self._young[pid] = (clock, identity.names)
        for minor, holders in self._held.items():
            known: Mapping[int, frozenset[int]] = {} if before is None else before[minor]
            fresh = [pid for pid, files in holders.items() if not files <= known.get(pid, frozenset())]
            for pid in fresh:
                self._doubts.saw(minor, clock, ours=self._judge.ours(pid))

    def _weigh(self, opened: Opened, minors: Collection[int], due: Sequence[int]) -> dict[int, Use]:
        """The uses of these GPUs, after a scan."""
        clock = monotonic()
        hidden = self.hidden is not None
        self._doubts.heard(opened.minors, opened.closed, clock, hidden=hidden, shut=opened.shut)
        unseen = self._doubts.advance(due, clock, hidden=hidden)
        return {
            self._gpus[minor].index: self._use(minor, hidden=hidden)._replace(
                opened_unseen=minor in unseen,
                suspects=tuple(names for _, names in self._young.values()) if minor in unseen else (),
            )
            for minor in minors
        }

    def _use(self, minor: int, *, hidden: bool) -> Use:
        load = self._contexts.load(self._gpus[minor].index)
        if self._held is None:
            return self._judge.use({}, load._replace(trouble="/proc cannot be read"), hidden=True)
        use = self._judge.use(self._held[minor], load, hidden=hidden)
        if hidden and use.unknown is None and not self._openings.watches(minor):
            return use._replace(unknown="neither who opens it nor who has it open can be seen")
        return use

    def _look_at_people(self, now: float, *, ask: bool) -> tuple[Presence, ...] | None:
        if self._people is None:
            return None
        if self._watchmen is not None:
            self._watchmen.read()
        answer = self._people.hints.descriptor
        if ask and answer is not None and self._bell is not None:
            self._bell.drop(answer)  # a question that is given up takes its descriptor along
        self._people_at = None
        return self._people.look(now, ask=ask)

    def _glance_at_people(
        self, rung: Collection[int], clock: float, now: float
    ) -> tuple[Presence, ...] | None:
        if self._people is None or self._watchmen is None or self._bell is None:
            return None
        if self._watchmen.descriptor in rung and self._watchmen.read():
            self._people_at = max(clock, self._people_seen_at + _PEOPLE_SECONDS)
            if self._watchmen.descriptor is not None:
                self._bell.mute(self._watchmen.descriptor)
        answer = self._people.hints.descriptor
        if answer is not None and answer in rung:
            self._bell.drop(answer)  # the last part of the answer closes it; the others add it again
            if self._people.hints.take():
                self._people_at = clock
        if self._people_at is None or clock < self._people_at:
            return None
        self._people_seen_at = clock
        self._watchmen.refresh()
        return self._look_at_people(now, ask=False)

    def _set_bell(self) -> None:
        """Ring when there is something to look into again."""
        bell = self._bell
        if bell is None:
            return
        clock = monotonic()
        watched = self._openings.descriptor
        if watched is not None and not self._pending.minors:
            bell.hear(watched)
        if self._watchmen is not None and self._watchmen.descriptor is not None and self._people_at is None:
            bell.hear(self._watchmen.descriptor)
        if self._people is not None and self._people.hints.descriptor is not None:
            bell.add(self._people.hints.descriptor)
        times = [
            self._rest_until if self._pending.minors or self._pending.missed else None,
            self._rested(self._doubts.next(hidden=self.hidden is not None)),
            self._rested(clock + _LATE_SECONDS if self._contexts.awaited else None),
            self._people_at,
        ]
        wanted = [time for time in times if time is not None]
        bell.ring_in(max(0.0, min(wanted) - clock) if wanted else None)

    def _rested(self, time: float | None) -> float | None:
        return None if time is None else max(time, self._rest_until)


def _is_news(use: Use, known: Use | None) -> bool:
    if known is None or use.opened_unseen:
        return True
    return (use.holders, use.unknown) != (known.holders, known.unknown)


def is_native(roots: Roots) -> bool:
    """Whether the driver's pids are those of this /proc: it is the machine's own."""
    return read_link(f"{roots.proc}/self/ns/pid") in (None, f"pid:[{INITIAL_PID_NAMESPACE}]")
