"""`gpulse`: the root command, which prints a snapshot when no command is given; `bmon`, which prints nothing else.

`bmon` has the name and the options of the tool that gpulse replaces.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import click

from gpulse._version import __version__
from gpulse.cli import common
from gpulse.cli.common import CommandGroup
from gpulse.cli.snapshot import PARTS, run_snapshot, snapshot_options

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_INSTALL_COMMANDS = {
    "bash": "gpulse completion bash >> ~/.bashrc",
    "zsh": "gpulse completion zsh >> ~/.zshrc",
    "fish": "gpulse completion fish > ~/.config/fish/completions/gpulse.fish",
}
_SHA256_MODULES = ("_sha256", "_sha2")
"""Python's own implementation, by version."""
_BMON_PARTS = ("bottleneck", "cpu", "disk")
"""The parts that `-a` shows: -b -c -d, as in the replaced tool."""


class Verb(NamedTuple):
    """A command whose module is imported when it is used."""

    module: str
    help: str
    attribute: str = "command"
    """Name of the command in its module."""
    openssl: bool = True
    """Whether it uses OpenSSL; gRPC has its own."""

    def load(self) -> click.Command:
        """Import the command."""
        with nullcontext() if self.openssl else _without_openssl():
            command: click.Command = getattr(importlib.import_module(self.module), self.attribute)
        return command


@contextmanager
def _without_openssl() -> Iterator[None]:
    """Hide OpenSSL from the modules that are imported in this block: asyncio and hashlib load it, but do without.

    It takes 5 MB, a tenth of an agent. Some systems have no other implementation of hashes; there it is not hidden.
    """
    hidden = [name for name in ("ssl", "_hashlib") if name not in sys.modules]
    if not any(importlib.util.find_spec(name) for name in _SHA256_MODULES):
        hidden = []
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # importing a module that is None fails
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


VERBS = {
    "why": Verb("gpulse.cli.why", "Find out why GPUs are slow, from live data or a recording."),
    "stacks": Verb("gpulse.cli.stacks", "Print the stacks of Python processes that use GPUs."),
    "top": Verb("gpulse.cli.top", "Watch this machine or a cluster in a full-screen view."),
    "wait": Verb("gpulse.cli.wait", "Wait until GPUs are free, then start a command on them."),
    "record": Verb("gpulse.cli.record", "Record this machine to a file, optionally while a command runs."),
    "harvest": Verb("gpulse.cli.harvest", "Run programs on idle GPUs until somebody needs them."),
    "dask": Verb("gpulse.cli.dask", "Record GPU metrics of a Dask cluster by job, graph and task."),
    "head": Verb("gpulse.cli.head", "Run the head, which collects and serves data from many nodes."),
    "agent": Verb("gpulse.cli.agent", "Sample this machine for a head or for Prometheus.", openssl=False),
    "demo": Verb("gpulse.cli.demo", "Run a simulated cluster with its web page on this machine."),
    "deploy": Verb("gpulse.cli.deploy", "Install and remove agents on many nodes over ssh."),
    "session": Verb("gpulse.cli.session", "Start, stop, list, show, recover and export sessions."),
    "job": Verb("gpulse.cli.job", "Show how well a job, session or process used its GPUs."),
    "findings": Verb("gpulse.cli.findings", "List, acknowledge and silence the findings of a head."),
    "status": Verb("gpulse.cli.status", "Show a head, its nodes and its active sessions."),
    "notify": Verb("gpulse.cli.notify", "Check notification settings and send test messages."),
    "token": Verb("gpulse.cli.token", "Show where a head's token is and how to copy it."),
    "settings": Verb("gpulse.cli.settings", "Show or change the sampling settings of a head's agents."),
    "report": Verb("gpulse.cli.report", "Show or plot the statistics of a session from its file."),
    "doctor": Verb("gpulse.cli.doctor", "Check what gpulse can read, and show how to fix problems."),
    "explain": Verb(
        "gpulse.cli.explain", "Explain findings: what they mean, how they are detected, and what to do."
    ),
    "completion": Verb("gpulse.cli.main", "Print the shell completion script.", "completion"),
}


