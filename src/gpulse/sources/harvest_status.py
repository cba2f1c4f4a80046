"""Read what harvests on this machine publish about their GPUs and processes."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpulse.model.frame import GpuReading
from gpulse.model.harvest_status import (
    STATE_CODES,
    GpuStateName,
    HarvestGpu,
    HarvestProcess,
    HarvestStatus,
    status_from_document,
)
from gpulse.model.metric_catalog import Values
from gpulse.sources.procfs import (
    PidStat,
    Roots,
    is_due,
    list_names,
    parse_pid_stat,
    parse_pid_status,
    read_record,
    try_read,
)

_FILE_NAME = re.compile(r"gpulse-harvest-(0|[1-9]\d{0,9})(?:-[0-9a-f]{8})?\.json", re.ASCII)
_MAX_STATUS_BYTES = 1 << 20
_MAX_FILES = 16
"""Of one user: nobody can keep the reader busy by publishing many files."""
_PERIOD_SECONDS = 1.0
_RACY_SECONDS = 2.0
"""A directory that changed this recently may change again without a new modification time."""
_MAX_MISSED_INTERVALS, _SLACK_SECONDS = 3, 5.0
_MAX_DEPTH = 64
_WORKING_STATES: tuple[GpuStateName, ...] = ("harvested", "stopping")
_DEAD_STATES = frozenset("ZXx")
_ROOT = 0
_STATE_PRIORITY: tuple[GpuStateName, ...] = ("harvested", "stopping", "people", "waiting", "unknown")
"""If several harvests watch a GPU, the one that runs a program there wins: the others see that program as use by people."""


def status_path(roots: Roots, uid: int, mark: str) -> str:
    """Return where a harvest of a user publishes its status; the mark distinguishes it from the user's others."""
    return f"{roots.dev}/shm/gpulse-harvest-{uid}-{mark[:8]}.json"


class PublishedHarvests(NamedTuple):
    """The running harvests, and what they publish together."""

    statuses: tuple[HarvestStatus, ...] = ()
    gpus: Mapping[str, Values] = {}
    """Metric values by UUID."""
    programs: Mapping[HarvestProcess, tuple[int, str]] = {}
    """By process, the user whose harvest it is and the program's name."""


class _FileVersion(NamedTuple):
    """Identity of a file's content: it changes when the file is replaced."""

    changed: int
    inode: int
    size: int
    mode: int
    moved: int


class _StatusFile:
    """One published status, as it was when it was read last."""

    def __init__(self) -> None:
        self.seen: _FileVersion | None = None
        self.status: HarvestStatus | None = None


class HarvestReader:
    """Reads the status files that harvests publish; a file that cannot be trusted is ignored."""

    def __init__(self, roots: Roots = Roots()) -> None:  # noqa: B008  frozen
        self._roots = roots
        self._folder = f"{roots.dev}/shm"
        self._read_at: float | None = None
        self._changed: int | None = None
        self._files: dict[str, _StatusFile] = {}
        self._found = PublishedHarvests()

    def read(self, now: float) -> PublishedHarvests:
        """Return the harvests of this machine; `now` is in epoch seconds."""
        if is_due(now, self._read_at, _PERIOD_SECONDS):
            self._read_at = now
            self._list(now)
            living = [status for status in self._read_files() if self._is_alive(status, now)]
            self._found = combine_statuses([verify_status(status, self._roots) for status in living])
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
        names = filter(_FILE_NAME.fullmatch, list_names(self._folder))
        self._files = {name: self._files.get(name) or _StatusFile() for name in names}

    def _read_files(self) -> Iterator[HarvestStatus]:
        """Yield the statuses in the files, root's first, of each user the newest."""
        found = sorted((seen for seen in map(self._seen, self._files) if seen), key=_by_user_and_age)
        read: Counter[int] = Counter()
        for name, uid, seen in found:
            read[uid] += 1
            file = self._files[name]
            if read[uid] > _MAX_FILES:
                continue
            if seen != file.seen:
                file.seen = seen
                file.status = read_published_status(f"{self._folder}/{name}", uid)
            if file.status is not None:
                yield file.status

    def _seen(self, name: str) -> tuple[str, int, _FileVersion] | None:
        """Return a file's name, user and version; None when the file does not belong to that user."""
        match = _FILE_NAME.fullmatch(name)
        try:
            found = os.stat(f"{self._folder}/{name}", follow_symlinks=False)
        except OSError:
            return None
        if match is None or found.st_uid != int(match[1]):
            return None
        return (
            name,
            found.st_uid,
            _FileVersion(found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode, found.st_ctime_ns),
        )

    def _is_alive(self, status: HarvestStatus, now: float) -> bool:
        late = _MAX_MISSED_INTERVALS * status.interval_seconds + _SLACK_SECONDS
        if not -late <= now - status.time <= late:
            return False
        return _is_theirs(HarvestProcess(status.pid, status.pid_start_ticks), status.uid, self._roots)


