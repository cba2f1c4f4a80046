"""Worker plugin: measures on its own thread and sends the rows to the scheduler."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
from distributed.diagnostics.plugin import WorkerPlugin

from gpulse.integrations.dask.csv_files import FrameReader
from gpulse.integrations.dask.head_stream import HeadStream
from gpulse.integrations.dask.job_labels import GraphLabel, find_label, label_of
from gpulse.integrations.dask.monitor_settings import MonitorSettings
from gpulse.integrations.dask.trackable_metrics import ArgumentError
from gpulse.integrations.dask.worker_registry import (
    COMMAND_HANDLER,
    JOIN_HANDLER,
    PLUGIN_NAME,
    ROWS_HANDLER,
    WorkerCommand,
)
from gpulse.integrations.dask.worker_sampling import (
    CustomMetricRunner,
    ExecutingTasks,
    RowBatch,
    WorkerMachine,
    WorkerSamplingThread,
    choose_cadence,
    open_gpus,
    unique_labels,
)
from gpulse.model.device import Device, select_own_gpus
from gpulse.model.frame import Frame
from gpulse.sources.frame_source import Source
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.nvml.gpu_reader import GpuReader

if TYPE_CHECKING:
    from distributed import Worker

_SEND_SECONDS = 1.0
_ANSWER_SECONDS = 2.0
"""Deadline for the scheduler to accept rows; then they are sent again later, or dropped when the worker ends."""
_STOP_SECONDS = 8.0
"""How long a stop retries to send; the scheduler waits a little longer for its answer."""
_RETRY_SECONDS = 0.2
_MAX_SEND_SECONDS = 10.0
"""The scheduler waits no longer for an answer, so a command that seems older came while a clock was set."""
_TEARDOWN_SECONDS = 8.0
"""Deadline for cleaning up, so that a worker can exit even if something hangs."""
_MAX_PROBLEMS = 50
_HEAD_SECONDS = 3.0
"""Shorter outages of a head are not reported."""

_log = logging.getLogger("distributed.worker.gpulse")
"""Child of dask's logger, so that messages appear in the worker's log."""


class WorkerMonitor(WorkerPlugin):
    """Plugin that dask installs in every worker, also in those that join later."""

    name = PLUGIN_NAME

    def __init__(self, settings: MonitorSettings) -> None:
        self._settings = settings
        self._recorder: WorkerRecorder | None = None

    async def setup(self, worker: Worker) -> None:
        """Start the monitoring of a worker; dask calls it."""
        self._recorder = WorkerRecorder(worker, self._settings)
        await self._recorder.open()

    async def teardown(self, worker: Worker) -> None:  # noqa: ARG002  dask's signature
        """End the monitoring of a worker; dask calls it."""
        if self._recorder is None:
            return
        try:
            async with asyncio.timeout(_TEARDOWN_SECONDS):
                await self._recorder.close()
        except TimeoutError:
            _log.warning("monitoring did not end within %g s and was abandoned", _TEARDOWN_SECONDS)


class WorkerRecorder:
    """Records one worker: its GPUs, its sampling thread, and the rows on their way to the scheduler."""

    def __init__(self, worker: Worker, settings: MonitorSettings) -> None:
        self._worker = worker
        self._settings = settings
        self._life = secrets.token_hex(8)
        """Identifies this process among earlier ones at the same address."""
        self._gpus: list[Device] = []
        self._reader: GpuReader | None = None
        self._source: Source | None = None
        self._thread: WorkerSamplingThread | None = None
        self._stream: HeadStream | None = None
        self._troubles: list[str] = []
        self._custom = CustomMetricRunner(
            settings.custom, worker, interval_seconds=settings.interval_seconds, report=self._report
        )
        self._clock: tuple[str, Callable[[float], float]] | None = None
        """Token of the monitor, and the conversion from this machine's clock to its seconds."""
        self._reported: set[tuple[str, str | None, str]] = set()
        self._missed_since: float | None = None
        """Since when something has been wrong with the head."""
        self._unsent: RowBatch | None = None
        self._batches = 0
        self._sending = asyncio.Lock()
        self._command_lock = asyncio.Lock()
        self._halting = asyncio.Event()
        self._delivery: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Find the GPUs, register with the scheduler, and begin if recording runs."""
        await asyncio.to_thread(self._find_gpus)
        self._worker.handlers[COMMAND_HANDLER] = self._execute_command
        answer = await getattr(self._worker.scheduler, JOIN_HANDLER)(
            worker=self._worker.address,
            host=socket.gethostname(),
            pid=os.getpid(),
            gpus=[device.name for device in self._gpus],
        )
        if answer is not None:
            await self._execute_command(**answer)

    async def close(self) -> None:
        """Stop sampling and send the remaining rows."""
        if self._worker.handlers.get(COMMAND_HANDLER) == self._execute_command:
            del self._worker.handlers[COMMAND_HANDLER]
        async with self._command_lock:
            await self._stop_recording()
        self._custom.close()
        if self._reader is not None:
            await asyncio.to_thread(self._reader.close)

    async def _execute_command(self, **command: Any) -> dict[str, int]:
        """Execute a command of the scheduler; return how many measurements were lost."""
        wanted = WorkerCommand.of(command)
        received = time.time(), time.monotonic()
        async with self._command_lock:
            lost = 0
            if wanted.running:
                await self._stop_recording(_ANSWER_SECONDS)
                await self._begin(wanted, received)
            elif wanted.stop:
                lost = await self._stop_recording(_STOP_SECONDS)
            else:
                await self._send()
            return {"lost": lost}

    async def _begin(self, command: WorkerCommand, received: tuple[float, float]) -> None:
        try:
            self._thread = await asyncio.to_thread(self._build_sampling_thread, command, received)
        except Exception as error:
            self._report(f"cannot start measuring: {error!r}")
            await self._stop_recording()
            raise
        self._thread.start()
        self._halting.clear()
        self._delivery = asyncio.create_task(self._deliver())

    async def _stop_recording(self, timeout_seconds: float = 0.0) -> int:
        """Stop sampling, send the remaining rows, and return how many measurements were not accepted in time."""
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            self._halting.set()
            # It may have been cancelled with everything else of a worker that ends.
            await asyncio.wait([delivery])
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop)
        await self._send_rest(timeout_seconds)
        self._thread = None
        lost = 0 if self._unsent is None else self._unsent.measurements
        if lost:
            _log.warning("the scheduler does not respond (measurements lost: %d)", lost)
            self._unsent = None
        stream, self._stream = self._stream, None
        if stream is not None:
            await asyncio.to_thread(stream.stop)
        source, self._source = self._source, None
        if source is not None:
            await asyncio.to_thread(source.close)
            self._reader = None
        return lost

    async def _send_rest(self, timeout_seconds: float) -> None:
        """Try to send the remaining rows, once or until a deadline."""
        until = time.monotonic() + timeout_seconds
        while True:
            await self._try_to_send()
            if self._unsent is None or time.monotonic() >= until:
                return
            await asyncio.sleep(_RETRY_SECONDS)

    def _find_gpus(self) -> None:
        """Find the GPUs in the worker's own order, which is the order of every list in its record."""
        reader = open_gpus(
            self._settings.tracked,
            self._settings.interval_seconds,
            time.time(),
            whole=bool(self._settings.head),
        )
        self._reader = reader
        self._gpus = select_own_gpus(
            reader.devices,
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            first_only=_is_dask_cuda(self._worker),
        )
        if not self._settings.head:
            reader.only(frozenset(device.uuid for device in self._gpus))

    def _build_sampling_thread(
        self, command: WorkerCommand, received: tuple[float, float]
    ) -> WorkerSamplingThread:
        if self._reader is None:
            self._find_gpus()
        settings, tracked = self._settings, command.tracked
        uuids = [device.uuid for device in self._gpus]
        source: Source = WorkerMachine(tracked, self._reader)
        if command.streams and settings.head is not None:
            source = LocalMachine(
                interval_seconds=max(1.0, settings.interval_seconds),
                cadence=choose_cadence(tracked, settings.interval_seconds),
                threads=True,
                gpus=self._reader,
            )
            self._stream = self._start_stream()
        self._source = source
        self._custom.handles = _open_handles(uuids) if settings.custom else []
        wants_tasks = any(column.shape == "tasks" for column in tracked)
        if (
            self._clock is None or self._clock[0] != command.token
        ):  # else it would step when recording starts again
            self._clock = command.token, _build_clock(command, self._worker.scheduler_delay, *received)
        return WorkerSamplingThread(
            source,
            settings.interval_seconds,
            frames=FrameReader(tracked, uuids, os.getpid()),
            custom=self._custom,
            executing=lambda: find_executing(self._worker, command, keys=wants_tasks),
            elapsed=self._clock[1],
            taken=self._handle_frame,
        )

    def _start_stream(self) -> HeadStream:
        settings = self._settings
        if settings.head is None:
            raise RuntimeError("no head is configured")
        state = Path(self._worker.local_directory) / "gpulse-agent"
        stream = HeadStream(settings.head, state, interval_seconds=settings.interval_seconds)
        stream.start()
        return stream

    def _handle_frame(self, frame: Frame) -> None:
        """Handle a frame on the sampling thread."""
        if self._stream is not None:
            self._stream.offer(frame)
        for entry in frame.health:
            key = (entry.source, entry.subject, entry.code)
            if (
                entry.is_problem
                and key not in self._reported
                and not self._concerns_other_workers(entry.subject)
            ):
                self._reported.add(key)
                self._report(f"{entry.subject or entry.source}: {entry.detail}")

    def _concerns_other_workers(self, subject: str | None) -> bool:
        """Return whether a problem is about a GPU of other workers."""
        if subject is None or not subject.startswith("gpu "):
            return not self._gpus and subject is None
        return subject not in {f"gpu {device.label}" for device in self._gpus}

    def _report(self, trouble: str) -> None:
        if ("", None, trouble) in self._reported:
            return
        self._reported.add(("", None, trouble))
        if len(self._troubles) < _MAX_PROBLEMS:
            self._troubles.append(trouble)
        _log.warning("%s", trouble)

    async def _deliver(self) -> None:
        while not self._halting.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_SEND_SECONDS):
                    await self._halting.wait()
            if self._thread is not None and self._thread.error is not None:
                self._report(f"a measurement failed because of a bug in gpulse: {self._thread.error!r}")
                self._thread.error = None
            await self._try_to_send()

    async def _try_to_send(self) -> None:
        try:
            await self._send()
        except Exception as error:  # noqa: BLE001  an error while sending must end neither the measuring nor the worker
            _log.warning("the scheduler did not accept the measurements: %r", error)

    async def _send(self) -> None:
        """Send rows to the scheduler; keep what it does not accept for the next time."""
        async with self._sending:
            if self._unsent is not None and not await self._send_unsent():
                return
            # Only once: a scheduler that is slower than the measuring would keep this loop busy.
            if self._thread is not None:
                self._unsent = self._thread.take_batch()
                self._batches += self._unsent is not None
            if self._unsent is not None or self._troubles or self._stream is not None:
                await self._send_unsent()

    async def _send_unsent(self) -> bool:
        """Send the unsent rows, and return whether the scheduler accepted them."""
        batch, troubles = self._unsent, self._troubles[:]
        try:
            message = getattr(self._worker.scheduler, ROWS_HANDLER)(
                worker=self._worker.address,
                life=self._life,
                number=self._batches,
                batch=None
                if batch is None
                else {**batch._asdict(), "rows": batch.rows.encode("utf-8", "backslashreplace")},
                troubles=troubles,
                head=self._find_head_problem(),
            )
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer = await message
        except (OSError, TimeoutError):  # the scheduler is away, or gone with everything
            return False
        if answer is None:  # no monitor is attached to the scheduler
            return False
        self._unsent = None
        del self._troubles[: len(troubles)]
        if self._stream is not None:
            self._stream.label({int(pid): job for pid, job in answer.items()})
        return True

    def _find_head_problem(self) -> str | None:
        """Return why the head does not receive frames, if the problem persists."""
        trouble = None if self._stream is None else self._stream.trouble
        if trouble is None:
            self._missed_since = None
            return None
        self._missed_since = self._missed_since or time.monotonic()
        return trouble if time.monotonic() - self._missed_since >= _HEAD_SECONDS else None


