"""Detect which findings have begun and which are resolved, and decide which targets they are sent to; pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from gpulse.cluster.notify.config import QuietHours, Route
from gpulse.model.finding import SEVERITIES, FindingCategory, Severity

MAX_TRACKED_FINDINGS = 20_000
"""Findings beyond this number begin only when others have ended."""
_NODE_LOST = "node_lost"
_MAX_NAMES = 50
_MAX_LINES = 20
_MAX_TEXT_CHARACTERS = 600
ChangeKind = Literal["begin", "resolved", "reminder"]


class RoutedFinding(Protocol):
    """What routes look at in a finding."""

    @property
    def finding(self) -> str:
        """ID of the finding, such as `gpu_fault`."""

    @property
    def category(self) -> FindingCategory:
        """Whether it is a fault, slowness or waste."""

    @property
    def severity(self) -> Severity:
        """Its severity."""

    @property
    def node(self) -> str:
        """Name of its node."""

    @property
    def users(self) -> tuple[str, ...]:
        """Users of its GPUs."""

    @property
    def jobs(self) -> tuple[str, ...]:
        """Jobs on its GPUs."""


def find_targets(finding: RoutedFinding, routes: Iterable[Route]) -> tuple[str, ...]:
    """Return the names of the targets of all routes that match, in their order and without repetition."""
    found = (name for route in routes if matches_route(finding, route) for name in route.targets)
    return tuple(dict.fromkeys(found))


def matches_route(finding: RoutedFinding, route: Route) -> bool:
    """Return whether a finding matches every condition of a route.

    A condition on users or jobs matches if one of the finding's users or jobs does, so it never matches a finding
    without any.
    """
    return (
        is_at_least(finding.severity, route.severity)
        and (not route.categories or finding.category in route.categories)
        and _matches((finding.finding,), route.findings)
        and _matches((finding.node,), route.nodes)
        and _matches(finding.users, route.users)
        and _matches(finding.jobs, route.jobs)
    )


def is_at_least(severity: Severity, lowest: Severity) -> bool:
    """Return whether a severity reaches another one."""
    return SEVERITIES.index(severity) >= SEVERITIES.index(lowest)


def is_quiet(quiet: QuietHours | None, now: float) -> bool:
    """Return whether a time is in quiet hours.

    Args:
        quiet: The quiet hours; None for none.
        now: Epoch seconds.
    """
    if quiet is None:
        return False
    moment = datetime.fromtimestamp(now, UTC)
    local = (moment.astimezone() if quiet.zone is None else moment.astimezone(quiet.zone)).time()
    if quiet.start < quiet.end:
        return quiet.start <= local < quiet.end
    return local >= quiet.start or local < quiet.end


def passes_quiet(finding: RoutedFinding, quiet: QuietHours) -> bool:
    """Return whether a finding is sent even in quiet hours."""
    return (
        (quiet.except_severity is not None and is_at_least(finding.severity, quiet.except_severity))
        or finding.category in quiet.except_categories
        or (bool(quiet.except_findings) and _matches((finding.finding,), quiet.except_findings))
    )


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


class NotifiableFinding(RoutedFinding, Protocol):
    """An active finding of the fleet, as the head collects it."""

    @property
    def key(self) -> str:
        """Identifies the finding for as long as it is active."""

    @property
    def group(self) -> str:
        """Identifies the findings that have the same cause on other GPUs and nodes."""

    @property
    def label(self) -> str | None:
        """Its GPU: `3`, or `3:1` for a MIG instance; None for a finding about the node."""

    @property
    def since(self) -> float:
        """When it began, in epoch seconds."""

    @property
    def title(self) -> str:
        """What it is, in a few words."""

    @property
    def summary(self) -> str:
        """One sentence with the main numbers."""

    @property
    def evidence(self) -> tuple[str, ...]:
        """Measured values and their thresholds."""

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do."""

    @property
    def acknowledged(self) -> bool:
        """Whether somebody has acknowledged it."""

    @property
    def silenced(self) -> bool:
        """Whether it is silenced now."""


class FindingRecord(Struct, frozen=True):
    """What messages say about a finding; bounded, so that it can be stored."""

    key: str
    group: str
    finding: str
    category: FindingCategory
    severity: Severity
    node: str
    label: str | None
    users: tuple[str, ...]
    jobs: tuple[str, ...]
    since: float
    title: str
    summary: str
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


class AnnouncedFinding(Struct, frozen=True):
    """A finding that was announced to at least one target and is not resolved yet."""

    record: FindingRecord
    targets: dict[str, float]
    """The targets that were told, and when."""
    absent_since: float | None = None
    """When it was first absent, if it is; None while it is active."""


