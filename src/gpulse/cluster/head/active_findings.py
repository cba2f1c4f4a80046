"""Collect the findings that hold now, of all nodes, with the users and jobs that they affect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from gpulse.cluster.protocol.head_interface import LiveNode
from gpulse.diagnosis.finding_texts import describe_in_line
from gpulse.diagnosis.rule_registry import find_category, find_title
from gpulse.model.finding import (
    FINDING_CATEGORIES,
    SEVERITIES,
    CodeLocation,
    Finding,
    FindingCategory,
    Severity,
)
from gpulse.model.finding_acknowledgement import active_key, group_key
from gpulse.model.frame import GpuReading
from gpulse.model.safe_text import natural_key


class ActiveFinding(NamedTuple):
    """One finding that holds now, about one GPU or one node."""

    key: str
    """Stays the same while the finding holds, over restarts of agents and heads: `ID/node/GPU/cause`."""
    finding: str
    """ID of the rule, `node_lost` or `node_missing`."""
    category: FindingCategory
    severity: Severity
    node: str
    gpus: tuple[int, ...]
    """Indexes of its GPUs; empty for a finding about a node."""
    label: str | None
    """The GPU for people: `3`, or `3:1` for a MIG instance; None for a finding about a node."""
    users: tuple[str, ...]
    jobs: tuple[str, ...]
    since: float
    """When the condition began, in epoch seconds on the head's clock."""
    title: str
    """The finding in a few words, the same for all GPUs."""
    summary: str
    """One sentence with the main numbers."""
    evidence: tuple[str, ...]
    """One line per measured value, with its threshold."""
    advice: tuple[str, ...]
    """What to do, the most useful first."""
    acknowledged: bool
    silenced: bool
    lost_ratio: float | None
    """Share of the GPU's time that is lost; None when it is unknown or does not apply."""
    confidence: float | None
    """0 to 1; None when it is unknown."""
    where: tuple[CodeLocation, ...]
    """Lines of code behind it, the most frequent first. Only for callers who may change something."""
    reported: Finding
    """The whole finding, as its agent or the head made it."""

    @property
    def group(self) -> str:
        """Key of all findings with the same cause: `ID`, or `ID/cause` for faults of several causes."""
        return group_key(self.reported.key)


class ResponseLookup(Protocol):
    """Says which findings somebody has acknowledged or silenced."""

    def is_acknowledged(self, finding: ActiveFinding) -> bool:
        """Whether somebody has acknowledged a finding since its condition began."""

    def is_silenced(self, finding: ActiveFinding, now: float) -> bool:
        """Whether a silence matches a finding now."""


class NoResponses:
    """Nobody has acknowledged or silenced anything."""

    def is_acknowledged(self, _finding: ActiveFinding) -> bool:
        """Return False."""
        return False

    def is_silenced(self, _finding: ActiveFinding, _now: float) -> bool:
        """Return False."""
        return False


def collect_active_findings(
    nodes: Iterable[LiveNode],
    missing: Iterable[Finding],
    now: float,
    responses: ResponseLookup | None = None,
) -> list[ActiveFinding]:
    """Return all findings that hold now: faults first, then slowness and waste, each by severity and lost time.

    Args:
        nodes: The nodes of the fleet; the findings of a lost node are the one that says so.
        missing: Findings about expected nodes that have never reported; the cause is the name of the node.
        now: Epoch seconds.
        responses: What people have acknowledged and silenced.
    """
    known = NoResponses() if responses is None else responses
    found = [_active(node.name, finding, node, now) for node in nodes for finding in node.findings]
    found += [_active(finding.cause or "", finding, None, now) for finding in missing]
    return sorted(
        (
            item._replace(acknowledged=known.is_acknowledged(item), silenced=known.is_silenced(item, now))
            for item in found
        ),
        key=rank_active,
    )


def rank_active(finding: ActiveFinding) -> tuple[object, ...]:
    """Return the sort key of a finding: faults first, then slowness and waste, each by severity and lost time."""
    return (
        FINDING_CATEGORIES.index(finding.category),
        -SEVERITIES.index(finding.severity),
        -(finding.lost_ratio or 0.0),
        natural_key(finding.node),
        natural_key(finding.label or ""),
        finding.key,
    )


def _active(node: str, finding: Finding, live: LiveNode | None, now: float) -> ActiveFinding:
    users, jobs = ((), ()) if live is None else find_owners(live, finding)
    return ActiveFinding(
        key=active_key(node, finding.key),
        finding=finding.id,
        category=find_category(finding.id, finding.family),
        severity=finding.severity,
        node=node,
        gpus=() if finding.gpu is None else (finding.gpu,),
        label=finding.label,
        users=users,
        jobs=jobs,
        since=now if finding.start is None else finding.start,
        title=find_title(finding),
        summary=finding.summary,
        evidence=tuple(map(describe_in_line, finding.evidence)),
        advice=tuple(advice.do for advice in finding.advice),
        acknowledged=False,
        silenced=False,
        lost_ratio=finding.lost_ratio,
        confidence=None if math.isnan(finding.confidence) else finding.confidence,
        where=finding.where or (),
        reported=finding,
    )


def find_owners(node: LiveNode, finding: Finding) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the users and the jobs that a finding affects, in natural order.

    They are those of its processes; where it names none, those of all processes on its GPU, or on all GPUs of the node,
    and of the jobs that hold them.
    """
    frame, pids = node.frame, set(finding.pids)
    uuids: set[str] = set()
    if not pids and frame is None:  # since the head started, nothing has arrived
        pids = set(node.processes) if finding.label is None else set()
    elif not pids:
        gpus = _gpus(node, finding)
        pids = {process.pid for gpu in gpus for process in gpu.processes or ()}
        uuids = {gpu.device.uuid for gpu in gpus}
    read = {} if frame is None else {reading.pid: reading.identity for reading in frame.processes}
    owners = [known.owner for pid in pids if (known := node.processes.get(pid) or read.get(pid)) is not None]
    holders = [job for job in (frame.jobs if frame else ()) if not uuids.isdisjoint(job.gpus)]
    users = {owner.user for owner in owners} | {job.user for job in holders}
    jobs = {owner.job for owner in owners} | {job.id for job in holders}
    return _in_order(users), _in_order(jobs)


def _gpus(node: LiveNode, finding: Finding) -> Sequence[GpuReading]:
    gpus = () if node.frame is None else node.frame.gpus
    return [gpu for gpu in gpus if finding.label in (None, gpu.device.label)]


def _in_order(names: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(sorted((name for name in names if name), key=natural_key))
