"""Diagnose a recording of any length window by window, and decide when watching longer would not change the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from gpulse.diagnosis.engine import judge, rank_findings, verdict
from gpulse.diagnosis.evidence import GpuEvidence
from gpulse.diagnosis.job_window import JobWindow
from gpulse.diagnosis.rule import HARDWARE_FAMILIES
from gpulse.diagnosis.rule_registry import RULES, RULES_BY_ID
from gpulse.diagnosis.rules.stall import may_become_hang
from gpulse.diagnosis.second_aggregator import SecondAggregator
from gpulse.diagnosis.second_summary import SecondSummary
from gpulse.diagnosis.thresholds import DEFAULTS, Thresholds
from gpulse.model.finding import (
    DIAGNOSIS_LEVELS,
    SEVERITIES,
    Diagnosis,
    Finding,
    FindingKey,
    JudgedGpu,
    Severity,
)
from gpulse.model.formatting import seconds as seconds_text
from gpulse.model.frame import Frame

MAX_UNWINDOWED_SECONDS = 300.0
"""Recordings up to this length are diagnosed as a whole, unless a window length is given."""
WINDOW_SECONDS = 120.0
_PRELIMINARY_SECONDS = 60.0
_COARSE_SECONDS = 10.0
"""Length of a `SecondSummary` in a long recording: a window still holds a dozen of them."""
_FEW_WINDOWS = 3
_MIN_WINDOWS_IN_A_ROW = 2
"""Windows in a row that must show a finding for a long recording to list it."""
_MAX_WINDOWS_APART = 3
"""After more windows than this without it, the same finding counts as a new one."""
_MAX_LISTED_TIMES = 3
"""Maximum number of times that the same finding is listed; beyond it, the finding is listed once as intermittent."""
_TREND_RULES = tuple(rule for rule in RULES if rule.trend)
_MAX_COARSE_SECONDS = 4000


_Run = list[tuple[int, Finding]]
"""Findings of the same kind with the index of their windows."""


class WindowedDiagnosis:
    """Takes frames in order and returns one diagnosis at the end.

    A long recording is cut into windows that are diagnosed as they end, so that it takes time but hardly any memory.
    A finding of several windows in a row is listed once, with its start and end. Slow changes (leaks) are searched
    for over the whole recording.
    """

    def __init__(
        self,
        *,
        window_seconds: float | None = None,
        thresholds: Thresholds = DEFAULTS,
        observe: Callable[[Mapping[str, Sequence[SecondSummary]]], None] | None = None,
    ) -> None:
        """Start a diagnosis.

        Args:
            window_seconds: Length of each window; None diagnoses a short recording as a whole.
            thresholds: What the rules compare with.
            observe: Called with the seconds of each window, by GPU, when it is diagnosed.
        """
        self._observe = observe
        self._window = WINDOW_SECONDS if window_seconds is None else window_seconds
        self._is_whole = window_seconds is None
        """Whether the recording has not been cut into windows yet."""
        self._t = thresholds
        self._digest = SecondAggregator()
        self._open: dict[str, list[SecondSummary]] = {}
        """Seconds of the open window."""
        self._coarse: dict[str, list[SecondSummary]] = {}
        """A few seconds of each window, to find slow changes."""
        self._windows: list[Diagnosis] = []
        self._last: Frame | None = None
        self._witness: Frame | None = None
        """The last frame of the window with an NVML problem."""
        self._start = self._window_start = 0.0
        self._frames = 0
        self._notes: dict[str, None] = {}

    @property
    def seconds(self) -> dict[str, list[SecondSummary]]:
        """Seconds by GPU, for charts: all of a short recording, a few of each window of a long one."""
        if not self._windows:
            return self._open
        return {
            uuid: [*self._coarse.get(uuid, ()), *self._open.get(uuid, ())]
            for uuid in {**self._coarse, **self._open}
        }

    def feed(self, frame: Frame) -> None:
        """Add one frame.

        Raises:
            RecordingError: The frame is from another machine, or older than the previous one.
        """
        done = self._digest.feed(frame)
        for uuid, second in done.items():
            self._open.setdefault(uuid, []).append(second)
        self._frames += 1
        self._last = frame
        self._note(frame)
        if self._frames == 1:
            self._start = self._window_start = frame.time
        if self._is_whole:
            if frame.time - self._start > MAX_UNWINDOWED_SECONDS:
                self._is_whole = False
                self._digest.seconds = _COARSE_SECONDS
                self._cut_into_windows(frame)
        elif done and frame.time - self._window_start >= self._window:
            self._close(frame)

    def preliminary(self, min_seconds: float) -> Diagnosis | None:
        """Return what the last minute shows so far, from `min_seconds` of work on; None without frames."""
        if self._last is None:
            return None
        begin = self._last.time - _PRELIMINARY_SECONDS
        recent = {
            uuid: [second for second in entries if second.start >= begin]
            for uuid, entries in self._open.items()
        }
        shorter = self._t._replace(min_seconds=min(min_seconds, self._t.min_seconds))
        return judge(recent, self._witness or self._last, shorter, self._last.time)

    def finish(self, gpus: Collection[str] | None = None) -> Diagnosis:
        """Return the diagnosis of all frames, limited to these GPUs when UUIDs are given."""
        if self._last is None:
            return Diagnosis("Not enough data: there are no frames.", data_gaps=tuple(self._notes))
        if self._windows and any(self._open.values()):
            self._close(self._last)
        if self._windows:
            diagnosis = self._merged(self._last, gpus)
        else:  # a short recording, or one shorter than a window
            diagnosis = self._judged(self._last, _only(self._open, gpus))
        labels = None if gpus is None else self._labels(gpus)
        if labels is not None:
            diagnosis = _limit_to(diagnosis, labels)
        return diagnosis._replace(
            data_gaps=(*diagnosis.data_gaps, *self._notes),
            start=self._start,
            end=self._last.time,
            frames=self._frames,
        )

    def _note(self, frame: Frame) -> None:
        for entry in frame.health:
            if entry.source == "recording":
                self._notes[entry.detail] = None
            elif entry.source == "nvml" and entry.is_problem:
                self._witness = frame

    def _cut_into_windows(self, frame: Frame) -> None:
        """Diagnose the seconds so far in windows, now that the recording is too long for a diagnosis as a whole."""
        kept, self._open = self._open, {}
        begin = self._start
        while begin + self._window <= frame.time:
            end = begin + self._window
            part = {
                uuid: [second for second in seconds if begin <= second.start < end]
                for uuid, seconds in kept.items()
            }
            self._keep(part, frame)
            begin = end
        self._open = {
            uuid: [second for second in seconds if second.start >= begin] for uuid, seconds in kept.items()
        }
        self._window_start = begin

    def _close(self, frame: Frame) -> None:
        self._keep(self._open, frame)
        self._open = {}
        self._window_start = frame.time

    def _keep(self, seconds: dict[str, list[SecondSummary]], frame: Frame) -> None:
        self._windows.append(self._judged(frame, seconds))
        for uuid, entries in seconds.items():
            if entries:
                coarse = self._coarse.setdefault(uuid, [])
                coarse += entries[:: max(1, len(entries) // 4)]
                if len(coarse) > _MAX_COARSE_SECONDS:
                    del coarse[1::2]
        self._witness = None

    def _judged(self, frame: Frame, seconds: dict[str, list[SecondSummary]]) -> Diagnosis:
        if self._observe is not None:
            self._observe(seconds)
        return judge(seconds, self._witness or frame, self._t, frame.time)

    def _merged(self, last: Frame, gpus: Collection[str] | None) -> Diagnosis:
        """Merge the windows into one diagnosis."""
        judged = _merge_judged(entry for window in self._windows for entry in window.judged)
        counts = Counter(entry.label for window in self._windows for entry in window.judged)
        findings = [
            _merge_run(run, counts, len(self._windows), self._window)
            for runs in _runs([window.findings for window in self._windows]).values()
            for run in _worth_listing(runs, counts)
        ]
        info = [
            runs[-1][-1][1]
            for runs in _runs([window.info for window in self._windows]).values()
            if 2 * sum(map(len, runs)) >= counts[runs[0][0][1].label or ""]
        ]
        known = {finding.key for finding in findings}
        sparse = self._t._replace(coverage=0.0)
        trends = judge(_only(self._coarse, gpus), last, sparse, last.time, _TREND_RULES)
        findings += [finding for finding in trends.findings if finding.key not in known]
        findings = rank_findings(findings)
        known_windows = [window for window in self._windows if window.judged] or self._windows
        gaps = Counter(gap for window in known_windows for gap in window.data_gaps)
        return Diagnosis(
            verdict=verdict(findings, judged, starting=False),
            findings=tuple(findings),
            info=tuple(info),
            data_gaps=tuple(gap for gap, count in gaps.items() if 2 * count >= len(known_windows)),
            judged=judged,
        )

    def _labels(self, gpus: Collection[str]) -> set[str]:
        seconds = self.seconds
        return {seconds[uuid][-1].reading.device.label for uuid in gpus if seconds.get(uuid)}


def _only(
    seconds: dict[str, list[SecondSummary]], gpus: Collection[str] | None
) -> dict[str, list[SecondSummary]]:
    return seconds if gpus is None else {uuid: part for uuid, part in seconds.items() if uuid in gpus}


def _limit_to(diagnosis: Diagnosis, labels: Collection[str]) -> Diagnosis:
    """Return the diagnosis without other GPUs."""
    findings = tuple(f for f in diagnosis.findings if f.label is None or f.label in labels)
    judged = tuple(entry for entry in diagnosis.judged if entry.label in labels)
    if findings == diagnosis.findings and judged == diagnosis.judged:
        return diagnosis
    return diagnosis._replace(
        verdict=verdict(findings, judged, starting=False),
        findings=findings,
        info=tuple(f for f in diagnosis.info if f.label is None or f.label in labels),
        judged=judged,
    )


def _runs(windows: Sequence[Sequence[Finding]]) -> dict[FindingKey, list[_Run]]:
    """Return the runs of windows that show a finding, by its key."""
    found: dict[FindingKey, list[_Run]] = {}
    for place, findings in enumerate(windows):
        for finding in findings:
            runs = found.setdefault(finding.key, [[]])
            if runs[-1] and place - runs[-1][-1][0] > _MAX_WINDOWS_APART:
                runs.append([])
            runs[-1].append((place, finding))
    return found


def _worth_listing(runs: list[_Run], judged: Counter[str]) -> list[_Run]:
    first = runs[0][0][1]
    if (
        first.family not in HARDWARE_FAMILIES
        and first.label is not None
        and judged[first.label] > _FEW_WINDOWS
    ):
        runs = [run for run in runs if len(run) >= _MIN_WINDOWS_IN_A_ROW]
    return runs if len(runs) <= _MAX_LISTED_TIMES else [[entry for run in runs for entry in run]]


def _merge_run(run: _Run, judged: Counter[str], windows: int, seconds: float) -> Finding:
    """Merge a finding of several windows: evidence of the worst one, from the first start to the last end."""
    group = [finding for _, finding in run]
    if len(group) == 1:
        return group[0]
    worst = max(group, key=lambda f: (SEVERITIES.index(f.severity), f.lost_ratio or 0.0))
    of = judged[worst.label] if worst.label is not None else windows
    starts = [finding.start for finding in group if finding.start is not None]
    ends = [finding.end for finding in group if finding.end is not None]
    losses = [finding.lost_ratio for finding in group if finding.lost_ratio is not None]
    each = seconds_text(seconds)
    return worst._replace(
        summary=f"{worst.summary} (seen in {len(group)} of {of} windows of {each}; the worst is shown)",
        confidence=max(finding.confidence for finding in group),
        lost_ratio=sum(losses) / len(losses) if losses else None,
        start=min(starts, default=None),
        end=max(ends, default=None),
    )


def _merge_judged(entries: Iterable[JudgedGpu]) -> tuple[JudgedGpu, ...]:
    """Merge the windows of each GPU; it counts as idle only if it was idle in all of them."""
    found: dict[str, JudgedGpu] = {}
    for entry in entries:
        old = found.get(entry.label)
        if old is None:
            found[entry.label] = entry
        else:
            state = entry.state if old.state == "idle" else old.state if entry.state == "idle" else "at work"
            found[entry.label] = old._replace(
                end=entry.end,
                frames=old.frames + entry.frames,
                state=state,
                is_clear=old.is_clear and entry.is_clear,
                level=max(old.level, entry.level, key=DIAGNOSIS_LEVELS.index),
            )
    return tuple(found.values())


EVALUATION_SECONDS = 1.0
"""Time between two evaluations."""
_MIN_AGREEING = 3
"""Evaluations in a row with the same findings."""
_MIN_CONFIDENCE = 0.6
_MIN_SEVERITY = SEVERITIES.index("medium")
"""A small loss is close to the threshold: a longer window may have none, or another."""

_Findings = tuple[tuple[FindingKey, Severity], ...]


class EarlyVerdict:
    """Compares the diagnoses of a growing window.

    A verdict is sure when the same findings came out several times in a row, every GPU at work has a clear one, and no
    pause was seen: pauses, slow changes and healthy jobs need the whole time. So is that of a machine where nothing runs.
    """

    def __init__(self, thresholds: Thresholds = DEFAULTS) -> None:
        self._t = thresholds
        self._last: _Findings = ()
        self._agreeing = 0
        self._due: float | None = None

    def is_due(self, time: float) -> bool:
        """Return whether the window has grown enough for another evaluation."""
        if self._due is None:
            self._due = time + self._t.min_seconds
        if time < self._due:
            return False
        self._due = time + EVALUATION_SECONDS
        return True

    def is_sure(self, diagnosis: Diagnosis, timeline: WindowedDiagnosis) -> bool:
        """Add the next diagnosis of the same window; return whether the verdict can be given now."""
        findings = tuple((finding.key, finding.severity) for finding in diagnosis.findings)
        self._agreeing = self._agreeing + 1 if findings == self._last else 1
        self._last = findings
        return self._agreeing >= _MIN_AGREEING and _is_clear(diagnosis) and not self._may_change(timeline)

    def _may_change(self, timeline: WindowedDiagnosis) -> bool:
        """Return whether a GPU pauses or may hang, or its job has not been observed for long enough."""
        windows = [JobWindow(seconds, self._t, {}) for seconds in timeline.seconds.values() if seconds]
        return any(
            not window.is_enough or window.stalls or may_become_hang(GpuEvidence(window, self._t, window.end))
            for window in windows
            if window.job
        )


def _is_clear(diagnosis: Diagnosis) -> bool:
    """Return whether every GPU at work has a final finding, or no GPU is at work."""
    if not diagnosis.judged:
        return False
    worst: dict[str | None, Finding] = {}
    for finding in diagnosis.findings:
        worst.setdefault(finding.label, finding)
    at_work = {entry.label for entry in diagnosis.judged if entry.state != "idle"}
    return at_work <= worst.keys() and all(_is_final(finding) for finding in worst.values())


def _is_final(finding: Finding) -> bool:
    """Return whether more of the same would lead to the same finding."""
    rule = RULES_BY_ID[finding.id]
    needs_time = rule.trend or (rule.family == "stall" and not rule.is_settled)
    return (
        not needs_time
        and finding.confidence >= _MIN_CONFIDENCE
        and SEVERITIES.index(finding.severity) >= _MIN_SEVERITY
    )
