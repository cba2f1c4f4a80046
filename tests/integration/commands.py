"""Runs the installed commands as people do: as processes, with an environment of their own, on a terminal or not."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

BIN = Path(sys.executable).parent
TRACES = Path(__file__).parents[1] / "data" / "traces"
_PATIENCE_SECONDS = 60.0
STUBBORN = (
    sys.executable,
    "-c",
    """
import os, pathlib, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
time.sleep(600)
""",
)
"""A command that no polite signal ends; it writes its pid into the file that is its argument."""


class Ended(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The same on every machine, whatever the developer's shell has set."""
    base = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": "/nonexistent", "TZ": "UTC", "LANG": "C.UTF-8"}
    return {**base, **(extra or {})}


def run(
    *arguments: str | Path,
    program: str = "gpulse",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Ended:
    """Run a command to its end, without a terminal and without input."""
    done = subprocess.run(
        [BIN / program, *arguments],
        env=environment(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


def pid_of_stubborn(path: Path) -> int:
    """The pid, once it ignores signals."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            pytest.fail("the command did not start")
        time.sleep(0.05)
    return int(path.read_text())


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, child: subprocess.Popen[bytes], master: int) -> None:
        self.child = child
        self._master = master
        self.seen = b""

    def until(self, text: bytes) -> bytes:
        """Read until the command has written this; everything it wrote so far."""
        while text not in self.seen:
            if not self._read():
                pytest.fail(f"ended without {text!r}: {self.seen!r}")
        return self.seen

    def to_the_end(self) -> bytes:
        """Read until the command ends."""
        while self._read():
            pass
        self.child.wait(_PATIENCE_SECONDS)
        return self.seen

    def _read(self) -> bool:
        if not select.select([self._master], [], [], _PATIENCE_SECONDS)[0]:
            pytest.fail(f"silent for {_PATIENCE_SECONDS} s: {self.seen!r}")
        try:
            part = os.read(self._master, 65536)
        except OSError:  # how a terminal says that nobody holds its other end
            return False
        self.seen += part
        return bool(part)

    def press_ctrl_c(self) -> None:
        """Type it, so that the terminal itself sends SIGINT to the command in its foreground."""
        os.write(self._master, b"\x03")


@contextmanager
def terminal(
    *arguments: str | Path,
    columns: int = 80,
    rows: int = 24,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[Terminal]:
    """Start a command in the foreground of a terminal of this size."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    child = subprocess.Popen(
        ["setsid", "--ctty", *prefix, BIN / "gpulse", *arguments],
        env=environment({"TERM": "xterm-256color", **(env or {})}),
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    try:
        yield Terminal(child, master)
    finally:
        child.kill()
        child.wait()
        os.close(master)
