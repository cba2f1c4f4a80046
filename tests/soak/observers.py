"""Observers: threads that watch pages, processes and answers while the soak disturbs them, and only record."""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from playwright.sync_api import ConsoleMessage, Error, Page, Request, Response, WebSocket
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.browser import FILLED, Tab, browsing, tab
from tests.soak.observations import (
    HEAD,
    Contact,
    FindingSeen,
    FindingsPoll,
    PageEvent,
    Scrape,
    Usage,
)
from tests.soak.parts import JOB, JOB_NODE, NODES, SIMULATED, USER, Parts

STAYING, WALKING = "staying", "walking"
_PAGE_SECONDS = 2.0
_FILL_SECONDS = 30.0
_USAGE_SECONDS = 2.0
_POLL_SECONDS = 1.0
_SCRAPE_SECONDS = 5.0
_ANSWER_SECONDS = 180.0
_STATUS = """
document.addEventListener("DOMContentLoaded", () => {
  const connection = document.getElementById("connection");
  if (!connection) return;
  const tell = () => {
    const more = document.getElementById("banner")?.hidden ? "" : document.getElementById("banner-more").textContent;
    window.soakStatus(`${connection.textContent}${more ? ": " + more : ""}`);
  };
  new MutationObserver(tell).observe(connection, {childList: true, characterData: true, subtree: true});
  tell();
});
"""

_T = TypeVar("_T")


class Observer(threading.Thread):
    """A thread that observes until it is stopped, and keeps what made it fail."""

    def __init__(self, name: str) -> None:
        super().__init__(name=f"soak-{name}", daemon=True)
        self.stopping = threading.Event()
        self.failure: str | None = None

    def run(self) -> None:
        """Observe; a failure is kept for the report."""
        try:
            self.observe()
        except Exception:  # noqa: BLE001  whatever it is, it belongs into the report
            self.failure = traceback.format_exc()

    def observe(self) -> None:
        """Observe until `stopping` is set."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the thread."""
        self.stopping.set()
        if self.is_alive():
            self.join(60.0)


class PageObserver(Observer):
    """A browser with one tab that stays on the overview and one that walks through all pages."""

    def __init__(self, port: int) -> None:
        super().__init__("pages")
        self.events: list[PageEvent] = []
        self.received: list[float] = []
        """Times of the live messages of the staying tab, at most one a second."""
        self.visits: Counter[str] = Counter()
        self._port = port
        self._work: queue.Queue[tuple[Callable[[Tab, Tab], Any], Future[Any]]] = queue.Queue()

    def ask(self, work: Callable[[Tab, Tab], _T]) -> _T:
        """Have something done with the staying and the walking tab; called from other threads."""
        future: Future[_T] = Future()
        self._work.put((work, future))
        return future.result(_ANSWER_SECONDS)

    def reload(self) -> None:
        """Load the walking tab's page anew."""

        def work(_: Tab, walking: Tab) -> None:
            self._happened(WALKING, "load", "reload")
            walking.page.reload()

        self.ask(work)

    def observe(self) -> None:
        """Walk until stopped."""
        with ExitStack() as stack:
            browser = stack.enter_context(browsing())
            tabs = [stack.enter_context(tab(browser, self._port, timezone_id="UTC")) for _ in range(2)]
            for name, opened in zip((STAYING, WALKING), tabs, strict=True):
                self._watch(name, opened.page)
                self._happened(name, "load", "first")
                opened.go(query="?density=cards")  # which say to the second when a node was last heard of
            staying, walking = tabs
            number = 0
            while not self.stopping.is_set():
                self._visit(staying, walking, number)
                number += 1

    def _visit(self, staying: Tab, walking: Tab, number: int) -> None:
        """Show one page until it is filled and a little longer; do what other threads ask for meanwhile."""
        places = _places(number)
        place = places[number % len(places)]
        name = "/".join(place) or "overview"
        begun = time.time()
        is_filled = False
        try:
            walking.go(*place)
            while not self.stopping.is_set():
                self._do_work(staying, walking)
                if not is_filled and walking.page.evaluate(FILLED):
                    is_filled = True
                    self.visits[place[0] if place else "overview"] += 1
                passed = time.time() - begun
                if passed > (_PAGE_SECONDS if is_filled else _FILL_SECONDS):
                    break
                walking.page.wait_for_timeout(200)
        except Error as error:
            self._happened(WALKING, "not filled", f"{name}: {str(error)[:200]}", begun)
            walking.page.wait_for_timeout(1000)
            return
        if not is_filled:
            self._happened(WALKING, "not filled", f"{name}: not after {_FILL_SECONDS:g} s")

    def _do_work(self, staying: Tab, walking: Tab) -> None:
        with suppress(queue.Empty):
            work, future = self._work.get_nowait()
            try:
                future.set_result(work(staying, walking))
            except Exception as error:  # noqa: BLE001  who asked gets it
                future.set_exception(error)

    def _watch(self, name: str, page: Page) -> None:
        def console(message: ConsoleMessage) -> None:
            if message.type in {"error", "warning"}:
                self._happened(name, "console", f"{message.type}: {message.text}")

        def failed(request: Request) -> None:
            if "ERR_ABORTED" not in (request.failure or ""):
                self._happened(name, "request failed", f"{request.url} {request.failure}")

        def answered(response: Response) -> None:
            if response.status >= 400:
                self._happened(name, "http error", f"{response.status}: {response.url}")

        def opened(socket: WebSocket) -> None:
            self._happened(name, "open", socket.url)
            socket.on("close", lambda _: self._happened(name, "close", socket.url))
            if name == STAYING:
                socket.on("framereceived", lambda _: self._received())

        page.expose_function("soakStatus", lambda text: self._happened(name, "status", str(text)))
        page.add_init_script(_STATUS)
        page.on("console", console)
        page.on("pageerror", lambda error: self._happened(name, "page error", str(error)))
        page.on("requestfailed", failed)
        page.on("response", answered)
        page.on("websocket", opened)

    def _received(self) -> None:
        now = time.time()
        if not self.received or now - self.received[-1] >= 1.0:
            self.received.append(now)

    def _happened(self, name: str, kind: str, text: str, moment: float | None = None) -> None:
        if not self.stopping.is_set():
            self.events.append(PageEvent(moment or time.time(), name, kind, text))


