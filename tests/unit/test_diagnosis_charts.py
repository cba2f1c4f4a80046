from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gpulse.charts import chart_files
from gpulse.charts.chart_files import check_chart_path
from gpulse.charts.chart_model import Chart, Lines
from gpulse.charts.style import legend
from gpulse.diagnosis.line_search import LineSpan
from gpulse.diagnosis.second_aggregator import SecondAggregator
from gpulse.diagnosis.second_summary import SecondSummary
from gpulse.errors import MissingExtraError, UsageError, install_command
from gpulse.export.diagnosis_charts import build_charts, build_page, describe_window, write_diagnosis_charts
from gpulse.model.finding import Advice, Diagnosis, Evidence, Finding, JudgedGpu
from gpulse.model.process import GpuProcess
from tests.unit.diagnosed import diagnosed, digested
from tests.unit.frames import NOON, frame, gpu

EVIL = '<script>alert("1")</script>&'
MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-", "svg": b"<?xml", "html": b"<!DOCTYPE html>"}


@pytest.fixture(autouse=True)
def _closes_fonts() -> Iterator[None]:
    """Matplotlib keeps the files of its fonts open for the next picture."""
    yield
    if "matplotlib.font_manager" in sys.modules:
        vars(sys.modules["matplotlib.font_manager"])["_get_font"].cache_clear()


def seconds_of(count: int = 20, without: range = range(0), gpus: int = 1) -> dict[str, list[SecondSummary]]:
    """Seconds of GPUs, some of them missing."""
    digest = SecondAggregator()
    found: dict[str, list[SecondSummary]] = {}
    for place in range(count):
        if place not in without:
            moment = frame(
                *(gpu(index, name=EVIL) for index in range(gpus)), time=NOON + place, monotonic=float(place)
            )
            for uuid, second in digest.feed(moment).items():
                found.setdefault(uuid, []).append(second)
    return found


def finding(gpu: int | None, text: str = "waits") -> Finding:
    """A finding from the fifth to the tenth second."""
    return Finding(
        "launch_bound",
        "host",
        "high",
        0.9,
        f"GPU {gpu} {text}",
        gpu=gpu,
        label=None if gpu is None else str(gpu),
        start=NOON + 5,
        end=NOON + 10,
    )


@pytest.mark.parametrize("kind", MAGIC)
def test_a_picture_of_a_real_run(kind: str, tmp_path: Path) -> None:
    """Every kind has what such a file begins with, and something in it."""
    path = tmp_path / f"why.{kind}"

    write_diagnosis_charts(digested("checkpoint_stall"), diagnosed("checkpoint_stall"), path)

    assert path.read_bytes().startswith(MAGIC[kind])
    assert path.stat().st_size > 15_000


@pytest.mark.parametrize("kind", MAGIC)
def test_nothing_at_all_is_a_picture_too(kind: str, tmp_path: Path) -> None:
    """No GPU, no frame, no finding."""
    path = tmp_path / f"why.{kind}"

    write_diagnosis_charts({}, Diagnosis("Not enough data."), path)

    assert path.read_bytes().startswith(MAGIC[kind])


@pytest.mark.parametrize("kind", ["png", "html"])
def test_foreign_text_is_drawn_as_it_is(kind: str, tmp_path: Path) -> None:
    """Formulas, control characters and letters that no font has are no reason to fail."""
    path = tmp_path / f"why.{kind}"
    text = "$\\frac{1$ \x1b[2J \u202e \u4e2d \U0001f525 " + "x" * 300

    write_diagnosis_charts(seconds_of(), Diagnosis(text, (finding(0, text),)), path)

    assert path.stat().st_size > 1000


def test_an_existing_file_is_replaced(tmp_path: Path) -> None:
    """As the help says."""
    path = tmp_path / "why.HTML"
    path.write_text("old")

    write_diagnosis_charts(seconds_of(), Diagnosis("New."), path)

    assert path.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("name", ["why.gif", "why", ".png"])
def test_an_unknown_ending_is_refused_with_the_choices(name: str) -> None:
    """Before any time is spent on watching."""

    with pytest.raises(UsageError, match=r"\.png, \.svg, \.pdf, \.html"):
        check_chart_path(Path(name))


def test_a_place_for_no_file_is_refused(tmp_path: Path) -> None:
    """A folder that is not there, and one that is none."""
    (tmp_path / "file").touch()

    with pytest.raises(UsageError, match="does not exist"):
        check_chart_path(tmp_path / "no" / "why.html")
    with pytest.raises(UsageError, match="cannot create a file in"):
        check_chart_path(tmp_path / "file" / "why.html")


