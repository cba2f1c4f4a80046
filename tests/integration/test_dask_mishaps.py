"""Mishaps on a real cluster: whoever dies, hangs or was there before, it can be monitored, and what is recorded is right."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import distributed
import pynvml
import pytest

from gpulse.errors import GpulseError
from gpulse.integrations.dask import Monitor, custom_metric, worker_plugin, worker_registry
from gpulse.integrations.dask.monitor_settings import build_settings
from gpulse.integrations.dask.scheduler_plugin import SchedulerMonitor
from gpulse.integrations.dask.worker_plugin import pack_plugin
from gpulse.integrations.dask.worker_registry import ROWS_HANDLER
from tests.integration import dask_tasks as tasks
from tests.integration.cluster import until
from tests.integration.dask_machine import DaskMachine, DaskProcess, Row, dask_machine, labels_of, read_rows

pytestmark = pytest.mark.slow

dask: Any = distributed  # it has no types

_ANSWER_SECONDS = 0.5
"""For so long workers wait for an answer here."""
_BLOCKED_SECONDS = 1.3
"""Longer than they wait for two."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[DaskMachine]:
    """Two workers that outlive all tests; the first sees both GPUs."""
    with dask_machine(tmp_path_factory.mktemp("mishaps"), nvml_library) as made:
        made.start_workers(["0,1", "1"], threads=2)
        yield made


@pytest.fixture
def monitor(machine: DaskMachine) -> Iterator[Monitor]:
    """A monitor that is not attached yet."""
    with machine.client() as client:
        made = Monitor(client)
        yield made
        made.detach()


def attach(monitor: Monitor, *metrics: object) -> None:
    """Prepare the fastest pace."""
    monitor.attach(["tasks", "compute-util"], [tasks.BEAT, *metrics], polling_interval=50)


def address(machine: DaskMachine, number: int = 0) -> list[str]:
    """Where a task is to be executed."""
    return [machine.workers[f"w{number}"].address]


def rows_by_name(monitor: Monitor, folder: Path) -> dict[str, list[Row]]:
    """What is recorded of each worker."""
    workers = monitor.status().workers
    return {
        worker.name: read_rows(path) for worker, path in zip(workers, monitor.to_csv(folder), strict=True)
    }


def check_all_works(machine: DaskMachine, monitor: Monitor, folder: Path) -> None:
    """Attach, start, stop, export and detach, as if nothing had happened."""
    attach(monitor)
    monitor.start()
    with machine.client() as client:
        client.gather([client.submit(tasks.seen, key=f"on-{n}", workers=address(machine, n)) for n in (0, 1)])
    monitor.stop()
    found = rows_by_name(monitor, folder)
    monitor.detach()

    assert [{(1, 1)}, {(1, 2)}] == [labels_of(found[f"w{n}"], f"on-{n}") for n in (0, 1)]


@contextmanager
def dying(process: DaskProcess) -> Iterator[None]:
    """Something is wanted of a worker that hears nothing any more and then is gone."""
    os.kill(process.popen.pid, signal.SIGSTOP)
    death = threading.Timer(0.3, process.popen.kill)
    death.start()
    try:
        yield
    finally:
        death.join()
        process.kill()


def test_workers_and_clients_that_die_in_the_middle(
    machine: DaskMachine, monitor: Monitor, tmp_path: Path
) -> None:
    """A worker dies while it is detached, another one while it is attached by somebody who goes away: all works afterwards."""

    victims = [machine.worker(name, visible="0") for name in ("detached", "attached")]
    for process in victims:
        machine.joined(process)
    attach(monitor)
    monitor.start()
    client: Any = monitor.client
    usual = client.run_on_scheduler(wait_for_workers, 100.0)
    began = time.monotonic()
    with dying(victims[0]):
        monitor.detach()
    with dying(victims[1]):
        asyncio.run(goes_away_while_attaching(machine))
    monitor.status()
    monitor.start()
    monitor.stop()
    took = time.monotonic() - began
    client.run_on_scheduler(wait_for_workers, usual)
    monitor.detach()

    check_all_works(machine, monitor, tmp_path)
    assert took < 60.0, "somebody was waited for"


async def goes_away_while_attaching(machine: DaskMachine) -> None:
    """A client that closes its connection once the scheduler has begun to put the other half into workers."""
    async with dask.Client(machine.address, asynchronous=True, set_as_default=False) as client:
        watch: Any = Monitor(client)
        attaching = asyncio.create_task(watch.attach(["tasks"]))
        async with asyncio.timeout(60):
            await client.run_on_scheduler(settling)
    attaching.cancel()
    await asyncio.gather(attaching, return_exceptions=True)


