"""On whose behalf a process runs, read off its control groups and its environment."""

from __future__ import annotations

import pwd
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import inf
from time import monotonic
from types import MappingProxyType
from typing import NamedTuple

from gpulse.model.harvest import job_of
from gpulse.model.process import Owner
from gpulse.sources.slurm import is_sluid, slurm_job, slurm_job_of_environ

_CONTAINER = re.compile(r"(?<!conmon-)(?<![0-9a-f])([0-9a-f]{64})(?=/|\.scope|$)")
"""Docker, podman, containerd and CRI-O differ in what they write around the id, never in the id itself;
`conmon-` marks the helper that watches a container from outside."""
_LXC = re.compile(r"/lxc(?:\.payload\.|\.payload/|/)([^/]+)")
_POD = re.compile(r"(?:/|-)pod([0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12})(?=/|\.slice|$)")
_SHORT = 12
_MOST_NAMES = 4096
_RETRY_SECONDS = 30.0
_nameless: dict[int, float] = {}
"""When a user was last found to have no name: the directory that knows it may have been away."""


class Register(NamedTuple):
    """What is known of a scheduler's jobs here from what only root can write: whether a process that names one may be believed."""

    numbers: Mapping[str, str] = MappingProxyType({})
    """The jobs by number of those that control groups know by another name."""
    users: Mapping[str, int] = MappingProxyType({})
    """Whose each job is, as far as that is known."""
    has_groups: bool = False
    """True where the scheduler gives its jobs control groups: a process outside of them is in none, whatever it says."""

    def believes(self, job: str, uid: int | None) -> bool:
        """Whether a user's process, in no job's control group, may be in this job: it is his, or nothing speaks against it."""
        return self.users[job] == uid if job in self.users else not self.has_groups


def find_owner(
    uid: int | None,
    cgroups: Iterable[str],
    environ: bytes | None = None,
    program: str | None = None,
    register: Register = Register(),  # noqa: B008  frozen
) -> Owner:
    """The owner, from the process's user, the paths of its control groups and its environment.

    Args:
        uid: The process's user.
        cgroups: The paths of its control groups.
        environ: Its environment, in which it may write what it likes and inherits what others wrote.
        program: The program of a harvest that it is proven to belong to.
        register: What is known of the scheduler's jobs.
    """
    paths = list(dict.fromkeys(cgroups))
    return Owner(
        user=user_name(uid),
        uid=uid,
        job=_job(uid, paths, environ, program, register),
        container=container(paths),
        pod=pod(paths),
    )


def _job(
    uid: int | None, paths: Iterable[str], environ: bytes | None, program: str | None, register: Register
) -> str | None:
    job = slurm_job(paths)
    if job is None and program is not None:
        return job_of(program)
    if job is not None and (not is_sluid(job) or job in register.numbers):
        return register.numbers.get(job, job)
    told = slurm_job_of_environ(environ)
    if told is None:
        return job
    is_his = register.believes(told, uid) if job is None else register.users.get(told, uid) == uid
    return told if is_his else job


def container(paths: Iterable[str]) -> str | None:
    """The innermost container: its id shortened as `docker ps` does, or the name that LXC gave it."""
    for path in paths:
        if found := _CONTAINER.findall(path):
            return str(found[-1])[:_SHORT]
        if match := _LXC.search(path):
            return match[1]
    return None


def pod(paths: Iterable[str]) -> str | None:
    """The UID of the Kubernetes pod; systemd's names write its dashes as underscores."""
    for path in paths:
        if match := _POD.search(path):
            return match[1].replace("_", "-")
    return None


def user_name(uid: int | None) -> str | None:
    """The user's name, the number as text when nobody has it."""
    if uid is None:
        return None
    clock = monotonic()
    if clock - _nameless.get(uid, -inf) < _RETRY_SECONDS:
        return str(uid)
    try:
        return _look_up(uid)
    except (KeyError, OverflowError):
        if len(_nameless) >= _MOST_NAMES:
            _nameless.clear()
        _nameless[uid] = clock
        return str(uid)


@lru_cache(maxsize=_MOST_NAMES)
def _look_up(uid: int) -> str:
    return pwd.getpwuid(uid).pw_name
