"""What one frame is enough to know: the faults that the driver itself reports."""

from __future__ import annotations

from gpulse.diagnosis.rule import found
from gpulse.diagnosis.rules import clocks, fault
from gpulse.model.finding import SEVERITIES, Finding
from gpulse.model.frame import Frame

READINGS = frozenset(
    {
        "clocks_event_reasons",
        "ecc_uncorrected_errors_total",
        "recovery_action",
        "remapped_rows_failed",
        "remapped_rows_pending",
        "retired_pages_pending",
    }
)
"""What is looked at, besides health and the Xids, which are seen only while somebody watches."""


def faults(frame: Frame) -> list[Finding]:
    """The faults that NVML reports in this frame, worst first."""
    rules = {rule.id: rule for rule in (*fault.RULES, *clocks.RULES)}
    findings = [found(rules["gpu_fault"], match) for match in fault.faults_of(frame)]
    findings += [
        found(rules[name], match)
        for gpu in frame.gpus
        if gpu.device.mig_index is None
        for name, match in clocks.instant(gpu, frame.time)
    ]
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
