"""A run of any length as one diagnosis: judged as a whole when it is short, window by window when it is long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from gpulse.diagnosis.digest import Digest
from gpulse.diagnosis.engine import judge, rank, verdict
from gpulse.diagnosis.rulebook import RULES
from gpulse.diagnosis.seconds import Second
from gpulse.diagnosis.thresholds import DEFAULTS, Thresholds
from gpulse.model.finding import SEVERITIES, Diagnosis, Finding, FindingKey, Judged
from gpulse.model.frame import Frame
from gpulse.model.units import duration

WHOLE_SECONDS = 300.0
"""A run up to this long is judged as a whole, unless a window was asked for."""
WINDOW_SECONDS = 120.0
_COARSE_SECONDS = 10.0
"""How long a second is in a run that has become long: a window still holds a dozen of them."""
_FEW_WINDOWS = 3
_IN_A_ROW = 2
"""Windows in a row that a finding must hold in to be worth telling about a long run."""
_APART = 3
"""Windows without it after which the same finding is told anew."""
_MOST_TIMES = 3
"""Times that the same finding is told; more often than that is one finding that comes and goes."""
_TREND_RULES = tuple(rule for rule in RULES if rule.trend)
_FACTS = frozenset({"fault", "clocks", "link"})
_COARSE_POINTS = 4000


_Run = list[tuple[int, Finding]]
"""Findings of the same kind with the numbers of their windows."""


class Timeline:
    """Takes frames in order and tells at the end what they show.

    A long run is cut into windows that are judged as they end, so that its length costs time but hardly
    any memory; what several windows in a row show is told once, with when it began and ended. Slow changes
    (leaks) are looked for over the whole run.
    """

    def __init__(self, *, window_seconds: float | None = None, thresholds: Thresholds = DEFAULTS) -> None:
        self._window = WINDOW_SECONDS if window_seconds is None else window_seconds
        self._is_whole = window_seconds is None
        """Whether nothing has been cut into windows yet."""
        self._t = thresholds
        self._digest = Digest()
        self._open: dict[str, list[Second]] = {}
        """The seconds of the window that has not ended yet."""
        self._coarse: dict[str, list[Second]] = {}
        """A few seconds out of each window, for what changes slowly."""
        self._windows: list[Diagnosis] = []
        self._last: Frame | None = None
        self._witness: Frame | None = None
        """The last frame of the window in which something could not be read."""
        self._start = self._window_start = 0.0
        self._frames = 0
        self._notes: dict[str, None] = {}

    @property
    def seconds(self) -> dict[str, list[Second]]:
        """By GPU what there is to draw: every second of a short run, a few of each window of a long one."""
        if not self._windows:
            return self._open
        return {
            uuid: [*self._coarse.get(uuid, ()), *self._open.get(uuid, ())]
            for uuid in {**self._coarse, **self._open}
        }

    def feed(self, frame: Frame) -> None:
        """Take one frame.

        Raises:
            RecordingError: The frame is of another machine, or older than the one before.
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
            if frame.time - self._start > WHOLE_SECONDS:
                self._is_whole = False
                self._digest.seconds = _COARSE_SECONDS
                self._cut_into_windows(frame)
        elif done and frame.time - self._window_start >= self._window:
            self._close(frame)

    def finish(self, gpus: Collection[str] | None = None) -> Diagnosis:
        """What the frames show, of these GPUs alone when their UUIDs are given."""
        if self._last is None:
            return Diagnosis("Not enough data: there is not a single frame.", data_gaps=tuple(self._notes))
        if self._windows and any(self._open.values()):
            self._close(self._last)
        if self._windows:
            diagnosis = self._told(self._last, gpus)
        else:  # a short run, or shorter than a window
            diagnosis = self._judged(self._last, _only(self._open, gpus))
        labels = None if gpus is None else self._labels(gpus)
        if labels is not None:
            diagnosis = _about(diagnosis, labels)
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
        """Judge what was kept so far, now that it has become too long to be judged as a whole."""
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

    def _keep(self, seconds: dict[str, list[Second]], frame: Frame) -> None:
        self._windows.append(self._judged(frame, seconds))
        for uuid, entries in seconds.items():
            if entries:
                coarse = self._coarse.setdefault(uuid, [])
                coarse += entries[:: max(1, len(entries) // 4)]
                if len(coarse) > _COARSE_POINTS:
                    del coarse[1::2]
        self._witness = None

    def _judged(self, frame: Frame, seconds: dict[str, list[Second]]) -> Diagnosis:
        return judge(seconds, self._witness or frame, self._t, frame.time)

    def _told(self, last: Frame, gpus: Collection[str] | None) -> Diagnosis:
        """The windows as one diagnosis."""
        judged = _joined(entry for window in self._windows for entry in window.judged)
        counts = Counter(entry.label for window in self._windows for entry in window.judged)
        findings = [
            _as_one(run, counts, len(self._windows), self._window)
            for runs in _runs([window.findings for window in self._windows]).values()
            for run in _worth_telling(runs, counts)
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
        findings = rank(findings)
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


def _only(seconds: dict[str, list[Second]], gpus: Collection[str] | None) -> dict[str, list[Second]]:
    return seconds if gpus is None else {uuid: part for uuid, part in seconds.items() if uuid in gpus}


def _about(diagnosis: Diagnosis, labels: Collection[str]) -> Diagnosis:
    """Without what is said about other GPUs."""
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
    """By finding, GPU and cause the stretches of windows that show it."""
    found: dict[FindingKey, list[_Run]] = {}
    for place, findings in enumerate(windows):
        for finding in findings:
            runs = found.setdefault(finding.key, [[]])
            if runs[-1] and place - runs[-1][-1][0] > _APART:
                runs.append([])
            runs[-1].append((place, finding))
    return found


def _worth_telling(runs: list[_Run], judged: Counter[str]) -> list[_Run]:
    first = runs[0][0][1]
    if first.family not in _FACTS and first.label is not None and judged[first.label] > _FEW_WINDOWS:
        runs = [run for run in runs if len(run) >= _IN_A_ROW]
    return runs if len(runs) <= _MOST_TIMES else [[entry for run in runs for entry in run]]


def _as_one(run: _Run, judged: Counter[str], windows: int, seconds: float) -> Finding:
    """Several windows' finding as one: the worst one's evidence, from when it began to when it ended."""
    group = [finding for _, finding in run]
    if len(group) == 1:
        return group[0]
    worst = max(group, key=lambda f: (SEVERITIES.index(f.severity), f.lost_ratio or 0.0))
    of = judged[worst.label] if worst.label is not None else windows
    starts = [finding.start for finding in group if finding.start is not None]
    ends = [finding.end for finding in group if finding.end is not None]
    losses = [finding.lost_ratio for finding in group if finding.lost_ratio is not None]
    each = duration(seconds)
    return worst._replace(
        summary=f"{worst.summary} (the worst of {len(group)} windows of {each} that show it, out of {of})",
        confidence=max(finding.confidence for finding in group),
        lost_ratio=sum(losses) / len(losses) if losses else None,
        start=min(starts, default=None),
        end=max(ends, default=None),
    )


def _joined(entries: Iterable[Judged]) -> tuple[Judged, ...]:
    """The stretches of each GPU as one, called idle only when all of them were."""
    found: dict[str, Judged] = {}
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
            )
    return tuple(found.values())
