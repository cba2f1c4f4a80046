"""Find a scheduler's jobs on this machine in control groups, process environments and job maps."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpulse.model.device import Device
from gpulse.model.job import Job
from gpulse.model.source_health import Health
from gpulse.sources.cgroups import find_mounts
from gpulse.sources.process_owners import JobRegistry, user_name
from gpulse.sources.procfs import (
    Roots,
    is_due,
    list_names,
    parse_pid_stat,
    parse_pid_status,
    parse_vmstat,
    read_bytes,
    try_read,
    unreadable_health,
)
from gpulse.sources.slurm import (
    JobEnvironment,
    find_allocated_gpus,
    find_allowed_gpus,
    find_gpu_by_minor,
    is_slice_of_root,
    is_sluid,
    parse_daemon_title,
    parse_environ,
    parse_job_folder,
    parse_user_folder,
)

_MOUNT_SECONDS = 30.0
_LOOK_SECONDS = 1.0
_YOUNG_SECONDS = 5.0
_SETTLED_SECONDS = 10.0
_MAX_JOBS = 1024
_MAX_STEPS = 32
_MAX_STEP_PROCESSES = 8
"""Processes of a step whose environment is read."""
_MAX_SLICE_DEPTH = 3
_MAX_ENVIRON_BYTES = 1 << 18
_HIERARCHIES = ("freezer", "devices", "memory", "cpuset", "cpu", "cpuacct", "pids")
"""Hierarchies of version 1, most likely to contain Slurm's job directories first."""
_STEP_PRIORITY = {"step_batch": 0, "step_interactive": 1, "step_extern": 3}
"""Steps with the most complete environment first; step_extern only holds logins over ssh."""
_ROOT = 0


class JobCgroup(NamedTuple):
    """A job with a control group on this machine."""

    job: str
    """The job's ID, or its SLUID when the ID is unknown."""
    uid: int | None
    environments: tuple[JobEnvironment, ...]
    """Job variables in the environments of its processes, one entry per step."""
    is_hidden: bool
    """True when no environment of its processes could be read because permission was denied."""
    is_silent: bool
    """True when for a while none of its processes has had Slurm's variables."""
    devices: bytes | None
    """Its `devices.list`, in version 1."""


class _JobFolder:
    """Cached state of one job's directory."""

    def __init__(self, job: str, uid: int | None, now: float) -> None:
        self.job = job
        self.uid = uid
        self.first_seen = now
        self.read_at: float | None = None
        self.is_alive = False
        self.environments: dict[str, JobEnvironment] = {}
        self.is_hidden = False


