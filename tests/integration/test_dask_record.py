"""What is recorded on a real cluster, how it is kept and given out, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from gpulse.errors import GpulseError, UsageError
from gpulse.integrations.dask import Monitor, custom_metric
from tests.integration import dask_tasks as tasks
from tests.integration.cluster import until
from tests.integration.dask_machine import DaskMachine, Row, columns, dask_machine, read_rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[DaskMachine]:
    """A machine with two GPUs, and a worker for each."""
    with dask_machine(tmp_path_factory.mktemp("record"), nvml_library) as made:
        made.start_workers(["0", "1"])
        yield made


@pytest.fixture
def monitor(machine: DaskMachine) -> Iterator[Monitor]:
    """A monitor that is not attached yet."""
    with machine.client() as client:
        made = Monitor(client)
        yield made
        made.detach()


def begin(monitor: Monitor, **given: Any) -> None:
    """Monitor the cluster at the fastest pace."""
    settings = {"tracking": ["tasks", "compute-util"], "custom_metrics": [tasks.BEAT], **given}
    monitor.attach(polling_interval=50, **settings)
    monitor.start()


def work(machine: DaskMachine, *keys: str, times: int = 2) -> None:
    """A job of a graph a key, on both workers each."""
    with machine.client() as client:
        for key in keys:
            futures = [
                client.submit(tasks.seen, times=times, key=f"{key}-{name}", workers=[process.address])
                for name, process in machine.workers.items()
            ]
            client.gather(futures)


def measured(monitor: Monitor, measurements: int) -> None:
    """Wait until that many measurements of every worker have come by themselves."""
    until(
        lambda: all(worker.measurements >= measurements for worker in monitor.status().workers),
        f"{measurements} measurements of each worker",
    )


def beats(rows: list[Row]) -> list[int]:
    """The numbers that the custom metric gave; a measurement that it was late for has none, and the next has that number."""
    numbers = (row.cells["beat"] for row in rows)
    return list(dict.fromkeys(number for number in numbers if number is not None))


def in_order(numbers: list[int]) -> list[int]:
    """As many numbers in a row, from the first one on."""
    return list(range(numbers[0], numbers[0] + len(numbers)))


def test_nothing_is_lost_by_a_limit(machine: DaskMachine, monitor: Monitor, tmp_path: Path) -> None:
    """With `mem_limit` measurements go to disk on the way; the export has every one, and the disk is cleared."""

    spilled = tmp_path / "deep" / "spilled"
    begin(monitor, mem_limit=7, dump_loc=str(spilled))
    work(machine, "a", times=10)
    measured(monitor, 25)
    on_disk = [path for path in spilled.rglob("*") if path.is_file()]
    monitor.stop()
    files = monitor.to_csv(tmp_path / "csv")
    monitor.detach()

    assert on_disk
    for path in files:
        rows = read_rows(path)
        assert in_order(beats(rows)) == beats(rows)
        assert len(rows) >= 25
        assert {(1, 1), (1, 2)} & {row.label for row in rows}
    assert [] == [path for path in spilled.rglob("*") if path.is_file()]


def test_export_while_it_runs(machine: DaskMachine, monitor: Monitor, tmp_path: Path) -> None:
    """An export disturbs nothing: what was given out once is the beginning of what is given out later."""

    begin(monitor)
    work(machine, "a")
    measured(monitor, 5)
    early = [path.read_bytes() for path in monitor.to_csv(tmp_path / "early")]
    work(machine, "b")
    monitor.stop()
    late = [path.read_bytes() for path in monitor.to_csv(tmp_path / "late")]
    again = [path.read_bytes() for path in monitor.to_csv(tmp_path / "late")]

    assert again == late
    for before, after in zip(early, late, strict=True):
        assert before.endswith(b"\n")
        assert after.startswith(before)
        assert len(after) > len(before)
    for path in (tmp_path / "late").iterdir():
        rows = read_rows(path)
        assert in_order(beats(rows)) == beats(rows)


def test_stopped_and_started_again(machine: DaskMachine, monitor: Monitor, tmp_path: Path) -> None:
    """A second start goes on in the same record, on the same clock, after a gap."""

    begin(monitor)
    work(machine, "a")
    monitor.stop()
    first = [read_rows(path) for path in monitor.to_csv(tmp_path)]
    work(machine, "unseen", times=0)
    assert first == [read_rows(path) for path in monitor.to_csv(tmp_path)]
    monitor.start()
    work(machine, "b")
    monitor.stop()

    for path, before in zip(monitor.to_csv(tmp_path), first, strict=True):
        rows = read_rows(path)
        assert before == rows[: len(before)]
        assert rows[len(before)].timestamp > before[-1].timestamp
        assert in_order(beats(rows)) == beats(rows)
        assert not [row for row in rows if any("unseen" in key for key in row.cells["tasks"])]
    assert not monitor.status().running


def test_peaks_by_job(machine: DaskMachine, monitor: Monitor, tmp_path: Path) -> None:
    """The peak of each job is that of its own time; exported files give the same."""

    begin(monitor)
    for use in (80, 37):
        set_use(machine, monitor, tmp_path, use)
        work(machine, f"at-{use}", times=3)
    set_use(machine, monitor, tmp_path, 99)
    monitor.stop()
    folder = tmp_path / "csv"
    monitor.to_csv(folder)

    peaks: list[Any] = [{1: [80], 2: [37]}, {1: [81], 2: [38]}]
    if monitor.status().workers[0].name == "w1":
        peaks.reverse()
    assert peaks == monitor.get_peaks("compute-util")
    assert peaks[::-1] == Monitor.peaks_from_csv(folder, "compute-util", workers=[1, 0])
    assert peaks == Monitor.peaks_from_csv(str(folder), metric="compute-util")
    assert [[99], [100]] == sorted(monitor.get_peaks("compute-util", per_job=False))
    assert [] == monitor.get_peaks("compute-util", workers=[])


def set_use(machine: DaskMachine, monitor: Monitor, folder: Path, use: int) -> None:
    """Make the GPUs as busy as that while nobody's job is going on, and wait until every worker has noticed."""

    def newest() -> list[Row]:
        return [row for path in monitor.to_csv(folder / "looked") for row in read_rows(path)[-1:]]

    until(lambda: [0, 0] == [row.job for row in newest()], "the end of the job before")
    for gpu in (0, 1):
        machine.fake.gpu(gpu).util_gpu = use + gpu
    until(
        lambda: [[use], [use + 1]] == sorted(row.cells["compute-util"] for row in newest()),
        f"{use} % at every worker",
    )