class RootGroup(CommandGroup):
    """The group of all commands, imported one at a time so that a snapshot loads no other command's libraries."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        """Return the commands in the order of the help."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one command."""
        return VERBS[cmd_name].load() if cmd_name in VERBS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.help) for name, verb in VERBS.items()])


@click.group(cls=RootGroup, invoke_without_command=True, context_settings=_CONTEXT)
@click.option(
    "-a",
    "--all",
    "everything",
    is_flag=True,
    help="Show everything: CPU, disks, network and bottleneck diagnosis (takes about ten seconds).",
)
@snapshot_options
@click.option("--debug", is_flag=True, help="Print the traceback of an error.")
@click.version_option(__version__, prog_name="gpulse")
@click.pass_context
def command(ctx: click.Context, /, *, everything: bool, debug: bool, **options: Any) -> None:  # noqa: ARG001  run() reads --debug
    """Show what the GPUs are doing now and, on request, CPUs, disks, network, faults and bottlenecks.

    \b
    gpulse                 show the GPUs once
    gpulse -a              show everything
    gpulse --demo -a       show a simulated machine with eight GPUs
    gpulse -w 1            update every second
    gpulse why             find out why jobs are slow, with evidence

    CPU, disk and network rates are measured over half a second before they are shown.
    """  # noqa: D301  click needs the backspace itself
    if ctx.invoked_subcommand is not None:
        verb = VERBS[ctx.invoked_subcommand].load()
        common.reject_misplaced_options(ctx, verb, "gpulse", ctx.invoked_subcommand)
        return
    run_snapshot(options, always=PARTS if everything else (), opened=ctx.obj)


@click.command(
    epilog="\b\nInstall it with one of:\n" + "\n".join(f"  {line}" for line in _INSTALL_COMMANDS.values())
)
@click.argument("shell", type=click.Choice(sorted(_INSTALL_COMMANDS)), required=False, metavar="[SHELL]")
def completion(shell: str | None) -> None:
    """Print the completion script for SHELL: bash, fish or zsh (default: your login shell)."""
    if shell is None:
        shell = os.path.basename(os.environ.get("SHELL", ""))
        if shell not in _INSTALL_COMMANDS:
            raise click.UsageError(
                "cannot determine your shell; give one of: " + ", ".join(sorted(_INSTALL_COMMANDS))
            )
    from click.shell_completion import get_completion_class  # noqa: PLC0415  which a snapshot does not need

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  click has all three
    click.echo(kind(command, {}, "gpulse", "_GPULSE_COMPLETE").source())


@click.command(context_settings=_CONTEXT)
@click.option(
    "-a",
    "--all",
    "everything",
    is_flag=True,
    help="Show everything that -b, -c and -d show (takes about ten seconds).",
)
@snapshot_options
@click.option("--debug", is_flag=True, hidden=True)
@click.version_option(__version__, prog_name="bmon (gpulse)")
def bmon(*, everything: bool, debug: bool, **options: Any) -> None:  # noqa: ARG001  run() reads --debug
    """Show GPU metrics and, on request, CPUs, disks, network, faults and bottlenecks.

    \b
    bmon                   show the GPUs once
    bmon -a                show everything, and what slows down running jobs
    bmon --json            print JSON for programs; also --csv and --sqlite FILE

    This is the same program as `gpulse`, which also supports recordings, a full-screen view and clusters.
    """  # noqa: D301  click needs the backspace itself
    run_snapshot(options, always=_BMON_PARTS if everything else (), opened=None)


def run_bmon() -> None:
    """Run `bmon`."""
    sys.exit(common.run(bmon, name="bmon"))
