"""The diagnosis of a live stream: a sliding window, and findings that do not flicker."""

from __future__ import annotations

from collections import deque

from gpulse.diagnosis.digest import Digest
from gpulse.diagnosis.engine import judge, rank
from gpulse.diagnosis.faults import faults
from gpulse.diagnosis.seconds import Second
from gpulse.diagnosis.thresholds import DEFAULTS, Thresholds
from gpulse.errors import RecordingError
from gpulse.model.finding import Finding, FindingKey
from gpulse.model.finding_span import MAX_GAP_SECONDS
from gpulse.model.frame import Frame
from gpulse.model.xid import XidLedger

WINDOW_SECONDS = 30.0
EVERY_SECONDS = 5.0
_FEWEST_FRAMES = 12
_RAISED_AFTER = 2
"""Judgements in a row that must show a finding before it is told."""
_CLEARED_AFTER = 3
"""Judgements in a row that must not, before it is taken back."""
_MAX_STARTS = 1000
"""More are forgotten when they are over: numbers of Xid errors and of GPUs come and go for months."""


class _Held:
    """One finding on its way in, in, or on its way out."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        self.seen = 1
        self.missed = 0

    def again(self, finding: Finding) -> None:
        starts = [start for start in (self.finding.start, finding.start) if start is not None]
        self.finding = finding._replace(start=min(starts, default=None))
        self.seen += 1
        self.missed = 0


class Monitor:
    """Tells for every frame what is wrong now, since when, and until when it was seen.

    Facts that the driver reports are told at once. What is inferred is judged every few seconds over the
    last half minute; it is told when two judgements in a row agree and taken back when three do not.
    """

    def __init__(
        self,
        *,
        window_seconds: float = WINDOW_SECONDS,
        every_seconds: float = EVERY_SECONDS,
        thresholds: Thresholds = DEFAULTS,
        xids: XidLedger | None = None,
    ) -> None:
        """Begin to watch.

        Args:
            window_seconds: How far back a judgement looks.
            every_seconds: Time from one judgement to the next.
            thresholds: What counts as too little or too much.
            xids: Xid errors that are known already; those of the frames are added to it.
        """
        self._window = window_seconds
        self._every = every_seconds
        self._t = thresholds
        self._xids = XidLedger() if xids is None else xids
        self._digest = Digest()
        self._seconds: dict[str, deque[Second]] = {}
        self._held: dict[FindingKey, _Held] = {}
        self._starts: dict[FindingKey, tuple[float | None, float]] = {}
        """When each finding began, and when it was told last."""
        self._judged_at: float | None = None

    def __call__(self, frame: Frame) -> list[Finding]:
        """Take the next frame; the findings that hold now, worst first."""
        self._take(frame)
        if self._judged_at is None or frame.time < self._judged_at:
            self._judged_at = frame.time
        elif frame.time - self._judged_at >= self._every:
            self._judged_at = frame.time
            self._judge(frame)
        now = faults(frame, self._xids)
        facts = {finding.key for finding in now}
        told = [
            held.finding._replace(end=frame.time)
            for key, held in self._held.items()
            if held.seen >= _RAISED_AFTER and key not in facts
        ]
        return rank([self._since_it_began(finding, frame.time) for finding in (*now, *told)])

    def _since_it_began(self, finding: Finding, now: float) -> Finding:
        """Return the finding with the start it had when it was told first, unless it was gone for long."""
        start, last = self._starts.get(finding.key, (finding.start, now))
        if not 0 <= now - last <= MAX_GAP_SECONDS:
            start = finding.start
        self._starts[finding.key] = start, now
        if len(self._starts) > _MAX_STARTS:
            self._starts = {
                key: told for key, told in self._starts.items() if now - told[1] <= MAX_GAP_SECONDS
            }
        return finding._replace(start=start)

    def _take(self, frame: Frame) -> None:
        try:
            done = self._digest.feed(frame)
        except RecordingError:  # a replay that started over, or another machine: begin anew
            self._digest, self._xids = Digest(), XidLedger()
            self._seconds.clear()
            done = self._digest.feed(frame)
        self._xids.follow(frame)
        for uuid, second in done.items():
            self._seconds.setdefault(uuid, deque()).append(second)
        for uuid, seconds in list(self._seconds.items()):
            # At a slow pace half a minute holds too little to judge.
            while len(seconds) > _FEWEST_FRAMES and frame.time - seconds[0].start > self._window:
                seconds.popleft()
            if frame.time - seconds[-1].end > max(self._window, _FEWEST_FRAMES * seconds[-1].seconds):
                del self._seconds[uuid]  # gone

    def _judge(self, frame: Frame) -> None:
        seconds = {uuid: list(entries) for uuid, entries in self._seconds.items()}
        found = {
            finding.key: finding
            for finding in judge(seconds, frame, self._t, frame.time).findings
            if finding.id != "gpu_fault"  # told from the frame itself
        }
        for key, finding in found.items():
            if key in self._held:
                self._held[key].again(finding)
            else:
                self._held[key] = _Held(finding)
        for key in [key for key in self._held if key not in found]:
            held = self._held[key]
            held.missed += 1
            if held.missed >= _CLEARED_AFTER or held.seen < _RAISED_AFTER:
                del self._held[key]
