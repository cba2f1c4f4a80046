"""Pages with charts in a browser: zoom, one cursor over all panels, print, dark screens, phones, and no network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpulse.charts.chart_model import (
    Box,
    Boxes,
    BoxRow,
    Chart,
    ChartGap,
    ChartLine,
    ChartPanel,
    ChartSpan,
    Lines,
    QuartileColumn,
    Quartiles,
    QuartileTable,
    arrange_lines,
    make_axis,
)
from gpulse.charts.html_page import page as chart_page
from gpulse.export import diagnosis_charts
from tests.integration.browser import browsing
from tests.unit.diagnosed import diagnosed, digested
from tests.unit.frames import NOON

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser without a screen."""
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every kind of panel that has a time axis."""
    times = NOON + np.arange(101.0)
    lines = [ChartLine(f"GPU {place} {HOSTILE}", times, np.full(101, 0.04 * place)) for place in range(20)]
    boxes = tuple(
        Box(NOON + 10 * place, NOON + 10 * place + 10, 0.1, 0.2, 0.3, 0.4, 0.5, 7) for place in range(10)
    )
    axis = make_axis("ratio", np.array([1.0]))
    panels = (
        ChartPanel("Lines", Lines(tuple(lines[:3])), axis, (ChartGap(NOON + 80, NOON + 90, "asleep"),)),
        ChartPanel("Lanes", Lines(tuple(lines[:8]), has_lanes=True), axis),
        ChartPanel("Boxes", Boxes((BoxRow("GPU 0", boxes),)), axis),
        ChartPanel("Map", arrange_lines(lines, NOON, NOON + 100), axis),
    )
    spans = (ChartSpan(NOON + 20, NOON + 60, "slow", HOSTILE, "high"),)
    path = tmp_path_factory.mktemp("pages") / "charts.html"
    path.write_text(chart_page(HOSTILE, "", [Chart(NOON, NOON + 100, panels, spans=spans)]), encoding="utf-8")
    return path


@contextmanager
def opened(browser: Browser, path: Path, **options: Any) -> Iterator[Page]:
    """A page from the disk, in a browser that must find nothing wrong with it and ask nobody for anything."""
    context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.on(
        "request",
        lambda request: wrong.append(request.url) if request.url[:5] not in ("file:", "data:") else None,
    )
    try:
        page.goto(path.as_uri())
        yield page
        assert [] == wrong
    finally:
        context.close()


def drag(page: Page, panel: int, start: float, end: float) -> None:
    """Drag from one place of a plot to another, as shares of its width."""
    box = page.locator(".u-over").nth(panel).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + start * box["width"], box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()


def hover(page: Page, panel: int, moment: float, down: float) -> None:
    """Point at a moment of a plot, as a share of its width, and so many pixels from its top."""
    box = page.locator(".u-over").nth(panel).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + moment * box["width"], box["y"] + down)


def readouts(page: Page) -> list[str]:
    """What the cursor says in each plot."""
    return page.locator(".readout").all_inner_texts()


def test_dragging_zooms_all_panels_and_a_double_click_resets(browser: Browser, all_kinds: Path) -> None:
    """From the panel under the pointer."""
    with opened(browser, all_kinds) as page:
        drag(page, 1, 0.25, 0.5)
        zoomed = page.locator("html").get_attribute("data-zoom") or ""
        start, end = (float(moment) - NOON for moment in zoomed.split(" "))
        page.locator(".u-over").nth(3).dblclick(position={"x": 30, "y": 30})

        assert (25, 50) == pytest.approx((start, end), abs=1)
        assert "" == page.locator("html").get_attribute("data-zoom")


def test_one_cursor_tells_time_and_values_in_all_panels(browser: Browser, all_kinds: Path) -> None:
    """The value of each line, of the lane or row under the pointer, of a box, and the finding at that moment."""
    with opened(browser, all_kinds, timezone_id="UTC") as page:
        hover(page, 1, 0.4, 20)
        spans, lines, lanes, boxes, heat_map = readouts(page)

        assert HOSTILE == spans
        assert 4 == len(lines.split("\n"))
        assert f"GPU 2 {HOSTILE}  8 %" == lines.split("\n")[-1]
        assert "GPU 7" in lanes
        assert "GPU 0  30 % (interquartile range 20 to 40, range 10 to 50, 7 values)" == boxes
        assert "20 of 20 with data, 0 to 76 %" == heat_map

        hover(page, 4, 0.3, 2)
        assert "0 %" in readouts(page)[4].split("\n")[-1]
        hover(page, 1, 0.85, 20)
        assert "asleep" in readouts(page)[1]


@pytest.fixture(scope="module")
def with_gap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with a line that has a run of values and, after a gap, a single one."""
    times = NOON + np.array([*np.arange(11.0), 20.0, 50.0])
    values = np.array([*np.full(11, 0.6), np.nan, 0.6])
    other = ChartLine("GPU 1", NOON + np.arange(0.5, 100.0), np.full(100, 0.1))
    panel = ChartPanel(
        "Lines",
        Lines((ChartLine("GPU 0", times, values), other)),
        make_axis("ratio", np.array([1.0])),
        (ChartGap(NOON + 10.2, NOON + 49.8, "asleep", (0,)),),
    )
    path = tmp_path_factory.mktemp("gap") / "gap.html"
    path.write_text(chart_page("A gap", "", [Chart(NOON, NOON + 100, (panel,))]), encoding="utf-8")
    return path


