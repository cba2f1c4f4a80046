"""Energy of each GPU in a session: the board's own counter where it moved, power over time before and after."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.export.session.grid import Table
from gpulse.export.session.quantities import ENERGY, POWER

Array = NDArray[np.float64]


class _Account(NamedTuple):
    """What is known of one GPU so far."""

    time: float = np.nan
    power: float = np.nan
    joules: float = 0.0
    """Power over time, from the beginning."""
    counter: float = np.nan
    grown: float = 0.0
    """By how much the counter grew between its first and its last step."""
    first_step: float = 0.0
    before_first: float = np.nan
    """Power over time up to the counter's first step."""
    before_last: float = np.nan


class Energy:
    """Adds up the energy of many GPUs.

    The counter is read only now and then, and stands still in between. Between the first and the last time it moves
    it is exact; what lies before and after comes from the power draw.
    """

    def __init__(self, gpus: int, *, longest_gap_seconds: float) -> None:
        """Begin.

        Args:
            gpus: How many.
            longest_gap_seconds: Over a longer silence nothing is added, since nobody knows what the power was.
        """
        self._accounts = [_Account()] * gpus
        self._gap = longest_gap_seconds

    def add(self, table: Table) -> None:
        """Take samples, no older than those before."""
        if not len(table.times):
            return
        order = np.argsort(table.columns, kind="stable")
        columns = table.columns[order]
        edges = np.flatnonzero(np.concatenate(([True], columns[1:] != columns[:-1], [True])))
        for begin, end in itertools.pairwise(edges):
            which = order[begin:end]
            column = int(columns[begin])
            self._accounts[column] = self._further(
                self._accounts[column],
                table.times[which],
                table.values[POWER][which],
                table.values[ENERGY][which],
            )

    def joules(self, gpu: int) -> float | None:
        """The energy that one GPU used; None when neither its power nor its counter was known."""
        account = self._accounts[gpu]
        if np.isnan(account.before_first):
            return None if np.isnan(account.power) else account.joules
        if np.isnan(account.power):
            return account.first_step + account.grown
        outside = account.joules - (account.before_last - account.before_first)
        return account.grown + max(0.0, outside)

    def _further(self, account: _Account, times: Array, power: Array, counter: Array) -> _Account:
        known = ~np.isnan(power)
        grows = account.joules + np.zeros(len(times))
        if known.any():
            moments = np.concatenate(([account.time], times[known]))
            watts = np.concatenate(([account.power], power[known]))
            lasted = np.diff(moments)
            parts = lasted * (watts[1:] + watts[:-1]) / 2
            parts[~((lasted >= 0) & (lasted <= self._gap))] = 0.0  # the first of all is NaN
            sums = account.joules + np.cumsum(parts)
            account = account._replace(
                time=float(moments[-1]), power=float(watts[-1]), joules=float(sums[-1])
            )
            reached = np.cumsum(known)
            grows = np.where(reached > 0, sums[np.maximum(reached - 1, 0)], grows)
        return _with_counter(account, counter, grows)


def _with_counter(account: _Account, counter: Array, joules: Array) -> _Account:
    known = np.flatnonzero(~np.isnan(counter))
    if not len(known):
        return account
    readings = np.concatenate(([account.counter], counter[known]))
    steps = np.diff(readings)
    moved = np.flatnonzero(steps > 0)  # one that ran backwards, or the first of all, tells nothing
    grown, first, last = account.grown, account.before_first, account.before_last
    first_step = account.first_step
    if len(moved):
        if np.isnan(first):
            # Of the first step nobody knows when it began: it ends where the counter's own time begins.
            first = float(joules[known[moved[0]]])
            first_step = float(steps[moved[0]])
            grown += float(steps[moved[1:]].sum())
        else:
            grown += float(steps[moved].sum())
        last = float(joules[known[moved[-1]]])
    return account._replace(
        counter=float(readings[-1]),
        grown=grown,
        first_step=first_step,
        before_first=first,
        before_last=last,
    )
