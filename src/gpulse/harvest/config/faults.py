"""Everything that is wrong with a configuration, so that the first fault is told and the others are counted."""

from __future__ import annotations

from typing import NamedTuple

from gpulse.harvest.settings import ConfigError


class WrongError(Exception):
    """What is wrong with one value; whoever knows its line tells it."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


class Fault(NamedTuple):
    """One thing that is wrong."""

    line: int | None
    """None: it is not about a line."""
    reason: str
    hint: str | None


class Faults:
    """What was found wrong with one file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._found: dict[tuple[int | None, str], Fault] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, line: int | None, reason: str, hint: str | None = None) -> None:
        """Note a fault; the same one twice is one."""
        self._found.setdefault((line, reason), Fault(line, reason, hint))

    def refuse(self) -> None:
        """End here if anything is wrong.

        Raises:
            ConfigError: The first fault by line, and how many more there are.
        """
        if not self._found:
            return
        first = min(self._found.values(), key=lambda fault: (fault.line is None, fault.line or 0))
        place = self.path if first.line is None else f"{self.path}:{first.line}"
        more = len(self._found) - 1
        counted = f" (and {more} more {'fault' if more == 1 else 'faults'})" if more else ""
        raise ConfigError(f"{place}: {first.reason}{counted}", hint=first.hint)
