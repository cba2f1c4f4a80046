"""Who is at the machine: terminals and how long ago somebody typed there, desktops."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import Literal

from gpulse.harvest.sight.inotify import ACCESS, CREATE, DIRECTORY, MOVED_TO, Inotify
from gpulse.harvest.sight.logind import Desktop, IdleHints, desktops
from gpulse.harvest.sight.seen import Presence
from gpulse.sources.owners import user_name
from gpulse.sources.procfs import Roots

_CONSOLE = re.compile(r"tty[0-9]+")
_ROOT = 0
SOMEBODY = "somebody"
"""Who may be where nobody can look."""


class Watchmen:
    """Notices that somebody came: a new terminal, a keystroke that was read, a new session."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._inotify: Inotify | None = None
        self.refresh()

    @property
    def descriptor(self) -> int | None:
        """Readable when somebody came; None when that cannot be watched."""
        return None if self._inotify is None else self._inotify.descriptor

    def refresh(self) -> None:
        """Watch what is there now; what may not be watched is only looked at."""
        if self._inotify is None:
            try:
                self._inotify = Inotify()
            except OSError:
                return
        with suppress(OSError):
            self._inotify.watch(f"{self._roots.dev}/pts", CREATE | ACCESS)
        with suppress(OSError):
            self._inotify.watch(f"{self._roots.run}/systemd/sessions", CREATE | MOVED_TO)
        with suppress(OSError):
            self._watch_each(self._inotify, _terminals(self._roots))

    def _watch_each(self, inotify: Inotify, terminals: Iterable[str]) -> None:
        """Newer kernels do not tell a directory of reads from the devices in it."""
        for name in terminals:
            with suppress(OSError):
                inotify.watch(f"{self._roots.dev}/{name}", ACCESS)

    def read(self) -> bool:
        """True when somebody came since the last call; that we looked ourselves does not count."""
        came = False
        while self._inotify is not None and (events := self._inotify.read()):
            came = came or any(not event.mask & DIRECTORY for event in events)
        return came

    def close(self) -> None:
        """Watch nothing any more."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None


class People:
    """Looks at who is at the machine."""

    def __init__(self, roots: Roots, hints: IdleHints | None = None) -> None:
        self._roots = roots
        self.hints = hints or IdleHints()

    def look(self, now: float, *, ask: bool) -> tuple[Presence, ...]:
        """Everybody who is there, and somebody for every place that cannot be looked at.

        Args:
            now: Epoch seconds.
            ask: Ask desktops anew whether they are idle; the answer is in a later look.
        """
        found: list[Desktop] = []
        unseen: list[Presence] = []
        try:
            found = desktops(self._roots)
        except OSError as error:
            unseen.append(_somebody("desktop", error))
        if ask:
            self.hints.ask([desktop.id for desktop in found])
        shown = {desktop.terminal for desktop in found}
        return (*self._at_terminals(now, shown), *self.hints.presences(found, now), *unseen)

    def close(self) -> None:
        """Give up what is asked."""
        self.hints.close()

    def _at_terminals(self, now: float, shown: Collection[str | None]) -> Iterator[Presence]:
        try:
            names = _terminals(self._roots)
        except OSError as error:
            yield _somebody("terminal", error)
            return
        for name in names:
            try:
                found = os.stat(f"{self._roots.dev}/{name}")
            except FileNotFoundError:  # closed meanwhile
                continue
            except OSError as error:
                yield _somebody("terminal", error)
                continue
            # A console at which nobody is logged in is root's, and nobody has typed there.
            is_waiting = name.startswith("tty") and found.st_uid == _ROOT and found.st_atime <= found.st_ctime
            if name not in shown and not is_waiting:
                idle_seconds = max(0.0, now - found.st_atime)
                yield Presence(user_name(found.st_uid) or str(found.st_uid), name, idle_seconds)


def _somebody(kind: Literal["terminal", "desktop"], error: OSError) -> Presence:
    where = f"a {kind} that cannot be looked at ({error.filename}: {error.strerror})"
    return Presence(SOMEBODY, where, None, kind)


def _terminals(roots: Roots) -> list[str]:
    """`pts/3` and `tty1`.

    Raises:
        OSError: It cannot be told which there are.
    """
    ptys = (name for name in os.listdir(f"{roots.dev}/pts") if name.isdecimal())
    consoles = (name for name in os.listdir(roots.dev) if _CONSOLE.fullmatch(name))
    return [*(f"pts/{number}" for number in sorted(ptys, key=int)), *sorted(consoles)]
