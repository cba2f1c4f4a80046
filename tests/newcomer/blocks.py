"""Read the shell commands out of the fenced blocks of a Markdown document."""

from __future__ import annotations

import re
from typing import NamedTuple

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.DOTALL | re.MULTILINE)
_SHELLS = ("sh", "bash")
_PROMPT = "$ "


class Command(NamedTuple):
    """One command as a document shows it."""

    document: str
    line: int
    block: int
    """Number of the fenced block in its document."""
    text: str


def commands(document: str, text: str) -> list[Command]:
    """Return the commands of a document in their order.

    Every line of a block in `sh` or `bash` is a command. In other blocks a command follows a prompt, and the lines without
    one are what it printed.
    """
    found: list[Command] = []
    for number, match in enumerate(_FENCE.finditer(text)):
        line = text[: match.start("text")].count("\n") + 1
        is_script = match["language"] in _SHELLS
        held = ""
        for place, raw in enumerate(match["text"].splitlines()):
            written = raw.removeprefix(match["indent"])
            if not held and not is_script:
                if not written.startswith(_PROMPT):
                    continue
                written = written.removeprefix(_PROMPT)
            held = f"{held}\n{written}" if held else written
            if held.endswith("\\"):
                continue
            if held.strip() and not held.lstrip().startswith("#"):
                found.append(Command(document, line + place, number, held))
            held = ""
    return found
