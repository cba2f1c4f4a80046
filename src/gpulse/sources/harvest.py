"""What harvests on this machine tell about the GPUs they watch, and which processes are theirs."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpulse.model.frame import GpuReading
from gpulse.model.harvest import (
    STATE_CODES,
    GpuState,
    HarvestGpu,
    HarvestProcess,
    HarvestStatus,
    from_document,
)
from gpulse.model.metric import Values
from gpulse.sources.procfs import Roots, due, list_names, read_record
from gpulse.sources.procpid import PidStat, parse_pid_stat

_NAME = re.compile(r"gpulse-harvest-(0|[1-9]\d{0,9})\.json", re.ASCII)
_LARGEST_BYTES = 1 << 20
_PERIOD_SECONDS = 1.0
_RACY_SECONDS = 2.0
"""A directory that changed so short a time ago may change again without a new time of its own."""
_MISSED_INTERVALS, _SLACK_SECONDS = 3, 5.0
_DEEPEST = 64
_MOST_TELLING: tuple[GpuState, ...] = ("harvested", "stopping", "people", "waiting", "unknown")
"""What one harvest runs on a GPU is somebody else's use to the others that watch it."""


def status_path(roots: Roots, uid: int) -> str:
    """Where the harvest of a user says what it does."""
    return f"{roots.dev}/shm/gpulse-harvest-{uid}.json"


class Harvests(NamedTuple):
    """The harvests that are alive, and what they say together."""

    statuses: tuple[HarvestStatus, ...] = ()
    gpus: Mapping[str, Values] = {}
    """By UUID the catalogue's values."""
    programs: Mapping[HarvestProcess, tuple[int, str]] = {}
    """By process, the user whose harvest it is and the program's name."""


class _File:
    """One published status, as it was when it was read last."""

    def __init__(self) -> None:
        self.seen: tuple[int, ...] = ()
        self.status: HarvestStatus | None = None


class HarvestReader:
    """Reads what harvests publish; a file that is not what it says it is counts for nothing."""

    def __init__(self, roots: Roots = Roots()) -> None:  # noqa: B008  frozen
        self._roots = roots
        self._folder = f"{roots.dev}/shm"
        self._read_at: float | None = None
        self._changed: int | None = None
        self._files: dict[str, _File] = {}
        self._found = Harvests()

    def read(self, now: float) -> Harvests:
        """The harvests of this machine; `now` is in epoch seconds."""
        if due(now, self._read_at, _PERIOD_SECONDS):
            self._read_at = now
            self._list(now)
            told = (self._told(name, file) for name, file in sorted(self._files.items()))
            living = [status for status in told if status and self._is_alive(status, now)]
            self._found = together(living) if living else Harvests()
        return self._found

    def _list(self, now: float) -> None:
        """Find the files; a folder that did not change is not listed again."""
        try:
            changed = os.stat(self._folder).st_mtime_ns
        except OSError:
            self._changed = None
            self._files = {}
            return
        if changed == self._changed:
            return
        is_settled = now - changed / 1e9 > _RACY_SECONDS
        self._changed = changed if is_settled else None
        names = filter(_NAME.fullmatch, list_names(self._folder))
        self._files = {name: self._files.get(name) or _File() for name in names}

    def _told(self, name: str, file: _File) -> HarvestStatus | None:
        """What a file says, taken apart again only when it is another one."""
        match = _NAME.fullmatch(name)
        try:
            found = os.stat(f"{self._folder}/{name}", follow_symlinks=False)
        except OSError:
            return None
        seen = (found.st_ino, found.st_mtime_ns, found.st_size, found.st_uid, found.st_mode)
        if match is not None and seen != file.seen:
            file.seen = seen
            file.status = _published(f"{self._folder}/{name}", int(match[1]))
        return file.status

    def _is_alive(self, status: HarvestStatus, now: float) -> bool:
        late = _MISSED_INTERVALS * status.interval_seconds + _SLACK_SECONDS
        if not -late <= now - status.time <= late:
            return False
        found = _stat(self._roots, status.pid)
        return found is not None and found.start_ticks == status.pid_start_ticks


def together(statuses: Sequence[HarvestStatus]) -> Harvests:
    """What harvests say about the same machine."""
    told: dict[str, list[HarvestGpu]] = {}
    programs: dict[HarvestProcess, tuple[int, str]] = {}
    for status in statuses:
        if status.dry_run:
            continue  # what it tells is what it would do
        for gpu in status.gpus:
            told.setdefault(gpu.uuid, []).append(gpu)
        for run in status.runs:
            for process in (run.keeper, run.process):
                if process is not None:
                    programs[process] = status.uid, run.program
    return Harvests(tuple(statuses), {uuid: _values(gpus) for uuid, gpus in told.items()}, programs)


def with_harvests(gpus: tuple[GpuReading, ...], harvests: Harvests) -> tuple[GpuReading, ...]:
    """GPUs with what harvests say of them; nothing is added where none does."""
    if not harvests.gpus:
        return gpus
    return tuple(
        gpu if told is None else gpu._replace(values={**gpu.values, **told})
        for gpu, told in ((gpu, harvests.gpus.get(gpu.device.uuid)) for gpu in gpus)
    )


def program_of(pid: int, uid: int | None, harvests: Harvests, roots: Roots) -> str | None:
    """The program that a process belongs to, by the processes that harvests say they started.

    A harvest speaks for processes of its own user; one of root's may have started those of anybody.
    """
    for _ in range(_DEEPEST):
        found = _stat(roots, pid) if pid > 1 else None
        if found is None:
            break
        told = harvests.programs.get(HarvestProcess(pid, found.start_ticks))
        if told is not None:
            return told[1] if told[0] in (0, uid) else None
        pid = found.parent_pid
    return None


def _values(told: Sequence[HarvestGpu]) -> Values:
    state = min((gpu.state for gpu in told), key=_MOST_TELLING.index)
    return {
        "harvest_state": STATE_CODES[state],
        "harvested_seconds_total": sum(gpu.harvested_seconds for gpu in told),
        "harvest_preemptions_total": sum(gpu.preemptions for gpu in told),
    }


def _published(path: str, uid: int) -> HarvestStatus | None:
    """The status in a plain file of that user's which nobody else can write."""
    import json  # noqa: PLC0415  most machines have nothing to read with it

    try:
        # Neither a link nor a pipe may lead or hold the reader somewhere.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        is_theirs = stat.S_ISREG(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022
        data = os.read(descriptor, _LARGEST_BYTES + 1) if is_theirs else b""
        status = from_document(json.loads(data)) if len(data) <= _LARGEST_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(descriptor)
    return status if status is not None and status.uid == uid else None


def _stat(roots: Roots, pid: int) -> PidStat | None:
    try:
        return parse_pid_stat(read_record(f"{roots.proc}/{pid}/stat"))
    except OSError:
        return None
