"""Findings and health problems in the live view: a panel of the worst ones, and a page of all."""

from __future__ import annotations

from dataclasses import dataclass

from gpulse.model.finding import SEVERITIES, Advice, Finding, Severity
from gpulse.model.source_health import format_subject, merge_gpu_entries
from gpulse.terminal.snapshot_tables import is_in_findings, since
from gpulse.terminal.top.styled_text import (
    Glyphs,
    Line,
    StyledText,
    Tone,
    align_both,
    styled,
    truncate,
    width,
)
from gpulse.terminal.top.view_state import TopSnapshot

_TONES: dict[Severity, Tone] = {
    "info": "dim",
    "low": "plain",
    "medium": "warn",
    "high": "bad",
    "critical": "alert",
}

_MIN_CELLS_FOR_BOTH = 40


@dataclass(frozen=True, slots=True)
class Problem:
    """A finding or a health problem."""

    severity: Severity
    about: str
    text: str
    advice: tuple[Advice, ...] = ()
    hint: str | None = None
    since: str = ""
    """When it began and for how long it has held; empty when that is unknown."""


def find_problems(snapshot: TopSnapshot) -> list[Problem]:
    """Return findings and health problems, most severe first."""
    found = [
        Problem(
            finding.severity,
            "node" if finding.gpu is None else f"GPU {finding.label or finding.gpu}",
            _without_gpu(finding),
            finding.advice,
            since=since(finding, snapshot.frame.time),
        )
        for finding in snapshot.findings
    ]
    found += [
        Problem(
            "high" if item.source == "nvml" else "medium",
            format_subject(item.subject or item.source),
            _reason(item.code, item.detail),
            hint=item.hint,
        )
        for item in merge_gpu_entries(snapshot.frame.health)
        if item.is_problem and not is_in_findings(item, snapshot.findings)
    ]
    return sorted(found, key=lambda item: -SEVERITIES.index(item.severity))


def panel_lines(found: list[Problem], room: int, cells: int, glyphs: Glyphs) -> list[Line]:
    """Return the worst problems in this many lines; the last line says how many more there are."""
    if not found:
        return [styled(" no findings so far", "dim")]
    shown = [problem_line(item, cells, glyphs) for item in found[:room]]
    hidden = len(found) - len(shown)
    more: Line = (
        (StyledText("  "), StyledText("f", "key"), StyledText(f" +{hidden} more ", "dim"))
        if hidden
        else (StyledText(" "), StyledText("f", "key"), StyledText(" advice ", "dim"))
    )
    shown[-1] = align_both(problem_line(found[len(shown) - 1], cells - width(more), glyphs), more, cells)
    return shown


def page_lines(found: list[Problem], glyphs: Glyphs) -> list[Line]:
    """Return all problems with their advice."""
    if not found:
        return [styled("No findings.")]
    out: list[Line] = []
    for item in found:
        out.append((*_head(item, glyphs), StyledText(glyphs.clean(item.text))))
        if item.since:
            out.append((StyledText("  since", "head"), StyledText(item.since.removeprefix("since "), "dim")))
        for advice in item.advice:
            out.append((StyledText("  try", "head"), StyledText(glyphs.clean(advice.do))))
            out.append((StyledText("  why", "head"), StyledText(glyphs.clean(advice.why), "dim")))
            out.append((StyledText("  check", "head"), StyledText(glyphs.clean(advice.confirm), "dim")))
        if item.hint:
            out.append((StyledText("  try", "head"), StyledText(glyphs.clean(item.hint), "dim")))
        out.append(())
    return out[:-1]


def _without_gpu(finding: Finding) -> str:
    """Return the summary without the GPU's name, which is already shown before it."""
    about = f"GPU {finding.label or finding.gpu}"
    return finding.summary.removeprefix(f"{about}: ").removeprefix(f"{about} ")


def _reason(code: str, detail: str) -> str:
    return f"{code.replace('_', ' ')}: {detail}"


def _head(item: Problem, glyphs: Glyphs) -> Line:
    tone = _TONES[item.severity]
    mark = glyphs.warning if SEVERITIES.index(item.severity) >= 2 else glyphs.dot
    return (
        StyledText(f"{mark} {item.severity.upper():<8} ", tone),
        StyledText(f"{glyphs.clean(item.about)}  ", "strong"),
    )


def problem_line(item: Problem, cells: int, glyphs: Glyphs) -> Line:
    """Return one problem in one line: after the text comes when it began, or only for how long if there is little room."""
    head = (StyledText(" "), *_head(item, glyphs))
    text, room = glyphs.clean(item.text), cells - width(head)
    held = f"  {item.since}" if item.since else ""
    if len(held) + width(styled(text)) > room:
        held = f" {held[held.index('(') :]}" if held and room >= _MIN_CELLS_FOR_BOTH else ""
    return (*head, StyledText(truncate(text, room - len(held), glyphs.ellipsis)), StyledText(held, "dim"))
