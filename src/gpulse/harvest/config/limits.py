"""How much of the machine a program may have, and how it is asked to end."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Collection
from typing import Any

from gpulse.harvest.config.faults import WrongError
from gpulse.harvest.config.values import shown, whole_number

_IONICE = re.compile(r"idle|best-effort(?::[0-7])?", re.ASCII)
_CPU_RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", re.ASCII)
_LONGEST = 1000
_ENDS_NOTHING = frozenset(
    {
        signal.SIGCHLD,
        signal.SIGCONT,
        signal.SIGSTOP,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
        signal.SIGURG,
        signal.SIGWINCH,
    }
)


def nice(*, root: bool) -> Callable[[Any], int]:
    """Takes niceness; only root may be less nice than others."""

    def take(value: object) -> int:
        given = whole_number(-20, 19)(value)
        if given < 0 and not root:
            raise WrongError(f"{given} needs root", "from 0 to 19")
        return given

    return take


def ionice(value: object) -> str:
    """A class of the disk scheduler, as `ionice` calls it."""
    if not isinstance(value, str) or _IONICE.fullmatch(value) is None:
        raise WrongError(
            f"{shown(value)} is not known", "known: idle, best-effort, best-effort:0 to best-effort:7"
        )
    return value


def stop_signal(value: object) -> int:
    """A signal by its name, with or without SIG, or its number."""
    number = _signal_number(value)
    if number in _ENDS_NOTHING:
        raise WrongError(f"{shown(value)} does not ask a program to end", "such as TERM, INT or USR1")
    return number


def _signal_number(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value in signal.valid_signals():
        return int(value)
    given = value.upper() if isinstance(value, str) else ""
    for known in signal.Signals:
        if given in (known.name, known.name.removeprefix("SIG")):
            return int(known)
    raise WrongError(f"{shown(value)} is not a signal", "such as TERM, INT or USR1")


class Cpus:
    """CPUs as they were asked for."""

    def __init__(self, value: object, allowed: Collection[int]) -> None:
        """Check what was asked for.

        Args:
            value: Which (`"0-7,16"`, a list), or how many.
            allowed: Those that there are.

        Raises:
            WrongError: It is neither, or they are not there.
        """
        self._allowed = sorted(allowed, reverse=True)
        self._count: int | None = None
        self._named: tuple[int, ...] = ()
        if isinstance(value, int) and not isinstance(value, bool):
            self._count = self._counted(value)
        else:
            self._named = self._found(value)

    def part(self, position: int) -> tuple[int, ...]:
        """Those of one of several programs; so many of them each means others for each, while they last."""
        if self._count is None:
            return self._named
        total = len(self._allowed)
        first = position * self._count
        return tuple(sorted(self._allowed[(first + step) % total] for step in range(self._count)))

    def _counted(self, count: int) -> int:
        if not 1 <= count <= len(self._allowed):
            raise WrongError(
                f"{shown(count)} CPUs cannot be had, there are {len(self._allowed)}",
                'a number means how many; "0-7" means which',
            )
        return count

    def _found(self, value: object) -> tuple[int, ...]:
        wanted = sorted(set(_cpu_numbers(value)))
        missing = [cpu for cpu in wanted if cpu not in self._allowed]
        if missing:
            known = f"{self._allowed[-1]} to {self._allowed[0]}" if self._allowed else "none"
            raise WrongError(f"there is no CPU {shown(missing[0])} for us", f"there are: {known}")
        return tuple(wanted)


def _cpu_numbers(value: object) -> list[int]:
    if isinstance(value, list):
        return [whole_number(0, 9_999)(part) for part in value] or _no_cpus(value)
    if not isinstance(value, str) or len(value) > _LONGEST:
        return _no_cpus(value)
    found: list[int] = []
    for part in value.split(","):
        match = _CPU_RANGE.fullmatch(part.strip())
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        found += numbers or _no_cpus(value)
    return found


def _no_cpus(value: object) -> list[int]:
    raise WrongError(f"{shown(value)} does not say which CPUs", 'such as "0-7,16", or 4 for any four')
