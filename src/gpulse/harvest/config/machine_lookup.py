"""Look up what a configuration names on this machine: GPUs, CPUs, directories, programs and users."""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from gpulse.harvest.config.validation import InvalidValueError, format_value, text, whole_number, words
from gpulse.harvest.settings import HarvestableGpu

_GPU_RANGE = re.compile(r"([0-9]{1,4})-([0-9]{1,4})", re.ASCII)
_GPU_INDEX = re.compile(r"[0-9]{1,4}", re.ASCII)
_CPU_RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", re.ASCII)
_MAX_CPU_LIST_LENGTH = 1000
_EXECUTABLE = 0o111


class GpuChoice(NamedTuple):
    """GPUs as a program or a section wants them."""

    indices: tuple[int, ...]
    kind: Literal["all", "each", "some"] = "some"

    def among(self, watched: Mapping[int, object]) -> GpuChoice:
        """Return a program's GPUs, all of which must be watched; "all" and "each" mean the watched ones."""
        if self.kind != "some":
            return self._replace(indices=tuple(sorted(watched)))
        for index in self.indices:
            if index not in watched:
                raise InvalidValueError(
                    f"GPU {index} is not watched",
                    f"use one of the watched GPUs ({', '.join(map(str, sorted(watched)))}), or watch this GPU too",
                )
        return self


class Machine(NamedTuple):
    """The parts of this machine that a configuration can name."""

    gpus: Sequence[HarvestableGpu]
    cpus: Collection[int]
    root: bool
    search: str
    """Search path for programs without a directory, in the format of PATH."""
    home: str | None
    """The directory of `~`; None: the user's home directory."""
    base: str
    """What relative paths are relative to."""

    def all_gpus(self) -> GpuChoice:
        """Return the choice of all GPUs."""
        return GpuChoice(tuple(gpu.index for gpu in self.gpus), "all")

    def choose_gpus(self, value: object, *, each: bool = False) -> GpuChoice:
        """Return the GPUs that are meant: all, each (where that is allowed), or some by index, range and UUID."""
        given = [value] if isinstance(value, int) else value if isinstance(value, list) else words(value)
        if len(given) == 1 and isinstance(given[0], str):
            word = given[0].strip().lower()
            if word == "all":
                return self.all_gpus()
            if word == "each" and each:
                return self.all_gpus()._replace(kind="each")
        found = [index for part in given for index in _find_gpus(part, self.gpus)]
        if not found:
            raise InvalidValueError("the list of GPUs is empty", _describe_gpus(self.gpus))
        for index in found:
            if found.count(index) > 1:
                raise InvalidValueError(f"GPU {index} is listed twice")
        return GpuChoice(tuple(found))

    def visible_gpus(self, wanted: GpuChoice) -> tuple[tuple[str, str], ...]:
        """Return the environment variables that let a program see its GPUs and no other."""
        if wanted.kind == "all" and len(wanted.indices) == len(self.gpus):
            return ()
        return (
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
            ("CUDA_VISIBLE_DEVICES", ",".join(map(str, wanted.indices))),
        )

    def choose_cpus(self, value: object) -> CpuChoice:
        """Return the CPUs that are meant: a number of them, or which (`"0-7,16"`, a list)."""
        available = sorted(self.cpus)
        if isinstance(value, int) and not isinstance(value, bool):
            if not 1 <= value <= len(available):
                raise InvalidValueError(
                    f"the number of CPUs must be between 1 and {len(available)}, not {format_value(value)}",
                    'use a smaller number, or select CPUs: "0-7"',
                )
            return CpuChoice(tuple(available), value)
        wanted = sorted(set(_parse_cpu_numbers(value)))
        missing = [cpu for cpu in wanted if cpu not in self.cpus]
        if missing:
            known = f"{available[0]} to {available[-1]}" if available else "none"
            raise InvalidValueError(
                f"CPU {format_value(missing[0])} is not available", f"use only available CPUs: {known}"
            )
        return CpuChoice(tuple(wanted))

    def find_program(self, command: tuple[str, ...], directory: str, search: str) -> tuple[str, ...]:
        """Return a command whose program exists and may be run, as seen from a directory."""
        program = self._expand(command[0]) if command[0].startswith("~") else command[0]
        places = [""] if "/" in program else search.split(":")
        tried = [os.path.join(directory, place, program) for place in places]
        there = [path for path in tried if _read_mode(path) is not None]
        files = [path for path in there if stat.S_ISREG(_read_mode(path) or 0)]
        if any((_read_mode(path) or 0) & _EXECUTABLE and os.access(path, os.X_OK) for path in files):
            return (program, *command[1:])
        if files:
            raise InvalidValueError(
                f"{format_value(files[0])} is not executable",
                "run chmod +x on the file, or start the command with its interpreter",
            )
        if there:
            raise InvalidValueError(
                f"{format_value(there[0])} is not a program file", "use the path of an executable file"
            )
        where = f"in {format_value(directory)}" if "/" in program else f"in {format_value(search)}"
        raise InvalidValueError(
            f"there is no program {format_value(program)} {where}", "use the program's full path"
        )

    def find_directory(self, value: object) -> str:
        """Return the path of a directory that exists and may be entered."""
        path = self._absolute(value)
        mode = _read_mode(path)
        if mode is None:
            raise InvalidValueError(
                f"there is no directory {format_value(path)}",
                "create the directory with mkdir, or choose another one",
            )
        if not stat.S_ISDIR(mode):
            raise InvalidValueError(f"{format_value(path)} is not a directory")
        if not os.access(path, os.X_OK):
            raise InvalidValueError(
                f"{format_value(path)} cannot be entered: permission denied", "choose another directory"
            )
        return path

    def find_log(self, value: object) -> str:
        """Return the path of a file that can be appended to."""
        path = self._absolute(value)
        parent = os.path.dirname(path)
        mode = _read_mode(path)
        if mode is not None and stat.S_ISDIR(mode):
            raise InvalidValueError(f"{format_value(path)} is a directory", "specify a file")
        if not stat.S_ISDIR(_read_mode(parent) or 0):
            raise InvalidValueError(
                f"there is no directory {format_value(parent)}",
                "create the directory with mkdir, or choose another one",
            )
        if not os.access(path if mode is not None else parent, os.W_OK):
            raise InvalidValueError(
                f"{format_value(path)} cannot be written: permission denied", "choose another file"
            )
        return path

    def find_user(self, value: object) -> str:
        """Return the name of a user that root can run programs as."""
        given = text(value)
        if not self.root:
            raise InvalidValueError(
                "only root can run programs as another user", "remove this key, or run harvest as root"
            )
        if not _user_exists(given):
            raise InvalidValueError(f"there is no user {format_value(given)}")
        return given

    def _absolute(self, value: object) -> str:
        path = text(value)
        if path.startswith("~"):
            path = self._expand(path)
        return os.path.normpath(os.path.join(self.base, path))

    def _expand(self, path: str) -> str:
        name, slash, rest = path[1:].partition("/")
        try:
            known = pwd.getpwnam(name).pw_dir if name else self.home or pwd.getpwuid(os.getuid()).pw_dir
        except (KeyError, ValueError) as error:
            raise InvalidValueError(
                f"{format_value('~' + name)}: unknown home directory", "use the full path"
            ) from error
        return f"{known}{slash}{rest}"


