"""Evidence that the rules use: pauses of a GPU, and its lost time, each second of which has one cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Literal, NamedTuple

from gpulse.diagnosis.estimates import link_bytes_per_second
from gpulse.diagnosis.job_window import JobWindow, Stall
from gpulse.diagnosis.second_summary import SecondSummary
from gpulse.diagnosis.thresholds import Thresholds
from gpulse.model.finding import Evidence, Severity
from gpulse.model.frame import Frame
from gpulse.model.intervals import shared_length

Cause = Literal["throttled", "swapping", "crowded", "storage", "copies", "workers", "main", "none"]


class Attribution(NamedTuple):
    """Lost time of a window, by cause."""

    lost: float
    """Fraction of the time in which no kernel ran, without stalls."""
    shares: dict[Cause, float]
    """Fraction of the lost time, by cause."""
    seconds: Sequence[SecondSummary]
    """The seconds that were attributed."""
    causes: Sequence[Cause]
    """Cause of each second."""

    def main(self, t: Thresholds) -> Cause | None:
        """Return the cause of at least half of the lost time: `none` when there is no such cause, None when too little is lost."""
        if self.lost < t.lost:
            return None
        cause = max(self.shares, key=lambda name: self.shares[name], default=None)
        return cause if cause is not None and self.shares[cause] >= t.explained else "none"

    def of(self, cause: Cause) -> list[SecondSummary]:
        """Return the seconds attributed to a cause."""
        return [second for second, name in zip(self.seconds, self.causes, strict=True) if name == cause]

    def onset(self, cause: Cause, t: Thresholds) -> float:
        """Return when lasting losses from this cause began."""
        held = [
            name == cause and (second.lost or 0.0) >= t.lost
            for name, second in zip(self.causes, self.seconds, strict=True)
        ]
        for place, holds in enumerate(held):
            if holds and all(held[place : place + 3]):
                return self.seconds[place].start
        return self.seconds[0].start


def attribute(window: JobWindow, t: Thresholds, without: Iterable[Stall] = ()) -> Attribution:
    """Attribute the lost time of every second to a cause."""
    stalls = list(without)
    kept = [
        second
        for second in window.steady
        if not stalls or not any(_is_within(second, stall) for stall in stalls)
    ]
    causes = [cause_of(second, window, t) for second in kept]
    lost: dict[Cause, float] = {}
    seen = 0.0
    for second, cause in zip(kept, causes, strict=True):
        if second.lost is not None:
            lost[cause] = lost.get(cause, 0.0) + second.lost * second.seconds
            seen += second.seconds
    total = sum(lost.values())
    return Attribution(
        lost=total / seen if seen > 0 else 0.0,
        shares={cause: part / total for cause, part in lost.items()} if total > 0 else {},
        seconds=kept,
        causes=causes,
    )


def cause_of(second: SecondSummary, window: JobWindow, t: Thresholds) -> Cause:
    """Return the first cause that holds; an earlier cause hides the later ones."""
    for name, holds in _CAUSE_CHECKS:
        if holds(second, window, t):
            return name
    return "none"


def _is_within(second: SecondSummary, stall: Stall) -> bool:
    return shared_length(second, stall) >= 0.1 * second.seconds


def _never_waits(second: SecondSummary, t: Thresholds) -> bool:
    """Whether the threads that feed the GPU ran all the time, so that they did not wait."""
    return (second.feeding_cores or 0.0) >= t.never_waits


def _throttled(second: SecondSummary, window: JobWindow, t: Thresholds) -> bool:  # noqa: ARG001  one signature for all
    return (second.throttled or 0.0) >= t.throttled_periods


def _swapping(second: SecondSummary, window: JobWindow, t: Thresholds) -> bool:  # noqa: ARG001
    swapped = second.host.get("swap_in_pages_per_second", 0.0) >= t.swapped_pages_per_second
    return swapped and second.host.get("pressure_memory_full_ratio", 0.0) >= t.memory_pressure


def _crowded(second: SecondSummary, window: JobWindow, t: Thresholds) -> bool:  # noqa: ARG001
    cpus = second.cpus
    if not cpus or _never_waits(second, t):
        return False
    if not _waits_for_cpu(second, t):
        return False
    runnable = second.host.get("processes_running", 0.0) / cpus
    if runnable >= t.runnable_per_core_always:
        return True
    own = sum(helper.cores for helper in second.workers)
    return runnable >= t.runnable_per_core and own < cpus / 2


def _waits_for_cpu(second: SecondSummary, t: Thresholds) -> bool:
    """Whether the job itself wants a CPU and gets none; other jobs also make the machine's CPU pressure high."""
    waited, pressure = second.run_wait, second.host.get("pressure_cpu_some_ratio")
    if waited is not None:
        return waited >= t.run_wait or (waited >= t.run_wait_some and (pressure or 0.0) >= t.cpu_pressure)
    # Where waiting is not counted, the length of the run queue shows it.
    return not _sleeps(second, t) and (pressure is None or pressure >= t.cpu_pressure)


