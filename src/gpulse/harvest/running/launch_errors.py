"""Say why a command cannot be run: which file it is about, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

_MAX_SCRIPT_LINE_BYTES = 256


def explain(command: str, error: OSError | ValueError, environment: Mapping[str, str]) -> str:
    """Return one sentence about a command that could not be run, with what to do where that is known.

    Must be called where the command was started: in its directory, and as its user.

    Args:
        command: Its first word.
        error: What starting it raised.
        environment: The environment that it was to get.
    """
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    path = _found(command, environment)
    advice = _advice(command, path, getattr(error, "errno", None))
    return f"cannot run {path or command}: {reason}{f'; {advice}' if advice else ''}"


def _advice(command: str, path: str | None, number: int | None) -> str | None:
    if path is None:
        if command.startswith("/"):
            return None
        if "/" in command:
            return f"it is looked for in {_here()}"
        return "it is in no directory of PATH; write its whole path"
    interpreter = _interpreter(path)
    if number == errno.ENOENT:
        if interpreter is None:
            return "the program needs a loader that is not here; it was built for another system"
        return f"its first line names the interpreter {interpreter}, which does not exist; correct that line"
    if number == errno.EACCES:
        return _forbidden(path, interpreter)
    if number == errno.ENOEXEC:
        return f"it is neither a program for this machine nor a script that begins with #!; run it as `sh {path}`"
    return None


def _forbidden(path: str, interpreter: str | None) -> str:
    if os.path.isdir(path):
        return "this is a directory; name the program in it"
    if not os.access(path, os.X_OK):
        return f"chmod +x {path}"
    if interpreter is not None and not os.access(interpreter, os.X_OK):
        return f"its first line names the interpreter {interpreter}, which may not be run; correct that line"
    return "its file system may be mounted noexec; copy it to another one"


def _found(command: str, environment: Mapping[str, str]) -> str | None:
    """The file that was tried: the first one that may be run, else the first one that is there."""
    if "/" in command:
        return command if os.path.lexists(command) else None
    places = environment.get("PATH", os.defpath).split(os.pathsep)
    there = [path for place in places if os.path.isfile(path := os.path.join(place or ".", command))]
    return next((path for path in there if os.access(path, os.X_OK)), there[0] if there else None)


def _interpreter(path: str) -> str | None:
    """The interpreter that a script's first line names."""
    try:
        with open(path, "rb") as file:
            first = file.readline(_MAX_SCRIPT_LINE_BYTES)
    except OSError:
        return None
    words = first[2:].split() if first.startswith(b"#!") else []
    return os.fsdecode(words[0]) if words else None


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "(which is gone)"
