"""What the policy remembers between two events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpulse.harvest.policy.words import Reason
from gpulse.harvest.settings import Program, Settings
from gpulse.harvest.sight.seen import Presence

ProcessKey = tuple[int, int | None]


class Sighted(NamedTuple):
    """A process that has a GPU open."""

    since: float
    """When it was first seen to have it open, or to open it once more."""
    files: frozenset[int]


class GpuState(NamedTuple):
    """One GPU."""

    looked_at: float | None = None
    free_since: float | None = None
    """None: somebody uses it, or nobody knows."""
    busy: Reason | None = None
    """Who uses it, when that is known; None for a free one."""
    sighted: Mapping[ProcessKey, Sighted] = {}
    unseen_at: float | None = None
    """When somebody out of sight opened it."""
    preempted: bool = False
    """A program of ours had to go from here, and none was started since."""
    cool_until: float | None = None


class RunState(NamedTuple):
    """A program of ours that runs, or of which something is left."""

    run: str
    program: Program
    since: float
    started: bool = False
    stopped_at: float | None = None
    """When it was asked to end."""
    kill_at: float | None = None
    reason: Reason | None = None
    killed: bool = False
    status: int | None = None
    """How the program itself ended, None while it runs."""
    own_end: bool = False
    """It ended before anybody asked it to."""


class ProgramState(NamedTuple):
    """What became of a program so far."""

    starts: int = 0
    failures: int = 0
    """In a row."""
    brief_at: float | None = None
    """When its last run ended, if that was a brief one."""
    last_status: int | None = None
    last_error: str | None = None
    not_before: float | None = None
    done: bool = False


class State(NamedTuple):
    """All that the policy knows."""

    settings: Settings
    gpus: Mapping[int, GpuState]
    programs: Mapping[str, ProgramState]
    runs: Mapping[str, RunState]
    people: tuple[Presence, ...] | None = None
    """Who is at the machine and counts; None: nobody looked yet."""
    people_at: float | None = None
    """When somebody looked."""
    number: int = 0
    """Runs so far."""
    wall_offset: float = 0.0
    """What the wall clock shows more than the clock of the events, which nobody sets."""
    closed: bool = False
    ended: bool = False
    hurried: bool = False
    """The end waits for nobody."""

    def on(self, gpu: int) -> RunState | None:
        """The run that has this GPU."""
        return next((run for run in self.runs.values() if gpu in run.program.gpus), None)


def begin(settings: Settings, wall_offset: float = 0.0) -> State:
    """Nothing is known yet, so that every GPU counts as used."""
    return State(
        settings,
        gpus={index: GpuState() for index in settings.gpus},
        programs={program.name: ProgramState() for program in settings.programs},
        runs={},
        wall_offset=wall_offset,
    )
