"""One section or table of a configuration: keys, values, and the lines they are on."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from gpulse.harvest.config.faults import Faults, WrongError
from gpulse.harvest.config.values import LONGEST_NAME, shown

T = TypeVar("T")
D = TypeVar("D")


class Entry(NamedTuple):
    """One value as it was written."""

    value: Any
    line: int


class Table:
    """Values by key; what is wrong with them is noted, not raised."""

    def __init__(self, title: str, line: int | None, entries: Mapping[str, Entry], faults: Faults) -> None:
        """Begin with nothing wrong.

        Args:
            title: As it stands in the file, such as `[defaults]`.
            line: Where it begins; None when it is not in the file.
            entries: Its keys.
            faults: Where faults are noted.
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
        """Note every key that is not one of these."""
        names = tuple(known)
        for key, entry in self._entries.items():
            if key not in names:
                self._has_unknown = True
                self._faults.add(
                    entry.line, f"unknown key {shown(key)} in {self.title}", suggestion(key, names)
                )

    def take(self, key: str, convert: Callable[[Any], T], default: D) -> T | D:
        """The value of a key; the default when it is not there, or wrong."""
        entry = self._entries.get(key)
        if entry is None:
            return default
        return self.judge(key, lambda: convert(entry.value), default)

    def need(self, key: str, convert: Callable[[Any], T], example: str) -> T | None:
        """The value of a key that must be there; None when it is not, or wrong."""
        if key not in self._entries:
            self._wrong.add(key)
            if not self._has_unknown:  # which is told already, and may be this one misspelt
                self._faults.add(self.line, f"{self.title} has no {key}", f"such as {example}")
            return None
        return self.take(key, convert, None)

    def judge(self, key: str, work: Callable[[], T], default: D) -> T | D:
        """What some work on the value of a key gives; the default when it finds the value wrong."""
        try:
            return work()
        except WrongError as wrong:
            self._wrong.add(key)
            self._faults.add(self.line_of(key), f"{key}: {wrong.reason}", wrong.hint)
            return default

    def line_of(self, key: str) -> int | None:
        """Where a key stands, or where the table begins."""
        entry = self._entries.get(key)
        return self.line if entry is None else entry.line

    def is_sound(self, *keys: str) -> bool:
        """True when nothing was found wrong with these keys so far, or with any when none is named."""
        return not self._wrong.intersection(keys or self._wrong)


def titled(name: str) -> str:
    """A header as a message may show it."""
    return f"[{name}]" if name.isprintable() and len(name) <= LONGEST_NAME else f"[{shown(name)}]"


def suggestion(given: str, known: Iterable[str]) -> str:
    """What may be written instead of a name that is not known."""
    names = list(known)
    close = difflib.get_close_matches(given.lower()[:100], names, n=1, cutoff=0.5)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}known: {', '.join(names)}"
