"""What was wrong with a job: findings about its GPUs in its time, and what only the whole of it shows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from gpulse.model.finding import SEVERITIES, Advice, Finding, FindingKey, Severity
from gpulse.model.natural import natural_key
from gpulse.reports.efficiency import GpuUse
from gpulse.reports.findings import ReportedFinding, finding_fields
from gpulse.reports.process_index import ProcessKey
from gpulse.store.store import StoredFinding

_MAX_FINDINGS = 200
_MIN_IDLE_RATIO = 0.25
"""Of the time held; from this much on it is worth saying that GPUs were idle."""
_MIN_IDLE_SECONDS = 600.0
"""Less is the start or the end of a program."""


class JobFinding(ReportedFinding, frozen=True, kw_only=True):
    """A finding about a job's GPUs, with how often and for how long it held in the job's time."""

    node: str | None
    """null for a finding about the whole job."""
    times: int
    active_seconds: float


def merge_findings(
    held: Iterable[StoredFinding],
    names: Mapping[int, str],
    labels: Mapping[int, Collection[str]],
    pids: Mapping[int, Collection[int]] | None,
    start: float,
    end: float,
) -> list[JobFinding]:
    """Return the findings about a job's GPUs, each once with how often and for how long it held.

    Args:
        held: The findings of its nodes and time, oldest first.
        names: Names of nodes.
        labels: Its GPUs, by node.
        pids: Its processes, by node: findings about other processes alone are left out; None for all.
        start: When its time began.
        end: When its time ended.
    """
    found: dict[tuple[int, FindingKey], JobFinding] = {}
    for stored in held:
        node, span, finding = stored.node, stored.span, stored.finding
        if node is None or node not in names:
            continue
        if finding.label is not None and finding.label not in labels.get(node, ()):
            continue
        if pids is not None and finding.pids and set(finding.pids).isdisjoint(pids.get(node, ())):
            continue
        until = end if span.end is None else min(span.end, end)
        key = node, finding.key
        before = found.get(key)
        found[key] = JobFinding(
            node=names[node],
            start=span.start if before is None else before.start,
            end=span.end,
            times=1 + (0 if before is None else before.times),
            active_seconds=max(0.0, until - max(span.start, start))
            + (0.0 if before is None else before.active_seconds),
            **finding_fields(finding),
        )
    return [replace(finding, active_seconds=round(finding.active_seconds, 3)) for finding in found.values()]


def rank_findings(found: Iterable[JobFinding]) -> list[JobFinding]:
    """Return the worst findings first, and no more than anybody reads."""
    return sorted(found, key=_rank)[:_MAX_FINDINGS]


def _rank(finding: JobFinding) -> tuple[object, ...]:
    return (
        -SEVERITIES.index(finding.severity),
        -finding.active_seconds,
        natural_key(finding.node or ""),
        natural_key(finding.label or ""),
    )


def judge_job(uses: Sequence[GpuUse], start: float, end: float) -> Iterator[JobFinding]:
    """Yield findings about a job as a whole."""
    granted = [use for use in uses if use.granted_seconds is not None]
    untouched = [use for use in granted if use.use == "untouched"]
    if untouched:
        lost = sum(use.granted_seconds or 0.0 for use in untouched)
        yield _finding(
            "gpus_untouched",
            "high" if 2 * len(untouched) >= len(granted) else "medium",
            f"{len(untouched)} of {len(granted)} allocated GPUs were never touched, {lost / 3600:.1f} GPU-hours",
            Advice(
                _advise_fewer(len(granted) - len(untouched)),
                "no process of the job was ever seen on them, and they did nothing",
                "gpulse job JOB lists them as untouched",
            ),
            (start, end),
            lost / max(1.0, sum(use.granted_seconds or 0.0 for use in granted)),
        )
    held = sum(use.held.known for use in uses)
    idle = sum(use.held.idle for use in uses)
    if held and idle >= _MIN_IDLE_RATIO * held and idle >= _MIN_IDLE_SECONDS:
        yield _finding(
            "gpus_held_idle",
            "high" if 2 * idle >= held else "medium",
            f"GPUs were held but did nothing for {100 * idle / held:.0f}% of the time, {idle / 3600:.1f} GPU-hours",
            Advice(
                "end the program when its work is done, and prepare data before GPUs are asked for",
                "in these minutes the job had the GPUs, and no kernel of it ran on them",
                "the idle column says which GPUs, the page's map says when",
            ),
            (start, end),
            idle / held,
        )


def _advise_fewer(needed: int) -> str:
    if not needed:
        return "ask for GPUs only where the program uses them, and see whether it finds them"
    return f"ask for {needed} {'GPU' if needed == 1 else 'GPUs'}, or let the program use all of them"


def _finding(
    id_: str, severity: Severity, summary: str, advice: Advice, span: tuple[float, float], lost: float
) -> JobFinding:
    finding = Finding(id_, "gpu_use", severity, 1.0, summary, lost_ratio=round(lost, 4), advice=(advice,))
    return JobFinding(
        node=None,
        start=span[0],
        end=span[1],
        times=1,
        active_seconds=round(span[1] - span[0], 3),
        **finding_fields(finding),
    )


def pids_by_node(keys: Iterable[ProcessKey]) -> dict[int, set[int]]:
    """Return pids by their node."""
    found: dict[int, set[int]] = {}
    for node, pid, _ in keys:
        found.setdefault(node, set()).add(pid)
    return found
