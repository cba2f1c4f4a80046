"""`gsprof`: heads, agents and sessions under the names and with the options of the tool they replace."""

from __future__ import annotations

import copy
import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from gpulse._version import __version__
from gpulse.cli import recover, remote, session, shell, target
from gpulse.errors import GpulseError, UsageError
from gpulse.terminal import format as f

if TYPE_CHECKING:
    from gpulse.cluster.client.address import Transport

DATA_DIR = Path(".gswarm_profiler_data")
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_EXISTING_FILE = click.Path(path_type=Path, dir_okay=False)


class _Borrowed(NamedTuple):
    """A command of gpulse under another name."""

    module: str
    help: str
    defaults: dict[str, Any]
    """By parameter, where they are others than gpulse's."""
    extra: tuple[click.Parameter, ...] = ()
    option_help: dict[str, str] = {}  # noqa: RUF012  it never changes
    """By parameter, where the help of gpulse's would not be true."""


_RESILIENT = click.Option(
    ["--resilient"],
    is_flag=True,
    expose_value=False,
    help="Accepted; agents always reconnect and keep frames.",
)
_BORROWED = {
    "start": _Borrowed(
        "gpulse.cli.head",
        "Start the head: gRPC for agents on 8090, HTTP on 8091, for all machines, data in .gswarm_profiler_data/.",
        {
            "host": "0.0.0.0",  # noqa: S104  as the users of gsprof expect; a token is needed
            "data_dir": DATA_DIR,
            "freq": 500,
            "enable_bandwidth": False,
            "enable_nvlink": False,
        },
        option_help={
            "data_dir": "Where everything is kept.",
            "freq": "Milliseconds between two samples of every agent.",
            "enable_bandwidth": "PCIe traffic in sessions.",
            "enable_nvlink": "NVLink traffic in sessions.",
        },
    ),
    "connect": _Borrowed(
        "gpulse.cli.agent", "Sample this machine for the head at HEAD until Ctrl-C.", {}, (_RESILIENT,)
    ),
}


def _borrowed(name: str, borrowed: _Borrowed) -> click.Command:
    """The other command with its own defaults."""
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


class _Group(click.Group):
    """A group that loads the commands it borrows when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return [*_BORROWED, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _BORROWED:
            return _borrowed(cmd_name, _BORROWED[cmd_name])
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what to try is said in the words of gsprof."""
        shell.use_words(ctx, reworded)
        try:
            return super().invoke(ctx)
        except GpulseError as error:  # it is reported when the command has ended
            error.hint = error.hint and reworded(error.hint)
            raise


_HEAD = r"(?: --head( [^\s,]+))?"
_WORDS = (
    (re.compile(rf"gpulse session recover ({remote.NAME}){_HEAD}"), r"gsprof recover\2 --name \1"),
    (re.compile(rf"gpulse session export ({remote.NAME}){_HEAD}"), r"gsprof recover\2 --export --name \1"),
    (re.compile(rf"gpulse session stop ({remote.NAME}){_HEAD}"), r"gsprof stop\2 --name \1"),
    (re.compile(rf"gpulse session start ({remote.NAME}){_HEAD}"), r"gsprof profile\2 --name \1"),
    (re.compile(r"gpulse session stop\b"), "gsprof stop"),
    (re.compile(rf"gpulse session list\b{_HEAD}"), r"gsprof status\1"),
    (re.compile(rf"gpulse status\b{_HEAD}"), r"gsprof status\1"),
    (re.compile(r"gpulse report (?=\S)"), "gsprof stat --data "),
    (re.compile(r"gpulse head\b"), "gsprof start"),
    (re.compile(r"gpulse agent\b"), "gsprof connect"),
)


def reworded(hint: str) -> str:
    """Return advice with the commands of gsprof where it has them."""
    for ours, theirs in _WORDS:
        hint = ours.sub(theirs, hint)
    return hint


@click.group(cls=_Group, context_settings=_CONTEXT)
@click.option("--debug", is_flag=True, hidden=True)
@click.version_option(__version__, prog_name="gsprof (gpulse)")
def command(*, debug: bool) -> None:
    """Profile the GPUs of many machines: one head, a client on each machine, named sessions.

    The same programs as `gpulse head`, `gpulse agent`, `gpulse session` and `gpulse report`, which have more.
    """


_SPOKEN: dict[Transport, str] = {"grpc": "gRPC", "http": "HTTP"}
_PORTS: dict[Transport, int] = {"grpc": 8090, "http": 8091}


def _address(transport: Transport) -> Callable[[Callable[..., object]], Callable[..., object]]:
    return click.argument("head", required=False, metavar=f"[HOST[:{_PORTS[transport]}]]")


def _profile(name: str, transport: Transport) -> None:
    """Add the command that begins a session."""

    @command.command(name, help=f"Begin a session, over {_SPOKEN[transport]}.")
    @_address(transport)
    @click.option(
        "--name", callback=remote.not_empty, help="The session's name; the head finds one when left out."
    )
    @target.access_options
    def profile(*, name: str | None, **given: Any) -> None:
        chosen = _chosen(given, transport)
        stop = "gsprof stop" if transport == "grpc" else "gsprof http-stop"
        there = _where(chosen, transport)
        session.begin(
            chosen, {"name": name}, transport=transport, stop=lambda name: f"{stop} {there} --name {name}"
        )


