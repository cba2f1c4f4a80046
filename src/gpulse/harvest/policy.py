"""Policy of harvest: one event in, the new state and the instructions out. No clock, no process and no file.

Occupancy: which processes count as users of a GPU, and which people count as present. Scheduling: which programs may be
started now, and which must make room. Transitions: what follows from an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from gpulse.harvest import events, policy_state
from gpulse.harvest.events import GpuHolder, MachineObservation, ObservedUse, UserPresence
from gpulse.harvest.policy_state import (
    GpuState,
    KnownHolder,
    ProcessKey,
    ProgramState,
    RunState,
    State,
    StopReason,
)
from gpulse.harvest.settings import HarvestSettings, Program


def update_gpu(
    gpu: GpuState, index: int, use: ObservedUse, settings: HarvestSettings, now: float, *, ours: bool
) -> GpuState:
    """Return the state of a GPU after an observation.

    Args:
        gpu: As it was.
        index: Which one it is.
        use: What was observed.
        settings: Who counts.
        now: The time of the look.
        ours: A program of ours is on it, so that what it does says nothing about others.
    """
    known_holders = dict(_update_holders(gpu, use.holders, now))
    ignored = settings.gpus.get(index, frozenset())
    # The process that opened it is hidden, but programs that were just started are visible: an ignored monitor
    # among them explains the open.
    excused = any(not ignored.isdisjoint(names) for names in use.suspects)
    unseen_at = now if use.opened_unseen and not excused else gpu.unseen_at
    busy = _find_busy_reason(index, use, known_holders, settings, now)
    if busy is None and unseen_at is not None and now - unseen_at < settings.quiet_seconds:
        busy = StopReason("gpu", None, f"a process that is not visible opened GPU {index}")
    if busy is None and not ours:
        busy = _find_load_reason(index, use, settings)
    return gpu._replace(
        looked_at=now,
        free_since=None if busy else (now if gpu.free_since is None else min(gpu.free_since, now)),
        busy=busy,
        known_holders=known_holders,
        unseen_at=unseen_at,
        cool_until=now + settings.cooldown_seconds if busy and gpu.preempted else gpu.cool_until,
    )


def _update_holders(
    gpu: GpuState, holders: Iterable[GpuHolder], now: float
) -> Iterable[tuple[ProcessKey, KnownHolder]]:
    for holder in holders:
        key = (holder.pid, holder.start_ticks)
        known = gpu.known_holders.get(key)
        opened = known is None or not holder.files <= known.files
        yield key, KnownHolder(now if known is None or opened else min(known.since, now), holder.files)


def _find_busy_reason(
    index: int,
    use: ObservedUse,
    known_holders: dict[ProcessKey, KnownHolder],
    settings: HarvestSettings,
    now: float,
) -> StopReason | None:
    if use.unknown is not None:
        return StopReason("unknown", None, f"cannot determine who uses GPU {index}: {use.unknown}")
    ignored = settings.gpus.get(index, frozenset())
    for holder in use.holders:
        held = now - known_holders[holder.pid, holder.start_ticks].since
        if _counts_as_user(holder, ignored, settings, held):
            name = holder.names[0] if holder.names else "a program"
            process = f"{holder.user}'s {name}" if holder.user else name
            verb = "is using" if holder.working else "has opened"
            return StopReason("gpu", holder.user, f"{process} (pid {holder.pid}) {verb} GPU {index}")
    return None


def _counts_as_user(
    holder: GpuHolder, ignored: frozenset[str], settings: HarvestSettings, held: float
) -> bool:
    if holder.user in settings.always_users:
        return True
    if holder.user in settings.ignore_users or not ignored.isdisjoint(holder.names):
        return False
    return holder.working or held < settings.quiet_seconds


def _find_load_reason(index: int, use: ObservedUse, settings: HarvestSettings) -> StopReason | None:
    """Return a reason when a GPU's utilization or memory exceeds the limits, though no user is visible."""
    most, busy = settings.utilization_ratio, use.utilization_ratio
    if most is not None and (busy is None or busy > most):
        what = "utilization unknown" if busy is None else f"{busy:.0%} utilized"
        return StopReason("unknown" if busy is None else "gpu", None, f"GPU {index}: {what}")
    room, taken = settings.memory_bytes, use.memory_bytes
    if room is not None and (taken is None or taken > room):
        what = (
            "memory use unknown"
            if taken is None
            else f"{taken / 2**20:.0f} MiB of memory in use, but no visible process holds it"
        )
        return StopReason("unknown" if taken is None else "gpu", None, f"GPU {index}: {what}")
    return None


