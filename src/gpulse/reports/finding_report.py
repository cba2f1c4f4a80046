"""Report on the findings of a time range, one by one or grouped by cause: who is affected, since when, what it costs, what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypedDict

from msgspec import UNSET, Struct, UnsetType, field

from gpulse.diagnosis.rule_registry import find_category, find_title
from gpulse.model.finding import FINDING_CATEGORIES, SEVERITIES, Finding, FindingCategory, Severity
from gpulse.model.finding_acknowledgement import (
    ACKNOWLEDGED_EVENT,
    FindingAcknowledgement,
    active_key,
    group_key,
)
from gpulse.model.safe_text import natural_key
from gpulse.reports.time_grid import ReportContext
from gpulse.store.event_decoder import AdvicePayload, CodeLocationPayload, EvidencePayload
from gpulse.store.incomplete_answers import collect_missing
from gpulse.store.store import Query, StoredFinding, StoredProcess

_MAX_FINDINGS = 2000


class FindingFields(TypedDict):
    """Fields of a finding that answers contain unchanged."""

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
    evidence: list[EvidencePayload]
    advice: list[AdvicePayload]
    url: str | None
    where: list[CodeLocationPayload] | UnsetType
    where_note: str | UnsetType


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
    evidence: list[EvidencePayload]
    advice: list[AdvicePayload]
    url: str | None
    where: list[CodeLocationPayload] | UnsetType = UNSET
    """Lines of code, the most frequent first; empty if no line stands out; omitted if no stacks were taken, and for
    callers who may only read."""
    where_note: str | UnsetType = UNSET
    """Why there is no line; omitted like `where`."""


class FindingSpanRow(ReportedFinding, frozen=True, kw_only=True):
    """A finding of one node, with its own start and end, which may lie outside the requested time range."""

    node: str


class FindingReport(Struct, frozen=True, kw_only=True):
    """The findings that held at any time of a range, oldest first."""

    start: float = field(name="from")
    end: float = field(name="to")
    truncated: bool
    spans: list[FindingSpanRow]
    incomplete: list[str]
    """Sentences about missing data."""


def build_finding_report(context: ReportContext, query: Query) -> FindingReport:
    """Return the findings that held at any time of a range, oldest first; if there are too many, only the newest ones."""
    with collect_missing() as incomplete:
        found = context.store.findings(replace(query, limit=_MAX_FINDINGS + 1))
    return FindingReport(
        incomplete=incomplete,
        start=query.start,
        end=query.end,
        truncated=len(found) > _MAX_FINDINGS,
        spans=[
            FindingSpanRow(
                node=find_node_name(context, stored),
                start=stored.span.start,
                end=stored.span.end,
                **finding_fields(stored.finding),
            )
            for stored in found[-_MAX_FINDINGS:]
        ],
    )


def find_node_name(context: ReportContext, stored: StoredFinding) -> str:
    """Return the name of a finding's node; for a node that has never reported, it is the cause of the finding."""
    if stored.node is None:
        return stored.finding.cause or ""
    return context.node_names.get(stored.node, str(stored.node))


def finding_fields(finding: Finding) -> FindingFields:
    """Return the fields of a finding that answers contain unchanged."""
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
        "evidence": [EvidencePayload(*item) for item in finding.evidence],
        "advice": [AdvicePayload(*item) for item in finding.advice],
        "url": finding.url,
        "where": UNSET if finding.where is None else [CodeLocationPayload(*place) for place in finding.where],
        "where_note": UNSET if finding.where_note is None else finding.where_note,
    }


FindingState = Literal["now", "past", "acknowledged", "silenced"]
FindingEnding = Literal["recovered", "processes_ended", "not_reporting"]
"""How a finding ended: the condition was over, its processes ended, or its node stopped reporting."""
_MAX_PAST = 4000
_MAX_GROUPS = 500
_MAX_ACKNOWLEDGEMENTS = 5000
_PROCESS_END_SECONDS = 90.0
"""A finding that ends within this time of its processes ended with them."""


class AcknowledgementRow(Struct, frozen=True, kw_only=True):
    """Who acknowledged a finding, and when."""

    time: float
    by: str
    note: str | None


class GroupedFinding(Struct, frozen=True, kw_only=True):
    """One GPU or node of a group."""

    key: str
    node: str
    gpu: int | None
    label: str | None
    severity: Severity
    summary: str
    users: list[str]
    jobs: list[str]
    lost_ratio: float | None
    start: float = field(name="from")
    end: float | None = field(name="to")
    """null while it holds."""
    gpu_hours: float | None
    """Lost time so far; null if the finding has no lost time."""
    ending: FindingEnding | None
    """null while it holds."""
    acknowledged: AcknowledgementRow | None
    silence: str | None
    """ID of the silence that hides it."""


