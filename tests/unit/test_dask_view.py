"""What `gpulse dask status` and `peaks` show."""

from __future__ import annotations

from typing import Any

import pytest

from gpulse.terminal.dask_tables import (
    WorkerPeaks,
    describe_newest_job,
    describe_workers,
    format_value,
    peak_lines,
    status_lines,
)
from gpulse.terminal.table import make_painter

PLAIN = make_painter(color=False)


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
        "the cluster at tcp://head:8786 is being monitored: newest job 2 (one job per client), 1 graph",
        "every 200 ms: mem-util",
        "",
        "worker  name  state      GPUs           measurements  until  host       pid",
        "     0  w0    recording  2 NVIDIA H200         1,234   4:06  10.0.0.1  4711",
        "     1  w1    left       none                  1,234      -  10.0.0.1     -",
    ] == lines


def test_a_status_says_everything_that_was_asked_for() -> None:
    """The limit, the head, the custom metrics, how jobs are counted, and whether it records."""
    lines = shown(
        status(
            running=False, custom=("power",), mem_limit=9000, head="h:8090", job_type="manual", job=7, jobs=9
        )
    )

    assert (
        "the cluster at tcp://head:8786 is not being monitored now: newest job 7 (each new-job begins a job), 1 graph"
        == lines[0]
    )
    assert (
        "every 200 ms: mem-util, power (custom), at most 9,000 measurements in memory, streamed to the head at h:8090"
        == lines[1]
    )
    assert "the cluster has no workers yet; each is monitored as soon as it joins" == lines[3]
    assert "a monitor that has not been started yet" in shown(status(running=False, started=False))[0]


def test_troubles_are_reported_once() -> None:
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


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ("0 workers", []),
        ("2 workers without GPUs", [(), ()]),
        ("1 worker with 1 GPU (A)", [("A",)]),
        ("1 worker with 2 GPUs (A, B)", [("A", "B")]),
        ("2 workers with 2 GPUs each (A)", [("A", "A"), ("A", "A")]),
        ("2 workers with 1 GPU each (A, B)", [("A",), ("B",)]),
        ("3 workers with 0 to 2 GPUs each (A)", [("A", "A"), (), ("A",)]),
    ],
)
def test_gpus_of_workers_are_not_added_up(words: str, gpus: list[tuple[str, ...]]) -> None:
    """Two workers of one machine may see the same ones."""

    assert words == describe_workers([worker(index, gpus=names) for index, names in enumerate(gpus)])


def test_the_newest_job_is_no_count() -> None:
    """Numbers can be left out by hand."""

    assert ["no jobs yet", "newest job 7"] == [describe_newest_job(number) for number in (0, 7)]


def test_peaks_are_a_table() -> None:
    """A column a GPU; those that a worker does not have are unknown, and so is what was never read."""
    peaks = [WorkerPeaks(0, 1, [50.25, None]), WorkerPeaks(0, 2, [100, 3]), WorkerPeaks(8, 1, [7])]

    assert [
        "highest mem-util",
        "worker  job   GPU 0  GPU 1",
        "     0    1  50.25%      -",
        "     0    2    100%     3%",
        "     8    1      7%      -",
    ] == list(peak_lines("mem-util", peaks, "percent", width=26, paint=PLAIN))


def test_peaks_are_not_cut_on_a_narrow_terminal() -> None:
    """A line a GPU then: half a number would be another number."""
    peaks = [WorkerPeaks(0, 1, [50.25, None]), WorkerPeaks(8, 12, [100])]

    assert [
        "highest mem-util",
        "worker  job  GPU    peak",
        "     0    1    0  50.25%",
        "     0    1    1       -",
        "     8   12    0    100%",
    ] == list(peak_lines("mem-util", peaks, "percent", width=25, paint=PLAIN))
    assert ["highest heap", "worker        peak", "     0  12,345,678"] == list(
        peak_lines("heap", [WorkerPeaks(0, None, [12_345_678])], width=15, paint=PLAIN)
    )


def test_one_value_has_the_name_of_its_metric() -> None:
    """And without jobs there is no column for them."""

    assert ["worker  cores", "     0    2.5"] == list(
        peak_lines("cores", [WorkerPeaks(0, None, [2.5])], width=80, paint=PLAIN)
    )
    assert ["worker  mem-util", "     0         -"] == list(
        peak_lines("mem-util", [WorkerPeaks(0, None, [])], width=80, paint=PLAIN)
    )


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("9.4G", "bytes", 10_093_173_145),
        ("612M", "bytes", 612 << 20),
        ("34.0 MB/s", "bytes/second", 34_000_000),
        ("87%", "ratio", 0.873),
        ("50.25%", "percent", 50.25),
        ("87.35%", "percent", 87.345678),
        ("259W", "watts", 258.8),
        ("51C", "celsius", 51),
        ("1905MHz", "hertz", 1_905_000_000),
        ("34.5kJ", "joules", 34_512.0),
        ("16", "lanes", 16),
        ("12,345", "", 12345),
        ("-", "", None),
        ("-", "percent", None),
    ],
)
def test_values_have_their_unit(text: str, unit: str, value: float | None) -> None:
    """As everywhere else on the terminal."""

    assert text == format_value(value, unit)