def find_present(people: Iterable[UserPresence], settings: HarvestSettings) -> tuple[UserPresence, ...]:
    """Return the people at the machine who count."""
    return tuple(person for person in people if _is_present(person, settings))


def _is_present(person: UserPresence, settings: HarvestSettings) -> bool:
    if person.idle_seconds is not None and person.idle_seconds >= settings.people.idle_seconds:
        return False
    if person.user in settings.always_users:
        return True
    return person.user not in settings.people.whitelist and person.user not in settings.ignore_users


def people_reason(people: tuple[UserPresence, ...] | None, settings: HarvestSettings) -> StopReason | None:
    """Return why the people at the machine keep programs from running; None when they do not."""
    if not settings.people.enabled:
        return None
    if people is None:
        return StopReason("unknown", None, "it is not yet known who is logged in")
    if not people:
        return None
    first = people[0]
    return StopReason("people", first.user, f"{first.user} is logged in and active at {first.where}")


_VALID_INTERVALS = 3.0
"""An observation is valid for this many intervals, and this many seconds more."""
_VALID_SECONDS = 5.0


def validity_seconds(settings: HarvestSettings) -> float:
    """Return how long an observation of a GPU is valid."""
    return _VALID_INTERVALS * settings.interval_seconds + _VALID_SECONDS


def find_obstacle(state: State, program: Program, now: float, *, displacing: bool = False) -> str | None:
    """Return why a program cannot be started now; None when it can.

    Args:
        state: What is known.
        program: The program.
        now: The time.
        displacing: As if programs of ours that want single GPUs were not there.
    """
    if state.ended or state.closed:
        return "harvest has stopped starting programs"
    known = state.programs[program.name]
    if known.done:
        return "it has finished and is not restarted"
    if known.not_before is not None and now < known.not_before:
        return f"it restarts in {known.not_before - now:.0f} s"
    if not is_open(state, program, now):
        return "it is outside its allowed hours"
    people = people_reason(state.people, state.settings)
    if people is not None:
        return people.what
    for index in program.gpus:
        why = _find_gpu_obstacle(state, index, now, displacing=displacing)
        if why is not None:
            return why
    return _exceeds_gpu_limit(state, program, displacing=displacing)


def _find_gpu_obstacle(state: State, index: int, now: float, *, displacing: bool) -> str | None:
    """Return why this GPU is not available; None when it is."""
    gpu = state.gpus[index]
    if gpu.busy is not None:
        return gpu.busy.what
    if gpu.free_since is None or gpu.looked_at is None:
        return f"it is not yet known who uses GPU {index}"
    if not 0 <= now - gpu.looked_at <= validity_seconds(state.settings):
        return f"the last check of GPU {index} is too old"
    free = now - gpu.free_since
    if free < state.settings.idle_seconds:
        return (
            f"GPU {index} has been idle for {free:.0f} s of the required {state.settings.idle_seconds:.0f} s"
        )
    if gpu.cool_until is not None and now < gpu.cool_until:
        return f"GPU {index} is in cooldown for another {gpu.cool_until - now:.0f} s after a preemption"
    run = state.on(index)
    if run is not None and not (displacing and not run.program.whole):
        return f"{run.program.name} is running on GPU {index}"
    return None


def _exceeds_gpu_limit(state: State, program: Program, *, displacing: bool) -> str | None:
    most = state.settings.max_gpus
    if most is None:
        return None
    taken = sum(len(run.program.gpus) for run in state.runs.values() if run.program.whole or not displacing)
    if taken + len(program.gpus) > most:
        return f"it needs {len(program.gpus)} GPUs, but {taken} of at most {most} (max_gpus) are already harvested"
    return None


def is_open(state: State, program: Program, now: float) -> bool:
    """True within the hours of the configuration and of the program."""
    hours = state.settings.hours
    if not hours.windows and not program.hours.windows:
        return True
    local = datetime.fromtimestamp(now + state.wall_offset)  # noqa: DTZ006  hours are those of the clock on the wall
    return hours.open_at(local) and program.hours.open_at(local)


