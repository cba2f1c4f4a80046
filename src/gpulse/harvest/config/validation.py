"""Validate a configuration: convert its values, and collect the faults of its tables with their lines."""

from __future__ import annotations

import difflib
import re
import shlex
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast, get_args

from gpulse.harvest.settings import ConfigError, DayWindow, OpenHours, Restart
from gpulse.model.safe_text import quoted

MAX_NAME_LENGTH = 64
_MAX_SHOWN_LENGTH = 200
MAX_WHOLE_NUMBER = 10**18
"""Larger integers are mistakes, and some cannot be converted back to text."""
_DAY_SECONDS = 86_400
MIN_INTERVAL_SECONDS = 0.1
MAX_INTERVAL_SECONDS = _DAY_SECONDS
MAX_SECONDS = 30 * _DAY_SECONDS
MAX_GRACE_SECONDS = 3_600
MIN_BACKOFF_SECONDS = 0.1
MAX_MEMORY_BYTES = 1 << 50
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(?:([KMGTP])(I?))?B", re.ASCII | re.IGNORECASE)
_POWERS = "KMGTP"
_SIZE_HINT = 'use a number of bytes, or a size such as "512MiB" or "1GiB"'
_IONICE = re.compile(r"idle|best-effort(?::[0-7])?", re.ASCII)
_NOT_ENDING_SIGNALS = frozenset(
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
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_WEEK = frozenset(range(7))
_DAY_MINUTES = 24 * 60
_MIN_DAY_LETTERS = 3
_MAX_WINDOW_LENGTH = 200
_WINDOW = re.compile(
    r"(?P<days>[a-z][a-z, -]*?)?\s*(?:(?P<start>[0-9:]+)\s*-\s*(?P<end>[0-9:]+))?", re.ASCII | re.IGNORECASE
)
_TIME = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))?", re.ASCII)
_HOURS_HINT = 'use hours such as "22:00-07:00", "mon-fri 20:00-07:00" or "sat,sun"'


class InvalidValueError(Exception):
    """A value that is refused; the caller adds the file, the line and the key."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


def format_value(value: object) -> str:
    """Format a value for a message: on one line and not too long."""
    if isinstance(value, str):
        return quoted(value, _MAX_SHOWN_LENGTH)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < MAX_WHOLE_NUMBER else "a number this large"
    if isinstance(value, list):
        return "a list"
    return "a table" if isinstance(value, dict) else "a date or time"


def text(value: object) -> str:
    """Return a string that is not empty and has no NUL or line break."""
    if not isinstance(value, str):
        raise InvalidValueError(f"{format_value(value)} is not a string", "put the value in quotes")
    if not value.strip():
        raise InvalidValueError("the value is empty")
    if any(character in value for character in "\0\n\r"):
        raise InvalidValueError(f"{format_value(value)} contains a line break or a NUL character")
    return value


def name(value: object) -> str:
    """Return a name that a program may have."""
    given = text(value)
    if given != given.strip() or not given.isprintable() or len(given) > MAX_NAME_LENGTH:
        raise InvalidValueError(
            f"{format_value(given)} is not a valid name",
            f"use at most {MAX_NAME_LENGTH} printable characters",
        )
    return given


def number(least: float, most: float) -> Callable[[Any], float]:
    """Return a converter for numbers of this range."""

    def take(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidValueError(
                f"{format_value(value)} is not a number", f"use a number from {least:g} to {most:g}"
            )
        if not least <= value <= most:
            raise InvalidValueError(
                f"must be a number from {least:g} to {most:.15g}, not {format_value(value)}"
            )
        return float(value)

    return take


def whole_number(least: int, most: int) -> Callable[[Any], int]:
    """Return a converter for whole numbers of this range."""

    def take(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InvalidValueError(
                f"must be a whole number from {least} to {most}, not {format_value(value)}"
            )
        return value

    return take


interval_seconds = number(MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS)
seconds = number(0, MAX_SECONDS)
grace_seconds = number(0, MAX_GRACE_SECONDS)
backoff_seconds = number(MIN_BACKOFF_SECONDS, MAX_SECONDS)


def flag(value: object) -> bool:
    """Return a boolean."""
    if not isinstance(value, bool):
        raise InvalidValueError(
            f"{format_value(value)} is neither true nor false", "write true or false without quotes"
        )
    return value


def ratio(value: object) -> float:
    """Convert a percentage to a ratio."""
    return number(0, 100)(value) / 100


def size(value: object) -> int:
    """Return a size in bytes, given as a number or with a unit: 1kB is 1000 bytes, 1KiB is 1024."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _check_size(value, value)
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise InvalidValueError(f"{format_value(value)} is not a size", _SIZE_HINT)
    step = 1024 if match[3] else 1000
    power = _POWERS.index(match[2].upper()) + 1 if match[2] else 0
    return _check_size(int(float(match[1]) * step**power), value)


