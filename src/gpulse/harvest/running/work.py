"""What a keeper is told to do, and how it starts the program: the last steps before the program takes over."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from gpulse.harvest.running.kernel import set_io_priority
from gpulse.harvest.running.launch_errors import explain

_NOT_STARTED = 127


class User(NamedTuple):
    """Whom a program runs as."""

    name: str
    uid: int
    gid: int
    groups: Sequence[int]


class Work(NamedTuple):
    """One program to start, and how it is ended."""

    command: Sequence[str]
    directory: str
    environment: Mapping[str, str]
    """All of it."""
    log: str | None
    """None: where the keeper itself writes."""
    nice: int | None
    io_priority: int | None
    """As the kernel has it."""
    cpus: Sequence[int]
    """None: all."""
    user: User | None
    """None: whom the keeper runs as."""
    stop_signal: int
    grace_seconds: float
    proc: str

    def to_json(self) -> str:
        """As text without a newline."""
        return json.dumps(self._asdict())


def work_from_json(text: str | bytes) -> Work:
    """What `to_json` wrote."""
    fields = json.loads(text)
    user = fields.pop("user")
    return Work(**fields, user=None if user is None else User(*user))


class _NotStartedError(Exception):
    pass


def launch(work: Work) -> tuple[int, int]:
    """Start the program; gives its number and a descriptor that ends when it runs, or says why it does not.

    Raises:
        OSError: The machine has no room for another process.
    """
    heard, told = os.pipe()
    # A signal that comes before the program is there waits for it, and is not lost on our own handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become(work, told)
    except OSError:
        os.close(heard)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(told)
    return pid, heard


def _become(work: Work, told: int) -> None:
    try:
        _turn_into(work)
    except _NotStartedError as error:
        os.write(told, str(error).encode("utf-8", "backslashreplace"))
    except BaseException as error:  # noqa: BLE001 - a second keeper must not go on from here
        os.write(told, repr(error).encode("utf-8", "backslashreplace"))
    finally:
        os._exit(_NOT_STARTED)


def _turn_into(work: Work) -> None:
    os.setsid()
    _limit(work)
    if work.user is not None:
        with _or_say(f"cannot run as {work.user.name}"):
            os.setgroups(work.user.groups)
            os.setgid(work.user.gid)
            os.setuid(work.user.uid)
    _connect(work.log)
    with _or_say(f"cannot enter the working directory {work.directory}"):
        os.chdir(work.directory)
    _hear_signals()
    try:
        os.execvpe(work.command[0], tuple(work.command), work.environment)  # noqa: S606 - without a shell is the point
    except (OSError, ValueError) as error:
        raise _NotStartedError(explain(work.command[0], error, work.environment)) from error


def _limit(work: Work) -> None:
    if work.nice is not None:
        with _or_say(f"cannot have nice {work.nice}"):
            os.setpriority(os.PRIO_PROCESS, 0, work.nice)
    if work.io_priority is not None:
        with _or_say("cannot have this ionice"):
            set_io_priority(work.io_priority)
    if work.cpus:
        with _or_say("cannot run on these CPUs"):
            os.sched_setaffinity(0, work.cpus)


def _connect(log: str | None) -> None:
    """Nothing to read; output to the log, which is opened as the user who runs the program."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if log is not None:
        with _or_say(f"cannot write the log {log}"):
            output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)


def _hear_signals() -> None:
    """As a program finds them that a shell starts."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@contextmanager
def _or_say(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise _NotStartedError(f"{what}: {reason}") from error
