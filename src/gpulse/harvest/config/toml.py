"""Our own configuration, in TOML: what its tables and keys mean."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from gpulse.harvest.config import check, values
from gpulse.harvest.config.check import Machine
from gpulse.harvest.config.faults import Faults
from gpulse.harvest.config.hours import hours
from gpulse.harvest.config.locate import Lines
from gpulse.harvest.config.program import PROGRAM_KEYS, programs
from gpulse.harvest.config.table import Entry, Table, suggestion, titled
from gpulse.harvest.settings import (
    DEFAULT_COOLDOWN_SECONDS,
    DEFAULT_IDLE_SECONDS,
    DEFAULT_IGNORED,
    DEFAULT_INTERVAL_SECONDS,
    DEFAULT_PEOPLE_IDLE_SECONDS,
    DEFAULT_QUIET_SECONDS,
    Hours,
    People,
    Program,
    Settings,
)

HARVEST_KEYS = ("interval_seconds", "max_gpus", "hours")
IDLE_KEYS = (
    "idle_seconds",
    "cooldown_seconds",
    "quiet_holder_seconds",
    "max_utilization_percent",
    "max_memory",
    "ignore_programs",
    "ignore_users",
    "always_users",
)
PEOPLE_KEYS = ("enabled", "whitelist", "idle_seconds")
GPU_KEYS = ("gpus", "ignore_programs")
TABLES = {
    "harvest": HARVEST_KEYS,
    "idle": IDLE_KEYS,
    "people": PEOPLE_KEYS,
    "gpu": GPU_KEYS,
    "program": PROGRAM_KEYS,
}
_REPEATED = ("gpu", "program")
_MOST_GPUS = 1024
_AT_LINE = re.compile(r" \(at line ([0-9]+), column [0-9]+\)$")
_AT_END = " (at end of document)"
_INI = re.compile(r"^\s*\[(?:defaults|tty|gpu-[^\]]*|process-[^\]]*)\]", re.MULTILINE)


def settings(text: str, path: str, machine: Machine, faults: Faults) -> Settings:
    """What a TOML file asks for; what is wrong with it is noted."""
    document = _parsed(text, faults)
    tables = _tables(document, Lines(text), faults)
    harvest, idle, people = (tables[name][0] for name in ("harvest", "idle", "people"))
    ignored = idle.take("ignore_programs", values.program_names, DEFAULT_IGNORED)
    gpus = _watched(tables["gpu"], ignored, machine)
    wanted = [program for table in tables["program"] for program in programs(table, machine, gpus)]
    if not tables["program"]:
        faults.add(None, "there is no program in it", "a table [[program]] with name, command and gpus")
    most_gpus: int | None = harvest.take("max_gpus", values.whole_number(1, _MOST_GPUS), None)
    _check_names(wanted, faults)
    _check_most(wanted, most_gpus, faults)
    return Settings(
        path,
        gpus,
        tuple(program for _, program in wanted),
        interval_seconds=harvest.take("interval_seconds", values.interval_seconds, DEFAULT_INTERVAL_SECONDS),
        idle_seconds=idle.take("idle_seconds", values.seconds, DEFAULT_IDLE_SECONDS),
        cooldown_seconds=idle.take("cooldown_seconds", values.seconds, DEFAULT_COOLDOWN_SECONDS),
        quiet_seconds=idle.take("quiet_holder_seconds", values.seconds, DEFAULT_QUIET_SECONDS),
        utilization_ratio=idle.take("max_utilization_percent", values.ratio, None),
        memory_bytes=idle.take("max_memory", values.size, None),
        most_gpus=most_gpus,
        hours=harvest.take("hours", hours, Hours()),
        people=_people(people),
        ignore_users=idle.take("ignore_users", check.users, frozenset()),
        always_users=idle.take("always_users", check.users, frozenset()),
    )


def _parsed(text: str, faults: Faults) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        place = _AT_LINE.search(said)
        at_end = text.rstrip().count("\n") + 1 if said.endswith(_AT_END) else None
        hint = 'a text needs quotes: key = "text"; comments begin with #'
        if _INI.search(text):
            hint = "is it gpu_mon's? then its name must not end in .toml"
        reason = _AT_LINE.sub("", said).removesuffix(_AT_END)
        faults.add(int(place[1]) if place else at_end, f"this is not TOML: {reason}", hint)
        faults.refuse()
        return {}


def _tables(document: Mapping[str, Any], lines: Lines, faults: Faults) -> dict[str, list[Table]]:
    """All tables by name; one that may not be repeated is there exactly once, if need be empty."""
    found: dict[str, list[Table]] = {name: [] for name in TABLES}
    for name, value in document.items():
        if name not in TABLES:
            faults.add(lines.of(name), f"unknown table or key {values.shown(name)}", suggestion(name, TABLES))
        elif name in _REPEATED:
            found[name] = _repeated(name, value, lines, faults)
        elif isinstance(value, dict):
            found[name] = [_table(titled(name), value, (name,), lines, faults)]
        else:
            faults.add(lines.of(name), f"{name} is not a table", f"begin it with a line [{name}]")
    for name, tables in found.items():
        for table in tables:
            table.expect(TABLES[name])
    nothing = Table("", None, {}, faults)
    return {name: tables if tables or name in _REPEATED else [nothing] for name, tables in found.items()}


def _repeated(name: str, value: Any, lines: Lines, faults: Faults) -> list[Table]:
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        faults.add(
            lines.of(name), f"[{name}] is not [[{name}]]", f"two brackets: there may be several [[{name}]]"
        )
        return [Table("", None, {}, Faults(""))]
    return [_table(f"[[{name}]]", part, (name, number), lines, faults) for number, part in enumerate(value)]


def _table(
    title: str, value: Mapping[str, Any], path: tuple[str | int, ...], lines: Lines, faults: Faults
) -> Table:
    entries = {key: Entry(part, lines.of(*path, key)) for key, part in value.items()}
    return Table(title, lines.of(*path), entries, faults)


def _watched(tables: list[Table], ignored: frozenset[str], machine: Machine) -> dict[int, frozenset[str]]:
    """The GPUs of all [[gpu]] tables, with the programs that are ignored on each; all GPUs without a table."""
    everything = {gpu.index: ignored for gpu in machine.gpus}
    watched = {} if tables else everything
    for table in tables:
        wanted = table.take(
            "gpus", lambda given: check.choice(given, machine.gpus), check.every(machine.gpus)
        )
        names = table.take("ignore_programs", values.program_names, frozenset())
        for index in wanted.indices:
            watched[index] = watched.get(index, ignored) | names
    return watched


def _people(table: Table) -> People:
    return People(
        enabled=table.take("enabled", values.flag, default=table.line is not None),
        whitelist=table.take("whitelist", check.users, frozenset()),
        idle_seconds=table.take("idle_seconds", values.seconds, DEFAULT_PEOPLE_IDLE_SECONDS),
    )


def _check_names(wanted: list[tuple[Table, Program]], faults: Faults) -> None:
    seen: dict[str, Table] = {}
    for table, program in wanted:
        earlier = seen.setdefault(program.name, table)
        if earlier is not table:
            faults.add(
                table.line_of("name"),
                f"there is a program {values.shown(program.name)} already, at line {earlier.line}",
                "give one of them another name",
            )


def _check_most(wanted: list[tuple[Table, Program]], most: int | None, faults: Faults) -> None:
    for table, program in wanted:
        if most is not None and len(program.gpus) > most:
            faults.add(
                table.line_of("gpus"),
                f"{values.shown(program.name)} wants {len(program.gpus)} GPUs and max_gpus is {most}: "
                "it would never start",
                "fewer GPUs, or a larger max_gpus",
            )
