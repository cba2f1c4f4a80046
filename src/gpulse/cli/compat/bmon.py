"""`bmon`: the look under the name and with the flags of the tool it replaces."""

from __future__ import annotations

import sys

import click

from gpulse._version import __version__
from gpulse.cli import shell


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("-a", "--all", "everything", is_flag=True, help="All features: -b -c -d.")
@click.option(
    "-b",
    "--bottleneck",
    is_flag=True,
    help="What is wrong: faults, and what slows the running jobs, for which it watches them for ten seconds.",
)
@click.option("-c", "--cpu", is_flag=True, help="CPU metrics of the processes on GPUs.")
@click.option("-d", "--disk", is_flag=True, help="Disk metrics.")
@click.option("-v", "--verbose", is_flag=True, help="More of each part.")
@click.option("--debug", is_flag=True, hidden=True)
@click.version_option(__version__, prog_name="bmon (gpulse)")
def command(*, everything: bool, bottleneck: bool, cpu: bool, disk: bool, verbose: bool, debug: bool) -> None:  # noqa: ARG001
    """Show GPU metrics, and on request those of CPUs and disks, and what is wrong.

    The same program as `gpulse`, which has more: network, JSON, CSV, recordings, a full-screen view.
    """
    from gpulse.cli.look import look  # noqa: PLC0415  --help needs none of it
    from gpulse.terminal.snapshot import Parts  # noqa: PLC0415

    parts = Parts(
        cpu=everything or cpu, disk=everything or disk, findings=everything or bottleneck, verbose=verbose
    )
    look(
        opened=None,
        parts=parts,
        gpus=None,
        watch=None,
        as_json=False,
        as_csv=False,
        sqlite=None,
        no_color=False,
        demo=False,
        replay=None,
        at=None,
        diagnosed=bottleneck,
    )


def main() -> None:
    """The entry point of `bmon`."""
    sys.exit(shell.run(command, name="bmon"))
