"""One GPU over a stretch of time: which part of it counts, and what it adds up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise, repeat
from statistics import median
from typing import NamedTuple

from gpulse.diagnosis.seconds import Second, Signal
from gpulse.diagnosis.thresholds import Thresholds
from gpulse.model.device import Device
from gpulse.model.process import ProcessReading
from gpulse.model.rates import ProcessKey

_YOUNG_SECONDS = 60.0
"""A job older than this at the start of a stretch has left its start-up behind."""
_BYSTANDER = 0.10
"""A process on the GPU that uses less than this of what the busiest one uses has nothing to do with the job."""
_SOME_CPU_SECONDS = 0.5
_AT_WORK_CORES = 0.3
_SETTLED = 0.8
_AT_WORK = 0.25
_DENSE = 0.3
_LEFT_DUTY = 0.05
_PACE = 0.005
_COPIED = 0.3 * 2**30
"""A second with less than these has no work in it."""


class Stall(NamedTuple):
    """A pause of the GPU between two stretches of work."""

    start: float
    end: float
    worked: float = 0.0
    """Seconds of work since the one before."""

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end - self.start


class Stretch:
    """One GPU, the job on it, and the seconds in which that job was at work.

    What came before the job had started, after it had ended, or belongs to another job is left out.
    """

    def __init__(self, seconds: Sequence[Second], thresholds: Thresholds, names: dict[int, str]) -> None:
        """Take the seconds of one GPU in order; `names` are the programs of the processes by pid."""
        self._all = _since_the_clock_was_set(seconds)
        self._thresholds = thresholds
        self.names = names
        self.device: Device = seconds[-1].reading.device

    @property
    def seconds_seen(self) -> Sequence[Second]:
        """Every second, also those outside the job."""
        return self._all

    @cached_property
    def job(self) -> Sequence[Second]:
        """The seconds of the job that was seen the longest; empty when nothing was on the GPU.

        A job goes on while at least one of its processes does. The second in which it came is half another
        job's, or nobody's, and left out.
        """
        runs: list[list[Second]] = []
        last: Second | None = None
        for second in self._all:
            if self._is_empty(second):
                continue
            if last is not None and self._is_same_job(last, second):
                runs[-1].append(second)
            else:
                runs.append([second] if second is self._all[0] else [])
            last = second
        longest = max(filter(None, runs), key=lambda run: run[-1].end - run[0].start, default=[])
        if longest and longest[-1].end - longest[0].start < self._thresholds.shortest_seconds:
            alive = [second for second in self._all if not self._is_empty(second)]
            if (self.mean("duty", alive) or 0.0) >= self._thresholds.between_stalls_duty:
                return alive  # many short processes that keep the GPU busy together
        return longest

    @cached_property
    def _actors(self) -> frozenset[ProcessKey]:
        """The processes that matter: without those that only sit on the GPU beside one that works."""
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
        """Whether the GPU works and its list of processes is empty, as it is in many containers."""
        if any(second.holders is None or second.holders for second in self._all):
            return False
        return any(_works(second, self._thresholds.seldom) for second in self._all)

    def _present(self, second: Second) -> frozenset[ProcessKey] | None:
        return None if second.holders is None or self.is_unlisted else second.holders & self._actors

    def _is_empty(self, second: Second) -> bool:
        present = self._present(second)
        return present is not None and not present

    def _is_same_job(self, before: Second, after: Second) -> bool:
        old, new = self._present(before), self._present(after)
        return old is None or new is None or bool(old & new)

    @cached_property
    def started(self) -> float | None:
        """When the job's oldest process started."""
        present = self._present(self.job[0]) or ()
        return min((start for _, start in present if start is not None), default=None)

    @cached_property
    def steady(self) -> Sequence[Second]:
        """The job's seconds without its start-up."""
        job = self.job
        if len(job) > 2 and job[-1].end < self._all[-1].end:
            job = job[:-1]  # it ended there, and its last second is half a second of leaving
        elif job and job[-1].holders is None:
            job = _while_held(job)
        if not job or not self._was_young:
            return job
        return job[_settled(job) :]

    @cached_property
    def _was_young(self) -> bool:
        if self.started is None or self.job[0] is not self._all[0]:
            return True  # it came while somebody watched
        return self.started > self.job[0].start - _YOUNG_SECONDS

    @property
    def start(self) -> float:
        """Epoch seconds at which the steady part begins."""
        return self.steady[0].start

    @property
    def end(self) -> float:
        """Epoch seconds at which it ends."""
        return self.steady[-1].end

    @cached_property
    def length(self) -> float:
        """Seconds of the steady part that were seen."""
        return sum(second.seconds for second in self.steady)

    @cached_property
    def frames(self) -> int:
        """Frames of the steady part."""
        return sum(second.frames for second in self.steady)

    @cached_property
    def is_enough(self) -> bool:
        """Whether there is enough to judge."""
        t = self._thresholds
        if not self.steady or self.length < t.shortest_seconds - 0.5 or self.frames < t.fewest_frames:
            return False
        return self.length >= t.coverage * (self.end - self.start)

    @cached_property
    def is_starting(self) -> bool:
        """Whether the job works on the host, or loads what it needs, and has not computed on the GPU."""
        if not self.job or self.has_computed:
            return False
        if self.has_worked and not self.is_loading:
            return False
        cores = self.job_cores(self.job)
        return cores is not None and cores >= _AT_WORK_CORES

    @cached_property
    def has_computed(self) -> bool:
        """Whether kernels ran once the job had settled."""
        samples = [value for second in self.steady for _, value in second.duties]
        return sum(value >= self._thresholds.still for value in samples) > 0.01 * len(samples)

    @cached_property
    def is_loading(self) -> bool:
        """Whether what is copied to the GPU stays there: weights on their way in."""
        held = [value for s in self.job if (value := s.mean("memory_used_bytes")) is not None]
        rates = [(s.seconds, s.mean("pcie_rx_bytes_per_second") or 0.0) for s in self.job]
        copied = sum(length * rate for length, rate in rates)
        if len(held) < 2 or copied < 2**30:
            return False
        return 0.5 <= (held[-1] - held[0]) / copied <= 1.5

    @cached_property
    def still_end(self) -> Sequence[Second]:
        """The seconds at the end in which the GPU did nothing any more, when they are enough to judge."""
        still = self._thresholds.still
        first = len(self.steady)
        while first and not _works(self.steady[first - 1], still):
            first -= 1
        tail = self.steady[first:]
        length = sum(second.seconds for second in tail)
        return tail if length >= self._thresholds.shortest_seconds - 0.5 else ()

    @cached_property
    def has_worked(self) -> bool:
        """Whether the GPU computed or copied anything for the job once it had settled."""
        return self.has_computed or any(_works(second, self._thresholds.still) for second in self.steady)

    def mean(self, name: str, seconds: Iterable[Second] | None = None) -> float | None:
        """The mean of one reading of the GPU over all its samples."""
        sums = [
            second.gpu[name] for second in (self.steady if seconds is None else seconds) if name in second.gpu
        ]
        samples = sum(entry.count for entry in sums)
        return sum(entry.total for entry in sums) / samples if samples else None

    def cpu(self, name: str, seconds: Iterable[Second] | None = None) -> float | None:
        """The mean over time of something else that a second knows: `cores`, `blocked`, `read_bytes`."""
        pairs = [
            (second.seconds, getattr(second, name))
            for second in (self.steady if seconds is None else seconds)
        ]
        known = [(length, value) for length, value in pairs if value is not None]
        total = sum(length for length, _ in known)
        return sum(length * value for length, value in known) / total if total > 0 else None

    def job_cores(self, seconds: Sequence[Second]) -> float | None:
        """CPUs' worth of time of the processes on the GPU and their helpers together."""
        cores = self.cpu("cores", seconds)
        if cores is None:
            return None
        length = sum(second.seconds for second in seconds)
        return cores + sum(s.seconds * sum(helper.cores for helper in s.workers) for s in seconds) / length

    def host(self, name: str, seconds: Iterable[Second] | None = None) -> float | None:
        """The mean over time of a reading or rate of the host."""
        pairs = [(s.seconds, s.host.get(name)) for s in (self.steady if seconds is None else seconds)]
        known = [(length, value) for length, value in pairs if value is not None]
        total = sum(length for length, _ in known)
        return sum(length * value for length, value in known) / total if total > 0 else None

    def fact(self, name: str) -> float | None:
        """A fact of the GPU, or a setting that held at the end."""
        value = self._all[-1].reading.get(name)
        return None if value is None else float(value)

    @cached_property
    def duty(self) -> float | None:
        """Share of the steady part in which kernels ran.

        A mean over time: on a crowded machine fewer frames come in a second, just when the GPU waits.
        """
        known = [(s.seconds, value) for s in self.steady if (value := s.mean("duty")) is not None]
        total = sum(length for length, _ in known)
        return sum(length * value for length, value in known) / total if total > 0 else None

    @cached_property
    def cpus(self) -> float | None:
        """CPUs that the job may use."""
        return next((second.cpus for second in reversed(self.steady) if second.cpus is not None), None)

    @cached_property
    def pids(self) -> tuple[int, ...]:
        """The processes on the GPU for at least half of the steady part, in order."""
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
        """Whether the job had helpers for most of the time."""
        return 2 * sum(bool(second.workers) for second in self.steady) >= len(self.steady)

    @cached_property
    def sees(self) -> frozenset[Signal]:
        """Which kinds of signals were there for most of the steady part."""
        return frozenset(kind for kind, is_there in _KINDS.items() if _mostly(is_there, self.steady))

    @cached_property
    def duties(self) -> list[tuple[float, float]]:
        """Times and values of all duty samples of the steady part."""
        return [sample for second in self.steady for sample in second.duties]

    @cached_property
    def stalls(self) -> list[Stall]:
        """The pauses between stretches of work."""
        return _stalls(self.duties, self._thresholds)

    @cached_property
    def edges(self) -> list[Stall]:
        """Pauses that had begun before the stretch, or go on after it."""
        samples, t = self.duties, self._thresholds
        busy = [time for time, value in samples if value >= t.stall_duty]
        if not busy:
            return []
        backwards = [-time for time in reversed(busy)]
        found = (
            Stall(samples[0][0], _begun(busy, t.stall_seconds)),
            Stall(-_begun(backwards, t.stall_seconds), samples[-1][0]),
        )
        return [stall for stall in found if stall.seconds >= t.stall_seconds / 2]


