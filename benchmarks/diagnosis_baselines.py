"""What others would say about the same frames, and what gpulse would say with less: pure functions.

The rules of others are written anew from their documentation, with their documented defaults. Each answer is
mapped to all the finding ids that its words could mean, which favours them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from gpulse.diagnosis.engine import diagnose, judge
from gpulse.diagnosis.second_aggregator import SecondAggregator
from gpulse.diagnosis.second_summary import SecondSummary
from gpulse.diagnosis.thresholds import DEFAULTS
from gpulse.model.finding import Diagnosis
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric_catalog import Values

_BIT_FINDINGS = {
    0x80: "power_brake",
    0x40: "thermal_throttle",
    0x20: "thermal_throttle",
    0x08: "hw_slowdown",
    0x04: "power_capped",
    0x02: "clocks_locked",
    0x10: "clocks_locked",
    0x100: "clocks_locked",
    0x01: "gpu_underused",
}
"""The clock event reasons as findings, the gravest first."""
_UNDERUSED = ("gpu_underused", "gpu_idle_allocated", "host_wait_unattributed")
_SAGEMAKER_SECONDS = 0.5
"""How often SageMaker Debugger reads the system's metrics."""
_GPM = ("_active_ratio", "_occupancy_ratio", "x_bytes_per_second")
"""How the names of what GPM says end."""
_MIDDLE = 0.5


class Answer(NamedTuple):
    """What one method says about one run, first of all."""

    id: str
    """The finding that is nearest to its words."""
    means: frozenset[str]
    """Every finding that its words could mean."""
    words: str
    """Its own name for it."""
    confidence: float = 1.0
    """Those that do not say how sure they are speak as if they were."""
    start: float | None = None


class Outcome(NamedTuple):
    """What one method makes of one run."""

    answer: Answer | None
    """None when it finds nothing wrong."""
    judged: bool = True
    """False when it says that it cannot tell."""


Method = Callable[[Sequence[Frame]], Outcome]


def _said(words: str, *means: str) -> Outcome:
    return Outcome(Answer(means[0], frozenset(means), words))


def bmon(frames: Sequence[Frame]) -> Outcome:
    """Any clocks event reason is printed as the bottleneck.

    It looks once, so what counts is the reason that most looks would show.
    """
    masks = [int(gpu.values.get("clocks_event_reasons", 0)) for gpu in _readings(frames)]
    for bit, finding in _BIT_FINDINGS.items():
        if 2 * sum(bool(mask & bit) for mask in masks) > len(masks):
            more = _UNDERUSED if finding == "gpu_underused" else ()
            return _said(f"reason 0x{bit:x}", finding, *more)
    return Outcome(None)


def small_batch(frames: Sequence[Frame], least: float = 0.5) -> Outcome:
    """GPU utilization under one half is answered with "increase the batch size", as Kineto's plugin does."""
    used = [
        value for gpu in _readings(frames) if (value := gpu.values.get("gpu_utilization_ratio")) is not None
    ]
    if _has_job(frames) and used and fmean(used) < least:
        return _said("small batch", "thin_kernels", "launch_bound")
    return Outcome(None)


def sagemaker(frames: Sequence[Frame]) -> Outcome:
    """SageMaker Debugger's rules for system metrics, the most specific one that fires.

    Its `patience` of 1,000 samples skips the start of a job, as does the `begin` of a label; its `window` of
    500 samples (250 s) is the whole run here. Samples are half a second apart, as there.
    """
    samples = list(_paced(frames, _SAGEMAKER_SECONDS))
    if not _has_job(frames) or len(samples) < 2:
        return Outcome(None)
    if cpu_bottleneck(samples):
        return _said(
            "CPUBottleneck",
            "input_cpu_bound",
            "input_too_few_workers",
            "host_single_thread",
            "launch_bound",
            "cpu_oversubscribed",
            "cgroup_cpu_throttled",
        )
    if io_bottleneck(samples):
        return _said("IOBottleneck", "input_io_bound")
    if gpu_memory_increase(samples):
        return _said("GPUMemoryIncrease", "gpu_memory_leak", "gpu_oom_imminent")
    use = low_gpu_utilization(samples)
    if use == "low":
        return _said("LowGPUUtilization", *_UNDERUSED)
    if use == "fluctuates":
        return _said("GPU fluctuates", "periodic_stall", "checkpoint_stall")
    return Outcome(None)


