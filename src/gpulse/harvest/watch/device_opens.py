"""Track opens of the GPUs' device files: reported by inotify, and rechecked while no visible process explains them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import NamedTuple

from gpulse.harvest.watch.inotify import CLOSE, IGNORED, OPEN, OVERFLOW, Inotify, explain_inotify_error

VISIBLE_RECHECK_SECONDS = (0.01, 0.06, 0.3, 1.0, 3.0)
"""Delays after which an unexplained open is checked again. The kernel reports an open before the descriptor
can be seen, and on an overloaded machine much time may pass between the two."""
HIDDEN_RECHECK_SECONDS = (0.01, 0.1, 0.5, 1.0, 2.0)
"""The same where processes are hidden: until the driver lists the context of the process that opened the GPU."""
_EVENT_DELAY_SECONDS = 0.25
"""An event is read after the descriptor that it is about was seen."""
_OWN_START_SECONDS = 5.0
"""After one of our processes opened a GPU, opens are not attributed to others for this long: CUDA opens and closes
device files many times while it starts."""
_CALM_SECONDS = 1.0
"""An open this long after our last open, or after the last close, is not part of such a start: it is kept
until it may be reported."""
_MIN_RECHECK_SECONDS = 10.0
"""Least time between checks of a GPU that was opened and closed by a process that cannot be seen: a frequent monitor
must not cause frequent scans."""


class DeviceEvents(NamedTuple):
    """Opens and closes of the device files since the last read."""

    minors: Mapping[int, bool]
    """GPUs that were opened; True when no close came after the last open."""
    closed: frozenset[int] = frozenset()
    """GPUs of which a file was closed and none opened after that."""
    missed: bool = False
    """The kernel's event queue overflowed: any file may have been opened."""
    shut: frozenset[int] = frozenset()
    """GPUs of which a file was closed, even if it was opened again."""


