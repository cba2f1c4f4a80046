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

from gpulse.export import job_words as words
from gpulse.export.job_page import page
from gpulse.terminal.job import job_lines
from gpulse.terminal.table import painter, width_of

BEGIN = 1_800_000_000.0
HOSTILE = "\x1b]0;x\x07<script>alert(1)</script>\n\u202e\"'&"


def figure(mean: float, peak: float) -> dict[str, Any]:
    """A metric."""
    return {"unit": "", "mean": mean, "max": peak}


def gpu(number: int, **more: Any) -> dict[str, Any]:
    """A row of a GPU."""
    return {
        "node": "n1",
        "gpu": str(number),
        "uuid": f"GPU-{number}",
        "model": "NVIDIA H200",
        "use": "used",
        "shared": False,
        "memory_total_bytes": 140 << 30,
        "allocated_seconds": 7200.0,
        "unused_seconds": 0.0,
        "gpu_seconds": 7200.0,
        "held_seconds": 7200.0,
        "known_seconds": 7200.0,
        "idle_seconds": 360.0,
        "utilization_mean": 0.83,
        "energy_joules": 3.6e6,
        "memory_bytes_max": 71 << 30,
        "metrics": {"power_watts": figure(500.0, 700.0), "memory_used_bytes": figure(60 << 30, 71 << 30)},
        **more,
    }


def finding(label: str | None, **more: Any) -> dict[str, Any]:
    """A finding."""
    return {
        "node": "n1",
        "gpu": 0,
        "label": label,
        "id": "input_io_bound",
        "severity": "high",
        "summary": "GPU waits 40% of the time",
        "from": BEGIN + 60,
        "to": BEGIN + 660,
        "times": 2,
        "active_seconds": 300.0,
        "advice": [{"do": "cache the data", "why": "it is read again", "confirm": "see"}],
        **more,
    }


def report(**more: Any) -> dict[str, Any]:
    """A report about a job."""
    untouched = gpu(
        2,
        use="untouched",
        gpu_seconds=0.0,
        held_seconds=0.0,
        known_seconds=0.0,
        idle_seconds=None,
        utilization_mean=None,
        energy_joules=None,
    )
    return {
        "job": "slurm:4711",
        "kind": "job",
        "state": "ended",
        "to_now": False,
        "name": "llama",
        "user": "ada",
        "partition": "gpu",
        "account": None,
        "program": "python3 train.py",
        "from": BEGIN,
        "to": BEGIN + 7200,
        "nodes": ["n1"],
        "gpus": 3,
        "processes": 2,
        "allocated_seconds": 21600.0,
        "unused_seconds": 7200.0,
        "untouched_gpus": 1,
        "gpu_seconds": 14400.0,
        "held_seconds": 14400.0,
        "known_seconds": 14400.0,
        "idle_seconds": 720.0,
        "utilization_mean": 0.83,
        "energy_joules": 7.2e6,
        "memory_bytes_max": 71 << 30,
        "metrics": {
            "gpu_utilization_ratio": figure(0.8, 1.0),
            "tensor_active_ratio": figure(0.31, 0.5),
            "memory_used_bytes": figure(60 << 30, 71 << 30),
            "power_watts": figure(500.0, 700.0),
        },
        "cluster": {
            "gpu_seconds": 1e6,
            "known_seconds": 1e6,
            "idle_seconds": 120_000.0,
            "utilization_mean": 0.61,
            "power_watts_mean": 410.0,
        },
        "findings": [finding("0"), finding("1", active_seconds=600.0, summary="GPU waits 50% of the time")],
        "gpu_rows": [gpu(0), gpu(1), untouched],
        "missing_seconds": 0.0,
        "missing": [],
        "data_gaps": ["nothing is known of n1 for a while"],
        "series": {
            "step": 1800.0,
            "times": [BEGIN + 1800 * place for place in range(4)],
            "metrics": {"gpu_utilization_ratio": [0.8, None, 0.9, 0.0], "power_watts": [1.0, 2.0, 3.0, 4.0]},
            "gpus": [{"node": "n1", "gpu": "0", "uuid": "GPU-0", "values": [0.8, None, 0.9, 0.0]}],
        },
        **more,
    }


def shown(document: dict[str, Any], width: int = 120) -> str:
    """The text on a terminal without colours."""
    return "\n".join(job_lines(document, width, painter(color=False)))


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
held but idle  12 GPU-min, 5% of the time held (cluster 12%)
not held       2.0 GPU-hours allocated that no process held; 1 GPU never touched
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
n1    2    NVIDIA H200      2.0 h    0 s      -     -  71.0/140G   500W       -  untouched