class JobCgroupReader:
    """Reads the control groups of Slurm's jobs: names every second, contents when they may have changed."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._mounts: dict[str, str] = {}
        self._tops: list[str] = []
        self._mounts_at: float | None = None
        self._looked_at: float | None = None
        self._known: dict[str, _JobFolder] = {}
        self._found: tuple[JobCgroup, ...] = ()
        self.numbers: Mapping[str, str] = {}
        """Job IDs of the jobs whose control groups are named by SLUID."""
        self.is_used = False
        """True once a job's control group was found: Slurm uses control groups on this machine."""

    def read(self, now: float) -> tuple[JobCgroup, ...]:
        """Return the jobs that have a process on this machine; `now` is in epoch seconds."""
        if is_due(now, self._mounts_at, _MOUNT_SECONDS):
            self._mounts_at = now
            self._find_tops()
        if self._tops and is_due(now, self._looked_at, _LOOK_SECONDS):
            self._looked_at = now
            self._look(now)
        return self._found

    def _find_tops(self) -> None:
        """Find the directories in which Slurm keeps its jobs."""
        self._mounts = find_mounts(self._roots, _HIERARCHIES)
        unified = self._mounts.get("")
        scopes = [] if unified is None else _find_scopes(unified)
        mounts = [mount for name in _HIERARCHIES if (mount := self._mounts.get(name)) is not None]
        folders = [
            f"{mount}/{name}" for mount in mounts for name in list_names(mount) if name.startswith("slurm")
        ]
        self._tops = scopes + folders
        # Slurm's daemon may create its scope but track jobs by other means.
        self.is_used = self.is_used or bool(folders)
        if not self._tops:
            self._known, self._found, self.numbers = {}, (), {}

    def _look(self, now: float) -> None:
        known: dict[str, _JobFolder] = {}
        seen: set[str] = set()
        for folder, job, uid in self._folders():
            if job in seen or len(known) >= _MAX_JOBS:
                continue  # the same job in another hierarchy, or more than anybody runs
            self.is_used = True
            known[folder] = self._known.get(folder) or _JobFolder(job, uid, now)
            self._refresh(folder, known[folder], now)
            if known[folder].is_alive:
                seen.add(job)
        self._known = known
        living = [(folder, job) for folder, job in known.items() if job.is_alive]
        self._found = tuple(
            JobCgroup(
                job.job,
                job.uid,
                tuple(job.environments.values()),
                job.is_hidden,
                not job.environments and not job.is_hidden and now - job.first_seen >= _YOUNG_SECONDS,
                self._devices(folder),
            )
            for folder, job in living
        )
        names = {folder: parse_job_folder(folder.rpartition("/")[2]) for folder, _ in living}
        self.numbers = {
            name: job.job for folder, job in living if (name := names[folder]) and name != job.job
        }

    def _folders(self) -> Iterator[tuple[str, str, int | None]]:
        """Yield each job's directory, the job, and its user if the path names it."""
        for top in self._tops:
            for name in list_names(top):
                if (job := parse_job_folder(name)) is not None:
                    yield f"{top}/{name}", job, None
                elif (uid := parse_user_folder(name)) is not None:
                    for inner in list_names(f"{top}/{name}"):
                        if (job := parse_job_folder(inner)) is not None:
                            yield f"{top}/{name}/{inner}", job, uid

    def _refresh(self, folder: str, job: _JobFolder, now: float) -> None:
        period = _LOOK_SECONDS if now - job.first_seen < _YOUNG_SECONDS else _SETTLED_SECONDS
        if not is_due(now, job.read_at, 0.9 * period):
            return
        job.read_at = now
        steps = sorted((name for name in list_names(folder) if name.startswith("step_")), key=_step_order)
        job.is_alive = _is_populated(folder)
        is_refused = False
        for step in steps[:_MAX_STEPS]:
            pids = _list_processes(f"{folder}/{step}")
            job.is_alive = job.is_alive or bool(pids)
            if is_sluid(job.job):
                job.job = self._number(f"{folder}/{step}/slurm") or job.job
            if job.uid is None:
                job.uid = self._user(pids)
            if step in job.environments or any(found.gpus for found in job.environments.values()):
                continue
            environment, refused = self._read_environment(pids, job.job)
            is_refused = is_refused or refused
            if environment is not None:
                job.environments[step] = environment
                job.job = environment.job
        job.is_hidden = not job.environments and is_refused

    def _read_environment(self, pids: list[int], job: str) -> tuple[JobEnvironment | None, bool]:
        """Return the job variables of the oldest process that has them, and whether any environment was unreadable.

        The oldest process has the environment that Slurm gave it, unless it replaced it.
        """
        refused = False
        for folder in self._by_age(pids):
            try:
                found = parse_environ(read_bytes(f"{folder}/environ", _MAX_ENVIRON_BYTES))
            except PermissionError:
                refused = True
                continue
            except OSError:
                continue
            if found is not None and (found.job == job or is_sluid(job)):
                return found, refused
        return None, refused

    def _by_age(self, pids: list[int]) -> list[str]:
        """Return the directories of processes, oldest first."""
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
        """Return the job's ID from the command line of the step's daemon."""
        for pid in _read_pids(folder):
            if job := parse_daemon_title(try_read(f"{self._roots.proc}/{pid}/cmdline") or b""):
                return job
        return None

    def _user(self, pids: list[int]) -> int | None:
        """Return the user of these processes: the first that is not root, whose process watches logins."""
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


