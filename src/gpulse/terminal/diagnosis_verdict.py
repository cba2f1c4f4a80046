"""Output of `gpulse why`: the verdict, its evidence, what to do next, and the missing data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpulse.diagnosis.finding_texts import EvidenceText, describe_evidence
from gpulse.diagnosis.line_search import describe_where
from gpulse.diagnosis.rule_registry import CAPABILITY_LEVELS, RULES_BY_ID, describe_level
from gpulse.model.device import gpu_label
from gpulse.model.finding import DIAGNOSIS_LEVELS, Diagnosis, Evidence, Finding, Severity, group_by_kind
from gpulse.terminal import value_format as f
from gpulse.terminal.table import Paint, display_width, truncate, wrap, wrap_items

_GUTTER = 9
_MIN_GUTTER_WIDTH = 50
_MIN_TEXT_COLUMNS = 12
_MAX_OTHER_FINDINGS = 3
_MAX_RULED_OUT = 6
_SAME_START_SECONDS = 5.0
_CERTAIN_CONFIDENCE = 0.85
_LIKELY_CONFIDENCE = 0.6
_STYLES: dict[Severity, str] = {
    "critical": "warn",
    "high": "warn",
    "medium": "notice",
    "low": "notice",
    "info": "dim",
}


class VerdictFinding(NamedTuple):
    """One finding, on all GPUs that have it with the same text."""

    finding: Finding
    labels: tuple[str, ...]
    pids: tuple[int, ...]
    others: tuple[VerdictFinding, ...] = ()
    """The same finding with other numbers, on other GPUs."""
    since: float | None = None
    """When it began, if that was well after the job's own start."""

    @property
    def summary(self) -> str:
        """Sentence about the finding that names all its GPUs."""
        return f.plain(_about(self.finding, self.labels))


class _VerdictLayout(NamedTuple):
    """Width and colors of the text."""

    width: int
    paint: Paint
    verbose: bool

    @property
    def gutter(self) -> int:
        """Columns left of the text; in a narrow window, titles stand above the text instead."""
        return _GUTTER if self.width >= _MIN_GUTTER_WIDTH else 1

    @property
    def room(self) -> int:
        """Columns right of the gutter."""
        return self.width - self.gutter

    def prose(self, text: str, indent: str = "", style: str = "") -> Iterator[str]:
        """Yield text on as many lines as it needs."""
        return (self.paint(style, line) for line in wrap(text, self.room, indent))

    def section(self, title: str, lines: Iterable[str]) -> Iterator[str]:
        """Yield lines with a title in the gutter of the first."""
        padded_title = f"{self.paint('title', title)}{' ' * (self.gutter - len(title))}"
        for place, line in enumerate(lines):
            if place == 0 and self.gutter < _GUTTER:
                yield self.paint("title", title)
            has_title = place == 0 and self.gutter == _GUTTER
            yield f"{padded_title if has_title else ' ' * self.gutter}{line}".rstrip()


