"""Real processes that open and close files when told to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HAND = """
import os, sys
for line in sys.stdin:
    verb, *words = line.split()
    if verb == "open":
        print(os.open(words[0], os.O_RDWR), flush=True)
    elif verb == "close":
        os.close(int(words[0]))
        print("closed", flush=True)
    elif verb == "often":
        for _ in range(int(words[1])):
            os.close(os.open(words[0], os.O_RDWR))
        print("done", flush=True)
    elif verb == "fork":
        child = os.fork()
        if child == 0:
            sys.stdin.read()
            os._exit(0)
        print(child, flush=True)
"""


class Hand:
    """One such process."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self.pid = child.pid

    def tell(self, *words: object) -> str:
        """Have it do something; its answer comes when it is done."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(" ".join(map(str, words)) + "\n")
        self._child.stdin.flush()
        return self._child.stdout.readline().strip()

    def open(self, path: Path) -> int:
        """Have it open a file; the descriptor."""
        return int(self.tell("open", path))

    def close(self, descriptor: int) -> None:
        """Have it close a descriptor."""
        self.tell("close", descriptor)


@contextmanager
def hand(*prefix: str) -> Iterator[Hand]:
    """A process that is ended afterwards."""
    child = subprocess.Popen(
        [*prefix, sys.executable, "-I", "-S", "-c", _HAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        yield Hand(child)
    finally:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        child.wait(60)
        child.stdout.close()


def start_ticks(pid: int) -> int:
    """When a process was started, as the kernel counts."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


IS_ROOT = os.geteuid() == 0
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")
