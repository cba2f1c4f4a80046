"""Who an agent is: its machine, this boot of it, and the agent itself, told apart from all others."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gpulse.errors import UsageError

_MACHINE_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_BOOT_FILE = "/proc/sys/kernel/random/boot_id"
_LONGEST = 200
_LONGEST_PART = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class Identity(NamedTuple):
    """What an agent says about itself."""

    host: str
    machine: str
    boot: str
    instance: str
    pid: int


def read_identity(state: Path, *, name: str | None = None, machine_file: Path | None = None) -> Identity:
    """Find out who we are.

    Args:
        state: Where what cannot be found is kept, once it was made up.
        name: What the node is to be called; its host name when None.
        machine_file: Holds the machine's id.

    Raises:
        UsageError: The machine's file cannot be read, or is empty.
    """
    return Identity(
        host=name or socket.gethostname() or "unknown",
        machine=_machine(state, machine_file),
        boot=_first_line(_BOOT_FILE) or "",
        instance=_kept(state / "instance-id"),
        pid=os.getpid(),
    )


def safe_name(text: str) -> str:
    """The text as one part of a path."""
    return _UNSAFE.sub("_", text).lstrip(".")[:_LONGEST_PART] or "_"


def state_name(targets: Sequence[str]) -> str:
    """How the state directory of an agent is called that has these heads, `host:port` of each."""
    whole = ",".join(targets).lower()
    if len(targets) == 1 or len(whole) <= _LONGEST_PART:
        return safe_name(whole)
    return f"{safe_name(whole)[:60]}-{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def _machine(state: Path, machine_file: Path | None) -> str:
    if machine_file is not None:
        found = _first_line(machine_file)
        if not found:
            raise UsageError(
                f"there is no machine id in {machine_file}",
                hint="write any text into it that no other machine has, or leave --machine-id-file out",
            )
        return found
    for path in _MACHINE_FILES:
        if found := _first_line(path):
            return found
    return _kept(state / "machine-id")


def _kept(path: Path) -> str:
    """A random id that stays the same for as long as the file does; on a disk that takes nothing, for this run."""
    if found := _first_line(path):
        return found
    made = secrets.token_hex(16)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(made + "\n", encoding="ascii")
    return made


def _first_line(path: Path | str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline(_LONGEST).strip() or None
    except OSError:
        return None
