"""How well GPUs were used: figures of each GPU in somebody's time, added up, and beside what everybody had."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from gpulse.model.idleness import IDLE_RATIO
from gpulse.model.metric import CATALOGUE
from gpulse.reports.chart import Grid
from gpulse.reports.document import Document
from gpulse.reports.occupancy import Spans, Work, within
from gpulse.reports.owners import Key, Person
from gpulse.reports.usage import Tally
from gpulse.store.store import Series, Share, StoredGpu

METRICS = (
    "gpu_utilization_ratio",
    "sm_active_ratio",
    "tensor_active_ratio",
    "dram_active_ratio",
    "memory_used_bytes",
    "power_watts",
    "pcie_rx_bytes_per_second",
    "pcie_tx_bytes_per_second",
)
"""What matters of a GPU."""
BUSY_METRICS = ("gpu_utilization_ratio", "sm_active_ratio")
_DIGITS = 6

GpuKey = tuple[int, str]
"""Node and UUID."""


class Figure(NamedTuple):
    """A metric over some time."""

    mean: float
    max: float
    seconds: float
    """For how long it is known."""

    def document(self, metric: str) -> Document:
        """As the API tells it."""
        return {"unit": CATALOGUE["gpu"][metric].unit, "mean": _rounded(self.mean), "max": _rounded(self.max)}


Figures = Mapping[str, Figure]


def figure(steps: Series, moments: Grid, spans: Spans) -> Figure | None:
    """A metric in some stretches of time; None when nothing is known of it then."""
    weights = within(steps.times, moments.step, spans)
    known = weights > 0
    seconds = float(weights.sum())
    if not seconds:
        return None
    mean = float((steps.values * weights).sum()) / seconds
    return Figure(mean, float(steps.highs[known].max()), seconds)


def together(some: Iterable[Figures]) -> dict[str, Figure]:
    """The figures of several GPUs as those of one: means by how long each is known."""
    found: dict[str, Figure] = {}
    for figures in some:
        for metric, one in figures.items():
            other = found.get(metric)
            if other is None:
                found[metric] = one
                continue
            seconds = one.seconds + other.seconds
            mean = (one.mean * one.seconds + other.mean * other.seconds) / seconds
            found[metric] = Figure(mean, max(one.max, other.max), seconds)
    return {metric: found[metric] for metric in METRICS if metric in found}


class GpuUse(NamedTuple):
    """What somebody had of one GPU."""

    key: GpuKey
    gpu: StoredGpu | None
    tally: Tally
    """Of their own processes."""
    held: Work
    """What it did while these were on it."""
    figures: Figures
    granted_seconds: float | None
    """For how long a scheduler gave it to them; None when nobody knows."""
    unused_seconds: float | None
    """For how much of that no process of theirs was on it, as far as anything is known; None when nobody knows."""
    untabled_seconds: float
    """For how long there are samples of it, but nobody knows which processes were on it."""
    is_shared: bool
    """Whether others held it at the same time."""
    use: str | None
    """In a word; None when nobody knows."""

    def document(self, node: str) -> Document:
        """As the API tells it."""
        gpu = self.gpu
        total = None if gpu is None else dict(gpu.device.get("facts") or {}).get("memory_total_bytes")
        return {
            "node": node,
            "gpu": None if gpu is None else gpu.label,
            "uuid": self.key[1],
            "model": None if gpu is None else gpu.name,
            "use": self.use,
            "shared": self.is_shared,
            "memory_total_bytes": total,
            "allocated_seconds": _rounded(self.granted_seconds, 3),
            "unused_seconds": _rounded(self.unused_seconds, 3),
            **had(self.tally, [self.held]),
            "metrics": {metric: one.document(metric) for metric, one in self.figures.items()},
        }


def used(figures: Figures, *, is_held: bool, by_others: bool, is_known: bool) -> str | None:
    """How a GPU was used, in a word; None when nobody knows.

    Args:
        figures: What it did while they had it.
        is_held: Whether a process of theirs was on it.
        by_others: Whether others' were meanwhile.
        is_known: Whether it is known which processes were on it.
    """
    if is_held:
        return "used"
    busy = [figures[metric].mean for metric in BUSY_METRICS if metric in figures]
    if is_known and (by_others or (busy and max(busy) <= IDLE_RATIO)):
        return "untouched"
    return "unattributed" if busy and max(busy) > IDLE_RATIO else None


def had(tally: Tally, held: Iterable[Work]) -> Document:
    """What processes had of GPUs that they held, as the API tells it."""
    held = list(held)
    known = sum(work.known for work in held)
    return {
        **added(tally),
        "held_seconds": round(sum(work.seconds for work in held), 3),
        "known_seconds": round(known, 3),
        "idle_seconds": round(sum(work.idle for work in held), 3) if known else None,
        "memory_bytes_max": None if tally.memory is None else int(tally.memory),
    }


def added(tally: Tally) -> Document:
    """What processes had, divided where several held a GPU, as the API tells it."""
    return {
        "gpu_seconds": round(tally.seconds, 3),
        "known_seconds": round(tally.known, 3),
        "idle_seconds": round(tally.idle, 3) if tally.known else None,
        "utilization_mean": round(tally.busy / tally.known, _DIGITS) if tally.known else None,
        "energy_joules": _rounded(tally.energy, 3),
    }


def everybody(
    shares: Iterable[Share], harvested: Collection[Key], capacity: Mapping[GpuKey, float]
) -> Document:
    """What all jobs had in the same time.

    Args:
        shares: Everybody's.
        harvested: Processes that do not count.
        capacity: For how long each GPU was there.
    """
    tally, nobody = Tally(), Person((0, 0, None))
    for share in shares:
        if share.pid is not None and (share.node, share.pid, share.start) not in harvested:
            tally.add(share, nobody)
    watts = tally.energy / tally.seconds if tally.energy is not None and tally.seconds else None
    return {
        "gpus": len(capacity),
        "capacity_seconds": round(sum(capacity.values()), 3),
        "gpus_held": len(tally.gpus),
        **added(tally),
        "power_watts_mean": _rounded(watts),
    }


def _rounded(value: float | None, digits: int = _DIGITS) -> float | None:
    return None if value is None else round(value, digits)
