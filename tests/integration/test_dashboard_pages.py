"""Every page of the dashboard in a browser: history, sessions and their files, who used what, findings, themes, access."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser, Page, Response, ViewportSize, expect

from gpulse.model.finding import SEVERITIES
from tests.integration.browser import Tab, browsing, tab
from tests.integration.cluster import HeadProcess, cluster_in, until

PAGES = ("map", "sessions", "session", "who", "user", "job", "overview", "node", "gpu", "findings")
WITH_FINDINGS = ("overview", "node", "gpu", "findings")
"""Pages that show what is wrong; the others do not wait until something is."""
THEMES = ("yellow", "blue", "auto")
DESK: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 360, "height": 740}
EAGER = {"gpulse.cluster.agent.taker:_JUDGE_SECONDS": 1.0}
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
    form.get_by_label("Begin").fill("5s")
    form.get_by_label("Labels").fill("team=vision, run=3")
    form.get_by_role("button", name="Start").click()
    row = page.get_by_role("row").filter(has_text="from-the-page")
    expect(row).to_contain_text("active")
    expect(row).to_contain_text("run=3")
    row.get_by_role("button", name="Stop").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Keep going").click()
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
    expect(page.locator(".chart[data-state=ready]").first).to_be_visible()


def test_a_name_that_is_taken(browser: Browser, head: HeadProcess) -> None:
    """What the head refuses is said with its hint, and what was typed is still there."""
    with tab(browser, head.http_port) as opened:
        page = opened.go("sessions", query="?name=goes-on")
        form = page.get_by_role("form", name="Start a session")
        form.get_by_role("button", name="Start").click()
        expect(form.get_by_role("alert")).to_contain_text("active already")
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


def test_theme_and_filter_last(window: Tab) -> None:
    """What a reader chose is there again after a reload."""
    page = window.go()
    page.get_by_label("Theme").select_option("blue")
    page.get_by_role("button", name=re.compile("^Free")).first.click()
    shown = page.url
    assert "free" in shown
    page.goto("about:blank")
    page.goto(window.address)
    expect(page.locator("html")).to_have_attribute("data-theme", "blue")
    expect(page.get_by_role("button", name=re.compile("^Free")).first).to_have_attribute(
        "aria-pressed", "true"
    )


def test_from_another_machine(browser: Browser, head: HeadProcess) -> None:
    """It wants the token first: a wrong one is refused, the right one leads to the page that the link was about."""
    token = (head.data_dir.parent / "token").read_text(encoding="utf-8").strip()
    elsewhere = {"X-Forwarded-For": "192.0.2.7"}
    with tab(browser, head.http_port, extra_http_headers=elsewhere) as opened:
        page = opened.go("gpu", "demo-1", "0")
        page.get_by_label("Token").fill("not the token")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_text("That is not the token of this head")).to_be_visible()
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
    visitor.go(*_parts(name, head))
    expect(page.locator(f'main [data-page="{name}"]')).to_be_attached()
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


def test_findings(window: Tab, findings: list[dict[str, Any]]) -> None:
    """The worst first, with its evidence, advice and meaning; a filter lasts over a reload."""
    page = window.go("findings")
    first = page.locator("article.finding").first
    expect(first).to_be_visible()
    told = [words.split()[-1] for words in page.locator(".severity").all_inner_texts()]
    assert sorted(told, key=SEVERITIES[::-1].index) == told
    expect(first.get_by_role("table").first).to_contain_text("Counts when")
    expect(first).to_contain_text("What to do")
    expect(first.get_by_role("link", name="demo-1 · GPU")).to_have_attribute(
        "href", re.compile("#/gpu/demo-1/")
    )
    first.get_by_role("link", name="What it means").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Recognised by")
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()
    page.get_by_label("Search").fill("nothing is called so")
    expect(page.locator("main")).to_contain_text("No finding fits")
    page.get_by_role("button", name="Show all").click()
    page.get_by_label("About").select_option(findings[0]["family"])
    page.reload()
    expect(page.get_by_label("About")).to_have_value(findings[0]["family"])
    first.get_by_role("link", name="What it means").click()
    dialog.get_by_role("button", name="Close").click()
    expect(page.get_by_label("About")).to_have_value(findings[0]["family"])


def _parts(name: str, head: HeadProcess) -> tuple[str, ...]:
    """The address of a page, of something that is there."""
    match name:
        case "overview":
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
    found = Axe().run(page, options=options).response["violations"]
    return {
        f"{one['id']} ({one['help']})": [node["html"][:200] for node in one["nodes"][:5]]
        for one in found
        if one["impact"] in {"serious", "critical"}
    }
