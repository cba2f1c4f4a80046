"""gpu_mon's configuration: what its sections and keys mean."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gpulse.harvest.config import check, ini, values
from gpulse.harvest.config.check import Choice, Machine
from gpulse.harvest.config.faults import Faults, WrongError
from gpulse.harvest.config.table import Table, suggestion
from gpulse.harvest.settings import (
    DEFAULT_INTERVAL_SECONDS,
    DEFAULT_PEOPLE_IDLE_SECONDS,
    Gpu,
    People,
    Program,
    Settings,
)

SECTIONS = ("defaults", "gpu-NAME", "process-NAME", "tty")
DEFAULTS_KEYS = ("interval_seconds", "cooldown_seconds")
GPU_KEYS = ("gpus", "ignore_programs")
PROCESS_KEYS = ("dir", "cmd", "gpus", "log")
TTY_KEYS = ("enabled", "whitelist", "idle_seconds")
DEFAULT_COOLDOWN_SECONDS = 0.0
"""gpu_mon starts a program again at the check that finds its GPUs idle again."""
_GPU = "gpu-"
_PROCESS = "process-"
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
_TOML = re.compile(r"\s*(?:\[\[.+\]\]|\[(?:harvest|idle|people)\])\s*(?:#.*)?")


def settings(text: str, path: str, machine: Machine, faults: Faults) -> Settings:
    """What a file of gpu_mon's asks for; what is wrong with it is noted."""
    if line := _line_of_toml(text):
        faults.add(line, "this is TOML in a file that is not called so", "give it a name that ends in .toml")
        faults.refuse()
    sections = ini.read(text, faults)
    _expect(sections, faults)
    gpus = _watched([table for name, table in sections.items() if name.startswith(_GPU)], machine.gpus)
    programs = [
        _program(table, name.removeprefix(_PROCESS), machine, gpus, faults)
        for name, table in sections.items()
        if name.startswith(_PROCESS)
    ]
    if not programs:
        faults.add(
            None, "there is no program in it", "a section such as [process-all] with dir, cmd and gpus"
        )
    nothing = Table("", None, {}, faults)
    defaults = sections.get("defaults", nothing)
    return Settings(
        path,
        gpus,
        tuple(program for program in programs if program is not None),
        interval_seconds=defaults.take(
            "interval_seconds",
            lambda given: values.interval_seconds(_number(given)),
            DEFAULT_INTERVAL_SECONDS,
        ),
        idle_seconds=0.0,  # gpu_mon starts a program at the check that finds its GPUs idle
        cooldown_seconds=defaults.take(
            "cooldown_seconds", lambda given: values.seconds(_number(given)), DEFAULT_COOLDOWN_SECONDS
        ),
        people=_people(sections["tty"]) if "tty" in sections else People(),
    )


def _line_of_toml(text: str) -> int | None:
    """Where something stands that only our TOML has."""
    return next((number for number, line in enumerate(text.split("\n"), 1) if _TOML.fullmatch(line)), None)


def _expect(sections: Mapping[str, Table], faults: Faults) -> None:
    for name, table in sections.items():
        if name.startswith(_GPU):
            table.expect(GPU_KEYS)
        elif name.startswith(_PROCESS):
            table.expect(PROCESS_KEYS)
        elif name == "defaults":
            table.expect(DEFAULTS_KEYS)
        elif name == "tty":
            table.expect(TTY_KEYS)
        else:
            faults.add(table.line, f"unknown section {table.title}", suggestion(name, SECTIONS))


def _watched(tables: Sequence[Table], gpus: Sequence[Gpu]) -> dict[int, frozenset[str]]:
    """The GPUs of all sections, with the programs that are ignored on each; all GPUs when there is no section."""
    watched: dict[int, frozenset[str]] = {} if tables else {gpu.index: frozenset() for gpu in gpus}
    for table in tables:
        wanted = table.need("gpus", lambda given: _choice(given, gpus), "gpus=ALL")
        ignored = table.take("ignore_programs", values.program_names, frozenset())
        for index in wanted.indices if wanted else ():
            watched[index] = watched.get(index, frozenset()) | ignored
    # A section that names no GPU has its own fault: programs are not blamed for it.
    complete = all(table.is_sound("gpus") for table in tables)
    return watched if complete else {gpu.index: frozenset() for gpu in gpus}


def _program(
    table: Table, name: str, machine: Machine, watched: Mapping[int, frozenset[str]], faults: Faults
) -> Program | None:
    try:
        values.name(name)
    except WrongError:
        faults.add(table.line, f"{table.title} does not name its program", "such as [process-miner]")
    wanted = table.need(
        "gpus", lambda given: check.among(_choice(given, machine.gpus), watched), "gpus=ALL or gpus=0,1"
    )
    directory = table.take("dir", lambda given: check.directory(given, machine), machine.base)
    command = table.need("cmd", check.split, "cmd=miner-run")
    if command is not None and table.is_sound("dir"):
        words = command
        command = table.judge(
            "cmd", lambda: check.runnable(words, directory, machine.search, machine), command
        )
    log = table.take("log", lambda given: check.log(given, machine) if given else None, None)
    if wanted is None or command is None:
        return None
    return Program(
        name,
        command,
        wanted.indices,
        whole=wanted.kind == "all",
        directory=directory,
        log=log,
        environment=check.visible(wanted, machine.gpus),
    )


def _people(table: Table) -> People:
    return People(
        enabled=table.take("enabled", _flag, default=True),
        whitelist=table.take("whitelist", lambda given: frozenset(values.words(given)), frozenset()),
        idle_seconds=table.take(
            "idle_seconds", lambda given: values.seconds(_number(given)), DEFAULT_PEOPLE_IDLE_SECONDS
        ),
    )


def _choice(given: str, gpus: Sequence[Gpu]) -> Choice:
    if _COMMENT.search(given):
        raise _commented(given)
    return check.choice(given, gpus)


def _number(given: str) -> float:
    if _COMMENT.search(given):
        raise _commented(given)
    if _NUMBER.fullmatch(given) is None:
        raise WrongError(f"{values.shown(given)} is not a number", "such as 10")
    return float(given)


def _flag(given: str) -> bool:
    if given.lower() not in _FLAGS:
        raise WrongError(f"{values.shown(given)} is neither true nor false", f"known: {', '.join(_FLAGS)}")
    return _FLAGS[given.lower()]


def _commented(given: str) -> WrongError:
    return WrongError(f"{values.shown(given)} has a comment in it", "a comment needs a line of its own")
