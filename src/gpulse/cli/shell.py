"""What every command shares: errors as people read them, colours, the terminal's width, where frames come from."""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from gpulse.errors import GpulseError
from gpulse.terminal.table import Paint, painter

if TYPE_CHECKING:
    from gpulse.sources.base import Source
    from gpulse.sources.machine import LocalMachine

Command = TypeVar("Command", bound=Callable[..., object])

INTERRUPTED = 130
DEMO_HEAD_START_SECONDS = 5.0


def run(command: click.Command, *, name: str, machine: LocalMachine | None = None) -> int:
    """Run a command and turn whatever ends it into an exit code and, if need be, one clear message.

    Args:
        command: What to run, with the arguments of this process.
        name: How the command is called.
        machine: This machine, if it was opened already.
    """
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    try:
        result = command.main(args=arguments, prog_name=name, standalone_mode=False, obj=machine)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except GpulseError as error:
        if debug:
            traceback.print_exc()
        _complain(name, error.message, error.hint)
        return error.exit_code
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.ClickException as error:
        _complain(
            name, error.format_message(), f"{name} --help" if isinstance(error, click.UsageError) else None
        )
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _complain(name: str, message: str, hint: str | None) -> None:
    print(f"{name}: {message}", file=sys.stderr)
    if hint:
        print(f"  try: {hint}", file=sys.stderr)


def wants_color(*, no_color: bool) -> bool:
    """Whether to use colours: the flag, then NO_COLOR, then FORCE_COLOR, then whether a person is looking."""
    if no_color or os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def paint(*, no_color: bool) -> Paint:
    """The painter for standard output."""
    return painter(color=wants_color(no_color=no_color))


def width() -> int:
    """Columns of the terminal; 120 when there is none, so that files and pipes get whole tables."""
    if os.environ.get("COLUMNS", "").isdigit():
        return int(os.environ["COLUMNS"])
    return shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120


def write(text: str) -> None:
    """Print text, whatever the terminal's encoding can show of it."""
    encoding = sys.stdout.encoding or "ascii"
    click.echo(text.encode(encoding, "replace").decode(encoding), color=True)


def source_options(command: Command) -> Command:
    """The options that choose another machine than this one."""
    replay = click.option(
        "--replay",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Show a recording instead of this machine.",
    )
    demo = click.option(
        "--demo", is_flag=True, help="Show a simulated machine with eight GPUs, made of real recordings."
    )
    return demo(replay(command))


def other_source(*, demo: bool, replay: Path | None, gpus: int = 8) -> Source | None:
    """The source those options ask for, None for this machine."""
    if demo and replay is not None:
        raise click.UsageError("--demo and --replay exclude each other")
    if demo:
        from gpulse.sources.simulated import DemoMachine  # noqa: PLC0415  not needed on real machines

        return DemoMachine(time.time() - DEMO_HEAD_START_SECONDS, gpus=gpus)
    if replay is not None:
        from gpulse.sources.recording import Recording, ReplaySource  # noqa: PLC0415

        return ReplaySource(Recording(replay), started=time.time())
    return None
