from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from gpulse.model.frame import Frame
from gpulse.sources.recording_reader import TraceDecoder

TRACE = Path(__file__).parents[1] / "data" / "traces" / "gpu_shared.jsonl.gz"


@pytest.fixture(scope="module")
def lines() -> tuple[str, str]:
    """The header and a line in the middle of a real trace, with processes on the GPU."""
    header, *ticks = gzip.decompress(TRACE.read_bytes()).decode().splitlines()
    return header, ticks[len(ticks) // 2]


@pytest.fixture
def header(lines: tuple[str, str]) -> dict[str, Any]:
    """The header, to be changed."""
    document: dict[str, Any] = json.loads(lines[0])
    return document


@pytest.fixture
def tick(lines: tuple[str, str]) -> dict[str, Any]:
    """The line, to be changed."""
    document: dict[str, Any] = json.loads(lines[1])
    return document


def decode(header: dict[str, Any], tick: dict[str, Any]) -> Frame:
    """The frame of one line."""
    decoder = TraceDecoder()
    assert decoder.feed(json.dumps(header)) is None
    frame = decoder.feed(json.dumps(tick))
    assert frame is not None
    return frame


def test_units_become_ours(header: dict[str, Any], tick: dict[str, Any]) -> None:
    """Per cent, milliwatts, MHz, MiB/s and kernel ticks in the catalogue's base units."""

    gpu = tick["gpus"][0]
    gpu.update({"util_gpu": 57, "power_mw": 123_456, "sm_mhz": 1980})
    gpu["gpm"].update({"sm_util": 12.34567, "pcie_rx_mib_s": 2.0})
    tick["procs"][0].update({"utime": 250})
    frame = decode(header, tick)
    values = frame.gpus[0].values

    assert [0.57, 123.456, 1_980_000_000, 0.12346, 2 * 1024 * 1024] == [
        values[name]
        for name in (
            "gpu_utilization_ratio",
            "power_watts",
            "sm_clock_hertz",
            "sm_active_ratio",
            "pcie_rx_bytes_per_second",
        )
    ]
    assert 2.5 == frame.processes[0].values["cpu_user_seconds_total"]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "n/a"])
@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("mem_temp_c", "memory_temperature_celsius"),
        ("util_gpu", "gpu_utilization_ratio"),
        ("energy_mj", "energy_joules_total"),
        ("pcie_replays", "pcie_replays_total"),
    ],
)
def test_a_reading_that_is_no_number_is_a_gap(
    header: dict[str, Any], tick: dict[str, Any], key: str, name: str, value: object
) -> None:
    """And costs only itself."""

    whole = decode(header, tick).gpus[0].values
    tick["gpus"][0][key] = value

    assert {n: v for n, v in whole.items() if n != name} == decode(header, tick).gpus[0].values


def test_a_reading_that_is_missing_is_a_gap(header: dict[str, Any], tick: dict[str, Any]) -> None:
    """As on cards that do not report it."""

    del tick["gpus"][0]["mem_temp_c"]
    del tick["gpus"][0]["gpm"]["sm_util"]
    values = decode(header, tick).gpus[0].values

    assert not {"memory_temperature_celsius", "sm_active_ratio"} & values.keys()
    assert "power_watts" in values


@pytest.mark.parametrize("gpm", [None, {}, {"sm_util": float("nan")}])
def test_a_line_without_gpm_has_everything_else(
    header: dict[str, Any], tick: dict[str, Any], gpm: object
) -> None:
    """The first line of a trace often has none."""

    tick["gpus"][0]["gpm"] = gpm
    values = decode(header, tick).gpus[0].values

    assert not [name for name in values if name.endswith("_active_ratio")]
    assert "power_watts" in values


def test_a_fact_that_is_missing_is_a_gap(header: dict[str, Any], tick: dict[str, Any]) -> None:
    """The header may know less."""

    header["gpus"][0]["slowdown_c"] = None
    facts = decode(header, tick).gpus[0].device.facts

    assert "temperature_slowdown_celsius" not in facts
    assert "memory_total_bytes" in facts


def test_processes_know_their_place(header: dict[str, Any], tick: dict[str, Any]) -> None:
    """Who is listed by the GPU is on it; shares are ratios."""

    frame = decode(header, tick)
    listed = {process.pid for process in frame.gpus[0].processes or ()}

    assert listed
    assert listed == {process.pid for process in frame.processes if process.on_gpu}
    assert all(0 <= (process.sm_ratio or 0) <= 1 for process in frame.gpus[0].processes or ())


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"t": 1}',
        '{"trace": 1}',
        '{"t": NaN, "gpus": [], "host": {}, "procs": []}',
        "[" * 99_999,
    ],
)
def test_a_line_that_is_not_of_a_trace_is_refused(header: dict[str, Any], line: str) -> None:
    """With a ValueError, whatever is wrong with it."""

    decoder = TraceDecoder()
    decoder.feed(json.dumps(header))

    with pytest.raises(ValueError, match=r"."):
        decoder.feed(line)


def test_a_gpu_that_the_header_does_not_know_is_refused(header: dict[str, Any], tick: dict[str, Any]) -> None:
    """There would be nothing to name it by."""

    tick["gpus"][0]["index"] = 5

    with pytest.raises(ValueError, match="not a line of a trace"):
        decode(header, tick)
