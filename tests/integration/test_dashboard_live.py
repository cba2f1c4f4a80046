"""The dashboard as it runs, in a browser: nodes that come, change and go, and names that are no names."""

from __future__ import annotations

import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Page, WebSocket, WebSocketRoute, expect

from tests.fakes.nvml import FakeNvml
from tests.integration.browser import Tab, browsing, serve_static, tab
from tests.integration.cluster import EAGER, Cluster, HeadProcess, Process, cluster_in, until
from tests.integration.hostile_agent import markup

IMPATIENT = {
    "gpulse.cluster.head.membership:LATE_SECONDS": 1.5,
    "gpulse.cluster.head.membership:LOST_SECONDS": 3.5,
}
NODE = markup("node")
PROGRAM = markup("program")
_GIB = 1 << 30


class Lab(NamedTuple):
    """A head, and who sends to it: two demo machines, one with a driver, one whose names are markup."""

    cluster: Cluster
    head: HeadProcess
    driver: FakeNvml
    pid: int
    """Of the process that holds GPU 0 of the machine with a driver."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all of it."""
    with browsing() as made:
        yield made


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[Lab]:
    """One cluster for all of it."""
    directory = tmp_path_factory.mktemp("lab")
    (directory / "nodes.txt").write_text("demo-1\n# a comment\nnever-there\n", encoding="utf-8")
    with ExitStack() as stack:
        cluster = stack.enter_context(cluster_in(directory))
        held = stack.enter_context(_named_process(directory))
        driver = FakeNvml.create(directory / "nvml-control", 2)
        stack.callback(driver.close)
        driver.add_process(0, held.pid, 8 * _GIB, sm=70)
        driver.gpu(0).memory_used = 9 * _GIB
        head = cluster.head("--nodes", str(directory / "nodes.txt"), "--freq", "250", tuned=IMPATIENT)
        cluster.agent("demo-1", head.port)
        cluster.agent("driver-1", head.port, "--full-commands", source=(), env=driver.env(nvml_library))
        stack.enter_context(_hostile_agent(directory, head.port))
        until(lambda: {"demo-1", "driver-1", NODE} <= set(head.nodes()), "the nodes are there")
        yield Lab(cluster, head, driver, held.pid)


@pytest.fixture
def window(browser: Browser, lab: Lab) -> Iterator[Tab]:
    """A window on the lab, which must not have complained about anything at the end."""
    with tab(browser, lab.head.http_port) as opened:
        yield opened
        opened.quiet()


def _named_process(directory: Path) -> subprocess.Popen[bytes]:
    """A process that is called as no program should be."""
    program = directory / PROGRAM
    shutil.copy(shutil.which("sleep") or "", program)
    return _Ended([str(program), "600"])


class _Ended(subprocess.Popen[bytes]):
    """A process that is over when its block is."""

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()


def _hostile_agent(directory: Path, port: int) -> ExitStack:
    stack = ExitStack()
    process = Process(
        *("agent", f"127.0.0.1:{port}", "--demo", "--node-name", NODE, "--full-commands"),
        *("--state-dir", str(directory / "hostile")),
        cwd=Path(__file__).parents[2],
        command=[sys.executable, "-m", "tests.integration.hostile_agent"],
    )
    stack.callback(process.end, signal.SIGKILL)
    return stack


def _card(node: str) -> str:
    return f'article[data-node="{node}"]'


def test_values_change_in_place(window: Tab, lab: Lab) -> None:
    """A reading that changes on the node changes on the page, in the row that was there before."""
    page = window.go()
    window.is_live()
    row = page.locator(f'{_card("driver-1")} tr[data-gpu="0"]')
    expect(row).to_contain_text("9.0 / 140 GiB")
    row.evaluate("row => { window.sameRow = row }")
    lab.driver.gpu(0).memory_used = 100 * _GIB
    lab.driver.gpu(0).power_mw = lab.driver.gpu(0).power_average_mw = 612_000
    expect(row).to_contain_text("100 / 140 GiB")
    expect(row).to_contain_text("612 / 700 W")
    assert row.evaluate("row => row === window.sameRow")
    lab.driver.gpu(0).memory_used = 9 * _GIB


def test_a_gpu_and_its_job(window: Tab, lab: Lab) -> None:
    """Pid, user, program, memory and running time of the process on a GPU; dashes for what nobody knows."""
    page = window.go()
    job = page.locator(f'{_card("driver-1")} li[data-pid="{lab.pid}"]')
    expect(job).to_contain_text(f"{PROGRAM} 600")
    expect(job).to_contain_text("8.0 GiB")
    expect(job).to_contain_text("root")
    free = page.locator(f'{_card("driver-1")} tr[data-gpu="1"]')
    expect(free).to_have_attribute("data-state", "free")