def test_a_single_value_after_a_gap_is_drawn(browser: Browser, with_gap: Path) -> None:
    """As a point, because no line reaches it."""
    pixels = """() => {
        const canvas = document.querySelector("canvas"), plot = document.querySelector(".u-over");
        const y = Math.round(plot.offsetTop + 0.4 * plot.clientHeight);
        const { data } = canvas.getContext("2d").getImageData(0, y, canvas.width, 1);
        const at = (share) => 4 * Math.round(plot.offsetLeft + share * plot.clientWidth);
        return [0.3, 0.5].map((share) => [...data.slice(at(share), at(share) + 4)]);
    }"""
    with opened(browser, with_gap, color_scheme="light") as page:
        gap, point = page.evaluate(pixels)

    assert [0, 0, 0, 0] == gap
    assert [0, 0x72, 0xB2, 255] == point


def test_the_cursor_has_no_value_in_a_gap(browser: Browser, with_gap: Path) -> None:
    """Not even of the moment beside it; a line without the gap has its value."""
    with opened(browser, with_gap) as page:
        hover(page, 0, 0.104, 20)

        assert ["asleep", "GPU 0  \N{EN DASH}", "GPU 1  10 %"] == readouts(page)[0].split("\n")[1:]


def test_elapsed_times_are_as_exact_as_the_values_are_dense(browser: Browser, tmp_path: Path) -> None:
    """Tenths for ten values a second; seconds have their unit, for nothing else says that they are none of a minute."""
    line = ChartLine("GPU 0", np.arange(0.0, 100.0, 0.1), np.zeros(1000))
    panel = ChartPanel("Lines", Lines((line,)), make_axis("ratio", np.array([1.0])))
    path = tmp_path / "elapsed.html"
    found = []
    for end in (100.0, 200.0):
        path.write_text(chart_page("", "", [Chart(0.0, end, (panel,), clock="elapsed")]), encoding="utf-8")
        with opened(browser, path) as page:
            hover(page, 0, 0.5, 20)
            found.append(readouts(page)[0].split("\n")[0])

    assert re.fullmatch(r"(49|50)\.\d s", found[0])
    assert re.fullmatch(r"1:(39|40)\.\d", found[1])


