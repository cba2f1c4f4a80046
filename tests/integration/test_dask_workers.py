"""Workers that come, go and are killed, the GPUs that they see, and a scheduler that is started again."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpulse.errors import GpulseError
from gpulse.integrations.dask import Monitor
from gpulse.integrations.dask.worker_registry import WorkerStatus
from tests.integration import dask_tasks as tasks
from tests.integration.cluster import until
from tests.integration.dask_machine import DaskMachine, Row, dask_machine, read_rows, rows_until

if TYPE_CHECKING:
    from distributed import Client

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[DaskMachine]:
    """A machine with two GPUs and a worker that stays through all tests of this file."""
    with dask_machine(tmp_path_factory.mktemp("workers"), nvml_library) as made:
        made.start_workers(["0"], prefix="stays")
        yield made


@contextmanager
def monitored(machine: DaskMachine, **given: Any) -> Iterator[Monitor]:
    """Monitor a cluster at the fastest pace."""
    with machine.client() as client:
        monitor = Monitor(client)
        settings = {"tracking": ["tasks", "compute-util"], "custom_metrics": [tasks.BEAT], **given}
        monitor.attach(polling_interval=50, **settings)
        monitor.start()
        try:
            yield monitor
        finally:
            monitor.detach()


def index_of(monitor: Monitor, name: str) -> int:
    """The index of the worker that is or was called so."""
    found: int
    (found,) = (worker.index for worker in monitor.status().workers if worker.name == name)
    return found


def rows_of(monitor: Monitor, folder: Path, name: str) -> list[Row]:
    """What is recorded of one worker."""
    return read_rows(monitor.to_csv(folder)[index_of(monitor, name)])


def gone(monitor: Monitor, name: str) -> None:
    """Wait until the scheduler has noticed that a worker is away."""
    until(lambda: not _is_here(monitor, name), f"{name} to be gone")


def _is_here(monitor: Monitor, name: str) -> bool:
    return any(worker.here for worker in monitor.status().workers if worker.name == name)


def has_run(key: str, times: int = 1) -> Any:
    """Whether rows name a task so often."""
    return lambda rows: sum(key in row.cells["tasks"] for row in rows) >= times


def test_killed_in_the_middle(machine: DaskMachine, tmp_path: Path) -> None:
    """A worker that is killed keeps all that had come of it; its task goes on elsewhere, in its graph."""

    begun, go = tmp_path / "begun", tmp_path / "go"
    victim = machine.joined(machine.worker("victim", visible="1"))
    with monitored(machine) as monitor, machine.client() as client:
        where = [victim.address, machine.workers["stays0"].address]
        future = client.submit(
            tasks.held, str(begun), str(go), key="moves", workers=where[:1], allow_other_workers=True
        )
        until(begun.exists, "the task")
        before = rows_until(
            lambda: rows_of(monitor, tmp_path / "before", "victim"), has_run("moves", 5), "rows of the task"
        )
        victim.kill()
        gone(monitor, "victim")
        go.touch()
        assert 0 == future.result()
        client.submit(tasks.seen, key="next").result()
        monitor.stop()
        after = rows_of(monitor, tmp_path / "after", "victim")
        stays = rows_of(monitor, tmp_path / "after", "stays0")

    assert before == after[: len(before)]
    assert {(1, 1)} == {row.label for row in after if row.cells["tasks"]}
    assert {(1, 1)} == {row.label for row in stays if row.cells["tasks"] == ["moves"]}
    assert {(1, 2)} == {row.label for row in stays if row.cells["tasks"] == ["next"]}
    assert unbroken(stays)


def unbroken(rows: list[Row]) -> bool:
    """Whether no measurement is missing: each is numbered by the custom metric, unless that was late for it."""
    numbers = (row.cells["beat"] for row in rows)
    beats = list(dict.fromkeys(number for number in numbers if number is not None))
    return list(range(beats[0], beats[0] + len(beats))) == beats


def test_who_comes_later(machine: DaskMachine, tmp_path: Path) -> None:
    """A worker that joins is monitored from then on, under the next index; one that leaves keeps its data."""

    with monitored(machine) as monitor, machine.client() as client:
        client.submit(tasks.seen, key="early").result()
        so_far = rows_until(
            lambda: rows_of(monitor, tmp_path, "stays0"), has_run("early"), "rows of the task"
        )
        late = machine.joined(machine.worker("late", visible="1"))
        client.submit(tasks.seen, key="late", workers=[late.address]).result()
        client.retire_workers([late.address])
        gone(monitor, "late")
        assert 0 == late.popen.wait(60), late.text
        late.end()
        client.submit(tasks.seen, key="last").result()
        monitor.stop()
        files = monitor.to_csv(tmp_path / "all")
        status = monitor.status()

    assert [("stays0", True), ("late", False)] == [(worker.name, worker.here) for worker in status.workers]
    assert ["worker-0.csv", "worker-1.csv"] == [path.name for path in files]
    stays, joined = (read_rows(path) for path in files)
    assert {(1, 2)} == {row.label for row in joined if row.cells["tasks"]}
    assert joined[0].timestamp > so_far[-1].timestamp
    assert joined[-1].timestamp < stays[-1].timestamp
    assert unbroken(joined)
    assert unbroken(stays)


def test_the_last_rows_of_one_that_leaves(machine: DaskMachine, tmp_path: Path) -> None:
    """A worker that is told to end sends what it has measured before it goes."""

    begun, go = tmp_path / "begun", tmp_path / "go"
    leaver = machine.joined(machine.worker("leaver"))
    with monitored(machine) as monitor, machine.client() as client:
        client.submit(tasks.held, str(begun), str(go), key="fleeting", workers=[leaver.address])
        until(begun.exists, "the task")
        go.touch()
        client.submit(tasks.seen, key="finishing", workers=[leaver.address]).result()
        leaver.popen.send_signal(signal.SIGTERM)
        gone(monitor, "leaver")
        rows = rows_until(lambda: rows_of(monitor, tmp_path, "leaver"), has_run("finishing"), "the last rows")
        leaver.kill()  # dask itself may now wait for half a minute

    assert {(1, 2)} == {row.label for row in rows if row.cells["tasks"] == ["finishing"]}
    assert unbroken(rows)


def test_restarted_under_its_address(machine: DaskMachine, tmp_path: Path) -> None:
    """A worker that comes back under its address goes on in its own file, after a gap."""

    returns = machine.joined(machine.worker("returns"))
    with monitored(machine) as monitor, machine.client() as client:
        client.submit(tasks.seen, key="before", workers=[returns.address]).result()
        rows_until(lambda: rows_of(monitor, tmp_path, "returns"), has_run("before"), "rows of the task")
        returns.kill()
        gone(monitor, "returns")
        returns = machine.restart("returns")
        client.submit(tasks.seen, key="after", workers=[returns.address]).result()
        monitor.stop()
        workers = monitor.status().workers
        process = process_of(monitor, "returns")
        rows = rows_of(monitor, tmp_path / "all", "returns")
        returns.kill()

    assert 2 == len(workers)
    assert returns.popen.pid == process
    beats = [row.cells["beat"] for row in rows]
    times = [row.timestamp for row in rows]
    assert sorted(times) == times
    gaps = [later - earlier for earlier, later in pairwise(times)]
    restart = gaps.index(max(gaps)) + 1
    assert [1, 1] == [beats[:restart].count(1), beats[restart:].count(1)]
    assert {"before": {(1, 1)}, "after": {(1, 2)}} == {
        key: {row.label for row in rows if row.cells["tasks"] == [key]} for key in ("before", "after")
    }


def test_restarted_by_its_nanny(machine: DaskMachine, tmp_path: Path) -> None:
    """A worker that its nanny starts anew has another process, and goes on in its own file all the same."""

    nanny = machine.joined(machine.worker("kept", nanny=True))
    with monitored(machine) as monitor, machine.client() as client:
        client.submit(tasks.seen, key="before", workers=["kept"]).result()
        before = process_of(monitor, "kept")
        client.restart_workers(["kept"])
        client.submit(tasks.seen, key="after", workers=["kept"]).result()
        monitor.stop()
        after = process_of(monitor, "kept")
        rows = rows_of(monitor, tmp_path, "kept")
    nanny.end()

    assert before != after
    assert {"before": {(1, 1)}, "after": {(1, 2)}} == {
        key: {row.label for row in rows if row.cells["tasks"] == [key]} for key in ("before", "after")
    }


def process_of(monitor: Monitor, name: str) -> int | None:
    """The process of a worker."""
    workers: tuple[WorkerStatus, ...] = monitor.status().workers
    return workers[index_of(monitor, name)].pid


LIKE_DASK_CUDA = """
from distributed import WorkerPlugin

