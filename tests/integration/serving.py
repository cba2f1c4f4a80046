"""An application served on a free port, in the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from gpulse.web.server import serve

if TYPE_CHECKING:
    from starlette.types import ASGIApp


@asynccontextmanager
async def served(app: ASGIApp, host: str = "127.0.0.1", **options: Any) -> AsyncIterator[int]:
    """Serve it; gives the port."""
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(app, host=host, port=0, ready=port.set_result, **options))
    try:
        await asyncio.wait((port, task), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        yield port.result()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
