"""The simulated nodes of the demo, all in one process: `python -m gpulse.cluster.demo.simulated_nodes`.

Every node is a separate agent with its own stream; sampling a simulation is so cheap that one interpreter is enough.
The process is separate from the head's, so that neither waits for the other's interpreter lock, and so that it can
clean up when the head's process is killed: this process owns the temporary directory of the demo, and removes it and
exits as soon as its standard input is closed.

It reads one JSON object per line from standard input: first the size of the cluster, later the address of the head.
It writes one JSON object per line: its directory, the progress of writing the history, and that it is ready.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpulse.cluster.agent.agent import AgentConfig, run_agent
from gpulse.cluster.agent.connection import ConnectionConfig
from gpulse.cluster.agent.sampling_thread import RetimedSource
from gpulse.cluster.demo.demo_history import machine_id, make_machine, write_history
from gpulse.cluster.demo.scenario import DemoCluster, DemoNode, build_cluster
from gpulse.errors import DiskError, GpulseError

DIRECTORY_PREFIX = "gpulse-demo-"
_REMOVE_SECONDS = 3.0
_SPREAD_SECONDS = 0.5
"""The nodes start over this time, so that they do not all sample at the same moment."""
_MEMORY_FRAMES = 600
_SPOOL_BYTES = 16 << 20
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_NO_SPACE_HINT = "free about 100 MB there, or use another directory: TMPDIR=/somewhere gpulse demo"


def remove_directory(directory: str, seconds: float = _REMOVE_SECONDS) -> None:
    """Remove a directory; retry for a while in case something still writes to it."""
    deadline = time.monotonic() + seconds
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.exists(directory) or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _read_requests(directory: str) -> queue.SimpleQueue[dict[str, Any]]:
    """Read requests from standard input in a thread, which cleans up and exits the process at the end of the input."""
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(json.loads(line))
        remove_directory(directory)
        os._exit(0)

    threading.Thread(target=read, name="gpulse-demo-input", daemon=True).start()
    return requests


def _write_message(**document: Any) -> None:
    with suppress(OSError):  # the parent is gone: the end of the input will end this process
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()


def _write_machine_id(node: DemoNode, state: Path) -> Path:
    """Write the file with a node's machine ID, which must match its history; return its path."""
    state.mkdir(parents=True)
    path = state / "machine"
    path.write_text(machine_id(node), encoding="ascii")
    return path


async def _run_node(
    node: DemoNode, plan: DemoCluster, started: float, link: ConnectionConfig, state: Path
) -> None:
    """Run the agent of one node until it is planned to leave."""
    await asyncio.sleep(_SPREAD_SECONDS * (node.number - 1) / len(plan.nodes))
    config = AgentConfig(
        link=link,
        state=state,
        node_name=node.name,
        machine_file=_write_machine_id(node, state),
        labels=node.labels,
        spool_limit_bytes=_SPOOL_BYTES,
        memory_frames=_MEMORY_FRAMES,
    )
    stop = asyncio.Event()
    if node.leaves is not None:
        asyncio.get_running_loop().call_later(node.leaves, stop.set)
    await run_agent(config, RetimedSource(make_machine(node, started)), stop=stop)


async def _run_nodes(plan: DemoCluster, started: float, link: ConnectionConfig, directory: str) -> None:
    await asyncio.gather(
        *(_run_node(node, plan, started, link, Path(directory, "agents", node.name)) for node in plan.nodes)
    )
    await asyncio.Event().wait()  # even if all agents have ended, the process waits for the end of its input


def _run_demo(directory: str, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    wanted = requests.get()
    plan = build_cluster(wanted["nodes"], wanted["gpus"])
    started = time.time()
    gc.disable()  # nothing becomes garbage before the history is written
    write_history(
        f"{directory}/data",
        plan,
        started,
        clock=time.time,
        progress=lambda done: _write_message(done=round(done, 3)),
    )
    gc.enable()
    gc.collect()
    gc.freeze()  # the recordings stay in memory
    _write_message(ready=True)
    request = requests.get()
    asyncio.run(_run_nodes(plan, started, ConnectionConfig(request["head"], request["token"]), directory))


def main() -> int:
    """Run the simulated nodes until standard input ends."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the head's process, which then closes the input
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        directory = tempfile.mkdtemp(prefix=DIRECTORY_PREFIX)
    except OSError as error:
        _write_message(
            error=f"cannot create a temporary directory: {error.strerror}",
            hint="set TMPDIR to a writable directory",
        )
        return 1
    requests = _read_requests(directory)
    _write_message(directory=directory)
    try:
        _run_demo(directory, requests)
    except DiskError as error:
        _write_message(error=error.message, hint=_NO_SPACE_HINT)
    except GpulseError as error:
        _write_message(error=error.message, hint=error.hint)
    except OSError as error:
        _write_message(error=str(error), hint=_NO_SPACE_HINT if error.errno in _DISK_ERRORS else None)
    finally:
        remove_directory(directory)
    return 1


if __name__ == "__main__":
    sys.exit(main())


_END_SECONDS = 1.5
_START_SECONDS = 30.0
"""Time allowed until the process reports its directory: before that only the process itself can remove it."""


class SimulatedNodes:
    """The child process with the simulated nodes, which owns the demo's directory."""

    def __init__(self, nodes: int, gpus: int) -> None:
        self._wanted = {"nodes": nodes, "gpus": gpus}
        self._process: asyncio.subprocess.Process
        self._directory = ""

    async def start(self) -> None:
        """Start the process.

        Raises:
            GpulseError: The process cannot be started.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gpulse.cluster.demo.simulated_nodes"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is handled by this process
            )
        except OSError as error:
            raise GpulseError(f"cannot start the simulated nodes: {error.strerror}") from error
        await self._send(self._wanted)

    async def prepared(self, progress: Callable[[float], None]) -> str:
        """Wait until the history is written; return the demo's directory.

        Raises:
            GpulseError: The history cannot be written.
        """
        assert self._process.stdout is not None  # noqa: S101  a pipe was requested
        while line := await self._process.stdout.readline():
            match json.loads(line):
                case {"done": float() | int() as done}:
                    progress(done)
                case {"directory": str(directory)}:
                    self._directory = directory
                case {"ready": True}:
                    progress(1.0)
                    return self._directory
                case {"error": str(error), "hint": hint}:
                    raise GpulseError(error, hint=hint)
        raise self._ended_error()

    async def play(self, head: str, token: str) -> None:
        """Make the nodes connect to the head at an address, with its token."""
        await self._send({"head": head, "token": token})

    async def ended(self) -> None:
        """Wait until the process ends by itself.

        Raises:
            GpulseError: The process ended.
        """
        await self._process.wait()
        raise self._ended_error()

    async def end(self) -> None:
        """End the process, which removes the directory."""
        process = self._process
        assert process.stdin is not None  # noqa: S101  a pipe was requested
        process.stdin.close()
        try:
            async with asyncio.timeout(_END_SECONDS if self._directory else _START_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._directory:  # in case the process was killed before it removed the directory
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _send(self, document: dict[str, Any]) -> None:
        assert self._process.stdin is not None  # noqa: S101  a pipe was requested
        self._process.stdin.write(json.dumps(document).encode() + b"\n")
        with suppress(ConnectionError):  # the process has ended; `ended` reports it
            await self._process.stdin.drain()

    def _ended_error(self) -> GpulseError:
        return GpulseError(
            "the process that simulates the nodes ended unexpectedly",
            hint="check that there is enough memory, and start the demo again",
        )
