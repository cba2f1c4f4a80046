"""Sampling in a worker: frames of its own GPUs, turned into rows on a thread, and custom metrics, which may raise or hang."""

from __future__ import annotations

import os
import platform
import threading
import traceback
from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from gpulse.errors import ClosedError
from gpulse.integrations.dask.csv_files import Cell, FrameReader, build_lines, to_plain_json
from gpulse.integrations.dask.job_labels import GraphLabel
from gpulse.integrations.dask.monitor_settings import CustomMetric
from gpulse.integrations.dask.trackable_metrics import TrackedColumn, find_needed_readings
from gpulse.model.device import Node
from gpulse.model.frame import Frame
from gpulse.model.metric_catalog import Scope
from gpulse.model.source_health import Health
from gpulse.sampling.sampler import Sampler
from gpulse.sources.disks import DiskReader, FilesystemReader
from gpulse.sources.frame_source import Source
from gpulse.sources.host import HostReader
from gpulse.sources.network import NetworkReader
from gpulse.sources.nvml.gpm import MIN_GPM_SECONDS
from gpulse.sources.nvml.gpu_reader import GpuReader
from gpulse.sources.nvml.read_timing import Cadence, DriverTimeouts
from gpulse.sources.processes import ProcessReader
from gpulse.sources.timeout_pool import PoolBatch, TimeoutPool

_LATE_SECONDS = 1.0
"""A result that takes longer, and longer than a measurement, is reported."""


class CustomMetricRunner:
    """Calls each function on its own thread, at most once at a time; a measurement waits up to half an interval."""

    def __init__(
        self,
        metrics: Sequence[CustomMetric],
        worker: Any,
        *,
        interval_seconds: float,
        report: Callable[[str], None],
    ) -> None:
        """Prepare to run.

        Args:
            metrics: Custom metrics to run.
            worker: The dask worker that they get.
            interval_seconds: Time between two measurements.
            report: Called once for each way in which a metric fails.
        """
        self.handles: list[Any] = []
        """NVML handles of the worker's GPUs; None for one without."""
        self._metrics = {metric.name: metric for metric in metrics}
        self._worker = worker
        self._patience = interval_seconds / 2
        self._late_seconds = max(_LATE_SECONDS, interval_seconds)
        self._report = report
        self._reported: set[tuple[str, str]] = set()
        self._pool: TimeoutPool[str] = TimeoutPool("custom", len(metrics))
        self._batches: dict[str, tuple[PoolBatch[str, Cell], float]] = {}
        """Running calls, and since when."""

    def cells(self) -> list[Cell]:
        """Return one result per metric, None for those that failed or are late; a late result is used when it arrives."""
        clock = monotonic()
        for name in self._metrics.keys() - self._batches.keys():
            self._batches[name] = self._pool.start([name], self._call_metric), clock
        for batch, _ in self._batches.values():
            batch.wait(clock + self._patience - monotonic())
        return [self._collect_result(name) for name in self._metrics]

    def close(self) -> None:
        """End the threads; one that hangs ends with the process."""
        self._pool.close(0.2)

    def _collect_result(self, name: str) -> Cell:
        batch, since = self._batches[name]
        if not batch.finished:
            if monotonic() - since > self._late_seconds:
                self._report_failure(name, None)
            return None
        del self._batches[name]
        if name in batch.errors:
            self._report_failure(name, batch.errors[name])
        return batch.results.get(name)

    def _call_metric(self, name: str) -> Cell:
        try:
            return self._call_function(self._metrics[name])
        except (SystemExit, KeyboardInterrupt) as error:  # which would end the thread silently
            raise RuntimeError(f"it raised {error!r}") from error

    def _call_function(self, metric: CustomMetric) -> Cell:
        if not metric.per_device:
            return to_plain_json(metric(self._worker, list(self.handles)))
        return [
            None if handle is None else to_plain_json(metric(self._worker, handle)) for handle in self.handles
        ]

    def _report_failure(self, name: str, error: Exception | None) -> None:
        kind = "late" if error is None else type(error).__name__
        if (name, kind) in self._reported:
            return
        self._reported.add((name, kind))
        if error is None:
            self._report(
                f"custom metric {name!r} takes longer than {self._late_seconds:g} s; its values are recorded as missing until it returns"
            )
            return
        lines = "".join(traceback.format_exception(type(error), error, _skip_own_frames(error.__traceback__)))
        self._report(f"custom metric {name!r} failed; its values are recorded as missing:\n{lines}")


