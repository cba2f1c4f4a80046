"""Run the site's hook for a holder of unused GPUs: as another user, without a shell, with checked arguments.

Files that decide which program a head runs are used only if no other user can change them.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import select
import shlex
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from gpulse.cluster.notify.idle_holdings import HeldPlace
from gpulse.cluster.notify.idle_policy import IdlePolicy, Track
from gpulse.errors import UsageError
from gpulse.model.safe_text import one_line, printable, quoted

PLACEHOLDERS = ("job", "job_id", "user", "node", "gpus", "pids", "idle_seconds")
"""Each is also an environment variable of the hook: GPULSE_JOB, GPULSE_JOB_ID, …"""
MAX_OUTPUT_BYTES = 4096
"""How much of the hook's output is kept: the beginning."""
MAX_LISTED = 1000
"""GPUs and processes that are named; a job with more is named by its ID anyway."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_SAFE_VALUE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+,=/-]*", re.ASCII)
"""Words without spaces, quotes and characters that mean something to a shell, in case the hook is a careless script."""
_PARENT_DIRECTORY = re.compile(r"(?:^|[^A-Za-z0-9_.-])\.\.(?:$|[^A-Za-z0-9_.-])", re.ASCII)
"""Would lead a hook that uses a value as part of a path elsewhere."""
_MAX_NAME_CHARACTERS = 256
_POLL_SECONDS = 0.1
_STOP_SECONDS = 3.0
"""How long a hook may still run when the head stops."""
_CANNOT_EXECUTE = 127
_CANNOT_EXECUTE_TEXT = b"gpulse: cannot run the hook: "
_CHANGE_USER = f"""
import os, sys
uid, gid, groups, program, *command = sys.argv[1:]
try:
    os.setgroups([int(group) for group in groups.split(",")])
    os.setresgid(int(gid), int(gid), int(gid))
    os.setresuid(int(uid), int(uid), int(uid))
    os.execve(program, command, os.environ)
except OSError as error:
    sys.stdout.write({_CANNOT_EXECUTE_TEXT.decode()!r} + str(error.strerror))
    sys.stdout.flush()
    os._exit({_CANNOT_EXECUTE})
"""
"""Program that becomes another user for good, and then the hook."""
MAX_LINKS = 40
"""As many symbolic links as the kernel follows."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class HookUser(NamedTuple):
    """The Unix account that runs the hook."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


class HookCall(NamedTuple):
    """A hook with its arguments and environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


class HookRefusedError(Exception):
    """The hook cannot be called for a holder, for a reason that operators should read."""


class HookOutcome(NamedTuple):
    """How a hook ended."""

    state: Literal["ended", "failed", "timed_out", "not_started", "refused", "stopped", "unknown"]
    exit_code: int | None = None
    reason: str = ""
    output: str = ""
    """The beginning of what it printed."""


def find_hook_user(policy: IdlePolicy) -> HookUser:
    """Return the account that runs the hook.

    Raises:
        UsageError: The account does not exist, or the head cannot or should not run programs as it.
    """
    own = os.geteuid()
    name = policy.hook_user
    if name is None and own == 0:
        raise UsageError(
            "[idle] hook_user is missing; it is required because the head runs as root",
            hint='add the user to run the hook as, for example hook_user = "gpulse-ops"',
        )
    try:
        account = pwd.getpwuid(own) if name is None else pwd.getpwnam(name)
    except KeyError as error:
        who = f"user {quoted(name)}" if name is not None else f"user ID {own}"
        raise UsageError(
            f"[idle] hook_user: there is no {who} on this machine",
            hint="create that user, or name another one in hook_user",
        ) from error
    if own not in (0, account.pw_uid):
        raise UsageError(
            f"[idle] hook_user is {account.pw_name}, but the head runs as user ID {own} and cannot run programs as another user",
            hint=f"run the head as {account.pw_name} or as root, or remove hook_user",
        )
    groups = tuple(os.getgrouplist(account.pw_name, account.pw_gid))
    return HookUser(account.pw_name, account.pw_uid, account.pw_gid, groups, account.pw_dir)