def test_an_agent_that_is_killed(window: Tab, lab: Lab) -> None:
    """Its node is late, then lost, and says since when."""
    agent = lab.cluster.agent("doomed", lab.head.port)
    page = window.go()
    card = page.locator(_card("doomed"))
    expect(card).to_have_attribute("data-state", "healthy")
    agent.kill()
    expect(card).to_have_attribute("data-state", "late")
    expect(card.locator(".card-head")).to_contain_text("late")
    expect(card).to_have_attribute("data-state", "lost")
    assert "lost" == lab.head.nodes()["doomed"]
    expect(card.locator(".card-head")).to_have_text(re.compile(r"lost.*\d\d:\d\d:\d\d"))


def test_a_node_that_was_never_heard_of(window: Tab) -> None:
    """It is expected, so it has a card that says what is wrong."""
    page = window.go()
    card = page.locator(_card("never-there"))
    expect(card).to_contain_text("never reported")
    expect(page.locator(_card("demo-1"))).not_to_contain_text("never reported")


def test_names_that_are_markup(window: Tab) -> None:
    """Node, GPU, driver, disk, process, user, job: all are shown as text, and nothing runs."""
    page = window.page
    told = {
        (): ("node", "gpu", "driver", "mount", "link", "user", "job", "container", "command"),
        ("map",): (),
        ("node", NODE): ("node", "kernel", "cpu", "mount", "link", "user", "health"),
        ("gpu", NODE, "0"): ("node", "gpu", "user", "command"),
        ("user", markup("user")): ("user", "node"),
        ("job", markup("job")): ("job", "user"),
        ("findings",): (),
        ("who",): ("user",),
        ("sessions",): (),
    }
    for parts, names in told.items():
        window.go(*parts)
        window.settled()
        for name in names:
            expect(page.locator("main")).to_contain_text(markup(name))
        assert page.evaluate("window.hacked") is None
        assert 0 == page.locator("img").count()


def test_the_map(window: Tab) -> None:
    """Every GPU has a place, with its name and numbers; one leads to its page, the mode lasts over a reload."""
    page = window.go("map")
    window.settled()
    box = page.locator("#map")
    box.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".map-tip")).to_contain_text("GPU")
    page.goto("about:blank")
    page.goto(window.address)
    expect(box).to_be_visible()
    expect(page.locator("#map-summary")).to_contain_text(re.compile(r"[0-9]+ GPUs"))
    box.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator('[data-page="gpu"] h1')).to_be_visible()


def test_by_keyboard_alone(window: Tab) -> None:
    """From the front page to a GPU without a mouse, with the focus to be seen on the way."""
    page = window.go()
    expect(page.locator(f'{_card("demo-1")} tr[data-gpu="0"]')).to_be_visible()
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("(document.activeElement.getAttribute('href') ?? '').startsWith('#/gpu/')"):
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    page.keyboard.press("Enter")
    expect(page.locator('[data-page="gpu"] h1')).to_contain_text("GPU")


def test_a_page_that_stays_open(browser: Browser, tmp_path: Path) -> None:
    """It keeps its one connection, and never says that the head was lost, however long slow requests may take."""
    with cluster_in(tmp_path) as cluster:
        head = cluster.head(tuned={"gpulse.web.protocol:PatientHttp.request_seconds": 0.5})
        cluster.agent("demo-1", head.port)
        until(lambda: head.nodes().get("demo-1") == "healthy", "the node is there")
        with tab(browser, head.http_port) as opened:
            page = opened.go()
            opened.is_live()
            page.evaluate(_NOTE_STATES)
            for _ in range(6):
                _wait_until_cut(page, head.http_port)
            opened.is_live()
            expect(page.locator("#banner")).to_be_hidden()
            assert [] == page.evaluate("window.states")
            assert 1 == sum(url.startswith("ws:") for url in opened.requests)
            opened.quiet()


_NOTE_STATES = """() => {
  window.states = [];
  new MutationObserver((changes) => {
    for (const { target } of changes) window.states.push(target.dataset.connection);
  }).observe(document.querySelector("#connection"), { attributeFilter: ["data-connection"] });
}"""


def _wait_until_cut(page: Page, port: int) -> None:
    """Send half a request, and wait until the head cuts the connection, while the page goes on."""
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\n")
        slow.setblocking(False)
        while select.select([slow], [], [], 0)[0] == []:
            page.wait_for_timeout(20)