class DeviceWatch:
    """Watches device files; a file that appears later is watched from the next `refresh` on."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        """Prepare to watch; `refresh` begins.

        Args:
            paths: The device files by their minor numbers.
        """
        self._paths = paths
        self._inotify: Inotify | None = None
        self._minors: dict[int, int] = {}
        """By the kernel's number of the watch."""
        self.trouble: str | None = "not watched yet"
        """Why not all of them are watched."""

    @property
    def descriptor(self) -> int | None:
        """Readable when something happened; None when nothing can be watched."""
        return None if self._inotify is None else self._inotify.descriptor

    def watches(self, minor: int) -> bool:
        """Return True while opens of this GPU are reported."""
        return minor in self._minors.values()

    def refresh(self) -> None:
        """Watch the files that exist now; a replaced file is watched anew."""
        if self._inotify is None:
            try:
                self._inotify = Inotify()
            except OSError as error:
                self.trouble = f"inotify: {explain_inotify_error(error)}"
                return
        watched: dict[int, int] = {}
        self.trouble = None
        for minor, path in self._paths.items():
            try:
                watched[self._inotify.watch(path, OPEN | CLOSE)] = minor
            except OSError as error:
                self.trouble = f"{path} cannot be watched: {explain_inotify_error(error)}"
        for watch in self._minors.keys() - watched.keys():
            self._inotify.forget(watch)
        self._minors = watched

    def read(self) -> DeviceEvents:
        """Return what happened since the last call."""
        last: dict[int, bool] = {}
        opened: set[int] = set()
        shut: set[int] = set()
        missed = False
        for event in () if self._inotify is None else self._inotify.read():
            minor = self._minors.get(event.watch)
            if event.mask & OVERFLOW:
                missed = True
            elif minor is None:
                continue
            elif event.mask & IGNORED:
                del self._minors[event.watch]
            elif event.mask & (OPEN | CLOSE):
                # The kernel keeps equal events in a row once: how many opens there were is not known.
                last[minor] = bool(event.mask & OPEN)
                (opened if event.mask & OPEN else shut).add(minor)
        return DeviceEvents(
            {minor: last[minor] for minor in opened},
            frozenset(minor for minor, is_open in last.items() if not is_open),
            missed,
            frozenset(shut),
        )

    def close(self) -> None:
        """Stop watching."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None


class UnexplainedOpen(NamedTuple):
    """A GPU that was opened by no process that can be seen."""

    since: float
    step: int
    is_open: bool
    """No close came after it."""
    reported: bool = False
    calm: bool = True
    """Nothing else happened to the GPU just before."""


class UnexplainedOpens:
    """GPUs whose last open no visible process explains; times are monotonic."""

    def __init__(self) -> None:
        self._unexplained: dict[int, UnexplainedOpen] = {}
        self._opened_at: dict[int, float] = {}
        self._own_at: dict[int, float] = {}
        self._shut_at: dict[int, float] = {}
        self._closed_at: dict[int, float] = {}

    def note_visible(self, minor: int, clock: float, *, ours: bool) -> None:
        """Note that a visible process has this GPU open under a new descriptor."""
        self._opened_at[minor] = clock
        if ours:
            self._own_at[minor] = clock
        entry = self._unexplained.get(minor)
        # After the last check a new descriptor cannot be the one that was reported.
        if entry is not None and entry.step < len(HIDDEN_RECHECK_SECONDS):
            del self._unexplained[minor]

    def note_events(
        self,
        opened: Mapping[int, bool],
        closed: Iterable[int],
        clock: float,
        *,
        hidden: bool,
        shut: Iterable[int] = (),
    ) -> None:
        """Record events of the device files, after a scan of the processes.

        Args:
            opened: The GPUs that were opened; True when no close came after it.
            closed: Those of which something was closed last.
            clock: The time.
            hidden: Some processes cannot be seen.
            shut: Those of which something was closed at all.
        """
        self._shut_at.update(dict.fromkeys(shut, clock))
        for minor in closed:
            if minor in self._unexplained and (
                not hidden or self._unexplained[minor].step >= len(HIDDEN_RECHECK_SECONDS)
            ):
                del self._unexplained[minor]  # that process has closed it
            elif minor in self._unexplained:
                self._unexplained[minor] = self._unexplained[minor]._replace(is_open=False)
        for minor, is_open in opened.items():
            last = max(self._own_at.get(minor, -inf), self._shut_at.get(minor, -inf))
            calm = clock - last >= _CALM_SECONDS
            if minor in self._unexplained:
                entry = self._unexplained[minor]
                if not entry.is_open:
                    self._unexplained[minor] = entry._replace(is_open=is_open, calm=calm)
            elif clock - self._opened_at.get(minor, -inf) < _EVENT_DELAY_SECONDS:
                continue
            elif is_open:
                self._unexplained[minor] = UnexplainedOpen(clock, 0, is_open, calm=calm)
            elif hidden and clock - self._closed_at.get(minor, -inf) >= _MIN_RECHECK_SECONDS:
                self._closed_at[minor] = clock
                self._unexplained[minor] = UnexplainedOpen(clock, 0, is_open)

    def due(self, clock: float, *, hidden: bool) -> list[int]:
        """Return the GPUs to check again now."""
        return [
            minor
            for minor, entry in self._unexplained.items()
            if self._at(minor, entry, hidden=hidden) <= clock
        ]

    def next(self, *, hidden: bool) -> float | None:
        """Return when the next check is due."""
        times = (self._at(minor, entry, hidden=hidden) for minor, entry in self._unexplained.items())
        return min(times, default=None)

    def is_deep(self, minors: Iterable[int], *, hidden: bool) -> bool:
        """True when it is time to read every descriptor for one of these, which is done once.

        Where processes are hidden there are few to read, and it is done before another user is suspected.
        """
        step = 0 if hidden else 1
        return any(self._unexplained[minor].step == step for minor in minors if minor in self._unexplained)

    def advance(self, minors: Iterable[int], clock: float, *, hidden: bool) -> set[int]:
        """Record that these were checked again; return those opened by a hidden process, each once."""
        unseen: set[int] = set()
        for minor in minors:
            entry = self._unexplained.get(minor)
            if entry is None:
                continue
            starting = clock - self._own_at.get(minor, -inf) < _OWN_START_SECONDS
            if hidden and entry.is_open and not entry.reported and not starting:
                unseen.add(minor)
                entry = entry._replace(reported=True)
            self._unexplained[minor] = entry._replace(step=entry.step + 1)
            waits = hidden and entry.is_open and entry.calm and not entry.reported
            if (
                entry.step + 1 >= len(HIDDEN_RECHECK_SECONDS if hidden else VISIBLE_RECHECK_SECONDS)
                and not waits
            ):
                del self._unexplained[minor]
        return unseen

    def _at(self, minor: int, entry: UnexplainedOpen, *, hidden: bool) -> float:
        """Return when to check it again; after the last check it waits until it may be reported."""
        steps = HIDDEN_RECHECK_SECONDS if hidden else VISIBLE_RECHECK_SECONDS
        if entry.step < len(steps):
            return entry.since + steps[entry.step]
        return self._own_at.get(minor, -inf) + _OWN_START_SECONDS
