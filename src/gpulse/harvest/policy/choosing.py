"""Which programs may be started now, and which must make room."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from gpulse.harvest.policy.judging import somebody
from gpulse.harvest.policy.state import RunState, State
from gpulse.harvest.policy.words import Reason
from gpulse.harvest.settings import Program, Settings

_LATE_LOOKS = 3.0
"""What was seen is believed for so many intervals."""
_LATE_SECONDS = 5.0


def believed_seconds(settings: Settings) -> float:
    """For how long a look at a GPU is believed."""
    return _LATE_LOOKS * settings.interval_seconds + _LATE_SECONDS


def obstacle(state: State, program: Program, now: float, *, displacing: bool = False) -> str | None:
    """Why a program cannot be started now; None when it can.

    Args:
        state: What is known.
        program: The program.
        now: The time.
        displacing: As if programs of ours that want single GPUs were not there.
    """
    if state.ended or state.closed:
        return "nothing new is started"
    known = state.programs[program.name]
    if known.done:
        return "it is done"
    if known.not_before is not None and now < known.not_before:
        return f"it is started again in {known.not_before - now:.0f} s"
    if not is_open(state, program, now):
        return "outside of its hours"
    people = somebody(state.people, state.settings)
    if people is not None:
        return people.what
    for index in program.gpus:
        why = _in_the_way(state, index, now, displacing=displacing)
        if why is not None:
            return why
    return _over_limit(state, program, displacing=displacing)


def _in_the_way(state: State, index: int, now: float, *, displacing: bool) -> str | None:
    """Why this GPU cannot be had."""
    gpu = state.gpus[index]
    if gpu.busy is not None:
        return gpu.busy.what
    if gpu.free_since is None or gpu.looked_at is None:
        return f"who uses GPU {index} is not known yet"
    if not 0 <= now - gpu.looked_at <= believed_seconds(state.settings):
        return f"the last look at GPU {index} is too old"
    free = now - gpu.free_since
    if free < state.settings.idle_seconds:
        return f"GPU {index} has been free for {free:.0f} s of {state.settings.idle_seconds:.0f}"
    if gpu.cool_until is not None and now < gpu.cool_until:
        return f"GPU {index} is left alone for {gpu.cool_until - now:.0f} s more after somebody came"
    run = state.on(index)
    if run is not None and not (displacing and not run.program.whole):
        return f"{run.program.name} is on GPU {index}"
    return None


def _over_limit(state: State, program: Program, *, displacing: bool) -> str | None:
    most = state.settings.most_gpus
    if most is None:
        return None
    taken = sum(len(run.program.gpus) for run in state.runs.values() if run.program.whole or not displacing)
    if taken + len(program.gpus) > most:
        return f"it needs {len(program.gpus)} of at most {most} harvested GPUs, and {taken} are taken"
    return None


def is_open(state: State, program: Program, now: float) -> bool:
    """True within the hours of the configuration and of the program."""
    hours = state.settings.hours
    if not hours.spans and not program.hours.spans:
        return True
    local = datetime.fromtimestamp(now + state.wall_offset)  # noqa: DTZ006  hours are those of the clock on the wall
    return hours.open_at(local) and program.hours.open_at(local)


def wanted_whole(state: State, now: float) -> Program | None:
    """The program for all GPUs that should have them now, whatever single ones of ours are there."""
    for program in state.settings.programs:
        if program.whole and obstacle(state, program, now, displacing=True) is None:
            brief_at = state.programs[program.name].brief_at
            rested = brief_at is None or now - brief_at >= program.longest_backoff_seconds
            if rested or not _displaced(state, program):  # one that ends again and again disturbs nobody
                return program
    return None


def _displaced(state: State, program: Program) -> list[RunState]:
    return [run for run in state.runs.values() if not set(run.program.gpus).isdisjoint(program.gpus)]


def startable(state: State, now: float) -> Program | None:
    """The program to start next, as far as is known."""
    whole = wanted_whole(state, now)
    if whole is not None:
        return whole if obstacle(state, whole, now) is None else None
    for program in state.settings.programs:
        if not program.whole and obstacle(state, program, now) is None:
            return program
    return None


def is_seen(state: State, program: Program, now: float) -> bool:
    """True when its GPUs and the people were looked at just now: nothing is started on what was seen before."""
    if state.settings.people.enabled and state.people_at != now:
        return False
    return all(state.gpus[index].looked_at == now for index in program.gpus)


def must_go(state: State, now: float) -> Iterator[tuple[RunState, Reason]]:
    """The runs that have to end, and why."""
    people = somebody(state.people, state.settings)
    whole = wanted_whole(state, now)
    by_name = {program.name: program for program in state.settings.programs}
    room = state.settings.most_gpus
    for run in state.runs.values():
        program = run.program
        room = None if room is None else room - len(program.gpus)
        if state.ended:
            yield run, Reason("ending", None, "harvest ends")
        elif people is not None:
            yield run, people
        elif (busy := _taken(state, program, now)) is not None:
            yield run, busy
        elif by_name.get(program.name) != program:
            yield run, Reason("changed", None, "the configuration changed")
        elif not is_open(state, program, now):
            yield run, Reason("hours", None, "its hours are over")
        elif room is not None and room < 0:
            yield run, Reason("limit", None, "too many GPUs are harvested")
        elif whole is not None and not program.whole:
            yield run, Reason("displaced", None, f"{whole.name} takes all GPUs")


def _taken(state: State, program: Program, now: float) -> Reason | None:
    """Who came to the GPUs of a program."""
    for index in program.gpus:
        gpu = state.gpus.get(index)
        if gpu is None:
            return Reason("changed", None, f"GPU {index} is no longer watched")
        if gpu.busy is not None:
            return gpu.busy
        if gpu.looked_at is None or abs(now - gpu.looked_at) > believed_seconds(state.settings):
            return Reason("unknown", None, f"nobody could look at GPU {index} for too long")
    return None