Findings
  high: n1:0,1: GPU waits 50% of the time (input_io_bound; 08:01:00 to 08:11:00, 4 times, up to 10:00)
    try: cache the data

What is not known
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
        "slurm:4711 ada: 3 GPUs for 2:00:00, 4.0 GPU-hours, busy 83% (cluster 61%), idle 5%, tensor 31%, power 500W, "
        "mem 71.0G, 2 kWh, 1 GPU untouched, input_io_bound"
    ) == words.line(report())
    assert "no data for 1:40" in words.line(report(missing_seconds=100.0))


@given(st.text(max_size=400), st.text(max_size=400))
def test_the_line_is_one_short_line_whatever_people_call_their_jobs(job: str, user: str) -> None:
    """It goes into other people's files."""
    line = words.line(report(job=job, user=user, findings=[finding(None, id=job)]))
    assert len(line) < 200
    assert line.isprintable()


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_narrow_terminals(width: int) -> None:
    """No line is wider than the window."""
    assert max(width_of(line) for line in shown(report(), width).splitlines()) <= width


def test_a_job_that_held_all_it_was_given() -> None:
    """Minutes are not divided to the second, and nobody holds more than all."""
    assert "4.0 GPU-hours held, all that was allocated\n" in shown(report(allocated_seconds=14390.0))


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
    assert "1 GPU that nobody held" in text
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
    empty = report(**nothing, metrics={}, gpu_rows=[], cluster={}, findings=[], gpus=0, series=None)
    text = shown(empty)
    assert "held but idle  -" in text
    assert "energy         -" in text
    assert "busy -, idle -" in words.line(empty)
    assert "<h2>Over time</h2>" not in page(empty)


class Reader(HTMLParser):
    """Notes what a page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.add(tag)
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


def read(text: str) -> Reader:
    """A page taken apart; every tag is closed."""
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert [] == reader.open
    return reader


def test_the_page_needs_nothing_else() -> None:
    """No script, no link, no picture from elsewhere; curves and the map are in it."""
    text = page(report())
    reader = read(text)
    assert not reader.tags & {"script", "link", "img", "iframe", "a", "image", "use"}
    assert not reader.attributes & {"src", "href", "xlink:href", "onload"}
    assert "http" not in text
    assert "url(" not in text
    assert {"svg", "table", "polyline"} <= reader.tags
    assert "prefers-color-scheme: dark" in text
    for said in ("4.0 GPU-hours", "cache the data", "untouched", "nothing is known of n1", "cluster 61%"):
        assert said in text


def test_foreign_text_is_harmless() -> None:
    """Whatever people call their jobs, users, nodes and programs: no markup, no escape sequence, no new line."""
    foreign = dict.fromkeys(("job", "name", "user", "program", "partition", "account"), HOSTILE)
    rows = [gpu(0, node=HOSTILE, gpu=HOSTILE, model=HOSTILE, use=HOSTILE)]
    found = [
        finding(
            HOSTILE, node=HOSTILE, id=HOSTILE, summary=HOSTILE, severity=HOSTILE, advice=[{"do": HOSTILE}]
        )
    ]
    series = {**report()["series"], "gpus": [{"node": HOSTILE, "gpu": HOSTILE, "values": [0.1, 0.2]}]}
    hostile = report(
        **foreign, nodes=[HOSTILE], gpu_rows=rows, findings=found, data_gaps=[HOSTILE], series=series
    )
    assert "script" not in read(page(hostile)).tags
    text = shown(hostile)
    assert all(line.isprintable() for line in text.splitlines())
    assert not re.search("[\x1b\x07\u202e]", text)


def test_gaps_break_curves_and_the_map() -> None:
    """A step without a value is bridged, unless the report says that data is missing there."""
    values = [0.8, None, 0.8, 0.0]
    series = {**report()["series"], "gpus": [{"node": "n1", "gpu": "0", "values": values}]}
    bridged = page(report(series=series))
    gap = {"node": "n1", "from": BEGIN + 1800, "to": BEGIN + 3600}
    broken = page(report(series=series, missing=[gap]))
    elsewhere = page(report(series=series, missing=[{**gap, "node": "n2"}]))
    assert [2, 3, 2] == [text.count('height="14"') for text in (bridged, broken, elsewhere)]
    assert [0, 1] == [text.count("<circle") for text in (bridged, broken)]


def test_many_gpus_are_cut_off() -> None:
    """A page or a terminal is for people."""
    rows = [gpu(number) for number in range(600)]
    assert "and 472 more" in shown(report(gpu_rows=rows, gpus=600))
    assert "and 88 more" in page(report(gpu_rows=rows, gpus=600))


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