def _skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that is in the user's code."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("gpulse."):
        trace = trace.tb_next
    return trace


_NEVER_SECONDS = 1e9
_SLOW_SECONDS = 5.0
"""Energy and similar readings cost milliseconds of CPU time per GPU."""
_SHARES_SECONDS = 2.0
_TICK_TIMEOUT_SECONDS = 2.0
"""Long, because tasks that hold the interpreter lock delay all our calls."""
_CALL_TIMEOUT_SECONDS = 10.0
_FIRST_TIMEOUT_SECONDS = 1.0
"""For readings outside the tick, such as the memory size, before the first frame is returned."""

_MAX_WAITING_ROWS = 20_000
"""Measurements that wait for the scheduler; beyond that the oldest are dropped."""


def choose_cadence(tracked: Sequence[TrackedColumn], interval_seconds: float) -> Cadence:
    """Return how often to read: at every measurement, except expensive readings."""
    gpm = max(MIN_GPM_SECONDS, interval_seconds)
    wants_graphics = any(column.metric == "graphics_active_ratio" for column in tracked)
    return Cadence(
        second=interval_seconds,
        gpm=gpm,
        graphics=gpm if wants_graphics else _NEVER_SECONDS,
        shares=max(_SHARES_SECONDS, interval_seconds),
        slow=max(_SLOW_SECONDS, interval_seconds),
        details=0.0,
    )


def choose_timeouts() -> DriverTimeouts:
    """Return deadlines for driver calls in a process whose own work comes first."""
    return DriverTimeouts(call=_CALL_TIMEOUT_SECONDS)


class _MachineReader(Protocol):
    """One part of a machine."""

    def read(self, now: float) -> tuple[Any, list[Health]]: ...


