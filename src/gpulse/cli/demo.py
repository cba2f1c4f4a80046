"""`gpulse demo`: a whole cluster on this machine, for a look at the web page."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import logging
import os
import secrets
import sys
import webbrowser
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import click

from gpulse.cli import service, shell
from gpulse.errors import INTERRUPTED, GpulseError, MissingExtraError

if TYPE_CHECKING:
    from gpulse.cli.service import EndSignals
    from gpulse.cluster.demo.plan import ClusterPlan
    from gpulse.cluster.demo.troupe import Troupe
    from gpulse.cluster.head.head import Frontend, Listening, MakeFrontend
    from gpulse.cluster.protocol.interface import HeadInterface
    from gpulse.cluster.security import Access

_Result = TypeVar("_Result")

_HOST = "127.0.0.1"
_INTERVAL_MS = 1000
_MOST_PORTS = 50
"""So many ports are tried, one after the other."""
_FIRST_FRAMES_SECONDS = 10.0
_SESSION_SECONDS = 900.0


@click.command()
@click.option("--nodes", type=click.IntRange(1, 200), default=8, show_default=True, help="How many nodes.")
@click.option(
    "--gpus", type=click.IntRange(0, 16), default=8, show_default=True, help="How many GPUs each has."
)
@click.option(
    "--port",
    "--http-port",
    "port",
    type=click.IntRange(0, 65535),
    default=8091,
    show_default=True,
    help="Where the page is; the next free port when that one is taken, any for 0.",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@click.option("-v", "--verbose", is_flag=True, help="Say what the head does.")
def command(*, nodes: int, gpus: int, port: int, opens: bool, verbose: bool) -> int:
    """Show a whole cluster at work on this machine: a head, its web page, and simulated nodes.

    Needs no GPU, no configuration and no token, listens on this machine alone, keeps everything in a
    temporary directory, and leaves nothing behind after Ctrl-C. What the nodes show are recordings of real
    runs on an H200; names, jobs and the past hours are made up.

    \b
    gpulse demo
    gpulse demo --open               and open the page in a browser
    gpulse demo --nodes 125          a thousand GPUs
    gpulse demo --port 9000
    """  # noqa: D301  click needs the backspace itself
    if any(importlib.util.find_spec(name) is None for name in ("duckdb", "starlette", "uvicorn")):
        raise MissingExtraError("gpulse demo", "head")
    signals = service.EndSignals()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if verbose:
        service.start_logging()
    else:
        logging.disable(logging.CRITICAL)  # what happens to the nodes is on the page
    asyncio.run(_Demo(nodes, gpus, port, opens=opens).run(signals))
    return 0


class _Demo:
    """One demo, from its start to its end."""

    def __init__(self, nodes: int, gpus: int, port: int, *, opens: bool) -> None:
        self._nodes = nodes
        self._gpus = gpus
        self._port = port
        self._opens = opens
        self._stop = asyncio.Event()
        self._progress = _Progress()

    async def run(self, signals: EndSignals) -> None:
        """Work until Ctrl-C.

        Raises:
            GpulseError: Something cannot be started, or the nodes ended by themselves.
        """
        from gpulse.cluster.demo.troupe import Troupe  # noqa: PLC0415  --help needs none of it

        signals.bind(self._heard)
        troupe = Troupe(self._nodes, self._gpus)
        await troupe.start()
        try:
            _load()
            directory = await self._unless_stopped(troupe.prepared(self._progress.show))
            if directory is not None:
                await self._serve(directory, troupe)
        finally:
            self._progress.clear()
            await troupe.end()

    def _heard(self) -> None:
        """The first signal ends everything gently; after a second one the nodes' process cleans up alone."""
        if self._stop.is_set():
            os._exit(INTERRUPTED)
        self._stop.set()

    async def _unless_stopped(self, work: Awaitable[_Result]) -> _Result | None:
        """What some work comes to, None when the demo is told to end before."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for each in (task, stopped):
                each.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    async def _serve(self, directory: str, troupe: Troupe) -> None:
        """Be the head of the nodes until told to end."""
        from gpulse.cluster.demo.plan import cluster_plan  # noqa: PLC0415  --help needs none of it
        from gpulse.cluster.head.head import Head, HeadConfig  # noqa: PLC0415
        from gpulse.cluster.security import Access  # noqa: PLC0415

        plan = cluster_plan(self._nodes, self._gpus)
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
        access = Access(token, names={_HOST})
        head = Head(config, access)
        behind: list[HeadInterface] = []
        failed: list[Exception] = []
        tasks: list[asyncio.Task[None]] = []

        async def until_over(work: Awaitable[object]) -> None:
            """Whatever ends, or goes wrong, ends the head."""
            try:
                await work
            except Exception as error:  # noqa: BLE001  raised again when the head has ended
                failed.append(error)
            head.stop()

        async def introduce(listening: Listening) -> None:
            await troupe.play(listening.grpc, token)
            await _first_frames(behind[0], self._nodes)
            await _begin_session(behind[0], plan)
            address = self._say(listening, plan)
            if self._opens:
                await asyncio.to_thread(webbrowser.open, address)
            await troupe.ended()

        def up(listening: Listening) -> None:
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

    def _say(self, listening: Listening, plan: ClusterPlan) -> str:
        """Tell what there is to see; the page's address."""
        self._progress.clear()
        port = int(str(listening.http).rpartition(":")[2])
        if self._port not in (0, port):
            shell.remark(f"port {self._port} is taken: the page is on port {port}")
        address = f"http://{listening.http}/"
        shell.write(_introduction(plan, self._gpus, address, listening.grpc))
        return address


