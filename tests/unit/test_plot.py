from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gpulse.diagnosis.digest import Digest
from gpulse.diagnosis.seconds import Second
from gpulse.errors import MissingExtraError, UsageError, install_command
from gpulse.export import plot as plotting
from gpulse.export.curves import charts, time_ticks
from gpulse.export.page import html
from gpulse.export.plot import check, plot
from gpulse.model.finding import Advice, Diagnosis, Finding, Judged
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


def seconds_of(count: int = 20, without: range = range(0), gpus: int = 1) -> dict[str, list[Second]]:
    """Seconds of GPUs, some of them missing."""
    digest = Digest()
    found: dict[str, list[Second]] = {}
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

    plot(digested("checkpoint_stall"), diagnosed("checkpoint_stall"), path)

    assert path.read_bytes().startswith(MAGIC[kind])
    assert path.stat().st_size > 15_000


@pytest.mark.parametrize("kind", MAGIC)
def test_nothing_at_all_is_a_picture_too(kind: str, tmp_path: Path) -> None:
    """No GPU, no frame, no finding."""
    path = tmp_path / f"why.{kind}"

    plot({}, Diagnosis("Not enough data."), path)

    assert path.read_bytes().startswith(MAGIC[kind])


@pytest.mark.parametrize("kind", ["png", "html"])
def test_foreign_text_is_drawn_as_it_is(kind: str, tmp_path: Path) -> None:
    """Formulas, control characters and letters that no font has are no reason to fail."""
    path = tmp_path / f"why.{kind}"
    text = "$\\frac{1$ \x1b[2J \u202e \u4e2d \U0001f525 " + "x" * 300

    plot(seconds_of(), Diagnosis(text, (finding(0, text),)), path)

    assert path.stat().st_size > 1000


def test_an_existing_file_is_replaced(tmp_path: Path) -> None:
    """As the help says."""
    path = tmp_path / "why.HTML"
    path.write_text("old")

    plot(seconds_of(), Diagnosis("New."), path)

    assert path.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("name", ["why.gif", "why", ".png"])
def test_an_unknown_ending_is_refused_with_the_choices(name: str) -> None:
    """Before any time is spent on watching."""

    with pytest.raises(UsageError, match=r"\.png, \.svg, \.pdf, \.html"):
        check(Path(name))


def test_a_place_for_no_file_is_refused(tmp_path: Path) -> None:
    """A folder that is not there, and one that is none."""
    (tmp_path / "file").touch()

    with pytest.raises(UsageError, match="there is no folder"):
        check(tmp_path / "no" / "why.html")
    with pytest.raises(UsageError, match="no file can be made in"):
        check(tmp_path / "file" / "why.html")


def test_a_link_to_a_picture_stays_one(tmp_path: Path) -> None:
    """What it leads to is replaced."""
    picture, link = tmp_path / "real.html", tmp_path / "link.html"
    picture.write_text("old")
    link.symlink_to(picture)

    plot(seconds_of(), Diagnosis("New."), link)

    assert link.is_symlink()
    assert "New." in picture.read_text()
    assert {picture, link} == set(tmp_path.iterdir())


