"""An agent without a head: it samples this machine for whoever scrapes it, and keeps nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

from gpulse._version import __version__
from gpulse.cluster.agent.changes import Changes
from gpulse.cluster.agent.taker import Seen, Taker
from gpulse.sources.base import Source

_LAST_FRAME_SECONDS = 0.4


async def run_alone(
    source: Source,
    *,
    interval_seconds: float,
    seen: Seen,
    stop: asyncio.Event,
    diagnosis: bool = True,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Sample until told to stop, or until a recording ends.

    Args:
        source: Where frames come from; closed in the end.
        interval_seconds: Time from one frame to the next.
        seen: Gets each frame, in a thread.
        stop: Set to end it.
        diagnosis: Judge what is seen.
        ready: Called once it runs.

    Raises:
        GpulseError: Nothing can be sampled.
    """
    loop = asyncio.get_running_loop()

    def ended() -> None:
        with suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(stop.set)

    taker = Taker(
        source,
        interval_seconds,
        changes=Changes(version=__version__, pid=os.getpid()),
        taken=lambda _frame, _packed, _texts: None,
        ended=ended,
        diagnosis=diagnosis,
        seen=seen,
    )
    taker.start()
    try:
        ready()
        await stop.wait()
    finally:
        taker.stop()
        await asyncio.to_thread(taker.join, _LAST_FRAME_SECONDS)
    if taker.error is not None:
        raise taker.error
