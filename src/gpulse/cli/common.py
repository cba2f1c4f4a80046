"""Functions that all commands share: groups, running them, errors, colors, terminal size, user directories, source of frames."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

import click

from gpulse.errors import EXIT_INTERRUPTED, GpulseError, file_hint
from gpulse.model.safe_text import plain
from gpulse.terminal.table import Paint, make_painter

if TYPE_CHECKING:
    from gpulse.sources.demo_machine import DemoMachine
    from gpulse.sources.frame_source import Source
    from gpulse.sources.nvml.gpu_reader import GpuReader


Command = TypeVar("Command", bound=Callable[..., object])

DEMO_ELAPSED_SECONDS = 5.0
"""How long the simulated machine has been running when it is first shown."""
_MIN_COLUMNS = 20
_EXIT_CODES_KEY = "gpulse.exit_codes"
_REWORD_KEY = "gpulse.reword"

Reword = Callable[[str], str]
"""Replaces the commands in a hint with those of the program that was called."""


class CommandGroup(click.Group):
    """A group whose error about an unknown command names the closest one, or all of them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names, as click does.

        Raises:
            click.UsageError: There is none.
        """
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchOption:
            raise
        except click.UsageError as error:
            names = self.list_commands(ctx)
            close = closest(args[0], names)
            advice = f"did you mean `{close}`?" if close else f"the commands are: {', '.join(names)}"
            raise click.UsageError(f"there is no command {args[0]!r}; {advice}", ctx) from error


def closest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that looks most like a misspelled word, None when none does."""
    from difflib import get_close_matches  # noqa: PLC0415  needed for an error alone

    known = list(names)
    letters = sorted(word.lower())
    swapped = (name for name in known if sorted(name) == letters)  # too short for difflib: `pu` for `up`
    return next(swapped, None) or next(iter(get_close_matches(word.lower(), known, n=1)), None)


def describe_unknown_option(error: click.NoSuchOption) -> str:
    """Say which option does not exist, with the closest one that does."""
    option = error.option_name
    command = error.ctx.command if error.ctx is not None else None
    flags = [
        flag
        for parameter in (command.get_params(error.ctx) if command is not None and error.ctx else ())
        if isinstance(parameter, click.Option) and not parameter.hidden
        for flag in (*parameter.opts, *parameter.secondary_opts)
        if flag.startswith("--")
    ]
    close = closest(option, flags) if option.startswith("--") else None
    return f"there is no option {option!r}" + (f"; did you mean `{close}`?" if close else "")


class ExitCodes:
    """Exit codes for a command that fails or is cut short; the command may change them while it runs.

    Commands for which 1 has a meaning of its own, such as `why`, need other codes.
    """

    def __init__(self) -> None:
        self.failed = 1
        """For an error that has no exit code of its own."""
        self.unread = 0
        """For output that nobody read to its end."""


def exit_codes(ctx: click.Context) -> ExitCodes:
    """Return the exit codes of the running command."""
    found: ExitCodes = ctx.meta.setdefault(_EXIT_CODES_KEY, ExitCodes())
    return found


def set_rewording(ctx: click.Context, reword: Reword) -> None:
    """Rewrite the commands in hints for as long as a command runs."""
    ctx.meta[_REWORD_KEY] = reword


def get_rewording() -> Reword:
    """Return the function that replaces commands of `gpulse` in a hint with those of the program that was called."""
    ctx = click.get_current_context(silent=True)
    found: Reword = ctx.meta.get(_REWORD_KEY, str) if ctx is not None else str
    return found


