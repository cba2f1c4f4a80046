"""What `gpulse job` prints and the page it writes: figures in words, one line, and foreign text that does no harm."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.charts.chart_model import Chart, HeatMap, Lines
from gpulse.cli.job import job_lines
from gpulse.export import job_report_text as words
from gpulse.export.job_report_html import build_charts, build_page
from gpulse.reports.job_report import JobReport
from gpulse.terminal.table import display_width, make_painter
from tests.unit.job_documents import BEGIN, finding_document, gpu_document, job_document, read

HOSTILE = "\x1b]0;x\x07<script>alert(1)</script>\n\u202e\"'&"


def report(**more: Any) -> JobReport:
    """A report about a job."""
    return read(job_document(**more))


def shown(document: JobReport, width: int = 120) -> str:
    """The text on a terminal without colours."""
    return "\n".join(job_lines(document, width, make_painter(color=False)))


@pytest.fixture(autouse=True, scope="module")
def utc() -> Iterator[None]:
    """The same clock everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def test_the_text() -> None:
    """Who, when, GPU-hours, idle time beside the cluster's, means and peaks, every GPU, findings with advice, gaps."""
    assert (
        """
job slurm:4711 (llama) of ada
ended, 2027-01-15 08:00:00 to 10:00:00 UTC (2:00:00), 3 GPUs on n1

GPU time       4.0 GPU-hours held of 6.0 GPU-hours allocated
held but idle  12 GPU-min, 5% of the time held (cluster mean 12%)
not held       2.0 GPU-hours allocated, but not held by any process; 1 GPU never used
energy         2 kWh
program        python3 train.py (2 processes)
scheduler      partition gpu

                mean   peak  cluster
GPU busy         83%   100%      61%
tensor cores     31%    50%
memory in use  60.0G  71.0G
power           500W   700W     410W

Node  GPU  Model        Allocated   Held   Idle  Busy     Memory  Power  Energy
n1    0    NVIDIA H200      2.0 h  2.0 h  6 min   83%  71.0/140G   500W   1 kWh
n1    1    NVIDIA H200      2.0 h  2.0 h  6 min   83%  71.0/140G   500W   1 kWh
n1    2    NVIDIA H200      2.0 h    0 s      -     -  71.0/140G   500W       -  never used

Findings
  high: n1 GPUs 0,1 (worst: n1 GPU 1): GPU waits 50% of the time (input_io_bound; 08:01:00 to 08:11:00, 4 times, up to
    10:00)
    try: cache the data

Missing data
  nothing is known of n1 for a while
""".strip()
        == "\n".join(line.rstrip() for line in shown(report()).splitlines())
    )


def test_a_task_of_an_array_is_called_by_both_names() -> None:
    """The scheduler's number and the one that people know."""
    assert "job slurm:4711 (llama, task 4700_3) of ada" == words.headline(report(array="4700_3"))
    assert "job slurm:4711 (task 4700_3) of ada" == words.headline(report(array="4700_3", name=None))


def test_the_line() -> None:
    """All that matters, without colours, in less than two hundred characters."""
    assert (
        "slurm:4711 ada: 3 GPUs for 2:00:00, 4.0 GPU-hours, busy 83% (cluster mean 61%), idle 5%, tensor 31%, power 500W, "
        "memory 71.0G, 2 kWh, 1 GPU never used, input_io_bound"
    ) == words.one_line_summary(report())
    assert "no data for 1:40" in words.one_line_summary(report(missing_seconds=100.0))


@pytest.mark.slow
@given(st.text(max_size=400), st.text(max_size=400))
def test_the_line_is_one_short_line_whatever_people_call_their_jobs(job: str, user: str) -> None:
    """It goes into other people's files."""
    line = words.one_line_summary(report(job=job, user=user, findings=[finding_document(None, id=job)]))
    assert len(line) < 200
    assert line.isprintable()


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_narrow_terminals(width: int) -> None:
    """No line is wider than the window."""
    assert max(display_width(line) for line in shown(report(), width).splitlines()) <= width


def test_a_job_that_held_all_it_was_given() -> None:
    """Minutes are not divided to the second, and nobody holds more than all."""
    assert "4.0 GPU-hours held, which is the whole allocation\n" in shown(report(allocated_seconds=14390.0))


def test_sessions_and_processes_have_words_of_their_own() -> None:
    """What they have no notion of is left out."""
    bare: dict[str, Any] = {
        "name": None,
        "partition": None,
        "allocated_seconds": None,
        "unused_seconds": None,
        "findings": [],
    }
    text = shown(report(kind="session", job="training", user=None, program=None, **bare))
    assert text.startswith("session training\n")
    assert "1 GPU idle and not held" in text
    text = shown(
        report(kind="process", job="n#2:77", untouched_gpus=None, state="running", to_now=True, **bare)
    )
    assert text.startswith("process 77 on n#2 of ada\nrunning, ")
    assert " to now, " in text


def test_what_is_unknown_is_not_zero() -> None:
    """A job of which little is known says so."""
    nothing = dict.fromkeys(
        (
            "idle_seconds",
            "utilization_mean",
            "energy_joules",
            "allocated_seconds",
            "unused_seconds",
            "untouched_gpus",
        )
    )
    cluster = {
        **job_document()["cluster"],
        **dict.fromkeys(("idle_seconds", "utilization_mean", "power_watts_mean")),
    }
    empty = report(**nothing, metrics={}, gpu_rows=[], cluster=cluster, findings=[], gpus=0, series=None)
    text = shown(empty)
    assert "held but idle  -" in text
    assert "energy         -" in text
    assert "busy -, idle -" in words.one_line_summary(empty)
    assert "<h2>Over time</h2>" not in build_page(empty)


