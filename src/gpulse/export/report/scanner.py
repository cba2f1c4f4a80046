"""Reads JSON too large for memory: an object's members one by one, and the frames in it one by one."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from gpulse.errors import RecordingError

FRAMES = "frames"
_CHUNK_BYTES = 1 << 18
_LONGEST_VALUE = 1 << 26
"""Characters of one frame or member; a document nobody made by hand or with a session of ours is not longer."""
_LONGEST_FIRST_LINE = 1 << 22
_NEAR_THE_END = 32
"""An error this close to what was read so far can be due to what was not."""
_WORDS = ("true", "false", "null", "NaN", "-Infinity", "Infinity")
_SPACE = " \t\n\r"
_DECODER = json.JSONDecoder(
    parse_constant=lambda _: None
)  # NaN and infinities, which JSON does not have, are unknown


def members(file: BinaryIO, name: str) -> Iterator[tuple[str, Any]]:
    """The members of a session file; `frames` comes as often as there are frames, each time with one of them.

    Args:
        file: The file, from its beginning: one JSON document, or JSON lines.
        name: What to call it when something is wrong.

    Raises:
        RecordingError: It is neither, or ends before it is complete.
    """
    line = file.readline(_LONGEST_FIRST_LINE)
    is_lines = line.endswith(b"\n") and _is_object(line) and bool(file.readline(_LONGEST_FIRST_LINE).strip())
    file.seek(0)
    yield from _lines(file, name) if is_lines else _Document(file, name).members()


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[str, Any]]:
    number = 0
    while line := file.readline(_LONGEST_VALUE):
        number += 1
        if not line.strip():
            continue
        try:
            document = _DECODER.decode(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n"):
                raise _cut(name, f"in line {number}") from error
            raise _wrong(name, f"line {number} is not JSON") from error
        if not isinstance(document, dict):
            raise _wrong(name, f"line {number} is not an object")
        if "gpu_util" in document or "frame_id" in document:
            yield FRAMES, document
        else:
            yield from document.items()


class _Document:
    """One JSON document of which a little is held at a time."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._scan = _DECODER.raw_decode
        self._text = ""
        self._place = 0
        self._passed = 0
        self._ended = False

    def members(self) -> Iterator[tuple[str, Any]]:
        """The members of the object that the document is."""
        self._expect("{", "it is not a JSON object")
        if self._peek() == "}":
            self._place += 1
        else:
            while True:
                key = self._key()
                if key == FRAMES:
                    if self._peek() != "[":
                        raise self._error("`frames` is not a list")
                    for frame in self._items():
                        yield FRAMES, frame
                else:
                    yield key, self._value()
                if self._separator("}"):
                    break
        if self._peek():
            raise self._error("something follows after its end")

    def _key(self) -> str:
        if self._peek() != '"':
            raise self._error("a name is missing")
        key = self._value()
        self._expect(":", "a colon is missing")
        self._peek()
        return str(key)

    def _items(self) -> Iterator[Any]:
        self._place += 1
        if self._peek() == "]":
            self._place += 1
            return
        while True:
            yield self._value()
            if self._separator("]"):
                return

    def _separator(self, end: str) -> bool:
        """Pass a comma, or the end; True at the end."""
        found = self._peek()
        if found not in (",", end) or not found:
            raise self._error("a comma is missing")
        self._place += 1
        return found == end

    def _expect(self, character: str, complaint: str) -> None:
        if self._peek() != character:
            raise self._error(complaint)
        self._place += 1

    def _peek(self) -> str:
        """The next character that is not space; nothing at the end."""
        while True:
            while self._place < len(self._text):
                if self._text[self._place] not in _SPACE:
                    return self._text[self._place]
                self._place += 1
            if not self._more():
                return ""

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = self._scan(self._text, self._place)
            except json.JSONDecodeError as error:
                is_open = error.msg.startswith(("Unterminated", "Invalid \\u"))
                away = error.pos - self._place
                if not (is_open or error.pos >= len(self._text) - _NEAR_THE_END) or not self._more():
                    rest = self._text[self._place + away :].strip()
                    if self._ended and (is_open or any(word.startswith(rest) for word in _WORDS)):
                        raise _cut(self._name, f"at character {self._passed + len(self._text)}") from error
                    raise self._error(error.msg, self._place + away) from error
            except (ValueError, RecursionError) as error:  # endless numbers, endless nesting
                raise self._error("it cannot be read") from error
            else:
                # A number at the very end may go on: `1` as `10`, as `1.5` or as `1e+5`.
                length = end - self._place
                if len(self._text) - end >= 3 or not self._more():
                    self._place += length
                    return value

    def _more(self) -> bool:
        """Read on; False at the end of the file."""
        if self._ended:
            return False
        left = self._text[self._place :]
        if len(left) > _LONGEST_VALUE:
            raise self._error(f"one value takes more than {_LONGEST_VALUE >> 20} MB")
        raw = self._file.read(max(_CHUNK_BYTES, len(left)))
        self._ended = not raw
        try:
            more = self._decode.decode(raw, final=self._ended)
        except UnicodeDecodeError as error:
            raise self._error("it is not text in UTF-8") from error
        self._passed += self._place
        self._text, self._place = left + more, 0
        return not self._ended

    def _error(self, complaint: str, place: int | None = None) -> RecordingError:
        at = self._passed + (self._place if place is None else place)
        is_empty = self._ended and at == 0 and not self._text
        if is_empty:
            return _wrong(self._name, "the file is empty")
        if self._ended and self._passed + len(self._text) - at < _NEAR_THE_END and place is None:
            return _cut(self._name, f"at character {at}")
        return _wrong(self._name, f"{complaint[:1].lower()}{complaint[1:]}, at character {at}")


def _wrong(name: str, why: str) -> RecordingError:
    return RecordingError(
        f"{name} is not a session file: {why}",
        hint="give a .json or .jsonl file that `gpulse session stop` wrote",
    )


def _cut(name: str, where: str) -> RecordingError:
    return RecordingError(
        f"{name} is cut off {where}", hint="export the session again: gpulse session export NAME"
    )