def run(command: click.Command, *, name: str, gpus: GpuReader | None = None) -> int:
    """Run a command with the arguments of this process; report its error, if any, and return the exit code.

    Args:
        command: The command.
        name: Name of the program.
        gpus: The GPUs of this machine, if they were opened already.
    """
    _open_missing_streams()
    _accept_ctrl_c()
    if f"_{name.upper()}_COMPLETE" in os.environ:
        command.main(prog_name=name)  # a shell asks for completions; click answers and exits
    arguments = sys.argv[1:]
    codes = ExitCodes()
    try:
        code = _invoke(command, name, arguments, gpus, codes)
        sys.stdout.flush()
        return code
    except (KeyboardInterrupt, click.Abort):
        if sys.stdout.isatty():
            click.echo()  # the terminal has echoed ^C; the prompt belongs on a line of its own
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        _redirect_to_null(sys.stdout)
        return codes.unread
    except Exception as error:  # noqa: BLE001  the last resort: users get a message, not a traceback
        if "--debug" in _own_arguments(arguments):
            sys.excepthook(type(error), error, error.__traceback__)
        return _report_error(name, error) or codes.failed


def _invoke(
    command: click.Command, name: str, arguments: list[str], gpus: GpuReader | None, codes: ExitCodes
) -> int:
    try:
        with command.make_context(name, list(arguments), obj=gpus) as ctx:
            ctx.meta[_EXIT_CODES_KEY] = codes
            result = command.invoke(ctx)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    return result if isinstance(result, int) else 0


def _own_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments before `--`, after which those of a recorded command begin."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _report_error(name: str, error: Exception) -> int | None:
    """Print what failed, why, and what to try; return the error's exit code, None for the general one."""
    code: int | None = None
    match error:
        case GpulseError():
            print_error(name, error.message, error.hint)
            code = error.exit_code
        case click.UsageError():
            path = error.ctx.command_path if error.ctx is not None else name
            if isinstance(error, click.NoSuchOption):
                message = describe_unknown_option(error)
            else:
                message = error.format_message()
            print_error(name, message, f"{path} --help")
            code = error.exit_code
        case click.ClickException():
            print_error(name, error.format_message())
            code = error.exit_code
        case OSError():
            _redirect_to_null(sys.stdout)
            what = "standard output" if error.filename is None else error.filename
            print_error(name, f"cannot use {what}: {error.strerror or error}", file_hint(error))
        case _:
            print_error(
                name,
                f"unexpected error, probably a bug: {type(error).__name__}: {error}",
                f"run the command again as `{name} --debug ...`, and report the traceback",
            )
    return None if code == GpulseError.exit_code else code


def reject_misplaced_options(
    ctx: click.Context, command: click.Command, before: str, name: str | None = None
) -> None:
    """Reject options given before a subcommand, which would be ignored silently, and say where they belong.

    Args:
        ctx: Context of the group.
        command: The subcommand.
        before: What precedes the subcommand, such as `gpulse`.
        name: Name of the subcommand, if it is not `command.name`.

    Raises:
        click.UsageError: An option was given.
    """
    name = name or command.name
    flags_there = {flag for parameter in command.params for flag in parameter.opts}
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if given and parameter.name not in ("debug", "version"):
            flag = max(parameter.opts, key=len)
            raise click.UsageError(
                f"{flag} must come after the command: {before} {name} {flag}"
                if flag in flags_there
                else f"`{before} {name}` has no option {flag}; only `{before}` without a command has it"
            )


def print_error(name: str, message: str, hint: str | None = None) -> None:
    """Print on standard error what went wrong and what to try, without control characters from foreign names."""
    print_note("\n".join(plain(line) for line in f"{name}: {message}".split("\n")))
    if hint:
        print_note(f"  try: {plain(get_rewording()(hint))}")


