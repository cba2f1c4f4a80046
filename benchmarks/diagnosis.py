"""How often the diagnosis is right on labelled recordings of real runs, beside what others would say."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import measure
from benchmarks.diagnosis_baselines import METHODS, Outcome, gpulse, snapshots
from benchmarks.measure import Report, Table, Target
from gpulse.diagnosis.rule_registry import RULES_BY_ID
from gpulse.model.frame import Frame
from gpulse.sources.recording_reader import Recording

NAME = "diagnosis"
_TRACES = measure.ROOT / "tests" / "data" / "traces"
_DEMO = measure.ROOT / "src" / "gpulse" / "sources" / "demo"
_SURE = 0.5
_WHOLE = "gpulse, start-up and all"
_BESIDE = {
    "gpulse at 1 Hz": "1 Hz",
    "ablation: NVML + host": "NVML + host",
    "ablation: NVML + GPM": "NVML + GPM",
    "ablation: NVML only": "NVML only",
    "ablation: one second": "one second",
    "SageMaker Debugger": "SageMaker",
    "util < 50 %: batch": "util < 50 %",
    "bmon": "bmon",
}
_OWN = """These are the recordings that the thresholds were checked on, so gpulse's own row is the best case; the rules
of others and the ablations stand beside it on the same frames. Recordings from elsewhere are scored with `--labels`."""
_MAPPING = """What an answer of theirs may mean, and any of it counts as right. `exact` asks for the first one alone.

- bmon: reason 0x4 is power_capped; 0x1 is gpu_underused, gpu_idle_allocated or host_wait_unattributed; 0x20 and
  0x40 are thermal_throttle, 0x8 hw_slowdown, 0x80 power_brake, 0x2, 0x10 and 0x100 clocks_locked. The reason that
  stands in more than half of the frames is the one that a look shows.
- SageMaker Debugger: CPUBottleneck (some core > 90 % and GPU < 10 % in > 50 % of the samples) is input_cpu_bound,
  input_too_few_workers, host_single_thread, launch_bound, cpu_oversubscribed or cgroup_cpu_throttled; IOBottleneck
  (some core's iowait > 50 % and GPU < 10 % in > 50 %) is input_io_bound; GPUMemoryIncrease (mean of 10 samples 5
  points above the 10 before) is gpu_memory_leak or gpu_oom_imminent; LowGPUUtilization (p95 < 70 %) is
  gpu_underused, gpu_idle_allocated or host_wait_unattributed, and with p95 >= 70 % and p5 < 10 % it is
  periodic_stall or checkpoint_stall. Samples every 0.5 s; patience (1000 samples) ends where the label's steady
  state begins; the window (500 samples) is the run. It runs inside jobs, so it is silent where there is none.
- util < 50 %: mean utilization under one half is answered with a larger batch: thin_kernels or launch_bound.
- The others give no confidence, so every wrong answer of theirs is a sure one.

`one second` gives the engine the middle second of the run, repeated for as long as the run was: all its rules may
speak and rates are as good as ever, but nothing changes in the course of the run. `1 Hz` keeps one frame a second, with GPM averaged over those left
out, as GPM counts between two reads. `NVML only` knows of processes no more than the driver's list of pids."""


class Label(NamedTuple):
    """What must come out of a recording."""

    expect: tuple[str, ...]
    right: frozenset[str]
    begin: float
    end: float
    mark: float | None

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Label:
        """A label as it stands in labels.json."""
        marks = entry.get("marks") or ()
        return cls(
            expect=tuple(entry["expect"]),
            right=frozenset((*entry["expect"], *entry.get("also_right", ()))),
            begin=entry.get("begin", -math.inf),
            end=entry.get("end", math.inf),
            mark=marks[0]["at"] if marks else None,
        )


class Run(NamedTuple):
    """One labelled recording."""

    name: str
    label: Label
    frames: list[Frame]

    @property
    def steady(self) -> list[Frame]:
        """Without its start-up and its end."""
        return [frame for frame in self.frames if self.label.begin <= frame.time <= self.label.end]