def find_whole_program(state: State, now: float) -> Program | None:
    """Return the program for all GPUs that should run now, even if it displaces our programs on single GPUs."""
    for program in state.settings.programs:
        if program.whole and find_obstacle(state, program, now, displacing=True) is None:
            brief_at = state.programs[program.name].brief_at
            rested = brief_at is None or now - brief_at >= program.max_backoff_seconds
            if rested or not _find_displaced_runs(state, program):  # one that keeps exiting displaces nothing
                return program
    return None


def _find_displaced_runs(state: State, program: Program) -> list[RunState]:
    return [run for run in state.runs.values() if not set(run.program.gpus).isdisjoint(program.gpus)]


def find_startable(state: State, now: float) -> Program | None:
    """Return the program to start next, by the last observation."""
    whole = find_whole_program(state, now)
    if whole is not None:
        return whole if find_obstacle(state, whole, now) is None else None
    for program in state.settings.programs:
        if not program.whole and find_obstacle(state, program, now) is None:
            return program
    return None


def is_just_observed(state: State, program: Program, now: float) -> bool:
    """True when its GPUs and the people were observed just now: nothing is started on an older observation."""
    if state.settings.people.enabled and state.people_at != now:
        return False
    return all(state.gpus[index].looked_at == now for index in program.gpus)


def find_runs_to_stop(state: State, now: float) -> Iterator[tuple[RunState, StopReason]]:
    """Yield the runs that have to stop, and why."""
    people = people_reason(state.people, state.settings)
    whole = find_whole_program(state, now)
    by_name = {program.name: program for program in state.settings.programs}
    room = state.settings.max_gpus
    for run in state.runs.values():
        program = run.program
        room = None if room is None else room - len(program.gpus)
        if state.ended:
            yield run, StopReason("ending", None, "harvest is shutting down")
        elif people is not None:
            yield run, people
        elif (busy := _find_taken_reason(state, program, now)) is not None:
            yield run, busy
        elif by_name.get(program.name) != program:
            yield run, StopReason("changed", None, "the configuration changed")
        elif not is_open(state, program, now):
            yield run, StopReason("hours", None, "it is outside its allowed hours")
        elif room is not None and room < 0:
            yield run, StopReason("limit", None, "more GPUs are harvested than max_gpus allows")
        elif whole is not None and not program.whole:
            yield run, StopReason("displaced", None, f"{whole.name} needs all GPUs")


def _find_taken_reason(state: State, program: Program, now: float) -> StopReason | None:
    """Return why the GPUs of a program are taken; None when they are not."""
    for index in program.gpus:
        gpu = state.gpus.get(index)
        if gpu is None:
            return StopReason("changed", None, f"GPU {index} is no longer watched")
        if gpu.busy is not None:
            return gpu.busy
        if gpu.looked_at is None or abs(now - gpu.looked_at) > validity_seconds(state.settings):
            return StopReason("unknown", None, f"the last check of GPU {index} is too old")
    return None


_HEALTHY_SECONDS = 60.0
"""A program that ran for this long was healthy: earlier failures are forgotten."""


def step(state: State, event: policy_state.Event) -> tuple[State, list[policy_state.Instruction]]:
    """Apply an event; the instructions must be carried out in their order."""
    state = _apply(state, event)
    state, stops = _stop_runs(state, event.now)
    state, starts = _start_programs(state, event.now)
    return state, [*stops, *starts]


def wants_look(state: State, now: float) -> bool:
    """True when a program would be started if a new check found nothing changed."""
    program = find_startable(state, now)
    return program is not None and not is_just_observed(state, program, now)


def next_event_time(state: State, now: float) -> float | None:
    """Return when time alone will change something; None when it will not."""
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


def _apply(state: State, event: policy_state.Event) -> State:
    match event:
        case policy_state.Observed(now, observation):
            return _observe(state, observation, now)
        case policy_state.RunReported(now, run_event):
            return _apply_run_event(state, run_event, now)
        case policy_state.Reconfigured(now, settings, observation):
            return _observe(_reconfigure(state, settings), observation, now)
        case policy_state.StartsClosed():
            return state._replace(closed=True)
        case policy_state.ShutdownRequested(_, at_once):
            return state._replace(ended=True, hurried=state.hurried or at_once)
        case policy_state.TimePassed(_, wall_offset):
            return state._replace(wall_offset=wall_offset)


def _observe(state: State, observation: MachineObservation, now: float) -> State:
    gpus = dict(state.gpus)
    for index, use in observation.uses.items():
        if index in gpus:
            ours = state.on(index) is not None
            gpus[index] = update_gpu(gpus[index], index, use, state.settings, now, ours=ours)
    if observation.people is not None:
        people = find_present(observation.people, state.settings)
        state = state._replace(people=people, people_at=now)
    return state._replace(gpus=gpus)


