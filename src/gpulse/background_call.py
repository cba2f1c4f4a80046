"""Run calls that may hang on daemon threads, which neither the caller nor the end of the program waits for.

Use `gpulse.sources.timeout_pool` for calls that are repeated for many devices.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def start_background_call(call: Callable[[], Result], *, name: str) -> Future[Result]:
    """Start a call on its own thread; wait for the future with a timeout, and drop it when that has passed.

    Args:
        call: The call.
        name: Name of its thread.
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # a running call cannot be cancelled

    def run() -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001  raised again in the waiting thread
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def await_background_call(call: Callable[[], Result], *, name: str) -> Result:
    """Await a call on its own thread, without blocking the event loop; add `asyncio.timeout` for a deadline.

    Args:
        call: The call.
        name: Name of its thread.
    """
    return await asyncio.wrap_future(start_background_call(call, name=name))
