"""State of the policy, the events that it handles, and the instructions that it returns. All times are monotonic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from gpulse.harvest.events import MachineObservation, RunEvent, UserPresence
from gpulse.harvest.settings import HarvestSettings, Program


class Observed(NamedTuple):
    """GPUs, people, or both were checked."""

    now: float
    observation: MachineObservation


class RunReported(NamedTuple):
    """The runner reported something about a program."""

    now: float
    event: RunEvent


class TimePassed(NamedTuple):
    """Time went by."""

    now: float
    wall_offset: float
    """The wall clock minus `now`."""


class Reconfigured(NamedTuple):
    """There is a new configuration, and an observation under it."""

    now: float
    settings: HarvestSettings
    observation: MachineObservation


class StartsClosed(NamedTuple):
    """No more programs are to be started."""

    now: float


class ShutdownRequested(NamedTuple):
    """Everything is to be stopped."""

    now: float
    at_once: bool = False
    """Without a grace period, even for programs that are already stopping."""


Event = Observed | RunReported | TimePassed | Reconfigured | StartsClosed | ShutdownRequested

StopKind = Literal["gpu", "people", "unknown", "hours", "displaced", "changed", "limit", "ending"]


class StopReason(NamedTuple):
    """Why a program has to stop."""

    kind: StopKind
    by: str | None
    """The user who came."""
    what: str
    """Description, such as `alice's python3 (pid 4711) has opened GPU 0`."""

    @property
    def preempted(self) -> bool:
        """True when the program was stopped because of somebody else's use."""
        return self.kind in ("gpu", "people", "unknown")


class Start(NamedTuple):
    """Start a program."""

    run: str
    program: Program


class Signal(NamedTuple):
    """Ask everything of a run to end."""

    run: str
    number: int
    reason: StopReason


class Kill(NamedTuple):
    """End everything of a run."""

    run: str
    reason: StopReason


Instruction = Start | Signal | Kill

ProcessKey = tuple[int, int | None]


class KnownHolder(NamedTuple):
    """A process that has a GPU open."""

    since: float
    """When it was first seen to have it open, or to open it once more."""
    files: frozenset[int]


class GpuState(NamedTuple):
    """One GPU."""

    looked_at: float | None = None
    free_since: float | None = None
    """None: it is used, or that is unknown."""
    busy: StopReason | None = None
    """Who uses it, when that is known; None for a free one."""
    known_holders: Mapping[ProcessKey, KnownHolder] = {}
    unseen_at: float | None = None
    """When a process that cannot be seen opened it."""
    preempted: bool = False
    """One of our programs was preempted on it, and none was started since."""
    cool_until: float | None = None


class RunState(NamedTuple):
    """One of our programs that runs or has processes left."""

    run: str
    program: Program
    since: float
    started: bool = False
    stopped_at: float | None = None
    """When it was asked to end."""
    kill_at: float | None = None
    reason: StopReason | None = None
    killed: bool = False
    status: int | None = None
    """How the program itself ended, None while it runs."""
    own_end: bool = False
    """It ended before anybody asked it to."""


class ProgramState(NamedTuple):
    """History of a program."""

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
    """Everything that the policy knows."""

    settings: HarvestSettings
    gpus: Mapping[int, GpuState]
    programs: Mapping[str, ProgramState]
    runs: Mapping[str, RunState]
    people: tuple[UserPresence, ...] | None = None
    """People who count as present; None: not checked yet."""
    people_at: float | None = None
    """When people were last checked."""
    number: int = 0
    """Runs so far."""
    wall_offset: float = 0.0
    """The wall clock minus the monotonic clock of the events."""
    closed: bool = False
    ended: bool = False
    hurried: bool = False
    """The shutdown has no grace period."""

    def on(self, gpu: int) -> RunState | None:
        """Return the run that has this GPU."""
        return next((run for run in self.runs.values() if gpu in run.program.gpus), None)


def initial_state(settings: HarvestSettings, wall_offset: float = 0.0) -> State:
    """Return the first state: nothing is known, so that every GPU counts as used."""
    return State(
        settings,
        gpus={index: GpuState() for index in settings.gpus},
        programs={program.name: ProgramState() for program in settings.programs},
        runs={},
        wall_offset=wall_offset,
    )
