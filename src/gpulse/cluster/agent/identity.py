"""Identity of an agent: host name, machine ID, boot ID and the ID of the agent itself."""

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

from gpulse.atomic_files import make_directories, replace_file
from gpulse.errors import UsageError

_MACHINE_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_BOOT_FILE = "/proc/sys/kernel/random/boot_id"
_MAX_ID_CHARACTERS = 200
_MAX_PATH_PART_CHARACTERS = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class AgentIdentity(NamedTuple):
    """The identity that an agent reports in its hello message."""

    host: str
    machine: str
    boot: str
    instance: str
    pid: int


def read_identity(state: Path, *, name: str | None = None, machine_file: Path | None = None) -> AgentIdentity:
    """Read the identity of this agent.

    Args:
        state: State directory, which stores generated IDs.
        name: Name of the node; the host name when None.
        machine_file: File with the machine ID; the system's when None.

    Raises:
        UsageError: `machine_file` cannot be read or is empty.
    """
    return AgentIdentity(
        host=name or socket.gethostname() or "unknown",
        machine=_read_machine_id(state, machine_file),
        boot=_read_first_line(_BOOT_FILE) or "",
        instance=_load_or_create_id(state / "instance-id"),
        pid=os.getpid(),
    )


def safe_path_part(text: str) -> str:
    """Return a text with only characters that are safe in one component of a path."""
    return _UNSAFE.sub("_", text).lstrip(".")[:_MAX_PATH_PART_CHARACTERS] or "_"


def state_directory_name(targets: Sequence[str]) -> str:
    """Return the name of the state directory of an agent for these heads (`host:port` each)."""
    whole = ",".join(targets).lower()
    if len(targets) == 1 or len(whole) <= _MAX_PATH_PART_CHARACTERS:
        return safe_path_part(whole)
    return f"{safe_path_part(whole)[:60]}-{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def _read_machine_id(state: Path, machine_file: Path | None) -> str:
    if machine_file is not None:
        found = _read_first_line(machine_file)
        if not found:
            raise UsageError(
                f"cannot read a machine ID from {machine_file}",
                hint="write an ID that is unique to this machine into the file, or omit --machine-id-file",
            )
        return found
    for path in _MACHINE_FILES:
        if found := _read_first_line(path):
            return found
    return _load_or_create_id(state / "machine-id")


def _load_or_create_id(path: Path) -> str:
    """Return the ID in a file, created if missing; on a read-only disk the ID lasts for this run only."""
    if found := _read_first_line(path):
        return found
    made = secrets.token_hex(16)
    with suppress(OSError):
        make_directories(os.fspath(path.parent))
        replace_file(path, f"{made}\n".encode())
    return made


def _read_first_line(path: Path | str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline(_MAX_ID_CHARACTERS).strip() or None
    except OSError:
        return None
