"""Sample the machine for the profiler: the process's own GPUs often, everything once per second."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import NamedTuple

from gpulse.model.device import Device, select_own_gpus
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.snapshot import select_gpus
from gpulse.model.source_health import Health
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.nvml.gpm import MIN_GPM_SECONDS
from gpulse.sources.nvml.gpu_reader import GpuReader
from gpulse.sources.nvml.read_timing import Cadence, DriverTimeouts

_TICK_TIMEOUT_SECONDS = 2.0
"""Long, because calls wait while the program holds the interpreter lock (GIL)."""
_CALL_TIMEOUT_SECONDS = 10.0
_UNHURRIED_SECONDS = 5.0
"""Assumed interval of frames, for the same reason."""
_FULL_FRAME_SECONDS = 1.0
_SLOW_SECONDS = 5.0
"""The energy counter and other slow readings cost milliseconds of CPU time per GPU."""
_INITIAL_NAMESPACE = "pid:[4026531836]"


class ProfilingSample(NamedTuple):
    """One sample of the machine."""

    now: float
    monotonic: float
    gpus: tuple[GpuReading, ...]
    """GPUs of this process."""
    frame: Frame | None
    """Full frame, once per second."""
    trouble: str | None
    """Why readings are missing."""


class ProfilingSampler:
    """Reads the GPUs that this process may use, and once per second the whole machine."""

    def __init__(self, interval_seconds: float, variable: str | None) -> None:
        """Open the machine.

        Args:
            interval_seconds: Time between two samples.
            variable: GPUs to read, in the format of CUDA_VISIBLE_DEVICES; None for all.
        """
        cadence = Cadence(
            second=interval_seconds,
            gpm=max(MIN_GPM_SECONDS, interval_seconds),
            graphics=_FULL_FRAME_SECONDS,
            slow=max(_SLOW_SECONDS, interval_seconds),
            details=0.0,
        )
        timeouts = DriverTimeouts(call=_CALL_TIMEOUT_SECONDS)
        self._variable = variable
        self._reader = GpuReader(cadence, watch_xids=False, timeouts=timeouts)
        self._machine = LocalMachine(
            interval_seconds=_UNHURRIED_SECONDS, cadence=cadence, timeouts=timeouts, gpus=self._reader
        )
        self._devices: list[Device] = []
        self._own: frozenset[str] = frozenset()
        self._whole_at = -inf
        self._samples = 0

    def sample(self, now: float) -> ProfilingSample:
        """Take one sample; `now` is in epoch seconds."""
        clock = monotonic()
        frame = None
        if self._samples > 1 and clock - self._whole_at >= _FULL_FRAME_SECONDS - 0.05:
            self._whole_at = clock
            whole = self._machine.sample(now)
            readings, health = whole.gpus, whole.health
            frame = select_gpus(whole, self._is_own)
            clock = whole.monotonic
        else:
            self._reader.start(now)
            readings, found = self._reader.collect(now, tick_patience=_TICK_TIMEOUT_SECONDS)
            health = tuple(found)
        self._samples += 1
        self._choose()
        gpus = tuple(gpu for gpu in readings if self._is_own(gpu))
        return ProfilingSample(now, clock, gpus, frame, self._trouble(gpus, health))

    def close(self) -> None:
        """Release the driver."""
        self._machine.close()

    def _is_own(self, gpu: GpuReading) -> bool:
        return gpu.device.uuid in self._own

    def _choose(self) -> None:
        devices = self._reader.devices
        if devices != self._devices:
            self._devices = devices
            self._own = frozenset(device.uuid for device in select_own_gpus(devices, self._variable))
            self._reader.only(self._own)

    def _trouble(self, gpus: Sequence[GpuReading], health: Sequence[Health]) -> str | None:
        labels = {f"gpu {gpu.device.label}" for gpu in gpus}
        for entry in health:
            if entry.source == "nvml" and entry.is_problem and (not labels or entry.subject in labels):
                return entry.detail if entry.hint is None else f"{entry.detail} ({entry.hint})"
        if self._devices and not gpus:
            return f"{self._variable!r} matches none of the GPUs of this machine"
        return None if gpus else "no GPU found"


def driver_pid() -> int | None:
    """Return the PID of this process in the driver's namespace; None in a container, where the host's PID is unknown."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    return os.getpid() if namespace == _INITIAL_NAMESPACE else None
