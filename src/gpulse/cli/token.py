"""`gpulse token`: shows where the head's token is, and how to copy it."""

from __future__ import annotations

import os
from pathlib import Path

import click

from gpulse.cli import service, shell
from gpulse.errors import GpulseError


@click.command()
@click.option("--show", is_flag=True, help="Print the token itself, and nothing else.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The token's file; default: that of the head that runs here, else the one commands use.",
)
def command(*, show: bool, token_file: Path | None) -> int:
    """Show where the token is that a head wants from other machines and other users, and how to copy it.

    \b
    gpulse token             the file, and the command to run on another machine
    gpulse token --show      the token itself
    """  # noqa: D301  click needs the backspace itself
    from gpulse.cluster.tokens import copy_command, read_token  # noqa: PLC0415  --help needs none of it

    path = str((token_file or _of_head() or _usual()).absolute())
    if not os.path.lexists(path):
        raise GpulseError(
            f"there is no token at {path}",
            hint="the first start of gpulse head makes it; run this on the head's machine, as the user who started it",
        )
    text = read_token(path)
    if show:
        shell.write(text)
        return 0
    shell.write(
        f"token file: {path}\n"
        f"on another machine, run:  {copy_command(path)}\n"
        "another user of this machine needs a copy of mode 600: gpulse token --show prints the token"
    )
    return 0


def _of_head() -> Path | None:
    """Return the token file of this user's head on this machine, if one runs."""
    from gpulse.cluster.head.address_file import read_whereabouts  # noqa: PLC0415  --help needs none of it

    document = read_whereabouts(str(service.state_dir("head")))
    named = document.get("token_file") if document else None
    return Path(named) if isinstance(named, str) else None


def _usual() -> Path:
    named = os.environ.get("GPULSE_TOKEN_FILE")
    return Path(named) if named else service.default_token_file()