def test_a_connection_that_died_silently(window: Tab) -> None:
    """After this machine slept, say: the head answers requests, nothing comes over the stream, and a new one is opened."""
    dead: list[bool] = []
    opened: list[str] = []

    def pass_on(socket: WebSocketRoute) -> None:
        opened.append(socket.url)
        is_first = len(opened) == 1
        server = socket.connect_to_server()
        server.on_message(lambda message: None if is_first and dead else socket.send(message))
        socket.on_message(lambda message: None if is_first and dead else server.send(message))

    window.page.route_web_socket("**/api/v1/live", pass_on)
    window.page.clock.install()
    page = window.go()
    window.is_live()
    dead.append(True)
    page.clock.fast_forward(15_000)
    page.clock.fast_forward(6_000)
    until(lambda: _passes(page, opened), "a second stream")
    window.is_live()


def _passes(page: Page, opened: list[str]) -> bool:
    page.clock.fast_forward(1_000)
    return len(opened) == 2


def test_a_head_without_news(browser: Browser, tmp_path: Path) -> None:
    """It has nothing to say for minutes, and its page keeps the connection."""
    with cluster_in(tmp_path) as cluster, tab(browser, cluster.head().http_port) as opened:
        page = opened.page
        sockets: list[WebSocket] = []
        page.on("websocket", lambda socket: sockets.append(socket))  # noqa: PLW0108  it sets attributes on it
        page.clock.install()
        opened.go()
        opened.is_live()
        page.evaluate(_NOTE_STATES)
        for _ in range(5):
            with sockets[0].expect_event("framereceived"):  # the page asks whether the head is there
                page.clock.fast_forward(15_000)
            page.clock.fast_forward(6_000)
        assert [] == page.evaluate("window.states")
        assert 1 == len(sockets)
        opened.quiet()


def test_a_hidden_tab_sleeps(window: Tab) -> None:
    """Nobody looks, so nothing is sent; it wakes up when somebody does."""
    sockets: list[WebSocket] = []
    window.page.on("websocket", lambda socket: sockets.append(socket))  # noqa: PLW0108  it sets attributes on it
    window.page.clock.install()
    page = window.go()
    window.is_live()
    with sockets[0].expect_event("close"):
        _hide(page, hidden=True)
        page.clock.fast_forward(4000)
    expect(page.locator("#connection")).to_have_attribute("data-connection", "asleep")
    _hide(page, hidden=False)
    window.is_live()
    assert 2 == len(sockets)


def _hide(page: Page, *, hidden: bool) -> None:
    page.evaluate(
        """hidden => {
          Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def test_a_head_that_is_killed_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    """The page says so, keeps what it shows, and is live again by itself."""
    with cluster_in(tmp_path) as cluster:
        head = cluster.head()
        cluster.agent("demo-1", head.port, tuned=EAGER)
        until(lambda: head.nodes().get("demo-1") == "healthy", "the node is there")
        with tab(browser, head.http_port) as opened:
            page = opened.go()
            opened.is_live()
            card = page.locator(_card("demo-1"))
            expect(card).to_be_visible()
            head.kill()
            expect(page.locator("#banner")).to_be_visible()
            expect(page.locator("#banner")).to_contain_text("Lost the head")
            expect(page.locator("#announcer")).to_contain_text("Lost the head")
            expect(card).to_be_visible()
            cluster.head(port=head.port, http_port=head.http_port)
            opened.is_live()
            expect(page.locator("#banner")).to_be_hidden()
            expect(card).to_have_attribute("data-state", "healthy")


@pytest.mark.parametrize("is_cached", [False, True], ids=["page", "part of the page"])
def test_a_page_opened_while_the_head_is_down(browser: Browser, tmp_path: Path, is_cached: bool) -> None:
    """It is shown as soon as the head is back, whether its module or one that it imports could not be loaded."""
    with cluster_in(tmp_path) as cluster:
        head = cluster.head()
        with tab(browser, head.http_port) as opened:
            page = opened.go()
            opened.is_live()
            head.kill()
            expect(page.locator("#banner")).to_be_visible()
            if is_cached:
                page.route("**/pages/findings.js", serve_static)
            opened.go("findings")
            expect(page.locator("main")).to_contain_text("This page could not be loaded.")
            page.unroute_all()
            cluster.head(port=head.port, http_port=head.http_port)
            opened.settled()
            expect(page.locator('[data-page="findings"] h1')).to_be_visible()