def _check_size(size_bytes: int, written: object) -> int:
    if not 0 <= size_bytes <= MAX_MEMORY_BYTES:
        raise InvalidValueError(f"{format_value(written)} is out of range for a memory size", _SIZE_HINT)
    return size_bytes


def words(value: object) -> tuple[str, ...]:
    """Return a list of words, given as a list or as a comma-separated string."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, list):
        raise InvalidValueError(f"{format_value(value)} is not a list", 'use a list such as ["a", "b"]')
    return tuple(text(part).strip() for part in value)


def program_names(value: object) -> frozenset[str]:
    """Return program names as shown in the process list."""
    found = words(value)
    for given in found:
        if "/" in given:
            raise InvalidValueError(
                f"{format_value(given)} is a path", "use only the program's name, for example nvidia-smi"
            )
    return frozenset(found)


def split_command(value: object) -> tuple[str, ...]:
    """Split a command like a shell."""
    if not isinstance(value, str):
        raise InvalidValueError(
            f"{format_value(value)} is not a command", "use a string or a list of strings"
        )
    try:
        return command_list(shlex.split(value))
    except ValueError as error:
        raise InvalidValueError(
            f"unbalanced quotes in {format_value(value)}",
            "balance the quotes; write a literal quote as \\'",
        ) from error


def command_list(given: Sequence[object]) -> tuple[str, ...]:
    """Return a command given as a list."""
    for part in given:
        if not isinstance(part, str):
            raise InvalidValueError(f"{format_value(part)} is not a string", "put each argument in quotes")
        if "\0" in part:
            raise InvalidValueError(f"{format_value(part)} contains a NUL character")
    found = tuple(map(str, given))
    if not found or not found[0].strip():
        raise InvalidValueError("the command is empty", "write the program and its arguments")
    return found


def restart(value: object) -> Restart:
    """Return when a program that ended is started again."""
    for known in get_args(Restart):
        if value == known:
            return cast("Restart", known)
    raise InvalidValueError(
        f"{format_value(value)} is not a valid restart policy", f"use one of {', '.join(get_args(Restart))}"
    )


def nice(*, root: bool) -> Callable[[Any], int]:
    """Return a converter for niceness; only root may use a negative one."""

    def take(value: object) -> int:
        given = whole_number(-20, 19)(value)
        if given < 0 and not root:
            raise InvalidValueError(f"{given} requires root", "use 0 to 19")
        return given

    return take


def ionice(value: object) -> str:
    """Return an I/O priority in the notation of `ionice`."""
    if not isinstance(value, str) or _IONICE.fullmatch(value) is None:
        raise InvalidValueError(
            f"{format_value(value)} is not a valid I/O priority",
            "use idle, best-effort, or best-effort:0 to best-effort:7",
        )
    return value


def stop_signal(value: object) -> int:
    """Return a signal given by name, with or without SIG, or by number."""
    number = _find_signal_number(value)
    if number in _NOT_ENDING_SIGNALS:
        raise InvalidValueError(
            f"{format_value(value)} does not make a program exit", "use a signal such as TERM, INT or USR1"
        )
    return number


def _find_signal_number(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value in signal.valid_signals():
        return int(value)
    given = value.upper() if isinstance(value, str) else ""
    for known in signal.Signals:
        if given in (known.name, known.name.removeprefix("SIG")):
            return int(known)
    raise InvalidValueError(
        f"{format_value(value)} is not a signal", "use a signal such as TERM, INT or USR1"
    )


def hours(value: object) -> OpenHours:
    """Return the windows of the day that a text, or a list of texts, names."""
    windows = value if isinstance(value, list) else [value]
    if not windows:
        raise InvalidValueError("the list is empty", f"{_HOURS_HINT}; remove the key to allow all hours")
    return OpenHours(tuple(_parse_window(window) for window in windows))


def _parse_window(value: object) -> DayWindow:
    match = (
        _WINDOW.fullmatch(value.strip())
        if isinstance(value, str) and len(value) <= _MAX_WINDOW_LENGTH
        else None
    )
    if match is None or not (match["days"] or match["start"]):
        raise InvalidValueError(f"{format_value(value)} is not a time window", _HOURS_HINT)
    days = _parse_days(match["days"]) if match["days"] else _WEEK
    if match["start"] is None:
        return DayWindow(days, 0, _DAY_MINUTES)
    start, end = _parse_minute(match["start"]), _parse_minute(match["end"])
    if start in {end, _DAY_MINUTES}:
        raise InvalidValueError(
            f"{format_value(value)} starts and ends at the same time", "omit the times to allow the whole day"
        )
    return DayWindow(days, start, end)


def _parse_minute(given: str) -> int:
    match = _TIME.fullmatch(given)
    minute = int(match[1]) * 60 + int(match[2] or 0) if match else None
    if match is None or minute is None or minute > _DAY_MINUTES or int(match[2] or 0) >= 60:
        raise InvalidValueError(f"{format_value(given)} is not a time of day", "use 00:00 to 24:00")
    return minute


def _parse_days(given: str) -> frozenset[int]:
    found: set[int] = set()
    for part in given.split(","):
        first, dash, last = part.partition("-")
        start = _parse_day(first)
        length = (_parse_day(last) - start) % 7 if dash else 0
        found |= {(start + step) % 7 for step in range(length + 1)}
    return frozenset(found)


def _parse_day(given: str) -> int:
    word = given.strip().lower()
    for number, day in enumerate(_DAYS):
        if len(word) >= _MIN_DAY_LETTERS and day.startswith(word):
            return number
    raise InvalidValueError(
        f"{format_value(given.strip())} is not a weekday", "use one of mon, tue, wed, thu, fri, sat, sun"
    )


T = TypeVar("T")
D = TypeVar("D")


class ConfigFault(NamedTuple):
    """One fault in a configuration."""

    line: int | None
    """None: it is not about a line."""
    reason: str
    hint: str | None


class ConfigFaults:
    """Faults of one file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._found: dict[tuple[int | None, str], ConfigFault] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, line: int | None, reason: str, hint: str | None = None) -> None:
        """Add a fault, unless it is already there."""
        self._found.setdefault((line, reason), ConfigFault(line, reason, hint))

    def refuse(self) -> None:
        """Raise an error if there are faults.

        Raises:
            ConfigError: The first fault by line, and how many more there are.
        """
        if not self._found:
            return
        first = min(self._found.values(), key=lambda fault: (fault.line is None, fault.line or 0))
        place = self.path if first.line is None else f"{self.path}:{first.line}"
        more = len(self._found) - 1
        counted = f" (and {more} more {'error' if more == 1 else 'errors'})" if more else ""
        raise ConfigError(f"{place}: {first.reason}{counted}", hint=first.hint)