def cpu_bottleneck(
    samples: Sequence[Frame], *, threshold: float = 50, gpu_threshold: float = 10, cpu_threshold: float = 90
) -> bool:
    """Whether at more than `threshold` % of the samples the GPU idled while some core was busy."""
    return (
        _coincides(
            samples, gpu_threshold, lambda spent: 1 - (spent[3] + spent[4]) / sum(spent), cpu_threshold
        )
        > threshold
    )


def io_bottleneck(
    samples: Sequence[Frame], *, threshold: float = 50, gpu_threshold: float = 10, io_threshold: float = 50
) -> bool:
    """Whether at more than `threshold` % of the samples the GPU idled while some core waited for a disk."""
    return _coincides(samples, gpu_threshold, lambda spent: spent[4] / sum(spent), io_threshold) > threshold


def low_gpu_utilization(
    samples: Sequence[Frame], *, threshold_p95: float = 70, threshold_p5: float = 10
) -> str | None:
    """`low` when even the 95th percentile of the utilization is, `fluctuates` when the 5th percentile alone is."""
    used = sorted(100 * gpu.values.get("gpu_utilization_ratio", 0.0) for gpu in _readings(samples))
    if _quantile(used, 0.95) < threshold_p95:
        return "low"
    return "fluctuates" if _quantile(used, 0.05) < threshold_p5 else None


def gpu_memory_increase(samples: Sequence[Frame], *, increase: float = 5, window: int = 10) -> bool:
    """Whether the mean of a window is `increase` points of memory above that of the window before.

    The documentation says "of the previous iteration". One sample before, which is how the published code
    reads it, would need a tenth of the memory at once; the window before is the kinder reading.
    """
    used = [
        100
        * gpu.values.get("memory_used_bytes", 0)
        / gpu.device.facts.get("memory_total_bytes", float("inf"))
        for gpu in _readings(samples)
    ]
    return any(
        fmean(used[end - window : end]) - fmean(used[end - 2 * window : end - window]) > increase
        for end in range(2 * window, len(used) + 1)
    )


def gpulse(frames: Sequence[Frame]) -> Outcome:
    """The engine as it is."""
    return _outcome(diagnose(frames))


def nvml_only(frames: Sequence[Frame]) -> Outcome:
    """The engine with what NVML says on any GPU; of processes only the driver's list of pids."""
    return gpulse(without_gpm(without_host(frames)))


def nvml_gpm(frames: Sequence[Frame]) -> Outcome:
    """The engine with NVML and GPM, and nothing of the host."""
    return gpulse(without_host(frames))


def nvml_host(frames: Sequence[Frame]) -> Outcome:
    """The engine with NVML and the host, as on GPUs before Hopper."""
    return gpulse(without_gpm(frames))


def slow(frames: Sequence[Frame]) -> Outcome:
    """The engine with as few frames as one a second."""
    seconds = (frames[-1].time - frames[0].time) / max(1, len(frames) - 1)
    return gpulse(every(frames, max(1, round(1.0 / seconds))))


def snapshot(frames: Sequence[Frame]) -> Outcome:
    """The engine with the middle second alone."""
    moments = list(snapshots(frames, only=_MIDDLE))
    return moments[0] if moments else Outcome(None, judged=False)


def snapshots(frames: Sequence[Frame], only: float | None = None) -> Iterator[Outcome]:
    """The engine's rules without time: each second of the run as if all others had been like it.

    One second is repeated for as long as the run was, so that no rule is silent for want of length and rates
    are as good as ever. What changes in the course of the run cannot be seen. `only` picks one place.
    """
    digest = SecondAggregator()
    seconds = [(frame, of) for frame in frames if (of := digest.feed(frame))]
    if only is not None and seconds:
        place = min(int(only * len(seconds)), len(seconds) - 1)
        picked = seconds[place : place + 1]
    else:
        picked = seconds
    for frame, of in picked:
        repeated = {uuid: list(_repeated(second, len(seconds))) for uuid, second in of.items()}
        now = max(entries[-1].end for entries in repeated.values())
        outcome = _outcome(judge(repeated, frame, DEFAULTS, now))
        # A moment does not know since when.
        yield (
            outcome
            if outcome.answer is None
            else outcome._replace(answer=outcome.answer._replace(start=None))
        )


