"""INI as Python's configparser reads it, with the line of everything, and all faults instead of the first."""

from __future__ import annotations

import io
import re
from typing import NamedTuple

from gpulse.harvest.config.faults import Faults
from gpulse.harvest.config.table import Entry, Table, titled
from gpulse.harvest.config.values import shown

_HEADER = re.compile(r"\[(?P<name>.+)\]")
_OPTION = re.compile(r"(?P<key>.*?)\s*[=:]\s*(?P<value>.*)$")
_COMMENTS = ("#", ";")


class _Value(NamedTuple):
    """One value while its lines come."""

    line: int
    parts: list[str]


class _Section(NamedTuple):
    """One section while its lines come."""

    name: str
    line: int
    values: dict[str, _Value]


def read(text: str, faults: Faults) -> dict[str, Table]:
    """The sections by name, in the order of the file."""
    reader = _Reader(faults)
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        reader.take(number, line)
    return {section.name: _table(section, faults) for section in reader.sections.values()}


def _table(section: _Section, faults: Faults) -> Table:
    entries = {
        key: Entry("\n".join(value.parts).rstrip(), value.line) for key, value in section.values.items()
    }
    return Table(titled(section.name), section.line, entries, faults)


class _Reader:
    """Takes one line after the other."""

    def __init__(self, faults: Faults) -> None:
        self.sections: dict[str, _Section] = {}
        self._faults = faults
        self._section: _Section | None = None
        self._value: _Value | None = None
        """What a line that is indented further goes on with."""
        self._indent = 0

    def take(self, number: int, line: str) -> None:
        """Take the next line."""
        said = line.strip()
        if said.startswith(_COMMENTS):
            return
        if not said:
            if self._value is not None:
                self._value.parts.append("")
            return
        indent = len(line) - len(line.lstrip())
        if self._value is not None and indent > self._indent:
            self._value.parts.append(said)
            return
        self._indent = indent
        if header := _HEADER.match(said):
            self._open(number, header["name"])
        else:
            self._add(number, said)

    def _open(self, number: int, name: str) -> None:
        self._value = None
        self._section = _Section(name, number, {})
        earlier = self.sections.setdefault(name, self._section)
        if earlier is not self._section:
            self._faults.add(
                number,
                f"there is a section {titled(name)} already, at line {earlier.line}",
                "give one of them another name, or make them one",
            )

    def _add(self, number: int, said: str) -> None:
        option = _OPTION.match(said)
        if self._section is None:
            self._faults.add(
                number, f"{shown(said)} is in no section", "begin with a line such as [defaults]"
            )
        elif option is None or not option["key"]:
            self._faults.add(
                number,
                f"{shown(said)} is neither a section nor a key with a value",
                "such as [gpu-all] or gpus=ALL; comments begin with ; or #",
            )
        else:
            self._set(self._section, number, option["key"].lower(), option["value"])

    def _set(self, section: _Section, number: int, key: str, value: str) -> None:
        self._value = _Value(number, [value])
        earlier = section.values.setdefault(key, self._value)
        if earlier is not self._value:
            self._faults.add(
                number, f"{shown(key)} is there already, at line {earlier.line}", "remove one of them"
            )
