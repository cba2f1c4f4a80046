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


class Finding(NamedTuple):
    """One verdict about one GPU, or about the node when `gpu` is None."""

    id: str
    family: Family
    severity: Severity
    confidence: float
    summary: str
    """One sentence with the number in it."""
    gpu: int | None = None
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
