"""Read fenced blocks out of Markdown documents, and the shell commands out of those."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?: (?P<source>\S+))?\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
_OPENING = re.compile(r"^ *```", re.MULTILINE)
_NAV_ENTRY = re.compile(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", re.MULTILINE)
_SHELLS = ("sh", "bash")
_PROMPT = "$ "


class Block(NamedTuple):
    """One fenced block of a document."""

    document: str
    line: int
    """Of its first line of text, counted from 1."""
    number: int
    """Among the blocks of its document, counted from 0."""
    language: str
    source: str
    """The file that it quotes, or nothing."""
    text: str

    @property
    def place(self) -> str:
        """Where to find it."""
        return f"{self.document}:{self.line}"


class Command(NamedTuple):
    """One command as a document shows it."""

    document: str
    line: int
    block: int
    """Number of the fenced block in its document."""
    text: str


def parse_json_sample(text: str) -> list[Any]:
    """Return the documents of a JSON sample: one, or one on each line; an ellipsis stands for more of the same.

    Raises:
        ValueError: It is not JSON.
    """
    whole = re.sub(r",\s*…|…\s*,|…", "", text)
    try:
        return [json.loads(whole)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in whole.splitlines() if line]


def list_documents(root: Path) -> tuple[str, ...]:
    """Return the documents whose samples are tested, in the order in which a newcomer reads them."""
    pages = _NAV_ENTRY.findall((root / "mkdocs.yml").read_text(encoding="utf-8"))
    return ("README.md", *(f"docs/{page}" for page in pages), "CONTRIBUTING.md")


def read_blocks(document: str, text: str) -> list[Block]:
    """Return the fenced blocks of a document in their order.

    Raises:
        ValueError: A fence is not closed, or is written in a way that this does not read.
    """
    found = []
    for number, match in enumerate(_FENCE.finditer(text)):
        indent = match["indent"]
        lines = [line.removeprefix(indent) for line in match["text"].splitlines(keepends=True)]
        line = text[: match.start("text")].count("\n") + 1
        found.append(Block(document, line, number, match["language"], match["source"] or "", "".join(lines)))
    if 2 * len(found) != len(_OPENING.findall(text)):
        raise ValueError(f"{document}: a fenced block is not closed, or has words after its language")
    return found


def read_commands(block: Block) -> list[Command]:
    """Return the commands of a block in their order.

    Every line of a block in `sh` or `bash` is a command. In other blocks a command follows a prompt, and the lines without
    one are what it printed.
    """
    found: list[Command] = []
    is_script = block.language in _SHELLS
    held = ""
    for place, raw in enumerate(block.text.splitlines()):
        line = raw
        if not held and not is_script:
            if not line.startswith(_PROMPT):
                continue
            line = line.removeprefix(_PROMPT)
        held = f"{held}\n{line}" if held else line
        if held.endswith("\\"):
            continue
        if held.strip() and not held.lstrip().startswith("#"):
            found.append(Command(block.document, block.line + place, block.number, held))
        held = ""
    return found


def commands(document: str, text: str) -> list[Command]:
    """Return the commands of a document in their order."""
    return [command for block in read_blocks(document, text) for command in read_commands(block)]
