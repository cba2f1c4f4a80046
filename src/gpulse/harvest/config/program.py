"""One [[program]] table: the programs it makes, one for all its GPUs or one for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gpulse.harvest.config import check, limits, values
from gpulse.harvest.config.check import Choice, Machine
from gpulse.harvest.config.faults import WrongError
from gpulse.harvest.config.hours import hours
from gpulse.harvest.config.limits import Cpus
from gpulse.harvest.config.table import Table
from gpulse.harvest.settings import (
    DEFAULT_BACKOFF_SECONDS,
    DEFAULT_GRACE_SECONDS,
    DEFAULT_LONGEST_BACKOFF_SECONDS,
    Hours,
    Program,
)

PROGRAM_KEYS = (
    "name",
    "command",
    "gpus",
    "dir",
    "log",
    "env",
    "user",
    "nice",
    "ionice",
    "cpus",
    "grace_seconds",
    "stop_signal",
    "restart",
    "backoff_seconds",
    "max_backoff_seconds",
    "hours",
)
_OURS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPULSE_HARVEST_RUN", "GPULSE_HARVEST_PROGRAM")
_INDEX = "{gpu}"


class _Plan(NamedTuple):
    """What a table says, before it is looked up for one GPU or all."""

    program: Program
    wanted: Choice
    log: str | None
    environment: Mapping[str, str]
    cpus: Cpus | None


def programs(
    table: Table, machine: Machine, watched: Mapping[int, frozenset[str]]
) -> list[tuple[Table, Program]]:
    """The programs of one table; none when something is wrong with it."""
    plan = _plan(table, machine, watched)
    if plan is None:
        return []
    made: list[tuple[Table, Program]] = []
    for position, variant in enumerate(_variants(plan)):
        program = _looked_up(table, variant, position, machine)
        if not table.is_sound():
            break
        made.append((table, program))
    return made


def _plan(table: Table, machine: Machine, watched: Mapping[int, frozenset[str]]) -> _Plan | None:
    name = table.need("name", values.name, 'name = "fold"')
    command = table.need("command", _command, 'command = "fold --gpu 0"')
    wanted = table.need(
        "gpus",
        lambda given: check.among(check.choice(given, machine.gpus, each=True), watched),
        'gpus = "all", "each", 0 or [0, 1]',
    )
    directory = table.take("dir", lambda given: check.directory(given, machine), machine.base)
    backoff = table.take("backoff_seconds", values.backoff_seconds, DEFAULT_BACKOFF_SECONDS)
    longest = table.take(
        "max_backoff_seconds",
        values.number(backoff, values.LONGEST_SECONDS),
        max(backoff, DEFAULT_LONGEST_BACKOFF_SECONDS),
    )
    program = Program(
        name or "",
        command or (),
        wanted.indices if wanted else (),
        directory=directory,
        user=table.take("user", lambda given: check.user(given, machine), None),
        nice=table.take("nice", limits.nice(root=machine.root), None),
        ionice=table.take("ionice", limits.ionice, None),
        grace_seconds=table.take("grace_seconds", values.grace_seconds, DEFAULT_GRACE_SECONDS),
        stop_signal=table.take("stop_signal", limits.stop_signal, Program._field_defaults["stop_signal"]),
        hours=table.take("hours", hours, Hours()),
        restart=table.take("restart", values.restart, "always"),
        backoff_seconds=backoff,
        longest_backoff_seconds=longest,
    )
    log = table.take("log", values.text, None)
    environment = table.take("env", _environment, {})
    cpus = table.take("cpus", lambda given: Cpus(given, machine.cpus), None)
    if wanted is None or not table.is_sound("name", "command"):
        return None
    return _Plan(program, wanted, log, environment, cpus)


def _variants(plan: _Plan) -> Iterator[_Plan]:
    """The plan itself, or one for each GPU."""
    if plan.wanted.kind != "each":
        yield plan
        return
    for index in plan.wanted.indices:

        def filled(text: str, index: int = index) -> str:
            return text.replace(_INDEX, str(index))

        program = plan.program._replace(
            name=f"{plan.program.name}-{index}",
            command=tuple(map(filled, plan.program.command)),
            gpus=(index,),
        )
        yield plan._replace(
            program=program,
            wanted=Choice((index,)),
            log=None if plan.log is None else filled(plan.log),
            environment={key: filled(value) for key, value in plan.environment.items()},
        )


def _looked_up(table: Table, plan: _Plan, position: int, machine: Machine) -> Program:
    """The program, its command and log checked against the machine."""
    program = plan.program
    command = program.command
    if table.is_sound("dir", "env"):
        search = plan.environment.get("PATH", machine.search)
        command = table.judge(
            "command", lambda: check.runnable(command, program.directory, search, machine), command
        )
    log = plan.log
    return program._replace(
        command=command,
        whole=plan.wanted.kind == "all",
        log=None if log is None else table.judge("log", lambda: check.log(log, machine), log),
        environment=(*plan.environment.items(), *check.visible(plan.wanted, machine.gpus)),
        cpus=plan.cpus.part(position) if plan.cpus else (),
    )


def _command(value: Any) -> tuple[str, ...]:
    return check.command(value) if isinstance(value, list) else check.split(value)


def _environment(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise WrongError(f"{values.shown(value)} is not a table", 'such as env = {OMP_NUM_THREADS = "4"}')
    return {_variable(key): _content(key, part) for key, part in value.items()}


def _variable(key: str) -> str:
    if key in _OURS:
        raise WrongError(f"harvest sets {key} itself", "the key gpus says which GPUs a program sees")
    if not key or "=" in key or "\0" in key:
        raise WrongError(f"{values.shown(key)} is not the name of a variable")
    return key


def _content(key: str, value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < values.LARGEST:
        return str(value)
    if not isinstance(value, str) or "\0" in value:
        raise WrongError(f"{values.shown(key)} is {values.shown(value)}, not a text", "write it in quotes")
    return value
