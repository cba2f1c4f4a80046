"""Many clients that ask a head for everything again and again, each as soon as it has its answer."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
from collections import Counter
from urllib.parse import urlsplit

ROUTES = (
    "/metrics/latest",
    "/metrics",
    "/status",
    "/clients",
    "/api/v1/gpus",
    "/api/v1/findings",
    "/api/v1/fleet/totals",
    "/api/v1/fleet/trends",
)
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_RETRY = re.compile(rb"retry-after: (\d+)", re.IGNORECASE)


class Poller:
    """One connection."""

    def __init__(self, url: str, route: str, *, heeds: bool) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._request = (
            f"GET {route} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept-Encoding: gzip\r\n\r\n".encode()
        )
        self._heeds = heeds
        self.answers = Counter[str]()

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
                try:
                    while True:
                        await self._ask(reader, writer)
                finally:
                    writer.close()
            except (OSError, EOFError):
                self.answers["no connection"] += 1
                await asyncio.sleep(0.5)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        left = int(length[1]) if length else 0
        while left:
            piece = await reader.read(min(left, 1 << 20))
            if not piece:
                raise EOFError
            left -= len(piece)
        self.answers[head[9:12].decode()] += 1
        retry = _RETRY.search(head)
        if retry and self._heeds:
            await asyncio.sleep(int(retry[1]))


async def run(url: str, clients: int, *, heeds: bool) -> None:
    """Poll until the process is asked to end, then print how many answers came, by status."""
    pollers = [Poller(url, ROUTES[number % len(ROUTES)], heeds=heeds) for number in range(clients)]
    tasks = [asyncio.create_task(poller.run()) for poller in pollers]
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    print(json.dumps({"clients": clients}), flush=True)
    await ending.wait()
    for task in tasks:
        task.cancel()
    print(json.dumps(dict(sum((poller.answers for poller in pollers), Counter()))), flush=True)


def main() -> None:
    """`python -m benchmarks.children.pollers URL CLIENTS`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("clients", type=int)
    parser.add_argument("--heed", action="store_true", help="wait as long as Retry-After says")
    given = parser.parse_args()
    asyncio.run(run(given.url, given.clients, heeds=given.heed))


if __name__ == "__main__":
    main()
