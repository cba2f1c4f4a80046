"""`gpulse completion`: the script that lets a shell complete commands and options."""

from __future__ import annotations

import os

import click
from click.shell_completion import get_completion_class

_WHERE = {
    "bash": "gpulse completion bash >> ~/.bashrc",
    "zsh": "gpulse completion zsh >> ~/.zshrc",
    "fish": "gpulse completion fish > ~/.config/fish/completions/gpulse.fish",
}


@click.command(epilog="\b\nInstall it with one of:\n" + "\n".join(f"  {line}" for line in _WHERE.values()))
@click.argument("shell", type=click.Choice(sorted(_WHERE)), required=False)
def command(shell: str | None) -> None:
    """Print the completion script of SHELL (yours when not given)."""
    if shell is None:
        shell = os.path.basename(os.environ.get("SHELL", ""))
        if shell not in _WHERE:
            raise click.UsageError("which shell? give one of: " + ", ".join(sorted(_WHERE)))
    from gpulse.cli.main import command as root  # noqa: PLC0415  the root loads this module

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  click has all three
    click.echo(kind(root, {}, "gpulse", "_GPULSE_COMPLETE").source())
