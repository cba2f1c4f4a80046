"""What `gpulse dask status` and `peaks` show."""

from __future__ import annotations

from typing import Any

import pytest

from gpulse.terminal.dask import Peaks, gpus_of, peak_lines, status_lines, value_of
from gpulse.terminal.table import painter

PLAIN = painter(color=False)


def worker(index: int, **more: Any) -> dict[str, Any]:
    """A worker of a status."""
    return {
        "index": index,
        "address": f"tcp://10.0.0.{index}:1",
        "name": f"w{index}",
        "host": "10.0.0.1",
        "pid": 4711,
        "gpus": ("NVIDIA H200", "NVIDIA H200"),
        "here": True,
        "measurements": 1234,
        "last": 246.8,
        "troubles": (),
        **more,
    }


def status(*workers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """How a cluster is monitored."""
    return {
        "running": True,
        "started": True,
        "tracking": ("mem-util",),
        "custom": (),
        "job_type": "client",
        "polling_interval": 200.0,
        "mem_limit": None,
        "dump_loc": "temp",
        "head": None,
        "job": 2,
        "jobs": 2,
        "dags": 1,
        "workers": workers,
        "troubles": (),
        **more,
    }


def shown(document: dict[str, Any], width: int = 120) -> list[str]:
    """What people see."""
    return list(status_lines(document, "tcp://head:8786", width=width, paint=PLAIN))


def test_a_status_is_a_table() -> None:
    """A line a worker, also of those that left."""
    lines = shown(status(worker(0), worker(1, here=False, gpus=(), pid=None, last=None)))

    assert [
        "the cluster at tcp://head:8786 is monitored: 2 jobs (by client), 1 graph",
        "every 200 ms: mem-util",
        "",
        "worker  name  state      GPUs           measurements  last at  host       pid",
        "     0  w0    recording  2 NVIDIA H200         1,234     4:06  10.0.0.1  4711",
        "     1  w1    left       none                  1,234        -  10.0.0.1     -",
    ] == lines


def test_a_status_says_everything_that_was_asked_for() -> None:
    """The limit, the head, the custom metrics, how jobs are counted, and whether it records."""
    lines = shown(
        status(running=False, custom=("power",), mem_limit=9000, head="h:8090", job_type="manual", jobs=1)
    )

    assert "the cluster at tcp://head:8786 is not monitored now: 1 job (by new-job), 1 graph" == lines[0]
    assert (
        "every 200 ms: mem-util, power (custom), 9,000 measurements in memory, streamed to the head at h:8090"
        == lines[1]
    )
    assert "the cluster has no workers yet; they are monitored from the moment they join" == lines[3]
    assert "a monitor that was not started yet" in shown(status(running=False, started=False))[0]


def test_troubles_are_told_once() -> None:
    """With the workers that have them; a traceback stays readable, and whatever a worker says stays harmless."""
    told = "custom metric 'x' fails:\nTraceback:\n  File \x1b[2J\nZeroDivisionError"
    workers = [worker(index, troubles=(told,)) for index in (0, 1, 2, 7)]
    lines = shown(
        status(*workers, worker(8, troubles=("late", told)), troubles=("no GPU anywhere",)), width=60
    )

    assert [
        "",
        "! no GPU anywhere",
        "! workers 0-2,7,8: custom metric 'x' fails:",
        "  Traceback:",
        "    File ^[[2J",
        "  ZeroDivisionError",
        "! worker 8: late",
    ] == lines[-7:]


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_status_fits_the_terminal(width: int) -> None:
    """Columns give way, and names of workers do no harm."""
    hostile = worker(0, name="\x1b]0;x\x07" * 30, host="h" * 300, troubles=("y" * 400,))

    assert [] == [line for line in shown(status(hostile), width) if len(line) > width or "\x1b" in line]


def test_gpus_are_counted() -> None:
    """By their names."""

    assert "no GPU" == gpus_of([worker(0, gpus=())])
    assert "1 GPU (A)" == gpus_of([worker(0, gpus=("A",))])
    assert "3 GPUs (A, B)" == gpus_of([worker(0, gpus=("A", "B")), worker(1, gpus=("A",))])


def test_peaks_are_a_table() -> None:
    """A column a GPU; those that a worker does not have are unknown, and so is what was never read."""
    peaks = [Peaks(0, 1, [50.25, None]), Peaks(0, 2, [100, 3]), Peaks(8, 1, [7])]

    assert [
        "highest mem-util",
        "worker  job   GPU 0  GPU 1",
        "     0    1  50.25%      -",
        "     0    2    100%     3%",
        "     8    1      7%      -",
    ] == list(peak_lines("mem-util", peaks, width=80, paint=PLAIN))


def test_one_value_has_the_name_of_its_metric() -> None:
    """And without jobs there is no column for them."""

    assert ["worker  cores", "     0    2.5"] == list(
        peak_lines("cores", [Peaks(0, None, [2.5])], width=80, paint=PLAIN)
    )
    assert ["worker  mem-util", "     0         -"] == list(
        peak_lines("mem-util", [Peaks(0, None, [])], width=80, paint=PLAIN)
    )


@pytest.mark.parametrize(
    ("text", "metric", "value"),
    [
        ("9.4G", "total-mem", 10_093_173_145),
        ("612M", "memory_used_bytes", 612 << 20),
        ("34.0 MB/s", "pcie_rx_bytes_per_second", 34_000_000),
        ("87%", "sm_active_ratio", 0.873),
        ("259W", "host.power_watts", 258.8),
        ("51C", "temperature_celsius", 51),
        ("1905MHz", "sm_clock_hertz", 1_905_000_000),
        ("12,345", "power", 12345),
        ("-", "power", None),
        ("-", "compute-util", None),
    ],
)
def test_values_have_the_unit_of_their_name(text: str, metric: str, value: float | None) -> None:
    """As everywhere else on the terminal."""

    assert text == value_of(metric, value)
