from __future__ import annotations

import ast
from typing import get_args

import pytest

from gpulse.diagnosis.evidence import Cause
from gpulse.diagnosis.finding_texts import (
    DERIVED_SIGNALS,
    EvidenceText,
    describe_evidence,
    describe_in_line,
    signal_text,
)
from gpulse.model.finding import Evidence
from gpulse.model.metric_catalog import CATALOG
from tests.unit.diagnosed import RECORDINGS, ROOT, diagnosed

COMPUTED = {
    "_PACE": ["power_watts"],
    "counter": [
        "hardware_thermal_slowdown_seconds_total",
        "power_brake_seconds_total",
        "thermal_slowdown_seconds_total",
    ],
    "name": [
        "ecc_uncorrected_errors_total",
        "pcie_link_generation",
        "pcie_link_width",
        "remapped_rows_failed",
        "remapped_rows_pending",
        "retired_pages_pending",
    ],
    "signal": [
        "cpu_throttled_ratio",
        "job_resident_bytes",
        "memory_used_bytes",
        "runnable_per_cpu",
        "saturated_workers",
        "swap_in_pages_per_second",
    ],
    "f'lost_time_{cause}_ratio'": [f"lost_time_{cause}_ratio" for cause in get_args(Cause)],
    "f'pcie_{way}_bytes_per_second'": ["pcie_rx_bytes_per_second", "pcie_tx_bytes_per_second"],
    "f'clocks_event_{bit:#x}_ratio'": [f"clocks_event_{bit:#x}_ratio" for bit in (0x8, 0x20, 0x40, 0x80)],
    "f'clocks_event_{POWER_CAP:#x}_ratio'": ["clocks_event_0x4_ratio"],
    "f'clocks_event_{APPLICATION:#x}_ratio'": ["clocks_event_0x2_ratio"],
}
"""What the names of signals that are computed in the rules can come to."""


def used_in_rules() -> set[str]:
    """The first argument of every `Evidence(...)` in the diagnosis, as it is written there."""
    calls = (
        node
        for path in (ROOT / "src" / "gpulse" / "diagnosis").rglob("*.py")
        if path.name != "finding_texts.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Evidence"
    )
    return {
        str(first.value) if isinstance(first := call.args[0], ast.Constant) else ast.unparse(first)
        for call in calls
    }


def test_every_signal_of_a_rule_has_words() -> None:
    """Evidence has labels."""

    names = [name for used in sorted(used_in_rules()) for name in COMPUTED.get(used, [used])]

    assert [] == [name for name in names if signal_text(name) is None], (
        "a metric needs a `title` in model/metric_catalog.py, any other quantity words in the `quantities` of its rule"
    )


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_signal_of_a_recorded_run_has_words(name: str) -> None:
    """No evidence of the recordings lacks a label."""

    found = diagnosed(name)
    said = [
        item.signal
        for finding in (*found.findings, *found.info)
        for item in (*finding.evidence, *finding.counter_evidence)
    ]

    assert [] == [name for name in said if signal_text(name) is None]


def test_a_quantity_has_its_words_in_one_place() -> None:
    """A quantity of the diagnosis has no metric with a title of its own."""

    titled = {metric.name for metrics in CATALOG.values() for metric in metrics.values() if metric.title}

    assert set() == titled & set(DERIVED_SIGNALS)


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (
            Evidence("lost_ratio", "mean", 0.974, ">=", 0.1),
            EvidenceText("lost GPU time", "97%", "at least 10%"),
        ),
        (
            Evidence("sm_active_ratio", "mean", 0.0143, "<", 0.5),
            EvidenceText("SMs in use", "1.4%", "below 50%"),
        ),
        (
            Evidence("duty", "median before", 0.9, ">=", 0.3),
            EvidenceText("time with kernels running, before", "90%", "at least 30%"),
        ),
        (
            Evidence("memory_used_bytes", "slope", 2.4e9, ">=", 0),
            EvidenceText("GPU memory in use, growth", "2.4 GB/s", ""),
        ),
        (
            Evidence("thermal_slowdown_seconds_total", "rate", 0.3, ">=", 0.02),
            EvidenceText("time slowed by the driver because of heat", "30%", "at least 2%"),
        ),
        (
            Evidence("sm_ratio", "mean of pid 7", 0.5, ">=", 0.1),
            EvidenceText("share of the GPU of PID 7", "50%", "at least 10%"),
        ),
        (
            Evidence("clocks_event_reasons", "now", 0x60, "has bit", 0x20),
            EvidenceText("reason for lowered clocks", "thermal slowdown", ""),
        ),
        (Evidence("xid_errors_total", "now", 2, ">", 0), EvidenceText("Xid errors", "2", "")),
        (Evidence("brand_new_thing", "mean", 1.5, "<", 2), EvidenceText("brand new thing", "1.5", "below 2")),
    ],
)
def test_evidence_is_described_with_label_and_unit(evidence: Evidence, expected: EvidenceText) -> None:
    """The unit decides how a number is written, and the statistic what it is a number of."""

    assert expected == describe_evidence(evidence)


def test_evidence_is_described_in_one_line() -> None:
    """What rules a cause out reads like the evidence."""

    measure = Evidence("processes_waiting_for_disks", "mean", 0.0, "<", 0.35)

    assert "processes waiting for disks 0, below 0.35" == describe_in_line(measure)
