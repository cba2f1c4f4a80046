"""Find session files, and read their JSON as a stream, however large they are."""

from __future__ import annotations

import codecs
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ijson

from gpulse.errors import RecordingError, UsageError
from gpulse.model.safe_text import quoted
from gpulse.model.session import check_session_name
from gpulse.model.time_text import parse_iso

FRAMES_MEMBER = "frames"
MAX_VALUE_BYTES = 1 << 26
"""Maximum size of a frame or member; far more than gpulse writes."""
MAX_DEPTH = 64
"""Maximum nesting of lists and objects."""
_MAX_FIRST_LINE_BYTES = 1 << 22
_CHUNK_BYTES = 1 << 18
_SUFFIXES = (".json", ".jsonl")
_NOT_A_NUMBER = re.compile(rb"(^|[\[,:])(\s*)(?:NaN|-?Infinity)(?=\s*(?:[\],}]|$))")
"""Values that Python's json module writes but JSON does not allow. A text such as `a, NaN, b` matches as well."""
_CARET = "------^"
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)
_MIN_MILLISECONDS = 1e11
"""Epoch seconds of the year 5138; larger numbers are milliseconds or smaller units."""
_MAX_EPOCH_SECONDS = 4e9

_Events = Iterator[tuple[str, Any]]


class _FileCandidate(NamedTuple):
    """File that may belong to a session; the newest compares as the greatest."""

    end: float
    """End of its session in epoch seconds. It is compared first, because a session can be started in the past."""
    written: float
    start: float
    """Start of its session; 0 when the file does not say."""
    path: Path
    name: str | None
    """Name of its session; None when the file does not say."""


def find_session_file(given: Path) -> Path:
    """Return the file at this path, or else the newest file of the session with this name.

    Raises:
        RecordingError: Neither exists.
    """
    if os.path.lexists(given):
        return given
    names = [given.name, *([given.stem] if given.suffix in _SUFFIXES else [])]
    for name in names:
        found = [candidate for candidate in _find_candidates(given.parent, name) if candidate.name == name]
        if found:
            return max(found).path
        for suffix in _SUFFIXES:  # the file may give its session another name
            if (path := given.parent / f"{name}{suffix}").is_file():
                return path
    raise RecordingError(
        f"cannot read {given}: no such file, and no session file with this name in {given.parent.absolute()}",
        hint=_export_hint(names[-1]),
    )


def find_newer_file(path: Path) -> Path | None:
    """Return the newest file, in the same directory, of a later session with the same name; None if there is none."""
    this = _read_candidate(path) if path.is_file() else None
    if this is None or this.name is None or not this.start:
        return None
    others = (other for other in _find_candidates(path.parent, this.name) if other.name == this.name)
    newest = max(others, default=this)
    return newest.path if newest.end > this.end and newest.start != this.start else None


def _find_candidates(directory: Path, name: str) -> Iterator[_FileCandidate]:
    """Yield the files that may belong to a session; only its content says whether `run-2.json` is of `run` or `run-2`."""
    shape = re.compile(rf"{re.escape(name)}(?:-[0-9]+)?\.jsonl?")
    try:
        names = sorted(entry for entry in os.listdir(directory) if shape.fullmatch(entry))
    except OSError:
        return
    for entry in names:
        # A pipe that somebody put there would keep its reader waiting.
        found = _read_candidate(directory / entry) if (directory / entry).is_file() else None
        if found is not None:
            yield found


def _read_candidate(path: Path) -> _FileCandidate | None:
    """Read the members of a file before its frames; None when it cannot be read."""
    header: dict[str, object] = {}
    try:
        with path.open("rb") as file:
            written = os.fstat(file.fileno()).st_mtime
            for key, value in read_members(file, path.name):
                if key == FRAMES_MEMBER:
                    break
                header[key] = value
    except (OSError, RecordingError):
        if "session_name" not in header:
            return None
    name = header.get("session_name")
    start = parse_epoch(header.get("start_time")) or 0.0
    end = parse_epoch(header.get("end_time")) or start
    return _FileCandidate(end, written, start, path, name if isinstance(name, str) else None)


def _export_hint(name: str) -> str | None:
    try:
        return f"download it from the head with: gpulse session export {check_session_name(name)}"
    except UsageError:
        return None


