"""Who is on a GPU, as the driver tells it: pids, device memory, share of the multiprocessors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from gpulse.model.process import GpuProcess
from gpulse.sources.nvml.library import LASTING, NO_DATA, NVMLError, code_of
from gpulse.sources.nvml.probes import Failures, call

_COMPUTE = (call("nvmlDeviceGetComputeRunningProcesses"), "compute")
_GRAPHICS = (call("nvmlDeviceGetGraphicsRunningProcesses"), "graphics")


class GpuProcessReader:
    """The processes of one GPU or MIG instance."""

    def __init__(self, handle: Any, shares_seconds: float) -> None:
        """Prepare to read.

        Args:
            handle: Of the GPU or MIG instance.
            shares_seconds: How often the shares of the multiprocessors are asked for, and held. The
                call keeps a CPU busy for some 2 ms, fifty times as long as the list itself.
        """
        self._handle = handle
        self._kinds = [_COMPUTE, _GRAPHICS]
        self._shares_seconds = shares_seconds
        self._shares: dict[int, float] = {}
        self._told_shares = False
        self.shares_at = 0.0
        self._shares_error: int | None = None
        self.has_shares = True
        """False once the driver said that it does not know shares of single processes."""

    def read(self, now: float, failures: Failures) -> tuple[GpuProcess, ...]:
        """The processes, those with most memory first.

        Raises:
            NVMLError: The list cannot be had; a part of it would pass for the whole.
        """
        found: dict[int, GpuProcess] = {}
        for entry in list(self._kinds):
            for process in self._listed(entry):
                known = found.get(process.pid)
                found[process.pid] = process if known is None else _together(known, process)
        if found and self.has_shares and now - self.shares_at >= 0.9 * self._shares_seconds:
            self._shares = self._asked_shares(now)
            self.shares_at = now
        if found and self._shares_error is not None:
            failures["sm_ratio"] = self._shares_error
        listed = (process._replace(sm_ratio=self._shares.get(pid)) for pid, process in found.items())
        return tuple(sorted(listed, key=lambda process: (-(process.gpu_memory_bytes or 0), process.pid)))

    def _listed(self, entry: tuple[Callable[..., Any], str]) -> list[GpuProcess]:
        function, kind = entry
        try:
            return [GpuProcess(raw.pid, kind, raw.usedGpuMemory) for raw in function(self._handle)]
        except NVMLError as error:
            if entry is _COMPUTE or code_of(error.value) not in LASTING:
                raise
            self._kinds.remove(entry)
            return []

    def _asked_shares(self, now: float) -> dict[int, float]:
        """Each process' mean share of the multiprocessors over the driver's samples of the last second."""
        self._shares_error = None
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._handle, int((now - 1.0) * 1e6))
        except NVMLError as error:
            self.has_shares = self._told_shares or code_of(error.value) not in LASTING
            self._shares_error = None if error.value in NO_DATA else error.value
            return {}
        self._told_shares = True
        sums: dict[int, list[int]] = {}
        for sample in samples:
            sums.setdefault(sample.pid, []).append(sample.smUtil)
        return {pid: min(1.0, sum(parts) / len(parts) / 100) for pid, parts in sums.items()}


def _together(one: GpuProcess, other: GpuProcess) -> GpuProcess:
    """A process that is listed twice: by both lists, or in several instances of a GPU that is split."""
    if one.kind != other.kind:
        return one._replace(
            kind="compute+graphics", gpu_memory_bytes=one.gpu_memory_bytes or other.gpu_memory_bytes
        )
    sizes = [size for size in (one.gpu_memory_bytes, other.gpu_memory_bytes) if size is not None]
    return one._replace(gpu_memory_bytes=sum(sizes) if sizes else None)
