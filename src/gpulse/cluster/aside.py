"""Work that waits, done beside a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


async def aside(step: Callable[[], Result], *, name: str) -> Result:
    """Do something that waits, in a thread that nobody waits for at the end of the program.

    Args:
        step: What is to be done.
        name: Of the thread.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Result] = loop.create_future()

    def told(set_outcome: Callable[[], None]) -> None:
        if not outcome.done():
            set_outcome()

    def run() -> None:
        try:
            result = step()
        except Exception as error:  # noqa: BLE001  raised again where it is waited for
            failure = error
            tell = lambda: outcome.set_exception(failure)  # noqa: E731
        else:
            tell = lambda: outcome.set_result(result)  # noqa: E731
        with suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(told, tell)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await outcome
