"""Rules on stalls: checkpoints, periodic pauses, hangs, and drops in throughput."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from statistics import fmean, median, pstdev
from typing import NamedTuple

from gpulse.diagnosis.evidence import GpuEvidence, Pause
from gpulse.diagnosis.rule import Rule, RuleMatch, SignalText
from gpulse.diagnosis.second_summary import SecondSummary
from gpulse.diagnosis.thresholds import Thresholds
from gpulse.model.finding import Advice, Evidence
from gpulse.model.formatting import long_size
from gpulse.model.formatting import seconds as seconds_text

_ALWAYS_BUSY = 0.9999
"""Between two kernels, even of a CUDA graph, the GPU is idle for longer than the rest of this."""
_ALWAYS_BUSY_NVML = 0.995
"""NVML's utilization has steps of 1%."""
_ALWAYS_IDLE_NVML = 0.005
_GUESS_SECONDS = 15.0
"""Minimum length of a hang that is inferred without GPM."""
_SETTLING_SECONDS = 2
"""Seconds for which averaged power still falls after the work has ended."""
_POWER_SPREAD = 0.03
_SM_RESOLUTION = 1.5e-5
_MAX_POLLING_BYTES_PER_SECOND = 100e6
"""PCIe or NVLink traffic of kernels that poll flags in the memory of the host or of another GPU."""
_MAX_FILE_BYTES_PER_SECOND = 1e5
"""Reads or writes of files that count as progress."""
_MAX_WORKER_CORES = 0.5
_MAX_CORES_PER_PROCESS = 1.2
_MAX_MEMORY_CHANGE_BYTES = 2.0**21
_PIPES = ("dram", "tensor", "fp64", "fp32", "fp16")
_TRAFFIC = ("copies", "nvlink_rx_bytes_per_second", "nvlink_tx_bytes_per_second")


class KernelHang(NamedTuple):
    """The last seconds of a window, in which one kernel polled and nothing else happened."""

    seconds: Sequence[SecondSummary]
    least_seconds: float
    least_duty: float
    is_measured: bool
    """Whether GPM shows it; otherwise it is inferred from utilization and power."""
    power: float
    """Power draw relative to the limit; 1 when unknown."""
    power_drop: float | None
    """Power draw relative to that of the work before; None when there was none, or it drew as little."""

    @property
    def length(self) -> float:
        """Length in seconds."""
        return self.seconds[-1].end - self.seconds[0].start


def find_hang(gpu: GpuEvidence) -> KernelHang | None:
    """Return the hang at the end of the window, None when the job makes progress or this cannot be told."""
    return _measured(gpu) if "gpm" in gpu.window.signals else _guessed(gpu)


def may_become_hang(gpu: GpuEvidence) -> bool:
    """Return whether the GPU polls at the end of the window, but not for long enough yet."""
    t = gpu.t
    holds = partial(_is_polling, t=t) if "gpm" in gpu.window.signals else _reads_busy
    least = t.hang_seconds if "gpm" in gpu.window.signals else _GUESS_SECONDS
    tail = _tail(gpu.window.steady, holds)
    return bool(tail) and _length(tail) < least and not _makes_progress(tail)


def _measured(gpu: GpuEvidence) -> KernelHang | None:
    t = gpu.t
    seconds = _tail(gpu.window.steady, partial(_is_polling, t=t))
    if _length(seconds) < t.hang_seconds or _makes_progress(seconds):
        return None
    filled = [value for second in seconds if (value := second.mean("sm_active_ratio")) is not None]
    if max(filled) - min(filled) > max(_SM_RESOLUTION, t.hang_spread * max(filled)):
        return None
    return KernelHang(seconds, t.hang_seconds, _ALWAYS_BUSY, is_measured=True, power=1.0, power_drop=None)


