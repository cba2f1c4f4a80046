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
from playwright.sync_api import Browser, Page, ViewportSize, WebSocket, WebSocketRoute, expect

from tests.fakes.nvml import FakeNvml
from tests.integration.browser import Tab, browsing, serve_static, tab
from tests.integration.cluster import EAGER, Cluster, HeadProcess, Process, cluster_in, until
from tests.integration.hostile_agent import markup

IMPATIENT = {
    "gpulse.cluster.head.fleet:LATE_SECONDS": 1.5,
    "gpulse.cluster.head.fleet:LOST_SECONDS": 3.5,
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


CARDS = "?density=cards"


def test_values_change_in_place(window: Tab, lab: Lab) -> None:
    """A reading that changes on the node changes on the page, in the row that was there before."""
    page = window.go(query=CARDS)
    window.is_live()
    row = page.locator(f'{_card("driver-1")} tr[data-gpu="0"]')
    expect(row.locator(".c-memory")).to_have_text("9.0")
    expect(page.locator(f"{_card('driver-1')} thead")).to_contain_text("Memory, of 140 GiB")
    row.evaluate("row => { window.sameRow = row }")
    lab.driver.gpu(0).memory_used = 100 * _GIB
    lab.driver.gpu(0).power_mw = lab.driver.gpu(0).power_average_mw = 612_000
    expect(row.locator(".c-memory")).to_have_text("100.0")
    expect(row).to_contain_text("612 W")
    assert row.evaluate("row => row === window.sameRow")
    lab.driver.gpu(0).memory_used = 9 * _GIB


def test_a_gpu_and_its_job(window: Tab, lab: Lab) -> None:
    """Pid, user, program, memory and running time of the process on a GPU; dashes for what nobody knows."""
    page = window.go(query=CARDS)
    job = page.locator(f"{_card('driver-1')} tr", has=page.locator(f'[data-pid="{lab.pid}"]'))
    expect(job).to_contain_text(f"{PROGRAM} 600")
    expect(job).to_contain_text("8.0 GiB")
    expect(job).to_contain_text("root")
    free = page.locator(f'{_card("driver-1")} tr[data-gpu="1"]')
    expect(free).to_have_attribute("data-state", "free")


def test_an_agent_that_is_killed(window: Tab, lab: Lab) -> None:
    """Its node is late, then lost, and says since when."""
    agent = lab.cluster.agent("doomed", lab.head.port)
    page = window.go(query="?density=rows")
    row = page.locator(_card("doomed"))
    expect(row).to_have_attribute("data-state", "healthy")
    agent.kill()
    expect(row).to_have_attribute("data-state", "late")
    expect(row.locator(".row-sub")).to_contain_text("late")
    expect(row).to_have_attribute("data-state", "lost")
    assert "lost" == lab.head.nodes()["doomed"]
    expect(row.locator(".row-state")).to_have_text(re.compile(r"lost since \d\d:\d\d, last known values"))
    expect(page.locator("#nodes > article").first).to_have_attribute("data-node", "doomed")
    expect(page.locator(".finding-card").first).to_contain_text("doomed lost")
    expect(page.locator("#findings-count")).to_have_attribute("data-severity", "critical")


def test_a_node_that_was_never_heard_of(window: Tab) -> None:
    """It is expected, so it has a place that says what is wrong."""
    for density in ("cards", "rows", "strips"):
        page = window.go(query=f"?density={density}")
        place = page.locator('[data-node="never-there"]')
        expect(place).to_contain_text("missing")
        expect(page.locator('[data-node="demo-1"]')).not_to_contain_text("missing")


def test_names_that_are_markup(window: Tab) -> None:
    """Node, GPU, driver, disk, process, user, job: all are shown as text, and nothing runs."""
    page = window.page
    told = {
        (): ("node", "driver", "mount", "link", "user", "job", "container", "command"),
        ("node", NODE): ("node", "kernel", "cpu", "mount", "link", "user", "health", "adapter"),
        ("gpu", NODE, "0"): ("node", "gpu", "user", "command", "serial"),
        ("user", markup("user")): ("user", "node"),
        ("job", markup("job")): ("job", "user"),
        ("findings",): (),
        ("who",): ("user",),
        ("sessions",): (),
    }
    for parts, names in told.items():
        window.go(*parts, query="" if parts else CARDS)
        window.settled()
        for name in names:
            expect(page.locator("main")).to_contain_text(markup(name))
        assert page.evaluate("window.hacked") is None
        assert 0 == page.locator("img").count()


def test_the_fleet_by_keyboard(window: Tab) -> None:
    """Tab and arrows lead to one cell, arrows to all others, E opens a node in place, Escape closes it, Enter leads to a GPU's page."""
    page = window.go(query="?density=rows&sort=name")
    expect(page.locator(f'{_card("demo-1")} .cell[data-gpu="7"]')).to_be_visible()
    focused = page.locator("#nodes :focus")
    assert page.evaluate("document.activeElement === document.body")
    page.keyboard.press("ArrowDown")
    expect(focused).to_have_attribute("href", re.compile("#/gpu/.*/0"))
    page.locator("#sort").focus()
    for _ in range(6):
        page.keyboard.press("Tab")
        if focused.count():
            break
    assert 1 == page.locator('#nodes [tabindex="0"]').count()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.locator(f'{_card("demo-1")} .cell[data-gpu="0"]').focus()
    page.keyboard.press("ArrowRight")
    expect(focused).to_have_attribute("href", "#/gpu/demo-1/1")
    expect(page.locator(".fleet-tip")).to_contain_text("demo-1 · GPU 1")
    page.keyboard.press("ArrowDown")
    expect(focused).to_have_attribute("href", re.compile("#/gpu/d(oomed|river-1)/1"))
    page.keyboard.press("ArrowUp")
    page.keyboard.press("e")
    panel = page.locator(f"{_card('demo-1')} .node-panel")
    expect(panel.get_by_role("table")).to_contain_text("Tensor")
    expect(focused).to_have_attribute("href", "#/gpu/demo-1/1")
    page.keyboard.press("Escape")
    expect(panel).to_have_count(0)
    page.keyboard.press("/")
    page.keyboard.type("driver-1")
    expect(page.locator(_card("demo-1"))).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.locator(_card("demo-1"))).to_be_visible()
    page.locator(f'{_card("demo-1")} .cell[data-gpu="1"]').focus()
    page.keyboard.press("Enter")
    expect(page.locator('[data-page="gpu"] h1')).to_contain_text("GPU")


