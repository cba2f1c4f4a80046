"""Outputs that README and docs show use the words of the code: a reworded text makes its old samples fail."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.newcomer.blocks import Block, list_documents, read_blocks

_ROOT = Path(__file__).parents[2]
_COMMAND = re.compile(r"^\$ .*?(?<!\\)$", re.MULTILINE | re.DOTALL)
_WORDS = re.compile(r"[A-Za-z]+(?: [A-Za-z]+){2,}")
_LABELS = re.compile(
    r"\b(try|check|why|sure|likely|possible|node|I|W|More about this finding|Interruptions)\b:?"
)
"""Labels of lines, which stand between two texts."""
_EXAMPLES = frozenset(
    [
        "ada",
        "bob",
        "compute",
        "db",
        "explain",
        "fold",
        "g",
        "gpu",
        "gpus",
        "json",
        "loading",
        "localhost",
        "mem",
        "metrics",
        "n",
        "run",
        "s",
        "tcp",
        "txt",
        "util",
    ]
)
"""Words that stand for users, nodes, programs and files of an example."""
_ASSEMBLED = (
    "of its processes wait for disks while reading",
    "workers busy all the time while",
    "sessions include PCIe traffic",
    "other users of this machine need the token to change anything",
    "other machines need the token to read or change anything",
    "min of GPU time since",
    "long resumed after an interruption of",
    "watts Power draw",
    "same finding on",
    "or open http",
    "this head requires a token for requests from other machines",
)
"""Texts that the code puts together from several pieces."""


def _outputs() -> list[Block]:
    """Return the blocks with commands and what they print."""
    return [
        block
        for document in list_documents(_ROOT)
        for block in read_blocks(document, (_ROOT / document).read_text(encoding="utf-8"))
        if _COMMAND.search(block.text)
    ]


@cache
def _known_text() -> str:
    """Return all texts of the code, in lower case, with single spaces."""
    files = [
        *(_ROOT / "src").rglob("*.py"),
        *(_ROOT / "src").rglob("*.sh"),
        *(_ROOT / "tests" / "golden").rglob("*.txt"),
        _ROOT / "tests" / "messages.txt",
    ]
    text = " ".join(file.read_text(encoding="utf-8") for file in files)
    text = re.sub(r"\"\s*\n\s*f?\"", "", text)  # a string that goes on in the next line
    return " ".join([*text.split(), *_ASSEMBLED]).lower()


def _unknown_phrases(output: str) -> list[str]:
    """Return the phrases of three words that no text of the code has."""
    found: list[str] = []
    for line in _COMMAND.sub("", output).splitlines():
        for run in _WORDS.findall(_LABELS.sub("|", line)):
            words = run.lower().split()
            phrases = zip(words, words[1:], words[2:], strict=False)
            named = (" ".join(phrase) for phrase in phrases if not _EXAMPLES.intersection(phrase))
            found += [phrase for phrase in named if phrase not in _known_text()]
    return found


@pytest.mark.parametrize("block", [pytest.param(block, id=block.place) for block in _outputs()])
def test_a_shown_output_has_the_words_of_the_code(block: Block) -> None:
    """Run the command again after its texts changed, and show what it prints now."""
    assert [] == _unknown_phrases(block.text)


def test_an_old_text_is_noticed() -> None:
    """A phrase that nothing prints any more is named."""
    assert ["an oracle told", "oracle told me"] == _unknown_phrases("$ gpulse status\nan oracle told me\n")
