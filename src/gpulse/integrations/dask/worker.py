"""In each worker: measures on a thread of its own and brings the lines to the scheduler."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import WorkerPlugin

from gpulse.integrations.dask.asking import CustomReader
from gpulse.integrations.dask.jobs import Label, label_of, marked
from gpulse.integrations.dask.machine import WorkerMachine, cadence, open_gpus
from gpulse.integrations.dask.recorder import Executing, Parcel, Recorder, same_once
from gpulse.integrations.dask.rows import FrameReader
from gpulse.integrations.dask.settings import Settings
from gpulse.integrations.dask.wire import JOIN, ORDER, PLUGIN, ROWS, Order
from gpulse.model.device import Device, own_gpus
from gpulse.model.frame import Frame
from gpulse.sources.base import Source
from gpulse.sources.machine import LocalMachine
from gpulse.sources.nvml.reader import GpuReader

if TYPE_CHECKING:
    from distributed import Worker

    from gpulse.integrations.dask.streaming import HeadStream

_SEND_SECONDS = 1.0
_ANSWER_SECONDS = 2.0
"""A scheduler that does not take rows in this time gets them again later; a worker that ends does not wait longer."""
_STOP_SECONDS = 8.0
"""For so long a stop goes on trying; the scheduler waits a little longer for its answer."""
_RETRY_SECONDS = 0.2
_LONGEST_UNDER_WAY = 10.0
"""The scheduler waits no longer for an order to be obeyed: what looks longer is a clock that was set."""
_TEARDOWN_SECONDS = 8.0
"""Whatever hangs, a worker that wants to end is not kept from it for longer."""
_MOST_TROUBLES = 50
_HEAD_SECONDS = 3.0
"""A head that cannot be reached for less is not worth a word."""

_log = logging.getLogger("distributed.worker.gpulse")
"""Under dask's own, so that it is seen where a worker's messages are."""


class WorkerMonitor(WorkerPlugin):
    """The plugin that dask puts into every worker, also into those that come later."""

    name = PLUGIN

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._station: Station | None = None

    async def setup(self, worker: Worker) -> None:
        """Dask has put the plugin into a worker."""
        self._station = Station(worker, self._settings)
        await self._station.open()

    async def teardown(self, worker: Worker) -> None:  # noqa: ARG002  dask's signature
        """The worker ends, or is not monitored any more."""
        if self._station is None:
            return
        try:
            async with asyncio.timeout(_TEARDOWN_SECONDS):
                await self._station.close()
        except TimeoutError:
            _log.warning("monitoring did not end within %g s, and is left behind", _TEARDOWN_SECONDS)


class Station:
    """The monitoring of one worker: its GPUs, its recorder, and what is on the way to the scheduler."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self._worker = worker
        self._settings = settings
        self._life = secrets.token_hex(8)
        """Tells this worker from an earlier one at the same address."""
        self._gpus: list[Device] = []
        self._reader: GpuReader | None = None
        self._source: Source | None = None
        self._recorder: Recorder | None = None
        self._stream: HeadStream | None = None
        self._troubles: list[str] = []
        self._custom = CustomReader(
            settings.custom, worker, interval_seconds=settings.interval_seconds, report=self._report
        )
        self._clock: tuple[str, Callable[[float], float]] | None = None
        """The monitor's token, and how its seconds follow from this machine's clock."""
        self._told: set[tuple[str, str | None, str]] = set()
        self._missed_since: float | None = None
        """Since when something has been wrong with the head."""
        self._unsent: Parcel | None = None
        self._batches = 0
        self._sending = asyncio.Lock()
        self._ordering = asyncio.Lock()
        self._halting = asyncio.Event()
        self._delivery: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Find the GPUs, join the others, and begin if they have begun."""
        await asyncio.to_thread(self._find_gpus)
        self._worker.handlers[ORDER] = self._ordered
        answer = await getattr(self._worker.scheduler, JOIN)(
            worker=self._worker.address,
            host=socket.gethostname(),
            pid=os.getpid(),
            gpus=[device.name for device in self._gpus],
        )
        if answer is not None:
            await self._ordered(**answer)

    async def close(self) -> None:
        """End the measuring, and send what there is."""
        if self._worker.handlers.get(ORDER) == self._ordered:
            del self._worker.handlers[ORDER]
        async with self._ordering:
            await self._halt()
        self._custom.close()
        if self._reader is not None:
            await asyncio.to_thread(self._reader.close)

    async def _ordered(self, **order: Any) -> dict[str, int]:
        """The scheduler wants something; how many measurements were lost over it."""
        wanted = Order.of(order)
        received = time.time(), time.monotonic()
        async with self._ordering:
            lost = 0
            if wanted.running:
                await self._halt(_ANSWER_SECONDS)
                await self._begin(wanted, received)
            elif wanted.stop:
                lost = await self._halt(_STOP_SECONDS)
            else:
                await self._send()
            return {"lost": lost}

    async def _begin(self, order: Order, received: tuple[float, float]) -> None:
        try:
            self._recorder = await asyncio.to_thread(self._prepared, order, received)
        except Exception as error:
            self._report(f"measuring could not begin: {error!r}")
            await self._halt()
            raise
        self._recorder.start()
        self._halting.clear()
        self._delivery = asyncio.create_task(self._deliver())

    async def _halt(self, patience_seconds: float = 0.0) -> int:
        """End the measuring, and bring the rest to the scheduler: how many it did not take in that time."""
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            self._halting.set()
            # It may have been cancelled with everything else of a worker that ends.
            await asyncio.wait([delivery])
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.stop)
        await self._send_rest(patience_seconds)
        self._recorder = None
        lost = 0 if self._unsent is None else self._unsent.measurements
        if lost:
            _log.warning("the scheduler does not answer: the last %d measurements are lost", lost)
            self._unsent = None
        stream, self._stream = self._stream, None
        if stream is not None:
            await asyncio.to_thread(stream.stop)
        source, self._source = self._source, None
        if source is not None:
            await asyncio.to_thread(source.close)
            self._reader = None
        return lost

    async def _send_rest(self, patience_seconds: float) -> None:
        """Try to send what there is, once or for a time."""
        until = time.monotonic() + patience_seconds
        while True:
            await self._try_to_send()
            if self._unsent is None or time.monotonic() >= until:
                return
            await asyncio.sleep(_RETRY_SECONDS)

    def _find_gpus(self) -> None:
        """Also in the worker's own order, which is the order of every list in its record."""
        reader = open_gpus(
            self._settings.tracked,
            self._settings.interval_seconds,
            time.time(),
            whole=bool(self._settings.head),
        )
        self._reader = reader
        self._gpus = own_gpus(
            reader.devices,
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            first_only=_is_dask_cuda(self._worker),
        )
        if not self._settings.head:
            reader.only(frozenset(device.uuid for device in self._gpus))

    def _prepared(self, order: Order, received: tuple[float, float]) -> Recorder:
        if self._reader is None:
            self._find_gpus()
        settings, tracked = self._settings, order.tracked
        uuids = [device.uuid for device in self._gpus]
        source: Source = WorkerMachine(tracked, self._reader)
        if order.streams and settings.head is not None:
            source = LocalMachine(
                interval_seconds=max(1.0, settings.interval_seconds),
                cadence=cadence(tracked, settings.interval_seconds),
                threads=True,
                gpus=self._reader,
            )
            self._stream = self._streaming()
        self._source = source
        self._custom.handles = _handles(uuids) if settings.custom else []
        wants_tasks = any(column.shape == "tasks" for column in tracked)
        if (
            self._clock is None or self._clock[0] != order.token
        ):  # else it would step when recording starts again
            self._clock = order.token, _clock(order, self._worker.scheduler_delay, *received)
        return Recorder(
            source,
            settings.interval_seconds,
            frames=FrameReader(tracked, uuids, os.getpid()),
            custom=self._custom,
            executing=lambda: executing(self._worker, order, keys=wants_tasks),
            elapsed=self._clock[1],
            taken=self._taken,
        )

    def _streaming(self) -> HeadStream:
        from gpulse.integrations.dask.streaming import HeadStream  # noqa: PLC0415  loads gRPC

        settings = self._settings
        if settings.head is None:
            raise RuntimeError("there is no head to stream to")
        state = Path(self._worker.local_directory) / "gpulse-agent"
        stream = HeadStream(settings.head, state, interval_seconds=settings.interval_seconds)
        stream.start()
        return stream

    def _taken(self, frame: Frame) -> None:
        """A frame, on the recorder's thread."""
        if self._stream is not None:
            self._stream.offer(frame)
        for entry in frame.health:
            key = (entry.source, entry.subject, entry.code)
            if entry.is_problem and key not in self._told and not self._is_of_others(entry.subject):
                self._told.add(key)
                self._report(f"{entry.subject or entry.source}: {entry.detail}")

    def _is_of_others(self, subject: str | None) -> bool:
        """Whether something is about a GPU, and none of this worker's."""
        if subject is None or not subject.startswith("gpu "):
            return not self._gpus and subject is None
        return subject not in {f"gpu {device.label}" for device in self._gpus}

    def _report(self, trouble: str) -> None:
        if ("", None, trouble) in self._told:
            return
        self._told.add(("", None, trouble))
        if len(self._troubles) < _MOST_TROUBLES:
            self._troubles.append(trouble)
        _log.warning("%s", trouble)

    async def _deliver(self) -> None:
        while not self._halting.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_SEND_SECONDS):
                    await self._halting.wait()
            if self._recorder is not None and self._recorder.error is not None:
                self._report(f"a measurement failed, which is a fault in gpulse: {self._recorder.error!r}")
                self._recorder.error = None
            await self._try_to_send()

    async def _try_to_send(self) -> None:
        try:
            await self._send()
        except Exception as error:  # noqa: BLE001  a fault in telling must end neither the measuring nor the worker
            _log.warning("the scheduler did not take what was measured: %r", error)

    async def _send(self) -> None:
        """Bring to the scheduler what there is; what it does not take is kept for the next time."""
        async with self._sending:
            if self._unsent is not None and not await self._sent():
                return
            # Once: a scheduler that is slower than the measuring would keep us here.
            if self._recorder is not None:
                self._unsent = self._recorder.parcel()
                self._batches += self._unsent is not None
            if self._unsent is not None or self._troubles or self._stream is not None:
                await self._sent()

    async def _sent(self) -> bool:
        """Whether the scheduler took what was there."""
        batch, troubles = self._unsent, self._troubles[:]
        try:
            message = getattr(self._worker.scheduler, ROWS)(
                worker=self._worker.address,
                life=self._life,
                number=self._batches,
                batch=None
                if batch is None
                else {**batch._asdict(), "rows": batch.rows.encode("utf-8", "backslashreplace")},
                troubles=troubles,
                head=self._head(),
            )
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer = await message
        except (OSError, TimeoutError):  # the scheduler is away, or gone with everything
            return False
        if answer is None:  # nobody there knows what these are
            return False
        self._unsent = None
        del self._troubles[: len(troubles)]
        if self._stream is not None:
            self._stream.label({int(pid): job for pid, job in answer.items()})
        return True

    def _head(self) -> str | None:
        """Why the head does not get the frames, if that lasts."""
        trouble = None if self._stream is None else self._stream.trouble
        if trouble is None:
            self._missed_since = None
            return None
        self._missed_since = self._missed_since or time.monotonic()
        return trouble if time.monotonic() - self._missed_since >= _HEAD_SECONDS else None