_KINDS: dict[Signal, Callable[[Second], bool]] = {
    "gpm": lambda second: "sm_active_ratio" in second.gpu,
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


def programs(processes: Iterable[ProcessReading]) -> dict[int, str]:
    """The names of processes by pid."""
    return {process.pid: process.identity.name for process in processes if process.identity.name}


def _since_the_clock_was_set(seconds: Sequence[Second]) -> Sequence[Second]:
    """The seconds after the wall clock went back: those before them would lie in their future."""
    for place in range(len(seconds) - 1, 0, -1):
        if seconds[place].start < seconds[place - 1].start:
            return [*seconds][place:]
    return seconds


def _mostly(is_there: Callable[[Second], bool], seconds: Sequence[Second]) -> bool:
    return bool(seconds) and 2 * sum(is_there(second) for second in seconds) >= len(seconds)


def _while_held(job: Sequence[Second]) -> Sequence[Second]:
    """Without the end of a job, where nobody can say which processes are there: idle, and its memory given back."""
    held = [second.mean("memory_used_bytes") or 0.0 for second in job]
    least = 0.9 * median(held)
    last = len(job)
    while last and held[last - 1] < least and (job[last - 1].mean("duty") or 0.0) < _LEFT_DUTY:
        last -= 1
    return job if last == len(job) else job[: max(0, last - 1)]


def _works(second: Second, still: float) -> bool:
    used = max(
        (second.gpu[name].mean for name in ("duty", "gpu_utilization_ratio") if name in second.gpu),
        default=0.0,
    )
    return used >= still or (second.mean("copies") or 0.0) >= 0.3 * 2**30


def _settled(job: Sequence[Second]) -> int:
    """Where the work has begun: two seconds at nearly the pace that it has later.

    Work that comes in rare bursts has begun with the first of them.
    """
    pace = [second.mean("duty") or 0.0 for second in job]
    copied = [second.mean("copies") or 0.0 for second in job]
    for series, least in ((pace, _PACE), (copied, _COPIED)):
        latest = median(series[len(series) // 2 :])
        if median(series) > least:
            if series[0] >= _SETTLED * median(series):
                return 0  # it was at work already
            return _first(series, (median(series[place:]) for place in range(len(series))))
        if latest > least:  # it has only just begun
            return _first(series, repeat(latest))
    bursts = (place for place in range(len(job)) if pace[place] > 2 * _PACE or copied[place] > _COPIED)
    return next(bursts, 0)


def _first(series: Sequence[float], levels: Iterable[float]) -> int:
    for place, level in zip(range(len(series)), levels, strict=False):
        later = series[place : place + 2]
        if sum(later) / len(later) >= _SETTLED * level:
            is_dense = level >= _DENSE  # then a second without work is not yet part of it
            return place + int(is_dense and series[place] < _AT_WORK * level)
    return 0


def _begun(busy: Sequence[float], stall_seconds: float) -> float:
    """When work began, a moment of it at the very edge before a pause left out."""
    for earlier, later in pairwise(busy):
        if earlier - busy[0] >= stall_seconds / 2:
            break
        if later - earlier >= stall_seconds:
            return later
    return busy[0]


def _stalls(samples: Sequence[tuple[float, float]], t: Thresholds) -> list[Stall]:
    """Runs of idle samples with work before and after them."""
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
