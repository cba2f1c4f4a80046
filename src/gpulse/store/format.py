"""The version of a data directory's format, kept in a file of the directory."""

from __future__ import annotations

import os
import re

from gpulse.errors import LogError
from gpulse.store.disk import disk_errors, sync_directory

FORMAT = 2
"""Version of everything in a data directory together: log, metadata and history.

A change that an earlier or later gpulse cannot read needs a new number and a new fixture in tests/fixtures/data."""
FILE = "format"
_LINE = re.compile(r"gpulse data, format (\d{1,6})\n", re.ASCII)
_MAX_BYTES = 100


def prepare_format(directory: str) -> None:
    """Check the format of a data directory, or create it and write the format down.

    Raises:
        LogError: Another version of gpulse wrote it, or the file cannot be understood.
        DiskError: It cannot be read or written.
    """
    if not check_format(directory):
        with disk_errors(f"make {directory}"):
            os.makedirs(directory, mode=0o700, exist_ok=True)
        with disk_errors(f"write {directory}/{FILE}"):
            with open(f"{directory}/{FILE}.new", "w", encoding="ascii") as file:
                file.write(f"gpulse data, format {FORMAT}\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{directory}/{FILE}.new", f"{directory}/{FILE}")
            sync_directory(directory)


def check_format(directory: str) -> bool:
    """Check the format of a data directory; False when it holds no data yet.

    Raises:
        LogError: Another version of gpulse wrote it, or the file cannot be understood.
        DiskError: It cannot be read.
    """
    path = f"{directory}/{FILE}"
    with disk_errors(f"read {path}"):
        try:
            with open(path, "rb") as file:
                text = file.read(_MAX_BYTES)
        except FileNotFoundError:
            if not os.path.exists(f"{directory}/log"):
                return False
            raise _refusal(directory, "an earlier version of gpulse") from None
    found = _LINE.fullmatch(text.decode("ascii", "replace"))
    if found is None:
        raise LogError(
            f"{path} does not say which format the data has",
            hint=f"restore the file (it is one line: gpulse data, format {FORMAT}), or use another --data-dir",
        )
    version = int(found[1])
    if version != FORMAT:
        raise _refusal(
            directory, f"a{' newer' if version > FORMAT else 'n earlier'} version of gpulse", version
        )
    return True


def _refusal(directory: str, writer: str, version: int = 1) -> LogError:
    return LogError(
        f"{directory} was written by {writer} (data format {version}); this one reads format {FORMAT} only",
        hint="use another --data-dir, or move this one away; its sessions can be exported with the gpulse that wrote it",
    )