def _find_scopes(folder: str, depth: int = 0) -> list[str]:
    """Return the scopes of Slurm's daemons in version 2: at the top, or in a slice that belongs to no user."""
    found: list[str] = []
    for name in list_names(folder):
        if name.endswith("slurmstepd.scope"):
            found.append(f"{folder}/{name}")
        elif depth < _MAX_SLICE_DEPTH and is_slice_of_root(name) and not name.startswith(_POD_SLICE_PREFIX):
            found += _find_scopes(f"{folder}/{name}", depth + 1)
    return found


_POD_SLICE_PREFIX = "kubepods"
"""Slices of Kubernetes pods: there may be hundreds, and none contains Slurm's scope."""


def _step_order(name: str) -> tuple[int, int, str]:
    return _STEP_PRIORITY.get(name, 2), len(name), name


def _is_populated(folder: str) -> bool:
    """Return whether a group of version 2, or one below it, contains processes."""
    return parse_vmstat(try_read(f"{folder}/cgroup.events") or b"").get("populated") == 1


def _list_processes(step: str) -> list[int]:
    """Return the processes of a step, those of its tasks first: others may be the step's daemon."""
    found: list[int] = []
    for folder in (f"{step}/user", step):
        tasks = sorted(name for name in list_names(folder) if name.startswith("task_"))
        for place in (*(f"{folder}/{name}" for name in tasks), folder):
            found += _read_pids(place)[:_MAX_STEP_PROCESSES]
            if len(found) >= _MAX_STEP_PROCESSES:
                return found[:_MAX_STEP_PROCESSES]
    return found


def _read_pids(folder: str) -> list[int]:
    data = try_read(f"{folder}/cgroup.procs") or b""
    whole = data[: data.rfind(b"\n") + 1]  # of a long list the last number may be cut off
    return [int(word) for word in whole.split() if word.isdigit()]


_GPU_FILE_NAME = re.compile(r"\d{1,4}(?:\.\d{1,4})?|nvidia\d{1,4}|(?:GPU|MIG)-[0-9A-Za-z-]{1,100}")
_JOB_LINE = re.compile(rb"([0-9A-Za-z][\w.:+@\[\]-]{0,63})(?:[ \t]+(\d{1,10}))?")
_MAX_MAP_FILES = 1024
_MAX_MAP_FILE_BYTES = 1 << 16
_MAX_MAPPED_JOBS = 256


class MappedJob(NamedTuple):
    """A job in a job map."""

    uid: int | None
    gpus: tuple[str, ...]
    """UUIDs of the GPUs whose files name it."""


def read_job_map(
    folder: str, devices: Sequence[Device], now: float
) -> tuple[dict[str, MappedJob], list[Health]]:
    """Return the jobs in a job map by ID, with their GPUs on this machine."""
    try:
        names = sorted(filter(_GPU_FILE_NAME.fullmatch, os.listdir(folder)))[:_MAX_MAP_FILES]
    except OSError as error:
        hint = "set --job-map to the directory to which the scheduler's prolog writes; see contrib/slurm"
        return {}, [unreadable_health("jobs", folder, error, now)._replace(hint=hint)]
    found: dict[str, MappedJob] = {}
    health: list[Health] = []
    for name in names:
        gpu = _find_device(name, devices)
        if gpu is None:
            continue
        try:
            data = _read_regular_file(f"{folder}/{name}")
        except FileNotFoundError:
            continue
        except OSError as error:
            health.append(unreadable_health("jobs", f"{folder}/{name}", error, now))
            continue
        for job, uid in parse_job_map_file(data):
            known = found.get(job, MappedJob(uid, ()))
            gpus = known.gpus if gpu in known.gpus else (*known.gpus, gpu)
            found[job] = MappedJob(uid if known.uid is None else known.uid, gpus)
    return found, health


def parse_job_map_file(data: bytes) -> list[tuple[str, int | None]]:
    """Return the jobs in one file, each with its UID if given; other lines are ignored."""
    jobs: list[tuple[str, int | None]] = []
    for line in data.split(b"\n")[:_MAX_MAPPED_JOBS]:
        if match := _JOB_LINE.fullmatch(line.strip()):
            word = match[1].decode()
            jobs.append(
                (f"slurm:{word}" if word.isdecimal() else word, None if match[2] is None else int(match[2]))
            )
    return jobs