def _stop(name: str, transport: Transport) -> None:
    """Add the command that ends sessions."""

    @command.command(name, help=f"End a session, or all of them, over {_SPOKEN[transport]}.")
    @_address(transport)
    @click.option("--name", callback=remote.not_empty, help="The session to end; all when left out.")
    @remote.format_option
    @target.access_options
    def stop(*, name: str | None, output_format: str | None, **given: Any) -> int:
        body = {"name": name, "format": output_format}
        from gpulse.cluster.protocol.answers import SeveralSessions  # noqa: PLC0415  --help needs none of it

        begin = "profile" if transport == "grpc" else "http-profile"
        chosen = _chosen(given, transport)
        with remote.asking(chosen, transport) as head:
            answer = head.call("stop", SeveralSessions, {key: value for key, value in body.items() if value})
            sessions = remote.written(head, answer)
        there = _where(chosen, transport)
        if not sessions:
            raise GpulseError(
                f.plain(answer.message),
                hint=f"gsprof {begin} {there} --name NAME",
            )
        scheme = "http://" if transport == "http" and "://" not in there else ""
        return remote.tell_written(
            sessions,
            verb="stopped",
            export_with=lambda name: f"gsprof recover {scheme}{there} --export --name {name}",
        )


def _status(name: str, transport: Transport) -> None:
    """Add the command that shows a head."""

    @command.command(name, help=f"Show the head, its nodes and sessions, over {_SPOKEN[transport]}.")
    @_address(transport)
    @click.option("--json", "as_json", is_flag=True, help="Print the head's answer as JSON.")
    @target.access_options
    def status(*, as_json: bool, **given: Any) -> int:
        from gpulse.cli.status import show  # noqa: PLC0415  other commands need none of it

        return show(
            _chosen(given, transport),
            as_json=as_json,
            no_color=False,
            transport=transport,
            name="gsprof",
        )


_profile("profile", "grpc")
_status("status", "grpc")
_stop("stop", "grpc")
_profile("http-profile", "http")
_status("http-status", "http")
_stop("http-stop", "http")


def _chosen(given: dict[str, Any], transport: Transport) -> target.Target:
    """The head that is named, or the one that was started here."""
    chosen = target.taken(given)
    if chosen.head or os.environ.get("GPULSE_HEAD"):
        return chosen
    here = target.running_at(DATA_DIR, transport)
    return chosen if here is None else chosen._replace(head=here.target)


def _where(chosen: target.Target, transport: Transport) -> str:
    """Return the head and the options as they were given, for a command that is suggested."""
    head = shlex.quote(chosen.head or chosen.address(transport).target)
    return head + chosen._replace(head=None).options()


@command.command("exit")
@_address("grpc")
@target.access_options
def end(**given: Any) -> None:
    """End the head; sessions that go on can be recovered."""
    from gpulse.cluster.protocol.answers import Done  # noqa: PLC0415  --help needs none of it

    with remote.asking(_chosen(given, "grpc")) as there:
        there.call("exit", Done)
        shell.write(f"the head at {there.place} ends")


@command.command("recover")
@_address("grpc")
@click.option("--name", callback=remote.not_empty, help="The session.")
@recover.options
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    default=DATA_DIR,
    show_default=True,
    help="Where to look when no head is named.",
)
@target.access_options
def recover_session(*, data_dir: Path, **given: Any) -> None:
    """List the sessions that were interrupted, go on with one, or export one.

    Without the address of a head it looks into the data directory here, and asks the head that works there.
    """
    chosen = target.taken(given)
    place = "" if data_dir == DATA_DIR else f" --data-dir {shlex.quote(str(data_dir))}"
    there = f" {shlex.quote(chosen.head)}" if chosen.head else ""
    options = f"{place}{chosen._replace(head=None).options()}"
    asked = recover.Asked(**given, command=f"gsprof recover{there}", before_name="--name ", options=options)
    if chosen.head is None and data_dir.is_dir():
        recover.in_directory(asked, data_dir, chosen)
        return
    try:
        with remote.asking(chosen) as head:
            recover.at_head(asked, head)
    except GpulseError as error:
        from gpulse.cluster.client.link import UnreachableError  # noqa: PLC0415  --help needs none of it

        if chosen.head is not None or not isinstance(error, UnreachableError):
            raise
        raise GpulseError(
            f"there is no {data_dir}/ here, and {error.message}",
            hint="go where the head was started, or name the head: gsprof recover HOST:8090 --list",
        ) from error


@command.command("stat")
@click.option("--data", type=_EXISTING_FILE, metavar="FILE", help="A session's file.")
@click.option("--name", callback=remote.not_empty, help="A session, of which the newest file here is read.")
@click.option(
    "--plot", type=_EXISTING_FILE, metavar="PICTURE", help="Also draw it: .pdf, .png, .svg or .html."
)
def stat(*, data: Path | None, name: str | None, plot: Path | None) -> int:
    """Say what the GPUs of a session did, and draw it."""
    if (data is None) == (name is None):
        raise UsageError(
            "either --data or --name says which session is meant",
            hint="gsprof stat --data training_run_1.json, or gsprof stat --name training_run_1",
        )
    from gpulse.cli.report import show  # noqa: PLC0415  other commands need none of it

    return show(data or Path(name or ""), plot)


def main() -> None:
    """The entry point of `gsprof`."""
    sys.exit(shell.run(command, name="gsprof"))


if __name__ == "__main__":
    main()
