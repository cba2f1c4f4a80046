"""`gsprof`: heads, agents and sessions under the names and with the options of the tool that gpulse replaces."""

from __future__ import annotations

import copy
import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from gpulse._version import __version__
from gpulse.cli import common, head_client, report, session, session_download
from gpulse.cli import status as head_status
from gpulse.cli.common import CommandGroup
from gpulse.cluster.client.transport import HeadUnreachableError, Transport
from gpulse.cluster.protocol.answers import Done, SeveralSessions
from gpulse.errors import GpulseError, UsageError
from gpulse.terminal import value_format as f

DATA_DIR = Path(".gswarm_profiler_data")
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_EXISTING_FILE = click.Path(path_type=Path, dir_okay=False)


class _BorrowedCommand(NamedTuple):
    """A command of gpulse that gsprof offers under another name."""

    module: str
    help: str
    defaults: dict[str, Any]
    """Default values that differ from gpulse's, by parameter."""
    extra: tuple[click.Parameter, ...] = ()
    option_help: dict[str, str] = {}  # noqa: RUF012  it never changes
    """Help texts that differ from gpulse's, by parameter."""


_RESILIENT = click.Option(
    ["--resilient"],
    is_flag=True,
    expose_value=False,
    help="Has no effect: agents always reconnect and keep unsent frames.",
)
_BORROWED_COMMANDS = {
    "start": _BorrowedCommand(
        "gpulse.cli.head",
        "Start the head, with gRPC on port 8090 and HTTP on 8091.",
        {
            "host": "0.0.0.0",  # noqa: S104  as the users of gsprof expect; a token is needed
            "data_dir": DATA_DIR,
            "freq": 500,
            "enable_bandwidth": False,
            "enable_nvlink": False,
        },
        option_help={
            "data_dir": "Directory for all data of the head.",
            "freq": "Milliseconds between samples of every agent.",
            "enable_bandwidth": "Record PCIe traffic in sessions.",
            "enable_nvlink": "Record NVLink traffic in sessions.",
        },
    ),
    "connect": _BorrowedCommand(
        "gpulse.cli.agent", "Sample this machine for the head at HEAD until Ctrl-C.", {}, (_RESILIENT,)
    ),
}


def _load_borrowed(name: str, borrowed: _BorrowedCommand) -> click.Command:
    """Return a copy of a gpulse command with gsprof's defaults and help."""
    original: click.Command = importlib.import_module(borrowed.module).command
    parameters: list[click.Parameter] = []
    for parameter in original.params:
        mine = copy.copy(parameter)
        if mine.name in borrowed.defaults:
            mine.default = borrowed.defaults[mine.name]
            if isinstance(mine, click.Option):
                mine.show_default = True
                mine.help = borrowed.option_help.get(mine.name, mine.help)
        parameters.append(mine)
    return click.Command(
        name, params=[*parameters, *borrowed.extra], callback=original.callback, help=borrowed.help
    )


class _GsprofGroup(CommandGroup):
    """A group that imports borrowed commands when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return [*_BORROWED_COMMANDS, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _BORROWED_COMMANDS:
            return _load_borrowed(cmd_name, _BORROWED_COMMANDS[cmd_name])
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; hints name commands of gsprof."""
        common.set_rewording(ctx, translate_commands)
        try:
            return super().invoke(ctx)
        except GpulseError as error:  # reported when the context with the rewording is gone
            error.hint = error.hint and translate_commands(error.hint)
            raise


