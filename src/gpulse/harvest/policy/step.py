"""One event in, the new state and what to do out. Nothing here reads a clock or touches a process."""

from __future__ import annotations

from gpulse.harvest.policy import choosing, judging, restarting
from gpulse.harvest.policy.state import GpuState, ProgramState, RunState, State
from gpulse.harvest.policy.words import (
    Changed,
    Closed,
    Ended,
    Event,
    Heard,
    Instruction,
    Kill,
    Looked,
    Passed,
    Signal,
    Start,
)
from gpulse.harvest.running.told import Exited, Failed, Gone, Started, Told
from gpulse.harvest.settings import Settings
from gpulse.harvest.sight.seen import Sighting


def step(state: State, event: Event) -> tuple[State, list[Instruction]]:
    """Take in an event; the instructions must be carried out in their order."""
    state = _taken_in(state, event)
    state, stops = _stopped(state, event.now)
    state, starts = _started(state, event.now)
    return state, [*stops, *starts]


def wants_look(state: State, now: float) -> bool:
    """True when something would be started if a look found everything as it was."""
    program = choosing.startable(state, now)
    return program is not None and not choosing.is_seen(state, program, now)


def next_time(state: State, now: float) -> float | None:
    """When time alone will change something, None when it will not."""
    settings = state.settings
    times = [run.kill_at for run in state.runs.values() if run.kill_at is not None and not run.killed]
    if not (state.ended or state.closed):
        times += [known.not_before for known in state.programs.values() if known.not_before is not None]
        for gpu in state.gpus.values():
            if gpu.free_since is not None:
                times.append(gpu.free_since + settings.idle_seconds)
            if gpu.cool_until is not None:
                times.append(gpu.cool_until)
    return min((time for time in times if time > now), default=None)


def _taken_in(state: State, event: Event) -> State:
    match event:
        case Looked(now, sighting):
            return _looked(state, sighting, now)
        case Heard(now, told):
            return _heard(state, told, now)
        case Changed(now, settings, sighting):
            return _looked(_changed(state, settings), sighting, now)
        case Closed():
            return state._replace(closed=True)
        case Ended(_, at_once):
            return state._replace(ended=True, hurried=state.hurried or at_once)
        case Passed(_, wall_offset):
            return state._replace(wall_offset=wall_offset)


def _looked(state: State, sighting: Sighting, now: float) -> State:
    gpus = dict(state.gpus)
    for index, use in sighting.uses.items():
        if index in gpus:
            ours = state.on(index) is not None
            gpus[index] = judging.judged(gpus[index], index, use, state.settings, now, ours=ours)
    if sighting.people is not None:
        people = judging.present(sighting.people, state.settings)
        state = state._replace(people=people, people_at=now)
    return state._replace(gpus=gpus)


def _heard(state: State, told: Told, now: float) -> State:
    run = state.runs.get(told.run)
    if run is None:
        return state
    runs = dict(state.runs)
    match told:
        case Started():
            runs[run.run] = run._replace(started=True)
            return state._replace(runs=runs)
        case Exited(status=status):
            runs[run.run] = run._replace(status=status, own_end=run.stopped_at is None)
            return state._replace(runs=runs)
        case Failed(why=why):
            del runs[run.run]
            return _remembered(state._replace(runs=runs), run, why, now)
        case Gone():
            del runs[run.run]
            return _remembered(state._replace(runs=runs), run, None, now)


def _remembered(state: State, run: RunState, error: str | None, now: float) -> State:
    """Keep how a run ended, when it ended by itself."""
    name = run.program.name
    known = state.programs.get(name)
    if known is None:
        return state
    if error is not None:
        known = restarting.after_failure(known, run.program, error, now)
    elif run.reason is None or run.own_end:
        known = restarting.after_end(known, run.program, run.status, now - run.since, now)
    else:
        known = known._replace(last_status=run.status)
    return state._replace(programs={**state.programs, name: known})


def _changed(state: State, settings: Settings) -> State:
    before = {program.name: program for program in state.settings.programs}
    return state._replace(
        settings=settings,
        gpus={index: state.gpus.get(index, GpuState()) for index in settings.gpus},
        programs={
            program.name: state.programs[program.name]
            if before.get(program.name) == program
            else ProgramState()
            for program in settings.programs
        },
        people=None if settings.people != state.settings.people else state.people,
    )


def _stopped(state: State, now: float) -> tuple[State, list[Instruction]]:
    instructions: list[Instruction] = []
    runs = dict(state.runs)
    gpus = dict(state.gpus)
    for run, reason in choosing.must_go(state, now):
        if run.stopped_at is None:
            grace = run.program.grace_seconds
            runs[run.run] = run._replace(stopped_at=now, kill_at=now + grace, reason=reason)
            if grace > 0:
                instructions.append(Signal(run.run, run.program.stop_signal, reason))
        for index in run.program.gpus if reason.preempted else ():
            gpu = gpus.get(index)
            if gpu is not None and (gpu.busy is not None or reason.kind == "people"):
                cool = now + state.settings.cooldown_seconds
                gpus[index] = gpu._replace(preempted=True, cool_until=cool)
    for run in list(runs.values()):
        due = run.kill_at is not None and (now >= run.kill_at or state.hurried)
        if due and not run.killed and run.reason is not None:
            runs[run.run] = run._replace(killed=True)
            instructions.append(Kill(run.run, run.reason))
    return state._replace(runs=runs, gpus=gpus), instructions


def _started(state: State, now: float) -> tuple[State, list[Instruction]]:
    instructions: list[Instruction] = []
    while (program := choosing.startable(state, now)) is not None and choosing.is_seen(state, program, now):
        number = state.number + 1
        run = RunState(f"{program.name}.{number}", program, now)
        known = state.programs[program.name]
        gpus = {
            index: gpu._replace(preempted=False, cool_until=None) if index in program.gpus else gpu
            for index, gpu in state.gpus.items()
        }
        state = state._replace(
            number=number,
            gpus=gpus,
            runs={**state.runs, run.run: run},
            programs={
                **state.programs,
                program.name: known._replace(starts=known.starts + 1, not_before=None),
            },
        )
        instructions.append(Start(run.run, program))
    return state, instructions
