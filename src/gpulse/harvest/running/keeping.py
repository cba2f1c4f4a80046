"""Keeps one program: starts it, tells what becomes of it, and leaves only when nothing of it is left.

A keeper is a process of its own, so that the program is ended even when harvest is killed. Whatever the
program starts stays below it: what loses its parent becomes its child. One that has no children has nothing
left below it.

It is told, a JSON document a line: the work, then `{"signal": N}` and `{"kill": true}`. It tells
`{"started": PID, "ticks": N}`, `{"killing": true}` when it was told to, `{"exited": STATUS}` and at last
`{"gone": true}`, or `{"failed": WHY}` alone.
When the line ends, harvest has died, and the program is ended; so it is when harvest was stopped (Ctrl-Z) and does not go on
within a few seconds: a program that nobody watches over must not stay. Once it was asked to end, it is killed when its
grace is over, though nobody says so: harvest may hang.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
from contextlib import suppress
from time import monotonic

from gpulse.harvest.running.kernel import set_name, set_subreaper
from gpulse.harvest.running.told import Process
from gpulse.harvest.running.tree import Tree, kill_child
from gpulse.harvest.running.work import Work, launch, work_from_json

NAME = "gpulse-harvest"
"""What keepers are called in lists of processes."""
_DEAF_TO = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
)
_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.1
_LONGEST_WAIT = 60.0
_WATCH_SECONDS = 4.0
"""How often it is seen whether harvest goes on."""
_STOPPED = ("T", "t")


def keep(line: int) -> None:
    """Do the work that this line tells, and end when nothing of it is left."""
    os.set_inheritable(line, False)
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    set_subreaper(True)
    set_name(NAME)
    woken = _wake_for_children()
    heard = b""
    while b"\n" not in heard:
        chunk = os.read(line, 1 << 16)
        if not chunk:
            return
        heard += chunk
    text, _, rest = heard.partition(b"\n")
    Keeper(work_from_json(text), line, woken, rest).run()
    os._exit(0)


def _wake_for_children() -> int:
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    return woken


class Keeper:
    """One program and everything that it started."""

    def __init__(self, work: Work, line: int, woken: int, heard: bytes) -> None:
        self._work = work
        self._line: int | None = line
        """None: harvest has died."""
        self._woken = woken
        self._heard = heard
        self._tree = Tree(work.proc)
        self._me = self._tree.myself()
        self._poll = select.poll()
        self._poll.register(line, select.POLLIN)
        self._poll.register(woken, select.POLLIN)
        self._leader: int | None = None
        """The program itself, until its status has been taken."""
        self._starting: int | None = None
        """Ends when the program runs."""
        self._failure = b""
        self._asked: set[tuple[Process, int]] = set()
        self._deadline = math.inf
        """When everything is killed: the grace after it was first asked to end."""
        self._killing = False
        self._pause = _SHORTEST_PAUSE
        self._harvest = os.getppid()
        self._seen_at = monotonic()
        self._seen_stopped = False

    def run(self) -> None:
        """Start the program, and stay until nothing of it is left."""
        try:
            self._leader, self._starting = launch(self._work)
        except OSError as error:
            self._failure = f"cannot start a process for {self._work.command[0]}: {error.strerror}".encode(
                "utf-8", "backslashreplace"
            )
        else:
            os.set_blocking(self._starting, False)
            self._poll.register(self._starting, select.POLLIN)
            self._obey()
        while self._reap():
            self._urge()
            self._wait()
            self._watch_harvest()
        if self._failure:
            self._tell({"failed": self._failure.decode("utf-8", "replace")})
        else:
            self._tell({"gone": True})

    def _reap(self) -> bool:
        """Take the status of everybody who ended; False when nobody is left."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
            if ended is None:
                return True
            if self._killing:
                kill_child(ended.si_pid)
                self._pause = _SHORTEST_PAUSE
            if ended.si_pid == self._leader:
                self._leader = None
                self._hear_start(ended.si_pid)
                if not self._failure:
                    exited = ended.si_code == os.CLD_EXITED
                    self._tell({"exited": ended.si_status if exited else -ended.si_status})
            os.waitid(os.P_PID, ended.si_pid, os.WEXITED)

    def _urge(self) -> None:
        """End what the program, or harvest, left behind: ask once, kill when the time is over."""
        if self._is_left_behind():
            self._ask(self._work.stop_signal)
        if monotonic() >= self._deadline:
            self._begin_to_kill()
        if self._killing:
            self._kill()

    def _is_left_behind(self) -> bool:
        return self._leader is None or self._line is None

    def _ask(self, number: int) -> None:
        """Send a signal to the program's group and to everybody else below us, to nobody twice."""
        if number == self._work.stop_signal:
            self._deadline = min(self._deadline, monotonic() + self._work.grace_seconds)
        group = self._leader if self._ask_group(number) else None
        for process, stat in self._tree.below(self._me).items():
            if (process, number) not in self._asked and not stat.ended:
                self._asked.add((process, number))
                if stat.group != group:
                    self._tree.send(process, number)

    def _ask_group(self, number: int) -> bool:
        """True when the program's group was sent this signal just now."""
        leader = None if self._leader is None else self._tree.find(self._leader)
        if leader is None or (leader, number) in self._asked:
            return False
        self._asked.add((leader, number))
        try:
            os.killpg(leader.pid, number)
        except ProcessLookupError:  # it has not made its group yet
            os.kill(leader.pid, number)
        except PermissionError:
            return False
        return True

    def _begin_to_kill(self) -> None:
        if not self._killing:
            self._killing = True
            # Before a thousand processes that all want to run; who is not root waits for a turn.
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))

    def _kill(self) -> None:
        for pid in self._tree.children(self._me.pid):
            self._tree.kill_family(pid)

    def _watch_harvest(self) -> None:
        """Ask the program to end when harvest was found stopped twice in a row."""
        if self._deadline < math.inf or monotonic() - self._seen_at < _WATCH_SECONDS:
            return
        self._seen_at = monotonic()
        found = self._tree.look(self._harvest)
        stopped = found is not None and found.state in _STOPPED
        if stopped and self._seen_stopped:
            self._ask(self._work.stop_signal)
        self._seen_stopped = stopped

    def _wait(self) -> None:
        for descriptor, _ in self._poll.poll(self._milliseconds()):
            if descriptor == self._woken:
                _drain(descriptor)
            elif descriptor == self._line:
                self._hear_order(descriptor)
            elif self._leader is not None:
                self._hear_start(self._leader)

    def _milliseconds(self) -> int:
        if self._killing:
            seconds = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif self._deadline == math.inf:
            seconds = _WATCH_SECONDS
        else:
            seconds = min(max(0.0, self._deadline - monotonic()), _LONGEST_WAIT)
        return math.ceil(seconds * 1000)

    def _hear_start(self, pid: int) -> None:
        """Whether the program runs, once that is known."""
        if self._starting is None:
            return
        try:
            while chunk := os.read(self._starting, 1 << 16):
                self._failure += chunk
        except BlockingIOError:
            return
        self._poll.unregister(self._starting)
        os.close(self._starting)
        self._starting = None
        process = self._tree.find(pid)
        if not self._failure and process is not None:
            self._tell({"started": pid, "ticks": process.start_ticks})

    def _hear_order(self, line: int) -> None:
        try:
            chunk = os.read(line, 1 << 16)
        except ConnectionError:
            chunk = b""
        self._heard += chunk
        self._obey()
        if not chunk:
            self._poll.unregister(line)
            self._line = None

    def _obey(self) -> None:
        *orders, self._heard = self._heard.split(b"\n")
        for order in map(json.loads, orders):
            if "signal" in order:
                self._ask(order["signal"])
            if "kill" in order:
                self._begin_to_kill()
                self._tell({"killing": True})

    def _tell(self, news: dict[str, object]) -> None:
        if self._line is not None:
            try:
                os.write(self._line, json.dumps(news).encode() + b"\n")
            except OSError:
                self._poll.unregister(self._line)
                self._line = None


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        return
