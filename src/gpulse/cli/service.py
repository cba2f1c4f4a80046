"""What commands that stay share: where their state is, their log, and running in the background."""

from __future__ import annotations

import logging
import os
import platform
import queue
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from gpulse.cli import shell
from gpulse.errors import GpulseError, UsageError
from gpulse.model.text import plain

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

Command = TypeVar("Command", bound=Callable[..., object])

_MOST_LINES = 1000
_LAST_WORDS_SECONDS = 1.0
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def duration(text: str) -> float:
    """A length of time from the command line, in seconds: `90`, `10m`, `1h30m`, `30d`.

    Raises:
        click.BadParameter: It is none.
    """
    from gpulse.model.time_text import parse_duration  # noqa: PLC0415  --help needs none of it

    try:
        return parse_duration(text.strip().lower())
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no length of time; write 90, 10m, 1h30m or 30d") from error


def labels(given: Iterable[str]) -> dict[str, str]:
    """Labels from the command line, each `KEY=VALUE`.

    Raises:
        UsageError: One is none, or there are too many.
    """
    from gpulse.model.session import LONGEST_LABEL, MOST_LABELS  # noqa: PLC0415  --help needs none of it

    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"{text!r} is no label", hint="--label KEY=VALUE")
        if max(len(key), len(value)) > LONGEST_LABEL or not text.isprintable():
            raise UsageError(
                f"{text[:60]!a} is no label: it is too long, or cannot be printed",
                hint=f"up to {LONGEST_LABEL} characters on either side of the equals sign",
            )
        found[key] = value
    if len(found) > MOST_LABELS:
        raise UsageError(f"{len(found)} labels are too many", hint=f"give {MOST_LABELS} at most")
    return found


def size(text: str) -> int:
    """A number of bytes from the command line: `500MB`, `50GiB`.

    Raises:
        click.BadParameter: It is none.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise click.BadParameter(f"{text!r} is no size; write 500MB or 50GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def config_dir() -> Path:
    """Where this user's settings are."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "gpulse"


def state_dir(*parts: str) -> Path:
    """Where this user's state on this machine is: homes may be shared by many machines."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base.joinpath("gpulse", platform.node() or "localhost", *parts)


def default_token_file() -> Path:
    """Where the token is when nobody says otherwise."""
    return config_dir() / "token"


def start_logging(*, aside: bool = False) -> None:
    """Say what happens on standard error, a line each.

    Args:
        aside: On a thread of its own, for those who must not wait for whoever reads it.
    """
    handler = Aside(sys.stderr.fileno()) if aside else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LogFormatter(shell.words()))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("asyncio", "uvicorn"):  # a client that hangs up is nothing to tell
        logging.getLogger(name).setLevel(logging.ERROR)


class _LogFormatter(logging.Formatter):
    """One line per record, with advice in the words of the program that was called.

    Names in it hold no escape sequences, and no second line that somebody forged.
    """

    def __init__(self, reword: shell.Reword) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s", "%Y-%m-%d %H:%M:%S")
        self._reword = reword

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        """Return the line of one record."""
        return plain(self._reword(super().formatMessage(record)))


class Aside(logging.Handler):
    """Writes lines on a thread of its own; those that pile up are lost, and nobody waits, not even at the end."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes] = queue.Queue(_MOST_LINES)
        self._thread = threading.Thread(target=self._work, name="gpulse-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record."""
        with suppress(queue.Full):
            self._lines.put_nowait(f"{self.format(record)}\n".encode(errors="replace"))

    def close(self) -> None:
        """Say what is left, if that does not take too long."""
        with suppress(queue.Full):
            self._lines.put_nowait(b"")
            self._thread.join(_LAST_WORDS_SECONDS)
        super().close()

    def _work(self) -> None:
        while line := self._lines.get():
            with suppress(OSError):
                while line:
                    line = line[os.write(self._descriptor, line) :]


def background_options(command: Command) -> Command:
    """The options of commands that can run in the background."""
    flag = click.option(
        "--background", is_flag=True, help="Go on in the background, and say where the log is."
    )
    log_file = click.option(
        "--log-file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Where the log goes in the background; beside the data when left out.",
    )
    return flag(log_file(command))


class EndSignals:
    """Ctrl-C and SIGTERM from the first moment to the last: they are heard before a loop runs and harmless after it."""

    def __init__(self) -> None:
        self._action: Callable[[], None] | None = None
        self._loop: AbstractEventLoop | None = None
        self._waiting = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._heard)

    def bind(self, action: Callable[[], None]) -> None:
        """From now on they do this, in the running loop."""
        from asyncio import get_running_loop  # noqa: PLC0415  most commands have no loop

        self._action, self._loop = action, get_running_loop()
        for _ in range(self._waiting):
            self._loop.call_soon(action)

    def _heard(self, _number: int, _frame: object) -> None:
        if self._action is None or self._loop is None:
            self._waiting += 1
            return
        with suppress(RuntimeError):  # the loop is closed: it ends already
            self._loop.call_soon_threadsafe(self._action)


class Ready:
    """Tells whoever started a command that it is up, or why it is not."""

    def __init__(self, channel: int | None = None) -> None:
        self._channel = channel

    def say(self, text: str, *more: str) -> None:
        """Report that it is up, and what else whoever started it should know, a line each."""
        self._send("\n".join((f"+{text}", *more)))

    def fail(self, error: GpulseError) -> None:
        """It will not come up."""
        hint = f" (try: {error.hint})" if error.hint else ""
        self._send(f"-{error.exit_code} {error.message}{hint}")

    def _send(self, text: str) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            with suppress(OSError):
                os.write(channel, text.encode()[:4000])
            os.close(channel)


def into_background(name: str, directory: Path, log_file: Path | None) -> Ready:
    """Go on in a process of its own; the one that was started waits until that is up, says so, and ends.

    Must be called before anything starts a thread.

    Raises:
        GpulseError: The log cannot be written.
    """
    log_path = (log_file or directory / f"{name}.log").absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise GpulseError(
            f"cannot write {log_path}: {error.strerror}", hint="name another place with --log-file"
        ) from error
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        os.close(log)
        os._exit(_report(name, reading, log_path))
    os.close(reading)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return Ready(writing)


def _report(name: str, channel: int, log_path: Path) -> int:
    """Wait for the child's word and pass it on; the exit code."""
    said = b""
    with suppress(KeyboardInterrupt):
        while piece := os.read(channel, 4096):
            said += piece
    text = "\n".join(map(plain, said.decode("utf-8", "replace").split("\n")))
    if text.startswith("+"):
        first, *more = text[1:].split("\n")
        print("\n".join((f"{first}; log: {log_path}", *more)), flush=True)
        return 0
    context = click.get_current_context(silent=True)
    called = f"gpulse {name}" if context is None else context.command_path
    code, _, why = text[1:].partition(" ")
    why = shell.words()(why) or "it ended at once"
    print(f"{called}: {why}; see {log_path}", file=sys.stderr, flush=True)
    return int(code) if code.isdecimal() else GpulseError.exit_code
