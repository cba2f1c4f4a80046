"""Figures of one run (a recording or a session) that can be compared with those of another, its step time among them.

The step time is the period of the GPU's activity. Sampling limits what can be known. A rhythm faster than the samples
looks like a slower one (aliasing). Samples that are averages over their interval, as GPM's are, weaken such a false rhythm
by a known factor, so a period is reported only if it is stronger than that. NVML's utilization is not such an average, and
is not used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.model.finding import MULTI_CAUSE_FINDING, SEVERITIES, Severity

Array = NDArray[np.float64]

MAX_SAMPLES = 4096
"""More samples than this are not used: steps that change over hours have no common period."""
_MIN_SAMPLES = 32
_MIN_PERIOD_SAMPLES = 4.0
_MIN_PERIODS = 6
_MIN_CORRELATION = 0.5
_SEGMENT_SAMPLES = 256
"""Steps are not equally long, so that a rhythm has a sharp frequency only over a limited time."""
_MIN_PERIODS_OF_SEGMENT = 4
_MIN_FUNDAMENTAL = 0.25
"""Power of a rhythm's own frequency relative to its strongest harmonic; short bursts have strong harmonics."""
_MULTIPLE_TOLERANCE = 0.03
_MAX_PERIOD_DIFFERENCE = 0.1
"""How far the peaks of the autocorrelation may be from the period of the spectrum, relative to it."""
_MIN_CORRELATION_OF_HALF = 0.35
_MAX_HALVES_DIFFERENCE = 0.05
"""How far the periods of the two halves may be from each other, relative to the period."""
_SQUARE_WAVE_AMPLITUDE = 2 / np.pi
"""Largest amplitude that work in turns with pauses can have at its own frequency."""
_AMPLITUDE_MARGIN = 0.02
_MAX_MISSING_RATIO = 0.05
_KEPT_QUANTILE = 0.1
_MAX_CONFIDENCE = 0.95


class StepRhythm(NamedTuple):
    """The period of a job's activity."""

    seconds: float
    error_seconds: float
    """Uncertainty of the period."""
    confidence: float
    """0 to 1."""


class _Period(NamedTuple):
    """A period in samples, and the autocorrelation there."""

    samples: float
    correlation: float
    multiples: int
    """Number of periods over which it was measured."""