def check_hook_program(policy: IdlePolicy, user: HookUser) -> None:
    """Check that the hook is an executable that nobody else can replace.

    Raises:
        UsageError: It is missing, cannot be executed, or other users can change it or one of its directories.
    """
    find_trusted_program(policy.hook[0], _trusted_owners(user))


def _trusted_owners(user: HookUser) -> frozenset[int]:
    """Return the users that may change the hook."""
    return frozenset((0, os.geteuid(), user.uid))


def build_hook_call(command: Sequence[str], track: Track, user: HookUser) -> HookCall:
    """Fill in the arguments and the environment of the hook.

    A value fills its place inside one argument, and can become neither a second argument nor an option.

    Raises:
        HookRefusedError: A value is missing, or not safe as an argument.
    """
    values = hook_values(track)
    for name, value in values.items():
        _check_value(name, value)
    if values["job"] and not values["job_id"]:
        raise HookRefusedError(f"the job {quoted(values['job'])} has no ID")
    filled = [command[0]]
    for argument in command[1:]:
        text = _PLACEHOLDER.sub(lambda match: _required(values, match[1]), argument)
        filled.append(text)
    environment = {
        "PATH": _PATH,
        "LANG": "C.UTF-8",
        "HOME": user.home,
        "USER": user.name,
        "LOGNAME": user.name,
        **{f"GPULSE_{name.upper()}": value for name, value in values.items()},
    }
    return HookCall(tuple(filled), environment)


def hook_values(track: Track) -> dict[str, str]:
    """Return the values of the placeholders, unchecked; an unknown one is empty."""
    job = track.holder.job or ""
    return {
        "job": job,
        "job_id": job.partition(":")[2] if ":" in job else job,
        "user": track.user or "",
        "node": ",".join(place.node for place in track.places),
        "gpus": _join_places(track.places, lambda place: [label for label, _ in place.gpus]),
        "pids": _join_places(track.places, lambda place: [str(pid) for pid, _ in place.processes]),
        "idle_seconds": str(int(track.unused_seconds)),
    }


def find_placeholders(command: Iterable[str]) -> frozenset[str]:
    """Return the placeholders in a command."""
    return frozenset(match[1] for argument in command for match in _PLACEHOLDER.finditer(argument))


def has_values(placeholders: frozenset[str], track: Track) -> bool:
    """Return whether a holder has a value for each placeholder: a user without a job, for example, has no job."""
    return not (
        (track.holder.job is None and not placeholders.isdisjoint(("job", "job_id")))
        or (track.user is None and "user" in placeholders)
        or ("pids" in placeholders and not any(place.processes for place in track.places))
    )


def check_placeholders(command: Sequence[str]) -> str | None:
    """Return what is wrong with the placeholders of a command; None if nothing is."""
    if _PLACEHOLDER.search(command[0]):
        return "the program itself must not contain a placeholder"
    for argument in command[1:]:
        for match in _PLACEHOLDER.finditer(argument):
            if match[1] not in PLACEHOLDERS:
                return f"{{{match[1]}}} is not a placeholder; use one of {', '.join(PLACEHOLDERS)}"
    return None


