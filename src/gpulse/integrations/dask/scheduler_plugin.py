"""Scheduler plugin: commands the workers and keeps their records."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin

from gpulse.atomic_files import resolve_output
from gpulse.errors import GpulseError, pip_requirement
from gpulse.integrations.dask.csv_files import build_header
from gpulse.integrations.dask.job_labels import SUBMITTING_LABEL, GraphLabelling, JobNumbering
from gpulse.integrations.dask.monitor_settings import MonitorSettings
from gpulse.integrations.dask.trackable_metrics import DEFAULT_ON_HOSTS, build_columns
from gpulse.integrations.dask.worker_registry import (
    JOIN_HANDLER,
    PLUGIN_NAME,
    ROWS_HANDLER,
    MonitorStatus,
    WorkerCommand,
    WorkerEntry,
    WorkerRecord,
    WorkerRegistry,
    WorkerRpc,
)

if TYPE_CHECKING:
    from distributed import Scheduler

_LOOK_SECONDS = 0.2
_LOOK_PAUSE_FACTOR = 200
"""Looking up what the cluster executes takes at most one part in this many of the scheduler's time."""

UpdateGraph = Callable[..., Awaitable[None]]


class SchedulerMonitor(SchedulerPlugin):
    """Plugin in the scheduler; it stays until it is detached, independent of clients."""

    name = PLUGIN_NAME

    def __init__(self, settings: MonitorSettings, custom: tuple[str, ...], for_workers: bytes) -> None:
        """Prepare to be sent to the scheduler.

        Args:
            settings: Settings without the custom metrics, whose functions may not be importable here.
            custom: Names of the custom metrics.
            for_workers: The plugin for every worker.
        """
        self._settings = settings
        self._custom = custom
        self._for_workers = for_workers

    async def start(self, scheduler: Scheduler) -> None:
        """Start in the scheduler; dask calls it.

        Raises:
            GpulseError: Another monitor is attached, or the dump directory cannot be created.
        """
        if PLUGIN_NAME in scheduler.plugins:
            raise already_monitored_error()
        if JOIN_HANDLER in scheduler.handlers:  # left by a monitor that was removed without detach
            stale: Any = scheduler.handlers[JOIN_HANDLER]
            await stale.__self__.close()
        self._scheduler = scheduler
        self._tracked = self._settings.tracked
        self._dumps = _DumpFolder(self._settings) if self._settings.mem_limit is not None else None
        self._workers = WorkerRegistry(self._new_record)
        self._rpc = WorkerRpc(scheduler)
        self._numbering = JobNumbering(self._settings.job_type)
        self._labels: GraphLabelling | None = None
        """None before the first start."""
        self._begun: float | None = None
        """The monotonic time of the first start."""
        self._running = False
        self._is_closed = False
        self._request_lock = asyncio.Lock()
        """Serialises requests of clients."""
        self._watch_task: asyncio.Task[None] | None = None
        self._send_tasks: set[asyncio.Task[Any]] = set()
        self._notes: list[str] = []
        self._has_looked_for_gpus = False
        self._submit: UpdateGraph = scheduler.stream_handlers["update-graph"]
        scheduler.stream_handlers["update-graph"] = self._handle_submission
        scheduler.handlers[JOIN_HANDLER] = self._handle_join
        scheduler.handlers[ROWS_HANDLER] = self._receive_rows
        for address in scheduler.stream_comms:  # in the order in which the workers joined
            self._workers.arrived(address, scheduler.workers[address].name)

    async def close(self) -> None:
        """End when the scheduler ends, or when monitoring is detached."""
        self._running, self._is_closed = False, True
        tasks = [*self._send_tasks, *([] if self._watch_task is None else [self._watch_task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watch_task = None
        handlers = self._scheduler.stream_handlers
        if handlers.get("update-graph") == self._handle_submission:
            handlers["update-graph"] = self._submit
        for name in (JOIN_HANDLER, ROWS_HANDLER):
            self._scheduler.handlers.pop(name, None)
        self._workers.close()
        if self._dumps is not None:
            self._dumps.close()

    # Called by dask.

    def update_graph(self, scheduler: Scheduler, *, client: str, tasks: Iterable[Any], **_: Any) -> None:  # noqa: ARG002  dask's signature
        """Label a graph that was submitted."""
        if self._labels is not None:
            self._labels.submitted(client, tasks, self._elapsed())

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Add a worker that joined."""
        self._workers.arrived(worker, scheduler.workers[worker].name)

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:  # noqa: ARG002  dask's signature
        """Note that a worker left; if it streamed to a head, another one of its machine takes over."""
        entry = self._workers.at(worker)
        was_streaming = entry is not None and self._workers.streams_to_head(entry)
        gone = self._workers.left(worker)
        if gone is None or not was_streaming or not self._running or self._settings.head is None:
            return
        for successor in self._workers.on(gone.host)[:1]:
            send_task = asyncio.ensure_future(
                self._rpc.send({successor: self._build_start_command(successor)})
            )
            self._send_tasks.add(send_task)
            send_task.add_done_callback(self._send_tasks.discard)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:  # noqa: ARG002  dask's signature
        """Note that a client closed its connection."""
        if self._labels is not None:
            self._numbering.left(client)
            self._labels.look(self._elapsed())

    # Called by workers.

    async def _handle_join(
        self, worker: str, host: str, pid: int, gpus: Iterable[str]
    ) -> dict[str, Any] | None:
        entry = self._workers.at(worker) or self._workers.arrived(worker, worker)
        self._workers.joined(entry, host, pid, gpus)
        if not self._running:
            return None
        self._look_for_gpus()
        return self._build_start_command(entry)._asdict()

    async def _receive_rows(
        self,
        worker: str,
        life: str,
        number: int,
        batch: Mapping[str, Any] | None,
        troubles: Iterable[str],
        head: str | None = None,
    ) -> dict[int, str]:
        entry = self._workers.at(worker) or self._workers.arrived(worker, worker)
        entry.add_problems(troubles)
        entry.head_trouble = head
        if batch is not None and self._labels is not None and entry.is_new(life, number):
            lines = self._labels.idle.filled(batch["rows"])
            entry.record.add(lines, batch["measurements"], batch["last"])
            entry.lost += batch["lost"]
        return (
            self._jobs_on(entry.host)
            if self._settings.head is not None and self._workers.streams_to_head(entry)
            else {}
        )

    # Called by clients.

    async def install(self) -> list[str]:
        """Install the plugin in the workers, and return notes about them.

        Raises:
            GpulseError: There are workers, but none can be monitored.
        """
        async with self._request_lock:
            return await self._install()

    async def _install(self) -> list[str]:
        self._check_open()
        self._scheduler.worker_plugins[PLUGIN_NAME] = self._for_workers  # also for workers that join later
        self._notes += await self._rpc.put_plugin(self._workers.here(), self._for_workers)
        self._notes += self._unmonitored()
        if self._workers.here() and not self._workers.present():
            self._scheduler.worker_plugins.pop(PLUGIN_NAME, None)
            raise GpulseError(
                self._notes[0], hint=f"on the workers' machines, run: pip install {pip_requirement('dask')}"
            )
        self._look_for_gpus()
        return self._notes

    async def begin(self) -> list[str]:
        """Start, or continue after a stop; return problems on workers."""
        async with self._request_lock:
            return await self._begin()

    async def _begin(self) -> list[str]:
        self._check_open()
        if self._running:
            raise GpulseError("monitoring is already running", hint="end it with stop()")
        if PLUGIN_NAME not in self._scheduler.worker_plugins:
            await self._install()  # the client that attached it died before the installation was complete
        self._running = True
        self._look_for_gpus()
        if self._begun is None:
            self._begun = time.monotonic()
        if self._labels is None:
            self._labels = GraphLabelling(self._scheduler, self._numbering)
            self._labels.adopt()
        self._watch_task = asyncio.create_task(self._watch())
        troubles = await self._rpc.send({m: self._build_start_command(m) for m in self._workers.present()})
        return [*self._unmonitored(), *troubles]

    async def end(self) -> list[str]:
        """Stop after collecting the last measurements; return problems on workers."""
        async with self._request_lock:
            return await self._end()

    async def _end(self) -> list[str]:
        self._check_open()
        if not self._running:
            raise GpulseError("monitoring is not running", hint="start it with start()")
        self._running = False
        watch_task, self._watch_task = self._watch_task, None
        troubles = await self._rpc.send(dict.fromkeys(self._workers.present(), WorkerCommand(stop=True)))
        if watch_task is not None:
            watch_task.cancel()
        return troubles

    async def uninstall(self) -> None:
        """Remove the monitor from the scheduler and from all workers that still answer."""
        async with self._request_lock:
            if self._is_closed:
                return
            self._scheduler.worker_plugins.pop(PLUGIN_NAME, None)
            # Workers first: they send their last rows while the scheduler still accepts them.
            await self._rpc.take_plugin(self._workers.here())
            await self.close()
            self._scheduler.plugins.pop(PLUGIN_NAME, None)

    async def collect(self) -> list[tuple[int, str]]:
        """Collect what workers have measured so far; return the index of each record and its first line."""
        if self._running:
            await self._rpc.send(dict.fromkeys(self._workers.present(), WorkerCommand()))
        first = build_header(self._tracked, self._custom)
        return [(entry.index, first) for entry in self._workers.entries]

    async def page(self, index: int, position: int) -> tuple[list[bytes], int | None]:
        """Return a part of a record."""
        return self._workers.entries[index].record.page(position)

    async def new_job(self, job: int | None) -> int:
        """Begin another job."""
        number = self._numbering.new_job(job)
        if self._labels is not None:
            self._labels.look(self._elapsed())
        return number

    async def status(self) -> MonitorStatus:
        """Return the status."""
        settings, numbering = self._settings, self._numbering
        return MonitorStatus(
            running=self._running,
            started=self._begun is not None,
            tracking=tuple(column.name for column in self._tracked),
            custom=self._custom,
            job_type=settings.job_type,
            polling_interval=settings.interval_ms,
            mem_limit=settings.mem_limit,
            dump_loc=settings.dump_loc,
            head=None if settings.head is None else settings.head.address,
            job=numbering.job,
            jobs=numbering.jobs,
            dags=numbering.graphs,
            workers=tuple(entry.status() for entry in self._workers.entries),
            troubles=tuple(self._notes),
        )

    # Helpers.

    async def _handle_submission(self, **message: Any) -> None:
        """Wrap dask's handler of submissions, which does not tell plugins which task submitted."""
        labels = self._labels
        cause = None if labels is None else labels.cause(message["client"], message.get("submitting_task"))
        token = SUBMITTING_LABEL.set(cause)
        try:
            await self._submit(**message)
        finally:
            SUBMITTING_LABEL.reset(token)

    async def _watch(self) -> None:
        while True:
            begun = time.perf_counter()
            if self._labels is not None:
                self._labels.look(self._elapsed())
            spent = time.perf_counter() - begun
            await asyncio.sleep(max(_LOOK_SECONDS, _LOOK_PAUSE_FACTOR * spent))

    def _unmonitored(self) -> list[str]:
        return [
            f"worker {entry.index} ({entry.address}) is not monitored: check that gpulse is installed there, and see the worker's log"
            for entry in self._workers.here()
            if not entry.joined
        ]

    def _check_open(self) -> None:
        if self._is_closed:
            raise GpulseError("the monitor has been detached", hint="attach it again with attach()")

    def _elapsed(self) -> float:
        return 0.0 if self._begun is None else time.monotonic() - self._begun

    def _look_for_gpus(self) -> None:
        """Check once, as soon as there are workers, whether any has a GPU; if none has, track the hosts."""
        here = self._workers.present()
        if self._has_looked_for_gpus or not here:
            return
        self._has_looked_for_gpus = True
        if any(entry.gpus for entry in here) or not any(column.is_of_gpus for column in self._tracked):
            return
        note = "no worker has a GPU: GPU metrics stay empty"
        if all(column.shape in ("gpus", "tasks") for column in self._tracked):
            more = [name for name in DEFAULT_ON_HOSTS if name not in self._custom]
            self._tracked = (*self._tracked, *build_columns(more))
            note += f", and {' and '.join(more)} of the hosts are tracked instead"
        self._notes.append(note)

    def _jobs_on(self, host: str) -> dict[int, str]:
        """Return the current job of each worker of a machine by PID, in the head's notation."""
        place = self._scheduler.address.partition("://")[2]
        found: dict[int, str] = {}
        for entry in self._workers.on(host):
            worker = self._scheduler.workers.get(entry.address)
            job = 0 if worker is None or self._labels is None else self._labels.newest_on(worker).job
            if job and entry.pid is not None:
                found[entry.pid] = f"dask:{place}/{job}"
        return found

    def _build_start_command(self, entry: WorkerEntry) -> WorkerCommand:
        worker, labels = self._scheduler.workers.get(entry.address), self._labels
        return WorkerCommand(
            running=True,
            elapsed=self._elapsed(),
            sent=time.time(),
            token="" if labels is None else labels.token,
            adopted={} if labels is None or worker is None else dict(labels.adopted_on(worker)),
            tracked=self._tracked,
            streams=self._settings.head is not None and self._workers.streams_to_head(entry),
        )

    def _new_record(self, index: int) -> WorkerRecord:
        path = None if self._dumps is None else os.path.join(self._dumps.folder, f"worker-{index}.dump")
        return WorkerRecord(path, self._settings.mem_limit)


class _DumpFolder:
    """A subfolder of the dump directory."""

    def __init__(self, settings: MonitorSettings) -> None:
        """Create it.

        Raises:
            GpulseError: It cannot be created.
        """
        self._under = os.path.abspath(settings.dump_loc)
        self._was_there = os.path.isdir(self._under)
        self.folder = os.path.join(self._under, f"gpulse-{secrets.token_hex(4)}")
        try:
            resolve_output(self._under)
            os.makedirs(self.folder, mode=0o700)
        except OSError as error:
            raise GpulseError(
                f"the scheduler cannot create {self.folder}: {error.strerror}",
                hint="set dump_loc to a directory on the scheduler's machine that the scheduler can write to",
            ) from error

    def close(self) -> None:
        """Remove the directories that were created, unless they are in use."""
        with suppress(OSError):
            os.rmdir(self.folder)
            if not self._was_there:
                os.rmdir(self._under)


def already_monitored_error() -> GpulseError:
    """Return the error for a second monitor: only one can be attached to a cluster."""
    return GpulseError(
        "this cluster is already being monitored",
        hint="end the monitoring with stop(), or with detach(), which also discards the record",
    )


async def check_before_attach(settings: MonitorSettings, dask_scheduler: Scheduler) -> GpulseError | None:  # noqa: ARG001  dask's word
    """Run on the scheduler: return what would prevent attaching a monitor, before an earlier one is detached."""
    if settings.mem_limit is not None:
        try:
            _DumpFolder(settings).close()
        except GpulseError as error:
            return error
    return None
