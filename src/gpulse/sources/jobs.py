"""The scheduler's jobs on this machine: from control groups, environments of processes, and mapping directories."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from gpulse.model.device import Device
from gpulse.model.health import Health
from gpulse.model.job import Job
from gpulse.sources.job_groups import Group, JobGroups
from gpulse.sources.owners import Register, user_name
from gpulse.sources.procfs import Roots, due
from gpulse.sources.slurm import Told, allocated, allowed

if TYPE_CHECKING:
    from gpulse.sources.job_map import Mapped

_MAP_SECONDS = 1.0
_MOST_JOBS = 1024
Spoken = Sequence[tuple[Told, int | None]]
"""What processes say of their jobs, each with its user."""


class JobReader:
    """Puts together what is known of each job, the most reliable first."""

    def __init__(self, roots: Roots = Roots(), *, folders: Sequence[str] = ()) -> None:  # noqa: B008  frozen
        """Prepare to read.

        Args:
            roots: Where /proc and /sys are.
            folders: Directories in which a prolog writes which job has which GPU.
        """
        self._groups = JobGroups(roots)
        self._maps = folders
        self._mapped_at: float | None = None
        self._mapped: dict[str, Mapped] = {}
        self._map_health: list[Health] = []
        self._register = Register()
        self._registered_of: tuple[object, ...] = ()
        self._made_of: tuple[object, ...] = ()
        self._made: tuple[tuple[Job, ...], list[Health]] = ((), [])

    def register(self, now: float) -> Register:
        """What is known of jobs without any word of a process, the same one as long as nothing is new."""
        groups = self._groups.read(now)
        made_of = (groups, self._groups.numbers, self._groups.is_used, self._mapped)
        if made_of != self._registered_of:
            self._registered_of = made_of
            mapped = {number: job.uid for number, job in self._mapped.items() if job.uid is not None}
            users = {group.job: group.uid for group in groups if group.uid is not None}
            self._register = Register(self._groups.numbers, mapped | users, self._groups.is_used)
        return self._register

    def read(
        self, now: float, devices: Sequence[Device], spoken: Spoken = ()
    ) -> tuple[tuple[Job, ...], list[Health]]:
        """The jobs with an allocation here, by id; `now` is in epoch seconds.

        Args:
            now: The time.
            devices: The GPUs of this machine and their MIG instances.
            spoken: What the processes on GPUs say in their environments.
        """
        groups = self._groups.read(now)
        if self._maps and due(now, self._mapped_at, _MAP_SECONDS):
            self._mapped_at = now
            self._read_maps(now, devices)
        made_of = (groups, self._mapped, self._map_health, list(devices), list(spoken))
        if made_of != self._made_of:
            self._made_of, self._made = made_of, self._put_together(now, groups, devices, spoken)
        return self._made

    def _put_together(
        self, now: float, groups: Sequence[Group], devices: Sequence[Device], spoken: Spoken
    ) -> tuple[tuple[Job, ...], list[Health]]:
        jobs = {group.job: _of_group(group, devices) for group in groups}
        for job in _of_processes(spoken, devices):
            known = jobs.get(job.id)
            if known is None:
                jobs[job.id] = job
            elif known.uid in (None, job.uid):  # anybody can write anything into an environment
                jobs[job.id] = _filled(known, job)
        for number, mapped in self._mapped.items():
            job = jobs.get(number) or Job(number)
            jobs[number] = _with_map(job, mapped)
        taken = {gpu for job in jobs.values() if job.source in _SURE for gpu in job.gpus}
        jobs = {number: _without(job, taken) for number, job in jobs.items()}
        # Where prologs write down who has a GPU, a job that is not there has none.
        is_told = bool(self._maps) and not self._map_health
        silent = [] if is_told or not devices else [job for job in groups if jobs[job.job].source is None]
        health = [*self._map_health, *_untold(silent, now)]
        return tuple(jobs[number] for number in sorted(jobs)[:_MOST_JOBS]), health

    def _read_maps(self, now: float, devices: Sequence[Device]) -> None:
        from gpulse.sources.job_map import read_map  # noqa: PLC0415  most machines have no such directory

        self._mapped, self._map_health = {}, []
        for folder in self._maps:
            found, health = read_map(folder, devices, now)
            self._mapped |= found
            self._map_health += health


def _of_group(group: Group, devices: Sequence[Device]) -> Job:
    job = _job(group.job, group.uid, group.told, devices)
    let_in = None if group.devices is None else allowed(group.devices, devices)
    return job if let_in is None else job._replace(gpus=let_in, source="devices")


def _of_processes(spoken: Spoken, devices: Sequence[Device]) -> list[Job]:
    by_job: dict[str, tuple[int | None, list[Told]]] = {}
    for told, uid in spoken:
        by_job.setdefault(told.job, (uid, []))[1].append(told)
    return [_job(number, uid, words, devices) for number, (uid, words) in by_job.items()]


def _job(number: str, uid: int | None, words: Sequence[Told], devices: Sequence[Device]) -> Job:
    gpus = allocated(words, devices)
    first = words[0] if words else Told(number)
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


def _filled(job: Job, other: Job) -> Job:
    """A job with what another source knows of it and the first does not."""
    known = {name: value for name in _WORDS if getattr(job, name) is None and (value := getattr(other, name))}
    if job.source is None:
        known |= {"gpus": other.gpus, "source": other.source}
    return job._replace(**known)


_WORDS = ("user", "uid", "name", "partition", "account", "array")


def _with_map(job: Job, mapped: Mapped) -> Job:
    if job.uid is None and mapped.uid is not None:
        job = job._replace(uid=mapped.uid, user=user_name(mapped.uid))
    return job if job.source == "devices" else job._replace(gpus=mapped.gpus, source="map")


_SURE = frozenset({"devices", "map"})
"""Where GPUs are known from that nobody but root can claim."""


def _without(job: Job, taken: Collection[str]) -> Job:
    """A job without the GPUs that it claims and that others were given for sure."""
    if job.source in _SURE or not any(gpu in taken for gpu in job.gpus):
        return job
    gpus = tuple(gpu for gpu in job.gpus if gpu not in taken)
    return job._replace(gpus=gpus, source=job.source if gpus else None)


def _untold(groups: Sequence[Group], now: float) -> Iterator[Health]:
    """That nobody tells which GPUs jobs were given, and why."""
    if hidden := [group.job for group in groups if group.is_hidden]:
        why = "processes of other users do not show their environment"
        yield _not_known(hidden, why, f"run gpulse as root, or {_WITH_A_MAP}", now)
    if silent := [group.job for group in groups if group.is_silent]:
        yield _not_known(silent, "nothing runs in it that knows", _WITH_A_MAP, now)


_WITH_A_MAP = "let Slurm's prolog write it down and name the directory with --job-map"


def _not_known(jobs: Sequence[str], why: str, hint: str, now: float) -> Health:
    shown = ", ".join(jobs[:3]) + (f" and {len(jobs) - 3} more" if len(jobs) > 3 else "")
    return Health(
        source="jobs",
        code="not_visible",
        detail=f"which GPUs {shown} was given: {why}",
        since=now,
        hint=hint,
    )