def verdict_lines(
    diagnosis: Diagnosis, width: int, paint: Paint, *, verbose: bool, hints: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the whole output of `why` as lines no wider than `width`.

    Args:
        diagnosis: The diagnosis to show.
        width: Columns of the terminal.
        paint: Adds colors.
        verbose: Show all findings with all their evidence.
        hints: What to do next when nothing was found.
    """
    layout = _VerdictLayout(width, paint, verbose)
    begun = {judged.label: judged.start for judged in diagnosis.judged}
    findings, notes = _group_findings(diagnosis.findings, begun), _group_findings(diagnosis.info, begun)
    if not verbose:
        findings, notes = _nest_same_kind(findings), _nest_same_kind(notes)
    sections = [_verdict(diagnosis, findings, layout)]
    if findings:
        sections += _details(findings[0], layout)
        if verbose:
            for entry in findings[1:]:
                sections += [_headline(entry, layout), *_details(entry, layout)]
        else:
            sections.append(layout.section("Also", _others(findings[1:], layout)))
    else:
        sections.append(layout.section("Next", _hints(hints, layout)))
    sections += [
        layout.section("Note", _notes(notes, layout)),
        layout.section("No data", _missing_data(diagnosis.data_gaps, layout)),
        layout.section("Level", _levels(diagnosis, layout)),
        _window(diagnosis, layout),
    ]
    is_first = True
    for section in sections:
        for place, line in enumerate(section):
            if place == 0 and not is_first:
                yield ""
            is_first = False
            yield line


def confidence_word(confidence: float) -> str:
    """Return how certain a finding is, in one word."""
    return (
        "sure"
        if confidence >= _CERTAIN_CONFIDENCE
        else "likely"
        if confidence >= _LIKELY_CONFIDENCE
        else "possible"
    )


def _group_findings(findings: Sequence[Finding], begun: Mapping[str, float]) -> list[VerdictFinding]:
    """Merge findings that have the same text and numbers on several GPUs; the order of the first ones stays."""
    groups: dict[object, list[Finding]] = {}
    for finding in findings:
        key = (
            finding.id,
            finding.severity,
            confidence_word(finding.confidence),
            _about(finding, ["X"]) if finding.gpu is not None else finding.summary,
            tuple(_evidence_texts(finding.evidence)),
            finding.advice,
            tuple(location[2:5] for location in (finding.where or ())[:1]),
        )
        groups.setdefault(key, []).append(finding)
    return [
        VerdictFinding(
            group[0],
            tuple(label for finding in group if (label := finding.label) is not None),
            tuple(sorted({pid for finding in group for pid in finding.pids})),
            since=_since(group[0], begun),
        )
        for group in groups.values()
    ]


def _since(finding: Finding, begun: Mapping[str, float]) -> float | None:
    first = begun.get(finding.label or "")
    if finding.start is None or first is None or finding.start - first < _SAME_START_SECONDS:
        return None
    return finding.start


def _nest_same_kind(groups: Sequence[VerdictFinding]) -> list[VerdictFinding]:
    """Nest findings of the same kind, with other numbers, under the first one, so that eight GPUs do not repeat it."""
    kinds = group_by_kind(groups, lambda group: group.finding)
    return [first._replace(others=tuple(rest)) for first, *rest in kinds]


def _verdict(
    diagnosis: Diagnosis, findings: Sequence[VerdictFinding], layout: _VerdictLayout
) -> Iterator[str]:
    if not findings:
        is_clear = diagnosis.judged and all(judged.is_clear for judged in diagnosis.judged)
        style = "good" if is_clear else "notice"
        yield from layout.section("Verdict", layout.prose(f.plain(diagnosis.verdict), style=style))
        return
    first = findings[0]
    rule = RULES_BY_ID.get(first.finding.id)
    text = first.summary if rule is None else f"{rule.title}: {re.sub('^Each', 'each', first.summary)}"
    style = _STYLES[first.finding.severity]
    lines = [*layout.prose(f"{text}.", style=style), *_severity_line(first, layout)]
    yield from layout.section("Verdict", lines)


def _headline(entry: VerdictFinding, layout: _VerdictLayout) -> Iterator[str]:
    style = _STYLES[entry.finding.severity]
    return layout.section(
        "Also", [*layout.prose(f"{entry.summary}.", style=style), *_severity_line(entry, layout)]
    )


def _severity_line(entry: VerdictFinding, layout: _VerdictLayout) -> Iterator[str]:
    """Yield the severity, certainty and ID of a finding, its GPUs and its processes."""
    finding = entry.finding
    certainty = confidence_word(finding.confidence)
    if finding.inferred:
        certainty += ", inferred"
    parts = [
        finding.severity,
        f"{certainty} ({finding.confidence:.2f})" if layout.verbose else certainty,
        f.plain(finding.id),
    ]
    if entry.labels:
        parts.append(gpu_label(entry.labels))
    if entry.pids:
        shown = entry.pids if layout.verbose else entry.pids[:4]
        more = f" and {len(entry.pids) - len(shown)} more" if len(shown) < len(entry.pids) else ""
        parts.append(f"pid {' '.join(map(str, shown))}{more}")
    if entry.since is not None:
        parts.append(f"since {f.clock_time(entry.since)}")
    yield from layout.prose(", ".join(parts), style="dim")
    yield from _other_gpus(entry, layout)


def _other_gpus(entry: VerdictFinding, layout: _VerdictLayout, indent: str = "") -> Iterator[str]:
    if entry.others:
        labels = [label for other in entry.others for label in other.labels]
        where = f"on {gpu_label(labels)}" if labels else f"{f.count_noun(len(entry.others), 'more time')}"
        lost = [other.finding.lost_ratio for other in entry.others]
        known = sorted(value for value in lost if value is not None)
        span = ""
        if known and len(known) == len(lost):
            low, high = f.share(known[0]), f.share(known[-1])
            span = f": {low if low == high else f'{low} to {high}'} of the time lost"
        yield from layout.prose(
            f"{indent}same finding {where}{span} (details: -v)", indent=indent, style="dim"
        )


def _details(entry: VerdictFinding, layout: _VerdictLayout) -> Iterator[Iterator[str]]:
    finding = entry.finding
    yield layout.section("Where", _where(finding, layout))
    yield layout.section("Why", _table(finding.evidence, layout))
    yield layout.section("Against", _table(finding.counter_evidence, layout))
    yield layout.section("Excluded", _ruled_out(finding.ruled_out, layout))
    yield layout.section("Next", _advice(finding, layout))


def _where(finding: Finding, layout: _VerdictLayout) -> Iterator[str]:
    """Yield the line of code behind a finding, all lines if verbose, and why there is none."""
    texts = describe_where(finding)
    lines = len(finding.where or ())
    for place, text in enumerate(texts):
        if place == 0 or place >= lines or layout.verbose:
            style = "name" if place == 0 and lines else "dim"
            yield from layout.prose(f.plain(text), indent="  ", style=style)


def _evidence_texts(evidence: Iterable[Evidence]) -> list[EvidenceText]:
    return [describe_evidence(item) for item in evidence]


def _table(evidence: Sequence[Evidence], layout: _VerdictLayout) -> Iterator[str]:
    """Yield a line per measurement: its name, its value, and its threshold."""
    rows = _evidence_texts(evidence)
    if not rows:
        return
    values = max(display_width(row.value) for row in rows)
    against = max(display_width(row.limit) for row in rows)
    if layout.room - values - against - 4 < _MIN_TEXT_COLUMNS:
        rows, against = [row._replace(limit="") for row in rows], 0
    left = layout.room - values - 2 - (against + 2 if against else 0)
    words = min(max(display_width(row.words) for row in rows), max(1, left))
    for row, item in zip(rows, evidence, strict=True):
        name = truncate(f.plain(row.words), words)
        line = f"{name}{' ' * (words - display_width(name))}  {f.plain(row.value):>{values}}"
        if row.limit or layout.verbose:
            line += f"  {layout.paint('dim', row.limit)}{' ' * (against - display_width(row.limit))}"
        source = f"{item.signal}, {item.statistic}"
        if layout.verbose and words + values + against + 6 + display_width(source) <= layout.room:
            line += f"  {layout.paint('dim', f.plain(source))}"
        yield line.rstrip()


def _ruled_out(entries: Sequence[str], layout: _VerdictLayout) -> Iterator[str]:
    shown = entries if layout.verbose else entries[:_MAX_RULED_OUT]
    for entry in shown:
        yield from layout.prose(f.plain(entry), indent="  ", style="dim")
    if len(shown) < len(entries):
        yield from layout.prose(f"and {len(entries) - len(shown)} more (show all with -v)", style="dim")


def _advice(finding: Finding, layout: _VerdictLayout) -> Iterator[str]:
    several = len(finding.advice) > 1
    for place, advice in enumerate(finding.advice, start=1):
        mark = f"{place}. " if several else "-> "
        yield from layout.prose(f.plain(f"{mark}{advice.do}"), indent="   ")
        for word, text in (("why", advice.why), ("check", advice.confirm)):
            if text:
                yield from layout.prose(
                    f.plain(f"   {word}: {text}"), indent=" " * (len(word) + 5), style="dim"
                )
    yield from layout.prose(f"More about this finding: gpulse explain {f.plain(finding.id)}", style="name")


def _others(entries: Sequence[VerdictFinding], layout: _VerdictLayout) -> Iterator[str]:
    """Yield the next worst findings in brief, and how many were left out."""
    shown = entries[:_MAX_OTHER_FINDINGS]
    for entry in shown:
        finding = entry.finding
        mark = f"[{finding.severity}] "
        yield from layout.prose(f"{mark}{entry.summary}.", indent="  ", style=_STYLES[finding.severity])
        if finding.advice:
            yield from layout.prose(f.plain(f"  -> {finding.advice[0].do}"), indent="     ")
        yield from _other_gpus(entry, layout, "  ")
        certainty = confidence_word(finding.confidence)
        text = f"  {certainty}; more: gpulse explain {f.plain(finding.id)}"
        yield from layout.prose(text, indent="     ", style="dim")
    left = len(entries) - len(shown)
    if left > 0:
        yield from layout.prose(f"{f.count_noun(left, 'more finding')}; show all in full with: -v")


def _notes(entries: Sequence[VerdictFinding], layout: _VerdictLayout) -> Iterator[str]:
    for entry in entries:
        yield from layout.prose(f"{entry.summary} ({f.plain(entry.finding.id)}).", indent="  ")
        yield from _other_gpus(entry, layout, "  ")


def _missing_data(gaps: Sequence[str], layout: _VerdictLayout) -> Iterator[str]:
    """Yield what could not be measured; what several GPUs have in common is listed once."""
    labels: dict[str, list[str]] = {}
    for gap in gaps:
        named = re.match(r"GPU (\d+(?::\d+)?): (.*)", gap, re.DOTALL)
        labels.setdefault(gap if named is None else named[2], []).extend(() if named is None else (named[1],))
    for text, gpus in labels.items():
        about = f"{gpu_label(gpus)}: " if gpus else ""
        yield from layout.prose(f.plain(f"{about}{text}"), indent="  ", style="dim")


def _hints(hints: Sequence[str], layout: _VerdictLayout) -> Iterator[str]:
    for hint in hints:
        yield from layout.prose(f.plain(f"-> {hint}"), indent="   ")


def _levels(diagnosis: Diagnosis, layout: _VerdictLayout) -> Iterator[str]:
    """Yield what could be told about each GPU, unless everything could."""
    for level in DIAGNOSIS_LEVELS[1:]:
        labels = [judged.label for judged in diagnosis.judged if judged.level == level]
        if labels:
            which = f"{gpu_label(labels)}, " if len(diagnosis.judged) > 1 else ""
            yield from layout.prose(f"{which}{describe_level(level)}", style="dim")


def _window(diagnosis: Diagnosis, layout: _VerdictLayout) -> Iterator[str]:
    """Yield the time range, the frames and the GPUs that the diagnosis covers."""
    parts = []
    if diagnosis.start is not None and diagnosis.end is not None:
        begin, end = diagnosis.start, diagnosis.end
        parts.append(f"{f.local_time(begin)} - {f.local_time(end, begin)}")
        parts.append(f.seconds(diagnosis.end - diagnosis.start))
    parts.append(f"{diagnosis.frames} {'frame' if diagnosis.frames == 1 else 'frames'}")
    if diagnosis.judged:
        parts.append(f"diagnosed: {gpu_label(judged.label for judged in diagnosis.judged)}")
    else:
        parts.append("no GPUs were diagnosed")
    if diagnosis.level is not None:
        parts.append(f"level: {CAPABILITY_LEVELS[diagnosis.level].name}")
    words = [*(f"{part}," for part in parts[:-1]), parts[-1]]
    yield from (layout.paint("dim", line) for line in wrap_items(words, layout.width, " ", "  "))
    if layout.verbose:
        for judged in diagnosis.judged:
            text = f"  GPU {judged.label}: {judged.state}, {judged.frames} {'frame' if judged.frames == 1 else 'frames'} in {f.seconds(judged.end - judged.start)}"
            yield from (layout.paint("dim", line) for line in wrap(f.plain(text), layout.width, "    "))


def _about(finding: Finding, labels: Iterable[str]) -> str:
    """Return the sentence about a finding, with these GPUs in place of its own."""
    listed = list(labels)
    own = f"GPU {finding.label}"
    if not listed or listed == [finding.label]:
        return finding.summary
    if len(listed) > 1 and finding.summary.startswith(f"{own} "):  # its verb is in the singular
        return f"Each of {gpu_label(listed)}{finding.summary.removeprefix(own)}"
    return finding.summary.replace(own, gpu_label(listed), 1)