def test_a_link_to_a_picture_stays_one(tmp_path: Path) -> None:
    """What it leads to is replaced."""
    picture, link = tmp_path / "real.html", tmp_path / "link.html"
    picture.write_text("old")
    link.symlink_to(picture)

    write_diagnosis_charts(seconds_of(), Diagnosis("New."), link)

    assert link.is_symlink()
    assert "New." in picture.read_text()
    assert {picture, link} == set(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PNG needs it, HTML does not."""
    monkeypatch.setattr(chart_files, "find_spec", lambda _: None)

    with pytest.raises(MissingExtraError) as caught:
        write_diagnosis_charts(seconds_of(), Diagnosis("New."), tmp_path / "why.png")
    write_diagnosis_charts(seconds_of(), Diagnosis("New."), tmp_path / "why.html")

    assert install_command("plot") == caught.value.hint
    assert ["why.html"] == [path.name for path in tmp_path.iterdir()]


def test_matplotlib_is_loaded_only_to_draw() -> None:
    """Only charts pay the half second of its import."""

    code = "import sys, gpulse.export.diagnosis_charts; print('matplotlib' in sys.modules)"

    assert "False" == subprocess.check_output([sys.executable, "-c", code], text=True).strip()


def test_the_page_escapes_what_others_have_written() -> None:
    """Names of GPUs, programs and nodes are not ours."""
    evil = Finding(
        EVIL, "host", "high", 0.9, f"GPU 0 {EVIL}", gpu=0, label="0", advice=(Advice(EVIL, EVIL, EVIL),)
    )
    diagnosis = Diagnosis(EVIL, (evil,), (evil._replace(severity="info"),), (EVIL,))

    page = build_page(seconds_of(), diagnosis)

    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;") >= 8


def test_the_page_is_well_formed() -> None:
    """Every element that is opened is closed in its place."""
    page = build_page(digested("host_memory_leak"), diagnosed("host_memory_leak"))
    opened: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
            if tag not in ("meta", "br"):
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert tag == opened.pop()

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            pass

    Checker().feed(page)

    assert [] == opened


def test_gpus_with_a_finding_are_drawn() -> None:
    """The others have nothing to tell."""

    drawn = build_charts(seconds_of(gpus=3), Diagnosis("V.", (finding(1),)))

    assert [f"GPU 1  {EVIL}"] == [chart.title for chart in drawn]
    assert [(NOON + 5, NOON + 10, "launch_bound")] == [(s.start, s.end, s.label) for s in drawn[0].spans]


def test_without_findings_the_judged_are_drawn() -> None:
    """And without those all that were seen."""
    judged = (JudgedGpu(2, "2", NOON, NOON + 20, 20, "busy 99%"),)

    assert 1 == len(build_charts(seconds_of(gpus=3), Diagnosis("V.", judged=judged)))
    assert 2 == len(build_charts(seconds_of(gpus=2), Diagnosis("V.")))
    assert 2 == len(build_charts(seconds_of(gpus=2), Diagnosis("V.", (finding(None),))))


@pytest.mark.parametrize("findings", [(), (finding(None),)])
def test_many_gpus_without_a_finding_are_compared(findings: tuple[Finding, ...]) -> None:
    """One panel a quantity, with a lane for each GPU."""
    (chart,) = build_charts(seconds_of(gpus=8), Diagnosis("V.", findings))

    assert f"All GPUs: 8 {EVIL}" == chart.title
    assert [
        "GPU activity: kernels running",
        "Power and memory: power (100% = 700W)",
        "Power and memory: memory (100% = 80.0 GiB)",
    ] == [panel.title for panel in chart.panels]
    assert all(panel.has_lanes and 8 == len(panel.labels) for panel in chart.panels)
    assert len(findings) == len(chart.spans)


def test_evidence_about_one_of_many_gpus_is_drawn_of_that_gpu() -> None:
    """The panel says which GPU it is."""
    hot = finding(3)._replace(
        severity="info", evidence=(Evidence("temperature_celsius", "last", 90.0, ">=", 80.0),)
    )
    seconds = seconds_of(gpus=8)
    (chart,) = build_charts(seconds, Diagnosis("V.", (), info=(hot,)))
    (panel,) = (panel for panel in chart.panels if panel.title == "Temperature, GPU 3")
    own = build_charts({"3": list(seconds.values())[3]}, Diagnosis("V.", (hot,)))[0]
    (same,) = (panel for panel in own.panels if panel.title == "Temperature")

    assert isinstance(panel.content, Lines)
    assert isinstance(same.content, Lines)
    assert same.content.lines[0].values.tolist() == panel.content.lines[0].values.tolist()


def lines_of(chart: Chart) -> dict[str, list[str]]:
    """Labels of the lines, by panel."""
    return {
        panel.title: [line.label for line in panel.content.lines]
        for panel in chart.panels
        if isinstance(panel.content, Lines)
    }


def test_the_gpu_of_the_verdict_comes_first() -> None:
    """The others follow in the order of their findings."""
    drawn = build_charts(seconds_of(gpus=3), Diagnosis("V.", (finding(2), finding(0), finding(2))))

    assert ["GPU 2", "GPU 0"] == [chart.title.split("  ")[0] for chart in drawn]


@pytest.mark.parametrize(
    ("recording", "panels"),
    [
        ("disk_small_random", {"Waiting for storage", "Storage", "Resource pressure on the host"}),
        ("cpu_oversubscribed", {"Run queue", "Resource pressure on the host"}),
        ("pcie_copies", {"PCIe"}),
        ("host_memory_leak", {"Host memory"}),
        ("tensor_cores_unused", {"Pipelines in use"}),
        ("gpu_shared", {"Share of the GPU"}),
    ],
)
def test_the_signals_of_the_evidence_are_drawn(recording: str, panels: set[str]) -> None:
    """Right after what the GPU did, before what is drawn for every run."""
    titles = [panel.title for panel in build_charts(digested(recording), diagnosed(recording))[0].panels]

    assert "GPU activity" == titles[0]
    assert panels <= set(titles[1 : 1 + len(titles) - 3])
    assert {"GPU activity", "PCIe", "Power and memory", "CPU time"} <= set(titles)


def test_evidence_without_a_panel_of_its_own_gets_one() -> None:
    """Any reading that a rule names can be seen, and one that was never read costs nothing."""
    hot = finding(0)._replace(
        evidence=(
            Evidence("temperature_celsius", "last", 90.0, ">=", 80.0),
            Evidence("fan_speed_ratio", "last", 0.0, "<", 0.1),
            Evidence("last_heard_timestamp_seconds", "now", 1.0, ">", 0.0),
            Evidence("no_such_signal", "mean", 1.0, ">", 0.0),
        )
    )

    assert "Temperature" in lines_of(build_charts(seconds_of(), Diagnosis("V.", (hot,)))[0])


@pytest.mark.parametrize(("processes", "entries"), [(2, 2), (12, 0), (32, 0)])
def test_many_processes_on_a_gpu_have_rows_in_place_of_a_legend(processes: int, entries: int) -> None:
    """And the evidence about them is cut off."""
    aggregator = SecondAggregator()
    holders = tuple(GpuProcess(pid, "compute", sm_ratio=0.5) for pid in range(1, processes + 1))
    seconds = [
        second
        for place in range(20)
        for second in aggregator.feed(
            frame(gpu(processes=holders), time=NOON + place, monotonic=float(place))
        ).values()
    ]
    shared = finding(0)._replace(
        evidence=tuple(Evidence("sm_ratio", f"mean of pid {one.pid}", 0.5, ">=", 0.1) for one in holders)
    )
    diagnosis = Diagnosis("V.", (shared,))
    (chart,) = build_charts({"0": seconds}, diagnosis)
    (panel,) = (panel for panel in chart.panels if panel.title == "Share of the GPU")
    page = build_page({"0": seconds}, diagnosis)

    assert entries == len(legend(chart, panel))
    assert [f"pid {one.pid}" for one in holders] == list(panel.labels)
    assert min(processes, 12) == page.count('<tr title="sm_ratio')
    assert (f"and {processes - 12} more" in page) == (processes > 12)


def test_lines_of_code_have_a_lane_each_and_are_named_once() -> None:
    """However often they alternate; of many lines the three most frequent are drawn."""
    seconds, names = (
        seconds_of(20),
        ["a.py:1 f", "a.py:1 f", "b.py:2 g", "b.py:2 g", "c.py:3 h", "c.py:3 h", "d.py:4 i"],
    )
    spans = [
        LineSpan(NOON + 2 * n, NOON + 2 * n + 1, name) for n, name in enumerate(names[::2] + names[1::2])
    ]
    (chart,) = build_charts(seconds, Diagnosis("v", findings=(finding(0),)), {"0": spans})

    drawn = [span for span in chart.spans if span.lane > 0]
    assert ["a.py:1 f", "b.py:2 g", "c.py:3 h"] == [span.label for span in drawn if span.label]
    assert [1, 2, 3, 1, 2, 3] == [span.lane for span in drawn]


def test_a_gap_stays_a_gap() -> None:
    """No line is drawn where nothing was seen, and the time is marked."""
    chart = build_charts(seconds_of(60, without=range(20, 40)), Diagnosis("V."))[0]

    for panel in chart.panels:
        assert isinstance(panel.content, Lines)
        assert {2} == {len(list(line.segments())) for line in panel.content.lines}
        assert [(NOON + 19, NOON + 40)] == [(round(gap.start), round(gap.end)) for gap in panel.gaps]


def test_a_signal_that_is_missing_has_no_line() -> None:
    """Unknown is not zero."""
    assert {
        "GPU activity": ["kernels running"],
        "Power and memory": ["power (100% = 700W)", "memory (100% = 80.0 GiB)"],
    } == lines_of(build_charts(seconds_of(), Diagnosis("V."))[0])


def test_hours_are_thinned() -> None:
    """A page of a day stays a page."""
    panels = build_charts(seconds_of(4000), Diagnosis("V."))[0].panels

    assert all(
        len(line.times) <= 1500
        for panel in panels
        if isinstance(panel.content, Lines)
        for line in panel.content.lines
    )


@pytest.mark.parametrize(
    ("length", "frames", "expected"), [(0.0, 1, ", 0.0 s, 1 frame"), (150.0, 3, ", 2:30, 3 frames")]
)
def test_the_window_is_described_as_in_the_terminal(length: float, frames: int, expected: str) -> None:
    """Length and frames, one or several."""
    diagnosis = Diagnosis("fine", start=NOON, end=NOON + length, frames=frames)

    assert describe_window(diagnosis).endswith(expected)
