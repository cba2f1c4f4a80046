"""The directory of a harvest: that it is the only one there, who its programs are, and what it has won.

The status is kept here for whoever comes after a crash, and published where everybody on the machine can read it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from gpulse.errors import DiskError, UsageError
from gpulse.harvest.running.told import Process
from gpulse.harvest.scribe import Scribe, replace
from gpulse.harvest.trust import check_trust
from gpulse.model.harvest import HarvestStatus, from_document, to_document
from gpulse.sources.harvest import status_path
from gpulse.sources.procfs import Roots, read_record

log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20
_KEEP_SECONDS = 60.0
"""Homes may be on another machine: the time alone is not worth a write at every look."""
_LEDGER, _MARK, _LOCK = "ledger.json", "mark", "lock"


class Won(NamedTuple):
    """What was won, also on GPUs and by programs that the configuration no longer names."""

    gpus: dict[str, tuple[float, int]]
    """By UUID: seconds, and how often they were given back."""
    programs: dict[str, float]


class Kept(NamedTuple):
    """What an earlier harvest left here."""

    status: HarvestStatus | None = None
    won: Won = Won({}, {})
    processes: tuple[Process, ...] = ()
    """Its keepers and programs, when the machine was not restarted since."""


class Ledger:
    """One harvest's directory; nobody else can have it at the same time."""

    def __init__(self, directory: str, roots: Roots, *, uid: int) -> None:
        """Take the directory.

        Raises:
            UsageError: Another harvest has it, or as root: others could write it.
            DiskError: It cannot be written.
        """
        self._directory = directory
        self._boot = _boot_id(roots)
        self._scribe = Scribe()
        self._complained = False
        self._kept_at = 0.0
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            if uid == 0:
                check_trust(directory, os.stat(directory))
            self._locks = [_locked(f"{directory}/{_LOCK}")]
            self.mark = self._own_mark()
        except OSError as error:
            raise DiskError(
                f"cannot use {directory}: {error.strerror}", hint="name another place with --state-dir"
            ) from error
        self._published = status_path(roots, uid, self.mark)
        self._machine = f"{roots.dev}/shm/gpulse-harvest-{uid}.lock"
        self._take_machine(uid)

    def _take_machine(self, uid: int) -> None:
        """Be the only one of this user here, whatever directory: two would not know each other's programs."""
        try:
            self._locks.append(_locked(self._machine))
        except UsageError:
            if os.stat(self._machine).st_uid == uid:
                self.close()
                raise
            log.warning("%s is somebody else's, and counts for nothing", self._machine)
        except OSError as error:
            log.warning("cannot lock %s: %s", self._machine, error.strerror)

    def _own_mark(self) -> str:
        """What tells the programs of this directory's harvests from all others, made once."""
        path = f"{self._directory}/{_MARK}"
        with suppress(OSError, ValueError):
            mark = read_record(path, 64).decode("ascii").strip()
            if len(mark) == 32 and set(mark) <= set("0123456789abcdef"):
                return mark
        mark = secrets.token_hex(16)
        replace(path, mark.encode(), 0o600)
        return mark

    def kept(self) -> Kept:
        """What the harvest before this one left; what it told last may be newer than what it wrote down."""
        document = _read(f"{self._directory}/{_LEDGER}") or {}
        status = from_document(document.get("status"))
        told = from_document(_read(self._published))
        if document and status is None:
            log.warning("what is kept in %s cannot be read: hours are counted anew", self._directory)
        if told is not None and (status is None or told.time > status.time):
            status = told
        same_boot = document.get("boot") == self._boot
        processes = tuple(_processes(status)) if status is not None and (same_boot or status is told) else ()
        return Kept(status, _won(document.get("won")), processes)

    def keep(self, status: HarvestStatus, won: Won, *, changed: bool) -> None:
        """Tell everybody, and write it down when something changed or some time went by.

        The first is in memory; the second may take its time, and nobody waits for it.
        """
        document = to_document(status)
        if changed or abs(status.time - self._kept_at) >= _KEEP_SECONDS:
            self._kept_at = status.time
            kept = {"boot": self._boot, "status": document, "won": won._asdict()}
            self._scribe.write(f"{self._directory}/{_LEDGER}", _bytes(kept), 0o600)
        try:
            replace(self._published, _bytes(document), 0o644, lasting=False)
            self._complained = False
        except OSError as error:
            if not self._complained:
                self._complained = True
                log.warning("cannot write %s: %s", self._published, error.strerror)

    def close(self) -> None:
        """Tell nobody any more, and let the directory go."""
        self._scribe.close()
        gone = (self._published, self._machine) if len(self._locks) > 1 else (self._published,)
        for path in gone:
            with suppress(OSError):
                os.unlink(path)
        while self._locks:
            os.close(self._locks.pop())


def read_kept(directory: str) -> HarvestStatus | None:
    """What a harvest that may have ended last wrote in its directory."""
    document = _read(f"{directory}/{_LEDGER}")
    return None if document is None else from_document(document.get("status"))


def _locked(path: str) -> int:
    """A descriptor with which nobody else can lock this file.

    Raises:
        UsageError: Somebody has.
        OSError: It cannot be locked.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(path, descriptor):  # whoever had it removed it just now
            os.close(descriptor)
            return _locked(path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise UsageError(
            f"a harvest of yours is running here already{f' (process {holder})' if holder else ''}",
            hint="gpulse harvest status shows it; kill -HUP makes it read its configuration again",
        ) from error
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(path: str, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def _processes(status: HarvestStatus) -> Iterator[Process]:
    for run in status.runs:
        for process in (run.keeper, run.process):
            if process is not None:
                yield Process(*process)


def _won(raw: object) -> Won:
    """What `Won` was written as, nothing for anything else."""
    if not isinstance(raw, dict):
        return Won({}, {})
    try:
        gpus = {str(uuid): (_counted(seconds), int(times)) for uuid, (seconds, times) in raw["gpus"].items()}
        programs = {str(name): _counted(seconds) for name, seconds in raw["programs"].items()}
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
        return Won({}, {})
    return Won(gpus, programs)


def _counted(raw: Any) -> float:
    seconds = float(raw)
    if not 0.0 <= seconds < math.inf:
        raise ValueError("no time that was counted")
    return seconds


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


def _bytes(document: dict[str, Any]) -> bytes:
    return json.dumps(document, allow_nan=False).encode()
