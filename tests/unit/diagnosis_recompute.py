"""The numbers of findings computed once more, from the frames alone and by other means than the engine's.

Only which seconds a cause was blamed for is taken from the engine; what they add up to is not.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from gpulse.diagnosis.evidence import GpuEvidence
from gpulse.diagnosis.job_window import JobWindow
from gpulse.diagnosis.second_aggregator import SecondAggregator
from gpulse.diagnosis.second_summary import SecondSummary
from gpulse.diagnosis.thresholds import DEFAULTS
from gpulse.model.finding import Evidence, Finding, JudgedGpu
from gpulse.model.formatting import duration, long_size, rate
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric_catalog import Values
from gpulse.model.process import ProcessReading

Span = tuple[float, float]

HOLDS = {">=": operator.ge, ">": operator.gt, "<": operator.lt, "<=": operator.le}

_NUMBER = re.compile(r"(?<![\w.:])(\d+(?:[.:]\d+)*)( ?(?:%|[kMGT]?B/s|[KMGTP]iB|s\b))?")
_WHILE = {
    "average while waiting for a CPU": "crowded",
    "average while waiting for workers": "workers",
    "average while waiting for storage": "storage",
    "average while copying": "copies",
    "average while computing": "main",
    "average while throttled": "throttled",
}
_LANE = 3.938e9
"""Bytes a second of one lane of PCIe 5."""


def everything(finding: Finding) -> tuple[Evidence, ...]:
    """What speaks for it and against it."""
    return (*finding.evidence, *finding.counter_evidence)


def unexplained(finding: Finding) -> set[str]:
    """Numbers of its sentence that are no evidence, nor the lost share of the time."""
    numbers = [number for item in everything(finding) for number in (item.value, item.threshold)]
    if finding.lost_ratio is not None:
        numbers.append(finding.lost_ratio)
    known = {text for number in numbers for text in _spellings(number)}
    sentence = finding.summary.removeprefix(f"GPU {finding.gpu}")
    return {"".join(found) for found in _NUMBER.findall(sentence)} - known


def _spellings(value: float) -> Iterator[str]:
    """All the ways in which sentences write a number."""
    yield from (f"{value:.0%}", f"{value:.1%}", f"{value:.0f}", f"{value:.1f}", f"{value:.2f}")
    yield from (f"{value:.0f} s", f"{value:.1f} s", long_size(value), rate(value), duration(round(value)))
    yield f"{value / 1e6:.0f}"  # MHz


class Window(NamedTuple):
    """The frames that a finding is about, and the seconds that its causes were blamed for."""

    frames: Sequence[Frame]
    """Of the judged time; the first one only opens the counters."""
    judged: JudgedGpu
    seconds: Sequence[SecondSummary]
    causes: Sequence[str]

    @property
    def spans(self) -> list[Span]:
        """The judged seconds."""
        return [(second.start, second.end) for second in self.seconds]

    def while_(self, cause: str) -> list[Span]:
        """The seconds that were put down to a cause."""
        return [span for span, name in zip(self.spans, self.causes, strict=True) if name == cause]

    def within(self, spans: Iterable[Span]) -> list[Frame]:
        """The frames of some seconds; each second is open at its start."""
        return [f for f in self.frames if any(start < f.time <= end for start, end in spans)]

    def at(self, time: float) -> Frame:
        """The frame taken at one moment."""
        return next(frame for frame in self.frames if frame.time == time)


def window(frames: Sequence[Frame], judged: JudgedGpu) -> Window:
    """The window of the one GPU of some frames."""
    digest = SecondAggregator()
    seconds = [second for frame in frames for second in digest.feed(frame).values()]
    gpu = GpuEvidence(JobWindow(seconds, DEFAULTS, {}), DEFAULTS, frames[-1].time)
    inside = [frame for frame in frames if judged.start <= frame.time <= judged.end]
    return Window(inside, judged, gpu.attribution.seconds, gpu.attribution.causes)


def recomputed(evidence: Evidence, view: Window, finding: Finding) -> float | None:
    """The value of a piece of evidence; None for an unknown signal or statistic."""
    cause = _WHILE.get(evidence.statistic)
    spans = view.spans if cause is None else view.while_(cause)
    plain = evidence.statistic in ("mean", "share", "count", "last") or cause is not None
    if evidence.statistic in _GROWTH and evidence.signal in _GROWING:
        return _GROWTH[evidence.statistic](_GROWING[evidence.signal](view, finding))
    if plain and evidence.signal in _SIGNALS:
        return _SIGNALS[evidence.signal](view, spans)
    if plain and evidence.signal.startswith("lost_time_"):
        return _blamed(view, evidence.signal.removeprefix("lost_time_").removesuffix("_ratio"))
    if evidence.signal == "sm_ratio":
        return _share_of(view, int(evidence.statistic.removeprefix("mean of pid ")))
    if (evidence.signal, evidence.statistic) == ("memory_available_bytes", "fall"):
        return _host(view, view.spans[0][1], "memory_available_bytes") - _host(
            view, view.spans[-1][1], "memory_available_bytes"
        )
    if (evidence.signal, evidence.statistic) == ("seconds", "length"):
        return view.judged.end - finding.start if finding.start is not None else None
    if (evidence.signal, evidence.statistic) == ("seconds_left", "extrapolated"):
        return _seconds_left(view, finding)
    return None


def _gpu(frame: Frame) -> GpuReading:
    return frame.gpus[0]


def _host(view: Window, time: float, name: str) -> float:
    host = view.at(time).host
    assert host is not None
    return host.values[name]


def duty(gpu: GpuReading) -> float:
    """Share of the time with kernels: GPM's number, or NVML's where GPM had none."""
    values = gpu.values
    if "graphics_active_ratio" in values:
        return values["graphics_active_ratio"]
    if values.get("sm_active_ratio", 1.0) < 0.2 and _copied(values) >= 2**30:
        return values["sm_active_ratio"]
    return values["gpu_utilization_ratio"]


def _copied(values: Values) -> float:
    return values.get("pcie_rx_bytes_per_second", 0.0) + values.get("pcie_tx_bytes_per_second", 0.0)


def _mean(name: str) -> Callable[[Window, list[Span]], float]:
    return lambda view, spans: fmean(
        _gpu(frame).values[name] for frame in view.within(spans) if name in _gpu(frame).values
    )


def _duty(view: Window, spans: list[Span]) -> float:
    """A mean over time: seconds in which few frames were taken count as much as others."""
    seconds = [end - start for start, end in spans]
    values = [fmean(duty(_gpu(frame)) for frame in view.within([span])) for span in spans]
    return fmean(values, seconds)


def _lost(view: Window, spans: list[Span]) -> float:
    return 1.0 - _duty(view, spans)


def _blamed(view: Window, cause: str) -> float:
    lost = [
        (name, _lost(view, [span]) * (span[1] - span[0]))
        for span, name in zip(view.spans, view.causes, strict=True)
    ]
    return sum(part for name, part in lost if name == cause) / sum(part for _, part in lost)


def _pcie(view: Window, spans: list[Span]) -> float:
    return fmean(_copied(_gpu(frame).values) for frame in view.within(spans))


def _link(view: Window, spans: list[Span]) -> float:
    ways = ("pcie_rx_bytes_per_second", "pcie_tx_bytes_per_second")
    return max(_mean(way)(view, spans) for way in ways) / (16 * _LANE)


def _fill(view: Window, spans: list[Span]) -> float:
    return _mean("sm_active_ratio")(view, spans) / _duty(view, spans)


def _power(view: Window, spans: list[Span]) -> float:
    return _mean("power_watts")(view, spans) / _gpu(view.frames[0]).device.facts["power_limit_watts"]


def _trainers(frame: Frame) -> list[ProcessReading]:
    pids = {process.pid for process in _gpu(frame).processes or ()}
    return [process for process in frame.processes if process.pid in pids]


def _helpers(frame: Frame) -> list[ProcessReading]:
    """In these recordings every other process descends from the one on the GPU."""
    return [process for process in frame.processes if not process.on_gpu]


def _job(frame: Frame) -> list[ProcessReading]:
    return [*_trainers(frame), *_helpers(frame)]


def _cpu(process: ProcessReading) -> float:
    return process.values["cpu_user_seconds_total"] + process.values["cpu_system_seconds_total"]


def _counted(
    view: Window,
    spans: list[Span],
    who: Callable[[Frame], list[ProcessReading]],
    counter: Callable[[ProcessReading], float],
) -> float:
    """How fast a counter of some processes grew, a second."""
    grown = 0.0
    for start, end in spans:
        before = {process.pid: counter(process) for process in who(view.at(start))}
        grown += sum(counter(p) - before[p.pid] for p in who(view.at(end)) if p.pid in before)
    return grown / sum(end - start for start, end in spans)


def _trainer_cores(view: Window, spans: list[Span]) -> float:
    return _counted(view, spans, _trainers, _cpu)


def _feeding_cores(view: Window, spans: list[Span]) -> float:
    """The two busiest threads of each second; in these recordings one process is on the GPU then."""
    used = 0.0
    for start, end in spans:
        before = {t.tid: t.cpu_seconds_total for p in _trainers(view.at(start)) for t in p.threads}
        grown = [
            thread.cpu_seconds_total - before[thread.tid]
            for process in _trainers(view.at(end))
            for thread in process.threads
            if thread.tid in before
        ]
        used += min(sum(sorted(grown)[-2:]), _counted(view, [(start, end)], _trainers, _cpu) * (end - start))
    return used / sum(end - start for start, end in spans)


def _job_cores(view: Window, spans: list[Span]) -> float:
    return _counted(view, spans, _job, _cpu)


def _cpus(view: Window, spans: list[Span]) -> float:
    return _host(view, spans[-1][1], "cpus")


def _workers(view: Window, spans: list[Span]) -> float:
    return fmean(len(_helpers(view.at(end))) for _, end in spans)


def _saturated(view: Window, spans: list[Span]) -> float:
    counts = []
    for start, end in spans:
        before = {process.pid: _cpu(process) for process in _helpers(view.at(start))}
        used = [(_cpu(p) - before[p.pid]) / (end - start) for p in _helpers(view.at(end)) if p.pid in before]
        counts.append(sum(cores >= 0.8 for cores in used))
    return fmean(counts)


def _runnable(view: Window, spans: list[Span]) -> float:
    return fmean(_host(view, end, "processes_running") for _, end in spans) / _cpus(view, spans)


def _pressure(resource: str) -> Callable[[Window, list[Span]], float]:
    name = f"pressure_{resource}_some_seconds_total"
    return lambda view, spans: (
        sum(_host(view, end, name) - _host(view, start, name) for start, end in spans)
        / sum(end - start for start, end in spans)
    )


def _utilization(view: Window, spans: list[Span]) -> float:
    def spent(states: str) -> float:
        names = [f"cpu_{state}_seconds_total" for state in states.split()]
        return sum(
            _host(view, end, name) - _host(view, start, name) for start, end in spans for name in names
        )

    busy = spent("user nice system irq softirq steal")
    return busy / (busy + spent("idle iowait"))


def _waiting(view: Window, spans: list[Span]) -> float:
    return fmean(sum(p.state == "D" for p in _job(frame)) for frame in view.within(spans))


def _read(view: Window, spans: list[Span]) -> float:
    return _counted(view, spans, _job, lambda process: process.values["read_bytes_total"])


def _share_of(view: Window, pid: int) -> float:
    return fmean(
        process.sm_ratio
        for frame in view.within(view.spans)
        for process in _gpu(frame).processes or ()
        if process.pid == pid and process.sm_ratio is not None
    )


def _computing(view: Window, spans: list[Span]) -> float:
    pids = {process.pid for frame in view.within(spans) for process in _gpu(frame).processes or ()}
    return sum(_share_of(view, pid) >= 0.1 for pid in pids)


def pauses(view: Window) -> list[Span]:
    """Times with hardly a kernel, between times with many."""
    samples = [(frame.time, duty(_gpu(frame))) for frame in view.frames[1:]]
    found: list[Span] = []
    begin = last_busy = samples[0][0]
    for (before, _), (time, value) in pairwise(samples):
        if value >= 0.1:
            if before - last_busy >= 1.2 and last_busy != begin:
                found.append((last_busy, before))
            last_busy = time
    return found


def _pause(statistic: Callable[[Window, list[Span]], float]) -> Callable[[Window, list[Span]], float]:
    return lambda view, _: statistic(view, pauses(view))


def _pause_seconds(view: Window, spans: list[Span]) -> float:
    del view
    return fmean(end - start for start, end in spans)


def _pause_share(view: Window, spans: list[Span]) -> float:
    return sum(end - start for start, end in spans) / (view.judged.end - view.judged.start)


def _written(view: Window, spans: list[Span]) -> float:
    def counter(time: float) -> float:
        frame = min(view.frames, key=lambda frame: abs(frame.time - time))
        return sum(process.values["written_chars_total"] for process in _trainers(frame))

    return fmean(counter(end) - counter(start) for start, end in spans)


def _spacing(view: Window, spans: list[Span]) -> float:
    del view
    return fmean(later[0] - earlier[0] for earlier, later in pairwise(spans))


def _device_memory(view: Window, finding: Finding) -> list[tuple[float, float]]:
    del finding
    return [
        (
            end,
            fmean(_gpu(frame).values["memory_used_bytes"] for frame in view.within([(start, end)])),
        )
        for start, end in view.spans
    ]


def _resident(view: Window, finding: Finding) -> list[tuple[float, float]]:
    del finding
    return [
        (end, sum(process.values["host_memory_bytes"] for process in _job(view.at(end))))
        for _, end in view.spans
    ]


def _until_the_end(series: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without what a program that leaves gives back."""
    while series[-1][1] < series[-2][1]:
        series = series[:-1]
    return series


