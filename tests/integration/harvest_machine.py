"""A machine to harvest on: fake device files, the fake driver's GPUs, and programs that say what they see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fakes.nvml import FakeNvml
from tests.integration import commands
from tests.integration.cluster import Process, is_gone, until

WORK = """\
#!{python} -IS
import fcntl, os, sys, time
me = os.open(sys.argv[1] + ".lock", os.O_RDWR | os.O_CREAT)
try:
    fcntl.flock(me, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    print("TWO AT ONCE", flush=True)
with open(sys.argv[1], "a") as out:
    out.write(f"{{os.getpid()}} {{os.environ.get('CUDA_VISIBLE_DEVICES')}}\\n")
print("at work", flush=True)
time.sleep(600)
"""
SMI = """\
#!{python}
import os, sys, time
held = os.open(sys.argv[1], os.O_RDONLY)
open(sys.argv[2], "w").close()
while not os.path.exists(sys.argv[3]):
    time.sleep(0.02)
"""
"""It starts no other program, which would have the device open for a moment under a name of its own."""


class HarvestMachine:
    """Where everything of one test is."""

    def __init__(self, directory: Path, fake: FakeNvml, library: Path, gpus: int = 2) -> None:
        self.directory = directory
        self.fake = fake
        self.dev = directory / "dev"
        self.bin = directory / "bin"
        self.config = directory / "home" / ".config" / "gpulse" / "harvest.toml"
        for folder in (self.dev / "shm", self.dev / "pts", self.bin, self.config.parent):
            folder.mkdir(parents=True)
        for number in range(1, gpus):
            fake.add(number)
        for number in range(gpus):
            self.device(number).touch()
        self._script("work", WORK.format(python=sys.executable))
        self._script("nvidia-smi", SMI.format(python=sys.executable))
        self.environment = {
            **fake.env(library),
            "HOME": str(directory / "home"),
            "XDG_STATE_HOME": str(directory / "state"),
            "XDG_CONFIG_HOME": str(self.config.parent.parent),
            "PATH": f"{self.bin}:{os.environ['PATH']}",
        }

    def device(self, number: int) -> Path:
        """The device file of a GPU."""
        return self.dev / f"nvidia{number}"

    def _script(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def configure(self, text: str = "", **idle: object) -> Path:
        """Write a configuration that decides quickly, with these programs."""
        settings = {"idle_seconds": 0, "cooldown_seconds": 0.2, **idle}
        lines = ["[harvest]", "interval_seconds = 0.2", "[idle]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        self.config.write_text("\n".join([*lines, text or self.program("fold", 0)]), encoding="utf-8")
        return self.config

    def program(self, name: str, gpus: object, **keys: object) -> str:
        """A program that writes its process and its visible GPUs into a file of its name."""
        given = {"name": name, "command": f"work {self.told(name)}", "gpus": gpus, **keys}
        return "\n".join(
            ["[[program]]", *(f"{key} = {json.dumps(value)}" for key, value in given.items()), ""]
        )

    def told(self, name: str) -> Path:
        """Where a program writes who it is."""
        return self.directory / f"{name}.told"

    def starts(self, name: str) -> list[tuple[int, str]]:
        """Process and visible GPUs of each start of a program."""
        try:
            lines = self.told(name).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [(int(pid), visible) for pid, visible in (line.split() for line in lines)]

    def started(self, name: str, times: int = 1) -> int:
        """Wait until a program was started so many times; its process."""
        found: list[tuple[int, str]] = until(
            lambda: (starts := self.starts(name))[times - 1 :] and starts, f"start {times} of {name}"
        )
        assert times == len(found)
        return found[-1][0]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`gpulse harvest …` to its end."""
        words = ("harvest", *arguments, "--dev-dir", str(self.dev))
        ended = commands.run(*words, env=self.environment)
        return subprocess.CompletedProcess(words, ended.code, ended.out, ended.err)

    def status(self) -> dict[str, Any]:
        """What `gpulse harvest status --json` says of the only harvest."""
        answer = self.run("status", "--json")
        (harvest,) = json.loads(answer.stdout)["harvests"]
        return {"exit": answer.returncode, **harvest}

    def looks(self) -> None:
        """Wait until harvest has looked twice more: the first look may have begun before."""
        begun = self.published()["time"]
        until(lambda: self.published()["time"] > begun + 0.45, "two looks")

    def supervisor(self) -> int:
        """The supervisor of the only run, once that is told."""
        supervisor: dict[str, int] = until(lambda: self.published()["runs"][0]["supervisor"], "a supervisor")
        return supervisor["pid"]

    def published(self) -> dict[str, Any]:
        """What the only harvest tells everybody."""
        (path,) = (self.dev / "shm").glob("*.json")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    @contextmanager
    def holding(self, number: int) -> Iterator[None]:
        """Somebody has a GPU open: this very process."""
        with self.device(number).open("rb"):
            yield

    @contextmanager
    def smi(self, number: int) -> Iterator[None]:
        """`nvidia-smi` has a GPU open."""
        up, stop = self.directory / "smi.up", self.directory / "smi.stop"
        process = subprocess.Popen(
            [str(self.bin / "nvidia-smi"), str(self.device(number)), str(up), str(stop)]
        )
        try:
            until(up.exists, "nvidia-smi to open the GPU")
            yield
        finally:
            stop.touch()
            process.wait(60)
            up.unlink()
            stop.unlink()


class HarvestProcess(Process):
    """`gpulse harvest`, running."""

    def __init__(self, machine: HarvestMachine, *options: str, env: Mapping[str, str] | None = None) -> None:
        super().__init__(
            *("harvest", "--dev-dir", str(machine.dev), *options),
            cwd=machine.directory,
            env={**machine.environment, **(env or {})},
        )


def gone(pid: int, seconds: float = 60.0) -> None:
    """Wait until a process has ended."""
    until(lambda: is_gone(pid), f"the end of process {pid}", seconds)
