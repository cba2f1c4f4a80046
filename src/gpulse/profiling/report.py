"""What a block has used, as numbers."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from gpulse.profiling.account import Account, Tally
from gpulse.profiling.loading import loading
from gpulse.profiling.meter import ACTIVITY, MEMORY, OWN_MEMORY, UTILIZATION

if TYPE_CHECKING:
    from gpulse.model.finding import Diagnosis, Finding

_NAMES = (UTILIZATION, *ACTIVITY)
_LEAST_INTERVALS = 10
"""Readings that a run must last for them to be about the run rather than about what is around it."""


class GpuReport(NamedTuple):
    """What a block used of one GPU; what could not be had is None."""

    label: str
    """How people name the GPU: `3`, or `3:1` for a MIG instance."""
    uuid: str
    name: str
    samples: int
    """Readings that were taken while the block was open: with none, energy is an estimate from those around it."""
    measured_seconds: float
    """Time of the block over which the energy was measured."""
    energy_joules: float | None
    power_watts: float | None
    """The mean."""
    memory_peak_bytes: int | None
    """The most that was in use on the GPU at a reading, by whomever."""
    memory_total_bytes: int | None
    process_memory_peak_bytes: int | None
    """The same of this process alone."""
    activity: dict[str, float]
    """Means by catalogue name."""

    @classmethod
    def of(cls, tally: Tally) -> GpuReport:
        """What was added up."""
        known = tally.seconds > 0
        joules = tally.joules + tally.rough_joules
        total = tally.device.facts.get("memory_total_bytes")
        return cls(
            label=tally.device.label,
            uuid=tally.device.uuid,
            name=tally.device.name,
            samples=tally.samples,
            measured_seconds=tally.seconds,
            energy_joules=joules if known else None,
            power_watts=joules / tally.seconds if known else None,
            memory_peak_bytes=_whole(tally.peaks.get(MEMORY)),
            memory_total_bytes=_whole(total),
            process_memory_peak_bytes=_whole(tally.peaks.get(OWN_MEMORY)),
            activity={
                name: tally.sums[name][0] / tally.sums[name][1] for name in _NAMES if name in tally.sums
            },
        )


class Report(NamedTuple):
    """What a block has used, all its runs together; what could not be had is None."""

    name: str
    runs: int
    is_open: bool
    """Whether a run is under way, so that this is not the end of it."""
    seconds: float
    """Time with at least one run under way."""
    run_seconds: float | None
    """The mean length of a run; None while one is under way or before the first one."""
    measured_seconds: float
    """The part of `seconds` that lies between two readings of the GPUs."""
    interval_seconds: float
    """Time from one reading to the next."""
    samples: int
    """Readings that were taken while it was open."""
    energy_joules: float | None
    """Of all its GPUs together."""
    memory_peak_bytes: int | None
    """Of the fullest GPU."""
    process_memory_peak_bytes: int | None
    activity: dict[str, float]
    """Means over its GPUs, by catalogue name."""
    gpus: tuple[GpuReport, ...]
    diagnosis: Diagnosis
    trouble: str | None
    """Why there is nothing about GPUs, or less than there should be."""

    @classmethod
    def of(
        cls,
        account: Account,
        now: float,
        diagnosis: Diagnosis,
        *,
        interval_seconds: float,
        held: Collection[str] = (),
        trouble: str | None = None,
    ) -> Report:
        """What an account says.

        Args:
            account: The block's.
            now: On the monotonic clock.
            diagnosis: What its time shows.
            interval_seconds: Time from one reading to the next.
            held: UUIDs of the GPUs that this process is on: only these count, unless there are none.
            trouble: Why there is nothing about GPUs.
        """
        spans = account.spans
        tallies = sorted(account.tallies.values(), key=lambda tally: _order(tally.device.label))
        mine = [tally for tally in tallies if tally.device.uuid in held] or tallies
        gpus = tuple(GpuReport.of(tally) for tally in mine)
        energies = [gpu.energy_joules for gpu in gpus if gpu.energy_joules is not None]
        return cls(
            name=account.name,
            runs=spans.count,
            is_open=spans.depth > 0,
            seconds=spans.seconds(now),
            run_seconds=spans.runs_seconds(now) / spans.count if spans.count and not spans.depth else None,
            measured_seconds=account.measured_seconds,
            interval_seconds=interval_seconds,
            samples=max((gpu.samples for gpu in gpus), default=0),
            energy_joules=sum(energies) if energies else None,
            memory_peak_bytes=_largest(gpu.memory_peak_bytes for gpu in gpus),
            process_memory_peak_bytes=_largest(gpu.process_memory_peak_bytes for gpu in gpus),
            activity=_mean(gpus),
            gpus=gpus,
            diagnosis=diagnosis,
            trouble=trouble,
        )

    @property
    def is_estimate(self) -> bool:
        """Whether its runs are so short that what it used cannot be told from what ran right before and after it."""
        if not self.runs:
            return False
        length = self.seconds / self.runs if self.run_seconds is None else self.run_seconds
        return length < _LEAST_INTERVALS * self.interval_seconds

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, worst first; nothing is found in less than ten seconds."""
        return self.diagnosis.findings

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {
            **self._asdict(),
            "is_estimate": self.is_estimate,
            "gpus": [gpu._asdict() for gpu in self.gpus],
            "diagnosis": self.diagnosis.to_dict(),
        }

    def __str__(self) -> str:
        with loading:
            from gpulse.profiling.view import report_text  # noqa: PLC0415  only who prints needs it

        return report_text(self)

    def _repr_html_(self) -> str:
        with loading:
            from gpulse.profiling.view import report_html  # noqa: PLC0415

        return report_html(self)


def _mean(gpus: tuple[GpuReport, ...]) -> dict[str, float]:
    means: dict[str, float] = {}
    for name in _NAMES:
        known = [gpu.activity[name] for gpu in gpus if name in gpu.activity]
        if known:
            means[name] = sum(known) / len(known)
    return means


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _largest(values: Any) -> int | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)


def _order(label: str) -> tuple[int, ...]:
    return tuple(int(part) for part in label.split(":"))