async def settling(dask_scheduler: Any) -> None:
    """On the scheduler: wait until a monitor is on its way to the workers."""
    while "gpulse" not in dask_scheduler.worker_plugins:  # noqa: ASYNC110  dask tells nobody
        await asyncio.sleep(0.01)


HALVES: dict[str, Callable[[Any], Any]] = {
    "only the scheduler has it": lambda client: client.register_plugin(
        SchedulerMonitor(wanted(), (), pack_plugin(wanted())), name="gpulse"
    ),
    "the workers lost it": lambda client: (
        Monitor(client).attach(["tasks"]),
        Monitor(client).start(),
        client.unregister_worker_plugin("gpulse"),
    ),
    "the scheduler lost it": lambda client: (
        Monitor(client).attach(["tasks"]),
        Monitor(client).start(),
        client.unregister_scheduler_plugin("gpulse"),
    ),
}


def wanted() -> Any:
    """Settings as `attach` makes them."""
    return build_settings(["tasks"], (), "client", 50, None, "temp")


@pytest.mark.parametrize("half", HALVES)
def test_half_a_monitor(machine: DaskMachine, monitor: Monitor, tmp_path: Path, half: str) -> None:
    """However little a client has left behind, somebody else can stop it, and monitor anew."""

    with machine.client() as client:
        HALVES[half](client)
    with suppress(GpulseError):
        monitor.stop()

    check_all_works(machine, monitor, tmp_path)


def test_the_scheduler_alone_is_completed_by_a_start(
    machine: DaskMachine, monitor: Monitor, tmp_path: Path
) -> None:
    """Whoever attached it died before workers knew of it; whoever starts it need not know."""

    with machine.client() as client:
        HALVES["only the scheduler has it"](client)
    monitor.start()
    until(lambda: all(rows_by_name(monitor, tmp_path).values()), "rows of both workers")
    monitor.stop()

    assert {"w0", "w1"} == set(rows_by_name(monitor, tmp_path))


