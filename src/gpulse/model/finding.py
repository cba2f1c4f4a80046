"""Findings of the diagnosis, their evidence and advice, their time spans, and groups of the same kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

from gpulse.model.device import gpu_label
from gpulse.model.safe_text import natural_key

Family = Literal[
    "input", "host", "gpu_use", "memory", "copy", "stall", "contention", "clocks", "link", "fault", "network"
]
Severity = Literal["info", "low", "medium", "high", "critical"]
FindingCategory = Literal["fault", "slowness", "waste"]
"""What a finding costs: something is broken, work is slower than it could be, or a GPU is held without need."""
FINDING_CATEGORIES: tuple[FindingCategory, ...] = ("fault", "slowness", "waste")
"""In the order in which findings are shown."""
SEVERITIES: tuple[Severity, ...] = ("info", "low", "medium", "high", "critical")
DiagnosisLevel = Literal["full", "nvml_only", "host_only"]
"""What the readings of a GPU allow: all activity (GPM), utilization and estimates (NVML), or nothing about its kernels."""
DIAGNOSIS_LEVELS: tuple[DiagnosisLevel, ...] = ("full", "nvml_only", "host_only")
"""From the most to the least that is known."""
MULTI_CAUSE_FINDING = "gpu_fault"
"""The only finding that a GPU can have several times at once, with different causes."""

NODE_FINDINGS = frozenset({"node_lost", "node_missing"})
"""Findings that the head makes about nodes; agents do not report them."""

CODE_FIELDS = frozenset({"where", "where_note"})
"""Fields of a finding that name files and functions of a user's program."""

FindingKey = tuple[str, str | None, str]
"""ID, GPU label and cause: two reports of a node with the same key are about the same finding."""

FindingKind = tuple[str, str, str]
"""Severity, ID and cause."""

MAX_GAP_SECONDS = 120.0
"""A finding that returns within this time continues; after a longer absence it is a new one."""
MAX_SILENCE_SECONDS = 3600.0
"""The same when the node did not report in between, for example while its agent restarted.

A fault continues after any silence: the driver reports it until the GPU is reset.
"""
_MAX_HELD_SECONDS = 30 * 86_400.0
"""A report of a longer duration means that the node's clock was changed."""
_CLOCK_JITTER_SECONDS = 0.05
"""Durations on the monotonic clock and on the wall clock may differ by this much."""
_MAX_CAUSE_CHARACTERS = 64
_MAX_NAMED_NODES = 4
_FAMILIES = frozenset(get_args(Family))
_Kind = TypeVar("_Kind")
_Item = TypeVar("_Item")


class Evidence(NamedTuple):
    """One number and its threshold; it can be recomputed from the frames."""

    signal: str
    statistic: str
    value: float
    comparison: str
    threshold: float


class Advice(NamedTuple):
    """One thing to do, why, and a cheap way to confirm that it helps."""

    do: str
    why: str
    confirm: str


CodeRole = Literal["main", "worker"]
"""Whether a process is on the GPU itself, or a descendant that prepares data for it."""


class CodeLocation(NamedTuple):
    """A line of the user's code, and the share of the stacks, taken while the GPU was idle, that contain it."""

    pid: int
    role: CodeRole
    file: str
    line: int
    function: str
    share: float
    stacks: int
    """Number of stacks that the share refers to."""
    doing: str | None = None
    """The innermost frame, where it is not this line itself: `json/encoder.py:258 iterencode`."""


class JudgedGpu(NamedTuple):
    """One GPU that was diagnosed, and the time span that its evidence comes from."""

    gpu: int
    label: str
    start: float
    end: float
    frames: int
    state: str
    """What the GPU did, in a few words: `busy 99%`, `idle`."""
    is_clear: bool = True
    """False when the readings do not show whether the GPU is well used."""
    level: DiagnosisLevel = "full"
    """What its readings allow."""