def test_densities(window: Tab) -> None:
    """Where the map was are strips; D leads to the next density; the choice is in the address and lasts over a reload."""
    page = window.go("map", query="?metric=memory")
    cell = page.locator('.strip-row[data-node="demo-1"] .cell[data-gpu="0"]')
    expect(cell).to_be_visible()
    assert "density=strips" in page.url
    expect(page.locator("#metric")).to_have_value("memory")
    box = cell.bounding_box()
    assert box is not None
    assert (22, 22) == (box["width"], box["height"])
    cell.hover()
    expect(page.locator(".fleet-tip")).to_contain_text("demo-1 · GPU 0")
    cell.focus()
    page.keyboard.press("e")
    expect(page.locator(".fleet-sheet table")).to_contain_text("Tensor")
    page.keyboard.press("Escape")
    expect(page.locator(".fleet-sheet")).to_be_hidden()
    page.keyboard.press("d")
    expect(page.locator("article.node-card")).not_to_have_count(0)
    page.get_by_role("button", name="Rows").click()
    expect(page.locator(f"{_card('demo-1')} .cell .spark").first).to_be_attached()
    assert "density=rows" in page.url
    page.goto("about:blank")
    page.goto(window.address)
    expect(page.locator(".fleet-row").first).to_be_visible()
    expect(page.get_by_role("button", name="Rows")).to_have_attribute("aria-pressed", "true")