def test_a_worker_that_lost_its_half(
    machine: DaskMachine, monitor: Monitor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers with nothing, which is no consent: the start names it, and goes on with the other."""

    attach(monitor)
    (bare,) = address(machine, 1)
    monitor.client.run(take_out, workers=[bare])
    with caplog.at_level(logging.WARNING, "gpulse.dask"):
        monitor.start()
    with machine.client() as client:
        client.submit(tasks.seen, key="measured", workers=address(machine)).result()
    monitor.stop()
    found = rows_by_name(monitor, tmp_path)
    (status,) = (worker for worker in monitor.status().workers if worker.address == bare)

    assert f"({bare}): not monitored" in caplog.text
    assert machine.workers["w0"].address not in caplog.text
    assert any("not monitored" in trouble for trouble in status.troubles)
    assert {(1, 1)} == labels_of(found["w0"], "measured")
    assert [] == found["w1"]


async def take_out(dask_worker: Any) -> None:
    """On a worker: take the monitor out of it."""
    await dask_worker.plugin_remove(name="gpulse")


def test_a_task_that_outlives_a_monitor(machine: DaskMachine, monitor: Monitor, tmp_path: Path) -> None:
    """Its old number is that of somebody else's graph now; it has a new one from the first row on."""

    begun, go = tmp_path / "begun", tmp_path / "go"
    with machine.client() as other, machine.client() as client:
        attach(monitor)
        monitor.start()
        other.submit(int, key="first").result()
        client.gather([client.submit(int, number, key=f"quick-{number}") for number in range(2)])
        future = client.submit(tasks.held, str(begun), str(go), key="long", workers=address(machine))
        until(begun.exists, "the task")
        numbers = monitor.status().jobs, monitor.status().dags
        attach_anew(monitor)
        other.submit(tasks.seen, key="new", workers=address(machine)).result()
        go.touch()
        future.result()
        monitor.stop()
        rows = rows_by_name(monitor, tmp_path)["w0"]

    assert (2, 4) == numbers
    assert {(1, 1)} == {row.label for row in rows if row.cells["tasks"] == ["long"]}
    assert {(1, 1), (2, 1)} == labels_of(rows, "new")
    assert (2, 2) == (monitor.status().jobs, monitor.status().dags)


def attach_anew(monitor: Monitor) -> None:
    """Stop, and begin with an empty record."""
    monitor.stop()
    attach(monitor)
    monitor.start()


def test_two_clients_from_before(machine: DaskMachine, monitor: Monitor, tmp_path: Path) -> None:
    """Each has its own job from the first row on, on whichever worker its task is."""

    go = tmp_path / "go"
    with machine.client() as one, machine.client() as two:
        futures = [
            client.submit(tasks.held, str(tmp_path / key), str(go), key=key, workers=address(machine, number))
            for number, (client, key) in enumerate(((one, "one"), (two, "two")))
        ]
        until(lambda: (tmp_path / "one").exists() and (tmp_path / "two").exists(), "both tasks")
        attach(monitor)
        monitor.start()
        go.touch()
        one.gather(futures[0])
        two.gather(futures[1])
        monitor.stop()
    found = rows_by_name(monitor, tmp_path)

    assert ["one"] == found["w0"][0].cells["tasks"]
    assert ["two"] == found["w1"][0].cells["tasks"]
    labels = [labels_of(found["w0"], "one"), labels_of(found["w1"], "two")]
    assert [{(1, 1)}, {(2, 1)}] in (labels, labels[::-1])


def test_what_is_nobodys_job(machine: DaskMachine, monitor: Monitor, tmp_path: Path) -> None:
    """What dask keeps for later, and what tasks have submitted, are waited for as by clients, and are none."""

    begun, go = tmp_path / "begun", tmp_path / "go"
    with machine.client() as client:
        future = client.submit(tasks.held, str(begun), str(go), key="old")
        dask.fire_and_forget([future, client.submit(waits_for_another, str(go), key="parent")])
        client.publish_dataset(data=client.submit(tasks.seen, future, key="data"))
        variable, queue = dask.Variable("best", client=client), dask.Queue("work", client=client)
        variable.set(client.submit(tasks.seen, future, key="best"))
        queue.put(client.submit(tasks.seen, future, key="work"))
        until(lambda: "child" in client.run_on_scheduler(under_way) and begun.exists(), "all tasks")
    attach(monitor)
    monitor.start()
    before = monitor.status().jobs
    with machine.client() as client:
        real = client.submit(tasks.seen, key="real")
        go.touch()
        real.result()
        client.gather([client.get_dataset("data"), dask.Variable("best", client=client).get()])
        client.unpublish_dataset("data")
        dask.Variable("best", client=client).delete()
        dask.Queue("work", client=client).close()
    monitor.stop()
    rows = [row for found in rows_by_name(monitor, tmp_path).values() for row in found]

    assert 0 == before
    assert {(1, 1)} == labels_of(rows, "real")
    assert (1, 1) == (monitor.status().jobs, monitor.status().dags)


def under_way(dask_scheduler: Any) -> list[str]:
    """On a scheduler: the tasks that it has."""
    return [str(key) for key in dask_scheduler.tasks]


def waits_for_another(go: str) -> int:
    """A task whose worker's own client waits for another one."""
    result: int = dask.get_client().submit(tasks.held, f"{go}-child", go, key="child").result()
    return result


def test_a_stop_while_the_scheduler_is_blocked(
    machine: DaskMachine, monitor: Monitor, tmp_path: Path
) -> None:
    """It hears nothing for seconds while workers bring their last rows, and yet has every measurement in the end."""

    client: Any = monitor.client
    attach(monitor)
    before = client.run(counted)
    monitor.start()
    client.gather(
        [client.submit(tasks.seen, times=4, workers=address(machine, n), pure=False) for n in (0, 1)]
    )
    usual = client.run(wait_for_answers, _ANSWER_SECONDS)
    try:
        troubles = client.run_on_scheduler(blocked_at_stop)
    finally:
        client.run(wait_for_answers, *set(usual.values()))
    counts = client.run(counted)
    found = rows_by_name(monitor, tmp_path)

    assert [] == troubles
    for name, rows in found.items():
        where = machine.workers[name].address
        beats = [row.cells["beat"] for row in rows]
        late = beats[-1] is None  # asked, and not waited for
        assert list(range(before[where] + 1, counts[where] + 1 - late)) == [
            beat for beat in beats if beat is not None
        ]
    assert all("lost" not in process.text for process in machine.workers.values())


def counted() -> int:
    """On a worker: how many measurements were taken."""
    return tasks._count


async def blocked_at_stop(dask_scheduler: Any) -> Any:
    """On the scheduler: tell workers to stop, and hear nothing for a time once the first brings its rows."""
    take = dask_scheduler.handlers[ROWS_HANDLER]
    blocked: list[bool] = []

    async def busy(**message: Any) -> Any:
        if not blocked:
            blocked.append(True)
            time.sleep(_BLOCKED_SECONDS)  # noqa: ASYNC251  that is the mishap
        return await take(**message)

    dask_scheduler.handlers[ROWS_HANDLER] = busy
    try:
        return await dask_scheduler.plugins["gpulse"].end()
    finally:
        dask_scheduler.handlers[ROWS_HANDLER] = take


def wait_for_workers(seconds: float) -> float:
    """On the scheduler: how long it waited for a worker so far, and does no more."""
    before, worker_registry.PATIENCE_SECONDS = worker_registry.PATIENCE_SECONDS, seconds
    return before


def wait_for_answers(seconds: float) -> float:
    """On a worker: how long it waited for an answer so far, and does no more."""
    before, worker_plugin._ANSWER_SECONDS = worker_plugin._ANSWER_SECONDS, seconds
    return before


@custom_metric("power")
def power(worker: Any, handle: Any) -> int:  # noqa: ARG001
    """What NVML says of a GPU."""
    watts: int = pynvml.nvmlDeviceGetPowerUsage(handle)
    return watts


def test_a_gpu_that_cannot_be_taken_hold_of(machine: DaskMachine, monitor: Monitor, tmp_path: Path) -> None:
    """People's own metrics have nothing for it; everything else is recorded, also of the other GPU."""

    attach(monitor, power)
    machine.fake.fail("nvmlDeviceGetHandleByUUID", gpu=1, code=pynvml.NVML_ERROR_GPU_IS_LOST)
    try:
        monitor.start()
        with machine.client() as client:
            client.gather(
                [
                    client.submit(tasks.seen, times=5, key=f"work-{n}", workers=address(machine, n))
                    for n in (0, 1)
                ]
            )
        monitor.stop()
    finally:
        machine.fake.clear_faults()
    found = rows_by_name(monitor, tmp_path)
    usage = [machine.fake.gpu(number).util_gpu for number in (0, 1)]

    both = [row.cells for row in found["w0"] if row.cells["tasks"]]
    assert [[76_000, None]] == distinct(cells["power"] for cells in both)
    assert [usage] == distinct(cells["compute-util"] for cells in both)
    assert [[None]] == distinct(row.cells["power"] for row in found["w1"])


def distinct(values: Any) -> list[Any]:
    """Each value once, but for what was not asked in time."""
    return [list(value) for value in dict.fromkeys(tuple(value) for value in values if value is not None)]


def test_starting_and_stopping_at_once(machine: DaskMachine, monitor: Monitor) -> None:
    """Two people who do not know of each other: whoever was last, nobody watches or measures what is stopped."""

    attach(monitor)
    with machine.client() as other:
        people = [
            threading.Thread(target=keeps_trying, args=(wish,))
            for wish in (monitor.start, Monitor(other).stop, Monitor(other).start, monitor.stop)
        ]
        for person in people:
            person.start()
        for person in people:
            person.join()
    seen = [how_it_is(monitor)]
    for wish in (monitor.stop, monitor.start, monitor.stop):
        with suppress(GpulseError):
            wish()
        seen.append(how_it_is(monitor))

    assert [(running, int(running), {running}) for running, _, _ in seen] == seen
    assert [False, True, False] == [running for running, _, _ in seen[1:]]


def keeps_trying(wish: Callable[[], None]) -> None:
    """Want the same five times."""
    for _ in range(5):
        with suppress(GpulseError):
            wish()


def how_it_is(monitor: Monitor) -> tuple[bool, int, set[bool]]:
    """Whether it runs, how many watch the cluster, and whether workers measure."""
    client: Any = monitor.client
    watching = client.run_on_scheduler(watchers)
    return monitor.status().running, watching, set(client.run(measures).values())


async def watchers(dask_scheduler: Any) -> int:  # noqa: ARG001
    """On the scheduler: how many look at what the cluster is at."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return sum(name.endswith("Monitor._watch") for name in names)


def measures() -> bool:
    """On a worker: whether it is being measured."""
    return any(thread.name == "gpulse-dask" for thread in threading.enumerate())
