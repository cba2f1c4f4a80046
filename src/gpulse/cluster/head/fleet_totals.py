"""Totals of all GPUs in steps of 15 minutes, and the file in which they survive a restart of the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from math import isfinite
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from gpulse.cluster.protocol import answers as a
from gpulse.store.damage import add_checksum, strip_checksum

TOTALS_FILE = "fleet-totals.json"
"""File in the data directory with the totals of the last two days."""
DAY_STEPS = 96
DAY_STEP_SECONDS = 900
_MAX_KEPT_SECONDS = 50 * 3600
"""Today and yesterday, also when one of them has 25 hours."""
MAX_STEPS = _MAX_KEPT_SECONDS // DAY_STEP_SECONDS
MAX_FILE_BYTES = 8 << 20
_MAX_IDLE_GPUS = 50_000
_MAX_AMOUNT = 1e15
_FILE_VERSION = 1

_Amount = Annotated[float, Meta(ge=0, le=_MAX_AMOUNT)]
_Time = Annotated[float, Meta(ge=0, le=1e11)]


class TotalsStep(Struct, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Sums over one step of 15 minutes."""

    start: _Time
    seconds: _Amount = 0.0
    """For how much of the step the totals are known."""
    busy: _Amount = 0.0
    """GPU-seconds in this state."""
    held_idle: _Amount = 0.0
    free: _Amount = 0.0
    harvested: _Amount = 0.0
    faulty: _Amount = 0.0
    power_seconds: _Amount = 0.0
    """For how much of the step the power is known."""
    joules: _Amount = 0.0


class IdleGpu(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A GPU that was held and idle when the file was written."""

    uuid: Annotated[str, Meta(max_length=256)]
    busy_at: _Time | None
    """When it was last active; None if that was not observed."""
    held_since: _Time


class TotalsFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file."""

    version: int
    steps: Annotated[Sequence[TotalsStep], Meta(max_length=MAX_STEPS + 1)]
    idle: Annotated[Sequence[IdleGpu], Meta(max_length=_MAX_IDLE_GPUS)]


class StateCounts(Struct, frozen=True, kw_only=True):
    """How many GPUs are in which state at one moment."""

    busy: int = 0
    held_idle: int = 0
    free: int = 0
    harvested: int = 0
    faulty: int = 0
    power_watts: float | None = None


_STATES = ("busy", "held_idle", "free", "harvested", "faulty")


class TotalsHistory:
    """Totals of the last two days."""

    def __init__(self, steps: Sequence[TotalsStep] = ()) -> None:
        self._steps = {int(step.start): step for step in steps}

    def add(self, counts: StateCounts, seconds: float, now: float) -> None:
        """Add the time that has just passed, in which the counts held."""
        start = int(now // DAY_STEP_SECONDS) * DAY_STEP_SECONDS
        step = self._steps.get(start)
        if step is None:
            oldest = now - _MAX_KEPT_SECONDS
            self._steps = {key: value for key, value in self._steps.items() if oldest < key <= start}
            step = self._steps[start] = TotalsStep(start=float(start))
        step.seconds += seconds
        for name in _STATES:
            setattr(step, name, getattr(step, name) + seconds * getattr(counts, name))
        if counts.power_watts is not None:
            step.power_seconds += seconds
            step.joules += seconds * counts.power_watts

    def day(self, now: float) -> a.FleetDay:
        """Return the last 24 hours."""
        last = int(now // DAY_STEP_SECONDS) * DAY_STEP_SECONDS
        start = last - (DAY_STEPS - 1) * DAY_STEP_SECONDS
        steps = [self._steps.get(start + place * DAY_STEP_SECONDS) for place in range(DAY_STEPS)]
        known = [step if step is not None and step.seconds > 0 else None for step in steps]
        means = {
            name: [None if step is None else round(getattr(step, name) / step.seconds, 2) for step in known]
            for name in ("busy", "held_idle", "free", "faulty")
        }
        return a.FleetDay(
            start=float(start),
            step_seconds=float(DAY_STEP_SECONDS),
            power_watts=[
                round(step.joules / step.power_seconds, 1)
                if step is not None and step.power_seconds > 0
                else None
                for step in known
            ],
            wasted_gpu_hours=[None if step is None else round(step.held_idle / 3600, 4) for step in known],
            **means,
        )

    def gpu_hours(self, start: float, end: float) -> tuple[float, float] | None:
        """Return the GPU-hours that were held and idle, and all that were held, of a time range; None if unknown."""
        found = [step for step in self._steps.values() if start <= step.start < end and step.seconds > 0]
        if not found:
            return None
        idle = sum(step.held_idle for step in found)
        return round(idle / 3600, 3), round((idle + sum(step.busy for step in found)) / 3600, 3)

    def to_bytes(self, idle: Sequence[IdleGpu]) -> bytes:
        """Return the content of the file."""
        steps = sorted(self._steps.values(), key=lambda step: step.start)[-MAX_STEPS:]
        document = TotalsFile(version=_FILE_VERSION, steps=steps, idle=idle[:_MAX_IDLE_GPUS])
        return add_checksum(msgspec.json.encode(document))


def read_totals(data: bytes) -> tuple[TotalsHistory, Mapping[str, IdleGpu]]:
    """Return the totals of a file, and the GPUs that were held and idle by UUID.

    Raises:
        ValueError: The content is damaged, or from another version.
    """
    try:
        found = msgspec.json.decode(strip_checksum(data)[0], type=TotalsFile)
    except msgspec.DecodeError as error:
        raise ValueError(f"the file does not contain fleet totals: {error}") from error
    if found.version != _FILE_VERSION:
        raise ValueError(f"unknown file version {found.version}")
    for step in found.steps:
        if not all(isfinite(getattr(step, name)) for name in step.__struct_fields__):
            raise ValueError("a total is not a finite number")
        if step.start % DAY_STEP_SECONDS or step.seconds > 2 * DAY_STEP_SECONDS:
            raise ValueError(f"the time step of {step.seconds} seconds at {step.start} is invalid")
    return TotalsHistory(found.steps), {gpu.uuid: gpu for gpu in found.idle}


def find_midnights(now: float, zone: tzinfo | None = None) -> tuple[float, float]:
    """Return the last midnight and the one before it, in epoch seconds.

    Args:
        now: Epoch seconds.
        zone: The time zone; that of this machine when None.
    """
    today = datetime.fromtimestamp(now, zone).replace(hour=0, minute=0, second=0, microsecond=0)
    return today.timestamp(), (today - timedelta(days=1)).timestamp()