def every(frames: Sequence[Frame], step: int) -> list[Frame]:
    """What a sampler at a slower pace would have read: GPM counts between two reads, the rest is of the moment."""
    kept = []
    for place in range(step - 1, len(frames), step):
        part = [
            {gpu.device.uuid: gpu.values for gpu in frame.gpus}
            for frame in frames[place - step + 1 : place + 1]
        ]
        kept.append(
            frames[place]._replace(
                gpus=tuple(
                    gpu._replace(
                        values=_averaged(
                            gpu.values, [of[gpu.device.uuid] for of in part if gpu.device.uuid in of]
                        )
                    )
                    for gpu in frames[place].gpus
                )
            )
        )
    return kept


def without_gpm(frames: Sequence[Frame]) -> list[Frame]:
    """A GPU before Hopper: utilization and no activity, and no rates of its links."""

    def kept(values: Values) -> Values:
        return {name: value for name, value in values.items() if not name.endswith(_GPM)}

    return [
        frame._replace(
            gpus=tuple(
                gpu._replace(device=gpu.device._replace(has_gpm=False), values=kept(gpu.values))
                for gpu in frame.gpus
            )
        )
        for frame in frames
    ]


def without_host(frames: Sequence[Frame]) -> list[Frame]:
    """The driver alone."""
    return [
        frame._replace(host=None, disks=(), filesystems=(), network=(), processes=(), cgroups=())
        for frame in frames
    ]


METHODS: dict[str, Method] = {
    "gpulse": gpulse,
    "gpulse at 1 Hz": slow,
    "ablation: NVML + host": nvml_host,
    "ablation: NVML + GPM": nvml_gpm,
    "ablation: NVML only": nvml_only,
    "ablation: one second": snapshot,
    "SageMaker Debugger": sagemaker,
    "util < 50 %: batch": small_batch,
    "bmon": bmon,
}


def _outcome(diagnosis: Diagnosis) -> Outcome:
    if not diagnosis.findings:
        return Outcome(None, judged=bool(diagnosis.judged))
    first = diagnosis.findings[0]
    return Outcome(Answer(first.id, frozenset((first.id,)), first.id, first.confidence, first.start))


def _averaged(values: Values, parts: Sequence[Values]) -> Values:
    means = {
        name: fmean(known)
        for name in values
        if name.endswith(_GPM) and (known := [part[name] for part in parts if name in part])
    }
    return {**values, **means}


def _readings(frames: Sequence[Frame]) -> list[GpuReading]:
    """Of the GPU that the job is on, or of the first."""
    counts: dict[str, int] = {}
    for frame in frames:
        for gpu in frame.gpus:
            counts[gpu.device.uuid] = counts.get(gpu.device.uuid, 0) + bool(gpu.processes)
    if not counts:
        return []
    busiest = max(counts, key=lambda uuid: counts[uuid])
    return [gpu for frame in frames for gpu in frame.gpus if gpu.device.uuid == busiest]


def _has_job(frames: Sequence[Frame]) -> bool:
    """Rules that run inside a job say nothing where there is none."""
    readings = _readings(frames)
    return 2 * sum(bool(gpu.processes) for gpu in readings) > len(readings)


def _paced(frames: Sequence[Frame], seconds: float) -> Iterator[Frame]:
    due = float("-inf")
    for frame in frames:
        if frame.time >= due:
            yield frame
            due = frame.time + 0.9 * seconds


def _coincides(
    samples: Sequence[Frame], gpu_percent: float, of_core: Callable[[list[int]], float], core_percent: float
) -> float:
    """Percentage of the samples at which the GPU is below its threshold and any core above its own."""
    readings = _readings(samples)
    hits = 0
    for (earlier, later), gpu in zip(pairwise(samples), readings[1:], strict=False):
        if 100 * gpu.values.get("gpu_utilization_ratio", 1.0) >= gpu_percent:
            continue
        if earlier.host is None or later.host is None:
            continue
        for old, new in zip(earlier.host.cores, later.host.cores, strict=False):
            spent = [max(0, after - before) for before, after in zip(old, new, strict=False)]
            if sum(spent) > 0 and 100 * of_core(spent) > core_percent:
                hits += 1
                break
    return 100 * hits / (len(samples) - 1)


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _repeated(second: SecondSummary, times: int) -> Iterator[SecondSummary]:
    for number in range(times):
        shift = number * second.seconds
        yield second._replace(
            start=second.start + shift,
            end=second.end + shift,
            duties=tuple((time + shift, value) for time, value in second.duties),
        )
