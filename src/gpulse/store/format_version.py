"""Format version of a data directory, stored with a checksum in a file in it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from zlib import crc32

from gpulse.atomic_files import make_directories, replace_file
from gpulse.errors import LogError
from gpulse.store.damage import Damage, set_aside
from gpulse.store.disk_errors import disk_errors
from gpulse.store.metadata.file_check import METADATA_FILE, has_check

FORMAT = 2
"""One version for everything in a data directory: log, metadata and history.

An incompatible change needs a new number and a new fixture in tests/fixtures/data."""
FORMAT_FILE = "format"
_LINES = re.compile(rb"(gpulse data, format (\d{1,6})\n)(?:checksum ([0-9a-f]{8})\n)?")
_MAX_BYTES = 100


class DamagedFormatError(LogError):
    """The format file of a data directory is missing, has no version, or has another one than was written."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"cannot read the data format version from {path}: the file is damaged ({reason})",
            hint=f"restore the file (its first line is: gpulse data, format {FORMAT}), or use another --data-dir",
        )
        self.reason = reason


class OtherFormatError(LogError):
    """Another version of gpulse wrote a data directory."""

    def __init__(self, directory: str, writer: str, version: int, *, is_certain: bool) -> None:
        super().__init__(
            f"{directory} was written by {writer} (data format {version}); this version of gpulse reads only format {FORMAT}",
            hint="use another --data-dir, or move this one away; only the version of gpulse that wrote it can export its sessions",
        )
        self.is_certain = is_certain
        """Whether a checksum confirms the version."""


def prepare_format(directory: str) -> list[Damage]:
    """Check the format of a data directory; create the directory and its format file if it is new.

    A damaged format file is written again if the directory has a log: log, metadata and history each have a version of
    their own, which is checked when they are opened. Return that damage.

    Raises:
        LogError: Another version of gpulse wrote the directory, or its format file is damaged and there is no log.
        DiskError: The directory cannot be read or written.
    """
    repaired = []
    try:
        is_written = check_format(directory)
    except DamagedFormatError as error:
        path = f"{directory}/{FORMAT_FILE}"
        if not os.path.exists(f"{directory}/log"):
            raise
        moved = set_aside(directory, path, FORMAT_FILE)
        affects = "no data is missing: the file was written again"
        repaired.append(Damage(path, error.reason, affects, moved_to=moved))
        is_written = False
    if not is_written or not _has_checksum(directory):
        write_format(directory)
    return repaired


def write_format(directory: str) -> None:
    """Write the format file of a data directory, which is created if it does not exist.

    Raises:
        DiskError: The file cannot be written.
    """
    line = b"gpulse data, format %d\n" % FORMAT
    with disk_errors(f"cannot create {directory}"):
        make_directories(directory)
    with disk_errors(f"cannot write {directory}/{FORMAT_FILE}"):
        replace_file(f"{directory}/{FORMAT_FILE}", line + b"checksum %08x\n" % crc32(line))


def check_format(directory: str) -> bool:
    """Check the format of a data directory; return False if it has no data yet.

    Raises:
        DamagedFormatError: The format file is damaged.
        OtherFormatError: Another version of gpulse wrote the directory.
        DiskError: The directory cannot be read.
    """
    path = f"{directory}/{FORMAT_FILE}"
    text = _read(directory)
    if text is None:
        if not os.path.exists(f"{directory}/log"):
            return False
        if has_check(f"{directory}/{METADATA_FILE}"):  # versions without a format file did not write that
            raise DamagedFormatError(path, "the file is missing")
        raise OtherFormatError(directory, "an earlier version of gpulse", 1, is_certain=False)
    found = _LINES.fullmatch(text)
    if found is None:
        raise DamagedFormatError(path, "it has no version")
    line, version, checksum = found[1], int(found[2]), found[3]
    if checksum is not None and crc32(line) != int(checksum, 16):
        raise DamagedFormatError(path, "its checksum is wrong")
    if version != FORMAT:
        writer = f"a{' newer' if version > FORMAT else 'n earlier'} version of gpulse"
        raise OtherFormatError(directory, writer, version, is_certain=checksum is not None)
    return True


def _has_checksum(directory: str) -> bool:
    found = _LINES.fullmatch(_read(directory) or b"")
    return found is not None and found[3] is not None


def _read(directory: str) -> bytes | None:
    path = f"{directory}/{FORMAT_FILE}"
    with disk_errors(f"cannot read {path}"), suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read(_MAX_BYTES)
    return None