def _places(number: int) -> list[tuple[str, ...]]:
    """Return the addresses of all pages; nodes take turns."""
    node = NODES[number % len(NODES)]
    return [
        (),
        ("node", node),
        ("gpu", node, "0"),
        ("job", JOB),
        ("user", USER),
        ("findings",),
        ("sessions",),
        ("sessions", "whole"),
        ("who",),
        ("gpu", JOB_NODE, "0"),
        ("node", SIMULATED),
    ]


class UsageObserver(Observer):
    """Memory and open files of the head, its helper processes and the agents."""

    def __init__(self, parts: Parts) -> None:
        super().__init__("usage")
        self.usages: list[Usage] = []
        self._parts = parts

    def observe(self) -> None:
        """Look every two seconds."""
        while not self.stopping.wait(_USAGE_SECONDS):
            now = time.time()
            self._parts.move_readings(now)
            for part, pid in self._parts.running().items():
                self._look(now, part, pid)
                if part == HEAD:
                    for child in children(pid):
                        self._look(now, f"head's {helper_name(child)}", child)

    def _look(self, now: float, part: str, pid: int) -> None:
        with suppress(OSError, ValueError, IndexError):
            files = len(os.listdir(f"/proc/{pid}/fd"))
            self.usages.append(Usage(now, part, pid, anonymous_bytes(pid), files))


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process that is not backed by files.

    Raises:
        OSError: It is gone.
        ValueError: It is about to be.
    """
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no memory any more")


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found += map(
                    int, Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii").split()
                )
    return found


def helper_name(pid: int) -> str:
    """Return the module that a helper process runs, such as `sealer`."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if "-m" in words[:-1]:
            return words[words.index("-m") + 1].rpartition(".")[2]
    return "helper"


class AnswerObserver(Observer):
    """Findings and connected nodes, as the head answers."""

    def __init__(self, parts: Parts) -> None:
        super().__init__("answers")
        self.contacts: list[Contact] = []
        self.polls: list[FindingsPoll] = []
        self._parts = parts

    def observe(self) -> None:
        """Ask every second."""
        while not self.stopping.wait(_POLL_SECONDS):
            asked = time.time()
            status = self._parts.get("/status")
            if status is not None:
                names = frozenset(node["name"] for node in status["nodes"] if node["connected"])
                self.contacts.append(Contact(time.time(), names))
            asked = time.time()
            document = self._parts.get("/api/v1/findings")
            if document is not None:
                seen = tuple(
                    FindingSeen(asked, one["node"], one["label"], one["id"], one["start"])
                    for one in document["findings"]
                )
                self.polls.append(FindingsPoll(asked, seen))


class ScrapeObserver(Observer):
    """Metrics pages of the head and of one agent, as a Prometheus would read them."""

    def __init__(self, parts: Parts, node: str) -> None:
        super().__init__("scrapes")
        self.scrapes: list[Scrape] = []
        self._parts = parts
        self._scraped = (HEAD, node)

    def observe(self) -> None:
        """Scrape every few seconds."""
        while not self.stopping.wait(_SCRAPE_SECONDS):
            for part in self._scraped:
                now = time.time()
                try:
                    page = self._parts.metrics(part)
                except OSError as error:
                    self.scrapes.append(Scrape(now, part, f"no answer: {error}"))
                else:
                    self.scrapes.append(read_page(now, part, page))


def read_page(now: float, part: str, page: str) -> Scrape:
    """Read a metrics page, and say what is wrong with it."""
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                if key in seen:
                    return Scrape(now, part, f"{sample.name} is there twice with the labels {sample.labels}")
                seen.add(key)
    except ValueError as error:
        return Scrape(now, part, f"the page cannot be read: {error}")
    if not seen:
        return Scrape(now, part, "the page is empty")
    return Scrape(now, part, None, len(seen))
