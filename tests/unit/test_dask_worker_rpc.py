"""What the scheduler has workers do, and that it comes through whatever becomes of them and of the clients meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpulse._version import __version__
from gpulse.errors import GpulseError
from gpulse.integrations.dask import worker_registry
from gpulse.integrations.dask.head_stream import HeadSettings
from gpulse.integrations.dask.monitor import NotAttachedError, call_scheduler_monitor
from gpulse.integrations.dask.monitor_settings import build_settings
from gpulse.integrations.dask.scheduler_plugin import SchedulerMonitor
from gpulse.integrations.dask.worker_registry import (
    COMMAND_HANDLER,
    JOIN_HANDLER,
    PLUGIN_NAME,
    ROWS_HANDLER,
    WorkerCommand,
    unpack_block,
)
from tests.integration.cluster import free_port

Answer = Callable[[], Awaitable[Any]]


class Cluster:
    """A scheduler as a plugin sees it, with workers that answer as they are told."""

    def __init__(self, *workers: str, gpus: tuple[str, ...] = ("H200",)) -> None:
        self.address = "tcp://scheduler:8786"
        self.plugins: dict[str, Any] = {}
        self.worker_plugins: dict[str, bytes] = {}
        self.handlers: dict[str, Any] = {}
        self.stream_handlers: dict[str, Any] = {"update-graph": None}
        self.stream_comms: dict[str, None] = dict.fromkeys(workers)
        self.workers = {name: SimpleNamespace(name=name, processing=[]) for name in workers}
        self.clients: dict[str, Any] = {}
        self.client_comms: dict[str, Any] = {}
        self.tasks: dict[str, Any] = {}
        self.gpus = gpus
        self.asked: list[tuple[str, str]] = []
        self.was_asked = asyncio.Event()
        self.commands: dict[str, list[WorkerCommand]] = {}
        self.answers: dict[tuple[str, str], Answer] = {}
        """By worker and question, what is done instead of a good answer."""

    def rpc(self, worker: str) -> Any:
        """The way to a worker."""
        return _Worker(self, worker)

    async def ask(self, worker: str, question: str, arguments: dict[str, Any]) -> Any:
        """A worker answers."""
        self.asked.append((worker, question))
        self.was_asked.set()
        if (worker, question) in self.answers:
            return await self.answers[worker, question]()
        if question == "plugin-add":
            await self.join(worker)
        if question == COMMAND_HANDLER:
            self.commands.setdefault(worker, []).append(WorkerCommand.of(arguments))
            return {"lost": 0}
        return {"status": "OK"}

    async def join(self, worker: str) -> Any:
        """The plugin has come to a worker, which says who it is."""
        return await self.handlers[JOIN_HANDLER](worker=worker, host="host", pid=1, gpus=self.gpus)

    async def wants(self, operation: str, *arguments: Any) -> Any:
        """A client has the scheduler do something."""
        kind, answer = await call_scheduler_monitor(operation, arguments, __version__, self)  # type: ignore[arg-type]
        if kind == "failed":
            raise answer
        if kind == "unknown":
            raise NotAttachedError
        return answer


class _Worker:
    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name

    def __getattr__(self, question: str) -> Callable[..., Awaitable[Any]]:
        return lambda **arguments: self._cluster.ask(self._name, question, arguments)


async def died() -> None:
    """What is seen of a worker that was killed before it answered."""
    raise OSError("closed")


async def unknown() -> None:
    """What dask answers to a question that it does not know."""


async def deaf() -> None:
    """A worker that hears nothing."""
    await asyncio.Event().wait()


async def faulty() -> None:
    """What no worker should do."""
    raise RuntimeError("a fault")


async def failed() -> dict[str, str]:
    """As dask tells of a plugin that could not be set up."""
    return {"status": "error", "exception_text": "ValueError('no')"}


async def losing() -> dict[str, int]:
    """A worker that could not bring everything."""
    return {"lost": 12}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for so long."""
    monkeypatch.setattr(worker_registry, "PATIENCE_SECONDS", 0.05)


