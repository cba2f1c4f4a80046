"""What a harvest has won and what it had to give back, and the whole of it as a status."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpulse.harvest.ledger import Kept, Won
from gpulse.harvest.policy.state import RunState, State
from gpulse.harvest.policy.words import Instruction, Kill, Reason, Signal
from gpulse.harvest.running.told import Failed, Gone, Process, Started, Told
from gpulse.harvest.settings import Gpu, Program
from gpulse.harvest.view import gpu_view, program_view, run_word
from gpulse.model.harvest import (
    MOST_PREEMPTIONS,
    GpuWord,
    HarvestGpu,
    HarvestProcess,
    HarvestProgram,
    HarvestRun,
    HarvestStatus,
    Preemption,
)

NOBODY = "somebody unknown"


class Me(NamedTuple):
    """The process that harvests."""

    process: Process
    uid: int
    user: str
    dry_run: bool = False


class _Won:
    """The time that one GPU was at work, and how often it was given back."""

    def __init__(self, seconds: float = 0.0, preemptions: int = 0) -> None:
        self.seconds = seconds
        self.preemptions = preemptions


class Account:
    """Adds up GPU time and remembers who came; times are told on both clocks."""

    def __init__(self, me: Me, gpus: Sequence[Gpu], before: Kept, *, wall: float) -> None:
        self._me = me
        self._gpus = {gpu.index: gpu for gpu in gpus}
        self._by_uuid = {uuid: _Won(*won) for uuid, won in before.won.gpus.items()}
        self._by_program = dict(before.won.programs)
        self._since = wall
        self._total = 0.0
        self._preemptions: list[Preemption] = []
        self._open: dict[str, Preemption] = {}
        """By run, those that are not over; they are in the list too."""
        self._processes: dict[str, tuple[Process, Process]] = {}
        self._states: dict[int, tuple[GpuWord, str | None, float]] = {}
        self._accrued_at: float | None = None
        if before.status is not None:
            self._go_on(before.status)

    def _go_on(self, status: HarvestStatus) -> None:
        self._since = status.since
        self._total = status.harvested_seconds
        self._preemptions = list(status.preemptions)
        for gpu in status.gpus:
            self._by_uuid[gpu.uuid] = _Won(gpu.harvested_seconds, gpu.preemptions)
        self._by_program |= {program.name: program.harvested_seconds for program in status.programs}

    def won(self) -> Won:
        """All that was won, also where the configuration no longer looks."""
        return Won(
            {uuid: (won.seconds, won.preemptions) for uuid, won in self._by_uuid.items()},
            dict(self._by_program),
        )

    def _of(self, gpu: int) -> _Won:
        return self._by_uuid.setdefault(self._gpus[gpu].uuid, _Won())

    def pass_to(self, state: State, now: float) -> None:
        """Add the time up to now to what runs in this state."""
        seconds = 0.0 if self._accrued_at is None else max(0.0, now - self._accrued_at)
        self._accrued_at = now
        for run in state.runs.values():
            if run.started:
                for gpu in run.program.gpus:
                    self._of(gpu).seconds += seconds
                won = seconds * len(run.program.gpus)
                self._total += won
                name = run.program.name
                self._by_program[name] = self._by_program.get(name, 0.0) + won

    def ordered(self, state: State, instructions: Iterable[Instruction], wall: float) -> None:
        """Remember who made programs go."""
        for order in instructions:
            if isinstance(order, Signal | Kill) and order.reason.preempted and order.run not in self._open:
                self._preempted(state.runs[order.run], order.reason, wall)

    def _preempted(self, run: RunState, reason: Reason, wall: float) -> None:
        program = run.program
        preemption = Preemption(wall, program.name, program.gpus, reason.by or NOBODY, reason.what)
        self._preemptions = [*self._preemptions[1 - MOST_PREEMPTIONS :], preemption]
        self._open[run.run] = preemption
        for gpu in program.gpus:
            self._of(gpu).preemptions += 1

    def told(self, told: Told, wall: float) -> None:
        """Remember what the runner told."""
        match told:
            case Started(run, keeper, program):
                self._processes[run] = (keeper, program)
            case Gone(run) | Failed(run):
                self._processes.pop(run, None)
                over = self._open.pop(run, None)
                if over is not None:
                    took = over._replace(took_seconds=max(0.0, wall - over.time))
                    self._preemptions = [took if entry is over else entry for entry in self._preemptions]

    def status(self, state: State, now: float, wall: float) -> HarvestStatus:
        """All of it as it is now."""
        settings = state.settings
        return HarvestStatus(
            time=wall,
            pid=self._me.process.pid,
            pid_start_ticks=self._me.process.start_ticks,
            uid=self._me.uid,
            user=self._me.user,
            config=settings.path,
            interval_seconds=settings.interval_seconds,
            dry_run=self._me.dry_run,
            gpus=tuple(self._gpu(state, gpu, now, wall) for gpu in settings.gpus if gpu in self._gpus),
            runs=tuple(self._run(run, wall - now) for run in state.runs.values()),
            programs=tuple(self._program(state, program, now) for program in settings.programs),
            preemptions=tuple(self._preemptions),
            harvested_seconds=self._total,
            since=self._since,
        )

    def _gpu(self, state: State, gpu: int, now: float, wall: float) -> HarvestGpu:
        view = gpu_view(state, gpu, now)
        word, program, since = self._states.get(gpu, (view.state, view.program, wall))
        if (word, program) != (view.state, view.program):
            since = wall
        self._states[gpu] = (view.state, view.program, since)
        won = self._of(gpu)
        return HarvestGpu(
            index=gpu,
            uuid=self._gpus[gpu].uuid,
            state=view.state,
            since=since,
            why=view.why,
            program=view.program,
            harvested_seconds=won.seconds,
            preemptions=won.preemptions,
        )

    def _run(self, run: RunState, offset: float) -> HarvestRun:
        keeper, process = self._processes.get(run.run, (None, None))
        return HarvestRun(
            id=run.run,
            program=run.program.name,
            gpus=run.program.gpus,
            since=run.since + offset,
            state=run_word(run),
            keeper=None if keeper is None else HarvestProcess(*keeper),
            process=None if process is None else HarvestProcess(*process),
        )

    def _program(self, state: State, program: Program, now: float) -> HarvestProgram:
        view = program_view(state, program, now)
        known = state.programs[program.name]
        return HarvestProgram(
            name=program.name,
            gpus=program.gpus,
            state=view.state,
            why=view.why,
            starts=known.starts,
            failures=known.failures,
            last_status=known.last_status,
            harvested_seconds=self._by_program.get(program.name, 0.0),
        )
