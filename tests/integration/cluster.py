"""Real heads and agents as processes, for tests."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc

from gpulse.cluster import wire
from tests.integration import commands

PATIENCE_SECONDS = 120.0
EAGER = {
    "gpulse.cluster.agent.head_selection:STABLE_SECONDS": 0.0,
    "gpulse.cluster.agent.head_selection:FIRST_DELAY_SECONDS": 0.3,
}
"""Agents that count every connection as a good one, and so never wait for more than a third of a second to try again."""
_UNBOUNDED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
SEALING = ("--seal-after", "1s")
"""Heads that seal all the time."""


_GIVEN: set[int] = set()


def free_port() -> int:
    """A port that nobody uses now, and that was not given to anybody before.

    It is below those that the system gives to connections, one of which could have it a moment later.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        end = max(int(file.read().split()[0]), 20_000)
    while True:
        port = random.SystemRandom().randrange(10_000, end)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port


def until(
    condition: Callable[[], Any],
    what: str,
    seconds: float = PATIENCE_SECONDS,
    *,
    max_pause_seconds: float = 0.05,
) -> Any:
    """Wait for something that another process does; what it came to.

    The pauses grow, because asking a head costs CPU time that what is waited for needs as well.
    """
    deadline = time.monotonic() + seconds
    pause_seconds = 0.01
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {seconds:g} s for: {what}"
        time.sleep(pause_seconds)
        pause_seconds = min(1.5 * pause_seconds, max_pause_seconds)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, whoever is to bury it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return text.rpartition(")")[2].split()[0] == "Z"


