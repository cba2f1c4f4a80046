"""Read the processes on a GPU from the driver: PIDs, device memory, share of the multiprocessors."""

from __future__ import annotations

import struct
from ctypes import byref, c_char, c_uint, c_ulonglong
from typing import Any

from gpulse.model.process import GpuProcess
from gpulse.sources.nvml.library import (
    INSUFFICIENT_SIZE,
    NO_DATA_ERRORS,
    PERMANENT_CODES,
    NVMLError,
    code_of,
    find_function,
)
from gpulse.sources.nvml.metric_probes import Failures
from gpulse.sources.procfs import is_due

_COMPUTE = ("nvmlDeviceGetComputeRunningProcesses_v3", "compute")
_GRAPHICS = ("nvmlDeviceGetGraphicsRunningProcesses_v3", "graphics")
_PROCESS = struct.Struct("<I4xQ8x")
"""nvmlProcessInfo_t: PID, memory."""
_UNKNOWN_BYTES = (1 << 64) - 1
_SHARE = struct.Struct("<I12xI12x")
"""nvmlProcessUtilizationSample_t: PID, percent of the multiprocessors."""
_FIRST_ROOM = 16


class GpuProcessReader:
    """Reads the processes of one GPU or MIG instance."""

    def __init__(self, handle: Any, shares_seconds: float, graphics_seconds: float = 0.0) -> None:
        """Prepare to read.

        Args:
            handle: Of the GPU or MIG instance.
            graphics_seconds: How often the list of graphics processes is read while it is empty.
            shares_seconds: How often the shares of the multiprocessors are read; they are kept in between. The
                call keeps a CPU busy for about 2 ms, fifty times as long as the process list itself.
        """
        self._handle = handle
        self._kinds = [_COMPUTE, _GRAPHICS]
        self._graphics_seconds = graphics_seconds
        self._graphics_at: float | None = None
        """When the list of graphics processes was found empty; None when it was not."""
        self._room = _FIRST_ROOM
        """Processes for which there was room in the last list: asking for their number first would cost a call."""
        self._shares_seconds = shares_seconds
        self._shares: dict[int, float] = {}
        self._has_reported_shares = False
        self.shares_at = 0.0
        self._shares_error: int | None = None
        self.has_shares = True
        """False once the driver reported that it does not support shares of processes."""

    def read(self, now: float, failures: Failures) -> tuple[GpuProcess, ...]:
        """Return the processes, those with the most memory first.

        Raises:
            NVMLError: The list cannot be read; a partial list would look complete.
        """
        listed = [process for entry in list(self._kinds) for process in self._listed(entry, now)]
        if listed and self.has_shares and now - self.shares_at >= 0.9 * self._shares_seconds:
            self._shares = self._read_shares(now)
            self.shares_at = now
        if listed and self._shares_error is not None:
            failures["sm_ratio"] = self._shares_error
        share = self._shares.get
        found: dict[int, GpuProcess] = {}
        for pid, kind, used in listed:
            process = GpuProcess(pid, kind, used, share(pid))
            known = found.get(pid)
            found[pid] = process if known is None else _merge_processes(known, process)
        return tuple(
            sorted(found.values(), key=lambda process: (-(process.gpu_memory_bytes or 0), process.pid))
        )

    def _listed(self, entry: tuple[str, str], now: float) -> list[tuple[int, str, int | None]]:
        function, kind = entry
        is_graphics = entry is _GRAPHICS
        if is_graphics and not is_due(now, self._graphics_at, 0.9 * self._graphics_seconds):
            return []
        try:
            raw = self._read_list(function)
        except NVMLError as error:
            if entry is _COMPUTE or code_of(error.value) not in PERMANENT_CODES:
                raise
            self._kinds.remove(entry)
            return []
        if is_graphics:
            self._graphics_at = None if raw else now
        return [
            (pid, kind, None if used == _UNKNOWN_BYTES else used) for pid, used in _PROCESS.iter_unpack(raw)
        ]

    def _read_list(self, function: str) -> memoryview:
        while True:
            count = c_uint(self._room)
            buffer = (c_char * (_PROCESS.size * self._room))()
            code = find_function(function)(self._handle, byref(count), buffer)
            if not code:
                return memoryview(buffer)[: _PROCESS.size * count.value]
            if code != INSUFFICIENT_SIZE or count.value <= self._room:
                raise NVMLError(code)
            self._room = 2 * count.value

    def _read_shares(self, now: float) -> dict[int, float]:
        """Return each process's mean share of the multiprocessors over the driver's samples of the last second."""
        self._shares_error = None
        try:
            samples = self._read_samples(c_ulonglong(int((now - 1.0) * 1e6)))
        except NVMLError as error:
            self.has_shares = self._has_reported_shares or code_of(error.value) not in PERMANENT_CODES
            self._shares_error = None if error.value in NO_DATA_ERRORS else error.value
            return {}
        self._has_reported_shares = True
        sums: dict[int, list[int]] = {}
        for pid, percent in samples:
            sums.setdefault(pid, []).append(percent)
        return {pid: min(1.0, sum(parts) / len(parts) / 100) for pid, parts in sums.items()}

    def _read_samples(self, since: c_ulonglong) -> list[tuple[int, int]]:
        """Return PID and percent of each sample of the driver since a time in microseconds."""
        function, count = find_function("nvmlDeviceGetProcessUtilization"), c_uint()
        code = function(self._handle, None, byref(count), since)
        if code != INSUFFICIENT_SIZE:
            raise NVMLError(code)
        buffer = (c_char * (_SHARE.size * count.value))()
        code = function(self._handle, buffer, byref(count), since)
        if code:
            raise NVMLError(code)
        return list(_SHARE.iter_unpack(memoryview(buffer)[: _SHARE.size * count.value]))


def _merge_processes(one: GpuProcess, other: GpuProcess) -> GpuProcess:
    """Merge a process that is listed twice: in both lists, or in several MIG instances of a GPU."""
    if one.kind != other.kind:
        return one._replace(
            kind="compute+graphics", gpu_memory_bytes=one.gpu_memory_bytes or other.gpu_memory_bytes
        )
    sizes = [size for size in (one.gpu_memory_bytes, other.gpu_memory_bytes) if size is not None]
    return one._replace(gpu_memory_bytes=sum(sizes) if sizes else None)
