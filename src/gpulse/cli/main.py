"""`gpulse`: the command line's root, which looks when no verb is given."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import click

from gpulse._version import __version__
from gpulse.cli import shell
from gpulse.cli.look_options import PARTS, look_options, take_look

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Verb(NamedTuple):
    """A command that is loaded when it is used."""

    module: str
    help: str


VERBS = {
    "why": Verb(
        "gpulse.cli.why", "Say what holds the GPUs up: watch, or judge a recording or a command's run."
    ),
    "top": Verb("gpulse.cli.top", "Watch GPUs, processes and host full-screen."),
    "record": Verb("gpulse.cli.record", "Record this machine, or a command's run, into a file."),
    "harvest": Verb("gpulse.cli.harvest", "Put idle GPUs to work, and give them back at once."),
    "dask": Verb(
        "gpulse.cli.dask", "Record a Dask cluster's GPUs by job, graph and task; peaks, CSV, plots."
    ),
    "head": Verb(
        "gpulse.cli.head", "Collect from many nodes: keep it, answer for it, cut sessions out of it."
    ),
    "agent": Verb("gpulse.cli.agent", "Sample this machine for a head, whatever the network does."),
    "demo": Verb("gpulse.cli.demo", "Show a whole simulated cluster on this machine, with its web page."),
    "deploy": Verb("gpulse.cli.deploy", "Put agents on many nodes over ssh, and take them away again."),
    "session": Verb("gpulse.cli.session", "Profiling sessions: start, stop, list, show, recover, export."),
    "job": Verb("gpulse.cli.job", "How well a job, a session or a process used its GPUs."),
    "status": Verb("gpulse.cli.status", "How a head is, its nodes, and what is being profiled."),
    "token": Verb("gpulse.cli.token", "Show where a head's token is, and how to copy it to other machines."),
    "settings": Verb("gpulse.cli.settings", "Show or change how a head's agents sample."),
    "report": Verb("gpulse.cli.report", "Statistics and plots of a session's file."),
    "doctor": Verb("gpulse.cli.doctor", "Check what can be read here, and say how to get the rest."),
    "explain": Verb(
        "gpulse.cli.explain",
        "Explain the findings: what they mean, how they are recognised, how to fix them.",
    ),
    "completion": Verb("gpulse.cli.completion", "Print the shell completion script."),
}


class Root(click.Group):
    """A group whose verbs are imported one at a time, so that a look loads no other verb's libraries."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        """The verbs, in the order of the help."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Load one verb."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(VERBS[cmd_name].module).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The verbs' help without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.help) for name, verb in VERBS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with an error that names the verbs."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(
                f"there is no command {args[0]!r}; there are: {', '.join(VERBS)}", ctx
            ) from error


@click.group(cls=Root, invoke_without_command=True, context_settings=_CONTEXT)
@click.option(
    "-a",
    "--all",
    "everything",
    is_flag=True,
    help="Everything: CPU, disks, network and bottleneck diagnosis (takes about ten seconds).",
)
@look_options
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.version_option(__version__, prog_name="gpulse")
@click.pass_context
def command(ctx: click.Context, /, *, everything: bool, debug: bool, **options: Any) -> None:  # noqa: ARG001  run() reads --debug
    """What your GPUs are doing: one look at GPUs, and on request at CPUs, disks, network and faults.

    \b
    gpulse                 one look
    gpulse -a              everything
    gpulse --demo -a       the same, on a simulated machine with eight GPUs
    gpulse -w 1            look every second
    gpulse why             what holds the jobs up, with evidence

    Rates (CPU, disks, network) are measured over half a second before they are shown.
    """  # noqa: D301  click needs the backspace itself
    if ctx.invoked_subcommand is not None:
        verb = importlib.import_module(VERBS[ctx.invoked_subcommand].module).command
        shell.refuse_stray_options(ctx, verb, "gpulse", ctx.invoked_subcommand)
        return
    take_look(options, always=PARTS if everything else (), opened=ctx.obj)
