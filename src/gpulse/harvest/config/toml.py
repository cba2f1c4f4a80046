"""Read configurations in TOML, with the line number of every key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gpulse.harvest.config import validation
from gpulse.harvest.config.machine_lookup import CpuChoice, GpuChoice, Machine, find_users
from gpulse.harvest.config.validation import (
    ConfigEntry,
    ConfigFaults,
    ConfigTable,
    InvalidValueError,
    format_title,
    suggest,
)
from gpulse.harvest.settings import (
    DEFAULT_BACKOFF_SECONDS,
    DEFAULT_COOLDOWN_SECONDS,
    DEFAULT_GRACE_SECONDS,
    DEFAULT_IDLE_SECONDS,
    DEFAULT_IGNORED_PROGRAMS,
    DEFAULT_INTERVAL_SECONDS,
    DEFAULT_MAX_BACKOFF_SECONDS,
    DEFAULT_PEOPLE_IDLE_SECONDS,
    DEFAULT_QUIET_SECONDS,
    HarvestSettings,
    OpenHours,
    PeopleSettings,
    Program,
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
TABLES = {
    "harvest": HARVEST_KEYS,
    "idle": IDLE_KEYS,
    "people": PEOPLE_KEYS,
    "gpu": GPU_KEYS,
    "program": PROGRAM_KEYS,
}
_REPEATED_TABLES = ("gpu", "program")
_MAX_GPUS = 1024
_AT_LINE = re.compile(r" \(at line ([0-9]+), column [0-9]+\)$")
_AT_END = " (at end of document)"
_INI_HEADER = re.compile(r"^\s*\[(?:defaults|tty|gpu-[^\]]*|process-[^\]]*)\]", re.MULTILINE)
_RESERVED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "GPULSE_HARVEST_RUN",
    "GPULSE_HARVEST_PROGRAM",
)
_GPU_PLACEHOLDER = "{gpu}"
Path = tuple[str | int, ...]
"""From the top of the document: names of tables and keys, numbers in arrays of tables."""
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_NAME_PART = re.compile(r"""[ \t]*(?:([A-Za-z0-9_-]+)|"((?:[^"\\\n]|\\.)*)"|'([^'\n]*)')[ \t]*""")
_VALUE_PIECE = re.compile(
    r'"""(?:[^\\]|\\.)*?"""(?:"{0,2})'
    r"|'''.*?'''(?:'{0,2})"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|(?P<open>[\[{])|(?P<close>[\]}])|(?P<end>\n)"
    r"|[^\"'\#\[\]{}\n]+",
    re.DOTALL,
)


def read_settings(text: str, path: str, machine: Machine, faults: ConfigFaults) -> HarvestSettings:
    """Return the settings in a TOML text; everything that is wrong with it is added to the faults."""
    document = _parse(text, faults)
    tables = _read_tables(document, KeyLines(text), faults)
    harvest, idle, people = (tables[name][0] for name in ("harvest", "idle", "people"))
    ignored = idle.take("ignore_programs", validation.program_names, DEFAULT_IGNORED_PROGRAMS)
    gpus = _read_watched_gpus(tables["gpu"], ignored, machine)
    wanted = [program for table in tables["program"] for program in _read_programs(table, machine, gpus)]
    if not tables["program"]:
        faults.add(None, "no program is configured", "add a [[program]] table with name, command and gpus")
    max_gpus: int | None = harvest.take("max_gpus", validation.whole_number(1, _MAX_GPUS), None)
    _check_names(wanted, faults)
    _check_max_gpus(wanted, max_gpus, faults)
    return HarvestSettings(
        path,
        gpus,
        tuple(program for _, program in wanted),
        interval_seconds=harvest.take(
            "interval_seconds", validation.interval_seconds, DEFAULT_INTERVAL_SECONDS
        ),
        idle_seconds=idle.take("idle_seconds", validation.seconds, DEFAULT_IDLE_SECONDS),
        cooldown_seconds=idle.take("cooldown_seconds", validation.seconds, DEFAULT_COOLDOWN_SECONDS),
        quiet_seconds=idle.take("quiet_holder_seconds", validation.seconds, DEFAULT_QUIET_SECONDS),
        utilization_ratio=idle.take("max_utilization_percent", validation.ratio, None),
        memory_bytes=idle.take("max_memory", validation.size, None),
        max_gpus=max_gpus,
        hours=harvest.take("hours", validation.hours, OpenHours()),
        people=_read_people(people),
        ignore_users=idle.take("ignore_users", find_users, frozenset()),
        always_users=idle.take("always_users", find_users, frozenset()),
    )