def _guessed(gpu: GpuEvidence) -> KernelHang | None:
    window, t = gpu.window, gpu.t
    seconds = _tail(window.steady, _reads_busy)
    limit = window.fact("power_limit_watts")
    if (
        _length(seconds) < _GUESS_SECONDS
        or _makes_progress(seconds)
        or _computes_on_host(seconds)
        or not limit
    ):
        return None
    drawn = [
        value for second in seconds[_SETTLING_SECONDS:] if (value := second.mean("power_watts")) is not None
    ]
    if not drawn or max(drawn) - min(drawn) > _POWER_SPREAD * max(drawn):
        return None
    power = sum(drawn) / len(drawn)
    if power >= t.low_power * limit:
        return None
    before = window.mean("power_watts", window.steady[: len(window.steady) - len(seconds)])
    drop = power / before if before else None
    return KernelHang(
        seconds,
        _GUESS_SECONDS,
        _ALWAYS_BUSY_NVML,
        is_measured=False,
        power=power / limit,
        power_drop=drop if drop is not None and drop < t.hang_power_drop else None,
    )


def _tail(
    seconds: Sequence[SecondSummary], holds: Callable[[SecondSummary], bool]
) -> Sequence[SecondSummary]:
    """Return the last seconds without an exception among them."""
    first = len(seconds)
    while first and holds(seconds[first - 1]):
        first -= 1
    return seconds[first:]


def _length(seconds: Sequence[SecondSummary]) -> float:
    return seconds[-1].end - seconds[0].start if seconds else 0.0


def _is_polling(second: SecondSummary, t: Thresholds) -> bool:
    """Whether a kernel was resident all the time, and neither computed nor used the memory."""
    if (second.mean("duty") or 0.0) < _ALWAYS_BUSY or second.mean("sm_active_ratio") is None:
        return False
    known = [value for name in _PIPES if (value := second.mean(f"{name}_active_ratio")) is not None]
    return bool(known) and all(value < t.hang_activity for value in known)


def _reads_busy(second: SecondSummary) -> bool:
    """Whether every sample of NVML's utilization reads 100%, and the memory is not used."""
    in_use = second.reading.get("memory_utilization_ratio")
    return (
        bool(second.duties)
        and all(value >= _ALWAYS_BUSY_NVML for _, value in second.duties)
        and (in_use is None or in_use < _ALWAYS_IDLE_NVML)
    )


def _makes_progress(seconds: Sequence[SecondSummary]) -> bool:
    """Whether something is read, written, copied, allocated, or prepared by workers."""
    files = [value for s in seconds for value in (s.read_bytes, s.written_bytes) if value is not None]
    traffic = [value for s in seconds for name in _TRAFFIC if (value := s.mean(name)) is not None]
    workers = [sum(worker.cores for worker in second.workers) for second in seconds]
    held = [value for second in seconds if (value := second.mean("memory_used_bytes")) is not None]
    return (
        max(files, default=0.0) > _MAX_FILE_BYTES_PER_SECOND
        or max(traffic, default=0.0) > _MAX_POLLING_BYTES_PER_SECOND
        or sum(workers) / len(workers) > _MAX_WORKER_CORES
        or max(held, default=0.0) - min(held, default=0.0) > _MAX_MEMORY_CHANGE_BYTES
    )


def _computes_on_host(seconds: Sequence[SecondSummary]) -> bool:
    """Whether more than one thread of each process runs; the one that waits for the GPU spins."""
    return any(cores > _MAX_CORES_PER_PROCESS for second in seconds for cores in second.holder_cores.values())


def checkpoint_stall(gpu: GpuEvidence) -> RuleMatch | None:
    """The GPU is idle while the program writes a checkpoint."""
    pauses, t = gpu.checkpoints, gpu.t
    if not pauses or _share(gpu, pauses) < t.stall_share:
        return None
    lost = _share(gpu, pauses)
    written = fmean(pause.written_bytes or 0.0 for pause in pauses)
    long = fmean(pause.stall.seconds for pause in pauses)
    return RuleMatch(
        summary=f"was idle {_times(len(pauses))} for {_on_average(long, len(pauses))} while {long_size(written)} were written ({lost:.0%} of the time)",
        severity=gpu.severity(lost) if lost >= t.lost else "low",
        confidence={1: 0.6, 2: 0.8}.get(len(pauses), 0.9),
        evidence=(
            Evidence("stalls", "count", len(pauses), ">=", 1),
            Evidence("stall_seconds", "mean", long, ">=", t.checkpoint_seconds),
            Evidence("stall_ratio", "share", lost, ">=", t.stall_share),
            Evidence("stall_written_bytes", "mean", written, ">=", t.checkpoint_bytes),
        ),
        lost_ratio=lost,
        start=pauses[0].stall.start,
        end=pauses[-1].stall.end,
    )