class HookRunner:
    """Runs hooks, one after the other; `run` blocks, so call it from a thread."""

    def __init__(self, user: HookUser, timeout_seconds: float) -> None:
        self._user = user
        self._timeout_seconds = timeout_seconds
        self._stop = threading.Event()

    def stop(self) -> None:
        """End a running hook within a few seconds, and start no other."""
        self._stop.set()

    @property
    def is_stopping(self) -> bool:
        """Whether the head is stopping."""
        return self._stop.is_set()

    def run(self, call: HookCall) -> HookOutcome:
        """Run the hook to its end, or end its process group when it takes too long."""
        if self._stop.is_set():
            return HookOutcome("not_started", reason="the head is stopping")
        try:  # others may have got access to it since the head started
            program = find_trusted_program(call.command[0], _trusted_owners(self._user))
        except UsageError as error:
            return HookOutcome("not_started", reason=printable(error.message, 400))
        change_user = self._change_user(program)
        try:
            # Without a change of user in this call, Python uses vfork: the handlers that gRPC runs after a fork crash.
            process = subprocess.Popen(  # noqa: S603  the site's own program; values are checked
                [*change_user, *call.command],
                executable=None if change_user else program,
                env=dict(call.environment),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,
            )
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return HookOutcome("not_started", reason=printable(reason, 200))
        with process:
            return self._follow(process, process.stdout.fileno() if process.stdout else -1)

    def _change_user(self, program: str) -> list[str]:
        """Return the command that becomes the hook's user and then the hook; nothing where that is this user."""
        who = self._user
        if who.uid == os.geteuid():
            return []
        groups = ",".join(map(str, who.groups))
        return [sys.executable, "-I", "-S", "-c", _CHANGE_USER, str(who.uid), str(who.gid), groups, program]

    def _follow(self, process: subprocess.Popen[bytes], pipe: int) -> HookOutcome:
        """Read what the hook prints until it ends or its time is over."""
        output, deadline = b"", time.monotonic() + self._timeout_seconds
        os.set_blocking(pipe, False)
        readable = select.poll()  # unlike select, it accepts any file descriptor
        readable.register(pipe, select.POLLIN)
        is_stopping, is_open = False, True
        while (code := process.poll()) is None:
            if self._stop.is_set() and not is_stopping:
                is_stopping, deadline = True, min(deadline, time.monotonic() + _STOP_SECONDS)
            left = deadline - time.monotonic()
            if left <= 0:
                _kill_group(process)
                state: Literal["stopped", "timed_out"] = "stopped" if is_stopping else "timed_out"
                return HookOutcome(state, reason=_TIMEOUT_REASONS[state], output=_shown(output))
            if is_open and readable.poll(1000 * min(left, _POLL_SECONDS)):
                piece = _read_piece(pipe)
                is_open = piece != b""
                output = (output + (piece or b""))[:MAX_OUTPUT_BYTES]
            elif not is_open:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(left, _POLL_SECONDS))
        # What its children hold open or still write is not waited for.
        while is_open and (piece := _read_piece(pipe)):
            output += piece
            is_open = len(output) < MAX_OUTPUT_BYTES
        output = output[:MAX_OUTPUT_BYTES]
        if code == 0:
            return HookOutcome("ended", 0, output=_shown(output))
        if code == _CANNOT_EXECUTE and output.startswith(_CANNOT_EXECUTE_TEXT):
            return HookOutcome("not_started", reason=one_line(_shown(output[len(_CANNOT_EXECUTE_TEXT) :])))
        reason = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
        return HookOutcome("failed", code, reason, _shown(output))


_TIMEOUT_REASONS = {
    "timed_out": "the time limit was exceeded",
    "stopped": "the head stopped",
}


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the hook and what it started in its process group, before its PID can be reused."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_piece(pipe: int) -> bytes | None:
    """Return what can be read now: empty at the end, None when there is nothing yet."""
    try:
        return os.read(pipe, 65536)
    except BlockingIOError:
        return None


def _shown(output: bytes) -> str:
    lines = output.decode(errors="replace").splitlines()
    return "\n".join(printable(line.expandtabs()) for line in lines)


def _join_places(places: Sequence[HeldPlace], items: Callable[[HeldPlace], list[str]]) -> str:
    """Return items of all places, separated by commas; on several nodes each has the node's name before it."""
    is_one = len(places) == 1
    found = [item if is_one else f"{place.node}/{item}" for place in places for item in items(place)]
    return ",".join(found[:MAX_LISTED])


def _required(values: Mapping[str, str], name: str) -> str:
    if not values[name]:
        raise HookRefusedError(f"the hook needs {{{name}}}, which is unknown for this user or job")
    return values[name]


