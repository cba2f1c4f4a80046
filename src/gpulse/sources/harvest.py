"""What harvests on this machine tell about the GPUs they watch, and which processes are theirs."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpulse.model.frame import GpuReading
from gpulse.model.harvest import (
    STATE_CODES,
    GpuWord,
    HarvestGpu,
    HarvestProcess,
    HarvestStatus,
    from_document,
)
from gpulse.model.metric import Values
from gpulse.sources.procfs import Roots, due, list_names, read_record, try_read
from gpulse.sources.procpid import PidStat, parse_pid_stat, parse_pid_status

_NAME = re.compile(r"gpulse-harvest-(0|[1-9]\d{0,9})(?:-[0-9a-f]{8})?\.json", re.ASCII)
_LARGEST_BYTES = 1 << 20
_MOST_FILES = 16
"""Of one user: nobody can keep the reader busy by publishing without end."""
_PERIOD_SECONDS = 1.0
_RACY_SECONDS = 2.0
"""A directory that changed so short a time ago may change again without a new time of its own."""
_MISSED_INTERVALS, _SLACK_SECONDS = 3, 5.0
_DEEPEST = 64
_AT_WORK: tuple[GpuWord, ...] = ("harvested", "stopping")
_DEAD = frozenset("ZXx")
_ROOT = 0
_MOST_TELLING: tuple[GpuWord, ...] = ("harvested", "stopping", "people", "waiting", "unknown")
"""What one harvest runs on a GPU is somebody else's use to the others that watch it."""


def status_path(roots: Roots, uid: int, mark: str) -> str:
    """Where a harvest of a user says what it does; the mark tells it from the user's others."""
    return f"{roots.dev}/shm/gpulse-harvest-{uid}-{mark[:8]}.json"


class Harvests(NamedTuple):
    """The harvests that are alive, and what they say together."""

    statuses: tuple[HarvestStatus, ...] = ()
    gpus: Mapping[str, Values] = {}
    """By UUID the catalogue's values."""
    programs: Mapping[HarvestProcess, tuple[int, str]] = {}
    """By process, the user whose harvest it is and the program's name."""


class _Seen(NamedTuple):
    """What tells a file from the one that comes after it."""

    changed: int
    inode: int
    size: int
    mode: int
    moved: int


class _File:
    """One published status, as it was when it was read last."""

    def __init__(self) -> None:
        self.seen: _Seen | None = None
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
            living = [status for status in self._told() if self._is_alive(status, now)]
            self._found = together([proven(status, self._roots) for status in living])
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

    def _told(self) -> Iterator[HarvestStatus]:
        """What the files say, root's first, of each user the newest."""
        found = sorted((seen for seen in map(self._seen, self._files) if seen), key=_by_user_and_age)
        read: Counter[int] = Counter()
        for name, uid, seen in found:
            read[uid] += 1
            file = self._files[name]
            if read[uid] > _MOST_FILES:
                continue
            if seen != file.seen:
                file.seen = seen
                file.status = _published(f"{self._folder}/{name}", uid)
            if file.status is not None:
                yield file.status

    def _seen(self, name: str) -> tuple[str, int, _Seen] | None:
        """A file's name, its user and what tells it from the next one; None for what is not that user's."""
        match = _NAME.fullmatch(name)
        try:
            found = os.stat(f"{self._folder}/{name}", follow_symlinks=False)
        except OSError:
            return None
        if match is None or found.st_uid != int(match[1]):
            return None
        return (
            name,
            found.st_uid,
            _Seen(found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode, found.st_ctime_ns),
        )

    def _is_alive(self, status: HarvestStatus, now: float) -> bool:
        late = _MISSED_INTERVALS * status.interval_seconds + _SLACK_SECONDS
        if not -late <= now - status.time <= late:
            return False
        return _is_theirs(HarvestProcess(status.pid, status.pid_start_ticks), status.uid, self._roots)


def _by_user_and_age(found: tuple[str, int, _Seen]) -> tuple[int, int, str]:
    name, uid, seen = found
    return uid, -seen.changed, name


def proven(status: HarvestStatus, roots: Roots) -> HarvestStatus:
    """A status without what only its word stands for.

    A run's processes are those that live and are of the user whose harvest it is, and a GPU is at work with such a run
    alone: nobody's own work becomes harvested by being called so. Root's harvest runs programs as anybody, and is believed.
    """
    if status.uid == _ROOT:
        return status
    runs = tuple(
        run._replace(
            keeper=_if_theirs(run.keeper, status.uid, roots),
            process=_if_theirs(run.process, status.uid, roots),
        )
        for run in status.runs
    )
    at_work = {index for run in runs if run.keeper or run.process for index in run.gpus}
    return status._replace(runs=runs, gpus=tuple(_as_far_as(gpu, at_work) for gpu in status.gpus))


def _as_far_as(gpu: HarvestGpu, at_work: Collection[int]) -> HarvestGpu:
    if gpu.index in at_work:
        return gpu
    return gpu._replace(state="unknown" if gpu.state in _AT_WORK else gpu.state, program=None)


def _if_theirs(process: HarvestProcess | None, uid: int, roots: Roots) -> HarvestProcess | None:
    return process if process is not None and _is_theirs(process, uid, roots) else None


def _is_theirs(process: HarvestProcess, uid: int, roots: Roots) -> bool:
    """True when a process lives and its user is that one; root's harvest may name anybody's."""
    found = _stat(roots, process.pid)
    if found is None or found.start_ticks != process.start_ticks or found.state in _DEAD:
        return False
    return uid == _ROOT or uid == parse_pid_status(try_read(f"{roots.proc}/{process.pid}/status") or b"").uid


def together(statuses: Sequence[HarvestStatus]) -> Harvests:
    """What harvests say about the same machine; of a process what the first of them says."""
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
                    programs.setdefault(process, (status.uid, run.program))
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
        if told is not None and told[0] in (_ROOT, uid):
            return told[1]
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
