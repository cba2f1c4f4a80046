"""A job over time: the mean of its GPUs, and how busy each of them was."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from gpulse.reports.efficiency import BUSY_METRICS, METRICS
from gpulse.reports.gpu_time import GpuKey
from gpulse.reports.gpu_use import JobData
from gpulse.reports.occupancy import on_grid
from gpulse.store.store import Series

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_GPUS = 64
"""Of more GPUs, only these are listed."""
_DIGITS = 4


class JobGpuSeries(Struct, frozen=True, kw_only=True):
    """How busy one GPU was, a value per step."""

    node: str
    gpu: str | None
    uuid: str
    values: list[float | None]


class JobSeries(Struct, frozen=True, kw_only=True):
    """A job over time; null where nothing is known."""

    step: float
    times: list[float]
    metrics: dict[str, list[float | None]]
    """The mean of its GPUs, by metric."""
    gpus: list[JobGpuSeries]


def make_series(data: JobData, used: Collection[GpuKey], max_steps: int) -> JobSeries | None:
    """Return a job over time; None when no step is wanted, or there is none.

    Args:
        data: What the store has.
        used: The GPUs that means are of.
        max_steps: At most this many.
    """
    grid = data.grid
    if not max_steps or not grid.count:
        return None
    several = -(-grid.count // max_steps)
    rows = {
        metric: [
            _downsample(on_grid(one, grid), several)
            for key, own in data.series.items()
            if key in used
            for one in own
            if one.metric == metric
        ]
        for metric in METRICS
    }
    busy = {key: _busy_series(own) for key, own in list(data.series.items())[:_MAX_GPUS]}
    return JobSeries(
        step=grid.step * several,
        times=grid.times()[::several],
        metrics={metric: _rounded(_mean(found)) for metric, found in rows.items() if found},
        gpus=[
            JobGpuSeries(
                node=data.names[key[0]],
                gpu=data.gpus[key].label if key in data.gpus else None,
                uuid=key[1],
                values=_rounded(_downsample(on_grid(one, grid), several)),
            )
            for key, one in busy.items()
            if one is not None
        ],
    )


def _busy_series(series: Sequence[Series]) -> Series | None:
    """Return the metric that says best how busy a GPU was: MIG instances have SM activity alone."""
    known = {one.metric: one for one in series}
    return next((known[metric] for metric in BUSY_METRICS if metric in known), None)


def _downsample(values: NDArray[np.float64], several: int) -> NDArray[np.float64]:
    """Return the means of this many steps each."""
    filled = np.concatenate((values, np.full(-len(values) % several, np.nan)))
    return _mean(list(filled.reshape(-1, several).T))


def _mean(rows: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the mean of what is known at each place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a place of which nothing is known stays unknown
        found: NDArray[np.float64] = np.nanmean(np.vstack(rows), axis=0)
    return found


def _rounded(values: NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(value) else round(value, _DIGITS) for value in values.tolist()]
