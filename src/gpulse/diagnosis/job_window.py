"""The time window in which one GPU's job was at work, and statistics over its seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise, repeat
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from gpulse.diagnosis.estimates import (
    FillEstimate,
    PowerModel,
    estimate_dram_ratio,
    full_power_watts,
    infer_seconds,
    model_power,
)
from gpulse.diagnosis.second_summary import SecondSummary, SignalGroup
from gpulse.diagnosis.thresholds import Thresholds
from gpulse.model.counter_rates import ProcessKey
from gpulse.model.device import Device
from gpulse.model.finding import DiagnosisLevel
from gpulse.model.process import ProcessReading

_YOUNG_SECONDS = 60.0
"""A job older than this at the start of a window has finished starting up."""
_BYSTANDER = 0.10
"""A process that uses less than this fraction of the busiest process's CPU time is not part of the job."""
_SOME_CPU_SECONDS = 0.5
_AT_WORK_CORES = 0.3
_SETTLED = 0.8
_AT_WORK = 0.25
_DENSE = 0.3
_LEFT_DUTY = 0.05
_PACE = 0.005
_COPIED = 0.3 * 2**30
"""A second with fewer copied bytes per second and a lower duty (`_PACE`) contains no work."""


class Stall(NamedTuple):
    """A pause of the GPU between two periods of work."""

    start: float
    end: float
    worked: float = 0.0
    """Seconds of work since the previous stall."""

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.end - self.start


