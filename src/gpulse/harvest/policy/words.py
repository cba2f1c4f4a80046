"""What the policy is told, and what it asks for. All times are on a clock that nobody sets."""

from __future__ import annotations

from typing import Literal, NamedTuple

from gpulse.harvest.running.told import Told
from gpulse.harvest.settings import Program, Settings
from gpulse.harvest.sight.seen import Sighting


class Looked(NamedTuple):
    """Somebody looked at GPUs, or at the people."""

    now: float
    sighting: Sighting


class Heard(NamedTuple):
    """The runner told something about a program."""

    now: float
    told: Told


class Passed(NamedTuple):
    """Time went by."""

    now: float
    wall_offset: float
    """What the wall clock shows more than `now`."""


class Changed(NamedTuple):
    """There is a new configuration, and this is what can be seen under it."""

    now: float
    settings: Settings
    sighting: Sighting


class Closed(NamedTuple):
    """Nothing new is to be started."""

    now: float


class Ended(NamedTuple):
    """Everything is to be stopped."""

    now: float
    at_once: bool = False
    """Without a grace period, even for what is already stopping."""


Event = Looked | Heard | Passed | Changed | Closed | Ended

Kind = Literal["gpu", "people", "unknown", "hours", "displaced", "changed", "limit", "ending"]


class Reason(NamedTuple):
    """Why a program has to go."""

    kind: Kind
    by: str | None
    """The user who came."""
    what: str
    """In words, such as `alice's python3 (4711) opened GPU 0`."""

    @property
    def preempted(self) -> bool:
        """True when it went for somebody else's sake."""
        return self.kind in ("gpu", "people", "unknown")


class Start(NamedTuple):
    """Start a program."""

    run: str
    program: Program


class Signal(NamedTuple):
    """Ask everything of a run to end."""

    run: str
    number: int
    reason: Reason


class Kill(NamedTuple):
    """End everything of a run."""

    run: str
    reason: Reason


Instruction = Start | Signal | Kill
