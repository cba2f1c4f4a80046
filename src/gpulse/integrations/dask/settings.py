"""How a cluster is to be monitored, as `Monitor.attach` was told."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, get_args

from gpulse.integrations.dask import custom
from gpulse.integrations.dask.custom import CustomMetric
from gpulse.integrations.dask.jobs import JobType
from gpulse.integrations.dask.tracking import ArgumentError, Column, columns, nothing_tracked
from gpulse.sampling.sampler import SHORTEST_INTERVAL_SECONDS

if TYPE_CHECKING:
    from gpulse.integrations.dask.streaming import HeadSettings

_SHORTEST_MS = round(SHORTEST_INTERVAL_SECONDS * 1000)
_LONGEST_MS = 3_600_000
_MOST_MEASUREMENTS = 10**12


class Settings(NamedTuple):
    """Everything that scheduler and workers need to know."""

    tracked: tuple[Column, ...]
    custom: tuple[CustomMetric, ...] = ()
    job_type: JobType = "client"
    interval_ms: float = 200
    mem_limit: int | None = None
    """Measurements of a worker that are kept in memory."""
    dump_loc: str = "temp"
    """Where the others go, on the scheduler's machine."""
    head: HeadSettings | None = None

    @property
    def interval_seconds(self) -> float:
        """Time from one measurement to the next."""
        return self.interval_ms / 1000


def settings(
    tracking: Iterable[str],
    custom_metrics: Iterable[object] | None,
    job_type: str,
    polling_interval: float,
    mem_limit: int | None,
    dump_loc: str | os.PathLike[str],
    head: HeadSettings | None = None,
) -> Settings:
    """What `attach` was given, checked.

    Raises:
        ArgumentError: Something of it does not make sense; it says what is allowed.
    """
    tracked = columns(tracking)
    customs = custom.checked(custom_metrics, tracked)
    if not tracked and not customs:
        raise nothing_tracked()
    return Settings(
        tracked,
        customs,
        _job_type(job_type),
        _interval(polling_interval),
        _limit(mem_limit),
        _folder(dump_loc),
        head,
    )


def _job_type(given: object) -> JobType:
    for known in get_args(JobType):
        if given == known:
            return known  # type: ignore[no-any-return]
    raise ArgumentError(f"job_type is 'client' or 'manual', not {given!r}")


def _interval(given: object) -> float:
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not _SHORTEST_MS <= given <= _LONGEST_MS:  # type: ignore[operator]
        raise ArgumentError(
            f"polling_interval is a number of milliseconds from {_SHORTEST_MS} to {_LONGEST_MS:,}, not {given!r}"
        )
    return given  # type: ignore[return-value]


def _limit(given: object) -> int | None:
    if given is None:
        return None
    if not isinstance(given, int | float) or isinstance(given, bool) or not 1 <= given <= _MOST_MEASUREMENTS:
        raise ArgumentError(
            f"mem_limit is a number of measurements, at least 1, or None for no limit, not {given!r:.50}"
        )
    return int(given)


def _folder(given: object) -> str:
    if not isinstance(given, str | os.PathLike) or not os.fspath(given) or "\0" in os.fspath(given):
        raise ArgumentError(f"dump_loc is the path of a folder, not {given!r}")
    return os.fspath(given)