class JobWindow:
    """One GPU, the job on it, and the seconds in which that job was at work.

    Time before the job started, after it ended, and of other jobs is excluded.
    """

    def __init__(
        self, seconds: Sequence[SecondSummary], thresholds: Thresholds, names: dict[int, str]
    ) -> None:
        """Take the seconds of one GPU in order; `names` are the program names by PID."""
        self._all = _since_the_clock_was_set(seconds)
        self.power_model: PowerModel | None = None
        """What the GPU draws, to estimate what GPM would measure; None with GPM or without power readings."""
        if not any("sm_active_ratio" in second.gpu for second in self._all):
            self.power_model = model_power(self._all)
            self._all = infer_seconds(self._all, self.power_model)
        self._thresholds = thresholds
        self.names = names
        self._means: dict[str, float | None] = {}
        """Means of GPU metrics over the steady part, which several rules use."""
        self.device: Device = seconds[-1].reading.device

    @property
    def seconds_seen(self) -> Sequence[SecondSummary]:
        """All seconds, including those outside the job."""
        return self._all

    @cached_property
    def job(self) -> Sequence[SecondSummary]:
        """The seconds of the job that was observed the longest; empty when no process was on the GPU.

        A job lasts as long as at least one of its processes. The second in which it appeared is excluded, because it
        belongs to the job only in part.
        """
        runs: list[list[SecondSummary]] = []
        last: SecondSummary | None = None
        for second in self._all:
            if self._is_empty(second):
                continue
            if last is not None and self._is_same_job(last, second):
                runs[-1].append(second)
            else:
                runs.append([second] if second is self._all[0] else [])
            last = second
        longest = max(filter(None, runs), key=lambda run: run[-1].end - run[0].start, default=[])
        if longest and longest[-1].end - longest[0].start < self._thresholds.min_seconds:
            alive = [second for second in self._all if not self._is_empty(second)]
            if (self.mean("duty", alive) or 0.0) >= self._thresholds.between_stalls_duty:
                return alive  # many short processes that together keep the GPU busy
        return longest

    @cached_property
    def _actors(self) -> frozenset[ProcessKey]:
        """The processes of the job, without those that are on the GPU but do hardly anything."""
        used: dict[ProcessKey, float] = {}
        shares: dict[int, float] = {}
        everybody: set[ProcessKey] = set()
        for second in self._all:
            everybody |= second.holders or set()
            for holder, cores in second.holder_cores.items():
                used[holder] = used.get(holder, 0.0) + cores * second.seconds
            for pid, share in second.shares.items():
                shares[pid] = max(shares.get(pid, 0.0), share.mean)
        most = max(used.values(), default=0.0)
        if most < _SOME_CPU_SECONDS:
            return frozenset(everybody)
        return frozenset(
            holder
            for holder in everybody
            if used.get(holder, most) >= _BYSTANDER * most or shares.get(holder[0], 0.0) >= _BYSTANDER
        )

    @cached_property
    def is_unlisted(self) -> bool:
        """Whether the GPU works but its process list is empty, as in many containers."""
        if any(second.holders is None or second.holders for second in self._all):
            return False
        return any(_is_working(second, self._thresholds.rare_duty) for second in self._all)

    def _present(self, second: SecondSummary) -> frozenset[ProcessKey] | None:
        return None if second.holders is None or self.is_unlisted else second.holders & self._actors

    def _is_empty(self, second: SecondSummary) -> bool:
        present = self._present(second)
        return present is not None and not present

    def _is_same_job(self, before: SecondSummary, after: SecondSummary) -> bool:
        old, new = self._present(before), self._present(after)
        return old is None or new is None or bool(old & new)

    @cached_property
    def started(self) -> float | None:
        """Start time of the job's oldest process."""
        present = self._present(self.job[0]) or ()
        return min((start for _, start in present if start is not None), default=None)

    @cached_property
    def steady(self) -> Sequence[SecondSummary]:
        """The job's seconds without its start-up."""
        job = self.job
        if len(job) > 2 and job[-1].end < self._all[-1].end:
            job = job[:-1]  # the job ended there, and its last second is only partly work
        elif job and job[-1].holders is None:
            job = _until_memory_released(job)
        if not job or not self._was_young:
            return job
        return job[_find_steady_start(job) :]

    @cached_property
    def _was_young(self) -> bool:
        if self.started is None or self.job[0] is not self._all[0]:
            return True  # it started during the recording
        return self.started > self.job[0].start - _YOUNG_SECONDS

    @property
    def start(self) -> float:
        """Start of the steady part in epoch seconds."""
        return self.steady[0].start

    @property
    def end(self) -> float:
        """End of the steady part in epoch seconds."""
        return self.steady[-1].end

    @cached_property
    def length(self) -> float:
        """Observed seconds of the steady part."""
        return sum(second.seconds for second in self.steady)

    @cached_property
    def frames(self) -> int:
        """Number of frames in the steady part."""
        return sum(second.frames for second in self.steady)

    @cached_property
    def is_enough(self) -> bool:
        """Whether there is enough data for a diagnosis."""
        t = self._thresholds
        if not self.steady or self.length < t.min_seconds - 0.5 or self.frames < t.min_frames:
            return False
        return self.length >= t.coverage * (self.end - self.start)

    @cached_property
    def is_starting(self) -> bool:
        """Whether the job works on the host or loads data, and has not computed on the GPU yet."""
        if not self.job or self.has_computed or not any(second.duties for second in self.job):
            return False  # without utilization nobody knows
        if self.has_worked and not self.is_loading:
            return False
        cores = self.job_cores(self.job)
        return cores is not None and cores >= _AT_WORK_CORES

    @cached_property
    def has_computed(self) -> bool:
        """Whether kernels ran in the steady part."""
        samples = [value for second in self.steady for _, value in second.duties]
        return sum(value >= self._thresholds.idle_duty for value in samples) > 0.01 * len(samples)

    @cached_property
    def is_loading(self) -> bool:
        """Whether the data copied to the GPU stays there, such as weights being loaded."""
        held = [value for s in self.job if (value := s.mean("memory_used_bytes")) is not None]
        rates = [(s.seconds, s.mean("pcie_rx_bytes_per_second") or 0.0) for s in self.job]
        copied = sum(length * rate for length, rate in rates)
        if len(held) < 2 or copied < 2**30:
            return False
        return 0.5 <= (held[-1] - held[0]) / copied <= 1.5

    @cached_property
    def idle_end(self) -> Sequence[SecondSummary]:
        """The idle seconds at the end; empty when they are too few for a diagnosis."""
        still = self._thresholds.idle_duty
        first = len(self.steady)
        while first and not _is_working(self.steady[first - 1], still):
            first -= 1
        tail = self.steady[first:]
        length = sum(second.seconds for second in tail)
        return tail if length >= self._thresholds.min_seconds - 0.5 else ()

    @cached_property
    def has_worked(self) -> bool:
        """Whether the GPU computed or copied anything in the steady part."""
        return self.has_computed or any(
            _is_working(second, self._thresholds.idle_duty) for second in self.steady
        )

    def mean(self, name: str, seconds: Iterable[SecondSummary] | None = None) -> float | None:
        """Return the mean of a GPU metric over all its samples."""
        if seconds is None:
            if name not in self._means:
                self._means[name] = self.mean(name, self.steady)
            return self._means[name]
        total, samples = 0.0, 0
        for second in seconds:
            entry = second.gpu.get(name)
            if entry is not None:
                total += entry[0]
                samples += entry[1]
        return total / samples if samples else None

    def cpu(self, name: str, seconds: Iterable[SecondSummary] | None = None) -> float | None:
        """Return the mean over time of another field of the seconds: `cores`, `blocked`, `read_bytes`."""
        read = attrgetter(name)
        return _average(
            (second.end - second.start, read(second))
            for second in (self.steady if seconds is None else seconds)
        )

    def job_cores(self, seconds: Sequence[SecondSummary]) -> float | None:
        """Return the CPU use, in CPUs, of the processes on the GPU and their workers together."""
        cores = self.cpu("cores", seconds)
        if cores is None:
            return None
        length = sum(second.seconds for second in seconds)
        return cores + sum(s.seconds * sum(helper.cores for helper in s.workers) for s in seconds) / length

    def host(self, name: str, seconds: Iterable[SecondSummary] | None = None) -> float | None:
        """Return the mean over time of a host metric or rate."""
        return _average(
            (s.end - s.start, s.host.get(name)) for s in (self.steady if seconds is None else seconds)
        )

    def fact(self, name: str) -> float | None:
        """Return a fact about the GPU, or the last value of a setting."""
        value = self._all[-1].reading.get(name)
        return None if value is None else float(value)

    @cached_property
    def duty(self) -> float | None:
        """Fraction of the steady part in which kernels ran.

        This is a mean over time, because an overloaded machine delivers fewer frames just when the GPU waits.
        """
        return _average((s.end - s.start, s.mean("duty")) for s in self.steady)

    @cached_property
    def estimated_fill(self) -> FillEstimate | None:
        """How much of the GPU was in use while kernels ran, without GPM; None when power or PCIe traffic is unknown.

        Copies draw as little power as small kernels, so that without PCIe traffic both look the same.
        """
        watts = self.mean("power_watts")
        if self.power_model is None or watts is None or not self.duty or "copies" not in self.signals:
            return None
        return self.power_model.fill(watts, self.duty, self.mean("sm_clock_hertz"))

    @cached_property
    def estimated_dram(self) -> float | None:
        """Share of the peak memory bandwidth in use, without GPM."""
        used = self.mean("memory_utilization_ratio")
        return None if used is None or "gpm" in self.signals else estimate_dram_ratio(used)

    @cached_property
    def cpus(self) -> float | None:
        """Number of CPUs available to the job."""
        return next((second.cpus for second in reversed(self.steady) if second.cpus is not None), None)

    @cached_property
    def pids(self) -> tuple[int, ...]:
        """PIDs of the processes that were on the GPU for at least half of the steady part, sorted."""
        seen: dict[int, int] = {}
        for second in self.steady:
            for pid, _ in second.holders or ():
                seen[pid] = seen.get(pid, 0) + 1
        actors = {pid for pid, _ in self._actors}
        return tuple(
            sorted(pid for pid, count in seen.items() if 2 * count >= len(self.steady) and pid in actors)
        )

    @cached_property
    def has_workers(self) -> bool:
        """Whether the job had workers most of the time."""
        return 2 * sum(bool(second.workers) for second in self.steady) >= len(self.steady)

    @cached_property
    def signals(self) -> frozenset[SignalGroup]:
        """Signal groups that were available for most of the steady part."""
        return frozenset(
            kind for kind, is_there in _SIGNAL_CHECKS.items() if _is_mostly_present(is_there, self.steady)
        )

    @cached_property
    def level(self) -> DiagnosisLevel:
        """What the readings of this GPU allow."""
        seconds = self.steady or self._all
        if _is_mostly_present(_SIGNAL_CHECKS["gpm"], seconds):
            return "full"
        return "nvml_only" if _is_mostly_present(_SIGNAL_CHECKS["duty"], seconds) else "host_only"

    @cached_property
    def duties(self) -> list[tuple[float, float]]:
        """Times and values of all duty samples of the steady part."""
        return [sample for second in self.steady for sample in second.duties]

    @cached_property
    def stalls(self) -> list[Stall]:
        """The pauses between periods of work."""
        return _stalls(self.duties, self._thresholds)

    @cached_property
    def edges(self) -> list[Stall]:
        """Pauses that began before the window, or continue after it."""
        samples, t = self.duties, self._thresholds
        busy = [time for time, value in samples if value >= t.stall_duty]
        if not busy:
            return []
        backwards = [-time for time in reversed(busy)]
        found = (
            Stall(samples[0][0], _find_work_start(busy, t.stall_seconds)),
            Stall(-_find_work_start(backwards, t.stall_seconds), samples[-1][0]),
        )
        return [stall for stall in found if stall.seconds >= t.checkpoint_seconds / 2]


