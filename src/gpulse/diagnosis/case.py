"""A GPU's stretch prepared for the rules: its pauses, and its lost time put down to causes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from gpulse.diagnosis.attribution import Attribution, Cause, attribute, cause_of, ruled_out
from gpulse.diagnosis.seconds import Second
from gpulse.diagnosis.signals import told_measure
from gpulse.diagnosis.stretch import Stall, Stretch
from gpulse.diagnosis.thresholds import Thresholds
from gpulse.model.finding import Evidence, Severity
from gpulse.model.frame import Frame

_FED_FROM_OUTSIDE: frozenset[Cause] = frozenset({"throttled", "swapping", "crowded", "storage", "workers"})
"""Causes that starve a GPU between its steps; a pause because of one of them is no pause of the program's own."""

CAUSE_FINDINGS: dict[Cause, str] = {
    "throttled": "cgroup_cpu_throttled",
    "swapping": "swap_thrash",
    "crowded": "cpu_oversubscribed",
    "storage": "input_io_bound",
    "copies": "pcie_copy_bound",
    "workers": "input_cpu_bound, input_too_few_workers",
    "main": "host_single_thread, launch_bound",
}


class Node(NamedTuple):
    """The machine as a whole, for what shows only when its GPUs are compared or concerns none of them."""

    cases: tuple[Case, ...]
    """Of the GPUs that were seen for long enough."""
    frame: Frame
    """The last one."""
    t: Thresholds


class Pause(NamedTuple):
    """A stall with what was moved meanwhile."""

    stall: Stall
    written_bytes: float | None
    """By the processes on the GPU."""


