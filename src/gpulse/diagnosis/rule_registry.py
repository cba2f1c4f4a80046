"""Registry of all rules, in the order in which findings of the same severity are shown, and what can be told of a GPU at each level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpulse.diagnosis.rule import Rule
from gpulse.diagnosis.rules import (
    clocks,
    contention,
    faults,
    gpu_use,
    host_cpu,
    input_pipeline,
    memory,
    network,
    pcie_copy,
    pcie_numa,
    stall,
)
from gpulse.diagnosis.second_summary import SignalGroup
from gpulse.model.finding import MULTI_CAUSE_FINDING, DiagnosisLevel, Finding, FindingCategory
from gpulse.model.frame import GpuReading

RULES: tuple[Rule, ...] = (
    *faults.RULES,
    *clocks.RULES,
    *pcie_numa.RULES,
    *memory.RULES,
    *stall.RULES,
    *contention.RULES,
    *pcie_copy.RULES,
    *input_pipeline.RULES,
    *host_cpu.RULES,
    *gpu_use.RULES,
    *network.RULES,
)

RULES_BY_ID = {rule.id: rule for rule in RULES}


def find_category(rule_id: str, family: str | None) -> FindingCategory:
    """Return the category of a finding; an agent of another version may report findings that have no rule here."""
    rule = RULES_BY_ID.get(rule_id)
    if rule is not None and rule.category is not None:
        return rule.category
    return "fault" if family == "fault" else "slowness"


def find_title(finding: Finding) -> str:
    """Return a finding in a few words, the same for all GPUs; for a fault, what the driver reports."""
    rule = RULES_BY_ID.get(finding.id)
    if finding.id == MULTI_CAUSE_FINDING:
        _, found, words = finding.summary.partition(f"GPU {finding.label}: ")
        text = (words if found else finding.summary).removeprefix("the driver reported ")
    else:
        text = finding.id.replace("_", " ") if rule is None else rule.title
    return text[:1].upper() + text[1:]


_MAX_LISTED = 6


class CapabilityLevel(NamedTuple):
    """One level: its name for people, and what it is based on."""

    name: str
    basis: str
    missing: frozenset[SignalGroup] = frozenset()
    """Signals that a GPU of this level does not have."""


CAPABILITY_LEVELS: dict[DiagnosisLevel, CapabilityLevel] = {
    "full": CapabilityLevel("full", "activity of SMs, tensor cores, memory and links is measured (GPM)"),
    "nvml_only": CapabilityLevel(
        "NVML only",
        "utilization, power and sampled PCIe traffic are measured, and the rest is estimated from them",
        missing=frozenset({"gpm"}),
    ),
    "host_only": CapabilityLevel(
        "host only",
        "the activity of the GPU is unknown; only its processes and the host are measured",
        missing=frozenset({"gpm", "fill", "dram", "duty", "copies", "shares", "power"}),
    ),
}


def find_unknown(level: DiagnosisLevel) -> tuple[str, ...]:
    """Return the IDs of the findings that cannot be made at a level."""
    missing = CAPABILITY_LEVELS[level].missing
    return tuple(rule.id for rule in RULES if not missing.isdisjoint(rule.needs))


def find_inferred(level: DiagnosisLevel) -> tuple[str, ...]:
    """Return the IDs of the findings that rest on estimates at a level."""
    missing = CAPABILITY_LEVELS[level].missing
    return tuple(
        rule.id
        for rule in RULES
        if "gpm" in missing and rule.inferred_without_gpm and missing.isdisjoint(rule.needs)
    )


def describe_level(level: DiagnosisLevel) -> str:
    """Return what can be told at a level, and what not, in one sentence."""
    known = CAPABILITY_LEVELS[level]
    parts = [f"{known.name}: {known.basis}"]
    if inferred := find_inferred(level):
        parts.append(f"inferred: {', '.join(inferred)}")
    if unknown := find_unknown(level):
        which = ", ".join(unknown[:_MAX_LISTED])
        more = f" and {len(unknown) - _MAX_LISTED} more" if len(unknown) > _MAX_LISTED else ""
        parts.append(f"cannot be diagnosed: {which}{more}")
    return "; ".join(parts)


def levels_of_readings(readings: Sequence[GpuReading]) -> Mapping[DiagnosisLevel, list[str]]:
    """Return the labels of the GPUs by their level; a GPU that is split into MIG instances is not one to diagnose."""
    split = {reading.device.parent_uuid for reading in readings}
    found: dict[DiagnosisLevel, list[str]] = {}
    for reading in readings:
        if reading.device.uuid not in split:
            found.setdefault(_level_of(reading), []).append(reading.device.label)
    return found


def _level_of(reading: GpuReading) -> DiagnosisLevel:
    if reading.device.has_gpm:
        return "full"
    return "nvml_only" if "gpu_utilization_ratio" in reading.values else "host_only"