class ConfigEntry(NamedTuple):
    """One value as it was written."""

    value: Any
    line: int


class ConfigTable:
    """Values by key; faults are collected, not raised."""

    def __init__(
        self, title: str, line: int | None, entries: Mapping[str, ConfigEntry], faults: ConfigFaults
    ) -> None:
        """Start without faults.

        Args:
            title: The header in the file, such as `[defaults]`.
            line: Line of the header; None when the table is not in the file.
            entries: Its keys and values.
            faults: Collects the faults.
        """
        self.title = title
        self.line = line
        self._entries = entries
        self._faults = faults
        self._wrong: set[str] = set()
        self._has_unknown = False

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def expect(self, known: Iterable[str]) -> None:
        """Add a fault for every key that is not one of these."""
        names = tuple(known)
        for key, entry in self._entries.items():
            if key not in names:
                self._has_unknown = True
                self._faults.add(
                    entry.line, f"unknown key {format_value(key)} in {self.title}", suggest(key, names)
                )

    def take(self, key: str, convert: Callable[[Any], T], default: D) -> T | D:
        """Return the value of a key; the default when it is missing or wrong."""
        entry = self._entries.get(key)
        if entry is None:
            return default
        return self.judge(key, lambda: convert(entry.value), default)

    def need(self, key: str, convert: Callable[[Any], T], example: str) -> T | None:
        """Return the value of a required key; None when it is missing or wrong."""
        if key not in self._entries:
            self._wrong.add(key)
            if not self._has_unknown:  # that fault is noted already, and may be this key misspelt
                self._faults.add(self.line, f"{self.title} has no {key}", f"add a line such as {example}")
            return None
        return self.take(key, convert, None)

    def judge(self, key: str, work: Callable[[], T], default: D) -> T | D:
        """Return the result of `work` on the value of a key; the default when it refuses the value."""
        try:
            return work()
        except InvalidValueError as wrong:
            self._wrong.add(key)
            self._faults.add(self.line_of(key), f"{key}: {wrong.reason}", wrong.hint)
            return default

    def line_of(self, key: str) -> int | None:
        """Return the line of a key, or of the table."""
        entry = self._entries.get(key)
        return self.line if entry is None else entry.line

    def is_sound(self, *keys: str) -> bool:
        """True when nothing was found wrong with these keys so far, or with any when none is named."""
        return not self._wrong.intersection(keys or self._wrong)


def format_title(name: str) -> str:
    """Format a header for a message."""
    return f"[{name}]" if name.isprintable() and len(name) <= MAX_NAME_LENGTH else f"[{format_value(name)}]"


def suggest(given: str, known: Iterable[str]) -> str:
    """Return a hint with the valid names, and the closest match."""
    names = list(known)
    close = difflib.get_close_matches(given.lower()[:100], names, n=1, cutoff=0.5)
    return (
        f"did you mean {close[0]}? valid: {', '.join(names)}" if close else f"use one of {', '.join(names)}"
    )
