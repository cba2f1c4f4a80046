from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from gpulse.errors import MissingExtraError, RecordingError, UsageError, install_command
from gpulse.integrations.dask import visualize
from gpulse.integrations.dask.csv_files import write_files
from tests.unit.dask_records import Plan, as_bytes, export, one_file

EVIL = '<script>alert("1")</script>&$x^2$'
MAGIC = {
    "png": b"\x89PNG\r\n\x1a\n",
    "pdf": b"%PDF-",
    "svg": b"<?xml",
    "html": b"<!DOCTYPE html>",
    "jpg": b"\xff\xd8",
}
SMALL: dict[str, Any] = {"width": 6, "height": 4}
METRICS = ["mem-util", "compute-util"]


@pytest.fixture(autouse=True)
def _closes_fonts() -> Iterator[None]:
    """Matplotlib keeps the files of its fonts open for the next picture."""
    yield
    vars(sys.modules["matplotlib.font_manager"])["_get_font"].cache_clear()


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """The file of a worker with two jobs."""
    return one_file(tmp_path / "run", Plan(lines=60))


class Page(HTMLParser):
    """Collects tags, and text as a browser shows it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag and what it refers to."""
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        """Note a text."""
        self.texts.append(data)


@pytest.mark.parametrize("kind", MAGIC)
def test_the_ending_says_which_kind_of_file(kind: str, worker: Path, tmp_path: Path) -> None:
    """Whatever matplotlib knows, and pages."""
    path = tmp_path / f"run.{kind.upper()}"

    figure = visualize.lines(worker, 1, METRICS, save=path, **SMALL)

    assert path.read_bytes().startswith(MAGIC[kind])
    assert (6, 4) == tuple(figure.get_size_inches())
    assert [] == plt.get_fignums()


@pytest.mark.parametrize(("workers", "gpus"), [(1, 2), (1, 6), (12, 2)])
def test_boxes_and_clusters_of_every_size(workers: int, gpus: int, tmp_path: Path) -> None:
    """A few lines, lanes, and rows of colours."""
    folder = export(tmp_path, Plan(lines=30, gpus=gpus, gap=(2.0, 4.0)), workers)
    for kind in ("svg", "html"):
        boxes, cluster = tmp_path / f"boxes.{kind}", tmp_path / f"cluster.{kind}"
        visualize.boxes(folder / "worker-0.csv", 1, ["mem-util"], 6, 4, boxes, freq=5)
        visualize.cluster(folder, ["mem-util"], None, 6, 4, cluster)

        for path in (boxes, cluster):
            assert path.read_bytes().startswith(MAGIC[kind])


@pytest.mark.parametrize(
    ("unknown", "lines"),
    [
        (2, [[1, 1, 5.0, [50], None, [], {"eth0": 1.5}, 1e300]]),
        (3, [[1, 0, 5.0, [None, None], None, [], {}, -3], [1, 0, 5.2, [], 2**70, [], None, -3]]),
        (0, [[1, 1, 0.0, [1], 1, [1], {"x": None}, 10**400], [1, 1, 9.0, [1, 2], 1, [1, 2], {"y": 2}, 0]]),
        (
            1,
            [
                [1, 1, 0.0, [1e308, -1e308], 1, [1e307, 1], {"x": float("nan")}, 5e-324],
                [1, 1, 0.2, [2, None], 1, [3, 4], {"x": -1e301}, 5e-324],
            ],
        ),
        (5, []),
    ],
)
def test_odd_records_can_be_drawn(unknown: int, lines: list[list[Any]], tmp_path: Path) -> None:
    """One line, nothing known, no GPUs, values by name, numbers that are huge or negative, no line at all."""
    names = ("mem-util", "a", "b", "c", "d")
    header, content = as_bytes(names, lines)
    (worker,) = write_files(tmp_path, {0: (header, [content])})
    job, path = 1 if lines else None, tmp_path / "run.html"

    for draw, place in ((visualize.lines, worker), (visualize.boxes, worker), (visualize.cluster, tmp_path)):
        draw(place, job=job, metrics=names, save=path, **SMALL).draw_without_rendering()
        assert unknown == path.read_text().count(">no data<")


