"""`bmon`: the look under the name and with the flags of the tool it replaces."""

from __future__ import annotations

import sys
from typing import Any

import click

from gpulse._version import __version__
from gpulse.cli import shell
from gpulse.cli.look_options import look_options, take_look

_ALL = ("bottleneck", "cpu", "disk")
"""What `-a` stands for: -b -c -d, as in the tool that this one replaces."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "-a", "--all", "everything", is_flag=True, help="All features: -b -c -d (takes about ten seconds)."
)
@look_options
@click.option("--debug", is_flag=True, hidden=True)
@click.version_option(__version__, prog_name="bmon (gpulse)")
def command(*, everything: bool, debug: bool, **options: Any) -> None:  # noqa: ARG001  run() reads --debug
    """Show GPU metrics, and on request those of CPUs, disks and network, and what is wrong.

    \b
    bmon                   one look at the GPUs
    bmon -a                everything about them, and what slows the running jobs
    bmon --json            for programs; also --csv and --sqlite FILE

    The same program as `gpulse`, which also has recordings, a full-screen view and clusters.
    """  # noqa: D301  click needs the backspace itself
    take_look(options, always=_ALL if everything else (), opened=None)


def main() -> None:
    """The entry point of `bmon`."""
    sys.exit(shell.run(command, name="bmon"))
