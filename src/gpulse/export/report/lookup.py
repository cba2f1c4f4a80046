"""Find the newest file of a session by the session's name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpulse.errors import RecordingError, UsageError
from gpulse.export.report.moments import epoch
from gpulse.export.report.scanner import FRAMES, members
from gpulse.model.session import checked_name

_SUFFIXES = (".json", ".jsonl")


class _Candidate(NamedTuple):
    """A file that may be a session's."""

    end: float
    """When its session ended, in epoch seconds: one that began in the past is the newest all the same."""
    written: float
    start: float
    """When its session began; 0 when it does not say."""
    path: Path
    name: str | None
    """What it calls its session; None when it does not say."""


def find_file(given: Path) -> Path:
    """Return the file that is meant: the one of this path, or the newest one of the session of this name.

    Raises:
        RecordingError: There is neither.
    """
    if os.path.lexists(given):
        return given
    names = [given.name, *([given.stem] if given.suffix in _SUFFIXES else [])]
    for name in names:
        found = [candidate for candidate in _candidates(given.parent, name) if candidate.name == name]
        if found:
            return max(found).path
        for suffix in _SUFFIXES:  # a file that calls its session otherwise, named without its suffix
            if (path := given.parent / f"{name}{suffix}").is_file():
                return path
    raise RecordingError(
        f"cannot read {given}: No such file, and no file of a session of that name in {given.parent.absolute()}",
        hint=_how_to_get(names[-1]),
    )


def newer_run(path: Path) -> Path | None:
    """Return the newest file beside this one that a later session of the same name was written to; None if none was."""
    own = _read(path) if path.is_file() else None
    if own is None or own.name is None or not own.start:
        return None
    newest = max(
        (other for other in _candidates(path.parent, own.name) if other.name == own.name), default=own
    )
    return newest.path if newest.end > own.end and newest.start != own.start else None


def _candidates(directory: Path, name: str) -> Iterator[_Candidate]:
    """Yield the files that may be of a session: `run-2.json` is of `run`, or of `run-2`; the file itself knows."""
    shape = re.compile(rf"{re.escape(name)}(?:-[0-9]+)?\.jsonl?")
    try:
        names = sorted(entry for entry in os.listdir(directory) if shape.fullmatch(entry))
    except OSError:
        return
    for entry in names:
        found = _read(directory / entry)
        if found is not None:
            yield found


def _read(path: Path) -> _Candidate | None:
    """Read what a file says about its session before its frames; None when it cannot be read."""
    said: dict[str, object] = {}
    try:
        with path.open("rb") as file:
            written = os.fstat(file.fileno()).st_mtime
            for key, value in members(file, path.name):
                if key == FRAMES:
                    break
                said[key] = value
    except (OSError, RecordingError):
        if "session_name" not in said:
            return None
    name = said.get("session_name")
    start = epoch(said.get("start_time")) or 0.0
    end = epoch(said.get("end_time")) or start
    return _Candidate(end, written, start, path, name if isinstance(name, str) else None)


def _how_to_get(name: str) -> str | None:
    try:
        return f"gpulse session export {checked_name(name)} brings it here from the head"
    except UsageError:
        return None