class Scored(NamedTuple):
    """What one method made of one run, against its label."""

    label: Label
    outcome: Outcome

    @property
    def is_exact(self) -> bool:
        """Whether the first finding is one that must come out."""
        answer = self.outcome.answer
        return answer is not None and answer.id in self.label.expect

    @property
    def is_right(self) -> bool:
        """Whether it is that or says the same; for a healthy run, whether it was judged and nothing found."""
        answer = self.outcome.answer
        if not self.label.expect:
            return answer is None and self.outcome.judged
        return answer is not None and bool(answer.means & self.label.right)

    @property
    def is_family_right(self) -> bool:
        """Whether it is at least of the right family."""
        answer = self.outcome.answer
        return answer is not None and bool(_families(answer.means) & _families(self.label.expect))

    @property
    def is_surely_wrong(self) -> bool:
        """Whether it is wrong and says so with confidence."""
        answer = self.outcome.answer
        return answer is not None and not self.is_right and answer.confidence >= _SURE

    @property
    def onset_error(self) -> float | None:
        """Seconds between the first mark and where a right finding says it began."""
        answer = self.outcome.answer
        if answer is None or answer.start is None or self.label.mark is None or not self.is_right:
            return None
        return answer.start - self.label.mark


def _families(ids: Iterable[str]) -> set[str]:
    """Of those ids that there are rules for: a label may ask for more."""
    return {RULES_BY_ID[name].family for name in ids if name in RULES_BY_ID}


