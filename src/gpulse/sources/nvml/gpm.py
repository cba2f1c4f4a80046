"""GPM (GPU performance monitoring): activity of the GPU's units, from counters of Hopper and newer, without root.

Reading a sample and computing its metrics costs about 70 us of CPU time on an H200, except for one metric: the
activity of the graphics engine alone takes 1.3 ms. It therefore has a longer period.
"""

from __future__ import annotations

import math
import struct
import threading
from contextlib import suppress
from ctypes import c_char, c_uint, c_void_p
from typing import Any

from gpulse.model.metric_catalog import Value, Values
from gpulse.sources.nvml import library
from gpulse.sources.nvml.library import NVMLError
from gpulse.sources.nvml.metric_probes import Failures

MIN_GPM_SECONDS = 0.1
"""Two samples closer than this give meaningless values."""
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
_GPM_FIELDS = [
    *((name, metric, 0.01) for name, metric in _RATIOS.items()),
    *((name, metric, _MIB) for name, metric in _RATES.items()),
    _GRAPHICS,
]
GPM_METRICS = tuple(name for name, _, _ in _GPM_FIELDS)

_VERSION = 1
_MAX_METRICS = 477
"""Size of the table in nvmlGpmMetricsGet_t; the driver reads and writes its first entries."""
_REQUEST = struct.Struct("<IIQQ")
"""nvmlGpmMetricsGet_t without its table: version, number of metrics, earlier sample, later sample."""
_METRIC = struct.Struct("<IId24x")
"""nvmlGpmMetric_t: metric, return code, value."""


def is_supported(handle: Any) -> bool:
    """Return whether the GPU supports GPM; a driver without this function does not."""
    answer = (c_uint * 2)(_VERSION)
    try:
        library.call("nvmlGpmQueryDeviceSupport", handle, answer)
    except NVMLError:
        return False
    return bool(answer[1])


class GpmReader:
    """Reads the activity of one GPU, or of one GPU instance, between two reads."""

    def __init__(self, handle: Any, *, graphics_seconds: float, gpu_instance: int | None = None) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._closed = False
        self._graphics_seconds = graphics_seconds
        self.graphics_at = 0.0
        self._graphics: Value | None = None
        self._gpu_instance = gpu_instance
        self._earlier: c_void_p | None = None
        self._spare: c_void_p | None = None
        self._earlier_at = 0.0
        self._request = (c_char * (_REQUEST.size + _MAX_METRICS * _METRIC.size))()
        for slot, (_, metric, _) in enumerate(_GPM_FIELDS):
            _METRIC.pack_into(self._request, _REQUEST.size + slot * _METRIC.size, metric, 0, 0.0)

    def prime(self, monotonic: float) -> GpmReader:
        """Take the first sample now, so that other metrics can be read until the second one."""
        self.read(monotonic, {}, {})
        return self

    @property
    def ready_at(self) -> float:
        """Monotonic time from which a read returns values."""
        return self._earlier_at + MIN_GPM_SECONDS

    def read(self, monotonic: float, values: Values, failures: Failures) -> bool:
        """Take a sample and compare it with the previous one; False when there is none yet."""
        if self._earlier is not None and monotonic - self._earlier_at < MIN_GPM_SECONDS:
            return False
        with self._lock:
            try:
                return not self._closed and self._read(monotonic, values, failures)
            finally:
                if self._closed:
                    self._free()

    def _read(self, monotonic: float, values: Values, failures: Failures) -> bool:
        count = len(_GPM_FIELDS) - (0 if self._wants_graphics(monotonic) else 1)
        try:
            sample = self._spare or library.read_handle("nvmlGpmSampleAlloc")
            self._spare = sample
            if self._gpu_instance is None:
                library.call("nvmlGpmSampleGet", self._handle, sample)
            else:
                library.call("nvmlGpmMigSampleGet", self._handle, self._gpu_instance, sample)
            earlier, self._earlier, self._earlier_at = self._earlier, sample, monotonic
            self._spare = earlier
            if earlier is None:
                return False
            _REQUEST.pack_into(self._request, 0, _VERSION, count, earlier.value, sample.value)
            library.call("nvmlGpmMetricsGet", self._request)
        except NVMLError as error:
            failures.update(dict.fromkeys(GPM_METRICS, error.value))
            return True
        answers = memoryview(self._request)[_REQUEST.size : _REQUEST.size + count * _METRIC.size]
        for (name, _, scale), (_, code, value) in zip(
            _GPM_FIELDS, _METRIC.iter_unpack(answers), strict=False
        ):
            if code:
                failures[name] = code
            elif math.isfinite(value):
                scaled = value * scale
                values[name] = max(0, round(scaled)) if scale > 1 else min(1.0, max(0.0, round(scaled, 5)))
        self._hold_graphics(monotonic, values, is_new=count == len(_GPM_FIELDS))
        return True

    def _wants_graphics(self, monotonic: float) -> bool:
        return monotonic - self.graphics_at >= 0.9 * self._graphics_seconds

    def _hold_graphics(self, monotonic: float, values: Values, *, is_new: bool) -> None:
        name = _GRAPHICS[0]
        if is_new:
            self._graphics, self.graphics_at = values.get(name), monotonic
        elif self._graphics is not None:
            values[name] = self._graphics

    def close(self) -> None:
        """Free the samples; if a call hangs, as soon as it returns."""
        self._closed = True
        if self._lock.acquire(timeout=_CLOSE_SECONDS):
            self._free()
            self._lock.release()

    def _free(self) -> None:
        for sample in (self._earlier, self._spare):
            if sample is not None:
                with suppress(NVMLError):  # the driver went first and took its memory along
                    library.call("nvmlGpmSampleFree", sample)
        self._earlier = self._spare = None
