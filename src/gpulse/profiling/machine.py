"""What a process sees of its machine while it profiles itself: its own GPUs often, everything once a second."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import NamedTuple

from gpulse.model.device import Device, own_gpus
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.health import Health
from gpulse.model.snapshot import select
from gpulse.sources.machine import LocalMachine
from gpulse.sources.nvml.cadence import Cadence, Patience
from gpulse.sources.nvml.gpm import SHORTEST_SECONDS
from gpulse.sources.nvml.reader import GpuReader

_TICK_PATIENCE = 2.0
"""Long: a program that holds the interpreter's lock makes every call of ours wait its turn."""
_CALL_PATIENCE = 10.0
_UNHURRIED_SECONDS = 5.0
"""As if frames were this far apart, for the same reason."""
_WHOLE_SECONDS = 1.0
_SLOW_SECONDS = 5.0
"""The counter of energy and the like cost milliseconds of CPU time a GPU."""
_INITIAL_NAMESPACE = "pid:[4026531836]"


class Look(NamedTuple):
    """One look at the machine."""

    now: float
    monotonic: float
    gpus: tuple[GpuReading, ...]
    """Those of this process."""
    frame: Frame | None
    """With everything in it, once a second."""
    trouble: str | None
    """Why there are no readings, or less than there should be."""


class OwnMachine:
    """Reads the GPUs that this process may use, and once a second the machine around them."""

    def __init__(self, interval_seconds: float, variable: str | None) -> None:
        """Prepare to read.

        Args:
            interval_seconds: Time from one look to the next.
            variable: Which GPUs are meant, as CUDA_VISIBLE_DEVICES says it; None for all.
        """
        cadence = Cadence(
            second=interval_seconds,
            gpm=max(SHORTEST_SECONDS, interval_seconds),
            graphics=_WHOLE_SECONDS,
            slow=max(_SLOW_SECONDS, interval_seconds),
            details=0.0,
        )
        patience = Patience(call=_CALL_PATIENCE)
        self._variable = variable
        self._reader = GpuReader(cadence, watch_xids=False, patience=patience)
        self._machine = LocalMachine(
            interval_seconds=_UNHURRIED_SECONDS, cadence=cadence, patience=patience, gpus=self._reader
        )
        self._devices: list[Device] = []
        self._own: frozenset[str] = frozenset()
        self._whole_at = -inf
        self._looks = 0

    def look(self, now: float) -> Look:
        """One look; `now` is in epoch seconds."""
        clock = monotonic()
        frame = None
        if self._looks > 1 and clock - self._whole_at >= _WHOLE_SECONDS - 0.05:
            self._whole_at = clock
            whole = self._machine.sample(now)
            readings, health = whole.gpus, whole.health
            frame = select(whole, self._is_own)
            clock = whole.monotonic
        else:
            self._reader.start(now)
            readings, found = self._reader.collect(now, tick_patience=_TICK_PATIENCE)
            health = tuple(found)
        self._looks += 1
        self._choose()
        gpus = tuple(gpu for gpu in readings if self._is_own(gpu))
        return Look(now, clock, gpus, frame, self._trouble(gpus, health))

    def close(self) -> None:
        """Give the driver back."""
        self._machine.close()

    def _is_own(self, gpu: GpuReading) -> bool:
        return gpu.device.uuid in self._own

    def _choose(self) -> None:
        devices = self._reader.devices
        if devices != self._devices:
            self._devices = devices
            self._own = frozenset(device.uuid for device in own_gpus(devices, self._variable))
            self._reader.only(self._own)

    def _trouble(self, gpus: Sequence[GpuReading], health: Sequence[Health]) -> str | None:
        labels = {f"gpu {gpu.device.label}" for gpu in gpus}
        for entry in health:
            if entry.source == "nvml" and entry.is_problem and (not labels or entry.subject in labels):
                return entry.detail if entry.hint is None else f"{entry.detail} ({entry.hint})"
        if self._devices and not gpus:
            return f"none of the {len(self._devices)} GPUs here is meant by {self._variable!r}"
        return None if gpus else "there is no GPU here"


def own_pid() -> int | None:
    """The number under which the driver knows this process, None in a container: it goes by the host's numbers."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    return os.getpid() if namespace == _INITIAL_NAMESPACE else None
