"""Score the diagnosis on every labelled recording, with GPM and without.

    python -m tests.diagnosis_score                 # all recordings as they are
    python -m tests.diagnosis_score --without-gpm   # as a GPU before Hopper would have been recorded
    python -m tests.diagnosis_score --without-gpm --without-pcie --all

A run with an induced cause is right when the first finding names it, and a healthy run when nothing is found.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gpulse.diagnosis.engine import judge
from gpulse.diagnosis.second_aggregator import SecondAggregator
from gpulse.diagnosis.second_summary import SecondSummary
from gpulse.diagnosis.thresholds import DEFAULTS
from gpulse.model.finding import Diagnosis, Finding
from gpulse.model.frame import Frame, GpuReading
from gpulse.sources.nvml.gpm import GPM_METRICS
from gpulse.sources.recording_reader import Recording

_ROOT = Path(__file__).parents[1]
_DATA = _ROOT / "tests" / "data"
_DEMO = _ROOT / "src" / "gpulse" / "sources" / "demo"
SETS = ("traces", "recordings")
NVML_ONLY = "nvml_only"
"""Recorded without GPM, most of them at a lowered power limit or at locked clocks."""
PCIE_SECONDS = 1.0
"""How often PCIe rates are read where GPM does not provide them."""
_PCIE = ("pcie_rx_bytes_per_second", "pcie_tx_bytes_per_second")


class LabelledRun(NamedTuple):
    """One recording and what was induced in it."""

    name: str
    path: Path
    expect: tuple[str, ...]
    """Empty for a healthy run."""
    right: frozenset[str]
    """What is accepted: the expected findings, and others that say the same."""
    begin: float
    end: float
    aside: frozenset[str] = frozenset()
    """Findings that are true about how the GPU was set, and say nothing about the program."""

    def steady(self) -> list[Frame]:
        """The frames between its start-up and its end."""
        return [frame for frame in read_frames(self.path) if self.begin <= frame.time <= self.end]


class Scored(NamedTuple):
    """What was found in one run."""

    run: LabelledRun
    diagnosis: Diagnosis
    seconds: float | None
    """Length of the shortest recording that gives the same answer, as every longer one does; None unless it is right."""

    @property
    def found(self) -> list[str]:
        """IDs of the findings about the program, worst first."""
        return [finding.id for finding in findings_of(self.run, self.diagnosis)]

    @property
    def is_right(self) -> bool:
        """Whether the first finding is right, or nothing was found where nothing was induced."""
        return is_right(self.run, self.diagnosis)


@cache
def read_frames(path: Path) -> tuple[Frame, ...]:
    """Every frame of a recording."""
    return tuple(Recording(path))


@cache
def labelled_runs(folder: str) -> tuple[LabelledRun, ...]:
    """The recordings of one folder of `tests/data` that has labels."""
    entries: dict[str, dict[str, Any]] = json.loads((_DATA / folder / "labels.json").read_text())
    found = []
    for name, entry in entries.items():
        places = (_DATA / folder / f"{name}.jsonl.gz", _DEMO / f"{name}.jsonl.gz")
        expect = tuple(entry["expect"])
        found.append(
            LabelledRun(
                f"{folder}/{name}",
                next(place for place in places if place.exists()),
                expect,
                frozenset((*expect, *entry.get("also_right", ()))),
                entry["begin"],
                entry["end"],
                frozenset(entry.get("aside", ())),
            )
        )
    return tuple(found)


def without_gpm(frames: Sequence[Frame], *, pcie: bool = True) -> list[Frame]:
    """What would have been recorded of a GPU before Hopper.

    Args:
        frames: As recorded with GPM.
        pcie: Keep the PCIe rates of one frame a second, which NVML measures by itself; the frames between hold them.
    """
    held: dict[str, tuple[float, dict[str, float]]] = {}

    def reduce(reading: GpuReading, time: float) -> GpuReading:
        values = {name: value for name, value in reading.values.items() if name not in GPM_METRICS}
        read_at = {name: at for name, at in reading.read_at.items() if name not in ("gpm", "graphics")}
        if pcie:
            since, rates = held.get(reading.device.uuid, (float("-inf"), {}))
            if time - since >= PCIE_SECONDS - 0.05:
                rates = {name: reading.values[name] for name in _PCIE if name in reading.values}
                held[reading.device.uuid] = time, rates
            values.update(rates)
        return reading._replace(device=reading.device._replace(has_gpm=False), values=values, read_at=read_at)

    return [frame._replace(gpus=tuple(reduce(gpu, frame.time) for gpu in frame.gpus)) for frame in frames]


def findings_of(run: LabelledRun, diagnosis: Diagnosis) -> list[Finding]:
    """The findings about the program, worst first; a GPU that was held back on purpose has others."""
    return [finding for finding in diagnosis.findings if finding.id not in run.aside]


def is_right(run: LabelledRun, diagnosis: Diagnosis) -> bool:
    """Whether a diagnosis says what was induced."""
    findings = findings_of(run, diagnosis)
    if not run.expect:
        return bool(diagnosis.judged) and not findings
    return bool(findings) and findings[0].id in run.right


def _growing(frames: Sequence[Frame]) -> Iterator[tuple[float, Diagnosis]]:
    """The diagnosis after each second, as if the recording had ended there, and its length."""
    aggregator = SecondAggregator()
    seconds: dict[str, list[SecondSummary]] = {}
    for frame in frames:
        completed = aggregator.feed(frame)
        for uuid, second in completed.items():
            seconds.setdefault(uuid, []).append(second)
        if completed:
            yield frame.time - frames[0].time, judge(seconds, frame, DEFAULTS, frame.time)


def score(run: LabelledRun, change: Callable[[Sequence[Frame]], Sequence[Frame]] = list) -> Scored:
    """Judge the steady part of a recording."""
    since: float | None = None
    last = Diagnosis("")
    for length, diagnosis in _growing(change(run.steady())):
        last = diagnosis
        if not is_right(run, diagnosis):
            since = None
        elif since is None:
            since = length
    return Scored(run, last, since)


class Total(NamedTuple):
    """The score of many runs."""

    right: int
    wrong: int
    """Runs with a cause for which another one was named."""
    missed: int
    """Runs with a cause for which none was named."""
    healthy: int
    false_alarms: int

    @property
    def causes(self) -> int:
        """Number of runs with a cause."""
        return self.right + self.wrong + self.missed


def total(scores: Sequence[Scored]) -> Total:
    """Count the answers."""
    sick = [each for each in scores if each.run.expect]
    sound = [each for each in scores if not each.run.expect]
    right = sum(each.is_right for each in sick)
    missed = sum(not each.found for each in sick)
    return Total(
        right=right,
        wrong=len(sick) - right - missed,
        missed=missed,
        healthy=len(sound),
        false_alarms=sum(bool(each.found) for each in sound),
    )


def main() -> int:
    """Print the score."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--without-gpm", action="store_true", help="remove what only GPM measures")
    parser.add_argument(
        "--without-pcie", action="store_true", help="with --without-gpm: no PCIe rates either"
    )
    parser.add_argument("--all", action="store_true", help="print every run and not only the wrong ones")
    parser.add_argument(
        "sets", nargs="*", help=f"folders of tests/data, by default {' '.join(SETS)}; also {NVML_ONLY}"
    )
    options = parser.parse_args()

    def change(frames: Sequence[Frame]) -> Sequence[Frame]:
        return without_gpm(frames, pcie=not options.without_pcie) if options.without_gpm else frames

    scores = [score(run, change) for name in options.sets or SETS for run in labelled_runs(name)]
    for each in scores:
        if options.all or not each.is_right:
            took = "" if each.seconds is None else f"{each.seconds:.0f} s"
            expected = ", ".join(each.run.expect) or "-"
            sure = "".join(f" {finding.confidence:.2f}" for finding in each.diagnosis.findings[:1])
            print(
                f"{'right' if each.is_right else 'WRONG'} {each.run.name:36} {took:5} expected {expected:24}"
                f" found {', '.join(each.found) or '-'}{sure} ({', '.join(i.id for i in each.diagnosis.info)})"
            )
    counted = total(scores)
    lengths = sorted(each.seconds for each in scores if each.seconds is not None)
    print(
        f"{counted.right} of {counted.causes} right, {counted.wrong} wrong, {counted.missed} missed;"
        f" {counted.false_alarms} of {counted.healthy} false alarms;"
        f" verdict after {lengths[len(lengths) // 2]:.0f} s (median), {lengths[-1]:.0f} s (longest)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
