"""What a configuration names, looked up on the machine: GPUs, directories, programs, users."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from gpulse.harvest.config.faults import WrongError
from gpulse.harvest.config.values import shown, text, words
from gpulse.harvest.settings import Gpu

_RANGE = re.compile(r"([0-9]{1,4})-([0-9]{1,4})", re.ASCII)
_INDEX = re.compile(r"[0-9]{1,4}", re.ASCII)
_PERMITTED = 0o111


class Choice(NamedTuple):
    """GPUs as a program or a section wants them."""

    indices: tuple[int, ...]
    kind: Literal["all", "each", "some"] = "some"


class Machine(NamedTuple):
    """What a configuration is checked against."""

    gpus: Sequence[Gpu]
    cpus: Collection[int]
    root: bool
    search: str
    """Where programs without a directory are looked for, as PATH has it."""
    home: str | None
    """What `~` is; None: as the list of users says."""
    base: str
    """What relative paths are relative to."""


def choice(value: object, gpus: Sequence[Gpu], *, each: bool = False) -> Choice:
    """The GPUs that are meant: all, each, or some by index, range and UUID."""
    given = [value] if isinstance(value, int) else value if isinstance(value, list) else words(value)
    if len(given) == 1 and isinstance(given[0], str):
        word = given[0].strip().lower()
        if word == "all":
            return every(gpus)
        if word == "each" and each:
            return every(gpus)._replace(kind="each")
    found = [index for part in given for index in _meant(part, gpus)]
    if not found:
        raise WrongError("it names no GPU", _known(gpus))
    for index in found:
        if found.count(index) > 1:
            raise WrongError(f"GPU {index} is named twice")
    return Choice(tuple(found))


def every(gpus: Sequence[Gpu]) -> Choice:
    """All GPUs."""
    return Choice(tuple(gpu.index for gpu in gpus), "all")


def among(wanted: Choice, watched: Mapping[int, object]) -> Choice:
    """A program's GPUs, all of which must be watched; all of them and each of them mean the watched ones."""
    if wanted.kind != "some":
        return wanted._replace(indices=tuple(sorted(watched)))
    for index in wanted.indices:
        if index not in watched:
            raise WrongError(
                f"GPU {index} is not watched",
                f"watched are: {', '.join(map(str, sorted(watched)))}; name it where they are listed",
            )
    return wanted


def _meant(part: object, gpus: Sequence[Gpu]) -> Iterable[int]:
    written = part if isinstance(part, str) else shown(part)
    if isinstance(part, int) and not isinstance(part, bool):
        return [_index(part, gpus)]
    if not isinstance(part, str):
        raise WrongError(f"{written} is no GPU", _known(gpus))
    if _INDEX.fullmatch(written):
        return [_index(int(written), gpus)]
    if match := _RANGE.fullmatch(written):
        first, last = int(match[1]), int(match[2])
        return [_index(index, gpus) for index in (range(first, last + 1) or (first, last))]
    return [_of_uuid(written, gpus)]


def _index(index: int, gpus: Sequence[Gpu]) -> int:
    if not any(gpu.index == index for gpu in gpus):
        raise WrongError(f"there is no GPU {shown(index)}", _known(gpus))
    return index


def _of_uuid(given: str, gpus: Sequence[Gpu]) -> int:
    if not given.upper().startswith("GPU-"):
        raise WrongError(f"{shown(given)} is no GPU", _known(gpus))
    matching = [gpu.index for gpu in gpus if gpu.uuid.lower().startswith(given.lower())]
    if len(matching) > 1:
        raise WrongError(
            f"{shown(given)} may be GPU {' or '.join(map(str, matching))}", "more characters of the UUID"
        )
    if not matching:
        raise WrongError(f"there is no GPU {shown(given)}", _known(gpus))
    return matching[0]


def _known(gpus: Sequence[Gpu]) -> str:
    return f"there are: {', '.join(str(gpu.index) for gpu in gpus) or 'none'}; or all of them: all"


def visible(wanted: Choice, gpus: Sequence[Gpu]) -> tuple[tuple[str, str], ...]:
    """The variables that let a program see its GPUs and no other."""
    if wanted.kind == "all" and len(wanted.indices) == len(gpus):
        return ()
    return (
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        ("CUDA_VISIBLE_DEVICES", ",".join(map(str, wanted.indices))),
    )