class FindingGroupRow(Struct, frozen=True, kw_only=True):
    """All findings with the same cause; the texts and numbers are those of the worst one."""

    key: str
    """Identifies the group in its state: the cause, and the start for past groups."""
    group: str
    """The cause: the ID of the finding, and the kind of fault."""
    id: str
    category: FindingCategory
    severity: Severity
    family: str | None
    title: str
    summary: str
    confidence: float | None
    start: float = field(name="from")
    end: float | None = field(name="to")
    gpus_lost: float | None
    """Sum of the lost shares of its GPUs; null if the finding has no lost time."""
    gpu_hours: float | None
    users: list[str]
    jobs: list[str]
    is_acknowledged: bool
    """Whether somebody has acknowledged all of it."""
    members: list[GroupedFinding]
    """Those that lost most time first."""
    evidence: list[EvidencePayload]
    counter_evidence: list[EvidencePayload]
    ruled_out: list[str]
    advice: list[AdvicePayload]
    url: str | None
    where: list[CodeLocationPayload] | UnsetType = UNSET
    """Lines of code; omitted if no stacks were taken, and for callers who may only read."""
    where_note: str | UnsetType = UNSET


class FindingCounts(Struct, frozen=True, kw_only=True):
    """Number of groups by state."""

    now: int
    past: int
    acknowledged: int
    silenced: int


class FindingGroups(Struct, frozen=True, kw_only=True):
    """Findings grouped by cause: faults first, then slowness and waste; past ones by their end, newest first."""

    time: float
    state: FindingState
    start: float = field(name="from")
    """Start of the time range of past findings."""
    end: float = field(name="to")
    counts: FindingCounts
    groups: list[FindingGroupRow]
    truncated: bool
    incomplete: list[str]
    """Sentences about missing data."""


class GroupItem(NamedTuple):
    """A finding to be grouped."""

    node: str
    finding: Finding
    start: float
    end: float | None
    users: Sequence[str] = ()
    jobs: Sequence[str] = ()
    ending: FindingEnding | None = None
    acknowledged: FindingAcknowledgement | None = None
    silence: str | None = None


def group_findings(items: Iterable[GroupItem], now: float) -> list[FindingGroupRow]:
    """Return findings that hold, grouped by cause: faults first, then by severity and GPUs lost."""
    causes: dict[str, list[GroupItem]] = {}
    for item in items:
        causes.setdefault(group_key(item.finding.key), []).append(item)
    groups = [_build_group(cause, cause, members, now) for cause, members in causes.items()]
    return sorted(groups, key=_rank)[:_MAX_GROUPS]


def group_past_findings(items: Iterable[GroupItem], now: float) -> list[FindingGroupRow]:
    """Return findings that are over, grouped by cause where their times overlap, newest end first."""
    groups: list[FindingGroupRow] = []
    causes: dict[str, list[GroupItem]] = {}
    for item in items:
        causes.setdefault(group_key(item.finding.key), []).append(item)
    for cause, members in causes.items():
        together: list[GroupItem] = []
        for item in sorted(members, key=lambda one: one.start):
            if together and item.start > max(one.end or now for one in together):
                groups.append(_build_past_group(cause, together, now))
                together = []
            together.append(item)
        groups.append(_build_past_group(cause, together, now))
    return sorted(groups, key=lambda group: (-(group.end or now), group.key))[:_MAX_GROUPS]


def _build_past_group(cause: str, items: Sequence[GroupItem], now: float) -> FindingGroupRow:
    return _build_group(f"{cause}@{min(item.start for item in items):.0f}", cause, items, now)


def _build_group(key: str, cause: str, items: Sequence[GroupItem], now: float) -> FindingGroupRow:
    ordered = sorted(items, key=_rank_item)
    worst = ordered[0].finding
    members = [_build_member(item, now) for item in ordered]
    fields = finding_fields(worst)
    with_line = next((item.finding for item in ordered if item.finding.where), worst)
    lines = finding_fields(with_line)
    ends = [item.end for item in ordered]
    return FindingGroupRow(
        key=key,
        group=cause,
        id=worst.id,
        category=find_category(worst.id, worst.family),
        severity=worst.severity,
        family=worst.family,
        title=find_title(worst),
        summary=worst.summary,
        confidence=fields["confidence"],
        start=min(item.start for item in ordered),
        end=None if None in ends else max(end for end in ends if end is not None),
        gpus_lost=_sum(item.finding.lost_ratio for item in ordered),
        gpu_hours=_sum(member.gpu_hours for member in members),
        users=_in_order(name for item in ordered for name in item.users),
        jobs=_in_order(name for item in ordered for name in item.jobs),
        is_acknowledged=all(item.acknowledged is not None for item in ordered),
        members=members,
        evidence=fields["evidence"],
        counter_evidence=[EvidencePayload(*item) for item in worst.counter_evidence],
        ruled_out=list(worst.ruled_out),
        advice=fields["advice"],
        url=fields["url"],
        where=lines["where"],
        where_note=lines["where_note"],
    )


