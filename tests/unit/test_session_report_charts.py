from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpulse.charts import chart_files
from gpulse.charts.chart_model import HeatMap, Lines, PanelContent, QuartileTable
from gpulse.charts.matplotlib_renderer import draw_figure
from gpulse.errors import MissingExtraError, UsageError, install_command
from gpulse.export.session_file.file_writer import write_session
from gpulse.export.session_report import session_charts
from gpulse.export.session_report.file_reader import read_report
from gpulse.export.session_report.session_figures import DownsampledSeries, SessionReport
from tests.unit.session_store import GIB, START, MemoryStore, gpu, session

if TYPE_CHECKING:
    from numpy.typing import NDArray

EVIL = '<script>alert("1")</script>&$x^2$'
MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-", "svg": b"<?xml", "html": b"<!DOCTYPE html>"}


@pytest.fixture(autouse=True)
def _closes_fonts() -> Iterator[None]:
    """Matplotlib keeps the files of its fonts open for the next picture."""
    yield
    if "matplotlib.font_manager" in sys.modules:
        vars(sys.modules["matplotlib.font_manager"])["_get_font"].cache_clear()


def report(
    path: Path, nodes: int, each: int, seconds: int = 60, node_name: str = "n{}", **changes: Any
) -> SessionReport:
    """The report of so many nodes and GPUs; the last node is away for a third of the time."""
    gpus = [
        gpu(node, index, node_name=node_name.format(node), **changes)
        for node in range(1, nodes + 1)
        for index in range(each)
    ]
    store = MemoryStore(gpus)
    for place, one in enumerate(gpus):
        times: NDArray[np.float64] = START + np.arange(float(seconds)) + 0.3
        if one.node == nodes:
            times = times[(times < START + seconds / 3) | (times > START + 2 * seconds / 3)]
        store.add(
            one,
            times,
            gpu_utilization_ratio=place / len(gpus),
            memory_used_bytes=place * GIB,
            memory_total_bytes=1000 * GIB,
            pcie_rx_bytes_per_second=1e9,
            pcie_tx_bytes_per_second=1e9,
        )
    with path.open("wb") as file:
        write_session(store, session(end=START + seconds, bandwidth=True), file)
    return read_report(path)


def test_memory_has_the_same_scale_as_in_other_reports(tmp_path: Path) -> None:
    """From 0 to 100%, although at most 0.7% are used."""
    found = report(tmp_path / "run.json", 2, 4)
    (panel,) = (one for one in session_charts.build_time_chart(found).panels if one.title == "Memory")
    (box_panel,) = session_charts.build_box_plots(found).panels
    assert isinstance(box_panel.content, QuartileTable)
    (column,) = (one for one in box_panel.content.columns if one.title == "Memory by GPU")

    assert ["0 to 100 %"] * 2 == [panel.axis.range_text, column.axis.range_text]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "nodes", "each"), [*((kind, 2, 1) for kind in MAGIC), ("png", 2, 8), ("svg", 4, 5)]
)
def test_pictures_of_lines_lanes_and_maps(kind: str, nodes: int, each: int, tmp_path: Path) -> None:
    """Every kind has what such a file begins with, and something in it."""
    path = tmp_path / f"run.{kind}"

    session_charts.write_charts(report(tmp_path / "run.json", nodes, each), path)

    assert path.read_bytes().startswith(MAGIC[kind])
    assert path.stat().st_size > 12_000


def contents(found: SessionReport) -> list[PanelContent]:
    """What the panels over time have in them."""
    return [panel.content for panel in session_charts.build_time_chart(found).panels]


@pytest.mark.parametrize(
    ("nodes", "each", "kind", "has_lanes"),
    [(1, 4, Lines, False), (1, 5, Lines, True), (2, 8, Lines, True), (1, 17, HeatMap, None)],
)
def test_more_than_sixteen_gpus_become_a_heat_map(
    nodes: int, each: int, kind: type[PanelContent], has_lanes: bool | None, tmp_path: Path
) -> None:
    """One for each of utilization, memory and bandwidth; few GPUs are drawn as lines or lanes."""
    found = contents(report(tmp_path / "run.json", nodes, each))

    assert 3 == len(found)
    assert all(isinstance(content, kind) for content in found)
    assert {has_lanes} == {getattr(content, "has_lanes", None) for content in found}


def test_lines_break_where_nothing_is_known(tmp_path: Path) -> None:
    """A gap is not drawn over."""
    util = contents(report(tmp_path / "run.json", 2, 1))[0]

    assert isinstance(util, Lines)
    parts = [line.times[segment] for line in util.lines for segment in line.segments()]
    assert 3 == len(parts)
    assert all(np.diff(part).max() < 1.5 for part in parts)