def test_a_number_too_large_to_be_one_is_unknown(tmp_path: Path) -> None:
    """JSON has no limit."""
    header, path = b"job,dag,timestamp,m", tmp_path / "run.html"
    (worker,) = write_files(tmp_path, {0: (header, [b"1,1,0.0,[1e999]\n1,1,0.2,[-1e999]\n"])})

    for draw, place in ((visualize.lines, worker), (visualize.boxes, worker), (visualize.cluster, tmp_path)):
        draw(place, job=1, save=path, **SMALL).draw_without_rendering()
        assert 1 == path.read_text().count(">no data<")


def test_jobs_are_marked_where_they_begin(tmp_path: Path) -> None:
    """The first needs no mark."""
    for jobs, marks in ((1, 0), (40, 39)):
        folder = export(tmp_path / str(jobs), Plan(metrics=("mem-util",), lines=400, jobs=jobs, dags=10))

        visualize.cluster(folder, save=tmp_path / "run.html", **SMALL)

        assert marks == (tmp_path / "run.html").read_text().count('<line class="mark"')


def test_a_page_needs_nothing_else_and_escapes_everything(tmp_path: Path) -> None:
    """Names of metrics and interfaces are text; nothing is fetched."""
    header, content = as_bytes(
        [f'"{EVIL.replace(chr(34), chr(34) * 2)}"', "n"], [[1, 1, 0.2, [1, 2], {EVIL: 1, "lo": 2}]]
    )
    write_files(tmp_path / "run", {0: (header, [content])})

    visualize.lines(tmp_path / "run" / "worker-0.csv", 1, [EVIL, "n"], save=tmp_path / "a.html")
    visualize.lines(tmp_path / "run" / "worker-0.csv", 1, [EVIL, "n"], save=tmp_path / "a.png", **SMALL)

    text = (tmp_path / "a.html").read_text()
    page = Page(text)
    assert 3 == page.tags.count("script")
    assert 2 <= page.texts.count(EVIL)
    assert [] == [link for link in page.links if not link.startswith("data:")]
    assert "<script>alert" not in text.replace("&lt;", "")
    assert "default-src 'none'" in text


def test_without_a_file_nothing_pops_up_where_there_is_no_screen(worker: Path) -> None:
    """The figure is there all the same, and pyplot knows nothing of it."""
    plt.switch_backend("agg")

    for figure in (visualize.lines(worker, 1, METRICS), visualize.boxes(worker, 2, "mem-util")):
        assert (20, 10) == tuple(figure.get_size_inches())
    assert [] == plt.get_fignums()