def _sleeps(second: SecondSummary, t: Thresholds) -> bool:
    """Whether neither the processes on the GPU nor their workers use a CPU."""
    return second.cores is not None and second.cores + sum(w.cores for w in second.workers) < t.idle_cores


def _storage(second: SecondSummary, window: JobWindow, t: Thresholds) -> bool:  # noqa: ARG001
    if _never_waits(second, t):
        return False
    waits = (second.blocked or 0.0) >= t.blocked
    pressed = second.host.get("pressure_io_some_ratio", 0.0) >= t.io_pressure
    job = second.read_bytes
    from_nfs = second.nfs.get("nfs_reads_in_flight", 0.0) >= t.blocked
    if job is None:
        from_disk = second.disk.get("reads_per_second", 0.0) >= t.reads_per_second
    else:
        from_disk = job >= t.job_read_bytes_per_second
    return (waits and (from_disk or from_nfs)) or (pressed and (job or 0.0) >= t.read_bytes_per_second)


def _copies(second: SecondSummary, window: JobWindow, t: Thresholds) -> bool:  # noqa: ARG001
    rate, lost = second.mean("copies") or 0.0, second.lost or 0.0
    if rate < t.copy_bytes_per_second:
        return False
    # NVML's utilization counts copies, and GPM's graphics metric or the estimate without GPM does not: the
    # difference is time in which there was nothing but copies.
    measured = "graphics_active_ratio" if "sm_active_ratio" in second.gpu else "duty"
    used, computed = second.mean("gpu_utilization_ratio"), second.mean(measured)
    if used is not None and computed is not None and used - computed >= t.explained * lost:
        return True
    if (second.mean("sm_active_ratio") or 0.0) >= t.copy_sm:
        return False
    link = link_bytes_per_second(second.reading)
    # At the speed of pageable memory these copies would have taken at least half of the lost time.
    return link is None or rate / (t.pageable_share * link) >= t.explained * lost


def _workers(second: SecondSummary, window: JobWindow, t: Thresholds) -> bool:  # noqa: ARG001
    active = [helper.cores for helper in second.workers if helper.cores >= t.active_worker]
    if not active or (second.thread_cores or 0.0) >= t.never_waits:
        return False
    saturated = sum(cores >= t.saturated_worker for cores in active)
    if saturated >= t.saturated_share * len(active):
        return True
    return second.cpus is not None and sum(active) >= t.cores_used * second.cpus


def _main(second: SecondSummary, window: JobWindow, t: Thresholds) -> bool:  # noqa: ARG001
    """Whether the job's own threads ran for most of the time in which the GPU did not.

    A thread that waits for the GPU spins, so a busy thread alone proves nothing: it must have been idle for at most
    half of the time in which the GPU was idle.
    """
    lost = second.lost or 0.0
    return (second.feeding_cores or 0.0) >= max(t.busy_thread_cores, 1.0 - t.explained * lost)


_CAUSE_CHECKS: tuple[tuple[Cause, Callable[[SecondSummary, JobWindow, Thresholds], bool]], ...] = (
    ("throttled", _throttled),
    ("swapping", _swapping),
    ("crowded", _crowded),
    ("storage", _storage),
    ("copies", _copies),
    ("workers", _workers),
    ("main", _main),
)


