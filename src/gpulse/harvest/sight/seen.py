"""What can be seen of GPUs and people at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Holder(NamedTuple):
    """A process that is not ours and has a GPU open, or work on it."""

    pid: int
    start_ticks: int | None
    """With the pid it names a process for good; None when it is not in our /proc."""
    names: tuple[str, ...]
    """What the program may be called: the kernel's name, its file's, its first argument's."""
    user: str | None
    working: bool
    """It has a context, or memory, on that GPU, or nobody can tell whether it has."""
    files: frozenset[int] = frozenset()
    """The descriptors under which it has it open, as far as they can be seen."""


class Use(NamedTuple):
    """One GPU at one moment."""

    holders: tuple[Holder, ...] = ()
    unknown: str | None = None
    """Why it cannot be told who uses it."""
    opened_unseen: bool = False
    """Somebody opened it since the last look who is out of our sight."""
    suspects: tuple[tuple[str, ...], ...] = ()
    """What programs out of our sight are called that were started just before."""
    utilization_ratio: float | None = None
    memory_bytes: int | None = None
    """In use by others than `holders` and us: nobody's, as far as we can see."""


class Presence(NamedTuple):
    """Somebody at the machine."""

    user: str
    where: str
    """`pts/3`, `tty1`, `seat0`."""
    idle_seconds: float | None
    """Since the last sign of life; None: not known."""
    kind: Literal["terminal", "desktop"] = "terminal"


class Sighting(NamedTuple):
    """What was seen in one look."""

    uses: Mapping[int, Use]
    """By index; a GPU that was not looked at is not in it."""
    people: tuple[Presence, ...] | None = None
    """None: nobody looked."""
