"""A lock on the control groups of Slurm's jobs, which all tests on this machine share.

An agent that finds a job's control group stops believing the jobs that processes outside of it claim. A test with such
claims therefore must not run beside one that creates control groups.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

_CGROUPS = "/sys/fs/cgroup"


@contextmanager
def creating_job_cgroups() -> Iterator[None]:
    """Wait until no test relies on their absence, and keep such tests waiting."""
    with _locked(fcntl.LOCK_EX):
        yield


@contextmanager
def no_job_cgroups() -> Iterator[None]:
    """Wait until no test has control groups of jobs, and keep tests from creating them."""
    with _locked(fcntl.LOCK_SH):
        yield


@contextmanager
def _locked(mode: int) -> Iterator[None]:
    descriptor = os.open(_CGROUPS, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, mode)
        yield
    finally:
        os.close(descriptor)
