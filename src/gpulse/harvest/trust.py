"""What root may believe: files that nobody else could have written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from gpulse.harvest.settings import ConfigError

_MOST_LINKS = 40
_MOVE_HINT = "sudo chown root and sudo chmod go-w, or keep it in a directory of root's such as /etc/gpulse"


def check_trust(path: str, status: os.stat_result) -> None:
    """Refuse a file or directory that somebody else may write, or put another one in the place of.

    Args:
        path: Where it is; symbolic links are followed.
        status: Its own.

    Raises:
        ConfigError: Somebody may.
    """
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
