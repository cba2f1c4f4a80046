"""State directory of a harvest: its lock, the mark of its programs, and the status and totals that survive a restart.

Its files are written in the background, and files that other users can change are refused.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from gpulse.atomic_files import open_output, replace_file
from gpulse.errors import DiskError, UsageError
from gpulse.harvest.events import ProcessId
from gpulse.harvest.settings import ConfigError
from gpulse.harvest.supervise.process_tree import MachineProcessTree
from gpulse.model.harvest_status import HarvestStatus, status_from_document, status_to_document
from gpulse.sources.harvest_status import read_published_status, status_path
from gpulse.sources.procfs import Roots, read_record

log = logging.getLogger(__name__)
_CLOSE_SECONDS = 2.0
"""How long closing waits for the last write."""
_MAX_LINKS = 40
_MOVE_HINT = "run sudo chown root and sudo chmod go-w on this path, or move the file to a directory owned by root, such as /etc/gpulse"


class BackgroundWriter:
    """Writes files on its own thread, so that a slow disk delays nothing; only the newest content is written.

    A failure is logged once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: tuple[str, bytes, int] | None = None
        self._closed = False
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Write it soon; content that still waits to be written is dropped."""
        with self._changed:
            self._next = (path, data, mode)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="gpulse-harvest-writer", daemon=True)
            self._thread.start()

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Write what is left, unless that takes too long."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._next is None:
                    if self._closed:
                        return
                    self._changed.wait()
                path, data, mode = self._next
                self._next = None
            try:
                replace_file(path, data, mode)
                self._has_failed = False
            except OSError as error:
                if not self._has_failed:
                    self._has_failed = True
                    log.warning("cannot write %s: %s", path, error.strerror)


def check_trust(path: str, status: os.stat_result) -> None:
    """Refuse a file or directory that another user can write or replace.

    Args:
        path: Where it is; symbolic links are followed.
        status: Its stat result.

    Raises:
        ConfigError: Another user can write or replace it.
    """
    trusted = {0, os.getuid(), os.stat("/").st_uid}
    if status.st_uid not in trusted:
        raise ConfigError(f"{path}: owned by another user (UID {status.st_uid})", hint=_MOVE_HINT)
    if _others_may_write(status.st_mode, status.st_gid):
        raise ConfigError(
            f"{path}: other users can write to this file, but its programs run as root", hint=_MOVE_HINT
        )
    for directory, only_passed in _walk_directories(path):
        found = os.stat(directory)
        shared = _others_may_write(found.st_mode, found.st_gid)
        if found.st_uid not in trusted:
            raise ConfigError(
                f"{path}: its directory {directory} is owned by another user (UID {found.st_uid})",
                hint=_MOVE_HINT,
            )
        # In a sticky directory users cannot replace files of others.
        if shared and not (only_passed and found.st_mode & stat.S_ISVTX):
            raise ConfigError(
                f"{path}: its directory {directory} is writable by other users, but the programs in this file run as root",
                hint=_MOVE_HINT,
            )


def _others_may_write(mode: int, group: int) -> bool:
    return bool(mode & stat.S_IWOTH) or (bool(mode & stat.S_IWGRP) and group != 0)


def _walk_directories(path: str) -> Iterator[tuple[str, bool]]:
    """Yield every directory on the path of a file, links followed; True when it only leads to the next directory."""
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
        if links > _MAX_LINKS:
            raise ConfigError(f"{path}: too many symbolic links in its path", hint=_MOVE_HINT)
        target = os.readlink(entry)
        if target.startswith("/"):
            current = "/"
        waiting += [step for step in target.split("/") if step not in ("", ".")][::-1]


_MAX_STATE_BYTES = 1 << 20
_MAX_SAVED_PROCESSES = 10_000
_PROCESSES_SECONDS = 10.0
"""How often the processes below this one are listed; what a harvest has not listed, the next one does not end."""
_SAVE_SECONDS = 60.0
"""Homes may be on another machine: the time alone is not worth a write at every look."""
_STATE_FILE, _MARK_FILE, _LOCK_FILE = "ledger.json", "mark", "lock"


class Totals(NamedTuple):
    """Harvested time, also of GPUs and programs that the configuration no longer names."""

    gpus: dict[str, tuple[float, int]]
    """By UUID: seconds, and the number of preemptions."""
    programs: dict[str, float]


class SavedState(NamedTuple):
    """State saved by an earlier harvest."""

    status: HarvestStatus | None = None
    totals: Totals = Totals({}, {})
    processes: tuple[ProcessId, ...] = ()
    """Its supervisors and programs, and what these had started, if the machine was not restarted since."""


class StateDirectory:
    """One harvest's directory; only one process can have it at a time."""

    def __init__(self, directory: str, roots: Roots, *, uid: int) -> None:
        """Lock the directory.

        Raises:
            UsageError: Another harvest has it, or as root: others could write it.
            DiskError: It cannot be written.
        """
        self._directory = directory
        self._boot = _read_boot_id(roots)
        self._writer = BackgroundWriter()
        self._has_failed = False
        self._saved_at = self._listed_at = 0.0
        self._uid = uid
        self._tree = MachineProcessTree(roots.proc)
        self._processes: list[ProcessId] = []
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            if uid == 0:
                check_trust(directory, os.stat(directory))
            self._locks = [_lock(f"{directory}/{_LOCK_FILE}")]
            self.mark = self._own_mark()
        except OSError as error:
            raise DiskError(
                f"cannot use the state directory {directory}: {error.strerror}",
                hint="choose another directory with --state-dir",
            ) from error
        self._published = status_path(roots, uid, self.mark)
        self._machine = f"{roots.dev}/shm/gpulse-harvest-{uid}.lock"
        self._lock_machine(uid)

    def _lock_machine(self, uid: int) -> None:
        """Lock this machine for this user, also for other directories: two harvests would not know each other's programs."""
        try:
            self._locks.append(_lock(self._machine))
        except UsageError:
            if os.stat(self._machine).st_uid == uid:
                self.close()
                raise
            log.warning("ignored %s: it belongs to another user", self._machine)
        except OSError as error:
            log.warning("cannot lock %s: %s", self._machine, error.strerror)

    def _own_mark(self) -> str:
        """Return the mark that identifies the programs of this directory's harvests; it is made once."""
        path = f"{self._directory}/{_MARK_FILE}"
        with suppress(OSError, ValueError):
            mark = read_record(path, 64).decode("ascii").strip()
            if len(mark) == 32 and set(mark) <= set("0123456789abcdef"):
                return mark
        mark = secrets.token_hex(16)
        replace_file(path, mark.encode(), 0o600)
        return mark

    def load(self) -> SavedState:
        """Return what the harvest before this one left; its published status may be newer than the saved one."""
        document = _read_json(f"{self._directory}/{_STATE_FILE}") or {}
        status = status_from_document(document.get("status"))
        published = read_published_status(self._published, self._uid)
        if document and status is None:
            log.warning(
                "cannot read the saved state in %s, so harvested time is counted from zero", self._directory
            )
        if published is not None and (status is None or published.time > status.time):
            status = published
        same_boot = document.get("boot") == self._boot
        processes = set(_parse_processes(document.get("processes")) if same_boot else ())
        if status is not None and (same_boot or status is published):
            processes.update(_list_processes(status))
        return SavedState(status, _parse_totals(document.get("won")), tuple(sorted(processes)))

    def save(self, status: HarvestStatus, totals: Totals, *, changed: bool) -> None:
        """Publish the status, and save it when something changed or some time went by.

        Publishing writes to memory; saving runs in the background.
        """
        document = status_to_document(status)
        if changed or abs(status.time - self._listed_at) >= _PROCESSES_SECONDS:
            self._listed_at = status.time
            before, self._processes = self._processes, sorted(self._tree.below(self._tree.myself()))
            changed = changed or before != self._processes
        if changed or abs(status.time - self._saved_at) >= _SAVE_SECONDS:
            self._saved_at = status.time
            saved = {
                "boot": self._boot,
                "status": document,
                "won": totals._asdict(),
                "processes": self._processes[:_MAX_SAVED_PROCESSES],
            }
            self._writer.write(f"{self._directory}/{_STATE_FILE}", _encode_json(saved), 0o600)
        try:
            replace_file(self._published, _encode_json(document), 0o644, has_umask=False, durable=False)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                log.warning("cannot write %s: %s", self._published, error.strerror)

    def close(self) -> None:
        """Withdraw the published status, and release the directory."""
        self._writer.close()
        gone = (self._published, self._machine) if len(self._locks) > 1 else (self._published,)
        for path in gone:
            with suppress(OSError):
                os.unlink(path)
        while self._locks:
            os.close(self._locks.pop())