def test_on_paper_the_charts_are_drawings(browser: Browser, all_kinds: Path) -> None:
    """Every panel is there, in light colors, although the screen is dark and was zoomed."""
    with opened(browser, all_kinds, color_scheme="dark") as page:
        drag(page, 1, 0.25, 0.5)
        page.emulate_media(media="print")

        assert 5 == page.locator(".static svg:visible").count()
        assert 0 == page.locator(".plot:visible").count()
        assert "rgb(255, 255, 255)" == page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert page.pdf().startswith(b"%PDF-")


def test_without_javascript_the_charts_are_drawings(browser: Browser, all_kinds: Path) -> None:
    """And nothing tells how to zoom."""
    with opened(browser, all_kinds, java_script_enabled=False) as page:
        assert 5 == page.locator(".static svg:visible").count()
        assert 0 == page.get_by_text("Drag to zoom").and_(page.locator(":visible")).count()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_screen(browser: Browser, all_kinds: Path, scheme: Any) -> None:
    """Page and lines change color when the screen does."""
    with opened(browser, all_kinds, color_scheme=scheme) as page:
        other: Any = "dark" if scheme == "light" else "light"
        colors = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.emulate_media(color_scheme=other)

        assert colors != page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert 5 == page.locator(".uplot").count()


@pytest.mark.parametrize("recording", ["disk_small_random", "cpu_oversubscribed", "checkpoint_stall"])
def test_why_fits_on_two_screens_and_on_a_phone(browser: Browser, recording: str, tmp_path: Path) -> None:
    """The page of one GPU is at most 1800 pixels high, and nothing is wider than a phone, not even its tables."""
    path = tmp_path / "why.html"
    diagnosis_charts.write_diagnosis_charts(digested(recording), diagnosed(recording), path)
    with opened(browser, path) as page:
        assert page.evaluate("document.documentElement.scrollHeight") <= 1800
    with opened(browser, path, viewport={"width": 390, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        tables = page.locator(".wide")
        assert tables.count()
        assert tables.evaluate_all(
            "tables => tables.every((table) => table.scrollWidth <= table.clientWidth)"
        )


def test_long_names_are_wrapped(browser: Browser, tmp_path: Path) -> None:
    """A page stays as wide as the screen."""
    line = ChartLine("n" * 300, np.arange(2.0), np.zeros(2))
    path = tmp_path / "long.html"
    chart = Chart(0.0, 1.0, (ChartPanel("p" * 300, Lines((line,))),), title="c" * 300)
    path.write_text(chart_page("t" * 300, "", [chart]), encoding="utf-8")
    with opened(browser, path) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 1440


@pytest.mark.parametrize("width", [390, 1440])
def test_box_plots_fit_on_a_phone_with_legible_text(browser: Browser, width: int, tmp_path: Path) -> None:
    """One drawing is visible, nothing of it is beyond the right edge, and its text is as large as on paper."""
    boxes = QuartileTable(
        ("gpu-01 GPU 0", "gpu-01 GPU 1"),
        tuple(
            QuartileColumn(title, make_axis("percent", is_whole=True), (Quartiles(1, 2, 3, 4, 5, 99), None))
            for title in ("Utilization by GPU", "Memory by GPU", "PCIe by GPU")
        ),
        "Boxes span the interquartile range of all frames, and a tick marks the maximum.",
    )
    path = tmp_path / "boxes.html"
    chart = Chart(0.0, 1.0, (ChartPanel("Distribution", boxes),))
    path.write_text(chart_page("t", "", [chart]), encoding="utf-8")
    with opened(browser, path, viewport={"width": width, "height": 800}) as page:
        texts = page.locator("figure svg:visible text")
        edges = texts.evaluate_all("all => all.map((one) => one.getBoundingClientRect().right)")
        heights = texts.evaluate_all("all => all.map((one) => one.getBoundingClientRect().height)")

        assert 1 == page.locator("figure svg:visible").count()
        assert 3 == texts.filter(has_text=" by GPU").count()
        assert max(edges) <= width
        assert min(heights) >= 12
