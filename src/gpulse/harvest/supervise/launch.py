"""Launch a program: its specification, the steps from fork to exec, and why a command cannot be run.

Every supervisor loads it: it imports little.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from gpulse.atomic_files import open_output
from gpulse.harvest.supervise.process_tree import set_io_priority

_MAX_SCRIPT_LINE_BYTES = 256


def explain_launch_error(command: str, error: OSError | ValueError, environment: Mapping[str, str]) -> str:
    """Return one sentence about a command that could not be run, with what to do where that is known.

    Must be called where the command was started: in its directory, and as its user.

    Args:
        command: Its first word.
        error: What starting it raised.
        environment: The environment that it was to get.
    """
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    path = _find_command(command, environment)
    advice = _find_advice(command, path, getattr(error, "errno", None))
    return f"cannot run {path or command}: {reason}{f'; {advice}' if advice else ''}"


def _find_advice(command: str, path: str | None, number: int | None) -> str | None:
    if path is None:
        if command.startswith("/"):
            return None
        if "/" in command:
            return f"relative paths start at {_current_directory()}"
        return "it is not in any directory of PATH; use its full path"
    interpreter = _read_interpreter(path)
    if number == errno.ENOENT:
        if interpreter is None:
            return "its dynamic loader is missing; the program was built for another system"
        return f"its first line names the interpreter {interpreter}, which does not exist; correct that line"
    if number == errno.EACCES:
        return _explain_permission_error(path, interpreter)
    if number == errno.ENOEXEC:
        return f"it is neither a program for this machine nor a script that starts with #!; run it as `sh {path}`"
    return None


def _explain_permission_error(path: str, interpreter: str | None) -> str:
    if os.path.isdir(path):
        return "it is a directory; give the path of a program"
    if not os.access(path, os.X_OK):
        return f"chmod +x {path}"
    if interpreter is not None and not os.access(interpreter, os.X_OK):
        return (
            f"its first line names the interpreter {interpreter}, which is not executable; correct that line"
        )
    return "its file system may be mounted noexec; copy the program to another file system"


def _find_command(command: str, environment: Mapping[str, str]) -> str | None:
    """Return the file that was tried: the first executable one, else the first that exists."""
    if "/" in command:
        return command if os.path.lexists(command) else None
    places = environment.get("PATH", os.defpath).split(os.pathsep)
    there = [path for place in places if os.path.isfile(path := os.path.join(place or ".", command))]
    return next((path for path in there if os.access(path, os.X_OK)), there[0] if there else None)


def _read_interpreter(path: str) -> str | None:
    """Return the interpreter that a script's first line names."""
    try:
        with open(path, "rb") as file:
            first = file.readline(_MAX_SCRIPT_LINE_BYTES)
    except OSError:
        return None
    words = first[2:].split() if first.startswith(b"#!") else []
    return os.fsdecode(words[0]) if words else None


def _current_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "a directory that no longer exists"


_NOT_STARTED_STATUS = 127


class ProgramUser(NamedTuple):
    """The user that a program runs as."""

    name: str
    uid: int
    gid: int
    groups: Sequence[int]


class ProgramSpec(NamedTuple):
    """One program to start, and how it is ended."""

    command: Sequence[str]
    directory: str
    environment: Mapping[str, str]
    """The complete environment."""
    log: str | None
    """None: the supervisor's own output."""
    nice: int | None
    io_priority: int | None
    """The kernel's number."""
    cpus: Sequence[int]
    """None: all."""
    user: ProgramUser | None
    """None: the user that runs the supervisor."""
    stop_signal: int
    grace_seconds: float
    proc: str

    def to_json(self) -> str:
        """Return it as text without a newline."""
        return json.dumps(self._asdict())


def spec_from_json(text: str | bytes) -> ProgramSpec:
    """Return the specification that `to_json` wrote."""
    fields = json.loads(text)
    user = fields.pop("user")
    return ProgramSpec(**fields, user=None if user is None else ProgramUser(*user))


class _NotStartedError(Exception):
    pass


def launch(spec: ProgramSpec) -> tuple[int, int]:
    """Start the program; return its PID, and a descriptor that reaches its end when the program runs, or has the error.

    Raises:
        OSError: No process can be created.
    """
    reader, writer = os.pipe()
    # A signal that comes before the program is there waits for it, and is not lost on our own handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _run_child(spec, writer)
    except OSError:
        os.close(reader)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writer)
    return pid, reader


def _run_child(spec: ProgramSpec, writer: int) -> None:
    try:
        _execute(spec)
    except _NotStartedError as error:
        os.write(writer, str(error).encode("utf-8", "backslashreplace"))
    except BaseException as error:  # noqa: BLE001 - a second supervisor must not go on from here
        os.write(writer, repr(error).encode("utf-8", "backslashreplace"))
    finally:
        os._exit(_NOT_STARTED_STATUS)


def _execute(spec: ProgramSpec) -> None:
    os.setsid()
    _set_limits(spec)
    if spec.user is not None:
        with _raise_not_started(f"cannot run as {spec.user.name}"):
            os.setgroups(spec.user.groups)
            os.setgid(spec.user.gid)
            os.setuid(spec.user.uid)
    _redirect_output(spec.log)
    with _raise_not_started(f"cannot enter the working directory {spec.directory}"):
        os.chdir(spec.directory)
    _reset_signals()
    try:
        os.execvpe(spec.command[0], tuple(spec.command), spec.environment)  # noqa: S606 - without a shell is the point
    except (OSError, ValueError) as error:
        raise _NotStartedError(explain_launch_error(spec.command[0], error, spec.environment)) from error


def _set_limits(spec: ProgramSpec) -> None:
    if spec.nice is not None:
        with _raise_not_started(f"cannot set nice to {spec.nice}"):
            os.setpriority(os.PRIO_PROCESS, 0, spec.nice)
    if spec.io_priority is not None:
        with _raise_not_started("cannot set the I/O priority"):
            set_io_priority(spec.io_priority)
    if spec.cpus:
        with _raise_not_started("cannot set the CPU affinity"):
            os.sched_setaffinity(0, spec.cpus)


def _redirect_output(log: str | None) -> None:
    """Connect input to nothing and output to the log, which is opened as the user who runs the program."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if log is not None:
        with _raise_not_started(f"cannot write the log file {log}"):
            output = open_output(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY)
        os.dup2(output, 1)
        os.dup2(output, 2)


def _reset_signals() -> None:
    """Set all signals as a shell leaves them for a program."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@contextmanager
def _raise_not_started(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise _NotStartedError(f"{what}: {reason}") from error
