"""Run programs, each with its environment, user and priorities under its own supervisor process, and report their state."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from gpulse.errors import GpulseError, UsageError
from gpulse.harvest.events import (
    ProcessId,
    ProgramExited,
    ProgramGone,
    ProgramStarted,
    ProgramStartFailed,
    RunEvent,
)
from gpulse.harvest.settings import Program
from gpulse.harvest.supervise.launch import ProgramSpec, ProgramUser
from gpulse.harvest.supervise.own_processes import (
    RUN_VARIABLE,
    OwnProcesses,
    end_processes,
    read_settled_environ,
    run_of,
)
from gpulse.harvest.supervise.process_tree import (
    MachineProcessTree,
    ProcessStat,
    is_subreaper,
    set_subreaper,
)
from gpulse.sources.procfs import Roots

PROGRAM_VARIABLE = "GPULSE_HARVEST_PROGRAM"
"""Names the program in its own environment."""
_SERVICE_VARIABLES = frozenset({"NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"})
_PUBLIC_VARIABLES = frozenset({"PATH", "LANG", "LANGUAGE", "TZ", "TERM", "LD_LIBRARY_PATH"})
_IO_CLASSES = {"best-effort": 2, "idle": 3}
_IO_CLASS_SHIFT = 13
_DEFAULT_IO_LEVEL = 4


def build_spec(mark: str, program: Program, environment: Mapping[str, str], proc: str) -> ProgramSpec:
    """Return what a supervisor needs to know to run this program.

    Raises:
        UsageError: There is no such user, or no such priority.
        OSError: The current directory is gone.
    """
    account = None if program.user is None else _find_account(program.user)
    user = None if account is None else _build_user(account)
    return ProgramSpec(
        command=program.command,
        directory=os.path.abspath(program.directory),
        environment={
            **_filter_environment(environment, to_another=user is not None),
            **({} if account is None else _find_home(account)),
            **dict(program.environment),
            RUN_VARIABLE: mark,
            PROGRAM_VARIABLE: program.name,
        },
        log=None if program.log is None else os.path.abspath(program.log),
        nice=program.nice,
        io_priority=None if program.ionice is None else io_priority(program.ionice),
        cpus=program.cpus,
        user=user,
        stop_signal=program.stop_signal,
        grace_seconds=program.grace_seconds,
        proc=proc,
    )


def io_priority(ionice: str) -> int:
    """Return `idle`, `best-effort` or `best-effort:N` as the kernel's number."""
    name, _, level = ionice.partition(":")
    if name not in _IO_CLASSES or (level and level not in tuple("01234567")):
        raise UsageError(
            f"{ionice!r} is not a valid I/O priority",
            hint="use idle, best-effort, or best-effort:0 (highest) to best-effort:7",
        )
    usual = _DEFAULT_IO_LEVEL if name == "best-effort" else 0
    return _IO_CLASSES[name] << _IO_CLASS_SHIFT | (int(level) if level else usual)


def _filter_environment(environment: Mapping[str, str], *, to_another: bool) -> dict[str, str]:
    """Return what a program gets of harvest's environment: nothing of its service, and no secrets if it runs as another user."""
    return {
        name: value
        for name, value in environment.items()
        if not _is_service_variable(name) and (_is_public_variable(name) or not to_another)
    }


def _is_service_variable(name: str) -> bool:
    return name in _SERVICE_VARIABLES or name.startswith("WATCHDOG_")


def _is_public_variable(name: str) -> bool:
    return name in _PUBLIC_VARIABLES or name.startswith(("LC_", "CUDA_"))


