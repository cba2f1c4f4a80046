"""Detect people who work at the machine: terminals with their idle time, and desktop sessions from logind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Literal, NamedTuple

from gpulse.harvest.events import UserPresence
from gpulse.harvest.watch.inotify import ACCESS, CREATE, DIRECTORY, MOVED_TO, Inotify
from gpulse.sources.process_owners import user_name
from gpulse.sources.procfs import Roots, number, read_bytes, text

_CONSOLE = re.compile(r"tty[0-9]+")
_ROOT = 0
UNKNOWN_PERSON = "somebody"
"""The user of a terminal or desktop that cannot be checked."""
_GRAPHICAL = frozenset({"x11", "wayland", "mir"})
_LOGINCTL = "/usr/bin/loginctl"
"""Where it is when PATH does not have it."""
_LOGINCTL_ARGUMENTS = (
    "show-session",
    "--property=Id",
    "--property=IdleHint",
    "--property=IdleSinceHint",
    "--",
)
_ANSWER_SECONDS = 5.0
_MAX_ANSWER_BYTES = 1 << 16


class ArrivalWatch:
    """Watches for people who arrive: a new terminal, a keystroke that was read, a new session."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._inotify: Inotify | None = None
        self.refresh()

    @property
    def descriptor(self) -> int | None:
        """Readable when somebody arrived; None when that cannot be watched."""
        return None if self._inotify is None else self._inotify.descriptor

    def refresh(self) -> None:
        """Watch all terminals and sessions that exist now; those that cannot be watched are only polled."""
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
            self._watch_each(self._inotify, _list_terminals(self._roots))

    def _watch_each(self, inotify: Inotify, terminals: Iterable[str]) -> None:
        """Watch each terminal: newer kernels do not report reads of devices to a watch on their directory."""
        for name in terminals:
            with suppress(OSError):
                inotify.watch(f"{self._roots.dev}/{name}", ACCESS)

    def read(self) -> bool:
        """Return True when somebody arrived since the last call; our own checks do not count."""
        came = False
        while self._inotify is not None and (events := self._inotify.read()):
            came = came or any(not event.mask & DIRECTORY for event in events)
        return came

    def close(self) -> None:
        """Stop watching."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None


class PresenceDetector:
    """Finds the people who work at the machine."""

    def __init__(self, roots: Roots, hints: IdleHints | None = None) -> None:
        self._roots = roots
        self.hints = hints or IdleHints()

    def look(self, now: float, *, ask: bool) -> tuple[UserPresence, ...]:
        """Return all people who are present, and `UNKNOWN_PERSON` for each terminal or desktop that cannot be checked.

        Args:
            now: Epoch seconds.
            ask: Query the idle state of desktops again; a later call returns the result.
        """
        found: list[Desktop] = []
        unseen: list[UserPresence] = []
        try:
            found = find_desktops(self._roots)
        except OSError as error:
            unseen.append(_unknown_presence("desktop", error))
        if ask:
            self.hints.ask([desktop.id for desktop in found])
        shown = {desktop.terminal for desktop in found}
        return (*self._at_terminals(now, shown), *self.hints.presences(found, now), *unseen)

    def close(self) -> None:
        """Abandon a pending query."""
        self.hints.close()

    def _at_terminals(self, now: float, shown: Collection[str | None]) -> Iterator[UserPresence]:
        try:
            names = _list_terminals(self._roots)
        except OSError as error:
            yield _unknown_presence("terminal", error)
            return
        for name in names:
            try:
                found = os.stat(f"{self._roots.dev}/{name}")
            except FileNotFoundError:  # closed meanwhile
                continue
            except OSError as error:
                yield _unknown_presence("terminal", error)
                continue
            # A console without a login belongs to root and has had no input.
            is_waiting = name.startswith("tty") and found.st_uid == _ROOT and found.st_atime <= found.st_ctime
            if name not in shown and not is_waiting:
                idle_seconds = max(0.0, now - found.st_atime)
                yield UserPresence(user_name(found.st_uid) or str(found.st_uid), name, idle_seconds)


def _unknown_presence(kind: Literal["terminal", "desktop"], error: OSError) -> UserPresence:
    where = f"a {kind} ({error.filename}: {error.strerror})"
    return UserPresence(UNKNOWN_PERSON, where, None, kind)


def _list_terminals(roots: Roots) -> list[str]:
    """`pts/3` and `tty1`.

    Raises:
        OSError: They cannot be listed.
    """
    ptys = (name for name in os.listdir(f"{roots.dev}/pts") if name.isdecimal())
    consoles = (name for name in os.listdir(roots.dev) if _CONSOLE.fullmatch(name))
    return [*(f"pts/{number}" for number in sorted(ptys, key=int)), *sorted(consoles)]


class Desktop(NamedTuple):
    """A graphical session of a user."""

    id: str
    user: str
    seat: str
    terminal: str | None
    """The virtual terminal that shows it, such as `tty2`."""


class IdleHint(NamedTuple):
    """Idle state of the person at a desktop, as the desktop reports it."""

    idle: bool
    since: float | None
    """Epoch seconds."""


def is_logind_available(roots: Roots) -> bool:
    """Return whether systemd's login manager runs here."""
    return os.path.isdir(f"{roots.run}/systemd/sessions")


