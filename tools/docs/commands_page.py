"""The page docs/reference/commands.md: every command of the package with its options and exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tools.docs.command_tree import PROGRAMS, CommandHelp, Option, Paragraph

_CODE_SPAN = re.compile(r"(`[^`]*`)")
_INTRODUCTION = """\
# Commands

Every command with its options. `--help` after a command prints the same text, and so does its man page:
`man gpulse`, `man gpulse-why`, `man gpulse-session-start`.

A short option takes its value after a space or directly (`-i 0.5`, `-i0.5`), a long one after a space or `=`
(`--interval 0.5`, `--interval=0.5`). Options come after the command that they belong to.

[Exit codes](exit-codes.md) have a page of their own.

<!-- Generated from the command line's own help by `make docs`; do not edit. -->"""


def commands_markdown(commands: Iterable[CommandHelp]) -> str:
    """Return the page."""
    known = {command.path: command for command in commands}
    lines = [_INTRODUCTION, "", "## Programs and verbs", "", "| command | purpose |", "|---|---|"]
    for program in PROGRAMS:
        lines += [
            f"| [`{path}`](#{anchor(path)}) | {_markdown(known[path].summary)} |"
            for path in (program, *known[program].subcommands)
            if program in (path, "gpulse")
        ]
    for command in known.values():
        lines += _section(command, known)
    return "\n".join(lines) + "\n"


def anchor(path: str) -> str:
    """Return the anchor of a command's section."""
    return path.replace(" ", "-")


def _section(command: CommandHelp, known: dict[str, CommandHelp]) -> Iterator[str]:
    level = "##" if command.path.count(" ") < 2 else "###"
    yield from ("", f"{level} {command.path}", "")
    yield from ("```text", command.usage, "```")
    for paragraph in command.description:
        yield from _paragraph(paragraph)
    if command.subcommands and command.path != "gpulse":  # those are listed at the top of the page
        yield from ("", "| subcommand | purpose |", "|---|---|")
        for path in command.subcommands:
            yield f"| [`{path}`](#{anchor(path)}) | {_markdown(known[path].summary)} |"
    yield from ("", "| option | meaning |", "|---|---|")
    yield from map(_option, command.options)
    for paragraph in command.exit_codes:
        yield from _paragraph(paragraph)


def _paragraph(paragraph: Paragraph) -> Iterator[str]:
    yield ""
    if paragraph.is_verbatim:
        yield from ("```text", paragraph.text, "```")
    else:
        yield _markdown(paragraph.text)


def _option(option: Option) -> str:
    names = option.names.replace("|", "\\|")
    variable = f" Environment variable: `{option.variable}`." if option.variable else ""
    return f"| `{names}` | {_markdown(option.help)}{variable} |"


def _markdown(text: str) -> str:
    """Escape what Markdown would take for markup; code between backticks stays as it is."""
    parts = _CODE_SPAN.split(text)
    escaped = [part if part.startswith("`") else re.sub(r"([*<\\])", r"\\\1", part) for part in parts]
    return "".join(escaped).replace("|", "\\|")
