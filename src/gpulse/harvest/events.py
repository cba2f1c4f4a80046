"""What the policy learns: events of runs, and observations of the GPUs and of the people at the machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class ProcessId(NamedTuple):
    """A process, identified for good: PIDs are reused, a PID with a start time is not."""

    pid: int
    start_ticks: int


class ProgramStarted(NamedTuple):
    """The program runs."""

    run: str
    supervisor: ProcessId
    program: ProcessId


class ProgramStartFailed(NamedTuple):
    """The program could not be started; nothing of it is left."""

    run: str
    why: str


class ProgramExited(NamedTuple):
    """The program itself ended; what it started may still be there."""

    run: str
    status: int
    """Its exit code, or minus the signal that ended it."""


class ProgramGone(NamedTuple):
    """Nothing of the program is left."""

    run: str


RunEvent = ProgramStarted | ProgramStartFailed | ProgramExited | ProgramGone


class GpuHolder(NamedTuple):
    """A process that is not ours and has a GPU open, or work on it."""

    pid: int
    start_ticks: int | None
    """With the pid it names a process for good; None when it is not in our /proc."""
    names: tuple[str, ...]
    """Names of the program: the kernel's, its file's, its first argument's."""
    user: str | None
    working: bool
    """It has a context or memory on that GPU, or it is unknown whether it has."""
    files: frozenset[int] = frozenset()
    """The descriptors under which it has it open, as far as they can be seen."""


class ObservedUse(NamedTuple):
    """One GPU at one moment."""

    holders: tuple[GpuHolder, ...] = ()
    unknown: str | None = None
    """Why it is unknown who uses it."""
    opened_unseen: bool = False
    """Since the last look a process opened it that cannot be seen."""
    suspects: tuple[tuple[str, ...], ...] = ()
    """Names of programs that were started just before and whose open files cannot be read."""
    utilization_ratio: float | None = None
    memory_bytes: int | None = None
    """Memory that no visible process uses, neither `holders` nor our own."""


class UserPresence(NamedTuple):
    """A person at the machine."""

    user: str
    where: str
    """`pts/3`, `tty1`, `seat0`."""
    idle_seconds: float | None
    """Since the last sign of life; None: not known."""
    kind: Literal["terminal", "desktop"] = "terminal"


class MachineObservation(NamedTuple):
    """GPUs and people at one moment."""

    uses: Mapping[int, ObservedUse]
    """By index; GPUs that were not checked are missing."""
    people: tuple[UserPresence, ...] | None = None
    """None: not checked."""