def periodic_stall(gpu: GpuEvidence) -> RuleMatch | None:
    """The GPU is idle repeatedly, and nothing is written."""
    t = gpu.t
    pauses = [pause for pause in gpu.pauses if pause not in gpu.checkpoints]
    if len(pauses) < 2 or len(pauses) < len(gpu.checkpoints) or _share(gpu, pauses) < t.stall_share:
        return None
    lost = _share(gpu, pauses)
    long = fmean(pause.stall.seconds for pause in pauses)
    spaces = [b.stall.start - a.stall.start for a, b in pairwise(pauses)]
    regular = len(spaces) >= 2 and pstdev(spaces) / fmean(spaces) < t.regular_spacing
    # Shorter pauses count only in a rhythm.
    least = t.stall_seconds if long >= t.stall_seconds else t.checkpoint_seconds
    evidence = [
        Evidence("stalls", "count", len(pauses), ">=", 2),
        Evidence("stall_seconds", "mean", long, ">=", least),
        Evidence("stall_ratio", "share", lost, ">=", t.stall_share),
        Evidence("stall_spacing_seconds", "mean", fmean(spaces), ">=", 0),
    ]
    every = f", every {seconds_text(fmean(spaces))}," if regular else ""
    return RuleMatch(
        summary=f"was idle {_times(len(pauses))} for {_on_average(long, len(pauses))}{every} while nothing was written ({lost:.0%} of the time)",
        severity=gpu.severity(lost) if lost >= t.lost else "low",
        confidence=0.8 if regular else 0.6 if len(pauses) >= 3 else 0.5,
        evidence=tuple(evidence),
        ruled_out=("checkpoint_stall: less than 200 MB were written in each pause",),
        lost_ratio=lost,
        start=pauses[0].stall.start,
        end=pauses[-1].stall.end,
    )


def throughput_regression(gpu: GpuEvidence) -> RuleMatch | None:
    """From some point on, the GPU does less work."""
    t, seconds = gpu.t, gpu.window.steady
    if gpu.reports_pauses:
        return None
    series = [(s.start, value) for s in seconds if (value := s.mean("duty")) is not None]
    change = _change(series, t.regression_seconds)
    if change is None:
        return None
    place, before, after = change
    if before < 0.3 or after > (1 - t.throughput_drop) * before:
        return None
    return RuleMatch(
        summary=f"slowed down at one point: it was busy {before:.0%} of the time before, and {after:.0%} after",
        severity="medium" if after < 0.6 * before else "low",
        confidence=0.6,
        evidence=(
            Evidence("duty", "median before", before, ">=", 0.3),
            Evidence("duty", "median after", after, "<", (1 - t.throughput_drop) * before),
        ),
        lost_ratio=before - after,
        start=series[place][0],
    )


