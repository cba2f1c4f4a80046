"""Find the owner of a process (user, job, container, pod) from its control groups and environment."""

from __future__ import annotations

import pwd
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import inf
from time import monotonic
from types import MappingProxyType
from typing import NamedTuple

from gpulse.model.harvest_status import harvest_job_name
from gpulse.model.process import Owner
from gpulse.sources.slurm import find_environ_job, find_slurm_job, is_sluid

_CONTAINER = re.compile(r"(?<!conmon-)(?<![0-9a-f])([0-9a-f]{64})(?=/|\.scope|$)")
"""Docker, podman, containerd and CRI-O differ in what they write around the ID, never in the ID itself;
`conmon-` marks the helper that monitors a container from outside."""
_LXC = re.compile(r"/lxc(?:\.payload\.|\.payload/|/)([^/]+)")
_POD = re.compile(r"(?:/|-)pod([0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12})(?=/|\.slice|$)")
_CONTAINER_ID_LENGTH = 12
_MAX_NAMES = 4096
_RETRY_SECONDS = 30.0
_unnamed_since: dict[int, float] = {}
"""When each UID was last found to have no name; the directory service may have been unavailable."""


class JobRegistry(NamedTuple):
    """Trusted facts about a scheduler's jobs, used to decide whether a process that claims a job is believed."""

    numbers: Mapping[str, str] = MappingProxyType({})
    """Job IDs by the other names that control groups use for them."""
    users: Mapping[str, int] = MappingProxyType({})
    """UIDs of the jobs' users, as far as they are known."""
    has_groups: bool = False
    """True when the scheduler puts jobs into control groups: a process outside of them is in no job, whatever it claims."""

    def believes(self, job: str, uid: int | None) -> bool:
        """Return whether a user's process outside all job control groups may be in this job: it is theirs, or nothing contradicts it."""
        return self.users[job] == uid if job in self.users else not self.has_groups


def find_owner(
    uid: int | None,
    cgroups: Iterable[str],
    environ: bytes | None = None,
    program: str | None = None,
    register: JobRegistry = JobRegistry(),  # noqa: B008  frozen
) -> Owner:
    """Return the owner, from the process's user, the paths of its control groups and its environment.

    Args:
        uid: The process's user.
        cgroups: The paths of its control groups.
        environ: Its environment, which is not trustworthy: the process can change it, and inherits it.
        program: The harvest program that it was verified to belong to.
        register: Trusted facts about the scheduler's jobs.
    """
    paths = list(dict.fromkeys(cgroups))
    return Owner(
        user=user_name(uid),
        uid=uid,
        job=_find_job(uid, paths, environ, program, register),
        container=find_container(paths),
        pod=find_pod(paths),
    )


def _find_job(
    uid: int | None, paths: Iterable[str], environ: bytes | None, program: str | None, register: JobRegistry
) -> str | None:
    job = find_slurm_job(paths)
    if job is None and program is not None:
        return harvest_job_name(program)
    if job is not None and (not is_sluid(job) or job in register.numbers):
        return register.numbers.get(job, job)
    claimed = find_environ_job(environ)
    if claimed is None:
        return job
    is_owner = register.believes(claimed, uid) if job is None else register.users.get(claimed, uid) == uid
    return claimed if is_owner else job


def find_container(paths: Iterable[str]) -> str | None:
    """Return the innermost container: its ID shortened as in `docker ps`, or its LXC name."""
    for path in paths:
        if found := _CONTAINER.findall(path):
            return str(found[-1])[:_CONTAINER_ID_LENGTH]
        if match := _LXC.search(path):
            return match[1]
    return None


def find_pod(paths: Iterable[str]) -> str | None:
    """Return the UID of the Kubernetes pod; systemd's names write its dashes as underscores."""
    for path in paths:
        if match := _POD.search(path):
            return match[1].replace("_", "-")
    return None


def user_name(uid: int | None) -> str | None:
    """Return the user's name, or the UID as text when it has no name."""
    if uid is None:
        return None
    clock = monotonic()
    if clock - _unnamed_since.get(uid, -inf) < _RETRY_SECONDS:
        return str(uid)
    try:
        return _look_up(uid)
    except (KeyError, OverflowError):
        if len(_unnamed_since) >= _MAX_NAMES:
            _unnamed_since.clear()
        _unnamed_since[uid] = clock
        return str(uid)


@lru_cache(maxsize=_MAX_NAMES)
def _look_up(uid: int) -> str:
    return pwd.getpwuid(uid).pw_name
