"""Every page of the dashboard, held open on a live cluster: `python -m tests.soak.pages --minutes 10`.

Nobody touches anything. Each page must keep its one connection, say nothing on the console, keep on showing new values,
and need no more memory at the end than after the first minute.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import CDPSession, WebSocket

from tests.integration.browser import Tab, browsing, tab
from tests.integration.cluster import until

_WARM_UP_SECONDS = 60.0
_MAX_GROWTH, _MAX_GROWTH_BYTES = 1.15, 3e6
"""A heap may be this much larger at the end, by factor or in bytes: collections are never complete."""
_VIEW = {"width": 1440, "height": 900}


class PageResult(NamedTuple):
    """What one page did."""

    name: str
    connections: int
    messages: int
    complaints: tuple[str, ...]
    first_bytes: float
    last_bytes: float

    @property
    def violations(self) -> list[str]:
        """What must not have happened."""
        found = [f"{self.name}: {text}" for text in self.complaints]
        if self.connections != 1:
            found.append(f"{self.name}: opened {self.connections} connections")
        if not self.messages:
            found.append(f"{self.name}: received nothing")
        if self.last_bytes > max(_MAX_GROWTH * self.first_bytes, self.first_bytes + _MAX_GROWTH_BYTES):
            found.append(
                f"{self.name}: heap grew from {self.first_bytes / 1e6:.1f} to {self.last_bytes / 1e6:.1f} MB"
            )
        return found


class OpenPage:
    """One page in a window of its own."""

    def __init__(self, window: Tab, place: tuple[str, ...]) -> None:
        self.name = "/".join(place) or "overview"
        self.window = window
        self._connections = self._messages = 0
        self._first_bytes = 0.0
        window.page.on("websocket", self._opened)
        window.go(*place)
        window.settled()
        self._debugger: CDPSession = window.page.context.new_cdp_session(window.page)

    def _opened(self, socket: WebSocket) -> None:
        self._connections += 1
        socket.on("framereceived", lambda _: self._received())

    def _received(self) -> None:
        self._messages += 1

    def warmed_up(self) -> None:
        """From now on its heap must not grow, and messages are counted."""
        self._first_bytes = self._heap()
        self._messages = 0

    def result(self) -> PageResult:
        """Return what it did."""
        return PageResult(
            self.name,
            self._connections,
            self._messages,
            tuple(self.window.complaints),
            self._first_bytes,
            self._heap(),
        )

    def _heap(self) -> float:
        self._debugger.send("HeapProfiler.collectGarbage")
        used: float = self._debugger.send("Runtime.getHeapUsage")["usedSize"]
        return used


def hold_pages_open(port: int, seconds: float, warm_up_seconds: float = _WARM_UP_SECONDS) -> list[PageResult]:
    """Hold all pages of a head open at once, each in a window of its own."""
    with ExitStack() as stack:
        browser = stack.enter_context(browsing())
        pages = [
            OpenPage(stack.enter_context(tab(browser, port, viewport=_VIEW)), place)
            for place in _places(port)
        ]
        _wait(pages[0], warm_up_seconds)
        for page in pages:
            page.warmed_up()
        _wait(pages[0], seconds)
        return [page.result() for page in pages]


def _wait(page: OpenPage, seconds: float) -> None:
    """Let time pass; the browser's events are only handled while one of its windows waits."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        page.window.page.wait_for_timeout(500)


def _places(port: int) -> list[tuple[str, ...]]:
    """Return the addresses of all pages, with something on each."""
    node = _get(port, "/status")["nodes"][0]["name"]
    jobs = [row for row in _get(port, "/api/v1/usage?by=job")["rows"] if row["job"]]
    job = max(jobs, key=lambda row: row["gpu_seconds"])
    session = _get(port, "/api/v1/sessions")["sessions"][0]["name"]
    return [
        (),
        ("findings",),
        ("jobs",),
        ("job", job["job"]),
        ("gpu", node, "0"),
        ("node", node),
        ("sessions",),
        ("sessions", session),
        ("user", job["user"]),
        ("who",),
    ]


def _get(port: int, path: str) -> dict[str, list[dict[str, str]]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        found: dict[str, list[dict[str, str]]] = json.load(answer)
    return found


def main() -> int:
    """Hold the pages of a demo open and print what they did; 1 if something must not have happened."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.pages", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--port", type=int, help="of a head that runs already (default: a demo of its own)")
    options = parser.parse_args()
    with ExitStack() as stack:
        port = options.port or _start_demo(stack)
        results = hold_pages_open(port, 60.0 * options.minutes)
    for result in results:
        print(
            f"{result.name:30} {result.connections} connection, {result.messages:5} messages, "
            f"heap {result.first_bytes / 1e6:5.1f} -> {result.last_bytes / 1e6:5.1f} MB"
        )
    violations = [text for result in results for text in result.violations]
    print(
        "\n".join(violations)
        or f"{len(results)} pages, {options.minutes:g} minutes: nothing to complain about"
    )
    return 1 if violations else 0


def _start_demo(stack: ExitStack) -> int:
    """Start `gpulse demo`; return the port of its page."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpulse-pages-")))
    with open(directory / "output", "wb") as output:
        demo = subprocess.Popen(
            [sys.executable, "-m", "gpulse", "demo", "--port", "0"],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    stack.callback(demo.wait)
    stack.callback(os.killpg, demo.pid, signal.SIGTERM)

    def port() -> int | None:
        _, found, rest = (directory / "output").read_text(encoding="utf-8").partition("http://127.0.0.1:")
        number = rest.split("/", 1)[0].split()[0] if found and rest.strip() else ""
        return int(number) if number.isdigit() else None

    found: int = until(port, "the demo is ready")
    return found


if __name__ == "__main__":
    sys.exit(main())