def _build_member(item: GroupItem, now: float) -> GroupedFinding:
    finding, known = item.finding, item.acknowledged
    seconds = max(0.0, (now if item.end is None else item.end) - item.start)
    return GroupedFinding(
        key=active_key(item.node, finding.key),
        node=item.node,
        gpu=finding.gpu,
        label=finding.label,
        severity=finding.severity,
        summary=finding.summary,
        users=list(item.users),
        jobs=list(item.jobs),
        lost_ratio=finding.lost_ratio,
        start=item.start,
        end=item.end,
        gpu_hours=None if finding.lost_ratio is None else round(finding.lost_ratio * seconds / 3600, 4),
        ending=item.ending,
        acknowledged=None if known is None else AcknowledgementRow(**known._asdict()),
        silence=item.silence,
    )


def _rank(group: FindingGroupRow) -> tuple[object, ...]:
    return (
        FINDING_CATEGORIES.index(group.category),
        -SEVERITIES.index(group.severity),
        -(group.gpus_lost or 0.0),
        group.start,
        group.key,
    )


def _rank_item(item: GroupItem) -> tuple[object, ...]:
    finding = item.finding
    return (
        -SEVERITIES.index(finding.severity),
        -(finding.lost_ratio or 0.0),
        natural_key(item.node),
        natural_key(finding.label or ""),
        item.start,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(math.fsum(known), 4) if known else None


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(set(names), key=natural_key)


def build_past_items(
    context: ReportContext, query: Query, findings: Sequence[str]
) -> tuple[list[GroupItem], bool, list[str]]:
    """Return the findings that ended within a time range, whether some were left out, and what data is missing.

    Args:
        context: Source of the data.
        query: The time range and the nodes.
        findings: Only findings with these IDs; all if empty.
    """
    with collect_missing() as incomplete:
        found = context.store.findings(replace(query, limit=_MAX_PAST + 1))
        ended = [
            stored
            for stored in found
            if stored.span.end is not None
            and stored.span.end <= query.end
            and (not findings or stored.finding.id in findings)
        ]
        processes = _find_processes(context, ended)
        acknowledged = _find_acknowledgements(context, query, ended)
    items = [_past_item(find_node_name(context, stored), stored, processes, acknowledged) for stored in ended]
    return items, len(found) > _MAX_PAST, incomplete


def _past_item(
    node: str,
    stored: StoredFinding,
    processes: Mapping[tuple[int, int], Sequence[StoredProcess]],
    acknowledged: Mapping[str, Sequence[FindingAcknowledgement]],
) -> GroupItem:
    span, finding = stored.span, stored.finding
    end = span.last if span.end is None else span.end
    own = [
        process
        for pid in finding.pids
        for process in processes.get((stored.node or 0, pid), ())
        if process.first_seen <= end and (process.ended is None or process.ended >= span.start)
    ]
    owners = [owner for process in own if isinstance(owner := process.identity.get("owner"), dict)]
    known = acknowledged.get(active_key(node, finding.key), ())
    return GroupItem(
        node,
        finding,
        span.start,
        end,
        _in_order(user for owner in owners if isinstance(user := owner.get("user"), str)),
        _in_order(job for owner in owners if isinstance(job := owner.get("job"), str)),
        _ending(stored, own, end),
        next((one for one in known if span.start <= one.time <= end), None),
    )


def _ending(stored: StoredFinding, own: Sequence[StoredProcess], end: float) -> FindingEnding:
    if own and all(
        process.ended is not None and abs(process.ended - end) <= _PROCESS_END_SECONDS for process in own
    ):
        return "processes_ended"
    return "recovered" if stored.span.is_over else "not_reporting"


def _find_processes(
    context: ReportContext, ended: Sequence[StoredFinding]
) -> dict[tuple[int, int], list[StoredProcess]]:
    """Return the processes that findings are about, by node and PID."""
    pids = frozenset(pid for stored in ended for pid in stored.finding.pids)
    if not pids:
        return {}
    found: dict[tuple[int, int], list[StoredProcess]] = {}
    start = min(stored.span.start for stored in ended)
    end = max(stored.span.end or stored.span.last for stored in ended)
    nodes = frozenset(stored.node for stored in ended if stored.node is not None)
    query = Query(start, end + 1.0, nodes=nodes, pids=pids, deadline=context.deadline)
    for process in context.store.processes(query):
        found.setdefault((process.node, process.pid), []).append(process)
    return found


def _find_acknowledgements(
    context: ReportContext, query: Query, ended: Sequence[StoredFinding]
) -> dict[str, list[FindingAcknowledgement]]:
    """Return the acknowledgements of the time in which findings held, by key."""
    if not ended:
        return {}
    start = min(stored.span.start for stored in ended)
    events = context.store.events(
        Query(
            start,
            query.end,
            kinds=frozenset({ACKNOWLEDGED_EVENT}),
            limit=_MAX_ACKNOWLEDGEMENTS,
            deadline=context.deadline,
        )
    )
    found: dict[str, list[FindingAcknowledgement]] = {}
    for event in events:
        keys, by, note = event.detail.get("keys"), event.detail.get("by"), event.detail.get("note")
        if isinstance(keys, list) and isinstance(by, str):
            made = FindingAcknowledgement(event.time, by, note if isinstance(note, str) else None)
            for key in keys:
                found.setdefault(str(key), []).append(made)
    return found
