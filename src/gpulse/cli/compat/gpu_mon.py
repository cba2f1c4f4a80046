"""`gpu_mon`: harvest under the name and with the file of the tool it replaces."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from gpulse._version import __version__
from gpulse.cli import shell
from gpulse.errors import UsageError

_DEFAULT = Path("~/.config/gpu_mon.conf")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    default=_DEFAULT,
    show_default=True,
    help="What to run when.",
)
@click.option("--init", is_flag=True, help="Write a commented FILE to begin with, and end.")
@click.option("--force", is_flag=True, help="With --init: replace a file that is there.")
@click.option("--debug", is_flag=True, hidden=True)
@click.version_option(__version__, prog_name="gpu_mon (gpulse)")
def command(*, config: Path, init: bool, force: bool, debug: bool) -> int:  # noqa: ARG001  run() reads --debug
    """Run programs on idle GPUs, and stop them when somebody comes.

    \b
    gpu_mon --init         write ~/.config/gpu_mon.conf; put your command into it
    gpu_mon                run it, until Ctrl-C

    The same program as `gpulse harvest`, which has more: a dry run, what runs and what was won, a check of what it can
    see, and a form of the file with more in it.
    """  # noqa: D301  click needs the backspace itself
    from gpulse.cli.harvest import start, write_template  # noqa: PLC0415  --help needs none of it

    if force and not init:
        raise click.UsageError("--force goes with --init")
    path = config.expanduser()
    is_toml = path.name.lower().endswith(".toml")
    named = "gpu_mon" if path == _DEFAULT.expanduser() else f"gpu_mon -c {shlex.quote(str(path))}"
    if init:
        write_template(path, "toml" if is_toml else "ini", force=force)
        shell.write(f"{path} is written: put your command into it, then run: {named}")
        return 0
    if not path.exists():
        raise UsageError(
            f"{path}: there is no such file", hint=f"{named} --init, which writes one to begin with"
        )
    return start(config=path)


def main() -> None:
    """The entry point of `gpu_mon`."""
    sys.exit(shell.run(command, name="gpu_mon"))


if __name__ == "__main__":
    main()