def test_a_screen_shows_a_window(worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is closed; nothing is left in pyplot's list."""
    shown: list[list[int]] = []

    class Manager(FigureManagerBase):
        @classmethod
        def pyplot_show(cls, *, block: bool | None = None) -> None:  # noqa: ARG003  as matplotlib calls it
            shown.append(plt.get_fignums())

    class Canvas(FigureCanvasAgg):
        manager_class = Manager

    window = ModuleType("window_of_a_test")
    vars(window)["FigureCanvas"] = Canvas
    monkeypatch.setitem(sys.modules, "window_of_a_test", window)
    plt.switch_backend("module://window_of_a_test")
    try:
        visualize.lines(worker, 1, METRICS, **SMALL)
    finally:
        plt.switch_backend("agg")

    assert [1] == list(map(len, shown))
    assert [] == plt.get_fignums()


def test_a_notebook_shows_the_picture_once(worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as it is drawn, not again as the result of the same cell, and again when another cell asks."""
    shown: list[Any] = []
    shell = SimpleNamespace(execution_count=7)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=shown.append))
    monkeypatch.setattr(mpl, "get_backend", lambda: "module://matplotlib_inline.backend_inline")

    figure = visualize.lines(worker, 1, METRICS, **SMALL)

    assert [figure] == shown
    again: Callable[[], None] = vars(figure)["_ipython_display_"]
    again()
    shell.execution_count = 8
    with pytest.raises(NotImplementedError):
        again()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"job": 7}, "there is no job 7 in .*; jobs: 1, 2"),
        ({"job": -1}, "there is no job -1"),
        ({"job": 10**400}, "there is no job 1000"),
        ({"job": "1"}, "job must be a number"),
        ({"job": True}, "job must be a number"),
        (
            {"metrics": ["power"]},
            "'power' was not tracked; tracked metrics: total-mem, mem-util, compute-util",
        ),
        ({"metrics": ["tasks"]}, "'tasks' are not numbers"),
        ({"metrics": []}, "no metric to draw; tracked metrics: total-mem"),
        ({"width": 0}, "width must be a number of inches from 1 to 200"),
        ({"height": float("nan")}, "height must be a number"),
        ({"height": "10"}, "height must be a number"),
        ({"width": 1000}, "width must be a number"),
        ({"save": "run.xyz"}, r"cannot draw 'run.xyz': .*\.png, \.svg, \.pdf, \.html"),
        ({"save": "run"}, "cannot draw 'run'"),
        ({"save": "/no/such/folder/run.png"}, "there is no directory"),
    ],
)
def test_what_cannot_be_drawn_is_reported(changes: dict[str, Any], words: str, worker: Path) -> None:
    """With what can."""
    asked: dict[str, Any] = {"job": 1, "metrics": METRICS, **changes}

    with pytest.raises(UsageError, match=words):
        visualize.lines(worker, **asked)
    with pytest.raises(UsageError, match=words):
        visualize.boxes(worker, **asked)
    with pytest.raises(UsageError, match=words):
        visualize.cluster(worker.parent, **asked)


@pytest.mark.parametrize("freq", [0, -1, 1.5, "15", True, None])
def test_a_box_of_no_records_is_none(freq: Any, worker: Path) -> None:
    """It needs at least one."""

    with pytest.raises(UsageError, match="freq must be the number of records per box"):
        visualize.boxes(worker, 1, METRICS, freq=freq)


def test_files_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    """As everywhere."""
    (tmp_path / "worker-0.csv").write_bytes(b"job,dag,timestamp,m\n1,1,0.0,{\n")

    with pytest.raises(UsageError, match="there is no file"):
        visualize.lines(tmp_path / "no.csv", 1, METRICS)
    with pytest.raises(UsageError, match="there is no directory"):
        visualize.cluster(tmp_path / "no")
    with pytest.raises(RecordingError, match=r"worker-0\.csv, line 2"):
        visualize.cluster(tmp_path)


def test_a_picture_that_fails_leaves_the_one_before(worker: Path, tmp_path: Path) -> None:
    """Nothing is written before it is drawn."""
    path = tmp_path / "run.png"
    path.write_text("old")

    with pytest.raises(UsageError):
        visualize.lines(worker, 9, METRICS, save=path)
    assert "old" == path.read_text()


def test_matplotlib_that_is_missing_is_reported(monkeypatch: pytest.MonkeyPatch, worker: Path) -> None:
    """With the command that installs it."""
    monkeypatch.setattr(visualize, "find_spec", lambda _: None)

    with pytest.raises(MissingExtraError) as error:
        visualize.lines(worker, 1, METRICS)
    assert install_command("dask") == error.value.hint


def test_whoever_draws_nothing_loads_nothing() -> None:
    """Neither matplotlib nor pandas; workers import this package too."""
    code = "import sys, gpulse.integrations.dask.visualize; print({'matplotlib', 'pandas', 'pyarrow'} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "set()" == done.stdout.strip()


def test_words_are_not_drawn_unless_somebody_asks(tmp_path: Path) -> None:
    """Nor what was never known: all that have numbers are drawn when nothing is named. Words that are named are refused."""
    file = tmp_path / "worker-0.csv"
    written = [
        "job,dag,timestamp,mem-util,word,load1",
        '1,1,0.2,[1],"[""x""]",',
        '1,1,0.4,[2],"[""y""]",',
        "",
    ]
    file.write_text("\n".join(written), encoding="utf-8")

    for save in ("all.png", "all.html"):
        visualize.cluster(tmp_path, save=tmp_path / save)
        assert (tmp_path / save).stat().st_size > 1000
    assert ">no data<" not in (tmp_path / "all.html").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="'word' are not numbers"):
        visualize.lines(file, 1, ["word"], save=tmp_path / "word.png")
