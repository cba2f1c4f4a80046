"""The scheduler's jobs on this machine: from control groups, environments of processes, and mapping directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpulse.model.device import Device
from gpulse.model.health import Health
from gpulse.model.job import Job
from gpulse.sources.job_groups import Group, JobGroups
from gpulse.sources.owners import user_name
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
        self._made_of: tuple[object, ...] = ()
        self._made: tuple[tuple[Job, ...], list[Health]] = ((), [])

    def numbers(self, now: float) -> Mapping[str, str]:
        """The jobs by number of those that control groups know by another name."""
        self._groups.read(now)
        return self._groups.numbers

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
        hidden = [group.job for group in groups if group.is_hidden and jobs[group.job].source is None]
        health = [*self._map_health, *([_hidden(hidden, now)] if hidden else [])]
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


def _hidden(jobs: Sequence[str], now: float) -> Health:
    shown = ", ".join(jobs[:3]) + (f" and {len(jobs) - 3} more" if len(jobs) > 3 else "")
    return Health(
        source="jobs",
        code="not_visible",
        detail=f"which GPUs {shown} was given: processes of other users do not show their environment",
        since=now,
        hint="run gpulse as root, or let Slurm's prolog write it down and name the directory with --job-map",
    )
