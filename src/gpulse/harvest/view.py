"""The policy's state in words for people: what each GPU and each program does, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gpulse.harvest.policy.choosing import is_open, obstacle
from gpulse.harvest.policy.state import RunState, State
from gpulse.harvest.settings import Program
from gpulse.model.harvest import GpuWord, ProgramWord, RunWord


class GpuView(NamedTuple):
    """One GPU."""

    gpu: int
    state: GpuWord
    why: str
    program: str | None = None


class ProgramView(NamedTuple):
    """One program."""

    program: Program
    state: ProgramWord
    why: str


def gpu_view(state: State, gpu: int, now: float) -> GpuView:
    """What a GPU does, and why."""
    run = state.on(gpu)
    if run is not None:
        word: GpuWord = "harvested" if run_word(run) != "stopping" else "stopping"
        return GpuView(gpu, word, run.reason.what if run.reason else "", run.program.name)
    known = state.gpus[gpu]
    if known.busy is not None:
        return GpuView(gpu, "unknown" if known.busy.kind == "unknown" else "people", known.busy.what)
    if known.looked_at is None:
        return GpuView(gpu, "unknown", "nobody looked yet")
    return GpuView(gpu, "waiting", _waits(state, gpu, now))


def _waits(state: State, gpu: int, now: float) -> str:
    """Why no program is on a free GPU."""
    mine = [program for program in state.settings.programs if gpu in program.gpus]
    for program in sorted(mine, key=lambda program: program.whole):  # its own tell more than those for all
        why = obstacle(state, program, now)
        if why is not None:
            return f"{program.name}: {why}"
    return "" if mine else "no program is for it"


def program_view(state: State, program: Program, now: float) -> ProgramView:
    """What a program does, and why."""
    run = next((run for run in state.runs.values() if run.program.name == program.name), None)
    if run is not None:
        return ProgramView(program, "running", run.reason.what if run.reason else "")
    known = state.programs[program.name]
    why = obstacle(state, program, now) or ""
    if known.done:
        return ProgramView(program, "done", why)
    if known.not_before is not None and now < known.not_before:
        return ProgramView(program, "backoff", f"{_ending(known.last_status, known.last_error)}; {why}")
    if not is_open(state, program, now):
        return ProgramView(program, "closed", why)
    return ProgramView(program, "waiting", why)


def _ending(status: int | None, error: str | None) -> str:
    if error is not None:
        return f"it could not be started: {error}"
    if status is None:
        return "it ended, nobody saw how"
    return f"signal {-status} ended it" if status < 0 else f"it ended with {status}"


def run_word(run: RunState) -> RunWord:
    """Where a run stands, in one word."""
    if run.stopped_at is not None or run.status is not None:
        return "stopping"
    return "running" if run.started else "starting"


def plan(state: State, now: float, *, dry_run: bool = False) -> Iterator[str]:
    """A line about each GPU and each program."""
    would = {"harvested": "would be harvested", "running": "would run"} if dry_run else {}
    for gpu in state.settings.gpus:
        view = gpu_view(state, gpu, now)
        word = would.get(view.state, view.state)
        yield f"GPU {gpu}: {': '.join(filter(None, (word, view.program, view.why)))}"
    for program in state.settings.programs:
        seen = program_view(state, program, now)
        yield f"{program.name}: {': '.join(filter(None, (would.get(seen.state, seen.state), seen.why)))}"


def waiting(state: State, now: float) -> Iterator[str]:
    """A line about each program that does not run."""
    for program in state.settings.programs:
        seen = program_view(state, program, now)
        if seen.state != "running":
            yield f"{program.name} waits: {seen.why}"
