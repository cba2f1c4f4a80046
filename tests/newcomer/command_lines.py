"""Find gpulse's programs in shell lines, and parse their arguments as the programs themselves would."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from unittest import mock

import click

from tools.docs.command_tree import PROGRAMS

_INLINE_CODE = re.compile(rf"(?<!`)`((?:{'|'.join(PROGRAMS)})(?: [^`\n]+)?)`(?!`)")
_OPERATOR = re.compile(r"[;|&()<>]+")
_NOT_PROGRAMS = ("apt-get", "createdb", "dnf", "install", "journalctl", "man", "pip", "systemctl")
"""Commands whose arguments may be called gpulse and are something else."""


def find_inline_lines(text: str) -> list[str]:
    """Return the command lines that a document shows as code within its sentences."""
    return _INLINE_CODE.findall(text)


def find_invocations(line: str) -> Iterator[list[str]]:
    """Yield the program and the arguments of every call of gpulse's programs in a shell line.

    A program also counts after another one that starts it, such as `docker run IMAGE gpulse agent HEAD`.
    """
    for simple in _split_at_operators(line):
        names = [word.rpartition("/")[2] for word in simple]
        if not any(name in _NOT_PROGRAMS for name in names[:2]):
            start = next((place for place, name in enumerate(names) if name in PROGRAMS), None)
            if start is not None:
                yield [names[start], *simple[start + 1 :]]


def _split_at_operators(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if not _OPERATOR.fullmatch(word):
            words.append(word)
            continue
        if word.startswith(">") and words and words[-1] in ("1", "2"):
            words.pop()  # the number of a file descriptor, as in 2>&1
        yield words
        words = []
    yield words


def check(arguments: list[str], *, is_mention: bool = False) -> str:
    """Return what is wrong with a call of a program, or nothing; files need not exist.

    Args:
        arguments: The program and its arguments.
        is_mention: Whether it stands in a sentence, where arguments may be left out: `gpulse deploy up`.
    """
    incomplete = (click.MissingParameter, click.BadOptionUsage, click.exceptions.NoArgsIsHelpError)
    given = [word for word in arguments[1:] if not is_mention or word not in ("...", "…")]
    given = [word.strip("[]") for word in given] if is_mention else given
    with mock.patch.object(click.Path, "convert", _accept_path):
        try:
            _parse(PROGRAMS[arguments[0]], arguments[0], given, None)
        except click.exceptions.Exit:  # --help and --version
            return ""
        except click.ClickException as error:
            return "" if is_mention and isinstance(error, incomplete) else error.format_message()
    return ""


def _accept_path(self: click.Path, value: str, param: object, ctx: object) -> object:  # noqa: ARG001  click's signature
    return self.coerce_path_result(value)


def _parse(command: click.Command, name: str, arguments: list[str], parent: click.Context | None) -> None:
    with command.make_context(name, list(arguments), parent=parent) as context:
        rest = [*context._protected_args, *context.args]
        if isinstance(command, click.Group) and rest:
            found, subcommand, below = command.resolve_command(context, rest)
            assert subcommand is not None
            _parse(subcommand, found or "", below, context)
