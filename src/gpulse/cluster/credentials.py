"""Load and check credentials: the token file, and private keys, which only their owner can read."""

from __future__ import annotations

import os
import pwd
import secrets
import shlex
import socket
import stat
from contextlib import suppress

from gpulse.atomic_files import create_file
from gpulse.errors import GpulseError, UsageError

_MIN_TOKEN_CHARACTERS = 16
_MAX_TOKEN_CHARACTERS = 1000
_ROOT_UID = 0


def load_or_create_token(path: str) -> str:
    """Return the token in a file, which is created if missing.

    Raises:
        UsageError: The file contains no token, or others can read it.
        GpulseError: The file cannot be read or created.
    """
    if os.path.lexists(path):
        return read_token(path)
    token = secrets.token_urlsafe(32)
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        try:
            create_file(path, f"{token}\n".encode(), 0o600)
        except FileExistsError:
            return read_token(path)  # another head created it first: both use its token
    except OSError as error:
        raise GpulseError(
            f"cannot create the token file {path}: {error.strerror}",
            hint="give another path with --token-file",
        ) from error
    return token


def read_token(path: str) -> str:
    """Return the token in a file that only its owner can read.

    Raises:
        UsageError: The file contains no token, or others can read it.
        GpulseError: The file cannot be read.
    """
    try:
        with open(path, encoding="ascii", errors="replace", opener=_open_nonblocking) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(
                    f"the token file {path} is not a regular file", hint="give another path with --token-file"
                )
            text = file.read(_MAX_TOKEN_CHARACTERS + 2).strip()
    except OSError as error:
        raise GpulseError(
            f"cannot read the token file {path}: {error.strerror}",
            hint="copy it from the head's machine (run `gpulse token` there to see how), or give its path with --token-file",
        ) from error
    is_ours = status.st_uid == os.geteuid() and _is_gpulse_file(path)
    another = "copy the head's token to a file with mode 600, and give that file with --token-file"
    if status.st_mode & 0o077:
        raise UsageError(
            f"other users can read the token file {path}",
            hint=f"chmod 600 {path}" if is_ours else another,
        )
    if (
        not _MIN_TOKEN_CHARACTERS <= len(text) <= _MAX_TOKEN_CHARACTERS
        or not text.isascii()
        or not text.isprintable()
        or " " in text
    ):
        raise UsageError(
            f"{path} does not contain a token, which is one line of at least {_MIN_TOKEN_CHARACTERS} characters",
            hint=f"remove it with `rm {path}`; the head creates a new one when it starts"
            if is_ours
            else another,
        )
    return text


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without blocking if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def token_copy_command(path: str) -> str:
    """Return the shell command that copies a token file of this machine to another one, to be run there."""
    user = str(os.geteuid())
    with suppress(KeyError):
        user = pwd.getpwuid(os.geteuid()).pw_name
    return _scp_command(shlex.quote(f"{user}@{socket.gethostname()}:{path}"))


def token_hint(host: str, *, is_local: bool) -> str:
    """Return a hint how to get the token of a head.

    Args:
        host: The head's machine as the user addressed it.
        is_local: Whether that is this machine; the head then belongs to another user.
    """
    if is_local:
        return (
            "run this as the user who started the head; or have that user run `gpulse token --show`, "
            "save the token to a file with mode 600, and give it with --token-file FILE"
        )
    source = shlex.quote(f"{host}:.config/gpulse/token")
    return f"{_scp_command(source)} (if the token is not there, the user who started the head can print its path with `gpulse token`)"


def _scp_command(source: str) -> str:
    return f"mkdir -p ~/.config/gpulse && scp {source} ~/.config/gpulse/token"


def _is_gpulse_file(path: str) -> bool:
    """Return whether a file is in a directory of gpulse: messages never suggest to change or remove any other file."""
    return os.path.basename(os.path.dirname(os.path.abspath(path))) == "gpulse"


def check_key_permissions(path: str) -> None:
    """Refuse a private key that other users can read, by the rules of PostgreSQL.

    A key belongs to the user who runs the program, with mode 600 or less; or to root, and then a group may read it.

    Raises:
        UsageError: Other users can read it.
        OSError: It is not there any more.
    """
    status = os.stat(path)
    is_ours = status.st_uid == os.geteuid()
    if not is_ours and status.st_uid != _ROOT_UID:
        raise UsageError(
            f"--tls-key {path} belongs to another user (UID {status.st_uid}), who can read it",
            hint=f"copy it to a file of your own: install -m 600 {shlex.quote(path)} FILE, and give it with --tls-key",
        )
    allowed = 0o640 if status.st_uid == _ROOT_UID else 0o600
    if stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) & 0o077 & ~allowed:
        raise UsageError(
            f"other users can read or change --tls-key {path} (mode {stat.S_IMODE(status.st_mode):o})",
            hint=f"chmod 600 {shlex.quote(path)}"
            if is_ours
            else f"have an administrator run: chmod 640 {shlex.quote(path)}",
        )
