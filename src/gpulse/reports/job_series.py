"""A job over time: the mean of its GPUs, and how busy each of them was."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpulse.reports.chart import Grid
from gpulse.reports.document import Document
from gpulse.reports.efficiency import BUSY_METRICS, METRICS, GpuKey
from gpulse.reports.occupancy import row
from gpulse.store.store import Series

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_ROWS = 64
"""More GPUs than that are not told one by one."""
_DIGITS = 4


def drawn(
    steps: Mapping[GpuKey, Sequence[Series]],
    worked: Collection[GpuKey],
    moments: Grid,
    points: int,
    labels: Mapping[GpuKey, Document],
) -> Document | None:
    """What happened in at most so many steps; None when nobody wants to see it.

    Args:
        steps: By GPU.
        worked: The GPUs that means are of.
        moments: The grid of the steps.
        points: The most of them.
        labels: What each GPU is called.
    """
    if not points or not moments.count:
        return None
    several = -(-moments.count // points)
    spread = {
        metric: [
            _thinned(row(one, moments), several)
            for key, own in steps.items()
            if key in worked
            for one in own
            if one.metric == metric
        ]
        for metric in METRICS
    }
    busy = {key: _busiest(own) for key, own in list(steps.items())[:MOST_ROWS]}
    return {
        "step": moments.step * several,
        "times": moments.times()[::several],
        "metrics": {metric: _spelled(_mean(rows)) for metric, rows in spread.items() if rows},
        "gpus": [
            {**labels[key], "values": _spelled(_thinned(row(one, moments), several))}
            for key, one in busy.items()
            if one is not None
        ],
    }


def _busiest(steps: Sequence[Series]) -> Series | None:
    """What says best how busy a GPU was: instances know only their activity."""
    known = {one.metric: one for one in steps}
    return next((known[metric] for metric in BUSY_METRICS if metric in known), None)


def _thinned(values: NDArray[np.float64], several: int) -> NDArray[np.float64]:
    """The means of so many steps each."""
    filled = np.concatenate((values, np.full(-len(values) % several, np.nan)))
    return _mean(list(filled.reshape(-1, several).T))


def _mean(rows: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The mean of what is known at each place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a place of which nothing is known stays unknown
        found: NDArray[np.float64] = np.nanmean(np.vstack(rows), axis=0)
    return found


def _spelled(values: NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(value) else round(value, _DIGITS) for value in values.tolist()]