def _parse(text: str, faults: ConfigFaults) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        place = _AT_LINE.search(said)
        at_end = text.rstrip().count("\n") + 1 if said.endswith(_AT_END) else None
        hint = 'put strings in quotes: key = "text"; start comments with #'
        if _INI_HEADER.search(text):
            hint = (
                "if this is a gpu_mon configuration, rename the file so that its name does not end in .toml"
            )
        reason = _AT_LINE.sub("", said).removesuffix(_AT_END)
        faults.add(int(place[1]) if place else at_end, f"invalid TOML: {reason}", hint)
        faults.refuse()
        return {}


def _read_tables(
    document: Mapping[str, Any], lines: KeyLines, faults: ConfigFaults
) -> dict[str, list[ConfigTable]]:
    """Return all tables by name; one that cannot be repeated is there exactly once, empty if missing."""
    found: dict[str, list[ConfigTable]] = {name: [] for name in TABLES}
    for name, value in document.items():
        if name not in TABLES:
            faults.add(
                lines.of(name),
                f"unknown table or key {validation.format_value(name)}",
                suggest(name, TABLES),
            )
        elif name in _REPEATED_TABLES:
            found[name] = _read_repeated(name, value, lines, faults)
        elif isinstance(value, dict):
            found[name] = [_build_table(format_title(name), value, (name,), lines, faults)]
        else:
            faults.add(lines.of(name), f"{name} is not a table", f"start the table with the line [{name}]")
    for name, tables in found.items():
        for table in tables:
            table.expect(TABLES[name])
    nothing = ConfigTable("", None, {}, faults)
    return {
        name: tables if tables or name in _REPEATED_TABLES else [nothing] for name, tables in found.items()
    }


def _read_repeated(name: str, value: Any, lines: KeyLines, faults: ConfigFaults) -> list[ConfigTable]:
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        faults.add(
            lines.of(name), f"[{name}] must be [[{name}]]", f"use double brackets: [[{name}]] can be repeated"
        )
        return [ConfigTable("", None, {}, ConfigFaults(""))]
    return [
        _build_table(f"[[{name}]]", part, (name, number), lines, faults) for number, part in enumerate(value)
    ]


def _build_table(
    title: str, value: Mapping[str, Any], path: tuple[str | int, ...], lines: KeyLines, faults: ConfigFaults
) -> ConfigTable:
    entries = {key: ConfigEntry(part, lines.of(*path, key)) for key, part in value.items()}
    return ConfigTable(title, lines.of(*path), entries, faults)


def _read_watched_gpus(
    tables: list[ConfigTable], ignored: frozenset[str], machine: Machine
) -> dict[int, frozenset[str]]:
    """Return the GPUs of all [[gpu]] tables, with the programs to ignore on each; all GPUs without a table."""
    everything = {gpu.index: ignored for gpu in machine.gpus}
    watched = {} if tables else everything
    for table in tables:
        wanted = table.take("gpus", machine.choose_gpus, machine.all_gpus())
        names = table.take("ignore_programs", validation.program_names, frozenset())
        for index in wanted.indices:
            watched[index] = watched.get(index, ignored) | names
    return watched


def _read_people(table: ConfigTable) -> PeopleSettings:
    return PeopleSettings(
        enabled=table.take("enabled", validation.flag, default=table.line is not None),
        whitelist=table.take("whitelist", find_users, frozenset()),
        idle_seconds=table.take("idle_seconds", validation.seconds, DEFAULT_PEOPLE_IDLE_SECONDS),
    )


def _check_names(wanted: list[tuple[ConfigTable, Program]], faults: ConfigFaults) -> None:
    seen: dict[str, ConfigTable] = {}
    for table, program in wanted:
        earlier = seen.setdefault(program.name, table)
        if earlier is not table:
            faults.add(
                table.line_of("name"),
                f"duplicate program {validation.format_value(program.name)}, first defined on line {earlier.line}",
                "give one of the programs another name",
            )


