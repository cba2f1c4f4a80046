"""Ends processes that have no keeper: each is asked once, and killed when the time is over."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection
from time import monotonic

from gpulse.harvest.running.told import Process
from gpulse.harvest.running.tree import Tree

_SHORTEST_PAUSE = 0.002
_LONGEST_PAUSE = 0.1


async def end(
    find: Callable[[], Collection[Process]],
    *,
    tree: Tree,
    stop_signal: int,
    deadline: Callable[[], float],
    limit: float | None = None,
) -> Collection[Process]:
    """End what is found until nothing is; gives what is left when the limit (monotonic) is reached."""
    asked: set[Process] = set()
    pause = _SHORTEST_PAUSE
    before: set[Process] = set()
    while found := find():
        now = monotonic()
        if limit is not None and now >= limit:
            break
        if now >= deadline():
            for process in found:
                tree.send(process, signal.SIGKILL)
        else:
            for process in set(found) - asked:
                tree.send(process, stop_signal)
            asked.update(found)
        pause = _SHORTEST_PAUSE if before - set(found) else min(2 * pause, _LONGEST_PAUSE)
        before = set(found)
        await asyncio.sleep(min(pause, max(_SHORTEST_PAUSE, deadline() - now)))
    return found