class WorkerMachine:
    """Source of one worker's frames, with only what its columns need."""

    def __init__(self, tracked: Sequence[TrackedColumn], gpus: GpuReader | None) -> None:
        """Prepare to read.

        Args:
            tracked: Columns that frames must provide.
            gpus: The reader of the worker's GPUs, None when it has none; closed with this source.
        """
        scopes: set[Scope | None] = {column.scope for column in tracked}
        self._gpus = gpus if any(column.is_of_gpus for column in tracked) else None
        self._opened = gpus
        self._node = Node(platform.node())
        made: dict[Scope, tuple[str, Callable[[], _MachineReader]]] = {
            "host": ("host", HostReader),
            "disk": ("disks", DiskReader),
            "filesystem": ("filesystems", FilesystemReader),
            "network": ("network", NetworkReader),
        }
        self._parts = {part: make() for scope, (part, make) in made.items() if scope in scopes}
        """By the part of a frame that each reads."""
        wants_process = any(
            column.scope in ("process", "cgroup") and not column.is_of_gpus for column in tracked
        )
        self._processes = ProcessReader() if wants_process else None
        self._sampled = False
        self._closed = False

    def sample(self, now: float) -> Frame:
        """Return one frame.

        Raises:
            ClosedError: The source was closed.
        """
        if self._closed:
            raise ClosedError("this source is closed")
        if self._gpus is not None:
            self._gpus.start(now)
        frame = Frame(time=now, monotonic=monotonic(), node=self._node)
        health: list[Health] = []
        for part, reader in self._parts.items():
            reading, found = reader.read(now)
            frame = frame._replace(**{part: reading})
            health += found
        if self._processes is not None:
            process, groups = self._processes.read_one(now, os.getpid())
            frame = frame._replace(processes=() if process is None else (process,), cgroups=groups)
        if self._gpus is not None:
            patience = 0.0 if self._sampled else _FIRST_TIMEOUT_SECONDS
            gpus, found = self._gpus.collect(now, tick_patience=_TICK_TIMEOUT_SECONDS, patience=patience)
            frame = frame._replace(gpus=gpus)
            health += found
        self._sampled = True
        return frame._replace(health=tuple(health))

    def close(self) -> None:
        """Release the readers; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._opened is not None:
            self._opened.close()
        filesystems = self._parts.get("filesystems")
        if isinstance(filesystems, FilesystemReader):
            filesystems.close()


def open_gpus(
    tracked: Sequence[TrackedColumn], interval_seconds: float, now: float, *, whole: bool = False
) -> GpuReader:
    """Return a reader whose GPUs have identified themselves, as far as they do so in a few seconds.

    Args:
        tracked: What will be read.
        interval_seconds: How often.
        now: Epoch seconds.
        whole: Read all metrics, for consumers of complete frames.
    """
    reader = GpuReader(
        choose_cadence(tracked, interval_seconds),
        watch_xids=whole or any(column.metric.startswith("xid_") for column in tracked),
        timeouts=choose_timeouts(),
        names=None if whole else find_needed_readings(tracked),
    )
    reader.open(now)
    return reader


class ExecutingTasks(NamedTuple):
    """Tasks that a worker executes now."""

    tasks: tuple[str, ...] = ()
    """The keys."""
    labels: tuple[GraphLabel | None, ...] = (None,)
    """Their graphs, each once; None where only the scheduler can tell."""


class RowBatch(NamedTuple):
    """Measurements on their way to the scheduler."""

    rows: str
    measurements: int
    last: float
    """The timestamp of the newest."""
    lost: int = 0
    """Number of measurements that were dropped before these."""


class WorkerSamplingThread:
    """Samples at a steady interval on its own thread, between `start` and `stop`."""

    def __init__(
        self,
        source: Source,
        interval_seconds: float,
        *,
        frames: FrameReader,
        custom: CustomMetricRunner,
        executing: Callable[[], ExecutingTasks],
        elapsed: Callable[[float], float],
        taken: Callable[[Frame], None] = lambda _: None,
    ) -> None:
        """Prepare to measure.

        Args:
            source: Where frames come from; not closed.
            interval_seconds: Time from one measurement to the next.
            frames: Reads the columns.
            custom: Runs the custom metrics; not closed.
            executing: Returns the tasks that the worker executes.
            elapsed: Converts a monotonic time to seconds since the start of monitoring.
            taken: Called with each frame on the thread.
        """
        self._sampler = Sampler(source, interval_seconds=interval_seconds)
        self._frames = frames
        self._custom = custom
        self._executing = executing
        self._elapsed = elapsed
        self._taken = taken
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._last = 0.0
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="gpulse-dask", daemon=True)
        self.error: Exception | None = None
        """The error of a measurement, or the one that ended the thread."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Stop sampling, without waiting for a reading that hangs."""
        self._sampler.stop()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def take(self, frame: Frame) -> None:
        """Make a measurement of a frame."""
        timestamp = max(0.0, self._elapsed(frame.monotonic))
        tasks, labels = self._executing()
        cells = [*self._frames.cells(frame, tasks), *self._custom.cells()]
        text = build_lines(labels, timestamp, cells)
        with self._lock:
            self._waiting.append(text)
            self._last = timestamp
            if len(self._waiting) > _MAX_WAITING_ROWS:
                del self._waiting[0]
                self._lost += 1

    def take_batch(self) -> RowBatch | None:
        """Return and remove the measurements that wait to be sent; None when there are none."""
        with self._lock:
            if not self._waiting:
                return None
            waiting, self._waiting = self._waiting, []
            lost, self._lost = self._lost, 0
            return RowBatch("".join(waiting), len(waiting), self._last, lost)

    def _run(self) -> None:
        try:
            for frame in self._sampler:
                self._take(frame)
        except Exception as error:  # noqa: BLE001  reported through `error`, because the thread ends silently
            self.error = error

    def _take(self, frame: Frame) -> None:
        try:
            self.take(frame)
            self._taken(frame)
        except Exception as error:  # noqa: BLE001  a bug in one measurement must not end the thread
            self.error = error


def unique_labels(labels: Sequence[GraphLabel | None]) -> tuple[GraphLabel | None, ...]:
    """Return each graph once, without unlabelled tasks when others have a label."""
    known = {label[:2]: label for label in labels if label is not None}
    return tuple(known[numbers] for numbers in sorted(known)) or (None,)
