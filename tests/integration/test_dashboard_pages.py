"""Every page of the dashboard in a browser: history, sessions and their files, who used what, findings, themes, access."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from axe_playwright_python.base import AXE_SCRIPT  # type: ignore[import-untyped]
from playwright.sync_api import Browser, Page, Response, ViewportSize, expect

from tests.integration.browser import Tab, browsing, tab
from tests.integration.cluster import HeadProcess, cluster_in, until

PAGES = (
    *("rows", "strips", "sessions", "session", "who", "user", "jobs", "job"),
    *("overview", "node", "gpu", "findings"),
)
WITH_FINDINGS = ("overview", "rows", "strips", "node", "gpu", "findings")
DENSITIES = ("rows", "strips")
"""Pages that show what is wrong; the others do not wait until something is."""
THEMES = ("light", "dark", "yellow", "blue")
DESK: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 360, "height": 740}
EAGER = {"gpulse.cluster.agent.sampling_thread:_DIAGNOSIS_SECONDS": 1.0}
"""Agents that judge what they see every second."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all of it."""
    with browsing() as made:
        yield made


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadProcess]:
    """A head with a demo node, and a session that goes on."""
    with cluster_in(tmp_path_factory.mktemp("pages")) as cluster:
        made = cluster.head("--freq", "250", "--token-file", str(cluster.directory / "token"))
        cluster.agent("demo-1", made.port, tuned=EAGER)
        until(lambda: "demo-1" in made.get("/metrics/latest")["client_data"], "the node is there")
        made.post("/profiling/start", {"name": "goes-on", "labels": {"team": "vision"}})
        yield made


@pytest.fixture(scope="module")
def findings(head: HeadProcess) -> list[dict[str, Any]]:
    """What is wrong with the demo node, once it was seen for long enough."""
    found: list[dict[str, Any]] = until(
        lambda: head.get("/api/v1/findings")["findings"], "something is found"
    )
    return found


@pytest.fixture
def window(browser: Browser, head: HeadProcess) -> Iterator[Tab]:
    """A window, which must not have complained about anything at the end."""
    with tab(browser, head.http_port, accept_downloads=True) as opened:
        yield opened
        opened.quiet()


@pytest.fixture(scope="module")
def visitor(browser: Browser, head: HeadProcess) -> Iterator[Tab]:
    """One window that goes from page to page, as people do."""
    with tab(browser, head.http_port, color_scheme="dark", reduced_motion="reduce") as opened:
        yield opened


def test_history_zooms(window: Tab) -> None:
    """A stretch that is drawn on a chart is asked of the head anew, in finer steps."""
    asked: list[Response] = []
    page = window.page
    page.on(
        "response", lambda response: asked.append(response) if "/api/v1/history" in response.url else None
    )
    window.go("gpu", "demo-1", "0", query="?from=-15m")
    window.settled()
    area = page.locator(".u-over").first
    expect(area).to_be_visible()
    box = area.bounding_box()
    assert box is not None
    before = asked[0].json()
    asked.clear()
    with page.expect_response(
        lambda response: "/api/v1/history" in response.url and "to=" in response.url
    ) as answer:
        _drag(page, box, 0.80, 0.95)
    words = parse_qs(urlsplit(answer.value.url).query)
    length = float(words["to"][0]) - float(words["from"][0])
    assert 0.1 * 900 < length < 0.2 * 900
    assert answer.value.json()["step"] < before["step"]
    assert re.search(r"from=\d+", page.url)
    page.go_back()
    expect(page).to_have_url(re.compile("from=-15m"))


def _drag(page: Page, box: Any, begin: float, end: float) -> None:
    height = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + begin * box["width"], height)
    page.mouse.down()
    page.mouse.move(box["x"] + (begin + end) / 2 * box["width"], height)
    page.mouse.move(box["x"] + end * box["width"], height)
    page.mouse.up()