def saturated_workers(window: JobWindow, seconds: Sequence[SecondSummary], t: Thresholds) -> float | None:
    """Return the average number of workers that used most of a CPU."""
    counts = [sum(helper.cores >= t.saturated_worker for helper in second.workers) for second in seconds]
    return sum(counts) / len(counts) if counts and "processes" in window.signals else None


def worker_count(seconds: Sequence[SecondSummary]) -> float:
    """Return the average number of workers."""
    return sum(len(second.workers) for second in seconds) / len(seconds) if seconds else 0.0


def find_ruled_out_causes(
    attribution: Attribution, window: JobWindow, t: Thresholds
) -> dict[Cause, Evidence]:
    """Return the causes that were ruled out, each with the measurement against it."""
    seconds = attribution.seconds
    measures: tuple[tuple[Cause, str, str, float | None, float], ...] = (
        ("throttled", "cpu_throttled_ratio", "mean", window.cpu("throttled", seconds), t.throttled_periods),
        (
            "swapping",
            "swap_in_pages_per_second",
            "mean",
            window.host("swap_in_pages_per_second", seconds),
            t.swapped_pages_per_second,
        ),
        ("crowded", "runnable_per_cpu", "mean", runnable(window, seconds), t.runnable_per_core),
        ("storage", "processes_waiting_for_disks", "mean", window.cpu("blocked", seconds), t.blocked),
        ("copies", "pcie_bytes_per_second", "mean", window.mean("copies", seconds), t.copy_bytes_per_second),
        (
            "workers",
            "saturated_workers",
            "mean",
            saturated_workers(window, seconds, t),
            max(1.0, t.saturated_share * worker_count(seconds)),
        ),
        (
            "main",
            "trainer_cores",
            "mean",
            window.cpu("cores", seconds),
            max(t.busy_thread_cores, 1.0 - t.explained * attribution.lost),
        ),
    )
    return {
        cause: Evidence(signal, statistic, value, "<", threshold)
        for cause, signal, statistic, value, threshold in measures
        if value is not None and value < threshold
    }


def runnable(window: JobWindow, seconds: Sequence[SecondSummary]) -> float | None:
    """Return the number of runnable threads per CPU available to the job."""
    threads, cpus = window.host("processes_running", seconds), window.cpus
    return None if threads is None or not cpus else threads / cpus


_STARVING_CAUSES: frozenset[Cause] = frozenset({"throttled", "swapping", "crowded", "storage", "workers"})
"""Causes that starve a GPU; a pause with one of these causes is not a pause of the program itself."""


class NodeEvidence(NamedTuple):
    """The whole machine, for rules that compare GPUs or concern none of them."""

    gpus: tuple[GpuEvidence, ...]
    """The GPUs with enough data."""
    frame: Frame
    """The last one."""
    t: Thresholds


class Pause(NamedTuple):
    """A stall, and the bytes that were written during it."""

    stall: Stall
    written_bytes: float | None
    """Written by the processes on the GPU."""


