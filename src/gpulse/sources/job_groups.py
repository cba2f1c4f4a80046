"""The control groups of Slurm's jobs: which jobs are on this machine, and what their processes know of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpulse.sources.procfs import Roots, due, list_names, parse_mounts, parse_vmstat, read_bytes, try_read
from gpulse.sources.procpid import parse_pid_stat, parse_pid_status
from gpulse.sources.slurm import (
    Told,
    is_slice_of_root,
    is_sluid,
    job_of_folder,
    job_of_title,
    parse_environ,
    user_of_folder,
)

_MOUNT_SECONDS = 30.0
_LOOK_SECONDS = 1.0
_YOUNG_SECONDS = 5.0
_SETTLED_SECONDS = 10.0
_MOST_JOBS = 1024
_MOST_STEPS = 32
_MOST_PROCESSES = 8
"""Of a step, asked for their environments."""
_DEEPEST_SLICE = 3
_MOST_ENVIRON = 1 << 18
_HIERARCHIES = ("freezer", "devices", "memory", "cpuset", "cpu", "cpuacct", "pids")
"""Of version 1, in the order in which Slurm is likely to have a job's directory there."""
_FIRST = {"step_batch": 0, "step_interactive": 1, "step_extern": 3}
"""The steps that know the most come first; the last one holds nothing but what was logged in from elsewhere."""
_ROOT = 0


class Group(NamedTuple):
    """A job with a control group on this machine."""

    job: str
    """By its number, or by its SLUID where nothing tells the number."""
    uid: int | None
    told: tuple[Told, ...]
    """What the environments of its processes say, one a step."""
    is_hidden: bool
    """True when no environment of it could be read for want of permission."""
    is_silent: bool
    """True when it has run nothing for a while that would know anything of it."""
    devices: bytes | None
    """Its `devices.list`, in version 1."""


class _Known:
    """What is remembered of one job's directory."""

    def __init__(self, job: str, uid: int | None, now: float) -> None:
        self.job = job
        self.uid = uid
        self.first_seen = now
        self.read_at: float | None = None
        self.is_alive = False
        self.told: dict[str, Told] = {}
        self.is_hidden = False


class JobGroups:
    """Reads the directories of Slurm's jobs: their names every second, what is in them when it may have changed."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._mounts: dict[str, str] = {}
        self._tops: list[str] = []
        self._mounts_at: float | None = None
        self._looked_at: float | None = None
        self._known: dict[str, _Known] = {}
        self._found: tuple[Group, ...] = ()
        self.numbers: Mapping[str, str] = {}
        """The jobs by number of those whose control groups go by SLUIDs."""
        self.is_used = False
        """True once it is known that Slurm gives its jobs control groups on this machine."""

    def read(self, now: float) -> tuple[Group, ...]:
        """The jobs that have a process on this machine; `now` is in epoch seconds."""
        if due(now, self._mounts_at, _MOUNT_SECONDS):
            self._mounts_at = now
            self._find_tops()
        if self._tops and due(now, self._looked_at, _LOOK_SECONDS):
            self._looked_at = now
            self._look(now)
        return self._found

    def _find_tops(self) -> None:
        """Find the directories in which Slurm keeps its jobs."""
        self._mounts = _mounts(self._roots)
        unified = self._mounts.get("")
        scopes = [] if unified is None else _scopes(unified)
        mounts = [mount for name in _HIERARCHIES if (mount := self._mounts.get(name)) is not None]
        folders = [
            f"{mount}/{name}" for mount in mounts for name in list_names(mount) if name.startswith("slurm")
        ]
        self._tops = scopes + folders
        # A daemon may make its scope and track its jobs by other means.
        self.is_used = self.is_used or bool(folders)
        if not self._tops:
            self._known, self._found, self.numbers = {}, (), {}

    def _look(self, now: float) -> None:
        known: dict[str, _Known] = {}
        seen: set[str] = set()
        for folder, job, uid in self._folders():
            if job in seen or len(known) >= _MOST_JOBS:
                continue  # the same job in another hierarchy, or more than anybody runs
            self.is_used = True
            known[folder] = self._known.get(folder) or _Known(job, uid, now)
            self._refresh(folder, known[folder], now)
            if known[folder].is_alive:
                seen.add(job)
        self._known = known
        living = [(folder, job) for folder, job in known.items() if job.is_alive]
        self._found = tuple(
            Group(
                job.job,
                job.uid,
                tuple(job.told.values()),
                job.is_hidden,
                not job.told and not job.is_hidden and now - job.first_seen >= _YOUNG_SECONDS,
                self._devices(folder),
            )
            for folder, job in living
        )
        names = {folder: job_of_folder(folder.rpartition("/")[2]) for folder, _ in living}
        self.numbers = {
            name: job.job for folder, job in living if (name := names[folder]) and name != job.job
        }

    def _folders(self) -> Iterator[tuple[str, str, int | None]]:
        """Each job's directory, the job and its user, as far as names say it."""
        for top in self._tops:
            for name in list_names(top):
                if (job := job_of_folder(name)) is not None:
                    yield f"{top}/{name}", job, None
                elif (uid := user_of_folder(name)) is not None:
                    for inner in list_names(f"{top}/{name}"):
                        if (job := job_of_folder(inner)) is not None:
                            yield f"{top}/{name}/{inner}", job, uid

    def _refresh(self, folder: str, job: _Known, now: float) -> None:
        period = _LOOK_SECONDS if now - job.first_seen < _YOUNG_SECONDS else _SETTLED_SECONDS
        if not due(now, job.read_at, 0.9 * period):
            return
        job.read_at = now
        steps = sorted((name for name in list_names(folder) if name.startswith("step_")), key=_step_order)
        job.is_alive = _is_populated(folder)
        is_refused = False
        for step in steps[:_MOST_STEPS]:
            pids = _processes(f"{folder}/{step}")
            job.is_alive = job.is_alive or bool(pids)
            if is_sluid(job.job):
                job.job = self._number(f"{folder}/{step}/slurm") or job.job
            if job.uid is None:
                job.uid = self._user(pids)
            if step in job.told or any(told.gpus for told in job.told.values()):
                continue
            told, refused = self._ask(pids, job.job)
            is_refused = is_refused or refused
            if told is not None:
                job.told[step] = told
                job.job = told.job
        job.is_hidden = not job.told and is_refused

    def _ask(self, pids: list[int], job: str) -> tuple[Told | None, bool]:
        """What the oldest process says that knows the job, and whether one refused to be asked.

        The oldest has the environment that Slurm gave it, as long as it did not make one of its own.
        """
        refused = False
        for folder in self._by_age(pids):
            try:
                told = parse_environ(read_bytes(f"{folder}/environ", _MOST_ENVIRON))
            except PermissionError:
                refused = True
                continue
            except OSError:
                continue
            if told is not None and (told.job == job or is_sluid(job)):
                return told, refused
        return None, refused

    def _by_age(self, pids: list[int]) -> list[str]:
        """The directories of processes, the oldest first."""
        found: list[tuple[int, int, str]] = []
        for pid in pids:
            folder = f"{self._roots.proc}/{pid}"
            stat = parse_pid_stat(try_read(f"{folder}/stat") or b"")
            if (
                stat is not None and stat.state not in "DZXx"
            ):  # the read could hang, or there is nothing to read
                found.append((stat.start_ticks, pid, folder))
        return [folder for *_, folder in sorted(found)]

    def _number(self, folder: str) -> str | None:
        """The job by its number, from the step's daemon."""
        for pid in _pids(folder):
            if job := job_of_title(try_read(f"{self._roots.proc}/{pid}/cmdline") or b""):
                return job
        return None

    def _user(self, pids: list[int]) -> int | None:
        """Whose processes these are: the first that is not root's, which watches over logins."""
        for pid in pids:
            uid = parse_pid_status(try_read(f"{self._roots.proc}/{pid}/status") or b"").uid
            if uid not in (None, _ROOT):
                return uid
        return None

    def _devices(self, folder: str) -> bytes | None:
        mount = self._mounts.get("devices")
        if mount is None:
            return None
        for hierarchy in self._mounts.values():
            if folder.startswith(f"{hierarchy}/"):
                return try_read(f"{mount}{folder.removeprefix(hierarchy)}/devices.list")
        return None


