"""A finding: what is wrong, how sure that is, what shows it and what to do about it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Family = Literal[
    "input", "host", "gpu_use", "memory", "copy", "stall", "contention", "clocks", "link", "fault", "network"
]
Severity = Literal["info", "low", "medium", "high", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "low", "medium", "high", "critical")


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
        }


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
