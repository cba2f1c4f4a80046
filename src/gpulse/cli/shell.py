"""What every command shares: errors as people read them, colours, the terminal's size, where frames come from."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

import click

from gpulse.errors import INTERRUPTED, GpulseError, file_hint
from gpulse.model.text import plain
from gpulse.terminal.table import Paint, painter

if TYPE_CHECKING:
    from gpulse.sources.base import Source
    from gpulse.sources.nvml.reader import GpuReader
    from gpulse.sources.simulated import DemoMachine

Command = TypeVar("Command", bound=Callable[..., object])

DEMO_HEAD_START_SECONDS = 5.0
_NARROWEST_COLUMNS = 20
_ENDING = "gpulse.ending"
_REWORD = "gpulse.reword"

Reword = Callable[[str], str]
"""Says advice in the words of the program that was called."""


class Ending:
    """The exit codes of ends that a command does not come to itself; it sets them as it goes.

    They are for commands to which 1 means something, as it does to `why`.
    """

    def __init__(self) -> None:
        self.failed = 1
        """When something goes wrong that has no exit code of its own."""
        self.unread = 0
        """When nobody reads the output to its end."""


def ending(ctx: click.Context) -> Ending:
    """How the command that runs will end, if not by itself."""
    found: Ending = ctx.meta.setdefault(_ENDING, Ending())
    return found


def use_words(ctx: click.Context, reword: Reword) -> None:
    """Have advice given in other words for as long as a command runs."""
    ctx.meta[_REWORD] = reword


def words() -> Reword:
    """How to say advice that names commands of `gpulse` in the words of the program that was called."""
    ctx = click.get_current_context(silent=True)
    found: Reword = ctx.meta.get(_REWORD, str) if ctx is not None else str
    return found


def run(command: click.Command, *, name: str, gpus: GpuReader | None = None) -> int:
    """Run a command and turn whatever ends it into an exit code and, if need be, one clear message.

    Args:
        command: What to run, with the arguments of this process.
        name: How the command is called.
        gpus: The GPUs of this machine, if they were opened already.
    """
    _open_streams()
    _accept_ctrl_c()
    if f"_{name.upper()}_COMPLETE" in os.environ:
        command.main(prog_name=name)  # a shell asks for completions; click answers and exits
    arguments = sys.argv[1:]
    codes = Ending()
    try:
        code = _invoked(command, name, arguments, gpus, codes)
        sys.stdout.flush()
        return code
    except (KeyboardInterrupt, click.Abort):
        if sys.stdout.isatty():
            click.echo()  # the terminal has echoed ^C; the prompt belongs on a line of its own
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        _discard(sys.stdout)
        return codes.unread
    except Exception as error:  # noqa: BLE001  the one place that stands between a bug and the user
        if "--debug" in _ours(arguments):
            traceback.print_exc()
        return _reported(name, error) or codes.failed


def _invoked(
    command: click.Command, name: str, arguments: list[str], gpus: GpuReader | None, codes: Ending
) -> int:
    try:
        with command.make_context(name, list(arguments), obj=gpus) as ctx:
            ctx.meta[_ENDING] = codes
            result = command.invoke(ctx)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    return result if isinstance(result, int) else 0


def _ours(arguments: list[str]) -> list[str]:
    """Without those of a command that is to be recorded."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _reported(name: str, error: Exception) -> int | None:
    """Say what happened, why, and what to try; the exit code that goes with it, unless that is the general one."""
    code: int | None = None
    match error:
        case GpulseError():
            complain(name, error.message, error.hint)
            code = error.exit_code
        case click.UsageError():
            path = error.ctx.command_path if error.ctx is not None else name
            complain(name, error.format_message(), f"{path} --help")
            code = error.exit_code
        case click.ClickException():
            complain(name, error.format_message())
            code = error.exit_code
        case OSError():
            _discard(sys.stdout)
            what = "standard output" if error.filename is None else error.filename
            complain(name, f"cannot use {what}: {error.strerror or error}", file_hint(error))
        case _:
            words = f"{type(error).__name__}: {error}"
            complain(
                name,
                f"this should not have happened: {words}",
                f"{name} --debug ..., and report what it says",
            )
    return None if code == GpulseError.exit_code else code


