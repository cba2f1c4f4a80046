"""The same calls as gpulse's reading of the GPUs, in one plain loop over nvidia-ml-py that keeps the answers.

Arguments: gpulse's periods in seconds of what it calls slow, graphics and shares. What is called follows
`gpulse.sources.nvml.metric_probes`; `benchmarks.sample_cost` prints the calls of both, which shows where they part.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pynvml

_SURVEY_SECONDS = 10.0
_GPM_METRICS = (2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 20, 21, 60, 61, 1)
"""The graphics engine comes last, because it is asked for less often."""
_SECOND_FIELDS = [82, 186, 74, 76, 269, (138, 0xFFFFFFFF), (139, 0xFFFFFFFF)]
_SLOW_FIELDS = [230, 270, 271]
_UNION = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

Calls = tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]

_TICK: Calls = (
    (pynvml.nvmlDeviceGetPowerUsage, ()),
    (pynvml.nvmlDeviceGetTemperature, (pynvml.NVML_TEMPERATURE_GPU,)),
    (pynvml.nvmlDeviceGetClockInfo, (pynvml.NVML_CLOCK_SM,)),
    (pynvml.nvmlDeviceGetClockInfo, (pynvml.NVML_CLOCK_MEM,)),
    (pynvml.nvmlDeviceGetCurrentClocksEventReasons, ()),
    (pynvml.nvmlDeviceGetPerformanceState, ()),
)
_SECOND: Calls = (
    (pynvml.nvmlDeviceGetEnforcedPowerLimit, ()),
    (pynvml.nvmlDeviceGetClockInfo, (pynvml.NVML_CLOCK_VIDEO,)),
    (pynvml.nvmlDeviceGetCurrPcieLinkGeneration, ()),
    (pynvml.nvmlDeviceGetCurrPcieLinkWidth, ()),
    (pynvml.nvmlDeviceGetEncoderUtilization, ()),
    (pynvml.nvmlDeviceGetDecoderUtilization, ()),
)
_SLOW: Calls = (
    (pynvml.nvmlDeviceGetTotalEnergyConsumption, ()),
    (pynvml.nvmlDeviceGetMarginTemperature, ()),
    (pynvml.nvmlDeviceGetPcieReplayCounter, ()),
    (pynvml.nvmlDeviceGetApplicationsClock, (pynvml.NVML_CLOCK_SM,)),
    (pynvml.nvmlDeviceGetEccMode, ()),
    *(
        (pynvml.nvmlDeviceGetTotalEccErrors, (kind, since))
        for since in (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC)
        for kind in (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    ),
    (pynvml.nvmlDeviceGetRemappedRows, ()),
    (pynvml.nvmlDeviceGetMigMode, ()),
    (pynvml.nvmlDeviceGetComputeMode, ()),
    (pynvml.nvmlDeviceGetPersistenceMode, ()),
    (pynvml.nvmlDeviceGetDisplayActive, ()),
)


class _Gpu:
    def __init__(self, index: int) -> None:
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.values: dict[Any, Any] = {}
        self.samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
        self.request = pynvml.c_nvmlGpmMetricsGet_t()
        self.request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        for slot, metric in enumerate(_GPM_METRICS):
            self.request.metrics[slot].metricId = metric
        pynvml.nvmlGpmSampleGet(self.handle, self.samples[0])

    def tick(self) -> None:
        rates = pynvml.nvmlDeviceGetUtilizationRates(self.handle)
        memory = pynvml.nvmlDeviceGetMemoryInfo(self.handle, version=pynvml.nvmlMemory_v2)
        self.values["tick"] = (rates.gpu, rates.memory, memory.used, memory.free, memory.reserved)
        self._all(_TICK)

    def second(self) -> None:
        self._all(_SECOND)
        self._fields(_SECOND_FIELDS)
        self.values["processes"] = [
            (process.pid, process.usedGpuMemory)
            for function in (
                pynvml.nvmlDeviceGetComputeRunningProcesses,
                pynvml.nvmlDeviceGetGraphicsRunningProcesses,
            )
            for process in function(self.handle)
        ]

    def shares(self, now: float) -> None:
        if self.values["processes"]:
            with suppress(pynvml.NVMLError):
                self.values["shares"] = [
                    (sample.pid, sample.smUtil)
                    for sample in pynvml.nvmlDeviceGetProcessUtilization(self.handle, int((now - 1) * 1e6))
                ]

    def gpm(self, *, graphics: bool) -> None:
        earlier, later = self.samples
        pynvml.nvmlGpmSampleGet(self.handle, later)
        self.request.sample1, self.request.sample2 = earlier, later
        self.request.numMetrics = len(_GPM_METRICS) - (not graphics)
        pynvml.nvmlGpmMetricsGet(self.request)
        metrics = (self.request.metrics[slot] for slot in range(self.request.numMetrics))
        self.values["gpm"] = [metric.value for metric in metrics if metric.nvmlReturn == 0]
        self.samples.reverse()

    def slow(self) -> None:
        self._all(_SLOW)
        self._fields(_SLOW_FIELDS)
        active = 0
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                active += pynvml.nvmlDeviceGetNvLinkState(self.handle, link)
            except pynvml.NVMLError:
                break
        self.values["links"] = active
        self._fields([38, 45, 52, 59])

    def _all(self, calls: Calls) -> None:
        for function, arguments in calls:
            try:
                self.values[function, arguments] = function(self.handle, *arguments)
            except pynvml.NVMLError as error:
                self.values[function, arguments] = error.value

    def _fields(self, wanted: list[Any]) -> None:
        for answer in pynvml.nvmlDeviceGetFieldValues(self.handle, wanted):
            if answer.nvmlReturn == 0:
                self.values[answer.fieldId] = getattr(answer.value, _UNION[answer.valueType])


def _survey() -> list[str]:
    found: list[str] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        found.append(pynvml.nvmlDeviceGetUUID(handle))
        pynvml.nvmlDeviceGetMigMode(handle)
    return found


class _Periods:
    """When what is due, by gpulse's rule: as soon as nine tenths of a period are over."""

    def __init__(self, **seconds: float) -> None:
        self._seconds = seconds
        self._at: dict[str, float] = {}

    def is_due(self, name: str, clock: float) -> bool:
        if clock - self._at.get(name, float("-inf")) < 0.9 * self._seconds[name]:
            return False
        self._at[name] = clock
        return True


def main() -> None:
    """Read a tick whenever a line comes in."""
    slow, graphics, shares = map(float, sys.argv[1:4])
    periods = _Periods(slow=slow, graphics=graphics, shares=shares, survey=_SURVEY_SECONDS / 0.9)
    pynvml.nvmlInit()
    gpus = [_Gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    periods.is_due("survey", time.monotonic())
    for _ in sys.stdin:
        cpu, begun = time.process_time(), time.perf_counter()
        now, clock = time.time(), time.monotonic()
        with_graphics = periods.is_due("graphics", clock)
        with_shares = periods.is_due("shares", clock)
        with_slow = periods.is_due("slow", clock)
        for gpu in gpus:
            gpu.tick()
            gpu.second()
            gpu.gpm(graphics=with_graphics)
            if with_shares:
                gpu.shares(now)
            if with_slow:
                gpu.slow()
        if periods.is_due("survey", clock):
            _survey()
        print(f'{{"cpu": {cpu:.9f}, "wall": {time.perf_counter() - begun:.9f}}}', flush=True)


if __name__ == "__main__":
    main()