class Finding(NamedTuple):
    """One finding about a GPU, or about the node when `gpu` is None."""

    id: str
    family: Family | None
    """None when an agent did not report a family, or an unknown one."""
    severity: Severity
    confidence: float
    """0 to 1; NaN when an agent did not report it."""
    summary: str
    """One sentence with the main numbers."""
    gpu: int | None = None
    label: str | None = None
    """Name of the GPU for people: `3`, or `3:1` for a MIG instance."""
    pids: tuple[int, ...] = ()
    lost_ratio: float | None = None
    start: float | None = None
    end: float | None = None
    evidence: tuple[Evidence, ...] = ()
    counter_evidence: tuple[Evidence, ...] = ()
    ruled_out: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    url: str | None = None
    cause: str | None = None
    """Distinguishes several findings of the same ID on one GPU: `xid_94`."""
    inferred: bool = False
    """Whether it rests on estimates, because the GPU does not measure what it is about."""
    where: tuple[CodeLocation, ...] | None = None
    """Lines that held the GPU up, the most frequent first; None when no stacks were taken, empty when no line stands out."""
    where_note: str | None = None
    """One sentence: why there is no line, what the share of the first one means, or that workers are missing."""

    @property
    def key(self) -> FindingKey:
        """Key that all reports of the same finding share."""
        return self.id, self.label, (self.cause or "")[:_MAX_CAUSE_CHARACTERS]

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON types; `where` and `where_note` are absent when they are unknown."""
        document: dict[str, Any] = {
            "id": self.id,
            "family": self.family,
            "severity": self.severity,
            "confidence": None if math.isnan(self.confidence) else self.confidence,
            "summary": self.summary,
            "gpu": self.gpu,
            "label": self.label,
            "pids": list(self.pids),
            "lost_ratio": self.lost_ratio,
            "start": self.start,
            "end": self.end,
            "evidence": [item._asdict() for item in self.evidence],
            "counter_evidence": [item._asdict() for item in self.counter_evidence],
            "ruled_out": list(self.ruled_out),
            "advice": [item._asdict() for item in self.advice],
            "url": self.url,
            "cause": self.cause,
            "inferred": self.inferred,
        }
        if self.where is not None:
            document["where"] = [place._asdict() for place in self.where]
        if self.where_note is not None:
            document["where_note"] = self.where_note
        return document


def finding_key(document: Mapping[str, Any]) -> FindingKey:
    """Return the key of a finding from its JSON document."""
    label, cause = document.get("label"), document.get("cause")
    return (
        str(document.get("id")),
        None if label is None else str(label),
        str(cause or "")[:_MAX_CAUSE_CHARACTERS],
    )


def without_code(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON document of a finding without what it says about code."""
    return {name: value for name, value in document.items() if name not in CODE_FIELDS}


def finding_from_document(document: Mapping[str, Any]) -> Finding:
    """Return the finding of a JSON document; fields of an unexpected type count as unknown."""
    family, severity = document.get("family"), document.get("severity")
    return Finding(
        id=str(document.get("id")),
        family=cast("Family", family) if _typed(str, family) in _FAMILIES else None,
        severity=cast("Severity", severity) if severity in SEVERITIES else "info",
        confidence=math.nan if (sure := finite_number(document.get("confidence"))) is None else sure,
        summary=_typed(str, document.get("summary")) or "",
        gpu=_typed(int, document.get("gpu")),
        label=_typed(str, document.get("label")),
        pids=tuple(_items(int, document.get("pids"))),
        lost_ratio=finite_number(document.get("lost_ratio")),
        start=finite_number(document.get("start")),
        end=finite_number(document.get("end")),
        evidence=_evidence(document.get("evidence")),
        counter_evidence=_evidence(document.get("counter_evidence")),
        ruled_out=tuple(_items(str, document.get("ruled_out"))),
        advice=tuple(
            Advice(*texts)
            for item in _items(dict, document.get("advice"))
            if len(texts := _items(str, [item.get(name) for name in Advice._fields])) == len(Advice._fields)
        ),
        url=_typed(str, document.get("url")),
        cause=_typed(str, document.get("cause")),
        inferred=document.get("inferred") is True,
        where=_where(document.get("where")),
        where_note=_typed(str, document.get("where_note")),
    )


def _where(listed: Any) -> tuple[CodeLocation, ...] | None:
    """Return the complete code locations; None when there is no list of them."""
    if not isinstance(listed, list):
        return None
    found = []
    for item in _items(dict, listed):
        numbers = _items(int, [item.get(name) for name in ("pid", "line", "stacks")])
        texts = _items(str, [item.get(name) for name in ("file", "function")])
        role, share = item.get("role"), finite_number(item.get("share"))
        is_complete = len(numbers) == 3 and len(texts) == 2 and _typed(str, role) in get_args(CodeRole)
        if is_complete and share is not None and 0 <= share <= 1:
            pid, line, stacks = numbers
            file, function = texts
            doing = _typed(str, item.get("doing"))
            found.append(
                CodeLocation(pid, cast("CodeRole", role), file, line, function, share, stacks, doing)
            )
    return tuple(found)


def _evidence(listed: Any) -> tuple[Evidence, ...]:
    """Return the complete pieces of evidence."""
    found = []
    for item in _items(dict, listed):
        texts = _items(str, [item.get(name) for name in ("signal", "statistic", "comparison")])
        value, threshold = finite_number(item.get("value")), finite_number(item.get("threshold"))
        if len(texts) == 3 and value is not None and threshold is not None:
            found.append(Evidence(texts[0], texts[1], value, texts[2], threshold))
    return tuple(found)


