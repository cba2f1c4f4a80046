"""Status of a harvest: what each GPU and each program does and why, harvested GPU time, and preemptions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gpulse.harvest.events import (
    ProcessId,
    ProgramGone,
    ProgramStarted,
    ProgramStartFailed,
    RunEvent,
)
from gpulse.harvest.policy import find_obstacle, is_open
from gpulse.harvest.policy_state import Instruction, Kill, RunState, Signal, State, StopReason
from gpulse.harvest.settings import HarvestableGpu, Program
from gpulse.harvest.state_directory import SavedState, Totals
from gpulse.model.harvest_status import (
    MAX_PREEMPTIONS,
    GpuStateName,
    HarvestGpu,
    HarvestProcess,
    HarvestProgram,
    HarvestRun,
    HarvestStatus,
    Preemption,
    ProgramStateName,
    RunStateName,
)

UNKNOWN_USER = "unknown user"


class HarvestIdentity(NamedTuple):
    """The process that harvests."""

    process: ProcessId
    uid: int
    user: str
    dry_run: bool = False


class _GpuTotals:
    """Harvested time of one GPU, and how often it was given back."""

    def __init__(self, seconds: float = 0.0, preemptions: int = 0) -> None:
        self.seconds = seconds
        self.preemptions = preemptions


class HarvestAccounting:
    """Adds up GPU time and records preemptions; times come on both clocks."""

    def __init__(
        self, me: HarvestIdentity, gpus: Sequence[HarvestableGpu], before: SavedState, *, wall: float
    ) -> None:
        self._me = me
        self._gpus = {gpu.index: gpu for gpu in gpus}
        self._by_uuid = {uuid: _GpuTotals(*won) for uuid, won in before.totals.gpus.items()}
        self._by_program = dict(before.totals.programs)
        self._since = wall
        self._total = 0.0
        self._preemptions: list[Preemption] = []
        self._open: dict[str, Preemption] = {}
        """By run, those that are not over; they are in the list too."""
        self._processes: dict[str, tuple[ProcessId, ProcessId]] = {}
        self._states: dict[int, tuple[GpuStateName, str | None, float]] = {}
        self._accrued_at: float | None = None
        if before.status is not None:
            self._continue_from(before.status)

    def _continue_from(self, status: HarvestStatus) -> None:
        self._since = status.since
        self._total = status.harvested_seconds
        self._preemptions = list(status.preemptions)
        for gpu in status.gpus:
            self._by_uuid[gpu.uuid] = _GpuTotals(gpu.harvested_seconds, gpu.preemptions)
        self._by_program |= {program.name: program.harvested_seconds for program in status.programs}

    def totals(self) -> Totals:
        """Return the totals of all GPUs and programs, also those that the configuration no longer names."""
        return Totals(
            {uuid: (won.seconds, won.preemptions) for uuid, won in self._by_uuid.items()},
            dict(self._by_program),
        )

    def _of(self, gpu: int) -> _GpuTotals:
        return self._by_uuid.setdefault(self._gpus[gpu].uuid, _GpuTotals())

    def accrue(self, state: State, now: float) -> None:
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

    def record_instructions(self, state: State, instructions: Iterable[Instruction], wall: float) -> None:
        """Record who made programs stop."""
        for order in instructions:
            if isinstance(order, Signal | Kill) and order.reason.preempted and order.run not in self._open:
                self._record_preemption(state.runs[order.run], order.reason, wall)

    def _record_preemption(self, run: RunState, reason: StopReason, wall: float) -> None:
        program = run.program
        preemption = Preemption(wall, program.name, program.gpus, reason.by or UNKNOWN_USER, reason.what)
        self._preemptions = [*self._preemptions[1 - MAX_PREEMPTIONS :], preemption]
        self._open[run.run] = preemption
        for gpu in program.gpus:
            self._of(gpu).preemptions += 1

    def record_run_event(self, event: RunEvent, wall: float) -> None:
        """Record what the runner reported."""
        match event:
            case ProgramStarted(run, supervisor, program):
                self._processes[run] = (supervisor, program)
            case ProgramGone(run) | ProgramStartFailed(run):
                self._processes.pop(run, None)
                over = self._open.pop(run, None)
                if over is not None:
                    took = over._replace(took_seconds=max(0.0, wall - over.time))
                    self._preemptions = [took if entry is over else entry for entry in self._preemptions]

    def status(self, state: State, now: float, wall: float) -> HarvestStatus:
        """Return the status as it is now."""
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
        supervisor, process = self._processes.get(run.run, (None, None))
        return HarvestRun(
            id=run.run,
            program=run.program.name,
            gpus=run.program.gpus,
            since=run.since + offset,
            state=run_state(run),
            supervisor=None if supervisor is None else HarvestProcess(*supervisor),
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


class GpuView(NamedTuple):
    """One GPU."""

    gpu: int
    state: GpuStateName
    why: str
    program: str | None = None


class ProgramView(NamedTuple):
    """One program."""

    program: Program
    state: ProgramStateName
    why: str


def gpu_view(state: State, gpu: int, now: float) -> GpuView:
    """Return what a GPU does, and why."""
    run = state.on(gpu)
    if run is not None:
        word: GpuStateName = "harvested" if run_state(run) != "stopping" else "stopping"
        return GpuView(gpu, word, run.reason.what if run.reason else "", run.program.name)
    known = state.gpus[gpu]
    if known.busy is not None:
        return GpuView(gpu, "unknown" if known.busy.kind == "unknown" else "people", known.busy.what)
    if known.looked_at is None:
        return GpuView(gpu, "unknown", "not checked yet")
    return GpuView(gpu, "waiting", _why_waiting(state, gpu, now))


def _why_waiting(state: State, gpu: int, now: float) -> str:
    """Return why no program is on a free GPU."""
    mine = [program for program in state.settings.programs if gpu in program.gpus]
    for program in sorted(mine, key=lambda program: program.whole):  # its own tell more than those for all
        why = find_obstacle(state, program, now)
        if why is not None:
            return f"{program.name}: {why}"
    return "" if mine else "no program is configured for it"


def program_view(state: State, program: Program, now: float) -> ProgramView:
    """Return what a program does, and why."""
    run = next((run for run in state.runs.values() if run.program.name == program.name), None)
    if run is not None:
        return ProgramView(program, "running", run.reason.what if run.reason else "")
    known = state.programs[program.name]
    why = find_obstacle(state, program, now) or ""
    if known.done:
        return ProgramView(program, "done", why)
    if known.not_before is not None and now < known.not_before:
        return ProgramView(program, "backoff", f"{_describe_end(known.last_status, known.last_error)}; {why}")
    if not is_open(state, program, now):
        return ProgramView(program, "closed", why)
    return ProgramView(program, "waiting", why)


def _describe_end(status: int | None, error: str | None) -> str:
    if error is not None:
        return f"failed to start: {error}"
    if status is None:
        return "ended with an unknown status"
    return f"terminated by signal {-status}" if status < 0 else f"exited with status {status}"


def run_state(run: RunState) -> RunStateName:
    """Return the state of a run."""
    if run.stopped_at is not None or run.status is not None:
        return "stopping"
    return "running" if run.started else "starting"


def describe_plan(state: State, now: float, *, dry_run: bool = False) -> Iterator[str]:
    """Yield a line about each GPU and each program."""
    would = {"harvested": "would be harvested", "running": "would run"} if dry_run else {}
    for gpu in state.settings.gpus:
        view = gpu_view(state, gpu, now)
        word = would.get(view.state, view.state)
        yield f"GPU {gpu}: {': '.join(filter(None, (word, view.program, view.why)))}"
    for program in state.settings.programs:
        seen = program_view(state, program, now)
        yield f"{program.name}: {': '.join(filter(None, (would.get(seen.state, seen.state), seen.why)))}"


def describe_waiting(state: State, now: float) -> Iterator[str]:
    """Yield a line about each program that does not run."""
    for program in state.settings.programs:
        seen = program_view(state, program, now)
        if seen.state != "running":
            yield f"{program.name} is waiting: {seen.why}"
