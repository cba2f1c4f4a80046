"""Support for long-running commands: logging, stop signals, and running in the background."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import queue
import shlex
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from gpulse.atomic_files import check_private_directory, open_output
from gpulse.cli import common
from gpulse.errors import GpulseError, UsageError
from gpulse.model.safe_text import plain

_MAX_WAITING_LINES = 1000
_LAST_LINES_SECONDS = 1.0
_GRACE_SECONDS = 10.0
_MAX_MESSAGE_BYTES = 4000
_CHANNEL_VARIABLE = "_GPULSE_READY_FD"
"""Environment variable with the file descriptor where a process in the background reports that it is up."""


def start_logging(*, aside: bool = False) -> None:
    """Log to standard error, one line per record.

    Args:
        aside: Write on a separate thread, so that a reader that stalls delays nobody.
    """
    handler = _ThreadHandler(sys.stderr.fileno()) if aside else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LogFormatter(common.get_rewording()))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("asyncio", "uvicorn"):  # a client that disconnects is not worth a line
        logging.getLogger(name).setLevel(logging.ERROR)


class _LogFormatter(logging.Formatter):
    """Formats a record as one line, with hints that name the commands of the program that was called.

    Escape sequences and line breaks in names are made harmless.
    """

    def __init__(self, reword: common.Reword) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s", "%Y-%m-%d %H:%M:%S")
        self._reword = reword

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        """Return the line of one record."""
        return plain(self._reword(super().formatMessage(record)))


class _ThreadHandler(logging.Handler):
    """Writes lines on a separate thread; drops those that pile up, so that nobody waits, not even at the end."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes] = queue.Queue(_MAX_WAITING_LINES)
        self._thread = threading.Thread(target=self._work, name="gpulse-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record."""
        with suppress(queue.Full):
            self._lines.put_nowait(f"{self.format(record)}\n".encode(errors="replace"))

    def close(self) -> None:
        """Write what is queued, if that does not take too long."""
        with suppress(queue.Full):
            self._lines.put_nowait(b"")
            self._thread.join(_LAST_LINES_SECONDS)
        super().close()

    def _work(self) -> None:
        while line := self._lines.get():
            with suppress(OSError):
                while line:
                    line = line[os.write(self._descriptor, line) :]


def background_options(command: common.Command) -> common.Command:
    """Add the options of commands that can run in the background."""
    flag = click.option(
        "--background", is_flag=True, help="Run in the background, and print the path of the log."
    )
    log_file = click.option(
        "--log-file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        show_default="in the data directory",
        help="With --background: file to log to.",
    )
    return flag(log_file(command))


class StopSignals:
    """Handles SIGINT and SIGTERM: remembers those that arrive before the loop runs, ignores those after it."""

    def __init__(self) -> None:
        self._action: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def bind(self, action: Callable[[], None]) -> None:
        """Call this in the running loop for each signal from now on, and for those remembered."""
        self._action, self._loop = action, asyncio.get_running_loop()
        for _ in range(self._waiting):
            self._loop.call_soon(action)

    def _on_signal(self, _number: int, _frame: object) -> None:
        if self._action is None or self._loop is None:
            self._waiting += 1
            return
        with suppress(RuntimeError):  # the loop is closed: the command is ending already
            self._loop.call_soon_threadsafe(self._action)


class StartupNotifier:
    """Reports to the process that started this one in the background: it is up, or why it failed."""

    def __init__(self, channel: int | None = None) -> None:
        self._channel = channel

    def say(self, text: str, *more: str) -> None:
        """Report that it is up, with further lines for the user.

        Without a reader the process stops: the user gave up on it, and nobody knows that it runs.
        """
        if not self._send("\n".join((f"+{text}", *more))):
            os.kill(os.getpid(), signal.SIGTERM)

    def fail(self, error: GpulseError) -> None:
        """Report that it failed to start."""
        hint = f" (try: {error.hint})" if error.hint else ""
        self._send(f"-{error.exit_code} {error.message}{hint}")

    def _send(self, text: str) -> bool:
        """Send one message, and close the channel; False when nobody reads it."""
        channel, self._channel = self._channel, None
        if channel is None:
            return True
        try:
            os.write(channel, text.encode()[:_MAX_MESSAGE_BYTES])
        except OSError:
            return False
        finally:
            os.close(channel)
        return True


@contextmanager
def run_daemon(
    name: str, directory: Path, log_file: Path | None, *, background: bool
) -> Iterator[StartupNotifier]:
    """Run a command in this process, or in the background in a new process with the same command line.

    For the background, the calling process waits for the new one, prints its report and exits. It must not read files
    before that: a pipe, such as `<(pass token)`, can be read only once.

    Args:
        name: The command.
        directory: Its data directory, which also gets the log unless `log_file` is given.
        log_file: The option.
        background: The option.

    Raises:
        UsageError: Other users can write to the directory.
        GpulseError: The log cannot be written.
        click.exceptions.Exit: The new process is up, or has failed.
    """
    ready = StartupNotifier()
    channel = os.environ.pop(_CHANNEL_VARIABLE, None) if background else None
    if channel is None:
        _check_directory(name, directory)
        _create_parents(directory)
    if background:
        if channel is None:
            log_path = (log_file or directory / f"{name}.log").absolute()
            raise click.exceptions.Exit(_start_in_background(directory, log_path))
        os.set_inheritable(int(channel), False)
        ready = StartupNotifier(int(channel))
    try:
        yield ready
    except GpulseError as error:
        ready.fail(error)
        raise


def _check_directory(name: str, directory: Path) -> None:
    """Refuse a directory that other users can write to: they could change what is stored, or what is run from it."""
    option = "--data-dir" if name == "head" else "--state-dir"
    try:
        check_private_directory(directory)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ELOOP):
            return  # it cannot be read: what needs it says so, and an agent goes on without it
        hint = f"choose another directory with {option}"
        if error.filename is not None and _is_trusted(error.filename):
            mode = "700" if Path(error.filename).is_relative_to(directory.resolve()) else "o-w"
            hint = f"chmod {mode} {shlex.quote(str(error.filename))}"
            if Path(error.filename).stat().st_uid != os.geteuid():
                hint = (
                    f"use {option} {shlex.quote(str(directory / 'gpulse'))}, which is created with mode 700"
                )
        raise UsageError(
            f"cannot use {directory} as the data directory of this {name}: {error.strerror}", hint=hint
        ) from error