class Change(NamedTuple):
    """A change of a finding that one target is told."""

    target: str
    kind: ChangeKind
    time: float
    record: FindingRecord


class ChangeRules(NamedTuple):
    """Settings of the detection."""

    routes: Sequence[Route]
    resolve_seconds: float = 120.0
    repeat_seconds: float | None = None


def detect_changes(
    tracked: Mapping[str, AnnouncedFinding],
    findings: Iterable[NotifiableFinding],
    rules: ChangeRules,
    now: float,
    *,
    moved_nodes: Collection[str] = (),
) -> tuple[dict[str, AnnouncedFinding], list[Change]]:
    """Return the findings that are tracked from now on, and what has changed for which target.

    For each finding and target, `begin` and `resolved` alternate. A finding that is acknowledged or silenced does not
    begin and gives no reminders; its `resolved` is sent to targets that were told when it began. While a node is lost,
    nothing is known about its other findings, so they are not resolved. The findings of a node that has moved to another
    head are forgotten: that head announces them.

    Args:
        tracked: The findings that are tracked so far, by key.
        findings: All active findings.
        rules: The settings.
        now: Epoch seconds.
        moved_nodes: Nodes that report to another head now.
    """
    active = {finding.key: finding for finding in findings}
    lost_nodes = {finding.node for finding in active.values() if finding.finding == _NODE_LOST}
    after: dict[str, AnnouncedFinding] = {}
    changes: list[Change] = []
    for key, known in tracked.items():
        if key in active or known.record.node in moved_nodes:
            continue
        since = now if known.absent_since is None else min(known.absent_since, now)
        if known.record.node in lost_nodes:
            after[key] = replace(known, absent_since=None)
        elif now - since < rules.resolve_seconds:
            after[key] = replace(known, absent_since=since)
        else:
            changes += [Change(target, "resolved", since, known.record) for target in known.targets]
    for key, finding in active.items():
        before = tracked.get(key)
        if before is None and len(after) >= MAX_TRACKED_FINDINGS:
            continue
        announced, new = _announce(finding, before, rules, now)
        changes += new
        if announced is not None:
            after[key] = announced
    return after, changes


def _announce(
    finding: NotifiableFinding, before: AnnouncedFinding | None, rules: ChangeRules, now: float
) -> tuple[AnnouncedFinding | None, list[Change]]:
    """Return an active finding as it is tracked from now on, and what its targets are told."""
    targets = {} if before is None else dict(before.targets)
    if finding.acknowledged or finding.silenced:
        return (None if before is None else _active_again(before)), []
    kinds: dict[str, ChangeKind] = {}
    for target in find_targets(finding, rules.routes):
        if target not in targets:
            kinds[target] = "begin"
        elif rules.repeat_seconds is not None and now - targets[target] >= rules.repeat_seconds:
            kinds[target] = "reminder"
    if not kinds:
        return (None if before is None else _active_again(before)), []
    record = make_record(finding)
    new = [Change(target, kind, now, record) for target, kind in kinds.items()]
    targets |= dict.fromkeys(kinds, now)
    return AnnouncedFinding(replace(record, evidence=(), advice=()), targets), new


def _active_again(known: AnnouncedFinding) -> AnnouncedFinding:
    return known if known.absent_since is None else replace(known, absent_since=None)


def forget_announcements(
    tracked: Mapping[str, AnnouncedFinding], withdrawn: Iterable[tuple[str, str]]
) -> dict[str, AnnouncedFinding]:
    """Return the tracked findings after some of their `begin` changes were withdrawn before they were sent.

    Args:
        tracked: The tracked findings.
        withdrawn: Key and target of each.
    """
    after = dict(tracked)
    for key, target in withdrawn:
        known = after.get(key)
        if known is None:
            continue
        targets = {name: time for name, time in known.targets.items() if name != target}
        if targets:
            after[key] = replace(known, targets=targets)
        else:
            del after[key]
    return after


def make_record(finding: NotifiableFinding) -> FindingRecord:
    """Return what messages say about a finding, cut to a length that can be stored."""
    return FindingRecord(
        finding.key,
        finding.group,
        finding.finding,
        finding.category,
        finding.severity,
        finding.node,
        finding.label,
        _cut(finding.users, _MAX_NAMES),
        _cut(finding.jobs, _MAX_NAMES),
        finding.since,
        finding.title[:_MAX_TEXT_CHARACTERS],
        finding.summary[:_MAX_TEXT_CHARACTERS],
        _cut(finding.evidence, _MAX_LINES),
        _cut(finding.advice, _MAX_LINES),
    )


def _cut(texts: Sequence[str], max_count: int) -> tuple[str, ...]:
    return tuple(text[:_MAX_TEXT_CHARACTERS] for text in texts[:max_count])
