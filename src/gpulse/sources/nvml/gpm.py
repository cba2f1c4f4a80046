"""GPM: how much of the GPU is really at work, from the counters of Hopper and later, without root.

Reading a sample and computing its metrics costs some 70 us of CPU on an H200, but for one metric: the
activity of the graphics engine alone takes 1.3 ms. It is therefore read at a period of its own.
"""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from typing import Any

import pynvml

from gpulse.model.metric import Value, Values
from gpulse.sources.nvml.library import NVMLError
from gpulse.sources.nvml.probes import Failures

SHORTEST_SECONDS = 0.1
"""Two samples closer than this give values that mean nothing."""
_CLOSE_SECONDS = 0.05

_MIB = 1024 * 1024
_GRAPHICS = ("graphics_active_ratio", 1, 0.01)
_RATIOS = {
    "sm_active_ratio": 2,
    "sm_occupancy_ratio": 3,
    "integer_active_ratio": 4,
    "tensor_active_ratio": 5,
    "tensor_fp64_active_ratio": 6,
    "tensor_half_active_ratio": 7,
    "tensor_integer_active_ratio": 9,
    "dram_active_ratio": 10,
    "fp64_active_ratio": 11,
    "fp32_active_ratio": 12,
    "fp16_active_ratio": 13,
}
_RATES = {
    "pcie_tx_bytes_per_second": 20,
    "pcie_rx_bytes_per_second": 21,
    "nvlink_rx_bytes_per_second": 60,
    "nvlink_tx_bytes_per_second": 61,
}
_METRICS = [
    *((name, metric, 0.01) for name, metric in _RATIOS.items()),
    *((name, metric, _MIB) for name, metric in _RATES.items()),
    _GRAPHICS,
]
NAMES = tuple(name for name, _, _ in _METRICS)


def supported(handle: Any) -> bool:
    """Whether the GPU has GPM; a driver that does not know the question has not."""
    try:
        return bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
    except (NVMLError, AttributeError):  # AttributeError: a binding from before GPM
        return False


class GpmReader:
    """Activity between one read and the next of one GPU, or of one GPU instance of it."""

    def __init__(self, handle: Any, *, graphics_seconds: float, gpu_instance: int | None = None) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._closed = False
        self._graphics_seconds = graphics_seconds
        self.graphics_at = 0.0
        self._graphics: Value | None = None
        self._gpu_instance = gpu_instance
        self._earlier: Any = None
        self._spare: Any = None
        self._earlier_at = 0.0
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        for slot, (_, metric, _) in enumerate(_METRICS):
            self._request.metrics[slot].metricId = metric

    def prime(self, monotonic: float) -> GpmReader:
        """Take the first sample now, so that the time until the second one is spent on other readings."""
        self.read(monotonic, {}, {})
        return self

    @property
    def ready_at(self) -> float:
        """The monotonic time from which on a read has something to say."""
        return self._earlier_at + SHORTEST_SECONDS

    def read(self, monotonic: float, values: Values, failures: Failures) -> bool:
        """Take a sample and compare it with the one before; False when there is none to compare with yet."""
        if self._earlier is not None and monotonic - self._earlier_at < SHORTEST_SECONDS:
            return False
        with self._lock:
            try:
                return not self._closed and self._read(monotonic, values, failures)
            finally:
                if self._closed:
                    self._free()

    def _read(self, monotonic: float, values: Values, failures: Failures) -> bool:
        try:
            sample = self._spare or pynvml.nvmlGpmSampleAlloc()
            self._spare = sample
            if self._gpu_instance is None:
                pynvml.nvmlGpmSampleGet(self._handle, sample)
            else:
                pynvml.nvmlGpmMigSampleGet(self._handle, self._gpu_instance, sample)
            earlier, self._earlier, self._earlier_at = self._earlier, sample, monotonic
            self._spare = earlier
            if earlier is None:
                return False
            self._request.sample1, self._request.sample2 = earlier, sample
            self._request.numMetrics = len(_METRICS) - (0 if self._wants_graphics(monotonic) else 1)
            pynvml.nvmlGpmMetricsGet(self._request)
        except NVMLError as error:
            failures.update(dict.fromkeys(NAMES, error.value))
            return True
        for slot, (name, _, scale) in enumerate(_METRICS[: self._request.numMetrics]):
            metric = self._request.metrics[slot]
            if metric.nvmlReturn != pynvml.NVML_SUCCESS:
                failures[name] = metric.nvmlReturn
            elif math.isfinite(value := metric.value):
                values[name] = _rounded(value * scale, scale)
        self._hold_graphics(monotonic, values)
        return True

    def _wants_graphics(self, monotonic: float) -> bool:
        return monotonic - self.graphics_at >= 0.9 * self._graphics_seconds

    def _hold_graphics(self, monotonic: float, values: Values) -> None:
        name = _GRAPHICS[0]
        if self._request.numMetrics == len(_METRICS):
            self._graphics, self.graphics_at = values.get(name), monotonic
        elif self._graphics is not None:
            values[name] = self._graphics

    def close(self) -> None:
        """Give the samples back to the library; after a call that hangs, as soon as it comes back."""
        self._closed = True
        if self._lock.acquire(timeout=_CLOSE_SECONDS):
            self._free()
            self._lock.release()

    def _free(self) -> None:
        for sample in (self._earlier, self._spare):
            if sample is not None:
                with suppress(NVMLError):  # the driver went first and took its memory along
                    pynvml.nvmlGpmSampleFree(sample)
        self._earlier = self._spare = None


def _rounded(value: float, scale: float) -> Value:
    return max(0, round(value)) if scale > 1 else min(1.0, max(0.0, round(value, 5)))