def _items(kind: type[_Kind], listed: Any) -> list[_Kind]:
    return [item for item in listed if _typed(kind, item) is not None] if isinstance(listed, list) else []


def _typed(kind: type[_Kind], value: Any) -> _Kind | None:
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def finite_number(value: Any) -> float | None:
    """Return a finite number; None for anything else, and for integers that no float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


class Diagnosis(NamedTuple):
    """Result of a diagnosis: findings, worst first, informational findings, and gaps in the data."""

    verdict: str
    """One sentence."""
    findings: tuple[Finding, ...] = ()
    info: tuple[Finding, ...] = ()
    data_gaps: tuple[str, ...] = ()
    judged: tuple[JudgedGpu, ...] = ()
    """GPUs with enough data."""
    start: float | None = None
    end: float | None = None
    frames: int = 0
    unchecked: frozenset[tuple[str, str]] = frozenset()
    """Rules that could not be checked for lack of signals, with the label of the GPU; `data_gaps` has it as text."""

    @property
    def level(self) -> DiagnosisLevel | None:
        """The lowest level of the diagnosed GPUs; None when there is none."""
        return max((judged.level for judged in self.judged), key=DIAGNOSIS_LEVELS.index, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON types."""
        return {
            "verdict": self.verdict,
            "level": self.level,
            "findings": [finding.to_dict() for finding in self.findings],
            "info": [finding.to_dict() for finding in self.info],
            "data_gaps": list(self.data_gaps),
            "judged": [judged._asdict() for judged in self.judged],
            "start": self.start,
            "end": self.end,
            "frames": self.frames,
        }


class FindingSpan(NamedTuple):
    """Time span of a finding, built from the reports of its node.

    A node reports all of its findings whenever one appears, changes or ends, and again every half minute. This class
    decides which reports belong to the same finding, for the live view and for the store, so that its start is the same
    everywhere.
    """

    start: float
    """Start in epoch seconds; it does not change while the finding continues."""
    last: float
    """Time of the newest report with the finding."""
    end: float | None = None
    """When it ended, or when its node stopped reporting; None while it is active."""
    is_over: bool = False
    """Whether a report without the finding ended it; False when the node stopped reporting."""

    def reported(self, finding: Mapping[str, Any], time: float) -> FindingSpan | None:
        """Return the span after another report of the finding; None when the report starts a new one."""
        if time <= self.last:
            return self
        absent_seconds = finding_start(finding, time) - self.last
        if absent_seconds > MAX_GAP_SECONDS and (self.is_over or not _outlasts(finding, absent_seconds)):
            return None
        if self.end is not None and self.end > time:  # the report came late
            return self._replace(last=time)
        return FindingSpan(self.start, time)

    def absent(self, time: float, watched_seconds: float | None = None) -> FindingSpan:
        """Return the span after a report without the finding.

        Args:
            time: Time of the report.
            watched_seconds: How long the agent has watched, if it has just started: it cannot know yet whether a
                finding that only its last run has reported is over.
        """
        if time <= self.last or self.is_over:
            return self
        if watched_seconds is not None and self.last < time - watched_seconds - _CLOCK_JITTER_SECONDS:
            return self
        return self._replace(end=time if self.end is None else min(self.end, time), is_over=True)

    def silent(self, time: float, heard: float | None = None) -> FindingSpan:
        """Return the span after the node stopped reporting, or its agent restarted.

        Args:
            time: When this was noticed.
            heard: Time of the node's last report, if known.
        """
        if time < self.last:
            return self
        silent_since = time if heard is None else max(heard, self.last)
        # Of two silences the earlier one counts, in whichever order they become known.
        return self if self.end is not None and self.end <= silent_since else self._replace(end=silent_since)


def watched_seconds_of(report: Mapping[str, Any]) -> float | None:
    """Return how long the agent that made a report has watched; None if long enough to recognise everything."""
    return finite_number(report.get("watched_seconds"))


def start_finding_span(finding: Mapping[str, Any], time: float) -> FindingSpan:
    """Return the span of a finding at its first report."""
    return FindingSpan(finding_start(finding, time), time)


def finding_start(finding: Mapping[str, Any], time: float) -> float:
    """Return the start of a finding on the clock of the receiver, who got the report at `time`.

    The node's clock may differ, so only the duration from the report's start to its end is used.
    """
    start, end = finding.get("start"), finding.get("end")
    if (
        isinstance(start, int | float)
        and isinstance(end, int | float)
        and 0 <= end - start <= _MAX_HELD_SECONDS
    ):
        return time - (end - start)
    return time


