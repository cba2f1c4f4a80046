"""One run as harvest sees it: the keeper it started, what that told, and what it was told."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from time import monotonic

from gpulse.errors import GpulseError
from gpulse.harvest.running import keeper as keeper_program
from gpulse.harvest.running.line import Line
from gpulse.harvest.running.told import Process
from gpulse.harvest.settings import Program


class Run:
    """One keeper, and what it told."""

    def __init__(self, name: str, program: Program, child: subprocess.Popen[bytes], keeper: Process) -> None:
        self.name = name
        self.program = program
        self.child = child
        self.keeper = keeper
        self.descriptor = os.pidfd_open(child.pid)
        self.line: Line | None = None
        self.process: Process | None = None
        self.exited = False
        self.gone = False
        self.asked_at: float | None = None
        self.killed = False
        self.obeyed = False
        """The keeper has begun to kill."""

    def deadline(self) -> float:
        """When it is killed that has lost its keeper."""
        if self.killed:
            return 0.0
        return (monotonic() if self.asked_at is None else self.asked_at) + self.program.grace_seconds

    def order(self, document: Mapping[str, object]) -> None:
        """Tell the keeper, which somebody may have stopped."""
        if self.line is not None:
            self.line.send(json.dumps(document))
            self.child.send_signal(signal.SIGCONT)


def start_keeper(environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A keeper in a session of its own, and our end of the line to it.

    Raises:
        GpulseError: The Python that runs harvest cannot be started again.
        OSError: There is no room for another connection.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            child = subprocess.Popen(  # noqa: S603  our own program
                [sys.executable, "-I", "-S", keeper_program.__file__, str(theirs.fileno())],
                cwd="/",
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
    except OSError as error:
        ours.close()
        raise GpulseError(
            f"cannot start the supervising process with Python at {sys.executable or '(an unknown path)'}: "
            f"{error.strerror}; if gpulse was just updated or moved, start harvest again"
        ) from error
    except BaseException:
        ours.close()
        raise
    return child, ours