def _find_device(name: str, devices: Sequence[Device]) -> str | None:
    if name.startswith("nvidia"):
        return find_gpu_by_minor(int(name.removeprefix("nvidia")), devices)
    index, _, instance = name.partition(".")
    for device in devices:
        if not index.isdecimal():
            is_meant = device.uuid.lower() == name.lower()
        elif instance:
            is_meant = device.index == int(index) and device.gpu_instance == int(instance)
        else:
            is_meant = device.index == int(index) and device.parent_uuid is None
        if is_meant:
            return device.uuid
    return None


def _read_regular_file(path: str) -> bytes:
    """Return the content of a regular file; follow no symbolic link and do not block on a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MAX_MAP_FILE_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        os.close(descriptor)


_MAP_SECONDS = 1.0
JobClaims = Sequence[tuple[JobEnvironment, int | None]]
"""Job variables in the environments of processes, each with the process's user."""


class JobReader:
    """Combines all sources of information about jobs, the most reliable first."""

    def __init__(self, roots: Roots = Roots(), *, folders: Sequence[str] = ()) -> None:  # noqa: B008  frozen
        """Prepare to read.

        Args:
            roots: Where /proc and /sys are.
            folders: Job maps: directories in which a prolog writes which job has which GPU.
        """
        self._groups = JobCgroupReader(roots)
        self._maps = folders
        self._mapped_at: float | None = None
        self._mapped: dict[str, MappedJob] = {}
        self._map_health: list[Health] = []
        self._register = JobRegistry()
        self._registered_of: tuple[object, ...] = ()
        self._made_of: tuple[object, ...] = ()
        self._made: tuple[tuple[Job, ...], list[Health]] = ((), [])

    def register(self, now: float) -> JobRegistry:
        """Return what is known of jobs without trusting any process; the same object while nothing changes."""
        groups = self._groups.read(now)
        made_of = (groups, self._groups.numbers, self._groups.is_used, self._mapped)
        if made_of != self._registered_of:
            self._registered_of = made_of
            mapped = {number: job.uid for number, job in self._mapped.items() if job.uid is not None}
            users = {group.job: group.uid for group in groups if group.uid is not None}
            self._register = JobRegistry(self._groups.numbers, mapped | users, self._groups.is_used)
        return self._register

    def read(
        self, now: float, devices: Sequence[Device], claims: JobClaims = ()
    ) -> tuple[tuple[Job, ...], list[Health]]:
        """Return the jobs with an allocation on this machine, by ID; `now` is in epoch seconds.

        Args:
            now: The time.
            devices: The GPUs of this machine and their MIG instances.
            claims: Job variables in the environments of processes on GPUs.
        """
        groups = self._groups.read(now)
        if self._maps and is_due(now, self._mapped_at, _MAP_SECONDS):
            self._mapped_at = now
            self._read_maps(now, devices)
        made_of = (groups, self._mapped, self._map_health, list(devices), list(claims))
        if made_of != self._made_of:
            self._made_of, self._made = made_of, self._put_together(now, groups, devices, claims)
        return self._made

    def _put_together(
        self, now: float, groups: Sequence[JobCgroup], devices: Sequence[Device], claims: JobClaims
    ) -> tuple[tuple[Job, ...], list[Health]]:
        jobs = {group.job: _job_of_cgroup(group, devices) for group in groups}
        for job in _jobs_of_processes(claims, devices):
            known = jobs.get(job.id)
            if known is None:
                jobs[job.id] = job
            elif known.uid in (None, job.uid):  # a user can put anything into an environment
                jobs[job.id] = _fill_missing_fields(known, job)
        for number, mapped in self._mapped.items():
            job = jobs.get(number) or Job(number)
            jobs[number] = _apply_map(job, mapped)
        taken = {gpu for job in jobs.values() if job.source in _TRUSTED_SOURCES for gpu in job.gpus}
        jobs = {number: _remove_gpus(job, taken) for number, job in jobs.items()}
        # With a complete job map, a job that is not in it has no GPU.
        is_mapped = bool(self._maps) and not self._map_health
        silent = [] if is_mapped or not devices else [job for job in groups if jobs[job.job].source is None]
        health = [*self._map_health, *_report_unknown_gpus(silent, now)]
        return tuple(jobs[number] for number in sorted(jobs)[:_MAX_JOBS]), health

    def _read_maps(self, now: float, devices: Sequence[Device]) -> None:

        self._mapped, self._map_health = {}, []
        for folder in self._maps:
            found, health = read_job_map(folder, devices, now)
            self._mapped |= found
            self._map_health += health