def split(value: object) -> tuple[str, ...]:
    """A command as a shell would split it."""
    if not isinstance(value, str):
        raise WrongError(f"{shown(value)} is not a command", "a text, or a list of texts")
    try:
        return command(shlex.split(value))
    except ValueError as error:
        raise WrongError(
            f"the quotes in {shown(value)} are not balanced",
            "the command is split as a shell would; a quote of its own is written \\'",
        ) from error


def command(given: Sequence[object]) -> tuple[str, ...]:
    """A command as a list."""
    for part in given:
        if not isinstance(part, str):
            raise WrongError(f"{shown(part)} is not a text", "write each argument in quotes")
        if "\0" in part:
            raise WrongError(f"{shown(part)} has a zero in it")
    found = tuple(map(str, given))
    if not found or not found[0].strip():
        raise WrongError("the command is empty", "the program and its arguments")
    return found


def runnable(given: tuple[str, ...], directory: str, search: str, machine: Machine) -> tuple[str, ...]:
    """A command whose program is there, seen from its directory."""
    program = _expanded(given[0], machine.home) if given[0].startswith("~") else given[0]
    places = [""] if "/" in program else search.split(":")
    tried = [os.path.join(directory, place, program) for place in places]
    there = [path for path in tried if _mode(path) is not None]
    files = [path for path in there if stat.S_ISREG(_mode(path) or 0)]
    if any((_mode(path) or 0) & _PERMITTED and os.access(path, os.X_OK) for path in files):
        return (program, *given[1:])
    if files:
        raise WrongError(f"{shown(files[0])} is not executable", "chmod +x, or name what runs it")
    if there:
        raise WrongError(f"{shown(there[0])} is not a program")
    where = f"in {shown(directory)}" if "/" in program else f"in {shown(search)}"
    raise WrongError(f"there is no program {shown(program)} {where}", "the whole path of the program")


def _mode(path: str) -> int | None:
    try:
        return os.stat(path).st_mode
    except (OSError, ValueError):
        return None


def directory(value: object, machine: Machine) -> str:
    """A directory that is there."""
    path = _absolute(value, machine)
    mode = _mode(path)
    if mode is None:
        raise WrongError(f"there is no directory {shown(path)}", "mkdir, or name another one")
    if not stat.S_ISDIR(mode):
        raise WrongError(f"{shown(path)} is not a directory")
    if not os.access(path, os.X_OK):
        raise WrongError(f"{shown(path)} may not be entered", "name another one")
    return path


def log(value: object, machine: Machine) -> str:
    """A file that can be appended to."""
    path = _absolute(value, machine)
    parent = os.path.dirname(path)
    mode = _mode(path)
    if mode is not None and stat.S_ISDIR(mode):
        raise WrongError(f"{shown(path)} is a directory", "the name of a file")
    if not stat.S_ISDIR(_mode(parent) or 0):
        raise WrongError(f"there is no directory {shown(parent)}", "mkdir, or name another one")
    if not os.access(path if mode is not None else parent, os.W_OK):
        raise WrongError(f"{shown(path)} may not be written", "name another one")
    return path


def _absolute(value: object, machine: Machine) -> str:
    path = text(value)
    if path.startswith("~"):
        path = _expanded(path, machine.home)
    return os.path.normpath(os.path.join(machine.base, path))


def _expanded(path: str, home: str | None) -> str:
    name, slash, rest = path[1:].partition("/")
    try:
        known = pwd.getpwnam(name).pw_dir if name else home or pwd.getpwuid(os.getuid()).pw_dir
    except (KeyError, ValueError) as error:
        raise WrongError(f"nobody knows what {shown('~' + name)} is", "the whole path") from error
    return f"{known}{slash}{rest}"


def user(value: object, machine: Machine) -> str:
    """Somebody whose program root may run."""
    given = text(value)
    if not machine.root:
        raise WrongError("only root runs programs as somebody else", "leave it out, or run harvest as root")
    if not _is_user(given):
        raise WrongError(f"there is no user {shown(given)}")
    return given


def users(value: object) -> frozenset[str]:
    """People of this machine; a number is somebody without a name."""
    found = words(value)
    for given in found:
        if not given.isdecimal() and not _is_user(given):
            raise WrongError(f"there is no user {shown(given)}", "a name as `id -un` prints it, or a number")
    return frozenset(found)


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except (KeyError, ValueError):
        return False
    return True