def _slope(series: list[tuple[float, float]]) -> float:
    """Theil and Sen's: the median of the slopes of all pairs."""
    return median(
        (b[1] - a[1]) / (b[0] - a[0]) for place, a in enumerate(series) for b in series[place + 1 :]
    )


def _seconds_left(view: Window, finding: Finding) -> float:
    if finding.id == "host_memory_leak":
        series = _until_the_end(_resident(view, finding))
        free = _host(view, view.spans[-1][1], "memory_available_bytes")
    else:
        series = _until_the_end(_device_memory(view, finding))
        free = _gpu(view.frames[0]).device.facts["memory_total_bytes"] - series[-1][1]
    return free / _slope(series)


_GROWING = {"memory_used_bytes": _device_memory, "job_resident_bytes": _resident}
_GROWTH: dict[str, Callable[[list[tuple[float, float]]], float]] = {
    "first": lambda series: series[0][1],
    "last": lambda series: _until_the_end(series)[-1][1],
    "rise": lambda series: _until_the_end(series)[-1][1] - series[0][1],
    "slope": lambda series: _slope(_until_the_end(series)),
}
_SIGNALS: dict[str, Callable[[Window, list[Span]], float]] = {
    **{
        name: _mean(name)
        for name in (
            "sm_active_ratio",
            "tensor_active_ratio",
            "dram_active_ratio",
            "fp32_active_ratio",
            "memory_used_bytes",
            "pcie_rx_bytes_per_second",
            "pcie_tx_bytes_per_second",
        )
    },
    "duty": _duty,
    "lost_ratio": _lost,
    "fill_ratio": _fill,
    "power_ratio": _power,
    "pcie_bytes_per_second": _pcie,
    "pcie_link_ratio": _link,
    "trainer_cores": _trainer_cores,
    "feeding_cores": _feeding_cores,
    "job_cores": _job_cores,
    "cpus": _cpus,
    "cpus_left": lambda view, spans: _cpus(view, spans) - _job_cores(view, spans),
    "workers": _workers,
    "saturated_workers": _saturated,
    "runnable_per_cpu": _runnable,
    "pressure_cpu_some_ratio": _pressure("cpu"),
    "pressure_io_some_ratio": _pressure("io"),
    "cpu_utilization_ratio": _utilization,
    "processes_waiting_for_disks": _waiting,
    "job_read_bytes_per_second": _read,
    "computing_processes": _computing,
    "stalls": _pause(lambda _, spans: len(spans)),
    "stall_seconds": _pause(_pause_seconds),
    "stall_ratio": _pause(_pause_share),
    "stall_written_bytes": _pause(_written),
    "stall_spacing_seconds": _pause(_spacing),
}