def test_gaps_of_all_gpus_and_of_some(tmp_path: Path) -> None:
    """Each panel knows which of its lines a gap is about; of all of them where it names none."""
    away = report(tmp_path / "run.json", 2, 2)
    only = away._replace(gaps=tuple(gap._replace(gpus=(0, 1, 2, 3)) for gap in away.gaps))

    assert {(2, 3)} == {
        gap.rows for panel in session_charts.build_time_chart(away).panels for gap in panel.gaps
    }
    assert {()} == {gap.rows for panel in session_charts.build_time_chart(only).panels for gap in panel.gaps}


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "each"), [(1, 2), (2, 4), (3, 8)])
def test_marked_where_the_head_was_down(nodes: int, each: int, tmp_path: Path) -> None:
    """Above lines, lanes and maps alike, and told by the page."""
    whole = report(tmp_path / "run.json", nodes, each)
    first = {"start_time": START + 10, "end_time": START + 17}
    down = whole._replace(interruptions=(first, {"start_time": START + 50, "end_time": None}))

    spans = session_charts.build_time_chart(down).spans

    assert () == session_charts.build_time_chart(whole).spans
    assert [(START + 10, START + 17, ""), (START + 50, START + 60, "head down")] == [
        (span.start, span.end, span.label) for span in spans
    ]
    assert "<h2>Interruptions</h2>" in session_charts.build_page(down)
    assert "(7s)" in session_charts.build_page(down)


def test_findings_lie_where_they_held(tmp_path: Path) -> None:
    """Above the panels, under the outages, each kind in a lane; those without times are only listed."""
    finding = {"id": "slow_disk", "severity": "high", "node": "n1", "summary": "The disk is slow"}
    timed = finding | {"first_time": START - 5, "last_time": START + 20}
    found = report(tmp_path / "run.json", 1, 2)._replace(
        findings=(timed, finding | {"id": "untimed"}),
        interruptions=({"start_time": START + 10, "end_time": START + 17},),
    )

    chart = session_charts.build_time_chart(found)

    assert [(0, START + 10, START + 17, "away"), (1, START, START + 20, "high")] == [
        (span.lane, span.start, span.end, span.color) for span in chart.spans
    ]
    assert "slow_disk, n1" == chart.spans[1].label
    assert 2 == session_charts.build_page(found).count('class="badge"')


def test_little_memory_does_not_look_like_none(tmp_path: Path) -> None:
    """Its scale is that of utilization, and every lane says from where to where it goes."""
    util, memory = session_charts.build_time_chart(report(tmp_path / "run.json", 1, 6)).panels[:2]

    assert isinstance(util.content, Lines)
    assert isinstance(memory.content, Lines)
    assert ("0 to 100 %", "17") == (util.axis.range_text, util.content.lines[1].note)
    assert ("0 to 100 %", "0.1") == (memory.axis.range_text, memory.content.lines[1].note)


def test_heat_maps_are_empty_where_nothing_is_known(tmp_path: Path) -> None:
    """As a colour of its own, not as zero."""
    util = contents(report(tmp_path / "run.json", 2, 10))[0]

    assert isinstance(util, HeatMap)
    unknown = np.isnan(util.cells)
    assert not unknown[:10, 5:-5].any()
    assert unknown[10:, 210:390].all()
    assert not unknown[10:, 5:190].any()


@pytest.mark.slow
def test_no_label_lies_over_another(tmp_path: Path) -> None:
    """Neither of lanes nor of maps nor of boxes, with long names of nodes."""
    for nodes, each in ((2, 8), (8, 8), (30, 2), (100, 8)):
        found = report(tmp_path / f"{nodes}.json", nodes, each, 12, "rack-of-many-words-{}")
        figure = draw_figure(session_charts.build_picture(found))
        figure.draw_without_rendering()
        for axes in figure.axes:
            boxes = [
                label.get_window_extent()
                for label in axes.get_yticklabels()
                if label.get_text() and axes.get_title(loc="left")
            ]
            boxes.sort(key=lambda box: box.y0)
            for lower, upper in itertools.pairwise(boxes):
                assert lower.y0 + 0.6 * lower.height <= upper.y0
            assert all(box.x0 >= 0 for box in boxes)


@pytest.mark.parametrize(
    ("nodes", "each", "rows", "title"), [(8, 8, 64, "GPU"), (33, 2, 33, "node"), (65, 1, 64, "node")]
)
def test_boxes_of_many_gpus_are_by_node(nodes: int, each: int, rows: int, title: str, tmp_path: Path) -> None:
    """And of many nodes those that did least."""
    (panel,) = session_charts.build_box_plots(report(tmp_path / "run.json", nodes, each, 12)).panels

    assert isinstance(panel.content, QuartileTable)
    assert rows == len(panel.content.labels)
    assert f"Utilization by {title}" == panel.content.columns[0].title