def _scopes(folder: str, depth: int = 0) -> list[str]:
    """The scopes of Slurm's daemons in version 2: at the top, or in a slice that is no user's."""
    found: list[str] = []
    for name in list_names(folder):
        if name.endswith("slurmstepd.scope"):
            found.append(f"{folder}/{name}")
        elif depth < _DEEPEST_SLICE and is_slice_of_root(name) and not name.startswith(_CROWDED):
            found += _scopes(f"{folder}/{name}", depth + 1)
    return found


_CROWDED = "kubepods"
"""The slices of pods, of which there may be hundreds, and none of them Slurm's."""


def _mounts(roots: Roots) -> dict[str, str]:
    """Where each hierarchy of version 1 is, and under the empty name that of version 2."""
    try:
        mounts = parse_mounts(read_bytes(f"{roots.proc}/self/mounts"))
    except OSError:
        return {}
    found: dict[str, str] = {}
    for mount in mounts:
        inside_sys = mount.mount_point.startswith("/sys/")
        folder = roots.sys + mount.mount_point.removeprefix("/sys") if inside_sys else mount.mount_point
        if mount.type == "cgroup2":
            found.setdefault("", folder)
        elif mount.type == "cgroup":
            for name in set(_HIERARCHIES).intersection(mount.options):
                found.setdefault(name, folder)
    return found


def _step_order(name: str) -> tuple[int, int, str]:
    return _FIRST.get(name, 2), len(name), name


def _is_populated(folder: str) -> bool:
    """Whether anything lives in a group of version 2, or below it."""
    return parse_vmstat(try_read(f"{folder}/cgroup.events") or b"").get("populated") == 1


def _processes(step: str) -> list[int]:
    """Processes of a step, those of its tasks first: what is not in a task may be the step's daemon."""
    found: list[int] = []
    for folder in (f"{step}/user", step):
        tasks = sorted(name for name in list_names(folder) if name.startswith("task_"))
        for place in (*(f"{folder}/{name}" for name in tasks), folder):
            found += _pids(place)[:_MOST_PROCESSES]
            if len(found) >= _MOST_PROCESSES:
                return found[:_MOST_PROCESSES]
    return found


def _pids(folder: str) -> list[int]:
    data = try_read(f"{folder}/cgroup.procs") or b""
    whole = data[: data.rfind(b"\n") + 1]  # of a long list the last number may be cut off
    return [int(word) for word in whole.split() if word.isdigit()]
