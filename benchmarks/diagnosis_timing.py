"""How soon a verdict comes and whether an early one lasts, how soon a hang is found, and how often live findings change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from benchmarks import measure
from benchmarks.diagnosis import Run, read
from benchmarks.diagnosis_baselines import without_gpm
from benchmarks.diagnosis_speed import Loop
from benchmarks.measure import Report, Table, Target
from gpulse.cluster.demo.demo_history import make_machine
from gpulse.cluster.demo.scenario import build_cluster
from gpulse.diagnosis.live_diagnosis import LiveDiagnosis
from gpulse.diagnosis.windowed_diagnosis import EarlyVerdict, WindowedDiagnosis
from gpulse.model.finding import Diagnosis, FindingKey, Severity
from gpulse.model.frame import Frame

NAME = "diagnosis_timing"
_RECORDINGS = measure.ROOT / "tests" / "data" / "recordings"
_WATCH_SECONDS = 20.0
_OFFSET_SECONDS = 3
_LEAST_SECONDS = 11.0
_MOST_EARLY_SECONDS = 15.0
_MOST_HANG_SECONDS = 30.0
_DEMO_NODES, _DEMO_GPUS = 8, 4
_STARTED = 1_800_000_000.0
_FIRST_SECONDS = 60.0
"""Time for which findings of a demo come up; after it none should change."""


class Watched(NamedTuple):
    """What `gpulse why` says of one window."""

    early: Diagnosis | None
    """When it was sure before the time was over."""
    seconds: float
    """When it ended."""
    full: Diagnosis

    @property
    def is_same(self) -> bool:
        """Whether the first finding of the early verdict is that of the full one."""
        return self.early is None or _first(self.early) == _first(self.full)


def watch(frames: Sequence[Frame]) -> Watched:
    """Watch a window as `gpulse why` does, and go on to its end."""
    timeline, early = WindowedDiagnosis(), EarlyVerdict()
    sure: tuple[Diagnosis, float] | None = None
    for frame in frames:
        timeline.feed(frame)
        if sure is None and early.is_due(frame.time):
            diagnosis = timeline.finish()
            if early.is_sure(diagnosis, timeline):
                sure = diagnosis, frame.time - frames[0].time
    full = timeline.finish()
    if sure is None:
        return Watched(None, frames[-1].time - frames[0].time, full)
    return Watched(sure[0], sure[1], full)


def windows(run: Run) -> Iterator[list[Frame]]:
    """Twenty seconds of a run, or what there is, from several moments on."""
    frames = run.steady
    length = frames[-1].time - frames[0].time
    for offset in range(0, max(1, int(length - _LEAST_SECONDS)), _OFFSET_SECONDS):
        begin = frames[0].time + offset
        yield [frame for frame in frames if begin <= frame.time <= begin + _WATCH_SECONDS]


def _first(diagnosis: Diagnosis) -> str | None:
    return diagnosis.findings[0].id if diagnosis.findings else None


class LiveChanges(NamedTuple):
    """What a live diagnosis reported over time."""

    changes: list[tuple[float, FindingKey, Severity | None, Severity | None]]
    """Times at which a finding appeared, ended, or changed its severity."""


def follow(frames: Iterable[Frame], monitor: LiveDiagnosis) -> LiveChanges:
    """Follow a stream."""
    before: dict[FindingKey, Severity] = {}
    found = LiveChanges([])
    for frame in frames:
        now = {finding.key: finding.severity for finding in monitor(frame)}
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                found.changes.append((frame.time, key, before.get(key), now.get(key)))
        before = now
    return found


def run(runs: Sequence[Run], *, quick: bool) -> Report:
    """Measure all of it."""
    report = Report(NAME, "How soon a verdict comes, and how steady findings are")
    _verdicts(report, runs)
    _hangs(report, runs)
    _changes(report, runs, quick=quick)
    report.notes.append(
        f"Each of the {len(runs)} labelled recordings is watched from its steady state on, and again from every third "
        "second, for 20 s or to its end, if that is at least 11 s. Healthy runs, pauses, leaks and losses under 20% take "
        "the whole time on purpose. A change is a finding that appears, ends, or gets another severity. A recording that "
        "goes on and on jumps from its end to its beginning, so that one which changes halfway changes again and again."
    )
    return report


def _verdicts(report: Report, runs: Sequence[Run]) -> None:
    table = Table(
        "When `gpulse why` ends, by what the recordings show:",
        ("expected", "recordings", "windows", "ended early", "median", "longest", "other verdict at the end"),
    )
    by_label: dict[str, list[Run]] = {}
    for each in runs:
        by_label.setdefault(", ".join(each.label.expect) or "-", []).append(each)
    every: list[Watched] = []
    for label, group in sorted(by_label.items()):
        watched = [watch(part) for each in group for part in windows(each)]
        every += watched
        early = [entry for entry in watched if entry.early is not None]
        table.rows.append(
            (
                label,
                f"{len(group)}",
                f"{len(watched)}",
                f"{len(early)}",
                f"{median(entry.seconds for entry in early):.1f} s" if early else "-",
                f"{max(entry.seconds for entry in early):.1f} s" if early else "-",
                f"{sum(not entry.is_same for entry in watched)}",
            )
        )
    report.tables.append(table)
    early = [entry for entry in every if entry.early is not None]
    same = sum(entry.is_same for entry in early)
    soon = sum(entry.seconds <= _MOST_EARLY_SECONDS for entry in early)
    report.targets += [
        Target(
            "early verdicts that name the same first finding as the full time",
            f"{same} of {len(early)}",
            "all",
            same == len(early),
        ),
        Target(
            f"early verdicts within {_MOST_EARLY_SECONDS:.0f} s (median of all: "
            f"{median(entry.seconds for entry in early):.1f} s)",
            f"{soon} of {len(early)}",
            "at least 95 %",
            soon >= 0.95 * len(early),
        ),
    ]


def _hangs(report: Report, runs: Sequence[Run]) -> None:
    found: list[float | None] = []
    for each in runs:
        if "collective_hang" not in each.label.expect or each.label.mark is None:
            continue
        for frames in (each.frames, without_gpm(each.frames)):
            for seconds in (5.0, 10.0):
                live = follow(frames, LiveDiagnosis(every_seconds=seconds))
                times = [
                    time for time, key, old, _ in live.changes if key[0] == "collective_hang" and old is None
                ]
                found.append(times[0] - each.label.mark if times else None)
    known = [seconds for seconds in found if seconds is not None]
    if found:
        report.targets.append(
            Target(
                "hangs found live, with and without GPM, evaluated every 5 s and every 10 s: latest",
                f"{max(known):.1f} s ({len(known)} of {len(found)})" if known else "none",
                f"within {_MOST_HANG_SECONDS:.0f} s",
                len(known) == len(found) and max(known) <= _MOST_HANG_SECONDS,
            )
        )


def _changes(report: Report, runs: Sequence[Run], *, quick: bool) -> None:
    length = 120 if quick else 600
    table = Table("Changes of live findings:", ("what", "first 2 minutes", f"{length // 60} minutes"))
    demo = [
        follow(
            (machine.sample(_STARTED + second) for second in range(length)), LiveDiagnosis(every_seconds=10.0)
        )
        for machine in (
            make_machine(node, _STARTED - 60) for node in build_cluster(_DEMO_NODES, _DEMO_GPUS).nodes
        )
    ]
    late = sum(time > _STARTED + _FIRST_SECONDS for live in demo for time, *_ in live.changes)
    table.rows.append((f"demo, {_DEMO_NODES} nodes with {_DEMO_GPUS} GPUs", *_counts(demo, _STARTED)))
    looped = []
    for each in runs[::4] if quick else runs:
        frames = _of_the_same_processes(each.steady)
        hertz = len(frames) / (frames[-1].time - frames[0].time)
        live = follow(Loop(frames).take(int(length * hertz)), LiveDiagnosis())
        looped.append((each.name, live, frames[0].time))
    short, long = (
        [sum(time <= begun + limit for time, *_ in live.changes) for _, live, begun in looped]
        for limit in (120, length)
    )
    table.rows.append((f"{len(looped)} recordings that go on and on", f"{sum(short)}", f"{sum(long)}"))
    restless = sorted(zip(long, short, (name for name, *_ in looped), strict=True), reverse=True)[:5]
    for many, few, name in restless:
        table.rows.append((f"of these {name}", f"{few}", f"{many}"))
    report.tables.append(table)
    report.targets.append(
        Target(
            f"changes of findings in the demo after its first {_FIRST_SECONDS:.0f} s",
            f"{late}",
            "0",
            late == 0,
        )
    )


def _counts(lives: Sequence[LiveChanges], begun: float) -> tuple[str, str]:
    times = [time for live in lives for time, *_ in live.changes]
    return f"{sum(time <= begun + 120 for time in times)}", f"{len(times)}"


def _of_the_same_processes(frames: Sequence[Frame]) -> list[Frame]:
    pids = {process.pid for process in frames[0].processes}
    return [frame for frame in frames if {process.pid for process in frame.processes} == pids]


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__).parse_args()
    recordings = [*read(None), *read(_RECORDINGS)]
    measure.publish(run(recordings, quick=given.quick), write=given.write)
