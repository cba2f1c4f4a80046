"""What is wrong, and what could not be read: the lines under the tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpulse.model.finding import Finding
from gpulse.model.health import Health, gathered
from gpulse.model.snapshot import Snapshot
from gpulse.terminal import format as f
from gpulse.terminal.table import Paint, wrapped

_INDENT = "  "
_URGENT = ("high", "critical")
_LASTING_SECONDS = 15.0
"""More than one look watches for: what it saw from its first moment on began nobody knows when."""


def finding_lines(snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    """Every finding with what to do about it."""
    if not snapshot.findings:
        yield from wrapped(_no_finding(snapshot), width)
    for finding in snapshot.findings:
        yield from _finding(finding, snapshot, width, paint)
        for advice in finding.advice:
            yield from wrapped(f"  -> {advice.do}", width, "     ")


def urgent_lines(snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    """The findings that nobody should have to ask for."""
    if not snapshot.frame.gpus:
        return  # the line in place of the table says why
    urgent = [finding for finding in snapshot.findings if finding.severity in _URGENT]
    for finding in urgent:
        yield from _finding(finding, snapshot, width, paint)
    if urgent:
        yield from (paint("dim", line) for line in wrapped("`gpulse -b` says what to do about it.", width))


def health_lines(snapshot: Snapshot, width: int, paint: Paint, *, verbose: bool) -> Iterator[str]:
    """What could not be read and why; with `verbose` also what this machine simply cannot say."""
    for health in gathered(snapshot.frame.health):
        if (health.is_problem or verbose) and not _is_said_above(health, snapshot):
            about = f"{health.subject}: " if health.subject else ""
            missing = f" ({', '.join(health.metrics)})" if health.metrics and verbose else ""
            style = "notice" if health.is_problem else "dim"
            for line in wrapped(f.plain(f"! {about}{health.detail}{missing}"), width, _INDENT):
                yield paint(style, line)
            if health.hint:
                for line in wrapped(f"  -> {f.plain(health.hint)}", width, "     "):
                    yield paint("dim", line)


def since(finding: Finding, now: float) -> str:
    """Since when a finding holds, empty where that is not known or it has only begun."""
    if finding.start is None or now - finding.start < _LASTING_SECONDS:
        return ""
    return f.since(finding.start, now)


def is_said(health: Health, findings: Iterable[Finding]) -> bool:
    """Whether one of the findings is about this entry of health, in the same words."""
    return health.detail != "" and any(finding.summary.endswith(health.detail) for finding in findings)


def _no_finding(snapshot: Snapshot) -> str:
    if snapshot.verdict is not None:
        return f.plain(snapshot.verdict)
    if snapshot.frame.gpus:
        return "The driver reports no fault. `gpulse why` watches the jobs and says what slows them."
    missing = any(health.code == "driver_missing" for health in snapshot.frame.health)
    return f"No {'driver' if missing else 'GPU'}, so no faults to report."


def _finding(finding: Finding, snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    style = "warn" if finding.severity in _URGENT else "notice"
    held = since(finding, snapshot.frame.time)
    text = f"[{finding.severity}] {f.plain(finding.summary)}{f', {held}' if held else ''}"
    for line in wrapped(text, width, _INDENT):
        yield paint(style, line)


def _is_said_above(health: Health, snapshot: Snapshot) -> bool:
    """Whether a finding, or the line in place of the GPU table, has said it already."""
    if not snapshot.frame.gpus:
        return health.source == "nvml"
    return health.source == "nvml" and is_said(health, snapshot.findings)
