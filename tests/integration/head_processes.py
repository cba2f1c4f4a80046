"""Heads and agents as processes, in a directory of their own, and commands that are typed at them."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import free_port
from tests.integration.commands import Ended, Started, environment, run, start

PATIENCE_SECONDS = 120.0
_MODULES = {"gpulse": "gpulse", "gsprof": "gpulse.cli.gsprof"}
_HOSTS = re.compile(r"(?:<head-node-ip>|master-node|localhost|profiler-host):(\d+)")


class Place:
    """A directory in which somebody works: commands are typed as documents print them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port, self.http_port = free_port(), free_port()
        self._processes: list[Started] = []
        home = directory / "home"
        home.mkdir()
        self.environment = environment(
            {
                "HOME": str(home),
                "XDG_STATE_HOME": str(home / "state"),
                "XDG_CONFIG_HOME": str(home / "config"),
            }
        )

    def type(self, line: str, *, code: int = 0) -> str:
        """Run a command to its end, 8090 and 8091 being the ports of the head here; what it printed."""
        ended = self.run(line)
        assert code == ended.code, f"{line}\n{ended.out}\n{ended.err}"
        return ended.out

    def run(self, line: str, **more: str) -> Ended:
        """Run a command to its end, whatever that is."""
        words, env = self._words(line), {**self.environment, **more}
        if words[0] in _MODULES:
            return run(*words[1:], program=words[0], env=env, cwd=self.directory)
        done = subprocess.run(
            words,
            cwd=self.directory,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())

    def begin(self, line: str, until: str) -> Started:
        """Start a command that stays, and wait until it says that it is up."""
        log = self.directory / f"log-{len(self._processes)}.txt"
        program, *arguments = self._words(line)
        with log.open("wb") as file:
            child = start(
                *arguments,
                module=_MODULES[program],
                cwd=self.directory,
                env=self.environment,
                stdout=file,
                stderr=file,
            )
        self._processes.append(child)

        def is_up() -> bool:
            if child.poll() is not None:
                pytest.fail(f"{line} ended: {log.read_text()}")
            return until in log.read_text()

        wait_for(is_up, f"{line} to say {until!r}")
        return child

    def head(self, line: str = "gsprof start --port 8090 --http-port 8091") -> Started:
        """Start a head."""
        return self.begin(line, "listening for agents")

    def agent(self, line: str = "gsprof connect localhost:8090 --resilient") -> Started:
        """Start an agent on a simulated machine, and wait until the head has frames of it."""
        before = self.frames()
        child = self.begin(f"{line} --demo", "connected")
        wait_for(lambda: self.frames() > before, "frames of the agent")
        return child

    def status(self) -> dict[str, Any]:
        """What the head says of itself."""
        document: dict[str, Any] = json.loads(self.type("gpulse status --head localhost:8090 --json"))
        return document

    def json(self, name: str) -> Any:
        """A file that was written here."""
        return json.loads((self.directory / name).read_bytes())

    def end(self, child: Started, number: int = signal.SIGTERM) -> int:
        """End a process; its exit code."""
        child.send_signal(number)
        return child.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        """End everything that was begun, agents first."""
        for child in reversed(self._processes):
            if child.poll() is None:
                child.kill()
            child.wait()

    def frames(self) -> int:
        """How many frames the head has got, asked over HTTP."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.http_port}/status", timeout=PATIENCE_SECONDS
        ) as answer:
            return int(json.load(answer)["frames_received"])

    def _words(self, line: str) -> list[str]:
        ports = {"8090": str(self.port), "8091": str(self.http_port)}
        here = _HOSTS.sub(lambda match: f"localhost:{ports.get(match[1], match[1])}", line)
        here = re.sub(r"(port )(\d+)", lambda match: match[1] + ports.get(match[2], match[2]), here)
        return shlex.split(here)


@contextmanager
def place(directory: Path) -> Iterator[Place]:
    """A place in which everything ends with the block."""
    made = Place(directory)
    try:
        yield made
    finally:
        made.close()


def wait_for(is_there: Callable[[], bool], what: str) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_there():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE_SECONDS} s for {what}")
        time.sleep(0.05)