def test_tables(machine: DaskMachine, monitor: Monitor, tmp_path: Path) -> None:
    """Pandas and Parquet hold what the CSV files hold."""

    import pandas as pd  # noqa: PLC0415  costs half a second

    begin(monitor, tracking=["tasks", "compute-util", "power_watts", "host_memory_bytes"])
    work(machine, "a")
    monitor.stop()
    frame = monitor.to_pandas()
    files = monitor.to_csv(tmp_path)
    tables = monitor.to_parquet(tmp_path / "parquet")

    rows = [(index, row) for index, path in enumerate(files) for row in read_rows(path)]
    assert ["worker", *columns(files[0])] == list(frame.columns)
    assert [index for index, _ in rows] == frame["worker"].tolist()
    assert [row.label for _, row in rows] == list(zip(frame["job"], frame["dag"], strict=True))
    assert [row.cells["compute-util"] for _, row in rows] == [list(cell) for cell in frame["compute-util"]]
    assert [row.cells["tasks"] for _, row in rows] == [list(cell) for cell in frame["tasks"]]
    assert ["worker-0.parquet", "worker-1.parquet"] == [path.name for path in tables]
    table = pd.read_parquet(tables[1])
    kept = [row for index, row in rows if index == 1]
    assert [row.timestamp for row in kept] == table["timestamp"].tolist()
    assert [row.cells["power_watts"] for row in kept] == [list(cell) for cell in table["power_watts"]]


