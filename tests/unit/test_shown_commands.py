"""Every command line that help and documents show is one that the programs accept, also where no test can run it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.newcomer.blocks import commands
from tests.newcomer.command_lines import check, find_inline_lines, find_invocations
from tools.docs.command_tree import PROGRAMS, CommandHelp, read_commands

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "contrib").rglob("*.md"))
    if path.name != "CHANGELOG.md"  # it names options as they were at the time
)
_EXTRAS = re.compile(r"pip install (?:-e )?'?(?:\.|gpulse)\[([\w,]+)\]")
_TARGET = re.compile(r"^(?:[^`\n]*`)?make ([a-z-]+)\b", re.MULTILINE)


def read(document: str) -> str:
    """Return the text of a document."""
    return (ROOT / document).read_text(encoding="utf-8")


def test_programs_are_found_in_shell_lines() -> None:
    """Behind other programs, between operators, and not where the word means something else."""
    line = "FOO=1 gpulse why 2>&1 | tee x && /opt/bin/gsprof status; pip install gpulse  # gpulse top"

    assert [["gpulse", "why"], ["gsprof", "status"]] == list(find_invocations(line))
    assert [["gpulse", "agent", "HEAD:8090"]] == list(
        find_invocations("docker run image gpulse agent HEAD:8090")
    )


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("gpulse why --pid 4711 -- python train.py --any-option", ""),
        ("gpulse session start run --since 10m", ""),
        ("gpulse record -o run.csv --help", ""),
        ("gpulse why --pdi 4711", "No such option"),
        ("gpulse why --pid many", "not a valid int"),
        ("gpulse wyh", "wyh"),
        ("gpulse session begin", "begin"),
        ("gpulse deploy up", "Missing option"),
        ("gpulse top now", "unexpected extra argument"),
    ],
)
def test_wrong_lines_are_recognized(line: str, wrong: str) -> None:
    """Unknown verbs, options and values, and arguments that are missing or too many."""
    (arguments,) = find_invocations(line)
    error = check(arguments)

    assert wrong in error
    assert bool(wrong) == bool(error)


def test_a_mention_may_leave_arguments_out() -> None:
    """In a sentence `gpulse deploy up` is a name; an option that does not exist is still wrong."""

    assert "" == check(["gpulse", "deploy", "up"], is_mention=True)
    assert "" == check(["gpu_mon", "[-c", "FILE]"], is_mention=True)
    assert "No such option" in check(["gpulse", "deploy", "up", "--bogus"], is_mention=True)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_blocks_are_accepted(document: str) -> None:
    """Those of fenced blocks, as they are printed."""
    errors = [
        f"{document}:{command.line}: {' '.join(arguments)}: {error}"
        for command in commands(document, read(document))
        for arguments in find_invocations(command.text)
        if (error := check(arguments)) and not _is_shown_as_wrong(command.text)
    ]

    assert [] == errors


def _is_shown_as_wrong(line: str) -> bool:
    """Whether a document shows this line for its error message."""
    return "mem-utl" in line


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_sentences_are_accepted(document: str) -> None:
    """Those in code spans; they may be incomplete."""
    errors = [
        f"{document}: {line}: {error}"
        for line in find_inline_lines(read(document))
        for arguments in find_invocations(line)
        if (error := check(arguments, is_mention=True))
    ]

    assert [] == errors


@pytest.mark.parametrize("command", read_commands(), ids=lambda command: command.path)
def test_examples_in_help_are_accepted(command: CommandHelp) -> None:
    """An example is followed by its meaning, in a column of its own, or by nothing."""
    errors = []
    for paragraph in command.description:
        for line in paragraph.text.splitlines() if paragraph.is_verbatim else ():
            if line.split(" ")[0] in PROGRAMS:
                columns = re.split(r"\s{2,}", line.strip())
                tries = [" ".join(columns), " ".join(columns[:-1])]
                errors += [line] if all(map(_is_refused, filter(None, tries))) else []

    assert [] == errors


def _is_refused(line: str) -> bool:
    try:
        return any(check(arguments) for arguments in find_invocations(line))
    except ValueError:  # an apostrophe in the meaning of an example
        return True


def test_the_extras_that_documents_install_exist() -> None:
    """As in `pip install '.[head,plot]'`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {
        extra
        for document in DOCUMENTS
        for found in _EXTRAS.findall(read(document))
        for extra in found.split(",")
    }

    assert named
    assert named <= set(project["optional-dependencies"])


def test_the_make_targets_that_documents_name_exist() -> None:
    """In blocks and in sentences."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {target for document in DOCUMENTS for target in _TARGET.findall(read(document))}

    assert named
    assert named <= targets
