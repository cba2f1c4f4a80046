"""What one frame is enough to know: the faults that the driver itself reports."""

from __future__ import annotations

from gpulse.diagnosis.rule import found
from gpulse.diagnosis.rules import clocks, fault
from gpulse.model.finding import SEVERITIES, Finding
from gpulse.model.frame import Frame
from gpulse.model.xid import XidLedger

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


def faults(frame: Frame, xids: XidLedger | None = None) -> list[Finding]:
    """Return the faults that NVML reports, worst first.

    Args:
        frame: The newest readings.
        xids: The Xid errors so far; the frame alone has only the last code of each GPU.
    """
    rules = {rule.id: rule for rule in (*fault.RULES, *clocks.RULES)}
    findings = [found(rules["gpu_fault"], match) for match in fault.faults_of(frame, xids)]
    findings += [
        found(rules[name], match)
        for gpu in frame.gpus
        if gpu.device.mig_index is None
        for name, match in clocks.instant(gpu, frame.time)
    ]
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
