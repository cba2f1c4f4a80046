"""Supervise one program: start it, report its state, and exit only when none of its processes is left.

A supervisor is a process of its own, so that the program is ended even when harvest is killed. Whatever the
program starts stays below it: a process that loses its parent becomes the supervisor's child. A supervisor
without children has nothing left below it.

Both sides send JSON documents, one on each line. Harvest sends the specification of the program, then
`{"signal": N}` and `{"kill": true}`. The supervisor sends `{"started": PID, "ticks": N}`, `{"killing": true}` once
it was ordered to kill, `{"exited": STATUS}` and at last `{"gone": true}`, or `{"failed": WHY}` alone.

When the connection ends, harvest has died, and the program is ended. The same happens when harvest was stopped
(Ctrl-Z) and does not continue within a few seconds: a program must not run unobserved. A program that
was asked to end is killed when its grace period is over, even without an order: harvest may hang.

It loads few modules, so that a program is started without delay.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
from contextlib import suppress
from time import monotonic

from gpulse.harvest.events import ProcessId
from gpulse.harvest.supervise.launch import ProgramSpec, launch, spec_from_json
from gpulse.harvest.supervise.process_tree import MachineProcessTree, kill_child, set_name, set_subreaper

SUPERVISOR_NAME = "gpulse-harvest"
"""What supervisors are called in lists of processes."""
_IGNORED_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
)
_MIN_PAUSE_SECONDS = 0.001
_MAX_PAUSE_SECONDS = 0.1
_MAX_WAIT_SECONDS = 60.0
_WATCH_SECONDS = 4.0
"""How often it checks whether harvest was stopped."""
_STOPPED_STATES = ("T", "t")


def supervise(connection: int) -> None:
    """Run the program that comes over this connection, and end when nothing of it is left."""
    os.set_inheritable(connection, False)
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    set_subreaper(True)
    set_name(SUPERVISOR_NAME)
    woken = _wake_for_children()
    received = b""
    while b"\n" not in received:
        chunk = os.read(connection, 1 << 16)
        if not chunk:
            return
        received += chunk
    text, _, rest = received.partition(b"\n")
    Supervisor(spec_from_json(text), connection, woken, rest).run()
    os._exit(0)


def _wake_for_children() -> int:
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    return woken


class Supervisor:
    """Runs one program, and ends everything that it started."""

    def __init__(self, spec: ProgramSpec, connection: int, woken: int, received: bytes) -> None:
        self._spec = spec
        self._connection: int | None = connection
        """None: harvest has died."""
        self._woken = woken
        self._received = received
        self._tree = MachineProcessTree(spec.proc)
        self._me = self._tree.myself()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(woken, select.POLLIN)
        self._leader: int | None = None
        """The program itself, until its status has been taken."""
        self._starting: int | None = None
        """Ends when the program runs."""
        self._failure = b""
        self._signalled: set[tuple[ProcessId, int]] = set()
        self._deadline = math.inf
        """When everything is killed: the grace after it was first asked to end."""
        self._killing = False
        self._pause = _MIN_PAUSE_SECONDS
        self._harvest = os.getppid()
        self._seen_at = monotonic()
        self._seen_stopped = False

    def run(self) -> None:
        """Start the program, and stay until nothing of it is left."""
        try:
            self._leader, self._starting = launch(self._spec)
        except OSError as error:
            self._failure = f"cannot start a process for {self._spec.command[0]}: {error.strerror}".encode(
                "utf-8", "backslashreplace"
            )
        else:
            os.set_blocking(self._starting, False)
            self._poll.register(self._starting, select.POLLIN)
            self._carry_out()
        while self._reap():
            self._end_remains()
            self._wait()
            self._watch_harvest()
        if self._failure:
            self._report({"failed": self._failure.decode("utf-8", "replace")})
        else:
            self._report({"gone": True})

    def _reap(self) -> bool:
        """Collect the exit status of every process that ended; False when none is left."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
            if ended is None:
                return True
            if self._killing:
                kill_child(ended.si_pid)
                self._pause = _MIN_PAUSE_SECONDS
            if ended.si_pid == self._leader:
                self._leader = None
                self._read_start(ended.si_pid)
                if not self._failure:
                    exited = ended.si_code == os.CLD_EXITED
                    self._report({"exited": ended.si_status if exited else -ended.si_status})
            os.waitid(os.P_PID, ended.si_pid, os.WEXITED)

    def _end_remains(self) -> None:
        """End what the program, or harvest, left behind: ask once, kill when the time is over."""
        if self._is_left_behind():
            self._signal(self._spec.stop_signal)
        if monotonic() >= self._deadline:
            self._begin_to_kill()
        if self._killing:
            self._kill()

    def _is_left_behind(self) -> bool:
        return self._leader is None or self._connection is None

    def _signal(self, number: int) -> None:
        """Send a signal to the program's group and to all other processes below us, to none twice."""
        if number == self._spec.stop_signal:
            self._deadline = min(self._deadline, monotonic() + self._spec.grace_seconds)
        self._signal_group(number)
        for process, stat in self._tree.below(self._me).items():
            if (process, number) not in self._signalled and not stat.ended:
                self._signalled.add((process, number))
                self._tree.send(process, number)

    def _signal_group(self, number: int) -> None:
        """Send a signal to the program's process group, unless it was sent before, and note who received it.

        The members are found by their group and not as descendants: when the program ends at once, its children
        become ours while the tree is read, and a member that was missed would be signalled again later.
        """
        leader = None if self._leader is None else self._tree.find(self._leader)
        if leader is None or (leader, number) in self._signalled:
            return
        self._signalled.add((leader, number))
        try:
            os.killpg(leader.pid, number)
        except ProcessLookupError:  # it has not made its group yet
            os.kill(leader.pid, number)
        except PermissionError:
            return
        for pid, stat in self._tree.everyone().items():
            if stat.group == leader.pid:
                self._signalled.add((ProcessId(pid, stat.start_ticks), number))

    def _begin_to_kill(self) -> None:
        if not self._killing:
            self._killing = True
            # Run before a thousand runnable processes; this fails without root.
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
        stopped = found is not None and found.state in _STOPPED_STATES
        if stopped and self._seen_stopped:
            self._signal(self._spec.stop_signal)
        self._seen_stopped = stopped

    def _wait(self) -> None:
        for descriptor, _ in self._poll.poll(self._milliseconds()):
            if descriptor == self._woken:
                _drain(descriptor)
            elif descriptor == self._connection:
                self._read_orders(descriptor)
            elif self._leader is not None:
                self._read_start(self._leader)

    def _milliseconds(self) -> int:
        if self._killing:
            seconds = self._pause
            self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)
        elif self._deadline == math.inf:
            seconds = _WATCH_SECONDS
        else:
            seconds = min(max(0.0, self._deadline - monotonic()), _MAX_WAIT_SECONDS)
        return math.ceil(seconds * 1000)

    def _read_start(self, pid: int) -> None:
        """Report that the program runs, once that is known."""
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
            self._report({"started": pid, "ticks": process.start_ticks})

    def _read_orders(self, connection: int) -> None:
        try:
            chunk = os.read(connection, 1 << 16)
        except ConnectionError:
            chunk = b""
        self._received += chunk
        self._carry_out()
        if not chunk:
            self._poll.unregister(connection)
            self._connection = None

    def _carry_out(self) -> None:
        *orders, self._received = self._received.split(b"\n")
        for order in map(json.loads, orders):
            if "signal" in order:
                self._signal(order["signal"])
            if "kill" in order:
                self._begin_to_kill()
                self._report({"killing": True})

    def _report(self, message: dict[str, object]) -> None:
        if self._connection is not None:
            try:
                os.write(self._connection, json.dumps(message).encode() + b"\n")
            except OSError:
                self._poll.unregister(self._connection)
                self._connection = None


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        return