def collective_hang(gpu: GpuEvidence) -> RuleMatch | None:
    """One kernel runs without an end and does nothing but poll."""
    t, hang = gpu.t, find_hang(gpu)
    if hang is None:
        return None
    window, seconds = gpu.window, hang.seconds
    duty = window.mean("duty", seconds) or 0.0
    evidence = [
        Evidence("hang_seconds", "length", hang.length, ">=", hang.least_seconds),
        Evidence("duty", "mean", duty, ">=", hang.least_duty),
    ]
    if hang.is_measured:
        filled, dram = (window.mean(f"{name}_active_ratio", seconds) or 0.0 for name in ("sm", "dram"))
        evidence += [
            Evidence("sm_active_ratio", "mean", filled, "<", 1.0),
            Evidence("dram_active_ratio", "mean", dram, "<", t.hang_activity),
        ]
        return RuleMatch(
            summary=f"has been busy for {seconds_text(hang.length)} with one kernel that does not end: it uses a constant {filled:.1%} of the SMs, without arithmetic or memory traffic",
            severity="critical",
            confidence=0.8,
            evidence=tuple(evidence),
            ruled_out=("thin_kernels: SM activity would change from kernel to kernel",),
            start=seconds[0].start,
        )
    evidence.append(Evidence("power_ratio", "mean", hang.power, "<", t.low_power))
    before = ""
    if hang.power_drop is not None:
        evidence.append(Evidence("hang_power_ratio", "mean", hang.power_drop, "<", t.hang_power_drop))
        before = f" and {hang.power_drop:.0%} of the power that it drew before"
    return RuleMatch(
        summary=f"possibly hangs (inferred from utilization and power): busy without a break for {seconds_text(hang.length)} at a constant {hang.power:.0%} of its power limit{before}, with nothing read, written or allocated",
        # Without GPM a graph of tiny kernels reads the same, unless the job worked before.
        severity="info" if hang.power_drop is None else "high",
        confidence=0.3 if hang.power_drop is None else 0.5,
        evidence=tuple(evidence),
        start=seconds[0].start,
        inferred=True,
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _on_average(seconds: float, count: int) -> str:
    return seconds_text(seconds) + (" on average" if count > 1 else "")


def _share(gpu: GpuEvidence, pauses: Sequence[Pause]) -> float:
    return sum(pause.stall.seconds for pause in pauses) / max(gpu.window.length, 1e-9)


def _change(series: Sequence[tuple[float, float]], least_seconds: float) -> tuple[int, float, float] | None:
    """Return the point that best splits a series into two steady levels, with the medians on both sides."""
    if len(series) < 4 or series[-1][0] - series[0][0] < 2 * least_seconds:
        return None
    values = [value for _, value in series]
    sums = [0.0, *accumulate(values)]
    squares = [0.0, *accumulate(value * value for value in values)]

    def scatter_of(begin: int, end: int) -> float:
        count, total = end - begin, sums[end] - sums[begin]
        return count * math.sqrt(max(0.0, (squares[end] - squares[begin]) / count - (total / count) ** 2))

    best: tuple[float, int] | None = None
    for place in range(1, len(series)):
        if (
            series[place][0] - series[0][0] < least_seconds
            or series[-1][0] - series[place][0] < least_seconds
        ):
            continue
        spread = scatter_of(0, place) + scatter_of(place, len(values))
        if best is None or spread < best[0]:
            best = (spread, place)
    if best is None:
        return None
    left, right = values[: best[1]], values[best[1] :]
    before, after = median(left), median(right)
    scatter = max(median(abs(v - before) for v in left), median(abs(v - after) for v in right))
    if abs(before - after) < 4 * scatter:
        return None
    return best[1], before, after


RULES = (
    Rule(
        id="collective_hang",
        family="stall",
        title="The GPU is busy but makes no progress",
        means="A kernel waits for something that does not arrive, usually another rank in a collective operation: utilization reads 100%, but no step ever finishes.",
        recognised="The GPU is busy without any break for at least ten seconds, and its SM (streaming multiprocessor) activity does not change at all. There is no arithmetic and no memory traffic, and nothing is read, written or allocated. Without GPM (GPU performance monitoring), the hang is inferred: utilization is 100% in every sample for 15 seconds, at a constant low power that fell from a higher level. If the power was not higher before, the finding is only informational, because tiny kernels in a CUDA graph look the same.",
        severity="Critical; high when the hang is inferred.",
        advice=(
            Advice(
                "find the rank that differs: run `gpulse stacks` on each node, which lists that rank first, and use NCCL's flight recorder (TORCH_NCCL_TRACE_BUFFER_SIZE)",
                "one rank that died, raised an exception or took another branch keeps all others waiting",
                "two stack dumps ten seconds apart should show the same lines, with all ranks but one waiting in the same collective",
            ),
        ),
        check=collective_hang,
        needs=("duty",),
        limits=("hang_seconds", "hang_activity", "hang_power_drop"),
        quantities={
            "hang_seconds": SignalText("time without progress", "seconds"),
            "hang_power_ratio": SignalText("power draw relative to the preceding period", "share"),
        },
        inferred_without_gpm=True,
        is_settled=True,
        stacks="all",
        sources=("NCCL issue 968", "PyTorch: NCCL flight recorder"),
    ),
    Rule(
        id="checkpoint_stall",
        family="stall",
        title="The GPU is idle while checkpoints are written",
        means="The program pauses its steps to copy the model to the host and write it, and the GPU waits for the disk.",
        recognised="The GPU pauses between periods of work, its processes write at least 200 MB in each pause, and the pauses together take at least 5% of the time. Two or more pauses raise the confidence.",
        severity="Depends on the time spent in pauses: low from 5%, medium from 20%, high from 40%.",
        advice=(
            Advice(
                "write asynchronously (torch.distributed.checkpoint.async_save, or a copy to the host and a background thread)",
                "the GPU must wait only for the copy to the host; writing can overlap with the next steps",
                "save to /dev/shm once: the pause should shrink to the time of the copy",
            ),
            Advice(
                "save less often, in shards, or to a faster disk",
                "the total cost is the time per save times the number of saves",
                "`gpulse -d` shows the disk's write rate during a pause",
            ),
        ),
        check=checkpoint_stall,
        needs=("duty", "io"),
        limits=("checkpoint_seconds", "stall_share", "checkpoint_bytes"),
        quantities={
            "stalls": SignalText("pauses", "count"),
            "stall_seconds": SignalText("mean pause length", "seconds"),
            "stall_ratio": SignalText("time spent in pauses", "share"),
            "stall_written_bytes": SignalText("data written per pause", "bytes"),
        },
        stacks="pauses",
        sources=("PyTorch: distributed checkpoint", "GoCkpt"),
    ),
    Rule(
        id="periodic_stall",
        family="stall",
        title="The GPU pauses repeatedly",
        means="At intervals, the program does something that does not use the GPU, such as evaluation on the host, logging, garbage collection, or starting the workers of the next epoch.",
        recognised="The GPU paused at least twice for 1.2 seconds between periods of work, or at least three times for half a second with equal lengths and spacing, while nothing was written and no process that feeds the GPU was busy. Regular spacing raises the confidence.",
        severity="Depends on the time spent in pauses: low from 5%, medium from 20%, high from 40%.",
        advice=(
            Advice(
                "check what happens at those times: evaluation metrics on the CPU, logging, or the end of an epoch",
                "this work can run less often, on the GPU, or in parallel with the steps",
                "`gpulse stacks` during a pause shows what the program is doing",
            ),
            Advice(
                "set persistent_workers=True if the pauses come at the end of each epoch",
                "otherwise, the workers are restarted for each epoch",
                "`gpulse -c -v` shows new worker PIDs after each pause",
            ),
        ),
        check=periodic_stall,
        needs=("duty", "processes"),
        limits=("stall_seconds", "stall_share"),
        quantities={"stall_spacing_seconds": SignalText("mean time from one pause to the next", "seconds")},
        yields_to=("gpu_idle_allocated",),
        stacks="pauses",
        sources=("Amazon SageMaker: step outliers",),
    ),
    Rule(
        id="throughput_regression",
        family="stall",
        title="GPU utilization dropped and stayed lower",
        means="From one point on, the GPU is busy for a smaller part of the time than before, without a pause in between.",
        recognised="GPU utilization is steady before and after one point in time, and at least 15% lower after it.",
        severity="Low; medium when utilization fell by more than 40%.",
        advice=(
            Advice(
                "check what else started at that time: another job, a backup, or a new phase of the program",
                "other findings at the same time show what has become scarce",
                "`gpulse top` shows which processes started when",
            ),
        ),
        check=throughput_regression,
        needs=("duty",),
        limits=("throughput_drop", "regression_seconds"),
        yields_to=("gpu_idle_allocated",),
        yields_to_losses=True,
        sources=("Greyhound: fail-slow detection", "Google: performance regression thresholds"),
    ),
)
