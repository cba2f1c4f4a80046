"""Who is on a GPU, as the driver tells it: pids, device memory, share of the multiprocessors."""

from __future__ import annotations

from typing import Any

import pynvml

from gpulse.model.process import GpuProcess
from gpulse.sources.nvml.library import LASTING, NVMLError, code_of
from gpulse.sources.nvml.probes import call

_COMPUTE = (call("nvmlDeviceGetComputeRunningProcesses"), "compute")
_GRAPHICS = (call("nvmlDeviceGetGraphicsRunningProcesses"), "graphics")
_SHARES_SECONDS = 1.0


class GpuProcessReader:
    """The processes of one GPU or MIG instance."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._kinds = [_COMPUTE, _GRAPHICS]
        self.has_shares = True
        """False once the driver said that it does not know shares of single processes."""

    def read(self, now: float) -> tuple[GpuProcess, ...]:
        """The processes, those with most memory first.

        Raises:
            NVMLError: Not even the compute processes can be listed.
        """
        found: dict[int, tuple[str, int | None]] = {}
        for entry in list(self._kinds):
            function, kind = entry
            try:
                processes = function(self._handle)
            except NVMLError:
                if entry is _COMPUTE:
                    raise
                self._kinds.remove(entry)
                continue
            for process in processes:
                known = found.get(process.pid)
                memory = process.usedGpuMemory
                found[process.pid] = (
                    (kind, memory) if known is None else ("compute+graphics", known[1] or memory)
                )
        shares = self._shares(now) if found else {}
        listed = [GpuProcess(pid, kind, memory, shares.get(pid)) for pid, (kind, memory) in found.items()]
        return tuple(sorted(listed, key=lambda process: (-(process.gpu_memory_bytes or 0), process.pid)))

    def _shares(self, now: float) -> dict[int, float]:
        """Each process' mean share of the multiprocessors over the driver's samples of the last second."""
        if not self.has_shares:
            return {}
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._handle, int((now - _SHARES_SECONDS) * 1e6))
        except NVMLError as error:
            self.has_shares = code_of(error.value) not in LASTING
            return {}
        sums: dict[int, list[int]] = {}
        for sample in samples:
            sums.setdefault(sample.pid, []).append(sample.smUtil)
        return {pid: min(1.0, sum(parts) / len(parts) / 100) for pid, parts in sums.items()}