def _by_user_and_age(found: tuple[str, int, _FileVersion]) -> tuple[int, int, str]:
    name, uid, seen = found
    return uid, -seen.changed, name


def verify_status(status: HarvestStatus, roots: Roots) -> HarvestStatus:
    """Return a status without claims that cannot be verified.

    A run keeps only processes that are alive and belong to the harvest's user, and a GPU counts as harvested only with
    such a run: a file cannot turn somebody's work into harvested work. Root's harvest runs programs as any user and is
    trusted.
    """
    if status.uid == _ROOT:
        return status
    runs = tuple(
        run._replace(
            supervisor=_verify_process(run.supervisor, status.uid, roots),
            process=_verify_process(run.process, status.uid, roots),
        )
        for run in status.runs
    )
    at_work = {index for run in runs if run.supervisor or run.process for index in run.gpus}
    return status._replace(runs=runs, gpus=tuple(_verify_gpu(gpu, at_work) for gpu in status.gpus))


def _verify_gpu(gpu: HarvestGpu, at_work: Collection[int]) -> HarvestGpu:
    if gpu.index in at_work:
        return gpu
    return gpu._replace(state="unknown" if gpu.state in _WORKING_STATES else gpu.state, program=None)


def _verify_process(process: HarvestProcess | None, uid: int, roots: Roots) -> HarvestProcess | None:
    return process if process is not None and _is_theirs(process, uid, roots) else None


def _is_theirs(process: HarvestProcess, uid: int, roots: Roots) -> bool:
    """True when a process is alive and belongs to that user; root's harvest may name any process."""
    found = _read_stat(roots, process.pid)
    if found is None or found.start_ticks != process.start_ticks or found.state in _DEAD_STATES:
        return False
    return uid == _ROOT or uid == parse_pid_status(try_read(f"{roots.proc}/{process.pid}/status") or b"").uid


def combine_statuses(statuses: Sequence[HarvestStatus]) -> PublishedHarvests:
    """Combine the statuses of several harvests on one machine; for a process the first status counts."""
    by_uuid: dict[str, list[HarvestGpu]] = {}
    programs: dict[HarvestProcess, tuple[int, str]] = {}
    for status in statuses:
        if status.dry_run:
            continue  # it publishes what it would do
        for gpu in status.gpus:
            by_uuid.setdefault(gpu.uuid, []).append(gpu)
        for run in status.runs:
            for process in (run.supervisor, run.process):
                if process is not None:
                    programs.setdefault(process, (status.uid, run.program))
    return PublishedHarvests(
        tuple(statuses), {uuid: _build_values(gpus) for uuid, gpus in by_uuid.items()}, programs
    )


def with_harvests(gpus: tuple[GpuReading, ...], harvests: PublishedHarvests) -> tuple[GpuReading, ...]:
    """Return GPUs with the values that harvests publish about them."""
    if not harvests.gpus:
        return gpus
    return tuple(
        gpu if values is None else gpu._replace(values={**gpu.values, **values})
        for gpu, values in ((gpu, harvests.gpus.get(gpu.device.uuid)) for gpu in gpus)
    )


def find_program(pid: int, uid: int | None, harvests: PublishedHarvests, roots: Roots) -> str | None:
    """Return the program that a process belongs to, by the processes that harvests say they started.

    A harvest can only claim processes of its own user; root's harvest can claim any.
    """
    for _ in range(_MAX_DEPTH):
        found = _read_stat(roots, pid) if pid > 1 else None
        if found is None:
            break
        owner = harvests.programs.get(HarvestProcess(pid, found.start_ticks))
        if owner is not None and owner[0] in (_ROOT, uid):
            return owner[1]
        pid = found.parent_pid
    return None


def _build_values(gpus: Sequence[HarvestGpu]) -> Values:
    state = min((gpu.state for gpu in gpus), key=_STATE_PRIORITY.index)
    return {
        "harvest_state": STATE_CODES[state],
        "harvested_seconds_total": sum(gpu.harvested_seconds for gpu in gpus),
        "harvest_preemptions_total": sum(gpu.preemptions for gpu in gpus),
    }


def read_published_status(path: str, uid: int) -> HarvestStatus | None:
    """Return the status in a regular file of that user which nobody else can write."""
    import json  # noqa: PLC0415  most machines have nothing to read with it

    try:
        # Follow no symbolic link, and do not block on a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        is_theirs = stat.S_ISREG(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022
        data = os.read(descriptor, _MAX_STATUS_BYTES + 1) if is_theirs else b""
        status = status_from_document(json.loads(data)) if len(data) <= _MAX_STATUS_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(descriptor)
    return status if status is not None and status.uid == uid else None


def _read_stat(roots: Roots, pid: int) -> PidStat | None:
    try:
        return parse_pid_stat(read_record(f"{roots.proc}/{pid}/stat"))
    except OSError:
        return None
