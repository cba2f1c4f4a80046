"""`gpulse demo`: run a simulated cluster on this machine, to try the web page."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

import click

from gpulse.cli import common, daemon
from gpulse.errors import EXIT_INTERRUPTED, MissingExtraError

_Result = TypeVar("_Result")


@click.command()
@click.option(
    "--nodes", type=click.IntRange(1, 200), default=8, show_default=True, metavar="N", help="Number of nodes."
)
@click.option(
    "--gpus", type=click.IntRange(0, 16), default=8, show_default=True, metavar="N", help="GPUs per node."
)
@click.option(
    "--port",
    "--http-port",
    "port",
    type=click.IntRange(0, 65535),
    default=8091,
    show_default=True,
    metavar="PORT",
    help="Port of the web page; if it is in use, the next free port is used; 0 picks any free port.",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@click.option("-v", "--verbose", is_flag=True, help="Print the head's log.")
def command(*, nodes: int, gpus: int, port: int, opens: bool, verbose: bool) -> int:
    """Run a cluster on this machine: a head, its web page, and simulated nodes.

    The demo needs no GPU, no configuration and no token. It listens on this machine only, keeps everything in a temporary
    directory, and leaves nothing behind after Ctrl-C. The nodes replay
    recordings of real runs on an H200; names, jobs and
    the history are made up.

    \b
    gpulse demo                      run until Ctrl-C
    gpulse demo --open               also open the page in a browser
    gpulse demo --nodes 125          simulate a thousand GPUs
    gpulse demo --port 9000          serve the page on another port
    """  # noqa: D301  click needs the backspace itself
    if any(importlib.util.find_spec(name) is None for name in ("duckdb", "starlette", "uvicorn")):
        raise MissingExtraError("gpulse demo", "head")
    signals = daemon.StopSignals()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if verbose:
        daemon.start_logging()
    else:
        logging.disable(logging.CRITICAL)  # the page shows what happens to the nodes
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
        self._progress = _StartProgress()

    async def run(self, signals: daemon.StopSignals) -> None:
        """Run the demo until Ctrl-C.

        Raises:
            GpulseError: Something cannot be started, or the nodes ended by themselves.
        """
        from gpulse.cluster.demo.simulated_nodes import SimulatedNodes  # noqa: PLC0415  loads gRPC, which --help does not need

        signals.bind(self._on_signal)
        simulated_nodes = SimulatedNodes(self._nodes, self._gpus)
        await simulated_nodes.start()
        try:
            from gpulse.cli.demo_head import DemoHead  # noqa: PLC0415  loaded while the nodes prepare themselves

            directory = await self._unless_stopped(simulated_nodes.prepared(self._progress.show))
            if directory is not None:
                head = DemoHead(self._nodes, self._gpus, self._port, opens=self._opens, stop=self._stop)
                await head.run(directory, simulated_nodes, introducing=self._progress.clear)
        finally:
            self._progress.clear()
            await simulated_nodes.end()

    def _on_signal(self) -> None:
        """Stop gracefully on the first signal; exit at once on the second, after which the nodes' process cleans up."""
        if self._stop.is_set():
            os._exit(EXIT_INTERRUPTED)
        self._stop.set()

    async def _unless_stopped(self, work: Awaitable[_Result]) -> _Result | None:
        """Return the result of some work, None when the demo is stopped first."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for each in (task, stopped):
                each.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)


class _StartProgress:
    """Progress of the start: a line that is redrawn on a terminal, a single line elsewhere."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        if not self._is_shown:
            common.print_note("gpulse demo: generating the history of a cluster")
        self.show(0.0)

    def show(self, done: float) -> None:
        """Show which part of the history, from 0 to 1, is written; the nodes start when all of it is."""
        what = "generating the history of a cluster" if done < 1 else "starting the nodes"
        self._draw(f"[{'#' * round(20 * done):<20}] {what}")

    def clear(self) -> None:
        """Erase the line."""
        self._draw("")
        self._is_shown = False

    def _draw(self, text: str) -> None:
        if self._is_shown:
            with suppress(OSError):  # a terminal that is gone is no reason to stop
                sys.stderr.write(f"\r\x1b[K{text}")
                sys.stderr.flush()
