"""Watch the GPUs and the people at the machine: everything at intervals, one GPU as soon as it is opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from time import monotonic

from gpulse.harvest.events import GpuHolder, MachineObservation, ObservedUse, UserPresence
from gpulse.harvest.settings import HarvestableGpu
from gpulse.harvest.watch.device_opens import DeviceEvents, DeviceWatch, UnexplainedOpens
from gpulse.harvest.watch.gpu_contexts import ContextReader
from gpulse.harvest.watch.gpu_holders import (
    DescriptorScanner,
    HeldGpus,
    HolderIdentities,
    ScanDepth,
    UseAnalyzer,
)
from gpulse.harvest.watch.inotify import Wakeup, explain_inotify_error
from gpulse.harvest.watch.user_presence import ArrivalWatch, PresenceDetector
from gpulse.sources.doctor_checks import INITIAL_PID_NAMESPACE
from gpulse.sources.gpu_claims import find_claimant
from gpulse.sources.nvml.read_timing import DriverTimeouts
from gpulse.sources.procfs import Roots, read_link

_LOOK_PATIENCE_SECONDS = 0.25
_GLANCE_PATIENCE_SECONDS = 0.05
"""How long to wait for the driver; later results are used at the next check."""
_LATE_SECONDS = 0.25
_REST_FACTOR = 4.0
_MIN_REST_SECONDS = 0.02
_MAX_REST_SECONDS = 0.25
"""After a glance the next one waits this many times as long as it took, within these bounds."""
_PEOPLE_SECONDS = 1.0
_YOUNG_SECONDS = 3.0
"""A program that was started this recently may be the one that opened a GPU."""


class Watcher:
    """Finds the users of the GPUs and the people who work at the machine."""

    def __init__(
        self,
        gpus: Sequence[HarvestableGpu],
        *,
        is_ours: Callable[[int], bool],
        roots: Roots = Roots(),  # noqa: B008  frozen
        people: bool = False,
        inotify: bool = True,
        timeouts: DriverTimeouts | None = None,
    ) -> None:
        """Begin to watch.

        Args:
            gpus: The GPUs to watch.
            is_ours: Whether a process was started by us, whatever became of it since.
            roots: Where /proc, /dev and /run are.
            people: Also watch people at the machine.
            inotify: Get opens reported; without it everything waits for the next look.
            timeouts: How long to wait for the driver.
        """
        self._gpus = {gpu.minor: gpu for gpu in gpus}
        self._scanner = DescriptorScanner(roots, self._gpus)
        self._identities = HolderIdentities(roots)
        self._native = is_native(roots)
        self._analyzer = UseAnalyzer(self._identities, is_ours, native=self._native)
        self._contexts = ContextReader(gpus, timeouts)
        self._device_watch = DeviceWatch({minor: f"{roots.dev}/nvidia{minor}" for minor in self._gpus})
        self._roots = roots
        self._people: PresenceDetector | None = None
        self._people_watch: ArrivalWatch | None = None
        self._wakeup: Wakeup | None = None
        self._unexplained = UnexplainedOpens()
        self._held: HeldGpus | None = None
        """None: /proc cannot be listed, or was not yet."""
        self._young: dict[int, tuple[float, tuple[str, ...]]] = {}
        """New processes whose open files cannot be read: when they were seen, and their names."""
        self._reported: dict[int, ObservedUse] = {}
        self._pending = DeviceEvents({})
        self._rest_until = 0.0
        self._closed = False
        self._people_due: float | None = None
        """When to check for people again, because somebody arrived."""
        self._people_looked_at = -inf
        self.inotify_problem: str | None = "inotify is disabled"
        """Why opens are noticed only at the next check; None when they are noticed at once."""
        if inotify:
            self._open_wakeup()
        if people:
            self.watch_people(wanted=True)

    @property
    def descriptor(self) -> int | None:
        """Readable when `glance` should be called; None when opens are not reported."""
        return None if self._wakeup is None else self._wakeup.descriptor

    @property
    def hidden(self) -> str | None:
        """Why the open files of some processes cannot be read; None when all can."""
        if not self._native:
            return "This is a container, so processes outside the container cannot be seen"
        if not self._scanner.sees_init:
            return "/proc hides other users' processes (hidepid)"
        count = self._scanner.refused
        if count:
            return f"The open files of {count} {'process' if count == 1 else 'processes'} of other users cannot be read"
        return None

    def look(self, now: float) -> MachineObservation:
        """Look at everything; `now` is in epoch seconds."""
        indices = [gpu.index for gpu in self._gpus.values()]
        self._contexts.ask(indices)
        self._refresh()
        opened = self._merge(self._device_watch.read())
        clock = monotonic()
        due = self._unexplained.due(clock, hidden=self.hidden is not None)
        deep = opened.missed or self._unexplained.is_deep(due, hidden=self.hidden is not None)
        calm: ScanDepth = "quick" if opened.minors or due else "calm"
        self._scan("whole" if deep else calm if self.inotify_problem is None else "polled", turn=True)
        self._contexts.wait(_LOOK_PATIENCE_SECONDS)
        uses = self._assess(opened, self._gpus, due)
        self._reported = uses
        self._identities.keep(holder.pid for use in uses.values() for holder in use.holders)
        people = self._look_at_people(now, ask=True)
        self._set_wakeup()
        return MachineObservation(uses, people)

    def glance(self, now: float) -> MachineObservation | None:
        """Look at what the descriptor became readable for; None when it was nothing of interest."""
        if self._wakeup is None:
            return None
        woken = self._wakeup.woken()
        clock = monotonic()
        uses = self._glance_at_gpus(woken, clock)
        people = self._glance_at_people(woken, clock, now)
        self._set_wakeup()
        return MachineObservation(uses, people) if uses or people is not None else None

    def watch_people(self, wanted: bool) -> None:
        """Start or stop watching people at the machine; the GPUs are watched as before."""
        if wanted and self._people is None:
            self._people = PresenceDetector(self._roots)
            self._people_watch = None if self._wakeup is None else ArrivalWatch(self._roots)
            self._refresh_people()
        elif not wanted:
            self._stop_watching_people()
        self._set_wakeup()

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._stop_watching_people()
        if self._wakeup is not None:
            self._wakeup.close()
            self._wakeup = None
        self._device_watch.close()
        self._contexts.close()

    def _stop_watching_people(self) -> None:
        descriptors = (
            None if self._people_watch is None else self._people_watch.descriptor,
            None if self._people is None else self._people.hints.descriptor,
        )
        for descriptor in descriptors:
            if descriptor is not None and self._wakeup is not None:
                self._wakeup.drop(descriptor)
        if self._people_watch is not None:
            self._people_watch.close()
        if self._people is not None:
            self._people.close()
        self._people = self._people_watch = self._people_due = None

    def _open_wakeup(self) -> None:
        try:
            self._wakeup = Wakeup()
        except OSError as error:
            self.inotify_problem = explain_inotify_error(error)
            return
        self._refresh()

    def _refresh(self) -> None:
        """Watch what came since the last look."""
        if self._wakeup is None:
            return
        self._device_watch.refresh()
        self.inotify_problem = self._device_watch.trouble
        if self._device_watch.descriptor is not None:
            self._wakeup.add(self._device_watch.descriptor)
        self._refresh_people()

    def _refresh_people(self) -> None:
        if self._wakeup is None or self._people_watch is None:
            return
        self._people_watch.refresh()
        if self._people_watch.descriptor is not None:
            self._wakeup.add(self._people_watch.descriptor)

    def _merge(self, opened: DeviceEvents) -> DeviceEvents:
        """Return these events together with those that were left for later."""
        earlier, self._pending = self._pending, DeviceEvents({})
        kept = {minor: is_open and minor not in opened.closed for minor, is_open in earlier.minors.items()}
        return DeviceEvents(
            {**kept, **opened.minors},
            (earlier.closed - opened.minors.keys()) | opened.closed,
            earlier.missed or opened.missed,
            earlier.shut | opened.shut,
        )

    def _glance_at_gpus(self, woken: Collection[int], clock: float) -> dict[int, ObservedUse]:
        hidden = self.hidden is not None
        if self._device_watch.descriptor in woken:
            self._pending = self._merge(self._device_watch.read())
        due = self._unexplained.due(clock, hidden=hidden)
        late = {index for index in self._contexts.awaited if self._reported.get(index) is not None}
        if clock < self._rest_until:
            if (
                self._pending.minors
                and self._device_watch.descriptor is not None
                and self._wakeup is not None
            ):
                self._wakeup.mute(self._device_watch.descriptor)
            return {}
        opened, self._pending = self._pending, DeviceEvents({})
        minors = set(self._gpus) if opened.missed else {*opened.minors, *due}
        if minors:
            self._contexts.ask(self._gpus[minor].index for minor in minors)
            deep = opened.missed or self._unexplained.is_deep(due, hidden=hidden)
            self._scan("whole" if deep else "quick", turn=False)
        elif opened.closed:
            self._unexplained.note_events({}, opened.closed, clock, hidden=hidden, shut=opened.shut)
        if not minors and not late:
            return {}
        self._contexts.wait(_GLANCE_PATIENCE_SECONDS if minors else 0.0)
        answered = {m for m, gpu in self._gpus.items() if gpu.index in late - set(self._contexts.awaited)}
        uses = self._assess(opened, minors | answered, due)
        if minors:
            cost = monotonic() - clock
            rest = min(_MAX_REST_SECONDS, max(_MIN_REST_SECONDS, _REST_FACTOR * cost))
            self._rest_until = monotonic() + rest
        changed = {index: use for index, use in uses.items() if _has_changed(use, self._reported.get(index))}
        self._reported = {**self._reported, **changed}
        return changed

    def _scan(self, depth: ScanDepth, *, turn: bool) -> None:
        """Scan the processes that have GPUs open, and record new ones."""
        before = self._held
        try:
            self._held = self._scanner.scan(depth, turn=turn)
        except OSError:
            self._held = None
            return
        clock = monotonic()
        self._young = {pid: young for pid, young in self._young.items() if clock - young[0] < _YOUNG_SECONDS}
        for pid in self._scanner.newcomers:
            identity = self._identities.of(pid)
            if identity is not None and identity.age_seconds() < _YOUNG_SECONDS:
                self._young[pid] = (clock, identity.names)
        for minor, holders in self._held.items():
            known: Mapping[int, frozenset[int]] = {} if before is None else before[minor]
            fresh = [pid for pid, files in holders.items() if not files <= known.get(pid, frozenset())]
            for pid in fresh:
                self._unexplained.note_visible(minor, clock, ours=self._analyzer.ours(pid))

    def _assess(
        self, opened: DeviceEvents, minors: Collection[int], due: Sequence[int]
    ) -> dict[int, ObservedUse]:
        """Return the uses of these GPUs, after a scan."""
        clock = monotonic()
        hidden = self.hidden is not None
        self._unexplained.note_events(opened.minors, opened.closed, clock, hidden=hidden, shut=opened.shut)
        unseen = self._unexplained.advance(due, clock, hidden=hidden)
        return {
            self._gpus[minor].index: self._use(minor, hidden=hidden)._replace(
                opened_unseen=minor in unseen,
                suspects=tuple(names for _, names in self._young.values()) if minor in unseen else (),
            )
            for minor in minors
        }

    def _use(self, minor: int, *, hidden: bool) -> ObservedUse:
        load = self._contexts.load(self._gpus[minor].index)
        if self._held is None:
            return self._analyzer.use({}, load._replace(trouble="/proc cannot be read"), hidden=True)
        use = self._with_claim(self._analyzer.use(self._held[minor], load, hidden=hidden), minor)
        if hidden and use.unknown is None and not self._device_watch.watches(minor):
            return use._replace(unknown="harvest cannot see who opens the GPU or has it open")
        return use

    def _with_claim(self, use: ObservedUse, minor: int) -> ObservedUse:
        """Return a use with the process that has claimed the GPU (`gpulse wait`), even before it uses it."""
        claimant = find_claimant(self._gpus[minor].uuid, self._roots)
        if claimant is None:
            return use
        identity = None if claimant.pid is None else self._identities.of(claimant.pid)
        holder = GpuHolder(
            claimant.pid or 0,
            None if identity is None else identity.start_ticks,
            ("gpulse wait",),
            None if identity is None else identity.user,
            working=True,
        )
        others = (one for one in use.holders if one.pid != holder.pid)
        return use._replace(holders=(*others, holder))

    def _look_at_people(self, now: float, *, ask: bool) -> tuple[UserPresence, ...] | None:
        if self._people is None:
            return None
        if self._people_watch is not None:
            self._people_watch.read()
        answer = self._people.hints.descriptor
        if ask and answer is not None and self._wakeup is not None:
            self._wakeup.drop(answer)  # an abandoned query closes its descriptor
        self._people_due = None
        return self._people.look(now, ask=ask)

    def _glance_at_people(
        self, woken: Collection[int], clock: float, now: float
    ) -> tuple[UserPresence, ...] | None:
        if self._people is None or self._people_watch is None or self._wakeup is None:
            return None
        if self._people_watch.descriptor in woken and self._people_watch.read():
            self._people_due = max(clock, self._people_looked_at + _PEOPLE_SECONDS)
            if self._people_watch.descriptor is not None:
                self._wakeup.mute(self._people_watch.descriptor)
        answer = self._people.hints.descriptor
        if answer is not None and answer in woken:
            self._wakeup.drop(answer)  # the last part of the answer closes it; the others add it again
            if self._people.hints.take():
                self._people_due = clock
        if self._people_due is None or clock < self._people_due:
            return None
        self._people_looked_at = clock
        self._people_watch.refresh()
        return self._look_at_people(now, ask=False)

    def _set_wakeup(self) -> None:
        """Set the timer to when something has to be checked again."""
        wakeup = self._wakeup
        if wakeup is None:
            return
        clock = monotonic()
        watched = self._device_watch.descriptor
        if watched is not None and not self._pending.minors:
            wakeup.unmute(watched)
        if (
            self._people_watch is not None
            and self._people_watch.descriptor is not None
            and self._people_due is None
        ):
            wakeup.unmute(self._people_watch.descriptor)
        if self._people is not None and self._people.hints.descriptor is not None:
            wakeup.add(self._people.hints.descriptor)
        times = [
            self._rest_until if self._pending.minors or self._pending.missed else None,
            self._after_rest(self._unexplained.next(hidden=self.hidden is not None)),
            self._after_rest(clock + _LATE_SECONDS if self._contexts.awaited else None),
            self._people_due,
        ]
        wanted = [time for time in times if time is not None]
        wakeup.wake_in(max(0.0, min(wanted) - clock) if wanted else None)

    def _after_rest(self, time: float | None) -> float | None:
        return None if time is None else max(time, self._rest_until)


def _has_changed(use: ObservedUse, known: ObservedUse | None) -> bool:
    if known is None or use.opened_unseen:
        return True
    return (use.holders, use.unknown) != (known.holders, known.unknown)


def is_native(roots: Roots) -> bool:
    """Return whether the driver's PIDs are those of this /proc, which is then the machine's own."""
    return read_link(f"{roots.proc}/self/ns/pid") in (None, f"pid:[{INITIAL_PID_NAMESPACE}]")
