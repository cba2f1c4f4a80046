"""Settings of a harvest: programs, GPUs, and when a GPU counts as free."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Literal, NamedTuple

from gpulse.errors import UsageError

Restart = Literal["always", "on-failure", "never"]

DEFAULT_INTERVAL_SECONDS = 10.0
DEFAULT_IDLE_SECONDS = 10.0
DEFAULT_COOLDOWN_SECONDS = 60.0
DEFAULT_QUIET_SECONDS = 60.0
DEFAULT_IGNORED_PROGRAMS = frozenset({"gpulse", "nvidia-smi"})
"""They look at GPUs and do nothing with them."""
DEFAULT_GRACE_SECONDS = 3.0
DEFAULT_PEOPLE_IDLE_SECONDS = 300.0
DEFAULT_BACKOFF_SECONDS = 5.0
DEFAULT_MAX_BACKOFF_SECONDS = 600.0


class ConfigError(UsageError):
    """A configuration that is refused; the message begins with the file and, where there is one, the line."""


class HarvestableGpu(NamedTuple):
    """One GPU of this machine."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a GPU
    """NVML's, the order of the PCI bus."""
    minor: int
    """N of /dev/nvidiaN."""
    uuid: str
    name: str


class DayWindow(NamedTuple):
    """A part of some days; one that ends before it begins goes on into the next day."""

    days: frozenset[int]
    """On which it begins, 0 is Monday."""
    start_minute: int
    end_minute: int

    def holds(self, local: datetime) -> bool:
        """True when this moment is in it."""
        minute = local.hour * 60 + local.minute
        if self.start_minute < self.end_minute:
            return local.weekday() in self.days and self.start_minute <= minute < self.end_minute
        evening = local.weekday() in self.days and minute >= self.start_minute
        morning = (local.weekday() - 1) % 7 in self.days and minute < self.end_minute
        return evening or morning


class OpenHours(NamedTuple):
    """When work may be done."""

    windows: tuple[DayWindow, ...] = ()
    """None: always."""

    def open_at(self, local: datetime) -> bool:
        """True when work may be done at this moment."""
        return not self.windows or any(window.holds(local) for window in self.windows)


class Program(NamedTuple):
    """One program that runs while its GPUs are idle."""

    name: str
    command: tuple[str, ...]
    gpus: tuple[int, ...]
    """Indices; all of them must be idle."""
    whole: bool = False
    """It wants all GPUs, and is preferred to those that want some."""
    directory: str = "."
    log: str | None = None
    """Appended to; None: where harvest itself writes."""
    environment: tuple[tuple[str, str], ...] = ()
    """Beside harvest's own; the visible GPUs are in it."""
    user: str | None = None
    """None: who runs harvest."""
    nice: int | None = None
    ionice: str | None = None
    """`idle`, `best-effort` or `best-effort:N`; None: unchanged."""
    cpus: tuple[int, ...] = ()
    """The CPUs it may use; none: all."""
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    stop_signal: int = 15
    hours: OpenHours = OpenHours()
    restart: Restart = "always"
    backoff_seconds: float = DEFAULT_BACKOFF_SECONDS
    max_backoff_seconds: float = DEFAULT_MAX_BACKOFF_SECONDS


class PeopleSettings(NamedTuple):
    """Which people at the machine stop the programs."""

    enabled: bool = False
    whitelist: frozenset[str] = frozenset()
    idle_seconds: float = DEFAULT_PEOPLE_IDLE_SECONDS


class HarvestSettings(NamedTuple):
    """One configuration, checked against the machine."""

    path: str
    gpus: Mapping[int, frozenset[str]]
    """The GPUs that are watched, each with the programs that may use it without counting."""
    programs: tuple[Program, ...]
    interval_seconds: float = DEFAULT_INTERVAL_SECONDS
    idle_seconds: float = DEFAULT_IDLE_SECONDS
    """How long a GPU must have been free before a program is started."""
    cooldown_seconds: float = DEFAULT_COOLDOWN_SECONDS
    """How long to wait before harvesting a GPU again after somebody used it."""
    quiet_seconds: float = DEFAULT_QUIET_SECONDS
    """How long a process counts that has a GPU open without a context or memory on it."""
    utilization_ratio: float | None = None
    """A GPU that is busier than this is not taken; None: any."""
    memory_bytes: int | None = None
    """A GPU with more memory in use than this is not taken; None: any."""
    max_gpus: int | None = None
    hours: OpenHours = OpenHours()
    people: PeopleSettings = PeopleSettings()
    ignore_users: frozenset[str] = frozenset()
    """Users whose processes never count."""
    always_users: frozenset[str] = frozenset()
    """Users whose processes always count, whatever the program."""
