"""So many open dashboards, as their head sees them: each takes the live stream that the front page asks for."""

from __future__ import annotations

import argparse
import asyncio
import json

from websockets.asyncio.client import connect

WISH = {
    "details": True,
    "interval": 1,
    "metrics": [
        "gpu_utilization_ratio",
        "memory_used_bytes",
        "memory_total_bytes",
        "power_watts",
        "power_limit_watts",
        "temperature_celsius",
        "sm_active_ratio",
        "tensor_active_ratio",
    ],
    "host_metrics": [
        "cpu_utilization_ratio",
        "cpus",
        "load1",
        "memory_total_bytes",
        "memory_available_bytes",
        "swap_total_bytes",
        "swap_free_bytes",
    ],
}
"""What `web/static/core/live.js` asks for when a page wants nothing special."""


async def watch(url: str, started: asyncio.Event, pages: int, opened: list[int]) -> None:
    """Take everything that comes."""
    async with connect(url, max_size=None, compression=None) as stream:
        await stream.send(json.dumps(WISH))
        await stream.recv()
        opened.append(1)
        if len(opened) == pages:
            started.set()
        async for _ in stream:
            pass


async def run(url: str, pages: int) -> None:
    """Open all streams, say so, and take what comes until the end."""
    started, opened = asyncio.Event(), list[int]()
    tasks = [asyncio.create_task(watch(url, started, pages, opened)) for _ in range(pages)]
    await started.wait()
    print(json.dumps({"open": pages}), flush=True)
    await asyncio.gather(*tasks)


def main() -> None:
    """`python -m benchmarks.children.watchers URL PAGES`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("pages", type=int)
    given = parser.parse_args()
    asyncio.run(run(given.url, given.pages))


if __name__ == "__main__":
    main()