def _check_value(name: str, value: str) -> None:
    if name in ("job", "job_id", "user") and len(value) > _MAX_NAME_CHARACTERS:
        raise HookRefusedError(f"the {name} has more than {_MAX_NAME_CHARACTERS} characters")
    if value and (not _SAFE_VALUE.fullmatch(value) or _PARENT_DIRECTORY.search(value)):
        raise HookRefusedError(f"the {name} {quoted(value)} is not safe as an argument of a command")


def find_trusted_program(path: str, owners: Collection[int]) -> str:
    """Return the file of a program, without symbolic links, if only trusted users can change what is run.

    Every directory and every symbolic link on the way must belong to one of the owners, and nobody else may write the
    directories. The sticky bit makes no difference: in such a directory, others can still create a file that is missing.

    Args:
        path: An absolute path.
        owners: User IDs of the users that may change it.

    Raises:
        UsageError: It is missing, is not a program, or others can change it.
    """
    try:
        return _follow(path, owners)
    except OSError as error:
        raise UsageError(
            f"[idle] hook: cannot find {printable(path)}: {error.strerror}",
            hint="give the absolute path of a program",
        ) from error


def _follow(path: str, owners: Collection[int]) -> str:
    """Follow a path from the root directory, one name at a time."""
    current, links = "/", 0
    found = os.lstat(current)
    _check_part(current, found, owners)
    names = path.split("/")[::-1]
    while names:
        name = names.pop()
        if name in ("", "."):
            continue
        if name == "..":
            current = os.path.dirname(current)
            found = os.lstat(current)
            continue
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        part = os.path.join(current, name)
        seen = os.lstat(part)
        _check_part(part, seen, owners)
        if stat.S_ISLNK(seen.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            target = os.readlink(part)
            names += target.split("/")[::-1]
            if target.startswith("/"):
                current, found = "/", os.lstat("/")
        else:
            current, found = part, seen
    if not stat.S_ISREG(found.st_mode) or not found.st_mode & 0o111:
        raise UsageError(
            f"[idle] hook: {printable(path)} is not a program", hint=f"chmod 755 {shlex.quote(path)}"
        )
    return current


def _check_part(path: str, found: os.stat_result, owners: Collection[int]) -> None:
    name = shlex.quote(path)
    if found.st_uid not in owners:
        raise UsageError(
            f"[idle] hook: {printable(path)} belongs to user ID {found.st_uid}, who could change the hook",
            hint=f"chown -h root {name}, or keep the hook in /usr/local/sbin",
        )
    if not stat.S_ISLNK(found.st_mode) and found.st_mode & _OTHERS_WRITE:
        raise UsageError(
            f"[idle] hook: other users can write to {printable(path)} and could change the hook",
            hint=f"chmod go-w {name}, or keep the hook in /usr/local/sbin",
        )


def check_settings_file(path: str, found: os.stat_result, *, has_hook: bool) -> None:
    """Check that other users cannot change a file of settings.

    Args:
        path: The file, for messages.
        found: What `fstat` says of the file that was read.
        has_hook: Whether the settings name a program; then members of the file's group may not change it either.

    Raises:
        UsageError: They can.
    """
    own = os.geteuid()
    if found.st_uid not in (0, own):
        raise UsageError(
            f"{printable(path)} belongs to user ID {found.st_uid}, who could redirect notifications and run other programs",
            hint=f"chown root {shlex.quote(path)}, or run gpulse as the owner of the file",
        )
    if found.st_mode & (_OTHERS_WRITE if has_hook else stat.S_IWOTH):
        raise UsageError(
            f"other users can change {printable(path)}, and so redirect notifications and run other programs",
            hint=f"chmod go-w {shlex.quote(path)}",
        )


class IdleConfig(NamedTuple):
    """A policy, and the account that runs its hook."""

    policy: IdlePolicy
    hook_user: HookUser | None = None


def check_idle_policy(policy: IdlePolicy) -> IdleConfig:
    """Return a policy that this head can carry out.

    Raises:
        UsageError: The hook is missing, can be changed by others, or cannot be run as its user.
    """
    if not policy.hook:
        return IdleConfig(policy)
    user = find_hook_user(policy)
    check_hook_program(policy, user)
    return IdleConfig(policy, user)