_SIGNAL_CHECKS: dict[SignalGroup, Callable[[SecondSummary], bool]] = {
    "gpm": lambda second: "sm_active_ratio" in second.gpu,
    "fill": lambda second: "sm_active_ratio" in second.gpu or _shows_fill(second),
    "dram": lambda second: "dram_active_ratio" in second.gpu or "memory_utilization_ratio" in second.gpu,
    "duty": lambda second: "duty" in second.gpu,
    "copies": lambda second: "copies" in second.gpu,
    "processes": lambda second: second.cores is not None,
    "holders": lambda second: second.holders is not None,
    "shares": lambda second: bool(second.shares),
    "io": lambda second: second.read_bytes is not None,
    "pressure": lambda second: "pressure_cpu_some_ratio" in second.host,
    "host": lambda second: "processes_running" in second.host,
    "memory": lambda second: "memory_used_bytes" in second.gpu,
    "power": lambda second: "power_watts" in second.gpu,
}


def _average(pairs: Iterable[tuple[float, float | None]]) -> float | None:
    """Return the mean of values over time, given as lengths and values; None when none is known."""
    total = weighted = 0.0
    for length, value in pairs:
        if value is not None:
            total += length
            weighted += length * value
    return weighted / total if total > 0 else None


def _shows_fill(second: SecondSummary) -> bool:
    return {"power_watts", "copies"} <= second.gpu.keys() and full_power_watts(second.reading) is not None


