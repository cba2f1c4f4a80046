"""Track the state of every GPU, its utilization of the last 15 minutes, and the totals of the fleet."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.atomic_files import replace_file
from gpulse.cluster.head.fleet import RECONNECT_SECONDS, Fleet
from gpulse.cluster.head.fleet_totals import (
    MAX_FILE_BYTES,
    TOTALS_FILE,
    IdleGpu,
    StateCounts,
    TotalsHistory,
    find_midnights,
    read_totals,
)
from gpulse.cluster.head.gpu_columns import GpuColumns, GpuRow
from gpulse.cluster.protocol import answers as a
from gpulse.errors import GpulseError
from gpulse.model.device import IDLE_RATIO
from gpulse.model.gpu_state import GPU_STATES, MIN_HELD_BYTES, MIN_HELD_RATIO, STAYS_BUSY_SECONDS, GpuState
from gpulse.model.harvest_status import STATE_CODES
from gpulse.store.store import Query, Store

BUSY, HELD_IDLE, FREE, HARVESTED, FAULTY, LOST, UNKNOWN = range(len(GPU_STATES))
_HARVESTING = (STATE_CODES["harvested"], STATE_CODES["stopping"])


class GpuStates:
    """State of every GPU, and since when idle GPUs have been idle."""

    def __init__(self) -> None:
        self.states: NDArray[np.int8] = np.zeros(0, np.int8)
        """Index in `GPU_STATES` for each row."""
        self.busy_at: NDArray[np.float64] = np.zeros(0)
        """When a GPU was last active; -inf if that was not observed."""
        self.held_since: NDArray[np.float64] = np.zeros(0)
        """Since when a GPU is held without interruption, as far as it was observed; NaN if it is not held."""
        self._doubt_until: NDArray[np.float64] = np.zeros(0)
        """Until then nobody knows whether a held GPU is idle, because it was not observed long enough; NaN before its
        first frame."""

    def move(self, moved: NDArray[np.int64]) -> None:
        """Follow rows that have moved, as returned by `GpuColumns.read`."""
        self.states = _moved(self.states, moved, UNKNOWN)
        self.busy_at = _moved(self.busy_at, moved, -np.inf)
        self.held_since = _moved(self.held_since, moved, np.nan)
        self._doubt_until = _moved(self._doubt_until, moved, np.nan)

    def restore(self, row: int, busy_at: float, held_since: float) -> None:
        """Set what was observed of a GPU that was held and idle when the last head ended."""
        self.busy_at[row] = max(self.busy_at[row], busy_at)
        self.held_since[row] = held_since
        self._doubt_until[row] = -np.inf

    def update(self, columns: GpuColumns) -> None:
        """Find the state of every GPU."""
        activity = find_activity(columns)
        is_known = ~np.isnan(activity)
        times = columns.times
        with np.errstate(invalid="ignore"):  # comparisons with NaN are false, as they should be
            is_active = activity > IDLE_RATIO
            self.busy_at = np.where(is_active, times, self.busy_at)
            used, total = columns.values["memory_used_bytes"], columns.memory_total
            limit = np.fmax(float(MIN_HELD_BYTES), MIN_HELD_RATIO * total)
            is_held = columns.has_process | (used > limit)
            is_undecided = np.isnan(times) | (~is_held & ~columns.knows_processes)
            held_since = np.where(is_held, np.fmin(self.held_since, times), np.nan)
            self.held_since = np.where(is_undecided, self.held_since, held_since)
            self._doubt_until = np.fmin(self._doubt_until, times + STAYS_BUSY_SECONDS)
            is_recent = is_known & (times - self.busy_at < STAYS_BUSY_SECONDS)
            is_doubted = times < self._doubt_until
        is_harvested = ~columns.has_people & (
            columns.has_harvest | np.isin(columns.values["harvest_state"], _HARVESTING)
        )
        is_blind = ~is_known & ~columns.knows_processes & np.isnan(used)
        states = np.where(is_blind, UNKNOWN, FREE)
        states = np.where(is_held, np.where(is_known & ~is_doubted, HELD_IDLE, BUSY), states)
        states = np.where(is_recent, np.where(is_held | is_active, BUSY, FREE), states)
        states = np.where(is_harvested, HARVESTED, states)
        states = np.where(columns.is_faulty & ((states == FREE) | (states == UNKNOWN)), FAULTY, states)
        self.states = np.where(columns.is_lost, LOST, states).astype(np.int8)

    def idle_since(self) -> NDArray[np.float64]:
        """Return since when each GPU that is held and idle is so; NaN for all others."""
        since: NDArray[np.float64] = np.fmax(self.busy_at, self.held_since)
        since[self.states != HELD_IDLE] = np.nan
        return since


def find_activity(columns: GpuColumns) -> NDArray[np.float64]:
    """Return the activity of each GPU from 0 to 1: utilization or active SMs, the larger; NaN where unknown."""
    activity: NDArray[np.float64] = np.fmax(
        columns.values["gpu_utilization_ratio"], columns.values["sm_active_ratio"]
    )
    return activity


def _moved(column: NDArray[Any], moved: NDArray[np.int64], new: float) -> NDArray[Any]:
    made = np.full(len(moved), new, column.dtype)
    kept = moved >= 0
    made[kept] = column[moved[kept]]
    return made


TREND_METRIC = "gpu_utilization_ratio"
TREND_STEPS = 60
TREND_STEP_SECONDS = 15
_MAX_FILLED_STEPS = 4
"""Stored readings may be this far apart, in steps, to be taken as one line: slow agents, rows of minutes."""
_UNKNOWN = -1
_VALUES: tuple[float | None, ...] = (*(hundredth / 100 for hundredth in range(101)), None)
"""Values by hundredths; the last one, which is also at -1, is the unknown value."""


class TrendView(NamedTuple):
    """The trends of all GPUs at one moment."""

    start: float
    rows: Sequence[GpuRow]
    hundredths: NDArray[np.int8]
    """By row and step."""

    def to_answer(self) -> a.FleetTrends:
        """Return the trends as the head answers them; takes a while with many GPUs."""
        gpus: dict[str, dict[str, list[float | None]]] = {}
        for row, numbers in zip(self.rows, self.hundredths, strict=True):
            values = [_VALUES[number] for number in numbers.tolist()]
            gpus.setdefault(row.node_name, {})[row.label] = values
        return a.FleetTrends(
            start=self.start, step_seconds=float(TREND_STEP_SECONDS), metric=TREND_METRIC, gpus=gpus
        )


class UtilizationTrends:
    """Mean utilization of every GPU in each step of the last 15 minutes."""

    def __init__(self) -> None:
        self._hundredths = np.zeros((0, TREND_STEPS), np.int8)
        """By row and step modulo the number of steps; the current step is in the sums instead."""
        self._sums = np.zeros(0)
        self._counts = np.zeros(0)
        self._step: int | None = None
        """Number of the current step, counted from the epoch."""

    def move(self, moved: NDArray[np.int64]) -> None:
        """Follow rows that have moved, as returned by `GpuColumns.read`."""
        kept = moved >= 0
        hundredths = np.full((len(moved), TREND_STEPS), _UNKNOWN, np.int8)
        sums, counts = np.zeros(len(moved)), np.zeros(len(moved))
        hundredths[kept] = self._hundredths[moved[kept]]
        sums[kept], counts[kept] = self._sums[moved[kept]], self._counts[moved[kept]]
        self._hundredths, self._sums, self._counts = hundredths, sums, counts

    def add(self, columns: GpuColumns, now: float) -> None:
        """Add the newest readings; those that are repeated or late are left out."""
        self._advance(int(now // TREND_STEP_SECONDS))
        used = columns.values[TREND_METRIC]
        used = np.where(np.isnan(used), columns.values["sm_active_ratio"], used)
        with np.errstate(invalid="ignore"):
            fresh = columns.is_new & ~np.isnan(used) & (columns.times > now - TREND_STEP_SECONDS)
        self._sums[fresh] += used[fresh]
        self._counts[fresh] += 1

    def restore(self, row: int, times: NDArray[np.float64], values: NDArray[np.float64]) -> None:
        """Set values of a GPU from the store, where there are none yet.

        Args:
            row: The GPU.
            times: Start time of each step.
            values: The mean of each step.
        """
        if self._step is None:
            return
        steps = np.floor_divide(times, TREND_STEP_SECONDS).astype(np.int64)
        steps, values = _fill_gaps(steps, values)
        wanted = (steps > self._step - TREND_STEPS) & (steps < self._step) & ~np.isnan(values)
        places = steps[wanted] % TREND_STEPS
        given = _to_hundredths(values[wanted])
        before = self._hundredths[row, places]
        self._hundredths[row, places] = np.where(before == _UNKNOWN, given, before)
        current = values[(steps == self._step) & ~np.isnan(values)]
        if len(current) and not self._counts[row]:
            self._sums[row], self._counts[row] = current[0], 1

    def view(self, rows: Sequence[GpuRow]) -> TrendView:
        """Return a copy of the trends of all GPUs."""
        step = self._step or 0
        first = step - TREND_STEPS + 1
        order = np.arange(first, step) % TREND_STEPS
        return TrendView(
            float(first * TREND_STEP_SECONDS),
            rows,
            np.column_stack((self._hundredths[:, order], self._current())),
        )

    def _advance(self, step: int) -> None:
        """Begin a step; steps without readings in between are unknown."""
        if self._step is None:
            self._step = step
        if step <= self._step:
            return
        self._hundredths[:, self._step % TREND_STEPS] = self._current()
        for skipped in range(max(self._step + 1, step - TREND_STEPS), step + 1):
            self._hundredths[:, skipped % TREND_STEPS] = _UNKNOWN
        self._sums[:] = 0
        self._counts[:] = 0
        self._step = step

    def _current(self) -> NDArray[np.int8]:
        """Return the mean of the current step so far."""
        with np.errstate(invalid="ignore"):
            return _to_hundredths(self._sums / self._counts)


def _fill_gaps(
    steps: NDArray[np.int64], values: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return steps with those between two readings added, which have the earlier value; not after a long gap."""
    known = ~np.isnan(values)
    steps, values = steps[known], values[known]
    if len(steps) < 2:
        return steps, values
    lengths = np.diff(steps)
    lengths = np.append(np.where(lengths <= _MAX_FILLED_STEPS, lengths, 1), 1)
    begins = np.repeat(steps, lengths)
    within = np.arange(len(begins)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return begins + within, np.repeat(values, lengths)


def _to_hundredths(values: NDArray[np.float64]) -> NDArray[np.int8]:
    return np.where(np.isnan(values), _UNKNOWN, np.rint(100 * np.clip(values, 0, 1))).astype(np.int8)


log = logging.getLogger(__name__)

_SAMPLE_SECONDS = 2.0
_MIN_SAMPLE_SECONDS = 0.5
"""A request for the totals observes the GPUs again if the last time is longer ago."""
_MAX_SAMPLE_SECONDS = 10.0
"""If the GPUs were not observed for longer, nothing is known about that time."""
_PROCESS_SECONDS = 15.0
"""How often the users of processes are looked up again."""
_SAVE_SECONDS = 60.0
_TRENDS_SECONDS = 5.0
"""All requests for trends within this time get the same answer."""


class FleetMonitor:
    """Counts the GPUs of a fleet by state, and keeps what the overview shows of the past."""

    def __init__(
        self,
        fleet: Fleet,
        store: Store,
        directory: str,
        *,
        missing: Callable[[], int],
        now: Callable[[], float],
    ) -> None:
        """Prepare to observe.

        Args:
            fleet: All nodes.
            store: Source of the trends of the time before the head started.
            directory: The data directory.
            missing: Returns the number of missing nodes.
            now: The head's clock.
        """
        self._fleet = fleet
        self._store = store
        self._path = f"{directory}/{TOTALS_FILE}"
        self._missing = missing
        self._now = now
        self._columns = GpuColumns()
        self._states = GpuStates()
        self._trends = UtilizationTrends()
        self._totals = TotalsHistory()
        self._counts: dict[GpuState, int] = dict.fromkeys(GPU_STATES, 0)
        self._power: float | None = None
        self._began = self._sampled = now()
        self._processes_at = float("-inf")
        self._answer: tuple[float, a.FleetTrends] | None = None
        self._answering = asyncio.Lock()

    def open(self) -> None:
        """Read the file that the last head has written."""
        self.sample(self._now())
        try:
            with open(self._path, "rb") as file:
                self._totals, idle = read_totals(file.read(MAX_FILE_BYTES))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("cannot read the fleet totals from %s; they start from zero: %s", self._path, error)
            return
        for place, row in enumerate(self._columns.rows):
            found = idle.get(row.uuid)
            if found is not None:
                busy_at = -np.inf if found.busy_at is None else found.busy_at
                self._states.restore(place, busy_at, found.held_since)

    async def run(self) -> None:
        """Observe until cancelled."""
        await self.restore_trends()
        saved = self._now()
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            now = self._now()
            self.sample(now)
            if now - saved >= _SAVE_SECONDS:
                saved = now
                await self.save()

    def sample(self, now: float) -> None:
        """Observe all GPUs at this moment."""
        is_due = now - self._processes_at >= _PROCESS_SECONDS
        if is_due:
            self._processes_at = now
        columns, states = self._columns, self._states
        moved = columns.read(self._fleet.members, self._fleet.layouts, processes=is_due)
        if moved is not None:
            states.move(moved)
            self._trends.move(moved)
        states.update(columns)
        self._trends.add(columns, now)
        counts = np.bincount(states.states[columns.is_unit], minlength=len(GPU_STATES)).tolist()
        self._counts = dict(zip(GPU_STATES, counts, strict=True))
        watts = columns.values["power_watts"][~columns.is_instance & (states.states != LOST)]
        watts = watts[~np.isnan(watts)]
        self._power = float(watts.sum()) if len(watts) else None
        seconds, self._sampled = now - self._sampled, now
        is_waiting = now - self._began < RECONNECT_SECONDS and bool(np.isnan(columns.times).any())
        if 0 < seconds <= _MAX_SAMPLE_SECONDS and not is_waiting:
            counts = StateCounts(
                busy=self._counts["busy"],
                held_idle=self._counts["idle"],
                free=self._counts["free"],
                harvested=self._counts["harvested"],
                faulty=self._counts["faulty"],
                power_watts=self._power,
            )
            self._totals.add(counts, seconds, now)

    async def trends(self) -> a.FleetTrends:
        """Return the trends of all GPUs, computed at most every few seconds."""
        async with self._answering:
            now = self._now()
            if self._answer is None or not 0 <= now - self._answer[0] < _TRENDS_SECONDS:
                view = self._trends.view(self._columns.rows)
                self._answer = now, await asyncio.to_thread(view.to_answer)
            return self._answer[1]

    def totals(self) -> a.FleetTotals:
        """Return the totals now and over the last 24 hours."""
        if self._now() - self._sampled >= _MIN_SAMPLE_SECONDS:
            self.sample(self._now())
        at, counts = self._sampled, self._counts
        midnight, yesterday = find_midnights(at)
        today = self._totals.gpu_hours(midnight, at + 1.0)
        before = self._totals.gpu_hours(yesterday, midnight)
        idle = self._columns.is_unit & (self._states.states == HELD_IDLE)
        since = self._states.idle_since()[idle]
        users = {user for place in np.flatnonzero(idle) for user in self._columns.users[place]}
        return a.FleetTotals(
            at=at,
            now=a.FleetNow(
                gpus=sum(counts.values()),
                busy=counts["busy"],
                held_idle=counts["idle"],
                free=counts["free"],
                harvested=counts["harvested"],
                faulty=counts["faulty"],
                lost=counts["lost"],
                missing_nodes=self._missing(),
                power_watts=None if self._power is None else round(self._power, 1),
                wasted_gpu_hours_today=today and today[0],
                held_gpu_hours_today=today and today[1],
                wasted_gpu_hours_yesterday=before and before[0],
                longest_idle_seconds=round(max(0.0, at - float(since.min())), 1) if len(since) else None,
                idle_users=len(users),
            ),
            day=self._totals.day(at),
        )

    async def save(self) -> None:
        """Write the totals to their file; a failure is only logged, because the log has all samples."""
        states = self._states
        idle = [
            IdleGpu(
                self._columns.rows[place].uuid,
                float(busy_at) if np.isfinite(busy_at := states.busy_at[place]) else None,
                float(states.held_since[place]),
            )
            for place in np.flatnonzero(~np.isnan(states.held_since) & (states.states == HELD_IDLE))
        ]
        try:
            await asyncio.to_thread(replace_file, self._path, self._totals.to_bytes(idle), durable=False)
        except OSError as error:
            log.warning("cannot write the fleet totals to %s: %s", self._path, os.strerror(error.errno or 0))

    async def restore_trends(self) -> None:
        """Read the trends of the time before the head started from the store."""
        now = self._now()
        query = Query(
            (now // TREND_STEP_SECONDS - TREND_STEPS) * TREND_STEP_SECONDS,
            now,
            scope="gpu",
            metrics=(TREND_METRIC,),
            step=float(TREND_STEP_SECONDS),
        )
        with suppress(GpulseError):  # the trends then begin with the head
            found = await asyncio.to_thread(self._store.series, query)
            places = {(row.node, row.uuid): place for place, row in enumerate(self._columns.rows)}
            for series in found:
                place = places.get((series.key.node, series.key.subject))
                if place is not None:
                    self._trends.restore(place, series.times, series.values)
