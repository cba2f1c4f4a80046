"""Small /proc and /sys trees on disk, to point the host's sources at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpulse.sources.procfs import Roots

STAT_FIELDS = 50
"""How many fields follow the name in /proc/PID/stat."""


def grow(root: Path, files: Mapping[str, str | bytes], links: Mapping[str, str] | None = None) -> Roots:
    """Write files and symbolic links below a directory that holds `proc`, `sys` and `dev`."""
    for folder in ("proc", "sys", "dev"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    for name, target in (links or {}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    return Roots(proc=str(root / "proc"), sys=str(root / "sys"), dev=str(root / "dev"))


def pid_stat(
    pid: int,
    parent: int = 1,
    *,
    comm: bytes = b"python3",
    state: bytes = b"S",
    session: int = 0,
    user: int = 0,
    system: int = 0,
    start: int = 100,
    resident: int = 0,
    threads: int = 1,
    faults: int = 0,
    cpu: int = 0,
    blocked: int = 0,
) -> bytes:
    """One line as /proc/PID/stat has it."""
    fields = [b"0"] * STAT_FIELDS
    numbers = {
        1: parent,
        3: session,
        9: faults,
        11: user,
        12: system,
        17: threads,
        19: start,
        21: resident,
        36: cpu,
        39: blocked,
    }
    fields[0] = state
    for column, value in numbers.items():
        fields[column] = b"%d" % value
    return b"%d (%s) %s\n" % (pid, comm, b" ".join(fields))