def _is_trusted(path: str) -> bool:
    """Return whether a path, and what it leads to if it is a link, belong to this user or to root."""
    return all(os.stat(path, follow_symlinks=follow).st_uid in (0, os.geteuid()) for follow in (False, True))


def _create_parents(directory: Path) -> None:
    """Create the parents of a directory privately where the umask would let everybody write to them."""
    umask = os.umask(0o077)
    try:
        if not umask & stat.S_IWOTH:
            with suppress(OSError):  # what needs the directory says so
                directory.parent.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(umask)


def _start_in_background(directory: Path, log_path: Path) -> int:
    """Start this command line again, detached; print its report and return the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = open_output(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise GpulseError(
            f"cannot write {log_path}: {error.strerror}", hint="choose another file with --log-file"
        ) from error
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    process = subprocess.Popen(  # noqa: S603  this very program
        [sys.executable, *sys.orig_argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        close_fds=False,  # options may name /dev/fd/63
        start_new_session=True,
        env={**os.environ, _CHANNEL_VARIABLE: str(writing)},
    )
    try:
        os.close(writing)
        with open(reading, "rb") as channel:
            message = channel.read().decode("utf-8", "replace")
        if message.startswith("+"):
            first, *more = map(plain, message[1:].split("\n"))
            common.write("\n".join((f"{first}; log: {log_path}", *more)))
            return 0
        ended = process.wait()
    except KeyboardInterrupt:
        _stop_process(process)
        raise
    code, _, reason = message[1:].partition(" ")
    reason = common.get_rewording()(reason) or "the process exited immediately"
    common.print_error(click.get_current_context().command_path, f"{reason}; see {log_path}")
    return int(code) if code else max(ended, GpulseError.exit_code)


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    """Stop a process that was not up yet; by force if it takes too long, or on a second Ctrl-C."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    finally:
        process.kill()