class CpuChoice(NamedTuple):
    """CPUs as a program wants them."""

    cpus: tuple[int, ...]
    """In order: those that are named, or all that there are."""
    size: int | None = None
    """How many of them each program gets; None: all of them."""

    def part(self, position: int) -> tuple[int, ...]:
        """Return the CPUs of one of several programs; a count gives each program others, from the last CPU down."""
        if self.size is None:
            return self.cpus
        first = position * self.size
        return tuple(sorted(self.cpus[-1 - (first + step) % len(self.cpus)] for step in range(self.size)))


def find_users(value: object) -> frozenset[str]:
    """Return users of this machine; a number is a user without a name."""
    found = words(value)
    for given in found:
        if not given.isdecimal() and not _user_exists(given):
            raise InvalidValueError(
                f"there is no user {format_value(given)}", "use a name as printed by `id -un`, or a UID"
            )
    return frozenset(found)


def _find_gpus(part: object, gpus: Sequence[HarvestableGpu]) -> Iterable[int]:
    written = part if isinstance(part, str) else format_value(part)
    if isinstance(part, int) and not isinstance(part, bool):
        return [_find_gpu_by_index(part, gpus)]
    if not isinstance(part, str):
        raise InvalidValueError(f"{written} is not a GPU", _describe_gpus(gpus))
    if _GPU_INDEX.fullmatch(written):
        return [_find_gpu_by_index(int(written), gpus)]
    if match := _GPU_RANGE.fullmatch(written):
        first, last = int(match[1]), int(match[2])
        return [_find_gpu_by_index(index, gpus) for index in (range(first, last + 1) or (first, last))]
    return [_find_gpu_by_uuid(written, gpus)]


def _find_gpu_by_index(index: int, gpus: Sequence[HarvestableGpu]) -> int:
    if not any(gpu.index == index for gpu in gpus):
        raise InvalidValueError(f"there is no GPU {format_value(index)}", _describe_gpus(gpus))
    return index


def _find_gpu_by_uuid(given: str, gpus: Sequence[HarvestableGpu]) -> int:
    if not given.upper().startswith("GPU-"):
        raise InvalidValueError(f"{format_value(given)} is not a GPU", _describe_gpus(gpus))
    matching = [gpu.index for gpu in gpus if gpu.uuid.lower().startswith(given.lower())]
    if len(matching) > 1:
        raise InvalidValueError(
            f"{format_value(given)} matches GPUs {' and '.join(map(str, matching))}",
            "use more characters of the UUID",
        )
    if not matching:
        raise InvalidValueError(f"there is no GPU {format_value(given)}", _describe_gpus(gpus))
    return matching[0]


def _describe_gpus(gpus: Sequence[HarvestableGpu]) -> str:
    return (
        f"use one of {', '.join(str(gpu.index) for gpu in gpus)}, or all"
        if gpus
        else "run harvest on a machine with GPUs; this machine has none"
    )


def _parse_cpu_numbers(value: object) -> list[int]:
    if isinstance(value, list):
        return [whole_number(0, 9_999)(part) for part in value] or _invalid_cpus_error(value)
    if not isinstance(value, str) or len(value) > _MAX_CPU_LIST_LENGTH:
        return _invalid_cpus_error(value)
    found: list[int] = []
    for part in value.split(","):
        match = _CPU_RANGE.fullmatch(part.strip())
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        found += numbers or _invalid_cpus_error(value)
    return found


def _invalid_cpus_error(value: object) -> list[int]:
    raise InvalidValueError(
        f"{format_value(value)} is not a valid CPU selection",
        'use a list such as "0-7,16", or a number such as 4 for any four CPUs',
    )


def _read_mode(path: str) -> int | None:
    try:
        return os.stat(path).st_mode
    except (OSError, ValueError):
        return None


def _user_exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except (KeyError, ValueError):
        return False
    return True
