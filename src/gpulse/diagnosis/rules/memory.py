"""Rules on memory: leaks, imminent out-of-memory errors, memory without a process, and swapping."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from gpulse.diagnosis.evidence import GpuEvidence
from gpulse.diagnosis.rule import Rule, RuleMatch, SignalText
from gpulse.model.finding import Advice, Evidence
from gpulse.model.formatting import long_size, rate
from gpulse.model.formatting import seconds as seconds_text


class Rise(NamedTuple):
    """Steady growth of a quantity."""

    first: float
    last: float
    start: float
    end: float

    @property
    def bytes(self) -> float:
        """Total growth."""
        return self.last - self.first

    @property
    def per_second(self) -> float:
        """Growth rate."""
        return self.bytes / (self.end - self.start)


def _rise(series: Sequence[tuple[float, float]], least: float) -> Rise | None:
    """Return the rise of a series that grows in each quarter of its time and never falls back by much; else None.

    A jump (a larger batch, an evaluation, the first step) grows in one quarter alone.
    """
    while len(series) >= 2 and series[-1][1] < series[-2][1]:
        series = series[:-1]  # a program that ends releases its memory
    if len(series) < 8:
        return None
    marks = [series[round(quarter * (len(series) - 1) / 4)] for quarter in range(5)]
    grown = marks[-1][1] - marks[0][1]
    if grown < least:
        return None
    steps = [later[1] - earlier[1] for earlier, later in pairwise(marks)]
    falls = sum(max(0.0, a[1] - b[1]) for a, b in pairwise(series))
    if min(steps) < 0.08 * grown or max(steps) > 0.6 * grown or falls > 0.5 * grown:
        return None
    if steps[-1] < 0.5 * steps[0]:
        return None  # it slows down: a cache that fills up
    return Rise(marks[0][1], marks[-1][1], marks[0][0], marks[-1][0])


def _rise_evidence(signal: str, rise: Rise, least: float) -> tuple[Evidence, ...]:
    return (
        Evidence(signal, "rise", rise.bytes, ">=", least),
        Evidence(signal, "first", rise.first, ">=", 0),
        Evidence(signal, "last", rise.last, ">=", 0),
        Evidence(signal, "slope", rise.per_second, ">=", 0),
        Evidence("seconds", "length", rise.end - rise.start, ">=", 0),
    )


def _gpu_rise(gpu: GpuEvidence) -> Rise | None:
    series = [(s.end, value) for s in gpu.window.steady if (value := s.mean("memory_used_bytes")) is not None]
    return _rise(series, gpu.t.leak_bytes)


def gpu_memory_leak(gpu: GpuEvidence) -> RuleMatch | None:
    """GPU memory use keeps growing."""
    rise = _gpu_rise(gpu)
    if rise is None or gpu.window.is_loading:
        return None
    total = gpu.window.fact("memory_total_bytes")
    if total is not None and rise.last > total:
        return None
    evidence, left = _rise_evidence("memory_used_bytes", rise, gpu.t.leak_bytes), ""
    if total is not None and total > rise.last:
        seconds = (total - rise.last) / rise.per_second
        evidence += (Evidence("seconds_left", "extrapolated", seconds, ">=", 0),)
        left = f"; at this rate, the memory will be full in {seconds_text(round(seconds))}"
    return RuleMatch(
        summary=f"uses more and more memory: from {long_size(rise.first)} to {long_size(rise.last)} in {seconds_text(round(rise.end - rise.start))} ({rate(rise.per_second)}){left}",
        severity="medium",
        confidence=0.9 if rise.end - rise.start >= 15 else 0.7,
        evidence=evidence,
        start=rise.start,
    )


def gpu_oom_imminent(gpu: GpuEvidence) -> RuleMatch | None:
    """GPU memory is nearly full and still grows."""
    total, rise = gpu.window.fact("memory_total_bytes"), _gpu_rise(gpu)
    if (
        total is None
        or rise is None
        or gpu.window.is_loading
        or rise.last > total
        or rise.last / total < gpu.t.oom_used
    ):
        return None
    left = (total - rise.last) / rise.per_second
    if left > gpu.t.oom_seconds:
        return None
    return RuleMatch(
        summary=f"will run out of memory in about {seconds_text(round(left))}: {rise.last / total:.0%} used, growing by {rate(rise.per_second)}",
        severity="critical" if left < 180 else "high",
        confidence=0.8,
        evidence=(
            Evidence("memory_used_ratio", "last", rise.last / total, ">=", gpu.t.oom_used),
            Evidence("memory_used_bytes", "slope", rise.per_second, ">=", 0),
            Evidence("seconds_left", "extrapolated", left, "<=", gpu.t.oom_seconds),
        ),
        start=rise.start,
    )


def host_memory_leak(gpu: GpuEvidence) -> RuleMatch | None:
    """The job's host memory keeps growing, and the machine's available memory shrinks with it."""
    steady = gpu.window.steady
    rise = _rise(
        [(s.end, s.resident_bytes) for s in steady if s.resident_bytes is not None], gpu.t.leak_bytes
    )
    if rise is None:
        return None
    available = [
        (s.end, s.host["memory_available_bytes"]) for s in steady if "memory_available_bytes" in s.host
    ]
    if len(available) < 2:
        return None
    fallen = available[0][1] - available[-1][1]
    if fallen < rise.bytes / 2:
        return None  # shared pages, counted for each process that maps them
    left = available[-1][1] / rise.per_second
    return RuleMatch(
        summary=f"has processes that use more and more host memory: from {long_size(rise.first)} to {long_size(rise.last)} in {seconds_text(round(rise.end - rise.start))} ({rate(rise.per_second)}); at this rate, the machine will run out of memory in {seconds_text(round(left))}",
        severity="high" if left < 1800 else "medium",
        confidence=0.8,
        evidence=(
            *_rise_evidence("job_resident_bytes", rise, gpu.t.leak_bytes),
            Evidence("memory_available_bytes", "fall", fallen, ">=", rise.bytes / 2),
            Evidence("seconds_left", "extrapolated", left, ">=", 0),
        ),
        start=rise.start,
    )


def gpu_memory_orphaned(gpu: GpuEvidence) -> RuleMatch | None:
    """Memory is in use, but no process holds it."""
    window, t = gpu.window, gpu.t
    seen = [s for s in window.seconds_seen if s.holders is not None]
    empty = [s for s in seen if not s.holders]
    if not seen or len(empty) < len(seen) or window.device.mig_index is not None:
        return None
    used = window.mean("memory_used_bytes", empty)
    if used is None or used < t.allocated_bytes or empty[-1].end - empty[0].start < t.min_seconds - 0.5:
        return None
    return RuleMatch(
        summary=f"has {long_size(used)} of memory in use, but no visible process holds it",
        severity="medium",
        confidence=0.6,
        evidence=(
            Evidence("memory_used_bytes", "mean", used, ">=", t.allocated_bytes),
            Evidence("processes_on_gpu", "max", 0, "<", 1),
        ),
        pids=(),
        start=empty[0].start,
        end=empty[-1].end,
    )


def swap_thrash(gpu: GpuEvidence) -> RuleMatch | None:
    """The machine swaps, and the job waits for its memory."""
    window, t = gpu.window, gpu.t
    pages = window.host("swap_in_pages_per_second")
    pressure = window.host("pressure_memory_full_ratio")
    if pages is None or pages < t.swapped_pages_per_second or (pressure or 0.0) < t.memory_pressure:
        return None
    return RuleMatch(
        summary=f"waits for swapped-out host memory: {pages:.0f} pages per second are swapped in, and all tasks are stalled {pressure or 0.0:.0%} of the time",
        severity="high",
        confidence=0.8,
        evidence=(
            Evidence("swap_in_pages_per_second", "mean", pages, ">=", t.swapped_pages_per_second),
            Evidence("pressure_memory_full_ratio", "mean", pressure or 0.0, ">=", t.memory_pressure),
        ),
        lost_ratio=gpu.lost,
        start=window.start,
    )


RULES = (
    Rule(
        id="gpu_oom_imminent",
        family="memory",
        title="GPU memory is about to run out",
        means="Nearly all device memory is in use, and its use is still growing. The first allocation that fails will end the job.",
        recognised="At least 92% of the memory is in use, its use grows in every quarter of the window, and it will be full within ten minutes. Full memory whose use does not grow (for example, preallocated by JAX or vLLM) is normal.",
        severity="High; critical when less than three minutes are left.",
        advice=(
            Advice(
                "save a checkpoint now; then use a smaller batch or activation checkpointing, or find the leak",
                "an out-of-memory error would end the run in the middle of a step",
                "record the next run with `gpulse record`: its memory use should stay flat",
            ),
        ),
        check=gpu_oom_imminent,
        needs=("memory",),
        limits=("oom_used", "oom_seconds"),
        quantities={
            "memory_used_ratio": SignalText("GPU memory in use", "share"),
            "seconds_left": SignalText("time until memory is full", "seconds"),
        },
        sources=("TraceML: memory thresholds", "Prometheus: predict_linear"),
        trend=True,
    ),
    Rule(
        id="gpu_memory_leak",
        family="memory",
        title="GPU memory use keeps growing",
        means="Each step leaks some GPU memory. Without a fix, an allocation eventually fails and ends the job.",
        recognised="Memory use grows in every quarter of the window, by at least 1 GiB in total, without falling back. A jump at the start or at an evaluation is not a leak.",
        severity="Medium.",
        advice=(
            Advice(
                "do not keep tensors that hold the autograd graph: store loss.item() or loss.detach() in lists and logs, and use retain_graph only where needed",
                "a tensor that is kept alive keeps its whole graph alive",
                "print torch.cuda.memory_allocated() every hundred steps: the value should stay flat",
            ),
            Advice(
                "call torch.cuda.memory._record_memory_history() and inspect the snapshot",
                "the snapshot names the line that allocates memory without freeing it",
                "from snapshot to snapshot, one block should keep growing",
            ),
        ),
        check=gpu_memory_leak,
        needs=("memory",),
        limits=("leak_bytes",),
        yields_to=("gpu_oom_imminent",),
        sources=("PyTorch FAQ: my model reports out of memory", "PyTorch: memory snapshots"),
        trend=True,
    ),
    Rule(
        id="host_memory_leak",
        family="memory",
        title="The job's host memory use keeps growing",
        means="The job's processes use more and more of the machine's memory, until the kernel kills one of them.",
        recognised="The resident memory of the job's processes grows in every quarter of the window, by at least 1 GiB in total, and the machine's available memory falls accordingly. Growth of the page cache or of shared pages does not count.",
        severity="Medium; high when the remaining memory lasts less than half an hour.",
        advice=(
            Advice(
                "look for growing lists (results, samples kept by a dataset), and lower prefetch_factor",
                "memory pages of Python lists are copied when a worker reads them, so each worker ends up with its own copy",
                "tracemalloc or memray shows which line allocates the memory",
            ),
        ),
        check=host_memory_leak,
        needs=("processes",),
        limits=("leak_bytes",),
        quantities={"job_resident_bytes": SignalText("host memory of the job", "bytes")},
        stacks="all",
        sources=("PyTorch issue 13246: copy-on-read in workers", "memray"),
        trend=True,
    ),
    Rule(
        id="swap_thrash",
        family="memory",
        title="The machine is swapping",
        means="Memory that is still in use is moved to disk and read back again and again, and everything on the machine waits for it.",
        recognised="At least 256 pages per second are swapped in while all tasks are stalled on memory for at least 5% of the time.",
        severity="High.",
        advice=(
            Advice(
                "use fewer workers, less prefetching, or more memory",
                "memory that does not fit must be read back from a disk, which is a thousand times slower",
                "`gpulse -c` should show that memory pressure and swap traffic fall",
            ),
        ),
        check=swap_thrash,
        needs=("pressure",),
        limits=("swapped_pages_per_second", "memory_pressure"),
        explains="swapping",
        sources=("systemd-oomd", "node exporter mixin: memory pressure"),
        shown=False,
    ),
    Rule(
        id="gpu_memory_orphaned",
        family="memory",
        title="GPU memory is in use, but no visible process holds it",
        category="waste",
        means="Device memory is in use, but no process is listed. Either the process that holds it is not visible from here (for example, in another container), or it died and the driver has not released the memory.",
        recognised="At least 1 GiB is in use over the whole window, and the process list could be read but was empty.",
        severity="Medium.",
        advice=(
            Advice(
                "run `sudo fuser -v /dev/nvidia*` on the host, and end the process that still holds the device",
                "a hidden or half-dead process keeps the memory until it ends",
                "`gpulse` should show that the memory is free again",
            ),
        ),
        check=gpu_memory_orphaned,
        needs=(),
        limits=("allocated_bytes",),
        quantities={"processes_on_gpu": SignalText("processes on the GPU", "count")},
        without_job=True,
        sources=("nvidia-docker issues 179 and 1483",),
        shown=False,
    ),
)
