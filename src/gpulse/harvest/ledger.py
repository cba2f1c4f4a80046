"""The directory of a harvest: that it is the only one there, who its programs are, and what it has won.

The status is kept here for whoever comes after a crash, and published where everybody on the machine can read it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from gpulse.errors import DiskError, UsageError
from gpulse.harvest.running.told import Process
from gpulse.model.harvest import HarvestStatus, from_document, to_document
from gpulse.sources.harvest import status_path
from gpulse.sources.procfs import Roots, read_record

log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20
_KEEP_SECONDS = 60.0
"""Homes may be on another machine: the time alone is not worth a write at every look."""
_LEDGER, _MARK, _LOCK = "ledger.json", "mark", "lock"


class Kept(NamedTuple):
    """What an earlier harvest left here."""

    status: HarvestStatus | None
    processes: tuple[Process, ...]
    """Its keepers and programs, when the machine was not restarted since."""


class Ledger:
    """One harvest's directory; nobody else can have it at the same time."""

    def __init__(self, directory: str, roots: Roots, *, uid: int) -> None:
        """Take the directory.

        Raises:
            UsageError: Another harvest has it.
            DiskError: It cannot be written.
        """
        self._directory = directory
        self._published = status_path(roots, uid)
        self._boot = _boot_id(roots)
        self._complained: set[str] = set()
        self._kept_at = 0.0
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            self._lock = os.open(f"{directory}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.mark = self._own_mark()
        except OSError as error:
            raise DiskError(
                f"cannot write {directory}: {error.strerror}", hint="name another place with --state-dir"
            ) from error
        self._take()

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            with suppress(OSError):
                holder = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip()
            os.close(self._lock)
            raise UsageError(
                f"a harvest is running here already{f' (process {holder})' if holder else ''}",
                hint="gpulse harvest status shows it; kill -HUP makes it read its configuration again",
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _own_mark(self) -> str:
        """What tells the programs of this directory's harvests from all others, made once."""
        path = f"{self._directory}/{_MARK}"
        with suppress(OSError, ValueError):
            mark = read_record(path, 64).decode("ascii").strip()
            if len(mark) == 32 and mark.isalnum():
                return mark
        mark = secrets.token_hex(16)
        _write(path, mark.encode(), 0o600)
        return mark

    def kept(self) -> Kept:
        """What the harvest before this one left."""
        document = _read(f"{self._directory}/{_LEDGER}")
        if document is None:
            return Kept(None, ())
        status = from_document(document.get("status"))
        if status is None:
            log.warning("what is kept in %s cannot be read: hours are counted anew", self._directory)
            return Kept(None, ())
        processes = tuple(_processes(status)) if document.get("boot") == self._boot else ()
        return Kept(status, processes)

    def keep(self, status: HarvestStatus, *, changed: bool) -> None:
        """Tell everybody, and write it down when something changed or some time went by.

        What cannot be written is said once.
        """
        document = to_document(status)
        if changed or abs(status.time - self._kept_at) >= _KEEP_SECONDS:
            self._kept_at = status.time
            self._try(f"{self._directory}/{_LEDGER}", {"boot": self._boot, "status": document}, 0o600)
        self._try(self._published, document, 0o644)

    def _try(self, path: str, document: dict[str, Any], mode: int) -> None:
        try:
            _write(path, json.dumps(document, allow_nan=False).encode(), mode)
            self._complained.discard(path)
        except OSError as error:
            if path not in self._complained:
                self._complained.add(path)
                log.warning("cannot write %s: %s", path, error.strerror)

    def close(self) -> None:
        """Tell nobody any more, and let the directory go."""
        with suppress(OSError):
            os.unlink(self._published)
        os.close(self._lock)


def read_kept(directory: str) -> HarvestStatus | None:
    """What a harvest that may have ended last wrote in its directory."""
    document = _read(f"{directory}/{_LEDGER}")
    return None if document is None else from_document(document.get("status"))


def _processes(status: HarvestStatus) -> Iterator[Process]:
    for run in status.runs:
        for process in (run.keeper, run.process):
            if process is not None:
                yield Process(*process)


def _boot_id(roots: Roots) -> str | None:
    with suppress(OSError):
        return read_record(f"{roots.proc}/sys/kernel/random/boot_id", 64).decode("ascii", "replace").strip()
    return None


def _read(path: str) -> dict[str, Any] | None:
    try:
        document = json.loads(read_record(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _write(path: str, data: bytes, mode: int) -> None:
    """Replace a file as a whole.

    Raises:
        OSError: It cannot be.
    """
    temporary = f"{path}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    descriptor = os.open(temporary, flags, mode)
    try:
        os.fchmod(descriptor, mode)
        os.write(descriptor, data)
        os.close(descriptor)
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
