"""Parts under test: head, agents, fake GPU drivers and time-series database, each started, stopped and killed here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

from tests.fakes.nvml import FakeNvml, Gpu, build
from tests.integration.cluster import AgentProcess, HeadProcess, Process, free_port, until
from tests.integration.commands import BIN, Ended
from tests.integration.stored import read_taken
from tests.integration.tsdb_servers import VictoriaMetrics
from tests.soak.observations import DATABASE, HEAD, Life, LogLine, Outage

FAULTY = "gpu-7"
FAULT = (FAULTY, "0", "gpu_fault")
SIMULATED = "demo-8"
"""A node whose readings are recordings of real jobs: its findings come and go."""
STEADY = ("gpu-1", "gpu-2")
"""Nodes whose agents run from the beginning to the end."""
HEALTHY = tuple(f"gpu-{number}" for number in range(1, 7))
NODES = (*HEALTHY, FAULTY, SIMULATED)
JOB, JOB_NODE, USER = "slurm:4711", "gpu-1", "ada"
INTERVAL_SECONDS = 0.5
_GPUS = 4
_PATIENCE_SECONDS = 120.0
_FRESH_SECONDS = 3.0
_DETACHED = ("setsid",)
"""Ctrl-C at a terminal reaches the soak alone, which then stops its parts in order."""


class Parts:
    """Everything under test, on ports of its own and in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.outages: list[Outage] = []
        self.lives: list[Life] = []
        self.problems: list[str] = []
        """What went wrong while parts were started and stopped."""
        self.agents: dict[str, AgentProcess] = {}
        self.metrics_ports: dict[str, int] = {}
        self._processes: list[tuple[str, Process]] = []
        self._started: dict[str, float] = {}
        self._stack = ExitStack()
        self._library = Path()
        self._drivers: dict[str, FakeNvml] = {}
        self.database = VictoriaMetrics(directory / "database")
        self.head: HeadProcess
        self._ports = free_port(), free_port()
        self._environment = {
            "TZ": "UTC",
            "HOME": str(directory / "home"),
            "XDG_STATE_HOME": str(directory / "state"),
            "XDG_CONFIG_HOME": str(directory / "config"),
            "XDG_RUNTIME_DIR": str(directory / "runtime"),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start everything, and wait until every node is connected."""
        for name in ("home", "runtime", "jobs"):
            (self.directory / name).mkdir()
        (self.directory / "jobs" / "0").write_text(f"{JOB.partition(':')[2]} 0\n", encoding="ascii")
        self._library = build(self.directory / "library")
        self._stack.callback(self.database.kill)
        self.database.start()
        self._start_head(auto_resume=True)
        for number, node in enumerate(NODES):
            self.metrics_ports[node] = free_port()
            if node != SIMULATED:
                driver = FakeNvml.create(
                    self.directory / f"driver-{node}", _GPUS, configure=partial(_number, number)
                )
                self._stack.callback(driver.close)
                self._drivers[node] = driver
        broken = self._drivers[FAULTY].gpu(0)
        broken.remapped_failed, broken.remapped_uncorrected = 1, 3
        for node in NODES:
            self._start_agent(node)
        until(lambda: set(NODES) <= self.connected(), "every node is connected", _PATIENCE_SECONDS)

    def move_readings(self, moment: float) -> None:
        """Change power and temperature of the fake GPUs a little, as idle GPUs do."""
        for driver in self._drivers.values():
            for index in range(_GPUS):
                gpu = driver.gpu(index)
                gpu.power_mw = gpu.power_average_mw = 76_000 + int(moment * 7 + index * 500) % 3000
                gpu.temperature = 28 + index + int(moment / 10) % 3

    # --- head ---

    def _start_head(self, *, auto_resume: bool) -> None:
        options = ["--remote-write", f"{self.database.url}/api/v1/write", "--seal-after", "20s"]
        self.head = HeadProcess(
            self.directory,
            *options,
            *(["--auto-resume"] if auto_resume else []),
            env=self._environment,
            prefix=_DETACHED,
            wait=False,
            port=self._ports[0],
            http_port=self._ports[1],
        )
        self._kept(HEAD, self.head)
        self.head.said("listening for agents on", _PATIENCE_SECONDS)
        until(self.is_head_up, "the head answers over HTTP", _PATIENCE_SECONDS)

    def is_head_up(self) -> bool:
        """Return whether the head answers over HTTP."""
        return self.get("/status") is not None

    def restart_head(self, action: str, *, kill: bool, auto_resume: bool) -> None:
        """End the head and start it again.

        Args:
            action: Name of the disturbance.
            kill: With SIGKILL instead of SIGTERM.
            auto_resume: The new head resumes sessions by itself.
        """
        self.outages.append(Outage(HEAD, action, time.time()))
        self._end(HEAD, self.head, kill=kill)
        self._start_head(auto_resume=auto_resume)
        self.outages[-1] = self.outages[-1]._replace(ready=time.time())

    def get(self, path: str, timeout: float = 20.0) -> Any:
        """Return the JSON that the head answers; None when it does not answer with status 200."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.head.http_port}{path}", timeout=timeout
            ) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return None

    def connected(self) -> set[str]:
        """Return the names of the nodes that are connected; empty while the head does not answer."""
        status = self.get("/status") or {"nodes": ()}
        return {node["name"] for node in status["nodes"] if node["connected"]}

    def wait_until_caught_up(self) -> None:
        """Wait until every node is connected and its newest frame is one of now, so that none waits to be sent."""

        def is_caught_up() -> bool:
            latest = (self.get("/metrics/latest") or {"client_data": {}})["client_data"]
            ages = [latest[node]["age_seconds"] for node in NODES if node in latest]
            return len(ages) == len(NODES) and max(ages) < _FRESH_SECONDS and set(NODES) <= self.connected()

        until(is_caught_up, "every node is connected and has sent its newest frame", _PATIENCE_SECONDS)

    # --- agents ---

    def _start_agent(self, node: str) -> None:
        driver = self._drivers.get(node)
        options = ["--metrics-port", str(self.metrics_ports[node])]
        if node == JOB_NODE:
            options += ["--job-map", str(self.directory / "jobs")]
        agent = AgentProcess(
            self.directory,
            node,
            self.head.port,
            *options,
            source=("--demo",) if driver is None else (),
            env={**self._environment, **({} if driver is None else driver.env(self._library))},
            prefix=_DETACHED,
        )
        self._kept(node, agent)
        self.agents[node] = agent
        self._started[node] = time.time()

    def stop_agent(self, node: str, action: str, *, kill: bool) -> None:
        """End an agent, and record how many frames it had sampled and what is in its spool."""
        agent = self.agents.pop(node)
        counted = self.frames_sampled(node)
        self.outages.append(Outage(node, action, time.time()))
        self._end(node, agent, kill=kill)
        kept = {run: frozenset(numbers) for run, numbers in read_taken(agent.state_dir).kept.items()}
        self.lives.append(Life(node, agent.popen.pid, self._started[node], time.time(), kill, counted, kept))

    def start_agent(self, node: str) -> None:
        """Start an agent that was stopped, and wait until its node is connected."""
        self._start_agent(node)
        until(lambda: node in self.connected(), f"{node} is connected", _PATIENCE_SECONDS)
        place = max(i for i, outage in enumerate(self.outages) if outage.part == node)
        self.outages[place] = self.outages[place]._replace(ready=time.time())

    def frames_sampled(self, node: str) -> int | None:
        """Return the number of frames that an agent says it has sampled since its start."""
        try:
            page = self.metrics(node)
        except OSError:
            return None
        for line in page.splitlines():
            if line.startswith("gpulse_agent_frames_total "):
                return int(float(line.split()[1]))
        return None

    def metrics(self, part: str) -> str:
        """Return the metrics page of the head or of an agent.

        Raises:
            OSError: It does not answer.
        """
        port = self.head.http_port if part == HEAD else self.metrics_ports[part]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20.0) as answer:
            text: str = answer.read().decode()
        return text

    # --- database ---

    def restart_database(self, action: str, down_seconds: float) -> None:
        """Kill the time-series database, and start it again after a while."""
        self.outages.append(Outage(DATABASE, action, time.time()))
        self.database.kill()
        time.sleep(down_seconds)  # the head meets a database that does not answer
        self.database.start()
        self.outages[-1] = self.outages[-1]._replace(ready=time.time())

    def wait_until_sent(self) -> None:
        """Wait until the head has sent everything to the database."""

        def is_sent() -> bool:
            status = self.get("/status")
            if status is None:
                return False
            remote, storage = status["remote"], status["storage"]
            waiting = (remote["waiting_bytes"], remote["waiting_seconds"], storage["waiting_bytes"])
            return remote["state"] == "ok" and not any(waiting)

        until(is_sent, "the head has sent every sample to the database", _PATIENCE_SECONDS)
        self.database.settle()

    # --- commands ---

    def run(self, *arguments: str) -> Ended:
        """Run a command of gpulse against this head to its end."""
        done = subprocess.run(
            [BIN / "gpulse", *arguments, "--head", f"127.0.0.1:{self.head.port}"],
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **_marker(), **self._environment},
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
        ended = Ended(done.returncode, done.stdout.decode(), done.stderr.decode())
        if ended.code != 0:
            self.problems.append(f"gpulse {' '.join(arguments)} failed: {(ended.err or ended.out).strip()}")
        return ended

    # --- ends ---

    def _kept(self, part: str, process: Process) -> None:
        self._processes.append((part, process))
        self._stack.callback(process.end, signal.SIGKILL)

    def _end(self, part: str, process: Process, *, kill: bool) -> None:
        if process.popen.poll() is not None:
            self.problems.append(f"{part} had ended by itself with exit code {process.popen.returncode}")
        code = process.end(signal.SIGKILL if kill else signal.SIGTERM, _PATIENCE_SECONDS)
        if not kill and code != 0:
            self.problems.append(f"{part} ended with exit code {code} after SIGTERM")

    def end_head(self) -> None:
        """End the head in order."""
        self._end(HEAD, self.head, kill=False)

    def running(self) -> dict[str, int]:
        """Return the processes that run now, by part."""
        listed = {HEAD: self.head, **self.agents}
        return {part: process.popen.pid for part, process in listed.items() if process.popen.poll() is None}

    def log_lines(self) -> list[LogLine]:
        """Return everything that heads and agents wrote."""
        return [log_line(part, text) for part, process in self._processes for text in list(process.lines)]

    def close(self) -> None:
        """End everything that runs."""
        self._stack.close()


def log_line(part: str, text: str) -> LogLine:
    """Parse a line such as `2026-11-16 09:13:47 I connected`."""
    try:
        moment = datetime.strptime(text[:19], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return LogLine(part, None, "", text)
    return LogLine(part, moment, text[20:21], text[22:])


def _number(node: int, index: int, gpu: Gpu) -> None:
    gpu.uuid = f"GPU-4d0c6b2e-8f1a-4c55-9e{node:02x}-{0x5A0000000000 + index:012x}".encode()


MARKER = "SOAK_RUN"
"""Environment variable that every process of one soak inherits."""


def _marker() -> dict[str, str]:
    return {MARKER: os.environ[MARKER]} if MARKER in os.environ else {}


def leftovers(run_id: str) -> list[tuple[int, str]]:
    """Return the processes of a soak that still run: pid and command line."""
    found = []
    wanted = f"{MARKER}={run_id}".encode()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        if pid == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if wanted in environment and command:
            found.append((pid, command[:120].strip()))
    return found