_HEAD = r"(?: --head( [^\s,]+))?"
_TRANSLATIONS = (
    (
        re.compile(rf"gpulse session recover ({head_client.SESSION_NAME_PATTERN}){_HEAD}"),
        r"gsprof recover\2 --name \1",
    ),
    (
        re.compile(rf"gpulse session export ({head_client.SESSION_NAME_PATTERN}){_HEAD}"),
        r"gsprof recover\2 --export --name \1",
    ),
    (
        re.compile(rf"gpulse session stop ({head_client.SESSION_NAME_PATTERN}){_HEAD}"),
        r"gsprof stop\2 --name \1",
    ),
    (
        re.compile(rf"gpulse session start ({head_client.SESSION_NAME_PATTERN}){_HEAD}"),
        r"gsprof profile\2 --name \1",
    ),
    (re.compile(r"gpulse session stop\b"), "gsprof stop"),
    (re.compile(rf"gpulse session list\b{_HEAD}"), r"gsprof status\1"),
    (re.compile(rf"gpulse status\b{_HEAD}"), r"gsprof status\1"),
    (re.compile(r"gpulse report (?=\S)"), "gsprof stat --data "),
    (re.compile(r"gpulse head\b"), "gsprof start"),
    (re.compile(r"gpulse agent\b"), "gsprof connect"),
)


def translate_commands(hint: str) -> str:
    """Replace commands of gpulse in a hint with those of gsprof, where it has them."""
    for ours, theirs in _TRANSLATIONS:
        hint = ours.sub(theirs, hint)
    return hint


@click.group(cls=_GsprofGroup, context_settings=_CONTEXT)
@click.option("--debug", is_flag=True, hidden=True)
@click.version_option(__version__, prog_name="gsprof (gpulse)")
def command(*, debug: bool) -> None:
    """Profile the GPUs of many machines with one head, one agent per machine, and named sessions.

    These are the same programs as `gpulse head`, `gpulse agent`, `gpulse session` and `gpulse report`, which have more
    options.
    """


_TRANSPORT_TITLES: dict[Transport, str] = {"grpc": "gRPC", "http": "HTTP"}
_PORTS: dict[Transport, int] = {"grpc": 8090, "http": 8091}


def _head_argument(transport: Transport) -> Callable[[Callable[..., object]], Callable[..., object]]:
    return click.argument("head", required=False, metavar=f"[HOST[:{_PORTS[transport]}]]")


def _add_profile_command(name: str, transport: Transport) -> None:
    """Add the command that starts a session."""

    @command.command(name, help=f"Start a session over {_TRANSPORT_TITLES[transport]}.")
    @_head_argument(transport)
    @click.option(
        "--name",
        callback=session_download.reject_empty_name,
        metavar="NAME",
        show_default="chosen by the head",
        help="Name of the session.",
    )
    @head_client.access_options
    def profile(*, name: str | None, **given: Any) -> None:
        chosen = _choose_head(given, transport)
        stop = "gsprof stop" if transport == "grpc" else "gsprof http-stop"
        address = _head_arguments(chosen, transport)
        session.start_session(
            chosen, {"name": name}, transport=transport, stop=lambda name: f"{stop} {address} --name {name}"
        )


def _add_stop_command(name: str, transport: Transport) -> None:
    """Add the command that stops sessions."""

    @command.command(name, help=f"Stop one session or all sessions over {_TRANSPORT_TITLES[transport]}.")
    @_head_argument(transport)
    @click.option(
        "--name",
        callback=session_download.reject_empty_name,
        metavar="NAME",
        show_default="all",
        help="Stop only this session.",
    )
    @session_download.format_option_without_file
    @head_client.access_options
    def stop(*, name: str | None, output_format: str | None, **given: Any) -> int:
        body = {"name": name, "format": output_format}
        start = "profile" if transport == "grpc" else "http-profile"
        chosen = _choose_head(given, transport)
        with head_client.connect_to_head(chosen, transport) as head:
            answer = head.call("stop", SeveralSessions, {key: value for key, value in body.items() if value})
            sessions = session_download.wait_until_written(head, answer)
        address = _head_arguments(chosen, transport)
        if not sessions:
            raise GpulseError(
                f.plain(answer.message),
                hint=f"gsprof {start} {address} --name NAME",
            )
        scheme = "http://" if transport == "http" and "://" not in address else ""
        return session_download.print_written_files(
            sessions,
            verb="stopped",
            export_with=lambda name: f"gsprof recover {scheme}{address} --export --name {name}",
        )


