"""`gpulse token`: show where a head's token is, and how to copy it; find the token for other commands."""

from __future__ import annotations

import os
from pathlib import Path

import click

from gpulse.cli import common
from gpulse.cluster.credentials import read_token, token_copy_command
from gpulse.cluster.head.address_file import read_address_file
from gpulse.errors import GpulseError


def find_token(path: Path | None, *, is_local: bool) -> str | None:
    """Return the token from the named file, the environment, or this user's configuration."""
    chosen = path or os.environ.get("GPULSE_TOKEN_FILE")
    if chosen:
        return read_token(os.fspath(chosen))
    if text := os.environ.get("GPULSE_TOKEN", "").strip():
        return text
    default = common.default_token_file()
    if not os.access(default, os.R_OK):
        return None
    try:
        return read_token(str(default))
    except GpulseError:
        if is_local:  # a head on this machine needs none
            return None
        raise


@click.command()
@click.option("--show", is_flag=True, help="Print only the token itself.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    show_default="the running head's file, else the file that other commands use",
    help="File with the token.",
)
def command(*, show: bool, token_file: Path | None) -> int:
    """Show where a head's token is, and how to copy it to other machines and users that need it.

    \b
    gpulse token             show the token's file and the command that copies it
    gpulse token --show      print the token itself
    """  # noqa: D301  click needs the backspace itself
    path = str((token_file or _running_head_token_file() or _default_token_file()).absolute())
    if not os.path.lexists(path):
        raise GpulseError(
            f"there is no token file {path}",
            hint="run this on the head's machine as the user who started the head; the head creates the token when it first starts",
        )
    text = read_token(path)
    if show:
        common.write(text)
        return 0
    common.write(
        f"token file: {path}\n"
        f"on another machine, run:  {token_copy_command(path)}\n"
        "other users of this machine need a copy with mode 600; print the token with: gpulse token --show"
    )
    return 0


def _running_head_token_file() -> Path | None:
    """Return the token file of this user's head on this machine, if one runs."""
    document = read_address_file(str(common.state_dir("head")))
    named = document.get("token_file") if document else None
    return Path(named) if isinstance(named, str) else None


def _default_token_file() -> Path:
    named = os.environ.get("GPULSE_TOKEN_FILE")
    return Path(named) if named else common.default_token_file()
