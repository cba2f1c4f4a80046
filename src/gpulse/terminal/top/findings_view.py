"""What is wrong: findings and problems of health, most severe first, as a strip and as a page."""

from __future__ import annotations

from dataclasses import dataclass

from gpulse.model.finding import SEVERITIES, Advice, Finding, Severity
from gpulse.model.health import gathered
from gpulse.terminal.notes import is_said, since
from gpulse.terminal.top.cells import Line, Piece, Tone, cut, ends, width, words
from gpulse.terminal.top.glyphs import Glyphs
from gpulse.terminal.top.snapshot import Snapshot

_TONES: dict[Severity, Tone] = {
    "info": "dim",
    "low": "plain",
    "medium": "warn",
    "high": "bad",
    "critical": "alert",
}

_ROOM_FOR_BOTH = 40


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that is wrong."""

    severity: Severity
    about: str
    text: str
    advice: tuple[Advice, ...] = ()
    hint: str | None = None
    since: str = ""
    """When it began and how long it lasts, empty when that is not known."""


def items(snapshot: Snapshot) -> list[Item]:
    """Findings and problems of health, most severe first, each kind in its own order."""
    found = [
        Item(
            finding.severity,
            "node" if finding.gpu is None else f"gpu {finding.label or finding.gpu}",
            _without_gpu(finding),
            finding.advice,
            since=since(finding, snapshot.frame.time),
        )
        for finding in snapshot.findings
    ]
    found += [
        Item(
            "high" if item.source == "nvml" else "medium",
            item.subject or item.source,
            _reason(item.code, item.detail),
            hint=item.hint,
        )
        for item in gathered(snapshot.frame.health)
        if item.is_problem and not is_said(item, snapshot.findings)
    ]
    return sorted(found, key=lambda item: -SEVERITIES.index(item.severity))


def lines(found: list[Item], room: int, cells: int, glyphs: Glyphs) -> list[Line]:
    """The first of them in so many lines; the last line says how many more there are."""
    if not found:
        return [words(" nothing wrong found so far", "dim")]
    shown = [_line(item, cells, glyphs) for item in found[:room]]
    hidden = len(found) - len(shown)
    more: Line = (
        (Piece("  "), Piece("f", "key"), Piece(f" +{hidden} more ", "dim"))
        if hidden
        else (Piece(" "), Piece("f", "key"), Piece(" advice ", "dim"))
    )
    shown[-1] = ends(_line(found[len(shown) - 1], cells - width(more), glyphs), more, cells)
    return shown


def page(found: list[Item], glyphs: Glyphs) -> list[Line]:
    """All of them with their advice."""
    if not found:
        return [words("Nothing wrong found.")]
    out: list[Line] = []
    for item in found:
        out.append((*_head(item, glyphs), Piece(glyphs.clean(item.text))))
        if item.since:
            out.append((Piece("  since", "head"), Piece(item.since.removeprefix("since "), "dim")))
        for advice in item.advice:
            out.append((Piece("  do", "head"), Piece(glyphs.clean(advice.do))))
            out.append((Piece("  because", "head"), Piece(glyphs.clean(advice.why), "dim")))
            out.append((Piece("  confirm", "head"), Piece(glyphs.clean(advice.confirm), "dim")))
        if item.hint:
            out.append((Piece("  try", "head"), Piece(glyphs.clean(item.hint), "dim")))
        out.append(())
    return out[:-1]


def _without_gpu(finding: Finding) -> str:
    """The summary without the GPU's name, which stands before it already."""
    about = f"GPU {finding.label or finding.gpu}"
    return finding.summary.removeprefix(f"{about}: ").removeprefix(f"{about} ")


def _reason(code: str, detail: str) -> str:
    return f"{code.replace('_', ' ')}: {detail}"


def _head(item: Item, glyphs: Glyphs) -> Line:
    tone = _TONES[item.severity]
    mark = glyphs.warning if SEVERITIES.index(item.severity) >= 2 else glyphs.dot
    return (
        Piece(f"{mark} {item.severity.upper():<8} ", tone),
        Piece(f"{glyphs.clean(item.about)}  ", "strong"),
    )


def _line(item: Item, cells: int, glyphs: Glyphs) -> Line:
    """When it began stands after it as far as there is room; of a text that is cut only how long it lasts."""
    head = (Piece(" "), *_head(item, glyphs))
    text, room = glyphs.clean(item.text), cells - width(head)
    held = f"  {item.since}" if item.since else ""
    if len(held) + width(words(text)) > room:
        held = f" {held[held.index('(') :]}" if held and room >= _ROOM_FOR_BOTH else ""
    return (*head, Piece(cut(text, room - len(held), glyphs.ellipsis)), Piece(held, "dim"))
