"""`--help` of every command is complete at 80 columns, and misspelled names get the closest match."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from gpulse.cli import common, gsprof, harvest, main

COLUMNS = 80
PROGRAMS = {
    "gpulse": main.command,
    "bmon": main.bmon,
    "gsprof": gsprof.command,
    "gpu_mon": harvest.gpu_mon,
}


def walk(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield a command and its subcommands with their paths and contexts."""
    context = click.Context(command, info_name=name, parent=parent, terminal_width=COLUMNS)
    yield context.command_path, command, context
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield from walk(found, child, context)


COMMANDS = [entry for name, command in PROGRAMS.items() for entry in walk(command, name)]
OPTIONS = [
    pytest.param(option, id=f"{path} {max(option.opts, key=len)}")
    for path, command, _ in COMMANDS
    for option in command.params
    if isinstance(option, click.Option) and not option.hidden
]


@pytest.mark.parametrize(
    ("path", "command", "context"), [pytest.param(*entry, id=entry[0]) for entry in COMMANDS]
)
def test_help_fits_80_columns(path: str, command: click.Command, context: click.Context) -> None:
    """The summary is complete in the list of commands, and the text starts with a sentence."""
    lines = command.get_help(context).splitlines()
    assert command.help, path
    assert command.help[0].isupper()
    listed = lines[lines.index("Commands:") + 1 :] if "Commands:" in lines else []
    assert not [line for line in listed if line.rstrip().endswith("...")]
    assert all(len(line) <= COLUMNS for line in listed)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_explains_itself(option: click.Option) -> None:
    """In a phrase that ends with a full stop, with its default and `repeatable` where they belong."""
    text = option.help or ""
    assert text
    assert text[0].isupper() or text.startswith("gRPC")
    assert text.endswith(".")
    assert option.multiple == ("repeatable" in text)
    assert not any(words in text.lower() for words in ("default", "left out", "when not given"))
    assert option.metavar or option.is_flag or option.count or isinstance(option.type, click.Choice)


@pytest.mark.parametrize(("path", "command", "context"), COMMANDS, ids=[path for path, *_ in COMMANDS])
def test_help_names_only_what_the_command_has(
    path: str, command: click.Command, context: click.Context
) -> None:
    """A default that depends on --push or on FILE needs that option or argument; a place is a DIR."""
    text = command.get_help(context)
    options = {name for param in command.params if isinstance(param, click.Option) for name in param.opts}
    metavars = " ".join(param.make_metavar(context) for param in command.params)

    assert "with --push" not in text or "--push" in options, path
    assert "FILE's extension" not in text or "FILE" in metavars, path
    assert "FOLDER" not in text, path


def test_the_usage_of_completion_names_the_argument_as_its_text_does() -> None:
    """And the text lists the shells."""
    text = next(
        command.get_help(context) for path, command, context in COMMANDS if path == "gpulse completion"
    )

    assert "[SHELL]" in text.splitlines()[0]
    assert "SHELL: bash, fish or zsh" in text


@pytest.mark.parametrize(
    ("program", "arguments", "meant"),
    [
        ("gpulse", ["wy"], "`why`"),
        ("gpulse", ["recrod"], "`record`"),
        ("gpulse", ["session", "strat"], "`start`"),
        ("gpulse", ["deploy", "statsu"], "`status`"),
        ("gpulse", ["harvest", "docter"], "`doctor`"),
        ("gpulse", ["dask", "atach"], "`attach`"),
        ("gpulse", ["--wacth"], "`--watch`"),
        ("gpulse", ["top", "--readnly"], "`--readonly`"),
        ("gpulse", ["session", "start", "--lable", "a=b"], "`--label`"),
        ("gsprof", ["profil"], "`profile`"),
        ("gsprof", ["status", "--jsn"], "`--json`"),
        ("bmon", ["--jsno"], "`--json`"),
        ("gpu_mon", ["--confg", "x"], "`--config`"),
    ],
)
def test_a_misspelled_name_gets_the_closest_match(
    program: str,
    arguments: list[str],
    meant: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For commands, subcommands and options, with exit code 2."""
    monkeypatch.setattr("sys.argv", [program, *arguments])

    assert common.run(PROGRAMS[program], name=program) == 2

    error = capsys.readouterr().err
    assert f"did you mean {meant}?" in error
    assert "try: " in error


def test_a_name_like_no_other_gets_the_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of commands; an option gets the help."""
    monkeypatch.setattr("sys.argv", ["gpulse", "session", "xyzzy"])

    assert common.run(main.command, name="gpulse") == 2

    assert "there is no command 'xyzzy'; the commands are: compare, export, list, " in capsys.readouterr().err