async def registered(cluster: Cluster, tracking: tuple[str, ...] = ("mem-util",), **given: Any) -> None:
    """The first step of attaching, after which a client can die."""
    wanted = build_settings(tracking, (), "client", 200, given.pop("mem_limit", None), "temp", **given)
    monitor: Any = SchedulerMonitor(wanted, (), b"the other half")
    await monitor.start(cluster)
    cluster.plugins[PLUGIN_NAME] = monitor


@asynccontextmanager
async def attached(cluster: Cluster, **given: Any) -> AsyncIterator[None]:
    """A cluster that is monitored, and in the end is as it was."""
    await registered(cluster, **given)
    await cluster.wants("install")
    try:
        yield
    finally:
        with suppress(NotAttachedError):
            await cluster.wants("uninstall")
        assert ({}, {}, {}) == (cluster.plugins, cluster.worker_plugins, cluster.handlers)
        assert {"update-graph": None} == cluster.stream_handlers
        assert 0 == watchers()


def watchers() -> int:
    """How many look at what the cluster is at."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return sum(name.endswith("_watch") for name in names)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (unknown, "not monitored"),
        (deaf, "no response"),
        (died, "unreachable"),
        (faulty, "RuntimeError('a fault')"),
        (failed, "ValueError('no')"),
        (losing, "lost 12 measurements"),
    ],
)
async def test_only_a_good_answer_is_consent(answer: Answer, words: str) -> None:
    """Starting and stopping say which worker did not obey and how, and the other one does what it was told."""
    cluster = Cluster("good", "bad")
    async with attached(cluster):
        cluster.answers["bad", COMMAND_HANDLER] = answer
        told = [await cluster.wants("begin"), await cluster.wants("end")]
        status = await cluster.wants("status")

    for (trouble,) in told:
        assert trouble.startswith("worker 1 (bad): ")
        assert words in trouble
    assert [True, False] == [command.running for command in cluster.commands["good"]]
    assert [False, True] == [bool(worker.troubles) for worker in status.workers]


async def test_a_worker_without_gpulse_is_named_at_once() -> None:
    """It takes the plugin, but never joins; the others are monitored."""
    cluster = Cluster("good", "bare")
    cluster.answers["bare", "plugin-add"] = lambda: asyncio.sleep(0, {"status": "OK"})
    await registered(cluster)
    (note,) = await cluster.wants("install")
    await cluster.wants("begin")
    await cluster.wants("uninstall")

    assert "worker 1 (bare) is not monitored" in note
    assert ["good"] == list(cluster.commands)


async def test_where_no_worker_can_be_monitored_nothing_is_attached() -> None:
    """The error names one of them."""
    cluster = Cluster("bare")
    cluster.answers["bare", "plugin-add"] = unknown
    await registered(cluster)
    with pytest.raises(GpulseError, match=r"worker 0 \(bare\).*not monitored"):
        await cluster.wants("install")
    await cluster.wants("uninstall")


@pytest.mark.parametrize("answer", [died, deaf, unknown, faulty])
@pytest.mark.parametrize("question", ["plugin-add", "plugin-remove", COMMAND_HANDLER])
async def test_a_worker_that_dies_at_any_step_keeps_nobody_from_anything(
    question: str, answer: Answer
) -> None:
    """Attaching, starting, looking, stopping and detaching go on with the others, and it can be done again."""
    cluster = Cluster("good", "bad")
    cluster.answers["bad", question] = answer
    for _ in range(2):
        async with attached(cluster):
            await cluster.wants("begin")
            records = await cluster.wants("collect")
            await cluster.wants("end")

    assert [0, 1] == [index for index, _ in records]
    assert ["plugin-add", COMMAND_HANDLER, COMMAND_HANDLER, COMMAND_HANDLER, "plugin-remove"] * 2 == [
        asked for worker, asked in cluster.asked if worker == "good"
    ]


async def test_no_word_of_a_worker_that_has_gone_meanwhile() -> None:
    """It is not there any more, which is not worth a warning."""
    cluster = Cluster("stays", "goes")
    async with attached(cluster):
        monitor = cluster.plugins[PLUGIN_NAME]

        async def goes() -> None:
            monitor.remove_worker(cluster, "goes")
            raise OSError("closed")

        cluster.answers["goes", COMMAND_HANDLER] = goes

        assert [] == await cluster.wants("begin")


async def test_a_client_that_dies_before_the_workers_got_their_half() -> None:
    """Whoever starts gives it to them; whoever detaches finds nothing in the way."""
    for is_started in (True, False):
        cluster = Cluster("first", "second")
        await registered(cluster)
        if is_started:
            await cluster.wants("begin")
            assert [True, True] == [
                command.running for given in cluster.commands.values() for command in given
            ]
            await cluster.wants("end")
        await cluster.wants("uninstall")
        assert ({}, {}, {}) == (cluster.plugins, cluster.worker_plugins, cluster.handlers)


async def test_a_monitor_that_was_taken_out_without_notice_gives_way() -> None:
    """Its watcher ends, and submissions are seen once."""
    cluster = Cluster("worker")
    await registered(cluster)
    await cluster.wants("begin")
    del cluster.plugins[PLUGIN_NAME]
    with pytest.raises(NotAttachedError):
        await cluster.wants("status")
    async with attached(cluster):
        assert 0 == watchers()
        await cluster.wants("begin")
        assert 1 == watchers()


async def test_two_monitors_are_one_too_many() -> None:
    """The one that is there goes on undisturbed."""
    cluster = Cluster("worker")
    async with attached(cluster):
        await cluster.wants("begin")
        with pytest.raises(GpulseError, match="already"):
            await registered(cluster)

        assert 1 == watchers()
        assert [] == await cluster.wants("end")


@pytest.mark.parametrize("wishes", [("begin", "end"), ("begin", "end", "begin"), ("begin", "begin", "end")])
@pytest.mark.parametrize("is_settled", [True, False])
async def test_those_who_start_and_stop_at_once(wishes: tuple[str, ...], is_settled: bool) -> None:
    """Whoever wins, somebody watches while it runs and nobody else, and the workers were last told what is so."""
    cluster = Cluster("worker")
    await registered(cluster)
    if is_settled:
        await cluster.wants("install")
    await asyncio.gather(*map(cluster.wants, wishes), return_exceptions=True)
    await asyncio.sleep(0)
    running = (await cluster.wants("status")).running
    watching = watchers()
    last = [given[-1].running for given in cluster.commands.values()]
    await cluster.wants("uninstall")
    left = watchers()

    assert int(running) == watching
    assert [running] == (last or [False])
    assert 0 == left


@pytest.mark.parametrize("is_settled", [True, False])
async def test_who_detaches_while_another_one_starts(is_settled: bool) -> None:
    """Nothing is left of it."""
    cluster = Cluster("quick", "slow")
    await registered(cluster)
    if is_settled:
        await cluster.wants("install")
    for question in ("plugin-add", COMMAND_HANDLER):
        cluster.answers["slow", question] = lambda: asyncio.sleep(0.02, {"status": "OK"})
    await asyncio.gather(cluster.wants("begin"), cluster.wants("uninstall"), return_exceptions=True)
    await asyncio.sleep(0)
    left = watchers()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

    assert 0 == left
    assert ({}, {}, {}) == (cluster.plugins, cluster.worker_plugins, cluster.handlers)


async def test_a_start_that_fails_has_not_started() -> None:
    """It can be tried again."""
    cluster = Cluster("bare")
    cluster.answers["bare", "plugin-add"] = unknown
    await registered(cluster)
    with pytest.raises(GpulseError, match="not monitored"):
        await cluster.wants("begin")
    running = (await cluster.wants("status")).running
    del cluster.answers["bare", "plugin-add"]
    with suppress(GpulseError):
        await cluster.wants("begin")
    status = await cluster.wants("status")
    given = cluster.commands.get("bare", [])
    await cluster.wants("uninstall")

    assert not running
    assert status.running
    assert [True] == [command.running for command in given]


async def test_a_worker_that_leaves_does_not_wait_for_its_heir() -> None:
    """The next one of its machine is told to speak to the head; that it is busy is nobody else's matter."""
    cluster = Cluster("speaker", "heir", "other")
    async with attached(cluster, head=HeadSettings(f"127.0.0.1:{free_port()}")):
        await cluster.wants("begin")
        streams = {worker: given[-1].streams for worker, given in cluster.commands.items()}
        monitor = cluster.plugins[PLUGIN_NAME]
        cluster.answers["heir", COMMAND_HANDLER] = deaf
        told = monitor.remove_worker(cluster, "speaker", stimulus_id="retired")
        asked = [await anew(cluster)]
        monitor.remove_worker(cluster, "heir", stimulus_id="retired")
        asked.append(await anew(cluster))

    assert told is None
    assert {"speaker": True, "heir": False, "other": False} == streams
    assert [("heir", COMMAND_HANDLER), ("other", COMMAND_HANDLER)] == asked
    assert [False, True] == [command.streams for command in cluster.commands["other"]]


