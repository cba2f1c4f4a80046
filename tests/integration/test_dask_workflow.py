"""What the documentation of dask-metrics promises, run as it is printed there on real clusters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.dask_machine import HOST, DaskMachine, Row, columns, dask_machine, read_rows

pytestmark = pytest.mark.slow

CONNECT = "from dask.distributed import Client\n"
ATTACH = """
from dask_metrics import Monitor

client = Client('[scheduler address]')  # Client connected to cluster
monitor = Monitor(client)  # create Monitor object bound to client

# attach monitor to cluster with list of metrics to track
monitor.attach(tracking=['mem-util', 'compute-util'])
monitor.start()  # start recording metrics

client.close()
"""
EXPORT = """
from dask_metrics import Monitor

client = Client('[scheduler address]')  # Client connected to cluster
monitor = Monitor(client)  # Monitor object bound to client

monitor.stop()  # stop recording metrics
monitor.to_csv('path/to/folder')  # export metrics to folder

client.close()
"""
JOBS = """
import time
for job in range(2):
    with Client('[scheduler address]') as client:
        for graph in range(2):
            client.gather(client.map(time.sleep, [0.6] * len(client.nthreads()), pure=False))
"""
CUSTOM = """
import pynvml
client = Client('[scheduler address]')
from dask_metrics import Monitor
monitor = Monitor(client)

from dask_metrics import custom_metric

@custom_metric('power')
def power_usage(worker, handle):
    return pynvml.nvmlDeviceGetPowerUsage(handle)

@custom_metric('hottest', per_device=False)
def hottest(worker, handles):
    return [worker.name, max(pynvml.nvmlDeviceGetTemperature(handle, 0) for handle in handles)]

monitor.attach(
    tracking=['mem-util', 'compute-util'],
    custom_metrics=[power_usage]
)
monitor.detach()

tracking = ['mem-util', 'compute-util']
monitor.attach(tracking, custom_metrics=[power_usage, hottest], polling_interval=50)
monitor.start()
import time
client.gather(client.map(time.sleep, [0.3, 0.3], pure=False))
monitor.stop()
print("peaks", monitor.get_peaks(metric='power', workers=[1, 0], per_job=False))
monitor.to_csv('path/to/folder')
client.close()
"""
PEAKS = """
client = Client('[scheduler address]')
from dask_metrics import Monitor
monitor = Monitor(client)

print("collected", monitor.get_peaks(metric='compute-util', workers=[0, 1]))
print("exported", Monitor.peaks_from_csv('path/to/csv/directory', 'compute-util', workers=[0, 1]))
print("in all", Monitor.peaks_from_csv('path/to/csv/directory', 'compute-util', per_job=False))
client.close()
"""
PLOT = """
from dask_metrics import visualize as vis
job_number = 1
metrics = ['compute-util', 'mem-util']
vis.lines('path/to/worker/file.csv', job_number, metrics)
vis.boxes('path/to/worker/file.csv', job_number, metrics, freq=2, width=6, height=4, save='boxes.png')
vis.lines('path/to/worker/file.csv', job_number, metrics, 6, 4, 'lines.svg')
"""


@pytest.fixture
def machine(tmp_path: Path, nvml_library: Path) -> Iterator[DaskMachine]:
    """A machine with two GPUs and a scheduler."""
    with dask_machine(tmp_path, nvml_library) as made:
        yield made


# A busy machine may be too slow for the timer of distributed's `BatchedSend`, which a closing client then leaves behind.
DASK_NOISE = """Future exception was never retrieved
future: <Future finished exception=TimeoutError('Timeout')>
TimeoutError: Timeout"""


def script(machine: DaskMachine, text: str, **places: str) -> list[str]:
    """Run a sample with its placeholders filled in, as a program of its own; the lines that it printed."""
    known = {"[scheduler address]": f"{HOST}:{machine.port}", "path/to/folder": "metrics/new", **places}
    for placeholder, value in known.items():
        text = text.replace(placeholder, value)
    path = machine.directory / "sample.py"
    path.write_text(CONNECT + text, encoding="utf-8")
    process = machine.run_script(path)
    assert 0 == process.popen.returncode, process.text
    return process.text.replace(DASK_NOISE, "").splitlines()


def test_two_scripts(machine: DaskMachine) -> None:
    """Attach and start by one program, run jobs by others, stop and export by a last one: a file for each worker."""

    count = 4  # two for each GPU
    for number, use in enumerate((37, 91)):
        device = machine.fake.gpu(number)
        device.util_gpu, device.memory_used = use, device.memory_total // 4 * (number + 1)
    machine.start_workers([str(number % 2) for number in range(count)])
    said = [script(machine, text) for text in (ATTACH, JOBS, EXPORT)]

    folder = machine.directory / "metrics" / "new"
    files = [folder / f"worker-{index}.csv" for index in range(count)]
    assert [[], [], []] == said
    assert files == sorted(folder.iterdir())
    assert ["job", "dag", "timestamp", "mem-util", "compute-util"] == columns(files[0])
    gpus = []
    for path in files:
        rows = read_rows(path)
        assert {(1, 1), (1, 2), (2, 1), (2, 2)} <= {row.label for row in rows}
        assert {row.label for row in rows} <= {(j, d) for j in range(3) for d in range(3)}
        (gpu,) = {(*row.cells["mem-util"], *row.cells["compute-util"]) for row in rows}
        gpus.append(gpu)
        times = [row.timestamp for row in rows]
        assert sorted(set(times)) == times
        assert 0 <= times[0] < 60.0
        assert 0.15 < (times[-1] - times[0]) / (len(times) - 1) < 10.0
    assert [(25, 37)] * (count // 2) + [(50, 91)] * (count // 2) == sorted(gpus)


def values(rows: Sequence[Row], metric: str) -> set[tuple[Any, ...]]:
    """Return what a custom metric returned; it may be late on a busy machine, and then has no value in a row."""
    return {tuple(row.cells[metric]) for row in rows if row.cells[metric] is not None}


def test_the_other_samples(machine: DaskMachine) -> None:
    """Custom metrics get the worker and NVML's handles; peaks and plots come of what was recorded and exported."""

    machine.fake.gpu(0).util_gpu, machine.fake.gpu(1).util_gpu = 37, 91
    machine.joined(machine.worker("both"))
    machine.joined(machine.worker("second", visible="1"))
    custom = script(machine, CUSTOM)
    peaks = script(machine, PEAKS, **{"path/to/csv/directory": "metrics/new"})
    plots = script(machine, PLOT, **{"path/to/worker/file.csv": "metrics/new/worker-0.csv"})

    both, second = (read_rows(machine.directory / f"metrics/new/worker-{index}.csv") for index in range(2))
    assert {(76_000, 76_500)} == values(both, "power")
    assert {("both", 29)} == values(both, "hottest")
    assert {(76_500,)} == values(second, "power")
    assert ["peaks [[76500], [76000, 76500]]"] == custom
    assert [
        "collected [{1: [37, 91]}, {1: [91]}]",
        "exported [{1: [37, 91]}, {1: [91]}]",
        "in all [[37, 91], [91]]",
    ] == peaks
    assert [] == plots
    assert b"\x89PNG" == (machine.directory / "boxes.png").read_bytes()[:4]
    assert "<svg" in (machine.directory / "lines.svg").read_text(encoding="utf-8")
