"""Retire a `dask worker` gracefully on SIGUSR1: `dask worker … --no-nanny --preload retire.py`.

The scheduler copies the results that only this worker holds to other workers and reassigns its tasks; then the process
ends without waiting for the running task. `Worker.close_gracefully` does the same but waits for that task, while a user
is waiting for this GPU.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Worker

_log = logging.getLogger("distributed.worker.retire")


def dask_setup(worker: Worker) -> None:
    """Install the signal handler; Dask calls this when the worker has started."""
    left: list[asyncio.Task[None]] = []

    def leave_once() -> None:
        if not left:
            left.append(loop.create_task(_leave(worker)))

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, leave_once)


async def _leave(worker: Worker) -> None:
    try:
        if not await worker.scheduler.retire_workers(workers=[worker.address], close_workers=False):
            _log.warning("no other worker could take the results: they will be computed again")
    except OSError as error:
        _log.warning("the scheduler does not answer (%s): the results will be computed again", error)
    await worker.close(executor_wait=False, reason="its GPU is needed")