def test_bad_custom_metrics(machine: DaskMachine, monitor: Monitor, tmp_path: Path) -> None:
    """One that raises is told once with its traceback; it and one that hangs are missing, and disturb nobody else."""

    victim = machine.joined(machine.worker("victim", visible="0,1"))
    metrics = [tasks.broken, tasks.odd, tasks.state, tasks.BEAT, tasks.stuck]
    begin(monitor, custom_metrics=metrics)
    work(machine, "a", "b")
    with machine.client() as client:
        client.submit(tasks.seen, times=10, key="long", workers=[victim.address]).result()
    until(lambda: "'stuck' takes longer" in str(monitor.status()), "the one that hangs to be told of")
    monitor.stop()
    status = monitor.status()
    files = monitor.to_csv(tmp_path)
    monitor.detach()
    with machine.client() as client:
        client.retire_workers([victim.address])
    assert 0 == victim.popen.wait(60), victim.text
    victim.end()
    del machine.workers["victim"]

    assert 1 == victim.text.count("RuntimeError: the sensor fell off"), victim.text
    assert 1 == victim.text.count("in broken"), victim.text
    (mine,) = (worker for worker in status.workers if worker.address == victim.address)
    for name in ("broken", "stuck", "odd"):
        assert [name] == [name for trouble in mine.troubles if name in trouble], mine.troubles
    rows = read_rows(files[mine.index])
    assert [
        "job",
        "dag",
        "timestamp",
        "tasks",
        "compute-util",
        "broken",
        "odd",
        "state",
        "beat",
        "stuck",
    ] == (columns(files[mine.index]))
    assert in_order(beats(rows)) == beats(rows)
    assert {None} == {
        value for row in rows for name in ("broken", "stuck") for value in row.cells[name] or [None]
    }
    assert {None} == {row.cells["odd"] for row in rows}
    told = {row.cells["state"] for row in rows if row.cells["tasks"] == ["long"]}
    assert {'"1",\n2'} == told - {None}  # a busy machine may have no answer in time
    assert all(2 == len(row.cells["compute-util"]) for row in rows)
    assert {(1, 1), (1, 2), (1, 3)} & {row.label for row in rows}


