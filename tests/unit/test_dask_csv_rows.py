"""A worker's measurement: which GPUs are its own, what a frame says about each column, and people's own metrics."""

from __future__ import annotations

import csv
import io
import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from math import nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.integrations.dask.csv_files import FrameReader, build_header, build_lines, to_plain_json
from gpulse.integrations.dask.job_labels import GraphLabel
from gpulse.integrations.dask.monitor_settings import CustomMetric, custom_metric
from gpulse.integrations.dask.trackable_metrics import build_columns, list_trackable
from gpulse.integrations.dask.worker_sampling import (
    CustomMetricRunner,
    ExecutingTasks,
    WorkerMachine,
    WorkerSamplingThread,
    open_gpus,
    unique_labels,
)
from gpulse.model.device import Device, select_own_gpus
from gpulse.model.frame import Frame, GpuReading, HostReading
from gpulse.model.process import GpuProcess
from gpulse.sources.demo_machine import DemoMachine
from tests.fakes.nvml import FakeNvml

GPUS = [Device(index, f"GPU-{index}aa", f"card {index}") for index in range(3)]
SPLIT = [
    GPUS[0],
    Device(1, "GPU-1aa", "card 1"),
    Device(1, "MIG-10", "slice", parent_uuid="GPU-1aa", mig_index=0),
    Device(1, "MIG-11", "slice", parent_uuid="GPU-1aa", mig_index=1),
]


@pytest.mark.parametrize(
    ("variable", "first_only", "uuids"),
    [
        (None, False, ["GPU-0aa", "GPU-1aa", "GPU-2aa"]),
        ("2,0", False, ["GPU-2aa", "GPU-0aa"]),
        ("1,2,0", True, ["GPU-1aa"]),
        ("", False, []),
        ("-1", False, []),
        ("0,7,1", False, ["GPU-0aa"]),
        ("1,1", False, ["GPU-1aa"]),
        ("GPU-2", False, ["GPU-2aa"]),
    ],
)
def test_the_gpus_of_a_worker_are_those_that_cuda_shows_it(
    variable: str | None, first_only: bool, uuids: list[str]
) -> None:
    """In CUDA's order; with dask-cuda the first of them is its own."""
    assert uuids == [device.uuid for device in select_own_gpus(GPUS, variable, first_only=first_only)]


def test_a_gpu_that_is_split_counts_by_its_instances() -> None:
    """A worker that is given one of them has that one."""
    assert ["GPU-0aa", "MIG-10", "MIG-11"] == [device.uuid for device in select_own_gpus(SPLIT, None)]
    assert ["MIG-11"] == [device.uuid for device in select_own_gpus(SPLIT, "MIG-11")]
    assert ["MIG-10", "GPU-0aa"] == [device.uuid for device in select_own_gpus(SPLIT, "1,0")]


def frame(*gpus: GpuReading, **given: Any) -> Frame:
    """A frame of these GPUs."""
    base = next(iter([DemoMachine(1000.0, gpus=1).sample(1001.0)]))
    return Frame(time=1001.0, monotonic=1.0, node=base.node, gpus=gpus, **given)


def test_dask_metrics_own_columns_are_percent_and_bytes() -> None:
    """A value a GPU, in the worker's order, None where it is not known."""
    readings = [
        GpuReading(GPUS[0], {"memory_used_bytes": 1, "memory_total_bytes": 3, "gpu_utilization_ratio": 0.29}),
        GpuReading(GPUS[1], {"memory_used_bytes": 7}),
    ]
    reader = FrameReader(
        build_columns(["total-mem", "mem-util", "compute-util", "tasks"]), ["GPU-1aa", "GPU-0aa", "GPU-9"], 1
    )

    found = reader.cells(frame(*readings), ["a", "('b', 1)"])

    assert [[7, 1, None], [None, 33.33, None], [None, 29, None], ["a", "('b', 1)"]] == found


