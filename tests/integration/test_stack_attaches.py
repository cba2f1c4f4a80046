"""A thousand reads of processes that fork, exec, exit and are killed: no crash, nothing stopped, nothing left.

By default a tenth of them; `GPULSE_ATTACHES=1000` runs all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from gpulse.model.python_stack import ProcessStacks
from gpulse.sources.python_stacks import StackReader, find_py_spy

ATTACHES = int(os.environ.get("GPULSE_ATTACHES", "100"))
RESTLESS = """
import multiprocessing, os, random, sys, threading, time
random.seed(int(sys.argv[1]))

def deep(n):
    return deep(n - 1) if n else sum(i * i for i in range(20_000))

def leave():
    end = time.monotonic() + random.random() * 0.2
    while time.monotonic() < end:
        deep(random.randrange(80))
    os._exit(0)

for _ in range(6):
    threading.Thread(target=lambda: [deep(random.randrange(40)) or time.sleep(0.001) for _ in range(10**9)], daemon=True).start()
end = time.monotonic() + random.random()
while time.monotonic() < end:
    child = os.fork()
    if child == 0:
        leave()
    deep(40)
    os.waitpid(child, 0)
if random.random() < 0.8:
    os.execv(sys.executable, [sys.executable, __file__, str(random.randrange(10**9))])
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Restless:
    """A few programs that fork, exec and exit; those that end, or are killed, are started again."""

    def __init__(self, script: Path, count: int) -> None:
        self._script = script
        self._lock = threading.Lock()
        self._number = 0
        self._programs = [self._start() for _ in range(count)]
        self._killer = threading.Thread(target=self._kill_some, daemon=True)
        self._stopped = threading.Event()
        self.stopped: list[int] = []
        """Processes that were seen in the state of a stopped or traced process."""
        self._killer.start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._number += 1
        return subprocess.Popen(
            [sys.executable, self._script, str(self._number)],
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )

    def pids(self) -> list[int]:
        """The programs and their children."""
        with self._lock:
            roots = [each.pid for each in self._programs]
        found = list(roots)
        for pid in roots:
            try:
                found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            except OSError:
                continue
        return found

    def _kill_some(self) -> None:
        while not self._stopped.wait(0.02):
            for pid in self.pids():
                if state_of(pid) in ("T", "t"):
                    self.stopped.append(pid)
            with self._lock:
                for place, each in enumerate(self._programs):
                    if each.poll() is not None:
                        self._programs[place] = self._start()
                if self._number % 3 == 0:
                    self._programs[self._number % len(self._programs)].kill()

    def close(self) -> None:
        """Kill all of them."""
        self._stopped.set()
        self._killer.join()
        for each in self._programs:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()


def state_of(pid: int) -> str:
    """The state letter of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def own_children() -> set[int]:
    """The children of all threads of this process, zombies included."""
    return {
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    }


def test_restless_processes_survive_being_read(tmp_path: Path) -> None:
    """They are read in all their moments, and each read ends with stacks or with a reason."""
    script = tmp_path / "restless.py"
    script.write_text(RESTLESS)
    before = own_children()
    restless = Restless(script, 4)
    reader = StackReader(find_py_spy())
    done: list[ProcessStacks] = []
    lock = threading.Lock()

    def read_some(_: int) -> None:
        while True:
            for pid in restless.pids():
                with lock:
                    if len(done) >= ATTACHES:
                        return
                stacks = reader.read(pid, time.time)
                with lock:
                    done.append(stacks)

    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(read_some, range(2)))
    finally:
        restless.close()
    outcomes = Counter("stacks" if each.problem is None else each.problem.code for each in done)

    assert len(done) >= ATTACHES
    assert outcomes["stacks"] > 0, outcomes
    assert not outcomes["no_py_spy"] + outcomes["not_permitted"], outcomes
    assert [] == restless.stopped
    assert before == own_children()
