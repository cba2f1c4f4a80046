"""The file itself: read once, and when we are root only if nobody else could have written it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from gpulse.harvest.settings import ConfigError

_MOST_BYTES = 1 << 20
_MOST_LINKS = 40
_TEMPLATE_HINT = "gpulse harvest init writes one to begin with"
_MOVE_HINT = "sudo chown root and sudo chmod go-w, or keep it in a directory of root's such as /etc/gpulse"


def read(path: str, *, root: bool) -> str:
    """The text of a configuration.

    Args:
        path: Its file; symbolic links are followed.
        root: Its programs run as root, so it must be root's or the caller's alone.

    Raises:
        ConfigError: It cannot be read, is no text, or others may change it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file", hint=_TEMPLATE_HINT) from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{path}: this is a directory", hint="name the file in it")
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: this is not a regular file", hint="save it as one")
        if root:
            _check_trust(path, status)
        data = _bytes(descriptor)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)
    return _decoded(data, path)


def _unreadable(path: str, error: OSError | ValueError) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"{path}: it cannot be read: {why}", hint="is it yours to read?")


def _bytes(descriptor: int) -> bytes:
    data = b""
    while len(data) <= _MOST_BYTES and (part := os.read(descriptor, _MOST_BYTES)):
        data += part
    return data


def _decoded(data: bytes, path: str) -> str:
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path}: it is larger than 1 MiB", hint="is it a configuration?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: this is not UTF-8 text", hint="save it as UTF-8") from error


def _check_trust(path: str, status: os.stat_result) -> None:
    """Refuse a file that somebody else may write, or put another one in the place of."""
    trusted = {0, os.getuid(), os.stat("/").st_uid}
    if status.st_uid not in trusted:
        raise ConfigError(f"{path}: it belongs to somebody else (user {status.st_uid})", hint=_MOVE_HINT)
    if _others_may_write(status.st_mode, status.st_gid):
        raise ConfigError(f"{path}: others may write it, and its programs run as root", hint=_MOVE_HINT)
    for directory, only_passed in _way(path):
        found = os.stat(directory)
        shared = _others_may_write(found.st_mode, found.st_gid)
        if found.st_uid not in trusted:
            raise ConfigError(
                f"{path}: its directory {directory} belongs to somebody else (user {found.st_uid})",
                hint=_MOVE_HINT,
            )
        # In a sticky directory others cannot touch what is not theirs.
        if shared and not (only_passed and found.st_mode & stat.S_ISVTX):
            raise ConfigError(
                f"{path}: others may write its directory {directory}, and its programs run as root",
                hint=_MOVE_HINT,
            )


def _others_may_write(mode: int, group: int) -> bool:
    return bool(mode & stat.S_IWOTH) or (bool(mode & stat.S_IWGRP) and group != 0)


def _way(path: str) -> Iterator[tuple[str, bool]]:
    """Every directory on the way to a file, links followed; True when it only leads to the next directory."""
    waiting = [part for part in os.path.abspath(path).split("/") if part][::-1]
    current, links = "/", 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            current = os.path.dirname(current)
            continue
        entry = os.path.join(current, part)
        is_link = os.path.islink(entry)
        yield current, bool(waiting) and not is_link
        if not is_link:
            current = entry
            continue
        links += 1
        if links > _MOST_LINKS:
            raise ConfigError(f"{path}: there are too many links on the way to it", hint=_MOVE_HINT)
        target = os.readlink(entry)
        if target.startswith("/"):
            current = "/"
        waiting += [step for step in target.split("/") if step not in ("", ".")][::-1]
