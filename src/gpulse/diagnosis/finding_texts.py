"""Texts about findings: evidence in words and readable units, and the reference manual for `gpulse explain`, the dashboard and the docs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gpulse.diagnosis.rule import Rule, SignalText
from gpulse.diagnosis.rule_registry import RULES
from gpulse.diagnosis.second_summary import SIGNAL_GROUPS
from gpulse.diagnosis.thresholds import DEFAULTS, THRESHOLD_TEXTS, Thresholds
from gpulse.model.clock_event_reasons import CLOCK_REASONS
from gpulse.model.finding import Advice, Evidence, Family
from gpulse.model.formatting import Unit, format_value
from gpulse.model.metric_catalog import CATALOG


class EvidenceText(NamedTuple):
    """One piece of evidence as text."""

    words: str
    value: str
    limit: str
    """What the value is compared with; empty when there is no threshold."""


# fmt: off
DERIVED_SIGNALS: dict[str, SignalText] = {
    "lost_ratio": SignalText("lost GPU time", "share"),
    "lost_time_throttled_ratio": SignalText("share of lost time spent at the CPU limit", "share"),
    "lost_time_swapping_ratio": SignalText("share of lost time spent swapping", "share"),
    "lost_time_crowded_ratio": SignalText("share of lost time spent waiting for a CPU", "share"),
    "lost_time_storage_ratio": SignalText("share of lost time spent waiting for storage", "share"),
    "lost_time_copies_ratio": SignalText("share of lost time spent copying", "share"),
    "lost_time_workers_ratio": SignalText("share of lost time with workers busy", "share"),
    "lost_time_main_ratio": SignalText("share of lost time with the program busy", "share"),
    "lost_time_none_ratio": SignalText("share of lost time with nothing busy", "share"),
    "duty": SignalText("time with kernels running", "share"),
    "pcie_bytes_per_second": SignalText("PCIe traffic", "bytes/second"),
    "trainer_cores": SignalText("CPUs used by the program", "cpus"),
    "job_cores": SignalText("CPUs used by the whole job", "cpus"),
    "saturated_workers": SignalText("fully busy workers", "number"),
    "processes_waiting_for_disks": SignalText("processes waiting for disks", "number"),
    "runnable_per_cpu": SignalText("runnable threads per CPU", "number"),
    "seconds": SignalText("duration", "seconds"),
    "estimated_fill_ratio": SignalText("part of the GPU in use while kernels run (estimated from the power draw)", "share"),
    "estimated_dram_active_ratio": SignalText(
        "GPU memory interface in use (estimated from memory utilization)", "share"
    ),
    "estimated_copy_ratio": SignalText("time with copies and no kernels (estimated)", "share"),
    **{
        f"clocks_event_{reason.bit:#x}_ratio": SignalText(f"{reason.name} active", "share")
        for reason in CLOCK_REASONS
    },
    **{name: quantity for rule in RULES for name, quantity in rule.quantities.items()},
}
"""Signals that only the diagnosis computes: those that several rules use, and each rule's own."""
# fmt: on

_UNITS: dict[str, Unit] = {
    "bytes": "bytes",
    "bytes/second": "bytes/second",
    "seconds": "seconds",
    "celsius": "celsius",
    "watts": "watts",
    "hertz": "hertz",
    "bitmask": "bits",
}

STATISTICS = {
    "first": " at the start",
    "last": " at the end",
    "rise": ", increase",
    "rise per minute": " per minute",
    "fall": ", decrease",
    "slope": ", growth",
    "max": ", maximum",
    "max under load": " under load",
    "median before": ", before",
    "median after": ", after",
    "mean between pauses": " between pauses",
    "median of the job's GPUs": ", median of the job's GPUs",
}
"""What a statistic adds to the label, unless it is the plain mean, share or count."""
_MEAN_OF_PID = "mean of pid "
COMPARISONS = {">=": "at least", ">": "above", "<": "below", "<=": "at most", "==": "equal to"}


def signal_text(signal: str) -> SignalText | None:
    """Return the label and the unit of a signal; None for a signal without a label."""
    if signal in DERIVED_SIGNALS:
        return DERIVED_SIGNALS[signal]
    metric = next((metrics[signal] for metrics in CATALOG.values() if signal in metrics), None)
    if metric is None or metric.title is None:
        return None
    return SignalText(metric.title, "share" if metric.kind == "ratio" else _UNITS.get(metric.unit, "number"))