def test_a_session_from_its_start_to_its_file(window: Tab, tmp_path: Path) -> None:
    """Started in a form, stopped after a question, its file downloaded and read."""
    page = window.go("sessions", query="?gpus=demo-1:3")
    form = page.get_by_role("form", name="Start a session")
    expect(form.get_by_label("GPUs")).to_have_value("demo-1:3")
    form.get_by_label("Name").fill("no name!")
    form.get_by_role("button", name="Start").click()
    expect(form.get_by_label("Name")).to_have_attribute("aria-invalid", "true")
    form.get_by_label("Name").fill("from-the-page")
    form.get_by_label("Start", exact=True).fill("5s")
    form.get_by_label("Labels").fill("team=vision, run=3")
    form.get_by_role("button", name="Start").click()
    row = page.get_by_role("row").filter(has_text="from-the-page")
    expect(row).to_contain_text("active")
    expect(row).to_contain_text("run=3")
    row.get_by_role("button", name="Stop").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Keep running").click()
    expect(row).to_contain_text("active")
    row.get_by_role("button", name="Stop").click()
    dialog.get_by_role("button", name="Stop").click()
    expect(row).to_contain_text("finished")
    with page.expect_download() as download:
        row.get_by_role("link", name="json", exact=False).first.click()
    saved = tmp_path / download.value.suggested_filename
    download.value.save_as(saved)
    document = json.loads(saved.read_bytes())
    assert "from-the-page.json" == saved.name
    assert document["frames"]
    assert {"demo-1:3:NVIDIA H200"} == {gpu for frame in document["frames"] for gpu in frame["gpu_id"]}
    row.get_by_role("link", name="from-the-page", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("from-the-page")
    expect(page.locator(".chart[data-state=ready]:visible").first).to_be_visible()


def test_a_session_is_compared_with_another(window: Tab, head: HeadProcess) -> None:
    """Chosen from a list, it is before or after by its start; the address keeps the choice."""
    head.post("/profiling/start", {"name": "a-change", "gpus": ["demo-1:0"]})
    until(
        lambda: head.get("/api/v1/sessions/a-change")["frame_count"] >= 4 * 14,
        "fourteen seconds are recorded",
    )
    page = window.go("sessions", "a-change")
    part = page.locator(".session-comparison")
    choice = part.locator("option").filter(has_text="goes-on")
    expect(choice).to_have_count(1)
    chosen = choice.get_attribute("value")
    part.get_by_role("combobox").select_option(chosen)
    card = part.locator(".comparison")
    expect(card.get_by_role("status")).to_contain_text("GPU utilization")
    expect(card.locator("dd").first).to_contain_text("goes-on")
    expect(card.locator("dd").nth(1)).to_contain_text("a-change")
    row = card.get_by_role("row").filter(has_text="SM activity")
    expect(row).to_contain_text("%")
    assert f"compare={chosen}" in page.url
    expect(page.locator(".session-summary")).to_contain_text("Utilization")
    expect(page.locator(".stats")).to_contain_text("GPU-hours")
    page.reload()
    expect(card.get_by_role("status")).to_contain_text("GPU utilization")
    part.get_by_role("combobox").select_option("")
    expect(card).to_have_count(0)


def test_a_name_that_is_taken(browser: Browser, head: HeadProcess) -> None:
    """What the head refuses is said with its hint, and what was typed is still there."""
    with tab(browser, head.http_port) as opened:
        page = opened.go("sessions", query="?name=goes-on")
        form = page.get_by_role("form", name="Start a session")
        form.get_by_role("button", name="Start").click()
        expect(form.get_by_role("alert")).to_contain_text(
            "There is already a session goes-on, which is active"
        )
        expect(form.get_by_role("alert")).to_contain_text("choose another name")
        expect(form.get_by_label("Name")).to_have_value("goes-on")


def test_who(window: Tab) -> None:
    """Users by their GPU-hours, jobs too, and the same as a file."""
    page = window.go("who")
    table = page.get_by_role("table")
    expect(table).to_contain_text("grace")
    page.get_by_role("button", name="User", exact=True).click()
    expect(table.get_by_role("columnheader", name="User")).to_have_attribute("aria-sort", "ascending")
    users = table.locator("tbody th").all_inner_texts()
    assert sorted(users, key=str.lower) == users
    page.get_by_role("button", name="By job").click()
    expect(table).to_contain_text("train_gpt.py")
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    header, *rows = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert "gpu_seconds" in header
    assert len(rows) == table.locator("tbody tr").count()
    page.get_by_label("Search").fill("katherine")
    expect(table.locator("tbody tr")).to_have_count(1)


def test_jobs(window: Tab) -> None:
    """Those of a time range, by user and state, in any order; each leads to its page, and a phone has cards."""
    page = window.go("jobs")
    table = page.get_by_role("table")
    rows = table.locator("tbody tr")
    expect(table).to_contain_text("train_gpt.py")
    expect(rows.filter(has_text="running").first).to_be_visible()
    page.get_by_role("button", name="User", exact=True).click()
    users = table.locator("tbody td[data-label=User]").all_inner_texts()
    assert sorted(users, key=str.lower) == users
    page.locator(".toolbar select").select_option("grace")
    expect(rows.filter(has_not_text="grace")).to_have_count(0)
    page.get_by_role("button", name="ended").click()
    expect(page.locator("main")).to_contain_text("No job matches")
    assert "user=grace" in page.url
    page.get_by_role("button", name="Show all").click()
    page.set_viewport_size(PHONE)
    expect(rows.first.locator("td").first).to_have_css("display", "flex")
    assert PHONE["width"] >= page.evaluate("document.documentElement.scrollWidth")
    page.set_viewport_size(DESK)
    rows.first.get_by_role("link").first.click()
    expect(page.locator('[data-page="job"] .stats')).to_contain_text("GPU-hours")
    expect(page.locator('.site-nav [aria-current="page"]')).to_have_text("Jobs")


def test_theme_and_filter_last(window: Tab) -> None:
    """What a reader chose is there again after a reload."""
    page = window.go()
    page.get_by_label("Theme").select_option("blue")
    page.locator("[data-chip=free]").click()
    shown = page.url
    assert "free" in shown
    page.goto("about:blank")
    page.goto(window.address)
    expect(page.locator("html")).to_have_attribute("data-theme", "blue")
    expect(page.locator("[data-chip=free]")).to_have_attribute("aria-current", "true")


def test_from_another_machine(browser: Browser, head: HeadProcess) -> None:
    """It wants the token first: a wrong one is refused, the right one leads to the page that the link was about."""
    token = (head.data_dir.parent / "token").read_text(encoding="utf-8").strip()
    elsewhere = {"X-Forwarded-For": "192.0.2.7"}
    with tab(browser, head.http_port, extra_http_headers=elsewhere) as opened:
        page = opened.go("gpu", "demo-1", "0")
        page.get_by_label("Token").fill("not the token")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_text("Wrong token")).to_be_visible()
        assert {} == _barriers(page, THEMES[0])
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Log in").click()
        expect(page.locator('[data-page="gpu"] h1')).to_have_text("GPU 0")
        expect(page.locator("#connection")).to_have_attribute("data-connection", "open")