def _add_status_command(name: str, transport: Transport) -> None:
    """Add the command that shows a head."""

    @command.command(
        name, help=f"Show the head, its nodes and its sessions over {_TRANSPORT_TITLES[transport]}."
    )
    @_head_argument(transport)
    @click.option("--json", "as_json", is_flag=True, help="Print the head's answer as JSON.")
    @head_client.access_options
    def status(*, as_json: bool, **given: Any) -> int:
        return head_status.print_status(
            _choose_head(given, transport),
            as_json=as_json,
            no_color=False,
            transport=transport,
            name="gsprof",
        )


_add_profile_command("profile", "grpc")
_add_status_command("status", "grpc")
_add_stop_command("stop", "grpc")
_add_profile_command("http-profile", "http")
_add_status_command("http-status", "http")
_add_stop_command("http-stop", "http")


def _choose_head(given: dict[str, Any], transport: Transport) -> head_client.HeadTarget:
    """Return the head that is named, or the one that was started in this directory."""
    chosen = head_client.pop_target(given)
    if chosen.head or os.environ.get("GPULSE_HEAD"):
        return chosen
    local = head_client.find_running_head(DATA_DIR, transport)
    return chosen if local is None else chosen._replace(head=local.target)


def _head_arguments(chosen: head_client.HeadTarget, transport: Transport) -> str:
    """Return the head and its options as they were given, for a suggested command."""
    head = shlex.quote(chosen.head or chosen.address(transport).target)
    return head + chosen._replace(head=None).options()


@command.command("exit")
@_head_argument("grpc")
@head_client.access_options
def exit_head(**given: Any) -> None:
    """Stop the head; active sessions can be recovered later."""
    with head_client.connect_to_head(_choose_head(given, "grpc")) as head:
        head.call("exit", Done)
        common.write(f"the head at {head.address} is stopping")


@command.command("recover")
@_head_argument("grpc")
@click.option(
    "--name", callback=session_download.reject_empty_name, metavar="NAME", help="Name of the session."
)
@session.recovery_options
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    default=DATA_DIR,
    show_default=True,
    help="Data directory to read when no head is given.",
)
@head_client.access_options
def recover_session(*, data_dir: Path, **given: Any) -> None:
    """List interrupted sessions, and resume or export one.

    Without the address of a head, this reads the local data directory, through the head if one is using it.
    """
    chosen = head_client.pop_target(given)
    directory = "" if data_dir == DATA_DIR else f" --data-dir {shlex.quote(str(data_dir))}"
    address = f" {shlex.quote(chosen.head)}" if chosen.head else ""
    options = f"{directory}{chosen._replace(head=None).options()}"
    request = session.RecoveryRequest(
        **given, command=f"gsprof recover{address}", before_name="--name ", options=options
    )
    if chosen.head is None and data_dir.is_dir():
        session.recover_in_directory(request, data_dir, chosen)
        return
    try:
        with head_client.connect_to_head(chosen) as head:
            session.recover_at_head(request, head)
    except GpulseError as error:
        if chosen.head is not None or not isinstance(error, HeadUnreachableError):
            raise
        raise GpulseError(
            f"there is no directory {data_dir}/ here, and no head can be used instead: {error.message}",
            hint="change to the directory where the head was started, or give the head's address: gsprof recover HOST:8090 --list",
        ) from error


@command.command("stat")
@click.option("--data", type=_EXISTING_FILE, metavar="FILE", help="Read this session file.")
@click.option(
    "--name",
    callback=session_download.reject_empty_name,
    metavar="NAME",
    help="Read the newest file of this session in the current directory.",
)
@click.option(
    "--plot",
    type=_EXISTING_FILE,
    metavar="PICTURE",
    help="Also plot to this file: .pdf, .png, .svg or .html.",
)
def stat(*, data: Path | None, name: str | None, plot: Path | None) -> int:
    """Show statistics of a session's GPUs, and plot them."""
    if (data is None) == (name is None):
        raise UsageError(
            "give either --data or --name to choose the session",
            hint="gsprof stat --data training_run_1.json, or gsprof stat --name training_run_1",
        )
    return report.show(data or Path(name or ""), plot)


def main() -> None:
    """Run `gsprof`."""
    sys.exit(common.run(command, name="gsprof"))


if __name__ == "__main__":
    main()
