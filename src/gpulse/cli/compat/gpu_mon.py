"""`gpu_mon`: harvest under the name and with the file of the tool it replaces."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gpulse._version import __version__
from gpulse.cli import shell


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    default="~/.config/gpu_mon.conf",
    show_default=True,
    help="What to run when.",
)
@click.option("--debug", is_flag=True, hidden=True)
@click.version_option(__version__, prog_name="gpu_mon (gpulse)")
def command(*, config: Path, debug: bool) -> int:  # noqa: ARG001  run() reads --debug
    """Run programs on idle GPUs, and stop them when somebody comes.

    The same program as `gpulse harvest`, which has more: a dry run, what runs and what was won, a check of what it can
    see, and a form of the file with more in it.
    """
    from gpulse.cli.harvest import start  # noqa: PLC0415  --help needs none of it

    return start(config=config)


def main() -> None:
    """The entry point of `gpu_mon`."""
    sys.exit(shell.run(command, name="gpu_mon"))


if __name__ == "__main__":
    main()