def _job_of_cgroup(group: JobCgroup, devices: Sequence[Device]) -> Job:
    job = _build_job(group.job, group.uid, group.environments, devices)
    let_in = None if group.devices is None else find_allowed_gpus(group.devices, devices)
    return job if let_in is None else job._replace(gpus=let_in, source="devices")


def _jobs_of_processes(claims: JobClaims, devices: Sequence[Device]) -> list[Job]:
    by_job: dict[str, tuple[int | None, list[JobEnvironment]]] = {}
    for environment, uid in claims:
        by_job.setdefault(environment.job, (uid, []))[1].append(environment)
    return [_build_job(number, uid, words, devices) for number, (uid, words) in by_job.items()]


def _build_job(
    number: str, uid: int | None, words: Sequence[JobEnvironment], devices: Sequence[Device]
) -> Job:
    gpus = find_allocated_gpus(words, devices)
    first = words[0] if words else JobEnvironment(number)
    uid = first.uid if uid is None else uid
    return Job(
        id=number,
        user=first.user if uid is None else user_name(uid),
        uid=uid,
        name=first.name,
        partition=first.partition,
        account=first.account,
        gpus=gpus,
        source="environment" if gpus else None,
        array=first.array,
    )


def _fill_missing_fields(job: Job, other: Job) -> Job:
    """Return a job with its missing fields filled from another source."""
    known = {
        name: value
        for name in _FILLABLE_FIELDS
        if getattr(job, name) is None and (value := getattr(other, name))
    }
    if job.source is None:
        known |= {"gpus": other.gpus, "source": other.source}
    return job._replace(**known)


_FILLABLE_FIELDS = ("user", "uid", "name", "partition", "account", "array")


def _apply_map(job: Job, mapped: MappedJob) -> Job:
    if job.uid is None and mapped.uid is not None:
        job = job._replace(uid=mapped.uid, user=user_name(mapped.uid))
    return job if job.source == "devices" else job._replace(gpus=mapped.gpus, source="map")


_TRUSTED_SOURCES = frozenset({"devices", "map"})
"""Sources of GPU allocations that only root can write."""


def _remove_gpus(job: Job, taken: Collection[str]) -> Job:
    """Return a job without the GPUs that a trusted source assigns to other jobs."""
    if job.source in _TRUSTED_SOURCES or not any(gpu in taken for gpu in job.gpus):
        return job
    gpus = tuple(gpu for gpu in job.gpus if gpu not in taken)
    return job._replace(gpus=gpus, source=job.source if gpus else None)


def _report_unknown_gpus(groups: Sequence[JobCgroup], now: float) -> Iterator[Health]:
    """Yield health entries for jobs whose GPUs are unknown, with the reason."""
    if hidden := [group.job for group in groups if group.is_hidden]:
        why = "the environment of other users' processes cannot be read"
        yield _unknown_gpus_health(hidden, why, f"run gpulse as root, or {_JOB_MAP_HINT}", now)
    if silent := [group.job for group in groups if group.is_silent]:
        yield _unknown_gpus_health(
            silent, "none of the processes has Slurm's variables in its environment", _JOB_MAP_HINT, now
        )


_JOB_MAP_HINT = "let Slurm's prolog write a job map, and pass the directory of that map with --job-map"


def _unknown_gpus_health(jobs: Sequence[str], why: str, hint: str, now: float) -> Health:
    shown = ", ".join(jobs[:3]) + (f" and {len(jobs) - 3} more" if len(jobs) > 3 else "")
    return Health(
        source="jobs",
        code="not_visible",
        detail=f"cannot determine the GPUs allocated to {shown}: {why}",
        since=now,
        hint=hint,
    )