def test_many_weeks_have_few_ticks(tmp_path: Path) -> None:
    """As many as there is room for."""
    path = tmp_path / "x.json"
    frames = [{"time": START + day * 86_400, "gpu_id": ["a"], "gpu_util": [day]} for day in range(100)]
    path.write_text(json.dumps({"frames": frames}))

    figure = draw_figure(session_charts.build_picture(read_report(path)))

    assert 5 <= len(figure.axes[0].get_xticks()) <= 10


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


@pytest.mark.slow
@pytest.mark.parametrize("each", [2, 8, 20])
def test_the_page_is_self_contained_and_harmless(each: int, tmp_path: Path) -> None:
    """Foreign names stay text, and nothing is fetched from anywhere."""
    found = report(tmp_path / "run.json", 1, each, name=EVIL, node_name=f"{EVIL}n1"[:30])
    finding = {"severity": EVIL, "node": EVIL, "label": EVIL, "summary": EVIL, "first_time": EVIL}
    found = found._replace(name=EVIL, labels={EVIL: EVIL}, findings=(finding,))

    text = session_charts.build_page(found)

    tags = _Tags()
    tags.feed(text)
    assert "alert" not in re.sub(r"&lt;script&gt;alert|u003cscript>alert", "", text)
    assert {"svg", "table", "title"} <= tags.tags
    assert all(link.startswith("data:image/png;base64,") for link in tags.links)
    assert not re.search(r"@import|url\((?!#)", text)


def test_text_is_not_taken_for_mathematics(tmp_path: Path) -> None:
    """Dollars in names are dollars."""
    found = report(tmp_path / "run.json", 1, 2, name="a$", node_name="n$\\frac$")

    session_charts.write_charts(found._replace(name="$\\undefined$"), tmp_path / "run.png")


def test_nothing_known_is_a_picture_too(tmp_path: Path) -> None:
    """Frames in which every value is null."""
    path = tmp_path / "x.json"
    path.write_text(
        '{"frames": [{"gpu_id": ["a"], "gpu_util": [null]}, {"gpu_id": ["a"], "gpu_util": [null]}]}'
    )

    for kind in MAGIC:
        session_charts.write_charts(read_report(path), tmp_path / f"x.{kind}")


def test_an_ending_that_cannot_be_drawn(tmp_path: Path) -> None:
    """Is refused before anything is read, with a name that can be."""
    with pytest.raises(UsageError, match=r"\.docx") as caught:
        session_charts.check_output_path(tmp_path / "run.docx")
    assert str(caught.value.hint).startswith("use --plot run.png")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said what to install; a page needs nothing else."""
    monkeypatch.setattr(chart_files, "find_spec", lambda _: None)

    with pytest.raises(MissingExtraError) as refused:
        session_charts.check_output_path(tmp_path / "run.pdf")

    assert install_command("plot") == refused.value.hint
    session_charts.check_output_path(tmp_path / "run.html")


def test_thinning_keeps_peaks_and_means() -> None:
    """One peak in a week is still to be seen, and the mean of everything is the same."""
    thinned = DownsampledSeries(1.0)
    for begin in range(0, 600_000, 1000):
        values = np.full((1000, 1), 10.0)
        if begin == 300_000:
            values[7] = 99.0
        thinned.add(START + begin + np.arange(1000.0), {"gpu_util": values})

    curve = thinned.curve("gpu_util", 0)

    assert len(curve.times) <= 2048
    assert (10.0, 99.0) == (curve.low.min(), curve.high.max())
    assert pytest.approx(START + 300_007, abs=thinned.width) == curve.times[curve.high.argmax()]
    assert pytest.approx(10.0, abs=0.01) == curve.mean.mean()
    assert len(thinned.curve("gpu_util", 0, max_points=100).times) <= 100


def test_reading_alone_does_not_load_matplotlib() -> None:
    """Half a second that figures in a terminal do not need."""
    code = "import sys, gpulse.export.session_report.file_reader, gpulse.export.session_report.session_charts, gpulse.cli.report; print('matplotlib' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)

    assert b"False\n" == done.stdout


@pytest.mark.parametrize("gpus", [[], ["n1:0:NVIDIA H200"]])
def test_a_session_without_measurements_says_so(gpus: list[str], tmp_path: Path) -> None:
    """Instead of an empty picture with a legend to nothing."""
    path = tmp_path / "run.json"
    frames = [
        {"time": f"2026-11-15T10:00:0{number}Z", "gpu_id": gpus, "gpu_util": [None] * len(gpus)}
        for number in range(3)
    ]
    path.write_text(json.dumps({"session_name": "run", "frames": frames}))
    silent = read_report(path)

    said = "This session has no measurements of any GPU."
    assert said in session_charts.build_picture(silent).note
    assert () == session_charts.build_picture(silent).charts
    assert said in session_charts.build_page(silent)
