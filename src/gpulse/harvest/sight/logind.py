"""Who is logged in at a screen, from what systemd's login manager keeps in /run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

from gpulse.harvest.sight.seen import Presence
from gpulse.sources.procfs import Roots, number, read_bytes, text

_GRAPHICAL = frozenset({"x11", "wayland", "mir"})
_PROGRAM = "/usr/bin/loginctl"
"""Where it is asked for when it is not among the user's programs."""
_QUESTION = ("show-session", "--property=Id", "--property=IdleHint", "--property=IdleSinceHint", "--")
_PATIENCE_SECONDS = 5.0
_MOST_ANSWER = 1 << 16


class Desktop(NamedTuple):
    """A graphical session of somebody."""

    id: str
    user: str
    seat: str
    terminal: str | None
    """The virtual terminal that shows it, such as `tty2`."""


class Hint(NamedTuple):
    """What a desktop says of the person before it."""

    idle: bool
    since: float | None
    """Epoch seconds."""


def is_available(roots: Roots) -> bool:
    """Whether there is a login manager here."""
    return os.path.isdir(f"{roots.run}/systemd/sessions")


def desktops(roots: Roots) -> list[Desktop]:
    """The graphical sessions that are shown now, none where there is no login manager.

    Raises:
        OSError: They may not be looked at.
    """
    folder = f"{roots.run}/systemd/sessions"
    # Beside a session lies a pipe, ID.ref, which must not be opened.
    names = sorted(filter(str.isalnum, os.listdir(folder))) if is_available(roots) else []
    found = (_desktop(name, parse_session(_session(f"{folder}/{name}"))) for name in names)
    return [desktop for desktop in found if desktop is not None]


def _session(path: str) -> bytes:
    try:
        return read_bytes(path)
    except FileNotFoundError:  # closed meanwhile
        return b""


def _desktop(name: str, session: Mapping[str, str]) -> Desktop | None:
    is_person = session.get("CLASS", "").startswith("user") and session.get("ACTIVE") == "1"
    user = session.get("USER") or session.get("UID")
    if not is_person or not user or session.get("TYPE") not in _GRAPHICAL:
        return None
    seat = session.get("SEAT") or session.get("DISPLAY") or f"session {name}"
    shown = session.get("VTNR", "")
    return Desktop(name, user, seat, f"tty{shown}" if shown.isdecimal() and shown != "0" else None)


def parse_session(data: bytes) -> dict[str, str]:
    """Lines of NAME=value."""
    pairs = (text(line).partition("=") for line in data.splitlines())
    return {name: value for name, is_pair, value in pairs if is_pair}


def parse_hints(data: bytes) -> dict[str, Hint]:
    """The answer of `loginctl show-session`, by session."""
    hints: dict[str, Hint] = {}
    for block in data.split(b"\n\n"):
        answer = parse_session(block)
        if answer.get("Id") and answer.get("IdleHint") in ("yes", "no"):
            microseconds = number(answer.get("IdleSinceHint", "").encode())
            since = microseconds / 1e6 if microseconds else None
            hints[answer["Id"]] = Hint(answer["IdleHint"] == "yes", since)
    return hints


class IdleHints:
    """Asks the login manager whether people at desktops are idle, without waiting for the answer."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        """Prepare to ask.

        Args:
            command: Answers when the names of sessions are added; None: `loginctl`, as it is found now.
        """
        program = os.path.abspath(shutil.which("loginctl") or _PROGRAM)
        self._command = (program, *_QUESTION) if command is None else tuple(command)
        self._child: subprocess.Popen[bytes] | None = None
        self._asked_at = 0.0
        self._answer = b""
        self._hints: dict[str, Hint] = {}

    @property
    def descriptor(self) -> int | None:
        """Readable when the answer is there; None while nothing was asked."""
        return None if self._child is None or self._child.stdout is None else self._child.stdout.fileno()

    def ask(self, sessions: Sequence[str]) -> None:
        """Ask about sessions, unless a question is out; one without an answer is given up after a while."""
        self.take()
        if self._child is not None:
            if monotonic() - self._asked_at < _PATIENCE_SECONDS:
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
                part = os.read(self.descriptor, _MOST_ANSWER)
            except BlockingIOError:
                return False
            self._answer += part
            if not part or len(self._answer) > _MOST_ANSWER:
                self._hints = parse_hints(self._answer)
                self._end()
                return True

    def presences(self, found: Sequence[Desktop], now: float) -> Iterator[Presence]:
        """The people at these desktops."""
        for desktop in found:
            hint = self._hints.get(desktop.id)
            yield Presence(desktop.user, desktop.seat, _idle_seconds(hint, now), "desktop")

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


def _idle_seconds(hint: Hint | None, now: float) -> float | None:
    if hint is None:
        return None
    if not hint.idle:
        return 0.0
    return None if hint.since is None else max(0.0, now - hint.since)
