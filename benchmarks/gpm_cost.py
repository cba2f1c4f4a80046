"""What single readings cost on the GPU at hand: CPU time of the calling thread, and time spent waiting."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks import measure
from benchmarks.measure import Report, Spread, Table

NAME = "gpm_cost"
_GPM_PAUSE_SECONDS = 0.11
"""A little more than the shortest time between two samples."""
_PAUSE_SECONDS = 0.002
"""So that a call finds the driver as a sampler finds it, and not still warm from the call before."""


def missing_gpu() -> str | None:
    """Why there is no GPU to measure, None when there is one."""
    if find_spec("pynvml") is None:
        return "nvidia-ml-py is not installed here"
    import pynvml  # noqa: PLC0415  may be missing

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"no NVIDIA GPU can be read here ({error}); this one needs a real one"
    return None if count else "the driver lists no GPU"


def run(*, quick: bool, reads: int = 50) -> Report:
    """Time every group of readings, then every single one."""
    import pynvml  # noqa: PLC0415  see missing_gpu

    from gpulse.sources.nvml.open_device import open_gpu  # noqa: PLC0415
    from gpulse.sources.nvml.read_timing import detailed_cadence  # noqa: PLC0415

    reads = 5 if quick else reads
    pynvml.nvmlInit()
    target = open_gpu(0, detailed_cadence())[0]
    report = Report(NAME, "What one reading costs on the GPU itself")
    head = ("what", "CPU, µs", "wall, µs", "waiting")
    groups = Table(
        f"Groups of GPU 0 ({target.device.name}), {reads} reads each, median and middle half:", head
    )
    singles = Table("Single readings, by the first catalogue name that each fills:", head)
    for group in ("tick", "second", "slow", "facts"):
        target.read(group, time.time())  # what this GPU will not say is not asked again
        groups.rows.append(_row(group, partial(_read, target, group), reads))
        for probe in target.probes[group]:
            label = f"{group}: {probe.names[0]}" + (
                f" and {len(probe.names) - 1} more" if probe.names[1:] else ""
            )
            singles.rows.append(_row(label, partial(probe.read, target.handle, {}, {}), reads))
    singles.rows += _process_rows(pynvml, target.handle, reads)
    if target.gpm is not None:
        gpm = target.gpm
        groups.rows.append(_row("gpm", lambda: gpm.read(time.monotonic(), {}, {}), reads, _GPM_PAUSE_SECONDS))
        singles.rows += _gpm_rows(pynvml, target.handle, max(5, reads // 2))
    target.close()
    pynvml.nvmlShutdown()
    report.tables += [groups, singles]
    report.notes.append(
        "CPU is the time of the calling thread (time.thread_time): a driver that spins while it waits shows up there. "
        "Waiting is the share of the wall time that is not CPU."
    )
    return report


def _read(target: Any, group: str) -> object:
    return target.read(group, time.time())


def _row(
    label: str, read: Callable[[], object], reads: int, pause: float = _PAUSE_SECONDS
) -> tuple[str, ...]:
    cpu: list[float] = []
    wall: list[float] = []
    read()
    for _ in range(reads):
        time.sleep(pause)
        used, begun = time.thread_time_ns(), time.perf_counter_ns()
        read()
        wall.append((time.perf_counter_ns() - begun) / 1000)
        cpu.append((time.thread_time_ns() - used) / 1000)
    waiting = max(0.0, 1 - sum(cpu) / sum(wall))
    return label, Spread.of(cpu).text(1, 0), Spread.of(wall).text(1, 0), f"{waiting:.0%}"


def _process_rows(pynvml: Any, handle: Any, reads: int) -> list[tuple[str, ...]]:
    return [
        _row(
            "second: list of compute processes",
            lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle),
            reads,
        ),
        _row(
            "second: list of graphics processes",
            lambda: pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
            reads,
        ),
        _row("shares: process utilization", lambda: _shares(pynvml, handle), reads),
    ]


def _shares(pynvml: Any, handle: Any) -> None:
    try:
        pynvml.nvmlDeviceGetProcessUtilization(handle, int((time.time() - 1) * 1e6))
    except pynvml.NVMLError:  # no process had anything to do
        return


def _gpm_rows(pynvml: Any, handle: Any, reads: int) -> list[tuple[str, ...]]:
    """A sample; then the metrics between two samples: all but the graphics engine, it alone, one of the rest."""
    from gpulse.sources.nvml import gpm  # noqa: PLC0415  see missing_gpu

    ids = [metric for _, metric, _ in gpm._GPM_FIELDS]  # noqa: SLF001  the list is the reader's own
    earlier, later = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
    pynvml.nvmlGpmSampleGet(handle, earlier)
    rows = [_row("gpm: sample", lambda: pynvml.nvmlGpmSampleGet(handle, later), reads, _GPM_PAUSE_SECONDS)]
    for label, wanted in (
        (f"gpm: {len(ids)} metrics", ids),
        ("gpm: all metrics but graphics", [metric for metric in ids if metric != 1]),
        ("gpm: graphics alone", [1]),
        ("gpm: SM activity alone", [2]),
    ):
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(wanted)
        request.sample1, request.sample2 = earlier, later
        for slot, metric in enumerate(wanted):
            request.metrics[slot].metricId = metric
        rows.append(_row(label, partial(pynvml.nvmlGpmMetricsGet, request), reads))
    pynvml.nvmlGpmSampleFree(earlier)
    pynvml.nvmlGpmSampleFree(later)
    return rows


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__, {"reads": 50}).parse_args()
    if (reason := missing_gpu()) is not None:
        sys.exit(f"benchmarks.{NAME}: {reason}")
    measure.publish(run(quick=given.quick, reads=given.reads), write=given.write)