def find_executing(worker: Worker, command: WorkerCommand, *, keys: bool) -> ExecutingTasks:
    """Return the tasks that a worker executes now, and their graphs. Thread-safe."""
    active = list(worker.active_keys)
    if not active:
        return ExecutingTasks()
    labels: list[GraphLabel | None] = []
    for key in active:
        task = worker.state.tasks.get(key)
        label = None if task is None else find_label(task.annotations, command.token)
        labels.append(label_of(command.adopted.get(key), command.token) if label is None else label)
    return ExecutingTasks(tuple(map(str, active)) if keys else (), unique_labels(labels))


def _build_clock(command: WorkerCommand, delay: float, wall: float, clock: float) -> Callable[[float], float]:
    """Return the conversion from the monotonic clock to seconds since the start of monitoring.

    Args:
        command: Says how many those were when it was sent.
        delay: What the scheduler's clock is ahead of ours.
        wall: When the command was received, in epoch seconds.
        clock: The same on the monotonic clock.
    """
    under_way = min(max(0.0, wall + delay - command.sent), _MAX_SEND_SECONDS)
    return lambda moment: command.elapsed + under_way + moment - clock


def _open_handles(uuids: Sequence[str]) -> list[Any]:
    """Return NVML handles for custom metrics, valid while NVML is open; None for a lost GPU."""
    import pynvml  # noqa: PLC0415  only where there are GPUs

    def handle(uuid: str) -> Any:
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError:
            return None

    try:
        pynvml.nvmlInit()  # loads the library for pynvml, too
        pynvml.nvmlShutdown()  # NVML stays open, because it counts the starts
    except pynvml.NVMLError:
        return [None for _ in uuids]
    return [handle(uuid) for uuid in uuids]


