"""Opens of the GPUs' device files, known the moment they happen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpulse.harvest.sight.inotify import CLOSE, IGNORED, OPEN, OVERFLOW, Inotify, reason


class Opened(NamedTuple):
    """What happened to the device files since they were last asked about."""

    minors: Mapping[int, bool]
    """Those that were opened; True when no close came after the last open."""
    closed: frozenset[int] = frozenset()
    """Those of which something was closed, and nothing opened after it."""
    missed: bool = False
    """More happened than the kernel kept: anything may have been opened."""
    shut: frozenset[int] = frozenset()
    """Those of which something was closed, whatever came after it."""


class Openings:
    """Watches device files; one that is not there yet, or comes back, is watched from the next `refresh` on."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        """Prepare to watch; `refresh` begins.

        Args:
            paths: The device files by their minor numbers.
        """
        self._paths = paths
        self._inotify: Inotify | None = None
        self._minors: dict[int, int] = {}
        """By the kernel's number of the watch."""
        self.trouble: str | None = "they are not watched yet"
        """Why not all of them are watched."""

    @property
    def descriptor(self) -> int | None:
        """Readable when something happened; None when nothing can be watched."""
        return None if self._inotify is None else self._inotify.descriptor

    def watches(self, minor: int) -> bool:
        """True while opens of this GPU are told."""
        return minor in self._minors.values()

    def refresh(self) -> None:
        """Watch what is there now; a file that was replaced by another is another."""
        if self._inotify is None:
            try:
                self._inotify = Inotify()
            except OSError as error:
                self.trouble = f"inotify: {reason(error)}"
                return
        watched: dict[int, int] = {}
        self.trouble = None
        for minor, path in self._paths.items():
            try:
                watched[self._inotify.watch(path, OPEN | CLOSE)] = minor
            except OSError as error:
                self.trouble = f"{path} cannot be watched: {reason(error)}"
        for watch in self._minors.keys() - watched.keys():
            self._inotify.forget(watch)
        self._minors = watched

    def read(self) -> Opened:
        """What happened since the last call."""
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
        return Opened(
            {minor: last[minor] for minor in opened},
            frozenset(minor for minor, is_open in last.items() if not is_open),
            missed,
            frozenset(shut),
        )

    def close(self) -> None:
        """Watch nothing any more."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
