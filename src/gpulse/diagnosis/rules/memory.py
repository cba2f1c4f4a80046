"""Memory: leaks, what runs out soon, what nobody holds, and swapping."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from gpulse.diagnosis.case import Case
from gpulse.diagnosis.rule import Match, Rule
from gpulse.model.finding import Advice, Evidence
from gpulse.model.units import duration, long_size, rate


class Rise(NamedTuple):
    """A quantity that grew all the time."""

    first: float
    last: float
    start: float
    end: float

    @property
    def bytes(self) -> float:
        """By how much."""
        return self.last - self.first

    @property
    def per_second(self) -> float:
        """How fast."""
        return self.bytes / (self.end - self.start)


def _rise(series: Sequence[tuple[float, float]], least: float) -> Rise | None:
    """The rise of a series that grows in each quarter of its time and never falls back by much.

    A jump (a larger batch, an evaluation, the first step) grows in one quarter alone.
    """
    while len(series) >= 2 and series[-1][1] < series[-2][1]:
        series = series[:-1]  # a program that ends gives its memory back
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


def _gpu_rise(case: Case) -> Rise | None:
    series = [
        (s.end, value) for s in case.stretch.steady if (value := s.mean("memory_used_bytes")) is not None
    ]
    return _rise(series, case.t.leak_bytes)


def gpu_memory_leak(case: Case) -> Match | None:
    """Device memory grows all the time."""
    rise = _gpu_rise(case)
    if rise is None or case.stretch.is_loading:
        return None
    total = case.stretch.fact("memory_total_bytes")
    if total is not None and rise.last > total:
        return None
    evidence, left = _rise_evidence("memory_used_bytes", rise, case.t.leak_bytes), ""
    if total is not None and total > rise.last:
        seconds = (total - rise.last) / rise.per_second
        evidence += (Evidence("seconds_left", "extrapolated", seconds, ">=", 0),)
        left = f", full in {duration(round(seconds))}"
    return Match(
        summary=f"loses memory: {long_size(rise.first)} grew to {long_size(rise.last)} in {rise.end - rise.start:.0f} s, {rate(rise.per_second)}{left}",
        severity="medium",
        confidence=0.9 if rise.end - rise.start >= 15 else 0.7,
        evidence=evidence,
        start=rise.start,
    )


def gpu_oom_imminent(case: Case) -> Match | None:
    """Device memory is nearly full and still grows."""
    total, rise = case.stretch.fact("memory_total_bytes"), _gpu_rise(case)
    if (
        total is None
        or rise is None
        or case.stretch.is_loading
        or rise.last > total
        or rise.last / total < case.t.oom_used
    ):
        return None
    left = (total - rise.last) / rise.per_second
    if left > case.t.oom_seconds:
        return None
    return Match(
        summary=f"will run out of memory in about {duration(round(left))}: {rise.last / total:.0%} used, growing by {rate(rise.per_second)}",
        severity="critical" if left < 180 else "high",
        confidence=0.8,
        evidence=(
            Evidence("memory_used_ratio", "last", rise.last / total, ">=", case.t.oom_used),
            Evidence("memory_used_bytes", "slope", rise.per_second, ">=", 0),
            Evidence("seconds_left", "extrapolated", left, "<=", case.t.oom_seconds),
        ),
        start=rise.start,
    )


def host_memory_leak(case: Case) -> Match | None:
    """The job's host memory grows all the time, and the machine's shrinks with it."""
    steady = case.stretch.steady
    rise = _rise(
        [(s.end, s.resident_bytes) for s in steady if s.resident_bytes is not None], case.t.leak_bytes
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
    return Match(
        summary=f"has processes that lose host memory: {long_size(rise.first)} grew to {long_size(rise.last)} in {rise.end - rise.start:.0f} s, {rate(rise.per_second)}, none left in {duration(round(left))}",
        severity="high" if left < 1800 else "medium",
        confidence=0.8,
        evidence=(
            *_rise_evidence("job_resident_bytes", rise, case.t.leak_bytes),
            Evidence("memory_available_bytes", "fall", fallen, ">=", rise.bytes / 2),
            Evidence("seconds_left", "extrapolated", left, ">=", 0),
        ),
        start=rise.start,
    )


def gpu_memory_orphaned(case: Case) -> Match | None:
    """Memory is in use and no process is there that holds it."""
    stretch, t = case.stretch, case.t
    seen = [s for s in stretch.seconds_seen if s.holders is not None]
    empty = [s for s in seen if not s.holders]
    if not seen or len(empty) < len(seen) or stretch.device.mig_index is not None:
        return None
    used = stretch.mean("memory_used_bytes", empty)
    if used is None or used < t.held_bytes or empty[-1].end - empty[0].start < t.shortest_seconds - 0.5:
        return None
    return Match(
        summary=f"has {long_size(used)} in use, and no process that holds them can be seen",
        severity="medium",
        confidence=0.6,
        evidence=(
            Evidence("memory_used_bytes", "mean", used, ">=", t.held_bytes),
            Evidence("processes_on_gpu", "max", 0, "<", 1),
        ),
        pids=(),
        start=empty[0].start,
        end=empty[-1].end,
    )


def swap_thrash(case: Case) -> Match | None:
    """The machine swaps, and the job waits for its own memory."""
    stretch, t = case.stretch, case.t
    pages = stretch.host("swap_in_pages_per_second")
    pressure = stretch.host("pressure_memory_full_ratio")
    if pages is None or pages < t.swapped_pages_per_second or (pressure or 0.0) < t.memory_pressure:
        return None
    return Match(
        summary=f"waits for host memory that was swapped out: {pages:.0f} pages a second come back, everything stands still {pressure or 0.0:.0%} of the time",
        severity="high",
        confidence=0.8,
        evidence=(
            Evidence("swap_in_pages_per_second", "mean", pages, ">=", t.swapped_pages_per_second),
            Evidence("pressure_memory_full_ratio", "mean", pressure or 0.0, ">=", t.memory_pressure),
        ),
        lost_ratio=case.lost,
        start=stretch.start,
    )


RULES = (
    Rule(
        id="gpu_oom_imminent",
        family="memory",
        title="The GPU's memory is about to run out",
        means="Nearly all device memory is used and it still grows; the next allocation that fails ends the job.",
        recognised="92 % used, growing in every quarter of the window, and full within ten minutes. A full but flat memory (preallocated by JAX or vLLM) is normal.",
        severity="High; critical below three minutes.",
        advice=(
            Advice(
                "save a checkpoint now; then a smaller batch, activation checkpointing, or find the leak",
                "an out-of-memory error comes in the middle of a step and takes the run with it",
                "`gpulse record` the next run: memory stays flat",
            ),
        ),
        check=gpu_oom_imminent,
        needs=("memory",),
        sources=("TraceML: memory thresholds", "Prometheus: predict_linear"),
        trend=True,
    ),
    Rule(
        id="gpu_memory_leak",
        family="memory",
        title="The GPU's memory grows without end",
        means="Each step leaves something behind on the GPU, until an allocation fails.",
        recognised="Memory in use rises by at least 1 GiB, in every quarter of the window, without falling back. A jump at the start or at an evaluation is no leak.",
        severity="Medium.",
        advice=(
            Advice(
                "keep numbers, not tensors: loss.item() or loss.detach() in lists and logs; retain_graph only where needed",
                "a tensor that is kept keeps its whole graph with it",
                "torch.cuda.memory_allocated() printed every hundred steps stays flat",
            ),
            Advice(
                "torch.cuda.memory._record_memory_history() and look at the snapshot",
                "it names the line that allocated what is never freed",
                "the snapshot's largest block that only grows",
            ),
        ),
        check=gpu_memory_leak,
        needs=("memory",),
        sources=("PyTorch FAQ: my model reports out of memory", "PyTorch: memory snapshots"),
        trend=True,
    ),
    Rule(
        id="host_memory_leak",
        family="memory",
        title="The job's host memory grows without end",
        means="The processes of the job take more and more of the machine's memory, until the kernel kills one of them.",
        recognised="Their resident memory rises by at least 1 GiB, in every quarter of the window, and the machine's available memory falls with it. Page cache and shared pages do neither.",
        severity="Medium; high when it lasts less than half an hour.",
        advice=(
            Advice(
                "look for lists that grow (results, samples kept by a dataset), and lower prefetch_factor",
                "Python lists touched by workers are copied page by page; whatever is kept is kept in each worker",
                "tracemalloc or memray names the line",
            ),
        ),
        check=host_memory_leak,
        needs=("processes",),
        sources=("PyTorch issue 13246: copy-on-read in workers", "memray"),
        trend=True,
    ),
    Rule(
        id="swap_thrash",
        family="memory",
        title="The machine swaps",
        means="Memory that is needed was moved to disk and is fetched back again and again; everything on the machine waits.",
        recognised="At least 256 pages a second come back from swap while all tasks stand still for 5 % of the time or more.",
        severity="High.",
        advice=(
            Advice(
                "fewer workers, smaller prefetch, or more memory",
                "what does not fit is fetched from a disk a thousand times slower",
                "`gpulse -c` shows memory pressure and swap traffic going down",
            ),
        ),
        check=swap_thrash,
        needs=("pressure",),
        sources=("systemd-oomd", "node exporter mixin: memory pressure"),
        shown=False,
    ),
    Rule(
        id="gpu_memory_orphaned",
        family="memory",
        title="Memory in use that no visible process holds",
        means="Device memory is taken, but no process is listed. Either its owner is hidden from here (another container), or it died and the driver still holds the memory.",
        recognised="At least 1 GiB in use for the whole window while the list of processes could be read and was empty.",
        severity="Medium.",
        advice=(
            Advice(
                "`sudo fuser -v /dev/nvidia*` on the host, and end what still holds the device",
                "a process that is hidden or half dead keeps the memory until it is gone",
                "`gpulse` shows the memory free again",
            ),
        ),
        check=gpu_memory_orphaned,
        needs=(),
        sources=("nvidia-docker issues 179 and 1483",),
        shown=False,
    ),
)