def _is_dask_cuda(worker: Worker) -> bool:
    """Return whether dask-cuda started the worker: its workers see all GPUs, their own first."""
    return any(type(plugin).__module__.partition(".")[0] == "dask_cuda" for plugin in worker.plugins.values())


def pack_plugin(settings: MonitorSettings) -> bytes:
    """Return the plugin for every worker, as dask sends it.

    Raises:
        ArgumentError: A custom metric cannot be pickled.
    """
    packed: bytes = cloudpickle.dumps(_build_carrier(_pack(settings)))
    return packed


def _pack(settings: MonitorSettings) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps(WorkerMonitor(settings))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        names = ", ".join(metric.name for metric in settings.custom)
        raise ArgumentError(
            f"custom metrics ({names}) cannot be sent to the workers: {error}",
            hint="create locks, files and connections inside the functions: each function is pickled with the globals that it uses",
        ) from error
    return packed


def _build_carrier(packed: bytes) -> WorkerPlugin:
    """Return a plugin that is pickled by value, and unpickles the monitor on the worker if gpulse is installed there.

    A plugin that cannot be loaded keeps a worker from joining its cluster.
    """

    class Carrier(WorkerPlugin):
        name = PLUGIN_NAME

        def __init__(self) -> None:
            self.packed = packed
            self.monitor: Any = None

        async def setup(self, worker: Worker) -> None:
            try:
                self.monitor = pickle.loads(self.packed)  # noqa: S301  dask's own wire, and what it carries anyway
            except ImportError as error:
                logging.getLogger("distributed.worker.gpulse").warning(
                    "this worker is not monitored because a package is missing: %s", error
                )
                return
            await self.monitor.setup(worker)

        async def teardown(self, worker: Worker) -> None:
            if self.monitor is not None:
                await self.monitor.teardown(worker)

    return Carrier()
