"""What `gpulse why` says: the verdict, why it is so, what to do next, and what could not be seen."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpulse.diagnosis.rulebook import BY_ID
from gpulse.diagnosis.signals import Told, told
from gpulse.model.device import ranges
from gpulse.model.finding import Diagnosis, Evidence, Finding, Severity
from gpulse.model.finding_group import by_kind
from gpulse.terminal import format as f
from gpulse.terminal.table import Paint, cut, flowed, width_of, wrapped

_GUTTER = 9
_NARROW = 50
_FEWEST_LETTERS = 12
_MOST_OTHERS = 3
_MOST_RULED_OUT = 6
_LATER_SECONDS = 5.0
_SURE = 0.85
_LIKELY = 0.6
_STYLES: dict[Severity, str] = {
    "critical": "warn",
    "high": "warn",
    "medium": "notice",
    "low": "notice",
    "info": "dim",
}


class Group(NamedTuple):
    """One finding, on every GPU about which there is the same to say."""

    finding: Finding
    labels: tuple[str, ...]
    pids: tuple[int, ...]
    others: tuple[Group, ...] = ()
    """The same finding with other numbers, on other GPUs."""
    since: float | None = None
    """When it began, where that was well after the job was first seen at work."""

    @property
    def summary(self) -> str:
        """Its sentence, with all the GPUs in it."""
        return f.plain(_about(self.finding, self.labels))


class _Page(NamedTuple):
    """How wide the text may be, and its colours."""

    width: int
    paint: Paint
    verbose: bool

    @property
    def gutter(self) -> int:
        """Columns left of the text; in a narrow window the words of the gutter stand above it."""
        return _GUTTER if self.width >= _NARROW else 1

    @property
    def room(self) -> int:
        """Columns right of the gutter."""
        return self.width - self.gutter

    def prose(self, text: str, indent: str = "", style: str = "") -> Iterator[str]:
        """Text on as many lines as it needs."""
        return (self.paint(style, line) for line in wrapped(text, self.room, indent))

    def section(self, title: str, lines: Iterable[str]) -> Iterator[str]:
        """Lines with a word in the gutter beside the first."""
        beside = f"{self.paint('title', title)}{' ' * (self.gutter - len(title))}"
        for place, line in enumerate(lines):
            if place == 0 and self.gutter < _GUTTER:
                yield self.paint("title", title)
            is_beside = place == 0 and self.gutter == _GUTTER
            yield f"{beside if is_beside else ' ' * self.gutter}{line}".rstrip()


def verdict_lines(
    diagnosis: Diagnosis, width: int, paint: Paint, *, verbose: bool, hints: Sequence[str] = ()
) -> Iterator[str]:
    """The whole answer to `why`, as lines no wider than `width`.

    Args:
        diagnosis: What was found.
        width: Columns of the terminal.
        paint: Its colours.
        verbose: Say everything about everything.
        hints: What to do next when nothing was found.
    """
    page = _Page(width, paint, verbose)
    begun = {judged.label: judged.start for judged in diagnosis.judged}
    findings, notes = _gathered(diagnosis.findings, begun), _gathered(diagnosis.info, begun)
    if not verbose:
        findings, notes = _alike(findings), _alike(notes)
    sections = [_verdict(diagnosis, findings, page)]
    if findings:
        sections += _in_full(findings[0], page)
        if verbose:
            for entry in findings[1:]:
                sections += [_headline(entry, page), *_in_full(entry, page)]
        else:
            sections.append(page.section("Also", _others(findings[1:], page)))
    else:
        sections.append(page.section("Next", _hints(hints, page)))
    sections += [
        page.section("Note", _notes(notes, page)),
        page.section("Unseen", _unseen(diagnosis.data_gaps, page)),
        _window(diagnosis, page),
    ]
    is_first = True
    for section in sections:
        for place, line in enumerate(section):
            if place == 0 and not is_first:
                yield ""
            is_first = False
            yield line


def confidence_word(confidence: float) -> str:
    """How sure a finding is, in a word."""
    return "sure" if confidence >= _SURE else "likely" if confidence >= _LIKELY else "possible"


def _gathered(findings: Sequence[Finding], begun: Mapping[str, float]) -> list[Group]:
    """Findings with the same numbers to say about several GPUs as one, where the first of them stood."""
    groups: dict[object, list[Finding]] = {}
    for finding in findings:
        said = (
            finding.id,
            finding.severity,
            confidence_word(finding.confidence),
            _about(finding, ["X"]) if finding.gpu is not None else finding.summary,
            tuple(_told(finding.evidence)),
            finding.advice,
        )
        groups.setdefault(said, []).append(finding)
    return [
        Group(
            group[0],
            tuple(label for finding in group if (label := finding.label) is not None),
            tuple(sorted({pid for finding in group for pid in finding.pids})),
            since=_since(group[0], begun),
        )
        for group in groups.values()
    ]


def _since(finding: Finding, begun: Mapping[str, float]) -> float | None:
    first = begun.get(finding.label or "")
    if finding.start is None or first is None or finding.start - first < _LATER_SECONDS:
        return None
    return finding.start


def _alike(groups: Sequence[Group]) -> list[Group]:
    """The same finding with other numbers under the first of its kind, so that eight GPUs do not say it eight times."""
    kinds = by_kind(groups, lambda group: group.finding)
    return [first._replace(others=tuple(rest)) for first, *rest in kinds]


def _verdict(diagnosis: Diagnosis, findings: Sequence[Group], page: _Page) -> Iterator[str]:
    if not findings:
        is_well = diagnosis.judged and all(judged.is_clear for judged in diagnosis.judged)
        style = "good" if is_well else "notice"
        yield from page.section("Verdict", page.prose(f.plain(diagnosis.verdict), style=style))
        return
    first = findings[0]
    rule = BY_ID.get(first.finding.id)
    title = f"{rule.title}: " if rule is not None else ""
    style = _STYLES[first.finding.severity]
    lines = [*page.prose(f"{title}{first.summary}.", style=style), *_standing(first, page)]
    yield from page.section("Verdict", lines)


def _headline(entry: Group, page: _Page) -> Iterator[str]:
    style = _STYLES[entry.finding.severity]
    return page.section("Also", [*page.prose(f"{entry.summary}.", style=style), *_standing(entry, page)])


def _standing(entry: Group, page: _Page) -> Iterator[str]:
    """Which finding it is, how bad, how sure, and whose."""
    finding = entry.finding
    sure = confidence_word(finding.confidence)
    parts = [
        finding.severity,
        f"{sure} ({finding.confidence:.2f})" if page.verbose else sure,
        f.plain(finding.id),
    ]
    if entry.labels:
        parts.append(f"GPU {ranges(entry.labels)}")
    if entry.pids:
        shown = entry.pids if page.verbose else entry.pids[:4]
        more = f" and {len(entry.pids) - len(shown)} more" if len(shown) < len(entry.pids) else ""
        parts.append(f"pid {' '.join(map(str, shown))}{more}")
    if entry.since is not None:
        parts.append(f"since {time.strftime('%H:%M:%S', time.localtime(entry.since))}")
    yield from page.prose(", ".join(parts), style="dim")
    yield from _same_elsewhere(entry, page)


def _same_elsewhere(entry: Group, page: _Page, indent: str = "") -> Iterator[str]:
    if entry.others:
        labels = [label for other in entry.others for label in other.labels]
        where = f"on GPU {ranges(labels)}" if labels else f"{len(entry.others)} times more"
        lost = [other.finding.lost_ratio for other in entry.others]
        known = sorted(value for value in lost if value is not None)
        span = ""
        if known and len(known) == len(lost):
            low, high = f.share(known[0]), f.share(known[-1])
            span = f": {low if low == high else f'{low} to {high}'} of the time lost"
        yield from page.prose(f"{indent}the same {where}{span} (-v)", indent=indent, style="dim")


def _in_full(entry: Group, page: _Page) -> Iterator[Iterator[str]]:
    finding = entry.finding
    yield page.section("Why", _table(finding.evidence, page))
    yield page.section("Against", _table(finding.counter_evidence, page))
    yield page.section("Not", _ruled_out(finding.ruled_out, page))
    yield page.section("Next", _advice(finding, page))


def _told(evidence: Iterable[Evidence]) -> list[Told]:
    return [told(item) for item in evidence]


def _table(evidence: Sequence[Evidence], page: _Page) -> Iterator[str]:
    """What was measured, its value, and the threshold it is held against."""
    rows = _told(evidence)
    if not rows:
        return
    values = max(width_of(row.value) for row in rows)
    against = max(width_of(row.against) for row in rows)
    if page.room - values - against - 4 < _FEWEST_LETTERS:
        rows, against = [row._replace(against="") for row in rows], 0
    left = page.room - values - 2 - (against + 2 if against else 0)
    words = min(max(width_of(row.words) for row in rows), max(1, left))
    for row, item in zip(rows, evidence, strict=True):
        name = cut(f.plain(row.words), words)
        line = f"{name}{' ' * (words - width_of(name))}  {f.plain(row.value):>{values}}"
        if row.against or page.verbose:
            line += f"  {page.paint('dim', row.against)}{' ' * (against - width_of(row.against))}"
        source = f"{item.signal}, {item.statistic}"
        if page.verbose and words + values + against + 6 + width_of(source) <= page.room:
            line += f"  {page.paint('dim', f.plain(source))}"
        yield line.rstrip()


def _ruled_out(entries: Sequence[str], page: _Page) -> Iterator[str]:
    shown = entries if page.verbose else entries[:_MOST_RULED_OUT]
    for entry in shown:
        yield from page.prose(f.plain(entry), indent="  ", style="dim")
    if len(shown) < len(entries):
        yield from page.prose(f"and {len(entries) - len(shown)} more (-v)", style="dim")


def _advice(finding: Finding, page: _Page) -> Iterator[str]:
    several = len(finding.advice) > 1
    for place, advice in enumerate(finding.advice, start=1):
        mark = f"{place}. " if several else "-> "
        yield from page.prose(f.plain(f"{mark}{advice.do}"), indent="   ")
        for word, text in (("why", advice.why), ("see", advice.confirm)):
            if text:
                yield from page.prose(f.plain(f"   {word}: {text}"), indent="        ", style="dim")
    yield from page.prose(f"gpulse explain {f.plain(finding.id)}", style="name")


def _others(entries: Sequence[Group], page: _Page) -> Iterator[str]:
    """The next worst in brief, and how many were left out."""
    shown = entries[:_MOST_OTHERS]
    for entry in shown:
        finding = entry.finding
        mark = f"[{finding.severity}] "
        yield from page.prose(f"{mark}{entry.summary}.", indent="  ", style=_STYLES[finding.severity])
        if finding.advice:
            yield from page.prose(f.plain(f"  -> {finding.advice[0].do}"), indent="     ")
        yield from _same_elsewhere(entry, page, "  ")
        sure = confidence_word(finding.confidence)
        yield from page.prose(f"  {sure}, gpulse explain {f.plain(finding.id)}", indent="     ", style="dim")
    left = len(entries) - len(shown)
    if left > 0:
        what = "finding" if left == 1 else "findings"
        yield from page.prose(f"{left} more {what}: -v shows all of them in full.")


def _notes(entries: Sequence[Group], page: _Page) -> Iterator[str]:
    for entry in entries:
        yield from page.prose(f"{entry.summary} ({f.plain(entry.finding.id)}).", indent="  ")
        yield from _same_elsewhere(entry, page, "  ")


def _unseen(gaps: Sequence[str], page: _Page) -> Iterator[str]:
    """What could not be seen; the same on several GPUs once."""
    labels: dict[str, list[str]] = {}
    for gap in gaps:
        named = re.match(r"GPU (\d+(?::\d+)?): (.*)", gap, re.DOTALL)
        labels.setdefault(gap if named is None else named[2], []).extend(() if named is None else (named[1],))
    for text, gpus in labels.items():
        about = f"GPU {ranges(gpus)}: " if gpus else ""
        yield from page.prose(f.plain(f"{about}{text}"), indent="  ", style="dim")


def _hints(hints: Sequence[str], page: _Page) -> Iterator[str]:
    for hint in hints:
        yield from page.prose(f.plain(f"-> {hint}"), indent="   ")


def _window(diagnosis: Diagnosis, page: _Page) -> Iterator[str]:
    """Over what all of this was said."""
    parts = []
    if diagnosis.start is not None and diagnosis.end is not None:
        begin, end = time.localtime(diagnosis.start), time.localtime(diagnosis.end)
        until = "%H:%M:%S" if begin[:3] == end[:3] else "%Y-%m-%d %H:%M:%S"
        parts.append(f"{time.strftime('%Y-%m-%d %H:%M:%S', begin)} - {time.strftime(until, end)}")
        parts.append(f.seconds(diagnosis.end - diagnosis.start))
    parts.append(f"{diagnosis.frames} {'frame' if diagnosis.frames == 1 else 'frames'}")
    if diagnosis.judged:
        parts.append(f"judged: GPU {ranges(judged.label for judged in diagnosis.judged)}")
    else:
        parts.append("no GPU judged")
    words = [*(f"{part}," for part in parts[:-1]), parts[-1]]
    yield from (page.paint("dim", line) for line in flowed(words, page.width, " ", "  "))
    if page.verbose:
        for judged in diagnosis.judged:
            text = f"  GPU {judged.label}: {judged.state}, {judged.frames} frames in {f.seconds(judged.end - judged.start)}"
            yield from (page.paint("dim", line) for line in wrapped(f.plain(text), page.width, "    "))


def _about(finding: Finding, labels: Iterable[str]) -> str:
    """Its sentence, with these GPUs in place of its own."""
    which = ranges(labels)
    return finding.summary.replace(f"GPU {finding.label}", f"GPU {which}", 1) if which else finding.summary