def _apply_run_event(state: State, event: events.RunEvent, now: float) -> State:
    run = state.runs.get(event.run)
    if run is None:
        return state
    runs = dict(state.runs)
    match event:
        case events.ProgramStarted():
            runs[run.run] = run._replace(started=True)
            return state._replace(runs=runs)
        case events.ProgramExited(status=status):
            runs[run.run] = run._replace(status=status, own_end=run.stopped_at is None)
            return state._replace(runs=runs)
        case events.ProgramStartFailed(why=why):
            del runs[run.run]
            return _record_end(state._replace(runs=runs), run, why, now)
        case events.ProgramGone():
            del runs[run.run]
            return _record_end(state._replace(runs=runs), run, None, now)


def _record_end(state: State, run: RunState, error: str | None, now: float) -> State:
    """Keep how a run ended, when it ended by itself."""
    name = run.program.name
    known = state.programs.get(name)
    if known is None:
        return state
    if error is not None:
        known = record_start_failure(known, run.program, error, now)
    elif run.reason is None or run.own_end:
        known = record_exit(known, run.program, run.status, now - run.since, now)
    else:
        known = known._replace(last_status=run.status)
    return state._replace(programs={**state.programs, name: known})


def _reconfigure(state: State, settings: HarvestSettings) -> State:
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


def _stop_runs(state: State, now: float) -> tuple[State, list[policy_state.Instruction]]:
    instructions: list[policy_state.Instruction] = []
    runs = dict(state.runs)
    gpus = dict(state.gpus)
    for run, reason in find_runs_to_stop(state, now):
        if run.stopped_at is None:
            grace = run.program.grace_seconds
            runs[run.run] = run._replace(stopped_at=now, kill_at=now + grace, reason=reason)
            if grace > 0:
                instructions.append(policy_state.Signal(run.run, run.program.stop_signal, reason))
        for index in run.program.gpus if reason.preempted else ():
            gpu = gpus.get(index)
            if gpu is not None and (gpu.busy is not None or reason.kind == "people"):
                cool = now + state.settings.cooldown_seconds
                gpus[index] = gpu._replace(preempted=True, cool_until=cool)
    for run in list(runs.values()):
        due = run.kill_at is not None and (now >= run.kill_at or state.hurried)
        if due and not run.killed and run.reason is not None:
            runs[run.run] = run._replace(killed=True)
            instructions.append(policy_state.Kill(run.run, run.reason))
    return state._replace(runs=runs, gpus=gpus), instructions


def _start_programs(state: State, now: float) -> tuple[State, list[policy_state.Instruction]]:
    instructions: list[policy_state.Instruction] = []
    while (program := find_startable(state, now)) is not None and is_just_observed(state, program, now):
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
        instructions.append(policy_state.Start(run.run, program))
    return state, instructions


def record_exit(
    known: ProgramState, program: Program, status: int | None, ran: float, now: float
) -> ProgramState:
    """Return the history of a program after it ended by itself.

    Args:
        known: What was known before.
        program: The program.
        status: Its exit code, or minus the signal that ended it; None when that is unknown.
        ran: For how many seconds.
        now: The time of its end.
    """
    brief = ran < _HEALTHY_SECONDS
    known = known._replace(brief_at=now if brief else None)
    if status == 0:
        wait = 0.0 if ran >= program.backoff_seconds else program.backoff_seconds - ran
        return known._replace(
            failures=0,
            last_status=status,
            last_error=None,
            not_before=now + wait,
            done=program.restart != "always",
        )
    before = known.failures if brief else 0
    return _record_failure(known, program, before, now)._replace(last_status=status, last_error=None)


def record_start_failure(known: ProgramState, program: Program, why: str, now: float) -> ProgramState:
    """Return the history of a program that could not be started."""
    known = known._replace(brief_at=now)
    return _record_failure(known, program, known.failures, now)._replace(last_status=None, last_error=why)


def _record_failure(known: ProgramState, program: Program, before: int, now: float) -> ProgramState:
    doublings = min(before, 30)
    wait = min(program.max_backoff_seconds, program.backoff_seconds * 2**doublings)
    return known._replace(failures=before + 1, not_before=now + wait, done=program.restart == "never")
