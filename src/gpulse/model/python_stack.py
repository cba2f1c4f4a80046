"""Stacks of Python processes: their threads, the frames of each, and why a process has none."""

from __future__ import annotations

from typing import Literal, NamedTuple

from gpulse.model.finding import CodeRole

MAX_FAILURES = 5
"""Failures in a row after which a process is given up."""

StackProblemCode = Literal["no_py_spy", "not_permitted", "not_python", "gone", "failed"]


class StackFrame(NamedTuple):
    """One function call on a thread's stack."""

    file: str
    """Path as the interpreter knows it; `<string>` and the like for code without a file."""
    line: int
    function: str
    short_file: str = ""
    """Path from its package on: `json/encoder.py`."""

    @property
    def shown_file(self) -> str:
        """Path for people, from the package on where that is known."""
        return self.short_file or self.file


class ThreadStack(NamedTuple):
    """The stack of one thread."""

    name: str
    thread_id: int | None
    """Thread ID of the operating system, equal to the process ID for the main thread."""
    is_active: bool
    """Whether it was running, not waiting."""
    frames: tuple[StackFrame, ...]
    """Innermost first."""
    code: str | None = None
    """Source text of the innermost frame's line, where the file can be read."""


class StackProblem(NamedTuple):
    """Why the stacks of a process could not be read."""

    code: StackProblemCode
    reason: str
    """A clause: `process 4711 belongs to another user`."""
    hint: str | None = None
    """What gives the stacks: a clause that ends with a command."""

    @property
    def sentence(self) -> str:
        """The reason and the remedy in one sentence."""
        return self.reason if self.hint is None else f"{self.reason}; {self.hint}"


def is_given_up(problem: StackProblem, failures: int) -> bool:
    """Return whether a process is not read again: at once, unless it may work the next time.

    Args:
        problem: The last failure.
        failures: Number of failures in a row.
    """
    return problem.code != "failed" or failures >= MAX_FAILURES


class ProcessStacks(NamedTuple):
    """All stacks of one process at one time, or why there are none."""

    pid: int
    time: float
    """Epoch seconds."""
    threads: tuple[ThreadStack, ...] = ()
    problem: StackProblem | None = None
    cpu_seconds: float = 0.0
    """CPU time that reading them took."""


class StackTarget(NamedTuple):
    """A process whose stacks are wanted."""

    pid: int
    role: CodeRole
