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

from gpulse.errors import MissingExtraError, UsageError, install_command
from gpulse.export.report import picture, plot
from gpulse.export.report.model import Report
from gpulse.export.report.page import page
from gpulse.export.report.reading import read_report
from gpulse.export.report.series import Thinned
from gpulse.export.session.write import write_session
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
) -> Report:
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


@pytest.mark.parametrize("kind", MAGIC)
@pytest.mark.parametrize(("nodes", "each"), [(2, 1), (2, 8), (4, 5)])
def test_pictures_of_lines_lanes_and_maps(kind: str, nodes: int, each: int, tmp_path: Path) -> None:
    """Every kind has what such a file begins with, and something in it."""
    path = tmp_path / f"run.{kind}"

    plot.plot(report(tmp_path / "run.json", nodes, each), path)

    assert path.read_bytes().startswith(MAGIC[kind])
    assert path.stat().st_size > 12_000


@pytest.mark.parametrize(("nodes", "each", "images"), [(1, 4, 0), (1, 5, 0), (2, 8, 0), (1, 17, 3)])
def test_more_than_sixteen_gpus_become_a_heat_map(nodes: int, each: int, images: int, tmp_path: Path) -> None:
    """One for each of utilization, memory and bandwidth; few GPUs are drawn as lines or lanes."""
    figure = picture.over_time(report(tmp_path / "run.json", nodes, each))

    assert images == sum(len(axes.images) for axes in figure.axes if axes.get_title(loc="left"))


def test_lines_break_where_nothing_is_known(tmp_path: Path) -> None:
    """A gap is not drawn over."""
    figure = picture.over_time(report(tmp_path / "run.json", 2, 1))

    lines = [line.get_xdata() for line in figure.axes[0].lines]
    assert 3 == len(lines)
    assert all(max(np.diff(np.asarray(line))) < 1.5 for line in lines)


@pytest.mark.parametrize(("nodes", "each"), [(1, 2), (2, 4), (3, 8)])
def test_shaded_where_the_head_was_away(nodes: int, each: int, tmp_path: Path) -> None:
    """With a strip above every panel, lines, lanes and maps alike, which the subtitle and the page explain."""
    whole = report(tmp_path / "run.json", nodes, each)
    told = {"start_time": START + 10, "end_time": START + 17}
    away = whole._replace(interruptions=(told, {"start_time": START + 50, "end_time": None}))

    for drawn, spans in ((whole, 0), (away, 2)):
        figure = picture.over_time(drawn)
        panels = [axes for axes in figure.axes if axes.get_title(loc="left")]
        for axes in panels:
            strips = [patch for patch in axes.patches if not patch.get_clip_on()]
            assert spans == len(strips)
            if strips:
                box = strips[0].get_path().get_extents(strips[0].get_patch_transform())
                assert (START + 10, START + 17) == (box.x0, box.x1)
    assert "orange where the head was away" in picture.whole(away).texts[1].get_text()
    assert "orange" not in picture.whole(whole).texts[1].get_text()
    assert "<h2>Interruptions</h2>" in page(away)
    assert "(7s)" in page(away)


def test_little_memory_does_not_look_like_none(tmp_path: Path) -> None:
    """Its scale ends near what is used, and every lane says from where to where it goes; utilization's does not."""
    figure = picture.over_time(report(tmp_path / "run.json", 1, 6))

    util, memory = [axes for axes in figure.axes if axes.get_title(loc="left")][:2]
    assert {"each lane 0 to 100%", "17%"} <= {text.get_text() for text in util.texts}
    assert {"each lane 0 to 10%", "0%"} <= {text.get_text() for text in memory.texts}


def test_heat_maps_are_empty_where_nothing_is_known(tmp_path: Path) -> None:
    """As a colour of its own, not as zero."""
    figure = picture.over_time(report(tmp_path / "run.json", 2, 10))

    (image,) = figure.axes[0].images
    cells = np.ma.getmaskarray(np.ma.asarray(image.get_array()))
    assert not cells[:10].any()
    assert cells[10:, 25:35].all()
    assert not cells[10:, :15].any()