class Case:
    """One GPU's stretch, the thresholds, and what several rules want to know about it."""

    def __init__(self, stretch: Stretch, thresholds: Thresholds, now: float) -> None:
        self.stretch = stretch
        self.t = thresholds
        self.now = now
        """Epoch seconds at which the case is judged."""
        self.siblings: list[Case] = []
        """Other GPUs that the same processes are on."""

    @cached_property
    def pauses(self) -> list[Pause]:
        """The pauses that the program takes by itself."""
        found = []
        for stall in self.stretch.stalls:
            inside = _overlapping(self.stretch.steady, stall)
            written = _written(inside, stall)
            if inside and self._is_pause(stall, inside, written):
                found.append(Pause(stall, written))
        return found

    def _is_pause(self, stall: Stall, inside: list[Second], written: float | None) -> bool:
        t = self.t
        if self._is_fed_from_outside(inside, stall):
            return False
        if (written or 0.0) >= t.checkpoint_bytes:
            return stall.worked >= t.checkpoint_seconds / 2
        return (
            stall.seconds >= t.stall_seconds and stall.worked >= t.stall_seconds / 2 and self._is_felt(inside)
        )

    @cached_property
    def checkpoints(self) -> list[Pause]:
        """The pauses in which the program wrote as much as a checkpoint holds."""
        return [pause for pause in self.pauses if (pause.written_bytes or 0.0) >= self.t.checkpoint_bytes]

    @cached_property
    def names_pauses(self) -> bool:
        """Whether pauses are a finding of their own, so that their time is not explained twice."""
        lost = sum(pause.stall.seconds for pause in self.pauses)
        written = len(self.checkpoints)
        return (
            "processes" in self.stretch.sees
            and max(2 * written, len(self.pauses) - written) >= 2
            and lost >= self.t.stall_share * self.stretch.length
        )

    @cached_property
    def attribution(self) -> Attribution:
        """The lost time between the pauses, by cause."""
        apart = [pause.stall for pause in self.pauses] if self.names_pauses else []
        # The frames next to a pause lie half in it.
        apart = [Stall(stall.start - self._step, stall.end + self._step) for stall in apart]
        edges = self.stretch.edges if apart else [*self._leaving, *self._written_edges]
        return attribute(self.stretch, self.t, [*apart, *edges])

    @cached_property
    def _step(self) -> float:
        """Time from one duty sample to the next."""
        return self.stretch.length / max(1, len(self.stretch.duties))

    @property
    def _written_edges(self) -> list[Stall]:
        """Checkpoints of which only the beginning or the end was seen."""
        written = [
            (edge, _written(_overlapping(self.stretch.steady, edge), edge)) for edge in self.stretch.edges
        ]
        return [edge for edge, size in written if (size or 0.0) >= self.t.checkpoint_bytes]

    @property
    def _leaving(self) -> list[Stall]:
        """The last moments of a busy job in which it did nothing more: it pauses, or ends."""
        busy = (self.stretch.duty or 0.0) >= self.t.between_stalls_duty
        return [
            edge
            for edge in self.stretch.edges
            if busy and edge.end >= self.stretch.end and edge.seconds <= self.t.leaving_seconds
        ]

    @cached_property
    def cause(self) -> Cause | None:
        """What most of the lost time goes to; None when too little is lost."""
        if "duty" not in self.stretch.sees:
            return None
        cause = self.attribution.main(self.t)
        return "none" if cause == "main" and self.takes_turns else cause

    @cached_property
    def takes_turns(self) -> bool:
        """Whether the program works on one of its GPUs at a time: then its thread is busy for the others."""
        duties = [case.stretch.duty or 0.0 for case in (self, *self.siblings)]
        return len(duties) > 1 and abs(sum(duties) - 1.0) <= self.t.turns

    @property
    def lost(self) -> float:
        """Share of the time between pauses in which no kernel ran."""
        return self.attribution.lost

    @cached_property
    def is_busy(self) -> bool:
        """Whether kernels ran nearly all the time."""
        duty = self.stretch.duty
        return duty is not None and duty >= self.t.busy

    @cached_property
    def fill(self) -> float | None:
        """Share of the multiprocessors in use while kernels ran."""
        filled, duty = self.stretch.mean("sm_active_ratio"), self.stretch.duty
        return None if filled is None or not duty else min(1.0, filled / duty)

    @cached_property
    def power(self) -> float | None:
        """Power draw over the limit."""
        drawn, limit = self.stretch.mean("power_watts"), self.stretch.fact("power_limit_watts")
        return None if drawn is None or not limit else drawn / limit

    @cached_property
    def is_unclear(self) -> bool:
        """Whether nobody could say from what was seen that the GPU is well used."""
        if self.stretch.duty is None or 1.0 - self.stretch.duty >= self.t.lost:
            return True
        return self.is_hollow

    @cached_property
    def is_hollow(self) -> bool:
        """Whether it reads busy, draws little power, and GPM does not tell why."""
        return "gpm" not in self.stretch.sees and self.is_busy and (self.power or 1.0) < self.t.hollow_power

    def severity(self, lost: float) -> Severity:
        """How bad it is to lose so much of a GPU's time."""
        return "high" if lost >= self.t.lost_high else "medium" if lost >= self.t.lost_medium else "low"

    def confidence(self, explained: float) -> float:
        """How sure a cause is that explains this share of the loss, with what could be seen."""
        sure = 0.9 if explained >= self.t.explained_surely else 0.7
        if "gpm" not in self.stretch.sees:
            sure -= 0.2
        if self.stretch.length < 15.0:
            sure -= 0.1
        if not self.stretch.sees >= {"pressure", "io"}:
            sure -= 0.1
        return round(max(0.1, sure), 2)

    @property
    def over(self) -> str:
        """What the lost time and its causes are a mean of."""
        is_whole = len(self.attribution.seconds) == len(self.stretch.steady)
        return "mean" if is_whole else "mean between pauses"

    def lost_evidence(self) -> Evidence:
        """The lost time against what is normal."""
        return Evidence("lost_ratio", self.over, self.lost, ">=", self.t.lost)

    def explained_evidence(self, cause: Cause) -> Evidence:
        """How much of the lost time a cause explains."""
        share = self.attribution.shares.get(cause, 0.0)
        return Evidence(f"lost_time_{cause}_ratio", "share", share, ">=", self.t.explained)

    def ruled_out(self, *but: Cause) -> tuple[str, ...]:
        """What else takes a GPU's time, and does not here, with the measure that says so."""
        measures = ruled_out(self.attribution, self.stretch, self.t)
        return tuple(
            f"{CAUSE_FINDINGS[cause]}: {told_measure(item)}"
            for cause, item in measures.items()
            if cause not in but
        )

    @cached_property
    def _power_at_work(self) -> float | None:
        """Power between the stalls, where it is enough above an idle GPU's to tell one from the other."""
        apart = [
            second
            for second in self.stretch.steady
            if not any(_overlapping((second,), stall) for stall in self.stretch.stalls)
        ]
        drawn, limit = self.stretch.mean("power_watts", apart), self.stretch.fact("power_limit_watts")
        return drawn if drawn is not None and limit and drawn >= self.t.telling_power * limit else None

    def _is_felt(self, seconds: list[Second]) -> bool:
        """Whether the power fell in a stall.

        Samples that are taken a little faster or slower than the steps come find the GPU idle many times
        in a row, and the power does not fall.
        """
        drawn = [value for second in seconds if (value := second.mean("power_watts")) is not None]
        if self._power_at_work is None or not drawn:
            return True
        return min(drawn) < self.t.stall_power * self._power_at_work

    def _is_fed_from_outside(self, seconds: list[Second], stall: Stall) -> bool:
        starved = 0.0
        for second in seconds:
            part = min(second.end, stall.end) - max(second.start, stall.start)
            cause = cause_of(second, self.stretch, self.t)
            inbound = (second.mean("pcie_rx_bytes_per_second") or 0.0) > (
                second.mean("pcie_tx_bytes_per_second") or 0.0
            )
            if cause in _FED_FROM_OUTSIDE or (cause == "copies" and inbound):
                starved += part
        return starved >= 0.5 * stall.seconds


def _overlapping(seconds: Sequence[Second], stall: Stall) -> list[Second]:
    return [second for second in seconds if second.end > stall.start and second.start < stall.end]


def _written(seconds: Sequence[Second], stall: Stall) -> float | None:
    """Bytes that were written during a stall, counting only the parts of seconds that lie in it."""
    known = [
        second.written_bytes * (min(second.end, stall.end) - max(second.start, stall.start))
        for second in seconds
        if second.written_bytes is not None
    ]
    return sum(known) if known else None
