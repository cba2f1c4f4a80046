"""What the runner tells about the programs it runs."""

from __future__ import annotations

from typing import NamedTuple


class Process(NamedTuple):
    """A process that cannot be mistaken for another: numbers are used again, a number with a start is not."""

    pid: int
    start_ticks: int


class Started(NamedTuple):
    """The program runs."""

    run: str
    keeper: Process
    program: Process


class Failed(NamedTuple):
    """The program could not be started; nothing of it is left."""

    run: str
    why: str


class Exited(NamedTuple):
    """The program itself ended; what it started may still be there."""

    run: str
    status: int
    """Its exit code, or minus the signal that ended it."""


class Gone(NamedTuple):
    """Nothing of the program is left."""

    run: str


Told = Started | Failed | Exited | Gone
