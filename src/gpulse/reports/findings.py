"""Findings over time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypedDict

from msgspec import Struct, field

from gpulse.model.finding import Finding, Severity
from gpulse.reports.context import Context
from gpulse.store.agent_events import Advice, Evidence
from gpulse.store.incomplete import noticing
from gpulse.store.store import Query, StoredFinding

_MAX_FINDINGS = 2000


class FindingFields(TypedDict):
    """The fields of a finding that answers have as they are."""

    gpu: int | None
    label: str | None
    id: str
    cause: str | None
    family: str | None
    severity: Severity
    summary: str
    lost_ratio: float | None
    confidence: float | None
    pids: list[int]
    evidence: list[Evidence]
    advice: list[Advice]
    url: str | None


class ReportedFinding(Struct, frozen=True, kw_only=True):
    """A finding and the time in which it held."""

    gpu: int | None
    label: str | None
    id: str
    cause: str | None
    family: str | None
    severity: Severity
    summary: str
    lost_ratio: float | None
    confidence: float | None
    pids: list[int]
    start: float = field(name="from")
    end: float | None = field(name="to")
    """null while it holds."""
    evidence: list[Evidence]
    advice: list[Advice]
    url: str | None


class FindingSpanRow(ReportedFinding, frozen=True, kw_only=True):
    """A finding of one node, with its own start and end whatever time was asked for."""

    node: str


class FindingReport(Struct, frozen=True, kw_only=True):
    """The findings that held at some time of a range, oldest first."""

    start: float = field(name="from")
    end: float = field(name="to")
    truncated: bool
    spans: list[FindingSpanRow]
    incomplete: list[str]
    """What is missing, in words."""


def finding_report(context: Context, query: Query) -> FindingReport:
    """Return the findings that held at some time of a range, oldest first; the newest of them when there are many."""
    with noticing() as incomplete:
        found = context.store.findings(replace(query, limit=_MAX_FINDINGS + 1))
    return FindingReport(
        incomplete=incomplete,
        start=query.start,
        end=query.end,
        truncated=len(found) > _MAX_FINDINGS,
        spans=[
            FindingSpanRow(
                node=_node_name(context, stored),
                start=stored.span.start,
                end=stored.span.end,
                **finding_fields(stored.finding),
            )
            for stored in found[-_MAX_FINDINGS:]
        ],
    )


def _node_name(context: Context, stored: StoredFinding) -> str:
    """Return the name of a finding's node; that of a node which has never reported is its cause."""
    if stored.node is None:
        return stored.finding.cause or ""
    return context.node_names.get(stored.node, str(stored.node))


def finding_fields(finding: Finding) -> FindingFields:
    """Return the fields of a finding that answers have as they are."""
    return {
        "gpu": finding.gpu,
        "label": finding.label,
        "id": finding.id,
        "cause": finding.cause,
        "family": finding.family,
        "severity": finding.severity,
        "summary": finding.summary,
        "lost_ratio": finding.lost_ratio,
        "confidence": None if math.isnan(finding.confidence) else finding.confidence,
        "pids": list(finding.pids),
        "evidence": [Evidence(*item) for item in finding.evidence],
        "advice": [Advice(*item) for item in finding.advice],
        "url": finding.url,
    }