def test_what_a_process_has_on_gpus_is_the_workers_own() -> None:
    """Whoever else is on them: so workers that share a GPU can be told apart."""
    readings = [
        GpuReading(GPUS[0], {}, (GpuProcess(1, "compute", 5, 0.5), GpuProcess(2, "compute", 6, None))),
        GpuReading(GPUS[1], {}, None),
    ]

    found = FrameReader(build_columns(["gpu_memory_bytes", "sm_ratio"]), ["GPU-0aa", "GPU-1aa"], 2).cells(
        frame(*readings), []
    )

    assert [[6, None], [None, None]] == found


def test_rates_need_two_frames_and_say_nothing_before() -> None:
    """Of the host, and of anything else."""
    reader = FrameReader(
        build_columns(["cpu_utilization_ratio", "context_switches_per_second", "load1"]), [], 1
    )

    def host(ticks: float) -> Frame:
        values = {
            "cpu_user_seconds_total": ticks, "cpu_idle_seconds_total": 3 * ticks, "context_switches_total": 10 * ticks, "load1": 0.5
        }  # fmt: skip
        return frame(host=HostReading(values))._replace(monotonic=ticks)

    assert [None, None, 0.5] == reader.cells(host(1.0), [])
    assert [0.25, 10.0, 0.5] == reader.cells(host(3.0), [])


def test_every_name_can_be_read_off_a_whole_machine() -> None:
    """Of the simulated one, whose frames have everything; no reading is a thing that JSON lacks."""
    machine = DemoMachine(1000.0, gpus=2)
    frames = [machine.sample(1001.0), machine.sample(1002.0)]
    uuids = [gpu.device.uuid for gpu in frames[0].gpus]
    pid = frames[0].processes[0].pid
    tracked = build_columns(list_trackable())
    reader = FrameReader(tracked, uuids, pid)
    reader.cells(frames[0], [])

    cells = dict(zip([column.name for column in tracked], reader.cells(frames[1], ["x"]), strict=True))

    assert all(isinstance(cells[c.name], list) for c in tracked if c.shape in ("gpus", "tasks"))
    assert all(isinstance(cells[c.name], dict) for c in tracked if c.shape == "named")
    assert cells["cpu_utilization_ratio"] is not None
    assert cells["power_watts"][0] is not None
    assert cells["host_memory_bytes"] is not None
    json.dumps(cells, allow_nan=False)


@given(
    st.lists(
        st.lists(
            st.one_of(st.none(), st.integers(), st.text(), st.floats(allow_nan=False, allow_infinity=False))
        )
    ),
    st.floats(0, 1e9),
)
def test_lines_read_back_as_they_were_written(cells: list[Any], timestamp: float) -> None:
    """Whatever is in them, by any reader of CSV."""
    text = build_lines([GraphLabel(1, 2), None], timestamp, cells)

    rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))

    assert [["1", "2"], ["", ""]] == [row[:2] for row in rows]
    assert [cells, cells] == [[json.loads(cell) for cell in row[3:]] for row in rows]


def test_lines_are_harmless_in_terminals() -> None:
    """Control characters and direction overrides in names of tasks are escaped, as JSON does."""
    text = build_lines([None], 1.0, [["\x1b[2J\x9b\u202e\u2028ä"], "=1+1"])

    assert ',,1.000,"[""\\u001b[2J\\u009b\\u202e\\u2028\\u00e4""]","""=1+1"""\n' == text


def test_the_header_names_every_column() -> None:
    """Also one whose name has a comma in it."""
    assert 'job,dag,timestamp,tasks,"a, b"\n' == build_header(build_columns(["tasks"]), ["a, b"])