def test_totals_and_chips_filter(window: Tab) -> None:
    """Numbers are links: they say what the cells show, and leave the rest out; a sort changes the order."""
    page = window.go(query="?density=rows")
    expect(page.locator(f'{_card("demo-1")} .cell[data-gpu="7"]')).to_be_visible()
    chip = page.locator("[data-chip=free]")
    expect(chip.locator("b")).not_to_have_text("0")
    chip.click()
    expect(chip).to_have_attribute("aria-current", "true")
    assert "state=free" in page.url
    shown = page.locator("#nodes .cell:not(.dim):visible")
    until(lambda: int(chip.locator("b").inner_text()) == shown.count(), "as many cells as the number says")
    assert {"free"} == set(shown.evaluate_all("cells => cells.map((cell) => cell.dataset.state)"))
    expect(page.locator(".total[aria-current=true] .total-title")).to_have_text("Free")
    page.locator("[data-chip=all]").click()
    page.locator(".total[data-state=busy]").click()
    expect(page.locator("[data-chip=busy]")).to_have_attribute("aria-current", "true")
    assert "density=rows" in page.url
    page.keyboard.press("Escape")
    expect(page.locator("[data-chip=all]")).to_have_attribute("aria-current", "true")
    page.locator("#sort").select_option("name")
    names = page.locator("#nodes > article").evaluate_all("rows => rows.map((row) => row.dataset.node)")
    named = [name for name in names if name != NODE]
    assert sorted(named) == named


def test_the_overview_on_a_phone(browser: Browser, lab: Lab) -> None:
    """Eight cells in a row, large enough for a finger; filters fold; a node opens as a card; nothing is wider than the screen."""
    phone: ViewportSize = {"width": 390, "height": 844}
    with tab(browser, lab.head.http_port, viewport=phone, has_touch=True) as opened:
        page = opened.go(query="?density=rows")
        row = page.locator(_card("demo-1"))
        expect(row.locator(".cell").nth(7)).to_be_visible()
        script = "all => all.map((one) => one.getBoundingClientRect()).map(({y, width, height}) => [y, width, height])"
        boxes = row.locator(".cell").evaluate_all(script)  # at once: what is above may grow
        assert 1 == len({y for y, _, _ in boxes})
        assert all(width >= 36 and height >= 36 for _, width, height in boxes)
        assert [36, 36] == [height for _, _, height in row.locator("h2 a, .row-toggle").evaluate_all(script)]
        expect(page.locator("#sort")).to_be_hidden()
        page.get_by_role("button", name="Filter and sort").click()
        expect(page.locator("#sort")).to_be_visible()
        expect(page.locator("#fleet-filter")).to_be_hidden()
        page.locator("#open-search").click()
        expect(page.locator("#fleet-filter")).to_be_focused()
        page.locator("#open-tools").click()
        expect(page.get_by_label("Theme", exact=True)).to_be_visible()
        row.locator(".row-toggle").click()
        expect(row.locator(".node-panel tr.gpu").first).to_be_visible()
        assert phone["width"] >= page.evaluate("document.documentElement.scrollWidth")
        opened.quiet()


def test_a_page_that_stays_open(browser: Browser, tmp_path: Path) -> None:
    """It keeps its one connection, and never says that the head was lost, however long slow requests may take."""
    with cluster_in(tmp_path) as cluster:
        head = cluster.head(tuned={"gpulse.web.server:TimeoutHttpProtocol.request_seconds": 0.5})
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
            expect(page.locator("#banner")).to_contain_text("Connection to the head lost")
            expect(page.locator("#announcer")).to_contain_text("Connection to the head lost")
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
            expect(page.locator("main")).to_contain_text("The head cannot be reached.")
            page.unroute_all()
            cluster.head(port=head.port, http_port=head.http_port)
            expect(
                page.locator('[data-page="findings"] h1')
            ).to_be_visible()  # after the page has loaded itself anew
            opened.settled()