def _check_max_gpus(
    wanted: list[tuple[ConfigTable, Program]], most: int | None, faults: ConfigFaults
) -> None:
    for table, program in wanted:
        if most is not None and len(program.gpus) > most:
            faults.add(
                table.line_of("gpus"),
                f"{validation.format_value(program.name)} needs {len(program.gpus)} GPUs, but max_gpus is {most}, "
                "so it could never start",
                "use fewer GPUs, or raise max_gpus",
            )


class _ProgramTable(NamedTuple):
    """A [[program]] table before it becomes one program, or one per GPU."""

    program: Program
    wanted: GpuChoice
    log: str | None
    environment: Mapping[str, str]
    cpus: CpuChoice | None


def _read_programs(
    table: ConfigTable, machine: Machine, watched: Mapping[int, frozenset[str]]
) -> list[tuple[ConfigTable, Program]]:
    """Return the programs of one table; none when it has faults."""
    plan = _read_program_table(table, machine, watched)
    if plan is None:
        return []
    made: list[tuple[ConfigTable, Program]] = []
    for position, variant in enumerate(_split_by_gpu(plan)):
        program = _resolve_program(table, variant, position, machine)
        if not table.is_sound():
            break
        made.append((table, program))
    return made


def _read_program_table(
    table: ConfigTable, machine: Machine, watched: Mapping[int, frozenset[str]]
) -> _ProgramTable | None:
    name = table.need("name", validation.name, 'name = "fold"')
    command = table.need("command", _convert_command, 'command = "fold --gpu 0"')
    wanted = table.need(
        "gpus",
        lambda given: machine.choose_gpus(given, each=True).among(watched),
        'gpus = "all", "each", 0 or [0, 1]',
    )
    directory = table.take("dir", machine.find_directory, machine.base)
    backoff = table.take("backoff_seconds", validation.backoff_seconds, DEFAULT_BACKOFF_SECONDS)
    longest = table.take(
        "max_backoff_seconds",
        validation.number(backoff, validation.MAX_SECONDS),
        max(backoff, DEFAULT_MAX_BACKOFF_SECONDS),
    )
    program = Program(
        name or "",
        command or (),
        wanted.indices if wanted else (),
        directory=directory,
        user=table.take("user", machine.find_user, None),
        nice=table.take("nice", validation.nice(root=machine.root), None),
        ionice=table.take("ionice", validation.ionice, None),
        grace_seconds=table.take("grace_seconds", validation.grace_seconds, DEFAULT_GRACE_SECONDS),
        stop_signal=table.take("stop_signal", validation.stop_signal, Program._field_defaults["stop_signal"]),
        hours=table.take("hours", validation.hours, OpenHours()),
        restart=table.take("restart", validation.restart, "always"),
        backoff_seconds=backoff,
        max_backoff_seconds=longest,
    )
    log = table.take("log", validation.text, None)
    environment = table.take("env", _convert_environment, {})
    cpus = table.take("cpus", machine.choose_cpus, None)
    if wanted is None or not table.is_sound("name", "command"):
        return None
    return _ProgramTable(program, wanted, log, environment, cpus)


def _split_by_gpu(plan: _ProgramTable) -> Iterator[_ProgramTable]:
    """Yield the table itself, or one copy per GPU for gpus = "each"."""
    if plan.wanted.kind != "each":
        yield plan
        return
    for index in plan.wanted.indices:

        def filled(text: str, index: int = index) -> str:
            return text.replace(_GPU_PLACEHOLDER, str(index))

        program = plan.program._replace(
            name=f"{plan.program.name}-{index}",
            command=tuple(map(filled, plan.program.command)),
            gpus=(index,),
        )
        yield plan._replace(
            program=program,
            wanted=GpuChoice((index,)),
            log=None if plan.log is None else filled(plan.log),
            environment={key: filled(value) for key, value in plan.environment.items()},
        )


