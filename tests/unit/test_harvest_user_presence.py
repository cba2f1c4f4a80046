from __future__ import annotations

import os
import select
import shutil
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from gpulse.harvest.events import UserPresence
from gpulse.harvest.watch.doctor_checks import run_harvest_checks
from gpulse.harvest.watch.user_presence import (
    UNKNOWN_PERSON,
    ArrivalWatch,
    Desktop,
    IdleHint,
    IdleHints,
    PresenceDetector,
    find_desktops,
    parse_hints,
)
from gpulse.sources.process_owners import user_name
from gpulse.sources.procfs import Roots

ME = user_name(os.getuid()) or ""
GRAPHICAL = {"UID": "1000", "USER": "ada", "ACTIVE": "1", "TYPE": "wayland", "CLASS": "user", "SEAT": "seat0"}


class Room:
    """A machine with terminals and sessions."""

    def __init__(self, root: Path) -> None:
        self.roots = Roots(dev=str(root / "dev"), run=str(root / "run"))
        self.sessions = root / "run" / "systemd" / "sessions"
        self.sessions.mkdir(parents=True)
        self._dev = root / "dev"
        (self._dev / "pts").mkdir(parents=True)

    def terminal(self, name: str, typed_at: float, uid: int = -1) -> Path:
        """A terminal at which somebody typed last at some time."""
        path = self._dev / name
        path.touch()
        os.utime(path, (typed_at, time.time()))
        if uid >= 0:
            os.chown(path, uid, -1)
        return path

    def session(self, name: str, **changes: str) -> None:
        """A graphical session, but for some fields."""
        text = "".join(f"{key}={value}\n" for key, value in {**GRAPHICAL, **changes}.items())
        (self.sessions / name).write_text("# private\n" + text)


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """An empty one."""
    return Room(tmp_path)


def present(room: Room, now: float, *answer: str) -> tuple[UserPresence, ...]:
    """Who is there, once the login manager answered so."""
    command = [sys.executable, "-I", "-S", "-c", f"print({chr(10).join(answer)!r})"]
    with closing(PresenceDetector(room.roots, IdleHints(command))) as people:
        people.look(now, ask=True)
        while not people.hints.take():
            assert people.hints.descriptor is not None
            select.select([people.hints.descriptor], [], [], 10)
        return people.look(now, ask=False)