def _find_account(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise UsageError(f"there is no user {name!r}", hint="run `getent passwd` to list the users") from None


def _find_home(account: pwd.struct_passwd) -> dict[str, str]:
    return {
        "HOME": account.pw_dir,
        "USER": account.pw_name,
        "LOGNAME": account.pw_name,
        "SHELL": account.pw_shell,
    }


def _build_user(account: pwd.struct_passwd) -> ProgramUser | None:
    """Return the user to change to; None when it is the one who runs harvest."""
    if account.pw_uid == os.geteuid():
        return None
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    return ProgramUser(account.pw_name, account.pw_uid, account.pw_gid, groups)


_SUPERVISOR_SECONDS = 0.5
"""How long a supervisor may take to kill its program."""
_SUPERVISOR_CODE = """\
import sys
sys.path.append(sys.argv[2])
from gpulse.harvest.supervise.supervisor import supervise
supervise(int(sys.argv[1]))
"""
_PACKAGES_PATH = str(Path(__file__).resolve().parents[3])
"""Where supervisors find this package: they start without site packages, which takes long."""
_CLOSE_SECONDS = 5.0
"""How long closing waits for killed processes."""


class Runner:
    """Starts and ends programs; all descendants of a program belong to it and end with it.

    `report` is called from the event loop, never from within a call to the runner. After `ProgramStartFailed` and `ProgramGone`
    nothing more is reported about a run.
    """

    def __init__(self, *, mark: str, report: Callable[[RunEvent], None], roots: Roots) -> None:
        self._mark = mark
        self._report = report
        self._proc = roots.proc
        self._tree = MachineProcessTree(roots.proc)
        self._own = OwnProcesses(self._tree)
        self._runs: dict[str, SupervisedRun] = {}
        self._supervisors: dict[int, SupervisedRun] = {}
        """By PID, those whose exit status was not collected yet."""
        self._rescue_tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        """Set while there is no run and no supervisor."""
        self._idle.set()
        self._was_subreaper: bool | None = None
        self._closed = False

    def start(self, run: str, program: Program, environment: Mapping[str, str]) -> None:
        """Start a program; the variables in its configuration override the given environment."""
        try:
            if self._closed or run in self._runs:
                raise GpulseError(
                    f"{run} is already running" if run in self._runs else "harvest is shutting down"
                )
            self._open(run, program, environment)
        except GpulseError as error:
            self._emit(ProgramStartFailed(run, error.message))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._emit(ProgramStartFailed(run, f"cannot start {program.command[0]}: {reason}"))

    def _open(self, name: str, program: Program, environment: Mapping[str, str]) -> None:
        mark = f"{self._mark}/{name}"
        spec = build_spec(mark, program, environment, self._proc)
        self._become_subreaper()
        child, end = start_supervisor({**environment, RUN_VARIABLE: mark})
        try:
            supervisor = self._tree.find(child.pid) or ProcessId(child.pid, 0)
            run = SupervisedRun(name, program, child, supervisor)
        except BaseException:
            end.close()
            child.kill()
            child.wait()
            raise
        run.connection = SupervisorConnection(end, lambda: self._read(run))
        run.connection.send(spec.to_json())
        asyncio.get_running_loop().add_reader(run.descriptor, self._supervisor_ended, run)
        self._runs[name] = self._supervisors[child.pid] = run
        self._idle.clear()

    def _become_subreaper(self) -> None:
        """Become the parent of processes that lose their supervisor."""
        if self._was_subreaper is None:
            self._was_subreaper = is_subreaper()
            set_subreaper(True)

    def signal(self, run: str, number: int) -> None:
        """Send a signal to a program and to everything that it started."""
        if running := self._runs.get(run):
            if number == running.program.stop_signal and running.asked_at is None:
                running.asked_at = monotonic()
            running.order({"signal": number})

    def kill(self, run: str) -> None:
        """Kill a program and everything that it started."""
        if running := self._runs.get(run):
            running.order({"kill": True})
            if not running.killed:
                running.killed = True
                asyncio.get_running_loop().call_later(_SUPERVISOR_SECONDS, self._take_over, running)

    def is_ours(self, pid: int) -> bool:
        """True for this process and everything that it runs."""
        return self._own.is_ours(pid)

    async def close(self, grace: float) -> None:
        """End everything and wait until it is gone, or for seconds after it was killed.

        What cannot be killed is left to its supervisor.
        """
        self._closed = True
        for name, run in list(self._runs.items()):
            if run.asked_at is None:
                self.signal(name, run.program.stop_signal)
        if not all(run.killed for run in self._runs.values()):
            await self._wait_until_idle(grace)
        for name in list(self._runs):
            self.kill(name)
        await self._wait_until_idle(_CLOSE_SECONDS)
        for run in list(self._supervisors.values()):
            self._let_go(run)
        for task in self._rescue_tasks:
            task.cancel()
        await asyncio.gather(*self._rescue_tasks, return_exceptions=True)
        self._runs.clear()
        self._check_idle()
        if self._was_subreaper is not None:
            set_subreaper(self._was_subreaper)
            self._was_subreaper = None

    async def _wait_until_idle(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            pass

    def _read(self, run: SupervisedRun) -> None:
        for message in () if run.connection is None else run.connection.read():
            match message:
                case {"started": int(pid), "ticks": int(ticks)}:
                    run.process = ProcessId(pid, ticks)
                    self._emit(ProgramStarted(run.name, run.supervisor, run.process))
                case {"exited": int(status)}:
                    run.exited = True
                    self._emit(ProgramExited(run.name, status))
                case {"killing": True}:
                    run.obeyed = True
                case {"failed": str(why)}:
                    self._finish(run, ProgramStartFailed(run.name, why))
                case {"gone": True}:
                    self._finish(run, ProgramGone(run.name))

    def _finish(self, run: SupervisedRun, last: RunEvent) -> None:
        run.gone = True
        del self._runs[run.name]
        self._emit(last)
        self._check_idle()

    def _supervisor_ended(self, run: SupervisedRun) -> None:
        self._read(run)
        status = run.child.wait()
        self._let_go(run)
        if not run.gone:
            task = asyncio.create_task(self._rescue(run, status))
            self._rescue_tasks.add(task)
            task.add_done_callback(self._rescue_tasks.discard)
        self._check_idle()

    def _let_go(self, run: SupervisedRun) -> None:
        asyncio.get_running_loop().remove_reader(run.descriptor)
        os.close(run.descriptor)
        if run.connection is not None:
            run.connection.close()
            run.connection = None
        del self._supervisors[run.child.pid]

    def _check_idle(self) -> None:
        if not self._runs and not self._supervisors:
            self._idle.set()

    def _take_over(self, run: SupervisedRun) -> None:
        """Kill a supervisor that does not carry out the order to kill, or was stopped: its processes become ours."""
        if run.gone or self._supervisors.get(run.child.pid) is not run:
            return
        stat = self._tree.look(run.child.pid)
        if run.obeyed and stat is not None and stat.state not in "Tt":
            asyncio.get_running_loop().call_later(_SUPERVISOR_SECONDS, self._take_over, run)
        else:
            run.child.kill()

    async def _rescue(self, run: SupervisedRun, status: int) -> None:
        """End what a supervisor left behind that was killed itself."""
        if run.asked_at is None:
            run.asked_at = monotonic()
        await end_processes(
            lambda: self._strays(run),
            tree=self._tree,
            stop_signal=run.program.stop_signal,
            deadline=run.deadline,
        )
        if run.process is None and not run.killed:
            self._finish(
                run,
                ProgramStartFailed(
                    run.name,
                    f"{run.program.command[0]} was not started: its supervisor process exited (status {status})",
                ),
            )
        else:
            self._finish(run, ProgramGone(run.name))

    def _strays(self, run: SupervisedRun) -> set[ProcessId]:
        """Return the processes that supervisors left to us; after the deadline they are killed at once.

        One that has just ended is among them: it may have left a child, which becomes ours only now.
        """
        killing = monotonic() >= run.deadline()
        found: set[ProcessId] = set()
        for process, stat in self._adopted(run):
            found.add(process)
            if killing:
                self._tree.kill_family(process.pid)
            else:
                found.update(self._tree.below(process))
            if stat.ended:
                self._reap(run, process.pid)
        return found

    def _adopted(self, run: SupervisedRun) -> Iterator[tuple[ProcessId, ProcessStat]]:
        """Our children that we did not start: no supervisors, in other sessions than ours, and of that run."""
        session = os.getsid(0)
        for pid in self._tree.children(os.getpid()):
            stat = self._tree.look(pid)
            if stat is None or pid in self._supervisors or stat.session == session:
                continue
            process = ProcessId(pid, stat.start_ticks)
            if stat.start_ticks >= run.supervisor.start_ticks and self._is_of(run, process, stat):
                yield process, stat

    def _is_of(self, run: SupervisedRun, process: ProcessId, stat: ProcessStat) -> bool:
        """False when its environment lacks the run's mark and nothing else shows that the run started it."""
        if run.process is not None and stat.session == run.process.pid:
            return True
        variables = read_settled_environ(process, self._tree, self._proc)
        if not variables or run_of(self._mark, variables) == run.name:
            return True
        return self._own.was_below(process, run.supervisor)

    def _reap(self, run: SupervisedRun, pid: int) -> None:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        if ended is not None and run.process is not None and pid == run.process.pid and not run.exited:
            run.exited = True
            exited = ended.si_code == os.CLD_EXITED
            self._emit(ProgramExited(run.name, ended.si_status if exited else -ended.si_status))

    def _emit(self, message: RunEvent) -> None:
        asyncio.get_running_loop().call_soon(self._report, message)


class SupervisedRun:
    """One run: its supervisor, and what that reported."""

    def __init__(
        self, name: str, program: Program, child: subprocess.Popen[bytes], supervisor: ProcessId
    ) -> None:
        self.name = name
        self.program = program
        self.child = child
        self.supervisor = supervisor
        self.descriptor = os.pidfd_open(child.pid)
        self.connection: SupervisorConnection | None = None
        self.process: ProcessId | None = None
        self.exited = False
        self.gone = False
        self.asked_at: float | None = None
        self.killed = False
        self.obeyed = False
        """The supervisor has begun to kill."""

    def deadline(self) -> float:
        """Return when processes that lost their supervisor are killed."""
        if self.killed:
            return 0.0
        return (monotonic() if self.asked_at is None else self.asked_at) + self.program.grace_seconds

    def order(self, document: Mapping[str, object]) -> None:
        """Send a command to the supervisor, and continue it if it was suspended."""
        if self.connection is not None:
            self.connection.send(json.dumps(document))
            self.child.send_signal(signal.SIGCONT)


def start_supervisor(environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a supervisor in a session of its own; return it and our end of the connection to it.

    Raises:
        GpulseError: The Python that runs harvest cannot be started again.
        OSError: No connection can be created.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            child = subprocess.Popen(  # noqa: S603  our own program
                [sys.executable, "-I", "-S", "-c", _SUPERVISOR_CODE, str(theirs.fileno()), _PACKAGES_PATH],
                cwd="/",
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
    except OSError as error:
        ours.close()
        raise GpulseError(
            f"cannot start the supervisor process with Python at {sys.executable or '(unknown path)'}: "
            f"{error.strerror}; if gpulse was just updated or moved, restart harvest"
        ) from error
    except BaseException:
        ours.close()
        raise
    return child, ours


class SupervisorConnection:
    """Connection to a supervisor, with a JSON document on each line; it never waits for the other side.

    It sends what fits at once and the rest later, and calls `readable` when data has arrived.
    """

    def __init__(self, end: socket.socket, readable: Callable[[], None]) -> None:
        end.setblocking(False)
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._unread = b""
        self._loop.add_reader(end, readable)

    def send(self, document: str) -> None:
        """Send one line; nothing happens when the supervisor is gone."""
        self._unsent += document.encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            del self._unsent[: self._end.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()
        if self._unsent:
            self._loop.add_writer(self._end, self._flush)
        else:
            self._loop.remove_writer(self._end)

    def read(self) -> Iterator[dict[str, Any]]:
        """Return the documents that arrived completely."""
        try:
            while chunk := self._end.recv(1 << 16):
                self._unread += chunk
            self._loop.remove_reader(self._end)
        except BlockingIOError:
            pass
        except OSError:
            self._loop.remove_reader(self._end)
        *lines, self._unread = self._unread.split(b"\n")
        yield from map(json.loads, lines)

    def close(self) -> None:
        """Let go of the supervisor: it ends its program by itself."""
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self._end.close()
