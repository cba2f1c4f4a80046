"""Sampling beside a command, and until Ctrl-C: signals, the child, and its exit code."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from gpulse.cli import shell

if TYPE_CHECKING:
    from gpulse.sampling.sampler import Sampler

Handler = Callable[[int, FrameType | None], object]

NOT_FOUND = 127
NOT_EXECUTABLE = 126


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
) -> int:
    """Run a command and sample until it ends; its exit code, or 128 and the number of the signal that ended it.

    Args:
        argv: The command.
        sampler: Stopped when the command ends.
        sample: Takes the sampler's frames until there are no more.
        started: Told the command's pid.
    """
    relay = _Relay()
    with _handling({signal.SIGINT: relay.wait, signal.SIGTERM: relay.end}):
        try:
            child = subprocess.Popen(argv)  # noqa: S603  running what was asked for is the point
        except FileNotFoundError:
            shell.complain("gpulse", f"{argv[0]}: command not found")
            return NOT_FOUND
        except OSError as error:
            shell.complain("gpulse", f"{argv[0]}: {error.strerror}")
            return NOT_EXECUTABLE
        relay.adopt(child)
        if started is not None:
            started(child.pid)
        waiter = threading.Thread(target=_stop_with, args=(child, sampler), name="gpulse-command")
        waiter.start()
        try:
            sample()
        finally:
            waiter.join()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


class _Relay:
    """Passes a polite kill on to the command, even one that comes while the command is being started."""

    def __init__(self) -> None:
        self._asked = False
        self._child: subprocess.Popen[bytes] | None = None

    def adopt(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        if self._asked:
            child.terminate()

    def end(self, number: int, stack: FrameType | None) -> None:  # noqa: ARG002  the signature of handlers
        self._asked = True
        if self._child is not None:
            self._child.terminate()

    def wait(self, number: int, stack: FrameType | None) -> None:
        """Ctrl-C reaches the command from the terminal; ignoring it instead would make the command ignore it."""


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_with(child: subprocess.Popen[bytes], sampler: Sampler) -> None:
    child.wait()
    sampler.stop()
