"""One look at this machine: two readings a short time apart, or one where nothing needs two."""

from __future__ import annotations

import time

from gpulse.model.snapshot import Snapshot
from gpulse.sources.machine import LocalMachine
from gpulse.sources.nvml.cadence import close_up
from gpulse.sources.nvml.gpm import SHORTEST_SECONDS
from gpulse.sources.nvml.reader import GpuReader, for_one_look

_MARGIN_SECONDS = 0.0005
"""So that a timer that fires a little early does not cost the reading."""


def machine_for_one_look(gpus: GpuReader | None = None) -> LocalMachine:
    """This machine, without what only pays in the long run; `gpus` when they were opened already."""
    return LocalMachine(cadence=close_up(SHORTEST_SECONDS), gpus=gpus or for_one_look())


def look(machine: LocalMachine, *, rates_seconds: float | None) -> Snapshot:
    """One look; without `rates_seconds` it takes a second reading only where a GPU's GPM needs it."""
    earlier = machine.sample(time.time(), patient=True)
    rates_at = None if rates_seconds is None else earlier.monotonic + rates_seconds
    due = [moment for moment in (machine.gpm_ready_at, rates_at) if moment is not None]
    if not due:
        return Snapshot.of(None, earlier)
    time.sleep(max(0.0, max(due) + _MARGIN_SECONDS - time.monotonic()))
    return Snapshot.of(earlier, machine.sample(time.time(), patient=True))
