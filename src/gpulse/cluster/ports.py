"""Ports: taking one, and who has it when it is taken."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

_LISTENING = "0A"


def who_listens(port: int) -> str | None:
    """The process that listens on a TCP port of this machine, such as `python3 (pid 4711)`, if it can be found.

    A process of another user cannot be looked into; it is known by its user alone.
    """
    sockets = dict(_listening(port))
    if not sockets:
        return None
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        if any(inode in sockets for inode in _sockets_of(pid)):
            return f"{_program(pid)} (pid {pid})"
    return f"a process of {_user(next(iter(sockets.values())))}"


def _listening(port: int) -> Iterator[tuple[str, int]]:
    """The inode and the user of every socket that listens there."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(table, encoding="ascii") as file:
            next(file, None)
            for line in file:
                parts = line.split()
                if parts[3] == _LISTENING and int(parts[1].rpartition(":")[2], 16) == port:
                    yield parts[9], int(parts[7])


def _sockets_of(pid: str) -> Iterator[str]:
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("socket:["):
                    yield target[8:-1]


def _program(pid: str) -> str:
    with suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return (
            "".join(letter if letter.isprintable() else "?" for letter in file.read().strip()) or "a process"
        )
    return "a process"


def _user(uid: int) -> str:
    import pwd  # noqa: PLC0415  only where a process hides

    with suppress(KeyError):
        return f"the user {pwd.getpwuid(uid).pw_name}"
    return f"the user {uid}"
