"""The step time from the rhythm of a GPU: right, or absent."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulse.reports.run_figures import Array, StepRhythm, find_rhythm
from gpulse.sources.recording_reader import Recording

_FINE_SECONDS = 0.005
_RECORDINGS = Path(__file__).parents[1] / "data" / "recordings"


def _times(count: int, interval: float = 0.2) -> Array:
    return (interval * np.arange(count)).astype(np.float64)


def rhythm(
    period: float, *, busy: float = 0.5, interval: float = 0.2, samples: int = 200, jitter: float = 0.02
) -> StepRhythm | None:
    """What is found in averaged samples of a program that works for a part of each step."""
    random = np.random.default_rng(round(1000 * period))
    work = np.zeros(round(samples * interval / _FINE_SECONDS))
    now = 0.0
    while now < samples * interval:
        length = period * (1 + jitter * random.standard_normal())
        work[int(now / _FINE_SECONDS) : int((now + busy * length) / _FINE_SECONDS)] = 1.0
        now += length
    averages = work.reshape(samples, -1).mean(axis=1)
    return find_rhythm(_times(samples, interval), averages)


@pytest.mark.parametrize("period", [0.95, 1.0, 1.3, 1.7, 2.5, 3.3, 4.4])
def test_a_step_of_several_samples_is_measured(period: float) -> None:
    """Also one that is not a multiple of the sampling interval."""
    found = rhythm(period)

    assert found is not None
    assert pytest.approx(period, rel=0.03) == found.seconds
    assert 0.5 <= found.confidence <= 0.95
    assert abs(found.seconds - period) <= 3 * found.error_seconds + 0.03 * period


@settings(max_examples=60, deadline=None)
@given(period=st.floats(0.02, 0.7), busy=st.floats(0.05, 0.95), jitter=st.floats(0.01, 0.1))
def test_a_step_faster_than_the_samples_is_never_mistaken_for_a_slow_one(
    period: float, busy: float, jitter: float
) -> None:
    """Such a rhythm is seen as a beat, which must not be reported. No two steps of a program are equal."""
    found = rhythm(period, busy=busy, jitter=jitter)

    assert found is None or pytest.approx(period, rel=0.05) == found.seconds


def test_no_rhythm_in_noise() -> None:
    """Neither in noise, nor in a constant, nor in a single pause."""
    times = _times(300)
    noise = np.random.default_rng(1).uniform(0, 1, 300)
    pause = np.ones(300)
    pause[100:150] = 0.0

    assert None is find_rhythm(times, noise)
    assert None is find_rhythm(times, np.full(300, 0.9))
    assert None is find_rhythm(times, pause)


def test_too_few_or_missing_samples() -> None:
    """Six periods are needed, and samples without large gaps."""
    assert None is rhythm(2.5, samples=60)
    assert None is find_rhythm(np.empty(0), np.empty(0))
    assert None is find_rhythm(_times(200), np.full(200, np.nan))
    wave = 0.5 + 0.5 * np.sin(2 * np.pi * np.arange(400) * 0.2 / 2.0)
    wave[100:200] = np.nan
    assert None is find_rhythm(_times(400), wave)


def test_readings_that_are_kept_count_once() -> None:
    """Averages over a second, repeated in every frame, are samples of one second."""
    second = 0.5 + 0.5 * np.sin(2 * np.pi * np.arange(120) / 8.0)
    found = find_rhythm(_times(600), np.repeat(second, 5))

    assert found is not None
    assert pytest.approx(8.0, rel=0.02) == found.seconds


def test_recordings_of_fast_steps_have_no_step_time() -> None:
    """Only one shows its steps, and that one rightly; those with regular pauses have a rhythm of their own."""
    labels = json.loads((_RECORDINGS / "labels.json").read_text())
    found = {}
    for name, label in labels.items():
        if label.get("steps_per_s") and "periodic_stall" not in label["expect"]:
            frames = [
                frame
                for frame in Recording(_RECORDINGS / f"{name}.jsonl.gz")
                if label["begin"] <= frame.time <= label["end"] and frame.gpus
            ]
            times = np.array([frame.time for frame in frames])
            values = [frame.gpus[0].values.get("graphics_active_ratio", np.nan) for frame in frames]
            rhythm = find_rhythm(times, np.array(values, np.float64))
            if rhythm is not None:
                found[name] = round(rhythm.seconds * label["steps_per_s"], 2)

    assert {"serving_slow": 1.0} == found