async def anew(cluster: Cluster) -> tuple[str, str]:
    """What a worker is asked next."""
    before = len(cluster.asked)
    cluster.was_asked.clear()
    async with asyncio.timeout(60):
        await cluster.was_asked.wait()
    return cluster.asked[before]


async def test_a_cluster_that_gets_its_first_worker_later() -> None:
    """Without a GPU it is its host that is tracked: the command says so, the file's first line says so, and so does a note."""
    cluster = Cluster(gpus=())
    async with attached(cluster):
        assert [] == await cluster.wants("begin")
        before = (await cluster.wants("status")).troubles
        cluster.workers["late"] = SimpleNamespace(name="late", processing=[])
        cluster.plugins[PLUGIN_NAME].add_worker(cluster, "late")
        command = WorkerCommand.of(await cluster.join("late"))
        (first,) = await cluster.wants("collect")
        status = await cluster.wants("status")

    assert () == before
    assert command.running
    assert "mem-util" == status.tracking[0]
    assert ",".join(["job", "dag", "timestamp", *status.tracking]) == first[1].strip()
    assert tuple(column.name for column in command.tracked) == status.tracking
    assert len(status.tracking) > 1
    (note,) = status.troubles
    assert "no worker has a GPU" in note
    assert all(name in note for name in status.tracking[1:])