class CPUAffinity(WorkerPlugin):
    name = "affinity"

CPUAffinity.__module__ = "dask_cuda.plugins"

async def dask_setup(worker):
    await worker.plugin_add(CPUAffinity())
"""


def test_what_workers_see(machine: DaskMachine, tmp_path: Path) -> None:
    """GPUs come in CUDA's order for each worker, whoever else sees them; dask-cuda's workers see all and have their first."""

    uuid = machine.fake.gpu(1).uuid.decode()
    visible = {"none": "", "first": "0", "same": "0", "both": None, "turned": "1,0", "named": uuid}
    like_dask_cuda = tmp_path / "like_dask_cuda.py"
    like_dask_cuda.write_text(LIKE_DASK_CUDA, encoding="utf-8")
    for gpu in (0, 1):
        machine.fake.gpu(gpu).util_gpu = 10 + gpu
        machine.fake.gpu(gpu).memory_used = 1000 + gpu
        machine.fake.gpu(gpu).power_mw = 100_500 + 1000 * gpu
    started = [machine.worker(name, visible=seen) for name, seen in visible.items()]
    started.append(machine.worker("cuda", "--preload", str(like_dask_cuda), visible="1,0"))
    for process in started:
        machine.joined(process)
    tracking = ["compute-util", "total-mem", "power_watts", "memory_total_bytes", "host.memory_total_bytes"]
    with monitored(machine, tracking=tracking) as monitor, machine.client() as client:
        addresses = [process.address for process in started]
        client.gather([client.submit(tasks.seen, pure=False, workers=[address]) for address in addresses])
        monitor.stop()
        found = {name: rows_of(monitor, tmp_path, name)[-1].cells for name in (*visible, "cuda")}
        names = {worker.name: len(worker.gpus) for worker in monitor.status().workers}
        peaks = monitor.get_peaks("total-mem", per_job=False)
        order = [worker.name for worker in monitor.status().workers]
    for process in started:
        process.kill()

    seen = {
        "none": [],
        "first": [0],
        "same": [0],
        "both": [0, 1],
        "turned": [1, 0],
        "named": [1],
        "cuda": [1],
    }
    assert {name: [10 + gpu for gpu in gpus] for name, gpus in seen.items()} == {
        name: cells["compute-util"] for name, cells in found.items()
    }
    assert {name: [1000 + gpu for gpu in gpus] for name, gpus in seen.items()} == {
        name: cells["total-mem"] for name, cells in found.items()
    }
    assert {name: [100.5 + gpu for gpu in gpus] for name, gpus in seen.items()} == {
        name: cells["power_watts"] for name, cells in found.items()
    }
    assert {name: len(gpus) for name, gpus in {**seen, "stays0": [0]}.items()} == names
    assert [[1000 + gpu for gpu in seen.get(name, [0])] for name in order] == peaks
    host = {cells["host.memory_total_bytes"] for cells in found.values()}
    assert 1 == len(host)
    assert [machine.fake.gpu(1).memory_total] == found["named"]["memory_total_bytes"] != [*host]


def test_without_gpus(tmp_path: Path, nvml_library: Path) -> None:
    """A cluster without GPUs is measured all the same, and it is said that there are none."""

    with dask_machine(tmp_path / "machine", nvml_library, gpus=0) as machine:
        machine.start_workers([None, None])
        tracking = ["tasks", "mem-util", "cpu_utilization_ratio", "host_memory_bytes", "threads"]
        with monitored(machine, tracking=tracking) as monitor, machine.client() as client:
            client.gather(client.map(tasks.seen, range(2), key="work"))
            client.submit(tasks.seen, key="more").result()
            monitor.stop()
            status = monitor.status()
            rows = [row for path in monitor.to_csv(tmp_path / "csv") for row in read_rows(path)]
            peaks = monitor.get_peaks("mem-util", per_job=False)
            threads = monitor.get_peaks("threads", per_job=False)

    assert [[], []] == peaks
    assert {"[]"} == {json.dumps(row.cells["mem-util"]) for row in rows}
    assert all(row.cells["host_memory_bytes"] > 1 << 20 for row in rows)
    assert any(row.cells["cpu_utilization_ratio"] is not None for row in rows)
    assert all(count >= 3 for (count,) in threads)
    assert {(1, 1), (1, 2)} <= {row.label for row in rows}
    assert any("GPU" in trouble for trouble in status.troubles), status


def test_the_scheduler_is_started_again(tmp_path: Path, nvml_library: Path) -> None:
    """A scheduler that is started again knows nothing of the monitor, and whoever asks is told so, also through an old client."""

    with dask_machine(tmp_path / "machine", nvml_library) as machine:
        machine.start_workers(["0"])
        with machine.client() as old:
            Monitor(old).attach(["mem-util"])
            Monitor(old).start()
            script = tmp_path / "killed_meanwhile.py"
            script.write_text(KILLED_MEANWHILE, encoding="utf-8")
            lost = machine.run_script(script, machine.address, str(machine.scheduler.popen.pid)).text
            machine.scheduler.kill()
            machine.start_scheduler()
            machine.start_workers(["1"], prefix="new")
            told = [*refusals(old, tmp_path)]
            with machine.client() as client:
                told += refusals(client, tmp_path)
                Monitor(client).attach(["mem-util"])
                Monitor(client).start()
                Monitor(client).stop()
            # Closed while it connects again, a client of distributed leaves a socket open.
            until(lambda: old.status == "running", "the old client to be back")

    assert "told: the scheduler does not respond" in lost
    assert 6 == len(told)
    for error in told:
        assert "was restarted" in str(error)
        assert "attach" in str(error.hint)


KILLED_MEANWHILE = """
import asyncio, os, signal, sys
from distributed import Client
from gpulse.errors import GpulseError
from gpulse.integrations.dask import Monitor

async def main(address, scheduler):
    async with Client(address, asynchronous=True, timeout=1) as client:
        await Monitor(client).status()
        os.kill(int(scheduler), signal.SIGKILL)
        try:
            await Monitor(client).stop()
        except GpulseError as error:
            print("told:", error, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""
"""A program of its own: a client whose scheduler is gone leaves sockets behind."""


def refusals(client: Client, folder: Path) -> Iterator[GpulseError]:
    """What somebody is told who goes on as if nothing had happened."""
    monitor = Monitor(client)
    for ask in (monitor.start, monitor.stop, lambda: monitor.to_csv(folder / "csv")):
        with pytest.raises(GpulseError) as refused:
            ask()
        yield refused.value