def _resolve_program(table: ConfigTable, plan: _ProgramTable, position: int, machine: Machine) -> Program:
    """Return the program with its command and log checked against the machine."""
    program = plan.program
    command = program.command
    if table.is_sound("dir", "env"):
        search = plan.environment.get("PATH", machine.search)
        command = table.judge(
            "command", lambda: machine.find_program(command, program.directory, search), command
        )
    log = plan.log
    return program._replace(
        command=command,
        whole=plan.wanted.kind == "all",
        log=None if log is None else table.judge("log", lambda: machine.find_log(log), log),
        environment=(*plan.environment.items(), *machine.visible_gpus(plan.wanted)),
        cpus=plan.cpus.part(position) if plan.cpus else (),
    )


def _convert_command(value: Any) -> tuple[str, ...]:
    return validation.command_list(value) if isinstance(value, list) else validation.split_command(value)


def _convert_environment(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise InvalidValueError(
            f"{validation.format_value(value)} is not a table",
            'write a table such as env = {OMP_NUM_THREADS = "4"}',
        )
    return {_check_variable_name(key): _check_variable_value(key, part) for key, part in value.items()}


def _check_variable_name(key: str) -> str:
    if key in _RESERVED_VARIABLES:
        raise InvalidValueError(
            f"harvest sets {key} itself",
            "remove this variable; the gpus key selects the GPUs that a program sees",
        )
    if not key or "=" in key or "\0" in key:
        raise InvalidValueError(f"{validation.format_value(key)} is not a valid variable name")
    return key


def _check_variable_value(key: str, value: object) -> str:
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < validation.MAX_WHOLE_NUMBER
    ):
        return str(value)
    if not isinstance(value, str) or "\0" in value:
        raise InvalidValueError(
            f"{validation.format_value(key)} is {validation.format_value(value)}, not a string",
            "put the value in quotes",
        )
    return value


class KeyLines:
    """Line numbers of the tables and keys in a document that `tomllib` accepts; `tomllib` itself does not tell them."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._lines: dict[Path, int] = {(): 1}
        self._counts: dict[Path, int] = {}
        self._counted_to = 0
        self._line = 1
        self._walk()

    def of(self, *path: str | int) -> int:
        """Return the line of a table or key, or of the nearest table around it."""
        while path not in self._lines:
            path = path[:-1]
        return self._lines[path]

    def _walk(self) -> None:
        position, table = 0, Path()
        while True:
            position = _match_end(_BLANK, self._text, position)
            if position >= len(self._text):
                return
            line = self._line_at(position)
            brackets = 2 if self._text.startswith("[[", position) else int(self._text[position] == "[")
            names, after = _parse_dotted_name(self._text, position + brackets)
            if not names:
                return
            if brackets:
                table = self._enter(names, line, again=brackets == 2)
                position = after + brackets
            else:
                for length in range(1, len(names) + 1):
                    self._lines.setdefault(table + tuple(names[:length]), line)
                position = _skip_value(self._text, after)

    def _line_at(self, position: int) -> int:
        self._line += self._text.count("\n", self._counted_to, position)
        self._counted_to = position
        return self._line

    def _enter(self, names: list[str], line: int, *, again: bool) -> Path:
        """Return the path of the table that a header begins; `again`: the next one of an array of tables."""
        path = Path()
        for number, name in enumerate(names, 1):
            path = (*path, name)
            self._lines.setdefault(path, line)
            if again and number == len(names):
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:
                path = (*path, self._counts[path] - 1)
                self._lines.setdefault(path, line)
        return path


def _parse_dotted_name(text: str, position: int) -> tuple[list[str], int]:
    """Return the parts of a dotted name, and the position of its end."""
    found: list[str] = []
    while match := _NAME_PART.match(text, position):
        bare, quoted, literal = match.groups()
        found.append(bare or literal or _unescape(quoted or ""))
        position = match.end()
        if not text.startswith(".", position):
            break
        position += 1
    return found, position


def _unescape(quoted: str) -> str:
    return str(tomllib.loads(f'name = "{quoted}"')["name"])


def _skip_value(text: str, position: int) -> int:
    depth = 0
    while match := _VALUE_PIECE.match(text, position):
        position = match.end()
        depth += (match["open"] is not None) - (match["close"] is not None)
        if match["end"] is not None and depth <= 0:
            break
    return position


def _match_end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position
