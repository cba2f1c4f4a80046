"""Run a command as a child process while sampling: forward signals, and report how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import NamedTuple, Protocol

from gpulse.cli import common
from gpulse.harvest.supervise.launch import explain_launch_error
from gpulse.sampling.sampler import Sampler

Handler = Callable[[int, FrameType | None], object]

NOT_FOUND = 127
NOT_EXECUTABLE = 126


class Stoppable(Protocol):
    """Something that runs beside a command, and is stopped when the command ends."""

    def stop(self) -> None:
        """Stop it, from any thread or signal handler."""


class CommandResult(NamedTuple):
    """How a command ended."""

    code: int
    """Its exit code, or 128 plus the number of a signal: the one that ended it, or the one that ended the
    sampling while the command keeps running."""
    pid: int | None = None
    """None when it could not be started."""
    is_running: bool = False
    """Whether it was left running."""


@contextmanager
def stop_on_signals(sampler: Sampler) -> Iterator[None]:
    """Stop the sampling on SIGINT and SIGTERM, so that the code after it still runs."""

    def stop(number: int, stack: FrameType | None) -> None:  # noqa: ARG001  the signature of handlers
        sampler.stop()

    with _handling({signal.SIGINT: stop, signal.SIGTERM: stop}):
        yield


def run(
    argv: list[str],
    sampler: Stoppable,
    sample: Callable[[], None],
    started: Callable[[int], None] | None = None,
    stdout: int | None = None,
    before_exec: Callable[[], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run a command and sample until it ends, or until SIGINT or SIGTERM comes a second time.

    The terminal sends the first SIGINT to the command too, and the first SIGTERM is forwarded to it. A command
    that ignores them is left running the second time, which is reported on standard error.

    Args:
        argv: The command.
        sampler: Stopped when the command ends.
        sample: Takes the sampler's frames until there are no more.
        started: Called with the command's process ID.
        stdout: File descriptor for the command's standard output; ours when None.
        before_exec: Called in the new process before it becomes the command. Other threads of this process hold
            locks that nobody releases there, so it may only make a system call that is prepared here.
        environment: Its environment; ours when None.
    """
    relay = _SignalRelay(sampler)
    with _handling({signal.SIGINT: relay.interrupt, signal.SIGTERM: relay.end}):
        try:
            child = subprocess.Popen(  # noqa: S603  running what was asked for is the point
                argv,
                stdout=stdout,
                preexec_fn=before_exec,  # noqa: PLW1509  as described above
                env=environment,
            )
        except (OSError, ValueError) as error:
            common.print_error("gpulse", explain_launch_error(argv[0], error, os.environ))
            return CommandResult(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)
        relay.adopt(child)
        if started is not None:
            started(child.pid)
        # A daemon thread, because a command that keeps running must not keep us from ending.
        threading.Thread(target=relay.wait, args=(child,), name="gpulse-command", daemon=True).start()
        try:
            sample()
        finally:
            stop_signal = relay.over.get()
    if stop_signal is not None and child.poll() is None:
        common.print_error("gpulse", f"the command (pid {child.pid}) is still running")
        return CommandResult(128 + stop_signal, child.pid, is_running=True)
    code = child.returncode
    return CommandResult(code if code >= 0 else 128 - code, child.pid)


class _SignalRelay:
    """Forwards signals to the command, even those that arrive while it is being started."""

    def __init__(self, sampler: Stoppable) -> None:
        self.over: SimpleQueue[int | None] = SimpleQueue()
        """Holds why there is nothing left to wait for: None when the command ended, or the repeated signal.

        A SimpleQueue, because it is reentrant: a signal handler may run while this thread waits for it."""
        self._sampler = sampler
        self._received: set[int] = set()
        self._child: subprocess.Popen[bytes] | None = None

    def adopt(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        if signal.SIGTERM in self._received:
            child.terminate()

    def wait(self, child: subprocess.Popen[bytes]) -> None:
        child.wait()
        self._stop(None)

    def end(self, number: int, stack: FrameType | None) -> None:
        is_first = number not in self._received
        self.interrupt(number, stack)
        if is_first and self._child is not None:
            self._child.terminate()

    def interrupt(self, number: int, stack: FrameType | None) -> None:  # noqa: ARG002  the signature of handlers
        """Count a Ctrl-C, which the terminal sends to the command too; ignoring SIGINT here would make it ignore it."""
        if number in self._received:
            self._stop(number)
        self._received.add(number)

    def _stop(self, by: int | None) -> None:
        self.over.put(by)
        self._sampler.stop()


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