def describe_evidence(evidence: Evidence) -> EvidenceText:
    """Return one piece of evidence as text; a signal without a label keeps its name."""
    known = signal_text(evidence.signal) or SignalText(evidence.signal.replace("_", " "), "number")
    unit = _unit(known.unit, evidence.statistic)
    if evidence.comparison == "has bit":
        return EvidenceText(known.words, _reason(int(evidence.threshold)), "")
    return EvidenceText(
        known.words + _statistic(evidence, known.unit),
        format_value(evidence.value, unit),
        _limit(evidence, unit),
    )


def describe_in_line(evidence: Evidence) -> str:
    """Return one piece of evidence as one line: `processes waiting for disks 0, below 0.35`."""
    text = describe_evidence(evidence)
    return f"{text.words} {text.value}{f', {text.limit}' if text.limit else ''}"


def _unit(unit: Unit, statistic: str) -> Unit:
    """Return the unit of a statistic of a quantity: growth of bytes is a rate."""
    if statistic == "slope" and unit == "bytes":
        return "bytes/second"
    if statistic == "rate" and unit == "seconds":
        return "share"  # seconds per second
    return unit


def _statistic(evidence: Evidence, unit: Unit) -> str:
    statistic = evidence.statistic
    if statistic.startswith(_MEAN_OF_PID):
        return f" of PID {statistic.removeprefix(_MEAN_OF_PID)}"
    if statistic == "last" and (unit != "bytes" or evidence.threshold != 0):
        return ""  # the value itself is the evidence, not the end of a rise
    return STATISTICS.get(statistic, "")


def _limit(evidence: Evidence, unit: Unit) -> str:
    if evidence.comparison in (">=", ">") and evidence.threshold == 0:
        return ""  # always true: the number is informational
    compared = COMPARISONS.get(evidence.comparison, evidence.comparison)
    return f"{compared} {format_value(evidence.threshold, unit)}"


def _reason(bit: int) -> str:
    return next((reason.name for reason in CLOCK_REASONS if reason.bit == bit), f"{bit:#x}")


FAMILY_TITLES: dict[Family, str] = {
    "input": "Input: the GPU waits for data",
    "host": "Host: the GPU waits for the program",
    "copy": "Copies between host and GPU",
    "stall": "Pauses, hangs and drops in throughput",
    "gpu_use": "How well the GPU is used",
    "contention": "Contention between programs or GPUs",
    "memory": "Memory",
    "clocks": "Clocks, heat and power",
    "link": "PCIe and NUMA",
    "network": "Network",
    "fault": "Faults",
}
"""Title of each family, in the order of the manual."""


class ManualEntry(NamedTuple):
    """Explanation of one finding."""

    id: str
    family: Family
    title: str
    means: str
    recognised: str
    severity: str
    informational: bool
    """Whether it is shown as a note instead of a finding, because no recording of a real run has shown it yet."""
    needs: tuple[str, ...]
    """Descriptions of the signals that it needs."""
    limits: tuple[str, ...]
    """Descriptions of the thresholds."""
    advice: tuple[Advice, ...]
    sources: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON types."""
        return {
            **self._asdict(),
            "needs": list(self.needs),
            "limits": list(self.limits),
            "advice": [advice._asdict() for advice in self.advice],
            "sources": list(self.sources),
        }


def build_entry(rule: Rule, thresholds: Thresholds = DEFAULTS) -> ManualEntry:
    """Return the manual entry of a rule."""
    return ManualEntry(
        id=rule.id,
        family=rule.family,
        title=rule.title,
        means=rule.means,
        recognised=rule.recognised,
        severity=rule.severity,
        informational=not rule.shown,
        needs=tuple(SIGNAL_GROUPS[signal] for signal in rule.needs),
        limits=tuple(_threshold_text(name, thresholds) for name in rule.limits),
        advice=rule.advice,
        sources=rule.sources,
    )


def build_entries(rules: Sequence[Rule] = RULES) -> list[ManualEntry]:
    """Return the entries of all findings, by family."""
    return [build_entry(rule) for family in FAMILY_TITLES for rule in rules if rule.family == family]


def _threshold_text(name: str, thresholds: Thresholds) -> str:
    text, unit = THRESHOLD_TEXTS[name]
    return text.format(format_value(getattr(thresholds, name), unit))
