"""Read configurations in gpu_mon's INI format, with the line number of every key."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpulse.harvest.config import validation
from gpulse.harvest.config.machine_lookup import GpuChoice, Machine
from gpulse.harvest.config.validation import (
    ConfigEntry,
    ConfigFaults,
    ConfigTable,
    InvalidValueError,
    format_title,
    format_value,
    suggest,
)
from gpulse.harvest.settings import (
    DEFAULT_INTERVAL_SECONDS,
    DEFAULT_PEOPLE_IDLE_SECONDS,
    HarvestSettings,
    PeopleSettings,
    Program,
)

SECTIONS = ("defaults", "gpu-NAME", "process-NAME", "tty")
DEFAULTS_KEYS = ("interval_seconds", "cooldown_seconds")
GPU_KEYS = ("gpus", "ignore_programs")
PROCESS_KEYS = ("dir", "cmd", "gpus", "log")
TTY_KEYS = ("enabled", "whitelist", "idle_seconds")
DEFAULT_COOLDOWN_SECONDS = 0.0
"""gpu_mon starts a program again at the check that finds its GPUs idle again."""
_GPU_PREFIX = "gpu-"
_PROCESS_PREFIX = "process-"
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?", re.ASCII | re.IGNORECASE)
_FLAGS = {
    "1": True,
    "yes": True,
    "true": True,
    "on": True,
    "0": False,
    "no": False,
    "false": False,
    "off": False,
}
_COMMENT = re.compile(r"\s[;#]")
_TOML_HEADER = re.compile(r"\s*(?:\[\[.+\]\]|\[(?:harvest|idle|people)\])\s*(?:#.*)?")
_HEADER = re.compile(r"\[(?P<name>.+)\]")
_OPTION = re.compile(r"(?P<key>.*?)\s*[=:]\s*(?P<value>.*)$")
_COMMENTS = ("#", ";")


def read_settings(text: str, path: str, machine: Machine, faults: ConfigFaults) -> HarvestSettings:
    """Return the settings in an INI text; everything that is wrong with it is added to the faults."""
    if line := _find_toml_line(text):
        faults.add(
            line, "this file is TOML, but its name does not end in .toml", "rename the file to NAME.toml"
        )
        faults.refuse()
    sections = read_sections(text, faults)
    _check_sections(sections, faults)
    gpus = _read_watched_gpus(
        [table for name, table in sections.items() if name.startswith(_GPU_PREFIX)], machine
    )
    programs = [
        _read_program(table, name.removeprefix(_PROCESS_PREFIX), machine, gpus, faults)
        for name, table in sections.items()
        if name.startswith(_PROCESS_PREFIX)
    ]
    if not programs:
        faults.add(
            None, "no program is configured", "add a section such as [process-all] with dir, cmd and gpus"
        )
    nothing = ConfigTable("", None, {}, faults)
    defaults = sections.get("defaults", nothing)
    return HarvestSettings(
        path,
        gpus,
        tuple(program for program in programs if program is not None),
        interval_seconds=defaults.take(
            "interval_seconds",
            lambda given: validation.interval_seconds(_parse_number(given)),
            DEFAULT_INTERVAL_SECONDS,
        ),
        idle_seconds=0.0,  # gpu_mon starts a program at the check that finds its GPUs idle
        cooldown_seconds=defaults.take(
            "cooldown_seconds",
            lambda given: validation.seconds(_parse_number(given)),
            DEFAULT_COOLDOWN_SECONDS,
        ),
        people=_read_people(sections["tty"]) if "tty" in sections else PeopleSettings(),
    )


def _find_toml_line(text: str) -> int | None:
    """Return the line of something that only our TOML has."""
    return next(
        (number for number, line in enumerate(text.split("\n"), 1) if _TOML_HEADER.fullmatch(line)), None
    )


def _check_sections(sections: Mapping[str, ConfigTable], faults: ConfigFaults) -> None:
    for name, table in sections.items():
        if name.startswith(_GPU_PREFIX):
            table.expect(GPU_KEYS)
        elif name.startswith(_PROCESS_PREFIX):
            table.expect(PROCESS_KEYS)
        elif name == "defaults":
            table.expect(DEFAULTS_KEYS)
        elif name == "tty":
            table.expect(TTY_KEYS)
        else:
            faults.add(table.line, f"unknown section {table.title}", suggest(name, SECTIONS))


def _read_watched_gpus(tables: Sequence[ConfigTable], machine: Machine) -> dict[int, frozenset[str]]:
    """Return the GPUs of all sections, with the programs to ignore on each; all GPUs when there is no section."""
    watched: dict[int, frozenset[str]] = {} if tables else {gpu.index: frozenset() for gpu in machine.gpus}
    for table in tables:
        wanted = table.need("gpus", lambda given: _choose_gpus(given, machine), "gpus=ALL")
        ignored = table.take("ignore_programs", validation.program_names, frozenset())
        for index in wanted.indices if wanted else ():
            watched[index] = watched.get(index, frozenset()) | ignored
    # A section that names no GPU has its own fault: programs are not blamed for it.
    complete = all(table.is_sound("gpus") for table in tables)
    return watched if complete else {gpu.index: frozenset() for gpu in machine.gpus}


def _read_program(
    table: ConfigTable,
    name: str,
    machine: Machine,
    watched: Mapping[int, frozenset[str]],
    faults: ConfigFaults,
) -> Program | None:
    try:
        validation.name(name)
    except InvalidValueError:
        faults.add(
            table.line, f"{table.title} has no program name", "name the section, for example [process-miner]"
        )
    wanted = table.need(
        "gpus", lambda given: _choose_gpus(given, machine).among(watched), "gpus=ALL or gpus=0,1"
    )
    directory = table.take("dir", machine.find_directory, machine.base)
    command = table.need("cmd", validation.split_command, "cmd=miner-run")
    if command is not None and table.is_sound("dir"):
        words = command
        command = table.judge("cmd", lambda: machine.find_program(words, directory, machine.search), command)
    log = table.take("log", lambda given: machine.find_log(given) if given else None, None)
    if wanted is None or command is None:
        return None
    return Program(
        name,
        command,
        wanted.indices,
        whole=wanted.kind == "all",
        directory=directory,
        log=log,
        environment=machine.visible_gpus(wanted),
    )


def _read_people(table: ConfigTable) -> PeopleSettings:
    return PeopleSettings(
        enabled=table.take("enabled", _parse_flag, default=True),
        whitelist=table.take("whitelist", lambda given: frozenset(validation.words(given)), frozenset()),
        idle_seconds=table.take(
            "idle_seconds",
            lambda given: validation.seconds(_parse_number(given)),
            DEFAULT_PEOPLE_IDLE_SECONDS,
        ),
    )


def _choose_gpus(given: str, machine: Machine) -> GpuChoice:
    if _COMMENT.search(given):
        raise _comment_error(given)
    return machine.choose_gpus(given)


def _parse_number(given: str) -> float:
    if _COMMENT.search(given):
        raise _comment_error(given)
    if _NUMBER.fullmatch(given) is None:
        raise InvalidValueError(
            f"{validation.format_value(given)} is not a number", "write a number, for example 10"
        )
    return float(given)


def _parse_flag(given: str) -> bool:
    if given.lower() not in _FLAGS:
        raise InvalidValueError(
            f"{validation.format_value(given)} is neither true nor false",
            f"use one of {', '.join(_FLAGS)}",
        )
    return _FLAGS[given.lower()]


def _comment_error(given: str) -> InvalidValueError:
    return InvalidValueError(
        f"{validation.format_value(given)} contains a comment", "put the comment on its own line"
    )


class _PendingValue(NamedTuple):
    """One value while its lines come."""

    line: int
    parts: list[str]


class _PendingSection(NamedTuple):
    """One section while its lines come."""

    name: str
    line: int
    values: dict[str, _PendingValue]


def read_sections(text: str, faults: ConfigFaults) -> dict[str, ConfigTable]:
    """Return the sections by name, in the order of the file, as Python's configparser reads them.

    Unlike configparser it knows the line of every key, and finds all faults instead of the first.
    """
    reader = _SectionParser(faults)
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        reader.take(number, line)
    return {section.name: _build_table(section, faults) for section in reader.sections.values()}


def _build_table(section: _PendingSection, faults: ConfigFaults) -> ConfigTable:
    entries = {
        key: ConfigEntry("\n".join(value.parts).rstrip(), value.line) for key, value in section.values.items()
    }
    return ConfigTable(format_title(section.name), section.line, entries, faults)


class _SectionParser:
    """Parser of sections, line by line."""

    def __init__(self, faults: ConfigFaults) -> None:
        self.sections: dict[str, _PendingSection] = {}
        self._faults = faults
        self._section: _PendingSection | None = None
        self._value: _PendingValue | None = None
        """The value that a line with a deeper indent continues."""
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
        self._section = _PendingSection(name, number, {})
        earlier = self.sections.setdefault(name, self._section)
        if earlier is not self._section:
            self._faults.add(
                number,
                f"duplicate section {format_title(name)}, first defined on line {earlier.line}",
                "rename one of the sections, or merge them",
            )

    def _add(self, number: int, said: str) -> None:
        option = _OPTION.match(said)
        if self._section is None:
            self._faults.add(
                number,
                f"{format_value(said)} is not in any section",
                "start with a section header such as [defaults]",
            )
        elif option is None or not option["key"]:
            self._faults.add(
                number,
                f"{format_value(said)} is neither a section header nor KEY=VALUE",
                "for example [gpu-all] or gpus=ALL; comments start with ; or #",
            )
        else:
            self._set(self._section, number, option["key"].lower(), option["value"])

    def _set(self, section: _PendingSection, number: int, key: str, value: str) -> None:
        self._value = _PendingValue(number, [value])
        earlier = section.values.setdefault(key, self._value)
        if earlier is not self._value:
            self._faults.add(
                number,
                f"{format_value(key)} is already set on line {earlier.line}",
                "remove one of the two lines",
            )