class GpuEvidence:
    """The window of one GPU's job, the thresholds, and values that several rules use."""

    def __init__(self, window: JobWindow, thresholds: Thresholds, now: float) -> None:
        self.window = window
        self.t = thresholds
        self.now = now
        """Time of the diagnosis in epoch seconds."""
        self.siblings: list[GpuEvidence] = []
        """Other GPUs that the same processes use."""

    @cached_property
    def pauses(self) -> list[Pause]:
        """Pauses that the program itself causes: long ones, checkpoints, and shorter ones in a rhythm."""
        found = [
            Pause(stall, _written(inside, stall))
            for stall in self.window.stalls
            if (inside := _overlapping(self.window.steady, stall)) and not self._is_starved(inside, stall)
        ]
        candidates = [pause for pause in found if self._may_be_pause(pause)]
        if _is_rhythm([pause.stall for pause in candidates], self.t):
            return candidates
        return [pause for pause in candidates if self._is_checkpoint(pause) or self._is_long(pause)]

    def _may_be_pause(self, pause: Pause) -> bool:
        stall, t = pause.stall, self.t
        if self._is_checkpoint(pause):
            return stall.worked >= t.checkpoint_seconds / 2
        return stall.worked >= t.stall_seconds / 2 and self._power_fell(
            _overlapping(self.window.steady, stall)
        )

    def _is_checkpoint(self, pause: Pause) -> bool:
        return (pause.written_bytes or 0.0) >= self.t.checkpoint_bytes

    def _is_long(self, pause: Pause) -> bool:
        return pause.stall.seconds >= self.t.stall_seconds

    @cached_property
    def checkpoints(self) -> list[Pause]:
        """Pauses in which the program wrote enough for a checkpoint."""
        return [pause for pause in self.pauses if self._is_checkpoint(pause)]

    @cached_property
    def reports_pauses(self) -> bool:
        """Whether pauses are a separate finding, so that their time must not be explained twice."""
        lost = sum(pause.stall.seconds for pause in self.pauses)
        written = len(self.checkpoints)
        return (
            "processes" in self.window.signals
            and max(2 * written, len(self.pauses) - written) >= 2
            and lost >= self.t.stall_share * self.window.length
        )

    @cached_property
    def attribution(self) -> Attribution:
        """Lost time between the pauses, by cause."""
        apart = [pause.stall for pause in self.pauses] if self.reports_pauses else []
        # The frames next to a pause lie partly in it.
        apart = [Stall(stall.start - self._step, stall.end + self._step) for stall in apart]
        edges = self.window.edges if apart else [*self._ending, *self._written_edges]
        return attribute(self.window, self.t, [*apart, *edges])

    @cached_property
    def _step(self) -> float:
        """Time between two duty samples."""
        return self.window.length / max(1, len(self.window.duties))

    @property
    def _written_edges(self) -> list[Stall]:
        """Checkpoints of which only the beginning or the end was recorded."""
        written = [
            (edge, _written(_overlapping(self.window.steady, edge), edge)) for edge in self.window.edges
        ]
        return [edge for edge, size in written if (size or 0.0) >= self.t.checkpoint_bytes]

    @property
    def _ending(self) -> list[Stall]:
        """The idle end of a busy job: it pauses, or is about to end."""
        busy = (self.window.duty or 0.0) >= self.t.between_stalls_duty
        return [
            edge
            for edge in self.window.edges
            if busy and edge.end >= self.window.end and edge.seconds <= self.t.ending_seconds
        ]

    @cached_property
    def cause(self) -> Cause | None:
        """The main cause of the lost time; None when too little is lost."""
        if "duty" not in self.window.signals:
            return None
        if self.reports_pauses and sum(s.seconds for s in self.attribution.seconds) < self.t.min_seconds / 2:
            return None  # too little is left between the pauses
        cause = self.attribution.main(self.t)
        return "none" if cause == "main" and self.takes_turns else cause

    @cached_property
    def takes_turns(self) -> bool:
        """Whether the program works on one of its GPUs at a time, so that its thread is busy for the others."""
        duties = [gpu.window.duty or 0.0 for gpu in (self, *self.siblings)]
        return len(duties) > 1 and abs(sum(duties) - 1.0) <= self.t.turns_tolerance

    @property
    def lost(self) -> float:
        """Fraction of the time between pauses in which no kernel ran."""
        return self.attribution.lost

    @cached_property
    def is_busy(self) -> bool:
        """Whether kernels ran nearly all the time."""
        duty = self.window.duty
        return duty is not None and duty >= self.t.busy

    @cached_property
    def fill(self) -> float | None:
        """Fraction of the SMs in use while kernels ran."""
        filled, duty = self.window.mean("sm_active_ratio"), self.window.duty
        return None if filled is None or not duty else min(1.0, filled / duty)

    @cached_property
    def power(self) -> float | None:
        """Power draw relative to the limit."""
        drawn, limit = self.window.mean("power_watts"), self.window.fact("power_limit_watts")
        return None if drawn is None or not limit else drawn / limit

    @cached_property
    def is_unclear(self) -> bool:
        """Whether the readings do not show that the GPU is well used."""
        if self.window.duty is None or 1.0 - self.window.duty >= self.t.lost:
            return True
        return self.is_busy_at_low_power

    @cached_property
    def is_busy_at_low_power(self) -> bool:
        """Whether the GPU reads as busy but draws little power, and neither GPM nor an estimate explains it."""
        if "gpm" in self.window.signals or not self.is_busy or (self.power or 1.0) >= self.t.low_power:
            return False
        fill, dram = self.window.estimated_fill, self.window.estimated_dram
        least = self.t.estimated_fill
        if fill is not None and (fill.ratio >= least or fill.is_surely_below(least)):
            return False
        return dram is None or dram < self.t.thin_dram

    def severity(self, lost: float) -> Severity:
        """Return the severity of losing this fraction of a GPU's time."""
        return "high" if lost >= self.t.lost_high else "medium" if lost >= self.t.lost_medium else "low"

    def confidence(self, explained: float) -> float:
        """Return the confidence in a cause that explains this fraction of the lost time, given the available signals."""
        sure = 0.9 if explained >= self.t.explained_surely else 0.7
        if "gpm" not in self.window.signals:
            sure -= 0.2
        if self.window.length < 15.0:
            sure -= 0.1
        if not self.window.signals >= {"pressure", "io"}:
            sure -= 0.1
        return round(max(0.1, sure), 2)

    @property
    def over(self) -> str:
        """Name of the statistic of lost time: whether pauses are excluded."""
        is_whole = len(self.attribution.seconds) == len(self.window.steady)
        return "mean" if is_whole else "mean between pauses"

    def lost_evidence(self) -> Evidence:
        """Return the lost time as evidence."""
        return Evidence("lost_ratio", self.over, self.lost, ">=", self.t.lost)

    def explained_evidence(self, cause: Cause) -> Evidence:
        """Return the fraction of the lost time that a cause explains, as evidence."""
        share = self.attribution.shares.get(cause, 0.0)
        return Evidence(f"lost_time_{cause}_ratio", "share", share, ">=", self.t.explained)

    def ruled_out(self, *but: Cause) -> dict[Cause, Evidence]:
        """Return the causes that were ruled out, each with the evidence against it."""
        measures = find_ruled_out_causes(self.attribution, self.window, self.t)
        return {cause: item for cause, item in measures.items() if cause not in but}

    @cached_property
    def _power_at_work(self) -> float | None:
        """Power draw between the stalls; None unless it is clearly above an idle GPU's."""
        apart = [
            second
            for second in self.window.steady
            if not any(_overlapping((second,), stall) for stall in self.window.stalls)
        ]
        drawn, limit = self.window.mean("power_watts", apart), self.window.fact("power_limit_watts")
        return drawn if drawn is not None and limit and drawn >= self.t.clear_power * limit else None

    def _power_fell(self, seconds: list[SecondSummary]) -> bool:
        """Whether the power draw fell in a stall.

        When the sampling interval is close to the step time, many samples in a row can find the GPU idle although
        it works; then the power does not fall.
        """
        drawn = [value for second in seconds if (value := second.mean("power_watts")) is not None]
        if self._power_at_work is None or not drawn:
            return True
        return min(drawn) < self.t.stall_power * self._power_at_work

    def _is_starved(self, seconds: list[SecondSummary], stall: Stall) -> bool:
        starved = 0.0
        for second in seconds:
            cause = cause_of(second, self.window, self.t)
            inbound = (second.mean("pcie_rx_bytes_per_second") or 0.0) > (
                second.mean("pcie_tx_bytes_per_second") or 0.0
            )
            if cause in _STARVING_CAUSES or (cause == "copies" and inbound):
                starved += shared_length(second, stall)
        return starved >= 0.5 * stall.seconds


def _is_rhythm(stalls: Sequence[Stall], t: Thresholds) -> bool:
    """Whether stalls recur with nearly equal length and spacing."""
    if len(stalls) < t.rhythmic_pauses:
        return False
    lengths = [stall.seconds for stall in stalls]
    spaces = [later.start - earlier.start for earlier, later in pairwise(stalls)]
    return all(pstdev(values) < t.regular_spacing * fmean(values) for values in (lengths, spaces))


def _overlapping(seconds: Sequence[SecondSummary], stall: Stall) -> list[SecondSummary]:
    return [second for second in seconds if shared_length(second, stall) > 0]


def _written(seconds: Sequence[SecondSummary], stall: Stall) -> float | None:
    """Return the bytes written during a stall, counting only the parts of seconds that lie in it."""
    known = [
        second.written_bytes * shared_length(second, stall)
        for second in seconds
        if second.written_bytes is not None
    ]
    return sum(known) if known else None
