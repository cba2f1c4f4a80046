"""A verdict is given early only where more time would not change it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from gpulse.cli import why_sources
from gpulse.cli.progress import WatchProgress
from gpulse.cli.why_sources import DiagnosisSource
from gpulse.diagnosis.windowed_diagnosis import EarlyVerdict, WindowedDiagnosis
from gpulse.model.frame import Frame
from gpulse.model.python_stack import ProcessStacks, StackProblem, StackTarget
from tests.unit.diagnosis_machine import BUSY, GIB, Doing, lost, play, together
from tests.unit.diagnosis_traces import NAMES, steady


def end(frames: Sequence[Frame]) -> float | None:
    """When watching these frames would end, in seconds; None when it takes all of them."""
    timeline, early = WindowedDiagnosis(), EarlyVerdict()
    for frame in frames:
        timeline.feed(frame)
        if early.is_due(frame.time) and early.is_sure(timeline.finish(), timeline):
            return frame.time - frames[0].time
    return None


def first(frames: Sequence[Frame]) -> str | None:
    """The first finding of these frames."""
    timeline = WindowedDiagnosis()
    for frame in frames:
        timeline.feed(frame)
    findings = timeline.finish().findings
    return findings[0].id if findings else None


def test_a_clear_cause_is_told_within_fifteen_seconds() -> None:
    """After three evaluations that agree, of at least ten seconds."""

    assert 12.0 == end(play(20, Doing(lost(0.6))))
    assert 12.0 == end(play(20, Doing({**lost(1.0), "memory_used_bytes": 0.2 * GIB}, on_gpu=False)))


class Reads:
    """Stacks of processes that all have the same problem; without one, none is ever complete."""

    def __init__(self, problem: StackProblem | None) -> None:
        self._problem = problem
        self.wanted: tuple[StackTarget, ...] = ()

    def watch(self, targets: Iterable[StackTarget]) -> None:
        """Read these from now on."""
        self.wanted = tuple(targets)

    def take(self) -> list[ProcessStacks]:
        """What was read since the last call."""
        if self._problem is None:
            return []
        return [ProcessStacks(target.pid, 0.0, problem=self._problem) for target in self.wanted]


@pytest.mark.parametrize(
    ("problem", "ends"), [(None, False), (StackProblem("not_permitted", "not yours"), True)]
)
def test_a_clear_cause_waits_for_its_line(
    problem: StackProblem | None, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as its stacks are being read, and no longer."""
    reads = Reads(problem)
    monkeypatch.setattr(why_sources, "collect_with", lambda _reader: reads)
    source = DiagnosisSource(WindowedDiagnosis(), lambda whole: whole, None, WatchProgress(quiet=True))
    source.lines, early = why_sources.LineWatch(source.timeline), EarlyVerdict()
    sure = []
    for frame in play(20, Doing(lost(0.6))):
        source._take(frame, lambda _: set())
        sure.append(source._is_sure(early, frame))

    assert reads.wanted or problem
    assert ends == any(sure)


def pausing(now: float) -> Doing:
    """Work with a pause in it."""
    return Doing(lost(1.0 if 4 <= now < 6 else 0.5))


def leaking(now: float) -> Doing:
    """Memory that grows."""
    return Doing({**BUSY, "memory_used_bytes": (20 + now) * GIB})


@pytest.mark.parametrize(
    "doing",
    [
        Doing(),
        Doing(lost(0.15)),
        pausing,
        leaking,
        lambda now: Doing(lost(0.6), on_gpu=now >= 6),
    ],
    ids=["healthy", "small loss", "pause", "leak", "starts later"],
)
def test_what_may_change_takes_the_whole_time(doing: Doing | Callable[[float], Doing]) -> None:
    """Healthy jobs, small losses, pauses, slow changes, and jobs that were not observed for long enough."""

    assert end(play(15, doing)) is None


def test_every_gpu_at_work_must_be_clear() -> None:
    """A healthy GPU beside one that waits needs the whole time; an idle one does not."""

    waiting = play(20, Doing(lost(0.6)))
    idle = play(20, Doing({**lost(1.0), "memory_used_bytes": 0.2 * GIB}, on_gpu=False), index=1)

    assert end(together(waiting, play(20, Doing(), index=1))) is None
    assert 12.0 == end(together(waiting, idle))


@pytest.mark.parametrize("name", NAMES)
def test_an_early_verdict_is_that_of_the_whole_time(name: str) -> None:
    """From any third second of a recording on."""

    for begin in range(0, len(steady(name)) - 110, 30):
        frames = steady(name)[begin : begin + 200]
        seconds = end(frames)
        if seconds is not None:
            early = [frame for frame in frames if frame.time - frames[0].time <= seconds]

            assert first(frames) == first(early)