def find_desktops(roots: Roots) -> list[Desktop]:
    """Return the graphical sessions that are shown now, none without a login manager.

    Raises:
        OSError: They cannot be read.
    """
    folder = f"{roots.run}/systemd/sessions"
    # Beside a session lies a pipe, ID.ref, which must not be opened.
    names = sorted(filter(str.isalnum, os.listdir(folder))) if is_logind_available(roots) else []
    found = (_parse_desktop(name, parse_session(_read_session(f"{folder}/{name}"))) for name in names)
    return [desktop for desktop in found if desktop is not None]


def _read_session(path: str) -> bytes:
    try:
        return read_bytes(path)
    except FileNotFoundError:  # closed meanwhile
        return b""


def _parse_desktop(name: str, session: Mapping[str, str]) -> Desktop | None:
    is_person = session.get("CLASS", "").startswith("user") and session.get("ACTIVE") == "1"
    user = session.get("USER") or session.get("UID")
    if not is_person or not user or session.get("TYPE") not in _GRAPHICAL:
        return None
    seat = session.get("SEAT") or session.get("DISPLAY") or f"session {name}"
    shown = session.get("VTNR", "")
    return Desktop(name, user, seat, f"tty{shown}" if shown.isdecimal() and shown != "0" else None)


def parse_session(data: bytes) -> dict[str, str]:
    """Return the pairs of lines such as NAME=value."""
    pairs = (text(line).partition("=") for line in data.splitlines())
    return {name: value for name, is_pair, value in pairs if is_pair}


def parse_hints(data: bytes) -> dict[str, IdleHint]:
    """Return the answer of `loginctl show-session`, by session."""
    hints: dict[str, IdleHint] = {}
    for block in data.split(b"\n\n"):
        answer = parse_session(block)
        if answer.get("Id") and answer.get("IdleHint") in ("yes", "no"):
            microseconds = number(answer.get("IdleSinceHint", "").encode())
            since = microseconds / 1e6 if microseconds else None
            hints[answer["Id"]] = IdleHint(answer["IdleHint"] == "yes", since)
    return hints


class IdleHints:
    """Asks the login manager whether people at desktops are idle, without waiting for the answer."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        """Prepare to ask.

        Args:
            command: Answers when the names of sessions are added; None: `loginctl`, as it is found now.
        """
        program = os.path.abspath(shutil.which("loginctl") or _LOGINCTL)
        self._command = (program, *_LOGINCTL_ARGUMENTS) if command is None else tuple(command)
        self._child: subprocess.Popen[bytes] | None = None
        self._asked_at = 0.0
        self._answer = b""
        self._hints: dict[str, IdleHint] = {}

    @property
    def descriptor(self) -> int | None:
        """Readable when the answer is there; None while nothing was asked."""
        return None if self._child is None or self._child.stdout is None else self._child.stdout.fileno()

    def ask(self, sessions: Sequence[str]) -> None:
        """Query these sessions, unless a query is pending; one without an answer is abandoned after a while."""
        self.take()
        if self._child is not None:
            if monotonic() - self._asked_at < _ANSWER_SECONDS:
                return
            self._hints = {}
            self._end()
        if not sessions:
            self._hints = {}
            return
        self._asked_at = monotonic()
        self._answer = b""
        try:
            self._child = subprocess.Popen(  # noqa: S603  a fixed command; names of sessions are letters and digits
                [*self._command, *sessions],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,  # in our session: a child in another one passes for a program's
            )
        except OSError:
            self._hints = {}
        if self.descriptor is not None:
            os.set_blocking(self.descriptor, False)

    def take(self) -> bool:
        """Read what there is of the answer; True when that was all."""
        if self.descriptor is None:
            return True
        while True:
            try:
                part = os.read(self.descriptor, _MAX_ANSWER_BYTES)
            except BlockingIOError:
                return False
            self._answer += part
            if not part or len(self._answer) > _MAX_ANSWER_BYTES:
                self._hints = parse_hints(self._answer)
                self._end()
                return True

    def presences(self, found: Sequence[Desktop], now: float) -> Iterator[UserPresence]:
        """Return the people at these desktops."""
        for desktop in found:
            hint = self._hints.get(desktop.id)
            yield UserPresence(desktop.user, desktop.seat, _idle_seconds(hint, now), "desktop")

    def close(self) -> None:
        """Give up the question that is out."""
        self._end()

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with suppress(ProcessLookupError):
            child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def _idle_seconds(hint: IdleHint | None, now: float) -> float | None:
    if hint is None:
        return None
    if not hint.idle:
        return 0.0
    return None if hint.since is None else max(0.0, now - hint.since)