@pytest.mark.parametrize("count", [11, 60, 3600])
def test_the_names_of_times_are_inside_the_page(count: int) -> None:
    """The last one too, which stands under the end of the curves."""
    drawn = charts(seconds_of(count), Diagnosis("V."))
    page = html(drawn, Diagnosis("V."))
    times = re.findall(r'<text x="([\d.]+)" y="\d+" text-anchor="middle">([\d:]+)<', page)

    assert times
    assert all(0 < float(x) - 4 * len(words) and float(x) + 4 * len(words) < 1200 for x, words in times)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PNG needs it, HTML does not."""
    monkeypatch.setattr(plotting, "find_spec", lambda _: None)

    with pytest.raises(MissingExtraError) as caught:
        plot(seconds_of(), Diagnosis("New."), tmp_path / "why.png")
    plot(seconds_of(), Diagnosis("New."), tmp_path / "why.html")

    assert install_command("plot") == caught.value.hint
    assert ["why.html"] == [path.name for path in tmp_path.iterdir()]


def test_matplotlib_is_loaded_only_to_draw() -> None:
    """Half a second that nobody else pays."""

    code = "import sys, gpulse.export.plot; print('matplotlib' in sys.modules)"

    assert "False" == subprocess.check_output([sys.executable, "-c", code], text=True).strip()


def test_the_page_escapes_what_others_have_written() -> None:
    """Names of GPUs, programs and nodes are not ours."""
    evil = Finding(
        EVIL, "host", "high", 0.9, f"GPU 0 {EVIL}", gpu=0, label="0", advice=(Advice(EVIL, EVIL, EVIL),)
    )
    diagnosis = Diagnosis(EVIL, (evil,), (evil._replace(severity="info"),), (EVIL,))

    page = html(charts(seconds_of(), diagnosis), diagnosis)

    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 8


def test_the_page_asks_nobody_for_anything() -> None:
    """One file, no requests, no programs in it."""
    page = html(
        charts(digested("cpu_oversubscribed"), diagnosed("cpu_oversubscribed")),
        diagnosed("cpu_oversubscribed"),
    )

    assert re.search(r"https?://|src=|href=|@import|url\(|<script", page) is None


def test_the_page_is_well_formed() -> None:
    """Every element that is opened is closed in its place."""
    page = html(
        charts(digested("host_memory_leak"), diagnosed("host_memory_leak")), diagnosed("host_memory_leak")
    )
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

    drawn = charts(seconds_of(gpus=3), Diagnosis("V.", (finding(1),)))

    assert [f"GPU 1  {EVIL}"] == [chart.title for chart in drawn]
    assert [(NOON + 5, NOON + 10, "launch_bound")] == [(m.start, m.end, m.name) for m in drawn[0].marks]


def test_without_findings_the_judged_are_drawn() -> None:
    """And without those all that were seen."""
    judged = (Judged(2, "2", NOON, NOON + 20, 20, "busy 99%"),)

    assert 1 == len(charts(seconds_of(gpus=3), Diagnosis("V.", judged=judged)))
    assert 3 == len(charts(seconds_of(gpus=3), Diagnosis("V.")))
    assert 3 == len(charts(seconds_of(gpus=3), Diagnosis("V.", (finding(None),))))


def test_a_gap_stays_a_gap() -> None:
    """No line is drawn where nothing was seen."""

    panels = charts(seconds_of(60, without=range(20, 40)), Diagnosis("V."))[0].panels

    assert {2} == {len(curve.runs) for panel in panels for curve in panel.curves}


def test_a_signal_that_is_missing_has_no_curve() -> None:
    """Unknown is not zero."""

    panels = charts(seconds_of(), Diagnosis("V."))[0].panels

    assert {
        "GPU activity": ["kernels running"],
        "Power and memory": ["power, of 700W", "memory, of 80.0 GiB"],
    } == {panel.title: [curve.label for curve in panel.curves] for panel in panels}


def test_hours_are_thinned() -> None:
    """A page of a day stays a page."""

    panels = charts(seconds_of(4000), Diagnosis("V."))[0].panels

    assert max(len(run) for panel in panels for curve in panel.curves for run in curve.runs) <= 1500


@pytest.mark.parametrize("length", [1.0, 30.0, 300.0, 5000.0, 90000.0, 1e6])
def test_moments_on_the_axis_are_round_and_few(length: float) -> None:
    """Never so many that their names meet."""

    ticks = time_ticks(NOON + 0.4, NOON + 0.4 + length)

    assert len(ticks) <= 12
    assert all(NOON <= moment <= NOON + 1 + length for moment, _ in ticks)
    assert [] == [moment for moment, _ in ticks if moment != int(moment)]