@pytest.mark.parametrize("name", PAGES)
def test_everybody_can_use_it(
    visitor: Tab, head: HeadProcess, request: pytest.FixtureRequest, name: str
) -> None:
    """No serious barrier on any page, enough contrast in every theme, and nothing wider than a small phone."""
    if name in WITH_FINDINGS:
        assert request.getfixturevalue("findings")
    page = visitor.page
    page.set_viewport_size(DESK)
    is_density = name in DENSITIES
    visitor.go(*_parts(name, head), query=f"?density={name}" if is_density else "")
    expect(page.locator(f'main [data-page="{"overview" if is_density else name}"]')).to_be_attached()
    visitor.settled()
    barriers: dict[str, list[str]] = {}
    for theme in THEMES:
        page.get_by_label("Theme").select_option(theme)
        barriers |= {f"{theme}: {rule}": where for rule, where in _barriers(page, theme).items()}
    page.set_viewport_size(PHONE)
    page.wait_for_timeout(100)
    assert PHONE["width"] >= page.evaluate("document.documentElement.scrollWidth")
    assert {} == barriers
    visitor.quiet()


def test_a_node_and_one_of_its_gpus(window: Tab, head: HeadProcess) -> None:
    """The topology leads to a GPU by keyboard; identity and counters are those that the head has, on a phone, too."""
    known = head.get("/api/v1/nodes/demo-1/hardware")
    page = window.go("node", "demo-1")
    topology = page.get_by_role("region", name="Topology", exact=True)
    expect(topology.locator(".part-switch text")).to_have_text("NVSwitch")
    summary = topology.get_by_text("As a table")
    summary.focus()
    page.keyboard.press("Enter")
    row = topology.locator("tbody tr").nth(3).get_by_role("cell")
    assert ["NV18", "NV18", "NV18", "X", "NV18"] == row.all_inner_texts()[:5]
    expect(row.last).to_have_text(str(known["gpus"][3]["numa_node"]))
    page.keyboard.press("Shift+Tab")
    expect(topology.locator("a").last).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("GPU 7")
    identity = page.get_by_role("region", name="Identity")
    gpu = known["gpus"][7]
    for text in (gpu["serial"], gpu["vbios"], gpu["uuid"], gpu["board_part_number"], "NUMA 1, CPUs 64-127"):
        expect(identity).to_contain_text(text)
    health = page.get_by_role("region", name="Health")
    expect(health).to_contain_text("no action needed")
    expect(health).to_contain_text("18 of 18 up, 26.6 GB/s each, 0 errors")
    expect(health.get_by_role("row", name="uncorrected").first).to_contain_text("0")
    expect(page.get_by_role("region", name="Xid errors")).to_contain_text(
        "No Xid errors in the last 90 days."
    )
    expect(page.locator("[data-figure=Temperature] dd")).to_contain_text("°C")
    page.set_viewport_size(PHONE)
    for panel in page.locator(".panel, .figures, .finding-banner").all():
        box = panel.bounding_box()
        assert box is not None
        assert (box["x"] >= 0, box["x"] + box["width"] <= PHONE["width"]) == (True, True)


