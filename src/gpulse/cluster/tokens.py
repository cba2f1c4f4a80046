"""The token that other machines and other users need: a file that nobody but its owner can read."""

from __future__ import annotations

import os
import pwd
import secrets
import shlex
import socket
import stat
from contextlib import suppress

from gpulse.errors import GpulseError, UsageError

_SHORTEST_TOKEN = 16
_LONGEST_TOKEN = 1000


def load_or_make_token(path: str) -> str:
    """The token of this user, made when there is none yet.

    Raises:
        UsageError: There is a file, but no token in it, or others can read it.
        GpulseError: It cannot be read or made.
    """
    if os.path.lexists(path):
        return read_token(path)
    token = secrets.token_urlsafe(32)
    draft = f"{path}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{token}\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # fails when another head was faster, so that both use one token
        except FileExistsError:
            return read_token(path)
        finally:
            with suppress(OSError):
                os.unlink(draft)
    except OSError as error:
        raise GpulseError(
            f"the token file {path} cannot be made: {error.strerror}",
            hint="name another one with --token-file",
        ) from error
    return token


def read_token(path: str) -> str:
    """The token in a file that nobody but its owner can read.

    Raises:
        UsageError: It holds no token, or others can read it.
        GpulseError: It cannot be read.
    """
    try:
        with open(path, encoding="ascii", errors="replace", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(
                    f"the token file {path} is not a regular file", hint="name another one with --token-file"
                )
            text = file.read(_LONGEST_TOKEN + 2).strip()
    except OSError as error:
        raise GpulseError(
            f"the token file {path} cannot be read: {error.strerror}",
            hint="copy it from the head's machine (gpulse token prints how, there), or name it with --token-file",
        ) from error
    is_ours = status.st_uid == os.geteuid() and _is_of_gpulse(path)
    another = "name a copy of the head's token, mode 600, with --token-file"
    if status.st_mode & 0o077:
        raise UsageError(
            f"others can read the token file {path}", hint=f"chmod 600 {path}" if is_ours else another
        )
    if (
        not _SHORTEST_TOKEN <= len(text) <= _LONGEST_TOKEN
        or not text.isascii()
        or not text.isprintable()
        or " " in text
    ):
        raise UsageError(
            f"{path} holds no token: one line of {_SHORTEST_TOKEN} characters or more",
            hint=f"remove it, and the next start of a head makes a new one: rm {path}"
            if is_ours
            else another,
        )
    return text


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for whoever might write to a pipe of that name."""
    return os.open(path, flags | os.O_NONBLOCK)


def copy_command(path: str) -> str:
    """Return the shell command that copies a token file of this machine, run on another one."""
    user = str(os.geteuid())
    with suppress(KeyError):
        user = pwd.getpwuid(os.geteuid()).pw_name
    return _copy(shlex.quote(f"{user}@{socket.gethostname()}:{path}"))


def token_hint(host: str, *, is_local: bool) -> str:
    """Say how to get the token of a head that wants one.

    Args:
        host: The head's machine, as it was addressed.
        is_local: Whether that is this machine: another user's head then.
    """
    if is_local:
        return (
            "run it as the user who started the head, or have that user run: gpulse token --show, "
            "and name a file of mode 600 with it: --token-file FILE"
        )
    source = shlex.quote(f"{host}:.config/gpulse/token")
    return f"{_copy(source)} (if it is elsewhere, the user who started the head can run there: gpulse token)"


def _copy(source: str) -> str:
    return f"mkdir -p ~/.config/gpulse && scp {source} ~/.config/gpulse/token"


def _is_of_gpulse(path: str) -> bool:
    """Whether a file is in a directory of ours: nobody is to be told to change, or remove, any other."""
    return os.path.basename(os.path.dirname(os.path.abspath(path))) == "gpulse"