def test_terminals_are_reported_with_their_owners_and_idle_times(room: Room) -> None:
    """Time runs from the last key that was read; a clock that was set back gives no negative time."""
    now = time.time()
    room.terminal("pts/0", now - 40)
    room.terminal("pts/11", now + 100)
    room.terminal("pts/ptmx", now)

    found = {person.where: person for person in present(room, now)}

    assert {"pts/0", "pts/11"} == found.keys()
    assert (ME, "terminal", 0.0) == (found["pts/0"].user, found["pts/0"].kind, found["pts/11"].idle_seconds)
    assert 40 == pytest.approx(found["pts/0"].idle_seconds, abs=0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to own terminals as others")
def test_consoles_at_which_nobody_logged_in_are_nobody(room: Room) -> None:
    """They are root's and nobody typed there; where somebody did, or whom it was given to, somebody is."""
    now = time.time()
    room.terminal("tty1", now - 500, uid=0)
    room.terminal("tty2", now + 30, uid=0)
    room.terminal("tty3", now - 500, uid=65534)
    room.terminal("ttyS0", now, uid=65534)

    assert {("root", "tty2"), ("nobody", "tty3")} == {(p.user, p.where) for p in present(room, now)}


def test_desktops_are_active_graphical_sessions_of_people(room: Room) -> None:
    """Not greeters, not those in the background, not terminals; the pipe beside a session is left alone."""
    room.session("1")
    room.session("c2", CLASS="greeter")
    room.session("3", ACTIVE="0")
    room.session("4", TYPE="tty", TTY="pts/1")
    room.session("5", SEAT="", DISPLAY=":1", TYPE="x11", VTNR="7")
    os.mkfifo(room.sessions / "1.ref")

    assert [Desktop("1", "ada", "seat0", None), Desktop("5", "ada", ":1", "tty7")] == find_desktops(
        room.roots
    )


def test_where_nobody_can_look_somebody_may_be(room: Room) -> None:
    """No list of the terminals or sessions, or one of them that does not say; one that was closed is nobody."""
    now = time.time()
    pts = Path(room.roots.dev) / "pts"
    room.terminal("pts/0", now)
    (pts / "1").symlink_to("nowhere")
    (pts / "2").symlink_to("2")
    (room.sessions / "1").mkdir()
    one = present(room, now)
    shutil.rmtree(pts)
    none = present(room, now)
    shutil.rmtree(room.sessions.parent)
    pts.touch()
    blocked = present(room, now)

    assert [(ME, "terminal"), (UNKNOWN_PERSON, "terminal"), (UNKNOWN_PERSON, "desktop")] == [
        (p.user, p.kind) for p in one
    ]
    assert [(UNKNOWN_PERSON, None, "terminal"), (UNKNOWN_PERSON, None, "desktop")] == [
        (p.user, p.idle_seconds, p.kind) for p in none
    ]
    assert [UNKNOWN_PERSON] == [person.user for person in blocked]
    assert [str(pts / "2"), str(pts)] == [p.where.split("(")[1].split(":")[0] for p in (one[1], none[0])]


def test_a_login_manager_that_comes_later_is_seen(room: Room) -> None:
    """As when it is started after us."""
    shutil.rmtree(room.sessions)
    with closing(PresenceDetector(room.roots, IdleHints(["true"]))) as people:
        before = people.look(0.0, ask=False)
        room.sessions.mkdir()
        room.session("1")
        after = people.look(0.0, ask=False)

    assert ((), ["ada"]) == (before, [person.user for person in after])


def test_the_login_manager_is_asked_from_our_session_in_a_group_of_its_own(room: Room) -> None:
    """What is in another session passes for a program's, and what is in our group gets our keys."""
    room.session("1")
    # The 1 stands before a session whose leader is outside our PID namespace: that one is called 0.
    script = (
        "import os; print(f'Id=1\\nIdleHint=yes\\nIdleSinceHint=1{os.getsid(0)}{os.getpgrp() - os.getpid()}')"
    )
    with closing(
        PresenceDetector(room.roots, IdleHints([sys.executable, "-I", "-S", "-c", script]))
    ) as people:
        people.look(0.0, ask=True)
        while not people.hints.take():
            assert people.hints.descriptor is not None
            select.select([people.hints.descriptor], [], [], 10)
        (person,) = people.look(1e9, ask=False)

    assert person.idle_seconds is not None
    assert f"1{os.getsid(0)}0" == f"{(1e9 - person.idle_seconds) * 1e6:.0f}"


def test_a_desktop_says_itself_whether_it_is_idle(room: Room) -> None:
    """One that does not is there for an unknown time; the terminal that shows it is not told beside it."""
    now = time.time()
    room.session("1")
    room.session("2", USER="bob", VTNR="2")
    room.session("3", USER="eve")
    room.terminal("tty2", now + 30)
    since = int((now - 90) * 1e6)

    found = present(
        room, now, "Id=1", "IdleHint=no", "IdleSinceHint=0", "", f"Id=2\nIdleHint=yes\nIdleSinceHint={since}"
    )

    assert [("ada", "desktop", 0.0), ("bob", "desktop", 90), ("eve", "desktop", None)] == [
        (p.user, p.kind, p.idle_seconds if p.idle_seconds is None else round(p.idle_seconds)) for p in found
    ]


def test_a_login_manager_without_an_answer_leaves_it_unknown(room: Room, tmp_path: Path) -> None:
    """Whether it is not there or says nothing that can be understood."""
    room.session("1")
    with closing(PresenceDetector(room.roots, IdleHints([str(tmp_path / "missing")]))) as people:
        missing = people.look(0.0, ask=True)

    assert [None] == [person.idle_seconds for person in missing]
    assert [None] == [person.idle_seconds for person in present(room, 0.0, "Failed to connect to bus")]


def test_a_login_manager_that_hangs_is_not_waited_for(room: Room) -> None:
    """The look is over while the question is still out, one question is out at a time, and it ends with us."""
    room.session("1")
    hints = IdleHints([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
    with closing(PresenceDetector(room.roots, hints)) as people:
        first = people.look(0.0, ask=True), hints.descriptor
        again = people.look(0.0, ask=True), hints.descriptor

    assert first == again
    assert [None] == [person.idle_seconds for person in first[0]]


def test_an_answer_that_nobody_fetched_is_taken_at_the_next_look(room: Room) -> None:
    """As where nothing waits on the descriptor."""
    room.session("1")
    with closing(
        PresenceDetector(room.roots, IdleHints([sys.executable, "-c", "print('Id=1\\nIdleHint=no')"]))
    ) as people:
        people.look(0.0, ask=True)
        assert people.hints.descriptor is not None
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        second = people.look(0.0, ask=True)

    assert [0.0] == [person.idle_seconds for person in second]


def test_hints_that_make_no_sense_are_left_out() -> None:
    """What is not said is not known."""
    assert {"a": IdleHint(idle=True, since=None), "b": IdleHint(idle=False, since=None)} == parse_hints(
        b"Id=a\nIdleHint=yes\nIdleSinceHint=soon\n\nId=b\nIdleHint=no\n\nId=c\nIdleHint=maybe\n\nIdleHint=yes\n\xff\n"
    )


def test_watchmen_tell_of_terminals_and_sessions_but_not_of_our_own_looks(room: Room) -> None:
    """A terminal that appears, one that is read, a session that is written."""
    pty = room.terminal("pts/0", 0.0)
    pty.write_text("x")
    with closing(ArrivalWatch(room.roots)) as watchmen:
        looked = bool(os.listdir(room.roots.dev + "/pts")) and watchmen.read()
        room.terminal("pts/1", 0.0)
        opened = watchmen.read()
        pty.read_text()
        typed = watchmen.read()
        room.session("1")
        logged_in = watchmen.read()
        quiet = watchmen.read()

    assert (False, True, True, True, False) == (looked, opened, typed, logged_in, quiet)


def test_a_machine_without_terminals_or_a_login_manager_says_so(tmp_path: Path) -> None:
    """What is not seen there is told."""
    roots = Roots(dev=str(tmp_path), run=str(tmp_path))
    statuses = {check.topic: check.status for check in run_harvest_checks(0.0, roots)}

    assert ("limited", "limited") == (statuses["people"], statuses["logind"])


def test_terminals_that_cannot_be_looked_at_are_reported_by_doctor(room: Room) -> None:
    """With what follows from it: nothing runs."""
    (Path(room.roots.dev) / "pts" / "2").symlink_to("2")
    (check,) = (check for check in run_harvest_checks(0.0, room.roots) if check.topic == "people")

    assert ("limited", True) == (check.status, "runs no program" in check.detail)