def find_rhythm(times: Array, averages: Array) -> StepRhythm | None:
    """Return the period of a job's activity; None when it cannot be told.

    Args:
        times: Epoch seconds of the samples.
        averages: Activity of the GPU, 0 to 1, each the average since the previous sample; NaN is unknown.
    """
    activity, width = _resample(times, averages)
    if len(activity) < _MIN_SAMPLES:
        return None
    whole = _find_period(activity)
    if whole is None:
        return None
    halves = [
        _refine(_autocorrelation(half), whole.samples)
        for half in (activity[: len(activity) // 2], activity[len(activity) // 2 :])
    ]
    if any(half is None or half.correlation < _MIN_CORRELATION_OF_HALF for half in halves):
        return None
    first, second = (half.samples for half in halves if half is not None)
    if abs(first - second) > _MAX_HALVES_DIFFERENCE * whole.samples:
        return None
    if not _is_stronger_than_alias(activity, whole):
        return None
    error = max(0.5 / whole.multiples, abs(first - second) / 2)
    return StepRhythm(
        seconds=round(whole.samples * width, 4),
        error_seconds=round(error * width, 4),
        confidence=round(min(_MAX_CONFIDENCE, whole.correlation), 2),
    )


def _resample(times: Array, values: Array) -> tuple[Array, float]:
    """Return the values at even intervals without gaps, and the interval; empty when there is no such part."""
    known = ~np.isnan(values)
    times, values = times[known], values[known]
    if len(times) < _MIN_SAMPLES:
        return np.empty(0), 1.0
    width = _measure_interval(times, values)
    places = np.rint((times - times[0]) / width).astype(np.int64)
    count = int(places[-1]) + 1
    if count > 4 * MAX_SAMPLES or (places < 0).any():
        return np.empty(0), width
    sums, counts = np.zeros(count), np.zeros(count)
    np.add.at(sums, places, values)
    np.add.at(counts, places, 1.0)
    missing = counts == 0
    if missing.mean() > _MAX_MISSING_RATIO:
        return np.empty(0), width
    even = np.where(missing, values.mean(), sums / np.maximum(counts, 1.0))
    return even[-MAX_SAMPLES:], width


def _measure_interval(times: Array, values: Array) -> float:
    """Return the interval between samples.

    Readings that are kept for several frames change only that often, and count as one sample.
    """
    interval = float(np.median(np.diff(times)))
    changes = times[1:][np.diff(values) != 0]
    kept = float(np.quantile(np.diff(changes), _KEPT_QUANTILE)) if len(changes) > 2 else interval
    return max(interval, kept, 1e-3)


def _autocorrelation(values: Array) -> Array:
    """Return the correlation of a series with itself at each lag; zeros for a constant series."""
    count = len(values)
    centered = values - values.mean()
    variance = float((centered**2).mean())
    if variance < 1e-9:
        return np.zeros(count)
    spectrum = np.fft.rfft(centered, 2 * count)
    sums = np.fft.irfft(np.abs(spectrum) ** 2, 2 * count)[:count]
    found: Array = sums / np.arange(count, 0, -1) / variance
    return found


def _find_period(values: Array) -> _Period | None:
    """Return the period of the strongest rhythm, confirmed by the autocorrelation."""
    spectrum, frequencies = _spectrum(values)
    lowest = max(_MIN_PERIODS / len(values), _MIN_PERIODS_OF_SEGMENT / min(len(values), _SEGMENT_SAMPLES))
    inner = np.flatnonzero(frequencies >= lowest)[1:-1]
    is_peak = (spectrum[inner] >= spectrum[inner - 1]) & (spectrum[inner] > spectrum[inner + 1])
    peaks = inner[is_peak]
    if not len(peaks):
        return None
    strongest = peaks[np.argmax(spectrum[peaks])]
    fundamental = next(
        place
        for place in peaks
        if spectrum[place] >= _MIN_FUNDAMENTAL * spectrum[strongest]
        and _is_multiple(float(frequencies[strongest] / frequencies[place]))
    )
    period = float(1 / frequencies[fundamental])
    if period < _MIN_PERIOD_SAMPLES:
        return None
    found = _refine(_autocorrelation(values), period)
    return None if found is None or found.correlation < _MIN_CORRELATION else found


def _spectrum(values: Array) -> tuple[Array, Array]:
    """Return the power spectrum, averaged over segments, and its frequencies in periods per sample."""
    length = min(len(values), _SEGMENT_SAMPLES)
    window = np.hanning(length)
    starts = range(0, len(values) - length + 1, max(1, length // 2))
    parts = [values[start : start + length] for start in starts]
    padded = 8 * length
    spectra = [np.abs(np.fft.rfft((part - part.mean()) * window, padded)) ** 2 for part in parts]
    return np.mean(spectra, axis=0), np.fft.rfftfreq(padded).astype(np.float64)


def _is_multiple(ratio: float) -> bool:
    return abs(ratio - round(ratio)) <= _MULTIPLE_TOLERANCE * ratio


def _refine(correlation: Array, period: float) -> _Period | None:
    """Measure a period more precisely at its multiples; None when there is no peak near it."""
    first = _peak_near(correlation, period)
    if first is None or abs(first[0] - period) > _MAX_PERIOD_DIFFERENCE * period:
        return None
    found, multiple = first[0], 1
    for place in range(2, int(len(correlation) / 2 / max(1.0, found)) + 1):
        later = _peak_near(correlation, place * found)
        if later is None or later[1] < _MIN_CORRELATION_OF_HALF:
            break
        if abs(later[0] / place - first[0]) > _MAX_PERIOD_DIFFERENCE * first[0]:
            break
        found, multiple = later[0] / place, place
    return _Period(found, first[1], multiple)


def _peak_near(correlation: Array, lag: float) -> tuple[float, float] | None:
    """Return the position and height of the peak within a quarter of a period of a lag, at most two samples away."""
    reach = max(1, min(2, round(lag / 4)))
    begin, end = max(1, round(lag) - reach), min(len(correlation) - 1, round(lag) + reach + 1)
    if end - begin < 1:
        return None
    place = begin + int(np.argmax(correlation[begin:end]))
    if not 1 <= place < len(correlation) - 1:
        return None
    before, here, after = (float(value) for value in correlation[place - 1 : place + 2])
    curvature = before - 2 * here + after
    if curvature >= 0 or here < max(before, after):
        return None
    return place + 0.5 * (before - after) / curvature, here


def _is_stronger_than_alias(values: Array, period: _Period) -> bool:
    """Return whether a rhythm is too strong to be the trace of a faster one in averaged samples."""
    amplitude = float(np.sqrt(2 * values.var() * max(0.0, period.correlation)))
    strongest_alias = _SQUARE_WAVE_AMPLITUDE * float(np.sinc(1 - 1 / period.samples))
    return amplitude >= strongest_alias + _AMPLITUDE_MARGIN


_MAX_BLOCKS = 12
_MIN_BLOCKS = 4
_OPTION_WITH_VALUE = re.compile(r"-(?P<name>[a-zA-Z]*?[cmWX]|-check-hash-based-pycs)(?P<value>.*)", re.DOTALL)
"""Options of Python that have a value, in the same word or in the next one."""


class Measure(NamedTuple):
    """A mean over a run, and how uncertain the run's own variation makes it."""

    value: float
    error: float | None = None
    """Standard error; None when it is unknown."""


class RunFinding(NamedTuple):
    """Findings of one kind in a run."""

    id: str
    severity: Severity
    summary: str
    """The worst one in one sentence."""
    lost_ratio: float | None = None
    """Time that was lost to it, as a fraction of the time of all GPUs in use; None when unknown."""
    cause: str = ""
    """Distinguishes kinds that have the same ID, such as different Xid errors."""

    @property
    def kind(self) -> tuple[str, str]:
        """What findings of two runs have in common."""
        return self.id, self.cause


class RunFigures(NamedTuple):
    """Figures of one run, over the time in which its job was at work."""

    name: str
    start: float | None
    """Epoch seconds."""
    recorded_seconds: float
    """Length of the whole recording or session."""
    seconds: float
    """Length of the part that the figures are about, without start-up and idle ends; 0 when there is none."""
    models: tuple[str, ...] = ()
    """Models of the GPUs in use, one entry for each GPU."""
    programs: tuple[str, ...] | None = None
    """The programs on these GPUs; None when they are unknown."""
    labels: Mapping[str, str] = {}
    utilization: Measure | None = None
    """Fraction of the time in which kernels ran."""
    sm_activity: Measure | None = None
    tensor_activity: Measure | None = None
    power_watts: Measure | None = None
    """Mean of a GPU."""
    lost_time: Mapping[str, float | None] | None = None
    """Fraction of the time in which no kernel ran, by cause; None when the causes, or the time of one, are unknown."""
    rhythm: StepRhythm | None = None
    findings: tuple[RunFinding, ...] = ()
    notes: tuple[str, ...] = ()
    """What limits these figures, in sentences."""
    missing: str | None = None
    """Why there are no figures; None when there are."""
    gpu_seconds: float | None = None
    """Time at work of all GPUs together; None if each was at work all the time."""

    @property
    def gpus(self) -> int:
        """Number of GPUs in use."""
        return len(self.models)

    @property
    def energy_joules(self) -> float | None:
        """Energy of the GPUs in use, over the part that the figures are about."""
        if self.power_watts is None:
            return None
        at_work = self.gpus * self.seconds if self.gpu_seconds is None else self.gpu_seconds
        return self.power_watts.value * at_work


def measure(samples: Iterable[tuple[float, float | None]]) -> Measure | None:
    """Return the mean of values in the order of time, and its standard error; None without values.

    Neighboring values depend on each other, so the error is that of the means of a few long blocks.

    Args:
        samples: The length of time that each value stands for, and the value; None is unknown.
    """
    known = [(seconds, value) for seconds, value in samples if value is not None and seconds > 0]
    if not known:
        return None
    mean = _mean(known)
    count = min(_MAX_BLOCKS, max(_MIN_BLOCKS, len(known) // 2))
    if len(known) < count:
        return Measure(mean)
    edges = [len(known) * place // count for place in range(count + 1)]
    means = [_mean(known[edges[place] : edges[place + 1]]) for place in range(count)]
    middle = sum(means) / count
    variance = sum((value - middle) ** 2 for value in means) / (count - 1)
    return Measure(mean, math.sqrt(variance / count))


def _mean(samples: Sequence[tuple[float, float]]) -> float:
    return sum(seconds * value for seconds, value in samples) / sum(seconds for seconds, _ in samples)


def combine_measures(parts: Iterable[tuple[float, Measure | None]]) -> Measure | None:
    """Return the mean of several GPUs, weighted by time.

    The GPUs of a job vary together, so their errors do not cancel out.
    """
    known = [(seconds, part) for seconds, part in parts if part is not None and seconds > 0]
    if not known:
        return None
    total = sum(seconds for seconds, _ in known)
    errors = [(seconds, part.error) for seconds, part in known if part.error is not None]
    return Measure(
        sum(seconds * part.value for seconds, part in known) / total,
        sum(seconds * error for seconds, error in errors) / total if len(errors) == len(known) else None,
    )


class FindingShare(NamedTuple):
    """One finding on one GPU, and the fraction of the run in which it held."""

    id: str
    severity: Severity
    summary: str
    lost_ratio: float | None
    cause: str | None
    held_ratio: float


def merge_findings(found: Iterable[FindingShare], gpus: int) -> tuple[RunFinding, ...]:
    """Merge findings of the same kind, worst first; their lost time is that of all GPUs in use."""
    kinds: dict[tuple[str, str], list[FindingShare]] = {}
    for one in found:
        if one.severity != "info":
            cause = (one.cause or "") if one.id == MULTI_CAUSE_FINDING else ""
            kinds.setdefault((one.id, cause), []).append(one)
    merged = [_merge(cause, group, max(1, gpus)) for (_, cause), group in kinds.items()]
    return tuple(
        sorted(merged, key=lambda one: (-SEVERITIES.index(one.severity), -(one.lost_ratio or 0.0), one.id))
    )


def _merge(cause: str, group: Sequence[FindingShare], gpus: int) -> RunFinding:
    worst = max(group, key=lambda one: (SEVERITIES.index(one.severity), one.lost_ratio or 0.0))
    losses = [
        one.lost_ratio * min(1.0, max(0.0, one.held_ratio)) for one in group if one.lost_ratio is not None
    ]
    lost = min(1.0, sum(losses) / gpus) if losses else None
    return RunFinding(worst.id, worst.severity, worst.summary, lost, cause)


def name_program(name: str | None, command: Sequence[str]) -> str | None:
    """Return the name of a program for people: that of the script for an interpreter, without its directory."""
    if not name and not command:
        return None
    shown = (name or command[0]).rpartition("/")[2]
    return (_name_script(command[1:]) if shown.startswith("python") else None) or shown


def _name_script(arguments: Iterable[str]) -> str | None:
    """Return the script or the module that Python runs; None for code of `-c` or of standard input."""
    rest = iter(arguments)
    for word in rest:
        if not word.startswith("-"):
            return word.rpartition("/")[2]
        if word == "-":
            return None
        option = _OPTION_WITH_VALUE.fullmatch(word)
        if option is not None:
            value = option["value"] or next(rest, "")
            if option["name"].endswith("m"):
                return value
            if option["name"].endswith("c"):
                return None
    return None
