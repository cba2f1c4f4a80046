from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulse.cli.report import report_lines
from gpulse.export.session_report import session_figures
from gpulse.export.session_report.file_reader import read_report
from gpulse.model.formatting import energy
from gpulse.terminal.table import display_width, make_painter


def view(path: Path, frames: int = 60, width: int = 120, **more: Any) -> list[str]:
    """What is printed about two nodes with two GPUs each, of which one is away for a while."""
    ids = ["a:0:NVIDIA H200", "a:1:NVIDIA H200", "b:0:NVIDIA H200", "b:1:NVIDIA H200"]
    document = {
        "session_name": "run",
        "start_time": 1_800_000_000,
        "frames": [
            {
                "time": 1_800_000_000 + second,
                "gpu_id": ids,
                "gpu_util": [50, 60, *([None, None] if 20 <= second < 50 else [90, 100])],
                "gpu_memory": [10, 20, *([None, None] if 20 <= second < 50 else [30, 40])],
                "dram_bandwidth": [1.5, 0, *([None, None] if 20 <= second < 50 else [0.02, 12])],
            }
            for second in range(frames)
        ],
        **more,
    }
    path.write_text(json.dumps(document))
    return list(report_lines(read_report(path), width, make_painter(color=False)))


def test_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of GPUs and nodes, gaps, findings."""
    monkeypatch.setenv("TZ", "UTC")
    finding = {
        "severity": "high",
        "node": "a",
        "label": "1",
        "summary": "GPU 1 waits",
        "first_time": "2027-01-15T08:00:05Z",
        "last_time": "2027-01-15T08:00:25Z",
    }
    summary = {"a:0:NVIDIA H200": {"energy_joules": 7200}}

    lines = view(tmp_path / "x.json", findings=[finding], summary_by_device=summary)

    assert [
        "run",
        "2027-01-15 08:00:00 to 08:01:00 UTC (1:00), 60 frames, one every 1 s, 4 GPUs on 2 nodes",
        "",
        "Node  GPU  Util mean   p50   p95   max  Mem mean  p50  p95  max  PCIe mean        p95        max  Energy  Data",
        "a     0          50%   50%   50%   50%       10%  10%  10%  10%   1.5 GB/s   1.5 GB/s   1.5 GB/s    2 Wh  100%",
        "a     1          60%   60%   60%   60%       20%  20%  20%  20%      0 B/s      0 B/s      0 B/s       -  100%",
        "b     0          90%   90%   90%   90%       30%  30%  30%  30%  20.0 MB/s  20.0 MB/s  20.0 MB/s       -   50%",
        "b     1         100%  100%  100%  100%       40%  40%  40%  40%  12.0 GB/s  12.0 GB/s  12.0 GB/s       -   50%",
    ] == lines[:8]
    assert [
        "Gaps",
        "  08:00:20 to 08:00:50 (30s): b (2 GPUs)",
        "",
        "Findings",
        "  high: a GPU 1 waits  08:00:05 to 08:00:25 (20s)",
    ] == lines[-5:]


def test_when_the_head_was_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every interruption is told, also one that has no end, and junk in its place is not."""
    monkeypatch.setenv("TZ", "UTC")
    told = [
        {"start_time": "2027-01-15T08:00:30Z", "end_time": "2027-01-15T08:00:37Z"},
        {"start_time": "2027-01-15T08:00:10Z", "end_time": "2027-01-15T08:00:10.5Z"},
        {"start_time": "2027-01-15T08:00:50Z", "end_time": None},
        {"start_time": "whenever"},
    ]

    lines = view(tmp_path / "x.json", interruptions=[*told, 7])

    at = lines.index("Interruptions")
    assert [
        "  the head was down from 08:00:10 to 08:00:10 (0.5s)",
        "  the head was down from 08:00:30 to 08:00:37 (7s)",
        "  the head was down from 08:00:50 on",
        "",
    ] == lines[at + 1 : at + 5]


def test_a_finding_that_came_and_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It held for less than from its first to its last moment, and that is said."""
    monkeypatch.setenv("TZ", "UTC")
    finding = {
        "severity": "low",
        "node": "a",
        "summary": "it waits",
        "first_time": "2027-01-15T08:00:05Z",
        "last_time": "2027-01-15T08:00:55Z",
        "active_seconds": 20.0,
        "times": 3,
    }

    lines = view(tmp_path / "x.json", findings=[finding])

    assert "  low: a: it waits  08:00:05 to 08:00:55 (3 times, 20s in total)" == lines[-1]


@pytest.fixture
def _own_zone() -> Iterator[None]:
    yield
    time.tzset()


@pytest.mark.usefixtures("_own_zone")
@pytest.mark.parametrize(
    ("zone", "start", "said"),
    [
        ("UTC", 1_800_000_000, "2027-01-15 08:00:00 to 08:01:00 UTC (1:00), "),
        ("<+0530>-5:30", 1_800_000_000, "2027-01-15 13:30:00 to 13:31:00 UTC+05:30 (1:00), "),
        ("<-03>3", 1_800_000_000, "2027-01-15 05:00:00 to 05:01:00 UTC-03:00 (1:00), "),
        (
            "CET-1CEST,M3.5.0,M10.5.0/3",
            1_824_944_400 - 30,
            "2027-10-31 02:59:30 UTC+02:00 to 02:00:30 UTC+01:00 (1:00), ",
        ),
    ],
)
def test_times_have_a_zone(
    zone: str, start: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local time with its offset; both offsets when clocks were changed in between."""
    frames = [{"time": start + second, "gpu_id": ["a:0:x"], "gpu_util": [1]} for second in range(60)]
    (tmp_path / "x.json").write_text(json.dumps({"start_time": start, "frames": frames}))
    report = read_report(tmp_path / "x.json")

    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        found = session_figures.subtitle(report)

    assert found.startswith(said)


@pytest.mark.parametrize("width", [30, 50, 80, 120, 200])
def test_no_line_is_too_wide(width: int, tmp_path: Path) -> None:
    """Columns give way instead."""
    for line in view(tmp_path / "x.json", width=width):
        assert display_width(line) <= width


def test_foreign_text_is_harmless(tmp_path: Path) -> None:
    """Escape sequences in names and findings are shown, not obeyed."""
    evil = "\x1b[31mred\x07"

    lines = view(
        tmp_path / "x.json",
        session_name=evil,
        labels={evil: evil},
        findings=[{"severity": evil, "summary": evil, "node": evil}],
    )

    assert not any("\x1b" in line or "\x07" in line for line in lines)


@pytest.mark.parametrize(
    ("joules", "text"),
    [(None, "-"), (0, "0 Wh"), (900, "0.25 Wh"), (360_000, "100 Wh"), (7.2e9, "2,000 kWh")],
)
def test_energy_in_watt_hours(joules: float | None, text: str) -> None:
    """As bills have it."""
    assert text == energy(joules)


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.0, "100%"), (0.99999, "99.9%"), (0.9512, "95.1%"), (0.5, "50%")]
)
def test_availability_is_whole_only_when_nothing_is_missing(ratio: float, text: str) -> None:
    """99.999 % is not 100 %."""
    assert text == session_figures.format_availability(ratio)
