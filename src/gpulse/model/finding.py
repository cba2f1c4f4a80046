"""A finding: what is wrong, how sure that is, what shows it and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Family = Literal[
    "input", "host", "gpu_use", "memory", "copy", "stall", "contention", "clocks", "link", "fault", "network"
]
Severity = Literal["info", "low", "medium", "high", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "low", "medium", "high", "critical")
SEVERAL_CAUSES = "gpu_fault"
"""The one finding that a GPU can have several times at once, each time with another cause."""

NODE_FINDINGS = frozenset({"node_lost", "node_missing"})
"""Findings that a head makes about its nodes; agents do not report them."""

FindingKey = tuple[str, str | None, str]
"""Id, label of the GPU and cause: what makes two reports of a node reports of the same finding."""

_MAX_CAUSE_CHARACTERS = 64


class Evidence(NamedTuple):
    """One number against its threshold, recomputable from the frames it came from."""

    signal: str
    statistic: str
    value: float
    comparison: str
    threshold: float


class Advice(NamedTuple):
    """One thing to do, why, and a cheap way to see whether it was right."""

    do: str
    why: str
    confirm: str


class Judged(NamedTuple):
    """The stretch of time over which one GPU was judged: what the evidence was computed from."""

    gpu: int
    label: str
    start: float
    end: float
    frames: int
    state: str
    """In a few words what it did: `busy 99 %`, `idle`."""
    is_clear: bool = True
    """False when what was seen does not say whether it is well used."""


class Finding(NamedTuple):
    """One verdict about one GPU, or about the node when `gpu` is None."""

    id: str
    family: Family
    severity: Severity
    confidence: float
    summary: str
    """One sentence with the number in it."""
    gpu: int | None = None
    label: str | None = None
    """How people name the GPU: `3`, or `3:1` for a MIG instance of it."""
    pids: tuple[int, ...] = ()
    lost_ratio: float | None = None
    start: float | None = None
    end: float | None = None
    evidence: tuple[Evidence, ...] = ()
    counter_evidence: tuple[Evidence, ...] = ()
    ruled_out: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    url: str | None = None
    cause: str | None = None
    """Which of several conditions it is, where one GPU can have several of them at once: `xid_94`."""

    @property
    def key(self) -> FindingKey:
        """What makes another report of the node one of the same finding."""
        return self.id, self.label, self.cause or ""

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON types."""
        return {
            "id": self.id,
            "family": self.family,
            "severity": self.severity,
            "confidence": self.confidence,
            "summary": self.summary,
            "gpu": self.gpu,
            "label": self.label,
            "pids": list(self.pids),
            "lost_ratio": self.lost_ratio,
            "start": self.start,
            "end": self.end,
            "evidence": [item._asdict() for item in self.evidence],
            "counter_evidence": [item._asdict() for item in self.counter_evidence],
            "ruled_out": list(self.ruled_out),
            "advice": [item._asdict() for item in self.advice],
            "url": self.url,
            "cause": self.cause,
        }


def finding_key(document: Mapping[str, Any]) -> FindingKey:
    """Return the key of a finding that is a JSON document."""
    label, cause = document.get("label"), document.get("cause")
    return (
        str(document.get("id")),
        None if label is None else str(label),
        str(cause or "")[:_MAX_CAUSE_CHARACTERS],
    )


class Diagnosis(NamedTuple):
    """What a stretch of frames shows: findings worst first, what is worth knowing, what could not be seen."""

    verdict: str
    """One sentence."""
    findings: tuple[Finding, ...] = ()
    info: tuple[Finding, ...] = ()
    data_gaps: tuple[str, ...] = ()
    judged: tuple[Judged, ...] = ()
    """GPUs that were seen for long enough."""
    start: float | None = None
    end: float | None = None
    frames: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON types."""
        return {
            "verdict": self.verdict,
            "findings": [finding.to_dict() for finding in self.findings],
            "info": [finding.to_dict() for finding in self.info],
            "data_gaps": list(self.data_gaps),
            "judged": [judged._asdict() for judged in self.judged],
            "start": self.start,
            "end": self.end,
            "frames": self.frames,
        }