def executing(worker: Worker, order: Order, *, keys: bool) -> Executing:
    """The tasks that a worker executes now, and their graphs; may be called from any thread."""
    active = list(worker.active_keys)
    if not active:
        return Executing()
    labels: list[Label | None] = []
    for key in active:
        task = worker.state.tasks.get(key)
        label = None if task is None else marked(task.annotations, order.token)
        labels.append(label_of(order.adopted.get(key), order.token) if label is None else label)
    return Executing(tuple(map(str, active)) if keys else (), same_once(labels))


def _clock(order: Order, delay: float, wall: float, clock: float) -> Callable[[float], float]:
    """From moments on a clock of ours that nobody sets to seconds since the start of monitoring.

    Args:
        order: Says how many those were when it was sent.
        delay: What the scheduler's clock is ahead of ours.
        wall: When the order was received, in epoch seconds.
        clock: The same on the monotonic clock.
    """
    under_way = min(max(0.0, wall + delay - order.sent), _LONGEST_UNDER_WAY)
    return lambda moment: order.elapsed + under_way + moment - clock


def _handles(uuids: Sequence[str]) -> list[Any]:
    """What people's functions get: NVML's handles, which are good as long as it is open; None for a GPU that is lost."""
    import pynvml  # noqa: PLC0415  only where there are GPUs

    def handle(uuid: str) -> Any:
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError:
            return None

    return [handle(uuid) for uuid in uuids]


def _is_dask_cuda(worker: Worker) -> bool:
    """Whether dask-cuda started the worker: it lets each one see all GPUs, its own first."""
    return any(type(plugin).__module__.partition(".")[0] == "dask_cuda" for plugin in worker.plugins.values())