def read_members(file: BinaryIO, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the members of a session file; `frames` is yielded once for each frame, with that frame.

    Args:
        file: The file, at its beginning: one JSON document, or JSON lines.
        name: The file's name in error messages.

    Raises:
        RecordingError: The file is neither of them, or incomplete.
    """
    line = file.readline(_MAX_FIRST_LINE_BYTES)
    is_lines = (
        line.endswith(b"\n") and _is_object(line) and bool(file.readline(_MAX_FIRST_LINE_BYTES).strip())
    )
    file.seek(len(codecs.BOM_UTF8) if line.startswith(codecs.BOM_UTF8) else 0)
    yield from _line_members(file, name) if is_lines else _JsonDocument(file, name).members()


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _line_members(file: BinaryIO, name: str) -> Iterator[tuple[str, Any]]:
    number = 0
    while line := file.readline(MAX_VALUE_BYTES):
        number += 1
        if not line.strip():
            continue
        try:
            document = _DECODER.decode(line.decode())
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n"):
                raise _truncated_file_error(name, f"in line {number}") from error
            raise _not_a_session_error(name, f"line {number} is not JSON") from error
        if not isinstance(document, dict):
            raise _not_a_session_error(name, f"line {number} is not a JSON object")
        if "gpu_util" in document or "frame_id" in document:
            yield FRAMES_MEMBER, document
        else:
            yield from document.items()


class _JsonDocument:
    """One JSON document, parsed by ijson as it is read."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._where = ""
        self._rest = b""
        self._bytes_since_value = 0

    def members(self) -> Iterator[tuple[str, Any]]:
        """Yield the members of the object, one frame at a time."""
        try:
            yield from self._parsed(ijson.basic_parse(self, use_float=True, buf_size=_CHUNK_BYTES))
        except (ijson.JSONError, UnicodeDecodeError) as error:
            raise self._damage(str(error)) from error

    def read(self, size: int) -> bytes:
        """Return the next bytes for ijson, with null for NaN and infinities."""
        chunk = self._rest + self._file.read(size)
        self._bytes_since_value += len(chunk) - len(self._rest)
        if self._bytes_since_value > MAX_VALUE_BYTES:
            raise _not_a_session_error(self._name, f"one value is larger than {MAX_VALUE_BYTES >> 20} MiB")
        end = chunk.rfind(b",") + 1 or len(chunk)  # after a comma, so that no word is split
        chunk, self._rest = chunk[:end], chunk[end:]
        if b"NaN" in chunk or b"Infinity" in chunk:
            return _NOT_A_NUMBER.sub(rb"\1\2null", chunk)
        return chunk

    def _parsed(self, events: _Events) -> Iterator[tuple[str, Any]]:
        if next(events)[0] != "start_map":
            raise _not_a_session_error(self._name, "it is not a JSON object")
        for event, key in events:
            if event == "end_map":
                break
            self._where = f" in {quoted(key, 40)}"
            first = next(events)
            if key != FRAMES_MEMBER:
                yield key, self._value(first, events)
                self._bytes_since_value = 0
            elif first[0] == "start_array":
                yield from self._frames(events)
            else:
                raise _not_a_session_error(self._name, "`frames` is not a list")
        self._where = " after the end of the document"
        for _ in events:  # the parser raises an error if anything follows
            pass

    def _frames(self, events: _Events) -> Iterator[tuple[str, Any]]:
        for count, first in enumerate(events, 1):
            if first[0] == "end_array":
                return
            self._where = f" in frame {count}"
            yield FRAMES_MEMBER, self._value(first, events)
            self._where = f" after frame {count}"
            self._bytes_since_value = 0

    def _value(self, first: tuple[str, Any], events: _Events, depth: int = 0) -> Any:
        """Build the value that starts with this event."""
        kind, value = first
        if depth > MAX_DEPTH:
            raise _not_a_session_error(
                self._name, f"it is nested deeper than {MAX_DEPTH} levels{self._where}"
            )
        if kind == "start_array":
            items: list[Any] = []
            for event in events:
                kind, value = event
                if kind == "number":  # the usual case
                    items.append(value)
                elif kind == "end_array":
                    break
                else:
                    items.append(value if kind == "string" else self._value(event, events, depth + 1))
            return items
        if kind == "start_map":
            found: dict[str, Any] = {}
            for kind, key in events:
                if kind == "end_map":
                    break
                found[key] = self._value(next(events), events, depth + 1)
            return found
        return value

    def _damage(self, message: str) -> RecordingError:
        """Return an error from the parser's message: a sentence, then an excerpt of the file with a caret under it."""
        sentence, *excerpt = message.splitlines()
        is_at_end = bool(excerpt) and not excerpt[0].strip()
        if "UTF8" in message or "utf-8" in message:
            return _not_a_session_error(self._name, f"it is not UTF-8 text{self._where}")
        if is_at_end or "premature EOF" in sentence or "Incomplete" in sentence:
            return (
                _truncated_file_error(self._name, self._where.strip())
                if self._where
                else _not_a_session_error(self._name, "the file is empty")
            )
        if not self._where:
            return _not_a_session_error(self._name, "it is not a JSON object")
        complaint = re.sub(r"^(?:parse|lexical) error: |\.$", "", sentence).replace("I expect", "expected")
        caret = excerpt[-1].find(_CARET) + len(_CARET) - 1 if excerpt else 0
        near = f", at {excerpt[0][caret : caret + 20]!a}" if caret > len(_CARET) else ""
        return _not_a_session_error(self._name, f"{complaint}{self._where}{near}")


def _not_a_session_error(name: str, why: str) -> RecordingError:
    return RecordingError(
        f"{name} is not a session file: {why}",
        hint="use a .json or .jsonl file that `gpulse session stop` or `gpulse session export` wrote",
    )


def _truncated_file_error(name: str, where: str) -> RecordingError:
    return RecordingError(
        f"{name} is incomplete: it ends {where}", hint="export the session again: gpulse session export NAME"
    )


def parse_epoch(raw: object) -> float | None:
    """Return epoch seconds from a number, a number as text, or ISO 8601; None for anything else.

    A time without a zone is local time, which is what gswarm-profiler wrote.
    """
    if isinstance(raw, str):
        try:
            return _epoch_of_number(float(raw))
        except ValueError:
            seconds = parse_iso(raw.strip())
            return None if seconds is None else _epoch_of_number(seconds)
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return _epoch_of_number(raw)
    return None


def _epoch_of_number(number: float) -> float | None:
    try:
        seconds = float(number)
    except OverflowError:
        return None
    while math.isfinite(seconds) and seconds > _MIN_MILLISECONDS:
        seconds /= 1000
    return seconds if 0 <= seconds <= _MAX_EPOCH_SECONDS else None
