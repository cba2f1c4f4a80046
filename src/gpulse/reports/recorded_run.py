"""Figures of a recording: its diagnosis, and means over the time in which its job was at work."""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gpulse.diagnosis.evidence import GpuEvidence
from gpulse.diagnosis.job_window import JobWindow
from gpulse.diagnosis.second_summary import SecondSummary
from gpulse.diagnosis.thresholds import DEFAULTS, Thresholds
from gpulse.diagnosis.windowed_diagnosis import WindowedDiagnosis
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame, GpuReading
from gpulse.reports.run_figures import (
    MAX_SAMPLES,
    FindingShare,
    Measure,
    RunFigures,
    StepRhythm,
    combine_measures,
    find_rhythm,
    measure,
    merge_findings,
    name_program,
)

PAUSES = "pauses"
"""Cause of the lost time in pauses of the program."""
_AVERAGED = ("graphics_active_ratio", "sm_active_ratio")
"""Averages of the GPU's activity, the better one first."""
_METRICS = ("duty", "sm_active_ratio", "tensor_active_ratio", "power_watts")
"""Metrics of a GPU whose means are figures of a run."""
_MAX_READ_DIFFERENCE_SECONDS = 0.1
"""Averages that were read at about the same time cover the same time."""


class _ActivitySample(NamedTuple):
    """Averages of a GPU's activity at one time; None is unknown."""

    time: float
    values: tuple[float | None, ...]


class _GpuTally:
    """What one GPU did while a job was at work on it.

    It keeps a few numbers for each second, because a recording may have a day of many GPUs.
    """

    def __init__(self) -> None:
        self.model = ""
        self.start = 0.0
        self.end = 0.0
        self._lengths = array("d")
        self._means = {metric: array("d") for metric in _METRICS}
        """The mean of each second; NaN is unknown."""
        self.lost: dict[str, float] = {}
        """Seconds without a kernel, by cause."""
        self.known_seconds = 0.0
        self.programs: Counter[str] = Counter()

    @property
    def length(self) -> float:
        """Seconds in which the job was at work."""
        return sum(self._lengths)

    def measure(self, metric: str) -> Measure | None:
        """Return the mean of a GPU metric over time."""
        means = self._means[metric]
        return measure(
            (length, None if math.isnan(mean) else mean)
            for length, mean in zip(self._lengths, means, strict=True)
        )

    def add(self, window: JobWindow, thresholds: Thresholds, now: float) -> None:
        """Add one window of the job."""
        self.model = window.device.name or ""
        if window.steady and not self._lengths:
            self.start = window.steady[0].start
        attribution = GpuEvidence(window, thresholds, now).attribution
        causes: dict[int, str] = {
            id(second): cause for second, cause in zip(attribution.seconds, attribution.causes, strict=True)
        }
        for second in window.steady:
            self.end = second.end
            self._lengths.append(second.seconds)
            for metric, means in self._means.items():
                mean = second.mean(metric)
                means.append(math.nan if mean is None else mean)
            if second.lost is not None:
                cause = causes.get(id(second), PAUSES)
                self.lost[cause] = self.lost.get(cause, 0.0) + second.lost * second.seconds
                self.known_seconds += second.seconds