def _load() -> None:
    """Load what a head needs while the nodes prepare themselves."""
    import gpulse.cluster.head.head  # noqa: PLC0415  --help needs none of it
    import gpulse.web.frontend  # noqa: F401, PLC0415


class _Progress:
    """How far the start is: one line that is drawn anew on a terminal, one in all elsewhere."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        if not self._is_shown:
            shell.remark("gpulse demo: writing the past of a cluster")
        self.show(0.0)

    def show(self, done: float) -> None:
        """So much of the past is written; the nodes start when all of it is."""
        what = "writing the past of a cluster" if done < 1 else "starting its nodes"
        self._draw(f"[{'#' * round(20 * done):<20}] {what}")

    def clear(self) -> None:
        """Wipe the line away."""
        self._draw("")
        self._is_shown = False

    def _draw(self, text: str) -> None:
        if self._is_shown:
            with suppress(OSError):  # a terminal that is gone is no reason to stop
                sys.stderr.write(f"\r\x1b[K{text}")
                sys.stderr.flush()


def _frontend(access: Access, port: int, behind: Callable[[HeadInterface], None]) -> MakeFrontend:
    """Makes the HTTP side on the first free port from this one on, and says which head is behind it."""
    from gpulse.web.frontend import open_frontend  # noqa: PLC0415  --help needs none of it

    async def make(head: HeadInterface, clock: Callable[[], float]) -> Frontend:
        behind(head)
        last = min(port + _MOST_PORTS, 65535) if port else 0
        for place in range(port, last + 1):
            try:
                return await open_frontend(head, access, host=_HOST, port=place, tls=None, clock=clock)
            except GpulseError as error:
                cause = error.__cause__
                is_taken = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
                if not is_taken or not port:
                    raise
        raise GpulseError(
            f"all ports from {port} to {last} are in use", hint="--port 0 takes any that is free"
        )

    return make


async def _first_frames(head: HeadInterface, nodes: int) -> None:
    """Wait until every node has sent something, for as long as that is reasonable."""
    version = -1
    with suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_FRAMES_SECONDS):
            while sum(node.frame is not None for node in head.live()) < nodes:
                version = await head.wait(version, 1.0)


async def _begin_session(head: HeadInterface, plan: ClusterPlan) -> None:
    """Begin the example of a session that goes on."""
    from gpulse.cluster.demo.plan import RUNNING_SESSION  # noqa: PLC0415  --help needs none of it
    from gpulse.cluster.protocol.requests import StartSession  # noqa: PLC0415
    from gpulse.cluster.protocol.values import Duration  # noqa: PLC0415

    request = StartSession(
        name=RUNNING_SESSION,
        since=Duration(_SESSION_SECONDS),
        nodes=tuple(plan.example_nodes),
        labels={"demo": "yes"},
    )
    await head.start_session(request)


def _counted(number: int, what: str) -> str:
    return f"{number} {what if number == 1 else f'{what}s'}"


def _introduction(plan: ClusterPlan, gpus: int, address: str, grpc: str) -> str:
    """What there is to see."""
    from gpulse.cluster.demo.past import past_seconds  # noqa: PLC0415  --help needs none of it

    names = [node.name for node in plan.nodes]
    looks = []
    if gpus > 1:
        looks.append((names[0], "every GPU has a different problem; Findings names it and what to do"))
    if len(names) > 3:
        looks.append((f"{names[1]}, {names[2]}", "one training over all GPUs of two nodes: slurm:4711"))
    if len(names) > 5:
        looks.append((f"{names[4]}, {names[5]}", "services in containers; GPUs that two people share"))
    if len(names) > 1:
        looks.append((names[-1], "goes silent now and is shown as lost in 30 s"))
    looks += [
        (plan.missing[0], "is expected and has never reported"),
        ("Sessions", "one that runs, one that is finished: open it, download its file"),
        ("Who", "GPU time by user and job, and how much of it was idle"),
    ]
    past = past_seconds(len(names))
    words = f"{past / 3600:.0f} hours" if past > 5400 else f"{past / 60:.0f} minutes"
    many = f"{_counted(len(names), 'node')} with {_counted(len(names) * gpus, 'GPU')}"
    width = max(len(what) for what, _ in looks)
    lines = [
        f"{many}, made of recordings of real runs, and {words} of their past:",
        "",
        f"    {address}",
        "",
        *(f"  {what:<{width}}  {why}" for what, why in looks),
        "",
        f"From another terminal: gpulse status --head {grpc}",
        "Ctrl-C ends it and leaves nothing behind.",
    ]
    return "\n".join(lines)
