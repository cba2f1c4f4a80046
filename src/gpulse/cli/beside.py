"""Sampling beside a command, and until Ctrl-C: signals, the child, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from gpulse.cli import shell
from gpulse.harvest.running.launch_errors import explain

if TYPE_CHECKING:
    from gpulse.sampling.sampler import Sampler

Handler = Callable[[int, FrameType | None], object]

NOT_FOUND = 127
NOT_EXECUTABLE = 126


class Outcome(NamedTuple):
    """What became of a command."""

    code: int
    """Its exit code, or 128 and the number of a signal: of the one that ended it, or of the one that ended
    the sampling while the command goes on."""
    pid: int | None = None
    """None when it could not be started."""
    goes_on: bool = False


@contextmanager
def stopping(sampler: Sampler) -> Iterator[None]:
    """Let Ctrl-C and a polite kill end the sampling, so that what follows it still happens."""

    def stop(number: int, stack: FrameType | None) -> None:  # noqa: ARG001  the signature of handlers
        sampler.stop()

    with _handling({signal.SIGINT: stop, signal.SIGTERM: stop}):
        yield


def run(
    argv: list[str],
    sampler: Sampler,
    sample: Callable[[], None],
    started: Callable[[int], None] | None = None,
    stdout: int | None = None,
) -> Outcome:
    """Run a command and sample until it ends, or until Ctrl-C or a polite kill comes a second time.

    The first Ctrl-C is the command's own, and the first polite kill is passed on to it. A command that makes
    nothing of them is left alone the second time, and told of on standard error.

    Args:
        argv: The command.
        sampler: Stopped when the command ends.
        sample: Takes the sampler's frames until there are no more.
        started: Told the command's pid.
        stdout: Where the command's standard output goes, if not to our own.
    """
    relay = _Relay(sampler)
    with _handling({signal.SIGINT: relay.interrupt, signal.SIGTERM: relay.end}):
        try:
            child = subprocess.Popen(argv, stdout=stdout)  # noqa: S603  running what was asked for is the point
        except (OSError, ValueError) as error:
            shell.complain("gpulse", explain(argv[0], error, os.environ))
            return Outcome(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)
        relay.adopt(child)
        if started is not None:
            started(child.pid)
        # A daemon, because a command that goes on must not keep us from ending.
        threading.Thread(target=relay.wait, args=(child,), name="gpulse-command", daemon=True).start()
        try:
            sample()
        finally:
            left_by = relay.over.get()
    if left_by is not None and child.poll() is None:
        shell.complain("gpulse", f"the command (pid {child.pid}) goes on running")
        return Outcome(128 + left_by, child.pid, goes_on=True)
    code = child.returncode
    return Outcome(code if code >= 0 else 128 - code, child.pid)


class _Relay:
    """Stands between the signals that come to us and the command, even while the command is being started."""

    def __init__(self, sampler: Sampler) -> None:
        self.over: SimpleQueue[int | None] = SimpleQueue()
        """Says that nothing is left to wait for: None when the command ended, or the signal that came again.

        A SimpleQueue, because handlers interrupt whoever waits for it."""
        self._sampler = sampler
        self._asked: set[int] = set()
        self._child: subprocess.Popen[bytes] | None = None

    def adopt(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        if signal.SIGTERM in self._asked:
            child.terminate()

    def wait(self, child: subprocess.Popen[bytes]) -> None:
        child.wait()
        self._stop(None)

    def end(self, number: int, stack: FrameType | None) -> None:
        is_first = number not in self._asked
        self.interrupt(number, stack)
        if is_first and self._child is not None:
            self._child.terminate()

    def interrupt(self, number: int, stack: FrameType | None) -> None:  # noqa: ARG002  the signature of handlers
        """Ctrl-C reaches the command from the terminal; ignoring it instead would make the command ignore it."""
        if number in self._asked:
            self._stop(number)
        self._asked.add(number)

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