def print_note(text: str) -> None:
    """Print a line on standard error; a broken standard error does not end the program."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _redirect_to_null(sys.stderr)


def _open_missing_streams() -> None:
    """Open substitutes where the program was started without standard output or standard error.

    Errors are discarded then. Writing output fails, so that nobody takes silence for success; a command that
    writes none, such as a recorder, works.
    """
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  open to the end


def _accept_ctrl_c() -> None:
    """Make Ctrl-C work in the foreground of a terminal, even when the parent process ignores SIGINT.

    A shell without job control starts background jobs with SIGINT ignored, and their child processes inherit that.
    Without a terminal it stays ignored, because the Ctrl-C of a calling script is not meant for this command.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and _is_in_foreground():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_in_foreground() -> bool:
    """Return whether this process is in the terminal's foreground process group, which gets Ctrl-C."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # standard input is closed, or is not the controlling terminal
        return False


def _redirect_to_null(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that Python does not fail again when it flushes the stream at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def parse_seconds(text: str) -> float:
    """Parse a positive, finite number of seconds from the command line.

    Raises:
        click.BadParameter: It is not one.
    """
    try:
        length = float(text)
    except ValueError:
        length = math.nan
    if not math.isfinite(length) or length <= 0:
        raise click.BadParameter(f"{text} is not a positive number of seconds")
    return length


def config_dir() -> Path:
    """Return the directory of this user's settings."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "gpulse"


def state_dir(*parts: str) -> Path:
    """Return the directory of this user's state on this machine; many machines may share a home directory."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base.joinpath("gpulse", os.uname().nodename or "localhost", *parts)


def default_token_file() -> Path:
    """Return the path of the token file unless an option names another."""
    return config_dir() / "token"


def wants_color(*, no_color: bool) -> bool:
    """Return whether to use colors: by the flag, then NO_COLOR, then FORCE_COLOR, then whether output is a terminal."""
    if no_color or os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return is_capable_terminal()


def is_capable_terminal() -> bool:
    """Return whether standard output is a terminal that understands escape sequences."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def paint(*, no_color: bool) -> Paint:
    """Return the function that colors text for standard output."""
    return make_painter(color=wants_color(no_color=no_color))


def terminal_width() -> int:
    """Return the terminal's width in columns; 120 without a terminal, so that files and pipes get whole tables."""
    return max(_MIN_COLUMNS, _asked_size("COLUMNS") or _terminal_size().columns or 120)


def terminal_height() -> int:
    """Return the terminal's height in lines; 24 without a terminal."""
    return _asked_size("LINES") or _terminal_size().lines or 24


def _asked_size(variable: str) -> int:
    asked = os.environ.get(variable, "")
    return int(asked) if asked.isdecimal() else 0


def _terminal_size() -> os.terminal_size:
    """Return the size of the terminal, zeros without one. The function of shutil would load compression libraries."""
    try:
        return os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):  # no terminal, or a closed file
        return os.terminal_size((0, 0))


def write(text: str) -> None:
    """Print text; characters that the terminal's encoding lacks are replaced."""
    encoding = sys.stdout.encoding or "ascii"
    click.echo(text.encode(encoding, "replace").decode(encoding), color=True)


def source_options(command: Command) -> Command:
    """Add the options --demo and --replay, which choose another source than this machine."""
    replay = click.option(
        "--replay",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Read from this recording instead of from this machine.",
    )
    demo = click.option(
        "--demo", is_flag=True, help="Use a simulated machine with eight GPUs, built from real recordings."
    )
    return demo(replay(command))


def chosen_source(*, demo: bool, replay: Path | None, gpus: int = 8) -> Source | None:
    """Return the source that --demo or --replay names, None for this machine."""
    if demo and replay is not None:
        raise click.UsageError("--demo and --replay cannot be used together")
    if demo:
        return demo_machine(gpus=gpus)
    if replay is not None:
        from gpulse.sources.recording_reader import Recording, ReplaySource  # noqa: PLC0415

        return ReplaySource(Recording(replay), started=time.time())
    return None


def demo_machine(*, gpus: int = 8, earlier_seconds: float = 0.0) -> DemoMachine:
    """Return the simulated machine, started a few seconds ago, or `earlier_seconds` before that."""
    from gpulse.sources.demo_machine import DemoMachine  # noqa: PLC0415  not needed on real machines

    return DemoMachine(time.time() - DEMO_ELAPSED_SECONDS - earlier_seconds, gpus=gpus)