def test_findings(window: Tab, findings: list[dict[str, Any]]) -> None:
    """A list by cause and the chosen one, by mouse and keyboard; a choice lasts over a reload."""
    assert findings
    page = window.go("findings")
    chosen, title = page.locator(".finding-row[aria-current=true]"), page.locator("#finding-title")
    expect(chosen).to_have_count(1)
    first = title.inner_text()
    detail = page.locator(".finding-detail")
    expect(detail.get_by_role("table").nth(1)).to_contain_text("Counts")
    expect(detail).to_contain_text("What to do")
    expect(detail).to_contain_text("Seen before")
    expect(detail.locator(".finding-members th a").first).to_have_attribute(
        "href", re.compile("#/gpu/demo-1/")
    )
    page.keyboard.press("j")
    expect(title).not_to_have_text(first)
    name = title.inner_text()
    expect(chosen).to_contain_text(name)
    page.keyboard.press("j")
    expect(title).not_to_have_text(name)
    page.keyboard.press("k")
    expect(title).to_have_text(name)
    page.reload()
    expect(title).to_have_text(name)
    detail.get_by_role("link", name="What it means").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Detection")
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()
    expect(title).to_have_text(name)

    for key, label in (("a", "Acknowledge"), ("s", "Silence")):
        # On a busy machine, frames are late and a finding may be over for a moment: then there is no button either.
        expect(detail.get_by_role("button", name=label)).to_be_visible()
        page.keyboard.press(key)
        form = page.get_by_role("form", name=label)
        expect(form.locator(":focus")).to_have_count(1)
        page.keyboard.press("Escape")
        expect(form).to_be_hidden()
        expect(detail.get_by_role("button", name=label)).to_be_focused()
    page.evaluate("location.hash += '&do=acknowledge'")  # as the banners of GPUs and nodes link to it
    expect(page.get_by_label("by", exact=True)).to_be_focused()
    assert "do=" not in page.url
    page.get_by_label("by", exact=True).fill("mo")
    page.keyboard.press("Enter")
    expect(chosen).to_contain_text("acknowledged")
    expect(detail).to_contain_text("Acknowledged by mo")
    page.keyboard.press("s")
    form = page.get_by_role("form", name="Silence")
    assert {} == _barriers(page, THEMES[0])
    form.get_by_role("button", name="Silence", exact=True).click()
    expect(form).to_be_visible()  # a reason is required
    form.get_by_label("because").fill("it restarts after the epoch")
    form.get_by_label("because").press("Enter")
    expect(form).to_be_hidden()
    expect(page.locator(".finding-row").filter(has_text=name)).to_have_count(0)
    page.get_by_role("link", name="Silenced 1").click()
    expect(page).to_have_url(re.compile("state=silenced"))
    expect(detail).to_contain_text("it restarts after the epoch")
    detail.get_by_role("button", name="End silence").click()
    expect(page.locator(".finding-index")).to_contain_text("No current finding is silenced.")
    page.get_by_role("link", name="Past").click()
    expect(page.get_by_role("link", name="Past")).to_have_attribute("aria-current", "page")
    page.get_by_role("link", name=re.compile("^Now")).click()
    page.get_by_label("Group").select_option("node")
    expect(page.locator(".finding-section").first).to_have_attribute("aria-label", "demo-1")
    expect(page).to_have_url(re.compile("by=node"))

    page.set_viewport_size(PHONE)
    expect(detail).to_be_hidden()
    page.locator(".finding-row").first.click()
    expect(detail).to_be_visible()
    expect(page.locator(".finding-index")).to_be_hidden()
    assert PHONE["width"] >= page.evaluate("document.documentElement.scrollWidth")
    page.get_by_role("link", name="← All findings").click()
    expect(page.locator(".finding-index")).to_be_visible()


def _parts(name: str, head: HeadProcess) -> tuple[str, ...]:
    """The address of a page, of something that is there."""
    match name:
        case "overview" | "rows" | "strips":
            return ()
        case "node":
            return ("node", "demo-1")
        case "gpu":
            return ("gpu", "demo-1", "0")
        case "user":
            return ("user", "grace")
        case "job":
            job = head.get("/api/v1/usage?by=job&users=grace")["rows"][0]
            return ("job", f"{job['node']}/{job['pid']}@{job['start_time']:.3f}")
        case "session":
            return ("sessions", "goes-on")
        case _:
            return (name,)


def _barriers(page: Page, theme: str) -> dict[str, list[str]]:
    """What keeps people out: everything in the first theme, contrast in the others."""
    options: dict[str, Any] = {"resultTypes": ["violations"], "preload": False, "iframes": False}
    if theme != THEMES[0]:
        options["runOnly"] = ["color-contrast"]
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(AXE_SCRIPT)
    found = page.evaluate("async (options) => (await axe.run(options)).violations", options)
    return {
        f"{one['id']} ({one['help']})": [node["html"][:200] for node in one["nodes"][:5]]
        for one in found
        if one["impact"] in {"serious", "critical"}
    }
