"""The head of `gpulse demo`: serve the simulated nodes, and print what there is to see."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import webbrowser
from collections.abc import Awaitable, Callable
from contextlib import suppress

from gpulse.cli import common
from gpulse.cluster.access_control import AccessPolicy
from gpulse.cluster.demo.demo_history import history_seconds
from gpulse.cluster.demo.scenario import RUNNING_SESSION, DemoCluster, build_cluster
from gpulse.cluster.demo.simulated_nodes import SimulatedNodes
from gpulse.cluster.head.head import Frontend, FrontendFactory, Head, HeadConfig, ListenAddresses
from gpulse.cluster.protocol.head_interface import HeadInterface
from gpulse.cluster.protocol.requests import Duration, StartSession
from gpulse.errors import GpulseError
from gpulse.web.server import open_frontend

_HOST = "127.0.0.1"
_INTERVAL_MS = 1000
_MAX_PORTS = 50
"""Number of ports that are tried, one after the other."""
_FIRST_FRAMES_SECONDS = 10.0
_SESSION_SECONDS = 900.0


class DemoHead:
    """The head of one demo."""

    def __init__(self, nodes: int, gpus: int, port: int, *, opens: bool, stop: asyncio.Event) -> None:
        """Prepare to run.

        Args:
            nodes: Number of nodes.
            gpus: GPUs per node.
            port: Port of the web page; if it is in use, the next free port is used; 0 picks any free port.
            opens: Open the page in a browser.
            stop: Set to stop the demo.
        """
        self._nodes = nodes
        self._gpus = gpus
        self._port = port
        self._opens = opens
        self._stop = stop

    async def run(
        self, directory: str, simulated_nodes: SimulatedNodes, *, introducing: Callable[[], None]
    ) -> None:
        """Run the head until it is stopped.

        Args:
            directory: Directory with the history, and for everything else.
            simulated_nodes: The nodes.
            introducing: Called before the introduction is printed on standard output.

        Raises:
            GpulseError: It cannot listen, or the nodes ended by themselves.
        """
        plan = build_cluster(self._nodes, self._gpus)
        token = secrets.token_urlsafe(32)
        os.makedirs(f"{directory}/sessions", exist_ok=True)
        config = HeadConfig(
            data_dir=f"{directory}/data",
            output_dir=f"{directory}/sessions",
            host=_HOST,
            port=0,
            interval_ms=_INTERVAL_MS,
            expected=lambda: plan.expected,
        )
        access = AccessPolicy(token, names={_HOST})
        head = Head(config, access)
        behind: list[HeadInterface] = []
        failed: list[Exception] = []
        tasks: list[asyncio.Task[None]] = []

        async def until_over(work: Awaitable[object]) -> None:
            """Stop the head when some work ends or fails."""
            try:
                await work
            except Exception as error:  # noqa: BLE001  raised again when the head has ended
                failed.append(error)
            head.stop()

        async def introduce(listening: ListenAddresses) -> None:
            await simulated_nodes.play(listening.grpc, token)
            await _wait_for_first_frames(behind[0], self._nodes)
            await _start_session(behind[0], plan)
            introducing()
            address = self._print_introduction(listening, plan)
            if self._opens:
                await asyncio.to_thread(webbrowser.open, address)
            await simulated_nodes.ended()

        def up(listening: ListenAddresses) -> None:
            tasks.append(asyncio.create_task(until_over(introduce(listening))))

        tasks.append(asyncio.create_task(until_over(self._stop.wait())))
        try:
            await head.run(frontend=_frontend(access, self._port, behind.append), ready=up)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if failed:
            raise failed[0]

    def _print_introduction(self, listening: ListenAddresses, plan: DemoCluster) -> str:
        """Print what there is to see; return the page's address."""
        port = int(str(listening.http).rpartition(":")[2])
        if self._port not in (0, port):
            common.print_note(f"port {self._port} is in use; the page is on port {port}")
        address = f"http://{listening.http}/"
        common.write(_introduction(plan, self._gpus, address, listening.grpc))
        return address


def _frontend(access: AccessPolicy, port: int, behind: Callable[[HeadInterface], None]) -> FrontendFactory:
    """Return the function that opens the HTTP frontend on the first free port from this one on.

    Args:
        access: Who may use it.
        port: The first port to try; 0 picks any.
        behind: Called with the head that it serves.
    """

    async def make(head: HeadInterface, clock: Callable[[], float]) -> Frontend:
        behind(head)
        last = min(port + _MAX_PORTS, 65535) if port else 0
        for place in range(port, last + 1):
            try:
                return await open_frontend(head, access, host=_HOST, port=place, tls=None, clock=clock)
            except GpulseError as error:
                cause = error.__cause__
                is_taken = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
                if not is_taken or not port:
                    raise
        raise GpulseError(
            f"all ports from {port} to {last} are in use", hint="use --port 0 to pick a free port"
        )

    return make


async def _wait_for_first_frames(head: HeadInterface, nodes: int) -> None:
    """Wait until every node has sent a frame, for ten seconds at most."""
    version = -1
    with suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_FRAMES_SECONDS):
            while sum(node.frame is not None for node in head.live()) < nodes:
                version = await head.wait(version, 1.0)


async def _start_session(head: HeadInterface, plan: DemoCluster) -> None:
    """Start the example of an active session."""
    request = StartSession(
        name=RUNNING_SESSION,
        since=Duration(_SESSION_SECONDS),
        nodes=tuple(plan.example_nodes),
        labels={"demo": "yes"},
    )
    await head.start_session(request)


def _count_text(number: int, what: str) -> str:
    return f"{number} {what if number == 1 else f'{what}s'}"


def _introduction(plan: DemoCluster, gpus: int, address: str, grpc: str) -> str:
    """Return the text that says what there is to see."""
    names = [node.name for node in plan.nodes]
    looks = []
    if gpus > 1:
        looks.append((names[0], "every GPU has a different problem; see Findings for what to do"))
    if len(names) > 3:
        looks.append((f"{names[1]}, {names[2]}", "one training job on all GPUs of two nodes: slurm:4711"))
    if len(names) > 5:
        looks.append((f"{names[4]}, {names[5]}", "services in containers; GPUs shared by two users"))
    if len(names) > 1:
        looks.append((names[-1], "stops reporting now and is shown as lost after 30 s"))
    looks += [
        (plan.missing[0], "is expected but has never reported"),
        ("Sessions", "one active and one finished; open one or download its file"),
        ("Who", "GPU time by user and job, and how much of it was idle"),
    ]
    past = history_seconds(len(names))
    words = f"{past / 3600:.0f} hours" if past > 5400 else f"{past / 60:.0f} minutes"
    many = f"{_count_text(len(names), 'node')} with {_count_text(len(names) * gpus, 'GPU')}"
    width = max(len(what) for what, _ in looks)
    lines = [
        f"{many}, built from recordings of real runs, with {words} of history:",
        "",
        f"    {address}",
        "",
        *(f"  {what:<{width}}  {why}" for what, why in looks),
        "",
        f"In another terminal: gpulse status --head {grpc}",
        "Ctrl-C stops the demo and leaves nothing behind.",
    ]
    return "\n".join(lines)
