"""The process of the simulated nodes, as whoever started it sees it."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gpulse.errors import GpulseError

_END_SECONDS = 1.5
_START_SECONDS = 10.0
"""As long as it may take until it says where its directory is: before that nobody else can remove it."""


class Troupe:
    """The process of the simulated nodes (`nodes.py`), which owns the demo's directory."""

    def __init__(self, nodes: int, gpus: int) -> None:
        self._wanted = {"nodes": nodes, "gpus": gpus}
        self._process: asyncio.subprocess.Process
        self._directory = ""

    async def start(self) -> None:
        """Start it.

        Raises:
            GpulseError: It cannot be started.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gpulse.cluster.demo.nodes"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for us
            )
        except OSError as error:
            raise GpulseError(f"the simulated nodes cannot be started: {error.strerror}") from error
        await self._tell(self._wanted)

    async def prepared(self, progress: Callable[[float], None]) -> str:
        """Wait until the past is written; the directory that everything is in.

        Raises:
            GpulseError: It cannot be written.
        """
        assert self._process.stdout is not None  # noqa: S101  it was asked for
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
        raise self._gone()

    async def play(self, head: str, token: str) -> None:
        """Let the nodes send to the head at this address, with its token."""
        await self._tell({"head": head, "token": token})

    async def ended(self) -> None:
        """Wait until it ends by itself.

        Raises:
            GpulseError: It did.
        """
        await self._process.wait()
        raise self._gone()

    async def end(self) -> None:
        """End it; it removes the directory."""
        process = self._process
        assert process.stdin is not None  # noqa: S101  it was asked for
        process.stdin.close()
        try:
            async with asyncio.timeout(_END_SECONDS if self._directory else _START_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._directory:  # it has removed it, unless it was killed
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _tell(self, document: dict[str, Any]) -> None:
        assert self._process.stdin is not None  # noqa: S101  it was asked for
        self._process.stdin.write(json.dumps(document).encode() + b"\n")
        with suppress(ConnectionError):  # it has ended; whoever waits for it says so
            await self._process.stdin.drain()

    def _gone(self) -> GpulseError:
        return GpulseError(
            "the process of the simulated nodes ended", hint="start the demo again; is there enough memory?"
        )