class RecordedRun:
    """Takes the frames of a recording in order, and returns its figures at the end."""

    def __init__(
        self, name: str, *, window_seconds: float | None = None, thresholds: Thresholds = DEFAULTS
    ) -> None:
        """Start a run.

        Args:
            name: What to call it.
            window_seconds: Length of each diagnosed window; None diagnoses a short recording as a whole.
            thresholds: What the rules compare with.
        """
        self._name = name
        self._t = thresholds
        self._timeline = WindowedDiagnosis(
            window_seconds=window_seconds, thresholds=thresholds, observe=self._take_window
        )
        self._tallies: dict[str, _GpuTally] = {}
        self._activity: dict[str, deque[_ActivitySample]] = {}
        self._programs: dict[int, str] = {}
        self._end = 0.0
        self._windows = 0

    def feed(self, frame: Frame) -> None:
        """Add one frame.

        Raises:
            RecordingError: The frame is from another machine, or older than the previous one.
        """
        self._timeline.feed(frame)
        self._end = frame.time
        for process in frame.processes:
            if process.on_gpu and process.pid not in self._programs:
                name = name_program(process.identity.name, process.identity.command)
                if name is not None:
                    self._programs[process.pid] = name
        for gpu in frame.gpus:
            kept = self._activity.setdefault(gpu.device.uuid, deque(maxlen=MAX_SAMPLES))
            sample = _read_activity(gpu, frame.time)
            if not kept or sample.time > kept[-1].time:
                kept.append(sample)

    def finish(self) -> RunFigures:
        """Return the figures of all frames."""
        diagnosis = self._timeline.finish()
        start = diagnosis.start
        recorded = 0.0 if start is None or diagnosis.end is None else diagnosis.end - start
        used = {uuid: tally for uuid, tally in self._tallies.items() if tally.length > 0}
        if not used:
            is_idle = bool(diagnosis.judged)
            missing = "no job ran on its GPUs" if is_idle else _without_prefix(diagnosis.verdict)
            return RunFigures(self._name, start, recorded, 0.0, missing=missing)
        tallies = list(used.values())
        length = max(tally.length for tally in tallies)
        programs = sum((tally.programs for tally in tallies), Counter[str]())
        return RunFigures(
            name=self._name,
            start=start,
            recorded_seconds=recorded,
            seconds=length,
            models=tuple(tally.model for tally in tallies),
            programs=tuple(name for name, _ in programs.most_common()) or None,
            utilization=_combine(tallies, "duty"),
            sm_activity=_combine(tallies, "sm_active_ratio"),
            tensor_activity=_combine(tallies, "tensor_active_ratio"),
            power_watts=_combine(tallies, "power_watts"),
            lost_time=_lost_time(tallies),
            rhythm=self._find_rhythm(used),
            findings=merge_findings(
                (self._share(finding, length) for finding in diagnosis.findings), len(tallies)
            ),
            gpu_seconds=sum(tally.length for tally in tallies),
            notes=tuple(gap for gap in diagnosis.data_gaps if not gap.startswith("GPU ")),
        )

    def _take_window(self, seconds: Mapping[str, Sequence[SecondSummary]]) -> None:
        self._windows += 1
        for uuid, entries in seconds.items():
            if not entries:
                continue
            window = JobWindow(entries, self._t, self._programs)
            if window.is_enough and not window.is_starting:
                tally = self._tallies.setdefault(uuid, _GpuTally())
                tally.add(window, self._t, self._end)
                tally.programs.update(self._programs[pid] for pid in window.pids if pid in self._programs)

    def _share(self, finding: Finding, length: float) -> FindingShare:
        """Return a finding with the fraction of the run that its lost time is about.

        That is all of it for a recording that was diagnosed as a whole, and else the windows with the finding.
        """
        held = 1.0
        if self._windows > 1 and finding.start is not None and finding.end is not None and length > 0:
            held = (finding.end - finding.start) / length
        return FindingShare(
            finding.id, finding.severity, finding.summary, finding.lost_ratio, finding.cause, held
        )

    def _find_rhythm(self, used: Mapping[str, _GpuTally]) -> StepRhythm | None:
        """Return the clearest rhythm of the GPUs in use."""
        found = []
        for uuid, tally in used.items():
            samples = [
                sample for sample in self._activity.get(uuid, ()) if tally.start <= sample.time <= tally.end
            ]
            for place in range(len(_AVERAGED)):
                known = [value for sample in samples if (value := sample.values[place]) is not None]
                if known and 10 * len(known) >= 9 * len(samples):
                    times = np.array([sample.time for sample in samples if sample.values[place] is not None])
                    rhythm = find_rhythm(times, np.array(known))
                    found += [] if rhythm is None else [rhythm]
                    break
        return max(found, key=lambda rhythm: rhythm.confidence, default=None)


def _read_activity(gpu: GpuReading, now: float) -> _ActivitySample:
    """Return the averages of a GPU's activity, with the time at which they were read."""
    read_at = gpu.read_at.get("gpm", now)
    is_late = gpu.read_at.get("graphics", read_at) < read_at - _MAX_READ_DIFFERENCE_SECONDS
    graphics, filled = (gpu.values.get(name) for name in _AVERAGED)
    return _ActivitySample(read_at, (None if is_late else graphics, filled))


def _combine(tallies: Sequence[_GpuTally], metric: str) -> Measure | None:
    return combine_measures((tally.length, tally.measure(metric)) for tally in tallies)


def _lost_time(tallies: Sequence[_GpuTally]) -> dict[str, float] | None:
    known = sum(tally.known_seconds for tally in tallies)
    if known <= 0:
        return None
    causes = dict.fromkeys(cause for tally in tallies for cause in tally.lost)
    return {cause: sum(tally.lost.get(cause, 0.0) for tally in tallies) / known for cause in causes}


def _without_prefix(verdict: str) -> str:
    text = verdict.removeprefix("Not enough data: ").rstrip(".")
    return text or "there is not enough data"