def refuse_stray_options(
    ctx: click.Context, command: click.Command, before: str, name: str | None = None
) -> None:
    """An option before a command would be ignored in silence: say where it belongs instead.

    Args:
        ctx: Of the group, with what was given to it.
        command: The command that comes after.
        before: What comes before it, such as `gpulse`.
        name: The command's, if it is called otherwise than by its own.

    Raises:
        click.UsageError: There was one.
    """
    name = name or command.name
    flags_there = {flag for parameter in command.params for flag in parameter.opts}
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if given and parameter.name not in ("debug", "version"):
            flag = max(parameter.opts, key=len)
            raise click.UsageError(
                f"{flag} stands before the command; write it after: {before} {name} {flag}"
                if flag in flags_there
                else f"{flag} goes with `{before}` alone; `{before} {name}` has no such option"
            )


def complain(name: str, message: str, hint: str | None = None) -> None:
    """Say on standard error what went wrong and what to try; names of others in it are made harmless."""
    remark("\n".join(plain(line) for line in f"{name}: {message}".split("\n")))
    if hint:
        remark(f"  try: {plain(words()(hint))}")


def remark(text: str) -> None:
    """Say something on standard error; what cannot be said there ends nothing."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def _open_streams() -> None:
    """Stand-ins for a program that was started without standard output or error.

    Errors go nowhere then. Output fails, so that nobody takes silence for success; a command that has
    nothing to say there (a recorder) does not notice.
    """
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  open to the end


def _accept_ctrl_c() -> None:
    """Make Ctrl-C work in the foreground of a terminal, even when the parent process ignores SIGINT.

    A shell without job control starts background jobs with SIGINT ignored, and everything that they start inherits
    that. Away from a terminal it stays ignored: there, the Ctrl-C of somebody's script is not meant for this command.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and _is_in_foreground():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_in_foreground() -> bool:
    """Whether what is typed at the terminal, Ctrl-C included, goes to this process."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # standard input is closed, or is not the terminal that controls this process
        return False


def _discard(stream: TextIO) -> None:
    """So that Python does not fail a second time when it flushes the stream at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def seconds(text: str) -> float:
    """A length of time from the command line: a finite number of seconds, more than none.

    Raises:
        click.BadParameter: It is none, or none that time can have.
    """
    try:
        length = float(text)
    except ValueError:
        length = math.nan
    if not math.isfinite(length) or length <= 0:
        raise click.BadParameter(f"{text} is not a number of seconds above 0")
    return length


def wants_color(*, no_color: bool) -> bool:
    """Whether to use colours: the flag, then NO_COLOR, then FORCE_COLOR, then whether a person is looking."""
    if no_color or os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return is_capable_terminal()


def is_capable_terminal() -> bool:
    """Whether standard output is a terminal that understands escape sequences."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def paint(*, no_color: bool) -> Paint:
    """The painter for standard output."""
    return painter(color=wants_color(no_color=no_color))


def width() -> int:
    """Columns of the terminal; 120 when there is none, so that files and pipes get whole tables."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked) > 0:
        return max(_NARROWEST_COLUMNS, int(asked))
    if not sys.stdout.isatty():
        return 120
    return max(_NARROWEST_COLUMNS, shutil.get_terminal_size((120, 24)).columns)


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
        help="A recording instead of this machine.",
    )
    demo = click.option(
        "--demo", is_flag=True, help="A simulated machine with eight GPUs, made of real recordings."
    )
    return demo(replay(command))


def other_source(*, demo: bool, replay: Path | None, gpus: int = 8) -> Source | None:
    """The source those options ask for, None for this machine."""
    if demo and replay is not None:
        raise click.UsageError("--demo and --replay exclude each other")
    if demo:
        return demo_machine(gpus=gpus)
    if replay is not None:
        from gpulse.sources.recording import Recording, ReplaySource  # noqa: PLC0415

        return ReplaySource(Recording(replay), started=time.time())
    return None


def demo_machine(*, gpus: int = 8, earlier_seconds: float = 0.0) -> DemoMachine:
    """The simulated machine, running since a while, or for so much longer."""
    from gpulse.sources.simulated import DemoMachine  # noqa: PLC0415  not needed on real machines

    return DemoMachine(time.time() - DEMO_HEAD_START_SECONDS - earlier_seconds, gpus=gpus)