def _outlasts(finding: Mapping[str, Any], silent_seconds: float) -> bool:
    return silent_seconds <= MAX_SILENCE_SECONDS or finding.get("id") == MULTI_CAUSE_FINDING


class FindingGroup(NamedTuple):
    """All findings of one kind."""

    severity: str
    id: str
    members: tuple[Mapping[str, Any], ...]
    """JSON documents, by lost time, then by duration, largest first."""
    places: tuple[str, ...]
    """The GPUs by node, or the node alone for findings about the node: `n1 GPUs 0-3`, `n2`."""
    times: int
    """Number of occurrences on all GPUs together."""
    seconds: float | None
    """Longest total duration on one GPU; None when unknown."""

    @property
    def worst(self) -> Mapping[str, Any]:
        """The worst finding, which represents the group."""
        return self.members[0]

    @property
    def text(self) -> str:
        """Where the findings are, and the summary of the worst one.

        For one GPU `n1 GPU 4 waits 99% of the time`, for several `n1 GPUs 0-3 (worst: n1 GPU 2): GPU 2 waits ...`.
        """
        summary, label = str(self.worst.get("summary") or self.id), self.worst.get("label")
        worst = "".join(format_places([self.worst]))
        if self.places == (worst,):
            subject = str(self.worst.get("node")) if label is None else f"GPU {label}"
            rest = summary.removeprefix(subject)
            return (
                f"{worst}{rest}" if rest.startswith((" ", ":")) and rest != summary else f"{worst}: {summary}"
            )
        more = len(self.places) - _MAX_NAMED_NODES
        nodes = f" and {more} more {'node' if more == 1 else 'nodes'}" if more > 0 else ""
        where = f"{', '.join(self.places[:_MAX_NAMED_NODES])}{nodes}{'' if label is None else f' (worst: {worst})'}"
        return f"{where}: {summary}" if self.places else summary


def finding_kind(finding: Finding | Mapping[str, Any]) -> FindingKind:
    """Return the kind of a finding: findings of the same kind are shown as one group."""
    if isinstance(finding, Finding):
        severity, (name, _, cause) = str(finding.severity), finding.key
    else:
        severity, (name, _, cause) = str(finding.get("severity") or "info"), finding_key(finding)
    severity = severity if severity in SEVERITIES else "info"
    return severity, name, cause if name == MULTI_CAUSE_FINDING else ""


def group_by_kind(
    items: Iterable[_Item], finding_of: Callable[[_Item], Finding | Mapping[str, Any]]
) -> list[list[_Item]]:
    """Group items by the kind of their finding, worst kinds first; within a group the order stays."""
    kinds: dict[FindingKind, list[_Item]] = {}
    for item in items:
        kinds.setdefault(finding_kind(finding_of(item)), []).append(item)
    return [kinds[kind] for kind in sorted(kinds, key=lambda kind: -SEVERITIES.index(kind[0]))]


def group_similar_findings(findings: Iterable[Mapping[str, Any]]) -> list[FindingGroup]:
    """Group findings of any number of nodes by kind, worst first.

    Args:
        findings: JSON documents with their node, and the number of occurrences and total duration if known (`times`,
            `active_seconds`).
    """
    return [_group(found) for found in group_by_kind(findings, lambda finding: finding)]


def format_places(findings: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return where findings are: the GPUs of each node as ranges, or the node alone, in natural order."""
    by_node: dict[str, set[str]] = {}
    for finding in findings:
        node, label = finding.get("node"), finding.get("label")
        if node is not None:
            by_node.setdefault(str(node), set()).update(() if label is None else (str(label),))
    return tuple(
        f"{node} {gpu_label(sorted(by_node[node], key=natural_key))}" if by_node[node] else node
        for node in sorted(by_node, key=natural_key)
    )


def _group(found: Sequence[Mapping[str, Any]]) -> FindingGroup:
    severity, name, _ = finding_kind(found[0])
    seconds: dict[tuple[str, str], float] = {}
    for one in found:
        if (active := finite_number(one.get("active_seconds"))) is not None:
            place = str(one.get("node")), str(one.get("label"))
            seconds[place] = seconds.get(place, 0.0) + active
    return FindingGroup(
        severity,
        name,
        tuple(sorted(found, key=_cost, reverse=True)),
        format_places(found),
        sum(times if isinstance(times := one.get("times"), int) and times > 0 else 1 for one in found),
        max(seconds.values(), default=None),
    )


def _cost(finding: Mapping[str, Any]) -> tuple[float, float]:
    return finite_number(finding.get("lost_ratio")) or 0.0, finite_number(
        finding.get("active_seconds")
    ) or 0.0