def program_names(processes: Iterable[ProcessReading]) -> dict[int, str]:
    """Return the process names by PID."""
    return {process.pid: process.identity.name for process in processes if process.identity.name}


def _since_the_clock_was_set(seconds: Sequence[SecondSummary]) -> Sequence[SecondSummary]:
    """Return the seconds since the wall clock was last set back; earlier ones would lie in their future."""
    for place in range(len(seconds) - 1, 0, -1):
        if seconds[place].start < seconds[place - 1].start:
            return [*seconds][place:]
    return seconds


def _is_mostly_present(is_there: Callable[[SecondSummary], bool], seconds: Sequence[SecondSummary]) -> bool:
    return bool(seconds) and 2 * sum(map(is_there, seconds)) >= len(seconds)


def _until_memory_released(job: Sequence[SecondSummary]) -> Sequence[SecondSummary]:
    """Cut off the end of a job whose processes cannot be listed: there it is idle and has released its memory."""
    held = [second.mean("memory_used_bytes") or 0.0 for second in job]
    least = 0.9 * median(held)
    last = len(job)
    while last and held[last - 1] < least and (job[last - 1].mean("duty") or 0.0) < _LEFT_DUTY:
        last -= 1
    return job if last == len(job) else job[: max(0, last - 1)]


def _is_working(second: SecondSummary, still: float) -> bool:
    used = max(
        (second.gpu[name].mean for name in ("duty", "gpu_utilization_ratio") if name in second.gpu),
        default=0.0,
    )
    return used >= still or (second.mean("copies") or 0.0) >= 0.3 * 2**30


def _find_steady_start(job: Sequence[SecondSummary]) -> int:
    """Return the index at which steady work begins: two seconds at nearly the later pace.

    Work that comes in rare bursts begins with the first burst.
    """
    pace = [second.mean("duty") or 0.0 for second in job]
    copied = [second.mean("copies") or 0.0 for second in job]
    for series, least in ((pace, _PACE), (copied, _COPIED)):
        latest = median(series[len(series) // 2 :])
        if median(series) > least:
            if series[0] >= _SETTLED * median(series):
                return 0  # already at work at the start
            return _first(series, (median(series[place:]) for place in range(len(series))))
        if latest > least:  # work has just begun
            return _first(series, repeat(latest))
    bursts = (place for place in range(len(job)) if pace[place] > 2 * _PACE or copied[place] > _COPIED)
    return next(bursts, 0)


def _first(series: Sequence[float], levels: Iterable[float]) -> int:
    for place, level in zip(range(len(series)), levels, strict=False):
        later = series[place : place + 2]
        if sum(later) / len(later) >= _SETTLED * level:
            is_dense = level >= _DENSE  # then a second without work does not count yet
            return place + int(is_dense and series[place] < _AT_WORK * level)
    return 0


def _find_work_start(busy: Sequence[float], stall_seconds: float) -> float:
    """Return when work began, ignoring a short burst at the very edge before a pause."""
    for earlier, later in pairwise(busy):
        if earlier - busy[0] >= stall_seconds / 2:
            break
        if later - earlier >= stall_seconds:
            return later
    return busy[0]


def _stalls(samples: Sequence[tuple[float, float]], t: Thresholds) -> list[Stall]:
    """Return the runs of idle samples with work before and after them."""
    found: list[Stall] = []
    idle_from: float | None = None
    worked = 0.0
    last: float | None = None
    for time, value in samples:
        step = 0.0 if last is None else time - last
        if value < t.stall_duty:
            if idle_from is None:
                idle_from = time - step
        elif idle_from is not None and value >= t.between_stalls_duty:
            if (last or time) - idle_from >= t.checkpoint_seconds:
                found.append(Stall(idle_from, last or time, worked))
                worked = 0.0
            idle_from = None
        if value >= t.between_stalls_duty:
            worked += step
        last = time
    return found