class Process:
    """One of our programs, and what it said."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        env: dict[str, str] | None = None,
        tuned: Mapping[str, float] | None = None,
        prefix: Sequence[str] = (),
        command: Sequence[str] | None = None,
        module: str = "gpulse",
        unset: Sequence[str] = (),
    ) -> None:
        """Start it with the environment of the tests, without the variables that begin so, and with `env`."""
        left_out = ("GPULSE_", "LC_", *unset)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
        environment |= {"LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", **(env or {})}
        if command is None and not prefix:
            self.popen = commands.start(
                *arguments,
                module=module,
                env=environment,
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                tuned=tuned,
            )
        else:
            self.popen = subprocess.Popen(
                [*prefix, *(command or commands.fresh_program(tuned or {})), *arguments],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL if command is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._is_told = False
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def text(self) -> str:
        """Everything it said."""
        return "\n".join(self.lines)

    def said(self, words: str, seconds: float = PATIENCE_SECONDS) -> str:
        """Wait until it says something; the line."""
        deadline = time.monotonic() + seconds
        with self._news:
            seen = 0
            while True:
                for line in self.lines[seen:]:
                    if words in line:
                        return line
                seen = len(self.lines)
                left = deadline - time.monotonic()
                ended = self.popen.poll() is not None and not self._reader.is_alive()
                assert left > 0 and not ended, f"it did not say {words!r}:\n{self.text}"  # noqa: PT018
                self._news.wait(min(left, 0.5))

    def kill(self) -> None:
        """End it without warning."""
        self.end(signal.SIGKILL)

    def tell(self, number: int = signal.SIGTERM) -> None:
        """Tell it to end, once: a second signal would end it at once, in the midst of ending."""
        if self.popen.poll() is None and not self._is_told:
            self._is_told = True
            self.popen.send_signal(number)

    def end(self, number: int = signal.SIGTERM, seconds: float = PATIENCE_SECONDS) -> int:
        """End it, and give its exit code."""
        self.tell(number)
        code = self.popen.wait(seconds)
        self._reader.join(PATIENCE_SECONDS)
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        if self.popen.stdout is not None:
            self.popen.stdout.close()
        return code


class HeadProcess(Process):
    """A head, on ports of its own."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        port: int | None = None,
        http_port: int | None = None,
        env: dict[str, str] | None = None,
        tuned: Mapping[str, float] | None = None,
        prefix: Sequence[str] = (),
        wait: bool = True,
    ) -> None:
        self.data_dir = directory / "data"
        self.output_dir = directory / "output"
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self.http_port = http_port or free_port()
        super().__init__(
            "head",
            *("--port", str(self.port), "--http-port", str(self.http_port)),
            *("--data-dir", str(self.data_dir), "--output-dir", str(self.output_dir)),
            *options,
            cwd=directory,
            env={
                "XDG_STATE_HOME": str(directory / "state"),
                "XDG_CONFIG_HOME": str(directory / "config"),
                **(env or {}),
            },
            tuned=tuned,
            prefix=prefix,
        )
        if wait:
            try:
                self.said("listening for agents on")
            except BaseException:  # nobody else knows of it yet
                self.kill()
                raise

    def ask(
        self, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """One HTTP request; the status and the JSON that came back."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=PATIENCE_SECONDS)
        try:
            sent = dict(headers or {})
            data = None
            if body is not None:
                data = json.dumps(body)
                sent.setdefault("Content-Type", "application/json")
            connection.request(method or ("GET" if body is None else "POST"), path, data, sent)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text else None
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """What a path answers."""
        status, document = self.ask(path)
        assert status == 200, (status, document)
        return document

    def post(self, path: str, body: Any) -> Any:
        """What a path answers to a document."""
        status, document = self.ask(path, body)
        assert status == 200, (status, document)
        return document

    def nodes(self) -> dict[str, str]:
        """The states of the nodes, by name."""
        return {node["name"]: node["state"] for node in self.get("/status")["nodes"]}


class AgentProcess(Process):
    """An agent of a simulated machine, or another one."""

    def __init__(
        self,
        directory: Path,
        name: str,
        port: int,
        *options: str,
        host: str = "127.0.0.1",
        source: Sequence[str] = ("--demo",),
        env: dict[str, str] | None = None,
        tuned: Mapping[str, float] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.state_dir = directory / f"agent-{name}"
        memory = directory.with_name(f"{directory.name}-memory")
        memory.mkdir(exist_ok=True)
        super().__init__(
            "agent",
            f"{host}:{port}",
            *source,
            *("--node-name", name, "--state-dir", str(self.state_dir)),
            *options,
            cwd=directory,
            env={
                "XDG_STATE_HOME": str(directory / "state"),
                "XDG_CONFIG_HOME": str(directory / "config"),
                "XDG_RUNTIME_DIR": str(memory),
                **(env or {}),
            },
            tuned=tuned,
            prefix=prefix,
        )


class SpyProcess(Process):
    """A head that hears everything and acknowledges nothing: what it heard is what an agent took."""

    def __init__(self, directory: Path, port: int, *, interval_ms: int) -> None:
        self._store = directory / f"spy-{port}"
        super().__init__(
            *(str(self._store), "--port", str(port), "--interval-ms", str(interval_ms), "--silent"),
            cwd=Path(__file__).parents[2],
            command=[sys.executable, "-m", "tests.integration.fake_head"],
        )
        self.said("listening")

    @property
    def heard(self) -> dict[bytes, int]:
        """The last frame of each run, oldest first."""
        last: dict[bytes, int] = {}
        for line in self._store.read_text(encoding="ascii").splitlines(keepends=True):
            if line.endswith("\n"):
                run, sequence = line.split()[:2]
                last[bytes.fromhex(run)] = int(sequence)
        return last


def talk(address: str, messages: Iterable[bytes]) -> tuple[grpc.StatusCode, str, list[bytes]]:
    """Send messages as an agent would; how it ended, the reason, and what the head said until then."""
    heard: list[bytes] = []
    channel: Any = grpc.insecure_channel(address, options=_UNBOUNDED)
    with channel:
        stream = channel.stream_stream(wire.STREAM)(iter(messages), timeout=PATIENCE_SECONDS)
        return *_outcome(lambda: heard.extend(stream)), heard


def call(
    address: str, path: str, data: bytes, metadata: Sequence[tuple[str, str]] = ()
) -> tuple[grpc.StatusCode, str, bytes]:
    """Make one call; how it ended, the reason, and the answer."""
    heard: list[bytes] = []
    channel: Any = grpc.insecure_channel(address, options=_UNBOUNDED)
    with channel:
        method = channel.unary_unary(path)
        code, why = _outcome(
            lambda: heard.append(method(data, metadata=tuple(metadata), timeout=PATIENCE_SECONDS))
        )
    return code, why, b"".join(heard)


def _outcome(work: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    try:
        work()
    except grpc.RpcError as error:
        failed: Any = error
        return failed.code(), failed.details() or ""
    return grpc.StatusCode.OK, ""


_Kept = TypeVar("_Kept", bound=Process)


class Cluster:
    """Heads and agents that are all gone at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()

    def head(self, *options: str, **given: Any) -> HeadProcess:
        """Start a head."""
        return self._kept(HeadProcess(self.directory, *options, **given))

    def agent(self, name: str, port: int, *options: str, **given: Any) -> AgentProcess:
        """Start an agent."""
        return self._kept(AgentProcess(self.directory, name, port, *options, **given))

    def spy(self, port: int, *, interval_ms: int) -> SpyProcess:
        """Start a head that hears everything and acknowledges nothing."""
        return self._kept(SpyProcess(self.directory, port, interval_ms=interval_ms))

    def _kept(self, process: _Kept) -> _Kept:
        self._stack.callback(process.end, signal.SIGKILL)
        return process

    def close(self) -> None:
        """End everything."""
        self._stack.close()


@contextmanager
def cluster_in(directory: Path) -> Iterator[Cluster]:
    """A cluster for one test."""
    cluster = Cluster(directory)
    try:
        yield cluster
    finally:
        cluster.close()