@custom_metric("mem-util")
def double(worker: Any, handle: Any) -> None:
    """A metric by the name of another."""


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"tracking": ["mem-utl"]}, "mem-util"),
    "unknown scope": ({"tracking": ["moon.power_watts"]}, "power_watts"),
    "nothing": ({"tracking": []}, "compute-util"),
    "text": ({"tracking": "mem-util"}, "list"),
    "number": ({"tracking": 3}, "list"),
    "always": ({"tracking": ["timestamp"]}, "always"),
    "negative": ({"polling_interval": -200}, "polling_interval"),
    "zero": ({"polling_interval": 0}, "50"),
    "no number": ({"polling_interval": float("nan")}, "polling_interval"),
    "words": ({"polling_interval": "fast"}, "milliseconds"),
    "no limit": ({"mem_limit": 0}, "at least 1"),
    "job type": ({"job_type": "graph"}, "'manual'"),
    "folder": ({"dump_loc": ""}, "dump_loc"),
    "plain function": ({"custom_metrics": [len]}, "@custom_metric"),
    "twice": ({"tracking": ["mem-util"], "custom_metrics": [double]}, "duplicate metric name"),
    "head": ({"head": "http://[broken"}, "head"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_settings_that_make_no_sense(monitor: Monitor, case: str) -> None:
    """What cannot be is refused with what is allowed, and leaves the cluster as it was."""

    given, words = BAD_SETTINGS[case]
    with pytest.raises(UsageError) as refused:
        monitor.attach(**{"tracking": ["mem-util"], **given})

    assert words in str(refused.value)
    with pytest.raises(GpulseError, match="attach"):
        monitor.start()


def test_questions_that_make_no_sense(machine: DaskMachine, monitor: Monitor, tmp_path: Path) -> None:
    """Peaks of what is not there, folders without files of ours, things in the wrong order: the answer says what there is."""

    with pytest.raises(GpulseError, match="attach"):
        monitor.to_csv(tmp_path / "nothing")
    begin(monitor)
    work(machine, "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "worker-0.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    elsewhere = tmp_path / "there"
    questions: list[tuple[Callable[[], Any], str]] = [
        (monitor.new_job, "manual"),
        (lambda: monitor.get_peaks("mem-util"), "compute-util"),
        (lambda: monitor.get_peaks("tasks"), "not numbers"),
        (lambda: monitor.get_peaks("compute-util", workers=[0, 2]), "0, 1|0 and 1|0 to 1"),
        (lambda: monitor.get_peaks("compute-util", workers=[-1]), "0, 1|0 and 1|0 to 1"),
        (lambda: Monitor.peaks_from_csv(tmp_path / "empty", "compute-util"), "worker-"),
        (lambda: Monitor.peaks_from_csv(elsewhere / "not", "compute-util"), "not"),
    ]
    for question, words in questions:
        with pytest.raises(UsageError, match=words):
            question()
    for wrong in (monitor.start, lambda: monitor.attach(["mem-util"])):
        with pytest.raises(GpulseError) as already:
            wrong()
        assert "already" in str(already.value)
        assert "stop()" in str(already.value.hint)
    with pytest.raises(GpulseError, match=r"worker-0\.csv"):
        Monitor.peaks_from_csv(tmp_path, "compute-util")
    assert monitor.status().running


def test_asynchronous_clients(machine: DaskMachine, tmp_path: Path) -> None:
    """With an asynchronous client everything is awaited."""

    async def followed() -> Any:
        made: Any = Client
        async with made(machine.address, asynchronous=True, set_as_default=False) as client:
            watch: Any = Monitor(client)
            await watch.attach(["tasks"], [tasks.BEAT], polling_interval=50)
            await watch.start()
            await client.submit(tasks.seen, key="awaited")
            await watch.stop()
            status = await watch.status()
            files = await watch.to_csv(tmp_path)
            peaks = await watch.get_peaks("beat", per_job=False)
            with pytest.raises(UsageError):
                await watch.get_peaks("mem-util")
            await watch.detach()
            return status, files, peaks

    status, files, peaks = asyncio.run(followed())
    rows = [row for path in files for row in read_rows(path)]
    assert (1, 1, False) == (status.jobs, status.dags, status.running)
    assert {(1, 1)} == {row.label for row in rows if "awaited" in row.cells["tasks"]}
    assert [[beats(read_rows(path))[-1]] for path in files] == peaks


def test_a_status_that_can_be_read(machine: DaskMachine, monitor: Monitor) -> None:
    """The status tells who is measured and how, to programs and to people."""

    with pytest.raises(GpulseError, match="no monitor is attached"):
        monitor.status()
    begin(monitor)
    work(machine, "a", "b")
    measured(monitor, 1)
    status = monitor.status()
    monitor.stop()

    assert (True, ("tasks", "compute-util"), ("beat",), "client", 50, None) == (
        status.running,
        status.tracking,
        status.custom,
        status.job_type,
        status.polling_interval,
        status.mem_limit,
    )
    assert (1, 4) == (status.jobs, status.dags)
    assert {process.address for process in machine.workers.values()} == {w.address for w in status.workers}
    assert {process.popen.pid for process in machine.workers.values()} == {w.pid for w in status.workers}
    assert {("NVIDIA H200",)} == {worker.gpus for worker in status.workers}
    assert all(process.address in str(status) for process in machine.workers.values())
