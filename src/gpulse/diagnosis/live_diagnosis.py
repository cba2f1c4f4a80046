"""Diagnose a live stream over a sliding window, with hysteresis so that findings do not flicker."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gpulse.diagnosis.engine import judge, rank_findings
from gpulse.diagnosis.rule_registry import RULES_BY_ID
from gpulse.diagnosis.rules.faults import find_faults
from gpulse.diagnosis.second_aggregator import SecondAggregator
from gpulse.diagnosis.second_summary import SecondSummary
from gpulse.diagnosis.thresholds import DEFAULTS, Thresholds
from gpulse.errors import RecordingError
from gpulse.model.finding import MAX_GAP_SECONDS, SEVERITIES, Finding, FindingKey
from gpulse.model.frame import Frame
from gpulse.model.xid import XidCounts

WINDOW_SECONDS = 30.0
INTERVAL_SECONDS = 5.0
_MIN_FRAMES = 12
_MIN_SEEN = 2
"""Evaluations in a row that must show a finding before it is reported."""
_MAX_MISSED = 3
"""Evaluations in a row that must not show a finding before it is withdrawn."""
_MIN_WORSE = 2
"""Evaluations in a row that must show a higher severity before it is reported."""
_MAX_WAITING_FRAMES = 24
"""At more frames per evaluation than this, seconds are summarized earlier: frames take memory."""
_MAX_STARTS = 1000
"""Above this number, start times of findings that have ended are dropped: an agent runs for months."""


class _TrackedFinding:
    """One finding, for how many evaluations it was seen or missed, and its severity in the last ones."""

    def __init__(self, finding: Finding, time: float) -> None:
        self.finding = finding
        self.seen = 1
        self.missed = 0
        self._confirmed = time
        self._levels = deque([(time, SEVERITIES.index(finding.severity))])

    @property
    def is_reported(self) -> bool:
        """Whether it was seen often enough; a finding that takes long to recognise is reported at once."""
        return self.seen >= _MIN_SEEN or RULES_BY_ID[self.finding.id].is_settled

    def again(self, finding: Finding, time: float, memory_seconds: float) -> None:
        """Replace it by that of the next evaluation.

        Its severity rises when two evaluations in a row are worse, and falls to the worst of the evaluations in memory.
        """
        starts = [start for start in (self.finding.start, finding.start) if start is not None]
        if time < self._levels[-1][0]:  # the clock was set back
            self._levels = deque([(time, SEVERITIES.index(self.finding.severity))])
        self._levels.append((time, SEVERITIES.index(finding.severity)))
        while time - self._levels[0][0] > memory_seconds:
            self._levels.popleft()
        levels = [level for _, level in self._levels]
        risen = max(SEVERITIES.index(self.finding.severity), min(levels[-_MIN_WORSE:]))
        severity = SEVERITIES[min(risen, max(levels))]
        self.finding = finding._replace(start=min(starts, default=None), severity=severity)
        self.confirm(time)

    def confirm(self, time: float) -> None:
        """Keep it as it is: the evaluation at this time shows it, or does not contradict it."""
        self.seen += 1
        self.missed = 0
        self._confirmed = time

    def is_old(self, time: float) -> bool:
        """Whether it was confirmed so long ago that it may have ended unnoticed."""
        return not 0 <= time - self._confirmed <= MAX_GAP_SECONDS


class LiveDiagnosis:
    """Diagnose a live stream: return the current findings for every frame.

    Facts from the driver are reported at once. Inferred findings are evaluated every few seconds over the last half
    minute; one is reported when two evaluations in a row show it, and withdrawn when three in a row do not. Its
    severity rises when two evaluations in a row are worse, and falls when none was as bad for half a minute.
    """

    def __init__(
        self,
        *,
        window_seconds: float = WINDOW_SECONDS,
        every_seconds: float = INTERVAL_SECONDS,
        thresholds: Thresholds = DEFAULTS,
        xids: XidCounts | None = None,
    ) -> None:
        """Start with an empty window.

        Args:
            window_seconds: Length of the sliding window.
            every_seconds: Time between two evaluations.
            thresholds: Thresholds of the rules.
            xids: Xid errors so far; those of the frames are added.
        """
        self._window = window_seconds
        self._every = every_seconds
        self._t = thresholds
        self._xids = XidCounts() if xids is None else xids
        self._digest = SecondAggregator()
        self._complete: list[Sequence[Frame]] = []
        """Frames of seconds that are not summarized yet: many at once cost less than one at a time."""
        self._seconds: dict[str, deque[SecondSummary]] = {}
        self._held: dict[FindingKey, _TrackedFinding] = {}
        self._starts: dict[FindingKey, tuple[float | None, float]] = {}
        """When each finding began, and when it was last reported."""
        self._judged_at: float | None = None

    def __call__(self, frame: Frame) -> list[Finding]:
        """Add the next frame, and return the current findings, worst first."""
        self._take(frame)
        if self._judged_at is None or frame.time < self._judged_at:
            self._judged_at = frame.time
        elif frame.time - self._judged_at >= self._every:
            self._judged_at = frame.time
            self._judge(frame)
        now = find_faults(frame, self._xids)
        facts = {finding.key for finding in now}
        inferred = [
            held.finding._replace(end=frame.time)
            for key, held in self._held.items()
            if held.is_reported and key not in facts and not self._yields(held)
        ]
        return rank_findings([self._since_it_began(finding, frame.time) for finding in (*now, *inferred)])

    def _yields(self, held: _TrackedFinding) -> bool:
        """Whether a reported finding of the same GPU explains the same better, also while either is about to end."""
        better = RULES_BY_ID[held.finding.id].yields_to
        return bool(better) and any(
            other.is_reported and other.finding.id in better and other.finding.label == held.finding.label
            for other in self._held.values()
        )

    def _since_it_began(self, finding: Finding, now: float) -> Finding:
        """Return the finding with the start of its first report, unless it was absent for a long time."""
        start, last = self._starts.get(finding.key, (finding.start, now))
        if not 0 <= now - last <= MAX_GAP_SECONDS:
            start = finding.start
        self._starts[finding.key] = start, now
        if len(self._starts) > _MAX_STARTS:
            self._starts = {
                key: start for key, start in self._starts.items() if now - start[1] <= MAX_GAP_SECONDS
            }
        return finding._replace(start=start)

    def _take(self, frame: Frame) -> None:
        try:
            frames = self._digest.add(frame)
        except RecordingError:  # the replay restarted, or this is another machine: start over
            self._digest, self._xids = SecondAggregator(), XidCounts()
            self._seconds.clear()
            self._complete.clear()
            frames = self._digest.add(frame)
        self._xids.follow(frame)
        if frames is not None:
            self._complete.append(frames)
            if len(self._complete) * len(frames) > _MAX_WAITING_FRAMES:
                self._summarize(frame.time)

    def _summarize(self, now: float) -> None:
        """Summarize the seconds that are complete, and drop those that the window does not hold anymore."""
        for frames in self._complete:
            self._drop_gone(frames[-1].time)
            for uuid, second in self._digest.summarize(frames).items():
                seconds = self._seconds.setdefault(uuid, deque())
                if seconds and second.start < seconds[-1].start:  # the clock was set back
                    seconds.clear()
                seconds.append(second)
        self._complete.clear()
        self._drop_gone(now)
        for seconds in self._seconds.values():
            # With slow sampling, half a minute holds too few frames.
            while len(seconds) > _MIN_FRAMES and now - seconds[0].start > self._window:
                seconds.popleft()

    def _drop_gone(self, now: float) -> None:
        """Forget GPUs that are not there anymore."""
        for uuid, seconds in list(self._seconds.items()):
            if now - seconds[-1].end > max(self._window, _MIN_FRAMES * seconds[-1].seconds):
                del self._seconds[uuid]

    def _judge(self, frame: Frame) -> None:
        self._summarize(frame.time)
        seconds = {uuid: list(entries) for uuid, entries in self._seconds.items()}
        diagnosis = judge(seconds, frame, self._t, frame.time)
        found = {
            finding.key: finding for finding in diagnosis.findings if not RULES_BY_ID[finding.id].from_frame
        }
        for key, finding in found.items():
            if key in self._held:
                self._held[key].again(finding, frame.time, self._window)
            else:
                self._held[key] = _TrackedFinding(finding, frame.time)
        possible = {finding.key for finding in diagnosis.info}
        for key in [key for key in self._held if key not in found]:
            held = self._held[key]
            if key in possible and held.is_reported:
                held.confirm(frame.time)  # the window does not show how it began anymore
                continue
            if (held.finding.id, held.finding.label) in diagnosis.unchecked and not held.is_old(frame.time):
                continue  # not being able to tell is no sign that it ended
            held.missed += 1
            if held.missed >= _MAX_MISSED or not held.is_reported:
                del self._held[key]
