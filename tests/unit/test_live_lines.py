"""Lines of code on a live stream: whose stacks are read, and how often what a finding says may change."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpulse.diagnosis.line_search import (
    MIN_FIRST_STACKS,
    RENEW_SECONDS,
    SETTLE_SECONDS,
    UPDATE_SECONDS,
    LiveLines,
)
from gpulse.model.device import Device, Node
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.process import ProcessIdentity, ProcessReading
from gpulse.model.python_stack import ProcessStacks, StackFrame, StackProblem, StackTarget, ThreadStack

START = 1_800_000_000.0
TRAINER, WORKER = 100, 101
SINGLE_THREAD = Finding("host_single_thread", "host", "high", 0.9, "s", 0, "0", (TRAINER,))
DEVICE = Device(0, "GPU-1", "NVIDIA H200")


def frame_at(second: float) -> Frame:
    """A frame of an idle GPU with a trainer and its worker."""
    processes = (
        ProcessReading(ProcessIdentity(TRAINER, 1), "R", {}, on_gpu=True),
        ProcessReading(ProcessIdentity(WORKER, TRAINER), "R", {}, on_gpu=False),
    )
    gpu = GpuReading(DEVICE, {"gpu_utilization_ratio": 0.0})
    return Frame(START + second, second, Node("n"), gpus=(gpu,), processes=processes)


class Programs:
    """Reads that end at once: every wanted process is at one line of its code."""

    def __init__(self) -> None:
        self.wanted: tuple[StackTarget, ...] = ()
        self.line, self.function = 84, "step"
        self.problem: StackProblem | None = None
        self.reads = 0
        self.now = 0.0
        self.lines = LiveLines(self.watch, self.take)

    def watch(self, targets: Iterable[StackTarget]) -> None:
        """Read these from now on."""
        self.wanted = tuple(targets)

    def take(self) -> list[ProcessStacks]:
        """What was read, shortly before now."""
        time = START + self.now - 0.5
        self.reads += len(self.wanted)
        if self.problem is not None:
            return [ProcessStacks(target.pid, time, problem=self.problem) for target in self.wanted]
        frames = (StackFrame("/home/ada/train.py", self.line, self.function),)
        thread = ThreadStack("MainThread", None, is_active=True, frames=frames)
        return [ProcessStacks(target.pid, time, (thread,)) for target in self.wanted]

    def live(self, seconds: float, *findings: Finding) -> list[Finding]:
        """Let time pass with these findings; what is said in the end."""
        said: list[Finding] = []
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            said = self.lines(frame_at(self.now), findings)
        return said


@pytest.fixture
def programs() -> Programs:
    """Programs on one GPU."""
    return Programs()


def shown_line(findings: Iterable[Finding]) -> int | None:
    """The line of the first finding."""
    first = next(iter(findings))
    return first.where[0].line if first.where else None


def test_healthy_jobs_are_never_read(programs: Programs) -> None:
    """Nor are those whose cause is not in their code."""

    programs.live(60)
    throttled = Finding("thermal_throttle", "clocks", "critical", 1.0, "s", 0, "0", (TRAINER,))
    programs.live(60, throttled)

    assert ((), 0) == (programs.wanted, programs.reads)


def test_a_finding_gets_its_line(programs: Programs) -> None:
    """Soon, from the trainer and its workers; reading stops with the finding."""

    (early,) = programs.live(MIN_FIRST_STACKS, SINGLE_THREAD)
    assert early.where is None, "a few stacks are no reason to name a line that stays for half a minute"
    (said,) = programs.live(10, SINGLE_THREAD)

    assert said.where is not None
    assert ("/home/ada/train.py", 84, "step", TRAINER) == (*said.where[0][2:5], said.where[0].pid)
    assert {StackTarget(TRAINER, "main"), StackTarget(WORKER, "worker")} == set(programs.wanted)
    programs.live(2)
    assert () == programs.wanted


def test_what_a_finding_says_changes_at_most_every_half_minute(programs: Programs) -> None:
    """However its shares change in between."""

    (first,) = programs.live(22, SINGLE_THREAD)
    held = []
    for _ in range(round(UPDATE_SECONDS) - 10):
        held += programs.live(1, SINGLE_THREAD)

    assert {first.where} == {finding.where for finding in held}
    (later,) = programs.live(40, SINGLE_THREAD)
    assert first.where is not None
    assert later.where is not None
    assert later.where[0].stacks > first.where[0].stacks


def test_reading_ends_after_enough_stacks_and_starts_anew_later(programs: Programs) -> None:
    """A finding that holds for days costs a few minutes of reading, and follows the program to another line."""

    programs.live(600, SINGLE_THREAD)
    assert () == programs.wanted
    reads = programs.reads
    programs.line = 99
    assert 84 == shown_line(programs.live(600, SINGLE_THREAD))
    assert reads == programs.reads

    assert 99 == shown_line(programs.live(RENEW_SECONDS - 1200 + 2 * UPDATE_SECONDS, SINGLE_THREAD))


def test_other_processes_are_another_case(programs: Programs) -> None:
    """The line of the job before is not that of the next job on the same GPU."""

    programs.live(30, SINGLE_THREAD)
    (next_job,) = programs.live(1, SINGLE_THREAD._replace(pids=(4711,)))

    assert (None, None) == (next_job.where, next_job.where_note)


def test_why_there_is_no_line(programs: Programs) -> None:
    """It is said, but does not replace a line that was found before."""

    programs.problem = StackProblem("not_permitted", "process 100 belongs to another user", "run: sudo x")
    (said,) = programs.live(20, SINGLE_THREAD)
    assert (None, "line of code unknown: process 100 belongs to another user; run: sudo x") == (
        said.where,
        said.where_note,
    )

    readable = Programs()
    readable.live(30, SINGLE_THREAD)
    readable.problem = StackProblem("gone", "process 100 ended")
    assert 84 == shown_line(readable.live(RENEW_SECONDS + 60, SINGLE_THREAD))


def test_that_no_line_stands_out_is_said_after_a_while(programs: Programs) -> None:
    """Not when the first stacks come."""

    said = []
    for second in range(70):
        programs.line, programs.function = second, f"step_{second}"
        said += programs.live(1, SINGLE_THREAD)
    first = next(place for place, finding in enumerate(said) if finding.where is not None)

    assert first >= SETTLE_SECONDS
    assert () == said[first].where
    assert "no single line" in str(said[first].where_note)