def test_what_was_made_on_disk_is_gone_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our folder, the dumps in it, and the folder around it if that is ours; one that was there before stays."""
    monkeypatch.chdir(tmp_path)
    dumped = asyncio.run(dumping(tmp_path))
    ours = list(tmp_path.iterdir())
    (tmp_path / "temp").mkdir()
    asyncio.run(dumping(tmp_path))

    assert ["gpulse", "temp", "worker-0.dump"] == [
        name.partition("-")[0] if "gpulse" in name else name for name in dumped
    ]
    assert [] == ours
    assert ["temp"] == names_in(tmp_path)


async def dumping(folder: Path) -> list[str]:
    """Monitor a cluster, and dump what comes; what is on disk meanwhile."""
    cluster = Cluster("worker")
    async with attached(cluster, mem_limit=1):
        await cluster.wants("begin")
        await brought(cluster, "life", 1)
        return names_in(folder)


def names_in(folder: Path) -> list[str]:
    """Everything in a folder, however deep."""
    return sorted(path.name for path in folder.rglob("*"))


async def brought(cluster: Cluster, life: str, number: int) -> None:
    """A worker brings a batch of two measurements, which tell where they belong."""
    rows = b"".join(b"1,1,%d.%d,%s\n" % (number, place, life.encode()) for place in range(2))
    batch = {"rows": rows, "measurements": 2, "last": number + 0.1, "lost": 0}
    answer = await cluster.handlers[ROWS_HANDLER](
        worker="worker", life=life, number=number, batch=batch, troubles=[]
    )
    assert {} == answer


async def test_a_batch_that_comes_late_and_again_counts_once() -> None:
    """Whatever has come since: the worker's next batch, or the first of the one that took its place."""
    cluster = Cluster("worker")
    async with attached(cluster):
        await cluster.wants("begin")
        for life, number in (("a", 1), ("a", 1), ("a", 2), ("a", 1), ("b", 1), ("a", 2), ("b", 1), ("b", 2)):
            await brought(cluster, life, number)
        blocks, _ = await cluster.wants("page", 0, 0)
        status = await cluster.wants("status")

    lines = b"".join(map(unpack_block, blocks)).decode().splitlines()
    assert [f"1,1,{number}.{place},{life}" for life in "ab" for number in (1, 2) for place in (0, 1)] == lines
    assert [8] == [worker.measurements for worker in status.workers]
