"""Real heads and agents as processes, each on the core it is told, and what they use."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from benchmarks.measure import ROOT, child_environment
from gpulse.cluster.client.grpc_transport import GrpcTransport
from gpulse.cluster.client.transport import HeadAddress, HeadCredentials, Reply

_SYNCS = Path(__file__).parent / "children" / "syncs.c"
_END_SECONDS = 60.0
_MIB = 1 << 20
_SPARE_FILES = 300
"""What a head has open besides its connections."""


@contextmanager
def workplace() -> Iterator[Path]:
    """A directory that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="gpulse-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cores() -> tuple[int, int]:
    """A core for whom is measured, and one for the others; the same where there is only one."""
    known = sorted(os.sched_getaffinity(0))
    return known[0], known[-1]


def allow_connections(wanted: int) -> int:
    """Raise the limit of open files; how many agents may be connected then."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return wanted if most == resource.RLIM_INFINITY else min(wanted, most - _SPARE_FILES)


class Process:
    """A program whose output goes to a file; `with` ends it."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        core: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._output = (folder / f"{len(list(folder.iterdir()))}.log").open("w+b")
        self._popen = subprocess.Popen(
            command,
            cwd=ROOT,
            env=child_environment(
                {
                    "XDG_CONFIG_HOME": f"{folder}/config",
                    "XDG_STATE_HOME": f"{folder}/state",
                    **(environment or {}),
                }
            ),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        self.pid = self._popen.pid
        if core is not None:  # before it has a second thread
            os.sched_setaffinity(self.pid, {core})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def check(self) -> None:
        """See that it still runs.

        Raises:
            RuntimeError: It does not.
        """
        if self._popen.poll() is not None:
            raise RuntimeError(
                f"{self._popen.args!r} ended with {self._popen.returncode}: {self.said()[-3000:]}"
            )

    def said(self) -> str:
        """Everything it said so far."""
        return os.pread(self._output.fileno(), 1 << 24, 0).decode(errors="replace")

    def until(self, found: Callable[[], Any], seconds: float = 60.0) -> Any:
        """Wait for something that this process does.

        Raises:
            RuntimeError: It ended, or did not do it in time.
        """
        deadline = time.monotonic() + seconds
        while not (answer := found()):
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._popen.args!r} took too long: {self.said()[-3000:]}")
            time.sleep(0.05)
        return answer

    def lines(self, count: int, seconds: float) -> list[Any]:
        """The first lines it prints, as JSON."""

        def enough() -> list[str]:
            whole = self.said().split("\n")[:-1]
            return whole[:count] if len(whole) >= count else []

        return [json.loads(line) for line in self.until(enough, seconds)]

    def answer(self, seconds: float = _END_SECONDS) -> Any:
        """The last line that it prints before it ends, as JSON."""
        self._popen.wait(seconds)
        return json.loads(self.said().strip().split("\n")[-1])

    def signal_end(self) -> None:
        """Ask it to end, and go on."""
        self._popen.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """End it gently; one that stays is killed."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
        try:
            self._popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._output.close()


class Head(Process):
    """`gpulse head` on free ports, with its disk waits counted."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        core: int | None = None,
        counted: Path | None = None,
        source: Path | None = None,
    ) -> None:
        self.data = folder / "data"
        self._syncs = folder / "syncs"
        self._syncs.mkdir(exist_ok=True)
        output = folder / "output"
        output.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "gpulse", "head", "--port", "0", "--http-port", str(_free_port())]
        command += ["--data-dir", str(self.data), "--output-dir", str(output), *options]
        counting = {} if counted is None else {"LD_PRELOAD": str(counted), "BENCH_SYNCS": str(self._syncs)}
        if source is not None:
            counting["PYTHONPATH"] = str(source)
        super().__init__(command, folder, core=core, environment=counting)
        try:
            self.until((self.data / "head.json").exists)
            self.address = str(json.loads((self.data / "head.json").read_text())["grpc"])
        except BaseException:
            self.end()
            raise

    @property
    def sealer(self) -> int | None:
        """The process that seals, once there is one."""
        with suppress(OSError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                for child in (task / "children").read_text().split():
                    if b"store.seal_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return int(child)
        return None

    def syncs(self, pid: int | None) -> int:
        """How often a process of it waited for the disk so far."""
        file = self._syncs / str(pid)
        return int.from_bytes(file.read_bytes(), sys.byteorder) if file.exists() else 0

    @contextmanager
    def asked(self) -> Iterator[Callable[..., Reply]]:
        """Ask it over gRPC: `ask(operation, body)`."""
        host, _, port = self.address.rpartition(":")
        link = GrpcTransport(HeadAddress("grpc", host, int(port)), HeadCredentials(), 120.0)

        def ask(operation: str, **body: Any) -> Reply:
            answer = link.ask(operation, body)
            if answer.status != 200:
                raise RuntimeError(f"{operation}: {answer.status} {answer.body[:500]!r}")
            return answer

        try:
            yield ask
        finally:
            link.close()


def sync_counter(folder: Path) -> Path:
    """The library that counts how often a process waits for its disk."""
    library = folder / "syncs.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(_SYNCS)], check=True)
    return library


def cpu_seconds(pid: int | None) -> float:
    """The CPU time of a process and all its threads so far; 0 when it is not there."""
    if pid is None:
        return 0.0
    try:
        return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) gives
    except OSError:
        return 0.0


def memory(pid: int | None, what: str = "VmRSS") -> float:
    """The memory of a process in MB: VmRSS now, VmHWM at most; 0 when it is not there."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(what):
                return int(line.split()[1]) * 1024 / _MIB
    return 0.0


def private_memory(pid: int) -> tuple[float, float]:
    """What only this process uses, in MB, and that together with its part of what it shares (PSS)."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {line.split()[0]: int(line.split()[1]) / 1024 for line in text.splitlines()[1:]}
    return sizes["Private_Clean:"] + sizes["Private_Dirty:"], sizes["Pss:"]


def thread_switches(pid: int) -> dict[int, int]:
    """How often each thread went to sleep so far."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            for line in (task / "status").read_text().splitlines():
                if line.startswith("voluntary"):
                    found[int(task.name)] = int(line.split()[1])
    return found


def thread_seconds(pid: int, thread: int) -> float:
    """The CPU time of one thread so far."""
    return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