def wilson(hits: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share."""
    if of == 0:
        return 0.0, 1.0
    share = hits / of
    middle = share + z * z / (2 * of)
    reach = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return max(0.0, (middle - reach) / (1 + z * z / of)), min(1.0, (middle + reach) / (1 + z * z / of))


def read(labels: Path | None) -> list[Run]:
    """Every labelled recording of a directory, in the order of names; without one, the project's own."""
    folders = [_TRACES, _DEMO] if labels is None else [labels]
    entries = json.loads((folders[0] / "labels.json").read_text())
    runs = []
    for name, entry in sorted(entries.items()):
        paths = [folder / f"{name}.jsonl.gz" for folder in folders]
        path = next((path for path in paths if path.exists()), paths[0])
        runs.append(Run(name, Label.of(entry), list(Recording(path))))
    return runs


def run(runs: Sequence[Run], *, name: str, title: str) -> Report:
    """Score every method on every run."""
    scores = {
        method: {run.name: Scored(run.label, say(run.steady)) for run in runs}
        for method, say in METHODS.items()
    }
    scores = {"gpulse": scores.pop("gpulse"), _WHOLE: {}, **scores}
    scores[_WHOLE] = {run.name: Scored(run.label, gpulse(run.frames)) for run in runs}
    report = Report(name, title)
    report.targets += _targets(scores["gpulse"])
    report.tables += [_methods(scores), _by_run(runs, scores)]
    report.notes += [_any_second(runs), _MAPPING]
    return report


def _targets(own: Mapping[str, Scored]) -> list[Target]:
    sick = [scored for scored in own.values() if scored.label.expect]
    healthy = [scored for scored in own.values() if not scored.label.expect]
    right = sum(scored.is_right for scored in sick)
    alarms = sum(scored.outcome.answer is not None for scored in healthy)
    low, high = wilson(alarms, len(healthy))
    sure = sum(scored.is_surely_wrong for scored in own.values())
    return [
        Target(
            "runs with a bottleneck: first finding right",
            f"{right} of {len(sick)}",
            "all",
            right == len(sick),
        ),
        Target(
            "healthy runs with a finding",
            f"{alarms} of {len(healthy)} (95 %: {low:.0%} to {high:.0%})",
            "0",
            alarms == 0,
        ),
        Target("sure and wrong", f"{sure} of {len(own)}", "0", sure == 0),
    ]


def _methods(scores: Mapping[str, Mapping[str, Scored]]) -> Table:
    table = Table(
        "The first finding, over runs with a bottleneck and over healthy ones; sure is a confidence of at least "
        f"{_SURE:g}, onset is where the label has a mark:",
        (
            "method",
            "exact",
            "right",
            "family",
            "silent",
            "false alarms",
            "95 % interval",
            "sure and wrong",
            "not judged",
            "onset error, median",
            "largest",
        ),
    )
    for method, by_run in scores.items():
        sick = [scored for scored in by_run.values() if scored.label.expect]
        healthy = [scored for scored in by_run.values() if not scored.label.expect]
        alarms = sum(scored.outcome.answer is not None for scored in healthy)
        low, high = wilson(alarms, len(healthy))
        errors = [abs(error) for scored in by_run.values() if (error := scored.onset_error) is not None]
        table.rows.append(
            (
                method,
                f"{sum(scored.is_exact for scored in sick)} of {len(sick)}",
                f"{sum(scored.is_right for scored in sick)}",
                f"{sum(scored.is_family_right for scored in sick)}",
                f"{sum(scored.outcome.answer is None for scored in sick)}",
                f"{alarms} of {len(healthy)}",
                f"{low:.0%} to {high:.0%}",
                f"{sum(scored.is_surely_wrong for scored in by_run.values())}",
                f"{sum(not scored.outcome.judged for scored in by_run.values())}",
                f"{median(errors):.2f} s ({len(errors)})" if errors else "-",
                f"{max(errors):.2f} s" if errors else "-",
            )
        )
    return table


def _by_run(runs: Sequence[Run], scores: Mapping[str, Mapping[str, Scored]]) -> Table:
    table = Table(
        "By run; `=` stands for the expected answer, `~` for another that is right, `!` for a wrong one, `?` for "
        "not judged:",
        ("run", "expected", "gpulse", "sure", "onset", "whole file", *_BESIDE.values()),
    )
    for run in runs:
        own = scores["gpulse"][run.name]
        answer, error = own.outcome.answer, own.onset_error
        table.rows.append(
            (
                run.name,
                ", ".join(run.label.expect) or "-",
                _cell(own),
                "-" if answer is None else f"{answer.confidence:.2f}",
                "-" if error is None else f"{error:+.2f} s",
                _cell(scores[_WHOLE][run.name]),
                *(_cell(scores[method][run.name]) for method in _BESIDE),
            )
        )
    return table


def _cell(scored: Scored) -> str:
    answer = scored.outcome.answer
    if answer is None:
        return "?" if not scored.outcome.judged else "=" if not scored.label.expect else "! silent"
    if scored.is_exact:
        return "="
    return f"{'~' if scored.is_right else '!'} {answer.words}"


def _any_second(runs: Sequence[Run]) -> str:
    sick: list[Scored] = []
    healthy: list[Scored] = []
    shares = []
    for run in runs:
        moments = [Scored(run.label, outcome) for outcome in snapshots(run.steady)]
        (sick if run.label.expect else healthy).extend(moments)
        if run.label.expect and moments:
            shares.append(sum(moment.is_right for moment in moments) / len(moments))
    alarms = sum(moment.outcome.answer is not None for moment in healthy)
    return (
        f"The row `one second` depends on which second that is. Over all {len(sick)} seconds of the runs with a "
        f"bottleneck, {sum(moment.is_right for moment in sick) / max(1, len(sick)):.0%} give a right answer (each run "
        f"counted alike: {sum(shares) / max(1, len(shares)):.0%}) and "
        f"{sum(moment.is_surely_wrong for moment in sick) / max(1, len(sick)):.0%} a sure and wrong one; "
        f"{alarms} of the {len(healthy)} healthy seconds give a false alarm."
    )


def _keep(report: Report, labels: Path) -> None:
    """The section of recordings from elsewhere, under a name of its own."""
    command = " ".join(["python", "-m", f"benchmarks.{NAME}", *sys.argv[1:]])
    made = f"Made on {time.strftime('%Y-%m-%d')} by `{command}` from {labels.name}.\n"
    measure.write_section(report.name, f"## {report.title}\n\n{report.text()}\n\n{made}")


if __name__ == "__main__":
    parser = measure.parser(NAME, __doc__)
    parser.add_argument("--labels", type=Path, help="a directory with other recordings and their labels.json")
    given = parser.parse_args()
    recordings = read(given.labels)
    if given.quick:
        recordings = recordings[::4]
    if given.labels is None:
        scored = run(recordings, name=NAME, title="How often the diagnosis is right")
        scored.notes.insert(0, _OWN)
        measure.publish(scored, write=given.write)
    else:
        scored = run(
            recordings,
            name=f"{NAME}_{given.labels.name}",
            title=f"How often the diagnosis is right on {given.labels.name}",
        )
        measure.publish(scored, write=False)
        if given.write:
            _keep(scored, given.labels)
