"""A headless browser on the dashboard, and everything that it complained about."""

from __future__ import annotations

import mimetypes
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    Response,
    Route,
    expect,
    sync_playwright,
)

from tests.integration.cluster import until
from tests.prerequisites import find, require

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
)
PATIENCE_MS = 60_000
FILLED = """
document.querySelector("main h1") !== null
  && document.querySelector("main [aria-busy=true], main [data-loading=true], main [data-state=loading]") === null
"""
_STATIC = Path(str(files("gpulse.web").joinpath("static")))
_FLEET = """
async ({script, given}) => {
  const [core, filter] = await Promise.all([import("/core/fleet.js"), import("/parts/filter.js")]);
  let now = 1000;
  const fleet = new core.Fleet(() => now);
  const gpus = (labels) => labels.map((id) => ({id, uuid: `GPU-${id}`, name: "H200"}));
  const update = (row) => fleet.take({type: "update", time: now, nodes: [{state: "healthy", connected: true, time: now, ...row}]});
  const process = (user, more = {}) => ({pid: 1, user, job: null, name: "python3", command: ["python3", "train.py"], ...more});
  const wait = (seconds) => { now += seconds; };
  return await (new Function("return " + script)())({core, filter, fleet, gpus, update, process, wait, given});
}
"""
_WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation",
  (event) => window.violations.push(`${event.violatedDirective}: ${event.blockedURI || event.sample}`));
"""


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser without a screen."""
    require("Chromium")
    program = find("chromium", "chromium-browser", "google-chrome")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """One window on the dashboard of a head."""

    def __init__(self, context: BrowserContext, port: int, host: str = "127.0.0.1") -> None:
        self.address = f"http://{host}:{port}/"
        self.page: Page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("requestfailed", self._failed)
        self.page.on("response", self._answered)
        self.page.on("websocket", lambda socket: self.requests.append(socket.url))

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(f"console {message.type}: {message.text}")

    def _failed(self, request: Request) -> None:
        if "ERR_ABORTED" not in (request.failure or ""):  # what a page asked for and then left
            self.complaints.append(f"failed: {request.url} {request.failure}")

    def _answered(self, response: Response) -> None:
        if response.status >= 400:
            self.complaints.append(f"{response.status}: {response.url}")

    def go(self, *parts: str, query: str = "") -> Page:
        """Look at a page; its parts are quoted."""
        path = "/".join(quote(part, safe="") for part in parts)
        self.page.goto(f"{self.address}#/{path}{query}")
        return self.page

    def settled(self) -> None:
        """Wait until the stream is open and the page has what it asked for."""
        self.is_live()
        until(lambda: self.page.evaluate(FILLED), f"the page is filled: {self.page.url}")

    def is_live(self) -> None:
        """Wait until the stream is open."""
        expect(self.page.locator("#connection")).to_have_attribute("data-connection", "open")

    def quiet(self) -> None:
        """Assert that nothing was complained about, and that nobody but the head was asked."""
        here = urlsplit(self.address).netloc
        elsewhere = [url for url in self.requests if url[:5] != "data:" and urlsplit(url).netloc != here]
        violations: list[str] = self.page.evaluate("window.violations")
        wrong = [*self.complaints, *violations, *(f"asked elsewhere: {url}" for url in elsewhere)]
        assert not wrong, "\n".join(wrong)


@contextmanager
def tab(browser: Browser, port: int, *, host: str = "127.0.0.1", **options: Any) -> Iterator[Tab]:
    """A window of its own, with its own storage and cookies."""
    context = browser.new_context(**options)
    try:
        context.add_init_script(_WATCH)
        yield Tab(context, port, host)
    finally:
        context.close()


def empty_page(browser: Browser) -> Page:
    """A page that can import the dashboard's modules; there is no server behind it."""
    page = browser.new_page()
    page.route("**/*", serve_static)
    page.goto("http://localhost/empty")
    return page


def serve_static(route: Route) -> None:
    """Answer a request with one of the dashboard's files, or with an empty page."""
    path = _STATIC / urlsplit(route.request.url).path.lstrip("/")
    if path.is_file():
        kind = mimetypes.guess_type(path.name)[0] or "text/plain"
        route.fulfill(body=path.read_bytes(), content_type=kind)
    else:
        route.fulfill(body="<!doctype html><title>empty</title>", content_type="text/html")


def in_fleet(page: Page, script: str, given: Any = None) -> Any:
    """What a function answers, on an empty page, that gets a fleet and what it takes to fill it."""
    return page.evaluate(_FLEET, {"script": script, "given": given})
