"""A head's HTTP side while it is open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gpulse.cluster.protocol.interface import HeadInterface
from gpulse.cluster.security import Access, TlsFiles
from gpulse.web.app import make_app
from gpulse.web.dashboard import Dashboard
from gpulse.web.server import serve


class HttpFrontend:
    """A server in a task of its own."""

    def __init__(self, address: str, task: asyncio.Task[None]) -> None:
        self.address = address
        """Where it listens."""
        self._task = task

    async def close(self) -> None:
        """Stop; open requests get a second to end."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def open_frontend(
    head: HeadInterface,
    access: Access,
    *,
    host: str,
    port: int,
    tls: TlsFiles | None,
    clock: Callable[[], float],
    theme_dir: str | None = None,
    dcgm_names: bool = False,
) -> HttpFrontend:
    """Serve a head, and return once connections are taken.

    Raises:
        GpulseError: The port cannot be listened on.
    """
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    app = make_app(head, access, clock=clock, dashboard=Dashboard(theme_dir), dcgm_names=dcgm_names)
    task = asyncio.create_task(serve(app, host=host, port=port, tls=tls, ready=ready.set_result))
    waiting: list[asyncio.Future[Any]] = [task, ready]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        task.result()  # raises why it could not
    shown = f"[{host}]" if ":" in host else host
    return HttpFrontend(f"{shown}:{ready.result()}", task)
