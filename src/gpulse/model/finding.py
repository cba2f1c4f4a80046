"""A finding: what is wrong, how sure that is, what shows it and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

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
_FAMILIES = frozenset(get_args(Family))
_Kind = TypeVar("_Kind")


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
    family: Family | None
    """None when an agent did not report it, or reported one that is unknown here."""
    severity: Severity
    confidence: float
    """0 to 1; NaN when an agent did not report it."""
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
        return self.id, self.label, (self.cause or "")[:_MAX_CAUSE_CHARACTERS]

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON types."""
        return {
            "id": self.id,
            "family": self.family,
            "severity": self.severity,
            "confidence": None if math.isnan(self.confidence) else self.confidence,
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


def from_document(document: Mapping[str, Any]) -> Finding:
    """Return the finding that a JSON document describes; fields of another type than expected count as unknown."""
    family, severity = document.get("family"), document.get("severity")
    return Finding(
        id=str(document.get("id")),
        family=cast("Family", family) if _typed(str, family) in _FAMILIES else None,
        severity=cast("Severity", severity) if severity in SEVERITIES else "info",
        confidence=math.nan if (sure := _number(document.get("confidence"))) is None else sure,
        summary=_typed(str, document.get("summary")) or "",
        gpu=_typed(int, document.get("gpu")),
        label=_typed(str, document.get("label")),
        pids=tuple(_items(int, document.get("pids"))),
        lost_ratio=_number(document.get("lost_ratio")),
        start=_number(document.get("start")),
        end=_number(document.get("end")),
        evidence=_evidence(document.get("evidence")),
        counter_evidence=_evidence(document.get("counter_evidence")),
        ruled_out=tuple(_items(str, document.get("ruled_out"))),
        advice=tuple(
            Advice(*texts)
            for item in _items(dict, document.get("advice"))
            if len(texts := _items(str, [item.get(name) for name in Advice._fields])) == len(Advice._fields)
        ),
        url=_typed(str, document.get("url")),
        cause=_typed(str, document.get("cause")),
    )


def _evidence(listed: Any) -> tuple[Evidence, ...]:
    """Return the pieces of evidence that are complete."""
    found = []
    for item in _items(dict, listed):
        texts = _items(str, [item.get(name) for name in ("signal", "statistic", "comparison")])
        value, threshold = _number(item.get("value")), _number(item.get("threshold"))
        if len(texts) == 3 and value is not None and threshold is not None:
            found.append(Evidence(texts[0], texts[1], value, texts[2], threshold))
    return tuple(found)


def _items(kind: type[_Kind], listed: Any) -> list[_Kind]:
    return [item for item in listed if _typed(kind, item) is not None] if isinstance(listed, list) else []


def _typed(kind: type[_Kind], value: Any) -> _Kind | None:
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


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