def test_no_label_lies_over_another(tmp_path: Path) -> None:
    """Neither of lanes nor of maps nor of boxes, with long names of nodes."""
    for nodes, each in ((2, 8), (8, 8), (30, 2), (100, 8)):
        found = report(tmp_path / f"{nodes}.json", nodes, each, 12, "rack-of-many-words-{}")
        figure = picture.whole(found)
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


def test_many_weeks_have_few_ticks(tmp_path: Path) -> None:
    """As many as there is room for."""
    path = tmp_path / "x.json"
    frames = [{"time": START + day * 86_400, "gpu_id": ["a"], "gpu_util": [day]} for day in range(100)]
    path.write_text(json.dumps({"frames": frames}))

    figure = picture.over_time(read_report(path))

    assert 5 <= len(figure.axes[0].get_xticks()) <= 10


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


@pytest.mark.parametrize("each", [2, 8, 20])
def test_the_page_is_self_contained_and_harmless(each: int, tmp_path: Path) -> None:
    """Foreign names stay text, and nothing is fetched from anywhere."""
    found = report(tmp_path / "run.json", 1, each, name=EVIL, node_name=f"{EVIL}n1"[:30])
    finding = {"severity": EVIL, "node": EVIL, "label": EVIL, "summary": EVIL, "first_time": EVIL}
    found = found._replace(name=EVIL, labels={EVIL: EVIL}, findings=(finding,))

    text = page(found)

    tags = _Tags()
    tags.feed(text)
    assert "script" not in tags.tags
    assert {"svg", "table", "title"} <= tags.tags
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in tags.links)
    assert not re.search(r"@import|url\((?!#)", text)


def test_text_is_not_taken_for_mathematics(tmp_path: Path) -> None:
    """Dollars in names are dollars."""
    found = report(tmp_path / "run.json", 1, 2, name="a$", node_name="n$\\frac$")

    plot.plot(found._replace(name="$\\undefined$"), tmp_path / "run.png")


def test_nothing_known_is_a_picture_too(tmp_path: Path) -> None:
    """Frames in which every value is null."""
    path = tmp_path / "x.json"
    path.write_text(
        '{"frames": [{"gpu_id": ["a"], "gpu_util": [null]}, {"gpu_id": ["a"], "gpu_util": [null]}]}'
    )

    for kind in MAGIC:
        plot.plot(read_report(path), tmp_path / f"x.{kind}")


def test_an_ending_that_cannot_be_drawn(tmp_path: Path) -> None:
    """Is refused before anything is read, with a name that can be."""
    with pytest.raises(UsageError, match=r"\.docx") as caught:
        plot.check(tmp_path / "run.docx")
    assert str(caught.value.hint).startswith("--plot run.pdf")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said what to install, for a page as well."""
    monkeypatch.setattr(plot, "find_spec", lambda _: None)

    with pytest.raises(MissingExtraError) as refused:
        plot.check(tmp_path / "run.html")

    assert install_command("plot") == refused.value.hint


def test_thinning_keeps_peaks_and_means() -> None:
    """One peak in a week is still to be seen, and the mean of everything is the same."""
    thinned = Thinned(1.0)
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
    assert len(thinned.curve("gpu_util", 0, most=100).times) <= 100


def test_reading_alone_does_not_load_matplotlib() -> None:
    """Half a second that figures in a terminal do not need."""
    code = (
        "import sys, gpulse.export.report.reading, gpulse.terminal.report; print('matplotlib' in sys.modules)"
    )

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

    said = "No GPU delivered a measurement in this session."
    texts = [text.get_text() for text in picture.whole(silent).texts]
    assert [said] == [text for text in texts if text == said]
    assert not any("Boxes" in text or "grey" in text for text in texts)
    assert said in page(silent)