def test_graphs_are_named_once_and_in_order() -> None:
    """What is unlabelled matters only when nothing else is there."""
    assert (GraphLabel(1, 2), GraphLabel(2, 1)) == unique_labels(
        [GraphLabel(2, 1), None, GraphLabel(1, 2), GraphLabel(2, 1)]
    )
    assert 1 == len(unique_labels([GraphLabel(1, 1, 3), GraphLabel(1, 1, 4)]))
    assert (None,) == unique_labels([None, None])


class Scalar:
    """A number as array libraries have it."""

    shape = ()

    def item(self) -> int:
        """The number."""
        return 7


def test_answers_of_functions_become_json() -> None:
    """Numbers of array libraries too, and never NaN; anything else is said to be none."""
    assert [1, None, "x", [7, None], {"a": 2.5}] == to_plain_json([1, nan, "x", (Scalar(), None), {"a": 2.5}])
    assert "a\\udcffb" == to_plain_json("a\udcffb")
    assert [2.0**64, None] == to_plain_json([2**64, 10**5000])
    for wrong in (object(), {1, 2}, [[[[[1]]]]]):
        with pytest.raises(TypeError, match="it returned"):
            to_plain_json(wrong)


@pytest.fixture
def reports() -> list[str]:
    """What was reported."""
    return []


def asking(
    metrics: list[CustomMetric], reports: list[str], handles: list[Any] | None = None
) -> CustomMetricRunner:
    """A reader of people's own metrics that waits for a minute, half its interval, so that no answer is late."""
    reader = CustomMetricRunner(metrics, "worker", interval_seconds=120.0, report=reports.append)
    reader.handles = handles or []
    return reader


def test_custom_metrics_are_asked_for_each_gpu_or_for_all(reports: list[str]) -> None:
    """With the worker, and what they need to ask the driver."""
    each = custom_metric("each")(lambda worker, handle: f"{worker}{handle}")
    every = custom_metric("every", per_device=False)(lambda _, handles: sum(handles))

    with closing(asking([each, every], reports, [1, 2])) as reader:
        found = reader.cells()

    assert ([["worker1", "worker2"], 3], []) == (found, reports)


def test_a_custom_metric_that_raises_is_reported_once(reports: list[str]) -> None:
    """With its traceback; it is missing then, and the others are not."""

    @custom_metric("broken")
    def broken(worker: object, handle: object) -> int:  # noqa: ARG001
        raise KeyError("nothing here")

    fine = custom_metric("fine", per_device=False)(lambda *_: 1)
    with closing(asking([broken, fine], reports, [1])) as reader:
        found = [reader.cells() for _ in range(3)]

    assert [[None, 1]] * 3 == found
    assert 1 == len(reports)
    assert "'broken' failed" in reports[0]
    assert "raise KeyError" in reports[0]
    assert "asking.py" not in reports[0]


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt])
def test_a_custom_metric_that_wants_to_end_the_program_just_fails(
    reports: list[str], ending: type[BaseException]
) -> None:
    """Its thread goes on to be asked."""

    @custom_metric("leaving", per_device=False)
    def leaving(worker: object, handles: object) -> int:  # noqa: ARG001
        raise ending

    with closing(asking([leaving], reports)) as reader:
        assert [[None], [None]] == [reader.cells() for _ in range(2)]

    assert [True] == [ending.__name__ in report for report in reports]


def test_a_custom_metric_that_hangs_holds_nobody_up(reports: list[str]) -> None:
    """It is missing until it comes back, which it is told of once."""
    go = threading.Event()
    hanging = CustomMetric("hanging", lambda *_: go.wait(600) and 5, per_device=False)
    fine = custom_metric("fine", per_device=False)(lambda *_: 1)

    with closing(asking([hanging, fine], reports)) as reader:
        reader._patience, reader._late_seconds = 1.0, 1.5
        first = [reader.cells() for _ in range(3)]
        go.set()
        while (last := reader.cells())[0] is None:
            pass

    assert [[None, 1]] * 3 == first
    assert [5, 1] == last
    assert 1 == len(reports)
    assert "'hanging' takes longer than 1.5 s" in reports[0]