class Reader(HTMLParser):
    """Notes what a page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.add(tag)
        self.scripts += tag == "script"
        self.attributes |= {name for name, _ in attrs}
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag that is closed at once."""
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        """Tags end in the order in which they began."""
        if tag == "li":
            while self.open[-1] == "br":
                self.open.pop()
        assert self.open.pop() == tag


def read_page(text: str) -> Reader:
    """A page taken apart; every tag is closed."""
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert [] == reader.open
    return reader


def test_the_page_needs_nothing_else() -> None:
    """No link, no picture from elsewhere; the charts are in it, for paper too."""
    text = build_page(report())
    reader = read_page(text)
    assert not reader.tags & {"link", "img", "iframe", "a", "use"}
    assert not reader.attributes & {"src", "xlink:href", "onload"}
    assert {"svg", "table", "polyline", "script"} <= reader.tags
    for said in (
        "4.0 GPU-hours",
        "cache the data",
        "never used",
        "nothing is known of n1",
        "cluster mean 61%",
    ):
        assert said in text


def test_advice_on_the_page_has_its_reason_and_a_check_with_commands_as_code() -> None:
    """As on the page of `gpulse why`."""
    advice = {
        "do": "run `gpulse agent HEAD` there",
        "why": "it <reports>",
        "confirm": "`gpulse status` lists it",
    }
    text = build_page(report(findings=[finding_document("0", advice=[advice])]))

    assert (
        "<li>run <code>gpulse agent HEAD</code> there<br>"
        '<span class="quiet">Why: it &lt;reports&gt;. Check: <code>gpulse status</code> lists it.</span></li>'
    ) in text


def test_foreign_text_is_harmless() -> None:
    """Whatever people call their jobs, users, nodes and programs: no markup, no escape sequence, no new line."""
    foreign = dict.fromkeys(("job", "name", "user", "program", "partition", "account"), HOSTILE)
    rows = [gpu_document(0, node=HOSTILE, gpu=HOSTILE, model=HOSTILE)]
    found = [
        finding_document(
            HOSTILE,
            node=HOSTILE,
            id=HOSTILE,
            summary=HOSTILE,
            advice=[dict.fromkeys(("do", "why", "confirm"), HOSTILE)],
        )
    ]
    series = {
        **job_document()["series"],
        "gpus": [{"node": HOSTILE, "gpu": HOSTILE, "uuid": HOSTILE, "values": [0.1, 0.2]}],
    }
    hostile = report(
        **foreign, nodes=[HOSTILE], gpu_rows=rows, findings=found, data_gaps=[HOSTILE], series=series
    )
    assert 3 == read_page(build_page(hostile)).scripts  # the data, uPlot, and what draws
    text = shown(hostile)
    assert all(line.isprintable() for line in text.splitlines())
    assert not re.search("[\x1b\x07\u202e]", text)


def chart_of(document: JobReport) -> Chart:
    """The chart of a page."""
    return next(part for part in build_charts(document) if isinstance(part, Chart))


def test_gaps_break_lines() -> None:
    """A step without a value is bridged, unless the report says that data of that node is missing there."""
    series = {
        **job_document()["series"],
        "gpus": [{"node": "n1", "gpu": "0", "uuid": "GPU-0", "values": [0.8, None, 0.8, 0.0]}],
    }
    gap = {"node": "n1", "from": BEGIN + 1800, "to": BEGIN + 3600}
    segments = []
    for missing in ([], [gap], [{**gap, "node": "n2"}]):
        panel = chart_of(report(series=series, missing=missing)).panels[-1]
        assert isinstance(panel.content, Lines)
        segments.append((len(list(panel.content.lines[0].segments())), len(panel.gaps)))
    assert [(1, 0), (2, 1), (1, 0)] == segments


def test_each_of_many_gpus_has_a_row_of_a_heat_map() -> None:
    """Named by node, in place of a legend of 64 entries."""
    gpus = [
        {"node": f"n{number // 8}", "gpu": str(number % 8), "uuid": "u", "values": [0.5] * 4}
        for number in range(64)
    ]
    panel = chart_of(report(series={**job_document()["series"], "gpus": gpus})).panels[-1]
    assert isinstance(panel.content, HeatMap)
    assert "n7 GPU 7" == panel.content.labels[-1]
    assert 7 == len(panel.content.group_edges)


def test_many_gpus_are_cut_off() -> None:
    """A page or a terminal is for people."""
    rows = [gpu_document(number) for number in range(600)]
    assert "and 472 more" in shown(report(gpu_rows=rows, gpus=600))
    assert "and 88 more" in build_page(report(gpu_rows=rows, gpus=600))


def test_moments_that_the_head_tells_in_words_are_local_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As all others in the report."""
    monkeypatch.setenv("TZ", "Etc/GMT-2")
    time.tzset()
    try:
        text = shown(report(data_gaps=["nothing is known of n1 since 2027-01-15T08:19:55.000Z"]))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "nothing is known of n1 since 2027-01-15 10:19:55 UTC+02:00" in text
