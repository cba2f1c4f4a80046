"""The commands of the command line, with their help split into parts that pages and man pages can format."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import NamedTuple

import click

from gpulse.cli import gsprof, harvest, main

PROGRAMS: dict[str, click.Command] = {
    "gpulse": main.command,
    "gsprof": gsprof.command,
    "bmon": main.bmon,
    "gpu_mon": harvest.gpu_mon,
}
"""Every program that the package installs, by name."""
_VERBATIM = "\b"
_EXIT_CODES = re.compile(r"(?i)(the )?exit (code|status)s?\b")


class Paragraph(NamedTuple):
    """One paragraph of a help text."""

    text: str
    is_verbatim: bool
    """Whether its line breaks and spaces matter, as in a list of examples."""


class Option(NamedTuple):
    """One option as `--help` shows it."""

    names: str
    """With its value, such as `-i, --interval SECONDS`."""
    help: str
    """With its default and its limits."""
    variable: str
    """The environment variable that can set it, or nothing."""


class CommandHelp(NamedTuple):
    """What the help of one command says."""

    path: str
    """Such as `gpulse session start`."""
    usage: str
    summary: str
    description: list[Paragraph]
    exit_codes: list[Paragraph]
    options: list[Option]
    subcommands: list[str]
    """Paths of the commands one level below."""


def read_commands() -> list[CommandHelp]:
    """Return every command that is not hidden, each before its subcommands."""
    found: list[CommandHelp] = []
    for name, command in PROGRAMS.items():
        context = _context(command, name)
        found += _walk(context, summary=_summary(command))
    return found


def _walk(context: click.Context, summary: str) -> Iterator[CommandHelp]:
    command = context.command
    below = list(_subcommands(context))
    paragraphs = split_paragraphs(command.help or "")
    yield CommandHelp(
        context.command_path,
        f"{context.command_path} {' '.join(command.collect_usage_pieces(context))}".strip(),
        summary,
        [one for one in paragraphs if not _EXIT_CODES.match(one.text)],
        [one for one in paragraphs if _EXIT_CODES.match(one.text)],
        list(_options(context)),
        [child.command_path for child, _ in below],
    )
    for child, text in below:
        yield from _walk(child, text)


def _subcommands(context: click.Context) -> Iterator[tuple[click.Context, str]]:
    group = context.command
    if not isinstance(group, click.Group):
        return
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        summary = main.VERBS[name].help if isinstance(group, main.RootGroup) else _summary(command)
        yield _context(command, name, context), summary


def _context(command: click.Command, name: str, parent: click.Context | None = None) -> click.Context:
    return click.Context(command, info_name=name, parent=parent, **command.context_settings)


def _summary(command: click.Command) -> str:
    return command.get_short_help_str(limit=10_000)


def _options(context: click.Context) -> Iterator[Option]:
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or not isinstance(parameter, click.Option):
            continue
        variable = parameter.envvar if isinstance(parameter.envvar, str) else ""
        # click keeps the help option of a command with the names that its first context had.
        flags = ", ".join(context.help_option_names) if "--help" in parameter.opts else record[0]
        yield Option(flags, " ".join(record[1].split()), "" if variable in record[1] else variable)


def split_paragraphs(text: str) -> list[Paragraph]:
    r"""Split a help text as click does: at blank lines, verbatim after a line with \b alone."""
    found: list[Paragraph] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text).partition("\f")[0]):
        lines = block.strip("\n").splitlines()
        if lines and lines[0].strip() == _VERBATIM:
            found.append(Paragraph("\n".join(line.rstrip() for line in lines[1:]), is_verbatim=True))
        elif lines:
            found.append(Paragraph(" ".join(line.strip() for line in lines), is_verbatim=False))
    return found
