"""What is wrong, and what could not be read: the lines under the tables."""

from __future__ import annotations

from collections.abc import Iterator

from gpulse.model.finding import Finding
from gpulse.model.health import Health
from gpulse.model.snapshot import Snapshot
from gpulse.terminal import format as f
from gpulse.terminal.table import Paint, wrapped

_INDENT = "  "
_URGENT = ("high", "critical")
_SAID_BY_A_FINDING = ("gpu_lost", "not_answering")


def finding_lines(snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    """Every finding with what to do about it."""
    if not snapshot.findings:
        words = (
            "The driver reports no fault." if snapshot.frame.gpus else "No driver, so no faults to report."
        )
        yield from wrapped(words, width)
    for finding in snapshot.findings:
        yield from _finding(finding, width, paint)
        for advice in finding.advice:
            yield from wrapped(f"  -> {advice.do}", width, "     ")


def urgent_lines(snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    """The findings that nobody should have to ask for."""
    urgent = [finding for finding in snapshot.findings if finding.severity in _URGENT]
    for finding in urgent:
        yield from _finding(finding, width, paint)
    if urgent:
        yield from (paint("dim", line) for line in wrapped("`gpulse -b` says what to do about it.", width))


def health_lines(snapshot: Snapshot, width: int, paint: Paint, *, verbose: bool) -> Iterator[str]:
    """What could not be read and why; with `verbose` also what this machine simply cannot say."""
    for health in snapshot.frame.health:
        if (health.is_problem or verbose) and not _is_said_above(health, snapshot):
            about = f"{health.subject}: " if health.subject else ""
            missing = f" ({', '.join(health.metrics)})" if health.metrics and verbose else ""
            style = "notice" if health.is_problem else "dim"
            for line in wrapped(f.plain(f"! {about}{health.detail}{missing}"), width, _INDENT):
                yield paint(style, line)
            if health.hint:
                for line in wrapped(f"  -> {f.plain(health.hint)}", width, "     "):
                    yield paint("dim", line)


def _finding(finding: Finding, width: int, paint: Paint) -> Iterator[str]:
    style = "warn" if finding.severity in _URGENT else "notice"
    for line in wrapped(f"[{finding.severity}] {f.plain(finding.summary)}", width, _INDENT):
        yield paint(style, line)


def _is_said_above(health: Health, snapshot: Snapshot) -> bool:
    """Whether a finding, or the line in place of the GPU table, has said it already."""
    if not snapshot.frame.gpus:
        return health.source == "nvml"
    return health.code in _SAID_BY_A_FINDING and any(
        health.subject == f"gpu {finding.gpu}" for finding in snapshot.findings
    )