def read_saved_status(directory: str) -> HarvestStatus | None:
    """Return the status that a harvest, which may have ended, last saved in its directory."""
    document = _read_json(f"{directory}/{_STATE_FILE}")
    return None if document is None else status_from_document(document.get("status"))


def _lock(path: str) -> int:
    """Lock a file; return the descriptor that holds the lock.

    Raises:
        UsageError: Another process holds the lock.
        OSError: It cannot be locked.
    """
    descriptor = open_output(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_same_file(path, descriptor):  # the last holder removed it just now
            os.close(descriptor)
            return _lock(path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise UsageError(
            f"you already have a harvest running on this machine{f' (pid {holder})' if holder else ''}",
            hint="see `gpulse harvest status`; kill -HUP PID reloads its configuration",
        ) from error
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_same_file(path: str, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def _list_processes(status: HarvestStatus) -> Iterator[ProcessId]:
    for run in status.runs:
        for process in (run.supervisor, run.process):
            if process is not None:
                yield ProcessId(*process)


def _parse_processes(raw: object) -> Iterator[ProcessId]:
    """Yield saved processes, none for anything else."""
    for each in raw if isinstance(raw, list) else ():
        match each:
            case [int(pid), int(start_ticks)]:
                yield ProcessId(pid, start_ticks)


def _parse_totals(raw: object) -> Totals:
    """Return saved totals, empty ones for anything else."""
    if not isinstance(raw, dict):
        return Totals({}, {})
    try:
        gpus = {
            str(uuid): (_parse_seconds(seconds), int(times)) for uuid, (seconds, times) in raw["gpus"].items()
        }
        programs = {str(name): _parse_seconds(seconds) for name, seconds in raw["programs"].items()}
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
        return Totals({}, {})
    return Totals(gpus, programs)


def _parse_seconds(raw: Any) -> float:
    seconds = float(raw)
    if not 0.0 <= seconds < math.inf:
        raise ValueError("not a number of seconds")
    return seconds


def _read_boot_id(roots: Roots) -> str | None:
    with suppress(OSError):
        return read_record(f"{roots.proc}/sys/kernel/random/boot_id", 64).decode("ascii", "replace").strip()
    return None


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        document = json.loads(read_record(path, _MAX_STATE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _encode_json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, allow_nan=False).encode()
