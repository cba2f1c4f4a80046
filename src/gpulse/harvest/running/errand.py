"""A program of the configuration as the work of a keeper: whole environment, user and priorities by number."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping

from gpulse.errors import UsageError
from gpulse.harvest.running.marks import RUN
from gpulse.harvest.running.work import User, Work
from gpulse.harvest.settings import Program

PROGRAM = "GPULSE_HARVEST_PROGRAM"
"""Names the program in its own environment."""
_OF_OUR_SERVICE = frozenset({"NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"})
_FOR_ANYBODY = frozenset({"PATH", "LANG", "LANGUAGE", "TZ", "TERM", "LD_LIBRARY_PATH"})
_IO_CLASSES = {"best-effort": 2, "idle": 3}
_IO_CLASS_SHIFT = 13
_USUAL_IO_LEVEL = 4


def to_work(mark: str, program: Program, environment: Mapping[str, str], proc: str) -> Work:
    """What a keeper needs to know to run this program.

    Raises:
        UsageError: There is no such user, or no such priority.
        OSError: The current directory is gone.
    """
    account = None if program.user is None else _account(program.user)
    user = None if account is None else _user(account)
    return Work(
        command=program.command,
        directory=os.path.abspath(program.directory),
        environment={
            **_passed_on(environment, to_another=user is not None),
            **({} if account is None else _home(account)),
            **dict(program.environment),
            RUN: mark,
            PROGRAM: program.name,
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
    """`idle`, `best-effort` or `best-effort:N` as the kernel has it."""
    name, _, level = ionice.partition(":")
    if name not in _IO_CLASSES or (level and level not in tuple("01234567")):
        raise UsageError(
            f"there is no ionice {ionice!r}", hint="it is idle, best-effort, or best-effort:0 (first) to :7"
        )
    usual = _USUAL_IO_LEVEL if name == "best-effort" else 0
    return _IO_CLASSES[name] << _IO_CLASS_SHIFT | (int(level) if level else usual)


def _passed_on(environment: Mapping[str, str], *, to_another: bool) -> dict[str, str]:
    """What a program gets of harvest's environment: nothing of its service, and no secrets when it is another user's."""
    return {
        name: value
        for name, value in environment.items()
        if not _is_of_our_service(name) and (_is_for_anybody(name) or not to_another)
    }


def _is_of_our_service(name: str) -> bool:
    return name in _OF_OUR_SERVICE or name.startswith("WATCHDOG_")


def _is_for_anybody(name: str) -> bool:
    return name in _FOR_ANYBODY or name.startswith(("LC_", "CUDA_"))


def _account(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise UsageError(f"there is no user {name!r}", hint="see `getent passwd`") from None


def _home(account: pwd.struct_passwd) -> dict[str, str]:
    return {
        "HOME": account.pw_dir,
        "USER": account.pw_name,
        "LOGNAME": account.pw_name,
        "SHELL": account.pw_shell,
    }


def _user(account: pwd.struct_passwd) -> User | None:
    """Nobody else when it is who we are already."""
    if account.pw_uid == os.geteuid():
        return None
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    return User(account.pw_name, account.pw_uid, account.pw_gid, groups)