def test_a_gpu_without_a_handle_has_no_answer(reports: list[str]) -> None:
    """The others of the worker have theirs."""
    metric = custom_metric("each")(lambda _, handle: handle * 2)

    with closing(asking([metric], reports, [1, None, 3])) as reader:
        assert [[2, None, 6]] == reader.cells()


class Counting:
    """A source of frames that counts."""

    def __init__(self) -> None:
        self.taken = threading.Semaphore(0)

    def sample(self, now: float) -> Frame:
        """The next one."""
        self.taken.release()
        return frame()._replace(time=now)

    def close(self) -> None:
        """Nothing is held."""


def recorder(source: Counting, ticks: Iterator[float], reports: list[str]) -> WorkerSamplingThread:
    """One that measures with a made-up clock."""
    return WorkerSamplingThread(
        source,
        0.05,
        frames=FrameReader(build_columns(["tasks"]), [], 1),
        custom=asking([], reports),
        executing=lambda: ExecutingTasks(("x",), (GraphLabel(1, 1), GraphLabel(2, 1))),
        elapsed=lambda _: next(ticks),
    )


def test_a_measurement_has_a_line_for_each_graph(reports: list[str]) -> None:
    """With the same time, and is counted once."""
    made = recorder(Counting(), iter([1.0, 2.0]), reports)
    made.take(frame())
    made.take(frame())

    batch = made.take_batch()

    assert batch is not None
    assert (2, 2.0, 0) == (batch.measurements, batch.last, batch.lost)
    assert ['1,1,1.000,"[""x""]"', '2,1,1.000,"[""x""]"'] == batch.rows.splitlines()[:2]
    assert 4 == batch.rows.count("\n")
    assert made.take_batch() is None


def test_a_scheduler_that_takes_nothing_does_not_fill_the_memory(reports: list[str]) -> None:
    """The oldest are given up, and it is said how many."""
    made = recorder(Counting(), iter(float(n) for n in range(20_010)), reports)
    empty = frame()
    for _ in range(20_005):
        made.take(empty)

    batch = made.take_batch()

    assert batch is not None
    assert (20_000, 5) == (batch.measurements, batch.lost)
    assert batch.rows.startswith("1,1,5.000")


def test_the_thread_measures_until_it_is_stopped(reports: list[str]) -> None:
    """And is gone then."""
    source = Counting()
    made = recorder(source, iter(map(float, range(1000))), reports)
    made.start()
    for _ in range(3):
        source.taken.acquire(timeout=60)
    made.stop()

    batch = made.take_batch()
    assert batch is not None
    assert batch.measurements >= 2
    assert made.error is None
    assert not [thread for thread in threading.enumerate() if thread.name == "gpulse-dask"]


def test_a_worker_reads_no_more_than_its_columns_need(fake_nvml: FakeNvml) -> None:
    """Of its own GPUs alone, and of the driver nothing else."""
    fake_nvml.add(1)
    tracked = build_columns(["compute-util", "host_memory_bytes", "load1"])
    reader = open_gpus(tracked, 0.2, 1000.0)
    chosen = select_own_gpus(reader.devices, "1")
    reader.only(frozenset(device.uuid for device in chosen))
    with closing(WorkerMachine(tracked, reader)) as machine:
        frames = [machine.sample(1000.0 + n) for n in range(3)]

    by_index = {gpu.device.index: gpu.values for gpu in frames[-1].gpus}
    assert (
        {"gpu_utilization_ratio"}
        <= by_index[1].keys()
        <= {"gpu_utilization_ratio", "memory_utilization_ratio"}
    )
    assert {} == by_index[0]
    assert frames[-1].host is not None
    assert [os.getpid()] == [process.pid for process in frames[-1].processes]
    assert ((), ()) == (frames[-1].disks, frames[-1].network)
    assert frames[-1].gpus[1].processes is None
