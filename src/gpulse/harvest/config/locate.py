"""The lines on which the tables and keys of a TOML document stand, which its parser does not tell."""

from __future__ import annotations

import re
import tomllib

Path = tuple[str | int, ...]
"""From the top of the document: names of tables and keys, numbers in arrays of tables."""

_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_NAME = re.compile(r"""[ \t]*(?:([A-Za-z0-9_-]+)|"((?:[^"\\\n]|\\.)*)"|'([^'\n]*)')[ \t]*""")
_PIECE = re.compile(
    r'"""(?:[^\\]|\\.)*?"""(?:"{0,2})'
    r"|'''.*?'''(?:'{0,2})"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|(?P<open>[\[{])|(?P<close>[\]}])|(?P<end>\n)"
    r"|[^\"'\#\[\]{}\n]+",
    re.DOTALL,
)


class Lines:
    """Where things are in a document that its parser accepts."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._lines: dict[Path, int] = {(): 1}
        self._counts: dict[Path, int] = {}
        self._counted_to = 0
        self._line = 1
        self._walk()

    def of(self, *path: str | int) -> int:
        """The line of something, or of the nearest thing around it."""
        while path not in self._lines:
            path = path[:-1]
        return self._lines[path]

    def _walk(self) -> None:
        position, table = 0, Path()
        while True:
            position = _end(_BLANK, self._text, position)
            if position >= len(self._text):
                return
            line = self._line_at(position)
            brackets = 2 if self._text.startswith("[[", position) else int(self._text[position] == "[")
            names, after = _names(self._text, position + brackets)
            if not names:
                return
            if brackets:
                table = self._enter(names, line, again=brackets == 2)
                position = after + brackets
            else:
                for length in range(1, len(names) + 1):
                    self._lines.setdefault(table + tuple(names[:length]), line)
                position = _after_value(self._text, after)

    def _line_at(self, position: int) -> int:
        self._line += self._text.count("\n", self._counted_to, position)
        self._counted_to = position
        return self._line

    def _enter(self, names: list[str], line: int, *, again: bool) -> Path:
        """The table that a header begins, the next one of its kind when it stands in double brackets."""
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


def _names(text: str, position: int) -> tuple[list[str], int]:
    """A dotted name, and where it ends."""
    found: list[str] = []
    while match := _NAME.match(text, position):
        bare, quoted, literal = match.groups()
        found.append(bare or literal or _unescaped(quoted or ""))
        position = match.end()
        if not text.startswith(".", position):
            break
        position += 1
    return found, position


def _unescaped(quoted: str) -> str:
    return str(tomllib.loads(f'name = "{quoted}"')["name"])


def _after_value(text: str, position: int) -> int:
    depth = 0
    while match := _PIECE.match(text, position):
        position = match.end()
        depth += (match["open"] is not None) - (match["close"] is not None)
        if match["end"] is not None and depth <= 0:
            break
    return position


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position
