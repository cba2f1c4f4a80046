"""The chart model and its renderers: whatever is drawn, both draw it, and foreign text does no harm."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.image import imread

from gpulse.charts.chart_model import (
    MAX_LANES,
    MAX_LINES,
    Axis,
    Box,
    Boxes,
    BoxRow,
    Chart,
    ChartGap,
    ChartLine,
    ChartPage,
    ChartPanel,
    ChartSpan,
    Clock,
    HeatMap,
    Lines,
    QuartileColumn,
    Quartiles,
    QuartileTable,
    TimeMark,
    arrange_lines,
    end_ticks,
    local_offsets,
    make_axis,
    make_line,
    number_text,
    time_ticks,
    visible_labels,
)
from gpulse.charts.html_page import page, prose, table
from gpulse.charts.matplotlib_renderer import draw_figure, render_figure
from gpulse.charts.style import heat_colors, png, right_margin, short_labels
from tests.unit.frames import NOON

HOSTILE = "</script><script>alert('1')</script><!--\x1b[2J\u202e&\"'$\\frac{1$ \U0001f525"
ANY_FLOAT = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


@pytest.fixture(autouse=True)
def _closes_fonts() -> Iterator[None]:
    """Matplotlib keeps the files of its fonts open for the next picture."""
    yield
    if "matplotlib.font_manager" in sys.modules:
        vars(sys.modules["matplotlib.font_manager"])["_get_font"].cache_clear()


def array(values: list[float | None]) -> Any:
    """Values as a chart has them."""
    return np.array([np.nan if value is None else value for value in values], np.float64)


@st.composite
def charts(draw_from: st.DrawFn) -> Chart:
    """Charts with every kind of content, of any numbers."""
    start = draw_from(st.floats(-1e10, 1e10))
    end = start + draw_from(st.floats(1e-3, 1e9))
    count = draw_from(st.integers(0, 6))
    unit = draw_from(st.sampled_from(["ratio", "percent", "bytes", "bytes/second", "1", "furlongs"]))
    labels = tuple(f"GPU {place}" for place in range(draw_from(st.integers(1, 3))))
    times = np.linspace(start, end, count)
    rows = [array(draw_from(st.lists(ANY_FLOAT, min_size=count, max_size=count))) for _ in labels]
    axis = make_axis(unit, *rows, is_whole=draw_from(st.booleans()), from_zero=draw_from(st.booleans()))
    gap = (end - start) / draw_from(st.integers(1, 10))
    has_lanes = draw_from(st.booleans())
    lines = tuple(make_line(label, times, row, gap, most=4) for label, row in zip(labels, rows, strict=True))
    numbers = [draw_from(st.floats(allow_nan=True)) for _ in range(6)]
    low, q1, median, q3, high = sorted(numbers[:5])
    boxes = tuple(BoxRow(label, (Box(start, end, low, q1, median, q3, high, 3),)) for label in labels)
    quartiles = tuple(Quartiles(*numbers) if place else None for place, _ in enumerate(labels))
    contents = (
        Lines(lines, has_lanes),
        Boxes(boxes, has_lanes),
        HeatMap(labels, start, end, np.array(rows).reshape(len(labels), count), labels),
        QuartileTable(labels, (QuartileColumn("column", axis, quartiles),)),
    )
    gaps = (ChartGap(start, (start + end) / 2, "away"), ChartGap(start, end, rows=(0,), color="away"))
    clock: Clock = draw_from(st.sampled_from(["local", "elapsed"]))
    spans = (
        ChartSpan(start, end, "first"),
        ChartSpan(start, start, "instant", lane=1, color="high", number=7),
    )
    return Chart(
        start,
        end,
        tuple(ChartPanel("any", content, axis, gaps) for content in contents),
        spans=spans,
        spans_title=draw_from(st.sampled_from(["", "graph"])),
        marks=(TimeMark(end, "now"),),
        clock=clock,
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(charts())
def test_any_chart_becomes_a_page(chart: Chart) -> None:
    """Without a number in it that is none."""
    html = page("any", "", [chart])
    body = html[html.index("<body>") : html.index('<script type="application/json"')]
    data = json.loads(re.findall(r'id="charts">(.*?)</script>', html)[0])

    assert not re.findall(r'"[^"<>]*\b(?:nan|inf|infinity)\b[^"<>]*"', body, re.IGNORECASE)
    assert 4 == len(data["charts"][0]["panels"])


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(charts())
def test_any_chart_becomes_a_figure(chart: Chart) -> None:
    """Matplotlib refuses none of them."""
    assert render_figure(draw_figure(ChartPage("any", "", (chart,))), "svg").startswith(b"<?xml")


def hostile_chart() -> Chart:
    """Return a chart in which every text is untrusted."""
    times = np.array([NOON, NOON + 1, NOON + 2])
    lines = tuple(ChartLine(HOSTILE, times, np.array([1.0, 2.0, 3.0]), note=HOSTILE) for _ in range(2))
    many = tuple(ChartLine(HOSTILE, times, np.array([1.0, 2.0, 3.0])) for _ in range(20))
    column = QuartileColumn(HOSTILE, Axis(HOSTILE), (Quartiles(0, 0.1, 0.2, 0.3, 0.4, 0.5),))
    return Chart(
        NOON,
        NOON + 2,
        (
            ChartPanel(HOSTILE, Lines(lines), Axis(HOSTILE), (ChartGap(NOON, NOON + 1, HOSTILE),), HOSTILE),
            ChartPanel(HOSTILE, Lines(lines, has_lanes=True), Axis(HOSTILE)),
            ChartPanel(HOSTILE, Boxes((BoxRow(HOSTILE, (Box(NOON, NOON + 1, 0, 0.1, 0.2, 0.3, 0.4, 5),)),))),
            ChartPanel(HOSTILE, arrange_lines(many, NOON, NOON + 2, [HOSTILE] * 20)),
            ChartPanel(HOSTILE, QuartileTable((HOSTILE,), (column,), HOSTILE)),
        ),
        HOSTILE,
        (ChartSpan(NOON, NOON + 1, HOSTILE, HOSTILE),),
        HOSTILE,
        (TimeMark(NOON, HOSTILE),),
        time_title=HOSTILE,
    )


def test_a_heat_map_is_empty_from_a_break_on() -> None:
    """Even when the break follows within the column of the last value."""
    times = NOON + np.array([0.0, 99.0, 99.1, 200.0, 600.0])
    lines = [ChartLine(str(row), times, np.array([1.0, 1.0, np.nan, 1.0, 1.0])) for row in range(17)]

    content = arrange_lines(lines, NOON, NOON + 600)

    assert isinstance(content, HeatMap)
    known = np.isfinite(content.cells[0])
    assert (100, 0, 400) == (known[:100].sum(), known[100:200].sum(), known[200:].sum())


def test_only_lanes_have_notes() -> None:
    """With room for them; lines that share an axis have none."""
    lines = tuple(ChartLine("GPU", np.array([NOON]), np.array([0.5]), note="0 to 93") for _ in range(2))
    beside, together = (
        Chart(NOON, NOON + 1, (ChartPanel("Util", Lines(lines, has_lanes=has_lanes)),))
        for has_lanes in (True, False)
    )

    assert right_margin(beside) > right_margin(together)
    assert 4 == page("", "", [beside]).count("0 to 93")  # drawn by JavaScript, and on paper
    assert 0 == page("", "", [together]).count("0 to 93")
    assert ["0 to 93", "0 to 93"] == [
        text.get_text() for text in draw_figure(ChartPage("", "", (beside,))).axes[0].texts
    ]


def test_box_plots_without_time_say_what_they_show() -> None:
    """Titles of the columns and the note are on a page and in a file."""
    column = QuartileColumn("Memory by GPU", Axis("%"), (Quartiles(0, 0.1, 0.2, 0.3, 0.4, 0.5),))
    chart = Chart(
        NOON, NOON + 1, (ChartPanel("Devices", QuartileTable(("n1:0",), (column,), "Half of all")),)
    )

    html, figure = (
        page("", "", [chart]),
        render_figure(draw_figure(ChartPage("", "", (chart,))), "svg").decode(),
    )

    for text in ("Memory by GPU", "Half of all"):
        assert text in html
        assert text in figure


def test_foreign_text_does_no_harm_in_a_page() -> None:
    """Neither as text, nor in attributes, nor inside the script with the data."""
    html = page(HOSTILE, HOSTILE, [hostile_chart()])
    opened: list[str] = []
    scripts: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
            if tag == "script":
                scripts.append(tag)
            if tag not in ("meta", "br"):
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert tag == opened.pop()

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            pass

    Checker().feed(html)

    assert [] == opened
    assert 3 == len(scripts)  # the data, uPlot, and what draws
    assert "\x1b" not in html
    assert "\u202e" not in html


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_foreign_text_does_no_harm_in_a_figure(kind: str) -> None:
    """It is no formula, and in an SVG no markup."""
    content = render_figure(draw_figure(ChartPage(HOSTILE, HOSTILE, (hostile_chart(),))), kind)

    assert len(content) > 1000
    assert b"<script" not in content


@pytest.mark.parametrize("width", [5.0, 12.0])
def test_long_titles_end_inside_a_figure(width: float) -> None:
    """With an ellipsis; a title has some lines before."""
    name = "training-run-of-node-17 " * 40
    chart = Chart(0.0, 1.0, (ChartPanel("Lines", Lines(())),), title=name)
    figure = draw_figure(ChartPage(name, name, (chart,)), Figure(figsize=(width, 6.0)))

    assert 3 == len(figure.texts)
    for text in figure.texts:
        assert text.get_text().endswith("…")
        assert text.get_window_extent().x1 <= figure.bbox.x1


def test_a_page_needs_nothing_else() -> None:
    """No address is asked for anything; the policy of the page forbids it as well."""
    html = page("any", "", [hostile_chart()])
    without_notices = re.sub(r"/\*.*?\*/", "", html, flags=re.DOTALL)

    assert re.search(r"src=|@import|url\(", without_notices) is None
    assert re.search(r'href="(?!data:)', without_notices) is None
    assert "default-src 'none'" in html
    assert "Permission is hereby granted" in html  # uPlot's licence goes with it


def test_the_same_picture_is_the_same_file() -> None:
    """So that it can be kept under version control."""
    first, second = (
        render_figure(draw_figure(ChartPage("any", "", (hostile_chart(),))), "svg") for _ in range(2)
    )

    assert first == second


@pytest.mark.parametrize(
    ("count", "kind"),
    [
        (1, "lines"),
        (MAX_LINES, "lines"),
        (MAX_LINES + 1, "lanes"),
        (MAX_LANES, "lanes"),
        (MAX_LANES + 1, "map"),
    ],
)
def test_many_lines_get_lanes_or_become_a_heat_map(count: int, kind: str) -> None:
    """Instead of a legend that is larger than its plot."""
    times = np.arange(100.0)
    lines = [ChartLine(f"GPU {place}", times, times * place) for place in range(count)]

    content = arrange_lines(lines, 0.0, 100.0)

    assert kind == ("map" if isinstance(content, HeatMap) else "lanes" if content.has_lanes else "lines")
    assert count == len(content.labels)


def test_a_heat_map_holds_a_value_until_the_next_and_not_over_a_gap() -> None:
    """A GPU that is sampled slowly is no stripes, and one that is silent is grey."""
    times = np.array([0.0, 10.0, 20.0, 70.0, 80.0])
    line = make_line("GPU 0", times, np.array([1.0, 2.0, 3.0, 4.0, 5.0]), 15.0)
    content = arrange_lines([line] * (MAX_LANES + 1), 0.0, 100.0)

    assert isinstance(content, HeatMap)
    cells = content.cells[0]
    assert [1.0, 2.0, 3.0] == [cells[place] for place in (30, 90, 150)]
    assert np.isnan(cells[300])
    assert 4.0 == cells[430]
    assert np.isnan(cells[-1])


def test_a_line_is_broken_at_gaps_and_unknown_values() -> None:
    """And thinned so that its extremes are still seen."""
    times = np.concatenate((np.arange(1000.0), 5000 + np.arange(1000.0)))
    values = np.sin(times)
    values[500] = np.nan
    line = make_line("any", times, values, 10.0, most=200)

    segments = [line.times[part] for part in line.segments()]
    assert 2 <= len(segments) <= 3
    assert not any(part[0] < 2000 < part[-1] for part in segments)
    assert len(line.times) <= 210
    assert line.high is not None
    assert 0.99 < np.nanmax(line.high) <= 1
    assert [1, 1] == [
        part.stop - part.start
        for part in make_line("any", np.array([0.0, 9.0]), np.array([1.0, 2.0]), 5.0).segments()
    ]


@pytest.mark.parametrize(
    ("unit", "values", "expected"),
    [
        ("ratio", [0.0, 0.034], ("%", 0.0, 10.0)),
        ("ratio", [0.0, 1.0], ("%", 0.0, 100.0)),
        ("bytes/second", [3.1e9], ("GB/s", 0.0, 4.0)),
        ("bytes", [70 * 2.0**30], ("GiB", 0.0, 80.0)),
        ("1", [-3.0, 5.0], ("", -4.0, 6.0)),
        ("furlongs", [], ("furlongs", 0.0, 1.0)),
    ],
)
def test_axes_have_peoples_units_and_round_ends(
    unit: str, values: list[float], expected: tuple[str, float, float]
) -> None:
    """All values lie inside."""
    axis = make_axis(unit, np.array(values))

    assert expected == (axis.unit, axis.low, axis.high)
    assert axis.ticks[0] >= axis.low
    assert axis.ticks[-1] <= axis.high


@given(st.lists(st.floats(allow_nan=True), max_size=20), st.sampled_from(["ratio", "bytes", "1", "watts"]))
def test_any_values_have_an_axis(values: list[float], unit: str) -> None:
    """Few ticks in order, and a range that is one."""
    axis = make_axis(unit, np.array(values, np.float64))

    assert axis.high > axis.low
    assert 2 <= len(axis.ticks) <= 12
    assert sorted(axis.ticks) == list(axis.ticks)
    assert all(number_text(tick) for tick in axis.ticks)


@pytest.mark.parametrize("clock", ["local", "elapsed"])
@pytest.mark.parametrize("length", [0.01, 1.0, 30.0, 300.0, 5000.0, 90000.0, 1e6, 1e9])
def test_moments_on_the_axis_are_few_and_inside(length: float, clock: str) -> None:
    """Never so many that their texts meet."""
    start = NOON + 0.4 if clock == "local" else 0.0
    ticks = time_ticks(start, start + length, clock)

    assert 1 <= len(ticks) <= 9
    assert all(start - 1e-3 <= moment <= start + length + 1e-3 for moment, _ in ticks)
    assert len({text for _, text in ticks}) == len(ticks)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (40.0, 41.0, ["40.0", "40.2", "40.4", "40.6", "40.8", "41.0"]),
        (1000.0, 1002.0, ["16:40.0", "16:40.5", "16:41.0", "16:41.5", "16:42.0"]),
        (7200.0, 7260.0, ["2:00:00", "2:00:10", "2:00:20", "2:00:30", "2:00:40", "2:00:50", "2:01:00"]),
        (0.0, 14400.0, ["0:00", "0:30", "1:00", "1:30", "2:00", "2:30", "3:00", "3:30", "4:00"]),
    ],
)
def test_elapsed_times_differ_however_close(start: float, end: float, expected: list[str]) -> None:
    """With as many digits as their distance needs."""
    assert expected == [text for _, text in time_ticks(start, end, "elapsed")]


def test_labels_without_room_are_left_out_and_round_numbers_stay() -> None:
    """Wide spans keep theirs."""
    spans = [ChartSpan(float(place), place + 1.0, str(place), number=place) for place in range(100)]

    assert spans == visible_labels(spans, 1.0)
    assert list(range(0, 100, 10)) == [span.number for span in visible_labels(spans, 8.0)]
    wide = ChartSpan(200.0, 300.0, "wide", number=3)
    assert wide in visible_labels([*spans, wide], 50.0)


def test_a_heat_map_names_groups_where_there_is_no_room_for_rows() -> None:
    """Nodes instead of their GPUs."""
    labels = tuple(f"n{place // 8}:{place % 8}" for place in range(64))
    heat_map = HeatMap(labels, 0.0, 1.0, np.zeros((64, 2)), tuple(label.split(":")[0] for label in labels))

    assert 64 == len(heat_map.row_ticks(64))
    assert ["n0", "n1"] == [label for _, label in heat_map.row_ticks(20)][:2]
    assert [8, 16, 24, 32, 40, 48, 56] == heat_map.group_edges


def test_a_picture_of_cells_can_be_read() -> None:
    """By a reader that is not ours."""
    colors = heat_colors(np.array([[0.0, 1.0], [np.nan, 0.5]]))
    read = imread(BytesIO(png(colors)), format="png")

    assert (2, 2, 4) == read.shape
    assert [1.0, 1.0, 0.0, 1.0] == read[..., 3].reshape(-1).tolist()
    assert [0x2A, 0x72, 0xC2] == np.rint(read[0, 1, :3] * 255).tolist()


def test_a_chart_must_have_a_length() -> None:
    """The error says which one it has."""
    with pytest.raises(ValueError, match="must be after its start"):
        Chart(1.0, 1.0, ())


@pytest.fixture
def _in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Local time is Berlin's."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


SUMMER_ENDS = 1792890000.0
"""2026-10-25 03:00 in Berlin, when clocks go back to 02:00."""


@pytest.mark.usefixtures("_in_berlin")
def test_ticks_are_local_times_after_clocks_were_changed() -> None:
    """Each has the offset of its own moment."""
    ticks = time_ticks(SUMMER_ENDS - 7200, SUMMER_ENDS + 3 * 3600, "local")

    assert all(text == time.strftime("%H:%M", time.localtime(moment)) for moment, text in ticks)
    assert "04:00" in [text for _, text in ticks]
    assert [(SUMMER_ENDS - 86400, 7200.0), (SUMMER_ENDS, 3600.0)] == local_offsets(
        SUMMER_ENDS - 86400, SUMMER_ENDS + 86400
    )


def test_each_chart_of_a_page_has_its_number_and_one_has_the_tip() -> None:
    """The tip about zooming is under the last chart that can be zoomed; equal charts are still two."""
    line = make_line("a", np.array([NOON, NOON + 1]), array([1.0, 2.0]), 5.0)
    timed = Chart(NOON, NOON + 1, (ChartPanel("Power", Lines((line,))),))
    column = QuartileColumn("Memory", Axis("%"), (Quartiles(0, 0.1, 0.2, 0.3, 0.4, 0.5),))
    boxes = Chart(NOON, NOON + 1, (ChartPanel("Devices", QuartileTable(("n1:0",), (column,))),))

    text = page("", "", [timed, timed, boxes])

    assert ["0", "1"] == re.findall(r'data-chart="(\d)" data-panel="0"', text)
    assert 1 == text.count("Drag to zoom")
    assert text.index("Drag to zoom") < text.index("Devices")


@pytest.mark.parametrize("highest", [0.07, 0.4, 1.0])
def test_the_middle_tick_of_a_distribution_is_in_the_middle(highest: float) -> None:
    """Between the first and the last, also of an axis with an odd number of steps."""
    first, middle, last = (value for value, _, _ in end_ticks(make_axis("ratio", np.array([highest]))))

    assert first + last == 2 * middle


@pytest.mark.parametrize(("unit", "highest", "is_above"), [("watts", 400.0, True), ("ratio", 1.0, False)])
def test_a_line_along_the_upper_end_is_below_the_frame(unit: str, highest: float, is_above: bool) -> None:
    """Except at 100 %, which nothing exceeds."""
    axis = make_axis(unit, np.array([0.0, highest]))

    assert highest == axis.high * axis.factor
    assert is_above == (axis.top > axis.high)


NODES = tuple(f"ip-10-0-12-{node}.eu-west-1.compute:{gpu}" for node in (101, 102) for gpu in (0, 1))


@pytest.mark.parametrize(
    ("labels", "most", "expected"),
    [
        (("GPU 0", "GPU 1"), 16, ["GPU 0", "GPU 1"]),
        (NODES, 16, ["…101.eu-…mpute:0", "…101.eu-…mpute:1", "…102.eu-…mpute:0", "…102.eu-…mpute:1"]),
        (NODES, 9, ["…101…te:0", "…101…te:1", "…102…te:0", "…102…te:1"]),
        (("worker 9 GPU 0", "worker 10 GPU 0"), 9, ["…9 GPU 0", "…10 GPU 0"]),
        (("a" * 20, "b" * 20), 9, ["aaaa…aaaa", "bbbb…bbbb"]),
        (("n" * 30,), 9, ["nnnn…nnnn"]),
    ],
)
def test_shortened_labels_of_rows_still_differ(
    labels: tuple[str, ...], most: int, expected: list[str]
) -> None:
    """The middle goes, and what all begin with."""
    assert expected == short_labels(labels, most)


def test_a_table_has_groups_of_columns_without_those_that_are_empty() -> None:
    """A group is as wide as what is left of it."""
    rows = [("n1", "1", "-", "2", "3"), ("n2", "4", "", "5", "6")]
    found = "".join(table(("", "a", "b", "c", "d"), rows, groups=("", "x", "x", "x", "y")))

    assert [("1", ""), ("2", "x"), ("1", "y")] == re.findall(r'<th colspan="(\d)">(\w*)</th>', found)
    assert ["", "a", "c", "d"] == re.findall(r"<th(?: class=\"name\")?>(\w*)</th>", found)


def test_commands_in_a_sentence_are_set_as_code() -> None:
    """And foreign text stays text."""
    assert "see <code>gpulse -d &lt;b&gt;</code>" == prose("see `gpulse -d <b>`")
