"""What is said to a node and what it answers: one shell script on standard input, lines with a mark in return."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

_MARK = re.compile(r"[0-9a-f]{16}")
_WORD = re.compile(r"[a-z_]+")
_PIECE = re.compile(r"[a-z]+(?:\.pem)?")
_PARAMETERS = (
    "gpulse",
    "venv",
    "python",
    "install",
    "interpreter",
    "wanted",
    "head",
    "slug",
    "target",
    "force",
    "keep",
    "bare",
    "lines",
    "follow",
    "spool",
    "patience",
)


class Letter(NamedTuple):
    """Everything that goes to a node in one connection."""

    command: str
    """For the login shell, whichever it is."""
    data: bytes
    """For its standard input."""
    mark: str
    """Begins each line of the answer that is meant for us; login scripts may say something too."""
    rest: bytes = b""
    """Follows on standard input; many letters may share it."""


class Answer(NamedTuple):
    """What a node said."""

    said: Mapping[str, Sequence[str]]
    is_complete: bool

    def first(self, key: str) -> str | None:
        """What it said of something, None when it said nothing or does not know."""
        told = self.said.get(key, ())
        return (told[0] or None) if told else None

    def number(self, key: str) -> int | None:
        """The number it said, None when it said none."""
        text = self.first(key)
        return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else None


def letter(
    verb: str,
    parameters: Mapping[str, str | None],
    words: Sequence[str] = (),
    pieces: Mapping[str, bytes] | None = None,
    rest: bytes = b"",
) -> Letter:
    """Put together what a node is to do.

    Args:
        verb: A verb of the script.
        parameters: What it needs to know.
        words: Options of the agent.
        pieces: Files that it keeps, such as the token, by their names.
        rest: What follows on standard input, to its end.
    """
    if not _WORD.fullmatch(verb) or not set(parameters) <= set(_PARAMETERS):
        raise ValueError(f"{verb} with {', '.join(parameters)} is not in the script")
    mark = secrets.token_hex(8)
    kept = pieces or {}
    known = {name: parameters.get(name) or "" for name in _PARAMETERS}
    known |= {
        "mark": mark,
        "verb": verb,
        "pieces": " ".join(f"{_name(key)}:{len(kept[key])}" for key in kept),
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in known.items()]
    lines.append(" ".join(["set --", *map(shlex.quote, words)]))
    script = "\n".join([*lines, files("gpulse.deploy").joinpath("node.sh").read_text("utf-8")]).encode()
    # dd takes no byte more than it is told to; shells read ahead. The command means the same in sh, csh and fish.
    command = f"exec sh -c 'eval \"$(dd bs=1 count={len(script)} 2>/dev/null)\"'"
    end = [mark.encode()] if verb == "up" else []  # without it the files did not all arrive
    return Letter(command, b"".join([script, *kept.values(), *end]), mark, rest)


def _name(key: str) -> str:
    if not _PIECE.fullmatch(key):
        raise ValueError(f"{key!r} is no name of a file")
    return key


def read_answer(output: bytes, mark: str) -> Answer:
    """The lines of an answer that are meant for us."""
    if not _MARK.fullmatch(mark):
        raise ValueError("that is no mark")
    said: dict[str, list[str]] = {}
    is_complete = False
    for line in output.decode("utf-8", "replace").split("\n"):
        found, _, rest = line.partition(" ")
        if found == mark:
            key, _, value = rest.partition(" ")
            said.setdefault(key, []).append(value)
            is_complete = is_complete or key in ("end", "error")
    return Answer(said, is_complete)
