"""Man pages of every command, in section 1: `gpulse`, `gpulse-why`, `gpulse-session-start` and so on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from textwrap import wrap

from tools.docs.command_tree import CommandHelp, Option, Paragraph

_CODE_SPAN = re.compile(r"`([^`]*)`")
_VALUE = re.compile(r"[A-Z<\[][^\s,]*")
_MAX_COLUMNS = 79
_EXIT_CODES = (
    ("0", "The command succeeded."),
    ("1", "The command failed; standard error says why."),
    ("2", "The command line or a configuration file is wrong, or an optional package is missing."),
    ("130", "Ctrl-C ended the command."),
)
"""Of commands whose help does not list their own."""


def man_pages(commands: Iterable[CommandHelp]) -> dict[str, str]:
    """Return the text of every page by the name of its file."""
    known = {command.path: command for command in commands}
    return {f"{_name(path)}.1": _page(command, known) for path, command in known.items()}


def _name(path: str) -> str:
    return path.replace(" ", "-")


def _page(command: CommandHelp, known: dict[str, CommandHelp]) -> str:
    name = _name(command.path)
    lines = [
        ".\\\" Generated from the command line's own help by `make docs`; do not edit.",
        f'.TH {_roff(name.upper())} 1 "" gpulse "gpulse manual"',
        ".SH NAME",
        f"{_roff(name)} \\- {_roff(_phrase(command.summary))}",
        ".SH SYNOPSIS",
        *_usage(command),
    ]
    if command.description:
        lines += [".SH DESCRIPTION", *_paragraphs(command.description)]
    if command.subcommands:
        lines.append(".SH COMMANDS")
        for path in command.subcommands:
            lines += [".TP", f"\\fB{_roff(_name(path))}\\fR(1)", _text(known[path].summary)]
    lines.append(".SH OPTIONS")
    for option in command.options:
        lines += _option(option)
    lines.append(".SH EXIT STATUS")
    if command.exit_codes:
        lines += _paragraphs(command.exit_codes)
    else:
        for code, meaning in _EXIT_CODES:
            lines += [".TP", f"\\fB{code}\\fR", _text(meaning)]
    related = _related(command.path, known)
    if related:
        lines += [".SH SEE ALSO", ",\n".join(f"\\fB{_roff(_name(path))}\\fR(1)" for path in related)]
    return "\n".join(lines) + "\n"


def _usage(command: CommandHelp) -> Iterator[str]:
    rest = command.usage.removeprefix(command.path).strip()
    yield f"\\fB{_roff(command.path)}\\fR {_values(rest)}".rstrip()


def _option(option: Option) -> Iterator[str]:
    variable = f" Environment variable: {option.variable}." if option.variable else ""
    yield ".TP"
    yield _names(option.names)
    yield _text(f"{option.help}{variable}")


def _names(names: str) -> str:
    """Set option names in bold and their values in italics."""
    words = []
    for word in names.split(" "):
        bare = word.rstrip(",")
        font = "B" if word.startswith("-") else "I"
        words.append(f"\\f{font}{_roff(bare)}\\fR{word[len(bare) :]}")
    return " ".join(words)


def _values(text: str) -> str:
    return _VALUE.sub(lambda match: f"\\fI{_roff(match[0])}\\fR", text).replace("--", "\\-\\-")


def _paragraphs(paragraphs: Iterable[Paragraph]) -> Iterator[str]:
    for place, paragraph in enumerate(paragraphs):
        if place:
            yield ".PP"
        if paragraph.is_verbatim:
            yield ".nf"
            yield ".RS 4"
            yield from map(_verbatim, paragraph.text.splitlines())
            yield ".RE"
            yield ".fi"
        else:
            yield _text(paragraph.text)


def _text(text: str) -> str:
    """Return text in lines of moderate length, with code between backticks in bold."""
    parts = _CODE_SPAN.split(text)
    words = "".join(
        f"\\fB{_roff(part)}\\fR" if place % 2 else _roff(part) for place, part in enumerate(parts)
    )
    lines = wrap(words, _MAX_COLUMNS, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(_protected, lines))


def _verbatim(line: str) -> str:
    return _protected(_roff(line))


def _protected(line: str) -> str:
    """Return a line that roff does not take for a request."""
    return f"\\&{line}" if line.startswith(".") else line


def _roff(text: str) -> str:
    """Escape the characters that roff interprets, and keep hyphens that can be copied and typed."""
    return text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("'", "\\(aq")


def _phrase(summary: str) -> str:
    """Return a summary as the line under NAME has it: one phrase without a full stop."""
    return summary.rstrip(".")


def _related(path: str, known: dict[str, CommandHelp]) -> list[str]:
    """Return the command above this one and the other commands below that."""
    above = path.rpartition(" ")[0]
    if not above:
        return [] if path == "gpulse" else ["gpulse"]
    return [above, *(other for other in known[above].subcommands if other != path)]
