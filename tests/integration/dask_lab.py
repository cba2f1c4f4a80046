"""A dask cluster for tests: a scheduler, a worker that only keeps results, and somebody who wants work done on GPUs.

It runs as a process (`python dask_lab.py STARTED GO`). It says what happens, and waits for a line of input before it looks whether
the results are still there.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from distributed import Client, Scheduler, Worker

ON_GPU = {"GPU": 1}


def chance(_: int) -> str:
    """A result that is another one whenever it is computed."""
    return os.urandom(16).hex()


def long_task(started: str, go: str) -> int:
    """Work that goes on until it may end; the process that did it."""
    Path(started).touch()
    while not Path(go).exists():
        time.sleep(0.02)
    return os.getpid()


async def main(started: str, go: str) -> None:
    """Have some work done, and one task half done; later look what became of them."""
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler,
        Worker(scheduler.address, host="127.0.0.1", nthreads=1, name="shelf"),
        Client(scheduler.address, asynchronous=True) as client,  # type: ignore[no-untyped-call]
    ):
        print(f"scheduler at {scheduler.address}", flush=True)
        done = client.map(chance, range(20), resources=ON_GPU, pure=False)
        before = await client.gather(done)
        half = client.submit(long_task, started, go, resources=ON_GPU, pure=False)
        names = {worker.name for worker in scheduler.workers.values()}
        print(f"results {json.dumps({'workers': len(names), 'on_shelf': _on_shelf(scheduler)})}", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        kept = {
            "workers": len(scheduler.workers),
            "on_shelf": _on_shelf(scheduler),
            "same": before == await client.gather(done),
            "held_against_it": scheduler.tasks[half.key].suspicious,
        }
        print(f"kept {json.dumps(kept)}", flush=True)
        print(f"finished by {await half}", flush=True)


def _on_shelf(scheduler: Scheduler) -> int:
    (shelf,) = (worker for worker in scheduler.workers.values() if worker.name == "shelf")
    return sum(str(task.key).startswith("chance") for task in shelf.has_what)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
